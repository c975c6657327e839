"""Train with a Trainer and leave model, model card and metrics.json in the output folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
from pretraining.run import report, resuming
from pretraining.run.errors import one_line
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import mars_hf
from mars_hf.distributed.shards import shape_of


@contextlib.contextmanager
def output_folder(training: TrainingArguments) -> Iterator[None]:
    """Hold the output folder for a block; what an earlier run left there moves into earlier-1, or the next."""
    output = Path(str(training.output_dir))
    checkpoint = training.resume_from_checkpoint
    if checkpoint is not None and not Path(checkpoint).is_dir():
        raise ValueError(f"--resume_from_checkpoint {checkpoint}: no such folder; give that of a checkpoint")
    with contextlib.ExitStack() as stack:
        output.parent.mkdir(parents=True, exist_ok=True)
        resuming.on_main(training, lambda: stack.enter_context(resuming.locked(output, "trains")))
        if checkpoint is None:
            resuming.on_main(training, lambda: resuming.begin(output, {}))
        yield


def trainer_class(training: TrainingArguments) -> Callable[..., Trainer]:
    """Return MarsTrainer, or Trainer where `--optim` names an optimizer other than MARS."""
    return mars_hf.MarsTrainer if OptimizerNames(training.optim).value.startswith("mars_") else Trainer


@contextlib.contextmanager
def loading(what: str, remedy: str) -> Iterator[None]:
    """Turn what a loader of datasets or transformers raises into a ValueError.

    Args:
        what: the flag and its value.
        remedy: what to do.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{what}: {one_line(error)}; {remedy}") from error


def load_splits(
    name: str,
    config: str | None,
    *,
    test_size: float,
    accepts: Callable[[Sequence[str]], bool],
    accepted: str,
) -> tuple[str, datasets.Dataset, datasets.Dataset]:
    """Return a data set's name, its rows to train on and those held out.

    Args:
        name: folder or name on the Hub.
        config: configuration of the data set; None: its only one.
        test_size: share to hold out where there is no split `test`, with seed 0.
        accepts: tells of the names of the columns whether the recipe can use them.
        accepted: what it accepts, for the message.

    Raises:
        ValueError: there are no such data, or their columns are others.
    """
    flag = f"--dataset_name {name}"
    with loading(flag, "check the name, and that the Hub is in reach; or give a folder"):
        splits = datasets.load_dataset(name, config)
    first = next(iter(splits.values()))
    if not accepts(first.column_names):
        raise ValueError(f"{flag}: columns {', '.join(first.column_names)}; accepted: {accepted}")
    if "train" in splits and "test" in splits:
        return name, splits["train"], splits["test"]
    with loading(f"--test_size {test_size}", "give another share"):
        split = first.train_test_split(test_size, seed=0)
    return name, split["train"], split["test"]


def train(trainer: Any, name: str, **card_facts: Any) -> dict[str, Any]:
    """Train, evaluate, and save the model, its card and metrics.json.

    Args:
        trainer: with an evaluation set.
        name: of the data.
        **card_facts: for `trainer.create_model_card`.

    Returns:
        The content of metrics.json: settings, and every number of the last evaluation.

    Raises:
        ValueError: loss or gradients stayed non-finite.
    """
    training = trainer.args
    try:
        result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    except mars_hf.NonFiniteError as error:
        raise ValueError(str(error)) from error
    history = trainer.state.log_history
    if not any("eval_loss" in row and row["step"] == trainer.state.global_step for row in history):
        trainer.evaluate()
    evaluations = [row for row in history if "eval_loss" in row]
    losses = [row["loss"] for row in history if "loss" in row]
    groups = trainer.optimizer.param_groups
    sizes = [(math.prod(shape_of(param)), param.requires_grad) for param in trainer.model.parameters()]
    metrics = {
        "optimizer": training.optim.value,
        "optim_args": training.optim_args,
        "learning_rate": training.learning_rate,
        "seed": training.seed,
        "dataset": name,
        "parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(size for size, trains in sizes if trains),
        "groups": report.groups(groups) if "mars_type" in groups[0] else None,
        "steps": trainer.state.global_step,
        "train_loss": losses[-1] if losses else None,
        **evaluations[-1],
        "at_step_0": evaluations[0] if evaluations[0]["step"] == 0 else None,
        "train_runtime_seconds": result.metrics["train_runtime"],
    }
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        trainer.create_model_card(**card_facts)
        report.write(Path(training.output_dir) / "metrics.json", metrics)
    if training.push_to_hub:
        trainer.push_to_hub(**card_facts)
    trainer.accelerator.end_training()
    return metrics


def conclude(trainer: Any, metrics: dict[str, Any], *names: str) -> None:
    """Print metrics of the last evaluation, each with its value at step 0."""
    if not trainer.is_world_process_zero():
        return
    before = metrics["at_step_0"] or {}
    print()
    for name in names:
        key = f"eval_{name}"
        first = f"  (step 0: {before[key]:.4f})" if key in before else ""
        print(f"held-out {name.replace('_', ' '):<12} {metrics[key]:.4f}{first}")
    print(f"model, model card and metrics.json are in {trainer.args.output_dir}")
