"""Mars: arithmetic against straight-line formulas, ownership of the last gradient, state, errors."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from reference import Reference
from torch import nn

import mars_hf
from mars_hf import Mars

SHAPES = ((7, 5), (4096, 3), (1,), (6,), (3, 2, 2, 3), (1, 1), ())


def make_params(shapes=SHAPES, dtype=torch.float64, seed=1) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def gradients(shapes, step: int, scale: float = 1.0, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def set_gradients(params, step: int, scale: float = 1.0) -> None:
    for param, gradient in zip(params, gradients([p.shape for p in params], step, scale), strict=True):
        param.grad = gradient.to(param.dtype)


def run(params, optimizer, steps=6, scale=1.0, start=0) -> list[torch.Tensor]:
    for step in range(start, start + steps):
        set_gradients(params, step, scale)
        optimizer.step()
    return [param.detach().clone() for param in params]


FORMULA_CASES = {
    "default": {},
    "lion": {"mars_type": "mars-lion"},
    "vectors too": {"optimize_1d": True},
    "lion, vectors too": {"optimize_1d": True, "mars_type": "mars-lion"},
    "amsgrad": {"amsgrad": True},
    "gamma 1": {"gamma": 1.0},
    "no clipping": {"clip_threshold": None},
    "tight clipping": {"clip_threshold": 0.1},
    "second moment of the gradient": {"second_moment": "gradient"},
    "decay and eps": {"weight_decay": 0.3, "eps": 1e-3, "weight_decay_1d": 0.2},
    "own rate for vectors": {"lr_1d": 0.05, "betas_1d": (0.5, 0.6)},
    "other betas": {"betas": (0.5, 0.7)},
    "zero betas": {"betas": (0.0, 0.0), "betas_1d": (0.0, 0.0)},
}


def references(params, **settings) -> list[Reference]:
    lr = settings.get("lr", 3e-3)
    made = []
    for param in params:
        matrix = param.ndim >= 2
        shared = {"eps": settings.get("eps", 1e-8), "amsgrad": settings.get("amsgrad", False)}
        if matrix or settings.get("optimize_1d"):
            made.append(
                Reference(
                    param,
                    rule=settings.get("mars_type", "mars-adamw"),
                    lr=lr,
                    betas=settings.get("betas", (0.95, 0.99)),
                    weight_decay=settings.get("weight_decay", 0.0),
                    gamma=settings.get("gamma", 0.025),
                    clip_threshold=settings.get("clip_threshold", 1.0),
                    second_moment=settings.get("second_moment", "corrected"),
                    **shared,
                )
            )
        else:
            made.append(
                Reference(
                    param,
                    rule="adamw",
                    lr=settings.get("lr_1d", lr / 2),
                    betas=settings.get("betas_1d", (0.9, 0.95)),
                    weight_decay=settings.get("weight_decay_1d", 0.0),
                    **shared,
                )
            )
    return made


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
@pytest.mark.parametrize("settings", FORMULA_CASES.values(), ids=FORMULA_CASES.keys())
def test_formulas_in_float64(settings, foreach):
    params = make_params()
    expected = references(params, **settings)
    optimizer = Mars(params, fused=False, **settings)
    for step in range(6):
        set_gradients(params, step, scale=0.05 * 10 ** (step % 3))  # some clipped, some not
        optimizer.step()
        for param, reference in zip(params, expected, strict=True):
            torch.testing.assert_close(param.detach(), reference.step(param.grad), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
def test_maximize_is_descent_on_the_negated_gradient(foreach):
    up, down = make_params(), make_params()
    ascent, descent = Mars(up, maximize=True, fused=False), Mars(down, fused=False)
    for step in range(4):
        set_gradients(up, step)
        set_gradients(down, step, scale=-1.0)
        before = [param.grad.clone() for param in up]
        ascent.step()
        descent.step()
        for a, b, gradient in zip(up, down, before, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a.grad, gradient)


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_zero_without_clipping_is_torch_adamw(foreach, amsgrad, dtype):
    mine, theirs = make_params(dtype=dtype), make_params(dtype=dtype)
    shared = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "amsgrad": amsgrad, "fused": False}
    mars = Mars(mine, gamma=0.0, clip_threshold=None, lr_1d=3e-3, weight_decay_1d=0.1, **shared)
    adamw = torch.optim.AdamW(theirs, **shared)
    for step in range(50):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        mars.step()
        adamw.step()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


# Each option, changed alone, must change the result by at least a hundred times the formulas' tolerance.
OPTIONS = {
    "lr": 1e-2,
    "betas": (0.8, 0.9),
    "eps": 1e-2,
    "weight_decay": 0.5,
    "gamma": 0.5,
    "mars_type": "mars-lion",
    "clip_threshold": 0.5,
    "amsgrad": True,
    "optimize_1d": True,
    "lr_1d": 1e-2,
    "betas_1d": (0.5, 0.6),
    "weight_decay_1d": 0.5,
    "second_moment": "gradient",
    "maximize": True,
    "max_grad_norm": 0.1,
    "state_dtype": torch.bfloat16,
}
# Each has tests of its own.
NOT_ARITHMETIC = {
    "process_group",
    "self",
    "params",
    "fused",
    "is_approx",
    "rounding",
}
ORTHOGONAL = {"ns_steps", "ns_coefficients", "ns_dtype", "layout"}  # in test_directions.py


def test_the_list_of_options_is_complete():
    assert set(OPTIONS) == set(inspect.signature(Mars.__init__).parameters) - NOT_ARITHMETIC - ORTHOGONAL


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_observable(name):
    def largest_difference(scale: float) -> float:
        plain, changed = make_params(), make_params()
        a = run(plain, Mars(plain), scale=scale)
        b = run(changed, Mars(changed, **{name: OPTIONS[name]}), scale=scale)
        return max(((x - y).abs() / x.abs().clamp_min(1e-3)).max().item() for x, y in zip(a, b, strict=True))

    # AMSGrad acts only where the second moment falls: gradients that shrink.
    if name == "amsgrad":
        params, others = make_params(), make_params()
        first, second = Mars(params), Mars(others, amsgrad=True)
        for step in range(6):
            set_gradients(params, step, scale=10.0**-step)
            set_gradients(others, step, scale=10.0**-step)
            first.step()
            second.step()
        difference = max((x - y).abs().max().item() for x, y in zip(params, others, strict=True))
    else:
        difference = largest_difference(0.3)
    assert difference > 1e-4


def test_settings_of_a_group_change_that_group_alone():
    shapes = ((4, 3), (4, 3))
    plain, changed = make_params(shapes), make_params(shapes)
    a = run(plain, Mars([{"params": [plain[0]]}, {"params": [plain[1]]}]))
    b = run(changed, Mars([{"params": [changed[0]]}, {"params": [changed[1]], "gamma": 0.5}]))
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[1], b[1])


def test_settings_are_read_from_the_group_at_every_step():
    scheduled, fixed = make_params(((4, 3),)), make_params(((4, 3),))
    one, two = Mars(scheduled), Mars(fixed)
    run(scheduled, one, steps=2)
    run(fixed, two, steps=2)
    one.param_groups[0]["gamma"] = 0.5
    assert not torch.equal(run(scheduled, one, start=2)[0], run(fixed, two, start=2)[0])


def test_schedulers_keep_the_ratio_of_the_rates():
    params = make_params(((4, 3), (3,)))
    optimizer = Mars(params, lr=6e-3, lr_1d=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        set_gradients(params, step)
        optimizer.step()
        scheduler.step()
        matrix, vector = (group["lr"] for group in optimizer.param_groups)
        assert matrix == pytest.approx(6e-3 / (2 + step))
        assert vector == pytest.approx(matrix / 2)


def test_tensor_learning_rate():
    numbers, tensors = make_params(), make_params()
    a = run(numbers, Mars(numbers, lr=0.01))
    b = run(tensors, Mars(tensors, lr=torch.tensor(0.01, dtype=torch.float64)))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


# --- the last gradient is ours ---------------------------------------------------------------------------------------


def losses_and_model():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    data = torch.randn(12, 5, 6, dtype=torch.float64)
    return model, data


def train(set_to_none, after_step=lambda model: None, before_step=lambda model: None) -> list[torch.Tensor]:
    model, data = losses_and_model()
    optimizer = mars_hf.create(model, lr=0.01, gamma=0.5)
    for step, batch in enumerate(data):
        optimizer.zero_grad(set_to_none=set_to_none(step))
        model(batch).square().mean().backward()
        before_step(model)
        optimizer.step()
        after_step(model)
    return [param.detach().clone() for param in model.parameters()]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def test_zeroing_gradients_in_place_changes_nothing():
    expected = train(lambda step: True)
    assert_same(train(lambda step: False), expected)
    assert_same(train(lambda step: step % 2 == 0), expected)


def test_rewriting_the_gradient_after_the_step_changes_nothing():
    def overwrite(model):
        for param in model.parameters():
            param.grad.fill_(7.0)

    assert_same(train(lambda step: True, after_step=overwrite), train(lambda step: True))


def test_gradients_that_are_views_of_a_reused_buffer_change_nothing():
    buffers: dict[int, torch.Tensor] = {}

    def into_one_buffer(model):
        flat = buffers.setdefault(id(model), torch.zeros(sum(p.numel() for p in model.parameters())).double())
        offset = 0
        for param in model.parameters():
            view = flat[offset : offset + param.numel()].view_as(param)
            view.copy_(param.grad)
            param.grad = view
            offset += param.numel()

    assert_same(train(lambda step: True, before_step=into_one_buffer), train(lambda step: True))


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
def test_a_step_leaves_the_gradient_alone(foreach):
    params = make_params()
    optimizer = Mars(params, fused=False)
    set_gradients(params, 0, scale=9.0)
    kept = [(param.grad, param.grad.clone()) for param in params]
    optimizer.step()
    for param, (gradient, value) in zip(params, kept, strict=True):
        assert param.grad is gradient
        assert torch.equal(gradient, value)
        state = optimizer.state[param]
        if "last_grad" in state:
            assert state["last_grad"].data_ptr() != gradient.data_ptr()


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
def test_parameters_without_a_gradient_are_left_alone(foreach):
    params = make_params(((4, 3), (5, 2), (3,)))
    expected = references(params)
    optimizer = Mars(params, fused=False)
    for step in range(6):
        set_gradients(params, step)
        if step in (0, 1, 3):
            params[1].grad = None
        optimizer.step()
        for param, reference in zip(params, expected, strict=True):
            if param.grad is not None:
                reference.step(param.grad)
            torch.testing.assert_close(param.detach(), reference.x, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
def test_non_contiguous_parameters(foreach):
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    param = nn.Parameter(base.t())
    assert not param.is_contiguous()
    twin = nn.Parameter(base.t().contiguous())
    one, two = Mars([param], fused=False), Mars([twin], fused=False)
    for step in range(4):
        (gradient,) = gradients([param.shape], step)
        param.grad, twin.grad = gradient.clone(), gradient.t().contiguous().t()
        one.step()
        two.step()
        torch.testing.assert_close(param, twin, rtol=1e-12, atol=0)


# --- lower precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_updated_in_float32_and_rounded_once(dtype, foreach):
    params = make_params(((8, 6), (5,)), dtype=dtype)
    optimizer = Mars(params, lr=0.05, fused=False)
    for step in range(5):
        before = [param.detach().clone() for param in params]
        states = copy.deepcopy([dict(optimizer.state[param]) for param in params])
        set_gradients(params, step)
        optimizer.step()
        # The same step from the same states on float32 copies, which need no rounding.
        wide = [nn.Parameter(x.float()) for x in before]
        twin = Mars(wide, lr=0.05, fused=False)
        for param, x, state in zip(params, wide, states, strict=True):
            twin.state[x] = state
            x.grad = param.grad.float()
        twin.step()
        for param, x in zip(params, wide, strict=True):
            assert torch.equal(param.detach(), x.detach().to(dtype))
            for key in ("exp_avg", "exp_avg_sq", "last_grad"):
                if key in optimizer.state[param]:
                    assert optimizer.state[param][key].dtype == torch.float32
                    assert torch.equal(optimizer.state[param][key], twin.state[x][key])


def test_mixed_dtypes_in_one_group():
    params = [*make_params(((4, 3), (2, 2)), torch.float32), *make_params(((4, 3), (3,)), torch.bfloat16)]
    one, two = copy.deepcopy(params), copy.deepcopy(params)
    assert_same(run(one, Mars(one)), run(two, Mars(two, fused=False)))


# --- state -----------------------------------------------------------------------------------------------------------


def saved(optimizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return file


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_dict_round_trip_to_the_bit(dtype, mars_type):
    settings = {"mars_type": mars_type, "amsgrad": True, "weight_decay": 0.1}
    whole = make_params(dtype=dtype)
    uninterrupted = Mars(whole, **settings)
    run(whole, uninterrupted, steps=3)
    resumed = [nn.Parameter(param.detach().clone()) for param in whole]
    other = Mars(resumed, **settings)
    other.load_state_dict(torch.load(saved(uninterrupted), weights_only=True))
    for a, b in zip(whole, resumed, strict=True):
        assert uninterrupted.state[a].keys() == other.state[b].keys()
        for key, value in uninterrupted.state[a].items():
            wide = torch.float64 if key != "step" and dtype == torch.float64 else torch.float32
            assert other.state[b][key].dtype == value.dtype == wide
            assert torch.equal(other.state[b][key], value)
    assert_same(run(whole, uninterrupted, start=3), run(resumed, other, start=3))


def test_loading_owns_its_memory():
    params = make_params()
    optimizer = Mars(params)
    run(params, optimizer, steps=2)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    twin = Mars(twins)
    state = optimizer.state_dict()
    twin.load_state_dict(state)
    run(params, optimizer, steps=2, start=2)
    expected = copy.deepcopy(twins)
    fresh = Mars(expected)
    fresh.load_state_dict(copy.deepcopy(twin.state_dict()))
    assert_same(run(twins, twin, start=9), run(expected, fresh, start=9))


@pytest.mark.slow
def test_state_dict_into_a_fresh_process(tmp_path):
    params = make_params(((5, 4), (3,)), torch.bfloat16)
    optimizer = Mars(params, gamma=0.05)
    run(params, optimizer, steps=3)
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, tmp_path / "in.pt")
    script = f"""
        import torch, mars_hf
        saved = torch.load({str(tmp_path / "in.pt")!r}, weights_only=True)
        params = [torch.nn.Parameter(p) for p in saved["params"]]
        optimizer = mars_hf.Mars(params)
        optimizer.load_state_dict(saved["optimizer"])
        for step in range(3, 6):
            for i, param in enumerate(params):
                param.grad = torch.full_like(param, 0.1 * (step + i))
            optimizer.step()
        torch.save([p.detach() for p in params], {str(tmp_path / "out.pt")!r})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    for step in range(3, 6):
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, 0.1 * (step + i))
        optimizer.step()
    assert_same([p.detach() for p in params], torch.load(tmp_path / "out.pt", weights_only=True))


def test_a_loaded_state_brings_its_settings():
    params = make_params(((4, 3),))
    optimizer = Mars(params, gamma=0.5, clip_threshold=None)
    run(params, optimizer, steps=2)
    twins = copy.deepcopy(params)
    twin = Mars(twins)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert twin.param_groups[0]["gamma"] == 0.5
    assert twin.param_groups[0]["clip_threshold"] is None
    assert_same(run(params, optimizer, start=2), run(twins, twin, start=2))


def test_loading_the_state_of_another_optimizer_is_refused():
    params = make_params(((4, 3), (3,)))
    foreign = torch.optim.AdamW([{"params": [params[0]]}, {"params": [params[1]]}])
    with pytest.raises(ValueError, match="another optimizer than Mars saved it"):
        Mars(params).load_state_dict(foreign.state_dict())


def test_loading_into_other_roles_is_refused():
    params = make_params(((4, 3), (3,)))
    state = Mars(params).state_dict()
    swapped = Mars([{"params": [params[1]]}, {"params": [params[0]]}])
    with pytest.raises(ValueError, match="role='matrix' and is 'vector'"):
        swapped.load_state_dict(state)


def test_settings_younger_than_a_checkpoint_take_their_defaults():
    params = make_params(((4, 3),))
    optimizer = Mars(params)
    run(params, optimizer, steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["second_moment"], group["maximize"]
    twins = copy.deepcopy(params)
    twin = Mars(twins)
    twin.load_state_dict(state)
    assert twin.param_groups[0]["second_moment"] == "corrected"
    assert_same(run(params, optimizer, start=2), run(twins, twin, start=2))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_and_pickles_go_on_alike(copier):
    params = make_params(((4, 3), (3,)))
    optimizer = Mars(params)
    run(params, optimizer, steps=2)
    twin = copier(optimizer)
    twins = [param for group in twin.param_groups for param in group["params"]]
    assert_same(run(params, optimizer, start=2), run(twins, twin, start=2))
    twin.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert twin.param_groups[-1]["lr"] == pytest.approx(1.5e-3)


def test_a_materializing_step_without_learning_rate_moves_nothing():
    params = make_params()
    optimizer = Mars(params, lr=0.0)
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same(before, [param.detach() for param in params])


def test_buffers_that_a_rule_does_not_use_are_not_made():
    params = make_params(((4, 3), (3,)))
    lion = Mars(params, mars_type="mars-lion")
    run(params, lion, steps=1)
    assert set(lion.state[params[0]]) == {"step", "exp_avg", "last_grad"}
    assert set(lion.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}


# --- overflow and errors ---------------------------------------------------------------------------------------------


def test_a_step_the_scaler_skips_changes_nothing():
    params = make_params(((4, 3), (3,)), torch.float32)
    optimizer = Mars(params)
    run(params, optimizer, steps=2)
    before = [param.detach().clone() for param in params]
    states = copy.deepcopy(optimizer.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # the scaler starts with its first loss
    for bad in (float("inf"), float("nan")):
        set_gradients(params, 5)
        params[0].grad[1, 1] = bad
        scaler.step(optimizer)
        scaler.update()
        assert_same(before, [param.detach() for param in params])
        for key, state in states["state"].items():
            for name, value in state.items():
                assert torch.equal(value, optimizer.state_dict()["state"][key][name])
    set_gradients(params, 6)
    scaler.step(optimizer)
    assert all(torch.isfinite(param).all() for param in params)
    assert not torch.equal(before[0], params[0])


def test_without_a_scaler_nan_goes_where_it_goes_in_adamw():
    mine, theirs = make_params(((4, 3),), torch.float32), make_params(((4, 3),), torch.float32)
    for params, optimizer in ((mine, Mars(mine, clip_threshold=None)), (theirs, torch.optim.AdamW(theirs))):
        set_gradients(params, 0)
        params[0].grad[1, 1] = float("nan")
        optimizer.step()
    assert torch.equal(mine[0].isnan(), theirs[0].isnan())


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 3)), "torch.sparse_coo"),
        (torch.ones(2, 3, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(2, 3, dtype=torch.int32), "torch.int32"),
    ],
    ids=["sparse", "complex", "integer"],
)
def test_unusable_gradients_are_named_before_anything_changes(gradient, message):
    good = nn.Parameter(torch.ones(2, 3))
    bad = nn.Parameter(torch.ones(2, 3, dtype=gradient.dtype), requires_grad=gradient.dtype != torch.int32)
    optimizer = Mars([good, bad])
    good.grad, bad.grad = torch.ones(2, 3), gradient
    with pytest.raises(RuntimeError, match=message) as error:
        optimizer.step()
    assert "float32" in str(error.value) or "strided" in str(error.value)
    assert torch.equal(good.detach(), torch.ones(2, 3))
    assert not optimizer.state[good]


def test_a_flat_tensor_of_unknown_origin_is_refused():
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = Mars([param])
    flat = nn.Parameter(torch.ones(6))
    flat.grad = torch.ones(6)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(RuntimeError, match="a flat tensor of shape"):
        optimizer.step()


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        Mars([])


def test_an_unknown_key_in_a_group_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gama'.*gamma"):
        Mars([{"params": make_params(((2, 2),)), "gama": 0.1}])


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    params = make_params(((2, 2),))
    optimizer = Mars(params)
    new = nn.Parameter(torch.ones(3, 3))
    for group in ({"params": [new, nn.Parameter(torch.ones(2)), params[0]]}, {"params": [new], "lr": -1}):
        with pytest.raises(ValueError):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [new]})
    assert len(optimizer.param_groups) == 2


def test_closure():
    param = nn.Parameter(torch.tensor([[2.0]]))
    optimizer = Mars([param])

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert param.item() < 2.0


def test_training_converges():
    torch.manual_seed(0)
    for mars_type in ("mars-adamw", "mars-lion"):
        target = torch.randn(6, 4)
        param = nn.Parameter(torch.zeros(6, 4))
        optimizer = Mars([param], lr=0.02, mars_type=mars_type)
        for _ in range(300):
            optimizer.zero_grad()
            (param - target).square().sum().backward()
            optimizer.step()
        assert (param - target).abs().max() < 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", (0.95, 1.5)), ("lr", float("nan")), ("gamma", "much"), ("eps", -1e-8), ("rounding", "up"), ("lr", None)],
)
def test_settings_in_a_state_are_checked(name, value):
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    optimizer = Mars(params)
    before = dict(optimizer.param_groups[0])
    state = optimizer.state_dict()
    state["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=f"^param group 0 of this state cannot be used: .*{name}"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0] == before
