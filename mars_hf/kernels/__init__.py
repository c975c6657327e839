"""Choose the backend of a list of tensors: plain PyTorch, or kernels that compute the same faster.

Kernels prove that at first use, see `compare_with_plain`; those that fail give way to plain PyTorch for the rest of
the run.

| backend  | where | what it is                               | chosen by `fused=None`                 |
| -------- | ----- | ---------------------------------------- | -------------------------------------- |
| triton   | GPU   | kernels/gpu.py, two passes, any tensors  | wherever it runs                       |
| compiled | CPU   | kernels/cpu.py, two passes               | from `COMPILED_FROM` elements on       |
| foreach  | any   | formulas.py on whole lists               | on GPUs, for small models on CPUs      |
| for-loop | CPU   | formulas.py, a call for each tensor      | otherwise                              |

Orthogonalized matrices use their backend for the first moments only. Newton-Schulz follows; then formulas.py
applies the directions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mars_hf import log
from mars_hf.arithmetic import eight_bits, formulas
from mars_hf.arithmetic.eight_bits import Coded, Column, Columns, join_weight, tensors_of, values_of
from mars_hf.arithmetic.formulas import SCALES
from mars_hf.kernels import joined

# Compiling takes a second or two, once per machine. From this size on it pays off within a few hundred steps.
COMPILED_FROM = 1_000_000
NEEDS = "GPUs need Triton (pip install triton), CPUs a C++ compiler"
# Of the tensors of a check, which are transposed: more elements than a tile of the kernels, and fewer than a block.
_SHAPES = (torch.Size((89, 97)), torch.Size((5,)), torch.Size((7, 3, 13)))
_JOINED = "parameters of 24 bits"  # in a check: bfloat16 with 8 bits more
Dtypes = tuple[tuple[str, torch.dtype], ...]  # of lists of tensors, by their names
_failures: dict[torch.device, str] = {}  # why kernels no longer run


@dataclass(frozen=True)
class Backend:
    """Run `formulas.sums` and `formulas.update`: as they are, or by kernels, which take dense tensors in one order."""

    name: str
    kernels: ModuleType | None = None
    foreach: bool = False  # formulas.py gets whole lists: fewer launches, temporaries for all tensors at once

    def run_sums(self, gradients: list[Tensor], last_grads: Column, **settings: Any) -> Tensor:
        """Take the sums; see `formulas.sums`. Last gradients may be in 8 bits."""
        if self.kernels is not None:
            return self.kernels.sums(gradients, last_grads, **settings)
        if self.foreach and joined.can_sum(gradients, last_grads):
            return joined.sums(gradients, tensors_of(last_grads), **settings)
        size = len(gradients) if self.foreach else 1
        parts = [slice(start, start + size) for start in range(0, len(gradients), size)]
        columns = []
        for part in parts:
            columns.append(formulas.sums(gradients[part], values_of(last_grads[part]), **settings))
        return torch.cat(columns, dim=1)

    def run_update(
        self, params: list[Tensor], gradients: list[Tensor], buffers: Columns, options: formulas.Options
    ) -> Tensor | None:
        """Update; see `formulas.update`. Buffers may be in 8 bits. Returns <g, g> of each tensor if kernels clip."""
        if self.kernels is not None:
            # Kernels bypass autograd: a graph that has saved a parameter must not run backward.
            torch.autograd.graph.increment_version(params)
            squares: Tensor | None = self.kernels.update(params, gradients, buffers, options)
            return squares
        if self.foreach and joined.can_update(params, buffers, options):
            joined.update(params, gradients, buffers, options)
            return None
        count = len(options.steps)
        size = count if self.foreach else 1
        for start in range(0, count, size):
            part = slice(start, start + size)
            part_options = replace(
                options,
                steps=options.steps[part],
                factors=None if options.factors is None else options.factors[part],
                rounding=options.rounding.select(part),
            )
            of_part = {name: column[part] for name, column in buffers.items()}
            _update_buffers(params[part], gradients[part], of_part, part_options)
        return None


def _update_buffers(params: list[Tensor], gradients: list[Tensor], buffers: Columns, options: formulas.Options) -> None:
    """Update in plain PyTorch; buffers in 8 bits are decoded for them, and encoded after them."""
    values = {name: values_of(column) for name, column in buffers.items()}
    formulas.update(params, gradients, values, options)
    for name, column in buffers.items():
        for each, value, step in zip(column, values[name], options.steps, strict=True):
            if isinstance(each, Coded):
                each.encode(value, step)


def choose_backend(
    group: dict[str, Any],
    device: torch.device,
    dtypes: Mapping[str, torch.dtype],
    arithmetic: str,
    numel: int,
    *,
    dense: bool,
) -> Backend:
    """Return the backend of a list.

    Args:
        group: the parameter group; its `fused`, `rounding` and `second_moment` decide.
        device: device of the tensors.
        dtypes: dtypes of all tensors, by the name of their list; "params" is what the update writes into.
        arithmetic: a name in `formulas.ARITHMETICS`; a module of kernels states those that it has, and which buffers.
        numel: number of elements in all parameters of the optimizer.
        dense: whether the memory suits kernels: no gaps, one order, aligned, shared with nothing.

    Raises:
        RuntimeError: `fused=True` where no kernels run, or where they compute something else than plain PyTorch.
    """
    plain = _plain_backend(device, numel, dense=dense)
    if not dense or not _wants_kernels(group, device, numel):
        return plain
    if not _can_compute(kernels_of(device), dtypes, arithmetic):
        return plain
    backend, problem = _kernels_that_work(device, dtypes, arithmetic, group["second_moment"])
    if backend is not None:
        return backend
    if group["fused"]:
        raise RuntimeError(f"fused=True, and {problem}; use fused=None")
    if kernels_of(device).is_available(device) and device not in _failures:  # `_library` logs a failed compilation
        log.warning_on_machine(f"MARS takes plain PyTorch for the rest of this run: {problem}")
        _failures[device] = problem
    return plain


def _plain_backend(device: torch.device, numel: int, *, dense: bool) -> Backend:
    """Return plain PyTorch: on whole lists, which saves calls, or tensor by tensor.

    A CPU takes tensors one by one if lists leave its cache, or if tensors may share memory: on a list, a rule reads all
    of them before it writes one.
    """
    on_lists = device.type != "cpu" or (dense and numel < COMPILED_FROM)
    return Backend("foreach" if on_lists else "for-loop", foreach=on_lists)


def _wants_kernels(group: Mapping[str, Any], device: torch.device, numel: int) -> bool:
    """Return whether kernels are asked for, or by `fused=None` pay off in a step of so many elements."""
    if group["fused"] is not None:
        return bool(group["fused"])
    return device.type != "cpu" or numel >= COMPILED_FROM


def _can_compute(kernels: ModuleType, dtypes: Mapping[str, torch.dtype], arithmetic: str) -> bool:
    """Return whether kernels have what a list needs."""
    known = {"params", "grads", "compensation", *kernels.BUFFERS}
    if arithmetic not in kernels.ARITHMETICS or not dtypes.keys() <= known:
        return False
    return bool(kernels.can_take(dtypes))


def _kernels_that_work(
    device: torch.device, dtypes: Mapping[str, torch.dtype], arithmetic: str, second_moment: str
) -> tuple[Backend | None, str]:
    """Return the kernels of a device if they run there and are right, or else None and the reason."""
    kernels = kernels_of(device)
    if not kernels.is_available(device):
        return None, f"no kernels run on {device.type}: {NEEDS}"
    backend = Backend(kernels.NAME, kernels)
    problem = _failures.get(device) or compare_with_plain(
        backend, device, tuple(dtypes.items()), arithmetic, second_moment
    )
    return (None, problem) if problem else (backend, "")


def kernels_of(device: torch.device) -> ModuleType:
    """Return the module of the kernels for a device."""
    return importlib.import_module(f"mars_hf.kernels.{'cpu' if device.type == 'cpu' else 'gpu'}")


@functools.cache
def compare_with_plain(
    backend: Backend, device: torch.device, dtypes: Dtypes, arithmetic: str, second_moment: str
) -> str:
    """Return what kernels compute otherwise than `formulas`, "" if nothing; once a process for each set of arguments.

    They take the sums and the update of a few small tensors, once by default and once with all options on; tensors and
    random numbers are the check's own.

    Every rank decides for itself. Machines of one kind decide alike, and replicas on several kinds round differently
    anyway. A collective would hang where ranks hold different lists, as under ZeRO.
    """
    plain = Backend("foreach", foreach=True)
    # Of the largest element, beyond each element's own rounding.
    tolerance = 1e-12 if {dtype for _, dtype in dtypes} == {torch.float64} else 2e-6
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            for all_on in (False, True):
                found = _compute(backend, device, dtypes, arithmetic, second_moment, all_on)
                expected = _compute(plain, device, dtypes, arithmetic, second_moment, all_on)
                for name in expected:
                    for ours, theirs in zip(found[name], expected[name], strict=True):
                        _compare(name, ours, theirs, tolerance)
    except Exception as error:
        names = ", ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in dtypes}))
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"{backend.name} kernels fail on {device} for {arithmetic} in {names}: {reason[:300]}"
    return ""


def symmetric_products(group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the kernels for symmetric products of Newton-Schulz in this dtype; None where PyTorch's are taken.

    PyTorch's are as fast in 32 bits, and `fused=False` asks for them.
    """
    if group["fused"] is False or dtype.itemsize != 2:
        return None
    return _products_that_work(device)


@functools.cache
def _products_that_work(device: torch.device) -> ModuleType | None:
    """Return the kernels for symmetric products if they run on a device and are right; checked once a process."""
    if not kernels_of(torch.device("cuda")).is_available(device):
        return None
    try:
        symmetric = importlib.import_module("mars_hf.kernels.symmetric")
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            symmetric.check(device)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        log.warning_on_machine(f"Newton-Schulz takes PyTorch's products for the rest of this run: {reason[:300]}")
        return None
    return symmetric


def _compare(name: str, ours: Tensor, plain: Tensor, tolerance: float) -> None:
    """Raise AssertionError unless tensors agree; a few codes of 8 bits may be rounded to the next one."""
    message = functools.partial("{}: {}".format, name)
    if not plain.is_floating_point():
        torch.testing.assert_close(ours.int(), plain.int(), rtol=0, atol=1, msg=message)
        assert ours.ne(plain).double().mean() < 0.01, f"{name}: many codes are rounded otherwise"
        return
    torch.testing.assert_close(
        ours.double(),
        plain.double(),
        rtol=2.0**-15 if name == _JOINED else torch.finfo(plain.dtype).eps,
        atol=tolerance * float(plain.abs().max()),
        msg=message,
    )


def _compute(
    backend: Backend, device: torch.device, dtypes: Dtypes, arithmetic: str, second_moment: str, all_on: bool
) -> dict[str, list[Tensor]]:
    """Return the tensors of a check after an update, and their sums, by name.

    With `all_on` gradients are scaled, decay is cautious, m blends c and e, and kernels round bfloat16 stochastically.
    """
    lists = _random_lists(device, dtypes)
    scale = torch.full((), 0.7, dtype=torch.float64, device=device) if all_on else None
    buffers = _buffers_among(lists)
    sums = backend.run_sums(lists["grads"], buffers.get("last_grad", []), k=0.4, grad_scale=scale)
    rounding = formulas.NEAREST
    if lists["compensation"]:
        rounding = formulas.Rounding(kind="kahan", compensations=lists["compensation"])
    elif all_on and lists["params"][0].dtype == torch.bfloat16 and backend.kernels is not None:
        # At most the other neighbour in bfloat16, which `_compare` accepts.
        rounding = formulas.Rounding(kind="stochastic", seeds=[1, 2, 3])
    options = formulas.Options(
        arithmetic=arithmetic, steps=[1.0, 2.0, 30.0], lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1,
        cautious=all_on, grad_scale=scale, k=0.4, factors=formulas.clip_factors(sums[3], 5.0),
        blend=0.3 if all_on else 0.0, second_moment=second_moment,
        rounding=rounding,
    )  # fmt: skip
    backend.run_update(lists["params"], lists["grads"], buffers, options)
    if dict(dtypes).get("compensation") == torch.int8:  # its 8 bits wrap where bfloat16 takes the other neighbour
        lists[_JOINED] = [join_weight(*pair) for pair in zip(lists["params"], lists.pop("compensation"), strict=True)]
    return {"sums": list(sums.T), **lists}


def _buffers_among(lists: Mapping[str, list[Tensor]]) -> dict[str, Column]:
    """Return the buffers among the tensors of a check, those in 8 bits with their scales."""
    others = ("params", "grads", "compensation", *SCALES.values())
    buffers: dict[str, Column] = {name: column for name, column in lists.items() if column and name not in others}
    for name, key in SCALES.items():
        if lists[key]:
            buffers[name] = list(map(Coded, lists[name], lists[key]))
    return buffers


def _random_lists(device: torch.device, dtypes: Dtypes) -> dict[str, list[Tensor]]:
    """Return the tensors of a check by list name; a list that the check does not need is empty.

    With states in 8 bits tensors are flat: their blocks are those of memory.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    names = ("params", "grads", "compensation", *dict(dtypes), *SCALES.values())
    lists: dict[str, list[Tensor]] = {name: [] for name in names}
    is_flat = any(dtype in eight_bits.DTYPES for _, dtype in dtypes)
    for name, dtype in dtypes:
        for offset, shape in enumerate(_SHAPES):
            values = torch.randn(shape.numel(), dtype=torch.float32, device="cpu", generator=generator)
            values = values.abs() if name == "exp_avg_sq" else values
            if name == "grads":
                values[::7] = 0  # where signs rest
            if name in SCALES and dtype in eight_bits.DTYPES:
                values, scales = eight_bits.encoded(values, dtype)
                lists[SCALES[name]].append(scales.to(device))
            # All but the first start at odd addresses.
            moved = torch.empty(offset + shape.numel(), dtype=dtype, device=device)[offset:].copy_(values)
            lists[name].append(moved if is_flat else moved.view(shape).transpose(0, -1))
    return lists
