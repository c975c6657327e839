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
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from mars_hf import clipping

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sums are taken over rows of this length first, so that no float32 sum runs over many elements.
ROW = 4096
# Rows of the matrices the sums are compiled with.
EXAMPLE_ROWS = 4

# dynamic_threads: torch.set_num_threads holds, and the size of the example does not decide on threads. The other one
# lets a multiplication and an addition be one instruction.
OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": True, "cpp.enable_floating_point_contract_flag": "fast"}

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
def sums(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    *,
    scale: Tensor | None = None,
    last_scales: Tensor | None = None,
    k: float = 0.0,
    products: bool = True,
    corrected: bool = True,
) -> Tensor:
    """As `rules.sums`, for one-dimensional contiguous tensors.

    Rows of 4096 elements are summed in the dtype of the arithmetic and added up in float64. What is not asked for is
    not computed: with all four sums a core is busier with arithmetic than with memory. Without last gradients, <g, g>
    is all there is.
    """
    if not gradients:
        return torch.zeros(4, 0)
    dtype = _arithmetic_dtype([*gradients, *last_grads])
    if not last_grads:
        own_scale = 1.0 if scale is None else float(scale)
        squares = torch.tensor([own_scale**2 * _square(gradient, dtype) for gradient in gradients], dtype=dtype)
        return squares * torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=dtype).unsqueeze(1)
    numbers = _columns([scale, last_scales, k], len(gradients), dtype)
    flags = (products or not corrected, corrected, corrected and (scale is not None or last_scales is not None))
    totals = []
    for i, row in enumerate(numbers):
        pair = (gradients[i], last_grads[i])
        size = pair[0].numel()
        whole = size // ROW * ROW if size >= 2 * ROW else 0  # torch.compile would make a kernel of its own for one row
        parts = []
        if whole:
            kernel = _sums_kernel(flags, dtype, *(t.dtype for t in pair))
            parts.append(kernel(*flags, row, *(t[:whole].view(-1, ROW) for t in pair)))
        if whole < size or not size:
            parts.append(_sum_rows(*flags, row, *(t[whole:].view(1, -1) for t in pair)))
        totals.append(parts[0] if len(parts) == 1 else parts[0] + parts[1])
    found = torch.zeros(4, len(gradients), dtype=torch.float64)
    found[_rows(flags)] = torch.stack(totals, 1)
    own = torch.ones((), dtype=torch.float64) if scale is None else scale.double()
    last = own.new_ones(len(gradients)) if last_scales is None else last_scales.double()
    found[:3] *= torch.stack([(own * own).expand_as(last), own * last, last * last])
    if not corrected:
        found[3] = found[0]  # c is g, or is not asked for
    return found.to(dtype)


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
    scale: Tensor | None = None,
    last_scales: Tensor | None = None,
    factors: Tensor | None = None,
    k: float = 0.0,
    blend: float = 0.0,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    second_moment: str = "corrected",
    keep_last: bool = True,
    clip_threshold: float | None = None,
    last_norms: Tensor | None = None,
) -> None:
    """As `rules.update`, for one-dimensional contiguous tensors; steps and lr are tensors.

    Args:
        clip_threshold: take the factors here, from <c, c> of the tensors themselves: norm and update of one tensor come
            right after each other, while its gradients are in the cache. None takes `factors`.
        last_norms: with `clip_threshold`, norms of the last gradients (NaN: unknown), replaced by those of g. Where
            they show that nothing is to be clipped, <g, g> is all that is summed. None takes <c, c> always.
    """
    lists = (params, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, last_grads)
    dtype = _arithmetic_dtype([t for entries in lists for t in entries])
    t, rate = steps.double(), lr.double()
    columns = [
        scale,
        last_scales,
        k,
        factors,
        1 - beta1,
        blend,
        beta2,
        1 - beta2,
        1 - rate * weight_decay,
        rate / (1 - beta1**t) if rule == "adamw" else rate,
        (1 - beta2**t).rsqrt(),
        eps,
    ]
    numbers = _columns([*columns, clip_threshold], len(params), dtype)
    flags = (rule, blend != 0.0, second_moment == "gradient", keep_last)
    scaled = scale is not None or last_scales is not None
    for i in reversed(range(len(params))):  # the pass that reads has left the last ones in the cache
        tensors = [entries[i].detach() if entries else None for entries in lists]
        size = params[i].numel()
        clips = clip_threshold is not None
        if clip_threshold is not None and last_norms is not None:
            norm = (1.0 if scale is None else abs(float(scale))) * _square(gradients[i], dtype) ** 0.5
            clips = not clipping.is_certain(norm, float(last_norms[i]), k, clip_threshold)
            last_norms[i] = norm
        if clips and clip_threshold is not None and (size % ROW or size < 2 * ROW):
            settings = {"scale": scale, "last_scales": None if last_scales is None else last_scales[i : i + 1]}
            square = sums([gradients[i]], last_grads[i : i + 1], **settings, k=k, products=False)[3]
            numbers[i][3] = clipping.factors(square, clip_threshold)[0]
            clips = False
        kernel: Callable[..., None] = _update_one
        if size > 1:  # torch.compile would make kernels of their own for sizes 0 and 1
            kernel = _update_kernel((*flags, scaled, clips), dtype, *(t if t is None else t.dtype for t in tensors))
        kernel(*flags, scaled, clips, numbers[i], *tensors)


def _square(gradient: Tensor, dtype: torch.dtype) -> float:
    """<g, g>; PyTorch's norm over rows reads faster than what it compiles for that sum."""
    whole = gradient.numel() // ROW * ROW
    rows = [gradient[:whole].view(-1, ROW), gradient[whole:].view(1, -1)]
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in rows if part.numel()]
    return sum(float(norm.square_().sum(dtype=torch.float64)) for norm in norms)


def _columns(numbers: Sequence[Tensor | float | None], count: int, dtype: torch.dtype) -> list[Tensor]:
    """One tensor of numbers for each of `count` tensors; None is 1."""
    values = [torch.as_tensor(1.0 if number is None else number, dtype=torch.float64) for number in numbers]
    return list(torch.stack([value.expand(count) for value in values], 1).to(dtype).unbind())


def _corrected(
    scaled: bool, numbers: Tensor, gradient: Tensor, last_grad: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """g, last and c; `numbers` begins with scale, last scale and k."""
    g = gradient.to(numbers.dtype)
    last = None if last_grad is None else last_grad.to(numbers.dtype)
    if scaled:
        g = g * numbers[0]
        last = None if last is None else last * numbers[1]
    return g, last, g if last is None else (g - last) * numbers[2] + g


def _rows(flags: tuple[bool, bool, bool]) -> list[int]:
    """The rows of `sums` that `_sum_rows` returns."""
    products, corrected, _ = flags
    return [*(range(3) if products else ()), *([3] if corrected else [])]


def _sum_rows(
    products: bool,
    corrected: bool,
    scaled: bool,
    numbers: Tensor,
    gradient: Tensor,
    last_grad: Tensor,
) -> Tensor:
    """Sums over two matrices, row by row: the products unscaled, <c, c> with `numbers` (scale, last scale and k)."""
    g, last = gradient.to(numbers.dtype), last_grad.to(numbers.dtype)
    found = [g * g, g * last, last * last] if products else []
    if corrected:
        c = _corrected(scaled, numbers, gradient, last_grad)[2]
        found.append(c * c)
    return torch.stack([matrix.sum(1).sum(dtype=torch.float64) for matrix in found])


def _update_one(
    rule: str,
    blended: bool,
    square_gradient: bool,
    keep_last: bool,
    scaled: bool,
    clips: bool,
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
    g, _, c = _corrected(scaled, numbers, gradient, last_grad)
    factor = numbers[3]
    if clips:
        square = (c * c).view(-1, ROW).sum(1).sum(dtype=torch.float64).to(dtype)  # as `sums`, to the bit
        factor = 1 / (square.sqrt() / numbers[12]).clamp_min(1.0)
    if last_grad is not None and keep_last:
        last_grad.copy_(g)
    c = c * factor
    old = exp_avg.to(dtype)
    average = old + numbers[4] * (c - old)
    exp_avg.copy_(average)
    first = average + numbers[5] * (c - average) if blended else average
    if rule == "momentum":
        param.copy_(first)
        return
    decayed = param.to(dtype) * numbers[8]
    if rule == "lion":
        param.copy_(decayed - numbers[9] * first.sign())
        return
    assert exp_avg_sq is not None
    squared = g if square_gradient else c
    second = exp_avg_sq.to(dtype) * numbers[6] + numbers[7] * squared * squared
    exp_avg_sq.copy_(second)
    if max_exp_avg_sq is not None:
        second = torch.maximum(max_exp_avg_sq.to(dtype), second)
        max_exp_avg_sq.copy_(second)
    param.copy_(decayed - numbers[9] * first / (second.sqrt() * numbers[10] + numbers[11]))


@functools.cache
def _sums_kernel(flags: tuple[bool, bool, bool], dtype: torch.dtype, *dtypes: torch.dtype) -> Callable[..., Any]:
    """`_sum_rows` for these flags and tensors of these dtypes."""
    return _compile(
        _sum_rows, *flags, torch.ones(3, dtype=dtype), *(_example(entry, (EXAMPLE_ROWS, ROW)) for entry in dtypes)
    )


@functools.cache
def _update_kernel(
    flags: tuple[str | bool, ...], dtype: torch.dtype, *dtypes: torch.dtype | None
) -> Callable[..., Any]:
    """`_update_one` for these flags and tensors of these dtypes (None: no such tensor)."""
    return _compile(
        _update_one, *flags, torch.ones(13, dtype=dtype), *(_example(entry, (EXAMPLE_ROWS * ROW,)) for entry in dtypes)
    )


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
    compiled = torch.compile(own, fullgraph=True, options=OPTIONS)

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
