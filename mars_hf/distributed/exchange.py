"""Share work on whole parameters among ranks: pieces go to one owner, and its results come back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.distributed.placement import Group
from mars_hf.distributed.routes import Item, Region, Routes
from mars_hf.distributed.whole_sums import wire_device

Work = Callable[[dict[int, Tensor]], dict[int, Tensor]]


class Exchange:
    """Do work on whole parameters once, each on one rank, for all ranks that hold pieces or copies.

    Ranks may hold pieces of parameters (`shards`: FSDP2, ZeRO), copies of what others hold (`replicas`: DDP), or both
    (HSDP). `Routes` divides the work. All ranks get the owner's result, so replicas stay bit-identical.

    Each set of parameters updated together has its own Exchange. Construction and `run` are collective: all ranks of
    both process groups take part, also those that hold nothing.
    """

    def __init__(
        self,
        shapes: Mapping[int, torch.Size],
        costs: Mapping[int, float],
        regions: Mapping[int, Region],
        *,
        shards: Group | None,
        replicas: Group | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Exchange local regions with the other ranks and assign each parameter an owner.

        Args:
            shapes: shapes of the whole parameters, by slot. Slots, shapes and costs are the same on all ranks;
                parameters that no rank holds are left out.
            costs: cost of the work on each slot; above 0, in any unit.
            regions: local region of each slot; an empty one counts as none.
            shards: process group whose ranks hold the pieces; None means whole parameters, not the default group.
            replicas: process group whose ranks hold the same pieces; None means no replicas.
            device: device of the pieces.
            dtype: dtype that pieces and results are rounded to, sent or not; torch.bfloat16 takes 2 bytes per element.

        Raises:
            RuntimeError: ranks disagree, or do not hold each element of a parameter exactly once; raised on all ranks.
        """
        self._shards, self._replicas = _unless_alone(shards), _unless_alone(replicas)
        self._device, self._dtype = device, dtype
        # The device that does the work.
        self._wire = device
        for group in (self._shards, self._replicas):
            if group is not None:
                self._wire = wire_device(self._wire, group)
        rank, replica = _rank(self._shards), _rank(self._replicas)
        settings = digest([(slot, shape, costs[slot]) for slot, shape in sorted(shapes.items())], dtype)
        held = {slot: region for slot, region in sorted(regions.items()) if region.shape(shapes[slot]).numel()}
        shared = gather_objects((settings, held, replica), self._shards)
        # One answer for all ranks, so that none of them continues alone.
        everywhere = gather_objects((digest([(settings, held) for settings, held, _ in shared]), rank), self._replicas)
        if len(set(everywhere)) > 1 or len({(settings, replica) for settings, _, replica in shared}) > 1:
            raise disagreement(len(everywhere) * len(shared), len(shared))
        self._routes = Routes(
            shapes, costs, [held for _, held, _ in shared], rank=rank, replica=replica, replicas=len(everywhere)
        )

    @property
    def owners(self) -> dict[int, int]:
        """Return the owner of each slot: its replica times the ranks per replica, plus its place among them."""
        return self._routes.owners

    @property
    def volume(self) -> dict[str, int]:
        """Return the bytes that this rank sends in a `run`, by collective; nothing else is sent.

        - `to_owners`: one all-to-all among `shards`. With W ranks that hold equal parts and R replicas, a rank sends
          (W - 1) / W of the R-th part of its pieces. A parameter that is whole on one rank (most matrices under ZeRO-1
          and 2) is worked on there and sends nothing.
        - `from_owners`: one all-to-all among `shards`, the way back: the same amount in the other direction.
        - `replicas`: one all-gather among `replicas`: (R - 1) times the pieces that this replica worked on, padded to
          the largest such block; (R - 1) / R of the pieces if blocks are equal. A rank receives as much.
        """
        return self._routes.volume(self._dtype.itemsize)

    @torch.no_grad()
    def run(self, pieces: Mapping[int, Tensor], work: Work) -> dict[int, Tensor]:
        """Do the work and return this rank's pieces of the results.

        Args:
            pieces: local piece of each slot, of `region.local_shape`, any floating dtype; not modified.
            work: maps whole tensors, by slot, to results of the same shapes; must not modify them. Called once with
                all tensors that this rank works on, or not at all if there are none.

        Returns:
            The same pieces of the results, in the dtype of the exchange. They may share memory with each other and
            with the results of `work`.
        """
        here = self._from_owners(self._work(work, self._to_owners(pieces)))
        here = self._from_replicas(here)
        return {
            slot: here[slot].to(piece.device).reshape(piece.shape)
            if slot in here
            else torch.empty_like(piece, dtype=self._dtype)
            for slot, piece in pieces.items()
        }

    def _work(self, work: Work, wholes: dict[int, Tensor]) -> dict[int, Tensor]:
        results = work(wholes) if wholes else {}
        return {slot: results[slot].to(self._wire, self._dtype).contiguous() for slot in wholes}

    def _to_owners(self, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the whole tensors that this rank works on."""
        routes = self._routes
        wholes = {}
        for slot, shape in routes.whole.items():
            if slot in routes.uncut:
                wholes[slot] = pieces[slot].to(self._wire, self._dtype).reshape(shape)
            else:
                wholes[slot] = torch.empty(shape, dtype=self._dtype, device=self._wire)
        if routes.moves:
            sent = self._pack([pieces[item.slot] for items in routes.sent for item in items], self._device)
            received = self._all_to_all(sent, routes.sent, routes.received)
            views = _unpack(received, routes.received)
            kept = [(item, pieces[item.slot].view(item.shape)) for item in routes.kept if item.slot not in routes.uncut]
            _copy([(item.region.of(wholes[item.slot]), piece) for item, piece in [*views, *kept]])
        return wholes

    def _from_owners(self, results: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return this rank's pieces of the results of its replica."""
        routes = self._routes
        here = {item.slot: item.region.of(results[item.slot]) for item in routes.kept}
        if routes.moves:
            sent = [item.region.of(results[item.slot]) for items in routes.received for item in items]
            received = self._all_to_all(self._pack(sent, self._wire), routes.received, routes.sent)
            here |= {item.slot: piece for item, piece in _unpack(received, routes.sent)}
        return here

    def _from_replicas(self, here: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return this rank's pieces of all results."""
        routes = self._routes
        if self._replicas is None or not routes.block:
            return here
        block = routes.blocks[_rank(self._replicas)]
        sent = self._pack([here[item.slot] for item in block], self._wire, routes.block)
        # Padded: NCCL turns an uneven all-gather into one broadcast per rank.
        received = torch.empty(len(routes.blocks) * routes.block, dtype=self._dtype, device=self._wire)
        # torch 2.13 renamed it.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(_bytes(received), _bytes(sent), group=self._replicas)
        blocks = received.split(routes.block)
        return {
            item.slot: piece
            for index, items in enumerate(routes.blocks)
            for item, piece in _unpack(blocks[index], [items])
        }

    def _all_to_all(self, sent: Tensor, leaving: Sequence[list[Item]], coming: Sequence[list[Item]]) -> Tensor:
        leaving_numels, coming_numels = ([sum(i.numel for i in items) for items in way] for way in (leaving, coming))
        received = torch.empty(sum(coming_numels), dtype=self._dtype, device=self._wire)
        size = self._dtype.itemsize
        dist.all_to_all_single(
            _bytes(received),
            _bytes(sent.to(self._wire)),
            [numel * size for numel in coming_numels],
            [numel * size for numel in leaving_numels],
            group=self._shards,
        )
        return received

    def _pack(self, tensors: Sequence[Tensor], device: torch.device, numel: int | None = None) -> Tensor:
        """Return the elements of all tensors, rounded, one after the other; padded to `numel` with anything."""
        flat = torch.empty(
            sum(tensor.numel() for tensor in tensors) if numel is None else numel, dtype=self._dtype, device=device
        )
        start = 0
        copies = []
        for tensor in tensors:
            copies.append((flat[start : start + tensor.numel()].view(tensor.shape), tensor))
            start += tensor.numel()
        _copy(copies)
        return flat


def _unpack(flat: Tensor, parcels: Iterable[Sequence[Item]]) -> list[tuple[Item, Tensor]]:
    """Return each piece as a view."""
    items = [item for parcel in parcels for item in parcel]
    parts = flat[: sum(item.numel for item in items)].split([item.numel for item in items])
    return [(item, part.view(item.shape)) for item, part in zip(items, parts, strict=True)]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [what for _, what in pairs])


def _bytes(flat: Tensor) -> Tensor:
    """View a tensor as bytes: not every communication backend knows every dtype."""
    return flat.view(torch.uint8)


def _unless_alone(group: Group) -> Group:
    return None if group is None or dist.get_world_size(group) == 1 else group


def _rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Return the values of all ranks of a process group; this rank's alone if there is none."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(values: Any, group: Group, device: torch.device, *flags: bool) -> tuple[bool, tuple[bool, ...]]:
    """Check, in one all-reduce of a few numbers, that all ranks of a process group are about to do the same.

    Args:
        values: what this rank is about to do; compared by `repr`.
        group: the process group.
        device: device of the work; waits for it, unless it is a CPU.
        *flags: requests that any rank may raise.

    Returns:
        Whether all ranks agree, and for each flag whether any rank raised it; the same on every rank.
    """
    number = int(digest(values)[:15], 16)
    sent = torch.tensor([number, -number, *flags], dtype=torch.int64).to(wire_device(device, group))
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, *raised = sent.tolist()
    return largest == -smallest, tuple(map(bool, raised))


def disagreement(ranks: int, copy: int) -> RuntimeError:
    """Return the error for ranks that would update different parameters; `copy` ranks hold one copy of the model."""
    return RuntimeError(
        f"{ranks} ranks, {copy} for each copy of the model, disagree on the parameters to be updated, on their shapes, "
        "on which pieces are where, or on the dtype of Newton-Schulz: build the optimizer from the same parameters in "
        "the same order on every rank, give them gradients in the same steps, and state ns_dtype if their CPUs differ"
    )


def digest(*values: Any) -> str:
    """Return a hash, in hexadecimal digits, of the `repr` of values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()
