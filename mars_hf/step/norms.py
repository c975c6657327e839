"""Compute norms over whole parameters, and scales and factors from them, between the two passes of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mars_hf import rules
from mars_hf.distributed import dtensors
from mars_hf.distributed.locator import Locator
from mars_hf.distributed.placement import Placement
from mars_hf.distributed.whole_sums import WholeSums
from mars_hf.param_groups import takes_mars
from mars_hf.step.buckets import Bucket
from mars_hf.step.corrections import Correction
from mars_hf.step.metrics import HERE, StepMetrics

# Rows of the sums.
GG, GL, LL, CC = range(4)


def take_norms(
    buckets: Sequence[Bucket],
    param_groups: Sequence[Mapping[str, Any]],
    placements: Mapping[Tensor, Placement],
    locator: Locator,
    *,
    max_grad_norm: float | None,
    metrics: StepMetrics | None,
) -> tuple[list[Correction], Tensor | None]:
    """Take only the norms that a step needs, and return the corrections that follow.

    Args:
        buckets: the step's buckets.
        param_groups: the optimizer's groups.
        placements: placements of the sharded parameters; if any, all ranks must call this.
        locator: the locator that found them.
        max_grad_norm: largest norm of all gradients together; None turns scaling off.
        metrics: receives the sums; None measures nothing.

    Returns:
        The correction of each bucket, and the norm of all gradients (0-d), None without `max_grad_norm`.

    Raises:
        RuntimeError: `max_grad_norm` under DeepSpeed.
    """
    corrections = [Correction.before_norms(bucket) for bucket in buckets]
    asked = [place for place, bucket in enumerate(buckets) if _wants_norms(bucket.group, metrics)]
    if max_grad_norm is None and metrics is None:  # only clipping needs norms: backends that clip compute them
        for place in asked:
            clips = buckets[place].backend.clips and not buckets[place].is_sharded
            corrections[place] = replace(corrections[place], clips=clips)
        asked = [place for place in asked if not corrections[place].clips]
    found = [(buckets[place], corrections[place]) for place in asked]
    norms = _Norms(found, max_grad_norm=max_grad_norm, metrics=metrics)
    groups = [group for group in param_groups if _wants_norms(group, metrics)]
    sharded = [param for group in groups for param in group["params"] if param in placements]
    if sharded:
        if max_grad_norm is not None and not all(dtensors.is_dtensor(param) for param in sharded):
            raise RuntimeError(
                f"max_grad_norm={max_grad_norm} under DeepSpeed, which steps group by group: set gradient_clipping "
                "in its JSON, and max_grad_norm=None"
            )
        vectors = max_grad_norm is not None or any(group["optimize_1d"] for group in groups)
        norms.reduce(
            [placements[param] for param in sharded],
            locator.slots(vectors=vectors),
            dtensors.local(sharded[0]).device,
            verify=not locator.all_seen(sharded),
        )
    norm = norms.take_norm()
    for place, correction in zip(asked, norms.corrections(norm), strict=True):
        corrections[place] = correction
    return corrections, norm


def _wants_norms(group: Mapping[str, Any], metrics: StepMetrics | None) -> bool:
    if group["max_grad_norm"] is not None:
        return True
    return takes_mars(group) and (group["clip_threshold"] is not None or metrics is not None)


class _Norms:
    """Compute the norms of one step.

    The constructor sums over the pieces on this rank, `reduce` adds the sums of sharded parameters across ranks, and
    `corrections` turns them into factors and scales.
    """

    def __init__(
        self,
        found: Sequence[tuple[Bucket, Correction]],
        *,
        max_grad_norm: float | None,
        metrics: StepMetrics | None,
    ) -> None:
        """Take the sums.

        Args:
            found: all buckets of a step if `max_grad_norm` is given, else those whose norms are needed.
            max_grad_norm: see `take_norms`.
            metrics: see `take_norms`.
        """
        self._max_grad_norm = max_grad_norm
        self._metrics = metrics
        self._sums = [(bucket, correction, self._sum(bucket, correction)) for bucket, correction in found]
        # With a global norm, <c, c> depends on the sums of all parameters.
        self._rows = slice(GG, LL + 1) if max_grad_norm is not None else slice(CC, CC + 1)
        self._whole: WholeSums | None = None

    def _sum(self, bucket: Bucket, correction: Correction) -> Tensor:
        """Return the sums over a bucket's pieces, without last gradients if nothing needs them."""
        folded = self._max_grad_norm is not None
        without = folded and bucket.group["clip_threshold"] is None and self._metrics is None
        return bucket.backend.run_sums(
            bucket.gradients,
            [] if without else bucket.last_grads,
            products=folded or self._metrics is not None,
            corrected=not folded,
            scale=correction.scale,
            last_scales=correction.last_scales,
            k=bucket.k,
        )

    def reduce(
        self, placements: Sequence[Placement], slots: Sequence[int], device: torch.device, *, verify: bool
    ) -> None:
        """Add the sums of pieces across ranks: one all-reduce per process group.

        All ranks take part, also those that hold no piece of some parameters.

        Args:
            placements: placements of the sharded parameters, those without gradient included.
            slots: slots of all parameters that may be sharded; the same on every rank.
            device: device of the parameters.
            verify: see `WholeSums.reduce`.
        """
        rows = self._rows.stop - self._rows.start
        self._whole = WholeSums(slots, rows, device, rules.sum_dtype(device))
        for placement in placements:
            self._whole.join(placement)
            if self._metrics is not None:
                self._metrics.join(placement.group, device)
        for bucket, _, sums in self._sums:
            if bucket.is_sharded:
                self._whole.add(bucket.process_group, bucket.slots, sums[self._rows])
        self._whole.reduce(verify=verify)

    def take_norm(self) -> Tensor | None:
        """Return the global norm of all gradients, 0-d; None without `max_grad_norm`."""
        if self._max_grad_norm is None:
            return None
        here = [sums[GG].sum() for bucket, _, sums in self._sums if not bucket.is_sharded]
        if self._whole is not None:
            here.append(self._whole.total(GG))
        if not here:
            return torch.zeros((), dtype=torch.float64, device="cpu").sqrt()
        return torch.stack([value.to(here[0].device) for value in here]).sum().sqrt()

    def corrections(self, norm: Tensor | None) -> list[Correction]:
        """Return the corrections with scale and factors, and report metrics."""
        scale = None
        if norm is not None and self._max_grad_norm is not None:
            scale = rules.global_scale(norm, self._max_grad_norm)
        found = []
        for bucket, correction, sums in self._sums:
            own_scale = None if scale is None else scale.to(sums.device, sums.dtype, non_blocking=True)
            if bucket.mars:
                correction = replace(correction, factors=self._factors(bucket, sums, own_scale))
            if own_scale is not None:
                both = own_scale if correction.scale is None else correction.scale * own_scale
                correction = replace(correction, scale=both)
            found.append(correction)
        return found

    def _factors(self, bucket: Bucket, sums: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return the clipping factors of corrected gradients; None without clipping."""
        whole = sums[self._rows]
        if bucket.is_sharded and self._whole is not None:
            whole = self._whole.of(bucket.process_group, bucket.slots).to(sums)
        square = whole[0] if scale is None else rules.corrected_square(whole, bucket.k, scale)
        threshold = bucket.group["clip_threshold"]
        if self._metrics is not None:
            if scale is not None:
                corrected = rules.corrected_square(sums, bucket.k, scale)
                sums = torch.stack([sums[GG] * scale**2, sums[GL] * scale, sums[LL], corrected])
            group = bucket.process_group if bucket.is_sharded else HERE
            has_last = bool(bucket.last_grads)
            self._metrics.add(sums, square, bucket.shares, threshold, has_last=has_last, group=group)
        return None if threshold is None else rules.clip_factors(square, threshold)
