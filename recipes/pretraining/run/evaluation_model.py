"""Load a model to evaluate, and check that it fits the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from pretraining.data.data_folder import Data
from pretraining.run.errors import one_line

LARGEST_DEFAULT_BLOCK = 1024  # GPT-2's, and the official runs'


def load(name: str, dtype: str) -> PreTrainedModel:
    """Load a causal language model.

    Args:
        name: folder, or name on the Hub.
        dtype: of the weights: float32, bfloat16, float16, or auto (as they were saved).

    Raises:
        ValueError: there is none, or some of its weights are missing.
    """
    _check_folder(name)
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # the report on missing weights; this function raises
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # safetensors raises Exception itself
        reason = one_line(error)
        raise ValueError(f"--model {name}: transformers loads no causal language model from it: {reason}") from error
    finally:
        logging.set_verbosity(before)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"--model {name} lacks {len(missing)} weights of {type(model).__name__} (first: {missing[0]}), which would "
            "be random; give a causal language model"
        )
    model.config.use_cache = False
    found: PreTrainedModel = model
    return found


def tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Return a model's tokenizer; None if it comes without one."""
    try:
        found = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception:  # tokenizers raises Exception itself
        return None
    # Without files, some classes give a tokenizer that knows only its special tokens.
    return found if len(found) > len(found.all_special_tokens) else None


def context(model: PreTrainedModel) -> int | None:
    """Return the most tokens that a model takes; None if its configuration sets no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def block_size(model: PreTrainedModel, given: int | None) -> int:
    """Return the tokens per block.

    Args:
        model: the model.
        given: `--block_size`; None takes the model's context, of at most 1,024 tokens.

    Raises:
        ValueError: the model does not take that many.
    """
    limit = context(model)
    if given is None:
        return min(limit or LARGEST_DEFAULT_BLOCK, LARGEST_DEFAULT_BLOCK)
    if limit is not None and given > limit:
        raise ValueError(
            f"--block_size {given} is more than the {limit} tokens that the model takes; give {limit} or less"
        )
    return given


def check_fits(model: PreTrainedModel, own: PreTrainedTokenizerBase | None, name: str, data: Data) -> None:
    """Check that the ids of the data mean the same to the model.

    Args:
        model: the model.
        own: its tokenizer; None skips the comparison of tokens.
        name: `--model`.
        data: the data.

    Raises:
        ValueError: the model has fewer tokens than the data, or others.
    """
    remedy = "evaluate it on data made with its own tokenizer"
    embeddings: Any = model.get_input_embeddings()
    rows, needed = embeddings.weight.shape[0], len(data.tokenizer)
    if rows < needed:
        raise ValueError(
            f"--model {name} has {rows:,} tokens, fewer than the {needed:,} of the data in {data.directory}; {remedy}"
        )
    if own is None:
        return
    theirs: dict[str, Any] = own.get_vocab()
    ours = sorted(data.tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    for token, number in ours:
        if theirs.get(token) != number:
            instead = "has no such token" if token not in theirs else f"gives it the id {theirs[token]}"
            raise ValueError(
                f"--model {name} has another tokenizer than the data in {data.directory}: id {number} is {token!r} in "
                f"the data, but the model's tokenizer {instead}; {remedy}"
            )


def _check_folder(name: str) -> None:
    """Raise ValueError for a path that is no folder with a model; names of the Hub pass."""
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"--model {name} is a file; give the folder that holds config.json and the weights")
    if not folder.exists():
        if folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) > 2:
            raise ValueError(f"--model {name}: no such folder")
        return
    if (folder / "config.json").is_file():
        return
    checkpoints = sorted(folder.glob("checkpoint-*/config.json"), key=lambda path: path.stat().st_mtime)
    hint = f"; it holds {checkpoints[-1].parent}: give that" if checkpoints else ""
    raise ValueError(f"--model {name}: no config.json in it, so it holds no model{hint or '; did its run finish?'}")
