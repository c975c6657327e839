"""A resumed run equals an uninterrupted one, under every engine and with more or fewer processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from launching import Launches, Run
from test_parity import BAR, apart, bar_of, share_that_agrees, worst
from torch import Tensor
from workload import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SAME_BAR = 1e-6  # relative to the largest element of the tensor; 0 was measured
BF16 = ("zero2_bf16/adamw_1d", "zero1_bf16_fp32accum/adamw", "zero2_bf16/m")
RESUMED = (
    *("ddp/lion_1d", "fsdp2/adamw", "fsdp2/lion", "trainer_ddp/adamw"),
    *("zero1/adamw_1d", "zero1/lion_1d_frozen", "zero2/adamw", "zero2/lion", "zero2_offload/adamw"),
    *("zero3/adamw", "zero3/lion_1d", *BF16, "trainer_zero2/adamw"),
    *("ddp/shampoo", "fsdp2/m", "zero1/m", "zero2/shampoo", "zero3/m", "zero2/m_unclipped"),
)
# Checkpoints of two processes, resumed by four and by one.
TAKEN_UP = {
    4: (
        *("fsdp2/adamw/from:fsdp2", "fsdp2/lion/from:fsdp2", "zero1/adamw_1d/from:zero1"),
        *("zero1/lion_1d_frozen/from:zero1", "zero2/adamw/from:zero2", "zero3/adamw/from:zero3"),
        *("zero3/lion_1d/from:zero3", "zero3/adamw/from:zero2", "zero2_bf16/adamw_1d/from:zero2_bf16"),
        *("fsdp2/m/from:fsdp2", "zero2/m/from:zero1", "zero3/m/from:zero3"),
    ),
    1: (
        *("fsdp2/adamw/from:fsdp2", "zero1/adamw_1d/from:zero1", "zero2/adamw/from:zero2", "zero2/lion/from:zero2"),
        *("zero3/adamw/from:zero3", "zero2/adamw/from:zero3", "trainer_zero2/adamw/from:trainer_zero2"),
        *("single/adamw/from:zero2", "single/lion_1d/from:zero3"),
        *("fsdp2/m/from:fsdp2", "zero2/shampoo/from:zero2", "single/m/from:zero3", "zero2/m_unclipped/from:zero2"),
        "zero1_bf16_fp32accum/adamw/from:zero1_bf16_fp32accum",
    ),
}
LOST = ("zero2/adamw/stock", "zero3/adamw/stock", "zero3/adamw/unextended")
REFERENCES = tuple(
    f"single/{case}"
    for case in ("adamw", "adamw_1d", "lion", "lion_1d", "lion_1d_frozen", "shampoo", "m", "m_unclipped")
)
SPECS = {
    2: (*RESUMED, "fsdp2/adamw/forgetful"),
    4: TAKEN_UP[4],
    1: (*REFERENCES, *TAKEN_UP[1], *LOST),
}
BY_HAND = [pytest.param(2, run, id=f"2-{run}") for run in RESUMED if not run.startswith("trainer")]
CHANGES = [pytest.param(world, run, id=f"{world}-{run}") for world, runs in TAKEN_UP.items() for run in runs]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Run]:
    """Return the results of a run; the first request trains all runs with as many processes."""
    launches = Launches("resume.py", tmp_path_factory)

    def get(world: int, run: str) -> Run:
        if world != 2:
            launches.get("2", SPECS[2], 2, "ddp/lion_1d")  # writes the checkpoints that the others resume
        return launches.get(str(world), SPECS[world], world, run)

    return get


def without_counters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """DeepSpeed has one step counter per partition, and the number of partitions is free."""
    return {name: x for name, x in tensors.items() if not name.startswith("step.")}


@pytest.mark.parametrize("run", RESUMED)
def test_a_stop_changes_nothing(trained, run):
    result = trained(2, run)
    expected, found = result.named("whole"), result.named("resumed")
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=SAME_BAR * x.abs().max().item(), msg=name)


def test_a_lost_last_gradient_is_noticed(trained):
    result = trained(2, "fsdp2/adamw/forgetful")
    assert max(apart(result.named("whole.weight"), result.named("resumed.weight")).values()) > 20 * BAR


# Trainer trains right after loading.
@pytest.mark.parametrize(("world", "run"), BY_HAND + [change for change in CHANGES if "trainer" not in change.id])
def test_what_is_loaded_is_what_was_saved(trained, world, run):
    _, case, *origin = run.split("/")
    result = trained(world, run)
    source = trained(2, f"{origin[0].removeprefix('from:')}/{case}") if origin else result
    saved, loaded = without_counters(source.named("saved")), without_counters(result.named("loaded"))
    assert loaded.keys() == saved.keys()
    states = [x for name, x in saved.items() if name.startswith("exp_avg." if case == "m_unclipped" else "last_grad.")]
    assert len(states) >= 10 and all(x.any() for x in states)  # as many matrices
    assert [name for name, x in saved.items() if not torch.equal(loaded[name], x)] == []
    assert result.notes["loaded_groups"] == source.notes["saved_groups"]
    roles = [group["role"] for group in result.notes["loaded_groups"]]
    assert {"matrix", "vector"} <= set(roles)  # otherwise the line above could not tell groups apart


@pytest.mark.parametrize(("world", "run"), [change for change in CHANGES if "bf16" not in change.id])
def test_other_processes_go_on_as_one_would_have(trained, world, run):
    engine, case, _ = run.split("/")
    expected, found = trained(1, f"single/{case}"), trained(world, run)
    for kind in ("weight",) if engine.startswith("trainer") else ("weight", "exp_avg", "last_grad"):
        pair = expected.named(f"whole.{kind}"), found.named(f"resumed.{kind}")
        if case == "m_unclipped" and kind == "last_grad":
            assert pair == ({}, {})
            continue
        if case.startswith("lion") and kind == "weight":
            assert share_that_agrees(*pair) >= 0.995
        else:
            differences = apart(*pair)
            assert max(differences.values()) <= bar_of(case), worst(differences)
    counters = found.named("resumed.step").values()
    assert {value.item() for value in counters} <= {STEPS}


@pytest.mark.parametrize("run", LOST)
def test_a_universal_checkpoint_without_last_gradients_is_refused(trained, run):
    error = trained(1, run).notes["error"]
    assert error.startswith("RuntimeError" if run.endswith("unextended") else "ValueError")
    assert "python -m mars_hf to_universal" in error
