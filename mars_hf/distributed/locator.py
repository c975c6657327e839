"""Explains what arrives at `step()`: which parameter each stretch of an engine's tensors belongs to.

An engine may hand over something else than the parameters an optimizer was built with: FSDP2 a DTensor for each,
DeepSpeed ZeRO flat tensors that hold pieces of many.
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
from mars_hf.distributed.placement import Group, Placement, reject_fsdp1, shape_of
from mars_hf.distributed.replicas import Replicas, all_objects


class Locator:
    """Knows the parameters an optimizer was built with, and explains what arrives at `step()`.

    It keeps their shapes and their `id`, and no reference to them. A strong one would keep the unsharded model alive
    while accelerate shards it. With a weak one `torch.utils.swap_tensors` refuses a tensor, by which `model.to(dtype)`
    converts DTensors. Only where DeepSpeed has put flat tensors in their place does it look for the parameters.

    A parameter's slot is its position among all; it is the same on every rank.
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
        # Those that an engine has put into flat tensors, by slot.
        self._origins: dict[int, weakref.ref[Tensor]] = {}
        # Of an engine's flat tensor, and what of it and its parameters the placement was found from.
        self._flat: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # By mesh; what is in them follows from the slot, the placements and the shape of a DTensor.
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
        """Slots of the matrices, of the vectors if wanted, and of all DTensors found so far; alike on every rank."""
        return [
            slot for slot, role in enumerate(self._roles) if vectors or role == "matrix" or slot in self._sharded_slots
        ] + sorted(slot for slot in self._sharded_slots if slot >= len(self._roles))

    def origin(self, slot: int) -> Tensor | None:
        """The parameter in a slot that an engine has put into a flat tensor; None if there is none."""
        return self._origins[slot]() if slot in self._origins else None

    def all_seen(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of these, or others laid out like them, have been asked about before; alike on every rank."""
        seen = True
        for tensor in tensors:
            owner: Any = tensor
            key = None
            if dtensors.is_dtensor(tensor):  # by what every rank knows; and no reference to the DTensor, see the class
                owner, key = owner.device_mesh, (owner.placements, owner.shape)
            known = self._verified.setdefault(owner, set())
            seen = seen and key in known
            known.add(key)
        return seen

    def locate(self, tensor: Tensor, slot: int) -> Placement | None:
        """Where the pieces of an optimizer's tensor belong; None for a whole parameter.

        Args:
            tensor: what a parameter group holds now.
            slot: its position among the tensors of all groups.

        Raises:
            RuntimeError: the tensor is a piece of something unknown; the message names what it looks like.
        """
        if dtensors.is_dtensor(tensor):
            return self._locate_dtensor(tensor, slot)
        reject_fsdp1(tensor)
        if tensor.ndim > 1 or self._is_known(tensor):
            return None
        if tensor in self._flat:
            placement, facts = self._flat[tensor]
            if facts == self._facts(tensor, placement):
                return placement
        placement = self._explain(tensor)
        if placement is not None:
            self._flat[tensor] = placement, self._facts(tensor, placement)
            return placement
        # An engine that is not known would have flattened matrices too.
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
        """Whether this is one of the parameters; what took the place of a freed one in memory has another shape."""
        slot = self._slots.get(id(tensor))
        return slot is not None and self.shapes[slot] == tensor.shape

    def _replace(self, slot: int, tensor: Tensor) -> None:
        """Remember a vector that the user has put in the place of another, or added."""
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
            if here.numel() if region is None else here != region.shape(tensor.shape):
                raise RuntimeError(
                    f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements} has a part of shape "
                    f"{tuple(here)} on this rank, which is not how torch divides it: MARS supports what fully_shard "
                    "and distribute_tensor make"
                )
        return placement

    def _explain(self, tensor: Tensor) -> Placement | None:
        """Which parameters an engine has put into a flat tensor; None if no engine says so."""
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
        """Look for the parameters among all objects: some 50 ms. Weak references do no harm to those of an engine."""
        found = {}
        for candidate in all_objects():
            slot = self._slots.get(id(candidate))
            if slot is not None and issubclass(type(candidate), Tensor) and shape_of(candidate) == self.shapes[slot]:
                if _compat.is_of_zero12(candidate) or _compat.zero3_optimizer(candidate) is not None:
                    found[slot] = weakref.ref(candidate)
        self._origins = dict(sorted(found.items()))

    def _facts(self, tensor: Tensor, placement: Placement) -> tuple[Any, ...]:
        """What a placement in an engine's flat tensor was found from; it holds as long as these are the same."""
        origins = [self.origin(piece.slot) for piece in placement.pieces]
        return (
            *(tensor.shape, tensor.storage_offset()),
            *(None if origin is None else zero.place_in_engine(origin, tensor) for origin in origins),
        )


def _is_of_a_module(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter of any module, as one that an engine has made is not."""
    if type(tensor) is not nn.Parameter:
        return False
    modules = (candidate for candidate in all_objects() if issubclass(type(candidate), nn.Module))
    return any(tensor is param for module in modules for param in _compat.own_parameters(module).values())
