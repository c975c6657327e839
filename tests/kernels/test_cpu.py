"""The compiled CPU kernels match rules.py at every size, dtype and flag."""

from __future__ import annotations

import logging
import math
import mmap

import psutil
import pytest
import torch
from helpers import needs_compiler

from mars_hf import rules
from mars_hf.kernels import cpu as compiled

CPU = torch.device("cpu")
ROW = compiled.ROW
SIZES = (0, 1, 2, 7, 4095, 4096, 4097, 2 * ROW - 1, 2 * ROW, 2 * ROW + 1, 5 * ROW + 777, 100_003)
TENSORS = ("scale", "last_scales", "factors")
NUMBERS = {"k": 0.475, "beta1": 0.95, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
FLOATS = {"p": 1.0, "g": 0.1, "m": 0.1, "v": 0.01, "last": 0.1}

pytestmark = needs_compiler


@pytest.fixture
def fresh():
    """Unload the library before and after a test."""
    compiled._library.cache_clear()
    yield
    compiled._library.cache_clear()


def tensors(sizes=SIZES, seed=0, **dtypes):
    """Return lists of tensors by name, float32 by default."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in FLOATS.items():
        values = [torch.randn(n, generator=generator) * size for n in sizes]
        made[name] = [(x.abs() if name == "v" else x).to(dtypes.get(name, torch.float32)) for x in values]
    return made


def settings(n, *, scale=None, factors=False, last_scales=False, **changed):
    """Return keyword arguments of `update` for n tensors."""
    return {
        "rule": "adamw",
        "steps": [float(t) for t in range(1, n + 1)],
        "lr": 0.01,
        "scale": None if scale is None else torch.tensor(scale),
        "factors": torch.linspace(0.2, 1.0, n) if factors else None,
        "last_scales": torch.linspace(0.5, 2.0, n) if last_scales else None,
        "nesterov": 0.0,
        "second_moment": "corrected",
        **NUMBERS,
        **changed,
    }


def run(made, kept, numbers):
    """Run `update` on the lists named in `kept`."""
    names = ("p", "g", "m", "v", "last")
    compiled.update(*(made[name] if name in kept else [] for name in names), **numbers)


def expected(made, kept, numbers):
    """Run the same update in float64 with rules.py."""
    exact = {name: [x.double().clone() for x in made[name]] for name in made}
    lists = [exact[name] if name in kept else [] for name in ("p", "g", "m", "v", "last")]
    wide = {name: None if numbers.get(name) is None else numbers[name].double() for name in TENSORS}
    rules.update(*lists[:4], [], lists[4], **{**numbers, **wide})
    return exact


def assert_equal(made, kept, exact, relative=1e-6):
    """Check that each tensor is within `relative` of its largest entry."""
    for name in kept:
        for got, want in zip(made[name], exact[name], strict=True):
            if got.numel():
                assert (got.double() - want).abs().max() <= relative * want.abs().max(), (name, got.numel())


ADAMW = ("p", "g", "m", "v", "last")
CASES = {
    "adamw": (ADAMW, {}),
    "adamw scaled and clipped": (ADAMW, {"scale": 0.3, "factors": True}),
    "moved last gradients": (ADAMW, {"scale": 0.3, "last_scales": True, "keep_last": False}),
    "second moment of the gradient": (ADAMW, {"second_moment": "gradient", "factors": True, "scale": 2.0}),
    "recursion": (("p", "g", "m", "v"), {"second_moment": "gradient", "nesterov": 0.025, "scale": 0.3}),
    "plain adamw": (("p", "g", "m", "v"), {"factors": True}),
    "lion": (("p", "g", "m", "last"), {"rule": "lion", "scale": 0.3, "factors": True}),
    "lion recursion": (("p", "g", "m"), {"rule": "lion", "nesterov": 0.025}),
    "momentum": (("p", "g", "m", "last"), {"rule": "momentum", "scale": 0.3, "factors": True}),
    "momentum recursion": (("p", "g", "m"), {"rule": "momentum", "nesterov": 0.025}),
}


@pytest.mark.parametrize("case", CASES)
def test_update_is_the_rule(case):
    kept, changed = CASES[case]
    made = tensors()
    before = [g.clone() for g in made["g"]]
    numbers = settings(len(SIZES), **changed)
    exact = expected(made, kept, numbers)
    run(made, kept, numbers)
    assert_equal(made, kept, exact)
    assert all(torch.equal(g, old) for g, old in zip(made["g"], before, strict=True))


@pytest.mark.parametrize(
    ("dtype", "rounding", "relative"),
    [(torch.bfloat16, 2**-8, 1e-6), (torch.float32, 0.0, 1e-6), (torch.float64, 0.0, 1e-14)],
    ids=["bfloat16", "float32", "float64"],
)
def test_momentum_is_rounded_once_and_what_it_is_written_to_is_not_read(dtype, rounding, relative):
    kept = CASES["momentum"][0]
    made = tensors(p=dtype)
    numbers = settings(len(SIZES), rule="momentum", steps=[math.nan] * len(SIZES))
    exact = expected(made, kept, numbers)
    for p in made["p"]:
        p.fill_(torch.nan)
    run(made, kept, numbers)
    for got, want in zip(made["p"], exact["p"], strict=True):
        assert got.dtype == dtype
        allowed = rounding * want.abs() + (relative * want.abs().max() if got.numel() else 0.0)
        assert ((got.double() - want).abs() <= allowed).all()
    assert_equal(made, ("m", "last"), exact)


@pytest.mark.parametrize(
    "kept, rule", [(ADAMW, "adamw"), (CASES["momentum"][0], "momentum")], ids=["adamw", "momentum"]
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("threshold", [1e-3, 1.0, 1e6])
def test_clipping_within_the_update(threshold, scaled, kept, rule):
    """The result equals `sums`, factor and `update`, up to the last place of PyTorch's square root."""
    sizes = (*SIZES, 4 * ROW, 16 * ROW)
    made, other = tensors(sizes), tensors(sizes)
    numbers = settings(len(sizes), rule=rule, scale=-0.3 if scaled else None, last_scales=scaled)
    correction = {name: numbers[name] for name in ("scale", "last_scales", "k")}
    square = compiled.sums(other["g"], other["last"], **correction, products=False)[3]
    run(other, kept, {**numbers, "factors": rules.clip_factors(square, threshold)})
    run(made, kept, {**numbers, "clip_threshold": threshold})
    for name in kept:
        torch.testing.assert_close(made[name], other[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_low_precision_parameters_are_rounded_once(dtype):
    made = tensors(p=dtype, g=dtype)
    numbers = settings(len(SIZES), factors=True)
    exact = expected(made, ADAMW, numbers)
    run(made, ADAMW, numbers)
    assert_equal(made, ("m", "v", "last"), exact)
    for got, want in zip(made["p"], exact["p"], strict=True):
        rounded = want.to(dtype)
        # Rarely, the float32 result is on the other side of the midpoint between two neighbours.
        assert torch.equal(got, rounded) or (got != rounded).float().mean() < 1e-3
        one_up, one_down = (torch.nextafter(rounded, torch.full_like(rounded, sign)) for sign in (9.0, -9.0))
        assert ((got == rounded) | (got == one_up) | (got == one_down)).all()


@pytest.mark.parametrize(
    "dtypes",
    [
        {"last": torch.bfloat16},
        {"last": torch.bfloat16, "m": torch.bfloat16, "v": torch.bfloat16, "p": torch.bfloat16},
        {"g": torch.bfloat16, "m": torch.bfloat16, "v": torch.bfloat16},
    ],
    ids=["last", "all but the gradient", "gradient and moments"],
)
def test_low_precision_states_are_within_a_rounding(dtypes):
    made = tensors(**dtypes)
    numbers = settings(len(SIZES), scale=0.3)
    exact = expected(made, ADAMW, numbers)
    run(made, ADAMW, numbers)
    for name in ("p", "m", "v", "last"):
        for got, want in zip(made[name], exact[name], strict=True):
            step = 2.0**-8 if dtypes.get(name) == torch.bfloat16 else 0.0
            allowed = want.abs() * step * 1.01 + 1e-6 * want.abs().max() if got.numel() else 0.0
            assert ((got.double() - want).abs() <= allowed).all(), name


def test_float64_keeps_its_precision():
    made = tensors(**dict.fromkeys(FLOATS, torch.float64))
    numbers = settings(len(SIZES), factors=True)
    exact = expected(made, ADAMW, numbers)
    run(made, ADAMW, numbers)
    assert_equal(made, ("p", "m", "v", "last"), exact, relative=1e-14)
    total = compiled.sums(made["g"], made["last"])
    assert total.dtype == torch.float64
    wanted = [(g * g).sum() for g in made["g"]]
    torch.testing.assert_close(total[0], torch.stack(wanted), rtol=1e-14, atol=0)


@pytest.mark.parametrize("offset", [1, 3])
def test_views_of_flat_buffers_at_odd_offsets(offset):
    sizes = (ROW * 3 + 5, 1, 777, 0, ROW * 2)
    made = tensors(sizes)
    flat = {name: torch.full((sum(sizes) + 2 * offset,), 7.0) for name in made}
    views = {name: list(flat[name][offset : offset + sum(sizes)].split(sizes)) for name in made}
    for name in made:
        torch._foreach_copy_(views[name], made[name])
    total = compiled.sums(views["g"], views["last"])
    assert torch.equal(total, compiled.sums(made["g"], made["last"]))
    for lists in (made, views):
        run(lists, ADAMW, settings(len(sizes)))
    for name in made:
        assert all(torch.equal(a, b) for a, b in zip(views[name], made[name], strict=True))
        assert (flat[name][:offset] == 7.0).all() and (flat[name][-offset:] == 7.0).all()


def test_empty_lists():
    compiled.update([], [], [], [], [], **settings(0))
    assert compiled.sums([], []).shape == (4, 0)


def test_parameters_of_a_model():
    made = tensors((10_000, 3))
    params = [torch.nn.Parameter(x.clone()) for x in made["p"]]
    copies = {name: [x.clone() for x in made[name]] for name in made}
    run({**copies, "p": params}, ADAMW, settings(2))
    run(made, ADAMW, settings(2))
    assert all(torch.equal(a, b) for a, b in zip(params, made["p"], strict=True))
    assert all(param.requires_grad and param.grad_fn is None for param in params)


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_nan_and_inf_spread_as_in_the_formulas(rule):
    kept = ADAMW if rule == "adamw" else ("p", "g", "m", "last")
    special = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -2.0)
    g, m, last = torch.cartesian_prod(*[torch.tensor(special)] * 3).T.contiguous()
    ones = torch.ones_like(g)
    made = {"p": [ones.clone()], "g": [g], "m": [m], "v": [ones.clone()], "last": [last]}
    numbers = settings(1, rule=rule)
    exact = expected(made, kept, numbers)
    run(made, kept, numbers)
    for name in kept:
        torch.testing.assert_close(made[name][0].double(), exact[name][0], rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtypes", [{}, {"g": torch.bfloat16}, {"last": torch.bfloat16}], ids=str)
def test_sums(dtypes, scale):
    made = tensors(**dtypes)
    number = None if scale is None else torch.tensor(scale)
    last_scales = None if scale is None else torch.linspace(0.5, 2.0, len(SIZES))
    total = compiled.sums(made["g"], made["last"], scale=number, last_scales=last_scales, k=0.475)
    assert total.dtype == torch.float64 and total.shape == (4, len(SIZES))
    for i, (g, last) in enumerate(zip(made["g"], made["last"], strict=True)):
        g, last = g.double() * (scale or 1.0), last.double() * (1.0 if scale is None else last_scales[i].double())
        c = g + 0.475 * (g - last)
        wanted = torch.stack([(g * g).sum(), (g * last).sum(), (last * last).sum(), (c * c).sum()])
        bound = torch.stack([(g * g).sum(), (g * last).abs().sum(), (last * last).sum(), (c * c).sum()])
        assert ((total[:, i] - wanted).abs() <= 1e-6 * bound).all(), len(g)


def test_the_norm_of_a_correction_keeps_its_precision():
    """The parts of <c, c> cancel at gamma=1: computed from the other sums, it would be off by 1e-4."""
    g = torch.randn(3 * ROW)
    last = g + 0.01 * torch.randn(3 * ROW)
    c = g.double() + 19 * (g.double() - last.double())
    total = compiled.sums([g], [last], k=19.0)
    assert (total[3, 0] - c.square().sum()).abs() <= 1e-6 * c.square().sum()


def test_sums_without_last_gradients():
    made = tensors()
    total = compiled.sums(made["g"], [], scale=torch.tensor(0.5))
    wanted = torch.stack([(0.25 * g.double() ** 2).sum() for g in made["g"]])
    torch.testing.assert_close(total[0], wanted, rtol=1e-6, atol=0)
    assert torch.equal(total[3], total[0])
    assert not total[1:3].any()


def test_squares_beyond_float32():
    g, last = torch.tensor([1e19, 3e20, 0.0]), torch.tensor([2e19, 1e20, 1e30])
    total = compiled.sums([g], [last], k=0.4)[:, 0]
    g, last = g.double(), last.double()
    c = g + 0.4 * (g - last)
    wanted = torch.stack([(g * g).sum(), (g * last).sum(), (last * last).sum(), (c * c).sum()])
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0)


def test_mixed_dtypes_in_a_list_are_refused():
    made = tensors((5, 70))
    made["last"][1] = made["last"][1].double()
    with pytest.raises(RuntimeError, match=r"torch.float32, torch.float64 in one list"):
        run(made, ADAMW, settings(2))


def test_lists_of_other_sizes_are_refused():
    made = tensors((5, 70))
    made["last"][1] = made["last"][1][:60]
    with pytest.raises(RuntimeError, match=r"\[5, 60\].*\[5, 70\]"):
        compiled.sums(made["g"], made["last"])
    with pytest.raises(RuntimeError, match=r"\[5, 60\].*\[5, 70\]"):
        run(made, ADAMW, settings(2))


def test_another_default_device_changes_nothing():
    results = []
    for device in ("cpu", "meta"):
        made, numbers = tensors((5000, 3)), settings(2, clip_threshold=0.1)
        with torch.device(device):
            total = compiled.sums(made["g"], made["last"])
            run(made, ADAMW, numbers)
        results.append([total, *(x for name in ADAMW for x in made[name])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -torch.inf])
def test_lion_shows_a_nan_in_the_parameter(value):
    param, gradient = torch.ones(700), torch.ones(700)
    gradient[3] = value
    compiled.update([param], [gradient], [torch.zeros(700)], [], [], **settings(1, rule="lion"))
    assert param.isnan().nonzero().flatten().tolist() == ([3] if value != value else [])


def test_sums_of_nan_and_inf():
    g = [torch.ones(3 * ROW), torch.ones(3 * ROW + 1), torch.ones(5)]
    g[0][ROW], g[1][-1], g[2][0] = float("nan"), float("inf"), float("nan")
    total = compiled.sums(g, [x.clone() for x in g])
    assert total[:, [0, 2]].isnan().all() and total[:3, 1].isinf().all()


def test_sums_of_many_elements_are_accurate():
    g = torch.full((30_000_001,), 0.1)
    total = compiled.sums([g], [g])
    exact = torch.tensor(0.1).double() ** 2 * len(g)
    assert ((total - exact).abs() <= 1e-6 * exact).all()  # c = g


@pytest.mark.slow
@pytest.mark.parametrize("clip_threshold", [None, 0.1])
def test_the_number_of_threads_changes_no_bit(clip_threshold):
    """Some tensors span several waves, and some waves hold several tensors."""
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            made = tensors((1_300_003, 5, 0, 700_000, 100_003, 4096, 900_001))
            numbers = settings(7, scale=0.5, clip_threshold=clip_threshold)
            total = compiled.sums(made["g"], made["last"])
            run(made, ADAMW, numbers)
            results.append([total, *(x for name in ADAMW for x in made[name])])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_stochastic_rounding_is_right_on_average():
    """Values lie a quarter and three quarters of the way between neighbours, at every place; NaN and inf stay."""
    count = 40_000
    low, step = 1.0, 2.0**-7
    values = torch.full((count,), low, dtype=torch.bfloat16)
    values[-2:] = torch.tensor([torch.inf, torch.nan])
    zeros = [torch.zeros(count)]
    for part, seed in ((0.25, 1), (0.25, 2), (0.75, 3)):
        param = values.clone()
        # Lion moves by lr against the sign.
        numbers = settings(1, rule="lion", lr=step * part, weight_decay=0.0)
        compiled.update([param], [-torch.ones(count)], [zeros[0].clone()], [], [], **numbers, seeds=[seed])
        moved = param[:-2].float() - low
        assert set(moved.tolist()) == {0.0, step}
        share = (moved > 0).float().mean().item()
        assert abs(share - part) < 5 * (part * (1 - part) / count) ** 0.5
        assert param[-2].isinf() and param[-1].isnan()


def test_stochastic_rounding_repeats_with_its_seed_and_differs_between_tensors():
    results = []
    for seed in (5, 5, 6):
        params = [torch.ones(5000, dtype=torch.bfloat16) for _ in range(2)]
        numbers = settings(2, rule="lion", lr=2.0**-9, weight_decay=0.0)
        others = [[x * torch.ones(5000) for _ in range(2)] for x in (-1.0, 0.0)]
        compiled.update(params, *others, [], [], **numbers, seeds=[seed, seed + 100])
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])
    assert not torch.equal(results[0][0], results[0][1])
    agree = (results[0][0] == results[0][1]).float().mean()
    assert 0.55 < agree < 0.7  # 0.625 if independent


def test_every_number_of_16_bits_is_read_right():
    """The momentum rule can copy, so it tests conversion alone."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    out, average = [torch.empty(len(every))], [torch.zeros(len(every))]
    compiled.update(out, [every], average, [], [], **settings(1, rule="momentum", beta1=0.0))
    torch.testing.assert_close(out[0], every.float(), rtol=0, atol=0, equal_nan=True)


def test_rounding_to_16_bits_is_that_of_pytorch():
    """Return numbers of all sizes, midpoints between neighbours, the largest numbers, inf and NaN."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    middles = (every[:-1].double() + every[1:].double()).float() / 2
    values = torch.cat([any_bits, every, middles, torch.tensor([3.3961e38, torch.inf])])
    out, average = [torch.empty(len(values), dtype=torch.bfloat16)], [torch.zeros(len(values))]
    compiled.update(out, [values], average, [], [], **settings(1, rule="momentum", beta1=0.0))
    torch.testing.assert_close(out[0], average[0].bfloat16(), rtol=0, atol=0, equal_nan=True)
    finite = values.isfinite()
    assert torch.equal(average[0][finite], values[finite])


LARGE = 2**31 + 5 * ROW + 7


@pytest.mark.slow
def test_sums_beyond_31_bits():
    """Memory that is only read costs nothing: all its pages map to one page of zeros."""
    memory = mmap.mmap(-1, 4 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    g = torch.frombuffer(memory, dtype=torch.float32)
    g[-3:] = 2.0
    g[2**31 - 1 : 2**31 + 1] = 3.0
    assert compiled.sums([g], [])[0].tolist() == [3 * 4 + 2 * 9]
    assert compiled.sums([g, g[-3:]], [g, g[-3:]], k=1.0).T.tolist() == [[30.0] * 4, [12.0] * 4]


@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 12 * 2**30, reason="needs 9 GB of memory")
def test_an_update_beyond_31_bits():
    memory = mmap.mmap(-1, 2 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    g = torch.frombuffer(memory, dtype=torch.bfloat16)
    marked = [0, 2**31 - 1, 2**31, 2**31 + ROW, LARGE - 1]
    g[marked] = 1.0
    param, average = (torch.zeros(LARGE, dtype=torch.bfloat16) for _ in range(2))
    compiled.update([param], [g], [average], [], [], **settings(1, rule="lion", lr=0.5))
    assert torch.nonzero(param).flatten().tolist() == marked
    assert (param[marked] == -0.5).all()


def test_a_failure_is_told_once(fresh, monkeypatch, caplog):
    def failing(source):
        raise RuntimeError("no g++")

    monkeypatch.setattr(compiled.compiler, "load", failing)
    with caplog.at_level(logging.WARNING):
        assert not compiled.is_available(CPU)
        assert not compiled.is_available(CPU)
    assert len(caplog.records) == 1 and "no g++" in caplog.text and "slower" in caplog.text
    with pytest.raises(RuntimeError, match="could not be made"):
        compiled.sums([torch.ones(3)], [])


def test_an_unknown_rule_is_refused():
    made = tensors()
    with pytest.raises(ValueError, match="rule='sgd' is unknown; accepted: adamw, lion, momentum"):
        run(made, ADAMW, settings(len(SIZES), rule="sgd"))
    assert all(map(torch.equal, made["p"], tensors()["p"]))


def test_rules_have_the_numbers_of_the_kernel():
    source = compiled.SOURCE.read_text()
    assert f"enum Rule {{ {', '.join(rules.RULES).upper()} }};" in source
    types = [str(dtype).removeprefix("torch.").upper() for dtype in compiled.TYPES]
    assert f"enum Type {{ ABSENT, {', '.join(types)} }};" in source and list(compiled.TYPES.values()) == [1, 2, 3]
