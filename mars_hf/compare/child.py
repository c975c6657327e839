"""The process of one run: `python -m mars_hf.compare.child [-m] SCRIPT ARGS`, with its order in the environment.

The script knows nothing of it. Classes of transformers are changed before it imports them, and whatever its end,
result.json tells it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import transformers
import transformers.trainer
from transformers.trainer import Trainer
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import TrainingArguments

from mars_hf.compare import arguments, files
from mars_hf.compare.arguments import Refused
from mars_hf.compare.no_uploads import refuse_uploads
from mars_hf.compare.order import VARIABLE, Order
from mars_hf.compare.recorder import NonFiniteLosses, Recorder
from mars_hf.training.nonfinite import NonFiniteCallback, NonFiniteError
from mars_hf.training.trainer import MarsTrainer  # registers MARS's names

_WRITE_EVERY = 5.0  # seconds


class Child:
    """What one run is asked for, and what is known of it.

    Attributes:
        order: of the run.
        result: what result.json holds.
    """

    def __init__(self, order: Order) -> None:
        """Begin an empty result."""
        self.order = order
        self.result: dict[str, Any] = {
            "state": "running",
            "message": "",
            "seconds": 0.0,
            "order": order.what_trains(),
            "notes": [],
            "trainings": [],
        }
        self.trainer: Trainer | None = None  # the one that trained last
        self._refusal = ""
        self._written = 0.0
        self._is_first_rank = int(os.environ.get("RANK", "0")) == 0

    def note(self, text: str) -> None:
        """Add a line that belongs on the page, once."""
        if text and text not in self.result["notes"]:
            self.result["notes"].append(text)

    # --- what the script does -----------------------------------------------------------------------------------------

    def before_trainer(self, given: dict[str, Any]) -> None:
        """Look at what a Trainer is made of: its optimizer must be the arm's, and it should evaluate."""
        args = given.get("args")
        optimizer = (given.get("optimizers") or (None, None))[0]
        if optimizer is not None and "optim" in self.order.arm:
            raise Refused(
                f"the script makes its own optimizer, {type(optimizer).__name__}, and hands it to its Trainer: no "
                "other can be compared there; leave optimizers=... out of the script"
            )
        if args is None:
            return
        for line in arguments.apply_again(self.order, args):
            self.note(line)
        if given.get("eval_dataset") is not None:
            self.note(arguments.evaluate_in_training(self.order, args))

    def after_trainer(self, trainer: Trainer) -> None:
        """Follow a Trainer."""
        trainer.add_callback(Recorder(trainer, self.order, self.result["trainings"], self.write))
        if not _callbacks(trainer, NonFiniteCallback):
            trainer.add_callback(NonFiniteLosses())

    def before_training(self, trainer: Trainer, resume_from: Any) -> Any:
        """Set the arm where one of several trainings is compared; return the checkpoint to resume from."""
        number = len(self.result["trainings"]) + 1
        self.trainer = trainer
        if self.order.training is None and number > 1:
            raise Refused(
                f"the script trains more than once, {self.result['trainings'][0]['steps']} steps the first time, and "
                "the arms would differ in all of them: choose one with --training 1 or --training 2, ..."
            )
        if self.order.training == number:
            arguments.apply_arm(self.order, trainer.args)
        output = Path(self.order.folder) / "output"
        if resume_from or not self.order.saves or number > 1 or not output.is_dir():
            return resume_from
        return get_last_checkpoint(str(output))

    # --- result -------------------------------------------------------------------------------------------------------

    def write(self, now: bool) -> None:
        """Write result.json on rank 0, now or if the last time is long ago."""
        if self._is_first_rank and (now or time.monotonic() - self._written > _WRITE_EVERY):
            files.write_json(Path(self.order.folder) / "result.json", self.result)
            self._written = time.monotonic()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Run the script in this block, and keep a later comparison from starting this run again meanwhile."""
        with contextlib.ExitStack() as stack:
            if self._is_first_rank:
                stack.enter_context(files.locked(Path(self.order.folder) / "process", "trains"))
            self.write(True)
            try:
                yield
                self._end_of_script(None)
            except NonFiniteError as error:
                is_it = len(self.result["trainings"]) == (self.order.training or 1)
                self._end("diverged" if is_it else "failed", str(error))
                raise SystemExit(3) from error
            except SystemExit as exit_:
                self._end_of_script(exit_.code)
                raise
            except BaseException as error:
                self._fail(str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
                raise

    def _end_of_script(self, code: Any) -> None:
        if code not in (0, None):
            self._fail(f"the script ended with {code!r}")
            return
        self._evaluate_at_end()
        message = self._missing_training()
        self._end("failed" if message else self._state_of_training(), message)

    def _fail(self, message: str) -> None:
        """End a run that failed; it counts if training had ended, and an evaluation of what can be evaluated."""
        is_over = not self._missing_training() and not self._refusal
        evaluates = self.order.evaluates and getattr(self.trainer, "eval_dataset", None) is not None
        if is_over and (self.result["trainings"][-1]["evaluations"] or not evaluates):
            self.note(f"the script failed after training: {_one_line(message)}")
            self._end(self._state_of_training(), "")
        else:
            self._end("failed", message)

    def _state_of_training(self) -> str:
        """Return how the training that is compared ended: some metrics are finite without a finite weight."""
        losses = self.result["trainings"][(self.order.training or 1) - 1]["losses"]
        return "complete" if all(map(math.isfinite, losses[-1:])) else "diverged"

    def _end(self, state: str, message: str) -> None:
        seconds = time.time() - psutil.Process().create_time()  # imports are part of what a run costs
        message = self._refusal or _one_line(message)
        self.result |= {"state": "failed" if self._refusal else state, "message": message, "seconds": seconds}
        self.write(True)

    def refuse(self, error: Refused) -> None:
        """Keep a refusal: a script may catch the error."""
        self._refusal = self._refusal or _one_line(str(error))

    def _missing_training(self) -> str:
        """Return why there is no training to compare, or ""."""
        trainings, asked = self.result["trainings"], self.order.training or 1
        if not trainings:
            return (
                "no transformers.Trainer has trained: a script with a loop of its own (accelerate, no_trainer) cannot "
                "be compared; others may need --do_train"
            )
        if asked > len(trainings):
            return f"--training {asked}: the script trains {len(trainings)} times"
        return "" if trainings[asked - 1]["ended"] else "the training did not end"

    def _evaluate_at_end(self) -> None:
        """Evaluate where the script has an eval_dataset and has not done so since training ended."""
        trainer, trainings = self.trainer, self.result["trainings"]
        if trainer is None or getattr(trainer, "eval_dataset", None) is None or not trainings:
            return
        last = trainings[-1]
        is_other = self.order.training not in (None, len(trainings))
        if is_other or not self.order.evaluates or any(one["step"] >= last["steps"] for one in last["evaluations"]):
            return
        try:
            trainer.evaluate()
        except Exception as error:  # the script may have merged or moved its model
            self.note(f"no evaluation at the end: {type(error).__name__}: {_one_line(str(error))}")


def install(child: Child) -> None:
    """Change classes of transformers, before the script imports them."""
    order = child.order
    if order.with_mars:
        transformers.Trainer = transformers.trainer.Trainer = MarsTrainer  # type: ignore[misc]
    transformers.set_seed(order.shared["seed"])  # for scripts that make a model before any set_seed

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Refused as error:
                child.refuse(error)
                raise

        return calling

    post_init, init, train, step = (
        TrainingArguments.__post_init__,
        Trainer.__init__,
        Trainer.train,
        Trainer.training_step,
    )
    signature = inspect.signature(init)

    @functools.wraps(post_init)
    def checked_arguments(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments.apply(order, self)
        post_init(self, *args, **kwargs)

    @functools.wraps(init)
    def followed_init(self: Any, *args: Any, **kwargs: Any) -> None:
        child.before_trainer(signature.bind(self, *args, **kwargs).arguments)
        init(self, *args, **kwargs)
        child.after_trainer(self)

    @functools.wraps(train)
    def counted_train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return train(self, child.before_training(self, resume_from_checkpoint), *args, **kwargs)

    @functools.wraps(step)
    def heard_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorders = [] if getattr(self, "in_stale_pass", False) else _callbacks(self, Recorder)
        for recorder in recorders:
            recorder.see_batch(inputs)
        loss = step(self, model, inputs, *args, **kwargs)
        for recorder in recorders:
            recorder.add_loss(loss)
        for callback in _callbacks(self, NonFiniteLosses):
            callback.watch("loss", loss)
        return loss

    TrainingArguments.__post_init__ = refusing(checked_arguments)  # type: ignore[method-assign]
    Trainer.__init__ = refusing(followed_init)  # type: ignore[method-assign]
    Trainer.train = refusing(counted_train)  # type: ignore[method-assign]
    Trainer.training_step = heard_step  # type: ignore[method-assign]
    refuse_uploads(child.note)


def main(argv: list[str]) -> None:
    """Run the script or module of the order as `__main__`."""
    order = Order.read(os.environ[VARIABLE])
    child = Child(order)
    install(child)
    sys.argv = [order.script, *argv[argv.index(order.script) + 1 :]]
    with child.recording():
        if not order.is_module:
            sys.path[0] = os.path.dirname(os.path.abspath(order.script))
            runpy.run_path(order.script, run_name="__main__")
        elif importlib.util.find_spec(order.script) is None:
            raise Refused(f"no such module: {order.script!r} (give a name that python -m can run)")
        else:
            runpy.run_module(order.script, run_name="__main__", alter_sys=True)


def _callbacks(trainer: Trainer, kind: type) -> list[Any]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main(sys.argv[1:])
