"""LoRA: which role each tensor takes, what stays untouched, and adapters that change under an optimizer."""

from __future__ import annotations

import functools

import peft
import pytest
import torch
from helpers import arguments, gpt2, trainer
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, TrainerCallback

import mars_hf
from mars_hf import Mars

RULES = ("mars-adamw", "mars-m")
ORTHOGONAL = ("mars-shampoo", "mars-m")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64))


TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "down_proj"]}
MAKERS = {"gpt2": gpt2, "llama": llama}


def config(kind: str = "gpt2", **settings) -> LoraConfig:
    given = {"r": 2, "target_modules": TARGETS[kind], "fan_in_fan_out": kind == "gpt2", "init_lora_weights": False}
    return LoraConfig(**{**given, **settings})


def adapted(kind: str = "gpt2", **settings) -> PeftModel:
    model = MAKERS[kind]()
    torch.manual_seed(1)
    return get_peft_model(model, config(kind, **settings))


def roles(optimizer: Mars) -> dict[str, str]:
    return {name: group["role"] for group in optimizer.param_groups for name in group["param_names"]}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}


def backward(model: nn.Module) -> None:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(3))
    model(input_ids=ids, labels=ids).loss.backward()


def train(model: nn.Module, optimizer: Mars, steps: int = 2) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def trainable(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


# --- roles -----------------------------------------------------------------------------------------------------------

LORA_OF_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (
            "LoraConfig",
            {"target_modules": ["q_proj", "lm_head"]},
            {"q_proj.lora_A": "matrix", "lm_head.lora_B": "adamw"},
        ),
        (
            "LoraConfig",
            LORA_OF_EXPERTS,
            {"q_proj.lora_A": "matrix", "experts.lora_A": "adamw", "experts.lora_B": "adamw"},
        ),
        ("IA3Config", {"target_modules": ["down_proj"], "feedforward_modules": ["down_proj"]}, {"ia3_l": "adamw"}),
        ("AdaLoraConfig", {"target_modules": ["q_proj"], "total_step": 10}, {"lora_A": "adamw", "lora_E": "adamw"}),
        ("LoHaConfig", {"target_modules": ["q_proj"]}, {"hada_w1_a": "adamw"}),
        ("OFTConfig", {"target_modules": ["q_proj"], "oft_block_size": 8}, {"oft_R": "adamw"}),
        ("PromptTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}, {"embedding": "adamw"}),
    ],
    ids=["heads", "experts", "ia3", "adalora", "loha", "oft", "prompts"],
)
def test_roles_of_adapters(kind, settings, expected):
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=50, num_local_experts=3))
    model = llama() if kind == "IA3Config" else model
    found = roles(mars_hf.create(get_peft_model(model, getattr(peft, kind)(**settings)), mars_type="mars-m"))
    for part, role in expected.items():
        assert {found[name] for name in found if part in name} == {role}


@pytest.mark.parametrize("mars_type", RULES)
@pytest.mark.parametrize("kind", MAKERS)
def test_roles_of_lora(kind, mars_type):
    model = adapted(kind)
    base = {name: value for name, value in values(model).items() if name not in trainable(model)}
    optimizer = mars_hf.create(model, mars_type=mars_type, lr=1e-2, weight_decay=0.1)
    assert roles(optimizer) == dict.fromkeys(trainable(model), "matrix")
    assert all(".lora_A." in name or ".lora_B." in name for name in trainable(model))
    before = values(model)
    train(model, optimizer)
    assert changed(model, before) == trainable(model)
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in base.items())
    known = {id(param) for param in model.parameters() if param.requires_grad}
    assert {id(param) for param in optimizer.state} == known
    assert all(param.grad is None for param in model.parameters() if not param.requires_grad)


@pytest.mark.parametrize("mars_type", ORTHOGONAL)
@pytest.mark.parametrize("kind", MAKERS)
def test_updates_are_orthogonal(kind, mars_type):
    """A (rank, in) has orthogonal rows and B (out, rank) orthogonal columns, for each projection of its own."""
    model = adapted(kind)
    before = values(model)
    optimizer = mars_hf.create(model, mars_type=mars_type, lr=1e-2)
    train(model, optimizer, steps=1)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        update = (before[name] - param.detach()).double() / 1e-2
        for matrix in update.split(8) if "c_attn.lora_B" in name else [update]:
            rows, cols = matrix.shape
            scale = max(1, rows / cols) ** 0.5 if mars_type == "mars-shampoo" else 0.2 * max(rows, cols) ** 0.5
            singular = torch.linalg.svdvals(matrix) / scale
            assert 0.6 < singular.min() and singular.max() < 1.25, name


def layouts(optimizer: Mars) -> dict[str, tuple | None]:
    return {
        name: (group["layout"] or {}).get("parts") for group in optimizer.param_groups for name in group["param_names"]
    }


@pytest.mark.parametrize("split_fused", ["auto", "none"])
def test_fused_projection(split_fused):
    model = adapted(target_modules=["c_attn", "c_fc"])
    for name, parts in layouts(mars_hf.create(model, mars_type="mars-m", split_fused=split_fused)).items():
        assert parts == ((8, 8, 8) if split_fused == "auto" and "c_attn.lora_B" in name else None)


class Qkv(nn.Module):
    """A fused projection that is known by its name and sizes, and one that is known by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.attention = nn.MultiheadAttention(8, 2)


def test_other_fused_projections():
    model = get_peft_model(Qkv(), LoraConfig(r=2, target_modules=["qkv", "attention"]))
    found = layouts(mars_hf.create(model, mars_type="mars-m"))
    assert {name for name, parts in found.items() if parts == (8, 8, 8)} == {
        "base_model.model.qkv.lora_B.default.weight",
        "base_model.model.attention.lora_B.default.weight",
    }


@pytest.mark.parametrize("mars_type", RULES)
def test_adapters_of_embeddings(mars_type):
    model = adapted(target_modules=["wte", "wpe", "c_attn"])
    expected = "adamw" if mars_type in ORTHOGONAL else "matrix"
    optimizer = mars_hf.create(model, mars_type=mars_type, lr_embeddings=0.5)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    for name, role in roles(optimizer).items():
        assert role == (expected if "lora_embedding_" in name else "matrix")
        assert rates[name] == (0.5 if "lora_embedding_" in name else 3e-3)
    assert ("embedding: base_model" in str(optimizer)) == (mars_type in ORTHOGONAL)
    before = values(model)
    train(model, optimizer)
    assert changed(model, before) == trainable(model)


@pytest.mark.parametrize("mars_type", RULES)
def test_trainable_tokens(mars_type):
    model = adapted("llama", trainable_token_indices=[1, 2])
    optimizer = mars_hf.create(model, mars_type=mars_type, lr_embeddings=0.5)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {rate for name, rate in rates.items() if "trainable_tokens_delta" in name} == {0.5}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.linear = nn.Linear(8, 4)


@pytest.mark.parametrize("mars_type", RULES)
def test_dora(mars_type):
    model = get_peft_model(Convolutions(), LoraConfig(r=2, target_modules=["conv", "linear"], use_dora=True))
    for name, role in roles(mars_hf.create(model, mars_type=mars_type)).items():
        assert role == ("vector" if "lora_magnitude_vector" in name else "matrix"), name


@pytest.mark.parametrize("mars_type", RULES)
def test_rank_one(mars_type):
    """One row or column cannot be orthogonalized: mars-shampoo and mars-m leave it to AdamW."""
    model = adapted("llama", r=1)
    optimizer = mars_hf.create(model, mars_type=mars_type)
    assert set(roles(optimizer).values()) == {"adamw" if mars_type in ORTHOGONAL else "matrix"}
    assert ("a single row or column" in str(optimizer)) == (mars_type in ORTHOGONAL)
    train(model, optimizer)


@pytest.mark.parametrize("mars_type", RULES)
def test_modules_to_save(mars_type):
    model = adapted("llama", modules_to_save=["embed_tokens", "lm_head", "norm"])
    optimizer = mars_hf.create(model, mars_type=mars_type)
    of_tables = "adamw" if mars_type in ORTHOGONAL else "matrix"
    for name, role in roles(optimizer).items():
        kinds = {"embed_tokens": of_tables, "lm_head": of_tables, "norm": "vector", "lora": "matrix"}
        assert role == next(kind for part, kind in kinds.items() if part in name)
    before = values(model)
    train(model, optimizer)
    assert changed(model, before) == trainable(model)
    assert not any("original_module" in name for name in trainable(model))


# --- several adapters, switching -------------------------------------------------------------------------------------


def test_optimizer_of_each_adapter():
    model = adapted()
    model.add_adapter("other", config())
    optimizers = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        optimizers[name] = mars_hf.create(model, lr=1e-2)
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        before = values(model)
        train(model, optimizers[name])
        assert changed(model, before) == trainable(model) and all(f".{name}." in own for own in trainable(model))


def test_optimizer_of_both_adapters():
    model = adapted()
    model.add_adapter("other", config())
    model.base_model.set_adapter(["default", "other"])
    optimizer = mars_hf.create(model, lr=1e-2, weight_decay=0.1)
    train(model, optimizer)
    model.set_adapter("other")
    before = values(model)
    train(model, optimizer)
    assert changed(model, before) == trainable(model) and all(".other." in name for name in trainable(model))


@pytest.mark.parametrize("change", ["another adapter", "lora"])
def test_step_that_trains_nothing_any_more(change):
    model = adapted() if change == "another adapter" else gpt2()
    optimizer = mars_hf.create(model)
    train(model, optimizer)
    if change == "another adapter":
        model.add_adapter("other", config())
        model.set_adapter("other")
    else:
        model = get_peft_model(model, config())
    before = values(model)
    backward(model)
    with pytest.raises(RuntimeError, match=r"no parameter of this optimizer requires a gradient.*mars_hf\.create"):
        optimizer.step()
    assert changed(model, before) == set()


class Do(TrainerCallback):
    """Do something to the model after the second step."""

    def __init__(self, change) -> None:
        self.change = change

    def on_step_end(self, args, state, control, model=None, **_) -> None:
        if state.global_step == 2:
            self.change(model)


def switch(model: PeftModel) -> None:
    model.add_adapter("other", config())
    model.set_adapter("other")


def run(folder, model, change=None, checkpoint=None, optimizer=None, **settings):
    optimizer = optimizer or mars_hf.create(model, lr=1e-2, mars_type="mars-m")
    callbacks = [] if change is None else [Do(change)]
    made = trainer(arguments(folder, **settings), model, optimizers=(optimizer, None), callbacks=callbacks)
    made.train(resume_from_checkpoint=checkpoint)
    return model


def test_trainer_with_another_adapter(tmp_path):
    with pytest.raises(RuntimeError, match=r"has none of the model's .* it lacks .*lora_A\.other"):
        run(tmp_path, adapted(), switch)


def test_trainer_with_missing_adapters(tmp_path):
    """Biases train on, so the loss has a gradient, and the optimizer has something to step."""
    with pytest.raises(RuntimeError, match=r"it lacks .*lora_A\.other"):
        run(tmp_path, adapted(bias="lora_only"), switch)


def test_trainer_with_a_known_adapter(tmp_path):
    model = adapted()
    model.add_adapter("other", config())
    model.base_model.set_adapter(["default", "other"])
    run(tmp_path, model, lambda model: model.set_adapter("other"))


# --- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_with_a_merged_adapter(tmp_path, checkpointing):
    """With gradient checkpointing the inputs require gradients, so torch sees nothing wrong."""
    with pytest.raises(RuntimeError, match=r"adapter 'default' is merged into .* 6 layers.*unmerge_adapter\(\)"):
        run(tmp_path, adapted(), lambda model: model.merge_adapter(), gradient_checkpointing=checkpointing)


def test_trainer_that_begins_merged(tmp_path):
    model = adapted()
    optimizer = mars_hf.create(model)
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="is merged into"):
        run(tmp_path, model, optimizer=optimizer)


def test_model_without_its_adapters(tmp_path):
    model = adapted()
    optimizer = mars_hf.create(model)
    merged = model.merge_and_unload()
    with pytest.raises(ValueError, match="no trainable parameter"):
        mars_hf.create(merged)
    merged.requires_grad_(True)
    with pytest.raises(RuntimeError, match="has none of the model's"):
        run(tmp_path, merged, optimizer=optimizer)
    before = values(merged)
    train(merged, mars_hf.create(merged))
    assert changed(merged, before) == trainable(merged)


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mars_type", RULES)
def test_resume(tmp_path, mars_type):
    def go(folder, checkpoint=None, **settings):
        model = adapted()
        rules = [("*.lora_B.*", {"lr": 2e-2})]
        optimizer = mars_hf.create(model, mars_type=mars_type, lr=1e-2, param_rules=rules)
        return run(folder, model, checkpoint=checkpoint, optimizer=optimizer, **settings)

    whole = go(tmp_path / "whole", max_steps=4)
    go(tmp_path / "parts", max_steps=2, save_strategy="steps", save_steps=2)
    resumed = go(tmp_path / "parts", str(tmp_path / "parts" / "checkpoint-2"), max_steps=4)
    assert changed(whole, values(resumed)) == set()


def test_loaded_adapter(tmp_path):
    adapted().save_pretrained(tmp_path)
    load = functools.partial(PeftModel.from_pretrained, gpt2(), tmp_path)
    with pytest.raises(ValueError, match=r"no trainable parameter.*is_trainable=True"):
        mars_hf.create(load())
    model = load(is_trainable=True)
    before = values(model)
    train(model, mars_hf.create(model))
    assert changed(model, before) == trainable(model)
