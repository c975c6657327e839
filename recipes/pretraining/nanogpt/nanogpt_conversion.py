"""Convert whole checkpoints between nanoGPT and transformers: the work of convert_nanogpt.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pretraining.data import token_files
from pretraining.nanogpt import nanogpt_file, nanogpt_folder, nanogpt_optimizer, nanogpt_states, nanogpt_weights
from pretraining.nanogpt.nanogpt_file import ACTIVATIONS, Checkpoint
from pretraining.run.errors import one_line


def from_nanogpt(settings: argparse.Namespace) -> list[str]:
    """Make the folder; return lines that say what was done.

    Raises:
        ValueError: the checkpoint cannot be converted, or the folder is there.
    """
    output: Path = settings.output_dir
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already; choose another folder, or delete it first")
    source: Path = settings.source
    checkpoint = nanogpt_file.read(source, settings.code)
    activation = settings.activation_function or ACTIVATIONS[checkpoint.code]
    model = nanogpt_weights.to_gpt2(checkpoint, activation)
    usual = activation == ACTIVATIONS[checkpoint.code]
    lines = [
        f"model       {model.num_parameters():,} parameters, after step {checkpoint.step}",
        f"activation  {activation}" + (f", as in today's model.py of {_NAMES[checkpoint.code]}" if usual else ""),
    ]
    moved, summed = None, None
    if settings.optimizer_state:
        summed = settings.summed_micro_batches or _summed(source, checkpoint)
        saved = nanogpt_optimizer.read(source, checkpoint)
        moved = nanogpt_states.to_ours(source, model, saved, checkpoint.config, summed)
        lines.append(f"optimizer   {moved.name}, of gradients summed over {summed} micro-batches")
    with token_files.writing(output) as partial:
        without = nanogpt_folder.write_model(partial, model, checkpoint, activation, summed)
        if moved is not None and summed is not None:
            nanogpt_folder.write_run(partial, checkpoint, moved, activation, summed)
    if without:
        lines.append(f"tokenizer   none: {without}")
    if settings.optimizer_state:
        lines.append(
            f"go on with  --config {output / nanogpt_folder.CONFIG} --resume_from_checkpoint {output} --data_dir DATA"
        )
    return [*lines, f"ready: {output}"]


def to_nanogpt(settings: argparse.Namespace) -> list[str]:
    """Make the ckpt.pt; return lines that say what was done.

    Raises:
        ValueError: the folder cannot be converted, or there is a ckpt.pt.
    """
    folder: Path = settings.source
    target = settings.output_dir / nanogpt_file.NAME
    if target.exists() or (settings.output_dir.exists() and not settings.output_dir.is_dir()):
        raise ValueError(f"{settings.output_dir} has a ckpt.pt already, or is a file; choose another folder")
    model = nanogpt_weights.read_gpt2(folder)
    notes = nanogpt_folder.read_notes(folder)
    activation = model.config.activation_function
    if activation not in ACTIVATIONS.values():
        raise ValueError(f"{folder} has activation_function={activation}; nanoGPT's model.py has gelu or gelu_new")
    code = settings.code or notes.get("code") or nanogpt_folder.code_for(activation)
    known = notes.get("activation_function") if notes.get("code") == code else None
    wanted = settings.activation_function or known or ACTIVATIONS[code]
    if wanted != activation:
        other = nanogpt_folder.code_for(activation)
        raise ValueError(
            f"{folder} has activation_function={activation}, and the model.py of {_NAMES[code]} computes {wanted}: "
            f"logits would differ; give --code {other}, or --activation_function {activation} for a copy that does"
        )
    sizes = nanogpt_weights.sizes_of(model, folder, code, {None: None, "true": True, "false": False}[settings.bias])
    step, loss = nanogpt_folder.progress_of(folder, notes)
    content: dict[str, Any] = {
        "model": nanogpt_weights.to_nanogpt(model, sizes, code),
        "model_args": sizes.model_args(code),
    }
    config = dict(notes.get("config", {}))
    lines = [f"model       {_NAMES[code]}, bias={sizes.bias}, {activation}, after step {step}"]
    if settings.optimizer_state:
        noted = notes.get("summed_micro_batches")
        saved, found = nanogpt_states.from_ours(folder, sizes, code, settings.summed_micro_batches, noted)
        config |= found
        lines.append(f"optimizer   {saved.kind}: " + ", ".join(f"{key}={value}" for key, value in found.items()))
    else:
        saved = nanogpt_optimizer.fresh(code, sizes, config)
        lines.append(f"optimizer   {saved.kind}, before its first step")
    content["optimizer"] = nanogpt_optimizer.state_dict(saved)
    content |= {"iter_num": step, "best_val_loss": loss, "config": config}
    nanogpt_file.save(settings.output_dir, content)
    return [*lines, f"ready: {target}"]


_NAMES = {"nanogpt": "nanoGPT", "mars": "the official repository"}


def _summed(path: Path, checkpoint: Checkpoint) -> int:
    """Return how many micro-batches' gradients the trainer summed."""
    if checkpoint.code == "nanogpt":
        return 1
    found = checkpoint.config.get("gradient_accumulation_steps")
    if type(found) is not int or found < 1:
        raise ValueError(
            f"--optimizer_state: the config of {path} has gradient_accumulation_steps={one_line(found, 40)}, and the "
            "official trainer sums so many gradients; give --summed_micro_batches"
        )
    return found
