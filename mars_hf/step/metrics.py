"""Measure what a step of MARS does: sums stay on the device until they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mars_hf.arithmetic.formulas import sum_dtype
from mars_hf.distributed.norms import all_reduce
from mars_hf.distributed.tensors import Group

# The sums that all ranks add up, in this order: of parameters, of squares and products, and of elements.
_SUMS = (
    "params",
    "clipped",  # parameters
    "compared",  # parameters with last gradients
    "corrected",  # <c, c>, as the next three of those compared
    "gradient",  # <g, g>
    "last",  # <last, last>
    "product",  # <g, last>
    "change",  # square of x_{t+1} - x_t
    "elements",  # number of those in "change"
    "lost",  # those of "fragile" that did not move
    "fragile",  # elements of half-precision parameters that have a gradient
)
HERE = object()  # stands for this rank alone; None is the default process group


def counted_by(process_group: Group) -> Group:
    """Return whose sums a list counts in: the ranks that hold its shards; `HERE` for whole parameters."""
    return HERE if process_group is None else process_group


class StepMetrics:
    """Accumulate sums over the parameters that use the MARS rule.

    `add` queues work on the parameters' device and never waits for it; `read` waits once. All sums are additive over
    parameters and their pieces, so they add up across ranks.
    """

    def __init__(self) -> None:
        """Start with empty sums."""
        self._sums: dict[tuple[Group, torch.device], Tensor] = {}
        self._sharded: dict[Group, torch.device] = {}

    def join(self, group: Group, device: torch.device) -> None:
        """Take part in the sums of a process group, even if this rank holds no piece of a parameter."""
        self._sharded.setdefault(group, device)

    def add(
        self,
        sums: Tensor,
        squares: Tensor,
        fractions: Sequence[float],
        clip_threshold: float | None,
        *,
        has_last: bool,
        group: Group = HERE,
    ) -> None:
        """Add pieces of parameters, whole ones included.

        Args:
            sums: sums over the pieces, from `formulas.sums`.
            squares: squared norm of the whole c_t that each piece belongs to.
            fractions: which part of its parameter each piece is.
            clip_threshold: the group's threshold; None for no clipping.
            has_last: whether there are last gradients to compare with.
            group: process group that holds the other pieces; by default this rank holds them all.
        """
        on_host = torch.tensor(fractions, dtype=sums.dtype, device="cpu", pin_memory=sums.is_cuda)
        weights = on_host.to(sums.device, non_blocking=True)
        values = {"params": weights.sum()}
        if clip_threshold is not None:
            values["clipped"] = ((squares > clip_threshold**2) * weights).sum()
        if has_last:
            gg, gl, ll, cc = sums.sum(dim=1).unbind()
            values |= {"compared": weights.sum(), "corrected": cc, "gradient": gg, "last": ll, "product": gl}
        self._accumulate(group, values)

    def add_update(self, params: Sequence[Tensor], before: Sequence[Tensor], group: Group = HERE) -> None:
        """Add the x_{t+1} - x_t of pieces of parameters, from copies of them before the step."""
        squares = []
        for param, old in zip(params, before, strict=True):
            dtype = torch.promote_types(param.dtype, torch.float32)
            change = param.to(dtype) - old.to(dtype)
            squares.append(torch.linalg.vector_norm(change, dtype=sum_dtype(param.device)).square())
        square = torch.stack(squares).sum()
        elements = sum(param.numel() for param in params)
        self._accumulate(group, {"change": square, "elements": torch.full_like(square, elements)})

    def add_lost(
        self, params: Sequence[Tensor], before: Sequence[Tensor], gradients: Sequence[Tensor], group: Group = HERE
    ) -> None:
        """Add how many elements have a gradient and did not move, from copies of them before the step."""
        pairs = []
        for param, old, gradient in zip(params, before, gradients, strict=True):
            has_gradient = gradient != 0
            stayed = param == old
            pairs.append(torch.stack([(stayed & has_gradient).sum(), has_gradient.sum()]))
        lost, fragile = torch.stack(pairs).sum(0).unbind()
        self._accumulate(group, {"lost": lost, "fragile": fragile})

    def read(self) -> dict[str, float]:
        """Return the metrics as floats, the same on every rank; empty if no parameter uses the MARS rule.

        - `mars/clip_fraction`: fraction of the parameters whose c_t exceeds `clip_threshold`.
        - `mars/corrected_norm_ratio`: ||c_t|| / ||g_t|| over all parameters together, before clipping.
        - `mars/grad_cosine`: cosine of g_t and g_{t-1}; missing at the first step, which has no g_{t-1}.
          These two are missing if no last gradient is kept (see `Mars`, State).
        - `mars/update_rms`: root mean square of x_{t+1} - x_t, weight decay included.
        - `mars/lost_update_fraction`: of the elements of half-precision parameters that have a gradient, the fraction
          that did not move, since rounding to nearest loses small updates; missing elsewhere.
        """
        total = torch.zeros(len(_SUMS), dtype=torch.float64, device="cpu")
        for group, device in self._sharded.items():
            sums = self._sums.pop((group, device), _zeros(device))
            total += all_reduce(sums, group).cpu().double()
        for sums in self._sums.values():
            total += sums.cpu().double()
        of = dict(zip(_SUMS, total.tolist(), strict=True))
        if not of["params"]:
            return {}
        metrics = {
            "mars/clip_fraction": of["clipped"] / of["params"],
            "mars/update_rms": (of["change"] / of["elements"]) ** 0.5 if of["elements"] else 0.0,
        }
        if of["fragile"]:
            metrics["mars/lost_update_fraction"] = of["lost"] / of["fragile"]
        if of["compared"]:
            gg, ll = of["gradient"], of["last"]
            metrics["mars/corrected_norm_ratio"] = (of["corrected"] / gg) ** 0.5 if gg else 0.0
            if ll:
                metrics["mars/grad_cosine"] = of["product"] / (gg * ll) ** 0.5 if gg else 0.0
        return metrics

    def _accumulate(self, group: Group, values: Mapping[str, Tensor]) -> None:
        device = next(iter(values.values())).device
        if (group, device) not in self._sums:
            self._sums[group, device] = _zeros(device)
        sums = self._sums[group, device]
        zero = torch.zeros((), dtype=sums.dtype, device=device)
        sums += torch.stack([values.get(name, zero).to(sums.dtype) for name in _SUMS])


def _zeros(device: torch.device) -> Tensor:
    return torch.zeros(len(_SUMS), dtype=sum_dtype(device), device=device)
