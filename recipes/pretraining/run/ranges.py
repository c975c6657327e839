"""List the accepted range of every number that a recipe reads."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """Accepted numbers.

    Attributes:
        text: the range in words, after "is not".
        accepts: whether a finite number is in the range.
        is_whole: whether only whole numbers are accepted.
    """

    text: str
    accepts: Callable[[float], bool]
    is_whole: bool = False

    def read(self, text: str) -> float:
        """Parse a number.

        Raises:
            argparse.ArgumentTypeError: it is no number, not finite, or out of range.
        """
        try:
            number = int(text) if self.is_whole else float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and self.accepts(number)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.text}")
        return number


def whole(low: int, high: int = _LARGEST, name: str = "") -> Range:
    """Return the whole numbers from `low` to `high`; `name` is how to write `high`."""
    end = "on" if high == _LARGEST else f"to {name or format(high, ',')}"
    return Range(f"a whole number from {low} {end}", lambda number: low <= number <= high, is_whole=True)


FINITE = Range("a finite number", lambda number: True)
NOT_NEGATIVE = Range("a finite number from 0 on", lambda number: number >= 0)
POSITIVE = Range("a finite number above 0", lambda number: number > 0)
SHARE = Range("a number from 0 to 1", lambda number: 0 <= number <= 1)
BELOW_ONE = Range("a number from 0 to below 1", lambda number: 0 <= number < 1)
HELD_OUT = Range("a share between 0 and 1, like 0.0005", lambda number: 0 < number < 1)
SIZE = whole(1)
TOKENS = Range("a whole number from 1 on", lambda number: number >= 1, is_whole=True)
SEED = whole(0, 2**32 - 1, "2**32 - 1")
EVERY = Range(
    "a whole number from 1 on or a share of the steps between 0 and 1",
    lambda number: 0 < number < 1 or (number >= 1 and number == int(number)),
)
WARMUP = Range(
    "a whole number from 0 on or a share of the steps below 1",
    lambda number: 0 <= number < 1 or (number >= 1 and number == int(number)),
)

# Names of the recipe's settings. A number without a row must be finite.
NUMBERS = {
    # the model
    **dict.fromkeys(("n_layer", "n_head", "n_embd", "vocab_size"), SIZE),
    "block_size": whole(2),  # the first token of a block is predicted by nothing
    **dict.fromkeys(("hidden_size", "intermediate_size", "image_size", "patch_size"), SIZE),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), SIZE),
    **dict.fromkeys(("lora_r", "lora_alpha", "max_length"), SIZE),
    **dict.fromkeys(("dropout", "lora_dropout"), BELOW_ONE),
    # the data
    "embedded_vocab_size": whole(
        257, 2**16, "65,536 (256 bytes and the end of text at least; token files hold 16 bits)"
    ),
    **dict.fromkeys(("max_eval_blocks", "official_eval_blocks"), SIZE),
    "test_size": HELD_OUT,
    # the optimizer
    **dict.fromkeys(("beta1", "beta2", "beta1_1d", "beta2_1d"), BELOW_ONE),
    **dict.fromkeys(
        ("eps", "gamma", "lr_1d", "lr_embeddings", "weight_decay_1d", "clip_threshold", "momentum_decay"), NOT_NEGATIVE
    ),
    "ns_steps": SIZE,
    # the run
    **dict.fromkeys(("cpu_threads", "nonfinite_patience"), SIZE),
    **dict.fromkeys(("sample_tokens", "tokens_per_step"), whole(0)),
    "max_steps": Range(
        "a whole number from 1 on (or -1, with --num_train_epochs)",
        lambda number: number == -1 or 1 <= number <= _LARGEST,
        is_whole=True,
    ),
    "num_train_epochs": POSITIVE,
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), SIZE),
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "neftune_noise_alpha"), NOT_NEGATIVE),
    "warmup_steps": WARMUP,
    **dict.fromkeys(("eval_steps", "logging_steps", "save_steps"), EVERY),
    "eval_delay": NOT_NEGATIVE,
    **dict.fromkeys(("eval_accumulation_steps", "save_total_limit", "torch_empty_cache_steps"), SIZE),
    "label_smoothing_factor": BELOW_ONE,
    **dict.fromkeys(("seed", "data_seed"), SEED),
    "dataloader_num_workers": whole(0),
    "dataloader_prefetch_factor": SIZE,
    **dict.fromkeys(("ddp_bucket_cap_mb", "ddp_timeout"), SIZE),
}
