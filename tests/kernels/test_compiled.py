"""The compiled CPU kernels do what rules.py does, at every size, dtype and flag, and compile each case once."""

from __future__ import annotations

import itertools
import logging
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from mars_hf import clipping, rules
from mars_hf.kernels import compiled

CPU = torch.device("cpu")
ROW = compiled.ROW
SIZES = (0, 1, 2, 7, 4095, 4096, 4097, 2 * ROW - 1, 2 * ROW, 2 * ROW + 1, 5 * ROW + 777, 100_003)
TENSORS = ("scale", "last_scales", "factors")
NUMBERS = {"k": 0.475, "beta1": 0.95, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
FLOATS = {"p": 1.0, "g": 0.1, "m": 0.1, "v": 0.01, "peak": 0.01, "last": 0.1}

pytestmark = pytest.mark.skipif(
    not compiled.supports(CPU, [torch.float32]), reason="torch.compile finds no C++ compiler here"
)


@pytest.fixture(autouse=True)
def no_failure():
    """A test that does not provoke one sees no failed compilation."""
    yield
    assert not compiled._failures


@pytest.fixture
def fresh(monkeypatch):
    """No kernel compiled yet and no failure seen, before and after."""

    def forget():
        for function in (compiled._update_kernel, compiled._sums_kernel, compiled._can_compile):
            function.cache_clear()

    forget()
    monkeypatch.setattr(compiled, "_failures", [])
    yield
    forget()


def tensors(sizes=SIZES, seed=0, **dtypes):
    """Lists by name, float32 unless another dtype is given."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in FLOATS.items():
        values = [torch.randn(n, generator=generator) * size for n in sizes]
        made[name] = [(x.abs() if name in ("v", "peak") else x).to(dtypes.get(name, torch.float32)) for x in values]
    return made


def settings(n, *, scale=None, factors=False, last_scales=False, **changed):
    """Keyword arguments of `update` for n tensors."""
    return {
        "rule": "adamw",
        "steps": torch.arange(1.0, n + 1),
        "lr": torch.tensor(0.01),
        "scale": None if scale is None else torch.tensor(scale),
        "factors": torch.linspace(0.2, 1.0, n) if factors else None,
        "last_scales": torch.linspace(0.5, 2.0, n) if last_scales else None,
        "blend": 0.0,
        "second_moment": "corrected",
        **NUMBERS,
        **changed,
    }


def run(made, kept, numbers):
    """`update` on the lists named in `kept`."""
    names = ("p", "g", "m", "v", "peak", "last")
    compiled.update(*(made[name] if name in kept else [] for name in names), **numbers)


def expected(made, kept, numbers):
    """The same in float64, by rules.py."""
    exact = {name: [x.double().clone() for x in made[name]] for name in made}
    names = ("p", "g", "m", "v", "peak", "last")
    wide = {name: None if numbers.get(name) is None else numbers[name].double() for name in TENSORS}
    plain = {"steps": numbers["steps"].tolist(), "lr": numbers["lr"].item()}
    rules.update(*(exact[name] if name in kept else [] for name in names), **{**numbers, **wide, **plain})
    return exact


def assert_equal(made, kept, exact, relative=1e-6):
    """Each tensor within `relative` of its largest entry."""
    for name in kept:
        for got, want in zip(made[name], exact[name], strict=True):
            if got.numel():
                assert (got.double() - want).abs().max() <= relative * want.abs().max(), (name, got.numel())


ADAMW = ("p", "g", "m", "v", "last")
CASES = {
    "adamw": (ADAMW, {}),
    "adamw scaled and clipped": (ADAMW, {"scale": 0.3, "factors": True}),
    "moved last gradients": (ADAMW, {"scale": 0.3, "last_scales": True, "keep_last": False}),
    "amsgrad": ((*ADAMW, "peak"), {"scale": 0.3, "factors": True}),
    "second moment of the gradient": (ADAMW, {"second_moment": "gradient", "factors": True, "scale": 2.0}),
    "recursion": (("p", "g", "m", "v"), {"second_moment": "gradient", "blend": 0.025, "scale": 0.3}),
    "plain adamw": (("p", "g", "m", "v"), {"factors": True}),
    "lion": (("p", "g", "m", "last"), {"rule": "lion", "scale": 0.3, "factors": True}),
    "lion recursion": (("p", "g", "m"), {"rule": "lion", "blend": 0.025}),
    "momentum": (("p", "g", "m", "last"), {"rule": "momentum", "scale": 0.3, "factors": True}),
    "momentum recursion": (("p", "g", "m"), {"rule": "momentum", "blend": 0.025}),
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
    numbers = settings(len(SIZES), rule="momentum", steps=torch.full((len(SIZES),), torch.nan))
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
    """To the bit what `sums`, the factor and `update` give, for sizes that are whole rows and others."""
    sizes = (*SIZES, 4 * ROW, 16 * ROW)
    made, other = tensors(sizes), tensors(sizes)
    numbers = settings(len(sizes), rule=rule, scale=-0.3 if scaled else None, last_scales=scaled)
    correction = {name: numbers[name] for name in ("scale", "last_scales", "k")}
    square = compiled.sums(other["g"], other["last"], **correction, products=False)[3]
    run(other, kept, {**numbers, "factors": clipping.factors(square, threshold)})
    run(made, kept, {**numbers, "clip_threshold": threshold})
    for name in kept:
        assert all(torch.equal(a, b) for a, b in zip(made[name], other[name], strict=True)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_rounded_once(dtype):
    made = tensors(p=dtype, g=dtype)
    numbers = settings(len(SIZES), factors=True)
    exact = expected(made, ADAMW, numbers)
    run(made, ADAMW, numbers)
    assert_equal(made, ("m", "v", "last"), exact)
    for got, want in zip(made["p"], exact["p"], strict=True):
        rounded = want.to(dtype)
        # The float32 result may lie on the other side of the middle of two neighbours, rarely.
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


def test_one_dtype_of_arithmetic_for_mixed_lists():
    made, other = tensors((5000, 300)), tensors((5000, 300))
    for name in made:
        made[name][1] = made[name][1].double()
        other[name] = [x.double() for x in other[name]]
    for lists in (made, other):
        run(lists, ADAMW, settings(2))
    assert made["p"][0].dtype == torch.float32
    assert torch.equal(made["p"][0], other["p"][0].float()) and torch.equal(made["p"][1], other["p"][1])


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
    compiled.update([], [], [], [], [], [], **settings(0))
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
    made = {"p": [ones.clone()], "g": [g], "m": [m], "v": [ones.clone()], "peak": [ones], "last": [last]}
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
    assert total.dtype == torch.float32 and total.shape == (4, len(SIZES))
    for i, (g, last) in enumerate(zip(made["g"], made["last"], strict=True)):
        g, last = g.double() * (scale or 1.0), last.double() * (1.0 if scale is None else last_scales[i].double())
        c = g + 0.475 * (g - last)
        wanted = torch.stack([(g * g).sum(), (g * last).sum(), (last * last).sum(), (c * c).sum()])
        bound = torch.stack([(g * g).sum(), (g * last).abs().sum(), (last * last).sum(), (c * c).sum()])
        assert ((total[:, i] - wanted).abs() <= 1e-6 * bound).all(), len(g)


def test_the_norm_of_a_correction_keeps_its_precision():
    """Where its parts cancel, as with gamma=1: <c, c> made from the other sums would be off by 1e-4."""
    g = torch.randn(3 * ROW)
    last = g + 0.01 * torch.randn(3 * ROW)
    c = g.double() + 19 * (g.double() - last.double())
    total = compiled.sums([g], [last], k=19.0)
    assert (total[3, 0] - c.square().sum()).abs() <= 1e-6 * c.square().sum()


def test_sums_without_last_gradients():
    made = tensors()
    total = compiled.sums(made["g"], [], scale=torch.tensor(0.5))
    wanted = torch.stack([(0.25 * g.double() ** 2).sum() for g in made["g"]]).float()
    torch.testing.assert_close(total[0], wanted, rtol=1e-6, atol=0)
    assert torch.equal(total[3], total[0])
    assert not total[1:3].any()


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


def test_one_compilation_for_all_numbers_and_sizes(fresh):
    torch._dynamo.utils.counters.clear()
    sizes = itertools.cycle((2, 3, 4096, 50_000, 123_457))
    for step, lr, scale, clipped in ((1, 0.1, None, False), (2, 0.2, 0.5, True), (9, 0.0, 1.0, True)):
        made = tensors((next(sizes), next(sizes)), seed=step)
        numbers = settings(2, scale=scale, factors=clipped, k=0.1 * step, beta2=0.9 + 0.01 * step)
        run(made, ADAMW, {**numbers, "lr": torch.tensor(lr), "steps": torch.full((2,), float(step))})
        compiled.sums(made["g"], made["last"], scale=numbers["scale"], k=numbers["k"])
    made = tensors((3 * ROW, 4 * ROW))
    compiled.sums(made["g"], made["last"])
    # Of each kernel one with and one without a scale.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_many_flag_combinations_do_not_exhaust_the_compile_cache(fresh):
    made = tensors((100,))
    with torch._dynamo.config.patch(recompile_limit=1):
        for kept, changed in list(CASES.values())[:4]:
            run(made, kept, settings(1, **changed))
    assert not compiled._failures


def test_number_of_threads_is_respected():
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            made = tensors((100_003,))
            total = compiled.sums(made["g"], made["last"])
            run(made, ADAMW, settings(1))
            results.append([total, *made["p"]])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_failed_compilation_is_told_once_and_does_not_stop_the_run(fresh, monkeypatch, caplog):
    def broken(*args, **kwargs):
        def raising(*args):
            raise RuntimeError("no such instruction")

        return raising

    made = tensors()
    numbers = settings(len(SIZES))
    exact = expected(made, ADAMW, numbers)
    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING):
        total = compiled.sums(made["g"], made["last"])
        run(made, ADAMW, numbers)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no such instruction" in caplog.text
    assert not compiled.supports(CPU, [torch.float32])
    assert_equal(made, ("p", "m", "v", "last"), exact)
    torch.testing.assert_close(total[0, -1].double(), exact["g"][-1].square().sum(), rtol=1e-6, atol=0)


def test_no_compiler_is_told_once(fresh, monkeypatch, caplog):
    def missing():
        raise RuntimeError("no g++")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    with caplog.at_level(logging.WARNING):
        assert not compiled.supports(CPU, [torch.float32])
        assert not compiled.supports(CPU, [torch.float32])
    assert len(caplog.records) == 1 and "no g++" in caplog.text


def test_torch_compile_turned_off_is_told_once(fresh, caplog):
    with torch.compiler.set_stance("force_eager"), caplog.at_level(logging.WARNING):
        assert not compiled.supports(CPU, [torch.float32])
        assert not compiled.supports(CPU, [torch.float32])
    assert len(caplog.records) == 1 and "turned off" in caplog.text


def test_a_compiled_caller_takes_the_same_kernels():
    made, other = tensors(), tensors()
    run(made, ADAMW, settings(len(SIZES)))
    torch._dynamo.utils.counters.clear()
    torch.compile(run)(other, ADAMW, settings(len(SIZES)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert all(torch.equal(a, b) for a, b in zip(made["p"], other["p"], strict=True))


def test_supports():
    assert compiled.supports(CPU, compiled.DTYPES)
    assert not compiled.supports(torch.device("meta"), [torch.float32])
    assert not compiled.supports(CPU, [torch.float32, torch.float8_e4m3fn])


def test_loops_count_in_64_bits(fresh):
    """Tensors beyond 2**31 elements do not fit into this machine's memory; the loops of the code that runs do."""
    made = tensors((3 * ROW, 5 * ROW))

    def both():
        compiled.sums(made["g"], made["last"], k=0.1)
        run(made, ADAMW, settings(2))

    _, sources = run_and_get_code(both)
    loops = re.findall(r"for\s*\(\s*(\w+) x\d+\s*=", "".join(sources))
    assert len(loops) >= 2
    assert set(loops) == {"int64_t"}
    offsets = re.findall(r"static_cast<(\w+)>\(x\d+", "".join(sources))
    assert set(offsets) <= {"int64_t"}
