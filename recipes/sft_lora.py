#!/usr/bin/env python
"""Fine-tune a language model on chats with MARS: TRL's SFTTrainer, and LoRA of PEFT. Copy this file and change it.

    python sft_lora.py                    # a small GPT-2 with random weights on made-up chats, about a minute
    python sft_lora.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara
    python sft_lora.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name chats --use_peft false

The data set has a column `messages`, columns `prompt` and `completion`, or a column `text`. `--optim mars_m` is another
rule, `--optim adamw_torch` the baseline. `--learning_rate` is AdamW's for all of them: unless you give `--optim_args`,
MARS converts it. All flags of TRL's SFTConfig and ModelConfig work, `--config FILE` reads them from YAML, and
`--resume_from_checkpoint True` resumes from the newest checkpoint in `--output_dir`.
"""

import argparse
import math
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import (
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

import mars_hf

ANIMALS = (  # its sound, home and food
    "cow moos barn grass,duck quacks pond weeds,dog barks kennel meat,cat meows house fish,sheep bleats meadow hay,"
    "horse neighs stable oats,pig grunts sty roots,owl hoots tree mice,frog croaks swamp flies,bee hums hive pollen"
)
QUESTIONS = {
    "A {0} {1}.": ["What sound does a {0} make?", "How does a {0} sound?", "Which noise comes from a {0}?"],
    "A {0} lives in a {2}.": ["Where does a {0} live?", "Where is the home of a {0}?", "Where do I find a {0}?"],
    "A {0} eats {3}.": ["What does a {0} eat?", "Which food does a {0} like?", "What do I feed a {0}?"],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def option(default: Any, text: str) -> Any:
    """Return a flag's default and help."""
    return field(default=default, metadata={"help": text})


@dataclass
class Arguments(ScriptArguments):
    """TRL's choice of data."""

    dataset_name: str | None = option(
        None, "Data set of the Hub, or a folder; left out: chats that this file makes up."
    )
    dataset_config: str | None = option(None, "Configuration of a data set on the Hub.")
    dataset_train_split: str = option("train", "Part to train on.")
    dataset_test_split: str = option("test", "Part to hold out; where there is none, a twentieth of the other.")


@dataclass
class Model(ModelConfig):
    """TRL's choice of the model and of its adapters."""

    model_name_or_path: str | None = option(None, "Hub or folder; left out: a small GPT-2 with random weights.")
    use_peft: bool = option(True, "Train LoRA adapters; false: all weights.")


@dataclass
class Training(SFTConfig):
    """TRL's, with the recipe's defaults."""

    _argument_group_name = "options of trl.SFTConfig"
    output_dir: str | None = option("finetuned-lora", "Folder of the run.")
    learning_rate: float = option(
        None, "AdamW's rate, which MARS converts; left out: 2e-4, with all weights 2e-5, without a model 5e-3."
    )
    optim_args: str | None = option(
        None, "Settings of the rule, such as gamma=0.05; left out: adamw_rates=true, and AdamW's betas for mars_adamw."
    )


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the text above as it stands, and the default of each flag."""


def chats() -> DatasetDict:
    """Return questions and answers about animals that this file makes up, one in ten held out."""
    rows = []
    for animal in ANIMALS.split(","):
        for answer, questions in QUESTIONS.items():
            for question in questions:
                user, assistant = (text.format(*animal.split()) for text in (question, answer))
                prompt = [{"role": "user", "content": user}]
                rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": assistant}]})
    random.Random(0).shuffle(rows)
    return DatasetDict({"train": Dataset.from_list(rows[10:] * 40), "test": Dataset.from_list(rows[:10])})


def load_data(args: ScriptArguments) -> tuple[Dataset, Dataset]:
    """Return what to train on and what is held out: the test part, or a twentieth."""
    parts = load_dataset(args.dataset_name, args.dataset_config) if args.dataset_name else chats()
    train, test = args.dataset_train_split, args.dataset_test_split
    if train not in parts:
        raise ValueError(f"--dataset_train_split {train}: {args.dataset_name} has {', '.join(parts)}")
    columns = parts[train].column_names
    if not ({"messages", "text"} & set(columns) or {"prompt", "completion"} <= set(columns)):
        raise ValueError(f"{args.dataset_name}: the columns are {', '.join(columns)}; see the top of sft_lora.py")
    if test in parts:
        return parts[train], parts[test]
    halves = parts[train].train_test_split(0.05, seed=0)
    return halves["train"], halves["test"]


def load_model(args: ModelConfig, rows: Dataset) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    if path := args.model_name_or_path:
        settings: dict[str, Any] = {"revision": args.model_revision, "dtype": args.dtype}
        settings["attn_implementation"] = args.attn_implementation
        if quantization := get_quantization_config(args):  # --load_in_4bit true
            settings |= {"quantization_config": quantization}
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **settings)
            tokenizer = AutoTokenizer.from_pretrained(path, revision=args.model_revision, trust_remote_code=False)
            return model, tokenizer
        except OSError as error:
            raise ValueError(f"--model_name_or_path {path}: {error}") from error
    tokenizer = GPT2Tokenizer().train_new_from_iterator(map(str, rows), vocab_size=512)
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, CHAT_TEMPLATE
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "n_positions": 128, "n_layer": 2, "n_head": 4, "n_embd": 128}
    ends: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(GPT2Config(initializer_range=0.1, **sizes, **ends))
    model.loss_type = "ForCausalLM"  # or transformers warns
    return model, tokenizer


def build(data: ScriptArguments, training: SFTConfig, model_args: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """Return the Trainer and a held-out row; raise ValueError for wrong input."""
    if int(os.environ.get("WORLD_SIZE", "1")) != training.world_size:
        raise ValueError("the launched processes are not connected, so each would train alone; add --use_cpu true")
    if (given := training.resume_from_checkpoint) in ("True", "true"):
        output = str(training.output_dir)
        training.resume_from_checkpoint = get_last_checkpoint(output) if os.path.isdir(output) else None
    if given and not Path(training.resume_from_checkpoint or "", "trainer_state.json").is_file():
        raise ValueError(f"--resume_from_checkpoint {given}: no checkpoint there; leave the flag out to start anew")
    set_seed(training.seed)
    with training.main_process_first():
        train, held_out = load_data(data)
        model, tokenizer = load_model(model_args, train)
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    return trainer, held_out[0]


def answer(trainer: Any, row: dict[str, Any]) -> str:
    """Return the beginning of a row and what the model answers."""
    tokenizer = trainer.processing_class
    messages = row.get("prompt") or row.get("messages", [])[:-1] or row.get("messages") or row["text"][:50]
    if isinstance(messages, str):
        inputs = tokenizer(messages, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    ids = trainer.model.generate(**inputs.to(trainer.args.device), max_new_tokens=32)[0, inputs["input_ids"].shape[1] :]
    asked = messages if isinstance(messages, str) else messages[-1]["content"]
    return f"question: {asked}\nanswer: {tokenizer.decode(ids, skip_special_tokens=True)}"


def main(argv: list[str] | None = None) -> SFTTrainer:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_adamw and the other names
    kinds: Any = (Arguments, Model, Training)
    parser = TrlParser(kinds, prog="sft_lora.py", usage=argparse.SUPPRESS, description=__doc__, formatter_class=Help)
    parser.set_defaults(
        optim="mars_adamw", lr_scheduler_type="cosine", warmup_steps=0.05, per_device_train_batch_size=16
    )
    parser.set_defaults(logging_steps=25, eval_on_start=True, bf16=torch.cuda.is_available())
    parser.set_defaults(lora_target_modules=["all-linear"], dtype="float32")
    try:
        data, model_args, training = parser.parse_args_and_config(argv)
        if model_args.model_name_or_path is None:
            print("A small GPT-2 with random weights trains on two CPU cores in about a minute.", flush=True)
        if training.learning_rate is None:
            pretrained = 2e-4 if model_args.use_peft else 2e-5
            training.learning_rate = pretrained if model_args.model_name_or_path else 5e-3
        if training.optim_args is None and training.optim.startswith("mars_"):
            training.optim_args = "adamw_rates=true"
            training.optim_args += ",beta1=0.9,beta2=0.999" if training.optim == "mars_adamw" else ""  # AdamW's
        trainer, row = build(data, training, model_args)
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        parser.error(" ".join(str(error).split()))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", metrics)
    first: dict[str, Any] = next((row for row in trainer.state.log_history if row["step"] == 0), {})
    if trainer.is_world_process_zero():
        trainer.create_model_card(dataset_name=data.dataset_name)
        for name in ("eval_loss", "eval_mean_token_accuracy"):
            before, after = first.get(name, math.nan), metrics.get(name, math.nan)
            print(f"held-out {name.removeprefix('eval_')}: {before:.3f} before, {after:.3f} after")
        print(f"saved in {training.output_dir}; --push_to_hub true, or hf upload NAME FOLDER, uploads it")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=data.dataset_name)
    if training.world_size == 1:
        print(answer(trainer, row))
    trainer.end()
    return trainer


if __name__ == "__main__":
    main()
