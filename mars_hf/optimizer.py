"""MARS as a torch.optim.Optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mars_hf import hyperparameters, param_groups, rules, sharding, universal
from mars_hf.metrics import HERE, StepMetrics

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class Mars(torch.optim.Optimizer):
    """MARS: AdamW or Lion on a variance-reduced gradient.

    For a matrix (a parameter of two or more dimensions), with k = gamma beta1 / (1 - beta1)::

        c_t = g_t + k (g_t - g_{t-1})                     corrected gradient; g_0 = 0
        c_t = c_t / max(1, ||c_t|| / clip_threshold)      norm over the whole parameter
        m_t = beta1 m_{t-1} + (1 - beta1) c_t
        mars-adamw:  v_t = beta2 v_{t-1} + (1 - beta2) c_t^2
                     x_{t+1} = x_t - lr (m_t / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps) + weight_decay x_t)
        mars-lion:   x_{t+1} = x_t - lr (sign(m_t) + weight_decay x_t)

    A vector (fewer than two dimensions) takes AdamW with `lr_1d`, `betas_1d` and `weight_decay_1d`, unless
    `optimize_1d`. Call `step()` after the backward pass, as with any torch optimizer; gradients are expected as they
    shall act (accumulated, averaged over ranks, globally clipped). `p.grad` is never modified or kept.

    Every group is split by role at construction: first its matrices, then its vectors, each in the order given. The
    role and all hyperparameters are written into the groups and read from there at every step; `lr`, `betas` and
    `weight_decay` of a vector group hold the `*_1d` values, so that any scheduler keeps the ratio of the two rates.

    Args:
        params: tensors, (name, tensor) pairs, or dicts with `params` and own hyperparameters. What a group states
            itself holds for all its parameters; vectors take its `lr` times lr_1d / lr. A group may state its `role`.
        lr: learning rate of the matrices, >= 0.
        betas: decay rates of first and second moment, each in [0, 1).
        eps: added to the root of the second moment, >= 0.
        weight_decay: decoupled decay of the matrices, >= 0.
        gamma: scale of the variance reduction, >= 0; 0 is AdamW on the clipped gradient.
        mars_type: `"mars-adamw"` or `"mars-lion"`.
        is_approx: True takes the gradient of the step before in the place of the stale gradient.
        clip_threshold: largest norm of a corrected gradient, > 0; None for no clipping.
        amsgrad: divide by the running maximum of the second moment (mars-adamw and vectors).
        optimize_1d: vectors take the MARS rule with the settings of the matrices; `*_1d` settings are then unused.
        lr_1d: learning rate of the vectors, >= 0; None for lr / 2.
        betas_1d: decay rates of the vectors' moments, each in [0, 1).
        weight_decay_1d: decoupled decay of the vectors, >= 0; a group that states its own `weight_decay` keeps it.
        matrix_ndim: `">=2"` counts convolutions and expert stacks as matrices; `"==2"` is the official code's test.
        second_moment: `"corrected"` averages c_t^2; `"gradient"` averages g_t^2.
        maximize: ascend instead of descend.
        foreach: True updates many tensors per kernel launch at the price of temporary copies, False one tensor after
            the other; None is True on accelerators, False on CPU.

    Raises:
        ValueError: a value out of range, an unknown key in a group, an empty parameter list; the message names the
            value and the accepted ones.
        NotImplementedError: `mars_type` `"mars-shampoo"` and `"mars-m"`, `is_approx=False`.
        RuntimeError: in `step()`, a sparse, complex or integer gradient; nothing has been changed then.

    State, per parameter, made at its first step:
        step: 0-d float32 on CPU, number of steps taken.
        exp_avg: shape of the parameter; m_t.
        exp_avg_sq: the same; v_t (not for mars-lion's matrices).
        max_exp_avg_sq: the same; with `amsgrad`.
        last_grad: the same; g_t, a copy of our own (parameters under the MARS rule).
        Tensors have the parameter's dtype, or float32 for float16 and bfloat16 parameters, whose update is computed in
        float32 and rounded once. Loading a state keeps the dtypes it was saved in.

    A step that a gradient scaler skips changes nothing. Without a scaler a NaN or infinite gradient does what it does
    in torch.optim.AdamW: it enters moments and parameter.

    Source: Algorithms 2 and 3 of arXiv 2411.10438, and the official implementation where it differs. Deviations from
    the latter, each with a test: `matrix_ndim`, `lr_1d=None`, `weight_decay_1d=0.0`, hyperparameters in groups,
    last_grad a copy, no unused buffers.
    """

    # Class attributes, because torch restores only defaults, state and param_groups when an optimizer is unpickled.
    _metrics: StepMetrics | None = None
    _layout: sharding.Layout | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gamma: float = 0.025,
        *,
        mars_type: str = "mars-adamw",
        is_approx: bool = True,
        clip_threshold: float | None = 1.0,
        amsgrad: bool = False,
        optimize_1d: bool = False,
        lr_1d: float | None = None,
        betas_1d: tuple[float, float] = (0.9, 0.95),
        weight_decay_1d: float = 0.0,
        matrix_ndim: str = ">=2",
        second_moment: str = "corrected",
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        """See the class."""
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "mars_type": mars_type,
            "is_approx": is_approx,
            "clip_threshold": clip_threshold,
            "amsgrad": amsgrad,
            "optimize_1d": optimize_1d,
            "lr_1d": lr_1d,
            "betas_1d": betas_1d,
            "weight_decay_1d": weight_decay_1d,
            "matrix_ndim": matrix_ndim,
            "second_moment": second_moment,
            "maximize": maximize,
            "foreach": foreach,
        }
        hyperparameters.check(defaults)
        if not isinstance(params, Tensor):  # torch's own error for that is good
            params = list(params)
            if not params:
                raise ValueError(
                    "params is an empty parameter list ([]); accepted: tensors, (name, tensor) pairs, groups of them, "
                    "such as model.parameters() of a model that has some"
                )
        super().__init__(params, defaults)
        universal.extend_deepspeed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, split by role: one or two groups are appended.

        Args:
            param_group: as in the constructor; what it does not state it takes from the constructor.

        Raises:
            As the constructor; the optimizer is left as it was.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        before = len(self.param_groups)
        try:
            for part in param_groups.split_by_role(param_group, self.defaults):
                super().add_param_group(part)
                for key in hyperparameters.KEYS_1D:
                    self.param_groups[-1].pop(key)
        except BaseException:
            del self.param_groups[before:]
            raise
        if self._layout is None:
            self._layout = sharding.Layout(self.param_groups)
        else:
            for group in self.param_groups[before:]:
                self._layout.extend(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled optimizer; settings that are younger than the pickle take their defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key in hyperparameters.GROUP_KEYS:
                group.setdefault(key, DEFAULTS[key])

    def __repr__(self) -> str:
        """One line per group: role, rule, sizes, learning rate, betas, decay."""
        return f"{type(self).__name__}\n{param_groups.summary(self.param_groups)}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its tensors are copied and keep the dtypes they were saved in.

        torch alone would cast them to the parameters' dtype, and share memory with `state_dict`.

        Raises:
            ValueError: the state belongs to another optimizer, or to groups with other roles.
        """
        saved_groups = state_dict["param_groups"]
        for index, (saved, own) in enumerate(zip(saved_groups, self.param_groups, strict=False)):
            if "role" not in saved:
                raise ValueError(
                    f"param group {index} of this state has no 'role', so it was not saved by Mars (its keys: "
                    f"{', '.join(saved)}); load a checkpoint of Mars, or start with a fresh optimizer"
                )
            if saved["role"] != own["role"]:
                raise ValueError(
                    f"param group {index} was saved with role={saved['role']!r} and is {own['role']!r} here; build "
                    "the optimizer from the same parameters, in the same order, as when it was saved"
                )
        super().load_state_dict(state_dict)
        saved_ids = [id_ for group in saved_groups for id_ in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for id_, param in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(id_, {}).items():
                if isinstance(value, Tensor):
                    device = value.device if key == "step" else param.device
                    self.state[param][key] = value.detach().to(device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the gradients and returns the loss; None if `backward` has been called.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient MARS cannot use; raised before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        placements = self._locate()
        for group in self.param_groups:
            for param in group["params"]:
                _check_gradient(param)
                _check_state(param, self.state.get(param, {}), group)
        sums = self._sum_norms(placements)
        for group in self.param_groups:
            for batch in self._batches(group):
                self._update(group, batch, placements, sums)
        return loss

    def update_last_grad(self) -> None:
        """Commit the last gradient after a step; nothing to do in approx mode, where `step()` has done it."""

    def collect_metrics(self, enabled: bool) -> None:
        """Whether the next steps measure what they do (extra reads of the gradients; no wait for the device).

        Starts afresh: what has been measured and not been read is dropped.
        """
        self._metrics = StepMetrics() if enabled else None

    def pop_metrics(self) -> dict[str, float]:
        """The metrics of the steps measured since they were last read; empty if there are none. Waits for the device.

        See `metrics.StepMetrics.read` for their definition. Where parameters are sharded, every rank must call it.
        """
        if self._metrics is None:
            return {}
        metrics, self._metrics = self._metrics, StepMetrics()
        return metrics.read()

    def _locate(self) -> dict[Tensor, sharding.Placement]:
        """Where the pieces of the tensors that take the MARS rule belong; whole parameters are not in it."""
        if self._layout is None:  # unpickled
            self._layout = sharding.Layout(self.param_groups)
        found = {}
        slot = 0
        for group in self.param_groups:
            for param in group["params"]:
                placement = self._layout.locate(param, slot) if _takes_mars(group) else None
                if placement is not None:
                    found[param] = placement
                slot += 1
        return found

    def _sum_norms(self, placements: dict[Tensor, sharding.Placement]) -> sharding.WholeSums | None:
        """Squared norms of the corrected gradients whose pieces are on several ranks; None if nobody asks for them.

        One all-reduce. The corrected gradients are made again by the update, batch by batch, rather than kept.
        """
        groups = [group for group in self.param_groups if _takes_mars(group) and self._wants_norms(group)]
        asked = [param for group in groups for param in group["params"] if param in placements]
        if not asked or self._layout is None:
            return None
        dtype = torch.promote_types(torch.float32, self._state_dtype(asked[0]))
        slots = self._layout.slots(vectors=any(group["optimize_1d"] for group in groups))
        sums = sharding.WholeSums(slots, sharding.local(asked[0]).device, dtype)
        for param in asked:
            sums.join(placements[param])
            if self._metrics is not None:
                self._metrics.join(placements[param].group, sharding.local(param).device)
        for group in groups:
            for batch in self._batches(group):
                sharded = [param for param in batch if param in placements]
                if sharded:
                    corrected = self._correct(group, sharded, self._gradients(group, sharded))
                    for param, c in zip(sharded, corrected, strict=True):
                        norms = rules.norms(sharding.cut(c, placements[param]), foreach=False)
                        sums.add(placements[param], [norm.square() for norm in norms])
        sums.reduce(verify=not self._layout.all_seen(asked))
        return sums

    def _wants_norms(self, group: dict[str, Any]) -> bool:
        return group["clip_threshold"] is not None or self._metrics is not None

    def _batches(self, group: dict[str, Any]) -> Iterator[list[Tensor]]:
        """Parameters with a gradient that are updated together: with foreach, those of one device and dtypes."""
        batches: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None:
                foreach = param.device.type != "cpu" if group["foreach"] is None else group["foreach"]
                key = (param.device, param.dtype, self._state_dtype(param)) if foreach else id(param)
                batches.setdefault(key, []).append(param)
        yield from batches.values()

    def _gradients(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """g_t of each parameter on this rank, in the dtype of its state."""
        dtype = self._state_dtype(params[0])
        gradients = [sharding.local(param.grad).to(dtype) for param in params if param.grad is not None]
        return list(torch._foreach_neg(gradients)) if group["maximize"] else gradients

    def _correct(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """c_t of each parameter on this rank, before clipping."""
        last_gradients = [sharding.local(self._state_of(param, group)["last_grad"]) for param in params]
        return rules.correct(
            gradients, last_gradients, gamma=group["gamma"], beta1=group["betas"][0], foreach=len(params) > 1
        )

    def _clipped(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        gradients: list[Tensor],
        placements: dict[Tensor, sharding.Placement],
        sums: sharding.WholeSums | None,
    ) -> list[Tensor]:
        """c_t of each parameter on this rank, clipped by the norm of the whole parameter."""
        corrected = self._correct(group, params, gradients)
        if not self._wants_norms(group):
            return corrected
        whole = not any(param in placements for param in params)
        norms = rules.norms(corrected, foreach=len(params) > 1) if whole else []
        pieces = corrected if whole else []
        for param, c in zip(params, corrected, strict=True) if not whole else ():
            placement = placements.get(param)
            pieces += sharding.cut(c, placement)
            if placement is None or sums is None:
                norms += rules.norms([c], foreach=False)
            else:
                norms += [value.sqrt().to(c.device, c.dtype) for value in sums.of(placement)]
        if self._metrics is not None:
            self._measure(group, params, gradients, corrected, norms, placements)
        if group["clip_threshold"] is not None and pieces:
            rules.clip(pieces, norms, clip_threshold=group["clip_threshold"], foreach=len(pieces) > 1)
        return corrected

    def _measure(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        gradients: list[Tensor],
        corrected: list[Tensor],
        norms: list[Tensor],
        placements: dict[Tensor, sharding.Placement],
    ) -> None:
        """Hand the pieces of a batch to the metrics, before they are clipped."""
        assert self._metrics is not None
        remaining = iter(norms)
        for param, g, c in zip(params, gradients, corrected, strict=True):
            placement = placements.get(param)
            last = sharding.local(self.state[param]["last_grad"])
            g_pieces, last_pieces, c_pieces = (sharding.cut(t, placement) for t in (g, last, c))
            self._metrics.add(
                g_pieces,
                last_pieces,
                c_pieces,
                [next(remaining) for _ in c_pieces],
                sharding.shares(placement),
                group["clip_threshold"],
                placement.group if placement else HERE,
            )

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        placements: dict[Tensor, sharding.Placement],
        sums: sharding.WholeSums | None,
    ) -> None:
        """One update of parameters of one group, one device and one dtype."""
        mars = _takes_mars(group)
        states = [self._state_of(param, group) for param in params]
        gradients = self._gradients(group, params)
        here = [sharding.local(param) for param in params]
        work = [x.to(self._state_dtype(params[0])) for x in here]  # `here` itself unless of lower precision
        before = [x.clone() for x in work] if mars and self._metrics is not None else []
        first = self._clipped(group, params, gradients, placements, sums) if mars else gradients
        for state in states:
            state["step"] += 1

        def buffers(key: str) -> list[Tensor]:
            return [sharding.local(state[key]) for state in states]

        beta1, beta2 = group["betas"]
        shared = {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "weight_decay": group["weight_decay"],
            "foreach": len(params) > 1,
        }
        if mars and group["mars_type"] == "mars-lion":
            rules.lion(work, first, buffers("exp_avg"), **shared)
        else:
            rules.adamw(
                work,
                first,
                gradients if group["second_moment"] == "gradient" else first,
                buffers("exp_avg"),
                buffers("exp_avg_sq"),
                buffers("max_exp_avg_sq") if group["amsgrad"] else [],
                [state["step"].item() for state in states],
                beta2=beta2,
                eps=group["eps"],
                **shared,
            )
        for param, x, old in zip(params, work, before, strict=True) if before else ():
            assert self._metrics is not None
            placement = placements.get(param)
            updates = sharding.cut(x - old, placement)
            self._metrics.add_updates(updates, placement.group if placement else HERE)
        if mars:
            torch._foreach_copy_(buffers("last_grad"), gradients)
        if work[0] is not here[0]:
            torch._foreach_copy_(here, work)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        """The dtype of a parameter's state: the one it was loaded with, or at least float32."""
        if "exp_avg" in self.state[param]:
            return self.state[param]["exp_avg"].dtype
        return torch.float32 if param.dtype in _LOW_PRECISION else param.dtype

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, with whatever its rule needs and it does not have yet."""
        dtype = self._state_dtype(param)
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        needed = ["exp_avg"]
        if not (_takes_mars(group) and group["mars_type"] == "mars-lion"):
            needed += ["exp_avg_sq", "max_exp_avg_sq"] if group["amsgrad"] else ["exp_avg_sq"]
        if _takes_mars(group):
            needed.append("last_grad")
        for key in needed:
            if key not in state:
                state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        return state


# Every hyperparameter of Mars and its default, as its constructor has them.
DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(Mars.__init__).parameters.items()
    if name not in ("self", "params")
}


def create(
    model_or_params: nn.Module | Iterable[Any], *, no_decay: Iterable[str] = (), **hyperparameters_: Any
) -> Mars:
    """Make a Mars optimizer for a model (preferred) or for parameters.

    With a model, module types and shapes decide which parameter is a matrix and which is decayed: see
    `param_groups.from_model`. Frozen parameters are left out, tied weights appear once.

    Args:
        model_or_params: a module, or what `Mars` takes as `params`.
        no_decay: shell patterns of parameter names (`"*.wte.weight"`) whose matrices are not decayed; needs a model.
        **hyperparameters_: any of `Mars`; its defaults hold for the rest.

    Raises:
        UnknownHyperparameterError: a setting `Mars` does not have.
        ValueError: as `Mars`; a model without trainable parameters; a pattern that matches nothing.
    """
    hyperparameters.reject_unknown(hyperparameters_, [*DEFAULTS, "no_decay"], "mars_hf.create")
    patterns = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    if isinstance(model_or_params, nn.Module):
        matrix_ndim = hyperparameters_.get("matrix_ndim", DEFAULTS["matrix_ndim"])
        hyperparameters.check({"matrix_ndim": matrix_ndim})
        return Mars(
            param_groups.from_model(model_or_params, matrix_ndim=matrix_ndim, no_decay=patterns), **hyperparameters_
        )
    if patterns:
        raise ValueError(f"no_decay={patterns!r} matches names, which plain parameters do not have; pass the model")
    return Mars(model_or_params, **hyperparameters_)


def _takes_mars(group: dict[str, Any]) -> bool:
    """Whether the parameters of a group take the MARS rule; plain AdamW otherwise."""
    return group["role"] == "matrix" or group["optimize_1d"]


def _check_gradient(param: Tensor) -> None:
    """Raise RuntimeError for a gradient MARS cannot use."""
    grad = param.grad
    if grad is None:
        return
    shape = tuple(param.shape)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient of layout {grad.layout} for a parameter of shape {shape}: MARS takes dense (torch.strided) "
            "gradients only; build the embedding with sparse=False"
        )
    if not grad.is_floating_point():
        raise RuntimeError(
            f"gradient of dtype {grad.dtype} for a parameter of shape {shape}: MARS takes real floating point "
            "gradients only (float16, bfloat16, float32, float64)"
        )
    sharding.check_gradient_placement(param, grad)


def _check_state(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Raise RuntimeError for a state that has been loaded without its last gradient."""
    if "exp_avg" in state and "last_grad" not in state and _takes_mars(group):
        raise RuntimeError(
            f"the state of a parameter of shape {tuple(param.shape)} has a first moment and no last gradient: it was "
            "loaded by something that knows Adam's states only. For DeepSpeed's universal checkpoints, convert with "
            "python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER, and import deepspeed before Mars is made"
        )
