"""formulas.py and every kernel do what the contract says, at every flag, dtype, size and offset."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from contract import (
    BACKENDS,
    INTERPRETED,
    NAMES,
    check_sums,
    check_update,
    draw,
    every_implementation,
    every_kernel,
    expected_sums,
    expected_update,
    problem,
    run_update,
    triton,
)

from mars_hf import Mars
from mars_hf import kernels as backends
from mars_hf.arithmetic import formulas

SMALL = [5, 0, 1500]
# Around the blocks, rows and tiles of both kernels.
EDGES = [0, 1, 2, 7, 1023, 1025, 4095, 4096, 4097, 8191, 8193, 0, 17_411, 20_480, 100_003, 0]
PLAIN = ("exp_avg_sq", "max_exp_avg_sq")
ALONE = (*PLAIN, "last_grad")
SCALES = {"grad_scale": torch.tensor(-0.3)}
FACTORS = {"factors": torch.tensor([0.5, 1.0, 0.01])}

# By case: lists that are not there, and settings.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (("max_exp_avg_sq",), {}),
    "adamw, scaled and clipped": (("max_exp_avg_sq",), {**SCALES, **FACTORS}),
    "adamw, second moment of the gradient": (("max_exp_avg_sq",), {**FACTORS, "second_moment": "gradient"}),
    "adamw, without last gradients": (("max_exp_avg_sq", "last_grad"), {**FACTORS}),
    "adamw, recursive": (("max_exp_avg_sq", "last_grad"), {"second_moment": "gradient", "blend": 0.3}),
    "lion": (PLAIN, {"arithmetic": "lion", **SCALES, **FACTORS}),
    "lion, recursive": (ALONE, {"arithmetic": "lion", "blend": 0.3}),
    "momentum": (PLAIN, {"arithmetic": "momentum", **SCALES, **FACTORS, "steps": [math.nan] * 3}),
    "momentum, recursive": (ALONE, {"arithmetic": "momentum", "blend": 0.3}),
    "adamw, cautious": (("max_exp_avg_sq",), {"cautious": True, "weight_decay": 20.0}),
    "lion, cautious": (PLAIN, {"arithmetic": "lion", "cautious": True, "weight_decay": 20.0}),
    "beta1 of 0": (("max_exp_avg_sq",), {"beta1": 0.0}),
}


def on(device: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in settings.items()}


@every_implementation
@pytest.mark.parametrize("case", CASES)
def test_update_formulas(backend, device, case):
    without, settings = CASES[case]
    check_update(backend, problem(SMALL, device, without=without), **on(device, settings))


@pytest.mark.skipif(INTERPRETED, reason="kernels have no running maximum")
@pytest.mark.parametrize("backend", ["for-loop", "foreach"])
def test_amsgrad_update(backend):
    check_update(backend, problem(SMALL, "cpu", without=()))


every_dtype = pytest.mark.parametrize(
    "dtypes",
    [
        {"params": torch.bfloat16, "gradients": torch.bfloat16},
        {"last_grad": torch.bfloat16},
        {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "last_grad": torch.bfloat16},
        {"exp_avg": torch.float64, "exp_avg_sq": torch.float32},
        {"gradients": torch.float64, "last_grad": torch.float64},
        dict.fromkeys(NAMES, torch.float64),
    ],
    ids=lambda dtypes: ",".join(f"{name}={dtype}".replace("torch.", "") for name, dtype in dtypes.items()),
)


@every_implementation
@every_dtype
def test_sums_of_dtypes(backend, device, dtypes):
    lists = problem([*SMALL, 5000], device, **dtypes)
    check_sums(backend, lists["gradients"], lists["last_grad"], k=0.4, grad_scale=torch.tensor(-3.0, device=device))


@every_implementation
@every_dtype
def test_update_of_dtypes(backend, device, dtypes):
    """Arithmetic is float32, or float64 if any tensor is; results are rounded once."""
    lists = problem([*SMALL, 5000], device, **dtypes)
    tolerance = 1e-13 if len(dtypes) == len(NAMES) else 1e-6
    check_update(backend, lists, tolerance=tolerance, grad_scale=torch.tensor(-3.0, device=device))


@every_implementation
@pytest.mark.parametrize("wide", ["gradients", "last_grad"])
def test_sums_are_in_float64_if_any_tensor_is(backend, device, wide):
    """Gradients and last gradients that cancel at a large k: float32 would keep two digits of c."""
    k = 1e5
    g = [draw.double() for draw in draw(SMALL, device=device)]
    last = [a + b.double() / k for a, b in zip(g, draw(SMALL, device=device, seed=1), strict=True)]
    lists = {"gradients": g, "last_grad": last}
    narrow = ({*lists} - {wide}).pop()
    lists[narrow] = [tensor.float() for tensor in lists[narrow]]
    found = BACKENDS[backend]().run_sums(lists["gradients"], lists["last_grad"], k=k)
    torch.testing.assert_close(found, expected_sums(lists["gradients"], lists["last_grad"], k=k), rtol=1e-9, atol=0)


@every_implementation
@pytest.mark.parametrize("wide", ["gradients", "exp_avg", "exp_avg_sq", "last_grad"])
def test_update_is_in_float64_if_any_tensor_is(backend, device, wide):
    """Its own values are then right to the last digits, whatever the parameters' dtype."""
    lists = problem(SMALL, device, **{wide: torch.float64})
    before = {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}
    lists["exp_avg"] = [tensor.double() for tensor in lists["exp_avg"]] if wide == "gradients" else lists["exp_avg"]
    settings = run_update(backend, lists)
    expected = expected_update(before, **settings)
    seen = "exp_avg" if wide == "gradients" else wide
    for found, exact in zip(lists[seen], expected[seen], strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)


@every_implementation
@pytest.mark.parametrize("beta1", [0.3, 0.999])
def test_bias_corrections(backend, device, beta1):
    """In float32, 1 - 0.9999 is wrong in its fourth digit."""
    check_update(backend, problem([64] * 3, device), steps=[1.0, 10.0, 1e6], beta1=beta1, beta2=0.9999)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_momentum_does_not_read_its_target(backend, device, dtype):
    lists = problem(SMALL, device, without=PLAIN, params=dtype)
    for param in lists["params"]:
        param.fill_(torch.nan)
    check_update(backend, lists, arithmetic="momentum")


@every_kernel
def test_update_at_the_edges(backend, device):
    check_update(backend, problem(EDGES, device))


@every_implementation
def test_sums_at_the_edges(backend, device):
    sizes = EDGES if INTERPRETED else [*EDGES, 768 * 3072]
    check_sums(backend, draw(sizes, device=device), draw(sizes, device=device, seed=1), k=0.4)


@every_implementation
@pytest.mark.parametrize("last", [True, False], ids=["last", "no last"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
def test_sums_formulas(backend, device, scaled, last):
    """Without last gradients c is g, whatever k is."""
    settings = on(device, SCALES if scaled else {}) | {"k": 0.475}
    gradients = draw(SMALL, device=device)
    found = check_sums(backend, gradients, draw(SMALL, device=device, seed=1) if last else [], **settings)
    assert last or (torch.equal(found[3], found[0]) and not found[1:3].any())


@every_implementation
def test_sums_asked_for(backend, device):
    g, last = draw(SMALL, device=device), draw(SMALL, device=device, seed=1)
    whole = check_sums(backend, g, last, k=0.4)
    implementation = BACKENDS[backend]()
    assert torch.equal(implementation.run_sums(g, last, k=0.4, corrected=False)[:3], whole[:3])
    assert torch.equal(implementation.run_sums(g, last, k=0.4, products=False)[3], whole[3])


@every_implementation
def test_sums_of_numbers_whose_squares_overflow(backend, device):
    g, last = torch.tensor([1e19, 3e20, 0.0], device=device), torch.tensor([2e19, 1e20, 1e30], device=device)
    assert check_sums(backend, [g], [last], k=0.4).isfinite().all()


@every_implementation
def test_square_of_the_corrected_gradient_does_not_cancel(backend, device):
    """Gradients and last gradients nearly cancel at a large k: float32 sums of products would lose every digit."""
    for k in (1e2, 1e4):
        g = draw([9000, 100], device=device)
        last = [a + b / k for a, b in zip(g, draw([9000, 100], device=device, seed=1), strict=True)]
        sums, expected = BACKENDS[backend]().run_sums(g, last, k=k), expected_sums(g, last, k=k)[3]
        torch.testing.assert_close(sums[3], expected, rtol=1e-6, atol=0)
        if k < 1e4:  # gamma 1 and beta1 0.99
            of_products = formulas.corrected_square(sums, k, torch.ones((), device=device))
            torch.testing.assert_close(of_products, expected, rtol=1e-6, atol=0)


def test_square_of_the_corrected_gradient_is_not_negative():
    """Sums that rounding has changed, of a last gradient that leaves nothing: 9 - 18 + 8.9996."""
    products = torch.tensor([1.0, 1.5, 2.2499], dtype=torch.float64)
    assert formulas.corrected_square(products, 2.0, torch.ones(())) == 0


@every_implementation
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_nan_and_inf_spread_as_in_the_formulas(backend, device, rule):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -2.0])
    g, m, last = (values.clone() for values in torch.cartesian_prod(special, special, special).T.to(device))
    without = ("max_exp_avg_sq",) if rule == "adamw" else PLAIN
    lists = problem([len(g)], device, without=without)
    lists |= {"gradients": [g], "exp_avg": [m], "last_grad": [last]}
    before = {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}
    settings = run_update(backend, lists, arithmetic=rule)
    expected = expected_update(before, **settings)
    torch.testing.assert_close(lists, expected, rtol=1e-6, atol=1e-7, equal_nan=True, check_dtype=False)


@pytest.mark.skipif(INTERPRETED, reason="kernels get copies of such gradients")
def test_gradient_may_be_the_parameter():
    results = []
    for aliased in (False, True):
        lists = problem([4], "cpu")
        lists["gradients"] = [lists["params"][0] if aliased else lists["params"][0].clone()]
        run_update("for-loop", lists)
        results.append([lists["params"][0], lists["exp_avg"][0], lists["last_grad"][0]])
    assert all(map(torch.equal, *results))


# --- stochastic rounding ---------------------------------------------------------------------------------------------


def stochastic(seeds: list[int]) -> formulas.Rounding:
    return formulas.Rounding(kind="stochastic", seeds=seeds)


def rounded(backend: str, device: str, sizes: list[int], seeds: list[int], *, value: float = 1.0, lr: float = 2.0**-10):
    """Return bfloat16 parameters that Lion has moved up by lr from `value`."""
    lists = problem(sizes, device, without=ALONE, params=torch.bfloat16)
    for param, gradient, average in zip(lists["params"], lists["gradients"], lists["exp_avg"], strict=True):
        param.fill_(value), gradient.fill_(-1.0), average.zero_()
    run_update(backend, lists, arithmetic="lion", lr=lr, weight_decay=0.0, rounding=stochastic(seeds))
    return lists["params"]


@every_kernel
def test_stochastic_rounding_is_right_on_average(backend, device):
    """1 + 2**-10 lies an eighth of the way from 1 to its upper neighbour, in every part of a tensor."""
    size = 8192
    (param,) = rounded(backend, device, [3 * size + 100], [17])
    up = (param != 1).float()
    assert set(param.float().tolist()) == {1.0, 1.0 + 2**-7}
    (repeated,), (other,) = (rounded(backend, device, [3 * size + 100], [seed]) for seed in (17, 18))
    assert torch.equal(param, repeated)
    for part in up.split(size)[:3]:
        assert abs(part.mean().item() - 0.125) < 4 * (0.125 * 0.875 / size) ** 0.5
    for two in (up[size : 2 * size], (other[:size] != 1).float()):  # noise must not repeat
        assert abs((up[:size] * two).mean().item() - 0.125**2) < 4 * (0.125**2 / size) ** 0.5


@every_kernel
def test_noise_does_not_depend_on_other_tensors(backend, device):
    (alone,) = rounded(backend, device, [8292], [7])
    assert torch.equal(alone, rounded(backend, device, [9000, 0, 8292], [5, 6, 7])[2])


@every_kernel
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 0.0, 2.0])
def test_stochastic_rounding_keeps_exact_values(backend, device, value):
    (param,) = rounded(backend, device, [700], [3], value=value, lr=0.0)
    torch.testing.assert_close(param, torch.full_like(param, value), rtol=0, atol=0, equal_nan=True)


@every_implementation
@pytest.mark.parametrize("arithmetic", ["adamw", "lion"])
def test_kahan_keeps_what_rounding_loses(backend, device, arithmetic):
    """Parameter and compensation together are those of float64, to the parameter's and the compensation's bits."""
    if backend == "compiled":
        pytest.skip("compiled kernels leave Kahan's rounding to plain PyTorch")
    sizes = EDGES[:11]
    lists = problem(
        sizes, device, without=PLAIN if arithmetic == "lion" else ("max_exp_avg_sq",), params=torch.bfloat16
    )
    lost = [0.003 * tensor for tensor in draw(sizes, torch.bfloat16, device, seed=9)]
    before = {name: [tensor.double().clone() for tensor in tensors] for name, tensors in lists.items()}
    before["params"] = [param + each.double() for param, each in zip(before["params"], lost, strict=True)]
    kahan = formulas.Rounding(kind="kahan", compensations=lost)
    settings = run_update(backend, lists, arithmetic=arithmetic, rounding=kahan)
    del settings["rounding"]
    expected = expected_update(before, **settings)
    for param, each, whole in zip(lists["params"], lost, expected["params"], strict=True):
        assert (param.double() - whole).abs().le(2.0**-7 * whole.abs() + 1e-6).all()
        assert (param.double() + each.double() - whole).abs().le(2.0**-14 * whole.abs() + 2e-6).all()
        assert each.numel() < 9 or each.any()


def test_plain_stochastic_rounding_keeps_nan_of_all_ones():
    values = torch.full((700,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert formulas.round_stochastically(values, torch.Generator()).isnan().all()


def test_noise_seeds_differ():
    """By parameter, step, and offset in the parameter."""
    assert len({formulas.noise_seed(*numbers) for numbers in itertools.product(range(4), repeat=3)}) == 4**3


@every_kernel
def test_stochastic_rounding_keeps_nan_of_all_ones(backend, device):
    """What NVIDIA GPUs produce; a carry would make it -0."""
    lists = problem([700], device, without=ALONE, params=torch.bfloat16)
    lists["params"][0].view(torch.int16).fill_(0x7FFF)
    run_update(backend, lists, arithmetic="lion", lr=0.0, rounding=stochastic([1]))
    assert lists["params"][0].isnan().all()


# --- in the optimizer -------------------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_grad_norm": 0.5},
        {"mars_type": "mars-lion", "optimize_1d": True, "maximize": True},
        {"second_moment": "gradient", "clip_threshold": None},
        {"mars_type": "mars-m", "ns_dtype": "float32"},
        {"mars_type": "mars-shampoo", "ns_dtype": "float32", "max_grad_norm": 0.5},
    ],
    ids=str,
)
def test_optimizer_on_kernels(backend, device, settings, monkeypatch):
    """Three steps, the rate a number or a tensor, are those of plain PyTorch; an expert rests in each."""
    if backend == "triton":
        monkeypatch.setattr(backends, "kernels_of", lambda device: triton())
    results = []
    for lr, fused in ((0.01, False), (0.01, True), (torch.tensor(0.01, device=device), True)):
        starts = draw([(40, 30), (3, 700), (50,), (3, 6, 50)], device=device)
        params = [torch.nn.Parameter(start) for start in starts]
        optimizer = Mars(params, lr=lr, lr_1d=0.005, weight_decay=0.1, fused=fused, **settings)
        for step in range(3):
            for param, gradient in zip(params, draw([p.shape for p in params], device=device, seed=step), strict=True):
                param.grad = gradient.to(device)
            params[3].grad[step] = 0
            optimizer.step()
        results.append(params)
    for other in results[1:]:
        for param, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(param, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
