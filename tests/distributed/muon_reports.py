"""Train mars-m under the DeepSpeed settings that its own Muon has failed in; see test_muon_reports.py.

    torchrun --nproc_per_node 1 muon_reports.py OUTPUT RUN ...

Each run trains the workload under DeepSpeed and in plain torch, and writes OUTPUT/<run>.json: how far each weight is
from plain torch's relative to its largest element, how much of matrices each orthogonalized, and both optimizers'
groups.

Runs:

    stage0, stage0_bf16  no ZeRO, which is DeepSpeed's default
    zero3_init           the model is built under `deepspeed.zero.Init`
    zero3_groups         parameter groups of the user's own
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from train import DEEPSPEED, Watched
from worker import import_deepspeed, main
from workload import ACCUMULATION, CASES, MAX_GRAD_NORM, MICRO_BATCH, Tokens, build_model

import mars_hf

STEPS = 4
KEYS = ("role", "lr", "weight_decay")
CASE = CASES["m"]
CONFIGS: dict[str, dict[str, Any]] = {
    "stage0": {},
    "stage0_bf16": {"bf16": {"enabled": True}},
    "zero3_init": DEEPSPEED["zero3"],
    "zero3_groups": DEEPSPEED["zero3"],
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups as in many recipes: one layer decays, the rest does not and has a rate of its own."""
    named = list(model.named_parameters())
    first = [param for name, param in named if "h.0" in name]
    rest = [param for name, param in named if "h.0" not in name]
    return [{"params": first, "weight_decay": 0.2, "lr": 4e-3}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]


def make_mars(run: str, model: nn.Module) -> mars_hf.Mars:
    params = groups_of(model) if run.endswith("groups") else model
    settings = CASE.hyperparameters()
    if run.endswith("bf16"):
        # AdamW divides an element of a gradient by its size. Where bf16 does not know an element's sign (a bias of
        # -1e-4 here and 5e-4 there, beside one of 0.14), two right runs would step apart by twice the learning rate.
        settings["eps"] = 1e-2
    return mars_hf.create(params, **settings)


def plain(run: str, begins_with_zeros: bool) -> tuple[nn.Module, mars_hf.Mars, Watched]:
    """Train in plain torch; in bf16 with weights in float32 beside it.

    Args:
        run: name of the run.
        begins_with_zeros: whether DeepSpeed made states by a step with zeros as gradients, which decays weights.
    """
    model = build_model(CASE)
    mars = make_mars(run, model)
    watched = Watched(mars, set())
    working = build_model(CASE)
    if run.endswith("bf16"):
        working = working.to(torch.bfloat16)
    if begins_with_zeros:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        mars.step()
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            ids = Tokens().micro_batch(step, micro, 0, 1)
            (working(ids, ids)["loss"] / ACCUMULATION).backward()
        for master, param in zip(model.parameters(), working.parameters(), strict=True):
            master.grad = param.grad.float()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        mars.step()
        working.zero_grad()
        watched.end_step()
        working.load_state_dict(model.state_dict())
    return model, mars, watched


def under_deepspeed(run: str) -> tuple[dict[str, Tensor], mars_hf.Mars, Watched, bool]:
    """Train under DeepSpeed and return the model's weights, and whether Mars stepped before training."""
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": MAX_GRAD_NORM,
        "zero_allow_untested_optimizer": True,
        **CONFIGS[run],
    }
    initial = build_model(CASE).state_dict()
    context = contextlib.nullcontext()
    if run.endswith("init"):
        context = deepspeed.zero.Init(config_dict_or_path=config)
    with context:
        model = build_model(CASE)
    if run.endswith("init"):
        assert {param.shape for param in model.parameters()} == {torch.Size([0])}
        for name, param in model.named_parameters():  # which were drawn in other orders
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.copy_(initial[name])
    mars = make_mars(run, model)
    watched = Watched(mars, set())
    engine, *_ = deepspeed.initialize(model=model, optimizer=mars, config=config)
    has_stepped = bool(mars.state)
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            ids = Tokens().micro_batch(step, micro, 0, 1)
            engine.backward(engine(ids, ids)["loss"])
            engine.step()
        watched.end_step()
    weights = {}
    for name, param in model.named_parameters():
        whole = deepspeed.zero.GatheredParameters([param]) if hasattr(param, "ds_id") else contextlib.nullcontext()
        with whole:
            weights[name] = param.detach().float().clone()
    return weights, mars, watched, has_stepped


def run(spec: str, file: Path) -> None:
    """Do one run."""
    found, mars, watched, has_stepped = under_deepspeed(spec)
    model, twin, expected = plain(spec, has_stepped)
    apart = {
        name: ((found[name] - param).abs().max() / param.abs().max()).item() for name, param in model.named_parameters()
    }
    calls = [sum(call["orthogonalized"] for call in one.notes()["calls"]) for one in (watched, expected)]
    groups = [[{key: group[key] for key in KEYS} for group in own.param_groups] for own in (mars, twin)]
    notes = {"apart": apart, "orthogonalized": calls, "groups": groups}
    Path(f"{file}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main(run)
