"""The expected result of one step of Mars, in straight-line float64, with a rounding bound for every element.

Only the documented names of settings and states are shared with mars_hf. A `Mirror` holds an optimizer's
groups, parameters and states in float64; `expect` computes what they become.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import orthogonalized
from torch import Tensor

SCALES = 2.0**-22  # relative error of norms and scales that are kept in float32, their sums apart
QUINTIC = 3.4445**5  # what five steps of Newton-Schulz magnify a small error by
LOW = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass
class Bound:
    """Values, and the allowed error of float32 or float64 arithmetic before the result is rounded."""

    value: Tensor
    slack: Tensor

    def check(self, name: str, actual: Tensor, rounding: float = 0.5) -> None:
        """Fail if an element is farther away than `rounding` units in the last place of its dtype allow."""
        assert actual.shape == self.value.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(self.value.shape)}"
        info = torch.finfo(actual.dtype)
        allowed = self.slack + rounding * info.eps * (self.value.abs() + self.slack) + info.smallest_normal * info.eps
        largest = info.max * (1 - info.eps)
        error = (actual.double() - self.value).abs()
        wrong = ~(error <= allowed) & ~(self.value.abs() >= largest)  # NaN is wrong
        if wrong.any():
            at = (error / allowed).nan_to_num(math.inf).argmax()
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst, element {int(at)}, "
                f"is {actual.flatten()[at].item():.9g} and not "
                f"{self.value.flatten()[at].item():.9g}, within {allowed.flatten()[at].item():.2g}"
            )


@dataclass
class Entry:
    """A parameter and its state in float64, with their real dtypes. last_grad includes last_grad_scale."""

    x: Tensor
    dtype: torch.dtype
    kept: dict[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


@dataclass
class Mirror:
    """Copy of an optimizer's groups and states."""

    groups: list[dict[str, Any]]
    entries: dict[Tensor, Entry]

    @classmethod
    def of(cls, optimizer: Any) -> Mirror:
        """Read the groups and states of an optimizer."""
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        entries = {}
        for group in groups:
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                kept = {key: _double(value) for key, value in state.items()}
                dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
                scale = kept.pop("last_grad_scale", None)
                dtypes.pop("last_grad_scale", None)
                if scale is not None and "last_grad" in kept:
                    kept["last_grad"] = kept["last_grad"] * scale
                entries[param] = Entry(_double(param), param.dtype, kept, dtypes)
        return cls(groups, entries)

    def names(self) -> dict[Tensor, str]:
        """Return a name for each parameter, for messages."""
        return {
            param: f"group {i} parameter {j} {tuple(param.shape)} {str(param.dtype).removeprefix('torch.')}"
            for i, group in enumerate(self.groups)
            for j, param in enumerate(group["params"])
        }

    def assert_same(self, other: Mirror, *, groups: bool = True) -> None:
        """Fail unless another mirror is bit-identical; zeros that a refused step has filled in are taken up."""
        names = self.names()
        assert [list(map(id, group["params"])) for group in self.groups] == [
            list(map(id, group["params"])) for group in other.groups
        ], "other parameters in the groups"
        if groups:
            for own, its in zip(self.groups, other.groups, strict=True):
                changed = {key for key in own.keys() | its.keys() if key != "params" and own.get(key) != its.get(key)}
                assert not changed, {key: (own.get(key), its.get(key)) for key in changed}
        for param, entry in self.entries.items():
            found = other.entries[param]
            assert entry.dtype == found.dtype, (names[param], found.dtype)
            assert _equal(entry.x, found.x), f"{names[param]}: values"
            for key in found.kept.keys() - entry.kept.keys():
                if not found.kept[key].any():
                    entry.kept[key] = found.kept[key]
                    entry.dtypes |= {key: found.dtypes[key]} if key in found.dtypes else {}
            assert entry.kept.keys() == found.kept.keys(), (names[param], sorted(entry.kept), sorted(found.kept))
            own, its = ({k: v for k, v in e.dtypes.items() if k != "step"} for e in (entry, found))
            assert own == its, f"{names[param]}: dtypes {own}, {its}"
            for key, value in entry.kept.items():
                assert _equal(value, found.kept[key]), f"{names[param]}: {key}"


def _double(value: Any) -> Tensor:
    return value.detach().double().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


# --- the step -------------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """Bounds on every parameter's values and states after a step, and the global norm if it is computed."""

    mirror: Mirror
    outcomes: dict[Tensor, dict[str, Bound]]
    norm: float | None
    norm_of: int = 0  # elements of the largest gradient in it

    def check(self, optimizer: Any, *, bfloat16: float = 0.5) -> None:
        """Fail if the optimizer differs.

        Args:
            optimizer: the optimizer after its step.
            bfloat16: allowed error of rounding to bfloat16, in units in the last place.
        """
        names = self.mirror.names()
        for group in self.mirror.groups:
            for param in group["params"]:
                self._check(names[param], param, optimizer, group, bfloat16)
        if self.norm is not None:
            rtol = SCALES + summing(self.norm_of, double=False)
            torch.testing.assert_close(float(optimizer.grad_norm), self.norm, rtol=rtol, atol=0, msg="grad_norm")

    def _check(self, name: str, param: Tensor, optimizer: Any, group: dict[str, Any], bfloat16: float) -> None:
        entry, state = self.mirror.entries[param], optimizer.state.get(param, {})
        outcome = self.outcomes.get(param)
        if outcome is None:
            assert _equal(_double(param), entry.x), f"{name}: changed without a gradient"
            now = Mirror.of(optimizer).entries[param].kept
            ended = {"previous_param"} if group["is_approx"] else {"previous_param", "last_grad"}
            kept = {key: value for key, value in now.items() if key not in ended}
            assert kept.keys() == entry.kept.keys() - ended, f"{name}: other states without a gradient"
            assert all(_equal(kept[key], entry.kept[key]) for key in kept), (
                f"{name}: a state changed without a gradient"
            )
            return
        outcome = dict(outcome)
        scaled = state.get("last_grad_scale", 1.0)
        for key, bound in outcome.items():
            if key in ("x", "kahan"):
                continue
            assert key in state, f"{name}: no {key}; the state has {sorted(state)}"
            actual = state[key]
            if key == "step":
                assert float(actual) == bound.value.item(), f"{name}: step {float(actual)}, not {bound.value.item()}"
                continue
            if key in entry.dtypes:
                assert actual.dtype == entry.dtypes[key] or key == "last_grad", f"{name}: dtype of {key} changed"
            if key == "last_grad":
                actual = actual.double() * float(scaled) if float(scaled) != 1.0 else actual
            if key != "compensation":
                bound.check(f"{name}: {key}", actual, bfloat16 if actual.dtype == torch.bfloat16 else 0.5)
        units = bfloat16 if param.dtype == torch.bfloat16 else 0.5
        if group["rounding"] == "stochastic" and param.dtype == torch.bfloat16:
            units = 1.0
        if "kahan" in outcome:
            bound = outcome.pop("kahan")
            lost = state["compensation"].double()
            error = torch.finfo(torch.bfloat16).eps
            bound.slack = bound.slack + bound.value.abs() * error * error
            bound.check(f"{name}: values with their compensation", param.detach().double() + lost)
        outcome["x"].check(f"{name}: values", param.detach(), units)


def expect(mirror: Mirror) -> Expected:
    """Return the expected result of a step from a mirror, with the parameters' current gradients."""
    moved = [(param, group) for group in mirror.groups for param in group["params"] if param.grad is not None]
    gradients = {param: param.grad.detach().double() for param, _ in moved}
    limit = mirror.groups[0]["max_grad_norm"]
    norm, scale, largest = None, 1.0, 0
    if limit is not None and moved:
        norm = math.sqrt(sum((gradient**2).sum().item() for gradient in gradients.values()))
        scale = min(1.0, limit / (norm + 1e-6))
        largest = max(gradient.numel() for gradient in gradients.values())
    scaled = 0.0 if limit is None else SCALES + summing(largest, double=False)
    outcomes = {}
    for param, group in moved:
        own = -scale if group["maximize"] else scale
        double = param.dtype == param.grad.dtype == torch.float64
        how = {"double": double, "scaled": scaled}
        outcomes[param] = step(mirror.entries[param], gradients[param] * own, group, **how)
    return Expected(mirror, outcomes, norm, largest)


def summing(count: int, *, double: bool) -> float:
    """Return the relative error of a norm from summing `count` squares: half that of the sum.

    Equal squares, as in expanded gradients, round alike, so errors add up over the whole chain of additions. A
    chain of float64 has `count` of them, here and there. One of float32 is a quarter of a row of 4096, and three more.
    """
    return count * 2.0**-53 + (0.0 if double else (min(count, 4096) // 4 + 3) * 2.0**-25)


def takes_mars(group: Mapping[str, Any]) -> bool:
    """Return whether a group uses the MARS rule; otherwise it uses AdamW."""
    return group["role"] == "matrix" or (group["role"] == "vector" and group["optimize_1d"])


def rule_of(group: Mapping[str, Any]) -> str:
    """Return `mars-...` or `adamw`."""
    if not takes_mars(group):
        return "adamw"
    orthogonal = group["mars_type"] in ("mars-shampoo", "mars-m")
    return "mars-adamw" if orthogonal and group["role"] != "matrix" else group["mars_type"]


def is_recursive(group: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Return whether the documentation promises that no last gradient is kept."""
    if not takes_mars(group) or not group["is_approx"] or group["clip_threshold"] is not None:
        return False
    return (rule_of(group) != "mars-adamw" or group["second_moment"] == "gradient") and "last_grad" not in kept


def step(entry: Entry, g: Tensor, group: Mapping[str, Any], *, double: bool, scaled: float) -> dict[str, Bound]:
    """Return bounds on one parameter's values ("x") and states after a step.

    Args:
        entry: the parameter before the step.
        g: gradient, scaled and signed.
        group: settings of its group.
        double: whether all arithmetic is in float64, norms included.
        scaled: relative error of the scale, if it comes from the global norm.
    """
    rule, kept, x = rule_of(group), entry.kept, entry.x
    u = 2.0**-50 if double else 2.0**-21
    b1, b2 = (float(beta) for beta in group["betas"])
    lr, decay, gamma = float(group["lr"]), float(group["weight_decay"]), float(group["gamma"])
    zeros = torch.zeros_like(x)
    t = float(kept.get("step", 0.0)) + 1
    found = {"step": Bound(torch.tensor(t, dtype=torch.float64), torch.zeros(()))}

    slack_g = g.abs() * (u + scaled)
    c, slack_c = g, slack_g
    recursive = is_recursive(group, kept)
    if rule != "adamw" and not recursive:
        last = kept.get("last_grad", zeros)
        k = gamma * b1 / (1 - b1)
        c = g + k * (g - last)
        slack_c = u * ((1 + k) * g.abs() + k * last.abs()) + (1 + k) * slack_g
        if scaled:  # last_grad_scale is float32
            slack_c = slack_c + k * last.abs() * SCALES
        threshold = group["clip_threshold"]
        norm = c.norm().item()
        if threshold is not None and norm > 0:
            reach = (1 + k) * g.norm().item() + k * last.norm().item()
            relative = (4 * u + scaled + summing(c.numel(), double=double)) * (reach / norm) ** 2
            factor = min(1.0, float(threshold) / norm)
            slack_c = slack_c * factor + (c * factor).abs() * relative * (norm * (1 + relative) > threshold)
            c = c * factor
    e = kept.get("exp_avg", zeros)
    average = b1 * e + (1 - b1) * c
    slack_e = u * (e.abs() + (1 - b1) * c.abs()) + (1 - b1) * slack_c
    found["exp_avg"] = Bound(average, slack_e)
    m, slack_m = average, slack_e
    if recursive:
        m = average + gamma * (g - average)
        slack_m = slack_e + u * (average.abs() + gamma * (g - average).abs()) + gamma * slack_g
    if rule == "mars-lion":
        direction = m.sign()
        slack_d = 2.0 * (m.abs() <= slack_m)
    elif rule in ("mars-shampoo", "mars-m"):
        direction, slack_d = _orthogonal(rule, m, slack_m, b1, float(group["eps"]))
    else:
        square, slack_s = (g, slack_g) if group["second_moment"] == "gradient" and rule != "adamw" else (c, slack_c)
        v = b2 * kept.get("exp_avg_sq", zeros) + (1 - b2) * square**2
        slack_v = u * v + 2 * (1 - b2) * square.abs() * slack_s + (1 - b2) * slack_s**2
        found["exp_avg_sq"] = Bound(v, slack_v)
        if group["amsgrad"]:
            v = torch.maximum(kept.get("max_exp_avg_sq", zeros), v)
            slack_v = torch.maximum(slack_v, u * v)  # a peak of float64 may be taken in float32
            found["max_exp_avg_sq"] = Bound(v, slack_v)
        bias1, bias2 = 1 - b1**t, 1 - b2**t
        # 1 - beta^t in float32, at small t.
        u = u / min(bias1, bias2) if not double else u
        root = (v / bias2).sqrt()
        slack_root = torch.minimum(slack_v / (2 * root * bias2).clamp_min(1e-300), (slack_v / bias2).sqrt()) + u * root
        denominator = root + float(group["eps"])
        direction = torch.where(denominator > 0, m / bias1 / denominator, torch.nan)
        slack_d = slack_m / bias1 / denominator + direction.abs() * (slack_root / denominator + u)
        slack_d = torch.where(
            slack_root < denominator / 2, slack_d, slack_d + 2 * direction.abs() + 1 / denominator * slack_m
        )
    lost = kept.get("compensation", zeros)
    before = x + lost if _compensates(entry, group) else x
    value = before * (1 - lr * decay) - lr * direction
    bound = Bound(value, u * (before.abs() + lr * direction.abs()) + lr * slack_d)
    found["x"] = bound
    if _compensates(entry, group):
        found["kahan"] = Bound(value, bound.slack.clone())
        found["compensation"] = Bound(zeros, zeros)
    if rule != "adamw" and not recursive and group["is_approx"]:
        found["last_grad"] = Bound(g, slack_g + g.abs() * (SCALES if scaled else 0.0))
    if not group["is_approx"]:
        found["previous_param"] = Bound(x, zeros)
    return found


def _compensates(entry: Entry, group: Mapping[str, Any]) -> bool:
    return bool(group["rounding"] == "kahan" and entry.dtype == torch.bfloat16)


def _orthogonal(rule: str, m: Tensor, slack: Tensor, beta1: float, eps: float) -> tuple[Tensor, Tensor]:
    """Return directions of mars-shampoo and mars-m for the default (out, in) matrices of a shape."""
    slack_d = torch.zeros(m.shape, dtype=m.dtype)
    if not m.numel():
        return m, slack_d
    matrices, slacks, bounds = (x if m.ndim == 3 else x.reshape(1, len(m), -1) for x in (m, slack, slack_d))
    for matrix, own, bound in zip(matrices, slacks, bounds, strict=True):
        relative = own.norm() / max(matrix.norm().item(), 1e-30)
        rows, cols = matrix.shape
        scale = math.sqrt(max(1.0, rows / cols)) if rule == "mars-shampoo" else 0.2 * math.sqrt(max(rows, cols))
        bound.fill_(scale * min(2.0, QUINTIC * float(relative + 2**-40)))
    return orthogonalized(rule, m, beta1, eps), slack_d
