"""`release_gradients` on several ranks: FSDP2 gives the weights of one process, and DDP is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import Launches, from_all_ranks, leave
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workload import CASES, Tokens, build_model

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

STEPS = 3


def train(spec: str, file: Path) -> None:
    """Do one run, ENGINE/CASE; `before` shards the model before `create`, `after` as accelerate does."""
    engine, name = spec.split("/")
    case, tokens = CASES[name], Tokens()
    model: Any = build_model(case)
    alone = engine == "alone"
    if engine == "fsdp2":
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    mars = case.create(model, release_gradients=not alone)
    wrapped, error, left = model, "", 0
    if engine == "ddp":
        wrapped = DistributedDataParallel(model)
    try:
        for step in range(STEPS):
            rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
            ids = tokens.micro_batch(step, 0, rank, world)
            wrapped(ids, labels=ids)["loss"].backward()
            left += sum(param.grad is not None for param in model.parameters())
            mars.step()
            mars.zero_grad()
    except RuntimeError as raised:
        error = str(raised)
    weights = {name: p.full_tensor() if engine == "fsdp2" else p for name, p in model.named_parameters()}
    notes = {"errors": from_all_ranks(error), "left": from_all_ranks(left)}
    leave(file, notes, {name: weight.detach() for name, weight in weights.items()})


CASE_NAMES = ("adamw", "lion", "m", "shampoo")
RUNS = {1: [f"alone/{name}" for name in CASE_NAMES], 2: [*(f"fsdp2/{name}" for name in CASE_NAMES), "ddp/adamw"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    launches = Launches(train, tmp_path_factory)
    return lambda world, run: launches.get(str(world), RUNS[world], world, run)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_fsdp2(trained, name):
    expected, found = trained(1, f"alone/{name}"), trained(2, f"fsdp2/{name}")
    assert found.notes == {"errors": ["", ""], "left": [0, 0]}
    torch.testing.assert_close(found.tensors, expected.tensors, rtol=1e-5, atol=1e-5)


def test_ddp(trained):
    errors = trained(2, "ddp/adamw").notes["errors"]
    assert all("DistributedDataParallel averages gradients later" in error for error in errors)
