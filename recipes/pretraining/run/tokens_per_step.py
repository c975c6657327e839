"""Hold a run to the tokens of an optimizer step that its config states, whatever the number of processes."""

from __future__ import annotations

from transformers import TrainingArguments

from pretraining.run.arguments import RunArguments


def count(training: TrainingArguments, block_size: int) -> int:
    """Return the tokens of an optimizer step: of all processes, devices and accumulation steps."""
    return training.train_batch_size * training.gradient_accumulation_steps * training.world_size * block_size


def check(run: RunArguments) -> None:
    """Raise ValueError if the run's tokens of a step are not its `tokens_per_step`; the message says what to change."""
    training, block, stated = run.training, run.model.block_size, run.training.tokens_per_step
    if not stated or (found := count(training, block)) == stated:
        return
    raise ValueError(
        f"a step has {found:,} tokens ({training.train_batch_size} sequences x {training.gradient_accumulation_steps} "
        f"accumulation steps x {training.world_size} processes x {block:,} tokens), but tokens_per_step is {stated:,}; "
        f"{_remedy(training, block, stated)}, or --tokens_per_step 0 for any number"
    )


def _remedy(training: TrainingArguments, block: int, stated: int) -> str:
    devices = max(1, training.n_gpu)  # of this process
    processes, batch = training.world_size, training.per_device_train_batch_size
    micro_batches, rest = divmod(stated, block * processes * devices)
    if rest:
        sequences, rest = divmod(stated, block)
        if rest:
            return f"give a --block_size that divides {stated:,}"
        near = max(number for number in range(1, processes * devices + 1) if sequences % number == 0)
        return f"{processes * devices} devices cannot share {sequences:,} sequences evenly: launch {near}"
    # The largest batch that fits where the configured one fits.
    fitting = max(size for size in range(1, batch + 1) if micro_batches % size == 0)
    smaller = "" if fitting == batch else f"--per_device_train_batch_size {fitting} "
    return f"give {smaller}--gradient_accumulation_steps {micro_batches // fitting}"
