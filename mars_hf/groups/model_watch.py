"""The model that `create` was given: parameters that it gets later, or that are exchanged, would never train."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from mars_hf.distributed.shards import ModelRef, is_fully_sharded, reshard
from mars_hf.distributed.tensors import is_dtensor
from mars_hf.groups.param_groups import param_groups, params_of, split_by_model
from mars_hf.groups.settings import MODEL_DEFAULTS, expand

# A look takes some 200 microseconds for 150 tensors: in each of the first steps, then in one of as many.
LOOKS_EVERY = 8


class ModelWatch:
    """Compare the parameters of a model with those of its optimizer; the model is not kept alive."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor], decayed: Mapping[str, float] | None = None) -> None:
        """Remember the model, which of its parameters the optimizer has, and what decays; see `param_groups`."""
        self.reference = _reference_to(model)
        self._decayed = decayed
        self._unsharded = _names_unsharded(model)
        self._was_sharded = any(is_fully_sharded(module) for module in model.modules())
        self._steps = 0
        # Identities, as references would keep what others free.
        self._known = {id(param) for param in [*model.parameters(), *params]}

    def add(self, params: Iterable[Tensor]) -> None:
        """Count the parameters that a new group brings as known."""
        self._known |= {id(param) for param in params}

    def split(
        self, param_group: dict[str, Any], created_with: Mapping[str, Any], mars_type: str
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Split a new group into parts whose roles and layouts come from the model, as `create` would.

        Returns:
            The parts, and advice about parameters that the model does not train; None for none.
        """
        model = self.reference()
        if model is None:
            return [param_group], None
        settings = expand(dict(created_with))
        options = {name: settings[name] for name in MODEL_DEFAULTS if name in settings}
        groups = param_groups(model, mars_type=mars_type, is_addition=True, **{**options, "decayed": self._decayed})
        parts = split_by_model([param_group], groups)
        params = params_of(parts)
        unknown = set(params).difference(params_of(groups))
        if not unknown:
            return parts or [param_group], None
        return parts, (
            f"{len(unknown)} of {len(params)} parameters in a new group are not trainable parameters of the model "
            "that create() was given, so their shapes alone decide their roles. State the role of the group"
        )

    def is_due(self) -> bool:
        """Count a step, and return whether to look at the model in it."""
        self._steps += 1
        return self._steps <= LOOKS_EVERY or self._steps % LOOKS_EVERY == 0

    def check(self, params: Iterable[Tensor]) -> str | None:
        """Compare the model with the parameters of its optimizer, one by one.

        Returns:
            Advice about parameters that have been unfrozen since the optimizer was made; None for none.

        Raises:
            RuntimeError: the model trains parameters that the optimizer lacks.
        """
        model = self.reference()
        if model is None:
            return None
        trained = set(map(id, params))
        others = [(name, param) for name, param in model.named_parameters() if id(param) not in trained]
        self._require_known_sharding(others)
        is_of_engine = self._was_sharded or not trained <= self._known  # which exchanges parameters on both sides
        if is_of_engine:
            return None
        # Without a gradient it is a copy for an average, a part that is not used yet, or nobody's.
        untrained = [(name, param) for name, param in others if param.requires_grad and param.grad is not None]
        new = [name for name, param in untrained if id(param) not in self._known]
        if new:
            raise RuntimeError(
                f"the model has {len(new)} trainable parameters that this optimizer lacks, {new[0]} among them: they "
                "were added or exchanged after create(model) (by to_empty, load_state_dict(assign=True), new or untied "
                "layers, adapters), and would not train. Call mars_hf.create(model, ...) after such changes, hand new "
                "parameters to optimizer.add_param_group, or freeze what is not meant to train"
            )
        if not untrained:
            return None
        return (
            f"{len(untrained)} parameters of the model have gradients and are not in this optimizer, "
            f"{untrained[0][0]} among them: they were frozen when create(model) was called, or left out. Unless "
            "another optimizer trains them, hand them to optimizer.add_param_group"
        )

    def reshard(self) -> None:
        """Let the model read what is written into its shards."""
        model = self.reference()
        if model is not None:
            reshard(model)

    def _require_known_sharding(self, others: Iterable[tuple[str, Tensor]]) -> None:
        """Raise RuntimeError if parameters have become DTensors since `create`, which the optimizer lacks."""
        replaced = [name for name, param in others if name in self._unsharded and is_dtensor(param)]
        if replaced and self._was_sharded:
            raise RuntimeError(
                f"{len(replaced)} parameters of the model, {replaced[0]} among them, were gathered when create(model) "
                "was called, as fully_shard leaves them after a forward pass: they would not train. Call "
                "model.reshard() before mars_hf.create(model, ...), or create before the first forward pass"
            )
        if replaced:
            raise RuntimeError(
                f"fully_shard or parallelize_module has replaced {len(replaced)} parameters of the model after "
                f"create(model), {replaced[0]} among them: they would not train. Call mars_hf.create(model, ...) after "
                "it, or let accelerator.prepare(model, optimizer) shard"
            )


def _reference_to(model: nn.Module) -> ModelRef:
    """Return a weak reference to a model; to the models in a list or dict of modules, which nobody else may keep."""
    if type(model) not in (nn.ModuleList, nn.ModuleDict):
        return weakref.ref(model)
    references = {name: weakref.ref(part) for name, part in model.named_children()}
    container_class: Any = type(model)

    def collect() -> nn.Module | None:
        container = container_class()
        for name, reference in references.items():
            part = reference()
            if part is None:
                return None
            container.add_module(name, part)
        return container

    return collect


def _names_unsharded(model: nn.Module) -> frozenset[str]:
    """Return the names of trainable parameters that `fully_shard` has not sharded yet."""
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return frozenset(name for name, param in trainable if not is_dtensor(param))
