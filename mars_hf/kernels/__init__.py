"""Choose the backend of a list of tensors: the plain rules, or kernels that compute the same faster.

| backend  | where | what it is                               | chosen by `fused=None`                 |
| -------- | ----- | ---------------------------------------- | -------------------------------------- |
| triton   | GPU   | kernels/gpu.py, two passes, any tensors  | wherever it runs                       |
| compiled | CPU   | kernels/cpu.py, two passes               | from `COMPILED_FROM` elements a step   |
| foreach  | GPU   | rules.py on whole lists                  | otherwise                              |
| for-loop | CPU   | rules.py, one tensor after the other     | otherwise                              |

Orthogonalized matrices use their backend for the first moments only. Newton-Schulz follows; then rules.py applies the
directions, with the backend's `foreach`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass
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
    foreach: bool = False  # rules.py works on whole lists

    @property
    def is_flat(self) -> bool:
        """Return whether it walks memory in its order."""
        return self.kernels is not None

    @property
    def rounds(self) -> bool:
        """Return whether `update` rounds bfloat16 parameters stochastically itself, with `seeds`."""
        return self.kernels is not None

    @property
    def clips(self) -> bool:
        """Return whether `update` clips each tensor itself, given `clip_threshold`."""
        return self.name == "compiled"

    def run_sums(self, gradients: list[Tensor], last_grads: list[Tensor], **settings: Any) -> Tensor:
        """Take the sums; see `rules.sums`."""
        if self.kernels is not None:
            return self.kernels.sums(gradients, last_grads, **settings)
        return rules.sums(gradients, last_grads, foreach=self.foreach, **settings)

    def run_update(self, *lists: list[Tensor], options: rules.Options) -> None:
        """Update; see `rules.update`."""
        params, gradients, exp_avgs, exp_avg_sqs, maxima, last_grads = lists
        if self.kernels is None:
            rules.update(params, gradients, exp_avgs, exp_avg_sqs, maxima, last_grads, options, foreach=self.foreach)
            return
        self.kernels.update(params, gradients, exp_avgs, exp_avg_sqs, last_grads, options)
        # Kernels bypass autograd: a graph that has saved a parameter must not run backward.
        torch.autograd.graph.increment_version(params)


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
    plain = Backend("foreach", foreach=True) if takes_lists(device) else Backend("for-loop")
    kahan = group["rounding"] == "kahan" and torch.bfloat16 in dtypes
    if group["fused"] is False or not dense or group["amsgrad"] or kahan:
        return plain
    if device.type == "cpu" and not group["fused"] and numel < COMPILED_FROM:
        return plain
    kernels = kernels_of(device)
    if not kernels.DTYPES.issuperset(dtypes):
        return plain
    if kernels.is_available(device):
        return Backend(kernels.NAME, kernels, plain.foreach)
    if group["fused"]:
        raise RuntimeError(
            f"fused=True, and no kernels run on {device.type}: GPUs need Triton (pip install triton), CPUs a C++ "
            "compiler; use fused=None"
        )
    return plain


def takes_lists(device: torch.device) -> bool:
    """Return whether plain PyTorch is faster on whole lists there: they save launches, and leave a CPU's cache."""
    return device.type != "cpu"


def kernels_of(device: torch.device) -> ModuleType:
    """Return the module of the kernels for a device."""
    return importlib.import_module(f"mars_hf.kernels.{'cpu' if device.type == 'cpu' else 'gpu'}")
