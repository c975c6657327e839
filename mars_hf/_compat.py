"""Every private name of another package that mars_hf uses, and what breaks without it.

`PRIVATE_NAMES` and `REPLACED_NAMES` are for people who look into a failure with a new version, and for a test. It
compares the first with what the package accesses, and both with what the installed packages have.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import platform
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# What breaks without a private name, or happens instead; seen in torch 2.9 to 2.13, deepspeed 0.18.4 to 0.19.8,
# transformers 5.19 to 5.23, accelerate 1.10 to 1.15, Python 3.10 to 3.14.
PRIVATE_NAMES = {
    "torch._disable_dynamo": "`Mars.step` cannot be imported.",
    "torch._foreach_add_": "No rule runs; `formulas.py` and others use this family.",
    "torch._utils._flatten_dense_tensors": "`mars_hf` cannot be imported: it joins small tensors on CPUs.",
    "torch.optim:Optimizer._optimizer_step_pre_hooks": "Hooks before a step see gradients that are not clipped yet.",
    "torch.optim:Optimizer._optimizer_step_post_hooks": "As the name before, after a step.",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "`mars_hf` cannot be imported.",
    "torch.optim.optimizer._global_optimizer_post_hooks": "As the name before.",
    "torch:Tensor._version": "Norms of last gradients cannot be remembered on a CPU.",
    "torch.cpu._is_avx512_bf16_supported": "On a CPU mars-shampoo and mars-m need `ns_dtype`: it has no default.",
    "torch.cpu._is_amx_tile_supported": "As the name before.",
    "torch:ops.mkldnn._is_mkldnn_bf16_supported": "As the name before, on ARM.",
    "torch.nn:Module._buffers": "The stale pass would leave running statistics.",
    "torch.distributed.tensor.placement_types._StridedShard": (
        "Parameters that FSDP2 and tensor parallelism shard along one dimension are refused."
    ),
    "parameters under FSDP1._fsdp_flattened": "FSDP1 is told by the class of its parameters alone.",
    "parameters under DeepSpeed._hp_mapping": "Flat tensors of ZeRO-1/2 cannot be explained: the run stops.",
    "parameters under DeepSpeed._dp_group": "As `_hp_mapping`.",
    "parameters under DeepSpeed._z3_optimizer": "Flat tensors of ZeRO-3 cannot be explained: the run stops.",
    "transformers.trainer_optimizer._OPTIMIZER_HANDLERS": "`register()` fails; `factory()` works.",
    "transformers:Trainer._defer_fsdp_gradient_reduction": (
        "The stale pass reduces every micro-batch's gradients under transformers' own FSDP."
    ),
    "transformers:Trainer._clip_grad_norm": "MarsTrainer clips as Trainer does, in passes of its own.",
    "transformers:Trainer._get_grad_norm": "NonFiniteCallback takes a norm of its own.",
    "transformers:Trainer._load_from_checkpoint": "Weights that are saved under other names are lost in resuming.",
    "transformers:Trainer._load_best_model": "As the name before, at the end with `load_best_model_at_end`.",
    "transformers:Trainer._load_optimizer_and_scheduler": "A truncated optimizer.pt is not named in the error.",
    "accelerate.state:GradientState._set_sync_gradients": "Exact MARS cannot accumulate gradients.",
    "enum:Enum._member_map_": "`--optim mars_adamw` is unknown; `factory()` works.",
}

# What checkpoints of DeepSpeed 0.18.4 to 0.19.8 hold besides tensors and plain values: data, whose making runs nothing
# of the file's. Without one of them no ZeRO checkpoint that holds it is converted.
CHECKPOINT_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)

# All names of other packages that change at run time, most by `replace_once`, and what is lost without that.
REPLACED_NAMES = {
    "transformers:Trainer": "Scripts under `python -m mars_hf run` train with Trainer in place of MarsTrainer.",
    "transformers:Trainer.train": "A run of `python -m mars_hf compare` does not tell a script that trains twice.",
    "transformers:Trainer.training_step": "The same: it has no training losses, and its first batch is not compared.",
    "transformers:Trainer.push_to_hub": "The same: a script that pushes at its end fails there.",
    "transformers:Trainer.__init__": "Nothing stops a Trainer in which another optimizer would step.",
    "transformers:Trainer.create_optimizer": "An override of `get_decay_parameter_names` is not followed.",
    "transformers:Trainer._load_from_checkpoint": "Mixtral, GPT-NeoX and others resume with weights as initialized.",
    "transformers:Trainer._load_best_model": "As the name before, at the end.",
    "transformers:Trainer._load_optimizer_and_scheduler": "A truncated optimizer.pt is not named in the error.",
    "transformers:TrainingArguments.__post_init__": "A bad `optim` or `optim_args` is told later.",
    "transformers.training_args:OptimizerNames": "`--optim mars_adamw` is unknown.",
    "transformers.trainer_optimizer:_OPTIMIZER_HANDLERS": "The same: nothing makes that optimizer.",
    "axolotl.core.builders.base:TrainerBuilderBase.hook_pre_create_trainer": "Axolotl's trainers are not MARS's.",
    "deepspeed.runtime.base_optimizer:ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir": (
        "ZeRO-1/2 load incomplete universal checkpoints of a Mars."
    ),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3": (
        "ZeRO-3 loses last gradients, and the settings of all groups but the first."
    ),
}


_THIS_IMPORT = object()


def replace_once(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of another package by `wrap` of it, unless that is done; see `REPLACED_NAMES`.

    Raises:
        RuntimeError: an earlier import of mars_hf has done it, and would go on with classes of its own.
    """
    method = getattr(owner, name)
    replaced_by = getattr(method, "of_mars_hf", None)
    if replaced_by is _THIS_IMPORT:
        return
    if replaced_by is not None:
        raise RuntimeError("mars_hf has been reloaded, or removed from sys.modules and imported again; restart Python")
    replacement: Any = wrap(method)
    replacement.of_mars_hf = _THIS_IMPORT
    setattr(owner, name, replacement)


def call_after(owner: Any, name: str, function: Callable[[Any], None]) -> None:
    """Call a function of the object after a method of another package, which returns nothing; once for each method."""

    def wrap(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def calling(self: Any, *args: Any, **kwargs: Any) -> None:
            method(self, *args, **kwargs)
            function(self)

        return calling

    replace_once(owner, name, wrap)


# --- torch ----------------------------------------------------------------------------------------------------------


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Tell whether the CPU has dot products of bfloat16; where it has none, torch emulates them, many times slower."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # ATEN_CPU_CAPABILITY may hide AVX-512 from torch.
    uses_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return uses_avx512 and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def shard_of(placement: Any) -> tuple[int, int] | None:
    """Return the dimension that a DTensor's placement shards, and its split factor, 1 for Shard; None for others."""
    kind = type(placement).__name__
    if kind == "Shard":
        return placement.dim, 1
    return (placement.dim, placement.split_factor) if kind == "_StridedShard" else None


# Hooks of ours on all optimizers, which read no gradients.
OWN_HOOKS: list[Callable[..., Any]] = []


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether hooks of an optimizer, or of all optimizers, run before or after its step, but for `OWN_HOOKS`."""
    of_all = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    if any(hook not in OWN_HOOKS for hook in of_all):
        return True
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


# --- engines --------------------------------------------------------------------------------------------------------


def is_inside_zero_redundancy_optimizer() -> bool:
    """Tell whether torch's ZeroRedundancyOptimizer is calling: it makes the optimizer of its rank itself."""
    callers = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(inspect.currentframe()))
    return "torch.distributed.optim.zero_redundancy_optimizer" in callers


def checkpoint_classes(names: Sequence[str]) -> list[Any]:
    """Import those of the names that are in `CHECKPOINT_CLASSES`; ImportError without DeepSpeed.

    The result is for `torch.serialization.safe_globals`. Early Pythons 3.11, such as 3.11.2, save a member of an enum
    as a call of getattr; the result has a function in its place that does nothing else.
    """
    paths = (name.rpartition(".") for name in names if name in CHECKPOINT_CLASSES)
    classes: list[Any] = [getattr(importlib.import_module(module), name) for module, _, name in paths]
    if "builtins.getattr" in names:
        classes.append((_enum_member, "builtins.getattr"))
    return classes


def _enum_member(kind: Any, name: str) -> Any:
    """Return a member of an enum; TypeError for another class."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise TypeError(f"getattr of {kind!r}, which is no enum")
    return kind[name]


# --- transformers -----------------------------------------------------------------------------------------------------


def add_enum_member(enum: Any, value: str) -> None:
    """Add a member to a str Enum, as if it had been written in its class body.

    Python has no public way: an enum with members cannot be subclassed, and `_missing_` alone does not reach the
    choices of a command line.
    """
    name = value.upper()
    member = str.__new__(enum, value)
    member._name_, member._value_, member.__objclass__ = name, value, enum
    member._sort_order_ = len(enum._member_names_)
    # Pickled as a plain string, so that training_args.bin loads on machines without mars_hf.
    member.__reduce_ex__ = lambda protocol: (str, (value,))
    member.__deepcopy__ = lambda memo: member  # which Enum does by itself from Python 3.11 on
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    type.__setattr__(enum, name, member)


def require_new_deepspeed() -> None:
    """Raise RuntimeError if the DeepSpeed that trains is one whose ZeRO gives wrong gradients to any optimizer."""
    # Below 0.18.3 ZeRO-2 is wrong for every loop; 0.18.3 divides by the accumulation steps after Trainer has done so.
    version = str(getattr(sys.modules.get("deepspeed"), "__version__", "1"))
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (0, 18, 4):
        raise RuntimeError(
            f"DeepSpeed {version} trains wrong weights under ZeRO, whatever the optimizer; pip install "
            "'deepspeed>=0.18.4'"
        )
