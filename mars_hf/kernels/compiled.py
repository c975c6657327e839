"""Sums and update on CPU, each in one pass over memory, compiled by torch.compile (Inductor).

The bodies below are ordinary PyTorch. Every combination of dtypes and flags is compiled once, at its first use, for
any size; numbers that change during training (learning rate, step, scale, factors) enter as a tensor, so that they
never lead to another compilation. Where compilation fails, the same bodies run uncompiled for the rest of the run:
correct, slow, and `supports` then tells the caller to go elsewhere.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sums are taken over rows of this length first, so that no float32 sum runs over many elements.
ROW = 4096
# Rows of the matrices the sums are compiled with.
EXAMPLE_ROWS = 4

_failures: list[str] = []


def supports(device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
    """Whether this engine can be used.

    Args:
        device: where the tensors are.
        dtypes: theirs.

    Returns:
        False for a device other than the CPU and for dtypes other than `DTYPES`; where torch.compile is turned off or
        finds no C++ compiler, and once a compilation has failed: this is logged, once, with the reason.
    """
    return device.type == "cpu" and all(dtype in DTYPES for dtype in dtypes) and not _failures and _can_compile()


@torch.compiler.disable  # a compiled caller must not take the kernels apart
@torch.no_grad()
def sums(gradients: list[Tensor], last_gradients: list[Tensor], scale: Tensor | None) -> Tensor:
    """Sums of g*g, g*last and last*last over each tensor, with g = scale * gradient.

    Args:
        gradients: g_t, one-dimensional and contiguous; not modified.
        last_gradients: g_{t-1}, of the same sizes, or an empty list: then only the first sum is not zero.
        scale: 0-d tensor, or None for 1.

    Returns:
        Tensor of shape (3, len(gradients)), float64 if any tensor is, else float32. Rows of 4096 elements are summed in
        that dtype and added up in float64.
    """
    dtype = _arithmetic_dtype([*gradients, *last_gradients])
    number = torch.ones((), dtype=dtype) if scale is None else scale.to(dtype)
    found = torch.zeros(len(gradients), 3, dtype=torch.float64)
    for i, row in enumerate(found.unbind()):
        pair = [entries[i] for entries in (gradients, last_gradients) if entries]
        size = pair[0].numel()
        whole = size // ROW * ROW if size >= 2 * ROW else 0  # torch.compile would make a kernel of its own for one row
        if whole:
            kernel = _sums_kernel(dtype, *(t.dtype for t in pair))
            row += torch.stack(kernel(number, *(t[:whole].view(-1, ROW) for t in pair))).sum(1, dtype=torch.float64)
        if whole < size:
            row += torch.stack(_sum_rows(number, *(t[whole:].view(1, -1) for t in pair))).squeeze(1)
    return found.T.to(dtype)


@torch.compiler.disable  # a compiled caller must not take the kernels apart
@torch.no_grad()
def update(
    params: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    last_grads: list[Tensor],
    *,
    rule: str,
    steps: Tensor,
    lr: Tensor,
    scale: Tensor | None,
    factors: Tensor | None,
    k: float,
    blend: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    second_moment_of: str,
) -> None:
    """One step of MARS-AdamW or MARS-Lion, in place.

    All tensors are one-dimensional and contiguous; lists have one entry a parameter or are empty. Arithmetic is in
    float32, in float64 if any tensor is; results are rounded once, when they are stored.

    Args:
        params: x_t; modified.
        gradients: before `scale`; not modified.
        exp_avgs: m; modified.
        exp_avg_sqs: v; modified; empty for `"lion"`.
        max_exp_avg_sqs: running maxima of v (AMSGrad); modified; an empty list turns AMSGrad off.
        last_grads: g_{t-1}, replaced by the scaled g_t; an empty list leaves the gradient uncorrected.
        rule: `"adamw"` or `"lion"`.
        steps: t of each parameter, from 1.
        lr: step size, 0-d.
        scale: what every gradient is multiplied with first, 0-d; None for 1.
        factors: what each corrected gradient is multiplied with (clipping), one a parameter; None for 1.
        k: weight of the correction, gamma beta1 / (1 - beta1).
        blend: weight of c_t in the first moment the parameter takes, m + blend (c_t - m); the moment stored is m.
        beta1: decay rate of m.
        beta2: decay rate of v.
        eps: added to the bias-corrected root of v.
        weight_decay: decoupled; the parameter loses lr * weight_decay of itself.
        second_moment_of: `"corrected"` averages c_t^2, `"gradient"` g_t^2.
    """
    lists = (params, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, last_grads)
    dtype = _arithmetic_dtype([t for entries in lists for t in entries])
    t, rate = steps.double(), lr.double()
    columns = [
        1.0 if scale is None else scale.double(),
        k,
        1.0 if factors is None else factors.double(),
        1 - beta1,
        blend,
        beta2,
        1 - beta2,
        1 - rate * weight_decay,
        rate / (1 - beta1**t) if rule == "adamw" else rate,
        (1 - beta2**t).rsqrt(),
        eps,
    ]
    numbers = torch.stack([torch.as_tensor(c, dtype=torch.float64).expand_as(t) for c in columns], 1).to(dtype)
    flags = (rule == "lion", blend != 0.0, second_moment_of == "gradient")
    for i, row in enumerate(numbers.unbind()):
        tensors = [entries[i].detach() if entries else None for entries in lists]
        kernel: Callable[..., None] = _update_one
        if params[i].numel() > 1:  # torch.compile would make kernels of their own for sizes 0 and 1
            kernel = _update_kernel(flags, dtype, *(t if t is None else t.dtype for t in tensors))
        kernel(*flags, row, *tensors)


def _sum_rows(scale: Tensor, gradient: Tensor, last: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of g*g, g*last and last*last over the rows of two matrices; without `last` the last two are 0."""
    g = gradient.to(scale.dtype) * scale
    squares = (g * g).sum(1)
    if last is None:
        return squares, torch.zeros_like(squares), torch.zeros_like(squares)
    last = last.to(scale.dtype)
    return squares, (g * last).sum(1), (last * last).sum(1)


def _update_one(
    lion: bool,
    blended: bool,
    square_gradient: bool,
    numbers: Tensor,
    param: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | None,
    max_exp_avg_sq: Tensor | None,
    last_grad: Tensor | None,
) -> None:
    """The step of one parameter; `numbers` has the columns of `update` and the dtype of the arithmetic."""
    dtype = numbers.dtype
    g = gradient.to(dtype) * numbers[0]
    c = g
    if last_grad is not None:
        c = (g - last_grad.to(dtype)) * numbers[1] + g
        last_grad.copy_(g)
    c = c * numbers[2]
    old = exp_avg.to(dtype)
    average = old + numbers[3] * (c - old)
    exp_avg.copy_(average)
    first = average + numbers[4] * (c - average) if blended else average
    decayed = param.to(dtype) * numbers[7]
    if lion:
        param.copy_(decayed - numbers[8] * first.sign())
        return
    assert exp_avg_sq is not None
    squared = g if square_gradient else c
    second = exp_avg_sq.to(dtype) * numbers[5] + numbers[6] * squared * squared
    exp_avg_sq.copy_(second)
    if max_exp_avg_sq is not None:
        second = torch.maximum(max_exp_avg_sq.to(dtype), second)
        max_exp_avg_sq.copy_(second)
    param.copy_(decayed - numbers[8] * first / (second.sqrt() * numbers[9] + numbers[10]))


@functools.cache
def _sums_kernel(dtype: torch.dtype, *dtypes: torch.dtype) -> Callable[..., Any]:
    """`_sum_rows` for tensors of these dtypes."""
    return _compile(_sum_rows, torch.ones((), dtype=dtype), *(_example(entry, (EXAMPLE_ROWS, ROW)) for entry in dtypes))


@functools.cache
def _update_kernel(
    flags: tuple[bool, bool, bool], dtype: torch.dtype, *dtypes: torch.dtype | None
) -> Callable[..., Any]:
    """`_update_one` for these flags and tensors of these dtypes (None: no such tensor)."""
    return _compile(_update_one, *flags, torch.ones(11, dtype=dtype), *(_example(entry, (ROW,)) for entry in dtypes))


def _example(dtype: torch.dtype | None, shape: tuple[int, ...]) -> Tensor | None:
    """A tensor to compile a kernel with, for any size of the first dimension but 0 and 1."""
    if dtype is None:
        return None
    example = torch.zeros(shape, dtype=dtype)
    torch._dynamo.mark_dynamic(example, 0)
    return example


def _compile(body: Callable[..., Any], *example: object) -> Callable[..., Any]:
    """Compile `body` for arguments like `example`; where that fails, what is returned runs `body` itself."""
    # torch.compile keeps its results, few of them, with the code object: give every kernel one of its own.
    own = types.FunctionType(body.__code__.replace(), body.__globals__, body.__name__, body.__defaults__)
    # dynamic_threads: torch.set_num_threads holds, and the size of the example does not decide on threads.
    compiled = torch.compile(own, fullgraph=True, options={"cpp.dynamic_threads": True})

    def kernel(*args: object) -> Any:
        if not _failures:
            try:
                return compiled(*args)
            except Exception as error:  # from the compilation, so that nothing has been changed yet
                _fail(f"torch.compile failed on {body.__name__}: {type(error).__name__}: {error!s:.400}")
        return body(*args)

    kernel(*example)
    return kernel


@functools.cache
def _can_compile() -> bool:
    """Whether torch.compile is on and finds a C++ compiler."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
        on = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")(torch.zeros(()))
    except Exception as error:
        _fail(f"torch.compile cannot be used: {type(error).__name__}: {error!s:.400}")
        return False
    if not on:
        _fail("torch.compile is turned off")
    return bool(on)


def _fail(reason: str) -> None:
    """Remember and log, once, why this engine is out of use."""
    if not _failures:
        logger.warning("MARS takes its slower CPU path for the rest of this run. %s", reason)
    _failures.append(reason)


def _arithmetic_dtype(tensors: list[Tensor]) -> torch.dtype:
    """Dtype of the arithmetic on these tensors."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
