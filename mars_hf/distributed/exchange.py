"""Work on whole parameters, shared among ranks: pieces go to one owner, and what it makes of them comes back."""

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
    """Does work that needs whole parameters, each on one rank only, for all ranks that hold pieces or copies of them.

    Ranks may hold pieces of parameters (`shards`: FSDP2, ZeRO), repeat what others hold (`replicas`: DDP), or both
    (HSDP). `Routes` divides the work. Everybody gets the owner's result, so that replicas stay alike to the bit.

    One is made for each set of parameters that are updated together. That is collective, and so is `run`: all ranks of
    both groups take part, also those that hold nothing.
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
        """Tell the other ranks what is here, and divide the work.

        Args:
            shapes: of the whole parameters, by slot. Slots, shapes and costs are the same on all ranks; parameters of
                which no rank holds anything are left out.
            costs: of the work on each, by slot; above 0, any unit.
            regions: what is here of each, by slot; an empty one is as good as none.
            shards: process group whose ranks hold the pieces of the parameters; None where they are whole, which is
                not the default group.
            replicas: process group whose ranks hold the same pieces; None if there are none.
            device: of the pieces.
            dtype: that pieces and results are rounded to, on the wire and where there is none; 2 bytes an element with
                torch.bfloat16.

        Raises:
            RuntimeError: on all ranks, where they disagree, or hold other than each element of a parameter once.
        """
        self._shards, self._replicas = _unless_alone(shards), _unless_alone(replicas)
        self._device, self._dtype = device, dtype
        # Where the work is done.
        self._wire = device
        for group in (self._shards, self._replicas):
            if group is not None:
                self._wire = wire_device(self._wire, group)
        rank, replica = _rank(self._shards), _rank(self._replicas)
        settings = digest([(slot, shape, costs[slot]) for slot, shape in sorted(shapes.items())], dtype)
        held = {slot: region for slot, region in sorted(regions.items()) if region.shape(shapes[slot]).numel()}
        shared = gather_objects((settings, held, replica), self._shards)
        # One answer for all ranks, so that none of them goes on alone.
        everywhere = gather_objects((digest([(settings, held) for settings, held, _ in shared]), rank), self._replicas)
        if len(set(everywhere)) > 1 or len({(settings, replica) for settings, _, replica in shared}) > 1:
            raise disagreement(len(everywhere) * len(shared), len(shared))
        self._routes = Routes(
            shapes, costs, [held for _, held, _ in shared], rank=rank, replica=replica, replicas=len(everywhere)
        )

    @property
    def owners(self) -> dict[int, int]:
        """Who works on each slot: its replica times the number of ranks that share one, plus its place among them."""
        return self._routes.owners

    @property
    def volume(self) -> dict[str, int]:
        """Bytes that this rank sends in a `run`, by collective; nothing else is sent.

        - `to_owners`: one all-to-all among `shards`. With W ranks that hold equal parts and R replicas, a rank sends
          (W - 1) / W of the R-th part of its pieces. What is whole on one rank (most matrices under ZeRO-1 and 2) is
          worked on there, and sends nothing.
        - `from_owners`: one all-to-all among `shards`, the way back: as much, the other way round.
        - `replicas`: one all-gather among `replicas`: (R - 1) times the pieces that this replica worked on, as large as
          the largest of such blocks, since blocks are padded; (R - 1) / R of the pieces where they are equal. As much
          is received.
        """
        return self._routes.volume(self._dtype.itemsize)

    @torch.no_grad()
    def run(self, pieces: Mapping[int, Tensor], work: Work) -> dict[int, Tensor]:
        """Do the work.

        Args:
            pieces: what is here of each slot, shaped like `region.of(whole)`, of any floating dtype; not modified.
            work: makes of whole tensors, by slot, others of the same shapes; does not modify them. Called once with
                all that this rank works on, or not at all if that is nothing.

        Returns:
            The same pieces of the results, in the dtype of the exchange. They may share memory with each other and
            with what `work` has returned.
        """
        here = self._from_owners(self._work(work, self._to_owners(pieces)))
        here = self._from_replicas(here)
        return {
            slot: here[slot].to(piece.device) if slot in here else torch.empty_like(piece, dtype=self._dtype)
            for slot, piece in pieces.items()
        }

    def _work(self, work: Work, wholes: dict[int, Tensor]) -> dict[int, Tensor]:
        results = work(wholes) if wholes else {}
        return {slot: results[slot].to(self._wire, self._dtype).contiguous() for slot in wholes}

    def _to_owners(self, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Whole tensors of what this rank works on."""
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
            kept = [(item, pieces[item.slot]) for item in routes.kept if item.slot not in routes.uncut]
            _copy([(item.region.of(wholes[item.slot]), piece) for item, piece in [*views, *kept]])
        return wholes

    def _from_owners(self, results: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """This rank's pieces of what is worked on in its replica."""
        routes = self._routes
        here = {item.slot: item.region.of(results[item.slot]) for item in routes.kept}
        if routes.moves:
            sent = [item.region.of(results[item.slot]) for items in routes.received for item in items]
            received = self._all_to_all(self._pack(sent, self._wire), routes.received, routes.sent)
            here |= {item.slot: piece for item, piece in _unpack(received, routes.sent)}
        return here

    def _from_replicas(self, here: dict[int, Tensor]) -> dict[int, Tensor]:
        """This rank's pieces of everything."""
        routes = self._routes
        if self._replicas is None or not routes.block:
            return here
        block = routes.blocks[_rank(self._replicas)]
        sent = self._pack([here[item.slot] for item in block], self._wire, routes.block)
        # Padded, since NCCL makes a broadcast for each rank of an uneven one.
        received = torch.empty(len(routes.blocks) * routes.block, dtype=self._dtype, device=self._wire)
        # torch 2.13 gave it another name.
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
        """The elements of all, one after the other and rounded; padded to `numel` with anything."""
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
    """Each piece, as a view."""
    items = [item for parcel in parcels for item in parcel]
    parts = flat[: sum(item.numel for item in items)].split([item.numel for item in items])
    return [(item, part.view(item.shape)) for item, part in zip(items, parts, strict=True)]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [what for _, what in pairs])


def _bytes(flat: Tensor) -> Tensor:
    """What travels: not every backend knows every dtype."""
    return flat.view(torch.uint8)


def _unless_alone(group: Group) -> Group:
    return None if group is None or dist.get_world_size(group) == 1 else group


def _rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """What each rank of a group has; this one's alone where there is no group."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(values: Any, group: Group, device: torch.device, *flags: bool) -> tuple[bool, tuple[bool, ...]]:
    """Tell the other ranks of a group, in one all-reduce of a few numbers, what this one is about to do.

    Args:
        values: what they should all be about to do; compared by `repr`.
        group: the ranks.
        device: where the work will be done; waits for it, unless it is a CPU.
        *flags: what each of them may want.

    Returns:
        Whether all agree, and for each flag whether any rank has raised it; the same on every rank.
    """
    number = int(digest(values)[:15], 16)
    sent = torch.tensor([number, -number, *flags], dtype=torch.int64).to(wire_device(device, group))
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, *raised = sent.tolist()
    return largest == -smallest, tuple(map(bool, raised))


def disagreement(ranks: int, copy: int) -> RuntimeError:
    """The error for ranks that would update different parameters; `copy` of them hold one copy of the model."""
    return RuntimeError(
        f"{ranks} ranks, {copy} for each copy of the model, disagree on the parameters to be updated, on their shapes, "
        "or on which pieces are where: build the optimizer from the same parameters in the same order on every rank, "
        "and give them gradients in the same steps"
    )


def digest(*values: Any) -> str:
    """A number, in hexadecimal digits, for values of the same `repr`."""
    return hashlib.sha256(repr(values).encode()).hexdigest()
