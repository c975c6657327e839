"""The trainers of trl and sentence-transformers, with everything that MARS adds."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_trainer import STEPS, TEXTS, WORDS, hold_to_straight_lines, optimizer_of, tokenizer, trained
from datasets import Dataset
from helpers import gpt2
from peft import LoraConfig
from transformers import BertConfig, BertModel, GPT2Config, GPT2ForSequenceClassification, TrainerCallback

import mars_hf

trl = pytest.importorskip("trl", reason="trl is not installed: pip install -e '.[test]'")


def settings(folder: Any, **more: Any) -> dict[str, Any]:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return {
        **{"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "use_cpu": True},
        **{"bf16": False, "lr_scheduler_type": "constant", "data_seed": 5, **quiet, **more},
    }


def language_model(seed: int = 0) -> Any:
    model = gpt2(seed, n_positions=64, bos_token_id=2, eos_token_id=2, pad_token_id=0)
    model.warnings_issued = {}
    return model


def classifier() -> Any:
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(GPT2Config(**language_model().config.to_dict() | {"num_labels": 1}))


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [text.count("to") + len(text) / 7 for text in completions]


PAIRS = [{"prompt": "to be", "chosen": " or not", "rejected": f" {word} question"} for word in WORDS * 3]
ANSWERS = [
    {"prompt": "to be", "completion": f" {word} question", "label": bool(index % 2)}
    for index, word in enumerate(WORDS * 3)
]
# The model, further arguments, rows, and what else a trainer takes.
METHODS = {
    "SFT": (language_model, {"max_length": 16}, [{"text": text} for text in TEXTS], {}),
    "DPO": (language_model, {"max_length": 16}, PAIRS, {"ref_model": lambda: language_model(seed=1)}),
    "Reward": (classifier, {"max_length": 16}, PAIRS, {}),
    "KTO": (language_model, {"max_length": 16}, ANSWERS, {"ref_model": lambda: language_model(seed=1)}),
    "GRPO": (
        language_model,
        {"num_generations": 4, "max_completion_length": 5},
        [{"prompt": text} for text in TEXTS],
        {"reward_funcs": lambda: rewards},
    ),
}


def build(method: str, folder: Any, kind: type, optimizer: Any = None, *, args: Any = None, **more: Any) -> Any:
    """Return a trainer of a class for a method of trl; `optimizer` makes one of parameters."""
    make, sizes, rows, others = METHODS[method]
    model = make()
    config = getattr(trl, f"{method}Config")(**settings(folder, gradient_checkpointing=False, **sizes, **(args or {})))
    given = {name: value() for name, value in others.items()} | more
    if optimizer is not None:
        given["optimizers"] = (optimizer(list(model.parameters())), None)
    data = Dataset.from_list(rows)
    return kind(model, args=config, train_dataset=data, processing_class=tokenizer(), **given)


# Of the approximate form, which has one pass as any optimizer, one method is enough.
@pytest.mark.parametrize(
    ("method", "exact"), [("SFT", False), *((method, True) for method in ("SFT", "DPO", "Reward", "KTO"))]
)
def test_trl_trainers_train_exactly(tmp_path, method, exact):
    make = functools.partial(build, method, tmp_path)
    run = hold_to_straight_lines(make, getattr(trl, f"{method}Trainer"), exact=exact, bar=1e-3)
    rows = [row for row in run.state.log_history if "loss" in row]
    assert len(rows) == STEPS and all("mars/clip_fraction" in row for row in rows)


def test_sft_with_lora_makes_its_own_mars(tmp_path):
    given = {"peft_config": LoraConfig(r=2, target_modules=["c_attn"]), "mars_kwargs": {"gamma": 0.05}}
    run = build("SFT", tmp_path, mars_hf.with_mars(trl.SFTTrainer), args={"learning_rate": 1e-2}, **given)
    run.train()
    mars = run.optimizer.optimizer
    assert isinstance(mars, mars_hf.Mars) and mars.defaults["gamma"] == 0.05
    adapters = {param for name, param in run.model.named_parameters() if "lora_" in name}
    assert adapters == {param for group in mars.param_groups for param in group["params"]}
    assert all("last_grad" in mars.state[param] for param in adapters)


class Twin(TrainerCallback):
    """Let a Mars step on copies of the parameters, with every step's gradients, clipped by PyTorch."""

    def watch(self, run: Any) -> None:
        self.params = [torch.nn.Parameter(param.detach().clone()) for param in run.model.parameters()]
        self.mars = optimizer_of(self.params, False)

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        for param, copied in zip(model.parameters(), self.params, strict=True):
            copied.grad = param.grad.clone()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.mars.step()


def test_grpo_trainer(tmp_path):
    """It generates its batches, so that only its own gradients can be compared."""
    twin = Twin()
    make = functools.partial(build, "GRPO", tmp_path, mars_hf.with_mars(trl.GRPOTrainer))
    run = make(lambda params: optimizer_of(params, False), callbacks=[twin])
    twin.watch(run)
    start = [param.detach().clone() for param in twin.params]
    run.train()
    assert run.state.global_step == STEPS
    farthest = max((after - before).abs().max() for after, before in zip(twin.params, start, strict=True))
    assert farthest > 1e-3
    for found, expected in zip(run.model.parameters(), twin.params, strict=True):
        assert (found - expected).abs().max() < 1e-4 * farthest
    exact = make(lambda params: optimizer_of(params, True))
    with pytest.raises(NotImplementedError, match=r"MarsGRPOTrainer.*makes new completions.*use is_approx=True"):
        exact.train()
    assert exact.state.global_step == 0


# --- sentence-transformers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Any:
    """Return sentence-transformers, and save a tiny BERT for `sentence_trainer`."""
    package = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed: pip install -e '.[test]'"
    )
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = BertModel(BertConfig(vocab_size=16, max_position_embeddings=32, **sizes, **still))
    package.bert = tmp_path_factory.mktemp("bert")
    bert.save_pretrained(package.bert), tokenizer().save_pretrained(package.bert)
    return package


def sentence_trainer(package: Any, folder: Any, kind: type, loss: str, given: Any = None, **more: Any) -> Any:
    """Return a trainer of sentence-transformers; `given` makes arguments of model, loss and TrainingArguments."""
    modules = package.sentence_transformer.modules if hasattr(package, "sentence_transformer") else package.models
    transformer = modules.Transformer(str(package.bert), max_seq_length=16)
    model = package.SentenceTransformer(modules=[transformer, modules.Pooling(8)], device="cpu")
    torch.manual_seed(1)
    columns = {"one": TEXTS, "two": TEXTS[::-1]}
    arguments = {}
    if loss == "SoftmaxLoss":
        arguments = {"sentence_embedding_dimension": 8, "num_labels": 3}
        columns["label"] = [index % 3 for index in range(len(TEXTS))]
    module = getattr(package.sentence_transformer.losses, loss)(model, **arguments)
    args = package.SentenceTransformerTrainingArguments(**settings(folder, **more))
    others = {} if given is None else given(model, module, args)
    return kind(model, args, train_dataset=Dataset.from_dict(columns), loss=module, **others)


@pytest.mark.parametrize(
    ("loss", "exact"), [("SoftmaxLoss", False), ("SoftmaxLoss", True), ("MultipleNegativesRankingLoss", True)]
)
def test_sentence_transformers(tmp_path, package, loss, exact):
    """SoftmaxLoss has weights of its own, which Trainer does not clip."""

    def make(kind: type, optimizer: Callable[[Any], Any] | None = None) -> Any:
        def given(model: Any, module: Any, args: Any) -> Any:
            params = {param: None for param in [*model.parameters(), *module.parameters()] if param.requires_grad}
            return {"optimizers": (optimizer(list(params)), None)}

        return sentence_trainer(package, tmp_path, kind, loss, given if optimizer else None)

    hold_to_straight_lines(make, package.SentenceTransformerTrainer, exact=exact, bar=1e-3)
    run = make(mars_hf.with_mars(package.SentenceTransformerTrainer))
    run.train()
    mars = run.optimizer.optimizer
    assert isinstance(mars, mars_hf.Mars)
    assert set(trained(run).values()) == {param for group in mars.param_groups for param in group["params"]}


DOORS = {
    "optim": None,
    "with_mars": None,
    "factory": lambda model, loss, args: {
        "optimizer_cls_and_kwargs": mars_hf.factory(args, mars_type="mars-m", lr_1d=1e-3)
    },
    "create(model)": lambda model, loss, args: {
        "optimizers": (mars_hf.create(model, mars_type="mars-m", lr=3e-3), None)
    },
    "create([model, loss])": lambda model, loss, args: {
        "optimizers": (mars_hf.create([model, loss], mars_type="mars-m", lr=3e-3), None)
    },
}


@pytest.mark.parametrize("door", DOORS)
def test_weights_of_a_loss(tmp_path, package, door, caplog):
    """They train, as the head that they are, or the run says that they do not; they stayed as they were in silence."""
    mars_hf.register()
    kind = package.SentenceTransformerTrainer
    kind = mars_hf.with_mars(kind) if door == "with_mars" else kind
    by_name = {"optim": "mars_m"} if door in ("optim", "with_mars") else {}
    run = sentence_trainer(package, tmp_path, kind, "SoftmaxLoss", DOORS[door], learning_rate=1e-3, **by_name)
    head = run.loss.classifier.weight
    before = head.detach().clone()
    message = "step 1: the optimizer lacks weights of the loss that get gradients (SoftmaxLoss.classifier.weight, "
    if door == "factory":
        with pytest.raises(RuntimeError, match=re.escape(message)):
            run.train()
        return
    run.train()
    is_left_out = door == "create(model)"
    assert caplog.text.count(message) == is_left_out
    assert torch.equal(head, before) == is_left_out
    mars = run.optimizer.optimizer
    roles = [group["role"] for group in mars.param_groups if any(param is head for param in group["params"])]
    assert roles == [] if is_left_out else roles == ["adamw"]


def test_decay_of_mars_kwargs(tmp_path, package):
    """The groups that the trainer makes have the decay of its arguments, which is 0 here."""

    def given(model: Any, module: Any, args: Any) -> Any:
        return {"mars_kwargs": {"weight_decay": 0.1}}

    kind = mars_hf.with_mars(package.SentenceTransformerTrainer)
    run = sentence_trainer(package, tmp_path, kind, "SoftmaxLoss", given, learning_rate=1e-3)
    decays = {(group["role"], group["weight_decay"]) for group in run.create_optimizer().param_groups}
    assert decays == {("matrix", 0.1), ("vector", 0.0)}
