"""The Triton kernels against straight-line float64 arithmetic, on the CPU in Triton's interpreter and on a GPU.

Triton reads TRITON_INTERPRET at import, once per process, so the interpreter has a process of its own:
`test_gpu_interpreter.py` runs this file there. On a GPU:
CUDA_VISIBLE_DEVICES=0 python -m pytest -m gpu tests/kernels.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from helpers import mars_of

from mars_hf import kernels as backends
from mars_hf import rules
from mars_hf.kernels import gpu as kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a visible CUDA GPU; on the CPU test_gpu_interpreter.py runs it", allow_module_level=True)

here = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])


def gpu(test):
    return pytest.mark.parametrize("device", ["cuda"])(pytest.mark.gpu(test))


# The interpreter truncates to bfloat16 (one unit in the last place); GPUs round to nearest (half of one).
ROUNDING = {
    torch.float64: 0.0,
    torch.float32: 0.0,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-7 if INTERPRETED else 2**-8,
}
STEP = {"k": 0.4, "nesterov": 0.0, "beta1": 0.95, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def draw(sizes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype).to(device) for size in sizes]


def problem(sizes, device, *, squares=True, last=True, param=None, gradient=None, state=None, last_dtype=None):
    """Return the lists of a step by name."""
    state = state or torch.float32
    exp_avg_sqs = [tensor.square() for tensor in draw(sizes, state, device, 4)]
    return {
        "params": draw(sizes, param or torch.float32, device, 1),
        "gradients": draw(sizes, gradient or torch.float32, device, 2),
        "exp_avgs": draw(sizes, state, device, 3),
        "exp_avg_sqs": exp_avg_sqs if squares else [],
        "last_grads": draw(sizes, last_dtype or torch.float32, device, 5) if last else [],
    }


def doubles(lists):
    return {name: [tensor.double().clone() for tensor in tensors] for name, tensors in lists.items()}


def expected_correction(gradients, last_grads, i, scale, last_scales, k):
    """Return g, last and c of tensor i, in float64."""
    g = gradients[i].double() * (1.0 if scale is None else scale.double())
    if not last_grads:
        return g, torch.zeros_like(g), g
    last = last_grads[i].double() * (1.0 if last_scales is None else last_scales[i].double())
    return g, last, g + k * (g - last)


def expected_update(
    lists,
    *,
    rule,
    steps,
    lr,
    scale=None,
    last_scales=None,
    factors=None,
    k,
    nesterov,
    beta1,
    beta2,
    eps,
    weight_decay,
    second_moment="corrected",
    keep_last=True,
):
    """Apply the contract of `update` line by line in float64, on copies."""
    lists = doubles(lists)
    for i, param in enumerate(lists["params"]):
        g, _, c = expected_correction(lists["gradients"], lists["last_grads"], i, scale, last_scales, k)
        if keep_last and lists["last_grads"]:
            lists["last_grads"][i].copy_(g)
        if factors is not None:
            c = c * factors[i].double()
        exp_avg = lists["exp_avgs"][i]
        exp_avg.mul_(beta1).add_(c * (1 - beta1))
        m = exp_avg + nesterov * (c - exp_avg)
        if rule == "momentum":
            param.copy_(m)
            continue
        param.mul_(1 - lr * weight_decay)
        if rule == "lion":
            param.sub_(lr * m.sign())
            continue
        s = c if second_moment == "corrected" else g
        exp_avg_sq = lists["exp_avg_sqs"][i]
        exp_avg_sq.mul_(beta2).add_((1 - beta2) * s * s)
        t = steps[i]
        param.sub_(lr / (1 - beta1**t) * m / ((exp_avg_sq / (1 - beta2**t)).sqrt() + eps))
    return lists


def assert_close(actual, expected, tolerance=1e-6):
    for name, tensors in expected.items():
        for i, (ours, theirs) in enumerate(zip(actual[name], tensors, strict=True)):
            bound = tolerance * theirs.abs().max() if theirs.numel() else 0.0
            error = (ours.double() - theirs).abs() - theirs.abs() * ROUNDING[ours.dtype]
            assert (error <= bound).all(), (name, i, error.max() / bound)


def check_update(lists, device, *, rule="adamw", steps=None, tolerance=1e-6, **settings):
    count = len(lists["params"])
    read_only = {"gradients"} if settings.get("keep_last", True) else {"gradients", "last_grads"}
    before = {name: [tensor.clone() for tensor in lists[name]] for name in read_only}
    settings = {
        **STEP,
        "rule": rule,
        "steps": [float(t) for t in range(1, count + 1)] if steps is None else steps,
        "lr": 1e-2,
        **settings,
    }
    expected = expected_update(lists, **settings)
    kernels.update(*lists.values(), **settings)
    assert_close(lists, expected, tolerance)
    for name, tensors in before.items():
        assert all(map(torch.equal, lists[name], tensors)), name


def expected_sums(gradients, last_grads, *, scale=None, last_scales=None, k=0.0):
    columns = []
    for i in range(len(gradients)):
        g, last, c = expected_correction(gradients, last_grads, i, scale, last_scales, k)
        columns.append(torch.stack([(a * b).sum() for a, b in ((g, g), (g, last), (last, last), (c, c))]))
    return torch.stack(columns, 1)


def magnitudes(gradients, last_grads, *, last_scales=None, **settings):
    """Return the scale for errors of sums: the sums of absolute values."""
    settings["last_scales"] = None if last_scales is None else last_scales.abs()
    return expected_sums([g.abs() for g in gradients], [-last.abs() for last in last_grads], **settings).abs()


def check_sums(gradients, last_grads, **settings):
    actual = kernels.sums(gradients, last_grads, **settings)
    expected = expected_sums(gradients, last_grads, **settings)
    bound = 1e-6 * magnitudes(gradients, last_grads, **settings)
    assert actual.shape == (4, len(gradients))
    assert ((actual.double() - expected).abs() <= bound).all(), actual.double() - expected
    return actual


EDGES = [0, 1, 7, 4095, 4096, 4097, 0, kernels.TILE, kernels.TILE + 1, 2 * kernels.TILE + kernels.BLOCK + 3, 0]
SMALL = [5, 0, 1500]


@here
def test_update_at_the_edges_of_blocks_and_tiles(device):
    check_update(problem(EDGES, device), device)


@here
def test_sums_at_the_edges_of_blocks_and_tiles(device):
    actual = check_sums(draw(EDGES, device=device), draw(EDGES, device=device, seed=1), k=0.4)
    assert actual.dtype == torch.float64


@here
def test_sums_without_last_gradients(device):
    """c is g, whatever k and last_scales are."""
    scale, last_scales = torch.tensor(0.3, device=device), torch.full((3,), torch.nan, device=device)
    gg, gl, ll, cc = check_sums(draw(SMALL, device=device), [], scale=scale, last_scales=last_scales, k=19.0)
    assert torch.equal(cc, gg) and not gl.any() and not ll.any()


@here
def test_squares_beyond_float32(device):
    g, last = torch.tensor([1e19, 3e20, 0.0], device=device), torch.tensor([2e19, 1e20, 1e30], device=device)
    actual = kernels.sums([g], [last], k=0.4)
    expected = expected_sums([g], [last], k=0.4)
    assert actual.isfinite().all() and torch.allclose(actual, expected, rtol=1e-6)


@here
def test_sums_of_nothing(device):
    assert kernels.sums([], []).shape == (4, 0)
    empty = torch.empty(0, device=device)
    assert (kernels.sums([empty, empty], [empty, empty], k=0.4) == 0).all()


@here
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_sums_by_dtype(device, dtype):
    scale = torch.tensor(0.25, device=device)
    actual = check_sums(draw(SMALL, dtype, device), draw(SMALL, torch.float32, device, 1), scale=scale, k=0.4)
    assert actual.dtype == torch.float64


@here
@pytest.mark.parametrize("dtype", sorted(kernels.DTYPES, key=str), ids=str)
@pytest.mark.parametrize("gradient", [torch.float32, torch.float64], ids=str)
def test_scales_of_last_gradients_by_dtype(device, dtype, gradient):
    lists = problem([1500, 5, 700, 0], device, gradient=gradient)
    last_scales = torch.tensor([0.25, -3.0, 0.0, 1.5], dtype=dtype, device=device)
    check_sums(lists["gradients"], lists["last_grads"], last_scales=last_scales, k=0.4)
    check_update(lists, device, last_scales=last_scales)


@here
def test_the_square_of_the_corrected_gradient_does_not_cancel(device):
    """Gradient and last gradient almost cancel and k is large: the other three sums would lose every digit."""
    gradients = draw([9000, 100], device=device)
    noise = draw([9000, 100], device=device, seed=1)
    last_grads = [2 * (g + 1e-4 * other) for g, other in zip(gradients, noise, strict=True)]
    settings = {"last_scales": torch.full((2,), 0.5, device=device), "k": 1e4}
    actual = kernels.sums(gradients, last_grads, **settings)[3].double()
    expected = expected_sums(gradients, last_grads, **settings)[3]
    assert ((actual - expected).abs() <= 1e-6 * expected).all()


@here
def test_sums_of_more_partials_than_one_block(device, monkeypatch):
    for name, value in {"TILE": 64, "BLOCK": 64, "REST": 32, "TOTALS": 16}.items():
        monkeypatch.setattr(kernels, name, value)
    check_sums(draw([64 * 70 + 5, 3], device=device), draw([64 * 70 + 5, 3], device=device, seed=1), k=0.4)


@here
def test_fifty_tensors_in_one_call(device):
    sizes = [1 + 37 * i % 300 for i in range(53)]
    check_update(problem(sizes, device), device)
    check_sums(draw(sizes, device=device), draw(sizes, device=device, seed=1), k=0.4)


@here
@pytest.mark.parametrize("last", [True, False], ids=["last", "no_last"])
@pytest.mark.parametrize("second_moment", ["corrected", "gradient"])
def test_adamw_flags(device, last, second_moment):
    lists = problem(SMALL, device, last=last)
    check_update(lists, device, second_moment=second_moment)


@here
@pytest.mark.parametrize("rule", ["adamw", "lion", "momentum"])
@pytest.mark.parametrize("keep_last", [True, False], ids=["keep_last", "read_last"])
def test_last_gradients_are_scaled_when_read_and_kept_on_demand(device, rule, keep_last):
    """The update keeps g, also if the last gradient it reads has another scale."""
    check_update(
        problem([*SMALL, 2 * kernels.TILE + 3], device, squares=rule == "adamw"),
        device,
        rule=rule,
        scale=torch.tensor(0.3, device=device),
        last_scales=torch.tensor([0.5, 2.0, -0.25, 3.0], device=device),
        keep_last=keep_last,
    )


@here
def test_without_last_gradients_their_settings_change_nothing(device):
    last_scales = torch.full((3,), torch.nan, device=device)
    for keep_last in (True, False):
        check_update(problem(SMALL, device, last=False), device, last_scales=last_scales, keep_last=keep_last)


@here
@pytest.mark.parametrize("last", [True, False], ids=["last", "no_last"])
@pytest.mark.parametrize("rule", ["lion", "momentum"])
def test_rules_without_a_second_moment(device, rule, last):
    check_update(problem(SMALL, device, squares=False, last=last), device, rule=rule)


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_momentum_is_rounded_once_and_what_it_is_written_to_is_not_read(device, dtype):
    lists = problem([*SMALL, kernels.TILE + 3], device, squares=False, param=dtype)
    for param in lists["params"]:
        param.fill_(torch.nan)
    check_update(lists, device, rule="momentum", steps=[math.nan] * 4)


@here
def test_momentum_recursion(device):
    check_update(problem(SMALL, device, squares=False, last=False), device, rule="momentum", nesterov=0.025)


@here
@pytest.mark.parametrize("rule", ["adamw", "lion", "momentum"])
def test_blend_scale_and_factors(device, rule):
    check_update(
        problem(SMALL, device, squares=rule == "adamw"),
        device,
        rule=rule,
        nesterov=0.3,
        scale=torch.tensor(0.125, device=device),
        factors=torch.tensor([0.5, 1.0, 0.01], device=device),
    )


@here
@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.999])
def test_bias_corrections_from_the_first_step_on(device, beta1):
    """In float32, 1 - 0.9999 is wrong in its fourth digit."""
    steps = [1.0, 10.0, 1e6]
    check_update(problem([64, 64, 64], device), device, steps=steps, beta1=beta1, beta2=0.9999)


@here
@pytest.mark.parametrize(
    "dtypes",
    [
        {"param": torch.bfloat16, "gradient": torch.bfloat16},
        {"param": torch.float16, "gradient": torch.float16},
        {"last_dtype": torch.bfloat16},
        {"state": torch.bfloat16, "last_dtype": torch.bfloat16},
        {"param": torch.bfloat16, "gradient": torch.bfloat16, "state": torch.bfloat16, "last_dtype": torch.bfloat16},
        {"gradient": torch.float16},
        {"gradient": torch.float64, "last_dtype": torch.float64},
    ],
    ids=lambda dtypes: ",".join(f"{name}={dtype}".replace("torch.", "") for name, dtype in dtypes.items()),
)
def test_dtypes(device, dtypes):
    check_update(problem(SMALL, device, **dtypes), device)


@here
def test_float64_keeps_its_digits(device):
    dtypes = dict.fromkeys(("param", "gradient", "state", "last_dtype"), torch.float64)
    check_update(problem(SMALL, device, **dtypes), device, tolerance=1e-13)


@here
def test_views_at_odd_offsets_touch_nothing_else(device):
    """Lists start at different offsets, one tensor of three is aligned; elements around each view stay unchanged."""
    sizes = [1500, 700, 2100]
    lists = problem(sizes, device)
    around = {}
    for shift, (name, tensors) in enumerate(lists.items()):
        for i, tensor in enumerate(tensors):
            offset = 4 if i == 1 else 1 + (shift + i) % 3
            flat = torch.full((tensor.numel() + 8,), 7.0, device=device)
            lists[name][i] = flat[offset : offset + tensor.numel()].copy_(tensor)
            around[name, i] = flat, offset, offset + tensor.numel()
    check_sums(lists["gradients"], lists["last_grads"], k=0.4)
    check_update(lists, device)
    for flat, first, end in around.values():
        assert (flat[:first] == 7).all() and (flat[end:] == 7).all()


@here
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_inf_reach_what_they_touch_and_nothing_else(device):
    lists = problem([2000, 600], device)
    lists["gradients"][0][3] = torch.nan
    lists["gradients"][0][1800] = torch.inf
    totals = kernels.sums(lists["gradients"], lists["last_grads"], k=0.4)
    assert totals[0, 0].isnan() and totals[3, 0].isnan() and totals[:, 1].isfinite().all()
    kernels.update(
        *lists.values(),
        **STEP,
        rule="adamw",
        steps=[1.0] * 2,
        lr=0.1,
    )
    for name in ("params", "exp_avgs", "exp_avg_sqs", "last_grads"):
        expected = torch.zeros(2000, dtype=torch.bool, device=device)
        expected[3] = expected[1800] = True
        assert torch.equal(~lists[name][0].isfinite(), expected), name
        assert lists[name][0][3].isnan()
        assert lists[name][1].isfinite().all()


@here
@pytest.mark.parametrize("moved", [False, True], ids=["kept", "moved"])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_three_steps_follow_the_rules(device, rule, moved):
    """Sums, clipping and update match rules.py in float64.

    Last gradients are either those the update kept, or gradients before scaling, with their scale.
    """
    sizes, k = [700, 30, 1500], 0.025 * 0.95 / 0.05
    lists = problem(sizes, device, squares=rule == "adamw")
    plain = doubles(lists)
    last_scales = torch.linspace(0.5, 2.0, 3, device=device) if moved else None
    for t in range(1, 4):
        scale = torch.tensor(1.0 / t, device=device)
        lists["gradients"] = draw(sizes, device=device, seed=10 + t)
        plain["gradients"] = [tensor.double() for tensor in lists["gradients"]]
        correction = {"scale": scale, "last_scales": last_scales, "k": k}
        settings = {**STEP, **correction, "rule": rule, "keep_last": not moved}
        found = kernels.sums(lists["gradients"], lists["last_grads"], **correction)
        wanted = rules.sums(plain["gradients"], plain["last_grads"], **correction)
        assert ((found - wanted).abs() <= 1e-6 * wanted.abs().max(0).values).all()
        lr = torch.tensor(3e-3, device=device)
        factors = rules.clip_factors(found[3], 1.0)
        kernels.update(*lists.values(), **settings, steps=[float(t)] * 3, lr=lr, factors=factors)
        factors = rules.clip_factors(wanted[3], 1.0)
        params, gradients, exp_avgs, exp_avg_sqs, last_grads = plain.values()
        rules.update(
            params,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            last_grads,
            **settings,
            steps=[float(t)] * 3,
            lr=lr.item(),
            factors=factors,
        )
        if moved:
            lists["last_grads"], plain["last_grads"] = lists["gradients"], plain["gradients"]
            last_scales = scale.expand(3).contiguous()
    assert_close(lists, plain)


def mars_steps(device, *, lr=0.01, **settings):
    """Take three steps of the optimizer on two matrices and a vector."""
    shapes = (40, 30), (3, 700), (50,)
    starts = draw([shape.numel() for shape in map(torch.Size, shapes)], device=device)
    params = [torch.nn.Parameter(start.view(shape)) for start, shape in zip(starts, shapes, strict=True)]
    optimizer = mars_of(params, lr=lr, lr_1d=0.005, weight_decay=0.1, **settings)
    for step in range(3):
        gradients = draw([param.numel() for param in params], device=device, seed=100 + step)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.view_as(param)
        optimizer.step()
    return {"params": [param.detach() for param in params]}


@here
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_grad_norm": 0.5, "take_grad": True},
        {"mars_type": "mars-lion", "optimize_1d": True, "maximize": True},
        {"second_moment": "gradient", "clip_threshold": None},
        {"mars_type": "mars-m", "ns_dtype": "float32"},
        {"mars_type": "mars-shampoo", "ns_dtype": "float32", "max_grad_norm": 0.5, "take_grad": True},
    ],
    ids=str,
)
def test_the_optimizer_on_these_kernels(device, settings, monkeypatch):
    expected = doubles(mars_steps(device, fused=False, **settings))
    monkeypatch.setattr(backends, "kernels_of", lambda device: kernels)
    for lr in (0.01, torch.tensor(0.01, device=device)):
        assert_close(mars_steps(device, lr=lr, fused=True, **settings), expected)


# Gradient norms by step: no clipping, then clipping, then a step after a large one.
GRADIENT_NORMS = (0.1, 0.12, 5.0, 4.0, 0.2, 0.1, 0.1)


def bf16_step(device, size, seed, *, value=1.0, lr=2.0**-11):
    """Lion moves each parameter from `value` by lr against the sign of its gradient, here always down."""
    lists = problem([size, 5], device, squares=False, last=False, param=torch.bfloat16)
    for i, n in enumerate((size, 5)):
        lists["params"][i].fill_(value)
        lists["gradients"][i].fill_(1.0)
        lists["exp_avgs"][i] = torch.zeros(n, device=device)
    kernels.update(
        *lists.values(),
        **{**STEP, "weight_decay": 0.0},
        rule="lion",
        steps=[1.0] * 2,
        lr=lr,
        seeds=[] if seed is None else [seed, seed + 1],
    )
    return lists["params"][0].float()


@here
def test_stochastic_rounding_is_right_on_average(device):
    """1 - 2**-11 lies an eighth of the way from 1 to its lower neighbour 1 - 2**-8."""
    size = 3 * kernels.TILE + 100
    params = bf16_step(device, size, 17)
    down = params == 1 - 2**-8
    assert (down | (params == 1.0)).all()
    tiles = [*down.float().split(kernels.TILE)]
    for share in [tile.mean().item() for tile in tiles[:3]]:
        assert abs(share - 0.125) < 4 * (0.125 * 0.875 / kernels.TILE) ** 0.5
    for other in (tiles[1], bf16_step(device, size, 18)[: kernels.TILE] < 1):
        together = (tiles[0] * other).mean().item()
        assert abs(together - 0.125**2) < 4 * (0.125**2 / kernels.TILE) ** 0.5, "noise repeats"
    assert torch.equal(params, bf16_step(device, size, 17))


@here
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_states_of_different_dtypes(device, dtypes):
    """The kernel writes nothing beyond the narrower tensors."""
    lists = problem([1500, 5, 0], device)
    lists["exp_avgs"] = [tensor.to(dtypes[0]) for tensor in lists["exp_avgs"]]
    guarded = [
        torch.full((tensor.numel() + 64,), 7.0, dtype=dtypes[1], device=device) for tensor in lists["exp_avg_sqs"]
    ]
    for guard, tensor in zip(guarded, lists["exp_avg_sqs"], strict=True):
        guard[: tensor.numel()] = tensor
    lists["exp_avg_sqs"] = [guard[:-64] for guard in guarded]
    check_update(lists, device)
    assert all((guard[-64:] == 7).all() for guard in guarded)


@here
def test_noise_does_not_depend_on_what_else_is_in_the_launch(device):
    size = kernels.TILE + 100
    alone = problem([size], device, squares=False, last=False, param=torch.bfloat16)
    others = [draw([kernels.TILE + 7, 0], device=device), draw([kernels.TILE + 7, 0], device=device, seed=1)]
    together = {name: [tensor.clone() for tensor in tensors] for name, tensors in alone.items()}
    for name, tensors in together.items():
        if tensors:
            tensors[:0] = [other.to(tensors[0].dtype) for other in others[name == "gradients"]]
    settings = {**STEP, "rule": "lion", "lr": 2.0**-10}
    kernels.update(*alone.values(), **settings, steps=[1.0], seeds=[7])
    kernels.update(*together.values(), **settings, steps=[1.0] * 3, seeds=[5, 6, 7])
    assert torch.equal(alone["params"][0], together["params"][2])


@here
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -torch.inf])
def test_lion_shows_a_nan_in_the_parameter(device, value):
    lists = problem([700], device, squares=False, last=False)
    lists["gradients"][0][3] = value
    steps, lr = [1.0], 0.1
    kernels.update(*lists.values(), **STEP, rule="lion", steps=steps, lr=lr)
    assert lists["params"][0].isnan().nonzero().flatten().tolist() == ([3] if value != value else [])


@here
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 0.0, 2.0])
def test_stochastic_rounding_keeps_what_is_exact(device, value):
    params = bf16_step(device, 700, 3, value=value, lr=0.0)
    assert torch.equal(params, torch.full_like(params, value)) or (value != value and params.isnan().all())


@here
def test_stochastic_rounding_keeps_the_nan_of_all_ones(device):
    """What NVIDIA GPUs produce; a carry would make it -0."""
    lists = problem([700], device, squares=False, last=False, param=torch.bfloat16)
    lists["params"][0].view(torch.int16).fill_(0x7FFF)
    steps, lr = [1.0], 0.0
    kernels.update(*lists.values(), **STEP, rule="lion", steps=steps, lr=lr, seeds=[1])
    assert lists["params"][0].isnan().all()


@here
def test_steps_too_small_for_bfloat16_stall_without_a_seed_and_add_up_with_one(device):
    """Each of 64 steps goes up by a sixteenth of the distance to the next number."""
    lr = 2.0**-11
    for stochastic, expected, tolerance in ((False, 1.0, 0.0), (True, 1 + 64 * lr, 1.4e-3)):
        lists = problem([2000], device, squares=False, last=False, param=torch.bfloat16)
        lists["params"][0].fill_(1.0)
        lists["gradients"][0].fill_(-1.0)
        lists["exp_avgs"][0].zero_()
        for seed in range(64):
            kernels.update(
                *lists.values(),
                **{**STEP, "weight_decay": 0.0},
                rule="lion",
                steps=[1.0],
                lr=lr,
                seeds=[seed] if stochastic else [],
            )
        assert abs(lists["params"][0].float().mean().item() - expected) <= tolerance


def locate(words, count, tile, device):
    """Return the result of `gpu_device.locate` for one tile: tensor, first element, number of elements."""
    import triton
    import triton.language as tl

    from mars_hf.kernels import gpu_device

    @triton.jit
    def kernel(table, count, tile, out, locate: tl.constexpr, TILE: tl.constexpr):
        tensor, start, length = locate(table, count, tile.to(tl.int64), TILE)
        tl.store(out, tensor.to(tl.int64))
        tl.store(out + 1, start)
        tl.store(out + 2, length.to(tl.int64))

    out = torch.zeros(3, dtype=torch.int64, device=device)
    table = torch.tensor(words, device=device)
    kernel[(1,)](table, count, tile, out, gpu_device.locate, kernels.TILE)
    return out.tolist()


@here
def test_positions_beyond_31_bits(device):
    """The tensors exceed memory here, so the test reads the places of their tiles off the table."""
    sizes = (5, 2**31 + 10, 0, 2**33 + 1, 2**45)
    words, tiles = kernels._words(sizes, ((0,) * 5,), ())
    first = words[8:13]
    assert tiles == sum(-(-size // kernels.TILE) for size in sizes)
    per = kernels.TILE
    for tile, expected in [
        (0, [0, 0, 5]),
        (1, [1, 0, per]),
        (first[3] - 1, [1, 2**31, 10]),
        (first[3], [3, 0, per]),
        (first[4] - 1, [3, 2**33, 1]),
        (tiles - 1, [4, 2**45 - per, per]),
    ]:
        assert locate(words, 5, tile, device) == expected


@here
def test_update_beyond_31_bits(device):
    """The tile at element 2**33 belongs to tensors whose address is 2**33 elements before real memory."""
    import triton.language as tl

    from mars_hf.kernels import gpu_device

    start, length = 2**33, 1300
    lists = problem([length], device)
    expected = expected_update(lists, **STEP, steps=[1.0], lr=1e-2, rule="adamw")
    order = ("gradients", "last_grads", "params", "exp_avgs", "exp_avg_sqs")
    addresses = tuple((lists[name][0].data_ptr() - 4 * start,) for name in order)
    numbers = (0.4, 0.0, 0.95, kernels._log(0.95), 0.99, kernels._log(0.99), 1e-8, 0.1)
    words, tiles = kernels._words((start + length,), addresses, numbers)
    assert locate(words, 1, tiles - 1, device) == [0, start, length]
    words[8] = 1 - tiles  # as if the launch began at the last tile
    steps, lr = (torch.tensor(values, device=device) for values in ([1.0], 1e-2))
    gpu_device.update[(1,)](
        torch.tensor(words, device=device), 1, steps, lr, None, None, None, None,
        PARAM=tl.float32, GRADIENT=tl.float32, EXP_AVG=tl.float32, EXP_AVG_SQ=tl.float32, LAST=tl.float32,
        COMPUTE=tl.float32, RULE="adamw", CORRECTED=True, KEEP_LAST=True,
        TILE=kernels.TILE, BLOCK=kernels.BLOCK, REST=kernels.REST, VECTOR=4,
    )  # fmt: skip
    assert_close(lists, expected)


@here
def test_tables_are_kept_by_content(device):
    kernels._kept.cache_clear()
    gradients = draw([10, 20], device=device)
    kernels.sums(gradients, [])
    kernels.sums(gradients, [])
    assert kernels._kept.cache_info().misses == 1
    moved = [gradients[0].clone(), gradients[1]]
    assert torch.equal(kernels.sums(moved, []), kernels.sums(gradients, []))
    assert kernels._kept.cache_info().misses == 2


@here
def test_only_tensors_with_every_address_aligned_are_called_aligned(device):
    """An error here is invisible on the CPU and a misaligned access on a GPU."""
    addresses = ((0, 16, 32, 8), (), (4096, 4100, 48, 16))
    words, _ = kernels._words((9, 9, 9, 9), addresses, ())
    assert words[8 + 2 * 4 : 8 + 3 * 4] == [1, 0, 1, 0]


def whole_step(sizes, device):
    """Return a whole step on the device (sums, clipping factors, update) as a function without arguments."""
    lists = problem(sizes, device)
    correction = {"last_scales": torch.linspace(0.5, 2.0, len(sizes), device=device)}

    def step():
        sums = kernels.sums(lists["gradients"], lists["last_grads"], k=STEP["k"], **correction)
        factors = rules.clip_factors(sums[3], 1.0)
        settings = {"rule": "adamw", "steps": [1.0] * len(sizes), "lr": 1e-2, "factors": factors}
        kernels.update(*lists.values(), **STEP, **settings, **correction)

    return lists, step


@gpu
def test_a_step_never_waits_for_the_gpu(device):
    lists, step = whole_step([3000, 17], device)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lists["gradients"] = [gradient.clone() for gradient in lists["gradients"]]  # new addresses: a new table
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize(
    "settings", [{}, {"take_grad": True}, {"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "take_grad": True}], ids=str
)
def test_the_optimizer_never_waits_for_the_gpu(device, settings):
    shapes = (300, 40), (17,), (64, 64)
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    optimizer = mars_of(params, lr=0.01, **settings)
    for step in range(5):
        for param in params:
            param.grad = torch.randn_like(param)
        try:
            if step > 1:  # creates states and compiles kernels
                torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@gpu
def test_sums_of_a_hundred_million_elements(device):
    gradient = torch.rand(100_000_000, device=device)
    last = torch.rand(100_000_000, device=device)
    first = check_sums([gradient], [last], k=0.4)
    assert torch.equal(first, kernels.sums([gradient], [last], k=0.4))


@gpu
def test_a_step_on_another_stream(device):
    lists, step = whole_step([3000, 17], device)
    plain, plain_step = whole_step([3000, 17], device)
    plain_step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, lists["params"], plain["params"]))
