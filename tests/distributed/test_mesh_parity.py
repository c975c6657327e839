"""Tensor parallelism, alone and under FSDP2, gives the weights and states of one process in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launching import Launches, Run
from mesh import HIDDEN, WIDTH
from test_parity import MATRIX_CASES, apart, bar_of, share_that_agrees, worst
from workload import CASES as SETTINGS
from workload import CLIP_THRESHOLD, MAX_GRAD_NORM, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# Number of processes, engine, cases.
RUNS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"tp": ("adamw", "lion_1d/partial", "adamw_1d_folded", "m", "adamw/tied", "adamw/llama", "m/llama")},
    4: {
        "fsdp2_tp": ("adamw", "lion", "adamw_1d_folded", "shampoo", "m/exact", "m_folded/resumed"),
        "hsdp_tp": ("m_folded",),
        "tp": ("adamw_1d", "m"),
    },
}
# `pytest -m soak` runs these.
SOAK: dict[int, dict[str, tuple[str, ...]]] = {
    4: {
        "fsdp2_tp": ("adamw/exact", "adamw/tied", "adamw_1d_folded/resumed", "lion_1d_folded", "m", "m_bf16"),
        "hsdp_tp": ("adamw_1d", "shampoo"),
    },
    8: {"fsdp2_tp": ("adamw_1d", "m"), "hsdp_tp": ("adamw_1d_folded", "lion_1d", "shampoo", "m/exact")},
}
CONTROLS = {
    2: ("tp/adamw/local_norms", "tp/m/local_norms"),
    4: ("fsdp2_tp/adamw/local_norms", "fsdp2_tp/lion/local_norms"),
}
METRICS = {2: ("tp/adamw_1d/metrics",), 4: ("fsdp2_tp/adamw_1d/metrics",)}
CASES = [
    pytest.param(world, engine, case, id=f"{engine}-{world}-{case}", marks=marks)
    for runs, marks in ((RUNS, []), (SOAK, [pytest.mark.soak]))
    for world, engines in runs.items()
    for engine, cases in engines.items()
    for case in cases
]


def plain(case: str) -> str:
    """Return the case of one process: clipped before the step, without a stop, with whole gradients."""
    return case.replace("_folded", "").removesuffix("/resumed").removesuffix("/partial")


def specs(world: int, soak: bool) -> list[str]:
    """Return the runs of one launch."""
    if world == 1:
        return [*sorted({f"single/{plain(param.values[2])}" for param in CASES}), "single/adamw_1d/metrics"]
    runs = [f"{engine}/{case}" for engine, cases in (SOAK if soak else RUNS)[world].items() for case in cases]
    return runs if soak else [*runs, *CONTROLS[world], *METRICS[world]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Run]:
    """Return the results of a run; the first request trains all runs of its launch."""
    launches = Launches("mesh.py", tmp_path_factory)

    def get(world: int, run: str) -> Run:
        soak = world > 1 and (world not in RUNS or run not in specs(world, soak=False))
        return launches.get(f"{world}{soak}", specs(world, soak), world, run)

    return get


def settings_of(case: str) -> str:
    return case.partition("/")[0]


@pytest.mark.parametrize(("world", "engine", "case"), CASES)
def test_weights_are_those_of_one_process(trained, world, engine, case):
    expected, found = trained(1, f"single/{plain(case)}"), trained(world, f"{engine}/{case}")
    weights = expected.named("weight"), found.named("weight")
    if case.startswith("lion"):
        # sign() turns the rounding noise of an almost zero gradient into a step.
        assert share_that_agrees(*weights) >= 0.995
    else:
        differences = apart(*weights)
        assert max(differences.values()) <= bar_of(settings_of(case)), worst(differences)


@pytest.mark.parametrize(("world", "engine", "case"), CASES)
def test_states_are_those_of_one_process(trained, world, engine, case):
    expected, found = trained(1, f"single/{plain(case)}"), trained(world, f"{engine}/{case}")
    for key in ("exp_avg",) if case.endswith("/exact") else ("exp_avg", "last_grad"):
        differences = apart(expected.named(key), found.named(key))
        assert differences and max(differences.values()) <= bar_of(settings_of(case)), worst(differences)


def test_the_clip_works_on_some_parameters_and_not_on_others(trained):
    """Otherwise parity would say nothing about norms."""
    for case in ("adamw", "lion"):
        steps = trained(1, f"single/{case}").notes["corrected_norms"]
        clipped = [{name for name, norm in norms.items() if norm > CLIP_THRESHOLD} for norms in steps]
        assert len(steps) == STEPS and all(0 < len(names) < len(steps[0]) for names in clipped)
        assert set.union(*clipped) - set.intersection(*clipped)  # some cross the threshold


def test_parameters_are_placed_in_all_ways(trained):
    """As torch names them; ranks hold uneven and empty parts."""
    alone = trained(2, "tp/adamw").notes
    assert set(alone["placements"].values()) == {
        "None",
        *("(Shard(dim=0),)", "(Shard(dim=1),)", "(Replicate(),)"),
    }
    both = trained(4, "fsdp2_tp/adamw").notes
    assert set(both["placements"].values()) == {
        "(Shard(dim=0),)",
        *("(_StridedShard(dim=0, sf=2), Shard(dim=0))", "(Shard(dim=0), Shard(dim=1))", "(Shard(dim=0), Replicate())"),
    }
    assert both["empty"] > 0


@pytest.mark.parametrize(("world", "run"), [(world, run) for world, runs in CONTROLS.items() for run in runs])
def test_a_norm_over_the_local_piece_is_noticed(trained, world, run):
    case = run.split("/")[1]
    weights = trained(1, f"single/{case}").named("weight"), trained(world, run).named("weight")
    if case == "lion":
        assert share_that_agrees(*weights) < 0.9
    else:
        assert max(apart(*weights).values()) > 20 * bar_of(case)


@pytest.mark.parametrize(("world", "engine", "case"), [p for p in CASES if "_folded" in p.values[2]])
def test_the_step_takes_the_global_norm_of_all_gradients(trained, world, engine, case):
    expected = trained(1, f"single/{plain(case)}").notes["total_norms"]
    assert min(expected) < MAX_GRAD_NORM < max(expected)
    assert trained(world, f"{engine}/{case}").notes["total_norms"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("world", "run"), [(world, run) for world, runs in METRICS.items() for run in runs])
def test_metrics_are_those_of_one_process(trained, world, run):
    expected = trained(1, "single/adamw_1d/metrics").notes["metrics"]
    found = trained(world, run).notes["metrics"]
    assert len(found) == STEPS
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4)
    assert len({metrics["mars/clip_fraction"] for metrics in expected}) > 2  # not all the same number


@pytest.mark.parametrize(
    ("world", "engine", "case"), [p for p in CASES if settings_of(p.values[2]) not in MATRIX_CASES]
)
def test_norms_take_one_all_reduce_for_each_set_of_ranks(trained, world, engine, case):
    """Under FSDP2, what tensor parallelism divides is shared with other ranks than what it leaves out or repeats.

    Of a mesh (dp, tp): all ranks share what both divide, those of dp what tensor parallelism leaves out. The biases
    that it repeats, which have a norm if vectors have one, are the same along tp, whose ranks exchange flags. Of a mesh
    (replicate, dp, tp): the ranks of (dp, tp), those of dp unless they are one, and those of replicate.
    """
    notes = trained(world, f"{engine}/{case}").notes
    rows = 3 if SETTINGS[settings_of(case)].folded else 1
    for call in notes["calls"]:
        found = call["collectives"]
        if case.endswith("/partial"):  # partial sums are reduced first
            assert len(found) > 1
            found = found[-1:]
        vectors = "_1d" in case or "_folded" in case
        assert len(found) == {"tp": 1, "fsdp2_tp": 2 + vectors, "hsdp_tp": 2 + (world > 4)}[engine]
        assert set(found) == {(rows + 1) * (notes["params"] + 1)}


@pytest.mark.parametrize(("world", "engine", "case"), [p for p in CASES if settings_of(p.values[2]) in MATRIX_CASES])
def test_each_matrix_is_orthogonalized_by_one_rank(trained, world, engine, case):
    """But for `mix`, which no plan divides: tensor parallelism repeats it, and nothing tells its ranks."""
    calls = trained(world, f"{engine}/{case}").notes["calls"]
    whole = trained(1, f"single/{plain(case)}").notes["calls"]
    mix, largest = WIDTH * WIDTH, WIDTH * HIDDEN
    for one, other in zip(whole[-len(calls) :], calls, strict=True):
        assert other["orthogonalized"] <= (one["orthogonalized"] - mix) / world + largest + mix
