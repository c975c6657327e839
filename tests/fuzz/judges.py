"""Judges of a fuzzed step: guarded memory, and values within bounds that rounding allows.

NaN lies around every element of guarded memory, so that stray reads and writes show. A `Mirror` holds an optimizer's
groups, parameters and states in float64; `expect` takes the reference's step from there, once exactly and once with
each input off by what rounding may change. The deviations together bound every element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from reference import Reference
from torch import Tensor

# --- guarded memory ---------------------------------------------------------------------------------------------------

# Parameters and states are written to; gradients are only read, so that their elements may share memory.
WRITABLE = ("contiguous", "offset", "misaligned", "every other", "permuted", "loose", "real part", "odd strides")
READABLE = (*WRITABLE, "expanded", "one element", "overlapping", "negated")
COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
_CANARY = 0xFF  # in every byte: NaN in all floating dtypes
_MARGIN = 64  # bytes


@dataclass
class Guarded:
    """A tensor and its memory; None if the tensor owns all of its memory."""

    layout: str
    tensor: Tensor
    memory: bytearray | None = None

    def __post_init__(self) -> None:
        # Where the elements are now: `tensor.data` may be set to other memory later.
        self._beside = None if self.memory is None else self._mark(torch.frombuffer(self.memory, dtype=torch.uint8))

    def check(self, name: str) -> None:
        """Fail if a byte outside the tensor's elements has changed."""
        if self.memory is not None:
            changed = (torch.frombuffer(self.memory, dtype=torch.uint8) != _CANARY).logical_and_(self._beside)
            written = changed.sum().item()
            assert not written, f"{name} ({self.layout}): {written} bytes beside the tensor have been written to"

    def _mark(self, memory: Tensor) -> Tensor:
        """Return a mask of the bytes that do not belong to the tensor."""
        beside = memory == _CANARY
        if self.tensor.numel():
            size = self.tensor.element_size()
            places = zip(self.tensor.shape, self.tensor.stride(), strict=True)
            shape = (*(1 if stride == 0 else length for length, stride in places), size)
            strides = (*(stride * size for stride in self.tensor.stride()), 1)
            beside.as_strided(shape, strides, self.tensor.data_ptr() - memory.data_ptr()).fill_(False)
        return beside


def place(values: Tensor, dtype: torch.dtype, layout: str, random: Random) -> Guarded:
    """Put values into a tensor of a dtype and a layout of `READABLE`, or a similar one if the shape cannot have it.

    If elements of the tensor share memory, some values are lost.
    """
    shape = tuple(values.shape)
    if layout == "contiguous":
        return Guarded(layout, values.to(dtype).contiguous().clone())
    if layout == "negated":
        guarded = place(-values, dtype, random.choice(WRITABLE[1:]), random)
        return Guarded(f"negated {guarded.layout}", torch._neg_view(guarded.tensor), guarded.memory)
    if layout == "real part" and dtype not in COMPLEX:
        layout = "every other"
    strides = _strides(shape, layout, random)
    size = dtype.itemsize * (2 if layout == "real part" else 1)
    reach = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    offset = random.randint(1, 3)
    start = _MARGIN + offset * size + (random.randrange(1, size) if layout == "misaligned" else 0)
    memory = bytearray([_CANARY]) * (start + max(reach, 1) * size + _MARGIN)
    # Use torch's own offset where possible, so that storage_offset() is not 0.
    skipped = 0 if layout == "misaligned" else offset
    stored = COMPLEX[dtype] if layout == "real part" else dtype
    flat = torch.frombuffer(memory, dtype=stored, offset=start - skipped * size, count=max(reach, 1) + skipped)
    tensor = flat.as_strided(shape, strides, skipped)
    tensor = tensor.real if layout == "real part" else tensor
    once = tuple(slice(None) if stride else slice(1) for stride in strides)
    if layout == "overlapping":
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        flat[skipped:] = torch.randn(len(flat) - skipped, generator=generator, dtype=torch.float64).to(dtype)
    else:
        tensor[once].copy_(values[once])
    return Guarded(layout, tensor, memory)


def _strides(shape: Sequence[int], layout: str, random: Random) -> tuple[int, ...]:
    dims = len(shape)
    order = list(range(dims))  # from the outermost dimension to the innermost
    steps = [1] * dims  # stride of each dimension, in units of the next inner one's extent
    if layout in ("permuted", "loose"):
        random.shuffle(order)
    if layout == "every other" and dims:
        steps[-1] = 2
    elif layout == "loose":
        steps = [random.randint(1, 3) for _ in steps]
    strides, acc = [0] * dims, 1
    for dim in reversed(order):
        strides[dim] = acc * steps[dim]
        acc = strides[dim] * max(shape[dim], 1)
    if layout == "one element":
        strides = [0] * dims
    if layout == "expanded" and dims:
        for dim in random.sample(range(dims), random.randint(1, dims)):
            strides[dim] = 0
    if layout == "overlapping":
        strides = [random.randint(1, 2) for _ in strides]
    if layout == "odd strides":  # where they say nothing
        strides = [random.randint(0, 99) if shape[dim] == 1 else stride for dim, stride in enumerate(strides)]
    return tuple(strides)


# --- the mirror -------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """A parameter and its state in float64, with their real dtypes."""

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
        for param in (param for group in groups for param in group["params"]):
            state = dict(optimizer.state.get(param, {}))
            kept = {key: _double(value) for key, value in state.items()}
            dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
            entries[param] = Entry(_double(param), param.dtype, kept, dtypes)
        return cls(groups, entries)

    def assert_same(self, other: Mirror) -> None:
        """Fail unless another mirror is bit-identical; a refused step may have added zeros."""
        for param, entry in self.entries.items():
            twin = other.entries[param]
            added = [key for key in twin.kept if key not in entry.kept and not twin.kept[key].any()]
            twin.kept = {key: value for key, value in twin.kept.items() if key not in added}
            assert entry.dtype == twin.dtype and _equal(entry, twin), f"{_name(param)}: values or states"


def _double(value: Any) -> Tensor:
    return value.detach().double().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _equal(one: Entry, other: Entry) -> bool:
    tensors = [{**entry.kept, "x": entry.x} for entry in (one, other)]
    return tensors[0].keys() == tensors[1].keys() and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in ((value, tensors[1][key]) for key, value in tensors[0].items())
    )


def _name(param: Tensor) -> str:
    return f"{param.dtype} parameter of shape {tuple(param.shape)}"


# --- the step ---------------------------------------------------------------------------------------------------------

SCALES = 2.0**-22  # relative error of norms and scales that are kept in float32, their sums apart
MARGIN = 4.0  # how much larger an error may be than all deviations together
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
        error = (actual.double() - self.value).abs()
        unbounded = self.slack.isnan() | (self.value.abs() >= info.max * (1 - info.eps))  # a step before has overflowed
        wrong = ~(error <= allowed) & ~unbounded  # NaN is wrong
        if wrong.any():
            at = (error / allowed).nan_to_num(math.inf).argmax()
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst, element {int(at)}, "
                f"is {actual.flatten()[at].item():.9g} and not "
                f"{self.value.flatten()[at].item():.9g}, within {allowed.flatten()[at].item():.2g}"
            )


@dataclass
class Expected:
    """Bounds on every parameter's values and states after a step, and the global norm if it is computed."""

    mirror: Mirror
    bounds: dict[Tensor, dict[str, Bound]]
    norm: float | None
    norm_error: float

    def check(self, optimizer: Any, *, bfloat16: float = 0.5) -> None:
        """Fail if the optimizer differs; `bfloat16` is the error of rounding, in units in the last place."""
        after = Mirror.of(optimizer)
        for group in self.mirror.groups:
            for param in group["params"]:
                entry, state = self.mirror.entries[param], optimizer.state.get(param, {})
                if param in self.bounds:
                    self._check(param, entry, state, group, bfloat16)
                    continue
                ended = {"previous_param"} if group["is_approx"] else {"previous_param", "last_grad"}
                for each in (entry, after.entries[param]):
                    each.kept = {key: value for key, value in each.kept.items() if key not in ended}
                assert _equal(entry, after.entries[param]), f"{_name(param)}: changed without a gradient"
        if self.norm is not None:
            torch.testing.assert_close(float(optimizer.grad_norm), self.norm, rtol=self.norm_error, atol=0)

    def _check(self, param: Tensor, entry: Entry, state: Mapping[str, Any], group: Any, bfloat16: float) -> None:
        bounds = dict(self.bounds[param])
        x = bounds.pop("x")
        for key, bound in bounds.items():
            assert key in state, f"{_name(param)}: no {key}; the state has {sorted(state)}"
            actual = torch.as_tensor(state[key])
            assert key in ("step", "last_grad") or actual.dtype == entry.dtypes.get(key, actual.dtype), key
            bound.check(f"{_name(param)}: {key}", actual, bfloat16 if actual.dtype == torch.bfloat16 else 0.5)
        units = bfloat16 if param.dtype == torch.bfloat16 else 0.5
        if param.dtype == torch.bfloat16 and group["rounding"] == "kahan":
            lost = x.slack + x.value.abs() * torch.finfo(torch.bfloat16).eps ** 2
            whole = param.detach().double() + state["compensation"].double()
            Bound(x.value, lost).check(f"{_name(param)}: values with their compensation", whole)
        elif param.dtype == torch.bfloat16 and group["rounding"] == "stochastic":
            units = 1.0
        x.check(f"{_name(param)}: values", param.detach(), units)


def expect(mirror: Mirror) -> Expected:
    """Return the expected result of a step from a mirror, with the parameters' current gradients."""
    moved = [(param, group) for group in mirror.groups for param in group["params"] if param.grad is not None]
    limit = mirror.groups[0]["max_grad_norm"]
    norm, scale, error = None, 1.0, 0.0
    if limit is not None and moved:
        norm = math.sqrt(sum((param.grad.detach().double() ** 2).sum().item() for param, _ in moved))
        scale = min(1.0, limit / (norm + 1e-6))
        error = SCALES + summing(max(param.numel() for param, _ in moved), double=False)
    bounds = {}
    for param, group in moved:
        g = param.grad.detach().double() * (-scale if group["maximize"] else scale)
        is_double = param.dtype == param.grad.dtype == torch.float64
        bounds[param] = step(mirror.entries[param], g, group, double=is_double, scaled=error)
    return Expected(mirror, bounds, norm, error)


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
    rule, kept, zeros = rule_of(group), entry.kept, torch.zeros_like(entry.x)
    u, generator = 2.0**-50 if double else 2.0**-21, torch.Generator().manual_seed(0)
    recursive, gamma = is_recursive(group, kept), float(group["gamma"])
    is_kahan = group["rounding"] == "kahan" and entry.dtype == torch.bfloat16

    def taken(erring: str = "") -> dict[str, Tensor]:
        """Take the reference's step, with one input that errs."""

        def near(name: str, value: Tensor, relative: float = u) -> Tensor:
            signs = torch.randint(0, 2, value.shape, generator=generator).double() * 2 - 1
            return value * (1 + relative * signs) if name == erring else value

        settings = {name: float(group[name]) for name in ("lr", "eps", "weight_decay", "gamma")}
        settings |= {name: group[name] for name in ("clip_threshold", "amsgrad", "second_moment", "weight_decay_mode")}
        x = near("x", entry.x + kept.get("compensation", zeros) if is_kahan else entry.x)
        line = Reference(x, rule=rule, betas=tuple(map(float, group["betas"])), **settings)
        # Decoupled decay goes by the largest rate so far, which the group keeps.
        line.initial_lr = max(settings["lr"], float(group.get("peak_lr", 0.0)))
        line.t = int(kept.get("step", 0))
        line.m, line.v, line.v_max = (near(key, kept.get(key, zeros)) for key in MOMENTS)
        line.last = near("last_grad", kept.get("last_grad", zeros), u + (SCALES if scaled else 0.0))
        gradient = near("g", g, u + scaled)
        # e + (1 - beta1) (c - e) rounds e even at a beta1 of 0.
        error, average = near("average", line.m) - line.m, line.average
        line.average = lambda c: average(c) + error
        averaged = line.average(gradient)
        if recursive:  # m_t = (1 - gamma) e_t + gamma g_t; as if the last gradient were 0
            line.m = (1 - gamma) * line.m
        elif rule != "adamw" and group["clip_threshold"] is not None:
            # The square of a norm may be a difference of larger ones.
            norm = max(line.corrected(g).norm().item(), 1e-300)
            line.last, last = -line.last.abs(), line.last
            larger = line.corrected(g.abs()).norm().item()
            line.last = last
            relative = (4 * u + scaled + summing(g.numel(), double=double)) * (larger / norm) ** 2
            line.clip_threshold = near("norm", _double(group["clip_threshold"]), relative).clamp_min(0.0).item()
        after = {"x": line.step(gradient), "exp_avg": line.m, "exp_avg_sq": line.v, "max_exp_avg_sq": line.v_max}
        after["last_grad"] = gradient
        if recursive:
            after["exp_avg"] = averaged
        return after | {"m": line.m}

    exact, others = taken(), [taken(name) for name in ("x", "g", "norm", "last_grad", "average", *MOMENTS)]
    slack = {key: MARGIN * sum((other[key] - exact[key]).abs() for other in others) for key in exact}
    slack["x"] += u * (entry.x.abs() + (exact["x"] - entry.x).abs())
    if rule in ("mars-shampoo", "mars-m"):
        # Products add up in an order of the processor's, which no deviation above has.
        slack["x"] += 32 * u * (exact["x"] - entry.x).abs()
    if rule == "mars-lion":
        slack["x"] += 2.0 * float(group["lr"]) * (exact["m"].abs() <= slack["m"])
    keys = ["x", "exp_avg"]
    if rule in ("adamw", "mars-adamw"):
        keys += ["exp_avg_sq", "max_exp_avg_sq"] if group["amsgrad"] else ["exp_avg_sq"]
    if rule != "adamw" and not recursive and group["is_approx"]:
        keys.append("last_grad")
    bounds = {key: Bound(exact[key], slack[key]) for key in keys}
    bounds["step"] = Bound(kept.get("step", torch.zeros((), dtype=torch.float64)) + 1, torch.zeros(()))
    if not group["is_approx"]:
        bounds["previous_param"] = Bound(entry.x, zeros)
    return bounds
