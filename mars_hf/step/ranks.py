"""What the ranks of a step share: sums over whole parameters, errors, and the work on matrices.

A process alone has the same object with nothing in it, so a step does not ask whether there are others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.orthogonalize import NewtonSchulz, compute_directions, iteration_dtype, newton_schulz_of
from mars_hf.arithmetic.resting import Moving
from mars_hf.arithmetic.update_rules import UpdateRule
from mars_hf.distributed.exchange import Exchange, Matrix, MatrixPlanner, Parcel, Round
from mars_hf.distributed.norms import GroupSums
from mars_hf.distributed.shards import ModelRef, Shards
from mars_hf.distributed.tensors import Group, ShardSpec, is_dtensor, local
from mars_hf.kernels import symmetric_products
from mars_hf.step.lists import TensorList
from mars_hf.step.metrics import StepMetrics


@dataclass
class SharedStep:
    """What this rank shares with others in one step; empty for a process alone."""

    specs: Mapping[Tensor, ShardSpec]  # of sharded parameters
    chunk_of: Mapping[int, Any]  # of matrices to orthogonalize, by the index of the parameter
    planner: MatrixPlanner
    sums: GroupSums | None = None

    @property
    def is_alone(self) -> bool:
        """Return whether no other rank takes part."""
        return self.sums is None

    @contextlib.contextmanager
    def raising_together(self) -> Iterator[None]:
        """Let an error of the block stop all ranks, with one message; nothing may have changed when it is raised."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if self.sums is not None:
                self.sums.reduce(error)  # raises on all ranks
            raise

    def reduce(self, lists: Sequence[TensorList], rows: slice) -> None:
        """Add up some rows of the sums over shards to sums over whole parameters. Collective."""
        if self.sums is None:
            return
        of_shards = [tensors for tensors in lists if tensors.process_group is not None]
        for tensors in of_shards:
            if tensors.sums is not None:
                self.sums.add(tensors.process_group, tensors.indices, tensors.sums[rows])
            if tensors.moving is not None:
                self.sums.add_moving(tensors.process_group, self._units_of(tensors), tensors.moving.flags)
        self.sums.reduce()
        for tensors in of_shards:
            if tensors.moving is not None:
                flags = self.sums.select_moving(tensors.process_group, self._units_of(tensors))
                tensors.moving = Moving(flags.to(tensors.moving.flags), tensors.moving.units)

    def _units_of(self, tensors: TensorList) -> list[int]:
        """Return the numbers by which all ranks know the units in a list of shards."""
        assert self.sums is not None
        columns = []
        for index, units in zip(tensors.indices, tensors.unit_indices, strict=True):
            columns += [self.sums.column_of_unit(index, unit) for unit in units]
        return columns

    def whole_sums(self, tensors: TensorList, sums: Tensor) -> Tensor:
        """Return sums over whole parameters: for a list of shards, those that `reduce` has added up."""
        if self.sums is None or tensors.process_group is None:
            return sums
        return self.sums.select(tensors.process_group, tensors.indices).to(sums)

    def sums_of_row(self, row: int) -> list[Tensor]:
        """Return the sum of a row over all shared parameters, 0-d; none for a process alone."""
        return [] if self.sums is None else [self.sums.sum_of_row(row)]

    def chunks(self, lists: Sequence[TensorList]) -> Iterator[Chunk]:
        """Yield the chunks of matrices that are orthogonalized together.

        Those that ranks share come first, in one order on all ranks; this rank may have no list of one.
        """
        rounds: dict[Any, tuple[Exchange, Round]] = {}
        if self.sums is not None:
            rounds = self.planner.rounds(self.sums)
        lists_of: dict[Any, list[TensorList]] = {chunk: [] for chunk in rounds}
        for tensors in lists:
            if tensors.chunk is not None:
                lists_of.setdefault(tensors.chunk, []).append(tensors)
        for chunk, of_chunk in lists_of.items():
            yield Chunk(of_chunk, *rounds.get(chunk, (None, [])))


class Chunk(NamedTuple):
    """Lists of matrices that are orthogonalized together."""

    lists: list[TensorList]
    exchange: Exchange | None  # among the ranks that share the work; None if this rank works alone
    matrices: Round  # that they share

    def iteration_dtype(self, tensors: TensorList) -> torch.dtype:
        """Return the dtype of the iteration of one of the lists."""
        if self.exchange is not None:
            return self.exchange.groups.dtype
        return iteration_dtype(tensors.group, tensors.params[0], tensors.params[0].device)

    def directions(self, momenta: Sequence[Tensor], param_groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Return what this rank holds of the directions of all matrices in the lists. Collective where ranks share.

        Args:
            momenta: their first moments, in the dtypes of the iteration.
            param_groups: the optimizer's groups.
        """
        rows = [row_avg_sq for tensors in self.lists for row_avg_sq in tensors.row_avg_sq]
        if self.exchange is None:
            settings: list[NewtonSchulz] = []
            for tensors in self.lists:
                dtype = self.iteration_dtype(tensors)
                products = symmetric_products(tensors.group, tensors.params[0].device, dtype)
                settings += [newton_schulz_of(tensors.group, dtype, products)] * len(tensors.params)
            is_double = self.lists[0].params[0].dtype == torch.float64
            return compute_directions(momenta, settings, torch.float64 if is_double else torch.float32, rows)
        dtype = self.exchange.groups.dtype

        def work(owned: list[Matrix], wholes: list[Tensor], rows_of_wholes: list[Tensor]) -> list[Tensor]:
            settings = []
            for matrix, whole in zip(owned, wholes, strict=True):
                group = param_groups[matrix.group]
                settings.append(newton_schulz_of(group, dtype, symmetric_products(group, whole.device, dtype)))
            return compute_directions(wholes, settings, dtype, rows_of_wholes)

        indices = [index for tensors in self.lists for index in tensors.indices]
        held = dict(zip(indices, map(Parcel, momenta, rows), strict=True))
        results = self.exchange.run(self.matrices, held, work)
        return [results[index].to(momentum.device) for index, momentum in zip(indices, momenta, strict=True)]


class Ranks:
    """Find what ranks share in a step: each one looks for shards anew; plans of exchanges are kept."""

    def __init__(self, param_groups: Sequence[Mapping[str, Any]] = ()) -> None:
        """Remember the parameters of these groups."""
        self.shards = Shards(param_groups)
        self._planner = MatrixPlanner()

    def begin(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        rules: Sequence[UpdateRule],
        *,
        max_grad_norm: float | None,
        metrics: StepMetrics | None,
        process_group: Group,
        model: ModelRef | None,
    ) -> SharedStep:
        """Return what a step shares. Collective where ranks share matrices for the first time.

        Args:
            param_groups: the optimizer's groups.
            rules: their update rules.
            max_grad_norm: largest global norm; None for no scaling.
            metrics: what measures the step; None for nothing.
            process_group: ranks that hold the same whole parameters; None for none.
            model: the model of the optimizer; None if it is not known.

        Raises:
            RuntimeError: a tensor is a part of something unknown, or a global norm is asked for under DeepSpeed.
        """
        specs = self._locate(param_groups, rules, max_grad_norm, model)
        chunk_of: Mapping[int, Any] = {}
        self._planner.shared = []
        if any(rule.orthogonalizes for rule in rules):
            chunk_of = self._planner.assign(param_groups, specs, self.shards.shapes, process_group)
        shared = SharedStep(specs, chunk_of, self._planner)
        sharded: list[Tensor] = []  # whose sums this rank adds to those of others
        for group, rule in zip(param_groups, rules, strict=True):
            if max_grad_norm is not None or _needs_norms(group, rule, metrics):
                sharded += [param for param in group["params"] if param in specs]
        if sharded or self._planner.shared:
            shared.sums = self._sums(param_groups, rules, rows=1 if max_grad_norm is None else 3)
            self._register(sharded, specs, shared.sums, metrics)
        return shared

    def _sums(self, param_groups: Sequence[Mapping[str, Any]], rules: Sequence[UpdateRule], *, rows: int) -> GroupSums:
        """Return sums over whole parameters, which are 0 yet."""
        params = [param for group in param_groups for param in group["params"]]
        count = max(len(self.shards.shapes), len(params))
        unit_counts: list[int] = []
        if any(rule.normalizes for rule in rules):  # by shape alone, which every rank knows of every parameter
            unit_counts = [shape[0] if len(shape) > 2 else 1 for shape in self.shards.shapes]
            unit_counts += [1] * (count - len(unit_counts))
        return GroupSums(count, rows, local(params[0]).device, unit_counts)

    def _register(
        self,
        sharded: Sequence[Tensor],
        specs: Mapping[Tensor, ShardSpec],
        sums: GroupSums,
        metrics: StepMetrics | None,
    ) -> None:
        """Say which sums this rank takes part in, and which gradients it has."""
        for param in sharded:
            sums.register_shards(specs[param], has_gradient=param.grad is not None)
            if metrics is not None:
                metrics.join(specs[param].group, local(param).device)
        self._planner.register(sums)

    def _locate(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        rules: Sequence[UpdateRule],
        max_grad_norm: float | None,
        model: ModelRef | None,
    ) -> dict[Tensor, ShardSpec]:
        """Return the specs of the sharded parameters whose norms, directions or 8-bit blocks may be needed."""
        wanted = []
        for group, rule in zip(param_groups, rules, strict=True):
            has_codes = group["state_dtype"] == eight_bits.NAME and group["role"] != "vector"
            wanted.append(max_grad_norm is not None or rule.corrects or has_codes)
        specs = self.shards.locate(param_groups, wanted, model)
        if max_grad_norm is not None and not all(map(is_dtensor, specs)):
            raise RuntimeError(
                f"max_grad_norm={max_grad_norm} under DeepSpeed, which steps group by group: set gradient_clipping "
                "in its JSON, and max_grad_norm=None"
            )
        return specs


def _needs_norms(group: Mapping[str, Any], rule: UpdateRule, metrics: StepMetrics | None) -> bool:
    """Return whether a step needs the norms, or the directions, of a group's corrected gradients."""
    if not rule.corrects:
        return False
    return rule.orthogonalizes or group["clip_threshold"] is not None or metrics is not None
