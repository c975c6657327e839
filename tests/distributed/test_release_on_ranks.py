"""`release_gradients` on several ranks: FSDP2 gives the weights of one process, and DDP is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import Launches, from_all_ranks, leave
from torch.nn.parallel import DistributedDataParallel
from train import shard
from workload import CASES, Tokens, build_model

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def train(spec: str, file: Path) -> None:
    """Do one run, ENGINE/CASE: alone in ordinary steps, else with released gradients."""
    engine, name = spec.split("/")
    case, tokens = CASES[name], Tokens()
    model: Any = build_model(case)
    if engine == "fsdp2":
        shard(model, (2,))
    mars = case.create(model, release_gradients=engine != "alone")
    rank, world = (0, 1) if engine == "alone" else (dist.get_rank(), dist.get_world_size())
    wrapped, error = DistributedDataParallel(model) if engine == "ddp" else model, ""
    try:
        for step in range(3):
            ids = tokens.micro_batch(step, 0, rank, world)
            wrapped(ids, labels=ids)["loss"].backward()
            assert engine == "alone" or all(param.grad is None for param in model.parameters())
            mars.step()
            mars.zero_grad()
    except RuntimeError as raised:
        error = str(raised)
    whole = {name: p.full_tensor() if engine == "fsdp2" else p for name, p in model.state_dict().items()}
    leave(file, from_all_ranks(error), whole)


CASE_NAMES = ("adamw", "lion", "m", "shampoo")
RUNS = {1: [f"alone/{name}" for name in CASE_NAMES], 2: [*(f"fsdp2/{name}" for name in CASE_NAMES), "ddp/adamw"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    launches = Launches(train, tmp_path_factory)
    return lambda world, run: launches.get(str(world), RUNS[world], world, run)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_release_gradients_fsdp2(trained, name):
    expected, found = trained(1, f"alone/{name}"), trained(2, f"fsdp2/{name}")
    assert found.notes == ["", ""]
    torch.testing.assert_close(found.tensors, expected.tensors, rtol=1e-5, atol=1e-5)


def test_release_gradients_ddp(trained):
    for error in trained(2, "ddp/adamw").notes:
        assert "DistributedDataParallel averages gradients later" in error
