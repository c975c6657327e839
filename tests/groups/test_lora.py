"""LoRA: which role each tensor takes, what stays untouched, and adapters that change under an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from helpers import arguments, gpt2, trainer
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, TrainerCallback

import mars_hf
from mars_hf import Mars
from mars_hf.groups.summary import one_line_summary

RULES = ("mars-adamw", "mars-m")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64))


def mixtral() -> MixtralForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=50, num_local_experts=3))


def convolutions() -> nn.ModuleDict:
    return nn.ModuleDict({"conv": nn.Conv2d(4, 8, 3), "linear": nn.Linear(8, 4)})


def fused() -> nn.ModuleDict:
    """A fused projection that is known by its name and sizes, and one that is known by its class."""
    return nn.ModuleDict({"qkv": nn.Linear(8, 24), "attention": nn.MultiheadAttention(8, 2)})


def config(make: Callable[[], nn.Module] = gpt2, **settings: Any) -> LoraConfig:
    targets = {gpt2: ["c_attn", "c_proj"], llama: ["q_proj", "down_proj"], convolutions: ["conv", "linear"]}
    defaults = {"target_modules": targets.get(make), "fan_in_fan_out": make is gpt2, "init_lora_weights": False}
    return LoraConfig(**{"r": 2, **defaults, **settings})


def adapted(make: Callable[[], nn.Module] = gpt2, **settings: Any) -> PeftModel:
    model = make()
    torch.manual_seed(1)
    return get_peft_model(model, config(make, **settings))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}


def trainable(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


def by_name(optimizer: Mars, key: str) -> dict[str, Any]:
    """Return a setting of each parameter's group."""
    return {name: group[key] for group in optimizer.param_groups for name in group["param_names"]}


def backward(model: nn.Module) -> None:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(3))
    model(input_ids=ids, labels=ids).loss.backward()


def train(model: nn.Module, optimizer: Mars, steps: int = 2) -> dict[str, torch.Tensor]:
    """Train what is trainable, all of it and nothing else; return the values before."""
    before = values(model)
    for _ in range(steps):
        backward(model)
        optimizer.step()
        assert all(param.grad is None for param in model.parameters() if not param.requires_grad)
        optimizer.zero_grad()
    assert changed(model, before) == trainable(model) != set()
    return before


# --- roles -----------------------------------------------------------------------------------------------------------

LORA_OF_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
SAVED = {"embed_tokens": "adamw", "lm_head": "adamw", "norm": "vector", "lora": "matrix"}
# The model, its adapters, the role under mars-m of names with a part; mars-adamw has the role matrix in place of adamw.
ROLES = {
    "gpt2": (gpt2, config(), {".lora_A.": "matrix", ".lora_B.": "matrix"}),
    "llama": (llama, config(llama), {".lora_A.": "matrix", ".lora_B.": "matrix"}),
    "embeddings": (
        gpt2,
        config(target_modules=["wte", "wpe", "c_attn"]),
        {"lora_embedding_": "adamw", "c_attn": "matrix"},
    ),
    "rank one": (llama, config(llama, r=1), {"lora_": "adamw"}),
    "modules to save": (llama, config(llama, modules_to_save=["embed_tokens", "lm_head", "norm"]), SAVED),
    "dora": (convolutions, config(convolutions, use_dora=True), {"lora_magnitude": "vector", "lora_": "matrix"}),
    "heads": (mixtral, LoraConfig(target_modules=["q_proj", "lm_head"]), {"q_proj": "matrix", "lm_head": "adamw"}),
    "experts": (mixtral, LoraConfig(**LORA_OF_EXPERTS), {"q_proj": "matrix", "experts.lora_": "adamw"}),
    "ia3": (
        llama,
        peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]),
        {"ia3_l": "adamw"},
    ),
    "adalora": (mixtral, peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10), {"lora_": "adamw"}),
    "loha": (mixtral, peft.LoHaConfig(target_modules=["q_proj"]), {"hada_w": "adamw"}),
    "oft": (mixtral, peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8), {"oft_R": "adamw"}),
    "prompts": (llama, peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), {"embedding": "adamw"}),
}


@pytest.mark.parametrize("mars_type", RULES)
@pytest.mark.parametrize("case", ROLES)
def test_lora_roles(case, mars_type):
    make, adapters, expected = ROLES[case]
    model = get_peft_model(make(), adapters)
    optimizer = mars_hf.create(model, mars_type=mars_type, lr=1e-2, weight_decay=0.1)
    roles = by_name(optimizer, "role")
    assert set(roles) == trainable(model) and all(any(part in name for name in roles) for part in expected)
    for name, role in roles.items():
        wanted = next(role for part, role in expected.items() if part in name)
        assert role == ("matrix" if mars_type == "mars-adamw" and wanted == "adamw" else wanted), name
    reason = {"embeddings": "embedding: base_model", "rank one": "a single row or column"}.get(case, "")
    assert (reason in str(optimizer)) == (mars_type == "mars-m" or not reason)
    if make in (gpt2, llama):
        train(model, optimizer)
        assert {id(param) for param in optimizer.state} == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("mars_type", RULES)
@pytest.mark.parametrize(
    ("make", "settings", "part"),
    [
        (gpt2, {"target_modules": ["wte", "wpe", "c_attn"]}, "lora_embedding_"),
        (llama, {"trainable_token_indices": [1, 2]}, "trainable_tokens_delta"),
    ],
)
def test_lr_embeddings(make, settings, part, mars_type):
    rates = by_name(mars_hf.create(adapted(make, **settings), mars_type=mars_type, lr_embeddings=0.5, lr=3e-3), "lr")
    assert rates == {name: 0.5 if part in name else 3e-3 for name in rates} and 0.5 in rates.values()


@pytest.mark.parametrize(
    ("make", "targets", "split_fused", "split"),
    [
        (gpt2, ["c_attn", "c_fc"], "auto", {f"transformer.h.{layer}.attn.c_attn" for layer in (0, 1)}),
        (gpt2, ["c_attn", "c_fc"], "none", set()),
        (fused, ["qkv", "attention"], "auto", {"qkv", "attention"}),
    ],
)
def test_fused_projections(make, targets, split_fused, split):
    model = adapted(make, target_modules=targets)
    layouts = by_name(mars_hf.create(model, mars_type="mars-m", split_fused=split_fused, lr=3e-3), "layout")
    expected = {f"base_model.model.{name}.lora_B.default.weight" for name in split}
    assert {name for name, layout in layouts.items() if (layout or {}).get("parts") == (8, 8, 8)} == expected
    assert all((layout or {}).get("parts") is None for name, layout in layouts.items() if name not in expected)


# Methods of PEFT whose tensors multiply no activations as matrices do, or are vectors.
OTHER_METHODS = {
    "LoHaConfig": {"r": 2},
    "LoKrConfig": {"r": 2},
    "OFTConfig": {"oft_block_size": 4},
    "BOFTConfig": {},
    "AdaLoraConfig": {"init_r": 2, "total_step": 9},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "VeraConfig": {"r": 2},
    "LNTuningConfig": {"target_modules": ["norm"]},
    "PromptTuningConfig": {"num_virtual_tokens": 3, "target_modules": None},
    "PrefixTuningConfig": {"num_virtual_tokens": 3, "target_modules": None},
}


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_first_line_of_other_methods(method):
    """All of it takes AdamW under the name mars-m."""
    settings = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **OTHER_METHODS[method]}
    if settings["target_modules"] is None:
        del settings["target_modules"]
    model = get_peft_model(llama(), getattr(peft, method)(**settings))
    optimizer = mars_hf.create(model, mars_type="mars-m", lr=3e-3)
    line = one_line_summary(optimizer.param_groups, model, "mars-m")
    assert line.startswith("mars-m (approximate, ") and "): nothing is orthogonalized, " in line
    assert {group["role"] for group in optimizer.param_groups} <= {"adamw", "vector"}


# --- several adapters, switching -------------------------------------------------------------------------------------


def both_adapters() -> PeftModel:
    model = adapted()
    model.add_adapter("other", config())
    model.base_model.set_adapter(["default", "other"])
    return model


def switch(model: PeftModel) -> None:
    """Make another adapter the active one, a new one where there is none."""
    if "other" not in model.peft_config:
        model.add_adapter("other", config())
    model.set_adapter("other")


def test_optimizers_of_adapters():
    model, optimizers = adapted(), {}
    model.add_adapter("other", config())
    for name in ("other", "default"):
        model.set_adapter(name)
        optimizers[name] = mars_hf.create(model, lr=1e-2)
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        train(model, optimizers[name])
        assert all(f".{name}." in param for param in trainable(model))
    model = both_adapters()
    optimizer = mars_hf.create(model, lr=1e-2, weight_decay=0.1)
    train(model, optimizer)
    switch(model)
    train(model, optimizer)
    assert all(".other." in name for name in trainable(model))


@pytest.mark.parametrize(("make", "change"), [(adapted, switch), (gpt2, lambda model: get_peft_model(model, config()))])
def test_step_that_trains_nothing_any_more(make, change):
    model = make()
    optimizer = mars_hf.create(model, lr=3e-3)
    train(model, optimizer)
    change(model)
    before = values(model)
    backward(model)
    with pytest.raises(RuntimeError, match=r"12 trainable parameters that this optimizer lacks, .*lora_A"):
        optimizer.step()
    assert changed(model, before) == set()


# --- Trainer ---------------------------------------------------------------------------------------------------------


def run(folder, model, change=lambda model: None, checkpoint=None, optimizer=None, **settings):
    """Train, with a change of the model after the second step."""
    callback = TrainerCallback()
    callback.on_step_end = lambda args, state, control, model, **_: change(model) if state.global_step == 2 else None
    optimizer = optimizer or mars_hf.create(model, lr=1e-2, mars_type="mars-m")
    made = trainer(arguments(folder, **settings), model, optimizers=(optimizer, None), callbacks=[callback])
    made.train(resume_from_checkpoint=checkpoint)
    return model


def test_trainer_with_a_known_adapter(tmp_path):
    run(tmp_path, both_adapters(), switch)


@pytest.mark.parametrize(
    ("change", "adapters", "settings", "message"),
    [
        (switch, {}, {}, r"holds 0 of the model's .*missing: .*lora_A\.other"),
        (switch, {"bias": "lora_only"}, {}, r"missing: .*lora_A\.other"),  # biases train on: there is a gradient
        (
            lambda model: model.merge_adapter(),
            {},
            {},
            r"adapter 'default' is merged into .* 6 layers.*unmerge_adapter\(\)",
        ),
        # The inputs require gradients, so torch sees nothing wrong.
        (lambda model: model.merge_adapter(), {}, {"gradient_checkpointing": True}, "adapter 'default' is merged into"),
    ],
)
def test_trainer_with_a_changed_adapter(tmp_path, change, adapters, settings, message):
    with pytest.raises(RuntimeError, match=message):
        run(tmp_path, adapted(**adapters), change, **settings)


def test_merged_models(tmp_path):
    """A run that begins merged, and one of a model without its adapters."""
    model = adapted()
    optimizer = mars_hf.create(model, lr=3e-3)
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="is merged into"):
        run(tmp_path, model, optimizer=optimizer)
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    with pytest.raises(ValueError, match="no trainable parameter"):
        mars_hf.create(merged, lr=3e-3)
    merged.requires_grad_(True)
    with pytest.raises(RuntimeError, match="holds 0 of the model's"):
        run(tmp_path, merged, optimizer=optimizer)
    train(merged, mars_hf.create(merged, lr=3e-3))


@pytest.mark.parametrize("mars_type", RULES)
def test_lora_resume(tmp_path, mars_type):
    def go(folder, checkpoint=None, **settings):
        model = adapted()
        rules = [("*.lora_B.*", {"lr": 2e-2})]
        optimizer = mars_hf.create(model, mars_type=mars_type, lr=1e-2, param_rules=rules)
        return run(folder, model, checkpoint=checkpoint, optimizer=optimizer, **settings)

    whole = go(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    resumed = go(tmp_path, str(tmp_path / "checkpoint-2"), max_steps=4)
    assert changed(whole, values(resumed)) == set()


def test_loaded_adapter(tmp_path):
    adapted().save_pretrained(tmp_path)
    load = functools.partial(PeftModel.from_pretrained, gpt2(), tmp_path)
    with pytest.raises(ValueError, match=r"no trainable parameter.*is_trainable=True"):
        mars_hf.create(load(), lr=3e-3)
    model = load(is_trainable=True)
    train(model, mars_hf.create(model, lr=3e-3))
