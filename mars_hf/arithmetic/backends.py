"""Choose the backend of a bucket: the plain rules, or kernels that compute the same faster.

| backend   | where | what it is                                      | chosen by `fused=None`                 |
| --------- | ----- | ----------------------------------------------- | -------------------------------------- |
| triton    | GPU   | kernels/gpu.py, two passes, any tensors         | wherever it runs                       |
| compiled  | CPU   | kernels/cpu.py, two passes                      | from `COMPILED_FROM` elements a step   |
| adamw     | CPU   | torch.optim's fused AdamW, for plain AdamW only | wherever it applies                    |
| foreach   | all   | rules.py on whole lists                         | on accelerators without Triton         |
| for-loop  | all   | rules.py, one tensor after the other            | otherwise                              |

Orthogonalized matrices use their backend for the first moments only. Newton-Schulz follows; then rules.py applies the
directions, with the backend's `foreach`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from mars_hf.arithmetic import rules

# Compiling takes a second or two, once per machine. From this size on it pays off within a few hundred steps.
COMPILED_FROM = 1_000_000


@dataclass(frozen=True)
class Backend:
    """Run `rules.sums` and `rules.update` as they are; subclasses run faster code."""

    name: str
    foreach: bool = False  # rules.py works on whole lists
    # `update` rounds bfloat16 parameters itself: stochastically with `seeds`, Kahan's way with `compensations`.
    rounds: bool = False
    clips: bool = False  # `update` clips each tensor itself, given `clip_threshold`

    @property
    def is_flat(self) -> bool:
        """Return whether it accepts only dense tensors with one memory order."""
        return False

    def run_sums(
        self, gradients: list[Tensor], last_grads: list[Tensor], *, products: bool, corrected: bool, **settings: Any
    ) -> Tensor:
        """Take the sums; see `rules.sums`."""
        return rules.sums(
            gradients, last_grads, products=products, corrected=corrected, foreach=self.foreach, **settings
        )

    def run_update(self, *lists: list[Tensor], steps: Sequence[Tensor], lr: float | Tensor, **settings: Any) -> None:
        """Update; see `rules.update`. Step counts and learning rate come as the optimizer holds them."""
        rules.update(*lists, steps=[step.item() for step in steps], lr=float(lr), foreach=self.foreach, **settings)


@dataclass(frozen=True)
class KernelBackend(Backend):
    """Run kernels, which read numbers that change from step to step from tensors on the device."""

    module: ModuleType = rules

    @property
    def is_flat(self) -> bool:
        """Return True: kernels walk memory in its order."""
        return True

    def run_sums(
        self, gradients: list[Tensor], last_grads: list[Tensor], *, products: bool, corrected: bool, **settings: Any
    ) -> Tensor:
        """Take the sums; see `rules.sums`."""
        return self.module.sums(gradients, last_grads, products=products, corrected=corrected, **settings)

    def run_update(self, *lists: list[Tensor], steps: Sequence[Tensor], lr: float | Tensor, **settings: Any) -> None:
        """Update; see `rules.update`. Settings may include those that `rounds` and `clips` name.

        Kernels bypass autograd, so this bumps the parameters' versions: a graph that saved one must not run backward.
        """
        device = lists[0][0].device
        self.module.update(*lists, steps=_on(device, steps), lr=_on(device, [lr], torch.float64)[0], **settings)
        torch.autograd.graph.increment_version(lists[0])


@dataclass(frozen=True)
class AdamWBackend(Backend):
    """Run torch's fused AdamW: plain AdamW on CPUs, where the step counts live."""

    @property
    def is_flat(self) -> bool:
        """Return True: the fused kernel walks memory in its order."""
        return True

    def run_sums(
        self, gradients: list[Tensor], last_grads: list[Tensor], *, products: bool, corrected: bool, **settings: Any
    ) -> Tensor:
        """Take the sums without last gradients, all at once: vectors are many and small."""
        square = torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square()
        if settings["scale"] is not None:
            square = square * settings["scale"].to(square).square()
        zeros = torch.zeros_like(square)
        return torch.stack([square, zeros, zeros, square])

    def run_update(self, *lists: list[Tensor], steps: Sequence[Tensor], lr: float | Tensor, **settings: Any) -> None:
        """Update without last gradients and factors.

        Low-precision gradients with a scale fall back to the rules, which scale them in float32.
        """
        params, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, _ = lists
        scale = settings["scale"]
        if scale is not None and gradients[0].dtype.itemsize < 4:  # a scaled copy would be rounded, or underflow
            super().run_update(*lists, steps=steps, lr=lr, **settings)
            return
        torch_adamw(
            params,
            gradients if scale is None else list(torch._foreach_mul(gradients, scale.to(gradients[0].dtype))),
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            [step - 1 for step in steps],  # torch counts the step itself
            fused=True,
            amsgrad=bool(max_exp_avg_sqs),
            **{key: settings[key] for key in ("beta1", "beta2", "weight_decay", "eps")},
            lr=lr,
            maximize=False,
        )


def choose_backend(
    group: dict[str, Any],
    device: torch.device,
    dtypes: Collection[torch.dtype],
    numel: int,
    *,
    plain_adamw: bool,
    dense: bool,
) -> Backend:
    """Return the backend of a bucket.

    Args:
        group: the parameter group; its `fused` and `rounding` decide.
        device: device of the tensors.
        dtypes: dtypes of all tensors.
        numel: number of elements in all parameters of the step.
        plain_adamw: whether the rule is AdamW, without last gradients and clipping by parameter.
        dense: whether the memory suits kernels: no gaps, one order, aligned, shared with nothing.

    Raises:
        RuntimeError: `fused=True` where no kernels run.
    """
    wanted = group["fused"]
    if dense and wanted is not False:
        kernels = _kernels(device, dtypes, numel, always=wanted is True)
        if kernels is not None:
            return kernels
        rounds = group["rounding"] != "nearest" and torch.bfloat16 in dtypes
        if plain_adamw and device.type == "cpu" and len(set(dtypes)) == 1 and not rounds:
            return AdamWBackend("adamw")
    if wanted and dense:
        names = ", ".join(sorted(str(dtype) for dtype in set(dtypes)))
        raise RuntimeError(
            f"fused=True, and no kernels run on {device.type} for {names}: GPUs need Triton (pip install triton), CPUs "
            "a C++ compiler; use fused=None"
        )
    return Backend("foreach", foreach=True) if takes_lists(device) else Backend("for-loop")


def takes_lists(device: torch.device) -> bool:
    """Return whether plain PyTorch is faster on whole lists there: they save launches, and leave a CPU's cache."""
    return device.type != "cpu"


def _kernels(device: torch.device, dtypes: Collection[torch.dtype], numel: int, *, always: bool) -> Backend | None:
    if device.type == "cpu" and (always or numel >= COMPILED_FROM):
        from mars_hf.arithmetic.kernels import cpu

        backend = KernelBackend("compiled", module=cpu, rounds=True, clips=True)
        return backend if cpu.supports(device, dtypes) else None
    if device.type not in ("cpu", "meta"):
        from mars_hf.arithmetic.kernels import gpu

        backend = KernelBackend("triton", foreach=True, module=gpu, rounds=True)
        return backend if gpu.supports(device, dtypes) else None
    return None


def _on(device: torch.device, numbers: Sequence[float | Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for the device."""
    there = [number for number in numbers if isinstance(number, Tensor) and number.device == device]
    if len(there) == len(numbers):
        return torch.stack(there).to(dtype)
    if there:
        return torch.stack([torch.as_tensor(number, device=device, dtype=dtype) for number in numbers])
    values = [float(number) for number in numbers]
    if len(set(values)) == 1:
        return torch.full((len(values),), values[0], dtype=dtype, device=device)
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
