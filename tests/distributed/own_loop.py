"""A loop of one's own with accelerate, stopped and resumed in the middle; test_own_loop.py launches it with torchrun.

Runs are `ENGINE/CASE`. `plain` is a loop without accelerate, on one process's data, to compare with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import worker
from safetensors.torch import save_file
from torch import nn
from train import Results, deepspeed_config, deepspeed_results, fresh_accelerate, plain_results, set_lr, shard
from workload import ACCUMULATION, CASES, MAX_GRAD_NORM, MICRO_BATCH, STEPS, Case, Tokens, build_model, lr_factor

HALF = STEPS // 2
WRAPPERS = {"ddp": "DistributedDataParallel", "fully_shard": "FSDPTinyGPT2", "zero2": "DeepSpeedEngine"}


def train_plain(case: Case) -> Results:
    model = build_model(case)
    mars = case.create(model)
    tokens = Tokens()
    for step in range(STEPS):
        set_lr(mars, step)
        for micro in range(ACCUMULATION):
            ids = tokens.micro_batch(step, micro, 0, 1)
            (model(ids, ids)["loss"] / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        mars.step()
        mars.zero_grad()
    return plain_results(model, mars)


class Loop:
    """The loop of a user of accelerate."""

    def __init__(self, engine: str, case: Case) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin

        if engine == "zero2":
            worker.import_deepspeed()
            config = deepspeed_config(engine, torch.distributed.get_world_size())
            self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        else:
            self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        world = self.accelerator.num_processes
        self.sharded = engine == "fully_shard"
        self.model = build_model(case)
        if self.sharded:
            shard(self.model, (world,))
        self.mars = case.create(self.model)
        loader = torch.utils.data.DataLoader(Tokens(), batch_size=MICRO_BATCH // world)
        # accelerate's scheduler takes a step for each process.
        schedule = torch.optim.lr_scheduler.LambdaLR(self.mars, lambda step: lr_factor(step // world))
        parts = [self.mars, loader, schedule]
        # On CPUs accelerate would wrap a sharded model in DDP.
        prepared: Any = (
            self.accelerator.prepare(*parts) if self.sharded else self.accelerator.prepare(self.model, *parts)
        )
        self.wrapped, self.optimizer, self.loader, self.schedule = (self.model, *prepared)[-4:]
        if type(self.wrapped).__name__ != WRAPPERS[engine]:  # accelerate falls back to DDP silently
            raise RuntimeError(f"the model is wrapped in {type(self.wrapped).__name__}, not {WRAPPERS[engine]}")

    def train(self, first: int, end: int) -> None:
        """Take the steps from `first` to before `end`."""
        batches = self.accelerator.skip_first_batches(self.loader, first * ACCUMULATION)
        for index, batch in enumerate(batches, start=1):
            with self.accelerator.accumulate(self.wrapped):
                self.accelerator.backward(self.wrapped(**batch)["loss"])
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.wrapped.parameters(), MAX_GRAD_NORM)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if index == (end - first) * ACCUMULATION:
                break

    def save(self, folder: Path) -> None:
        if self.sharded:
            dcp.save(self._sharded_state(), checkpoint_id=folder)
        else:
            self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        if not self.sharded:
            self.accelerator.load_state(str(folder))
            return
        state = self._sharded_state()
        dcp.load(state, checkpoint_id=folder)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        dcp_state.set_state_dict(self.model, self.mars, **states)

    def _sharded_state(self) -> dict[str, Any]:
        model, optimizer = dcp_state.get_state_dict(self.model, self.mars)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule}

    def results(self, engine: str) -> Results:
        if engine == "zero2":
            return deepspeed_results(self.model, self.wrapped, self.mars)
        return plain_results(self.accelerator.unwrap_model(self.wrapped), self.mars)


def train_in_two_halves(engine: str, case: Case, folder: Path) -> Results:
    """Train the first half and save; build everything anew, load, and train the second."""
    with fresh_accelerate():
        first = Loop(engine, case)
        first.train(0, HALF)
        first.save(folder)
    with fresh_accelerate():
        second = Loop(engine, case)
        second.load(folder)
        second.train(HALF, STEPS)
        return second.results(engine)


def run(spec: str, file: Path) -> None:
    """Do one run."""
    engine, case = spec.split("/")
    if engine == "plain":
        results = train_plain(CASES[case])
    else:
        results = train_in_two_halves(engine, CASES[case], file.parent / f"{file.name}-state")
    if torch.distributed.get_rank() == 0:
        save_file({name: value.contiguous().clone() for name, value in results.items()}, f"{file}.safetensors")
        Path(f"{file}.json").write_text("{}")


if __name__ == "__main__":
    worker.main(run)
