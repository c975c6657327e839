"""Sum up a finished run: its numbers, a picture of its losses, and a sample."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase, set_seed

from pretraining.run import arguments
from pretraining.run.arguments import RunArguments

# The reported training loss is the mean of the last tenth of the log lines: one line is a few noisy batches.
_TAIL = 0.1


def summarize(
    history: Sequence[dict[str, Any]],
    *,
    bytes_per_token: float,
    tokens_per_step: int,
    train_runtime: float,
    first_step: int = 0,
) -> dict[str, float | None]:
    """Return the numbers of metrics.json, from `trainer.state.log_history`.

    Args:
        history: log lines; the last evaluation counts, and the first if it was at step 0.
        bytes_per_token: bytes per token of the held-out text.
        tokens_per_step: tokens of all processes and accumulation steps.
        train_runtime: seconds of `trainer.train()`, evaluations included.
        first_step: step at which it began.
    """
    losses = [row["loss"] for row in history if "loss" in row]
    evaluations = [row for row in history if "eval_loss" in row]
    last, first = evaluations[-1], evaluations[0]
    tail = losses[-max(1, round(len(losses) * _TAIL)) :]
    evaluating = sum(row.get("eval_runtime", 0.0) for row in evaluations if row["step"] > first_step or not first_step)
    tokens = last["step"] * tokens_per_step
    return {
        "steps": last["step"],
        "tokens": tokens,
        "train_loss": sum(tail) / len(tail) if tail else None,
        "eval_loss": last["eval_loss"],
        "eval_loss_at_step_0": first["eval_loss"] if first["step"] == 0 else None,
        "perplexity": math.exp(min(last["eval_loss"], 700.0)),
        "bits_per_byte": last["eval_loss"] / math.log(2) / bytes_per_token,
        "tokens_per_second": (last["step"] - first_step) * tokens_per_step / max(train_runtime - evaluating, 1e-9),
        "train_runtime_seconds": train_runtime,
    }


# Runs of the default job, AdamW's among them.
_RECORDED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "controls_embedded.json"


def recorded_adamw(run: RunArguments) -> list[tuple[int, float]]:
    """Return steps and held-out losses of AdamW in the default job, means over seeds; empty for any other job."""
    if not _RECORDED.is_file() or not _is_default_job(run):
        return []
    runs = json.loads(_RECORDED.read_text(encoding="utf-8"))["runs"]
    curves = [each["curve"] for each in runs if each["contender"] == "adamw"]
    return [(places[0][0], statistics.fmean(loss for _, loss in places)) for places in zip(*curves, strict=True)]


def _is_default_job(run: RunArguments) -> bool:
    """Return whether a run has the data, model, batch and length of the default job, under any optimizer."""
    default, _ = arguments.read([])
    job = {**dataclasses.asdict(run.model), **dataclasses.asdict(run.data), "max_steps": run.training.max_steps}
    has_batch = run.count_tokens() == default.per_device_train_batch_size * default.block_size
    return has_batch and all(vars(default)[name] == value for name, value in job.items())


def draw_losses(history: Sequence[dict[str, Any]], adamw: Sequence[tuple[int, float]], path: Path) -> None:
    """Draw training and held-out loss over steps, and AdamW's held-out loss if it is known."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, label, style in (("loss", "training", "-"), ("eval_loss", "held-out", ".-")):
        rows = [(row["step"], row[name]) for row in history if name in row]
        if rows:
            axes.plot(*zip(*rows, strict=True), style, color="0.75" if name == "loss" else "tab:blue", label=label)
    if adamw:
        axes.plot(*zip(*adamw, strict=True), ":", color="black", label="held-out, AdamW in this job (recorded)")
    axes.set(xlabel="steps", ylabel="loss (nats per token), lower is better")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def sample(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, seed: int) -> str:
    """Continue `prompt` at temperature 0.8 with the tokenizer's tokens, at most to the model's last position."""
    set_seed(seed)
    positions = model.config.max_position_embeddings
    inputs = tokenizer(prompt, return_tensors="pt", truncation=True, max_length=positions - 1).to(model.device)
    ids = model.generate(
        **inputs,
        max_length=min(inputs.input_ids.shape[1] + tokens, positions),
        do_sample=True,
        temperature=0.8,
        top_k=50,
        suppress_tokens=list(range(len(tokenizer), model.config.vocab_size)) or None,  # rows without a token
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(ids[0]))
