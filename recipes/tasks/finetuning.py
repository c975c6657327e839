"""What the fine-tuning recipes share: arguments, rates to start from, held-out data, and a run from start to end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pretrain_gpt2
import torch
from peft import LoraConfig
from pretraining.run import checks

from mars_hf.groups.suggest import FINETUNING_BETAS, suggest


class SuggestedRate(NamedTuple):
    """Learning rate to start from with one optimizer, and further settings as `--optim_args` takes them."""

    learning_rate: float
    optim_args: str | None = None


def suggested(adamw_lr: float) -> dict[str, SuggestedRate]:
    """Return what `python -m mars_hf suggest --finetuning` derives from a learning rate of AdamW, by `--optim`."""
    rates = {"adamw_torch": SuggestedRate(adamw_lr)}
    for rule in ("mars-adamw", "mars-m", "mars-lion"):
        settings = suggest(rule, adamw_lr, FINETUNING_BETAS)
        optim_args = "beta1={:.2g},beta2={:.3g},lr_1d={:g}".format(*settings["betas"], settings["lr_1d"])
        rates[rule.replace("-", "_")] = SuggestedRate(float(f"{settings['lr']:.2g}"), optim_args)
    return rates


@dataclass
class RecipeArguments:
    """Model, data, and other defaults of TrainingArguments; in the bases of a class it comes before those."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or name on the Hub; left out: a small model."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Folder or name on the Hub; left out: data of this machine."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a data set on the Hub; left out: its main branch."}
    )
    test_size: float = field(default=0.05, metadata={"help": "Share to hold out of data that hold nothing out."})
    output_dir: str | None = field(default=None, metadata={"help": "Left out: runs/ and the names of task and optim."})
    optim: str = field(default="mars_adamw", metadata={"help": "mars_adamw, mars_m, adamw_torch or another one."})
    learning_rate: float = field(default=None, metadata={"help": "Left out: the recipe's."})  # type: ignore[assignment]
    optim_args: str | None = field(default=None, metadata={"help": "Further settings of the optimizer."})
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.05
    logging_steps: float = 25
    eval_strategy: str = "steps"
    eval_steps: float | None = 50
    eval_on_start: bool = True
    save_strategy: str = "no"

    def fill_in(self, rates: Mapping[str, SuggestedRate], name: str) -> None:
        """Fill in folder, learning rate and optim_args that the command line leaves out.

        Raises:
            ValueError: there is no learning rate to start from, or no run can have a value.
        """
        suggested_rate = rates.get(self.optim)
        if self.learning_rate is None and suggested_rate is None:
            raise ValueError(
                f"--optim {self.optim}: the recipe has no learning rate for it, only for {', '.join(rates)}; give "
                "--learning_rate (python -m mars_hf suggest derives one from AdamW's)"
            )
        if suggested_rate is not None:
            self.learning_rate = suggested_rate.learning_rate if self.learning_rate is None else self.learning_rate
            self.optim_args = suggested_rate.optim_args if self.optim_args is None else self.optim_args
        self.output_dir = self.output_dir or f"runs/{name}-{self.optim}"
        self._check()

    def _check(self) -> None:
        """Raise ValueError for what no run can have, before TrainingArguments sees it."""
        checks.numbers(vars(self))
        checks.words(vars(self))
        checks.schedule(self.lr_scheduler_type, vars(self)["lr_scheduler_kwargs"])
        if not 0 < self.test_size < 1:
            raise ValueError(f"--test_size {self.test_size}: give a share between 0 and 1")


@dataclass
class LoraArguments:
    """LoRA adapters."""

    lora_r: int = field(default=8, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "Adapters are scaled by lora_alpha / lora_r."})
    lora_target_modules: str = field(
        default="all-linear", metadata={"help": "Names of layers with adapters, separated by commas, or all-linear."}
    )

    def lora_config(self) -> LoraConfig:
        """Return PEFT's configuration."""
        modules: Any = self.lora_target_modules
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            target_modules=modules if modules == "all-linear" else modules.split(","),
            task_type="CAUSAL_LM",
        )


def small_gpt2(folder: Path, settings: Sequence[str]) -> str:
    """Return the folder of a GPT-2 that pretrain_gpt2.py trains on the embedded corpus, once."""
    if not (folder / "metrics.json").is_file():
        print(f"pretraining a small GPT-2 in {folder}, once")
        pretrain_gpt2.main([*settings, "--cpu_threads", str(torch.get_num_threads()), "--output_dir", str(folder)])
    return str(folder)


def load_dataset(args: RecipeArguments) -> datasets.DatasetDict:
    """Return the data set that the arguments name."""
    return datasets.load_dataset(args.dataset_name, args.dataset_config, revision=args.dataset_revision)


def split(parts: datasets.DatasetDict, test_size: float, **settings: Any) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return what to train on and what is held out: the same rows in runs of any seed."""
    held_out = next((name for name in ("validation", "valid", "val", "test") if name in parts), None)
    if "train" in parts and held_out:
        return parts["train"], parts[held_out]
    parts = next(iter(parts.values())).train_test_split(test_size, seed=0, **settings)
    return parts["train"], parts["test"]


def train(trainer: Any, name: str, general: datasets.Dataset | None = None, **card: Any) -> dict[str, Any]:
    """Train, evaluate, and leave model, model card and metrics.json in the output folder; return metrics.json.

    Args:
        trainer: with an evaluation set.
        name: of the data, for metrics.json.
        general: further data to evaluate on at the end, as `general_loss` and so on; None: none.
        **card: for `trainer.create_model_card`.

    Raises:
        ValueError: the output folder holds a finished run, or this one diverged.
    """
    args, output = trainer.args, Path(trainer.args.output_dir)
    if (output / "metrics.json").exists():
        raise ValueError(f"{output} holds a finished run; give another --output_dir, or delete it")
    checks.batch("per_device_train_batch_size", args.per_device_train_batch_size, len(trainer.train_dataset))
    checks.batch("per_device_eval_batch_size", args.per_device_eval_batch_size, len(trainer.eval_dataset))
    if metric := args.metric_for_best_model:
        measured = trainer.evaluate()
        if f"eval_{metric.removeprefix('eval_')}" not in measured:
            raise ValueError(f"--metric_for_best_model {metric} is none of {', '.join(measured)}")
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    evaluation = trainer.evaluate()
    if not math.isfinite(evaluation["eval_loss"]):
        raise ValueError(f"the held-out loss is non-finite; give a --learning_rate below {args.learning_rate}")
    if general is not None:
        evaluation |= trainer.evaluate(general, metric_key_prefix="general")
    sizes = {param: param.numel() for param in trainer.model.parameters()}
    metrics = {
        **{key: getattr(args, key) for key in ("optim", "optim_args", "learning_rate", "seed")},
        "dataset": name,
        "parameters": sum(sizes.values()),
        "trainable_parameters": sum(size for param, size in sizes.items() if param.requires_grad),
        "steps": trainer.state.global_step,
        "train_loss": result.training_loss,
        "train_runtime_seconds": result.metrics["train_runtime"],
        **evaluation,
    }
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        trainer.create_model_card(**card)
        (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(f"model, model card and metrics.json are in {output}")
    if args.push_to_hub:
        trainer.push_to_hub(**card)
    trainer.accelerator.end_training()
    return metrics
