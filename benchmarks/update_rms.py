#!/usr/bin/env python
"""Measure the update RMS of each optimizer on the default job: are the assumptions of `mars_hf suggest` true of it?

    python benchmarks/update_rms.py

Runs `recipes/pretrain_gpt2.py` for 100 steps, 50 of them warmup, with the tuned settings of each optimizer. The RMS is
that of the last 50 updates over their learning rate, without weight decay. Results go to
benchmarks/results/update_rms.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import interleave
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))

RESULTS = ROOT / "benchmarks" / "results" / "update_rms.json"
STEPS, WARMUP = 100, 50
COMMON = f"--max_steps {STEPS} --warmup_steps {WARMUP} --cpu_threads 1 --eval_on_start false".split()
COMMON += "--eval_strategy no --sample_tokens 0 --disable_tqdm true".split()
_MARS_M = "--learning_rate 0.008 --lr_embeddings 0.016 --gamma 0.025".split()
# At the rates of results/tune_embedded.json. The last run has AdamW's half-life for the first moment, not twice that.
RUNS = [
    ("adamw", "--learning_rate 0.004 --lr_embeddings 0.004".split()),
    ("mars_adamw", "--learning_rate 0.008 --lr_embeddings 0.008 --gamma 0.025".split()),
    ("mars_shampoo", []),
    ("mars_m", _MARS_M),
    ("mars_m", [*_MARS_M, "--beta1", "0.9"]),
]


class Meter:
    """Add up squared updates over the learning rate, apart for matrices, embeddings and vectors."""

    def __init__(self, after: int) -> None:
        """Count steps from `after` + 1 on."""
        self._after = after
        self._step = 0
        self._before: dict[Tensor, Tensor] = {}
        self._squares: dict[str, float] = {}
        self._elements: dict[str, int] = {}

    def begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the parameters before a step."""
        self._step += 1
        if self._step > self._after:
            self._before = {
                param: param.detach().clone() for group in optimizer.param_groups for param in group["params"]
            }

    def end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Add what the step did to them."""
        for group in optimizer.param_groups if self._before else ():
            for name, param in zip(group["param_names"], group["params"], strict=True):
                before = self._before.pop(param)
                update = (before - param.detach()).double() / float(group["lr"]) - group["weight_decay"] * before
                kind = _kind(name, param)
                self._squares[kind] = self._squares.get(kind, 0.0) + float(update.square().sum())
                self._elements[kind] = self._elements.get(kind, 0) + update.numel()

    def rms(self) -> dict[str, float]:
        """Return the root mean square of each kind of parameter."""
        return {kind: (square / self._elements[kind]) ** 0.5 for kind, square in self._squares.items()}


def _kind(name: str, param: Tensor) -> str:
    if name.endswith(("wte.weight", "wpe.weight")):
        return "embeddings"
    return "matrices" if param.ndim >= 2 else "vectors"


def measure(optimizer: str, argv: Sequence[str], *, after: int) -> dict[str, Any]:
    """Train once in this process and return the run's row."""
    meter = Meter(after)
    hooks = [register_optimizer_step_pre_hook(meter.begin), register_optimizer_step_post_hook(meter.end)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "run")
            importlib.import_module("pretrain_gpt2").main(
                ["--optimizer", optimizer, *argv, "--output_dir", str(output)]
            )
            loss = json.loads((output / "metrics.json").read_text())["eval_loss"]
    finally:
        for hook in hooks:
            hook.remove()
    return {"optimizer": optimizer, "arguments": list(argv), "eval_loss": loss, "rms": meter.rms()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every optimizer and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for optimizer, settings in RUNS:
        rows.append(measure(optimizer, [*COMMON, *settings], after=WARMUP))
        written = {"machine": interleave.describe_machine(), "runs": rows}
        options.output.write_text(json.dumps(written, indent=1) + "\n")
    for row in rows:
        print(row["optimizer"], {kind: round(value, 4) for kind, value in row["rms"].items()}, row["eval_loss"])


if __name__ == "__main__":
    main()
