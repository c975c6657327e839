"""Hold the factors that one step applies to the gradients of a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.step.buckets import Bucket


@dataclass(frozen=True)
class Correction:
    """Hold the numbers in c = factor (g + k (g - last)), where g = scale * gradient.

    Attributes:
        scale: scale of the gradients, 0-d; None means 1.
        last_scales: scales of the last gradients, one per piece; None means 1.
        factors: factors of the corrected gradients, one per piece; None means 1.
        clips: whether the update computes the factors itself.
    """

    scale: Tensor | None = None
    last_scales: Tensor | None = None
    factors: Tensor | None = None
    clips: bool = False

    @classmethod
    def before_norms(cls, bucket: Bucket) -> Correction:
        """Return the part that needs no norm: the sign, and the scales that the last step left."""
        ascends = bucket.group["maximize"] and bucket.params
        scale = torch.full((), -1.0, device=bucket.params[0].device) if ascends else None
        return cls(scale, _last_scales(bucket.owned))

    def of_piece(self, index: int) -> Correction:
        """Return the correction of one piece alone."""
        one = slice(index, index + 1)
        factors, last_scales = (None if own is None else own[one] for own in (self.factors, self.last_scales))
        return replace(self, factors=factors, last_scales=last_scales)


class Update(NamedTuple):
    """A bucket ready for its update.

    Attributes:
        bucket: the tensors.
        correction: the correction of the gradients.
        directions: one per piece if the rule orthogonalizes, else empty.
    """

    bucket: Bucket
    correction: Correction
    directions: Sequence[Tensor] = ()

    def pieces(self) -> Iterator[Update]:
        """Yield updates of one piece each."""
        for index, bucket in enumerate(self.bucket.pieces()):
            yield Update(bucket, self.correction.of_piece(index), self.directions[index : index + 1])


def _last_scales(owned: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """Return the scales that these states' last gradients still need, as one tensor; None means 1."""
    scales = [state.get("last_grad_scale") for state in owned]
    given = [scale for scale in scales if scale is not None]
    if not given:
        return None
    if len(given) == len(scales) and all(scale is given[0] for scale in given):  # from the same step
        return given[0].repeat(len(given))
    return torch.stack([torch.ones_like(given[0]) if scale is None else scale for scale in scales])
