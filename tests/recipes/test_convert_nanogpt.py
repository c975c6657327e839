"""Weights move between nanoGPT's ckpt.pt and GPT2LMHeadModel without a change of logits; a mistake gets one line."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from unittest import mock

import convert_nanogpt
import pytest
import torch
from tiny_nanogpt import BLOCK, VOCAB, TinyGPT, save
from transformers import AutoTokenizer, GPT2LMHeadModel, GPT2Tokenizer, LlamaConfig, LlamaForCausalLM

IDS = torch.arange(3 * BLOCK).reshape(3, BLOCK) * 7 % VOCAB


def tiny(code: str = "nanogpt", **settings) -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(code, **settings)


def convert(*argv: object) -> None:
    convert_nanogpt.main([str(word) for word in argv])


def refused(capsys, *argv: object) -> str:
    """Return the line that a conversion is refused with."""
    with pytest.raises(SystemExit) as end:
        convert(*argv)
    assert end.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("convert_nanogpt.py: ")]
    return line


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return GPT2LMHeadModel.from_pretrained(folder).eval()(IDS).logits


@torch.no_grad()
def difference(folder: Path, model: TinyGPT) -> float:
    """Return the largest difference of logits."""
    return float((logits(folder) - model(IDS)).abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("code", "other"), [("nanogpt", "gelu_new"), ("mars", "gelu")])
def test_logits_are_equal(tmp_path, code, bias, other):
    """The two GELUs differ enough for the wrong one to show."""
    model = tiny(code, bias=bias)
    path = save(tmp_path / "ckpt.pt", model)
    convert(path, tmp_path / "out")
    convert(path, tmp_path / "wrong", "--activation_function", other)
    assert model(IDS).std() > 1
    assert difference(tmp_path / "out", model) < 1e-5
    assert difference(tmp_path / "wrong", model) > 1e-4
    biases = [p for name, p in GPT2LMHeadModel.from_pretrained(tmp_path / "out").named_parameters() if "bias" in name]
    assert len(biases) == 2 * 6 + 1 and all(p.any() == bias for p in biases)


def test_prefixes_of_compiled_and_wrapped_models(tmp_path):
    model = tiny()
    assert next(iter(torch.compile(model).state_dict())).startswith("_orig_mod.")
    prefix = "module._orig_mod."
    weights = {prefix + name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save(tmp_path / "ckpt.pt", model, model=weights)
    convert(tmp_path, tmp_path / "out")  # the folder stands for its file
    assert difference(tmp_path / "out", model) < 1e-5


@pytest.mark.parametrize(
    ("code", "bias", "dtype"),
    [
        ("nanogpt", False, torch.float32),
        ("nanogpt", True, torch.bfloat16),
        ("mars", False, torch.float32),
        ("mars", True, torch.float32),
    ],
)
def test_round_trip_bit_for_bit(tmp_path, code, bias, dtype):
    model = tiny(code, bias=bias).to(dtype)
    convert(save(tmp_path / "ckpt.pt", model), tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "back", "--to_nanogpt")
    content = torch.load(tmp_path / "back" / "ckpt.pt", weights_only=True)
    assert content["model_args"] == model.model_args()
    assert content["model"]["lm_head.weight"].data_ptr() == content["model"]["transformer.wte.weight"].data_ptr()
    again = tiny(code, bias=bias).to(dtype)
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    again.load_state_dict(content["model"])  # strict: masks too
    for name, param in again.named_parameters():
        assert torch.equal(param, model.get_parameter(name)), name
        assert content["model"][name].dtype == dtype


@pytest.mark.parametrize("at_hand", [True, False])
def test_padded_vocabulary_and_tokenizer(tmp_path, monkeypatch, capsys, at_hand):
    def from_hub(name, trust_remote_code):
        assert not trust_remote_code
        if not at_hand:
            raise OSError("out of reach")
        return GPT2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[])

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_hub)
    model = tiny()
    model.transformer["wte"] = torch.nn.Embedding(50304, 12)
    torch.nn.init.normal_(model.transformer["wte"].weight, std=0.2)
    model.lm_head.weight = model.transformer["wte"].weight
    save(tmp_path / "ckpt.pt", model, model_args=model.model_args() | {"vocab_size": 50304})
    convert(tmp_path, tmp_path / "out")
    assert difference(tmp_path / "out", model) < 1e-5
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out").config.eos_token_id == 50256
    assert bool(list((tmp_path / "out").glob("tokenizer*"))) == at_hand
    assert ("tokenizer   none: out of reach" in capsys.readouterr().out) != at_hand


class Runs:
    def __reduce__(self):
        return os.mkdir, (str(Path("ran")),)


def test_code_in_a_checkpoint_does_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "ckpt.pt", tiny(), config={"x": Runs()})
    assert "holds more than tensors and plain values" in refused(capsys, path, tmp_path / "out")
    assert not Path("ran").exists() and not (tmp_path / "out").exists()
    pickle.loads(pickle.dumps(Runs()))  # it is one that would
    assert Path("ran").exists()


ARGS = tiny().model_args()
WEIGHTS = tiny().state_dict()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (None, "is damaged"),
        ({"model_args": None}, "KeyError: 'model_args'"),
        ({"model": [1]}, "AttributeError"),
        ({"model_args": ARGS | {"bias": True}}, 'Missing key(s) in state_dict: "transformer.h.0.ln_1.bias"'),
        ({"model_args": ARGS | {"n_layer": 1}}, 'Unexpected key(s) in state_dict: "transformer.h.1.ln_1.weight"'),
        ({"model_args": ARGS | {"vocab_size": 41}}, "size mismatch for transformer.wte.weight"),
        ({"model": WEIGHTS | {"lm_head.weight": WEIGHTS["lm_head.weight"] + 1}}, "lm_head.weight differs"),
    ],
    ids=str,
)
def test_other_contents(tmp_path, changes, line, capsys):
    path = save(tmp_path / "ckpt.pt", tiny(), **(changes or {}))
    if changes is None:
        path.write_bytes(path.read_bytes()[:-1000])
    assert line in refused(capsys, path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "llama"}, "nanoGPT is gpt2"),
        ({"n_layer": 3}, "lacks 12 weights"),
        ({"activation_function": "relu"}, "activation_function=relu; model.py of mars has gelu or gelu_new"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True; model.py of nanogpt has"),
    ],
)
def test_folders_that_nanogpt_cannot_compute(tmp_path, capsys, changes, line):
    folder = tmp_path / "folder"
    if "model_type" in changes:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(folder)
    else:
        convert(save(tmp_path / "ckpt.pt", tiny()), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    assert line in refused(capsys, folder, tmp_path / "out", "--to_nanogpt")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_or_left_half_done(tmp_path, capsys, monkeypatch):
    path = save(tmp_path / "ckpt.pt", tiny())
    convert(path, tmp_path / "folder")
    assert "exists already" in refused(capsys, path, tmp_path / "folder")
    assert "exists already" in refused(capsys, tmp_path / "folder", tmp_path, "--to_nanogpt")
    assert "no such file" in refused(capsys, tmp_path / "none.pt", tmp_path / "out")

    fails = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", fails)
    assert "No space left" in refused(capsys, path, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ckpt.pt", "folder"]
