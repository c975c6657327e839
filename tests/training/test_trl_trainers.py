"""The trainers of trl and sentence-transformers, with everything that MARS adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_trainer import STEPS, TEXTS, WORDS, hold_to_straight_lines, optimizer_of, place, tokenizer, trained
from datasets import Dataset
from helpers import gpt2
from peft import LoraConfig
from reference import Reference
from transformers import GPT2Config, GPT2ForSequenceClassification, TrainerCallback

import mars_hf

trl = pytest.importorskip("trl", reason="trl is not installed: pip install -e '.[test]'")


def settings(folder: Any, **more: Any) -> dict[str, Any]:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return {
        **{"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "use_cpu": True},
        **{"bf16": False, "lr_scheduler_type": "constant", "data_seed": 5, **quiet, **more},
    }


def language_model() -> Any:
    model = gpt2(n_positions=64, bos_token_id=2, eos_token_id=2, pad_token_id=0)
    model.warnings_issued = {}
    return model


def sft(kind: type, optimizer: Callable[[Any], Any], folder: Any) -> Any:
    model = language_model()
    args = trl.SFTConfig(**settings(folder, max_length=16, gradient_checkpointing=False))
    data = Dataset.from_dict({"text": TEXTS})
    given = (optimizer(list(model.parameters())), None)
    return kind(model, args, train_dataset=data, processing_class=tokenizer(), optimizers=given)


def pairs() -> Dataset:
    rows = [{"prompt": "to be", "chosen": " or not", "rejected": f" {word} question"} for word in WORDS]
    return Dataset.from_list(rows * 3)


def dpo(kind: type, optimizer: Callable[[Any], Any], folder: Any) -> Any:
    model = language_model()
    args = trl.DPOConfig(
        **settings(folder, max_length=16, gradient_checkpointing=False, precompute_ref_log_probs=False)
    )
    given = (optimizer(list(model.parameters())), None)
    reference = gpt2(seed=1, n_positions=64, bos_token_id=2, eos_token_id=2, pad_token_id=0)
    return kind(
        model, args=args, ref_model=reference, train_dataset=pairs(), processing_class=tokenizer(), optimizers=given
    )


def reward(kind: type, optimizer: Callable[[Any], Any], folder: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 64, "vocab_size": 64}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **still, num_labels=1, pad_token_id=0, bos_token_id=2, eos_token_id=2)
    model = GPT2ForSequenceClassification(config)
    args = trl.RewardConfig(**settings(folder, max_length=16, gradient_checkpointing=False))
    data = pairs()
    given = (optimizer(list(model.parameters())), None)
    return kind(model, args, train_dataset=data, processing_class=tokenizer(), optimizers=given)


@pytest.mark.parametrize("exact", [False, True], ids=["approx", "exact"])
@pytest.mark.parametrize(("name", "make"), [("SFTTrainer", sft), ("DPOTrainer", dpo), ("RewardTrainer", reward)])
def test_trl(tmp_path, name, make, exact):
    run = hold_to_straight_lines(
        lambda kind, optimizer: make(kind, optimizer, tmp_path), getattr(trl, name), exact=exact, bar=1e-3
    )
    rows = [row for row in run.state.log_history if "loss" in row]
    assert len(rows) == STEPS and all("mars/clip_fraction" in row for row in rows)


def test_sft_with_lora_makes_its_own_mars(tmp_path):
    args = trl.SFTConfig(**settings(tmp_path, max_length=16, gradient_checkpointing=False, learning_rate=1e-2))
    run = mars_hf.with_mars(trl.SFTTrainer)(
        language_model(),
        args,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["c_attn"]),
        mars_kwargs={"gamma": 0.05},
    )
    run.train()
    mars = run.optimizer.optimizer
    assert isinstance(mars, mars_hf.Mars) and mars.defaults["gamma"] == 0.05
    held = {id(param) for group in mars.param_groups for param in group["params"]}
    adapters = [param for name, param in run.model.named_parameters() if "lora_" in name]
    assert {id(param) for param in adapters} == held
    assert all("last_grad" in mars.state[param] for param in adapters)


# --- GRPO generates its batches: only its own gradients can be compared --------------------------------------------


class Gradients(TrainerCallback):
    """Keep every step's gradients, clipped to a norm of 1 in float64."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        found = {f"0.{name}": param.grad.double().clone() for name, param in model.named_parameters()}
        norm = torch.stack([gradient.square().sum() for gradient in found.values()]).sum().sqrt().item()
        factor = min(1.0, 1 / (norm + 1e-6))
        self.steps.append({name: gradient * factor for name, gradient in found.items()})


def grpo(kind: type, optimizer: Callable[[Any], Any], folder: Any, **more: Any) -> Any:
    model = language_model()
    sizes = {"num_generations": 4, "max_completion_length": 5, "gradient_checkpointing": False}
    args = trl.GRPOConfig(**settings(folder, **sizes))
    rows = Dataset.from_dict({"prompt": TEXTS})
    more["reward_funcs"] = lambda completions, **_: [text.count("to") + len(text) / 7 for text in completions]
    given = (optimizer(list(model.parameters())), None)
    return kind(model, args=args, train_dataset=rows, processing_class=tokenizer(), optimizers=given, **more)


def test_grpo(tmp_path):
    seen = Gradients()
    run = grpo(
        mars_hf.with_mars(trl.GRPOTrainer), lambda params: optimizer_of(params, False), tmp_path, callbacks=[seen]
    )
    weights = trained(run)
    rules = {
        name: Reference(param, rule="mars-adamw", lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, gamma=0.05)
        if param.ndim > 1
        else Reference(param, rule="adamw", lr=5e-3, betas=(0.9, 0.95), eps=1e-6)
        for name, param in weights.items()
    }
    start = {name: param.detach().clone() for name, param in weights.items()}
    run.train()
    assert len(seen.steps) == STEPS and any(gradient.any() for gradient in seen.steps[0].values())
    for gradients in seen.steps:
        for name, rule in rules.items():
            rule.step(gradients[name])
    found = {name: param.detach().clone() for name, param in weights.items()}
    place(weights, {name: rule.x for name, rule in rules.items()})
    moved = max((found[name] - start[name]).abs().max() for name in found)
    assert moved > 1e-3
    assert max((found[name] - param).abs().max() for name, param in weights.items()) < 1e-4 * moved


def test_exact_grpo_is_refused_at_the_start(tmp_path):
    run = grpo(mars_hf.with_mars(trl.GRPOTrainer), lambda params: optimizer_of(params, True), tmp_path)
    with pytest.raises(
        NotImplementedError, match=r"MarsGRPOTrainer.*makes new completions for each; use is_approx=True"
    ):
        run.train()
    assert run.state.global_step == 0


# --- sentence-transformers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True], ids=["approx", "exact"])
@pytest.mark.parametrize("loss", ["MultipleNegativesRankingLoss", "SoftmaxLoss"])
def test_sentence_transformers(tmp_path, loss, exact):
    """SoftmaxLoss has weights of its own."""
    package = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed: pip install -e '.[test]'"
    )
    folder = tmp_path / "bert"
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=16, max_position_embeddings=32, **sizes, **still)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)

    def make(kind: type, optimizer: Callable[[Any], Any] | None = None) -> Any:
        module = package.sentence_transformer.modules if hasattr(package, "sentence_transformer") else package.models
        transformer = module.Transformer(str(folder), max_seq_length=16)
        model = package.SentenceTransformer(modules=[transformer, module.Pooling(8)], device="cpu")
        torch.manual_seed(1)
        losses = package.sentence_transformer.losses
        arguments = {"sentence_embedding_dimension": 8, "num_labels": 3} if loss == "SoftmaxLoss" else {}
        own = getattr(losses, loss)(model, **arguments)
        columns = {"one": TEXTS, "two": TEXTS[::-1]}
        if loss == "SoftmaxLoss":
            columns["label"] = [index % 3 for index in range(len(TEXTS))]
        args = package.SentenceTransformerTrainingArguments(**settings(tmp_path))
        params = {param: None for param in [*model.parameters(), *own.parameters()] if param.requires_grad}
        given = {} if optimizer is None else {"optimizers": (optimizer(list(params)), None)}
        return kind(model, args, train_dataset=Dataset.from_dict(columns), loss=own, **given)

    hold_to_straight_lines(make, package.SentenceTransformerTrainer, exact=exact, bar=1e-3)
    run = make(mars_hf.with_mars(package.SentenceTransformerTrainer))
    run.train()
    trained_ones = {param for module in (run.model, run.loss) for param in module.parameters() if param.requires_grad}
    mars = run.optimizer.optimizer
    assert isinstance(mars, mars_hf.Mars)
    assert trained_ones == {param for group in mars.param_groups for param in group["params"]}
