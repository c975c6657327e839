"""What one step multiplies the gradients of a bucket by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.step.buckets import Bucket


@dataclass(frozen=True)
class Correction:
    """How gradients become corrected gradients: c = factor (g + k (g - last)), g = scale gradient.

    Attributes:
        scale: of the gradients, 0-d; None is 1.
        last_scales: of the last gradients, one a piece; None is 1.
        factors: of the corrected gradients, one a piece; None is 1.
        clips: whether the update itself takes the factors.
    """

    scale: Tensor | None = None
    last_scales: Tensor | None = None
    factors: Tensor | None = None
    clips: bool = False

    @classmethod
    def before_norms(cls, bucket: Bucket) -> Correction:
        """Return what is known before any norm is: the sign, and scales that the last step left."""
        ascends = bucket.group["maximize"] and bucket.params
        scale = torch.full((), -1.0, device=bucket.params[0].device) if ascends else None
        return cls(scale, _last_scales(bucket.owned))

    def of_piece(self, index: int) -> Correction:
        """Return the correction of one piece alone."""
        one = slice(index, index + 1)
        factors, last_scales = (None if own is None else own[one] for own in (self.factors, self.last_scales))
        return replace(self, factors=factors, last_scales=last_scales)


class Update(NamedTuple):
    """A bucket that is ready for its update.

    Attributes:
        bucket: its tensors.
        correction: of its gradients.
        directions: of its pieces, where the rule orthogonalizes; else empty.
    """

    bucket: Bucket
    correction: Correction
    directions: Sequence[Tensor] = ()

    def pieces(self) -> Iterator[Update]:
        """Return updates of one piece each."""
        for index, bucket in enumerate(self.bucket.pieces()):
            yield Update(bucket, self.correction.of_piece(index), self.directions[index : index + 1])


def _last_scales(owned: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """What the last gradients in these states are still to be multiplied by, as one tensor; None for 1."""
    scales = [state.get("last_grad_scale") for state in owned]
    given = [scale for scale in scales if scale is not None]
    if not given:
        return None
    if len(given) == len(scales) and all(scale is given[0] for scale in given):  # of one step
        return given[0].repeat(len(given))
    return torch.stack([torch.ones_like(given[0]) if scale is None else scale for scale in scales])
