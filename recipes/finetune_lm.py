#!/usr/bin/env python
"""Fine-tune a language model on other text with MARS: all of its weights, or LoRA adapters.

    python recipes/finetune_lm.py                                   # no network, a few minutes on CPU
    python recipes/finetune_lm.py --use_peft true                   # LoRA
    python recipes/finetune_lm.py --optim mars_m                    # or adamw_torch, or another one of --optim
    python recipes/finetune_lm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name roneneldan/TinyStories

Without --dataset_name the text is one in eight of the C++ headers that come with torch. Without --model_name_or_path
the model is a GPT-2 that pretrain_gpt2.py trains on the Python standard library first, in runs/finetune-base, unless it
is there. The learning rates to start from: for that GPT-2 STARTS, the best of a sweep on that text
(benchmarks/tune.py); for other models STARTS_PRETRAINED, what `python -m mars_hf suggest` derives from
AdamW's usual 2e-5, and 2e-4 for LoRA. For instructions and chats there is sft_lora.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from pretraining.data import embedded
from pretraining.run.errors import one_line_errors
from tasks import adapters, base_model, command_line, running
from tasks.adapters import AdapterArguments
from tasks.command_line import Start
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments, default_data_collator, set_seed

# By --use_peft and --optim.
STARTS = {
    False: {
        "mars_adamw": Start(8e-3, "beta1=0.9,beta2=0.95"),
        "mars_m": Start(1.6e-2, "beta1=0.95,lr_1d=0.016"),
        "mars_lion": Start(2e-3),
        "mars_shampoo": Start(3.2e-2, "beta1=0.95,lr_1d=0.004"),
        "adamw_torch": Start(4e-3),
    },
    True: {
        "mars_adamw": Start(1.6e-2, "beta1=0.9,beta2=0.95"),
        "mars_m": Start(1.6e-2, "beta1=0.95"),
        "mars_lion": Start(4e-3),
        "mars_shampoo": Start(1.6e-2, "beta1=0.95"),
        "adamw_torch": Start(1.6e-2),
    },
}
STARTS_PRETRAINED = {
    False: {
        "mars_adamw": Start(2.4e-5, "beta1=0.9,beta2=0.95,lr_1d=2e-5"),
        "mars_m": Start(2.5e-5, "beta1=0.95,lr_1d=2e-5"),
        "mars_lion": Start(4.6e-6, "lr_1d=2e-5"),
        "adamw_torch": Start(2e-5),
    },
    True: {
        "mars_adamw": Start(2.4e-4, "beta1=0.9,beta2=0.95"),
        "mars_m": Start(2.5e-4, "beta1=0.95"),
        "mars_lion": Start(4.6e-5),
        "adamw_torch": Start(2e-4),
    },
}
_BASE = "finetune-base"  # folder beside the output folder
_BASE_SETTINGS = [  # the model that STARTS was tuned on
    *("--optimizer", "mars_adamw", "--gamma", "0.025", "--learning_rate", "0.001", "--lr_embeddings", "0.032"),
]
_ONE_IN = 8  # headers


@dataclass
class ScriptArguments:
    """Model and data."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Causal language model: folder or name on the Hub; left out: a small GPT-2."}
    )
    use_peft: bool = field(default=False, metadata={"help": "Train LoRA adapters instead of all weights."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Folder or name on the Hub, with a column of text; left out: C++ headers."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    text_column: str = field(default="text", metadata={"help": "Column with the documents."})
    test_size: float = field(default=0.05, metadata={"help": "Share to hold out of data that hold nothing out."})
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens in a sequence; left out: the model's context, 1,024 at most."}
    )
    max_eval_blocks: int = field(default=256, metadata={"help": "Evaluate on the first blocks of the held-out text."})


@dataclass
class FinetuneArguments(TrainingArguments):
    """transformers.TrainingArguments with the recipe's defaults."""

    output_dir: str | None = field(default=None, metadata={"help": "Left out: runs/finetune-MODE-OPTIM."})
    optim: str = field(default="mars_adamw", metadata={"help": "mars_adamw, mars_m, adamw_torch or another one."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Left out: that of STARTS, or of STARTS_PRETRAINED."}
    )  # type: ignore[assignment]
    adam_beta2: float = 0.95
    max_steps: int = 100
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.05
    logging_steps: float = 25
    eval_strategy: str = "steps"
    eval_steps: float | None = 50
    eval_on_start: bool = True
    save_strategy: str = "no"
    report_to: str | None = "none"


@one_line_errors("finetune_lm.py")
def main(argv: list[str] | None = None) -> None:
    """Train; `argv` is the command line without the program's name."""
    train(argv)


def train(argv: list[str] | None = None) -> tuple[Trainer, dict[str, Any]]:
    """Train and return the Trainer and the content of metrics.json; see `main`."""
    script, adapter, training = command_line.parse(
        (ScriptArguments, AdapterArguments, FinetuneArguments),
        argv,
        description=__doc__,
        name=lambda values: f"finetune-{'lora' if values.use_peft else 'full'}",
        starts=lambda values: (STARTS_PRETRAINED if values.model_name_or_path else STARTS)[values.use_peft],
    )
    name, train_text, held_out_text = load(script)
    path = script.model_name_or_path or base_model.make(
        Path(training.output_dir).absolute().parent / _BASE, _BASE_SETTINGS
    )
    set_seed(training.seed)
    model, tokenizer = base_model.load(path)
    block = base_model.context(model, script.block_size, "--block_size")
    train_set, held_out = (blocks(part, script.text_column, tokenizer, block) for part in (train_text, held_out_text))
    if script.use_peft:
        model = adapters.add(model, adapter)
    with running.output_folder(training):
        trainer = running.trainer_class(training)(
            model=model,
            args=training,
            train_dataset=train_set,
            eval_dataset=held_out.select(range(min(script.max_eval_blocks, len(held_out)))),
            processing_class=tokenizer,
            data_collator=default_data_collator,
        )
        found = running.train(trainer, name, dataset=name)
    running.conclude(trainer, found, "loss")
    return trainer, found


def load(script: ScriptArguments) -> tuple[str, datasets.Dataset, datasets.Dataset]:
    """Return the name of the text, the documents to train on and those held out.

    Raises:
        ValueError: there are no such data, or they have no such column.
    """
    if script.dataset_name is None:
        corpus = embedded.read_corpus("torch-headers")
        parts = (corpus.train[::_ONE_IN], corpus.val)
        train, held_out = (datasets.Dataset.from_dict({script.text_column: documents}) for documents in parts)
        return embedded.NAMES["torch-headers"], train, held_out
    return running.load_splits(
        script.dataset_name,
        script.dataset_config,
        test_size=script.test_size,
        accepts=lambda columns: script.text_column in columns,
        accepted=f"{script.text_column}, or what --text_column names",
    )


def blocks(
    documents: datasets.Dataset, column: str, tokenizer: PreTrainedTokenizerBase, block: int
) -> datasets.Dataset:
    """Return sequences of `block` tokens, cut from the documents one after the other; what is left over is dropped.

    Each document ends with the tokenizer's end of text, if it has one.

    Raises:
        ValueError: the documents are shorter than one sequence.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokens(texts: Sequence[str]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [[*ids, *end] for ids in encoded]}

    kept = documents.select_columns([column])
    rows = kept.map(tokens, input_columns=[column], batched=True, remove_columns=[column], desc="tokenizing")
    stream: Iterator[int] = chain.from_iterable(rows["input_ids"])
    found = [list(ids) for ids in zip(*[stream] * block, strict=False)]
    if not found:
        raise ValueError(f"the text has fewer than --block_size {block} tokens; give more text, or a smaller block")
    return datasets.Dataset.from_dict({"input_ids": found, "labels": found})


if __name__ == "__main__":
    main()
