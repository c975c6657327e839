"""The model that `create` was given: parameters that it gets later, or that are exchanged, would never train."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from mars_hf.distributed.shards import ModelRef
from mars_hf.distributed.tensors import is_dtensor

# A look takes some 50 microseconds for 150 tensors: in each of the first steps, then in one of as many.
LOOKS_EVERY = 8


class _Module(NamedTuple):
    """What a module held when the model was last compared; identities, as references would keep what others free."""

    module: weakref.ref[nn.Module]
    params: list[int]
    children: list[int]
    frozen: list[str]  # names of parameters


class ModelWatch:
    """Compare the parameters of a model with those of its optimizer; the model is not kept alive."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        """Remember the model, and which of its parameters the optimizer has."""
        self.reference = _reference_to(model)
        self._unsharded = _names_unsharded(model)
        self._was_sharded = any(_is_fully_sharded(module) for module in model.modules())
        self._steps = 0
        self._known: set[int] = set()
        self._modules: list[_Module] = []
        self._waits = False  # for gradients of parameters that the optimizer lacks
        self._look_again(model, params)

    def _look_again(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        """Note the modules and parameters that the model has now; they count as known."""
        self._known = {id(param) for param in model.parameters()} | {id(param) for param in params}
        self._modules = []
        if self._was_sharded:  # fully_shard exchanges parameters before and after each forward pass
            return
        for module in model.modules():
            frozen = [
                name for name, param in module._parameters.items() if param is not None and not param.requires_grad
            ]
            self._modules.append(_Module(weakref.ref(module), *_identities(module), frozen))

    def add(self, params: Iterable[Tensor]) -> None:
        """Count the parameters that a new group brings as known."""
        self._known |= {id(param) for param in params}

    def is_due(self) -> bool:
        """Count a step, and return whether to look at the model in it."""
        self._steps += 1
        return self._steps <= LOOKS_EVERY or self._steps % LOOKS_EVERY == 0

    def is_unchanged(self) -> bool:
        """Return whether the model has the modules and parameters of the last look, and trains no others."""
        if self._waits:
            return False
        for reference, params, children, frozen in self._modules:
            module = reference()
            if module is None:
                continue
            held = module._parameters
            if _identities(module) != (params, children) or any(held[name].requires_grad for name in frozen):  # type: ignore[union-attr]
                return False
        return True

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
        of_optimizer = list(params)
        trained = {id(param) for param in of_optimizer}
        self._require_known_sharding(model, trained)
        is_of_engine = self._was_sharded or not trained <= self._known  # which exchanges parameters on both sides
        if is_of_engine:
            self._modules = []
            return None
        new, unfrozen, waiting = self._untrained(model, trained)
        if new:
            raise RuntimeError(
                f"the model has {len(new)} trainable parameters that this optimizer lacks, {new[0]} among them: they "
                "were added or exchanged after create(model) (by to_empty, load_state_dict(assign=True), new or untied "
                "layers, adapters), and would not train. Call mars_hf.create(model, ...) after such changes, hand new "
                "parameters to optimizer.add_param_group, or freeze what is not meant to train"
            )
        known_before = self._known
        self._look_again(model, of_optimizer)
        # A new parameter that waits for its first gradient stays new: with one, it is an error.
        self._known -= {id(param) for param in waiting if id(param) not in known_before}
        self._waits = bool(waiting)
        if not unfrozen:
            return None
        return (
            f"{len(unfrozen)} parameters of the model have gradients and are not in this optimizer, {unfrozen[0]} "
            "among them: they were frozen when create(model) was called, or left out. Unless another optimizer "
            "trains them, hand them to optimizer.add_param_group"
        )

    def _untrained(self, model: nn.Module, trained: set[int]) -> tuple[list[str], list[str], list[nn.Parameter]]:
        """Return the trainable parameters that are not in the optimizer.

        Returns:
            Names of those that the model has got since the last look, names of those that it had then and that were
            frozen or left out, and those without a gradient.
        """
        new: list[str] = []
        unfrozen: list[str] = []
        waiting: list[nn.Parameter] = []
        for name, param in model.named_parameters():
            if not param.requires_grad or id(param) in trained:
                continue
            if param.grad is None:  # a copy for an average, a part that is not used yet, or nobody's
                waiting.append(param)
            elif id(param) in self._known:
                unfrozen.append(name)
            else:
                new.append(name)
        return new, unfrozen, waiting

    def _require_known_sharding(self, model: nn.Module, trained: set[int]) -> None:
        """Raise RuntimeError if parameters have become DTensors since `create`, which the optimizer lacks."""
        replaced = []
        for name, param in model.named_parameters():
            has_become_dtensor = name in self._unsharded and is_dtensor(param)
            if has_become_dtensor and id(param) not in trained:
                replaced.append(name)
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


def _is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` has been called on a module; its class is not imported for this."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _identities(module: nn.Module) -> tuple[list[int], list[int]]:
    """Return which parameters and children a module has itself."""
    return list(map(id, module._parameters.values())), list(map(id, module._modules.values()))
