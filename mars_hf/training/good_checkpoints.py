"""Find the newest checkpoint whose weights are finite."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def newest_good(output_dir: Path) -> Path | None:
    """Return the newest whole checkpoint with finite weights; None if there is none.

    Weights are read from safetensors files. Engines' own formats are not read: a run that looks for non-finite values
    writes them only if the weights are finite.
    """
    found = [(int(match[1]), path) for path in output_dir.glob("*") if (match := _NAME.fullmatch(path.name))]
    return next((path for _, path in sorted(found, reverse=True) if _is_good(path)), None)


def _is_good(checkpoint: Path) -> bool:
    if not (checkpoint / TRAINER_STATE_NAME).is_file():  # Trainer writes it last
        return False
    try:
        return all(_is_finite(file) for file in sorted(checkpoint.glob("*.safetensors")))
    except (SafetensorError, OSError):
        return False


def _is_finite(file: Path) -> bool:
    with safe_open(str(file), "pt") as weights:
        for name in weights.keys():
            tensor = weights.get_tensor(name)
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return False
    return True
