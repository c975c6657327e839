#!/usr/bin/env python
"""Fine-tune a language model on instructions with MARS: TRL's SFTTrainer, and LoRA of PEFT.

    python recipes/sft_lora.py                                      # no network, a few minutes on CPU
    python recipes/sft_lora.py --optim mars_m                       # or adamw_torch, or another one of --optim
    python recipes/sft_lora.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara

Without --dataset_name the task is to describe a function of Python's standard library: the prompt is its signature, the
completion the first line of its docstring. Without --model_name_or_path the model is a small GPT-2, which
pretrain_gpt2.py makes first, in runs/sft-base; one of its finished runs does too: runs/embedded-mars_m.
The learning rates to start from: for that GPT-2 STARTS, the best of a sweep on that task (benchmarks/tune.py);
for other models STARTS_PRETRAINED, what `python -m mars_hf suggest` derives from 2e-4, a common rate of AdamW for LoRA.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import metrics
from pretraining.data import embedded
from pretraining.run.errors import one_line_errors
from tasks import adapters, base_model, command_line, running
from tasks.adapters import AdapterArguments
from tasks.command_line import Start
from transformers import set_seed
from transformers.utils import is_torch_bf16_gpu_available
from trl import SFTConfig, SFTTrainer

STARTS = {
    "mars_adamw": Start(3.2e-2, "beta1=0.9,beta2=0.95"),
    "mars_m": Start(1.6e-2, "beta1=0.95"),
    "adamw_torch": Start(1.6e-2),
}
STARTS_PRETRAINED = {
    "mars_adamw": Start(2.4e-4, "beta1=0.9,beta2=0.95"),
    "mars_m": Start(2.5e-4, "beta1=0.95"),
    "adamw_torch": Start(2e-4),
}
_BASE = "sft-base"  # folder beside the output folder
_BASE_SETTINGS = [
    *("--n_layer", "2", "--max_steps", "150", "--warmup_steps", "20", "--per_device_train_batch_size", "8"),
    *("--eval_steps", "75", "--max_eval_blocks", "64", "--sample_tokens", "0"),
    *("--optimizer", "mars_adamw", "--gamma", "0.025", "--learning_rate", "0.008", "--lr_embeddings", "0.008"),
]
_COLUMNS = ({"prompt", "completion"}, {"messages"}, {"text"})  # what SFTTrainer reads


@dataclass
class ScriptArguments:
    """Model and data."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Causal language model: folder or name on the Hub; left out: a small GPT-2."}
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Folder or name on the Hub, in one of TRL's formats; left out: functions and docstrings."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    test_size: float = field(default=0.05, metadata={"help": "Share to hold out of data that hold nothing out."})


@dataclass
class SftArguments(SFTConfig):
    """trl.SFTConfig with the recipe's defaults."""

    output_dir: str | None = field(default=None, metadata={"help": "Left out: runs/sft-OPTIM."})
    optim: str = field(default="mars_adamw", metadata={"help": "mars_adamw, mars_m, adamw_torch or another one."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Left out: that of STARTS, or of STARTS_PRETRAINED."}
    )  # type: ignore[assignment]
    max_length: int | None = field(default=None, metadata={"help": "Left out: the model's context, 1,024 at most."})
    gradient_checkpointing: bool | None = None  # type: ignore[assignment]  # off, where TRL has it on
    max_steps: int = 150
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.05
    logging_steps: float = 25
    eval_strategy: str = "steps"
    eval_steps: float | None = 75
    eval_on_start: bool = True
    save_strategy: str = "no"
    report_to: str | None = "none"

    def __post_init__(self) -> None:
        """Turn bfloat16 on where TRL would, but not on a CPU."""
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        super().__post_init__()


@one_line_errors("sft_lora.py")
def main(argv: list[str] | None = None) -> None:
    """Train; `argv` is the command line without the program's name."""
    train(argv)


def train(argv: list[str] | None = None) -> tuple[SFTTrainer, dict[str, Any]]:
    """Train and return the Trainer and the content of metrics.json; see `main`."""
    script, adapter, training = command_line.parse(
        (ScriptArguments, AdapterArguments, SftArguments),
        argv,
        description=__doc__,
        name="sft",
        starts=lambda values: STARTS_PRETRAINED if values.model_name_or_path else STARTS,
    )
    name, train_set, held_out = load(script)
    path = script.model_name_or_path or base_model.make(
        Path(training.output_dir).absolute().parent / _BASE, _BASE_SETTINGS
    )
    set_seed(training.seed)
    model, tokenizer = base_model.load(path)
    training.max_length = base_model.context(model, training.max_length, "--max_length")
    adapted = adapters.add(model, adapter)
    scores: dict[str, Any] = metrics.language_modeling()
    with running.output_folder(training):
        trainer = SFTTrainer(
            model=adapted,
            args=training,
            train_dataset=train_set,
            eval_dataset=held_out,
            processing_class=tokenizer,
            **scores,
        )
        found = running.train(trainer, name)  # TRL's card would link to data on the Hub
    running.conclude(trainer, found, "loss", "perplexity", "accuracy")
    return trainer, found


def load(script: ScriptArguments) -> tuple[str, datasets.Dataset, datasets.Dataset]:
    """Return the name of the data, the training set and the held-out set.

    Raises:
        ValueError: there are no such data, or SFTTrainer does not read their columns.
    """
    if script.dataset_name is None:
        corpus = embedded.read_corpus()
        parts = [datasets.Dataset.from_list(list(described_functions(texts))) for texts in (corpus.train, corpus.val)]
        return "functions and docstrings of Python's standard library", parts[0], parts[1]
    return running.load_splits(
        script.dataset_name,
        script.dataset_config,
        test_size=script.test_size,
        accepts=lambda columns: any(kind <= set(columns) for kind in _COLUMNS),
        accepted="prompt and completion, or messages, or text",
    )


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


if __name__ == "__main__":
    main()
