"""The recipe's Trainer: whole checkpoints, and a log that no interruption changes.

It reads and sets what Trainer keeps to itself: the sums of losses not yet logged (`_tr_loss`, `_total_loss_scalar`,
`_globalstep_last_logged`, `_initial_global_step`), which no checkpoint of Trainer's has, and overrides
`_save_checkpoint` and `_run_epoch`.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

import mars_hf
from pretraining.run import checkpoints
from pretraining.run.run_folder import Run


def optimizer_steps(training: TrainingArguments, samples: int) -> int:
    """Return the optimizer steps of `num_train_epochs` epochs, as Trainer counts them.

    Args:
        training: batch sizes, processes and epochs.
        samples: samples of one epoch, of all processes.
    """
    rounded = math.floor if training.dataloader_drop_last else math.ceil
    batches = rounded(rounded(samples / training.train_batch_size) / training.world_size)
    steps = max(1, math.ceil(batches / training.gradient_accumulation_steps))
    return math.ceil(training.num_train_epochs * steps)


class PretrainingTrainer(mars_hf.MarsTrainer):
    """MarsTrainer whose checkpoints are sealed and whose interrupted runs log what an uninterrupted one logs.

    It also runs AdamW.

    Args:
        *args: see MarsTrainer.
        run: the run; checkpoints carry its id and settings.
        resumed: manifest of the checkpoint that training goes on from; None for a new run.
        **kwargs: see MarsTrainer.
    """

    def __init__(
        self,
        *args: Any,
        run: Run,
        resumed: checkpoints.Manifest | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the Trainer; see the class."""
        super().__init__(*args, **kwargs)
        self._run = run
        self._resumed = resumed
        self.step_batches: list[Any] = []
        self._seconds_before = float(resumed.progress.get("seconds", 0.0)) if resumed else 0.0
        self._began = time.monotonic()
        # Trainer would delete old checkpoints before the new one is sealed.
        self._limit, self.args.save_total_limit = self.args.save_total_limit, None
        self.add_callback(_Restoring(self))

    def restore_progress(self) -> None:
        """Take up the sums of losses where the checkpoint left them."""
        self._began = time.monotonic()
        progress = self._resumed.progress if self._resumed else {}
        if "unlogged_losses" not in progress:
            return
        sums = progress["unlogged_losses"]
        own = sums[self.args.process_index] if len(sums) == self.args.world_size else sum(sums) / len(sums)
        self._tr_loss = torch.tensor(own, device=self.args.device)
        self._total_loss_scalar = progress["logged_losses"]
        self._globalstep_last_logged = progress["last_logged_step"]
        self._initial_global_step = 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log like Trainer; the row at the end counts the seconds of all sessions."""
        if "train_runtime" in logs:
            seconds = self._seconds_before + logs["train_runtime"]
            share = logs["train_runtime"] / seconds if seconds else 1.0
            logs["train_runtime"] = round(seconds, 4)
            # Trainer counts the steps of all sessions, because `_initial_global_step` is 0.
            for name in ("train_samples_per_second", "train_steps_per_second"):
                if name in logs:
                    logs[name] = round(logs[name] * share, 3)
        super().log(logs, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step from Trainer, and keep them for a callback that looks at them."""
        self.step_batches, num_items = super().get_batch_samples(*args, **kwargs)
        return self.step_batches, num_items

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch; Trainer would make one step more of a run that has made all of its steps."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, seal it, and only then delete older ones."""
        output = Path(str(self.args.output_dir))
        folder = output / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero() and folder.exists():  # left by a run that was killed while writing it
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        losses = self.accelerator.gather(self._tr_loss.detach().reshape(1).float())
        self.accelerator.wait_for_everyone()  # all ranks' files are there
        if not self.is_world_process_zero():
            return
        progress = {
            "seconds": self._seconds_before + time.monotonic() - self._began,
            "unlogged_losses": losses.tolist(),
            "logged_losses": self._total_loss_scalar,
            "last_logged_step": self._globalstep_last_logged,
        }
        step = self.state.global_step
        checkpoints.seal(folder, run=self._run.id, step=step, settings=self._run.settings, progress=progress)
        best = self.state.best_model_checkpoint
        checkpoints.rotate(output, self._limit, keep=Path(best) if best else None)


class _Restoring(TrainerCallback):
    """Restore progress after Trainer has set it to zero, and before the first step."""

    def __init__(self, trainer: PretrainingTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.restore_progress()
