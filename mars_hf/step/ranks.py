"""What the ranks of a step share: sums over whole parameters, errors, and the work on matrices.

A process alone has the same object with nothing in it, so a step does not ask whether there are others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.directions import NewtonSchulz, compute_directions, iteration_dtype, newton_schulz_of
from mars_hf.arithmetic.update_rules import UpdateRule, update_rule
from mars_hf.distributed.exchange import Exchange, Matrix, MatrixPlanner, Round
from mars_hf.distributed.norms import GroupSums, named
from mars_hf.distributed.shards import ModelRef, Shards, misplaced, spec_of_copies, takes_communication
from mars_hf.distributed.tensors import Group, ShardSpec, is_dtensor, local
from mars_hf.groups.settings import GROUP_KEYS
from mars_hf.kernels import symmetric_products
from mars_hf.step.lists import TensorList
from mars_hf.step.metrics import StepMetrics

# Numbers may differ in their last digits, where processors compute schedules; `fused` may differ with the processor.
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "gamma")
_NAMES = tuple(name for name in (*GROUP_KEYS, "role") if name not in (*_NUMBERS, "max_grad_norm", "fused"))
_ENDED = object()  # stands for the next yield of an update that has none


def settings_to_compare(group: Mapping[str, Any], index: int) -> dict[str, str]:
    """Return what must be the same on all ranks that share a group, by the names that an error gives it."""
    of_group = {name: _shown(group[name]) for name in _NUMBERS}
    if group["weight_decay_mode"] == "decoupled":
        of_group |= {name: _shown(group.get(name)) for name in ("max_lr", "peak_lr", "initial_lr")}
    of_group |= {name: _shown(group.get(name)) for name in _NAMES}
    compared = {f"{name} of param group {index}": text for name, text in of_group.items()}
    # ZeRO has flattened the matrices: ranks must have them in one order.
    shapes = tuple([tuple(param.shape) for param in group["params"] if param.ndim > 1])
    return {**compared, f"the shapes in param group {index}": str(shapes)}


def _shown(value: Any) -> str:
    """Return a value as text, the same whatever type holds it; numbers on a GPU are not waited for."""
    if isinstance(value, Tensor):
        return _shown(value.item()) if value.device.type == "cpu" else "a tensor"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, dict):
        return str({name: _shown(value[name]) for name in sorted(value)})
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")


class _OfGroup(NamedTuple):
    """Those settings of a group that decide which sums ranks add up."""

    rule: UpdateRule
    clips: bool
    has_codes: bool

    @classmethod
    def read(cls, group: Mapping[str, Any]) -> _OfGroup:
        """Read a group."""
        has_codes = group["state_dtype"] == eight_bits.NAME and group["role"] != "vector"
        return cls(update_rule(group), group["clip_threshold"] is not None, has_codes)


class _Settings(NamedTuple):
    """What decides which sums ranks add up: the same on all ranks, or the step before was refused."""

    groups: tuple[_OfGroup, ...]
    has_global_norm: bool
    has_metrics: bool

    def wants(self, index: int) -> bool:
        """Return whether the norms, directions or 8-bit blocks of a group's parameters may be needed."""
        of_group = self.groups[index]
        return self.has_global_norm or of_group.rule.corrects or of_group.has_codes

    def needs_norms(self, index: int) -> bool:
        """Return whether a step adds up norms of a group's corrected gradients, or exchanges its first moments."""
        of_group = self.groups[index]
        rule = of_group.rule
        needs_corrected = rule.corrects and (rule.orthogonalizes or of_group.clips or self.has_metrics)
        return self.has_global_norm or needs_corrected


class SharedStep:
    """What this rank shares with others in one step; empty for a process alone. `plan` comes first.

    The first all-reduce of a step has the form of the step before, whatever this rank has changed since, so that a rank
    whose settings are wrong, or differ, meets the others there. A second one follows only if the form changes, or if
    ranks communicate before the sums are known.
    """

    def __init__(
        self,
        ranks: Ranks,
        param_groups: Sequence[Mapping[str, Any]],
        *,
        process_group: Group,
        model: ModelRef | None,
    ) -> None:
        """Find what is sharded; collective where ranks meet for the first time. `raising_together` raises its errors.

        Args:
            ranks: what they have shared before.
            param_groups: the optimizer's groups.
            process_group: ranks that hold the same whole parameters; None for none.
            model: the model of the optimizer; None if it is not known.
        """
        self._ranks = ranks
        self._groups = param_groups
        self._process_group = process_group
        self._former = ranks.settings_of_before(param_groups)
        self._settings = self._former
        wanted = [self._former.wants(index) for index in range(len(param_groups))]
        with contextlib.suppress(Exception):  # said when they are checked
            settings = ranks.settings_of(param_groups, has_metrics=self._former.has_metrics)
            wanted = [settings.wants(index) or was_wanted for index, was_wanted in enumerate(wanted)]
        self.specs, self._error = ranks.shards.locate(param_groups, wanted, model)
        self.chunk_of: Mapping[int, Any] = {}
        self._planner: MatrixPlanner | None = None  # of exchanges; None if no rule orthogonalizes
        self.sums: GroupSums | None = None  # None before `plan`, and for a process alone
        self._compared: Mapping[str, str] | None = None  # what must be the same on all ranks
        self._has_agreed = False  # on going on, before the sums of the step
        self._is_told = False  # what is raised comes from an all-reduce: all ranks raise it

    @property
    def is_alone(self) -> bool:
        """Return whether no other rank takes part in this step, which has been planned."""
        return self.sums is None

    @contextlib.contextmanager
    def raising_together(self, error: Exception | None = None) -> Iterator[None]:
        """Let an error of the block stop all ranks, with one message; nothing may have changed when it is raised.

        `error`, and an error that this rank has kept since the step before, stop them as well. If a step has stopped
        half-way, so does every later one. An interrupt is not told to others: a launcher ends their processes.
        """
        ranks = self._ranks
        error, ranks.held_error = error or ranks.held_error, None
        try:
            if error is not None:
                raise error
            if ranks.interruption is not None:
                raise RuntimeError(
                    f"the step before stopped half-way ({ranks.interruption}), so ranks no longer hold the same "
                    "parameters: go on from the last checkpoint"
                )
            if self._error is not None:
                raise self._error
            yield
        except Exception as raised:
            if not self._is_told:
                sums = self.sums if self._has_agreed else self._sums(self._former)
                if sums is not None:
                    sums.reduce(raised)  # raises on all ranks
            raise

    def plan(self, *, max_grad_norm: float | None, metrics: StepMetrics | None) -> None:
        """Plan sums and exchanges. Collective where the plan differs from that of the step before.

        Args:
            max_grad_norm: largest global norm; None for no scaling.
            metrics: what measures the step; None for nothing.

        Raises:
            RuntimeError: a global norm is asked for under DeepSpeed, or a gradient cannot be placed.
        """
        ranks = self._ranks
        if max_grad_norm is not None and not all(map(is_dtensor, self.specs)):
            raise RuntimeError(
                f"max_grad_norm={max_grad_norm} under DeepSpeed, which steps group by group: set gradient_clipping "
                "in its JSON, and max_grad_norm=None"
            )
        settings = ranks.settings_of(self._groups, has_metrics=metrics is not None)
        self.sums = self._sums(settings, metrics)
        to_place = misplaced(self._groups)
        has_changed = settings != self._former and _form(self.sums) != _form(self._sums(self._former))
        if self.sums is not None or has_changed:
            self._compared = self._compare(max_grad_norm, metrics, to_place)
        if has_changed or any(map(takes_communication, to_place.values())):
            self._agree()
        if any(of_group.rule.orthogonalizes for of_group in settings.groups):
            self._planner = ranks.planner
            self.chunk_of = ranks.planner.assign(
                self._groups, self.specs, ranks.shards.shapes, self._process_group, self._agree
            )
        self._settings = settings

    def _compare(
        self, max_grad_norm: float | None, metrics: StepMetrics | None, to_place: Mapping[int, Any]
    ) -> dict[str, str]:
        """Return what must be the same on all ranks that share parameters."""
        compared = {"max_grad_norm": _shown(max_grad_norm)}
        compared["metrics"] = str(bool(self.specs) and metrics is not None)
        for index, param in to_place.items():
            compared[f"the placement of gradient {index}"] = str(param.grad.placements)
        for index, group in enumerate(self._groups):
            if self._is_shared(group):
                compared |= settings_to_compare(group, index)
        return compared

    def _agree(self) -> None:
        """Let ranks meet before they communicate: all stop if one has failed, or would not communicate; once a step."""
        if self._has_agreed:
            return
        sums = self._sums(self._former)
        if sums is not None and self._compared is not None:
            self._is_told = True
            # What follows is communication that a step does not always have: it must follow on all ranks.
            sums.reduce(settings={**self._compared, "what comes next": "an agreement"})
            self._is_told = False
        self._has_agreed = True

    def _sums(self, settings: _Settings, metrics: StepMetrics | None = None) -> GroupSums | None:
        """Return sums over whole parameters, which are 0 yet, with what gradients are here; None for a rank alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        params = [param for group in self._groups for param in group["params"]]
        joined = list(self._joined(settings))
        is_new_group = self._is_new_group(params)
        if not joined and not is_new_group:
            return None
        sums = self._ranks.empty_sums(params, settings)
        for param, spec in joined:
            sums.join(spec, has_gradient=param.grad is not None)
            if spec.group is not None and metrics is not None:
                metrics.join(spec.group, local(param).device)
        if is_new_group:
            sums.register(self._process_group)
        return sums

    def _joined(self, settings: _Settings) -> Iterator[tuple[Tensor, ShardSpec]]:
        """Yield the parameters in whose sums this rank takes part: whole ones if ranks share their work."""
        index = -1
        for group_index, group in enumerate(self._groups):
            needs_norms = bool(self.specs) and settings.needs_norms(group_index)
            orthogonalizes = settings.groups[group_index].rule.orthogonalizes
            for param in group["params"]:
                index += 1
                spec = self.specs.get(param)
                if spec is not None and needs_norms:
                    yield param, spec
                elif spec is None and orthogonalizes:
                    spec = spec_of_copies(param, index, self._process_group)
                    if spec is not None:
                        yield param, spec

    def _is_new_group(self, params: Sequence[Tensor]) -> bool:
        """Return whether ranks that hold copies take their first step together: they compare settings."""
        group = self._process_group
        if group is None or group is self._ranks.compared or dist.get_world_size(group) == 1:
            return False
        return any(param not in self.specs and not is_dtensor(param) for param in params)

    def _is_shared(self, group: Mapping[str, Any]) -> bool:
        """Return whether other ranks hold a group's parameters, or parts of them: its first one tells."""
        if self._process_group is not None or not group["params"]:
            return bool(group["params"])
        param = group["params"][0]
        return param in self.specs or is_dtensor(param) or not self._ranks.shards.is_whole(param)

    def add(self, lists: Sequence[TensorList], rows: slice) -> None:
        """Add some rows of this rank's sums over shards, and their flags of what moves."""
        for tensors in lists:
            if self.sums is None or tensors.process_group is None:
                continue
            if tensors.sums is not None:
                self.sums.add(tensors.process_group, tensors.indices, tensors.sums[rows])
            if tensors.moving:
                self.sums.add_moving(tensors.process_group, self._units_of(tensors), torch.cat(tensors.moving))

    def reduce(self) -> None:
        """Make sums over whole parameters of those over shards. Collective."""
        if self.sums is not None:
            self.sums.reduce(settings=self._compared)
        self._ranks.remember(self._groups, self._settings)
        self._ranks.compared, self._ranks.have_shared = self._process_group, self.sums is not None

    def merge_moving(self, lists: Sequence[TensorList]) -> None:
        """Replace the flags of shards by those of whole parameters, which `reduce` has added up."""
        for tensors in lists:
            if self.sums is not None and tensors.process_group is not None and tensors.moving:
                flags = self.sums.select_moving(tensors.process_group, self._units_of(tensors))
                tensors.moving = list(flags.to(tensors.moving[0]).split([*map(len, tensors.moving)]))

    @contextlib.contextmanager
    def noting_interruption(self) -> Iterator[None]:
        """Note what stops the block, where other ranks share parameters: they no longer hold the same ones then."""
        try:
            yield
        except BaseException as error:
            if self._process_group is not None or self.specs or not self.is_alone:
                self._ranks.interruption = str(error) or type(error).__name__
            raise

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep an error of a block, which may have changed something, while other ranks wait; see `Failure`."""
        return contextlib.nullcontext() if self._planner is None else self._planner.failure.kept()

    def overlap(self, updates: Iterable[Iterator[None]]) -> None:
        """Run updates that yield where they communicate: each begins before the one before it has ended.

        The newest goes on first, so that the older ones have had its work's time to communicate.
        """
        begun: list[Iterator[None]] = []
        for update in updates:
            begun = self._let_go_on([*begun, update])
        while begun:
            begun = self._let_go_on(begun)

    def _let_go_on(self, updates: Sequence[Iterator[None]]) -> list[Iterator[None]]:
        """Let updates go on until they communicate again, and return those that have not ended."""
        left = []
        for update in reversed(updates):
            communicates = False  # also after an error, which is kept
            with self.held():
                communicates = next(update, _ENDED) is not _ENDED
            if communicates:
                left.append(update)
        return left[::-1]

    def conclude(self) -> None:
        """End the step: raise what this rank has kept, or what others have told. Where ranks share work, it waits.

        Raises:
            RuntimeError: a rank has failed after parameters had moved.
        """
        if self._planner is None:
            return
        error = self._planner.failure.error
        message = None if error is None else named(error)
        for exchange in self._planner.shared:
            message = exchange.tell(message) or message
        if message is not None:
            raise RuntimeError(
                f"{message} (this step had begun to move parameters, so ranks no longer hold the same: go on from the "
                "last checkpoint)"
            ) from error

    def _units_of(self, tensors: TensorList) -> list[int]:
        """Return the numbers by which all ranks know the units in a list of shards."""
        assert self.sums is not None
        columns = []
        for index, units in zip(tensors.indices, tensors.units, strict=True):
            columns += [self.sums.column_of_unit(index, unit) for unit in units.indices]
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
        if self.sums is not None and self._planner is not None:
            rounds = self._planner.rounds(self.sums)
        lists_of: dict[Any, list[TensorList]] = {chunk: [] for chunk in rounds}
        for tensors in lists:
            if tensors.chunk is not None:
                lists_of.setdefault(tensors.chunk, []).append(tensors)
        for chunk, of_chunk in lists_of.items():
            exchange, matrices = rounds.get(chunk, (None, []))
            yield Chunk(of_chunk, exchange, matrices)


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

    def directions(
        self, momenta: Sequence[Tensor], param_groups: Sequence[Mapping[str, Any]], error: Exception | None = None
    ) -> Generator[None, None, list[Tensor]]:
        """Return what this rank holds of the directions of all matrices in the lists; yield where ranks communicate.

        Args:
            momenta: their first moments, in the dtypes of the iteration; overwritten where ranks share the work.
            param_groups: the optimizer's groups.
            error: why the first moments of this rank are zeros. Other ranks wait for them, so it is raised at the end.
        """
        rows = [row_avg_sq for tensors in self.lists for row_avg_sq in tensors.row_avg_sq]
        if self.exchange is None:
            settings: list[NewtonSchulz] = []
            for tensors in self.lists:
                param, dtype = tensors.params[0], self.iteration_dtype(tensors)
                settings += [_newton_schulz_of(tensors.group, param.device, dtype)] * len(tensors.params)
            is_double = self.lists[0].params[0].dtype == torch.float64
            return compute_directions(momenta, settings, torch.float64 if is_double else torch.float32, rows)
        dtype = self.exchange.groups.dtype

        def work(owned: list[Matrix], wholes: list[Tensor], rows_of_wholes: list[Tensor]) -> list[Tensor]:
            groups = [param_groups[matrix.group] for matrix in owned]
            settings = [
                _newton_schulz_of(group, whole.device, dtype) for group, whole in zip(groups, wholes, strict=True)
            ]
            return compute_directions(wholes, settings, dtype, rows_of_wholes)

        indices = [index for tensors in self.lists for index in tensors.indices]
        held = dict(zip(indices, zip(momenta, rows, strict=True), strict=True))
        yield from self.exchange.run(self.matrices, held, work, error)
        return list(momenta)


def _newton_schulz_of(group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> NewtonSchulz:
    return newton_schulz_of(group, dtype, symmetric_products(group, device, dtype))


def _form(sums: GroupSums | None) -> Any:
    return None if sums is None else sums.form


class Ranks:
    """Find what ranks share in a step: each one looks for shards anew; plans of exchanges are kept."""

    def __init__(self, param_groups: Sequence[Mapping[str, Any]] = ()) -> None:
        """Remember the parameters of these groups."""
        self.shards = Shards(param_groups)
        self.planner = MatrixPlanner()
        self.have_shared = False  # the last step
        self.compared: Group = None  # the process group whose ranks have compared their settings
        self.held_error: Exception | None = None  # that this rank has failed with since the last step
        self.interruption: str | None = None  # what has stopped the last step half-way
        self._before = _Settings((), has_global_norm=False, has_metrics=False)
        # What of the groups ranks have agreed on, by their ids, with the groups themselves: ids are used again.
        self._known: dict[int, tuple[Mapping[str, Any], _OfGroup]] = {}

    def settings_of(self, param_groups: Sequence[Mapping[str, Any]], *, has_metrics: bool) -> _Settings:
        """Return what in some groups decides which sums ranks add up."""
        has_global_norm = any(group["max_grad_norm"] is not None for group in param_groups)
        return _Settings(tuple(map(_OfGroup.read, param_groups)), has_global_norm, has_metrics)

    def settings_of_before(self, param_groups: Sequence[Mapping[str, Any]]) -> _Settings:
        """Return the settings of the step before; those of today for groups that are new since then.

        Under DeepSpeed a step may see some of the groups only.
        """
        groups = []
        for group in param_groups:
            known = self._known.get(id(group))
            groups.append(_OfGroup.read(group) if known is None else known[1])
        return self._before._replace(groups=tuple(groups))

    def remember(self, param_groups: Sequence[Mapping[str, Any]], settings: _Settings | None = None) -> None:
        """Remember the settings of groups: what they were made with, or what ranks have agreed on."""
        self._before = settings or self.settings_of(param_groups, has_metrics=False)
        for group, of_group in zip(param_groups, self._before.groups, strict=True):
            self._known[id(group)] = group, of_group

    def replace(self, groups: Sequence[Mapping[str, Any]], replaced: Sequence[Mapping[str, Any]]) -> None:
        """Note groups that torch has put in the place of others, with what is known of those."""
        settings = self.settings_of_before(replaced)
        self._known.clear()
        self.remember(groups, settings)

    def empty_sums(self, params: Sequence[Tensor], settings: _Settings) -> GroupSums:
        """Return sums over whole parameters, which are 0 yet, of no process group."""
        count = max(len(self.shards.shapes), len(params))
        unit_counts: list[int] = []
        if any(of_group.rule.orthogonalizes for of_group in settings.groups):
            # By shape alone, which every rank knows of every parameter.
            unit_counts = [shape[0] if len(shape) > 2 else 1 for shape in self.shards.shapes]
            unit_counts += [1] * (count - len(unit_counts))
        device = local(params[0]).device if params else torch.device("cpu")
        return GroupSums(count, 3 if settings.has_global_norm else 1, device, unit_counts)
