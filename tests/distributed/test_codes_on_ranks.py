"""States in 8 bits on several ranks: shards that hold nothing, and checkpoints in another form.

torch.distributed.checkpoint fills the tensors of the optimizer that loads, so states in 8 bits may arrive in float32,
as codes without scales. Ranks are threads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_ranks_in_threads import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed import multi_threaded_pg

import mars_hf
from mars_hf import Mars
from mars_hf.arithmetic.eight_bits import Coded
from mars_hf.step.coded import UnfitStateError

ROWS, COLS = 64, 128  # columns of 2 ranks end with a block, those of 4 do not


class Model(nn.Module):
    """A matrix and a vector, sharded or not."""

    def __init__(self, dim: int | None, shape: tuple[int, ...] = (ROWS, COLS)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.ones(8))
        if dim is not None:
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            for name, param in list(self.named_parameters()):
                placements = [Shard(dim if name == "weight" else 0)]
                setattr(
                    self, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements, src_data_rank=None))
                )


def train(model: Model, mars: Mars, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = gradient
        mars.step()
        mars.zero_grad()


def trained(dim: int | None, state_dtype: str | None, **settings: Any) -> tuple[Model, Mars]:
    model = Model(dim, **settings)
    mars = mars_hf.create(model, lr=1e-2, state_dtype=state_dtype)
    train(model, mars, range(3))
    return model, mars


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def values(mars: Mars, param: Tensor, key: str = "exp_avg") -> Tensor:
    """Return a whole state in float32."""
    state = mars.state[param]
    if state[key].is_floating_point():
        return whole(state[key])
    return Coded(whole(state[key]), whole(state[f"{key}_scale"])).decode()


def save(model: Model, mars: Mars, folder: Path) -> None:
    dcp.save({"optimizer": dcp_state.get_optimizer_state_dict(model, mars)}, checkpoint_id=folder)


def load(model: Model, mars: Mars, folder: Path, **planner: Any) -> None:
    state = {"optimizer": dcp_state.get_optimizer_state_dict(model, mars)}
    dcp.load(state, checkpoint_id=folder, **planner)
    dcp_state.set_optimizer_state_dict(model, mars, state["optimizer"])


def full(model: Model, mars: Mars) -> dict[str, Any]:
    options = dcp_state.StateDictOptions(full_state_dict=True)
    return dcp_state.get_optimizer_state_dict(model, mars, options=options)


@pytest.mark.parametrize(
    ("shape", "fused", "settings"),
    [
        ((3, 32, 64), False, {}),
        ((3, 32, 64), True, {}),
        ((2, 4096), True, {"mars_type": "mars-lion", "clip_threshold": None}),
        ((1, 64, 64), False, {"mars_type": "mars-m"}),
    ],
    ids=str,
)
def test_ranks_that_hold_nothing(shape, settings, fused):
    """Fewer experts than ranks: some have neither codes nor scales, and all take the step of one process."""

    def run(rank: int) -> Tensor:
        model = Model(0, shape)
        mars = mars_hf.create(model, lr=1e-2, state_dtype="8bit", fused=fused, ns_dtype="float32", **settings)
        train(model, mars, range(3))
        assert mars.state[model.weight]["exp_avg"].dtype == torch.int8
        return whole(model.weight)

    (expected,) = run_ranks(1, run)
    for found in run_ranks(4, run):
        if isinstance(found, Exception):
            raise found
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


# --- checkpoints ------------------------------------------------------------------------------------------------------

# Dimension of the shards, ranks, and state_dtype, of the run that saves and of the one that loads.
CHANGES = {
    "no change": ((0, 2, "8bit"), (0, 2, "8bit")),
    "more ranks": ((0, 2, "8bit"), (0, 4, "8bit")),
    "columns with whole blocks": ((0, 2, "8bit"), (1, 2, "8bit")),
    "to float32": ((0, 2, "8bit"), (0, 2, None)),
    "to bfloat16": ((0, 2, "8bit"), (0, 2, "bfloat16")),
    "to 8 bits": ((0, 2, None), (0, 2, "8bit")),
    "columns that cut blocks": ((1, 2, "8bit"), (1, 4, "8bit")),
    "rows to such columns": ((0, 4, "8bit"), (1, 4, "8bit")),
    "columns back": ((1, 4, "8bit"), (1, 2, "8bit")),
}
AS_NUMBERS = r"^the saved state of weight .* has exp_avg of .* as if they were numbers: .*state_dtype='8bit'"
MISSING = "Missing key in checkpoint state_dict: optimizer.state.weight.exp_avg_scale"
REFUSED = {
    "to float32": AS_NUMBERS,
    "to bfloat16": AS_NUMBERS,
    "to 8 bits": MISSING,
    "columns that cut blocks": AS_NUMBERS,
    "rows to such columns": AS_NUMBERS,
    "columns back": MISSING,
}


def outcome(results: list[Any]) -> Any:
    """Return what the first rank returned, or the error of any."""
    multi_threaded_pg.ProcessLocalGroup.reset()  # after errors
    errors = [result for result in results if isinstance(result, Exception)]
    return errors[0] if errors else results[0]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["distributed checkpoint", "full state dict"])
def test_checkpoints_in_another_form(change, how, tmp_path):
    """A state arrives as it was, or nothing changes and one line says what to do."""
    (dim, ranks, before), (dim_here, ranks_here, after) = CHANGES[change]
    is_full = how == "full state dict"

    def write(rank: int) -> Any:
        model, mars = trained(dim, before)
        saved = full(model, mars) if is_full else save(model, mars, tmp_path)
        return saved, values(mars, model.weight)

    def read(rank: int) -> Any:
        model = Model(dim_here)
        mars = mars_hf.create(model, lr=1e-2, state_dtype=after)
        try:
            if is_full:
                options = dcp_state.StateDictOptions(full_state_dict=True)
                dcp_state.set_optimizer_state_dict(model, mars, saved, options=options)
            else:
                load(model, mars, tmp_path)
        except dcp.CheckpointException as error:
            raise error.failures[rank][0] from None
        loaded = values(mars, model.weight)
        train(model, mars, range(3, 4))
        assert {group["state_dtype"] for group in mars.param_groups} == {after}
        return loaded, values(mars, model.weight)

    saved, expected = outcome(run_ranks(ranks, write))
    found = outcome(run_ranks(ranks_here, read))
    if change in REFUSED and not is_full:
        assert isinstance(found, (RuntimeError, ValueError)) and re.search(REFUSED[change], str(found))
        return
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)
    _, reference = outcome(run_ranks(1, lambda rank: continued(before)))
    assert (found[1] - reference).norm() < 0.05 * reference.norm()


def continued(state_dtype: str | None) -> tuple[None, Tensor]:
    """Return nothing, and the first moment of a run that nobody stopped."""
    model, mars = trained(None, state_dtype)
    train(model, mars, range(3, 4))
    return None, values(mars, model.weight)


@pytest.mark.parametrize(("before", "after"), [("8bit", None), (None, "8bit")], ids=str)
def test_the_way_that_errors_name(before, after, tmp_path):
    """Load as it was saved, then change the groups."""

    def write(rank: int) -> Tensor:
        model, mars = trained(0, before)
        save(model, mars, tmp_path)
        return values(mars, model.weight)

    def read(rank: int) -> Any:
        model = Model(0)
        mars = mars_hf.create(model, lr=1e-2, state_dtype=before)
        load(model, mars, tmp_path)
        loaded = values(mars, model.weight)
        for group in mars.param_groups:
            group["state_dtype"] = after
        train(model, mars, range(3, 4))
        assert mars.state[model.weight]["exp_avg"].dtype == (torch.int8 if after else torch.float32)
        return loaded, values(mars, model.weight)

    expected = outcome(run_ranks(2, write))
    loaded, found = outcome(run_ranks(2, read))
    _, reference = outcome(run_ranks(1, lambda rank: continued(None)))
    assert torch.equal(loaded, expected) and (found - reference).norm() < 0.05 * reference.norm()


def test_numbers_that_a_loader_has_copied_into_codes():
    """As `broadcast_from_rank0` does: every moment is below 1, so every code is 0."""
    model, mars = trained(None, None)
    saved = mars.state_dict()
    codes = trained(None, "8bit")[1].state_dict()["state"][0]
    state = saved["state"][0]
    for key in ("exp_avg", "exp_avg_sq", "last_grad"):
        state[key] = state[key].to(codes[key].dtype) * 0
        state[f"{key}_scale"] = torch.zeros_like(codes[f"{key}_scale"])
    model = Model(None)
    mars = mars_hf.create(model, lr=1e-2, state_dtype="8bit")
    line = "^param group 0 was saved with state_dtype=None, and its states arrive in 8 bits without any value"
    with pytest.raises(UnfitStateError, match=line):
        mars.load_state_dict(saved)
    assert not mars.state
