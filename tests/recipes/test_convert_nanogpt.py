"""Weights move between nanoGPT's ckpt.pt and GPT2LMHeadModel without a change of logits; a mistake gets one line."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from unittest import mock

import convert_nanogpt
import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel, GPT2Tokenizer, LlamaConfig, LlamaForCausalLM

VOCAB, BLOCK, WIDTH, HEADS, LAYERS = 40, 16, 12, 3, 2
IDS = torch.arange(3 * BLOCK).reshape(3, BLOCK) * 7 % VOCAB
GELUS = {  # of the two codes
    "nanogpt": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "mars": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def weights_of(code: str = "nanogpt", bias: bool = False, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Return random weights under nanoGPT's names; the official repository's attention has causal masks, too."""
    torch.manual_seed(0)
    block = {"ln_1": [1], "attn.c_attn": [3, 1], "attn.c_proj": [1, 1], "ln_2": [1]}
    block |= {"mlp.c_fc": [4, 1], "mlp.c_proj": [1, 4]}
    shapes = {f"h.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in block.items()}
    weights = {"transformer.wte.weight": torch.randn(vocab, WIDTH), "transformer.wpe.weight": torch.randn(BLOCK, WIDTH)}
    for name, shape in {**shapes, "ln_f": [1]}.items():
        weights[f"transformer.{name}.weight"] = torch.randn([WIDTH * count for count in shape]) / 2
        if bias:
            weights[f"transformer.{name}.bias"] = torch.randn(WIDTH * shape[0])
    if code == "mars":
        mask = torch.ones(1, 1, BLOCK, BLOCK).tril()
        weights |= {f"transformer.h.{layer}.attn.bias": mask for layer in range(LAYERS)}
    return weights | {"lm_head.weight": weights["transformer.wte.weight"]}


def args_of(code: str = "nanogpt", bias: bool = False, vocab: int = VOCAB) -> dict[str, object]:
    args = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": BLOCK, "bias": bias}
    args |= {"vocab_size": vocab, "dropout": 0.0}
    return args | ({"scale_attn_by_inverse_layer_idx": True} if code == "mars" else {})


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
    found = GPT2LMHeadModel.from_pretrained(folder).eval()(IDS).logits
    return float((found - expected).abs().max() / expected.std())


def save(path: Path, /, **changes: object) -> Path:
    """Write a checkpoint with the keys of both trainers; changes state others, or leave keys out as None."""
    content = {"model": weights_of(), "model_args": args_of(), "iter_num": 7, "config": {"dataset": "x"}}
    content |= {"best_val_loss": torch.tensor(3.25), **changes}
    torch.save({key: value for key, value in content.items() if value is not None}, path)
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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("code", "other"), [("nanogpt", "gelu_new"), ("mars", "gelu")])
def test_logits_are_equal(tmp_path, code, bias, other):
    """And the way back gives the same file, masks too; the two GELUs differ enough for the wrong one to show."""
    weights, args = weights_of(code, bias), args_of(code, bias)
    path = save(tmp_path / "ckpt.pt", model=weights, model_args=args)
    convert(path, tmp_path / "out")
    convert(path, tmp_path / "wrong", "--activation_function", other)
    expected = logits(weights, code)
    assert difference(tmp_path / "out", expected) < 1e-5 and difference(tmp_path / "wrong", expected) > 1e-4
    biases = [p for name, p in GPT2LMHeadModel.from_pretrained(tmp_path / "out").named_parameters() if "bias" in name]
    assert len(biases) == 2 * 6 + 1 and all(p.any() == bias for p in biases)
    assert_same(weights, args, tmp_path / "out")


def assert_same(weights: dict[str, torch.Tensor], args: dict[str, object], folder: Path) -> None:
    """Convert a folder back, and compare bit for bit."""
    convert(folder, folder.with_name("back"), "--to_nanogpt")
    content = torch.load(folder.with_name("back") / "ckpt.pt", weights_only=True)
    assert content["model_args"] == args and content["model"].keys() == weights.keys()
    for name, value in content["model"].items():
        assert torch.equal(value, weights[name]) and value.dtype == weights[name].dtype, name
    assert content["model"]["lm_head.weight"].data_ptr() == content["model"]["transformer.wte.weight"].data_ptr()


def test_bfloat16_and_names_of_compiled_and_wrapped_models(tmp_path):
    weights = {name: value.bfloat16() for name, value in weights_of(bias=True).items()}
    prefixed = {f"module._orig_mod.{name}": value for name, value in weights.items() if name != "lm_head.weight"}
    save(tmp_path / "ckpt.pt", model=prefixed, model_args=args_of(bias=True))
    convert(tmp_path, tmp_path / "out")  # the folder stands for its file
    assert_same(weights, args_of(bias=True), tmp_path / "out")


@pytest.mark.parametrize("at_hand", [True, False])
def test_padded_vocabulary_and_tokenizer(tmp_path, monkeypatch, capsys, at_hand):
    def from_hub(name, trust_remote_code):
        assert not trust_remote_code
        if not at_hand:
            raise OSError("out of reach")
        return GPT2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[])

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_hub)
    save(tmp_path / "ckpt.pt", model=weights_of(vocab=50304), model_args=args_of(vocab=50304))
    convert(tmp_path, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (50304, 50256)
    assert bool(list((tmp_path / "out").glob("tokenizer*"))) == at_hand
    assert ("tokenizer   none: out of reach" in capsys.readouterr().out) != at_hand


class Runs:
    def __reduce__(self):
        return os.mkdir, (str(Path("ran")),)


def test_code_in_a_checkpoint_does_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "ckpt.pt", config={"x": Runs()})
    assert "holds more than tensors and plain values" in refused(capsys, path, tmp_path / "out")
    assert not Path("ran").exists() and not (tmp_path / "out").exists()
    pickle.loads(pickle.dumps(Runs()))  # it is one that would
    assert Path("ran").exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ("cut", "is damaged"),
        ({"model_args": None}, "KeyError: 'model_args'"),
        ({"model": [1]}, "AttributeError"),
        ({"model_args": args_of(bias=True)}, 'Missing key(s) in state_dict: "transformer.h.0.ln_1.bias"'),
        ({"model_args": args_of() | {"n_layer": 1}}, 'Unexpected key(s) in state_dict: "transformer.h.1.ln_1.weight"'),
        ({"model_args": args_of(vocab=41)}, "size mismatch for transformer.wte.weight"),
        ({"model": weights_of() | {"lm_head.weight": torch.zeros(VOCAB, WIDTH)}}, "lm_head.weight differs"),
    ],
    ids=[*("cut", "no args", "a list", "biases", "layers", "vocabulary", "head")],
)
def test_other_contents(tmp_path, changes, line, capsys):
    path = save(tmp_path / "ckpt.pt", **({} if changes == "cut" else changes))
    if changes == "cut":
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
        convert(save(tmp_path / "ckpt.pt"), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    assert line in refused(capsys, folder, tmp_path / "out", "--to_nanogpt")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_or_left_half_done(tmp_path, capsys, monkeypatch):
    path = save(tmp_path / "ckpt.pt")
    convert(path, tmp_path / "folder")
    assert "exists already" in refused(capsys, path, tmp_path / "folder")
    assert "exists already" in refused(capsys, tmp_path / "folder", tmp_path, "--to_nanogpt")
    assert "no such file" in refused(capsys, tmp_path / "none.pt", tmp_path / "out")
    fails = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", fails)
    assert "No space left" in refused(capsys, path, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ckpt.pt", "folder"]
