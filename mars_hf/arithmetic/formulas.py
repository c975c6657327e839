"""Compute the paper's formulas on lists of tensors. No state, no I/O.

A step is two passes: `sums` reads, `update` writes. Between them, norms over whole parameters become factors.
`kernels` implements the same two functions, faster.

Symbols (paper, arXiv 2411.10438; comments below cite its algorithms and equations):

- x_t: parameter
- g_t: gradient; last_t: last gradient, g_{t-1} in the approximate form
- c_t: corrected gradient; c̃_t: c_t after clipping
- m_t, v_t: first and second moment (`exp_avg`, `exp_avg_sq`)
- e_t: average of the gradients, in `exp_avg` where the rule keeps no last gradient; elsewhere e_t is m_t
- γ gamma, k = γ β₁ / (1 - β₁), η `lr`, λ `weight_decay`
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mars_hf.arithmetic.eight_bits import join_weight, split_weight


@functools.cache
def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64, or float32 where it has none, as Apple's GPUs and Intel's Arc."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum()
    except (TypeError, RuntimeError):  # which of them depends on the device
        return torch.float32
    return torch.float64


def parse_dtype(value: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a setting: a torch.dtype, or its name."""
    if isinstance(value, torch.dtype):
        return value
    return getattr(torch, value.removeprefix("torch."))


def sums(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    *,
    grad_scale: Tensor | None = None,
    k: float = 0.0,
    products: bool = True,
    corrected: bool = True,
) -> Tensor:
    """Sum products over each tensor; all norms of a step follow from these sums.

    Args:
        gradients: any shapes, floating point, one device; not modified.
        last_grads: shapes of `gradients`; empty for a rule without last gradient.
        grad_scale: 0-d; g = grad_scale * gradient; None means 1.
        k: weight of the correction, c = g + k (g - last).
        products: whether the caller needs the first three rows; otherwise they may be zero.
        corrected: whether the caller needs the fourth row; otherwise it may be zero.

    Returns:
        float64 (see `sum_dtype`), 4 rows, one column per tensor: <g, g>, <g, last>, <last, last>, <c, c>. The square
        of a float32 never overflows there.
    """
    g, last, c = correct(gradients, last_grads, grad_scale, k if corrected else None)
    return sums_of(g, last, c, products=products, corrected=corrected)


def sums_of(g: list[Tensor], last: list[Tensor], c: list[Tensor], *, products: bool, corrected: bool) -> Tensor:
    """Return the rows of `sums`, from what `correct` returns; without products c is enough."""
    wide = sum_dtype(c[0].device)
    rows: list[Tensor | None] = [None] * 4
    if corrected or not last:
        rows[3] = torch.stack(torch._foreach_norm(c, 2, wide)).square()
    if products:
        rows[0] = torch.stack(torch._foreach_norm(g, 2, wide)).square() if last else rows[3]
    if products and last:
        rows[1] = torch.stack([torch.sum(a.to(wide) * b) for a, b in zip(g, last, strict=True)])
        rows[2] = torch.stack(torch._foreach_norm(last, 2, wide)).square()
    zeros = torch.zeros(len(c), dtype=wide, device=c[0].device)
    return torch.stack([zeros if row is None else row for row in rows])


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How bfloat16 parameters take up values of a higher precision."""

    kind: str = "nearest"  # or "stochastic", "kahan"
    seeds: Sequence[int] = ()  # stochastic: one per tensor, new at each step
    # Kahan's: what was lost, one per tensor, in bfloat16 or 8 bits (see `split_weight`); modified
    compensations: Sequence[Tensor] = ()

    def select(self, part: slice) -> Rounding:
        """Return the rounding of some tensors."""
        return replace(self, seeds=self.seeds[part], compensations=self.compensations[part])


NEAREST = Rounding()
HALF_DTYPES = (torch.float16, torch.bfloat16)


# The buffers of a list by name, with one tensor for each of its parameters.
Buffers = Mapping[str, list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one call of `update` does to its lists, here and in kernels."""

    arithmetic: str  # a name in `ARITHMETICS`; "momentum" ignores `steps`, `lr` and `weight_decay`
    steps: Sequence[float]  # t of each tensor, from 1
    lr: float | Tensor  # step size
    beta1: float  # decay rate of e
    beta2: float  # decay rate of v
    eps: float  # added to the bias-corrected root of v
    weight_decay: float  # decoupled; the parameter shrinks by lr * weight_decay
    cautious: bool = False  # it shrinks where the update takes it toward zero only
    k: float = 0.0  # weight of the correction; for this and the next see `sums`
    grad_scale: Tensor | None = None
    factors: Tensor | None = None  # multiply c, one per tensor; None means 1
    blend: float = 0.0  # weight of c in m: gamma for the form that needs no last gradient, else 0
    second_moment: str = "corrected"  # averages c^2 in v; "gradient" averages g^2
    rounding: Rounding = NEAREST  # of parameters; "momentum" rounds to nearest
    # Compiled kernels alone: with bounds they find the factors, of tensors whose <g, g> is above theirs.
    clip_bounds: Sequence[float] = ()
    clip_threshold: float = math.inf  # to which they clip the norm of c
    squares: Tensor | None = None  # these <g, g>, float64; None lets the kernels take them


def update(
    params: list[Tensor],
    gradients: list[Tensor],
    buffers: Buffers,
    options: Options,
) -> None:
    """Update parameters and states in place.

    Arithmetic is in float32, or float64 if any tensor is; results of lower precision are rounded once, parameters as
    `options.rounding` says. With g, last and c as in `sums`, and c multiplied by the tensor's factor::

        e = beta1 e + (1 - beta1) c                     kept in exp_avg
        m = e + blend (c - e)
        adamw:  v = beta2 v + (1 - beta2) c^2
                x = x (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
        lion:   x = x (1 - lr weight_decay) - lr sign(m)    the sign is 0 where g is, so x rests there
        momentum:  x = m                                no more: `apply` completes the step
        last = g

    If cautious, x (1 - lr weight_decay) is x where m x < 0.

    Args:
        params: x; modified. For momentum, the tensors that receive m, of any dtype.
        gradients: not modified.
        buffers: by name, modified: `exp_avg` holds e, `last_grad` is absent from a rule without last gradient, and the
            others are those of the arithmetic. `max_exp_avg_sq`, running maxima of v, turns AMSGrad on.
        options: the arithmetic and its numbers.

    Source: Algorithm 2 of the paper, in the order of operations of torch.optim.AdamW: gamma=0 without clipping equals
    AdamW.
    """
    lists = (params, gradients, *buffers.values())
    is_double = any(tensor.dtype == torch.float64 for tensors in lists for tensor in tensors)
    dtype = torch.float64 if is_double else torch.float32
    last_grads = buffers.get("last_grad", [])
    g, _, c = correct(gradients, last_grads, options.grad_scale, options.k, dtype)
    if options.factors is not None:
        # c̃_t = c_t / max(1, ‖c_t‖ / clip_threshold)    (Algorithm 2; see `clip_factors`)
        c = list(torch._foreach_mul(c, list(options.factors.to(dtype).unbind())))
    # Copies in the dtype of the arithmetic, or the tensors themselves.
    wide = {name: [value.to(dtype) for value in values] for name, values in buffers.items() if name != "last_grad"}
    e = wide["exp_avg"]
    # m_t = β₁ m_{t-1} + (1 - β₁) c̃_t    (Algorithm 2; for blend > 0 this is e_t, the average of g_t)
    torch._foreach_lerp_(e, c, 1 - options.beta1)
    # m_t = (1 - γ) e_t + γ g_t    (the same without clipping and last gradient; see `Mars`, State)
    m = list(torch._foreach_lerp(e, c, options.blend)) if options.blend else e
    if last_grads:
        torch._foreach_copy_(last_grads, g)
    s = g if options.second_moment == "gradient" else c  # v averages s²
    # Parameters are written last: a gradient may be the parameter itself.
    ARITHMETICS[options.arithmetic].write(params, g, m, s, wide, options)
    for name, values in wide.items():
        _write_back(values, buffers[name])


def _write_adamw(
    params: list[Tensor], g: list[Tensor], m: list[Tensor], s: list[Tensor], buffers: Buffers, options: Options
) -> None:
    lr = float(options.lr)
    denominators = _denominators(s, buffers, options)
    x = _wide(params, m[0].dtype, options.rounding)
    # x_{t+1} = x_t - η (m_t / (1 - β₁ᵗ) / (√v_t / √(1 - β₂ᵗ) + eps) + λ x_t)    (Algorithm 2)
    _shrink(x, m, lr * options.weight_decay, cautious=options.cautious)
    torch._foreach_addcdiv_(x, m, denominators, [-lr / (1 - options.beta1**t) for t in options.steps])
    _write_params(x, params, options.rounding)


def _denominators(s: list[Tensor], buffers: Buffers, options: Options) -> list[Tensor]:
    """Advance the second moments, and return what divides first moments."""
    v, peak = buffers["exp_avg_sq"], buffers.get("max_exp_avg_sq")
    # v_t = β₂ v_{t-1} + (1 - β₂) c̃_t²    (Algorithm 2, eq. 3.12; the official README prints g_t²)
    torch._foreach_mul_(v, options.beta2)
    torch._foreach_addcmul_(v, s, s, value=1 - options.beta2)
    if peak:
        # v̂_t = max(v̂_{t-1}, v_t)    (AMSGrad, official code)
        torch._foreach_maximum_(peak, v)
    # √v_t / √(1 - β₂ᵗ) + eps
    denominators = torch._foreach_sqrt(peak or v)
    torch._foreach_div_(denominators, [(1 - options.beta2**t) ** 0.5 for t in options.steps])
    torch._foreach_add_(denominators, options.eps)
    return list(denominators)


def _write_lion(
    params: list[Tensor], g: list[Tensor], m: list[Tensor], s: list[Tensor], buffers: Buffers, options: Options
) -> None:
    # x_{t+1} = x_t - η (sign(m_t) + λ x_t)    (MARS-Lion); 0 where g_t is, and NaN stays NaN
    signs = [
        torch.where(moment.isnan(), moment, moment.sign() * gradient.ne(0))
        for moment, gradient in zip(m, g, strict=True)
    ]
    apply(
        params,
        signs,
        lr=float(options.lr),
        weight_decay=options.weight_decay,
        cautious=options.cautious,
        rounding=options.rounding,
    )


def _write_momentum(
    params: list[Tensor], g: list[Tensor], m: list[Tensor], s: list[Tensor], buffers: Buffers, options: Options
) -> None:
    torch._foreach_copy_(params, m)


class Arithmetic(NamedTuple):
    """What turns first moments into parameters."""

    # From params x; g; m; s, whose squares v averages; buffers; and options. Writes x, and the buffers it names.
    write: Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Buffers, Options], None]
    # Its states of the parameter's shape, besides `exp_avg`, and their dtypes in 8 bits: see `eight_bits.DTYPES`.
    buffers: Mapping[str, torch.dtype] = {}


ARITHMETICS = {
    "adamw": Arithmetic(_write_adamw, buffers={"exp_avg_sq": torch.uint8}),
    "lion": Arithmetic(_write_lion),
    "momentum": Arithmetic(_write_momentum),  # Newton-Schulz follows
}

# By the key of a state that may be in 8 bits: its dtype then, and the key of its scales, if it has some.
CODES = {"exp_avg": torch.int8, "last_grad": torch.int8, "compensation": torch.int8}
CODES |= {key: dtype for arithmetic in ARITHMETICS.values() for key, dtype in arithmetic.buffers.items()}
SCALES = {key: "_".join((key, "scale")) for key in CODES if key != "compensation"}


def _write_back(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy values into tensors of another dtype, rounded once; those computed in place are there already."""
    for value, tensor in zip(values, tensors, strict=True):
        if value is not tensor:
            tensor.copy_(value)


def _wide(params: Sequence[Tensor], dtype: torch.dtype, rounding: Rounding) -> list[Tensor]:
    """Return parameters in the dtype of the arithmetic, with what earlier roundings have lost."""
    if _splits_weights(rounding):
        return [join_weight(*pair).to(dtype) for pair in zip(params, rounding.compensations, strict=True)]
    x = [param.to(dtype) for param in params]
    if rounding.compensations:
        torch._foreach_add_(x, [lost.to(dtype) for lost in rounding.compensations])
    return x


def _splits_weights(rounding: Rounding) -> bool:
    """Return whether a compensation is the 8 bits that follow those of a bfloat16."""
    return bool(rounding.compensations) and rounding.compensations[0].dtype == torch.int8


def _write_params(values: Sequence[Tensor], params: Sequence[Tensor], rounding: Rounding) -> None:
    """Round new values into parameters."""
    if _splits_weights(rounding):
        for value, param, lost in zip(values, params, rounding.compensations, strict=True):
            for tensor, part in zip((param, lost), split_weight(value.float()), strict=True):
                tensor.copy_(part)
        return
    if rounding.kind != "stochastic":
        _write_back(values, params)
    for value, param, seed in zip(values, params, rounding.seeds, strict=False):
        generator = torch.Generator(param.device).manual_seed(seed)
        param.copy_(round_stochastically(value.float(), generator))
    for value, param, lost in zip(values, params, rounding.compensations, strict=False):
        lost.copy_(value - param)


def apply(
    params: list[Tensor],
    directions: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    cautious: bool = False,
    rounding: Rounding = NEAREST,
) -> None:
    """Step along given directions, in place: x = x (1 - lr weight_decay) - lr direction.

    The arithmetic is that of `update`.

    Args:
        params: x; modified.
        directions: shapes of `params`; not modified.
        lr: step size.
        weight_decay: decoupled; the parameter shrinks by lr * weight_decay.
        cautious: see `Options`.
        rounding: of the parameters.
    """
    is_double = any(tensor.dtype == torch.float64 for tensor in (*params, *directions))
    dtype = torch.float64 if is_double else torch.float32
    x = _wide(params, dtype, rounding)
    # x_{t+1} = x_t - η (direction + λ x_t)    (Algorithm 4 for mars-shampoo; arXiv 2510.21800 for mars-m)
    _shrink(x, directions, lr * weight_decay, cautious=cautious)
    torch._foreach_add_(x, [direction.to(dtype) for direction in directions], alpha=-lr)
    _write_params(x, params, rounding)


def _shrink(x: list[Tensor], directions: Sequence[Tensor], decay: float, *, cautious: bool) -> None:
    """Shrink parameters by a part `decay` of them, in place; if cautious, where no direction would make them larger.

    Source: Algorithm 1 of arXiv 2510.12402, which decays where u x >= 0; signs do not underflow, as products do.
    """
    if not cautious:
        torch._foreach_mul_(x, 1 - decay)
        return
    for value, direction in zip(x, directions, strict=True):
        agrees = value.sign() * direction.sign() >= 0
        value.copy_(torch.where(agrees, value * (1 - decay), value))


def global_scale(norm: Tensor, max_grad_norm: float) -> Tensor:
    """Return the factor by which clipping to a global norm scales every gradient, as torch.nn.utils.clip_grad_norm_."""
    # scale = min(1, max_grad_norm / (‖g‖ + eps))
    return (max_grad_norm / (norm + 1e-6)).clamp_max(1.0)


def corrected_square(products: Tensor, k: float, scale: Tensor) -> Tensor:
    """Return <c, c> for c = g' + k (g' - last), g' = scale * g, from the sums over g.

    The scale depends on the gradients of all parameters, so one pass cannot sum c too.
    """
    gg, gl, ll = products[:3]
    # ‖c‖² = (1 + k)² scale² <g, g> - 2 (1 + k) k scale <g, last> + k² <last, last>
    square = ((1 + k) * scale) ** 2 * gg - 2 * (1 + k) * k * scale * gl + k**2 * ll
    return square.clamp_min(0.0)  # rounding can make it negative; NaN stays NaN


def clip_factors(square: Tensor, clip_threshold: float) -> Tensor:
    """Return the factors that clip corrected gradients with these <c, c> to a norm, parameter by parameter."""
    # c̃_t = c_t / max(1, ‖c_t‖ / clip_threshold)    (Algorithm 2, where the threshold is 1)
    return 1 / (square.sqrt() / clip_threshold).clamp_min(1.0)


def noise_seed(index: int, step: int, offset: int) -> int:
    """Return the seed of one tensor's noise in one step, 63 bits; the tensors updated alongside do not enter.

    Args:
        index: the parameter's index; the same on all ranks, so that replicas round alike.
        step: the parameter's step count.
        offset: first element or index of the parameter that this rank holds.
    """
    mixed = index
    for number in (step, offset):  # one round of splitmix64 each
        mixed = (mixed * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to either bfloat16 neighbour, unbiased."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # Add 16 random bits to the 16 bits that bfloat16 lacks, then truncate.
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)


def correct(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    grad_scale: Tensor | None,
    k: float | None,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return g, last and c in a dtype, None for that of their arithmetic; c is g without last gradients or k."""
    if dtype is None:
        is_double = torch.float64 in {tensor.dtype for tensor in (*gradients, *last_grads)}
        dtype = torch.float64 if is_double else torch.float32
    g, last = ([tensor.to(dtype) for tensor in tensors] for tensors in (gradients, last_grads))
    if grad_scale is not None:
        g = list(torch._foreach_mul(g, grad_scale.to(dtype)))
    if not last or k is None:
        return g, last, g
    # c_t = g_t + k (g_t - last_t)    (Algorithm 2)
    c = list(torch._foreach_sub(g, last))
    torch._foreach_mul_(c, k)
    torch._foreach_add_(c, g)
    return g, last, c
