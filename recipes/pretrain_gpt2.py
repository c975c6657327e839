#!/usr/bin/env python
"""Pretrain GPT-2, or a Llama, with MARS.

    accelerate launch recipes/pretrain_gpt2.py                       # 2 CPU cores, no network, a few minutes
    accelerate launch recipes/pretrain_gpt2.py --optimizer adamw     # the same budget with torch's AdamW
    accelerate launch recipes/pretrain_gpt2.py --is_approx false     # exact MARS: two gradients a step
    accelerate launch recipes/pretrain_gpt2.py --optimizer mars_adamw    # or mars_lion, mars_shampoo
    accelerate launch recipes/pretrain_gpt2.py --config llama        # grouped-query attention; --model_type phi3 fuses
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/pretrain_gpt2.py \
        --config gpt2-small --data_dir data/openwebtext              # the paper's run, on prepared tokens

The command line overrides any setting of a config; --help lists them all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretraining.data import embedded, token_files
from pretraining.data.token_files import TokenDataset
from pretraining.run import arguments, model, optimizers, processes, report, resuming
from pretraining.run.arguments import RunArguments
from pretraining.run.errors import one_line_errors
from pretraining.run.resuming import PretrainingTrainer
from pretraining.run.torch_optimizers import GammaSchedule
from transformers import default_data_collator, set_seed

import mars_hf
from mars_hf.compare.files import locked, write_json
from mars_hf.groups.summary import summary


@one_line_errors("pretrain_gpt2.py")
def main(argv: list[str] | None = None) -> None:
    """Train; `argv` is the command line without the program's name."""
    train(argv)


def train(argv: list[str] | None = None, prepare: Callable[[PretrainingTrainer], None] | None = None) -> RunArguments:
    """Train and return the run's arguments; `prepare` gets the Trainer before it trains. See `main`."""
    run = arguments.parse(argv)
    processes.check(run.training)
    processes.tell_of_idle_gpu(run.training)
    run.check_tokens()
    output = Path(str(run.training.output_dir))
    with contextlib.ExitStack() as stack:
        processes.on_main(run.training, lambda: stack.enter_context(locked(output, "trains")))
        _train(run, output, prepare)
    return run


def _train(run: RunArguments, output: Path, prepare: Callable[[PretrainingTrainer], None] | None) -> None:
    training = run.training
    set_seed(training.seed)
    processes.set_threads(training, training.cpu_threads)

    # Data.
    with training.main_process_first(desc="preparing data"):
        beside, size, corpus = output.absolute().parent / "data", run.data.embedded_vocab_size, run.data.embedded_corpus
        directory = Path(run.data.data_dir) if run.data.data_dir else embedded.prepare(beside, size, corpus)
        source = token_files.load(directory)
    train_set = TokenDataset(directory, "train", run.model.block_size)
    eval_set = TokenDataset(directory, "val", run.model.block_size, run.data.max_eval_blocks)

    # A new run, or a checkpoint of this one.
    settings = resuming.settings_of(run, source.identity)
    resume = processes.on_main(training, lambda: resuming.choose(training, output, settings))
    if resume.is_complete:
        return
    if resume.checkpoint:
        training.eval_on_start = False  # what step 0 gave is in the log

    # Model and optimizer.
    network = model.build(run.model, len(source.tokenizer), source.tokenizer.eos_token_id)
    optimizer = optimizers.for_trainer(run.optimizer, training)
    is_mars = run.optimizer.optimizer.startswith("mars_")

    # Trainer.
    is_on_hub = "/" in source.name  # files are named without their folder
    card_facts: dict[str, Any] = {"dataset": source.name, "dataset_tags": source.name if is_on_hub else None}
    callbacks: list[Any] = [mars_hf.NonFiniteCallback(training.nonfinite_patience)]
    if is_mars:
        callbacks += [GammaSchedule(run.optimizer.gamma_schedule), mars_hf.LastGradientCallback()]
    trainer = PretrainingTrainer(
        model=network,
        args=training,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=source.tokenizer,
        data_collator=default_data_collator,
        optimizer_cls_and_kwargs=optimizer,
        callbacks=callbacks,
    )
    stopping = processes.Stopping(trainer.accelerator)
    trainer.add_callback(stopping)
    if prepare is not None:
        prepare(trainer)
    if trainer.is_world_process_zero():
        print_settings(run, source.name, train_set, network, optimizer)

    # Train.
    try:
        result = trainer.train(resume_from_checkpoint=resume.checkpoint and str(resume.checkpoint))
    except mars_hf.NonFiniteError as error:
        what = str(error).partition(". ")[0]  # its advice is for scripts that load any weights
        raise ValueError(
            f"{what}. Start again with a lower --learning_rate and another --output_dir; resuming keeps the rate"
        ) from error
    if stopping.reason:
        if trainer.is_world_process_zero():
            print_stopped(trainer, stopping.reason)
        trainer.accelerator.end_training()
        return
    if trainer.state.global_step == 0:
        raise ValueError("no step was made: no epochs, or fewer tokens than a batch and --dataloader_drop_last true")
    if not any("eval_loss" in row and row["step"] == trainer.state.global_step for row in trainer.state.log_history):
        trainer.evaluate()
    loss = next(row["eval_loss"] for row in reversed(trainer.state.log_history) if "eval_loss" in row)
    if not math.isfinite(loss):
        raise ValueError(
            f"the held-out loss is {loss}; start again with a lower --learning_rate (now {training.learning_rate}), or "
            "the usual --eps, and another --output_dir"
        )

    # Report.
    network.config.use_cache = True  # Trainer turns it off for training
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        metrics = report.summarize(
            trainer.state.log_history,
            bytes_per_token=source.bytes_per_token,
            tokens_per_step=run.count_tokens(),
            train_runtime=result.metrics["train_runtime"],
            first_step=resume.step,
        )
        header = {
            "optimizer": run.optimizer.optimizer,
            "is_approx": vars(run.optimizer)["is_approx"] is not False if is_mars else None,
            "learning_rate": training.learning_rate,
            "weight_decay": training.weight_decay,
            "seed": training.seed,
            "dataset": source.name,
            "parameters": network.num_parameters(),
        }
        adamw = report.recorded_adamw(run)
        report.draw_losses(trainer.state.log_history, adamw, output / "losses.png")
        trainer.create_model_card(**card_facts)
        write_json(output / resuming.RESULT, {**header, **metrics})  # last: it marks the run as complete
        print_results(output, metrics, adamw[-1][1] if adamw else None)
    if training.push_to_hub:
        trainer.push_to_hub(**card_facts)
    if trainer.is_world_process_zero() and training.sample_tokens > 0:
        text = report.sample(network, source.tokenizer, training.sample_prompt, training.sample_tokens, training.seed)
        print(f"\n--- sample ---\n{text}\n--------------")
    trainer.accelerator.end_training()


def print_settings(run: RunArguments, name: str, train_set: TokenDataset, network: Any, optimizer: Any) -> None:
    """Print the run's settings."""
    make, settings = optimizer
    made = make()(network, **settings)
    steps, per_step = run.training.max_steps, run.count_tokens()
    about = f"optimizer   {made}"
    if isinstance(made, mars_hf.Mars):
        gradients = "one gradient" if made.param_groups[0]["is_approx"] else "two gradients"
        about = f"mars        is_approx={gradients == 'one gradient'}: {gradients} a step\n{summary(made.param_groups)}"
    print(
        f"config      {run.config}\n"
        f"data        {name}: {len(train_set.tokens):,} training tokens\n"
        f"model       {network.num_parameters():,} parameters: {model.describe(run.model)}\n"
        f"batch       {per_step:,} tokens a step, {steps:,} steps, {per_step * steps:,} tokens\n{about}",
        flush=True,
    )


def print_stopped(trainer: PretrainingTrainer, reason: str) -> None:
    """Print where a run was stopped, and how to go on."""
    step, steps = trainer.state.global_step, trainer.state.max_steps
    folder = Path(str(trainer.args.output_dir)) / f"checkpoint-{step}"
    saved = "is saved" if folder.is_dir() else "is not saved, because the step was not finite"
    where = f"stopped by {reason} after step {step} of {steps}; {folder} {saved}"
    print(f"\n{where}: go on with --resume_from_checkpoint true")


def print_results(output: Path, metrics: dict[str, Any], adamw: float | None) -> None:
    """Print the run's results, and in the default job where AdamW ends."""
    first = metrics["eval_loss_at_step_0"]
    of_adamw = "" if adamw is None else f"AdamW ends at     {adamw:.4f}  (in this job; mean of recorded runs)\n"
    print(
        f"\nheld-out loss     {metrics['eval_loss']:.4f}{f'  (step 0: {first:.4f})' if first else ''}\n{of_adamw}"
        f"perplexity        {metrics['perplexity']:.2f}\n"
        f"bits per byte     {metrics['bits_per_byte']:.4f}\n"
        f"tokens per second {metrics['tokens_per_second']:,.0f}\n"
        f"checkpoint, model card, losses.png and metrics.json are in {output}"
    )


if __name__ == "__main__":
    main()
    processes.leave()
