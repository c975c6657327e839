#!/usr/bin/env python
"""Pretrain a Llama-like model with MARS: grouped-query attention, and projections split or fused.

    python recipes/pretrain_llama.py                                # embedded corpus, no network, a few minutes on CPU
    python recipes/pretrain_llama.py --projections fused            # Phi-3's: query, key and value are one matrix
    python recipes/pretrain_llama.py --optim mars_adamw             # or adamw_torch, or another one of --optim
    python recipes/pretrain_llama.py --data_dir data/mine           # tokens of prepare_data.py

The two models compute the same function. mars-m orthogonalizes each projection by itself in both, because it splits
what Phi-3 fuses (split_fused="auto"), so they train alike; --optim_args split_fused=none takes fused matrices whole.
STARTS holds the learning rates to start from: the best of a sweep on the embedded corpus (benchmarks/tune.py).
Embeddings, heads and norms take AdamW at lr_1d under mars-m; they tolerate a higher rate than matrices.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pretraining.data import embedded, token_files
from pretraining.data.token_files import TokenDataset
from pretraining.run.errors import one_line_errors
from tasks import command_line, running
from tasks.command_line import Start
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

STARTS = {
    "mars_m": Start(1.6e-2, "beta1=0.95,lr_1d=0.032"),
    "mars_adamw": Start(4e-3, "beta1=0.9,beta2=0.95"),
    "adamw_torch": Start(2e-3),
}


@dataclass
class DataArguments:
    """Source of the tokens."""

    data_dir: str | None = field(default=None, metadata={"help": "Of prepare_data.py; left out: the embedded corpus."})
    max_eval_blocks: int = field(default=128, metadata={"help": "Evaluate on the first blocks of the held-out tokens."})


@dataclass
class ModelArguments:
    """Size of the model."""

    projections: Literal["split", "fused"] = field(
        default="split", metadata={"help": "split: Llama; fused: Phi-3, with one matrix for query, key and value."}
    )
    hidden_size: int = field(default=128, metadata={"help": "Width of the residual stream."})
    intermediate_size: int = field(default=352, metadata={"help": "Width of the MLP."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Number of blocks."})
    num_attention_heads: int = field(default=4, metadata={"help": "Query heads per block."})
    num_key_value_heads: int = field(default=2, metadata={"help": "Key and value heads per block; fewer: GQA."})
    block_size: int = field(default=128, metadata={"help": "Tokens in a sequence."})


@dataclass
class LlamaArguments(TrainingArguments):
    """transformers.TrainingArguments with the recipe's defaults."""

    output_dir: str | None = field(default=None, metadata={"help": "Left out: runs/llama-PROJECTIONS-OPTIM."})
    optim: str = field(default="mars_m", metadata={"help": "mars_m, mars_adamw, adamw_torch or another one."})
    learning_rate: float | None = field(default=None, metadata={"help": "Left out: STARTS of the recipe."})  # type: ignore[assignment]
    adam_beta2: float = 0.95
    max_steps: int = 150
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 32
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 15
    logging_steps: float = 10
    eval_strategy: str = "steps"
    eval_steps: float | None = 75
    eval_on_start: bool = True
    save_strategy: str = "no"
    report_to: str | None = "none"


@one_line_errors("pretrain_llama.py")
def main(argv: list[str] | None = None) -> None:
    """Train; `argv` is the command line without the program's name."""
    train(argv)


def train(argv: list[str] | None = None) -> tuple[Trainer, dict[str, Any]]:
    """Train and return the Trainer and the content of metrics.json; see `main`."""
    given, sizes, training = command_line.parse(
        (DataArguments, ModelArguments, LlamaArguments),
        argv,
        description=__doc__,
        name=lambda values: f"llama-{values.projections}",
        starts=lambda values: STARTS,
    )
    check(sizes)
    set_seed(training.seed)
    with training.main_process_first(desc="preparing data"):
        beside = Path(training.output_dir).absolute().parent
        directory = Path(given.data_dir) if given.data_dir else embedded.prepare(beside / "data", 4096)
        source = token_files.load(directory)
    model = build(sizes, source.tokenizer)
    with running.output_folder(training):
        trainer = running.trainer_class(training)(
            model=model,
            args=training,
            train_dataset=TokenDataset(directory, "train", sizes.block_size),
            eval_dataset=TokenDataset(directory, "val", sizes.block_size, given.max_eval_blocks),
            processing_class=source.tokenizer,
            data_collator=default_data_collator,
        )
        print(f"model       {type(model).__name__}, {model.num_parameters():,} parameters")
        print(
            f"projections {sizes.projections}, {sizes.num_key_value_heads} key-value heads for "
            f"{sizes.num_attention_heads} query heads"
        )
        found = running.train(trainer, source.name, dataset=source.name)
    running.conclude(trainer, found, "loss")
    return trainer, found


def check(sizes: ModelArguments) -> None:
    """Raise ValueError if the sizes do not fit one another."""
    for whole, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
        if getattr(sizes, whole) % getattr(sizes, part):
            raise ValueError(
                f"--{whole} {getattr(sizes, whole)} is not a multiple of --{part} {getattr(sizes, part)}; change one"
            )
    if sizes.hidden_size // sizes.num_attention_heads % 2:
        raise ValueError(
            f"--hidden_size {sizes.hidden_size} over --num_attention_heads {sizes.num_attention_heads} is odd, and "
            "rotary positions need pairs; give another number of heads"
        )


def build(sizes: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a new model for a tokenizer: Llama, or Phi-3, which fuses its projections."""
    settings = dataclasses.asdict(sizes)
    kind, make = {"split": (LlamaConfig, LlamaForCausalLM), "fused": (Phi3Config, Phi3ForCausalLM)}[
        settings.pop("projections")
    ]
    config = kind(
        max_position_embeddings=settings.pop("block_size"),
        **settings,
        vocab_size=len(tokenizer),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model: PreTrainedModel = make(config)
    return model


if __name__ == "__main__":
    main()
