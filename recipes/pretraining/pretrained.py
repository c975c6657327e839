"""Load a language model that others made; no code of theirs runs."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

_LONGEST = 1024  # tokens of a block unless more are asked for: GPT-2's context


def load(name: str, dtype: str = "float32") -> Any:
    """Return a causal language model.

    Args:
        name: folder, or name on the Hub.
        dtype: of the weights; auto keeps the one that they were saved in.

    Raises:
        ValueError: there is none, or some of its weights are missing.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # safetensors raises Exception itself
        raise ValueError(f"{name}: transformers loads no causal language model from it: {error}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{name} lacks {len(missing)} weights of {type(model).__name__} (first: {missing[0]}); they would be random"
        )
    return model


def load_tokenizer(name: str) -> Any | None:
    """Return a model's tokenizer; None if it comes without one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception:  # tokenizers raises Exception itself
        return None
    # Without files, some classes give a tokenizer that knows only its special tokens.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_tokens) else None


def block_size(model: Any, wanted: int | None) -> int:
    """Return the tokens of a block: the wanted ones, or the model's context, of at most 1,024.

    Raises:
        ValueError: the model does not take that many.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        return min(limit or _LONGEST, _LONGEST)
    if limit and wanted > limit:
        raise ValueError(f"blocks of {wanted} tokens are longer than the model's context; give at most {limit}")
    return wanted
