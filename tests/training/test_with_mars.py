"""`with_mars` gives any class of trainers what MarsTrainer adds, and keeps what the class overrides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_trainer import STEPS, hold_to_straight_lines, optimizer_of
from helpers import Blocks, arguments, gpt2
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, default_data_collator

import mars_hf

# --- classes of our own --------------------------------------------------------------------------------------------


class Own(Trainer):
    """Override what people override."""

    def __init__(self, *args: Any, temperature: float = 2.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = temperature
        self.calls: list[str] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits / self.temperature
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


class Stepping(Own):
    """A training step without Trainer's."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        self.calls.append("training_step")
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class Clipping(Own):
    """Clip, and look at what has come of it."""

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        after = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        assert after <= 1.0001
        self.calls.append("_clip_grad_norm")
        return norm


class Making(Own):
    """Make the optimizer, from settings of its own."""

    exact = False

    def create_optimizer(self, model: Any = None) -> Any:
        self.calls.append("create_optimizer")
        if self.optimizer is None:
            self.optimizer = optimizer_of(list(self.model.parameters()), self.exact)
        return self.optimizer


class ExactMaking(Making):
    exact = True


class Unnamed(Own):
    """Pass every argument on, without a name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)


@pytest.fixture
def make(tmp_path) -> Callable[..., Any]:
    """Return a function that makes a trainer of a class for GPT-2."""

    def made(kind: type, optimizer: Callable[[Any], Any]) -> Any:
        model = gpt2()
        args = arguments(tmp_path, max_steps=STEPS)
        given = (optimizer(list(model.parameters())), None)
        if issubclass(kind, Making):
            return kind(model, args, default_data_collator, Blocks())
        if issubclass(kind, Unnamed):
            empty = inspect.signature(Trainer.__init__).parameters
            values = {"model": model, "args": args, "data_collator": default_data_collator, "train_dataset": Blocks()}
            values["optimizers"] = given
            last = list(empty).index("optimizers")
            return kind(*(values.get(name, empty[name].default) for name in list(empty)[1 : last + 1]))
        return kind(model, args, default_data_collator, Blocks(), optimizers=given)

    return made


CASES = [
    pytest.param(kind, exact, id=f"{kind.__name__}-{'exact' if exact else 'approx'}")
    for kind in (Own, Stepping, Clipping, Unnamed, Seq2SeqTrainer)
    for exact in (False, True)
]


@pytest.mark.parametrize(("kind", "exact"), [*CASES, (Making, False), (ExactMaking, True)])
def test_overrides_are_kept_and_the_weights_are_those_of_straight_lines(make, tmp_path, kind, exact):
    if kind is Seq2SeqTrainer:
        from transformers import Seq2SeqTrainingArguments

        def made(kind: type, optimizer: Callable[[Any], Any]) -> Any:
            model = gpt2()
            plain = arguments(tmp_path, max_steps=STEPS).to_dict()
            known = {name: plain[name] for name in ("max_steps", "per_device_train_batch_size", "data_seed")}
            args = Seq2SeqTrainingArguments(
                output_dir=str(tmp_path),
                **known,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                lr_scheduler_type="constant",
                disable_tqdm=True,
            )
            given = (optimizer(list(model.parameters())), None)
            return kind(model, args, default_data_collator, Blocks(), optimizers=given)

        hold_to_straight_lines(made, kind, exact=exact)
        return
    run = hold_to_straight_lines(make, kind, exact=exact)
    expected = {Stepping: "training_step", Clipping: "_clip_grad_norm", Making: "create_optimizer"}
    for own, name in expected.items():
        if isinstance(run, own):
            assert name in run.calls


def test_the_class(make):
    assert mars_hf.with_mars(Trainer) is mars_hf.MarsTrainer
    made = mars_hf.with_mars(Own)
    assert made is mars_hf.with_mars(Own) and issubclass(made, Own) and made.__name__ == "MarsOwn"
    assert mars_hf.with_mars(made) is made
    assert list(inspect.signature(made).parameters) == ["args", "temperature", "mars_kwargs", "kwargs"]

    class Mixed(Own, mars_hf.MarsTrainer):
        pass

    assert mars_hf.with_mars(Mixed) is Mixed


@pytest.mark.parametrize("wrong", [nn.Module, "Trainer", None])
def test_only_classes_of_trainers_can_have_it(wrong):
    with pytest.raises(TypeError, match="give a class of trainers"):
        mars_hf.with_mars(wrong)


def test_folding_where_nothing_is_overridden_and_only_there(make):
    for kind, folds in ((Own, True), (Clipping, False)):
        run = make(mars_hf.with_mars(kind), lambda params: optimizer_of(params, False))
        norms = []

        class Seen(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
                norms.append(optimizer.optimizer.max_grad_norm)  # noqa: B023

        run.add_callback(Seen())
        run.train()
        assert norms == [1.0 if folds else None] * STEPS


# --- weights outside of the model ----------------------------------------------------------------------------------


class Heads(Trainer):
    """Train weights of a loss too, as sentence-transformers does; Trainer clips the model's gradients alone."""

    def __init__(self, *args: Any, loss: nn.Module, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss = loss

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        hidden = model(input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states[-1]
        return nn.functional.cross_entropy(self.loss(hidden).flatten(0, 1), inputs["labels"].flatten() % 7) * 30


@pytest.mark.parametrize("exact", [False, True], ids=["approx", "exact"])
def test_weights_of_a_loss(tmp_path, exact):
    def made(kind: type, optimizer: Callable[[Any], Any]) -> Any:
        model = gpt2(seed=3)
        torch.manual_seed(1)
        loss = nn.Linear(8, 7)
        given = (optimizer([*model.parameters(), *loss.parameters()]), None)
        args = arguments(tmp_path, max_steps=STEPS)
        return kind(model, args, default_data_collator, Blocks(), optimizers=given, loss=loss)

    hold_to_straight_lines(made, Heads, exact=exact)


# --- what cannot be combined ---------------------------------------------------------------------------------------


class Generates(Own):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return inputs


def test_a_trainer_that_generates_cannot_be_exact_and_says_so_at_the_start(make):
    run = make(mars_hf.with_mars(Generates), lambda params: optimizer_of(params, True))
    with pytest.raises(
        NotImplementedError, match=r"_generate_and_score_completions makes new completions.*is_approx=True"
    ):
        run.train()
    assert run.state.global_step == 0
    run = make(mars_hf.with_mars(Generates), lambda params: optimizer_of(params, False))
    run.train()
