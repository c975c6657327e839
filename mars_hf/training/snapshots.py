"""Restore buffers, counters, metrics and inputs after a pass that does not count."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers.utils import logging

from mars_hf import _compat

logger = logging.get_logger(__name__)

_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
# Larger ones are not restored, with a warning: every step would copy them.
_MOST_ITEMS = 10_000
_MOST_ELEMENTS = 1 << 22
# Wrappers with counters of their own, which must not be restored.
_ENGINES = ("torch.nn.parallel", "torch._dynamo", "deepspeed", "accelerate")


@contextlib.contextmanager
def buffers_kept(*models: nn.Module) -> Iterator[None]:
    """Restore every module's buffers and counters afterwards: the same tensors with the same values.

    Counters are numbers and tensors among a module's attributes.
    """
    modules = {id(module): module for model in models for module in model.modules()}.values()
    restore = keep_buffers(modules)
    try:
        yield
    finally:
        restore()


def keep_buffers(modules: Iterable[nn.Module], *, counters: bool = True) -> Callable[[], None]:
    """Keep the buffers of modules, and return what restores them: the same tensors with the same values.

    Args:
        modules: the modules themselves; their children are not looked into.
        counters: whether to keep numbers and tensors among their attributes too.
    """
    kept = [_Buffers(module, counters=counters) for module in modules]

    @torch.no_grad()
    def restore() -> None:
        for each in kept:
            each.restore()

    return restore


class _Buffers:
    """Snapshot of one module's buffers and counters."""

    def __init__(self, module: nn.Module, *, counters: bool) -> None:
        self._module = module
        self._buffers = {name: (buffer, _clone(buffer)) for name, buffer in _compat.own_buffers(module).items()}
        self._counters: dict[str, tuple[Any, Any]] = {}
        if counters and not type(module).__module__.startswith(_ENGINES):
            self._counters = {
                name: (value, _clone(value) if isinstance(value, Tensor) else value)
                for name, value in vars(module).items()
                if type(value) in (int, float) or isinstance(value, Tensor)
            }

    def restore(self) -> None:
        for kept, found in ((self._buffers, _compat.own_buffers(self._module)), (self._counters, vars(self._module))):
            for name, (value, before) in kept.items():
                if isinstance(value, Tensor) and before is not None:
                    _write(value, before)
                found[name] = value
        for name in [name for name in _compat.own_buffers(self._module) if name not in self._buffers]:
            del _compat.own_buffers(self._module)[name]


def _clone(tensor: Tensor | None) -> Tensor | None:
    """Return a copy, or None if it could not be written back."""
    if tensor is None or tensor.requires_grad or tensor.is_inference():
        return None
    return tensor.detach().clone()


def _write(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape == before.shape:
        tensor.copy_(before)
    else:  # its storage has been replaced
        tensor.data = before


@contextlib.contextmanager
def attributes_kept(holder: Any, skip: Collection[str] = ()) -> Iterator[None]:
    """Restore an object's attributes afterwards: bindings, and contents of built-in containers and tensors.

    The insides of other objects are not restored.

    Args:
        holder: the object.
        skip: attributes whose contents do not change; their bindings are still restored.
    """
    before = dict(vars(holder))
    kept = {name: _Contents(value) for name, value in before.items() if name not in skip}
    try:
        yield
    finally:
        for name, contents in kept.items():
            if not contents.restore():
                logger.warning_once(
                    f"{type(holder).__name__}.{name} was changed by exact MARS's pass for the stale gradient "
                    f"and is too large to be put back (more than {_MOST_ITEMS:,} items or {_MOST_ELEMENTS:,} tensor "
                    "elements); change it only where in_stale_pass is False"
                )
        now = vars(holder)
        for name in [name for name in now if name not in before]:
            del now[name]
        now.update(before)


@contextlib.contextmanager
def attribute_set(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute for the duration of the context."""
    attributes = vars(holder)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


class _Contents:
    """Snapshot of a value: its containers and tensors, nested ones included."""

    def __init__(self, value: Any) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._value = value
        self._seen: set[int] = set()
        self._items = self._elements = 0
        self._length = len(value) if type(value) in _CONTAINERS else None
        self._is_kept = self._look_into(value)

    def _look_into(self, value: Any) -> bool:
        """Record the contents of a value; return False once they are too large."""
        if id(value) in self._seen:
            return True
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._elements += value.numel()
            before = _clone(value) if self._elements <= _MOST_ELEMENTS else None
            if before is not None:
                self._tensors.append((value, before))
            return self._elements <= _MOST_ELEMENTS
        if type(value) not in _CONTAINERS and type(value) is not tuple:
            return True
        self._items += len(value)
        if self._items > _MOST_ITEMS:
            return False
        if type(value) is not tuple:
            self._containers.append((value, copy.copy(value)))
        return all(self._look_into(item) for item in (value.values() if isinstance(value, dict) else value))

    def restore(self) -> bool:
        """Restore the contents; return False if they were too large to keep and the length has changed."""
        if not self._is_kept:
            return self._length is None or len(self._value) == self._length
        for container, before in self._containers:
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(before)
            else:
                container.update(before)
        with torch.no_grad():
            for tensor, values in self._tensors:
                _write(tensor, values)
        return True


def copied(inputs: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a copy of a batch that a pass may change: containers, tensors and arrays, however nested.

    Other objects are shared.
    """
    memo = {} if memo is None else memo
    if id(inputs) in memo:
        return memo[id(inputs)]
    result = _copied(inputs, memo)
    memo[id(inputs)] = result
    return result


def _copied(inputs: Any, memo: dict[int, Any]) -> Any:
    result: Any
    if isinstance(inputs, Tensor):
        return inputs.detach().clone().requires_grad_(inputs.requires_grad)
    if isinstance(inputs, numpy.ndarray):
        return inputs.copy()
    if isinstance(inputs, MutableMapping):
        result = copy.copy(inputs)
        for key, value in inputs.items():
            result[key] = copied(value, memo)
        return result
    if isinstance(inputs, tuple):
        values = [copied(value, memo) for value in inputs]
        return type(inputs)(*values) if hasattr(inputs, "_fields") else type(inputs)(values)
    if isinstance(inputs, (list, deque)):
        result = copy.copy(inputs)
        result.clear()
        result.extend(copied(value, memo) for value in inputs)
        return result
    if isinstance(inputs, (set, bytearray)):
        return copy.copy(inputs)
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        result = copy.copy(inputs)
        for name, value in vars(inputs).items():
            object.__setattr__(result, name, copied(value, memo))
        return result
    return inputs


def difference(one: Any, other: Any, where: str = "inputs") -> str | None:
    """Return where two batches differ in structure, shapes or values (tensors, arrays, numbers, text), or None.

    Other objects count as equal.
    """
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return None if numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc") else where
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return None if _equal(one, other) else where
    if isinstance(one, MutableMapping) and isinstance(other, MutableMapping):
        if set(one) != set(other):
            return f"the keys of {where}"
        return _first(difference(one[key], other[key], f"{where}[{key!r}]") for key in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        if len(one) != len(other):
            return f"the length of {where}"
        return _first(difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
    if type(one) is not type(other):
        return where
    if isinstance(one, (bool, int, float, str, bytes)):
        return None if one == other or one != one else where
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    same = one.detach() == other.detach()
    if one.is_floating_point() or one.is_complex():
        same |= one.detach().isnan() & other.detach().isnan()
    return bool(same.all())


def _first(found: Iterable[str | None]) -> str | None:
    return next((where for where in found if where is not None), None)
