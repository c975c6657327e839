"""Between the pass that reads and the pass that writes: norms over whole parameters and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mars_hf.arithmetic import clipping, rules
from mars_hf.distributed.placement import Placement
from mars_hf.distributed.whole_sums import WholeSums
from mars_hf.step.buckets import Batch
from mars_hf.step.metrics import HERE, StepMetrics

# Rows of the sums.
GG, GL, LL, CC = range(4)


class Norms:
    """The norms of one step.

    Sums are taken over the pieces on this rank when it is made, put together across ranks by `reduce` where parameters
    are sharded, and turned into factors and scale of the batches by `apply`.
    """

    def __init__(self, batches: Sequence[Batch], *, max_grad_norm: float | None, metrics: StepMetrics | None) -> None:
        """Take the sums.

        Args:
            batches: all of a step if `max_grad_norm` is given, else those whose norms are asked for.
            max_grad_norm: gradients are to be scaled to this global norm; None for no scaling.
            metrics: what to report to; None if nobody asks.
        """
        self._max_grad_norm = max_grad_norm
        self._metrics = metrics
        self._sums = [(batch, self._take(batch)) for batch in batches]
        # With a global norm, <c, c> depends on the sums of all parameters.
        self._rows = slice(GG, LL + 1) if max_grad_norm is not None else slice(CC, CC + 1)
        self._whole: WholeSums | None = None

    def _take(self, batch: Batch) -> Tensor:
        """Sums over the pieces of a batch, without its last gradients where nothing asks for them."""
        folded = self._max_grad_norm is not None
        without = folded and batch.group["clip_threshold"] is None and self._metrics is None
        rows = {"products": folded or self._metrics is not None, "corrected": not folded}
        return batch.engine.sums(batch.gradients, [] if without else batch.last_grads, **rows, **batch.correction)

    def reduce(
        self, placements: Sequence[Placement], slots: Sequence[int], device: torch.device, *, verify: bool
    ) -> None:
        """Put the sums of pieces together across ranks: one all-reduce a process group.

        All ranks take part, also those that hold nothing of some parameters.

        Args:
            placements: of the sharded parameters, those without gradient included.
            slots: of all parameters that may be sharded; the same ones on every rank.
            device: of the parameters.
            verify: as `WholeSums.reduce`.
        """
        rows = self._rows.stop - self._rows.start
        self._whole = WholeSums(slots, rows, device, rules.sum_dtype(device))
        for placement in placements:
            self._whole.join(placement)
            if self._metrics is not None:
                self._metrics.join(placement.group, device)
        for batch, sums in self._sums:
            if batch.is_sharded:
                self._whole.add(batch.process_group, batch.slots, sums[self._rows])
        self._whole.reduce(verify=verify)

    def apply(self) -> Tensor | None:
        """Set scale and factors of the batches, and report metrics.

        Returns:
            The global norm of all gradients, 0-d, if `max_grad_norm` is given.
        """
        norm = scale = None
        if self._max_grad_norm is not None:
            norm = self._total().sqrt()
            scale = clipping.global_scale(norm, self._max_grad_norm)
        for batch, sums in self._sums:
            own_scale = None if scale is None else scale.to(sums.device, sums.dtype, non_blocking=True)
            if batch.mars:
                self._clip(batch, sums, own_scale)
            if own_scale is not None:
                batch.scale = own_scale if batch.scale is None else batch.scale * own_scale
        return norm

    def _clip(self, batch: Batch, sums: Tensor, scale: Tensor | None) -> None:
        whole = sums[self._rows]
        if batch.is_sharded and self._whole is not None:
            whole = self._whole.of(batch.process_group, batch.slots).to(sums)
        square = whole[0] if scale is None else clipping.corrected_square(whole, batch.k, scale)
        if self._metrics is not None and scale is not None:
            corrected = clipping.corrected_square(sums, batch.k, scale)
            sums = torch.stack([sums[GG] * scale**2, sums[GL] * scale, sums[LL], corrected])
        threshold = batch.group["clip_threshold"]
        if threshold is not None:
            batch.factors = clipping.factors(square, threshold)
        if self._metrics is not None:
            group = batch.process_group if batch.is_sharded else HERE
            has_last = bool(batch.last_grads)
            self._metrics.add(sums, square, batch.shares, threshold, has_last=has_last, group=group)

    def _total(self) -> Tensor:
        """Squared norm of all gradients together."""
        here = [sums[GG].sum() for batch, sums in self._sums if not batch.is_sharded]
        if self._whole is not None:
            here.append(self._whole.total(GG))
        if not here:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        return torch.stack([value.to(here[0].device) for value in here]).sum()
