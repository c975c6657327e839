"""MARS gives the same weights on several processes as on one, under every engine.

Only the rounding of sums in another order may differ. Every group of runs is one launch, whose results
are shared by the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
import train
from launching import Launches, Run
from packaging.version import parse
from torch import Tensor
from workload import CASES as SETTINGS
from workload import MAX_GRAD_NORM, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

BAR = 5e-5  # relative to the largest element of the tensor
# mars-shampoo and mars-m, with Newton-Schulz in float32 and in bfloat16, whose rounding is 4e-3.
MATRIX_BAR, BF16_MATRIX_BAR = 1e-5, 2e-2
# Codes of 8 bits have four places, and each run may take either neighbour.
TWO_CODES = 2.0**-3
# Where blocks are the same, rounding noise changes few codes.
SAME_BLOCKS_SHARE = 0.99
# bf16 gradients are rounded to 8 bits (0.4% each) before ranks add them up. Over 20 steps that made up to
# 2.7% of the norm of a first moment (5.3% under lion, where steps do not shrink with the gradient) and 0.4% of that of
# the weights. Norms of local pieces, for comparison, make 30 to 40% of a first moment.
BF16_STATE_BAR = {"adamw": 0.06, "lion": 0.1, "m_bf16": 0.06}
BF16_WEIGHT_BAR = 0.005
BF16 = ("zero1_bf16", "zero1_bf16_fp32accum", "zero2_bf16", "zero3_bf16")
# Settings in which users reported that DeepSpeed's own Muon fails, and how far weights may be from plain torch's.
MUON = {"stage0/m": 1e-6, "zero3_init/m": 1e-5, "zero3/m/groups": 1e-5, "stage0_bf16/m": 3e-2}
MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
MATRIX_CASES = {case for case, settings in SETTINGS.items() if settings.mars_type in ("mars-shampoo", "mars-m")}

# Cases of each engine, by kind of launch and number of processes.
# Stage 3 keeps the previous gradient for a parameter that has none, and steps on it, whatever the optimizer
# (seen with torch.optim.AdamW, DeepSpeed 0.19): no skipping there.
REGULAR: dict[tuple[str, int], dict[str, str]] = {
    ("torch", 2): {
        "ddp": "adamw lion_1d adamw_skipping m m_folded adamw_1d_kernels adamw_8bit lion_8bit",
        "ddp_bucket_view": "adamw_1d_skipping",
        "ddp_static_graph": "lion_1d",
        "fsdp2": "adamw adamw_1d lion adamw_1d_skipping lion_1d_folded m m_rows m_skipping shampoo_bf16 m_kernels"
        " adamw_8bit adamw_8bit_kernels m_8bit",
    },
    ("torch", 4): {"ddp": "m", "fsdp2": "adamw m_skipping", "hsdp": "lion_1d_frozen adamw_folded m m_rows"},
    ("deepspeed", 2): {
        "zero1": "adamw lion_1d m_skipping adamw_1d_kernels adamw_8bit",
        "zero2": "adamw lion adamw_1d_skipping adamw_unclipped m lion_8bit adamw_8bit_kernels",
        "zero3": "adamw adamw_1d lion_1d_frozen shampoo m m_rows m_8bit adamw_8bit",
        "zero2_offload": "adamw",
        "zero3_offload": "adamw_1d",
        "zero2_round_robin": "adamw_1d m",
    },
    ("deepspeed", 4): {"zero1": "m", "zero2": "lion_1d_frozen", "zero3": "adamw_1d"},
    ("ways", 2): {
        "factory_zero2": "adamw",
        "optim_zero2": "adamw",
        "accelerate_zero2": "adamw",
        "own_zero2": "adamw m",
        "trainer_zero2": "adamw m",
        "factory_ddp": "adamw",
        "accelerate_ddp": "adamw",
        "own_ddp": "adamw m",
        "trainer_ddp": "adamw m",
        "accelerate_fsdp2": "adamw adamw_1d m",
    },
}
# `pytest -m soak` runs these.
SOAK: dict[tuple[str, int], dict[str, str]] = {
    ("torch", 2): {
        "ddp": "adamw_1d adamw_frozen lion adamw_folded shampoo m_unclipped m_bf16 adamw_folded_kernels lion_kernels"
        " m_kernels",
        "ddp_bucket_view": "adamw",
        "ddp_static_graph": "adamw",
        "fsdp2": "adamw_frozen lion_1d adamw_skipping lion_1d_frozen adamw_unclipped adamw_folded shampoo shampoo_1d"
        " m_unclipped m_folded m_bf16 adamw_1d_kernels adamw_folded_kernels lion_kernels",
    },
    ("torch", 4): {
        "ddp": "adamw_1d shampoo_bf16",
        "fsdp2": "adamw_1d_skipping lion_1d_frozen shampoo_1d",
        "hsdp": "adamw adamw_1d_skipping shampoo m_bf16",
    },
    ("deepspeed", 2): {
        "zero1": "adamw_1d adamw_frozen lion adamw_skipping shampoo m_bf16",
        "zero2": "adamw_1d adamw_frozen lion_1d shampoo_1d m_unclipped m_kernels",
        "zero3": "adamw_frozen lion lion_1d shampoo_bf16 lion_kernels",
        "zero2_offload": "lion_1d m adamw_1d_kernels",
        "zero3_offload": "lion shampoo",
        "zero2_round_robin": "adamw lion lion_1d",
    },
    ("deepspeed", 4): {"zero1": "adamw_1d lion", "zero2": "adamw shampoo", "zero3": "lion m"},
}
# Loops with accelerate, stopped and resumed in the middle.
RESUMED = [f"accelerate_{way}/{case}/resumed" for way in ("ddp", "fullyshard", "zero2") for case in ("adamw", "m")]
# Other runs of the regular launches.
ZERO = ("zero1", "zero2", "zero3")
BF16_RUNS = [f"{engine}/{case}" for engine in BF16 for case in BF16_STATE_BAR]
FURTHER: dict[tuple[str, int], list[str]] = {  # local norms are wrong on purpose, see train.py
    ("torch", 1): ["single/adamw_1d/metrics", "single/m/groups"],
    ("deepspeed", 1): [*BF16_RUNS, *MUON],
    ("torch", 2): [
        *(f"fsdp2/{case}/local_norms" for case in ("adamw", "lion", "m")),
        *(f"{engine}/adamw_1d/metrics" for engine in ("ddp", "fsdp2")),
    ],
    ("deepspeed", 2): [
        *BF16_RUNS,
        "zero2_bf16/adamw/local_norms",
        "zero2_bf16/lion/local_norms",
        *(f"{engine}/{run}" for engine in ZERO for run in ("adamw/local_norms", "adamw_1d/metrics")),
    ],
    ("ways", 2): RESUMED,
}
CASES = [
    pytest.param(kind, world, engine, case, id=f"{engine}-{world}-{case}", marks=marks)
    for runs, marks in ((REGULAR, []), (SOAK, [pytest.mark.soak]))
    for (kind, world), engines in runs.items()
    for engine, cases in engines.items()
    for case in cases.split()
]


def further(flag: str) -> list[tuple[str, str]]:
    """Return the kinds and the other runs on two processes with a flag."""
    return [(kind, run) for (kind, world), runs in FURTHER.items() for run in runs if world == 2 and flag in run]


def plain(case: str) -> str:
    """Return the reference case: clipped before the step, by the rules without kernels."""
    return case.removesuffix("_kernels").removesuffix("_folded")


def specs(kind: str, world: int, soak: bool) -> list[str]:
    """Return all runs of one launch: the regular ones, or those of the soak."""
    runs = SOAK if soak else REGULAR
    further = [] if soak else FURTHER.get((kind, world), [])
    if (kind, world) == ("torch", 1):
        cases = {plain(case) for engines in runs.values() for cases in engines.values() for case in cases.split()}
        zeros = sorted(f"single_zeros/{case}" for case in cases if case.endswith("skipping"))
        return [*sorted(f"single/{case}" for case in cases), *zeros, *further]
    return [
        f"{engine}/{case}" for engine, cases in runs.get((kind, world), {}).items() for case in cases.split()
    ] + further


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], Run]:
    """Return the results of a run; the first request trains its whole group."""
    launches = Launches(train.run, tmp_path_factory)

    def get(kind: str, world: int, run: str) -> Run:
        soak = run not in specs(kind, world, soak=False)
        return launches.get(f"{kind}{world}{soak}", specs(kind, world, soak), world, run)

    return get


def apart(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to its largest element."""
    assert found.keys() == expected.keys()
    tiny = torch.finfo(torch.float32).tiny  # some are all zeros
    return {name: ((found[name] - x).abs().max() / x.abs().max().clamp(tiny)).item() for name, x in expected.items()}


def share_that_agrees(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the fraction of elements within the bar of their tensor, without the key biases, which are noise."""
    assert found.keys() == expected.keys()
    agree = []
    for name, x in expected.items():
        close = (found[name] - x).abs() <= BAR * x.abs().max()
        if name.endswith("attn.c_attn.bias"):
            third = len(x) // 3
            close = torch.cat([close[:third], close[2 * third :]])
        agree.append(close.flatten())
    return torch.cat(agree).float().mean().item()


def bar_of(case: str) -> float:
    """Return the largest difference that rounding explains."""
    if case not in MATRIX_CASES:
        return BAR
    return BF16_MATRIX_BAR if case.endswith("_bf16") else MATRIX_BAR


def check_same(expected: Run, found: Run, kind: str, case: str, parts: tuple[str, str] = ("", "")) -> None:
    """Compare the weights or states of two runs, or of their parts."""
    pair = [run.named(f"{part}{kind}") for run, part in zip((expected, found), parts, strict=True)]
    if "_8bit" in case:
        check_same_in_8_bits(kind, case, *pair)
    elif case.startswith("lion") and kind == "weight":
        # sign() turns the rounding noise of an almost zero gradient into a step.
        assert share_that_agrees(*pair) >= 0.995
    else:
        differences = apart(*pair)
        largest = sorted(differences.items(), key=lambda item: item[1])[-3:]
        assert differences and largest[-1][1] <= bar_of(case), largest


def check_same_in_8_bits(kind: str, case: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Compare weights or states of runs whose blocks may lie elsewhere: a number may have another code next to it."""
    bar = TWO_CODES
    if kind == "weight":
        bar = 0.1 if case.startswith("lion") else 0.02
    assert max(apart(expected, found).values()) <= bar


def check_noticed(expected: Run, wrong: Run, case: str) -> None:
    """Check that weights differ by far more than the bars allow."""
    pair = expected.named("weight"), wrong.named("weight")
    if case.startswith("lion"):
        assert share_that_agrees(*pair) < 0.9
    else:
        assert max(apart(*pair).values()) > 20 * bar_of(case)


def check_metrics(expected: Run, found: Run) -> None:
    one, other = expected.notes["metrics"], found.notes["metrics"]
    assert len(one) == len(other) == STEPS
    for metrics, others in zip(one, other, strict=True):
        assert others == pytest.approx(metrics, rel=1e-4)
    assert len({metrics["mars/clip_fraction"] for metrics in one}) > 2  # not all the same number


def reference(trained: Callable[..., Run], kind: str, case: str) -> Run:
    """Return the plain case on one process. Under ZeRO a parameter without gradient has zeros."""
    zeros = kind == "deepspeed" and case.endswith("skipping")
    return trained("torch", 1, f"{'single_zeros' if zeros else 'single'}/{plain(case)}")


@pytest.mark.parametrize(("kind", "world", "engine", "case"), CASES)
def test_parity_with_one_process(trained, kind, world, engine, case):
    expected, found = reference(trained, kind, case), trained(kind, world, f"{engine}/{case}")
    check_same(expected, found, "weight", case)
    if not engine.startswith(("factory", "optim", "own", "trainer")):  # whose states are DeepSpeed's, or wrapped
        for key in ("exp_avg",) if case == "m_unclipped" else ("exp_avg", "last_grad"):  # recursive: no last gradient
            check_same(expected, found, key, case)
    if case.startswith(("adamw_8bit", "lion_8bit")) and engine in ("ddp", "fsdp2"):
        for key in ("weight", "exp_avg", "last_grad"):
            assert share_that_agrees(expected.named(key), found.named(key)) >= SAME_BLOCKS_SHARE
    if SETTINGS[case].folded:  # the step takes the global norm of clip_grad_norm_
        norms = expected.notes["total_norms"]
        assert min(norms) < MAX_GRAD_NORM < max(norms)
        assert found.notes["total_norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("run", RESUMED)
def test_resumed_loops_with_accelerate(trained, run):
    case = run.split("/")[1]
    for key in ("weight", "exp_avg", "last_grad"):
        check_same(trained("torch", 1, f"single/{case}"), trained("ways", 2, run), key, case)


@pytest.mark.parametrize(("kind", "run"), further("local_norms"))
def test_local_norms_are_noticed(trained, kind, run):
    engine, case, _ = run.split("/")
    if engine in BF16:
        one, two = trained("deepspeed", 1, f"{engine}/{case}"), trained(kind, 2, run)
        assert farthest(one.named("exp_avg"), two.named("exp_avg")) > 2 * BF16_STATE_BAR[case]
        return
    check_noticed(reference(trained, kind, case), trained(kind, 2, run), case)


@pytest.mark.parametrize(("kind", "run"), further("metrics"))
def test_metrics_of_ranks(trained, kind, run):
    check_metrics(trained("torch", 1, "single/adamw_1d/metrics"), trained(kind, 2, run))


# --- collectives ------------------------------------------------------------------------------------------------------

# Each replica orthogonalizes its share of the matrices, and broadcasts it.
FROM_REPLICAS = {("ddp", 2): 2, ("ddp", 4): 4, ("hsdp", 4): 2}
COUNTED_MATRICES = MATRIX_CASES - {"m_8bit"}  # of a wider model
COUNTED = [param for param in CASES if param.values[0] in ("torch", "deepspeed")]


@pytest.mark.parametrize(("kind", "world", "engine", "case"), [p for p in COUNTED if p.values[3] in COUNTED_MATRICES])
def test_collectives_of_matrices(trained, kind, world, engine, case):
    """A step sends shards to the owners and back, then to the replicas, after one all-reduce of norms and flags.

    The state of rows travels in the same messages.
    """
    run = trained(kind, world, f"{engine}/{case}")
    calls = run.notes["calls"]
    reduced = 2 if engine == "hsdp" else 1  # among the ranks of a copy, and among copies
    moved = (0 if engine == "ddp" else 2) + FROM_REPLICAS.get((engine, world), 0)
    for call in calls[len(calls) // STEPS :]:  # in the first one ranks tell each other what they hold
        assert len(call["collectives"]) == reduced * call["mars_rule"] + moved * call["matrices"]
    # The first rank does about its share; the model has too few matrices for an exact split.
    assert 0.4 / world < _orthogonalized(run) / _orthogonalized(reference(trained, kind, case)) < 1.6 / world


def _orthogonalized(run: Run) -> int:
    """Return the number of matrix elements that one rank orthogonalizes in the run."""
    return sum(call["orthogonalized"] for call in run.notes["calls"])


@pytest.mark.parametrize(("kind", "world", "engine", "case"), [p for p in COUNTED if p.values[3] not in MATRIX_CASES])
def test_one_all_reduce_a_step(trained, kind, world, engine, case):
    """There is none if no norm is needed; copies have one in their first step, which compares settings."""
    notes = trained(kind, world, f"{engine}/{case}").notes
    calls = notes["calls"]
    assert len(calls) >= STEPS and any(call["mars_rule"] for call in calls)
    without = engine.startswith("ddp") or case == "adamw_unclipped"
    for index, call in enumerate(calls):
        compares = engine.startswith("ddp") and world > 1 and index == 0
        if (without and not compares) or not call["mars_rule"]:
            assert call["collectives"] == []
            continue
        numel, *others = call["collectives"]
        assert others == ([numel] if engine == "hsdp" else [])  # so that an error stops all copies
        assert numel == SETTINGS[case].numel_of_sums(notes["params"])


# --- bf16, and DeepSpeed's Muon ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", MUON)
def test_reports_on_deepspeeds_muon(trained, run):
    """See docs/muon.md: each step orthogonalizes every matrix once, and groups keep their settings."""
    if "bf16" in run and parse(version("deepspeed")) < parse("0.19"):
        pytest.skip("DeepSpeed 0.18 divides bf16 gradients by a scale that no loss had")
    one, found = trained("torch", 1, f"single/{run.partition('/')[2]}"), trained("deepspeed", 1, run)
    weights = one.named("weight"), found.named("weight")
    differences = apart(*weights)
    if "bf16" in run:  # whose gradients have 8 bits: Adam's steps of weights that start at 0 have any sign
        assert together(*weights) <= BF16_MATRIX_BAR
        differences = {name: value for name, value in differences.items() if name.endswith(MATRICES)}
    assert max(differences.values()) <= MUON[run], differences
    made_by_zeros = found.notes["calls"][0]["orthogonalized"] if "bf16" in run else 0  # DeepSpeed's way to make states
    assert _orthogonalized(found) - made_by_zeros == _orthogonalized(one) > 0
    assert found.notes["groups"] == one.notes["groups"]
    assert {group["initial_lr"] for group in found.notes["groups"]} == ({4e-3, 1e-3} if "groups" in run else {3e-3})


@pytest.mark.parametrize("case", BF16_STATE_BAR)
@pytest.mark.parametrize("engine", BF16)
def test_bf16_parity(trained, engine, case):
    one, two = trained("deepspeed", 1, f"{engine}/{case}"), trained("deepspeed", 2, f"{engine}/{case}")
    for key in ("exp_avg", "last_grad"):
        assert farthest(one.named(key), two.named(key)) <= BF16_STATE_BAR[case]
    assert together(one.named("weight"), two.named("weight")) <= BF16_WEIGHT_BAR
    if case == "lion":
        # One sign flipped by rounding moves a weight by two steps: 94% end within half a step of each other.
        half_a_step = SETTINGS["lion"].hyperparameters()["lr"] / 2
        weights = two.named("weight")
        moved = torch.cat([(weights[name] - x).abs().flatten() for name, x in one.named("weight").items()])
        assert (moved <= half_a_step).float().mean() >= 0.9


def farthest(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the largest norm of a tensor's difference, relative to the tensor's norm."""
    return max(together({name: x}, {name: found[name]}) for name, x in expected.items())


def together(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the norm of all tensors' differences, relative to their norm."""
    difference = sum((found[name] - x).square().sum().item() for name, x in expected.items())
    return (difference / sum(x.square().sum().item() for x in expected.values())) ** 0.5
