"""Train the workload under the engines named on the command line and write each one's final weights.

    torchrun --nproc_per_node 2 train.py OUTPUT ENGINE/CASE[/local_norms|/metrics|/hang] ...

One launch does many runs, since starting processes takes longer than training. Each writes OUTPUT/<run>.safetensors
(full fp32 weights, first moments and last gradients) and OUTPUT/<run>.json (the collectives of every `Mars.step`).

`local_norms` turns off the sums over ranks inside `Mars.step`: wrong on purpose, to prove that the comparison notices.
`metrics` also notes the metrics of every step. `hang` leaves one rank asleep.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from worker import import_deepspeed, main
from workload import (
    ACCUMULATION,
    CASES,
    MAX_GRAD_NORM,
    MICRO_BATCH,
    STEPS,
    Case,
    TinyGPT2,
    Tokens,
    build_model,
    lr_factor,
    uses_branch,
)

import mars_hf
from mars_hf import orthogonalize
from mars_hf.param_groups import rule_of
from mars_hf.settings import ORTHOGONAL_TYPES

STATES = ("exp_avg", "last_grad")
Results = dict[str, Tensor]


class CountCollectives(TorchDispatchMode):
    """Record the sizes of all collectives started inside, through any Python function."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back with the DTensor's local tensors
        if (func.namespace == "_c10d_functional" and "wait" not in func.__name__) or func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.numels.append(sum(t.numel() for t in tensors if isinstance(t, Tensor)))
        return func(*args, **(kwargs or {}))


class Watched:
    """Record every call of an optimizer's `step()`."""

    def __init__(self, mars: mars_hf.Mars, flags: set[str]) -> None:
        """Replace `mars.step` by one that records."""
        self.calls: list[dict[str, Any]] = []
        self.metrics: list[dict[str, float]] = []
        self._mars = mars
        mars.collect_metrics("metrics" in flags)
        self.params = sum(len(group["params"]) for group in mars.param_groups)
        step, all_reduce = mars.step, dist.all_reduce

        def forgetful(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            # Rows after the norms pass: they are the first step's check that all pieces are accounted for.
            norms = tensor[0].clone()
            all_reduce(tensor, *args, **kwargs)
            tensor[0] = norms

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # DeepSpeed calls once per group, or part of one, and hides the others from the optimizer.
            mars_rule = any(rule_of(group) != "adamw" and group["params"] for group in mars.param_groups)
            matrices = any(rule_of(group) in ORTHOGONAL_TYPES and group["params"] for group in mars.param_groups)
            damage = mock.patch.object(dist, "all_reduce", forgetful)
            orthogonalized: list[int] = []

            def noted(momenta: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
                orthogonalized.extend(momentum.numel() for momentum in momenta)
                return orthogonalize.compute_directions(momenta, *args, **kwargs)

            with (
                CountCollectives() as count,
                mock.patch("mars_hf.step.compute_directions", noted),
                damage if "local_norms" in flags else contextlib.nullcontext(),
            ):
                result = step(*args, **kwargs)
            kinds = {"mars_rule": mars_rule, "matrices": matrices}
            self.calls.append({**kinds, "collectives": count.numels, "orthogonalized": sum(orthogonalized)})
            return result

        mars.step = watched  # type: ignore[method-assign]

    def end_step(self) -> None:
        """Read the metrics; an engine may have called `step()` several times for them."""
        self.metrics.append(self._mars.pop_metrics())

    def notes(self) -> dict[str, Any]:
        return {"calls": self.calls, "params": self.params, "metrics": self.metrics}


def set_lr(mars: mars_hf.Mars, step: int) -> None:
    for group in mars.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor(step)


def corrected_norms(mars: mars_hf.Mars, names: dict[Tensor, str]) -> dict[str, float]:
    """Return the norm of c_t of every MARS parameter, from whole gradients and the state before the step."""
    norms = {}
    for group in mars.param_groups:
        k = group["gamma"] * group["betas"][0] / (1 - group["betas"][0])
        for param in group["params"]:
            if param.grad is not None and rule_of(group) != "adamw":
                last = mars.state[param].get("last_grad", torch.zeros_like(param))
                norms[names[param]] = torch.linalg.vector_norm(param.grad + k * (param.grad - last)).item()
    return norms


def plain_results(model: nn.Module, mars: mars_hf.Mars) -> Results:
    """Return weights and states of an optimizer that steps the model's own (possibly sharded) parameters."""
    results = {}
    for name, param in model.named_parameters():
        results[f"weight.{name}"] = param
        state = mars.state.get(param, {})
        results |= {f"{key}.{name}": state[key] for key in STATES if key in state}
        if "last_grad_scale" in state:  # a gradient that was moved
            results[f"last_grad.{name}"] = state["last_grad"] * state["last_grad_scale"]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in results.items()}


# --- torch: one process, DDP, FSDP2 ------------------------------------------------------------------------------


def train_torch(engine: str, case: Case, notes: dict[str, Any], flags: set[str]) -> Results:
    """Run a plain loop. `single_zeros` gives parameters without gradient a zero one, as ZeRO does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_model(case)
    wrapped: Any = model
    if engine.startswith("ddp"):
        settings = {"ddp": {}, "ddp_bucket_view": {"gradient_as_bucket_view": True}}
        settings["ddp_static_graph"] = {"static_graph": True}
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=case.skipping, **settings[engine])
    elif engine in ("fsdp2", "hsdp"):
        shard(model, (world,) if engine == "fsdp2" else (2, world // 2))
    mars = case.create(model)
    if engine.startswith("ddp"):
        mars.process_group = wrapped.process_group
    watched = Watched(mars, flags)
    names = {param: name for name, param in model.named_parameters()}
    norms, total_norms = [], []
    tokens = Tokens()
    for step in range(STEPS):
        set_lr(mars, step)
        for micro in range(ACCUMULATION):
            ids = tokens.micro_batch(step, micro, rank, world)
            # A static graph must see every backward pass (otherwise torch asserts).
            unsynced = engine in ("ddp", "ddp_bucket_view") and micro < ACCUMULATION - 1
            with wrapped.no_sync() if unsynced else contextlib.nullcontext():
                (wrapped(ids, ids, uses_branch(case, step))["loss"] / ACCUMULATION).backward()
        if engine == "single_zeros":
            for param in model.parameters():
                if param.requires_grad and param.grad is None:
                    param.grad = torch.zeros_like(param)
        if not case.folded:
            total_norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
        if engine == "single":
            norms.append(corrected_norms(mars, names))
        mars.step()
        if case.folded:
            total_norms.append(mars.grad_norm.clone())
        mars.zero_grad()
        watched.end_step()
    totals = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in total_norms]
    notes |= {**watched.notes(), "corrected_norms": norms, "total_norms": [norm.item() for norm in totals]}
    return plain_results(model, mars)


def shard(model: TinyGPT2, mesh_shape: tuple[int, ...], **settings: Any) -> None:
    """Set up FSDP2 on CPUs; with two dimensions, the first holds replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


# --- DeepSpeed ---------------------------------------------------------------------------------------------------

_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
_BF16 = {"bf16": {"enabled": True}}
# Buckets and sub-groups far below the model's 12000 weights, so that there are several of each.
_ZERO3 = {"stage": 3, "sub_group_size": 2500, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 3000}
_ZERO2 = {"stage": 2, "reduce_bucket_size": 3000, "allgather_bucket_size": 3000}
_ZERO1 = {**_ZERO2, "stage": 1}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": _ZERO1},
    "zero2": {"zero_optimization": _ZERO2},
    "zero3": {"zero_optimization": _ZERO3},
    "zero2_round_robin": {"zero_optimization": {**_ZERO2, "round_robin_gradients": True}},
    "zero2_offload": {"zero_optimization": {**_ZERO2, **_OFFLOAD}},
    "zero3_offload": {"zero_optimization": {**_ZERO3, **_OFFLOAD, "stage3_param_persistence_threshold": 100}},
    "zero1_bf16": {"zero_optimization": _ZERO1, **_BF16},
    "zero1_bf16_fp32accum": {"zero_optimization": _ZERO1, **_BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "zero2_bf16": {"zero_optimization": _ZERO2, **_BF16},
    "zero3_bf16": {"zero_optimization": _ZERO3, **_BF16},
}


def deepspeed_config(engine: str, world: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH // world,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": MAX_GRAD_NORM,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **DEEPSPEED[engine],
    }


def train_deepspeed(engine: str, case: Case, notes: dict[str, Any], flags: set[str]) -> Results:
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_model(case)
    mars = case.create(model)
    watched = Watched(mars, flags)
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=mars, config=deepspeed_config(engine, world))
    tokens = Tokens()
    for step in range(STEPS):
        set_lr(mars, step)
        for micro in range(ACCUMULATION):
            ids = tokens.micro_batch(step, micro, rank, world)
            wrapped.backward(wrapped(ids, ids, uses_branch(case, step))["loss"])
            wrapped.step()
        watched.end_step()
    notes |= watched.notes()
    results = deepspeed_results(model, wrapped, mars)
    wrapped.destroy()
    return results


def deepspeed_results(model: nn.Module, engine: Any, mars: mars_hf.Mars) -> Results:
    """Return fp32 weights and states from all ranks, collected by DeepSpeed where it can."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # ZeRO-1/2 link the states of all groups after the first group's first step, when the others have none.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    results = states_by_layout(model, mars)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            whole = deepspeed.zero.GatheredParameters([param]) if hasattr(param, "ds_id") else contextlib.nullcontext()
            with whole:
                results[f"weight.{name}"] = param.detach().float().clone()
            continue
        if getattr(engine.optimizer, "round_robin_gradients", False):
            # DeepSpeed 0.19 links weights to the wrong places of the reordered partitions; the model's own are right.
            results[f"weight.{name}"] = param.detach().clone()
            continue
        results[f"weight.{name}"] = safe_get_full_fp32_param(param).detach().clone()
        results[f"exp_avg.{name}"] = safe_get_full_optimizer_state(param, "exp_avg").detach().clone()
    return results


def states_by_layout(model: nn.Module, mars: mars_hf.Mars) -> Results:
    """Return states assembled from the pieces that mars_hf locates, rank by rank.

    DeepSpeed has no last gradient to give, since vectors have none, and loses its way with round_robin_gradients.
    """
    order = {id(param): name for name, param in model.named_parameters()}
    shards = mars._shards
    assert shards is not None
    names = {index: order[key] for key, index in shards._indices.items() if key in order}
    here = []
    for flat, state in mars.state.items():
        spec = shards.spec_of(flat, 0, mars._model)
        assert spec is not None
        for shard in spec.shards:
            stretch = slice(shard.start, shard.start + shard.numel)
            shape = shards.shapes[shard.param_index]
            here += [
                (f"{key}.{names[shard.param_index]}", shape, state[key][stretch]) for key in STATES if key in state
            ]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    pieces: dict[str, tuple[torch.Size, list[Tensor]]] = {}
    for name, shape, stretch in (found for rank in everywhere for found in rank):
        pieces.setdefault(name, (shape, []))[1].append(stretch)
    return {name: torch.cat(parts).view(shape) for name, (shape, parts) in pieces.items()}


# --- the ways in: Trainer and accelerate -------------------------------------------------------------------------


def training_arguments(folder: str, case: Case, zero: dict[str, Any] | None, **settings: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=MICRO_BATCH // dist.get_world_size(),
        gradient_accumulation_steps=ACCUMULATION,
        train_sampling_strategy="sequential",
        learning_rate=case.hyperparameters()["lr"],
        lr_scheduler_type="cosine",
        max_grad_norm=MAX_GRAD_NORM,
        use_cpu=True,
        deepspeed=zero,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        **settings,
    )


def train_way_in(engine: str, case: Case, notes: dict[str, Any], flags: set[str]) -> Results:
    """Run `<way>_<engine>`: each way to pass MARS from a script, under ZeRO-2, DDP or FSDP2."""
    way, backend = engine.rsplit("_", 1)
    zero = None
    if backend == "zero2":
        import_deepspeed().init_distributed("gloo")
        zero = deepspeed_config("zero2", dist.get_world_size())
    model = build_model(case)
    with fresh_accelerate():
        if way == "accelerate":
            return train_accelerate(backend, model, case, zero)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(way, model, case, folder, zero)
            trainer.train()
        check_backend(backend, trainer.model_wrapped)
        return {f"weight.{name}": param.detach().float().clone() for name, param in model.named_parameters()}


def make_trainer(way: str, model: nn.Module, case: Case, folder: str, zero: dict[str, Any] | None) -> Any:
    from transformers import Trainer, default_data_collator

    settings = case.hyperparameters()
    shared = {"model": model, "train_dataset": Tokens(), "data_collator": default_data_collator}
    if way == "optim":
        mars_hf.register()
        text = ",".join(f"{key}={value}" for key, value in settings.items() if key not in ("lr", "mars_type"))
        arguments = training_arguments(folder, case, zero, optim="mars_adamw", optim_args=text)
        return Trainer(args=arguments, **shared)
    arguments = training_arguments(folder, case, zero)
    if way == "own":
        own = {key: value for key, value in settings.items() if key != "lr"}
        return mars_hf.MarsTrainer(args=arguments, mars_kwargs=own, **shared)
    if way == "factory":
        return Trainer(args=arguments, optimizer_cls_and_kwargs=mars_hf.factory(arguments, **settings), **shared)
    return mars_hf.MarsTrainer(args=arguments, optimizers=(mars_hf.create(model, **settings), None), **shared)


def train_accelerate(backend: str, model: nn.Module, case: Case, zero: dict[str, Any] | None) -> Results:
    """Run accelerate without Trainer."""
    from accelerate import Accelerator, DeepSpeedPlugin

    if zero is not None:
        # Not with cpu=True, which means DDP. The number of micro-batches and the clip are in the JSON.
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero))
    else:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    if backend == "fsdp2":
        use_fsdp2_on_cpu(accelerator)
    mars = case.create(model)
    micro_batch = MICRO_BATCH // accelerator.num_processes
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=micro_batch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(mars, lambda step: lr_factor(step // accelerator.num_processes))
    wrapped, optimizer, loader, scheduler = accelerator.prepare(model, mars, loader, scheduler)
    check_backend(backend, wrapped)
    for batch in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if zero is not None:
        return deepspeed_results(model, wrapped, mars)
    return plain_results(accelerator.unwrap_model(wrapped), mars)


def check_backend(backend: str, wrapped: Any) -> None:
    """Raise unless the model is wrapped as requested: accelerate falls back to DDP silently."""
    wanted = {"zero2": "DeepSpeedEngine", "ddp": "DistributedDataParallel", "fsdp2": "FSDPTinyGPT2"}[backend]
    if type(wrapped).__name__ != wanted:
        raise RuntimeError(f"the model is wrapped in {type(wrapped).__name__}, not {wanted}")


def use_fsdp2_on_cpu(accelerator: Any) -> None:
    """Do what accelerate does with an FSDP config on accelerators; on CPUs it would fall back to DDP."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


@contextlib.contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Reset accelerate's and transformers' process-wide state, and restore it afterwards."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    before = dict(os.environ)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(before)


# --- the runs ----------------------------------------------------------------------------------------------------


def function_of(engine: str) -> Callable[..., Results]:
    if engine in DEEPSPEED:
        return train_deepspeed
    if engine.split("_")[0] in ("factory", "optim", "own", "trainer", "accelerate"):
        return train_way_in
    return train_torch


def run(spec: str, file: Path) -> None:
    """Do one run."""
    engine, case, *flags = spec.split("/")
    if "hang" in flags and dist.get_rank() == 1:
        time.sleep(3600)
    notes: dict[str, Any] = {}
    results = function_of(engine)(engine, CASES[case], notes, set(flags))
    if dist.get_rank() == 0:
        save_file({name: value.contiguous().clone() for name, value in results.items()}, f"{file}.safetensors")
        Path(f"{file}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main(run)
