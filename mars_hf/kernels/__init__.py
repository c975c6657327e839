"""Choose the backend of a list of tensors: the plain rules, or kernels that compute the same faster.

| backend  | where | what it is                               | chosen by `fused=None`                 |
| -------- | ----- | ---------------------------------------- | -------------------------------------- |
| triton   | GPU   | kernels/gpu.py, two passes, any tensors  | wherever it runs                       |
| compiled | CPU   | kernels/cpu.py, two passes               | from `COMPILED_FROM` elements a step   |
| foreach  | any   | rules.py on whole lists                  | on GPUs, in small steps on CPUs        |
| for-loop | CPU   | rules.py, a call for each tensor         | otherwise                              |

Orthogonalized matrices use their backend for the first moments only. Newton-Schulz follows; then rules.py applies the
directions.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mars_hf import rules

# Compiling takes a second or two, once per machine. From this size on it pays off within a few hundred steps.
COMPILED_FROM = 1_000_000


@dataclass(frozen=True)
class Backend:
    """Run `rules.sums` and `rules.update`: as they are, or by kernels, which need dense tensors in one memory order."""

    name: str
    kernels: ModuleType | None = None
    foreach: bool = False  # rules.py gets whole lists: fewer launches, temporaries for all tensors at once
    clips: bool = False  # `update` clips each tensor itself, given `clip_threshold`

    def run_sums(
        self, gradients: list[Tensor], last_grads: list[Tensor], *, last_scales: Tensor | None = None, **settings: Any
    ) -> Tensor:
        """Take the sums; see `rules.sums`."""
        if self.kernels is not None:
            return self.kernels.sums(gradients, last_grads, last_scales=last_scales, **settings)
        columns = []
        size = len(gradients) if self.foreach else 1
        for start in range(0, len(gradients), size):
            part = slice(start, start + size)
            scales = None if last_scales is None else last_scales[part]
            columns.append(rules.sums(gradients[part], last_grads[part], last_scales=scales, **settings))
        return torch.cat(columns, dim=1)

    def run_update(self, *lists: list[Tensor], options: rules.Options) -> None:
        """Update; see `rules.update`."""
        if self.kernels is not None:
            params, gradients, exp_avgs, exp_avg_sqs, _, last_grads = lists
            self.kernels.update(params, gradients, exp_avgs, exp_avg_sqs, last_grads, options)
            # Kernels bypass autograd: a graph that has saved a parameter must not run backward.
            torch.autograd.graph.increment_version(params)
            return
        scales, factors = options.last_scales, options.factors
        size = len(options.steps) if self.foreach else 1
        for start in range(0, len(options.steps), size):
            part = slice(start, start + size)
            part_options = replace(
                options,
                steps=options.steps[part],
                last_scales=None if scales is None else scales[part],
                factors=None if factors is None else factors[part],
            )
            params, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, last_grads = (tensors[part] for tensors in lists)
            rules.update(params, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, last_grads, part_options)


def choose_backend(
    group: dict[str, Any], device: torch.device, dtypes: Collection[torch.dtype], numel: int, *, dense: bool
) -> Backend:
    """Return the backend of a list.

    Args:
        group: the parameter group; its `fused`, `amsgrad` and `rounding` decide.
        device: device of the tensors.
        dtypes: dtypes of all tensors.
        numel: number of elements in all parameters of the step.
        dense: whether the memory suits kernels: no gaps, one order, aligned, shared with nothing.

    Raises:
        RuntimeError: `fused=True` where no kernels run.
    """
    # Whole lists save calls; large ones leave a CPU's cache.
    on_lists = device.type != "cpu" or (dense and numel < COMPILED_FROM)
    plain = Backend("foreach" if on_lists else "for-loop", foreach=on_lists)
    kahan = group["rounding"] == "kahan" and torch.bfloat16 in dtypes
    if group["fused"] is False or not dense or group["amsgrad"] or kahan:
        return plain
    if device.type == "cpu" and not group["fused"] and numel < COMPILED_FROM:
        return plain
    kernels = kernels_of(device)
    if not kernels.DTYPES.issuperset(dtypes):
        return plain
    if kernels.is_available(device):
        return Backend(kernels.NAME, kernels, clips=kernels.NAME == "compiled")
    if group["fused"]:
        raise RuntimeError(
            f"fused=True, and no kernels run on {device.type}: GPUs need Triton (pip install triton), CPUs a C++ "
            "compiler; use fused=None"
        )
    return plain


def kernels_of(device: torch.device) -> ModuleType:
    """Return the module of the kernels for a device."""
    return importlib.import_module(f"mars_hf.kernels.{'cpu' if device.type == 'cpu' else 'gpu'}")
