"""The process of one run: `python -m mars_hf.compare.child [-m] SCRIPT ARGS`, with its order in the environment.

The script knows nothing of it. Classes of transformers are changed before it imports them, and whatever its end,
result.json tells it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import runpy
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
import transformers
import transformers.trainer
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

from mars_hf.compare import files
from mars_hf.compare.order import VARIABLE, Order, Refused
from mars_hf.compare.recorder import Recorder
from mars_hf.training.nonfinite import NonFiniteError
from mars_hf.training.registry import MarsFactory
from mars_hf.training.trainer import MarsTrainer  # registers MARS's names

_WRITE_EVERY = 5.0  # seconds
# Parts of the addresses by which huggingface_hub makes repositories and commits, and asks where to put large files.
_WRITING = ("/api/repos/", "/preupload/", "/commit/", "/branch/", "/tag/", "/lfs/objects/batch", "/xet-write-token/")


class Child:
    """What one run is asked for, and what is known of it: `result` is what result.json holds."""

    def __init__(self, order: Order) -> None:
        """Begin an empty result."""
        self.order = order
        self.training: dict[str, Any] = {}  # its record; empty before it begins
        self.result: dict[str, Any] = {
            "state": "running",
            "message": "",
            "seconds": 0.0,
            "order": order.what_trains(),
            "notes": [],
            "own_rate": None,  # the script's own learning rate, where the arm has another
            "training": self.training,
        }
        self.recorder: Recorder | None = None  # of the Trainer that trains
        # By Trainer, from its arguments: other optimizers of MARS are the script's own.
        self.made_by_trainer: weakref.WeakSet[Any] = weakref.WeakSet()
        self._refusal = ""
        self._written = 0.0
        self._is_first_rank = int(os.environ.get("RANK", "0")) == 0

    def note(self, text: str) -> None:
        """Add a line that belongs on the page, once."""
        if text and text not in self.result["notes"]:
            self.result["notes"].append(text)

    # --- what the script does -----------------------------------------------------------------------------------------

    def see_rate(self, args: TrainingArguments) -> None:
        """Remember the script's own learning rate, before the arm's takes its place."""
        if args.learning_rate != self.order.arm.get("learning_rate", args.learning_rate):
            self.result["own_rate"] = self.order.shared.get("learning_rate", args.learning_rate)

    def before_trainer(self, given: dict[str, Any]) -> None:
        """Look at what a Trainer is made of: its optimizer must be the arm's, and it should evaluate."""
        args, (optimizer, *_) = given.get("args"), given.get("optimizers") or (None,)
        if optimizer is None:
            optimizer = getattr(given["self"], "_given_optimizer", None)  # MarsTrainer keeps it from Trainer
        if optimizer is not None and "optim" in self.order.arm:
            raise Refused(
                f"the script makes its own optimizer, {type(optimizer).__name__}, and hands it to its Trainer: no "
                "other can be compared there; leave optimizers=... out of the script"
            )
        if args is not None:
            self.see_rate(args)
            for line in self.order.apply_again(args):
                self.note(line)
            if given.get("eval_dataset") is not None:
                self.note(self.order.evaluate_in_training(args))

    def before_training(self, trainer: Trainer) -> None:
        """Record a training, and refuse a second one: arms would differ in both."""
        if self.training:
            raise Refused(
                f"the script trains more than once, {self.training['steps']} steps the first time, and the arms would "
                "differ in all of them: let it train once"
            )
        if self.recorder is None or self.recorder.trainer is not trainer:
            self.recorder = Recorder(trainer, self.order, self.training, self.write, self.made_by_trainer)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Keep the first refusal of a block, or of a function that this decorates: a script may catch the error."""
        try:
            yield
        except Refused as error:
            self._refusal = self._refusal or str(error)
            raise

    # --- result -------------------------------------------------------------------------------------------------------

    def write(self, now: bool) -> None:
        """Write result.json on rank 0, now or if the last time is long ago."""
        if self._is_first_rank and (now or time.monotonic() - self._written > _WRITE_EVERY):
            files.write_json(Path(self.order.folder) / "result.json", self.result)
            self._written = time.monotonic()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Run the script in this block, and keep a later comparison from starting this run again meanwhile."""
        lock = files.locked(Path(self.order.folder) / "process", "trains")
        with lock if self._is_first_rank else contextlib.nullcontext():
            self.write(True)
            try:
                yield
                self._end_of_script(None)
            except NonFiniteError as error:
                self._end("diverged", str(error))
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
        elif not self.training:
            self._end(
                "failed",
                "no transformers.Trainer has trained: a script with a loop of its own (accelerate, no_trainer) cannot "
                "be compared; others may need --do_train",
            )
        elif not self.training["ended"]:
            self._end("failed", "the training did not end")
        else:
            self._evaluate_at_end()
            self._end(self._state_of_training())

    def _fail(self, message: str) -> None:
        """End a run that failed; it counts if training had ended, and an evaluation of what can be evaluated."""
        if self.training.get("ended") and (self.training["evaluations"] or not self._can_evaluate):
            self.note(f"the script failed after training: {_one_line(message)}")
            self._end(self._state_of_training())
        else:
            self._end("failed", message)

    def _state_of_training(self) -> str:
        """Return how the training ended: some metrics are finite without a finite weight."""
        return "complete" if all(map(math.isfinite, self.training["losses"][-1:])) else "diverged"

    def _end(self, state: str, message: str = "") -> None:
        """Write the end of the run; one that was refused has failed, whatever the script made of it."""
        seconds = time.time() - psutil.Process().create_time()  # imports are part of what a run costs
        state, message = ("failed", self._refusal) if self._refusal else (state, message)
        self.result |= {"state": state, "message": _one_line(message), "seconds": seconds}
        self.write(True)

    @property
    def _can_evaluate(self) -> bool:
        trainer = None if self.recorder is None else self.recorder.trainer
        return self.order.evaluates and getattr(trainer, "eval_dataset", None) is not None

    def _evaluate_at_end(self) -> None:
        """Evaluate where the script has an eval_dataset and has not done so since training ended."""
        is_done = any(one["step"] >= self.training["steps"] for one in self.training["evaluations"])
        if is_done or not self._can_evaluate:
            return
        assert self.recorder is not None
        try:
            self.recorder.trainer.evaluate()
        except Exception as error:  # the script may have merged or moved its model
            self.note(f"no evaluation at the end: {type(error).__name__}: {_one_line(str(error))}")


def install(child: Child) -> None:
    """Change classes of transformers, before the script imports them."""
    if child.order.with_mars:
        transformers.Trainer = transformers.trainer.Trainer = MarsTrainer  # type: ignore[misc]
    transformers.set_seed(child.order.shared["seed"])  # for scripts that make a model before any set_seed
    post_init = TrainingArguments.__post_init__
    init, train, step = Trainer.__init__, Trainer.train, Trainer.training_step
    make_mars = MarsFactory.__call__
    signature = inspect.signature(init)

    @child.refusing()
    @functools.wraps(post_init)
    def checked_arguments(self: Any, *args: Any, **kwargs: Any) -> None:
        child.see_rate(self)
        child.order.apply(self)
        post_init(self, *args, **kwargs)
        child.order.remember(self)

    @child.refusing()
    @functools.wraps(init)
    def followed_init(self: Any, *args: Any, **kwargs: Any) -> None:
        child.before_trainer(signature.bind(self, *args, **kwargs).arguments)
        init(self, *args, **kwargs)

    @child.refusing()
    @functools.wraps(train)
    def counted_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        child.before_training(self)
        return train(self, *args, **kwargs)

    @functools.wraps(step)
    def heard_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = child.recorder
        if recorder is None or recorder.trainer is not self or getattr(self, "in_stale_pass", False):
            return step(self, model, inputs, *args, **kwargs)
        recorder.see_batch(inputs)
        loss = step(self, model, inputs, *args, **kwargs)
        recorder.add_loss(loss)
        return loss

    @functools.wraps(make_mars)
    def noted_make(self: MarsFactory, *args: Any, **kwargs: Any) -> Any:
        made = make_mars(self, *args, **kwargs)
        child.made_by_trainer.add(made)
        return made

    MarsFactory.__call__ = noted_make  # type: ignore[method-assign,assignment]
    TrainingArguments.__post_init__ = checked_arguments  # type: ignore[method-assign]
    Trainer.__init__ = followed_init  # type: ignore[method-assign]
    Trainer.train = counted_train  # type: ignore[method-assign]
    Trainer.training_step = heard_step  # type: ignore[method-assign]
    refuse_uploads(child.note)


def refuse_uploads(note: Callable[[str], None]) -> None:
    """Refuse every request that would write to the Hub, for nobody asked for these models; `note` hears of it."""

    def refuse(request: Any) -> None:
        url = str(request.url)
        writes = request.method not in ("GET", "HEAD") or "/xet-write-token/" in url
        if writes and any(part in url for part in _WRITING):
            note("the script would have uploaded to the Hub; nothing was")
            raise RuntimeError("python -m mars_hf compare uploads nothing")

    def push_nothing(self: Trainer, *args: Any, **kwargs: Any) -> None:
        note("the script would have uploaded to the Hub; nothing was")

    # Functions of huggingface_hub are imported by name in many places, so the session that all of them share refuses;
    # it is made anew after a fork, or an error.
    session = huggingface_hub.get_session()
    hooks = {**session.event_hooks, "request": [refuse, *session.event_hooks.get("request", [])]}
    make: Any = type(session)
    huggingface_hub.set_client_factory(
        lambda: make(event_hooks=hooks, follow_redirects=session.follow_redirects, timeout=session.timeout)
    )
    Trainer.push_to_hub = push_nothing  # type: ignore[method-assign,assignment]


def main(argv: list[str]) -> None:
    """Run the script or module of the order as `__main__`."""
    order = Order(**json.loads(os.environ[VARIABLE]))
    child = Child(order)
    install(child)
    sys.argv = [order.script, *argv[argv.index(order.script) + 1 :]]
    with child.recording():
        if not order.is_of_this_text:
            raise Refused(
                f"{order.script} was edited after the comparison began: bring back the script as it was, or compare "
                "anew with another --output_dir"
            )
        if order.is_module:
            runpy.run_module(order.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(order.script))
            runpy.run_path(order.script, run_name="__main__")


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main(sys.argv[1:])
