"""MARS as a torch.optim.Optimizer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_hf import _compat
from mars_hf.arithmetic.update_rules import UpdateRule, update_rule
from mars_hf.distributed.shards import place_gradients
from mars_hf.distributed.tensors import Group, local
from mars_hf.groups.advice import Advice
from mars_hf.groups.effects import (
    Statement,
    check_read,
    statements_of_defaults,
    statements_of_group,
    warn_of_decays,
)
from mars_hf.groups.model_watch import ModelWatch
from mars_hf.groups.param_groups import split_by_role
from mars_hf.groups.settings import (
    DEFAULTS,
    KEYS_1D,
    STRUCTURAL_KEYS,
    check_decoupled_decay,
    check_values,
    loaded_state_dtype,
    without_torch_keywords,
)
from mars_hf.groups.summary import summary
from mars_hf.step import exact, states
from mars_hf.step.last_norms import LastNorms
from mars_hf.step.lists import TensorList, build_lists
from mars_hf.step.metrics import StepMetrics
from mars_hf.step.ranks import Ranks, SharedStep
from mars_hf.step.release import GradientRelease
from mars_hf.step.sums import find_moving, norms_taken, rows_to_reduce, set_factors, take_sums
from mars_hf.step.update import count_steps, note_peaks, update, update_matrices

_device_of = attrgetter("device")
# Labels of groups that a model's modules and names give.
_OF_MODEL = ("left_out", "pattern")
# By the name of a package, what is called whenever a Mars is made, if that package is imported then. Modules above this
# one fill it in.
EXTENSIONS: dict[str, Callable[[], Any]] = {}


class Mars(torch.optim.Optimizer):
    """Run AdamW, Lion or orthogonalized momentum on a corrected gradient.

    For a matrix (a parameter of two or more dimensions), with k = gamma beta1 / (1 - beta1):

        c_t = g_t + k (g_t - last_t)                   correct; last_1 = 0
        c_t = c_t / max(1, ||c_t|| / clip_threshold)   clip, over the parameter
        m_t = beta1 m_{t-1} + (1 - beta1) c_t
        x_{t+1} = x_t - lr (d_t + weight_decay x_t)
        mars-adamw:    v_t = beta2 v_{t-1} + (1 - beta2) c_t^2
                       d_t = m_t / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps)
        mars-lion:     d_t = sign(m_t), 0 where g_t = 0
        mars-shampoo:  d_t = sqrt(max(1, rows / cols)) NS(m_t / (1 - beta1))
        mars-m:        d_t = 0.2 sqrt(max(rows, cols)) NS(m_t)

    NS is Newton-Schulz. It runs on each (rows, cols) = (outputs, inputs) matrix of the parameter, divided by its
    Frobenius norm + eps (1e-7 for mars-m); a group's `layout` says which matrices a parameter holds. The class takes
    every matrix, embeddings included, as the official one does; `create(model)` gives embeddings the role `adamw`.

    With `is_approx`, last_t is g_{t-1}, the gradient of the previous step. Otherwise it is the stale gradient: that of
    this step's batch at x_{t-1}. `MarsTrainer` supplies it; your own loop calls `previous_params()`,
    `update_previous_grad()` and `update_last_grad()`.

    A vector (fewer than two dimensions) takes AdamW with `lr_1d`, `betas_1d` and `weight_decay_1d`. With `optimize_1d`
    it takes the MARS rule instead, which is mars-adamw where matrices are orthogonalized. A parameter of the role
    `adamw` always takes AdamW with the settings of vectors, but decays as matrices do.

    Call `step()` after the backward pass, as with any torch optimizer, on gradients that are ready to use: accumulated,
    averaged over ranks, globally clipped. `p.grad` is never modified or kept; that of a DTensor is placed like its
    parameter.

    The constructor splits every group by role: first its matrices, then its vectors. Groups hold the role and all
    hyperparameters, and every step reads them there. A vector group's `lr`, `betas` and `weight_decay` hold the `*_1d`
    values, so schedulers keep the ratio of the two rates; give OneCycleLR and CyclicLR a list, one rate a group.

    Args:
        params: tensors, (name, tensor) pairs, or dicts with `params` and hyperparameters of their own. A group's own
            settings hold for all its parameters, but its `lr` is that of matrices: vectors, also in a group of vectors
            alone, take it times lr_1d / lr of the constructor, half of it by default. Its `lr_1d` is theirs as it is,
            and wins. A setting that none of its parameters reads is refused. A group may state its `role`
            (`"matrix"`, `"vector"` or `"adamw"`), and as `layout` the (out, in) matrices in its parameters: a
            `MatrixLayout` or a dict of its fields. None goes by shape: two dimensions are (out, in), three a batch of
            such, more are (out, all others).
        lr: learning rate of the matrices, >= 0.
        betas: decay rates of first and second moment, each in [0, 1).
        eps: added to the root of the second moment, >= 0, and by mars-shampoo to the norm of m_t / (1 - beta1).
        weight_decay: decoupled decay of the matrices, >= 0.
        gamma: scale of the correction, >= 0; 0 is AdamW on the clipped gradient.
        mars_type: `"mars-adamw"`, `"mars-lion"`, `"mars-shampoo"` or `"mars-m"`.
        is_approx: True uses the previous step's gradient in place of the stale gradient; False is exact MARS.
        clip_threshold: largest norm of a corrected gradient, > 0; None for no clipping.
        amsgrad: divide by the running maximum of the second moment (mars-adamw, vectors and embeddings;
            other matrices have none).
        optimize_1d: vectors take the MARS rule with the settings of the matrices; `*_1d` settings then hold for
            embeddings only.
        lr_1d: learning rate of the vectors, >= 0; None for lr / 2, and for lr with mars-m, as published.
        betas_1d: decay rates of the vectors' moments, each in [0, 1).
        weight_decay_1d: decoupled decay of the vectors, and of the role `adamw`, >= 0; None for 0, and for the role
            `adamw` (embeddings and heads) `weight_decay`. A group that states its own `weight_decay` keeps it.
        weight_decay_mode: `"standard"` shrinks weights by lr * weight_decay, as AdamW; `"cautious"` those alone whose
            update does not take them away from zero, d_t x_t >= 0 (arXiv 2510.12402); `"decoupled"` by weight_decay
            times the schedule's factor, lr over its peak: `max_lr` under OneCycleLR, else the largest rate that the
            group has had, the one it was made with included. Its weight_decay is AdamW's times lr: 1e-5 to 1e-3.
        second_moment: `"corrected"` averages c_t^2; `"gradient"` averages g_t^2.
        ns_steps: steps of Newton-Schulz, >= 1.
        ns_coefficients: `"quintic"`, those of the official code; `"polar-express"`, nearer to the polar factor at the
            same cost; or three numbers, or a list of as many triples as steps.
        ns_dtype: of the iteration, a torch.dtype or its name. None: bfloat16, but float32 on a CPU or GPU that lacks
            bfloat16 instructions (V100, T4), and float64 for float64 parameters.
        normalize_rows: of mars-shampoo and mars-m, the beta of NorMuon (arXiv 2510.05491), in [0, 1), 0.95 there: each
            row, an output, of an orthogonalized matrix is divided by the root of a running mean of its squares, and the
            matrix scaled back to the norm it had; None leaves rows as they are.
        max_grad_norm: largest global norm of all gradients together, > 0: they are scaled in the passes of the step,
            in place of a call of clip_grad_norm_ before it, and `grad_norm` holds their norm; None for no scaling. One
            for all groups.
        state_dtype: of the states; None for float32, and float64 for float64 parameters. `"8bit"` keeps the moments and
            last gradients of matrices and embeddings in one byte an element, with a scale for 64 of them, and the
            compensation of Kahan's rounding in one; tensors below 4,096 elements (not under ZeRO, whose tensors hold
            many), rows below 64, shards of columns that cut a block, and vectors stay in float32. `print(optimizer)`
            says how many are in 8 bits. See State.
        rounding: of bfloat16 parameters: `"nearest"`; `"stochastic"`, to either neighbour at random, right on average;
            `"kahan"`, with the rounding error kept in another bfloat16 state. The last two add up updates below half a
            unit in the last place; the first loses them.
        maximize: ascend instead of descend.
        fused: True takes the kernels made for the device (Triton on GPUs, compiled code on CPUs), False plain PyTorch.
            None takes the kernels where they run, on CPUs from a million parameters on, where compiling pays.
            Plain PyTorch takes what kernels do not: amsgrad, tensors with gaps in memory, on a CPU float16, Kahan's
            rounding without 8-bit states and exact MARS with them, and 8-bit states whose rows end within a block.
        process_group: ranks that hold the same whole parameters and take every step together, on the same gradients,
            such as those of DistributedDataParallel: they share the work of mars-shampoo and mars-m. None lets each
            rank work alone; a Trainer under DistributedDataParallel gives it. Not saved.
        foreach: torch's, for code that gives all its optimizers the same keywords; accepted at its default alone.
        capturable: the same.
        differentiable: the same.

    Raises:
        ValueError: a value out of range, an unknown key in a group, an empty parameter list, a setting that no
            parameter reads under the rules there are; the message names the value and the accepted ones, or the rules.
        RuntimeError: a parameter of which this rank has an unknown part (FSDP1, DeepSpeed's AutoTP, Megatron), or
            ZeroRedundancyOptimizer makes the optimizer. In `step()`, a sparse, complex or integer gradient, an exact
            step without stale gradients, or a model whose parameters `fully_shard` has replaced since `create`; nothing
            has been changed then.

    State, per parameter, made at its first step:

    - `step`: 0-d float32 on CPU, number of steps taken.
    - `exp_avg`: shape of the parameter; m_t, or the average e_t of the gradients where no last gradient is needed.
    - `exp_avg_sq`: the same; v_t (mars-adamw, vectors and embeddings).
    - `max_exp_avg_sq`: the same; with `amsgrad`.
    - `last_grad`: the same; last_{t+1}, a copy of our own (parameters under the MARS rule). In exact mode it is there
      from `update_last_grad()` to the end of `step()`. On a CPU its norm is remembered: change it in place or replace
      it, but do not write through its `.data`, which nothing can see.
    - `previous_grad`: the same; from `update_previous_grad()` to `update_last_grad()` (exact mode).
    - `previous_param`: shape and dtype of the parameter; x_t (exact mode, all parameters).
    - `compensation`: shape and dtype of the parameter; what rounding has lost (`rounding="kahan"`).
    - `row_avg_sq`: with `normalize_rows`, float32, one for each output of the whole parameter (experts one after the
      other), also where this rank holds a part of it; running means of their squares.
    - `exp_avg_scale`, `exp_avg_sq_scale`, `last_grad_scale`: float32, with `state_dtype="8bit"`, whose states are int8,
      second moments uint8, and `compensation` int8. One for 64 elements of a row: shape of the parameter, but for the
      last dimension.

    Without clipping, m_t = (1 - gamma) e_t + gamma g_t with e_t = beta1 e_{t-1} + (1 - beta1) g_t is the same first
    moment, so with `clip_threshold=None` all but mars-adamw with `second_moment="corrected"` keep no last_grad. Tensors
    have the parameter's dtype, or float32 for float16 and bfloat16 parameters, whose update is computed in float32 and
    rounded once. Loading a state keeps the dtypes it was saved in, but for 8 bits. Newton-Schulz adds 8 bytes an
    element in bfloat16, 16 in float32, of at most `2**25` elements or an eighth of all matrices (`2**22` on CPUs) at a
    time. Where ranks share the work, it is a quarter of a rank's matrices, or `2**25` elements if that is less, and up
    to three such rounds are under way.

    A step that a gradient scaler skips changes nothing. Without a scaler, a NaN or infinite gradient enters moments and
    parameter, as in torch.optim.AdamW.

    Source: Algorithms 1 to 4 of arXiv 2411.10438, and the official implementation where it differs.
    """

    # Class attributes, because torch restores only defaults, state and param_groups when an optimizer is unpickled.
    _metrics: StepMetrics | None = None
    _ranks: Ranks
    _grad_norm: Tensor | None = None
    _stale_gradients_supplied = False
    _is_made = False
    _was_trainable = False
    _advice: Advice
    # Whether any group has come with a role, as those of a model do.
    _roles_are_stated = True
    # What the groups stated when they were last checked.
    _structure: Sequence[dict[str, Any]] = ()
    # Of the model that `create` was given.
    _watch: ModelWatch | None = None
    # The arguments of the `create` that made it, which mars.json keeps; None for `Mars(params)`.
    created_with: Mapping[str, Any] | None = None

    # Ranks that hold the same whole parameters; may be set between steps. LastGradientCallback sets it under DDP.
    process_group: Group = None

    # Norms of the last gradients that the step before has left; a write through `.data` does not show in them.
    _last_norms: LastNorms | None = None

    # Steps parameters inside backward; None leaves all of them to `step()`.
    _release: GradientRelease | None = None

    # Set by whoever runs the loop and supplies stale gradients; LastGradientCallback stops exact runs without it.
    expects_stale_gradients = False

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
        weight_decay_1d: float | None = None,
        weight_decay_mode: str = "standard",
        second_moment: str = "corrected",
        ns_steps: int = 5,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "quintic",
        ns_dtype: str | torch.dtype | None = None,
        normalize_rows: float | None = None,
        max_grad_norm: float | None = None,
        state_dtype: str | torch.dtype | None = None,
        rounding: str = "nearest",
        maximize: bool = False,
        fused: bool | None = None,
        process_group: Any = None,
        foreach: None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        """See the class."""
        settings = {name: value for name, value in locals().items() if name in DEFAULTS}
        if isinstance(params, nn.Module):
            raise TypeError(f"Mars takes parameters, not the module {type(params).__name__}; give it to mars_hf.create")
        without_torch_keywords({"foreach": foreach, "capturable": capturable, "differentiable": differentiable})
        if _compat.is_inside_zero_redundancy_optimizer():
            raise RuntimeError(
                "ZeroRedundancyOptimizer gives all parameters of a rank the settings of its own groups, so biases and "
                "norms would train and decay as matrices do; shard with FSDP2 (fully_shard) or DeepSpeed ZeRO"
            )
        if process_group is not None:  # a copy or pickle of an optimizer has none
            self.process_group = process_group
        self._ranks = Ranks()
        self._advice = Advice()
        self._roles_are_stated = False
        self._statements: list[Statement] = []  # of the groups, until all are there
        super().__init__(params, check_values(settings))
        self._is_made = True
        check_read([*statements_of_defaults(self.defaults, self.param_groups), *self._statements])
        self._statements = []
        warn_of_decays(self.param_groups)
        self._ranks.remember(self.param_groups)
        if not self._roles_are_stated:
            self._advice.on_unknown_roles(self.param_groups)
        for package, extend in EXTENSIONS.items():
            if package in sys.modules:
                extend()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, split by role into one group or two.

        Args:
            param_group: as in the constructor. Settings that it does not state come from the constructor;
                `max_grad_norm` comes from the existing groups if those agree. Parameters get names if the existing ones
                have names, and lose them if not. After `create(model)` roles and layouts come from the model, unless
                the group states its role.

        Raises:
            ValueError: as the constructor; the optimizer stays as it was.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        before = len(self.param_groups)
        try:
            if self._is_made:
                param_group = self._with_max_grad_norm(param_group)
            for group in self._as_in_model(param_group):
                parts = split_by_role(group, self.defaults)
                self._advice.on_large_lr_1d(group, self.defaults)
                for part in parts:
                    if self._is_made and before:
                        self._match_names(part)
                    self._add_part(part)
            self._note_statements(param_group, before)
        except BaseException:
            del self.param_groups[before:]
            raise
        self._follow_groups(self.param_groups[before:])
        if "role" in param_group:
            self._roles_are_stated = True
        elif self._is_made and self._roles_are_stated and self._watch is None:
            self._advice.on_unknown_roles(self.param_groups[before:])

    def _follow_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        """Make new groups known to all that watches groups."""
        for group in groups:
            self._ranks.shards.extend(group)
            self._advice.add(group)
            if self._watch is not None:
                self._watch.add(group["params"])
        if self._release is not None:
            self._release.hook()

    def _note_statements(self, param_group: Mapping[str, Any], before: int) -> None:
        """Note what a group states until all are there; of a later one, raise ValueError for what is ignored."""
        made = self.param_groups[before:]
        statements = statements_of_group(check_values(param_group), self.defaults, made)
        if self._is_made:
            check_read(statements)
            warn_of_decays(made)
        else:
            self._statements += statements

    def _with_max_grad_norm(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """Return a new group with the norm of the others, unless it states one: the loop may have changed theirs."""
        norms = {group["max_grad_norm"] for group in self.param_groups}
        return {"max_grad_norm": norms.pop(), **param_group} if len(norms) == 1 else param_group

    def _add_part(self, part: dict[str, Any]) -> None:
        """Add parameters of one role."""
        super().add_param_group(part)
        for key in KEYS_1D:
            self.param_groups[-1].pop(key)
        if self.param_groups[-1]["weight_decay_mode"] == "decoupled":
            self.param_groups[-1]["peak_lr"] = float(part["lr"])
        self._was_trainable |= any(param.requires_grad for param in self.param_groups[-1]["params"])

    def _follow_model(self, model: nn.Module, decayed: Mapping[str, float] | None = None) -> None:
        """Take the roles, layouts and decays of groups to come from a model, and see that all of it trains."""
        self._watch = ModelWatch(model, self._params(), decayed)

    def _as_in_model(self, param_group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a new group of `create(model)` in parts, with roles and layouts from the model."""
        if self._watch is None or "role" in param_group:
            return [param_group]
        parts, message = self._watch.split(param_group, self.created_with or {}, self.defaults["mars_type"])
        if message is not None:
            self._advice.say("unknown parameters", message)
        return parts

    def _match_names(self, part: dict[str, Any]) -> None:
        """Name the parameters of a new group if those of the others are named, and only then: torch mixes neither."""
        entries = part["params"]
        named = "param_names" in self.param_groups[0]
        if not named:
            part["params"] = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        elif entries and not isinstance(entries[0], tuple):
            first = sum(len(group["params"]) for group in self.param_groups)
            part["params"] = [(f"added_{first + index}", entry) for index, entry in enumerate(entries)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled optimizer, of an earlier version too: settings that it lacks take their defaults."""
        super().__setstate__(state)
        self.param_groups = states.with_all_settings(self.param_groups)
        self.defaults = {**DEFAULTS, **self.defaults}
        self._is_made = True
        if "_ranks" not in vars(self):  # it is there if torch loads a state
            self._ranks = Ranks(self.param_groups)
            self._ranks.remember(self.param_groups)
            self._advice = Advice()
        self._advice.follow(self.param_groups)

    def __repr__(self) -> str:
        """Return one line per group: role, rule, sizes, learning rate, betas, decay."""
        return f"{type(self).__name__}\n{summary(self.param_groups)}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its tensors are copied and keep the dtypes they were saved in.

        torch alone casts them to the parameters' dtype and shares memory with `state_dict`. The saved settings win,
        except for `max_grad_norm`, which belongs to the running loop (MarsTrainer sets it), and `fused`, which belongs
        to the machine. Between float32 and 8 bits `state_dtype` stays as it is here: the next step converts the state.
        Settings that the saved groups lack, as those of an earlier version do, take their defaults. Hooks act as on any
        torch optimizer: the result of a pre-hook is loaded, the changes of a post-hook stay.

        Raises:
            ValueError: the state belongs to another optimizer, to groups with another role, rule or form, or to
                parameters of another shape, number or order, or its 8-bit codes have lost their scales; nothing has
                been changed then.
        """
        kept = ("max_grad_norm", "fused", "state_dtype", "param_names", *_OF_MODEL)  # of the loop, machine and model
        kept_settings = [{key: group[key] for key in kept if key in group} for group in self.param_groups]
        loaded: dict[str, Any] = {}
        before = self.param_groups

        def check_loaded(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            state_dict = {**state_dict, "param_groups": states.with_all_settings(state_dict["param_groups"])}
            states.check_loaded(state_dict, self.param_groups)
            loaded.update(state_dict)
            return state_dict

        def keep(_: Any) -> None:
            for group, settings in zip(self.param_groups, kept_settings, strict=True):
                settings["state_dtype"] = loaded_state_dtype(group["state_dtype"], settings["state_dtype"])
                for key in _OF_MODEL:
                    group.pop(key, None)
                group.update(settings)
            states.copy_loaded(self.state, loaded, self.param_groups)
            self._ranks.replace(self.param_groups, before)
            self._ranks.interruption = None

        # The last one before torch loads, and the first one after it.
        handles = [
            self.register_load_state_dict_pre_hook(check_loaded),
            self.register_load_state_dict_post_hook(keep, prepend=True),
        ]
        self._last_norms = None
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    @torch._disable_dynamo  # sorting does not trace; torch.compiler.disable would import dynamo at once
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; a no-op if none has.

        Args:
            closure: recomputes the gradients and returns the loss; None if `backward` has been called.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient or state MARS cannot use, all parameters have been frozen since the optimizer was
                made, or a CUDA graph is being captured; raised before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._release is not None:  # `_step` has been called for each parameter, and has not compared
            self._compare_with_model()
        if self._release is None or not self._release.finish():
            self._step()
        return loss

    def _compare_with_model(self) -> None:
        """Raise RuntimeError if the model has got parameters that would not train."""
        if self._watch is None:
            return
        is_due = self._watch.is_due()
        if is_due or not self.state or not self._has_gradients():
            message = self._watch.check(self._params())
            if message is not None:
                self._advice.say("unfrozen", message)

    def _step(self, error: Exception | None = None) -> None:
        """Algorithm 1: norms of the corrected gradients, clipping, moments, directions, update.

        Args:
            error: why this rank cannot step, which all ranks raise; None if it can.
        """
        groups, metrics = self.param_groups, self._metrics
        model = None if self._watch is None else self._watch.reference
        shared = SharedStep(self._ranks, groups, process_group=self.process_group, model=model)
        with self._autocast_off(), self._no_states_if_refused():
            with shared.raising_together(error):  # nothing has changed until its end
                _require_no_capture()
                if self._release is None:
                    self._compare_with_model()
                rules, max_grad_norm = self._rules(), self.max_grad_norm
                self._check_edited_groups()
                shared.plan(max_grad_norm=max_grad_norm, metrics=metrics)
                if shared.is_alone and not self._has_gradients():
                    self._require_trainable()
                    return
                place_gradients(groups)
                lists, steps = build_lists(groups, rules, self.state, shared.specs, shared.chunk_of)
                find_moving(lists)
                take_sums(lists, max_grad_norm, metrics, self._last_norms)
                shared.add(lists, rows_to_reduce(max_grad_norm))
            shared.reduce()
        with self._autocast_off():
            self._last_norms = None  # an update that is interrupted leaves other last gradients
            with shared.noting_interruption():
                self._move(shared, lists, steps, max_grad_norm)

    def _move(
        self,
        shared: SharedStep,
        lists: Sequence[TensorList],
        steps: Sequence[Tensor],
        max_grad_norm: float | None,
    ) -> None:
        """Move the parameters of a step that is not refused: factors, moments, directions, update."""
        groups, metrics = self.param_groups, self._metrics
        with shared.held():
            shared.merge_moving(lists)
            norm = set_factors(lists, shared, max_grad_norm, metrics)
            if norm is not None:
                self.grad_norm.copy_(norm)
            if self.is_exact and steps:
                exact.keep_params(groups, self.state)
            count_steps(steps)
            note_peaks(groups)
        for tensors in lists:
            if tensors.chunk is None:
                with shared.held():
                    update(tensors, metrics=metrics)
        shared.overlap(update_matrices(chunk, groups, metrics) for chunk in shared.chunks(lists))
        shared.conclude()
        self._last_norms = norms_taken(lists)
        if self.is_exact:
            exact.drop_stale_gradients(groups, self.state)
            self._stale_gradients_supplied = False

    @contextlib.contextmanager
    def _no_states_if_refused(self) -> Iterator[None]:
        """Drop the states that the block has made if it raises."""
        count = len(self.state)
        try:
            yield
        except Exception:
            for param in list(self.state)[count:]:
                del self.state[param]
            raise

    def _rules(self) -> list[UpdateRule]:
        """Return the rules of the groups; ValueError if somebody has edited one to a name that is none."""
        try:
            return [update_rule(group) for group in self.param_groups]
        except (KeyError, TypeError):
            for group in self.param_groups:
                check_values({name: group.get(name) for name in ("mars_type", "role", "optimize_1d")})
            raise

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for param in self._params())

    def _params(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @contextlib.contextmanager
    def _autocast_off(self) -> Iterator[None]:
        """Leave autocast: the arithmetic of a step is not the model's."""
        with contextlib.ExitStack() as stack:
            for device in {"cpu", *[device.type for device in set(map(_device_of, self._params()))]} - {"meta"}:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _check_edited_groups(self) -> None:
        """Check what somebody may have edited in the groups since the last step, and that exact ones can step."""
        structure = [{name: group.get(name) for name in STRUCTURAL_KEYS} for group in self.param_groups]
        if structure != self._structure:
            for settings, group in zip(structure, self.param_groups, strict=True):
                check_values(settings)
                check_decoupled_decay(group)
            self._advice.on_lost_updates(self.param_groups)
        self._advice.on_one_rate()
        if self.is_exact:
            were_approx = []  # in the step before; a group that is new since then was not there
            for group, before in zip(self.param_groups, self._structure, strict=False):
                if before["is_approx"]:
                    were_approx.append(group)
            exact.require_stale_gradients(self.param_groups, self.state, were_approx, self._stale_gradients_supplied)
        self._structure = structure

    def _require_trainable(self) -> None:
        """Raise RuntimeError if every parameter has been frozen since it was added; warn if no step has trained one."""
        if self._was_trainable and not any(param.requires_grad for param in self._params()):
            raise RuntimeError(
                "all parameters of this optimizer are frozen (another adapter active? LoRA applied afterwards?). Make "
                "a new one with mars_hf.create(model, ...), or skip step() while they are frozen"
            )
        if dist.is_available() and dist.is_initialized() and not self.state:
            self._advice.say(
                "no gradient",
                "no parameter of this optimizer has a gradient in its first step, so nothing trains. fully_shard and "
                "parallelize_module replace parameters: make the optimizer after them",
            )

    @property
    def max_grad_norm(self) -> float | None:
        """Largest global norm of the gradients, one for all groups; may be set between steps.

        Raises:
            ValueError: groups state different ones.
        """
        values = {group["max_grad_norm"] for group in self.param_groups}
        if len(values) > 1:
            raise ValueError(f"max_grad_norm={values} in different groups: it is the norm of all gradients, give one")
        return next(iter(values))

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_values({"max_grad_norm": value})
        for group in self.param_groups:
            group["max_grad_norm"] = value

    @property
    def grad_norm(self) -> Tensor:
        """Global norm of the last gradients clipped by `max_grad_norm`, before scaling; 0-d, NaN before any.

        The optimizer keeps one tensor for its whole life; every such step writes into it.
        """
        if self._grad_norm is None:
            first = next(self._params(), torch.empty(0))
            self._grad_norm = torch.full((), float("nan"), device=local(first).device)
        return self._grad_norm

    @property
    def is_exact(self) -> bool:
        """Whether any parameter needs stale gradients."""
        return any(not group["is_approx"] for group in self.param_groups)

    @property
    def has_previous_params(self) -> bool:
        """Whether `previous_params()` has x_{t-1} to offer: in exact mode, from the first step on."""
        return any("previous_param" in state for state in self.state.values())

    @contextlib.contextmanager
    def previous_params(self) -> Iterator[None]:
        """Put the model at x_{t-1} while the context lasts, to take the stale gradient there.

        Values are exchanged in place, one parameter after the other, so every holder of the parameters sees them.

        Raises:
            RuntimeError: no exact step has been taken yet.
        """
        if not self.has_previous_params:
            raise RuntimeError("there are no previous parameters: they are kept by step(), with is_approx=False")
        self._exchange_params()
        try:
            yield
        finally:
            self._exchange_params()

    def _exchange_params(self) -> None:
        """Exchange x_t and x_{t-1}, also for a model whose last forward pass, an evaluation, has gathered shards."""
        if self._watch is not None:
            self._watch.reshard()
        exact.exchange_params(self.param_groups, self.state)

    def update_previous_grad(self) -> None:
        """Keep a copy of the gradients as the stale ones of this batch; a no-op in approx mode.

        The gradients are expected as `step()` takes them: accumulated, averaged over ranks, globally clipped.

        Source: the official implementation's method of this name.
        """
        try:
            is_supplied = exact.keep_stale_gradients(self.param_groups, self.state)
        except Exception as error:
            if not self._ranks.have_shared:
                raise
            self._ranks.held_error = error  # other ranks go on to their step, and hear it there
        else:
            self._stale_gradients_supplied |= is_supplied

    def update_last_grad(self) -> None:
        """Hand the gradients that `update_previous_grad()` kept to the next `step()`; a no-op in approx mode.

        Source: the official implementation's method of this name.
        """
        exact.commit_stale_gradients(self.param_groups, self.state)

    def collect_metrics(self, enabled: bool) -> None:
        """Switch the metrics of the next steps on or off (extra reads of the gradients; no wait for the device).

        Either drops metrics that nobody has read.
        """
        self._metrics = StepMetrics() if enabled else None

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps measured since the last call; empty if there are none. Waits for the device.

        `metrics.StepMetrics.read` defines them. Where parameters are sharded, every rank must call this.
        """
        if self._metrics is None:
            return {}
        metrics, self._metrics = self._metrics, StepMetrics()
        return metrics.read()


def _require_no_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured: the host counts the steps and reads the rates."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step() was called while a CUDA graph is captured; each replay would repeat this step's count and learning "
            "rate. Capture forward and backward, and call step() after each replay()"
        )
