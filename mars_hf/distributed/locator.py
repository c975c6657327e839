"""Find the parameter behind each part of the tensors that an engine passes to `step()`.

An engine may replace the parameters that an optimizer was built with: FSDP2 by a DTensor for each, DeepSpeed ZeRO by
flat tensors that hold pieces of many.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mars_hf import _compat
from mars_hf.distributed import dtensors, zero
from mars_hf.distributed.placement import Group, Placement, reject_parts, shape_of
from mars_hf.distributed.replicas import Replicas, all_objects


class Locator:
    """Locate the tensors of a step among the parameters that the optimizer was built with.

    It keeps their shapes and ids, but no references. A strong reference would keep the unsharded model alive while
    accelerate shards it. A weak one would make `torch.utils.swap_tensors`, which `model.to(dtype)` uses on DTensors,
    refuse the tensor. It looks for the parameters themselves only if DeepSpeed has replaced them by flat tensors.

    A parameter's slot is its position among all parameters; it is the same on every rank.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]] = (), process_group: Group = None) -> None:
        """Remember the parameters of these groups.

        Args:
            groups: of the optimizer.
            process_group: as `Replicas`.
        """
        self.shapes: list[torch.Size] = []  # of the whole parameters, by slot
        self._roles: list[str] = []
        self._slots: dict[int, int] = {}  # by id
        # Parameters that an engine has put into flat tensors, by slot.
        self._origins: dict[int, weakref.ref[Tensor]] = {}
        # An engine's flat tensor to its placement and the facts that the placement follows from.
        self._flat: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Mesh to placements, keyed by slot, placements and shape of a DTensor.
        self._meshes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sharded_slots: set[int] = set()
        self._verified: WeakIdKeyDictionary = WeakIdKeyDictionary()  # flat tensors, and meshes with their geometries
        self.replicas = Replicas(process_group)
        for group in groups:
            self.extend(group)
            if group.get("mars_type") in ("mars-shampoo", "mars-m"):
                self.replicas.begin()

    def extend(self, group: Mapping[str, Any]) -> None:
        """Remember the parameters of one more group."""
        for param in group["params"]:
            self._slots[id(param)] = len(self.shapes)
            self.shapes.append(shape_of(param))
            self._roles.append(group["role"])
        self._origins.clear()
        self._flat.clear()
        self._verified.clear()

    def slots(self, *, vectors: bool) -> list[int]:
        """Return the slots of matrices, of vectors if wanted, and of all DTensors found so far; equal on all ranks."""
        return [
            slot for slot, role in enumerate(self._roles) if vectors or role == "matrix" or slot in self._sharded_slots
        ] + sorted(slot for slot in self._sharded_slots if slot >= len(self._roles))

    def origin(self, slot: int) -> Tensor | None:
        """Return the parameter of a slot that an engine has put into a flat tensor; None if unknown."""
        return self._origins[slot]() if slot in self._origins else None

    def all_seen(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all tensors, or ones with the same placement, were seen before; equal on all ranks."""
        seen = True
        for tensor in tensors:
            owner: Any = tensor
            key = None
            if dtensors.is_dtensor(tensor):  # key by facts known to every rank, without a reference (see the class)
                owner, key = owner.device_mesh, (owner.placements, owner.shape)
            known = self._verified.setdefault(owner, set())
            seen = seen and key in known
            known.add(key)
        return seen

    def locate(self, tensor: Tensor, slot: int) -> Placement | None:
        """Return the placement of an optimizer's tensor; None for a whole parameter.

        Args:
            tensor: a tensor in a parameter group.
            slot: its position among the tensors of all groups.

        Raises:
            RuntimeError: the tensor is a piece of something unknown; the message describes it.
        """
        if dtensors.is_dtensor(tensor):
            return self._locate_dtensor(tensor, slot)
        reject_parts(tensor)
        if self._is_known(tensor):
            return None
        if tensor.ndim > 1:
            if slot < len(self.shapes) and tensor.shape != self.shapes[slot]:
                self._find_origins()  # an engine's copy of a part, or the user has resized the parameter
                self._replace(slot, tensor)
            return None
        if tensor in self._flat:
            placement, facts = self._flat[tensor]
            if facts == self._facts(tensor, placement):
                return placement
        placement = self._explain(tensor)
        if placement is not None:
            self._flat[tensor] = placement, self._facts(tensor, placement)
            return placement
        # A vector the user replaced or added; an unknown engine would have flattened matrices too.
        in_its_place = slot >= len(self.shapes) or self._roles[slot] == "vector"
        if not self._origins and (in_its_place or _is_of_a_module(tensor)):
            self._replace(slot, tensor)
            return None
        raise RuntimeError(
            f"a flat tensor of shape {tuple(tensor.shape)} that is none of the parameters Mars was built with: the "
            "norm of a corrected gradient cannot be taken over a piece of unknown origin. Supported are DDP, FSDP2 and "
            "DeepSpeed ZeRO-1/2/3, with Mars built from the model's own parameters"
        )

    def _is_known(self, tensor: Tensor) -> bool:
        """Return whether this is one of the parameters: same id and shape, since ids of freed ones are reused."""
        slot = self._slots.get(id(tensor))
        return slot is not None and self.shapes[slot] == tensor.shape

    def _replace(self, slot: int, tensor: Tensor) -> None:
        """Remember a vector that the user has replaced or added."""
        self._slots[id(tensor)] = slot
        if slot < len(self.shapes):
            self.shapes[slot] = tensor.shape

    def _locate_dtensor(self, tensor: Any, slot: int) -> Placement | None:
        found = self._meshes.setdefault(tensor.device_mesh, {})
        key = (slot, tensor.placements, tensor.shape)
        if key not in found:
            found[key] = dtensors.place_dtensor(tensor, slot)
        placement = found[key]
        if placement is not None:
            self._sharded_slots.add(slot)
            (region,) = [piece.region for piece in placement.pieces] or [None]
            here = tensor.to_local().shape
            if here.numel() if region is None else here != region.local_shape(tensor.shape):
                raise RuntimeError(
                    f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements} has a part of shape "
                    f"{tuple(here)} on this rank, which is not how torch divides it: MARS supports what fully_shard, "
                    "parallelize_module and distribute_tensor make"
                )
        return placement

    def _explain(self, tensor: Tensor) -> Placement | None:
        """Return the placement of an engine's flat tensor; None if no known engine explains it."""
        if self._origins:
            placement = self._explain_with_origins(tensor)
            if placement is not None:
                return placement
        self._find_origins()
        return self._explain_with_origins(tensor)

    def _explain_with_origins(self, tensor: Tensor) -> Placement | None:
        origins = [(slot, origin) for slot, ref in self._origins.items() if (origin := ref()) is not None]
        return zero.place_in_zero3(tensor, origins) or zero.place_in_zero12(tensor, origins)

    def _find_origins(self) -> None:
        """Search all objects for the parameters: about 50 ms. Weak references do not disturb an engine's parameters."""
        found = {}
        slots = self._slots
        for candidate in [one for one in all_objects() if id(one) in slots]:
            slot = slots[id(candidate)]
            if not issubclass(type(candidate), Tensor):
                continue
            reject_parts(candidate)
            if _compat.is_of_zero12(candidate) or _compat.zero3_optimizer(candidate) is not None:
                if shape_of(candidate) == self.shapes[slot]:
                    found[slot] = weakref.ref(candidate)
        self._origins = dict(sorted(found.items()))

    def _facts(self, tensor: Tensor, placement: Placement) -> tuple[Any, ...]:
        """Return the facts behind a placement in a flat tensor; it is valid while they stay the same."""
        origins = [self.origin(piece.slot) for piece in placement.pieces]
        return (
            *(tensor.shape, tensor.storage_offset()),
            *(None if origin is None else zero.place_in_engine(origin, tensor) for origin in origins),
        )


def _is_of_a_module(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter of any module; an engine's own tensors are not."""
    if type(tensor) is not nn.Parameter:
        return False
    modules = (candidate for candidate in all_objects() if issubclass(type(candidate), nn.Module))
    return any(tensor is param for module in modules for param in _compat.own_parameters(module).values())
