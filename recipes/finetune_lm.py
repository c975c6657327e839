#!/usr/bin/env python
"""Fine-tune a language model on other text with MARS: all of its weights, or LoRA adapters.

    python recipes/finetune_lm.py                                   # no network, a few minutes on CPU
    python recipes/finetune_lm.py --use_peft true                   # LoRA
    python recipes/finetune_lm.py --optim mars_m                    # or adamw_torch, or another one of --optim
    python recipes/finetune_lm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name roneneldan/TinyStories

Without --dataset_name the text is one in eight of the C++ headers that come with torch. Without --model_name_or_path
the model is a GPT-2 that pretrain_gpt2.py trains on the Python standard library first, in runs/finetune-base, unless it
is there. The learning rates to start from: for that GPT-2 STARTS, the best of a sweep on that text
(benchmarks/tune.py); for other models what `python -m mars_hf suggest` derives from AdamW's usual 2e-5, and
2e-4 for LoRA. For instructions and chats there is sft_lora.py.
"""

from __future__ import annotations

from pretraining.run import errors

if __name__ == "__main__":
    errors.run("finetune_lm")  # above the imports that take seconds: it watches the launcher

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import metrics
from peft import get_peft_model
from pretraining.data import embedded
from pretraining.run.arguments import RecipeParser
from tasks import finetuning, models
from tasks.finetuning import LoraArguments, RecipeArguments, SuggestedRate
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed

import mars_hf

# By --use_peft and --optim.
STARTS = {
    False: {
        "mars_adamw": SuggestedRate(8e-3, "beta1=0.9,beta2=0.95"),
        "mars_m": SuggestedRate(1.6e-2, "beta1=0.95,lr_1d=0.016"),
        "mars_lion": SuggestedRate(2e-3),
        "mars_shampoo": SuggestedRate(3.2e-2, "beta1=0.95,lr_1d=0.004"),
        "adamw_torch": SuggestedRate(4e-3),
    },
    True: {
        "mars_adamw": SuggestedRate(1.6e-2, "beta1=0.9,beta2=0.95"),
        "mars_m": SuggestedRate(1.6e-2, "beta1=0.95"),
        "mars_lion": SuggestedRate(4e-3),
        "mars_shampoo": SuggestedRate(1.6e-2, "beta1=0.95"),
        "adamw_torch": SuggestedRate(1.6e-2),
    },
}
# The model that STARTS was tuned on.
_BASE_SETTINGS = "--optimizer mars_adamw --gamma 0.025 --learning_rate 0.001 --lr_embeddings 0.032".split()


@dataclass
class FinetuneArguments(RecipeArguments, LoraArguments, TrainingArguments):
    """Model, data, adapters, and transformers.TrainingArguments with the recipe's defaults."""

    use_peft: bool = field(default=False, metadata={"help": "Train LoRA adapters instead of all weights."})
    general_dataset_name: str | None = field(
        default=None,
        metadata={"help": "Folder or Hub name of other text, evaluated at the end: what the model forgets."},
    )
    text_column: str = field(default="text", metadata={"help": "Column with the documents."})
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens in a sequence; left out: the model's context, 1,024 at most."}
    )
    max_eval_blocks: int = field(default=256, metadata={"help": "Evaluate on the first blocks of the held-out text."})
    adam_beta2: float = field(  # type: ignore[assignment]
        default=None, metadata={"help": "AdamW's; left out: 0.999, and 0.95 for the small model."}
    )
    max_steps: int = 100
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32

    def __post_init__(self) -> None:
        """Fill in what the command line leaves out."""
        pretrained = finetuning.suggested(2e-4 if self.use_peft else 2e-5)
        starts = pretrained if self.model_name_or_path else STARTS[self.use_peft]
        if self.adam_beta2 is None:
            self.adam_beta2 = 0.999 if self.model_name_or_path else 0.95
        self.fill_in(starts, f"finetune-{'lora' if self.use_peft else 'full'}")
        super().__post_init__()


@errors.one_line_errors("finetune_lm.py")
def main(argv: list[str] | None = None) -> tuple[Trainer, dict[str, Any]]:
    """Train and return the Trainer and the content of metrics.json; `argv` is the command line without the program."""
    mars_hf.register()
    (args,) = RecipeParser(FinetuneArguments, TrainingArguments).parse_args_into_dataclasses(argv)
    set_seed(args.seed)
    train_text, held_out_text = load(args)
    base = Path(args.output_dir).absolute().parent / "finetune-base"
    path = args.model_name_or_path or finetuning.small_gpt2(base, _BASE_SETTINGS)
    model, tokenizer = models.load(path), models.load_tokenizer(path)
    block = models.block_size(model, args.block_size)
    train_set, held_out = (blocks(part, args.text_column, tokenizer, block) for part in (train_text, held_out_text))
    if args.use_peft:
        model = get_peft_model(model, args.lora_config())
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=held_out.select(range(min(args.max_eval_blocks, len(held_out)))),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        **metrics.language_modeling(),
    )
    name = args.dataset_name or "torch-headers"
    general = None
    if args.general_dataset_name:
        _, text = finetuning.split(datasets.load_dataset(args.general_dataset_name), args.test_size)
        general = blocks(text, args.text_column, tokenizer, block)
        general = general.select(range(min(args.max_eval_blocks, len(general))))
    return trainer, finetuning.train(trainer, name, general, dataset=name)


def load(args: FinetuneArguments) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the documents to train on and those held out."""
    if args.dataset_name:
        return finetuning.split(finetuning.load_dataset(args), args.test_size)
    corpus = embedded.read_corpus("torch-headers")
    train_text, held_out_text = (
        datasets.Dataset.from_dict({args.text_column: documents}) for documents in (corpus.train[::8], corpus.val)
    )
    return train_text, held_out_text


def blocks(documents: datasets.Dataset, column: str, tokenizer: Any, block: int) -> datasets.Dataset:
    """Return sequences of `block` tokens, cut from the documents one after the other; what is left over is dropped.

    Each document ends with the tokenizer's end of text, if it has one.

    Raises:
        ValueError: the documents are shorter than one sequence.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokenize(texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*ids, *end] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]}

    rows = documents.select_columns([column]).map(tokenize, batched=True, input_columns=column, remove_columns=column)
    stream = chain.from_iterable(rows["input_ids"])
    sequences = [list(ids) for ids in zip(*[stream] * block, strict=False)]
    if not sequences:
        raise ValueError(f"the text has fewer than --block_size {block} tokens; give more text, or a smaller block")
    labels = [[-100, *ids[1:]] for ids in sequences]  # nothing predicts the first, and Trainer's mean counts labels
    return datasets.Dataset.from_dict({"input_ids": sequences, "labels": labels})
