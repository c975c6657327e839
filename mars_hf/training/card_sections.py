"""Write the sections of a model card: what ran, on what, for how long, how well, and how to use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mars_hf import _compat
from mars_hf.groups.roles import orthogonalizes
from mars_hf.groups.settings import SETTINGS
from mars_hf.optimizer import Mars
from mars_hf.training import card_facts, loss_curve, run_command, usage_snippet
from mars_hf.training import provenance as origins
from mars_hf.training.card_facts import CardFacts, DataSet

_MOST_ROWS = 20  # of evaluations
_PAPER = """```bibtex
@article{yuan2024mars,
  title   = {MARS: Unleashing the Power of Variance Reduction for Training Large Models},
  author  = {Yuan, Huizhuo and Liu, Yifeng and Wu, Shuang and Zhou, Xun and Gu, Quanquan},
  journal = {arXiv preprint arXiv:2411.10438},
  year    = {2024}
}
```"""


def sections(trainer: Any, optimizer: Any, facts: CardFacts, license: str | None, *, has_picture: bool) -> list[str]:
    """Return the lines of all sections.

    Args:
        trainer: a Trainer, after or during training.
        optimizer: the one that steps.
        facts: what only the script knows.
        license: of the model; None: not stated.
        has_picture: whether the loss curve is beside the card.
    """
    parts = [
        [_opening(trainer, optimizer, facts)],
        ["## Usage", "", "```python", usage_snippet.snippet(trainer).rstrip(), "```"],
        ["## Results", "", *_results(trainer, facts, has_picture=has_picture)],
        ["## Data", "", *_data(trainer, facts)],
        ["## Budget", "", *_table(["", ""], _budget(trainer, facts).items())],
        ["## Optimizer", "", *_optimizer_table(optimizer)],
        ["## Training", "", *_table(["setting", "value"], _training(trainer, optimizer).items())],
        ["## Reproduce", "", *_reproduce(trainer)],
        ["## License", "", f"{license}" if license else "Not stated."],
    ]
    if isinstance(optimizer, Mars):
        parts.append(["## Citation", "", _PAPER])
    return [line for part in parts for line in (*part, "")]


def title(trainer: Any, optimizer: Any, facts: CardFacts) -> str:
    """Return what a picture of the run is about, in one line: model, data, optimizer."""
    model = card_facts.model_of(trainer)
    data = card_facts.data_set(trainer.train_dataset, facts).name
    rule = optimizer.param_groups[0]["mars_type"] if isinstance(optimizer, Mars) else type(optimizer).__name__
    if isinstance(optimizer, Mars) and optimizer.is_exact:
        rule += " (exact)"
    kind = type(card_facts.base_model_of(model)).__name__
    size = f"{_short(card_facts.count_parameters(model)[0])} parameters"
    return ", ".join(part for part in (kind, size, data, rule) if part)


def _opening(trainer: Any, optimizer: Any, facts: CardFacts) -> str:
    model = card_facts.model_of(trainer)
    base = card_facts.base_of(model, facts)
    parameters, trained = card_facts.count_parameters(model)
    size = f"{_short(parameters)} parameters" + (f", {_short(trained)} of them trained" if trained < parameters else "")
    kind = type(card_facts.base_model_of(model)).__name__
    what = f"An adapter of a `{kind}`" if card_facts.is_adapter(model) else f"A `{kind}`"
    how = "trained from scratch"
    if base is not None:
        link = f"[{base.name}](https://huggingface.co/{base.name})" if base.is_on_hub else f"`{base.name}`"
        how = f"fine-tuned from {link}"
    return f"{what} ({size}), {how} with {_describe(optimizer)}."


def _describe(optimizer: Any) -> str:
    if not isinstance(optimizer, Mars):
        return f"`{type(optimizer).__module__}.{type(optimizer).__name__}`"
    return (
        f"[MARS](https://arxiv.org/abs/2411.10438) (`{optimizer.param_groups[0]['mars_type']}`, the "
        "optimizer that corrects each gradient by the last one, through `mars_hf`)"
    )


def _short(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def _results(trainer: Any, facts: CardFacts, *, has_picture: bool) -> list[str]:
    rows = card_facts.evaluations(trainer.state.log_history)
    lines = []
    if rows:
        shown = rows[:: -(-len(rows) // _MOST_ROWS)] if len(rows) > _MOST_ROWS else rows
        shown = shown if shown[-1] == rows[-1] else [*shown, rows[-1]]
        names = list(dict.fromkeys(name for _, row in rows for name in row))
        heads = ["held-out loss" if name == "eval_loss" else name.removeprefix("eval_") for name in names]
        cells = ([str(step), *(_number(row.get(name)) for name in names)] for step, row in shown)
        lines += _table(["step", *heads], cells, numbers=True)
    if facts.results:
        lines += ["", *_table(["final", "value"], ((name, _number(value)) for name, value in facts.results.items()))]
    best = card_facts.final_metrics(trainer)[1]
    if best is not None:
        lines += ["", f"The weights are those of step {best}, the best."]
    if not rows and not facts.results:
        lines.append("The run has not been evaluated.")
    if has_picture:
        lines += ["", f"![Loss over steps]({loss_curve.FILE})"]
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _data(trainer: Any, facts: CardFacts) -> list[str]:
    rows = [("training", card_facts.data_set(trainer.train_dataset, facts))]
    given = trainer.eval_dataset
    if isinstance(given, dict):
        rows += [(f"evaluation: {name}", card_facts.data_set(own, facts)) for name, own in given.items()]
    elif given is not None:
        rows.append(("evaluation", card_facts.data_set(given, facts)))
    return _table(["", "data", "samples"], ((use, _named(own), _count(own.samples)) for use, own in rows))


def _named(data: DataSet) -> str:
    if data.name is None:
        return f"not named (a `{data.kind}`)"
    name = f"[{data.name}](https://huggingface.co/datasets/{data.hub_name})" if data.hub_name else data.name
    parts = [part for part in (data.config, data.split and f"split {data.split}") if part]
    return name + (f" ({', '.join(parts)})" if parts else "")


def _count(number: int | None) -> str:
    return "a stream" if number is None else f"{number:,}"


def _budget(trainer: Any, facts: CardFacts) -> dict[str, str]:
    args, state = trainer.args, trainer.state
    per_device = state.train_batch_size or args.train_batch_size
    samples = per_device * args.gradient_accumulation_steps * args.world_size
    parts = [f"{per_device} a process"]
    parts += [f"{args.gradient_accumulation_steps} accumulated"] if args.gradient_accumulation_steps > 1 else []
    parts += [f"{args.world_size} processes"] if args.world_size > 1 else []
    how = f" ({' × '.join(parts)})" if len(parts) > 1 else ""
    stopped = f" of {state.max_steps:,}" if state.global_step < state.max_steps else ""
    found = {"steps": f"{state.global_step:,}{stopped}", "samples a step": f"{samples:,}{how}"}
    if facts.tokens_per_sample:
        tokens = samples * facts.tokens_per_sample
        found |= {"tokens a step": f"{tokens:,}", "tokens": f"{tokens * state.global_step:,}"}
    elif state.num_input_tokens_seen:
        found["tokens"] = f"{state.num_input_tokens_seen:,}"
    if state.epoch is not None:
        found["epochs"] = f"{state.epoch:.4g}"
    seconds = next((row["train_runtime"] for row in reversed(state.log_history) if "train_runtime" in row), None)
    if seconds is not None:
        found["time"] = f"{seconds:,.0f} s, evaluations included, on {args.world_size} × {_device(args)}"
    return found


def _device(args: Any) -> str:
    import torch

    return torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else str(args.device.type)


def _optimizer_table(optimizer: Any) -> list[str]:
    """Return one row per parameter group, with the peak learning rate if a scheduler keeps it."""
    groups = getattr(optimizer, "param_groups", [])
    names = ["lr", "betas", "eps", "weight_decay"]
    elements: Sequence[int] = ()
    if isinstance(optimizer, Mars):
        orthogonal = any(map(orthogonalizes, groups))
        names = [name for name, own in SETTINGS.items() if own.in_card and (orthogonal or not own.is_orthogonal)]
        elements = origins.of(optimizer).elements
    rows = []
    for index, group in enumerate(groups):
        values = {**group, "lr": origins.rate(group)}
        name = str(group.get("role", index)) + (f" `{group['pattern']}`" if "pattern" in group else "")
        row = [name, *(str(values.get(name)) for name in names)]
        rows.append([*row, f"{elements[index]:,}"] if index < len(elements) else row)
    return _table(["group", *names, *(["parameters"] if elements else [])], rows)


def _training(trainer: Any, optimizer: Any) -> dict[str, Any]:
    args = trainer.args
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"
    model = card_facts.model_of(trainer)
    return {
        **_schedule(trainer),
        "max_grad_norm": _max_grad_norm(trainer, optimizer),
        "precision": f"{precision} autocast" if args.bf16 or args.fp16 else str(getattr(model, "dtype", precision)),
        "seed": args.seed,
    }


def _schedule(trainer: Any) -> dict[str, Any]:
    """Return the schedule that ran: TrainingArguments do not describe a scheduler passed to Trainer."""
    args, scheduler = trainer.args, trainer.lr_scheduler
    if scheduler is not None and not _compat.made_its_scheduler(trainer):
        return {"schedule": f"{type(scheduler).__name__} (handed over)"}
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    return {"schedule": kind, "warmup steps": args.warmup_steps}


def _max_grad_norm(trainer: Any, optimizer: Any) -> Any:
    """Return the norm that gradients were clipped to: MarsTrainer prefers the optimizer's, Trainer clips to both."""
    if hasattr(trainer, "clips_at"):
        return trainer.clips_at()
    own, given = optimizer.max_grad_norm if isinstance(optimizer, Mars) else None, trainer.args.max_grad_norm
    return given if own is None else own if not given else min(own, given)


def _reproduce(trainer: Any) -> list[str]:
    command = run_command.command((trainer.args.hub_token,))
    lines = ["Run in a notebook or an interpreter."]
    if command is not None:
        fence = "````" if "```" in command else "```"
        lines = [f"{fence}bash", command, fence]
    if trainer.args.world_size > 1:
        lines += ["", f"{trainer.args.world_size} processes."]
    return [*lines, "", *_table(["package", "version"], run_command.versions(trainer).items())]


def _table(
    header: Sequence[str], rows: Iterable[Sequence[Any]] | Mapping[str, Any], *, numbers: bool = False
) -> list[str]:
    line = ["---:" if numbers else "---"] * len(header)
    cells = [list(header), line, *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return ["| " + " | ".join(row) + " |" for row in cells]
