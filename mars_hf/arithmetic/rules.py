"""The paper's formulas on lists of tensors. No state, no I/O.

Two functions make a step: `sums`, a pass that reads, and `update`, a pass that writes. What lies between them, norms
over whole parameters and the factors that follow from them, is in `clipping`. `kernels` has the same two, fast.

Symbols (paper, arXiv 2411.10438): g_t gradient, last_t last gradient, c_t corrected gradient, m_t `exp_avg`,
v_t `exp_avg_sq`, x_t parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sums(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    *,
    scale: Tensor | None = None,
    last_scales: Tensor | None = None,
    k: float = 0.0,
    products: bool = True,
    corrected: bool = True,
    foreach: bool = False,
) -> Tensor:
    """Sums of products over each tensor, from which all norms of a step follow.

    Args:
        gradients: any shapes, floating point, one device; not modified.
        last_grads: shapes of `gradients`; empty for a rule without last gradient.
        scale: 0-d; g = scale * gradient. None is 1.
        last_scales: one for each tensor; last = last_scales[i] * last_grads[i]. None is 1.
        k: of the correction, c = g + k (g - last).
        products: whether the first three rows are asked for; otherwise they may be zero.
        corrected: the same for the fourth row.
        foreach: True hands whole lists to PyTorch's `torch._foreach_*` functions (fewer launches, the same arithmetic
            in the same order, temporaries for all tensors at once); False takes one tensor after the other.

    Returns:
        float64 (`sum_dtype`), 4 rows, one column a tensor: <g, g>, <g, last>, <last, last>, <c, c>. No square of a
        float32 overflows there.
    """
    columns = []
    for part in _parts(len(gradients), foreach):
        own_k = k if corrected else None  # without k, c is not made
        g, last, c = _correct(gradients[part], last_grads[part], scale, _of(last_scales, part), own_k)
        cc = _squares(c) if corrected or not last else None
        gg = _squares(g) if products and (last or cc is None) else cc
        rows = [gg, None, None, cc]
        if products and last:
            rows[1] = torch.stack([_product(a, b) for a, b in zip(g, last, strict=True)])
            rows[2] = _squares(last)
        zeros = torch.zeros_like(next(row for row in rows if row is not None))
        columns.append(torch.stack([zeros if row is None else row for row in rows]))
    return torch.cat(columns, dim=1)


def update(
    params: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    last_grads: list[Tensor],
    *,
    rule: str,
    steps: Sequence[float],
    lr: float,
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
    foreach: bool = False,
) -> None:
    """One update, in place. Arithmetic is in float32, or float64 if any tensor is; lower precisions are rounded once.

    With g, last and c as in `sums`, and c multiplied by the tensor's factor::

        e = beta1 e + (1 - beta1) c                     kept in exp_avg
        m = e + blend (c - e)
        adamw:  v = beta2 v + (1 - beta2) c^2
                x = x (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
        lion:   x = x (1 - lr weight_decay) - lr sign(m)
        momentum:  x = m                                nothing else: `apply` is the rest of the step
        last = g

    Args:
        params: x; modified. For momentum what m is written to, of any dtype.
        gradients: not modified.
        exp_avgs: e; modified.
        exp_avg_sqs: v; modified; empty for lion and momentum.
        max_exp_avg_sqs: running maxima of v, which take its place (AMSGrad); modified; empty without.
        last_grads: modified; empty for a rule without last gradient.
        rule: `"adamw"`, `"lion"` or `"momentum"`, which takes no account of `steps`, `lr` and `weight_decay`.
        steps: t of each tensor, from 1.
        lr: step size.
        scale: as `sums`.
        last_scales: as `sums`.
        factors: of c, one for each tensor; None is 1.
        k: as `sums`.
        blend: 0, or gamma for the form that needs no last gradient.
        beta1: decay rate of e.
        beta2: decay rate of v.
        eps: added to the bias-corrected root of v.
        weight_decay: decoupled; the parameter loses lr * weight_decay of itself.
        second_moment: what v averages the squares of: `"corrected"`, c, or `"gradient"`, g.
        keep_last: whether `last_grads` take g.
        foreach: as `sums`.

    Source: Algorithm 2 of the paper; order of operations of torch.optim.AdamW, so that gamma=0 without clipping is
    AdamW.
    """
    lists = (params, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, last_grads)
    for part in _parts(len(params), foreach):
        dtype = _arithmetic([tensor for own in lists for tensor in own[part]])
        g, _, c = _correct(gradients[part], last_grads[part], scale, _of(last_scales, part), k, dtype)
        if factors is not None:
            c = list(torch._foreach_mul(c, list(factors[part].to(dtype).unbind())))
        e = _in(exp_avgs[part], dtype)
        torch._foreach_lerp_(e, c, 1 - beta1)
        m = list(torch._foreach_lerp(e, c, blend)) if blend else e
        if rule == "adamw":
            v, peak = _in(exp_avg_sqs[part], dtype), _in(max_exp_avg_sqs[part], dtype)
            s = g if second_moment == "gradient" else c
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, s, s, value=1 - beta2)
            if peak:
                torch._foreach_maximum_(peak, v)
            denominators = torch._foreach_sqrt(peak or v)
            torch._foreach_div_(denominators, [(1 - beta2**t) ** 0.5 for t in steps[part]])
            torch._foreach_add_(denominators, eps)
            _put(v, exp_avg_sqs[part])
            _put(peak, max_exp_avg_sqs[part])
        if keep_last and last_grads:
            torch._foreach_copy_(last_grads[part], g)
        # Parameters come last: a gradient may be the parameter itself.
        if rule == "momentum":
            torch._foreach_copy_(params[part], m)
        elif rule == "lion":
            apply(params[part], [_sign(moment) for moment in m], lr=lr, weight_decay=weight_decay, foreach=True)
        else:
            x = _in(params[part], dtype)
            torch._foreach_mul_(x, 1 - lr * weight_decay)
            torch._foreach_addcdiv_(x, m, denominators, [-lr / (1 - beta1**t) for t in steps[part]])
            _put(x, params[part])
        _put(e, exp_avgs[part])


def apply(
    params: list[Tensor], directions: Sequence[Tensor], *, lr: float, weight_decay: float, foreach: bool = False
) -> None:
    """In place, in the arithmetic of `update`: x = x (1 - lr weight_decay) - lr direction.

    Args:
        params: x; modified.
        directions: shapes of `params`; not modified.
        lr: step size.
        weight_decay: decoupled; the parameter loses lr * weight_decay of itself.
        foreach: as `sums`.
    """
    for part in _parts(len(params), foreach):
        dtype = _arithmetic([*params[part], *directions[part]])
        x = _in(params[part], dtype)
        torch._foreach_mul_(x, 1 - lr * weight_decay)
        torch._foreach_add_(x, _in(list(directions[part]), dtype), alpha=-lr)
        _put(x, params[part])


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums on a device: float64, or float32 on Apple's GPUs, which have no other."""
    return torch.float32 if device.type == "mps" else torch.float64


def _squares(tensors: list[Tensor]) -> Tensor:
    """Squared norm of each tensor."""
    device = tensors[0].device
    if device.type == "cpu":
        return torch.stack([_square(tensor) for tensor in tensors])
    return torch.stack(torch._foreach_norm(tensors, 2, sum_dtype(device))).square()


def _square(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.sum(a.to(sum_dtype(a.device)) * b)


def _sign(tensor: Tensor) -> Tensor:
    """torch.sign, except that NaN stays NaN."""
    return torch.where(tensor.isnan(), tensor, tensor.sign())


def _parts(count: int, foreach: bool) -> list[slice]:
    """What is worked on at once: everything, or one tensor after the other."""
    return [slice(0, count)] if foreach else [slice(index, index + 1) for index in range(count)]


def _of(values: Tensor | None, part: slice) -> list[Tensor]:
    return [] if values is None else list(values[part].unbind())


def _correct(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    scale: Tensor | None,
    last_scales: list[Tensor],
    k: float | None,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """g, last and c in the dtype of the arithmetic; c is g where there is no last or no k."""
    dtype = _arithmetic([*gradients, *last_grads]) if dtype is None else dtype
    g, last = _in(gradients, dtype), _in(last_grads, dtype)
    if scale is not None:
        g = list(torch._foreach_mul(g, scale.to(dtype)))
    if not last:
        return g, last, g
    if last_scales:
        last = list(torch._foreach_mul(last, [value.to(dtype) for value in last_scales]))
    if k is None:
        return g, last, g
    c = list(torch._foreach_sub(g, last))
    torch._foreach_mul_(c, k)
    torch._foreach_add_(c, g)
    return g, last, c


def _arithmetic(tensors: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _in(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors themselves where they have this dtype, else copies."""
    return [t.to(dtype) for t in tensors]


def _put(results: list[Tensor], tensors: list[Tensor]) -> None:
    """Round results into the tensors they were made from; nothing to do where they are those."""
    for result, tensor in zip(results, tensors, strict=True):
        if result is not tensor:
            tensor.copy_(result)
