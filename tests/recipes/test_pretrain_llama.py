"""Pretraining with grouped-query attention: Llama's split projections and Phi-3's fused ones train alike."""

from __future__ import annotations

import copy
import json

import pretrain_llama
import pytest
import torch
from pretrain_llama import ModelArguments, build
from pretraining.data import token_files

import mars_hf

SIZES = [
    *("--hidden_size", "32", "--intermediate_size", "48", "--num_hidden_layers", "2", "--num_attention_heads", "4"),
    *("--num_key_value_heads", "2", "--block_size", "32"),
]
TINY = [
    *SIZES,
    *("--max_steps", "20", "--warmup_steps", "2", "--logging_steps", "10", "--eval_steps", "20"),
    *("--max_eval_blocks", "8", "--per_device_train_batch_size", "4", "--disable_tqdm", "true", "--use_cpu", "true"),
]


def sizes(projections: str) -> ModelArguments:
    given = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "block_size": 32}
    return ModelArguments(projections=projections, num_attention_heads=4, num_key_value_heads=2, **given)


def fuse(split: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return Llama's weights under Phi-3's names."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    of = {part: (fused, names) for fused, names in parts.items() for part in names}
    found = {}
    for name, weight in split.items():
        part = name.split(".")[-2]
        if part not in of:
            found[name] = weight
        elif part == of[part][1][0]:
            fused, names = of[part]
            found[name.replace(part, fused)] = torch.cat([split[name.replace(part, other)] for other in names])
    return found


@pytest.fixture(scope="module")
def twins(tokens):
    """Return both models with the same weights."""
    torch.manual_seed(0)
    tokenizer = token_files.load(tokens).tokenizer
    llama, phi3 = (build(sizes(projections), tokenizer) for projections in ("split", "fused"))
    phi3.load_state_dict(fuse(llama.state_dict()))
    return llama, phi3


def test_both_compute_the_same_function(twins):
    llama, phi3 = twins
    assert llama.config.num_key_value_heads == 2 < llama.config.num_attention_heads
    assert llama.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    assert phi3.model.layers[0].self_attn.qkv_proj.weight.shape == (32 + 2 * 16, 32)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(phi3(ids).logits, llama(ids).logits)


def steps(model: torch.nn.Module, **settings: object) -> dict[str, torch.Tensor]:
    """Return the weights after three steps of mars-m in float64."""
    model = model.double()
    optimizer = mars_hf.create(model, mars_type="mars-m", lr=1e-2, ns_dtype=torch.float64, **settings)
    for start in range(3):
        ids = torch.arange(start, start + 12)[None]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_mars_m_orthogonalizes_fused_projections_part_by_part(twins):
    """Clipping takes the norm of a whole tensor, so it is off here."""
    llama, phi3 = twins
    split = fuse(steps(copy.deepcopy(llama), clip_threshold=None))
    by_part = steps(copy.deepcopy(phi3), clip_threshold=None)
    whole = steps(copy.deepcopy(phi3), clip_threshold=None, split_fused="none")
    for name, weight in split.items():
        torch.testing.assert_close(by_part[name], weight, rtol=1e-9, atol=1e-9)
        if "qkv_proj" in name or "gate_up_proj" in name:
            assert (whole[name] - weight).abs().max() > 1e-4


@pytest.mark.parametrize("projections", ["split", "fused"])
def test_a_run_learns(projections, tokens, tmp_path, capsys):
    output = tmp_path / "run"
    argv = ["--data_dir", str(tokens), "--output_dir", str(output), "--projections", projections]
    trainer, found = pretrain_llama.train([*TINY, *argv])
    assert json.loads((output / "metrics.json").read_text())["eval_loss"] == found["eval_loss"]
    assert found["eval_loss"] < found["at_step_0"]["eval_loss"] - 0.2
    assert found["optimizer"] == "mars_m" and found["learning_rate"] == pretrain_llama.STARTS["mars_m"].learning_rate
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, mars_hf.Mars)
    matrices = {name for group in optimizer.param_groups if group["role"] == "matrix" for name in group["param_names"]}
    names = ("qkv_proj", "gate_up_proj") if projections == "fused" else ("q_proj", "k_proj", "v_proj", "gate_proj")
    expected = (*names, *("o_proj", "down_proj"), *(["up_proj"] if projections == "split" else []))
    assert {name.split(".")[-2] for name in matrices} == set(expected)
    embeddings = [group for group in optimizer.param_groups if group["role"] == "adamw"]
    assert [group["param_names"] for group in embeddings] == [["model.embed_tokens.weight"]]
    assert "mars-m" in (output / "README.md").read_text() and (output / "mars.json").is_file()
    assert f"projections {projections}, 2 key-value heads for 4 query heads" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["mars_adamw", "adamw_torch"])
def test_other_optimizers(optim, tokens, tmp_path):
    argv = ["--data_dir", str(tokens), "--output_dir", str(tmp_path / "run"), "--optim", optim]
    trainer, found = pretrain_llama.train([*TINY, *argv])
    assert type(trainer.optimizer.optimizer).__name__ == ("Mars" if optim == "mars_adamw" else "AdamW")
    assert found["learning_rate"] == pretrain_llama.STARTS[optim].learning_rate
    assert found["eval_loss"] < found["at_step_0"]["eval_loss"] - 0.1
    assert (tmp_path / "run" / "README.md").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--projections merged", ("--projections", "'merged'", "split", "fused")),
        ("--num_key_value_heads 3", ("--num_attention_heads 4", "not a multiple", "--num_key_value_heads 3")),
        ("--hidden_size 30", ("--hidden_size 30", "not a multiple", "--num_attention_heads 4")),
        ("--hidden_size 12", ("--hidden_size 12", "is odd", "give another number of heads")),
        ("--optim mars_n", ("--optim 'mars_n' is unknown", "did you mean mars_m", "accepted: mars_m, mars_adamw")),
        ("--optim mars_lion", ("--optim mars_lion", "has no learning rate", "give --learning_rate")),
        ("--optim_args gama=1", ("gama", "gamma")),
        ("--learning_rate -1", ("'-1' is not a finite number from 0 on",)),
        ("--do_eval true", ("--do_eval would be ignored",)),
        ("--data_dir nowhere", ("nowhere has no meta.json", "prepare_data.py")),
        ("--resume_from_checkpoint gone", ("--resume_from_checkpoint gone: no such folder",)),
    ],
)
def test_mistakes(words, said, tmp_path, monkeypatch, capsys, tokens):
    monkeypatch.chdir(tmp_path)
    given = [] if "--data_dir" in words else ["--data_dir", str(tokens)]
    with pytest.raises(SystemExit) as end:
        pretrain_llama.main(["--num_attention_heads", "4", "--use_cpu", "true", *given, *words.split()])
    assert end.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(part in line for part in said), line
    assert not (tmp_path / "runs" / "llama-split-mars_m" / "metrics.json").exists()
