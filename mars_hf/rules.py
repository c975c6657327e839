"""The paper's formulas on lists of tensors. No state, no I/O.

Every rule takes lists of equal length, one entry a parameter, and a flag `foreach`: False works on one tensor after the
other, True hands whole lists to PyTorch's `torch._foreach_*` functions (fewer kernel launches, the same arithmetic in
the same order). Tensors of one list share device and dtype when `foreach` is True. Numbers stay Python floats or 0-d
tensors on the parameters' device, so that no rule waits for the device.

Symbols (paper, arXiv 2411.10438): g_t gradient, g_{t-1} last gradient, c_t corrected gradient, m_t `exp_avg`,
v_t `exp_avg_sq`, x_t parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def correct(
    gradients: list[Tensor], last_gradients: list[Tensor], *, gamma: float, beta1: float, foreach: bool
) -> list[Tensor]:
    """Corrected gradient c_t = g_t + gamma beta1/(1-beta1) (g_t - g_{t-1}), before clipping.

    Args:
        gradients: g_t, any shapes, floating point; not modified.
        last_gradients: g_{t-1}, shapes and dtypes of `gradients`; not modified.
        gamma: scale of the correction.
        beta1: decay rate of the first moment.
        foreach: see the module's docstring.

    Returns:
        New tensors.

    Source: Algorithm 2 of the paper, with the gradient of the step before in the place of the stale one.
    """
    k = gamma * beta1 / (1 - beta1)
    if foreach:
        corrected = list(torch._foreach_sub(gradients, last_gradients))
        torch._foreach_mul_(corrected, k)
        torch._foreach_add_(corrected, gradients)
        return corrected
    return [(g - last).mul_(k).add_(g) for g, last in zip(gradients, last_gradients, strict=True)]


def norms(tensors: list[Tensor], *, foreach: bool) -> list[Tensor]:
    """2-norm of each tensor, as 0-d tensors."""
    return list(torch._foreach_norm(tensors)) if foreach else [torch.linalg.vector_norm(t) for t in tensors]


def clip(corrected: list[Tensor], norms: list[Tensor], *, clip_threshold: float, foreach: bool) -> None:
    """Scale corrected gradients down to norm `clip_threshold`, in place.

    Args:
        corrected: c_t, or pieces of it; modified.
        norms: 2-norm of the whole c_t each entry belongs to; not modified.
        clip_threshold: upper bound of the norm.
        foreach: see the module's docstring.

    Source: Algorithm 2 of the paper, parameter by parameter as in the official code.
    """
    if foreach:
        divisors = torch._foreach_div(norms, clip_threshold)
        torch._foreach_clamp_min_(divisors, 1.0)
        torch._foreach_div_(corrected, divisors)
        return
    for c, norm in zip(corrected, norms, strict=True):
        c.div_(norm.div(clip_threshold).clamp_min_(1.0))


def adamw(
    params: list[Tensor],
    gradients: list[Tensor],
    squared: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[float],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    foreach: bool,
) -> None:
    """AdamW with decoupled weight decay, in place: MARS-AdamW when `gradients` are corrected gradients.

    Args:
        params: x_t; modified.
        gradients: what the first moment averages (c_t for MARS, g_t for AdamW); not modified.
        squared: what the second moment averages the squares of; not modified.
        exp_avgs: m; modified.
        exp_avg_sqs: v; modified.
        max_exp_avg_sqs: running maxima of v (AMSGrad); modified; an empty list turns AMSGrad off.
        steps: t of each parameter, from 1.
        lr: step size.
        beta1: decay rate of m.
        beta2: decay rate of v.
        eps: added to the bias-corrected root of v.
        weight_decay: decoupled; the parameter loses lr * weight_decay of itself.
        foreach: see the module's docstring.

    Source: Algorithm 2 of the paper; order of operations of torch.optim.AdamW, so that gamma=0 without clipping is
    AdamW.
    """
    corrections1 = [1 - beta1**step for step in steps]
    roots2 = [(1 - beta2**step) ** 0.5 for step in steps]
    if foreach:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, squared, squared, value=1 - beta2)
        if max_exp_avg_sqs:
            torch._foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs)
        denominators = torch._foreach_sqrt(max_exp_avg_sqs or exp_avg_sqs)
        torch._foreach_div_(denominators, roots2)
        torch._foreach_add_(denominators, eps)
        torch._foreach_addcdiv_(params, exp_avgs, denominators, [-lr / c1 for c1 in corrections1])
        return
    for i, param in enumerate(params):
        param.mul_(1 - lr * weight_decay)
        exp_avgs[i].lerp_(gradients[i], 1 - beta1)
        exp_avg_sqs[i].mul_(beta2).addcmul_(squared[i], squared[i], value=1 - beta2)
        second_moment = exp_avg_sqs[i]
        if max_exp_avg_sqs:
            second_moment = torch.maximum(max_exp_avg_sqs[i], exp_avg_sqs[i], out=max_exp_avg_sqs[i])
        denominator = second_moment.sqrt().div_(roots2[i]).add_(eps)
        param.addcdiv_(exp_avgs[i], denominator, value=-lr / corrections1[i])


def lion(
    params: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    *,
    lr: float,
    beta1: float,
    weight_decay: float,
    foreach: bool,
) -> None:
    """MARS-Lion, in place: a step of size lr along the sign of the averaged corrected gradient.

    Args:
        params: x_t; modified.
        gradients: c_t; not modified.
        exp_avgs: m; modified.
        lr: step size.
        beta1: decay rate of m.
        weight_decay: decoupled; the parameter loses lr * weight_decay of itself.
        foreach: see the module's docstring.

    Source: MARS-Lion of the paper.
    """
    if foreach:
        torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, torch._foreach_sign(exp_avgs), alpha=-lr)
        return
    for param, c, exp_avg in zip(params, gradients, exp_avgs, strict=True):
        exp_avg.lerp_(c, 1 - beta1)
        param.mul_(1 - lr * weight_decay).add_(exp_avg.sign(), alpha=-lr)
