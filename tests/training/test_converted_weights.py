"""Weights that transformers saves under other names than the model has are resumed to the bit, or the run stops."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from helpers import Blocks, arguments, gpt2, mars_trainer, trainer
from safetensors.torch import load_file, save_file
from small_models import classes_by_type, small_model
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    TrainerCallback,
)
from transformers.conversion_mapping import get_model_conversion_mapping

import mars_hf
from mars_hf.training import converted_weights
from mars_hf.training.converted_weights import restore

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
# Files that transformers itself does not read back: two parts of the one have the same names, and the other's
# from_pretrained fails.
STOPPED = {"PixioBackbone", "JevForDecision"}
SAVES = {"save_strategy": "steps", "save_steps": 2, "optim": "mars_m", "learning_rate": 0.01}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    mars_hf.register()


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    sizes = {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 3, "head_dim": 8}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **sizes, pad_token_id=0))


def neox(seed: int = 0) -> GPTNeoXForCausalLM:
    torch.manual_seed(seed)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, intermediate_size=24))


def differing(model: PreTrainedModel, expected: PreTrainedModel) -> list[str]:
    values = expected.state_dict()
    assert values.keys() == model.state_dict().keys()
    return [name for name, value in model.state_dict().items() if not torch.equal(value, values[name])]


def load_as_trainer_does(model: PreTrainedModel, folder) -> None:
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)


def fill(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Give all parameters values that no initialization gives."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


class Recorder(TrainerCallback):
    """Keep the model with which a run begins."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.model = copy.deepcopy(model)


@pytest.mark.parametrize(
    ("way", "make_model"),
    [("create", neox), ("MarsTrainer", neox), ("optim", neox), ("factory", neox), ("create", mixtral)],
)
def test_resumed_run_is_the_same_to_the_bit(tmp_path, make_model, way, caplog):
    def make(seed: int):
        args = arguments(tmp_path, **SAVES)
        model = make_model(seed)
        if way == "MarsTrainer":
            return mars_trainer(args, model)
        if way == "factory":
            return trainer(args, model, optimizer_cls_and_kwargs=mars_hf.factory(args, mars_type="mars-m"))
        if way == "create":
            optimizer = mars_hf.create(model, mars_type="mars-m", lr=0.01)
            return trainer(args, model, optimizers=(optimizer, None))
        return trainer(args, model)

    whole = make(0)
    whole.train()
    resumed = make(1)
    with caplog.at_level(logging.INFO, logger="mars_hf"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert differing(resumed.model, whole.model) == []
    assert "loaded weights of" in caplog.text


@pytest.mark.parametrize("make_model", [mixtral, neox])
def test_best_model_is_loaded_at_the_end(tmp_path, make_model):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    args = arguments(tmp_path, **SAVES, **settings, metric_for_best_model="eval_loss")  # so the first is the best
    run = mars_trainer(args, make_model(), eval_dataset=Blocks(8))
    run.train()
    best = run.state.best_model_checkpoint
    assert best.endswith("checkpoint-2")
    assert differing(run.model, make_model().from_pretrained(best)) == []


def test_runs_without_mars_stay_as_they_are(tmp_path):
    args = arguments(tmp_path, **{**SAVES, "optim": "adamw_torch"})
    trainer(args, neox()).train()
    resumed = trainer(arguments(tmp_path, optim="adamw_torch", max_steps=3), neox(1))
    resumed.add_callback(Recorder())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    saved = GPTNeoXForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert differing(resumed.callback_handler.callbacks[-1].model, saved) == ["lm_head.weight"]


def test_half_precision_in_parts(tmp_path):
    expected, model = (fill(mixtral().to(torch.bfloat16), seed) for seed in (1, 2))
    for each in (expected, model):
        each.model.norm.float()
    expected.save_pretrained(tmp_path)
    load_as_trainer_does(model, tmp_path)
    assert restore(model, tmp_path)
    assert differing(model, expected) == []
    assert model.model.norm.weight.dtype == torch.float32 and model.lm_head.weight.dtype == torch.bfloat16


def test_weights_of_several_files_with_nan(tmp_path):
    expected, model = fill(mixtral(), 1), fill(mixtral(), 2)
    with torch.no_grad():
        expected.model.layers[1].mlp.experts.down_proj[2, 0, 0] = torch.nan
    expected.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert restore(model, tmp_path)
    different = differing(model, expected)  # a NaN is no number
    assert different == ["model.layers.1.mlp.experts.down_proj"]
    assert model.state_dict()[different[0]].isnan().sum() == 1


def test_nothing_to_restore(tmp_path):
    for number, model in enumerate([gpt2(), torch.nn.Linear(2, 2), mixtral()]):
        before = copy.deepcopy(model.state_dict())
        folder = tmp_path / str(number)
        folder.mkdir()
        if number < 2:
            save_file({"weight": torch.zeros(2, 2)}, folder / "model.safetensors")
        assert not restore(model, folder)  # the last folder has no weights, as those of adapters
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_files_that_lack_weights_stop_the_run(tmp_path):
    fill(neox(), 1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["gpt_neox.final_layer_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"GPTNeoXForCausalLM saves .*1 are lost, .*final_layer_norm\.weight first"):
        restore(neox(2), tmp_path)


def test_weights_that_are_saved_with_other_values(tmp_path, monkeypatch):
    """Under their own names: what transformers does not read back as it wrote it stops the run."""
    expected, model = fill(neox(), 1), fill(neox(), 2)
    expected.save_pretrained(tmp_path)
    own = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    save_file({name: -tensor for name, tensor in own.items()}, tmp_path / "model.safetensors", {"format": "pt"})

    def negate(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: -tensor for name, tensor in weights.items()}

    monkeypatch.setattr(converted_weights, "revert_weight_conversion", negate)
    load_as_trainer_does(model, tmp_path)
    with pytest.raises(RuntimeError, match="are lost"):
        restore(model, tmp_path)


def test_weights_that_are_read_back_wrong(tmp_path, monkeypatch):
    """Though nothing is reported to be missing."""
    fill(neox(), 1).save_pretrained(tmp_path)
    monkeypatch.setattr(converted_weights, "_load", lambda *_: (fill(neox(), 3), {"missing_keys": set()}))
    with pytest.raises(RuntimeError, match=r": \d+ are lost, "):
        restore(neox(2), tmp_path)


@pytest.mark.slow
def test_every_family_that_transformers_converts(tmp_path):
    wrong, were_wrong, stopped, seen, not_made = {}, set(), set(), set(), set()
    for model_type, kinds in classes_by_type().items():
        kind = kinds[0]
        on_meta = small_model(kind)
        if on_meta is None:
            not_made.add(model_type)
            continue
        if kind in seen or not get_model_conversion_mapping(on_meta, add_legacy=False):
            continue
        seen.add(kind)
        folder = tmp_path / model_type
        expected = fill(kind(on_meta.config), 1)
        model = fill(copy.deepcopy(expected), 2)
        expected.save_pretrained(folder)
        load_as_trainer_does(model, folder)
        if differing(model, expected):
            were_wrong.add(kind.__name__)
        try:
            restore(model, folder)
        except RuntimeError:
            stopped.add(kind.__name__)
            continue
        if differing(model, expected):
            wrong[kind.__name__] = differing(model, expected)
        for file in folder.iterdir():
            file.unlink()
    print(f"{len(seen)} classes, {len(were_wrong)} wrong before, stopped {stopped}, not made {not_made}")
    assert wrong == {}
    assert stopped <= STOPPED
    assert len(seen) > 140 and len(were_wrong) > 110
