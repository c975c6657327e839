"""Write a converted checkpoint as a folder: for from_pretrained, and with the optimizer's state for Trainer too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import GPT2LMHeadModel, TrainerControl, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from pretraining.data import gpt2_tokenizer
from pretraining.nanogpt import nanogpt_file
from pretraining.nanogpt.nanogpt_file import Checkpoint, Code
from pretraining.nanogpt.nanogpt_states import Moved
from pretraining.run import report

# What nanoGPT saves and transformers has no place for.
NOTES = "nanogpt.json"
CONFIG = "pretrain.yaml"
_LOGGING_STEPS = 50
# The official trainer's rows of the embedding: GPT-2's, and padding.
_PADDED_VOCABULARY = 50304


def write_model(
    folder: Path, model: GPT2LMHeadModel, checkpoint: Checkpoint, activation: str, summed: int | None
) -> str | None:
    """Write the model, nanoGPT's notes, and GPT-2's tokenizer for a model with its vocabulary.

    Args:
        folder: which is empty.
        model: the converted model.
        checkpoint: where it is from.
        activation: its GELU.
        summed: micro-batches whose gradients the trainer summed; None without the optimizer's state.

    Returns:
        Why there is no tokenizer; None if there is one.
    """
    model.save_pretrained(folder)
    notes = {
        "code": checkpoint.code,
        "activation_function": activation,
        "iter_num": checkpoint.step,
        "best_val_loss": checkpoint.best_loss,
        "summed_micro_batches": summed,
        "config": {key: value for key, value in checkpoint.config.items() if type(value) in (int, float, bool, str)},
    }
    report.write(folder / NOTES, notes)
    rows = checkpoint.sizes.vocab_size
    if not gpt2_tokenizer.END_OF_TEXT_ID < rows <= _PADDED_VOCABULARY:
        return f"a vocabulary of {rows:,} is not GPT-2's"
    try:
        gpt2_tokenizer.build().save_pretrained(folder)
    except gpt2_tokenizer.VocabularyError as error:
        return str(error)
    return None


def read_notes(folder: Path) -> dict[str, Any]:
    """Return the notes of a folder that came from nanoGPT; empty if it has none.

    Raises:
        ValueError: they are damaged.
    """
    path = folder / NOTES
    if not path.is_file():
        return {}
    kinds: dict[str, Any] = {"code": str, "activation_function": str, "iter_num": int, "config": dict}
    kinds["best_val_loss"] = (int, float)
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
        fits = all(isinstance(notes[key], kind) for key, kind in kinds.items()) and notes["code"] in nanogpt_file.CODES
    except (OSError, ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise ValueError(f"{path} is damaged; delete it to convert without it")
    return dict(notes)


def progress_of(folder: Path, notes: dict[str, Any]) -> tuple[int, float]:
    """Return the steps made and the lowest validation loss: the Trainer's own, if it left any, else those of the notes.

    Raises:
        ValueError: trainer_state.json is damaged.
    """
    step, loss = notes.get("iter_num", 0), notes.get("best_val_loss", nanogpt_file.NO_LOSS)
    path = folder / TRAINER_STATE_NAME
    if path.is_file():
        try:
            state = TrainerState.load_from_json(str(path))
            step = int(state.global_step)
            loss = min([loss, *(float(row["eval_loss"]) for row in state.log_history if "eval_loss" in row)])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}); copy it again") from None
    return step, loss


def write_run(folder: Path, checkpoint: Checkpoint, moved: Moved, activation: str, summed: int) -> None:
    """Write what a resume reads beside the weights, and a config of pretrain_gpt2.py that goes on with the run."""
    settings = _config(checkpoint, moved, activation, summed)
    torch.save(moved.optimizer.state_dict(), folder / OPTIMIZER_NAME)
    torch.save(_schedule(moved, checkpoint.step), folder / SCHEDULER_NAME)
    torch.save(_random_states(checkpoint.step), folder / "rng_state.pth")
    callbacks: Any = [TrainerControl()]  # a Trainer that saves looks its own up
    state = TrainerState(
        global_step=checkpoint.step,
        max_steps=settings.get("max_steps", 0),
        train_batch_size=settings.get("per_device_train_batch_size", 1),
        logging_steps=settings["logging_steps"],
        eval_steps=settings.get("eval_steps", 500),
        save_steps=settings.get("save_steps", 500),
        stateful_callbacks=callbacks,
    )
    state.save_to_json(str(folder / TRAINER_STATE_NAME))
    (folder / CONFIG).write_text(_commented(checkpoint, settings, summed), encoding="utf-8")


def _schedule(moved: Moved, step: int) -> dict[str, Any]:
    """Return the state of any schedule of transformers after a number of steps."""
    groups = [{"params": [torch.zeros(1)], "lr": group["initial_lr"]} for group in moved.optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups), lambda _: moved.share)
    schedule.last_epoch = step
    return schedule.state_dict()


def _random_states(seed: int) -> dict[str, Any]:
    """Return random states as Trainer saves them; nanoGPT saves none, so these are fresh."""
    return {
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed % 2**32).get_state(),
        "cpu": torch.Generator().manual_seed(seed).get_state(),
    }


def _config(checkpoint: Checkpoint, moved: Moved, activation: str, summed: int) -> dict[str, Any]:
    """Return settings of pretrain_gpt2.py: those of the checkpoint, where the recipe has them."""
    sizes, config = checkpoint.sizes, checkpoint.config
    found: dict[str, Any] = {
        **{key: getattr(sizes, key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")},
        "activation_function": activation,
        "bias": sizes.bias,
        "scale_attn_by_inverse_layer_idx": sizes.scaled,
        "dropout": float(sizes.dropout),
    }
    named = config.get("dataset")  # without it, too, no other data may be trained on
    found["data_dir"] = f"data/{named}" if isinstance(named, str) else "data"
    for ours, theirs in (
        ("max_steps", "max_iters"),
        ("per_device_train_batch_size", "batch_size"),
        ("per_device_eval_batch_size", "batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("warmup_steps", "warmup_iters"),
        ("eval_steps", "eval_interval"),
        ("save_steps", "eval_interval"),
    ):
        if type(config.get(theirs)) is int and config[theirs] > 0:
            found[ours] = config[theirs]
    if config.get("decay_lr") is False:
        found["lr_scheduler_type"] = "constant"
        found.pop("warmup_steps", None)
    elif isinstance(config.get("min_lr"), float):
        found |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": config["min_lr"]}}
    if isinstance(config.get("grad_clip"), (int, float)):
        found["max_grad_norm"] = config["grad_clip"] / summed
    if config.get("dtype") == "bfloat16":
        found["bf16"] = True
    if "eval_steps" in found:
        found |= {"eval_strategy": "steps", "save_strategy": "steps", "save_total_limit": 2}
    found |= {"logging_steps": _LOGGING_STEPS, "report_to": "none"}
    return found | {"optimizer": moved.name, "optimizers": {moved.name: _settings(moved)}}


def _settings(moved: Moved) -> dict[str, Any]:
    """Return the optimizer's section of the config."""
    found = {key: value for key, value in moved.settings.items() if key not in ("mars_type", "lr")}
    section: dict[str, Any] = {"learning_rate": moved.settings["lr"]}
    for key, value in found.items():
        if key in ("betas", "betas_1d"):
            suffix = key.removeprefix("betas")
            section |= {f"beta1{suffix}": value[0], f"beta2{suffix}": value[1]}
        else:
            section[key] = value
    return section


def _commented(checkpoint: Checkpoint, settings: dict[str, Any], summed: int) -> str:
    """Return the config as YAML, with what differs between the two trainers."""
    config, notes = checkpoint.config, []
    if checkpoint.code == "nanogpt" and "gradient_accumulation_steps" in settings:
        notes.append("gradient_accumulation_steps is for one process: divide it by the number of processes.")
    elif "gradient_accumulation_steps" in settings:
        notes.append("gradient_accumulation_steps is that of each process; the published runs have 8.")
    if checkpoint.code == "nanogpt" and "warmup_steps" in settings:
        notes.append("nanoGPT's warmup is at (step + 1) / (warmup_iters + 1) of the peak, Trainer's at step / warmup.")
    if config.get("lr_decay_iters", config.get("max_iters")) != config.get("max_iters"):
        notes.append(f"The rate reached its minimum at step {config['lr_decay_iters']}, and does at max_steps here.")
    if config.get("schedule", "cosine") != "cosine":
        notes.append(f"The schedule was {config['schedule']}: choose lr_scheduler_type yourself.")
    if summed > 1:
        notes.append(f"The official trainer sums {summed} gradients, Trainer averages: thresholds and eps are divided.")
    notes.insert(0, f"Goes on with a run of nanoGPT's format after step {checkpoint.step}.")
    return "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(settings, sort_keys=False)


def code_for(activation: str) -> Code:
    """Return whose model.py of today computes a GELU."""
    return next(code for code in nanogpt_file.CODES if nanogpt_file.ACTIVATIONS[code] == activation)
