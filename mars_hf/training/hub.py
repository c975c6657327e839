"""Write the model card of a run, for the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars_hf import _compat
from mars_hf.groups.roles import orthogonalizes
from mars_hf.groups.settings import SETTINGS
from mars_hf.optimizer import Mars
from mars_hf.training import provenance as origins
from mars_hf.training.guard import innermost

if TYPE_CHECKING:
    from transformers import Trainer


def write_model_card(trainer: Trainer) -> Path:
    """Write README.md into the output folder: results, optimizer and settings of the run.

    Args:
        trainer: a Trainer, after or during training.

    Returns:
        The path of the card.
    """
    from huggingface_hub import ModelCard, ModelCardData

    output = Path(str(trainer.args.output_dir))
    name = Path(trainer.args.hub_model_id or output).name
    optimizer = innermost(trainer.optimizer)
    mars = isinstance(optimizer, Mars)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=name,
        tags=["mars_hf", "mars"] if mars else ["mars_hf"],
    )
    lines = [f"---\n{data.to_yaml()}\n---", "", f"# {name}", ""]
    lines += [f"A `{type(trainer.model).__name__}` trained with {_describe(optimizer)}.", ""]
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    if evaluations:
        lines += ["## Results", "", "| step | held-out loss |", "| ---: | ---: |"]
        lines += [f"| {row['step']} | {row['eval_loss']:.4f} |" for row in evaluations]
        lines.append("")
    lines += ["## Optimizer", "", *_optimizer_table(optimizer, trainer), "", "## Training", ""]
    lines += ["| setting | value |", "| --- | --- |"]
    args = trainer.args
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    training = {
        "steps": trainer.state.global_step,
        "sequences per step": batch,
        **_schedule(trainer),
        "max_grad_norm": _max_grad_norm(trainer, optimizer),
        "seed": args.seed,
    }
    lines += [f"| {key} | {value} |" for key, value in training.items()]
    card = ModelCard("\n".join(lines) + "\n")
    path = output / "README.md"
    card.save(path)
    return path


def _schedule(trainer: Trainer) -> dict[str, Any]:
    """Return the schedule that ran: TrainingArguments do not describe a scheduler passed to Trainer."""
    args, scheduler = trainer.args, trainer.lr_scheduler
    if scheduler is not None and not _compat.made_its_scheduler(trainer):
        return {"schedule": f"{type(scheduler).__name__} (handed over)"}
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    return {"schedule": kind, "warmup steps": args.warmup_steps}


def _max_grad_norm(trainer: Trainer, optimizer: Any) -> Any:
    """Return the norm that gradients were clipped to: MarsTrainer prefers the optimizer's, Trainer clips to both."""
    own, given = optimizer.max_grad_norm if isinstance(optimizer, Mars) else None, trainer.args.max_grad_norm
    if own is None:
        return given
    return own if hasattr(trainer, "in_stale_pass") or not given else min(own, given)


def _describe(optimizer: Any) -> str:
    if not isinstance(optimizer, Mars):
        return f"`{type(optimizer).__module__}.{type(optimizer).__name__}`"
    return (
        f"[MARS](https://arxiv.org/abs/2411.10438) (`{optimizer.param_groups[0]['mars_type']}`, the "
        "optimizer that corrects each gradient by the last one, through `mars_hf`)"
    )


def _optimizer_table(optimizer: Any, trainer: Trainer) -> list[str]:
    """Return one row per parameter group, with the peak learning rate if a scheduler keeps it."""
    groups = getattr(optimizer, "param_groups", [])
    names = ["lr", "betas", "eps", "weight_decay"]
    if isinstance(optimizer, Mars):
        orthogonal = any(map(orthogonalizes, groups))
        names = [name for name, own in SETTINGS.items() if own.in_card and (orthogonal or not own.is_orthogonal)]
    header = ["group", *names]
    rows = [header, ["---"] * len(header)]
    for index, group in enumerate(groups):
        values = {**group, "lr": origins.rate(group)}
        rows.append([str(group.get("role", index)), *(str(values.get(name)) for name in names)])
    return ["| " + " | ".join(row) + " |" for row in rows]
