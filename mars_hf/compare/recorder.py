"""In the process of a run: record its training, without changing it."""

from __future__ import annotations

import copy
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback

from mars_hf.compare.files import plain
from mars_hf.compare.order import Order, Refused
from mars_hf.distributed.tensors import local
from mars_hf.optimizer import Mars
from mars_hf.training.guard import unwrap_optimizer
from mars_hf.training.nonfinite import NonFiniteCallback

Row = dict[str, Any]

_KEPT_ON_DEVICE = 200  # losses, before they are read
_NOT_METRICS = ("_runtime", "_per_second", "_time", "epoch", "_num_tokens")


class NonFiniteLosses(NonFiniteCallback):
    """Stop arms of other optimizers where MARS's would stop, by losses alone: no pass over the gradients."""

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Look at nothing."""


class Recorder(TrainerCallback):
    """Record the training of one Trainer, as one of its callbacks.

    Args:
        trainer: gets one that stops at non-finite losses, too, if it has none.
        order: of the run.
        row: of result.json, to fill; it is empty until the training begins.
        write: write result.json, now or when it is due.
        made_by_trainer: optimizers of MARS that a Trainer has made from its arguments.
    """

    def __init__(
        self,
        trainer: Trainer,
        order: Order,
        row: Row,
        write: Callable[[bool], None],
        made_by_trainer: Container[Any],
    ) -> None:
        """Record nothing yet."""
        self.trainer, self.order, self.row, self.write = trainer, order, row, write
        self.made_by_trainer = made_by_trainer
        self._step_loss: Tensor | None = None
        self._losses: list[Tensor] = []
        self._done = 0  # steps
        self._first_step_end = self._evaluating = 0.0
        self._stop: NonFiniteLosses | None = None
        if not any(isinstance(callback, NonFiniteCallback) for callback in trainer.callback_handler.callbacks):
            self._stop = NonFiniteLosses()
            trainer.add_callback(self._stop)
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Begin, if the optimizer is the one asked for; a training begins anew with auto_find_batch_size."""
        inner, model = unwrap_optimizer(optimizer), kwargs["model"]
        self._check_optimizer(inner, args)
        self._check_rate(inner, args)
        trainable = [param for param in model.parameters() if param.requires_grad]
        self.row |= {
            "trainer": type(self.trainer).__name__,
            "optimizer": type(inner).__name__,
            "parameters": sum(param.numel() for param in model.parameters()),
            "trainable": sum(param.numel() for param in trainable),
            "width": _width(model, trainable),
            "arguments": plain(args.to_dict()),
            "weights": _fingerprint([local(param.detach()).float().sum() for param in trainable]),
            "batch": None,
            "steps": 0,
            "seconds_per_step": None,
            "samples_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "evaluations": [],
            "losses": [],
            "memory": None,
            "ended": False,
        }
        self._losses, self._step_loss, self._done = [], None, 0
        self.write(True)

    def _check_optimizer(self, optimizer: Any, args: Any) -> None:
        """Raise Refused if the script made an optimizer that is not the arm's, or ignores the arm's settings."""
        asked = self.order.arm.get("optim")
        if asked is None:
            return
        if self.order.with_mars:
            is_it = isinstance(optimizer, Mars) and optimizer in self.made_by_trainer
        elif self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled:
            return  # their wrappers
        else:
            model, without = self.trainer.model, copy.copy(args)
            kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
            texts = (self.order.arm.get("optim_args") or "").split(",")
            for text in filter(None, texts):
                without.optim_args = ",".join(other for other in texts if other != text)
                if Trainer.get_optimizer_cls_and_kwargs(without, model)[1] == settings:  # type: ignore[arg-type]
                    raise Refused(f"{text} changes nothing in {asked}; correct its name, or leave it out")
            is_it = not isinstance(kind, type) or isinstance(optimizer, kind)
        if not is_it:
            raise Refused(
                f"the script makes its own optimizer, {type(optimizer).__name__}, where {asked} was asked for: no "
                "other can be compared there; leave that to its TrainingArguments"
            )

    def _check_rate(self, optimizer: Any, args: Any) -> None:
        """Raise Refused if the learning rate has not reached the optimizer: a search of it would be of nothing."""
        groups = getattr(optimizer, "param_groups", [])
        rates = {float(group[name]) for group in groups for name in ("initial_lr", "lr") if group.get(name) is not None}
        if rates and not any(math.isclose(rate, float(args.learning_rate), rel_tol=1e-6) for rate in rates):
            raise Refused(
                f"learning_rate={args.learning_rate:g} of the TrainingArguments does not reach "
                f"{type(optimizer).__name__}, whose rates are {', '.join(f'{rate:g}' for rate in sorted(rates))}: "
                "there is nothing to search; let the script give learning_rate to its optimizer"
            )

    def see_batch(self, inputs: Any) -> None:
        """Remember the first batch: arms of one seed must begin with the same."""
        if self.row["batch"] is None:
            self.row["batch"] = _fingerprint(list(_sums(inputs)))

    def add_loss(self, loss: Any) -> None:
        """Add a micro-batch's loss to its step's, which is their sum."""
        if self._stop is not None:
            self._stop.watch("loss", loss)
        if isinstance(loss, Tensor):
            loss = loss.detach()
            self._step_loss = loss if self._step_loss is None else self._step_loss + loss

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step, and keep its loss where it is: reading it would wait for the device."""
        if self._step_loss is not None:
            self._losses.append(self._step_loss)
            self._step_loss = None
        self.row["steps"], now = state.global_step, time.monotonic()
        self._done += 1
        if self._done == 1:  # the first compiles and warms up
            self._first_step_end, self._evaluating = now, 0.0
        else:
            self.row["seconds_per_step"] = (now - self._first_step_end - self._evaluating) / (self._done - 1)
        if len(self._losses) >= _KEPT_ON_DEVICE:
            self._read_losses()
        self.write(False)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Add an evaluation; the script may evaluate after training, too."""
        if not metrics:
            return
        self._evaluating += sum(value for name, value in metrics.items() if name.endswith("_runtime"))
        new = {name: float(value) for name, value in metrics.items() if _is_metric(name, value)}
        if not any(name.startswith("eval_") for name in new):
            return
        same = [row for row in self.row["evaluations"] if row["step"] == state.global_step]
        if same:  # of another eval_dataset
            same[0].update(new)
        else:
            self.row["evaluations"].append({"step": state.global_step, **new})
        self.write(True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the row; evaluations may follow."""
        self._read_losses()
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        self.row |= {"ended": True, "memory": memory}
        self.write(True)

    def _read_losses(self) -> None:
        if self._losses:
            self.row["losses"] += torch.stack([loss.float().reshape(()) for loss in self._losses]).tolist()
            self._losses = []


def _is_metric(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and not name.endswith(_NOT_METRICS)


def _width(model: nn.Module, trainable: Sequence[nn.Parameter]) -> int | None:
    """Return the width of hidden states, or the median of the short sides of what is trained."""
    stated = getattr(getattr(model, "config", None), "hidden_size", None)
    if isinstance(stated, int):
        return stated
    sides = [min(param.shape) for param in trainable if param.ndim == 2]
    return int(statistics.median(sides)) if sides else None


def _sums(value: Any) -> Iterator[Tensor]:
    """Yield sums of all tensors of a batch, whole and in part."""
    if isinstance(value, Tensor):
        yield value.detach().float().sum()
        yield value.detach().flatten()[:64].float().sum()
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield from _sums(value[name])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _sums(each)


def _fingerprint(numbers: list[Tensor]) -> str | None:
    if not numbers:
        return None
    stacked = torch.stack([number.cpu() for number in numbers])
    return hashlib.sha1(stacked.numpy().tobytes()).hexdigest()[:12]
