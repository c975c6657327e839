"""What one rank has wrong stops all ranks with the same words: none waits for one that has stopped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_ranks_in_threads import run_ranks, set_gradient, sharded, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import mars_hf
from mars_hf import Mars
from mars_hf.distributed import exchange
from mars_hf.distributed.tensors import local
from mars_hf.step import ranks, update

INDICES = (0, 2, 6)
MANY = INDICES * 4  # several for each rank
MESHES = {"sharded": ((4,), [Shard(0)]), "hybrid": ((2, 2), [Replicate(), Shard(0)]), "copies": ((4,), [Replicate()])}


def make(kind: str, indices: Sequence[int] = INDICES, **settings: Any) -> Mars:
    """Return the optimizer of one rank, with two groups of matrices and one of vectors."""
    wholes = [*map(whole, indices), torch.ones(12)]
    params, process_group = [nn.Parameter(tensor) for tensor in wholes], dist.group.WORLD
    if kind != "process group":
        shape, placements = MESHES[kind]
        mesh, process_group = init_device_mesh("cpu", shape), None
        params = [sharded(tensor, mesh, placements) for tensor in wholes]
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    return Mars(groups, **{"mars_type": "mars-m", "ns_dtype": "float32", **settings}, process_group=process_group)


def params_of(mars: Mars) -> list[Any]:
    return [param for group in mars.param_groups for param in group["params"]]


def step(mars: Mars) -> None:
    for index, param in enumerate(params_of(mars)):
        set_gradient(param, 0.01 * torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    mars.step()


def outcome(act: Callable[[], Any]) -> str:
    """Return the text of an error, '' for none."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


def failing_on(function: Callable[..., Any], rank: int, at: int, error: Exception) -> Callable[..., Any]:
    """Return a function that raises in one of its calls on one rank."""
    calls = itertools.count()

    def called(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank and next(calls) == at:
            raise error
        return function(*args, **kwargs)

    return called


# --- before a step changes anything ---------------------------------------------------------------------------------

EDITS: dict[str, tuple[Callable[[Mars], Any], str]] = {
    "rule": (lambda mars: mars.param_groups[1].update(mars_type="mars-x"), "rank 1: mars_type='mars-x' is not valid"),
    "norm in one group": (lambda mars: mars.param_groups[0].update(max_grad_norm=2.0), "in different groups"),
    "norm": (lambda mars: setattr(mars, "max_grad_norm", 2.0), "rank 0 has max_grad_norm=None, and rank 1 has 2"),
    "lr": (lambda mars: mars.param_groups[1].update(lr=2e-3), "lr of param group 1=0.003, and rank 1 has 0.002"),
    "type of lr": (lambda mars: mars.param_groups[1].update(lr="fast"), "fast"),
    "no lr": (lambda mars: mars.param_groups[1].pop("lr"), "rank 1: 'lr'"),
    "vectors": (lambda mars: mars.param_groups[2].update(betas=(0.8, 0.9)), "betas of param group 2=(0.9, 0.95)"),
    "gamma": (lambda mars: mars.param_groups[0].update(gamma=0.05), "gamma of param group 0=0.025, and rank 1 has"),
    "other rule": (
        lambda mars: mars.param_groups[0].update(mars_type="mars-lion"),
        "mars_type of param group 0=",
    ),
    "clipping": (lambda mars: mars.param_groups[0].update(clip_threshold=None), "clip_threshold of param group 0=1"),
    "order": (lambda mars: mars.param_groups[1]["params"].reverse(), "the shapes in param group 1=("),
    "peak": (lambda mars: mars.param_groups[0].update(initial_lr=1.0, weight_decay_mode="decoupled"), "of param group"),
}


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", [*MESHES, "process group"])
def test_edits_of_one_rank(kind, edit, first):
    """All ranks stop before anything has changed, and go on once the edit is undone."""
    act, message = EDITS[edit]
    if kind == "process group" and edit == "order":
        pytest.skip("copies of other shapes cannot be told apart by ranks that share nothing")

    def run(rank: int) -> tuple[str, str]:
        mars = make(kind, **({"weight_decay_mode": "decoupled"} if edit == "peak" else {}))
        if not first:
            step(mars)
        kept = [dict(group, params=list(group["params"])) for group in mars.param_groups]
        before = [local(param.detach()).clone() for param in params_of(mars)]
        if rank == 1:
            act(mars)
        found = outcome(lambda: step(mars))
        for group, saved in zip(mars.param_groups, kept, strict=True):
            group.clear()
            group.update(saved)
        for param, value in zip(params_of(mars), before, strict=True):
            assert torch.equal(local(param.detach()), value)
        return found, outcome(lambda: step(mars))

    results = run_ranks(4, run)
    assert all(result == results[0] for result in results), results
    assert message in results[0][0] and results[0][1] == ""


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
@pytest.mark.parametrize("kind", ["sharded", "hybrid"])
@pytest.mark.parametrize("edit", ["rule", "norm in one group", "norm", "lr", "gamma", "vectors", "other rule"])
def test_edits_under_elementwise_rules(kind, edit, mars_type):
    act = EDITS[edit][0]

    def run(rank: int) -> str:
        mars = make(kind, mars_type=mars_type)
        if rank == 1:
            act(mars)
            if edit == "other rule":
                mars.param_groups[0]["mars_type"] = "mars-m"
        return outcome(lambda: step(mars))

    results = run_ranks(4, run)
    assert results[0] and all(result == results[0] for result in results), results


def test_copies_compare_settings_in_their_first_step():
    """Elementwise rules under DistributedDataParallel have no all-reduce after it."""

    def run(rank: int) -> list[str]:
        mars = make("process group", mars_type="mars-adamw", lr=1e-3 * (1 + (rank == 1)))
        found = [outcome(lambda: step(mars))]
        for group in mars.param_groups:
            group["lr"] = 1e-3
        return found + [outcome(lambda: step(mars)) for _ in range(2)]

    for first, *others in run_ranks(2, run):
        assert "rank 0 has lr of param group 0=0.001, and rank 1 has 0.002" in first
        assert others == ["", ""]


def test_edit_of_one_rank_after_a_state_is_loaded():
    """torch has made new groups then, which ranks have agreed on all the same."""

    def run(rank: int) -> str:
        mars = make("sharded")
        step(mars)
        mars.load_state_dict(mars.state_dict())
        if rank == 1:
            mars.param_groups[0]["mars_type"] = "mars-x"
        return outcome(lambda: step(mars))

    results = run_ranks(4, run)
    assert results == [results[0]] * 4 and "rank 1: mars_type='mars-x' is not valid" in results[0]


def test_settings_that_may_differ():
    """Choice of kernels, the last digits of a rate, the types that hold a value, and labels."""

    def run(rank: int) -> str:
        mars = make("sharded")
        if rank == 1:
            first, second, third = mars.param_groups
            first.update(fused=False, lr=3e-3 * (1 + 1e-15), betas=list(first["betas"]), name="first")
            second.update(lr=torch.tensor(3e-3, dtype=torch.float64), ns_dtype=torch.float32)
            third.update(initial_lr=1.0)
        return outcome(lambda: step(mars))

    assert run_ranks(4, run) == [""] * 4


def test_settings_that_all_ranks_change():
    """Schedules, rules and norms may change between steps, also those that decide what ranks add up."""

    def run(rank: int) -> list[str]:
        mars, found = make("hybrid", clip_threshold=None, mars_type="mars-lion"), []
        for change in (
            lambda: None,
            lambda: setattr(mars, "max_grad_norm", 1.0),
            lambda: setattr(mars, "max_grad_norm", None),
            lambda: [group.update(lr=1e-4, betas=(0.8, 0.9)) for group in mars.param_groups],
            lambda: mars.collect_metrics(True),
            lambda: mars.add_param_group({"params": [sharded(whole(4), init_device_mesh("cpu", (4,)), [Shard(0)])]}),
            lambda: mars.load_state_dict(mars.state_dict()),
        ):
            change()
            found.append(outcome(lambda: step(mars)))
        return found

    for found in run_ranks(4, run):
        assert found == [""] * 7


ERRORS = [MemoryError(), KeyError("x"), torch.OutOfMemoryError("CUDA out of memory")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("where", ["build_lists", "take_sums", "rows_to_reduce"])
def test_any_error_of_one_rank(where, error, monkeypatch):
    monkeypatch.setattr(mars_hf.optimizer, where, failing_on(getattr(mars_hf.optimizer, where), 1, 0, error))
    results = run_ranks(4, lambda rank: outcome(lambda: step(make("hybrid"))))
    assert results == [f"rank 1: {str(error) or 'MemoryError'}"] * 4


def test_misplaced_gradients_of_one_rank():
    """Ranks that redistribute gradients meet before that."""

    def run(rank: int) -> list[str]:
        mesh, found = init_device_mesh("cpu", (2,)), []
        param, other = sharded(whole(0), mesh, [Shard(0)]), sharded(whole(2), mesh, [Shard(0)])
        mars = Mars([param, other])
        for is_missing in (False, True):
            for each, index in ((param, 0), (other, 2)):
                each.grad = torch.distributed.tensor.DTensor.from_local(whole(index) / 2, mesh, [Partial()])
            if rank == 1 and is_missing:
                other.grad = None
            found.append(outcome(mars.step))
        return found

    one, other = run_ranks(2, run)
    assert one == other and one[0] == "" and all(one[1:])


# --- after a step has begun to change ---------------------------------------------------------------------------------


# In each function's first and second call on every mesh; rows and rounds take turns, so that each pair is there.
FAILURES = [
    (kind, where, at, [None, 0.9][(one + other + at) % 2], [INDICES, MANY][(one + other // 2) % 2])
    for one, kind in enumerate([*MESHES, "process group"])
    for other, where in enumerate(["compute_directions", "_advance_momenta", "update", "set_factors"])
    for at in (0, 1)
]


@pytest.mark.parametrize(("kind", "where", "at", "normalize_rows", "indices"), FAILURES)
def test_out_of_memory_among_exchanges(kind, normalize_rows, where, at, indices, monkeypatch):
    """The rank takes part to the end, so that nobody waits for it, and all hear of it; they cannot go on."""
    monkeypatch.setattr(exchange, "ROUND_ELEMENTS", 1)
    error = torch.OutOfMemoryError("CUDA out of memory")
    modules = {"compute_directions": ranks, "_advance_momenta": update}
    module = modules.get(where, mars_hf.optimizer)

    def run(rank: int) -> list[str]:
        mars = make(kind, indices, normalize_rows=normalize_rows)
        return [*filter(None, [outcome(lambda: step(mars)) for _ in range(3)])]

    monkeypatch.setattr(module, where, failing_on(getattr(module, where), 1, at, error))
    results = run_ranks(4, run)
    assert all(result == results[0] for result in results), results
    first, second, *_ = results[0]
    assert first.startswith("rank 1: CUDA out of memory") and "last checkpoint" in first
    assert second.startswith("rank 0: the step before stopped half-way (rank 1: CUDA out of memory")


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_error_after_the_last_exchange(mars_type, monkeypatch):
    """It is this rank's alone; if it goes on, the next step stops all."""
    if mars_type == "mars-m":
        where = "apply"
        monkeypatch.setattr(update.formulas, where, failing_on(update.formulas.apply, 1, 1, MemoryError()))
    else:
        original = mars_hf.optimizer.update
        monkeypatch.setattr(mars_hf.optimizer, "update", failing_on(original, 1, 0, MemoryError()))

    def run(rank: int) -> list[str]:
        mars, found = make("sharded", mars_type=mars_type), []
        for _ in range(2):
            try:
                step(mars)
                found.append("")
            except (RuntimeError, MemoryError) as error:
                found.append(str(error) or "MemoryError")
        return found

    results = run_ranks(4, run)
    assert [bool(first) for first, _ in results] == [False, True, False, False]
    for _, second in results:
        assert second.startswith("rank 1: the step before stopped half-way")


def test_interrupts_are_not_shared():
    """A launcher ends the others; if the loop goes on, the next step stops all."""

    def run(rank: int) -> list[str]:
        mars, found = make("sharded", mars_type="mars-adamw"), []
        try:
            step(mars)
        except KeyboardInterrupt:
            found.append("interrupted")
        return [*found, outcome(lambda: step(mars))]

    with mock.patch("mars_hf.optimizer.count_steps", failing_on(update.count_steps, 1, 0, KeyboardInterrupt())):  # type: ignore[arg-type]
        results = run_ranks(4, run)
    assert results[1][0] == "interrupted"
    assert results[0][-1] == results[1][-1] != ""


def test_a_loaded_state_ends_an_interruption():
    def run(rank: int) -> list[str]:
        mars = make("sharded")
        step(mars)
        kept = mars.state_dict()
        mars._ranks.interruption = "out of memory" if rank == 1 else None
        found = [outcome(lambda: step(mars))]
        mars.load_state_dict(kept)
        return [*found, outcome(lambda: step(mars))]

    for refused, found in run_ranks(4, run):
        assert "half-way (out of memory)" in refused and found == ""


# --- outside of a step ------------------------------------------------------------------------------------------------


def test_stale_gradient_of_one_rank():
    """What `update_previous_grad` refuses on one rank is raised by the step, where the others are."""

    def run(rank: int) -> str:
        mars = make("sharded", mars_type="mars-adamw", is_approx=False)
        step(mars)
        with mars.previous_params():
            for param in params_of(mars):
                set_gradient(param, torch.ones(param.shape))
        if rank == 1:
            with mock.patch.object(mars_hf.step.exact, "_kept_gradient", side_effect=MemoryError("no room")):
                mars.update_previous_grad()
        else:
            mars.update_previous_grad()
        mars.update_last_grad()
        return outcome(lambda: step(mars))

    assert run_ranks(4, run) == ["rank 1: no room"] * 4


def test_released_gradient_of_one_rank():
    """A hook that may not step on one rank stops the hooks of all."""

    def run(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        param = sharded(whole(0), mesh, [Shard(0)])
        mars = mars_hf.create([param], lr=1e-3, release_gradients=True)
        if rank == 1:
            mars.param_groups[0]["is_approx"] = False
        return outcome(lambda: (param * 2).sum().backward())

    results = run_ranks(2, run)
    assert results == [results[0]] * 2 and "rank 1: release_gradients=True: each parameter steps alone" in results[0]
