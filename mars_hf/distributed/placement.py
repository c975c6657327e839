"""Describe where the pieces of a parameter live, and which ranks replicate them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf import _compat
from mars_hf.distributed.routes import Region

# ProcessGroup, or None for the default one.
Group = Any


class Piece(NamedTuple):
    """A part of a flattened local tensor: `numel` elements from `start` on, of the `whole` ones of parameter `slot`.

    `region` says which elements of the parameter these are.
    """

    slot: int
    start: int
    numel: int
    whole: int
    region: Region


class Placement(NamedTuple):
    """The pieces in a local tensor (none if it is all padding), and the ranks that hold the others.

    `replicas` are the ranks that hold the same pieces; None means no replicas.
    """

    pieces: tuple[Piece, ...]
    group: Group
    replicas: Group = None


def cut(tensor: Tensor, placement: Placement | None) -> list[Tensor]:
    """Return the pieces of a local tensor as views; the tensor itself if it is one piece."""
    if placement is None or [piece.numel for piece in placement.pieces] == [tensor.numel()]:
        return [tensor]
    return [tensor[piece.start : piece.start + piece.numel] for piece in placement.pieces]


def shares(placement: Placement | None) -> list[float]:
    """Return each piece's fraction of its parameter."""
    return [1.0] if placement is None else [piece.numel / piece.whole for piece in placement.pieces]


def shape_of(param: Tensor) -> torch.Size:
    """Return the parameter's own shape, also if DeepSpeed's `zero.Init` has left an empty tensor in its place."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def reject_parts(param: Tensor) -> None:
    """Raise RuntimeError for a parameter flattened by FSDP1 or divided by tensor parallelism without DTensors.

    Its shape is no longer that of the whole, and nothing says where the rest is.
    """
    if _compat.is_of_tensor_parallelism(param):
        raise RuntimeError(
            f"a parameter of shape {tuple(shape_of(param))} that DeepSpeed's AutoTP or Megatron has marked as one part "
            "(tensor_model_parallel): MARS needs norms over whole parameters, and only DTensors say where the other "
            'parts are. Use torch\'s tensor parallelism (tp_plan="auto" in from_pretrained, or parallelize_module), or '
            "ZeRO without AutoTP"
        )
    if _compat.is_flattened_by_fsdp1(param):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} that FSDP1 has flattened: MARS needs the parameters' shapes; "
            "use FSDP2 (fully_shard, or fsdp_version: 2 in the accelerate config)"
        )
