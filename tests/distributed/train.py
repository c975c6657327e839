"""Train the workload under an engine.

Runs are ENGINE/CASE[/local_norms|/metrics|/groups|/resumed]. Each leaves full fp32 weights, first moments and last
gradients, and notes: the collectives of every `Mars.step`.

`local_norms` turns off the sums over ranks inside `Mars.step`: wrong on purpose, to prove that the comparison notices.
`metrics` also notes the metrics of every step. `groups` are parameter groups of the user's own. `resumed` stops a loop
with accelerate in the middle.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from launching import device, from_all_ranks, import_deepspeed, leave
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from workload import ACCUMULATION, CASES, MAX_GRAD_NORM, MICRO_BATCH, STEPS, Case, Tokens, build_model, lr_factor

import mars_hf
from mars_hf import universal
from mars_hf.arithmetic import directions, eight_bits
from mars_hf.arithmetic.eight_bits import Coded
from mars_hf.arithmetic.update_rules import update_rule
from mars_hf.step import coded

STATES = ("exp_avg", "exp_avg_sq", "last_grad")
Results = dict[str, Tensor]


class CountCollectives(TorchDispatchMode):
    """Record the sizes of all collectives started inside, through any Python function."""

    def __init__(self) -> None:
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
        self.calls: list[dict[str, Any]] = []
        self.metrics: list[dict[str, float]] = []
        self._mars = mars
        mars.collect_metrics("metrics" in flags)
        self.params = sum(len(group["params"]) for group in mars.param_groups)
        step, all_reduce = mars.step, dist.all_reduce

        def forgetful(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            # What follows the norms passes: presence is the check that all pieces are accounted for.
            norms = tensor[: self.params + 1].clone()
            all_reduce(tensor, *args, **kwargs)
            tensor[: self.params + 1] = norms

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # DeepSpeed calls once per group, or part of one, and hides the others from the optimizer.
            mars_rule = any(update_rule(group).corrects and group["params"] for group in mars.param_groups)
            matrices = any(update_rule(group).orthogonalizes and group["params"] for group in mars.param_groups)
            damage = mock.patch.object(dist, "all_reduce", forgetful)
            orthogonalized: list[int] = []

            def noted(momenta: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
                orthogonalized.extend(momentum.numel() for momentum in momenta)
                return directions.compute_directions(momenta, *args, **kwargs)

            with (
                CountCollectives() as count,
                mock.patch("mars_hf.step.ranks.compute_directions", noted),
                damage if "local_norms" in flags else contextlib.nullcontext(),
            ):
                result = step(*args, **kwargs)
            sizes = {"collectives": count.numels, "orthogonalized": sum(orthogonalized)}
            self.calls.append({"mars_rule": mars_rule, "matrices": matrices, **sizes})
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


def plain_results(model: nn.Module, mars: mars_hf.Mars) -> Results:
    """Return weights and states of an optimizer that steps the model's own (possibly sharded) parameters."""
    results = {}
    for name, param in model.named_parameters():
        state = mars.state.get(param, {})
        results |= {f"weight.{name}": param, **{f"{key}.{name}": value for key, value in state.items()}}
    whole = {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in results.items()}
    for name in [name for name in whole if "_scale." in name]:
        codes = name.replace("_scale.", ".")
        whole[codes] = Coded(whole[codes], whole.pop(name)).decode()
    return whole


def dcp_states(model: nn.Module, mars: mars_hf.Mars, more: dict[str, Any]) -> dict[str, Any]:
    states = dcp_state.get_state_dict(model, mars)
    return dict(zip(("model", "optimizer"), states, strict=True)) | more


def load_dcp(folder: Path, model: nn.Module, mars: mars_hf.Mars, **more: Any) -> None:
    state = dcp_states(model, mars, more)
    dcp.load(state, checkpoint_id=folder)
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    dcp_state.set_state_dict(model, mars, **states)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups as in many recipes: one layer decays, the rest does not and has a rate of its own."""
    first = [param for name, param in model.named_parameters() if "h.0" in name]
    rest = [param for name, param in model.named_parameters() if "h.0" not in name]
    return [{"params": first, "weight_decay": 0.2, "lr": 4e-3}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]


def settings_of(mars: mars_hf.Mars) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in mars.param_groups]


# --- torch: one process, DDP, FSDP2 -----------------------------------------------------------------------------------

DDP = {"ddp": {}, "ddp_bucket_view": {"gradient_as_bucket_view": True}, "ddp_static_graph": {"static_graph": True}}


LOW_PRECISION = {"autocast": torch.bfloat16, "scaled": torch.float16}


class TorchRun:
    """A plain loop.

    `single_zeros` gives parameters without gradient a zero one, as ZeRO does; `compiled` is a compiled model,
    `autocast` computes it in bfloat16, `scaled` in float16 with a GradScaler; `fsdp2_offload` holds shards in the
    CPU's memory.
    """

    def __init__(self, engine: str, case: Case, flags: set[str] | None = None) -> None:
        self.engine, self.case, self.flags = engine, case, flags or set()
        self.part, self.parts = dist.get_rank(), dist.get_world_size()  # of the data
        self.tokens = Tokens()
        self.total_norms: list[Tensor] = []
        self.model: Any = self.build()
        self.wrapped: Any = self.model
        if engine in DDP:
            settings = {"find_unused_parameters": case.skipping, **DDP[engine]}
            self.wrapped = nn.parallel.DistributedDataParallel(self.model, **settings)
        if engine == "compiled":
            self.wrapped = torch.compile(self.model)
        self.scaler = self.make_scaler()
        self.mars = case.create(
            groups_of(self.model) if "groups" in self.flags else self.model, is_approx="exact" not in self.flags
        )
        if engine in DDP:
            self.mars.process_group = self.wrapped.process_group
        set_lr(self.mars, 0)  # as a scheduler would: torch loads only settings that the group already has
        self.watched = Watched(self.mars, self.flags)

    def make_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device().type, init_scale=2.0**12, enabled=self.engine == "scaled")

    def build(self) -> nn.Module:
        model = build_model(self.case)
        if self.engine == "fsdp2_offload":
            on_gpu = device().type == "cuda"
            shard(model, (dist.get_world_size(),), offload_policy=CPUOffloadPolicy(pin_memory=on_gpu))
            return model
        model.to(device())
        if self.engine in ("fsdp2", "hsdp"):
            world = dist.get_world_size()
            shard(model, (world,) if self.engine == "fsdp2" else (2, world // 2))
        return model

    def loss(self, ids: Tensor, step: int) -> Tensor:
        """Return a micro-batch's share of the loss."""
        precision = LOW_PRECISION.get(self.engine)
        with torch.autocast(device().type, precision, enabled=precision is not None):
            return self.wrapped(ids, ids, self.case.uses_branch(step))["loss"] / ACCUMULATION

    def backward(self, step: int) -> None:
        """Leave the gradients of a step's batch."""
        for micro in range(ACCUMULATION):
            ids = self.tokens.micro_batch(step, micro, self.part, self.parts).to(device())
            # A static graph must see every backward pass (otherwise torch asserts).
            unsynced = self.engine in ("ddp", "ddp_bucket_view") and micro < ACCUMULATION - 1
            with self.wrapped.no_sync() if unsynced else contextlib.nullcontext():
                self.scaler.scale(self.loss(ids, step)).backward()
        if self.engine == "single_zeros":
            for param in self.model.parameters():
                if param.requires_grad and param.grad is None:
                    param.grad = torch.zeros_like(param)

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)

    def train(self, first: int, end: int) -> None:
        """Take the steps from `first` to before `end`."""
        for step in range(first, end):
            set_lr(self.mars, step)
            self.backward(step)
            self.scaler.unscale_(self.mars)
            if not self.case.folded:
                self.total_norms.append(self.clip())
            self.scaler.step(self.mars)
            self.scaler.update()
            if self.case.folded:
                self.total_norms.append(self.mars.grad_norm.clone())
            self.mars.zero_grad()
            self.watched.end_step()

    def save(self, folder: Path) -> None:
        dcp.save(dcp_states(self.model, self.mars, {}), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load what `save` has saved, or a universal checkpoint."""
        if (folder / "universal").exists():
            universal.load(folder / "universal", self.model, self.mars)
        else:
            load_dcp(folder, self.model, self.mars)

    def results(self) -> Results:
        return plain_results(self.model, self.mars)

    def notes(self) -> dict[str, Any]:
        totals = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in self.total_norms]
        norms = [norm.item() for norm in totals]
        return {**self.watched.notes(), "total_norms": norms, "groups": settings_of(self.mars)}

    def close(self) -> None:
        pass


def shard(model: Any, mesh_shape: tuple[int, ...], **settings: Any) -> None:
    """Set up FSDP2; with two dimensions, the first holds replicas."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh(device().type, mesh_shape, mesh_dim_names=names)
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
    "zero3_init": {"zero_optimization": _ZERO3},  # with a model built under `deepspeed.zero.Init`
    "stage0": {},  # no ZeRO, which is DeepSpeed's default
    "stage0_bf16": _BF16,
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


class DeepSpeedRun:
    """ZeRO of any stage, or none."""

    def __init__(self, engine: str, case: Case, flags: set[str] | None = None, **config: Any) -> None:
        """Build a fresh model, optimizer and engine, with further keys of its config."""
        deepspeed = import_deepspeed(fp16="fp16" in config)
        flags, self.name, self.case = flags or set(), engine, case
        config = {**deepspeed_config(engine, dist.get_world_size()), **config}
        self.model = build_model(case)
        if engine == "zero3_init":
            initial = self.model.state_dict()
            with deepspeed.zero.Init(config_dict_or_path=config):
                self.model = build_model(case)
            assert {param.shape for param in self.model.parameters()} == {torch.Size([0])}
            for name, param in self.model.named_parameters():  # which were drawn in another order
                with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                    param.data.copy_(initial[name])
        self.mars = case.create(groups_of(self.model) if "groups" in flags else self.model)
        self.watched = Watched(self.mars, flags)
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.mars, config=config)

    def train(self, first: int, end: int) -> None:
        for step in range(first, end):
            set_lr(self.mars, step)
            for micro in range(ACCUMULATION):
                ids = Tokens().micro_batch(step, micro, dist.get_rank(), dist.get_world_size()).to(device())
                self.engine.backward(self.engine(ids, ids, self.case.uses_branch(step))["loss"])
                self.engine.step()
            self.watched.end_step()

    def save(self, folder: Path) -> None:
        """Save, and convert to a universal checkpoint, which cannot hold the state of rows."""
        self.engine.save_checkpoint(folder, tag="saved")
        if dist.get_rank() == 0 and self.case.normalize_rows is None:
            universal.to_universal(folder / "saved", folder / "universal")
        dist.barrier()

    def load(self, folder: Path) -> None:
        path, _ = self.engine.load_checkpoint(folder)  # the tag is in `latest` or `latest_universal`
        assert path is not None

    def results(self) -> Results:
        if self.name.startswith("stage0"):
            return {f"weight.{name}": param.detach().float() for name, param in self.model.named_parameters()}
        return deepspeed_results(self.model, self.engine, self.mars)

    def notes(self) -> dict[str, Any]:
        return {**self.watched.notes(), "groups": settings_of(self.mars)}

    def close(self) -> None:
        self.engine.destroy()


def build_run(engine: str, case: Case, flags: set[str] | None = None, **config: Any) -> TorchRun | DeepSpeedRun:
    return (DeepSpeedRun if engine in DEEPSPEED else TorchRun)(engine, case, flags, **config)


def link_states(engine: Any) -> None:
    """Let ZeRO-1/2 link all groups' states; it does so after the first group's first step, when others have none."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def deepspeed_results(model: nn.Module, engine: Any, mars: mars_hf.Mars) -> Results:
    """Return fp32 weights and states from all ranks, collected by DeepSpeed where it can, and this rank's counters."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    link_states(engine)
    results = states_by_layout(model, mars)
    results |= {f"step.{index}": state["step"].clone() for index, state in enumerate(mars.state.values())}
    # With round_robin_gradients DeepSpeed 0.19 links weights to the wrong places of the reordered partitions.
    is_linked = not getattr(engine.optimizer, "round_robin_gradients", False)
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]) if hasattr(param, "ds_id") else contextlib.nullcontext():
            results[f"weight.{name}"] = param.detach().float().clone()
        if param.requires_grad and is_linked:
            results[f"weight.{name}"] = safe_get_full_fp32_param(param).detach().clone()
            if not mars.param_groups[0]["state_dtype"]:
                results[f"exp_avg.{name}"] = safe_get_full_optimizer_state(param, "exp_avg").detach().clone()
    return results


def states_by_layout(model: nn.Module, mars: mars_hf.Mars) -> Results:
    """Return states assembled from the pieces that mars_hf locates, rank by rank.

    DeepSpeed has no last gradient to give, since vectors have none, and loses its way with round_robin_gradients.
    """
    order = {id(param): name for name, param in model.named_parameters()}
    shards = mars._ranks.shards
    assert shards is not None
    names = {index: order[key] for key, index in shards._indices.items() if key in order}
    here = []
    for flat, state in mars.state.items():
        spec = shards.spec_of(flat, 0, None if mars._watch is None else mars._watch.reference)
        assert spec is not None
        for shard in spec.shards:
            stretch = slice(shard.start, shard.start + shard.numel)
            shape = shards.shapes[shard.param_index]
            for key in STATES:
                if key in state:
                    piece = state[key][stretch]
                    if piece.dtype in eight_bits.DTYPES:
                        scales = coded.scales_of_shards(flat, state[f"{key}_scale"], spec)
                        piece = Coded(piece, scales[spec.shards.index(shard)]).decode()
                    here.append((f"{key}.{names[shard.param_index]}", shape, piece))
    pieces: dict[str, tuple[torch.Size, list[Tensor]]] = {}
    for name, shape, stretch in (found for rank in from_all_ranks(here) for found in rank):
        pieces.setdefault(name, (shape, []))[1].append(stretch)
    return {name: torch.cat(parts).view(shape) for name, (shape, parts) in pieces.items()}


# --- the ways in: Trainer and accelerate -------------------------------------------------------------------------


def training_arguments(folder: str, case: Case, zero: dict[str, Any] | None, **settings: Any) -> TrainingArguments:
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": MICRO_BATCH // dist.get_world_size(),
        "gradient_accumulation_steps": ACCUMULATION,
        "train_sampling_strategy": "sequential",
        "learning_rate": case.hyperparameters()["lr"],
        "lr_scheduler_type": "cosine",
        "max_grad_norm": MAX_GRAD_NORM,
        "use_cpu": device().type == "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return TrainingArguments(output_dir=folder, deepspeed=zero, **{**defaults, **settings})


def train_way_in(
    engine: str, case: Case, folder: Path, resume: Path | None = None, more: dict[str, Any] | None = None, **args: Any
) -> Results:
    """Run `<way>_<engine>`: each way to pass MARS to a Trainer, under ZeRO-2, DDP or FSDP2.

    `more` are keys of DeepSpeed's config, `args` TrainingArguments.
    """
    way, backend = engine.rsplit("_", 1)
    zero = None
    if backend == "zero2":
        import_deepspeed()
        zero = deepspeed_config("zero2", dist.get_world_size()) | (more or {})
    model = build_model(case)
    with fresh_accelerate():
        trainer = make_trainer(way, model, case, str(folder), zero, **args)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        check_wrapper(backend, trainer.model_wrapped)
        return {f"weight.{name}": param.detach().float().clone() for name, param in model.named_parameters()}


def make_trainer(
    way: str, model: nn.Module, case: Case, folder: str, zero: Any, callbacks: Any = None, **settings: Any
) -> Trainer:
    """Return a Trainer that gets MARS in one of the ways; further settings are TrainingArguments."""
    shared = {"model": model, "train_dataset": Tokens(), "data_collator": default_data_collator, "callbacks": callbacks}
    hyperparameters = case.hyperparameters()
    others = {key: value for key, value in hyperparameters.items() if key != "lr"}
    if way == "optim":
        mars_hf.register()
        text = ",".join(f"{key}={value}" for key, value in others.items() if key != "mars_type")
        settings |= {"optim": "mars_adamw", "optim_args": text}
    args = training_arguments(folder, case, zero, **settings)
    if way == "optim":
        return Trainer(args=args, **shared)
    if way == "own":
        return mars_hf.MarsTrainer(args=args, mars_kwargs=others, **shared)
    if way == "factory":
        return Trainer(args=args, optimizer_cls_and_kwargs=mars_hf.factory(args, **hyperparameters), **shared)
    kind = {"instance": Trainer, "trainer": mars_hf.MarsTrainer}[way]
    return kind(args=args, optimizers=(mars_hf.create(model, **hyperparameters), None), **shared)


class AccelerateRun:
    """The loop of a user of accelerate: `fsdp2` is sharded by accelerate, `fullyshard` before."""

    def __init__(self, backend: str, case: Case) -> None:
        self.backend = backend
        if backend == "zero2":
            import_deepspeed()
            # Not with cpu=True, which means DDP. The number of micro-batches and the clip are in the JSON.
            config = deepspeed_config("zero2", dist.get_world_size())
            self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        else:
            self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        if backend == "fsdp2":
            use_fsdp2_on_cpu(self.accelerator)
        world = self.accelerator.num_processes
        self.model = build_model(case)
        if backend == "fullyshard":
            shard(self.model, (world,))
        self.mars = case.create(self.model)
        loader = torch.utils.data.DataLoader(Tokens(), batch_size=MICRO_BATCH // world)
        # accelerate's scheduler takes a step for each process.
        schedule = torch.optim.lr_scheduler.LambdaLR(self.mars, lambda step: lr_factor(step // world))
        # On CPUs accelerate would wrap a sharded model in DDP.
        model = [] if backend == "fullyshard" else [self.model]
        prepared = self.accelerator.prepare(*model, self.mars, loader, schedule)
        self.wrapped, self.optimizer, self.loader, self.schedule = (self.model, *prepared)[-4:]
        check_wrapper(backend, self.wrapped)

    def train(self, first: int, end: int) -> None:
        batches = self.accelerator.skip_first_batches(self.loader, first * ACCUMULATION)
        for batch in itertools.islice(batches, (end - first) * ACCUMULATION):
            with self.accelerator.accumulate(self.wrapped):
                self.accelerator.backward(self.wrapped(**batch)["loss"])
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.wrapped.parameters(), MAX_GRAD_NORM)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        if self.backend == "fullyshard":
            dcp.save(dcp_states(self.model, self.mars, {"schedule": self.schedule}), checkpoint_id=folder)
        else:
            self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        if self.backend == "fullyshard":
            load_dcp(folder, self.model, self.mars, schedule=self.schedule)
        else:
            self.accelerator.load_state(str(folder))

    def results(self) -> Results:
        if self.backend == "zero2":
            return deepspeed_results(self.model, self.wrapped, self.mars)
        return plain_results(self.accelerator.unwrap_model(self.wrapped), self.mars)


def train_with_accelerate(backend: str, case: Case, folder: Path | None) -> Results:
    """Train; with a folder, stop in the middle, build everything anew and resume."""
    first = 0
    if folder is not None:
        first = STEPS // 2
        with fresh_accelerate():
            stopped = AccelerateRun(backend, case)
            stopped.train(0, first)
            stopped.save(folder)
    with fresh_accelerate():
        run = AccelerateRun(backend, case)
        if folder is not None:
            run.load(folder)
        run.train(first, STEPS)
        return run.results()


def check_wrapper(backend: str, wrapped: Any) -> None:
    """Raise unless the model is wrapped as requested: accelerate falls back to DDP silently."""
    wanted = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP", "fullyshard": "FSDP"}.get(backend, "DeepSpeedEngine")
    name = type(wrapped).__name__
    if not name.startswith(wanted):
        raise RuntimeError(f"the model is wrapped in {name}, not {wanted}")


class Fsdp2Trainer(mars_hf.MarsTrainer):
    """Set up FSDP2 as accelerate does on accelerators; on CPUs accelerate would fall back to DDP."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp2_on_cpu(self.accelerator)
        self.is_fsdp_enabled = True


def use_fsdp2_on_cpu(accelerator: Any) -> None:
    """Do what accelerate does with an FSDP config on accelerators; on CPUs it would fall back to DDP."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


@contextlib.contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Reset accelerate's and transformers' process-wide state, and restore it afterwards."""
    before = dict(os.environ)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(before)


# --- the runs ---------------------------------------------------------------------------------------------------------


def run(spec: str, file: Path) -> None:
    """Do one run."""
    engine, case, *flags = spec.split("/")
    way, _, backend = engine.partition("_")
    if way == "accelerate":
        folder = file.with_name(f"{file.name}-state") if "resumed" in flags else None
        leave(file, {}, train_with_accelerate(backend, CASES[case], folder))
    elif way in ("factory", "optim", "own", "trainer"):
        leave(file, {}, train_way_in(engine, CASES[case], file.with_name(f"{file.name}-output")))
    else:
        loop = build_run(engine, CASES[case], set(flags))
        loop.train(0, STEPS)
        leave(file, loop.notes(), loop.results())
        loop.close()
