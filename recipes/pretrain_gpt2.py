#!/usr/bin/env python
"""Pretrain GPT-2 with MARS.

    accelerate launch recipes/pretrain_gpt2.py                       # 2 CPU cores, no network, a few minutes
    accelerate launch recipes/pretrain_gpt2.py --optimizer adamw     # the same budget with torch's AdamW
    accelerate launch recipes/pretrain_gpt2.py --is_approx false     # exact MARS: two gradients a step
    accelerate launch recipes/pretrain_gpt2.py --optimizer mars_adamw    # or mars_lion, mars_shampoo
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/pretrain_gpt2.py \
        --config gpt2-small --data_dir data/openwebtext              # the paper's run, on prepared tokens

The command line overrides any setting of a config; --help lists them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from pretraining.data import embedded, token_files
from pretraining.data.token_files import TokenDataset
from pretraining.run import (
    arguments,
    evaluation,
    folder_lock,
    identity,
    model,
    optimizers,
    report,
    resuming,
    tokens_per_step,
)
from pretraining.run.errors import one_line_errors
from pretraining.run.gamma_schedule import GammaSchedule
from pretraining.run.stopping import Stopping
from pretraining.run.trainer import PretrainingTrainer, optimizer_steps
from transformers import default_data_collator, set_seed

import mars_hf
from mars_hf.summary import summary


@one_line_errors("pretrain_gpt2.py")
def main(argv: list[str] | None = None) -> None:
    """Train; `argv` is the command line without the program's name."""
    train(argv)


def train(
    argv: list[str] | None = None, prepare: Callable[[PretrainingTrainer], None] | None = None
) -> arguments.RunArguments:
    """Train and return the run's arguments; `prepare` gets the Trainer before it trains. See `main`."""
    run = arguments.parse(argv)
    training = run.training
    output = Path(str(training.output_dir))
    _check_processes(training)
    tokens_per_step.check(run)
    is_main = training.process_index == 0
    with contextlib.ExitStack() as stack:
        output.parent.mkdir(parents=True, exist_ok=True)
        resuming.on_main(training, lambda: stack.enter_context(folder_lock.held(output, "trains")))
        _train(run, output, is_main, prepare)
    return run


def _omp_num_threads_is_set() -> bool:
    """Whether the user has set OMP_NUM_THREADS; launchers give it to their workers unasked, but not to themselves."""
    is_launched = not os.environ.keys().isdisjoint({"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"})
    try:
        environment = psutil.Process(os.getppid()).environ() if is_launched else os.environ
    except psutil.Error:
        environment = {}
    return "OMP_NUM_THREADS" in environment


def _train(
    run: arguments.RunArguments, output: Path, is_main: bool, prepare: Callable[[PretrainingTrainer], None] | None
) -> None:
    training = run.training
    set_seed(training.seed)
    if training.device.type == "cpu" and (training.cpu_threads or not _omp_num_threads_is_set()):
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(training.cpu_threads or max(1, (os.cpu_count() or 1) // processes))

    with training.main_process_first(desc="preparing data"):
        directory = Path(run.data.data_dir) if run.data.data_dir else _embedded(output, run.data)
        source = token_files.load(directory, verify=run.data.verify_data and training.local_process_index == 0)
    block = run.model.block_size
    train_set = TokenDataset(directory, "train", block)
    if training.max_steps <= 0:
        training.max_steps = optimizer_steps(training, len(train_set))
    settings = identity.settings_of(run, source.identity, training.world_size)
    start = resuming.choose(training, output, settings)
    if start.is_complete:
        return

    eval_set = TokenDataset(directory, "val", block, run.data.max_eval_blocks)
    random_blocks = run.data.official_eval_blocks
    official_set = evaluation.RandomBlocks(directory, block, random_blocks) if random_blocks else None
    gpt2 = model.build(run.model, len(source.tokenizer), source.tokenizer.eos_token_id)
    if start.checkpoint:  # what step 0 gave is in the log
        training.eval_on_start = False

    optimizer = optimizers.for_trainer(run.optimizer, training)
    mars = run.optimizer.optimizer.startswith("mars_")
    approx = vars(run.optimizer)["is_approx"] is not False if mars else None
    facts: dict[str, Any] = {"license": training.license, "dataset": source.name}
    if "/" in source.name:  # a name on the Hub: files are named without their folder
        facts["dataset_tags"] = source.name
    trainer = PretrainingTrainer(
        model=gpt2,
        args=training,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=source.tokenizer,
        data_collator=default_data_collator,
        optimizer_cls_and_kwargs=optimizer,
        callbacks=[
            mars_hf.NonFiniteCallback(training.nonfinite_patience),
            *([GammaSchedule(run.optimizer.gamma_schedule), mars_hf.LastGradientCallback()] if mars else []),
        ],
        run=start.run,
        resumed=start.manifest,
    )
    stopping = Stopping(trainer.accelerator)
    trainer.add_callback(stopping)
    if prepare is not None:
        prepare(trainer)
    per_step = tokens_per_step.count(training, block)
    if is_main:
        _introduce(run, source, train_set, gpt2, optimizer, per_step)

    try:
        result = trainer.train(resume_from_checkpoint=start.checkpoint and str(start.checkpoint))
    except mars_hf.NonFiniteError as error:
        raise ValueError(str(error)) from error
    finally:
        stopping.close()
    if stopping.reason:
        if is_main:
            step, steps = trainer.state.global_step, trainer.state.max_steps
            folder = output / f"checkpoint-{step}"
            saved = "is saved" if folder.is_dir() else "is not saved, because the step was not finite"
            print(
                f"\nstopped by {stopping.reason} after step {step} of {steps}; {folder} {saved}: go on with "
                "--resume_from_checkpoint true"
            )
        trainer.accelerator.end_training()
        return
    if not any("eval_loss" in row and row["step"] == trainer.state.global_step for row in trainer.state.log_history):
        trainer.evaluate()
    official = None
    if official_set:
        official = evaluation.measure(
            trainer.model_wrapped,
            official_set,
            trainer.accelerator,
            batch_size=training.per_device_eval_batch_size,
            name="official_loss",
        )
    gpt2.config.use_cache = True  # Trainer turns it off for training
    trainer.save_model()
    trainer.save_state()
    if is_main:
        assert trainer.optimizer is not None
        metrics = report.summarize(
            trainer.state.log_history,
            bytes_per_token=source.bytes_per_token,
            tokens_per_step=per_step,
            train_runtime=result.metrics["train_runtime"],
        )
        metrics |= evaluation.as_metrics(official) if official else {}
        header = {
            "optimizer": run.optimizer.optimizer,
            "is_approx": approx,
            "learning_rate": training.learning_rate,
            "weight_decay": training.weight_decay,
            "seed": training.seed,
            "dataset": source.name,
            "parameters": gpt2.num_parameters(),
            "groups": report.groups(trainer.optimizer.param_groups),
        }
        trainer.create_model_card(**facts)
        report.write(output / "metrics.json", {**header, **metrics})  # last: it marks the run as complete
        _conclude(output, metrics)
    if training.push_to_hub:
        trainer.push_to_hub(**facts)
    if is_main and training.sample_tokens > 0:
        text = report.sample(gpt2, source.tokenizer, training.sample_prompt, training.sample_tokens, training.seed)
        print(f"\n--- sample ---\n{text}\n--------------")
    trainer.accelerator.end_training()  # gloo threads left running at exit sometimes abort the process


def _check_processes(training: arguments.PretrainingArguments) -> None:
    """Stop if launched processes are not connected: each would train alone, into the same folder."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != training.world_size:
        raise ValueError(
            f"{launched} processes were launched, but each sees {training.world_size}: a config for GPUs on a machine "
            "without them? Use accelerate_configs/cpu_ddp.yaml and --use_cpu true on CPU"
        )


def _embedded(output: Path, settings: arguments.DataArguments) -> Path:
    return embedded.prepare(output.absolute().parent / "data", settings.embedded_vocab_size, settings.embedded_corpus)


def _introduce(
    run: arguments.RunArguments,
    source: token_files.Data,
    train_set: TokenDataset,
    gpt2: Any,
    optimizer: Any,
    per_step: int,
) -> None:
    """Print the run's settings."""
    steps = run.training.max_steps
    print(f"config      {run.config}")
    print(f"data        {source.name}: {len(train_set.tokens):,} training tokens")
    print(f"model       {gpt2.num_parameters():,} parameters, {dataclasses.asdict(run.model)}")
    print(f"batch       {per_step:,} tokens a step, {steps:,} steps, {per_step * steps:,} tokens")
    make, settings = optimizer
    if not run.optimizer.optimizer.startswith("mars_"):
        print(f"optimizer   {make()(gpt2, **settings)}")
    else:
        groups = make()(gpt2, **settings).param_groups
        approx = groups[0]["is_approx"]
        print(f"mars        is_approx={approx}: {'one gradient' if approx else 'two gradients'} a step")
        print(summary(groups))
    sys.stdout.flush()


def _conclude(output: Path, metrics: dict[str, Any]) -> None:
    """Print the run's results."""
    first = metrics["eval_loss_at_step_0"]
    print(f"\nheld-out loss     {metrics['eval_loss']:.4f}" + (f"  (step 0: {first:.4f})" if first else ""))
    if "official_loss" in metrics:
        print(f"official loss     {metrics['official_loss']:.4f}  ({metrics['official_blocks']:,} random blocks)")
    print(f"perplexity        {metrics['perplexity']:.2f}")
    print(f"bits per byte     {metrics['bits_per_byte']:.4f}")
    print(f"tokens per second {metrics['tokens_per_second']:,.0f}")
    print(f"checkpoint, model card and metrics.json are in {output}")


if __name__ == "__main__":
    main()
