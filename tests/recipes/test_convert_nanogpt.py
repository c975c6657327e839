"""Weights move between nanoGPT's ckpt.pt and GPT2LMHeadModel without a change of logits; a mistake gets one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import convert_nanogpt
import pytest
import torch
from helpers import equal
from transformers import AutoTokenizer, GPT2LMHeadModel, GPT2Tokenizer, LlamaConfig, LlamaForCausalLM

VOCAB, BLOCK, WIDTH, HEADS, LAYERS = 40, 16, 12, 3, 2
IDS = torch.arange(3 * BLOCK).reshape(3, BLOCK) * 7 % VOCAB
GELUS = {  # of the two codes
    "nanogpt": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "mars": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def content_of(code: str = "nanogpt", bias: bool = False, vocab: int = VOCAB) -> dict[str, Any]:
    """Return model_args and random weights of nanoGPT; the official repository's attention has causal masks, too."""
    torch.manual_seed(0)
    block = {"ln_1": [1], "attn.c_attn": [3, 1], "attn.c_proj": [1, 1], "ln_2": [1]}
    block |= {"mlp.c_fc": [4, 1], "mlp.c_proj": [1, 4]}
    shapes = {f"h.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in block.items()} | {"ln_f": [1]}
    weights = {f"{name}.weight": torch.randn([WIDTH * count for count in shape]) / 2 for name, shape in shapes.items()}
    weights |= {"wte.weight": torch.randn(vocab, WIDTH), "wpe.weight": torch.randn(BLOCK, WIDTH)}
    args = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": BLOCK, "bias": bias}
    args |= {"vocab_size": vocab, "dropout": 0.0}
    if bias:
        weights |= {f"{name}.bias": torch.randn(WIDTH * shape[0]) for name, shape in shapes.items()}
    if code == "mars":
        weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, BLOCK, BLOCK).tril() for layer in range(LAYERS)}
        args["scale_attn_by_inverse_layer_idx"] = True
    weights = {f"transformer.{name}": value for name, value in weights.items()}
    return {"model": weights | {"lm_head.weight": weights["transformer.wte.weight"]}, "model_args": args}


def logits(weights: dict[str, torch.Tensor], code: str = "nanogpt") -> torch.Tensor:
    """Return what the code's model.py computes of `IDS`, written out."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    x = weights["transformer.wte.weight"][IDS] + weights["transformer.wpe.weight"]
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}."
        parts = linear(f"{block}attn.c_attn", norm(f"{block}ln_1", x)).split(WIDTH, dim=2)
        q, k, v = (part.view(3, BLOCK, HEADS, -1).transpose(1, 2) for part in parts)
        scores = q @ k.mT / math.sqrt(WIDTH / HEADS) / (layer + 1 if code == "mars" else 1)
        mixed = scores.masked_fill(torch.ones(BLOCK, BLOCK).triu(1).bool(), -math.inf).softmax(-1) @ v
        x = x + linear(f"{block}attn.c_proj", mixed.transpose(1, 2).flatten(2))
        hidden = linear(f"{block}mlp.c_fc", norm(f"{block}ln_2", x))
        x = x + linear(f"{block}mlp.c_proj", GELUS[code](hidden))
    return norm("transformer.ln_f", x) @ weights["lm_head.weight"].T


@torch.no_grad()
def difference(folder: Path, expected: torch.Tensor) -> float:
    """Return the largest difference of a converted model's logits, relative to their deviation."""
    logits = GPT2LMHeadModel.from_pretrained(folder).eval()(IDS).logits
    return float((logits - expected).abs().max() / expected.std())


def save(path: Path, /, **changes: Any) -> Path:
    """Write a checkpoint with the keys of both trainers; changes state others."""
    content = {**content_of(), "iter_num": 7, "config": {"dataset": "x"}, "best_val_loss": torch.tensor(3.25)}
    torch.save(content | changes, path)
    return path


def convert(*argv: object) -> None:
    convert_nanogpt.main([str(word) for word in argv])


def refused(capsys, *argv: object) -> str:
    """Return the line that a conversion is refused with."""
    with pytest.raises(SystemExit) as end:
        convert(*argv)
    assert end.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("convert_nanogpt.py: ")]
    return line


def assert_same(content: dict[str, Any], folder: Path) -> None:
    """Convert a folder back, and compare bit for bit."""
    convert(folder, folder.with_name("back"), "--to_nanogpt")
    back = torch.load(folder.with_name("back") / "ckpt.pt", weights_only=True)
    assert back["model_args"] == content["model_args"] and equal(back["model"], content["model"])
    assert back["model"]["lm_head.weight"].data_ptr() == back["model"]["transformer.wte.weight"].data_ptr()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("code", "other"), [("nanogpt", "gelu_new"), ("mars", "gelu")])
def test_logits_are_equal(tmp_path, code, bias, other):
    """And the way back gives the same file, masks too; the two GELUs differ enough for the wrong one to show."""
    content = content_of(code, bias)
    path, expected = save(tmp_path / "ckpt.pt", **content), logits(content["model"], code)
    convert(path, tmp_path / "out")
    convert(path, tmp_path / "wrong", "--activation_function", other)
    assert difference(tmp_path / "out", expected) < 1e-5 and difference(tmp_path / "wrong", expected) > 1e-4
    biases = [p for name, p in GPT2LMHeadModel.from_pretrained(tmp_path / "out").named_parameters() if "bias" in name]
    assert len(biases) == 2 * 6 + 1 and all(p.any() == bias for p in biases)
    assert_same(content, tmp_path / "out")


def test_bfloat16_and_names_of_compiled_and_wrapped_models(tmp_path):
    content = content_of(bias=True)
    content["model"] = {name: value.bfloat16() for name, value in content["model"].items()}
    names = content["model"].keys() - {"lm_head.weight"}
    save(tmp_path / "ckpt.pt", **content | {"model": {f"module._orig_mod.{n}": content["model"][n] for n in names}})
    convert(tmp_path, tmp_path / "out")  # the folder stands for its file
    assert_same(content, tmp_path / "out")


@pytest.mark.parametrize("at_hand", [True, False])
def test_padded_vocabulary_and_tokenizer(tmp_path, monkeypatch, capsys, at_hand):
    tokenizer = GPT2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[])
    from_hub = mock.Mock(side_effect=[tokenizer if at_hand else OSError("out of reach")])
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_hub)
    convert(save(tmp_path / "ckpt.pt", **content_of(vocab=50304)), tmp_path / "out")
    from_hub.assert_called_once_with("openai-community/gpt2", trust_remote_code=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (50304, 50256)
    assert bool(list((tmp_path / "out").glob("tokenizer*"))) == at_hand
    assert ("tokenizer   none: out of reach" in capsys.readouterr().out) != at_hand


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"config": {"x": print}}, "holds more than tensors and plain values"),  # unpickling would call what it names
        ({"model_args": {}}, "KeyError: 'vocab_size'"),
        ({"model": [1]}, "AttributeError"),
        (content_of() | {"model_args": content_of(bias=True)["model_args"]}, 'Missing key(s) in state_dict: "transfo'),
        ({"model_args": content_of(vocab=41)["model_args"]}, "size mismatch for transformer.wte.weight"),
        ({"model": content_of()["model"] | {"lm_head.weight": torch.zeros(VOCAB, WIDTH)}}, "lm_head.weight differs"),
    ],
    ids=["code", "no args", "a list", "biases", "vocabulary", "head"],
)
def test_other_contents(tmp_path, changes, line, capsys):
    path = save(tmp_path / "ckpt.pt", **changes)
    assert line in refused(capsys, path, tmp_path / "out")
    path.write_bytes(path.read_bytes()[:-1000])
    assert "is damaged" in refused(capsys, path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"n_layer": 3}, "lacks 12 weights"),
        ({"activation_function": "relu"}, "activation_function=relu; model.py of mars has gelu or gelu_new"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True; model.py of nanogpt has"),
    ],
)
def test_folders_that_nanogpt_cannot_compute(tmp_path, capsys, changes, line):
    convert(save(tmp_path / "ckpt.pt"), tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config | changes))
    assert line in refused(capsys, tmp_path / "folder", tmp_path / "out", "--to_nanogpt")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_or_left_half_done(tmp_path, capsys, monkeypatch):
    path = save(tmp_path / "ckpt.pt")
    convert(path, tmp_path / "folder")
    assert "exists already" in refused(capsys, path, tmp_path / "folder")
    assert "exists already" in refused(capsys, tmp_path / "folder", tmp_path, "--to_nanogpt")
    assert "no such file" in refused(capsys, tmp_path / "none.pt", tmp_path / "out")
    argv = [tmp_path / "folder", tmp_path / "out", "--to_nanogpt", "--activation_function", "gelu"]
    assert "--activation_function is for reading a ckpt.pt" in refused(capsys, *argv)
    fails = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", fails)
    assert "No space left" in refused(capsys, path, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ckpt.pt", "folder"]
    llama = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "llama")
    assert "nanoGPT is gpt2" in refused(capsys, tmp_path / "llama", tmp_path / "out", "--to_nanogpt")
