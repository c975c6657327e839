"""Find non-finite values in losses, gradients and weights, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_hf.distributed import dtensors

_NAMED = 3  # names that a report lists


@dataclass(frozen=True)
class Found:
    """What one rank has found in one step.

    Attributes:
        rank: the rank.
        losses: its non-finite losses, one per micro-batch.
        bad: number of its gradients that are not finite.
        of: number of its gradients.
        names: names of the first ones that are not finite.
        norms: non-finite norms of gradients that are not at hand any more.
    """

    rank: int
    losses: tuple[float, ...] = ()
    bad: int = 0
    of: int = 0
    names: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether anything is not finite."""
        return bool(self.losses or self.bad or self.norms)


def any_nonfinite(values: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether one of these numbers is not finite on any rank; waits once for the device.

    Args:
        values: 0-d tensors; every rank calls this, also without any.
        device: where ranks share the flag.
    """
    flags = [~torch.isfinite(torch.stack(own)).all() for own in _alike(values)]
    flag = torch.stack([own.to(device) for own in flags]).any() if flags else torch.zeros((), device=device)
    return any_rank(flag)


def any_rank(flag: Tensor) -> bool:
    """Return whether a 0-d flag is set on any rank."""
    if _is_distributed():
        flag = flag.to(torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def from_all_ranks(found: Found) -> list[Found]:
    """Return what every rank has found, in the order of the ranks."""
    if not _is_distributed():
        return [found]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return everywhere


def from_rank_zero(make: Callable[[], Any]) -> Any:
    """Return what `make` returns on rank 0; other ranks do not call it."""
    if not _is_distributed():
        return make()
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def look(losses: Sequence[Tensor], gradients: Iterable[tuple[str, Tensor]], norms: Sequence[Tensor] = ()) -> Found:
    """Look at every loss and gradient of this rank.

    Args:
        losses: 0-d tensors, one per micro-batch.
        gradients: gradients with names.
        norms: norms of gradients that are not at hand any more.
    """
    here = [(name, dtensors.local(grad)) for name, grad in gradients]
    bad = [name for name, grad in here if not torch.isfinite(grad).all()]
    return Found(
        dist.get_rank() if _is_distributed() else 0,
        tuple(value for value in (loss.item() for loss in losses) if not is_finite(value)),
        len(bad),
        len(here),
        tuple(bad[:_NAMED]),
        tuple(f"gradient norm {value:g}" for value in (norm.item() for norm in norms) if not is_finite(value)),
    )


def describe(found: Sequence[Found]) -> str:
    """Say in one line what the ranks have found."""
    parts = []
    for one in found:
        where = f" on rank {one.rank}" if len(found) > 1 else ""
        if one.losses:
            parts.append(f"loss {', '.join(f'{loss:g}' for loss in one.losses[:_NAMED])}{where}")
    alike: dict[tuple[Any, ...], list[int]] = {}  # ranks that average their gradients find the same
    for one in found:
        if one.bad:
            alike.setdefault((one.bad, one.of, one.names), []).append(one.rank)
    for (bad, of, names), ranks in alike.items():
        more = ", ..." if bad > len(names) else ""
        parts.append(f"{bad} of {of} gradients{_on(ranks, found)}: {', '.join(names)}{more}")
    for text in dict.fromkeys(text for one in found for text in one.norms):
        parts.append(text)
    return "; ".join(parts)


def total_norm(params: Iterable[Tensor]) -> Tensor | None:
    """Return the norm of all gradients, over all ranks that hold parts of them; None if there is none."""
    meshes: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            meshes.setdefault(getattr(param.grad, "device_mesh", None), []).append(param.grad)
    norms: list[Any] = [nn.utils.get_total_norm(grads) for grads in meshes.values()]
    whole = [norm.full_tensor() if dtensors.is_dtensor(norm) else norm for norm in norms]
    if len(whole) <= 1:
        return whole[0] if whole else None
    return torch.linalg.vector_norm(torch.stack([norm.to(whole[0].device) for norm in whole]))


def scale_gradients(params: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients in place by a number or a plain 0-d tensor; they may be on different meshes.

    Works on what this rank holds: torch multiplies no list that mixes plain tensors and DTensors, or DTensors of
    several meshes.
    """
    devices: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                devices.setdefault(param.grad.device, []).append(dtensors.local(param.grad))
        for device, grads in devices.items():
            torch._foreach_mul_(grads, factor.to(device) if isinstance(factor, Tensor) else factor)


def nonfinite_weights(model: nn.Module) -> list[str]:
    """Return the names of this rank's parameters and buffers that hold a non-finite value.

    ZeRO-3 leaves a parameter's part of this rank in `ds_tensor`.
    """
    named = [(name, getattr(param, "ds_tensor", param)) for name, param in model.named_parameters()]
    held = [(name, dtensors.local(tensor.detach())) for name, tensor in [*named, *model.named_buffers()]]
    held = [(name, tensor) for name, tensor in held if tensor.is_floating_point() and tensor.numel()]
    largest = {name: torch.linalg.vector_norm(tensor, torch.inf) for name, tensor in held}
    finite = torch.stack([torch.isfinite(own).cpu() for own in largest.values()]).tolist() if largest else []
    return [name for name, good in zip(largest, finite, strict=True) if not good]


def is_finite(value: float) -> bool:
    """Return whether a number is neither infinite nor NaN."""
    return abs(value) < float("inf")


def _alike(values: Sequence[Tensor]) -> list[list[Tensor]]:
    """Sort numbers by device and dtype, so that those of one list stack."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        found.setdefault((value.device, value.dtype), []).append(value.detach().reshape(()))
    return list(found.values())


def _on(ranks: Sequence[int], found: Sequence[Found]) -> str:
    if len(found) == 1:
        return ""
    if len(ranks) == len(found):
        return " on every rank"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
