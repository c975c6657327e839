"""Sum up a finished run: its numbers, its parameter groups, and a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, TextGenerationPipeline, set_seed

from mars_hf.arithmetic.update_rules import update_rule

# The reported training loss is the mean of the last tenth of the log lines: one line is a few noisy batches.
_TAIL = 0.1


def summarize(
    history: Sequence[dict[str, Any]],
    *,
    bytes_per_token: float,
    tokens_per_step: int,
    train_runtime: float,
) -> dict[str, float | None]:
    """Return the numbers of metrics.json, from `trainer.state.log_history`.

    Args:
        history: log lines; the last evaluation counts, and the first if it was at step 0.
        bytes_per_token: bytes per token of the held-out text.
        tokens_per_step: tokens of all processes and accumulation steps.
        train_runtime: seconds of `trainer.train()` in all sessions, evaluations included.
    """
    losses = [row["loss"] for row in history if "loss" in row]
    evaluations = [row for row in history if "eval_loss" in row]
    last, first = evaluations[-1], evaluations[0]
    tail = losses[-max(1, round(len(losses) * _TAIL)) :]
    evaluating = sum(row.get("eval_runtime", 0.0) for row in evaluations)
    tokens = last["step"] * tokens_per_step
    return {
        "steps": last["step"],
        "tokens": tokens,
        "train_loss": sum(tail) / len(tail) if tail else None,
        "eval_loss": last["eval_loss"],
        "eval_loss_at_step_0": first["eval_loss"] if first["step"] == 0 else None,
        "perplexity": math.exp(min(last["eval_loss"], 700.0)),
        "bits_per_byte": last["eval_loss"] / math.log(2) / bytes_per_token,
        "tokens_per_second": tokens / max(train_runtime - evaluating, 1e-9),
        "train_runtime_seconds": train_runtime,
    }


def groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that trained each parameter group, with the peak of its learning rate."""
    return [_settings_of(group) for group in param_groups]


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    rule = update_rule(group) if "mars_type" in group else None
    settings = {
        "role": group["role"],
        "rule": group.get("rule", "adamw") if rule is None else rule.name,
        "learning_rate": float(group.get("initial_lr", group["lr"])),
    }
    for key in ("betas", "momentum", "eps", "weight_decay"):
        if key in group:
            settings[key] = group[key]
    if rule is not None and rule.corrects:
        settings["gamma"] = group.get("initial_gamma", group["gamma"])
    return settings


def sample(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, seed: int) -> str:
    """Continue `prompt` by sampling at temperature 0.8 from the tokenizer's tokens."""
    set_seed(seed)
    room = model.config.max_position_embeddings - len(tokenizer(prompt).input_ids)
    generate: Any = TextGenerationPipeline(model=model, tokenizer=tokenizer)
    (continued,) = generate(
        prompt,
        max_new_tokens=max(1, min(tokens, room)),
        do_sample=True,
        temperature=0.8,
        top_k=50,
        suppress_tokens=list(range(len(tokenizer), model.config.vocab_size)) or None,  # rows without a token
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(continued["generated_text"])
