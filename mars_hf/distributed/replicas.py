"""Which parameters other ranks repeat, and whether those ranks take this step with the same gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from mars_hf import _compat
from mars_hf.distributed.placement import Group

# `Replicas` tells one backward pass from the next by the time at which each gradient was ready. Of fewer parameters
# than this, two passes might agree to the nanosecond.
MIN_TIMES = 8

_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_is_watching = _has_searched = False


class Replicas:
    """Tell which parameters have had their gradients averaged over other ranks since the last step.

    Ranks may divide work only if all of them come. They all do where DistributedDataParallel has averaged gradients
    since the last step: the backward pass needs every rank. It does not on the bare module, under `no_sync` or in
    `join`, and nobody waits for others there. A `process_group` promises that all of its ranks come, in every step.

    Nothing is remembered of a module but the times at which its gradients were ready. Which parameters it wraps, over
    which ranks, is looked up at every call.
    """

    def __init__(self, process_group: Group = None) -> None:
        """Start without having seen any backward pass.

        Args:
            process_group: ranks that take every step together on the same gradients; None finds out.
        """
        self._group = process_group
        self._times: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
        # Parameters that the last call left out, and whose gradients may have been averaged all the same, by id: with
        # `static_graph` the first backward pass is not timed.
        self.unclear: set[int] = set()

    def begin(self) -> None:
        """Take notice of wrappers made from now on, and of the backward passes of those that are known."""
        if _is_distributed():
            _watch()
            self.averaged(())

    def averaged(self, wanted: Collection[int]) -> dict[int, Group]:
        """Return the process group of each parameter whose gradient was averaged since the last call.

        Args:
            wanted: `id` of the parameters asked for.
        """
        if self._group is not None:
            return self._promised(wanted)
        found: dict[int, Group] = {}
        self.unclear = set()
        for module in _wrappers_of(wanted):
            times = _times_of(module)
            if module.static_graph and not any(times):
                self.unclear |= _group_by_param(module).keys()
            new = times != self._times.get(module, [0] * len(times))
            self._times[module] = times
            if new and len(times) >= MIN_TIMES and _stays_alike(module):
                found |= _group_by_param(module)
        return {key: found[key] for key in wanted if key in found}

    def repeated(self, wanted: Collection[int]) -> dict[int, Group]:
        """Return the process group of each parameter that other ranks keep alike.

        Nothing is concluded from the number of ranks: a model may be on one of them only, or differ.

        Args:
            wanted: `id` of the parameters asked for.
        """
        if self._group is not None:
            return self._promised(wanted)
        found: dict[int, Group] = {}
        for module in _wrappers_of(wanted):
            if _stays_alike(module):
                found |= _group_by_param(module)
        return {key: found[key] for key in wanted if key in found}

    def _promised(self, wanted: Collection[int]) -> dict[int, Group]:
        return dict.fromkeys(wanted, self._group) if _ranks(self._group) > 1 else {}


def note_wrapper(module: Any, *_: Any) -> None:
    """Remember a module if it is a DistributedDataParallel."""
    # Not isinstance, which asks proxies for their __class__.
    if issubclass(type(module), DistributedDataParallel):
        _wrappers.add(module)


def all_objects() -> list[Any]:
    """All objects that the garbage collector knows, modules and tensors among them; takes some 50 ms."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()  # what is frozen is not listed
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _watch() -> None:
    """Note every DistributedDataParallel that is made from now on."""
    global _is_watching
    if not _is_watching:
        register_module_module_registration_hook(note_wrapper)
        _is_watching = True


def _wrappers_of(wanted: Collection[int]) -> list[DistributedDataParallel]:
    """Return the known DistributedDataParallel modules, after a search if they lack a wanted parameter.

    The search takes some 50 ms and is made once a process: later wrappers make themselves known.
    """
    global _has_searched
    if not _is_distributed():
        return []
    _watch()
    if wanted and not _has_searched:
        known = {id(param) for module in _wrappers for param in _compat.ddp_parameters(module)}
        if not known.issuperset(wanted):
            _has_searched = True
            for module in all_objects():
                note_wrapper(module)
    return list(_wrappers)


def _times_of(module: DistributedDataParallel) -> list[int]:
    # Where torch does not tell, no gradient counts as averaged.
    return _compat.ddp_backward_times(module)


def _stays_alike(module: DistributedDataParallel) -> bool:
    """Whether there are other ranks that take every step with this one, on the same gradients."""
    group = module.process_group
    hooks = _compat.ddp_hooks(module)
    joining = _compat.ddp_is_joining(module)  # some ranks may have had their last batch
    return _ranks(group) > 1 and "post_localSGD_hook" not in hooks and not joining


def exists(group: Group) -> bool:
    """Whether a process group is there, and has not been destroyed; None stands for no group."""
    return group is None or _ranks(group) > 0


def _ranks(group: Group) -> int:
    """The number of ranks; 0 for a process group that has been destroyed."""
    try:
        return len(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return 0


def _group_by_param(module: DistributedDataParallel) -> dict[int, Group]:
    # As it took them at its construction: it averages no others, whatever has become of its module.
    ids = [id(param) for param in _compat.ddp_parameters(module) if param.requires_grad]
    if len(ids) != len(_times_of(module)):  # parameters have been frozen or unfrozen since
        return {}
    return dict.fromkeys(ids, module.process_group)
