#!/usr/bin/env python
"""Fine-tune a language model on instructions with MARS: TRL's SFTTrainer, and LoRA of PEFT.

    python recipes/sft_lora.py                                      # no network, a few minutes on CPU
    python recipes/sft_lora.py --optim mars_m                       # or adamw_torch, or another one of --optim
    python recipes/sft_lora.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara

Without --dataset_name the task is to describe a function of Python's standard library: the prompt is its signature, the
completion the first line of its docstring. Without --model_name_or_path the model is a small GPT-2, which
pretrain_gpt2.py makes first, in runs/sft-base; one of its finished runs does too: runs/embedded-mars_m.
The learning rates to start from: for that GPT-2 STARTS, the best of a sweep on that task (benchmarks/tune.py);
for other models what `python -m mars_hf suggest` derives from 2e-4, a common rate of AdamW for LoRA.
"""

from __future__ import annotations

from pretraining.run import errors

if __name__ == "__main__":
    errors.run("sft_lora")  # above the imports that take seconds: it watches the launcher

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from pretraining.data import embedded
from pretraining.run.arguments import RecipeParser
from tasks import finetuning, models
from tasks.finetuning import LoraArguments, RecipeArguments, SuggestedRate
from transformers import set_seed
from transformers.utils import is_torch_bf16_gpu_available
from trl import SFTConfig, SFTTrainer

import mars_hf

STARTS = {
    "mars_adamw": SuggestedRate(3.2e-2, "beta1=0.9,beta2=0.95"),
    "mars_m": SuggestedRate(1.6e-2, "beta1=0.95"),
    "adamw_torch": SuggestedRate(1.6e-2),
}
_BASE_SETTINGS = (
    "--n_layer 2 --max_steps 150 --warmup_steps 20 --per_device_train_batch_size 8 "
    "--eval_steps 75 --max_eval_blocks 64 --sample_tokens 0 "
    "--optimizer mars_adamw --gamma 0.025 --learning_rate 0.008 --lr_embeddings 0.008"
).split()
_COLUMNS = ({"prompt", "completion"}, {"messages"}, {"text"})  # what SFTTrainer reads


@dataclass
class SftArguments(RecipeArguments, LoraArguments, SFTConfig):
    """Model, data, adapters, and trl.SFTConfig with the recipe's defaults; `--max_length` left out is the context."""

    max_length: int | None = None
    gradient_checkpointing: bool | None = None  # type: ignore[assignment]  # off, where TRL has it on
    max_steps: int = 150
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32
    eval_steps: float | None = 75

    def __post_init__(self) -> None:
        """Fill in what the command line leaves out; bfloat16 is on where TRL would have it, but not on a CPU."""
        self.fill_in(finetuning.suggested(2e-4) if self.model_name_or_path else STARTS, "sft")
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        super().__post_init__()


@errors.one_line_errors("sft_lora.py")
def main(argv: list[str] | None = None) -> tuple[SFTTrainer, dict[str, Any]]:
    """Train and return the Trainer and the content of metrics.json; `argv` is the command line without the program."""
    mars_hf.register()
    (args,) = RecipeParser(SftArguments, SFTConfig).parse_args_into_dataclasses(argv)
    set_seed(args.seed)
    train_set, held_out = load(args)
    base = Path(args.output_dir).absolute().parent / "sft-base"
    path = args.model_name_or_path or finetuning.small_gpt2(base, _BASE_SETTINGS)
    model = models.load(path)
    args.max_length = models.block_size(model, args.max_length)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=held_out,
        processing_class=models.load_tokenizer(path),
        peft_config=args.lora_config(),
    )
    return trainer, finetuning.train(trainer, args.dataset_name or "functions and docstrings of the standard library")


def load(args: SftArguments) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return what to train on and what is held out.

    Raises:
        ValueError: SFTTrainer does not read the columns.
    """
    if args.dataset_name is None:
        corpus = embedded.read_corpus()
        functions = [list(described_functions(sources)) for sources in (corpus.train, corpus.val)]
        return datasets.Dataset.from_list(functions[0]), datasets.Dataset.from_list(functions[1])
    parts = finetuning.load_dataset(args)
    columns = next(iter(parts.values())).column_names
    if not any(kind <= set(columns) for kind in _COLUMNS):
        raise ValueError(
            f"--dataset_name {args.dataset_name}: columns {', '.join(columns)}; accepted: prompt and completion, or "
            "messages, or text"
        )
    return finetuning.split(parts, args.test_size)


def described_functions(sources: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the signature of each function with a docstring as prompt, and the docstring's first line as completion."""
    for source in sources:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes
                tree = ast.parse(source)
        except SyntaxError:  # of another Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(node)):
                word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
                prompt = f"{word} {node.name}({ast.unparse(node.args)}):\n"
                yield {"prompt": prompt, "completion": f'    """{text.splitlines()[0]}"""\n'}
