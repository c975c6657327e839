"""Weights move between nanoGPT's ckpt.pt and GPT2LMHeadModel without a change of logits; a mistake gets one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import convert_nanogpt
import pytest
import torch
from pretraining.data import gpt2_tokenizer
from pretraining.nanogpt import nanogpt_folder
from tiny_nanogpt import BLOCK, VOCAB, TinyGPT, save
from transformers import AutoTokenizer, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

IDS = torch.arange(3 * BLOCK).reshape(3, BLOCK) * 7 % VOCAB


def tiny(code: str = "nanogpt", **settings) -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(code, **settings)


def checkpoint(folder: Path, gpt: TinyGPT, **changes) -> Path:
    """Write a ckpt.pt without an optimizer, with keys changed or, as None, left out."""
    path = save(folder / "ckpt.pt", gpt, None, 7, gpt.model_args(), {"dataset": "x", "learning_rate": 0.01})
    content = torch.load(path, weights_only=True) | changes
    torch.save({key: value for key, value in content.items() if value is not None}, path)
    return path


def convert(*argv: object) -> None:
    convert_nanogpt.main([str(word) for word in argv])


def refused(*argv: object) -> str:
    """Return the line that a conversion is refused with."""
    with pytest.raises(SystemExit) as told:
        convert(*argv)
    assert told.value.code == 2
    return str(told.value.__context__)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return GPT2LMHeadModel.from_pretrained(folder).eval()(IDS).logits


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


# --- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("code", ["nanogpt", "mars"])
def test_logits_are_equal(tmp_path, code, bias):
    model = tiny(code, bias=bias)
    convert(checkpoint(tmp_path, model), tmp_path / "out")
    expected = model(IDS).detach()
    assert expected.std() > 1
    assert largest_difference(logits(tmp_path / "out"), expected) < 1e-5


@pytest.mark.parametrize(("code", "usual"), [("nanogpt", "gelu"), ("mars", "gelu_new")])
def test_activation_follows_the_code_or_the_flag(tmp_path, code, usual):
    """The two GELUs differ enough for the wrong one to show."""
    other = {"gelu": "gelu_new", "gelu_new": "gelu"}[usual]
    model = tiny(code, exact=other == "gelu")
    path = checkpoint(tmp_path, model)
    convert(path, tmp_path / "wrong")
    convert(path, tmp_path / "right", "--activation_function", other)
    assert largest_difference(logits(tmp_path / "wrong"), model(IDS).detach()) > 1e-4
    assert largest_difference(logits(tmp_path / "right"), model(IDS).detach()) < 1e-5


def test_code_overrides_what_the_file_says(tmp_path):
    """Forks of nanoGPT have the setting of scaled scores too."""
    model = tiny(exact=False)
    args = model.model_args() | {"scale_attn_by_inverse_layer_idx": False}
    path = checkpoint(tmp_path, model, model_args=args)
    convert(path, tmp_path / "mars")
    convert(path, tmp_path / "nanogpt", "--code", "nanogpt")
    assert largest_difference(logits(tmp_path / "mars"), model(IDS).detach()) < 1e-5
    assert json.loads((tmp_path / "nanogpt" / "config.json").read_text())["activation_function"] == "gelu"


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_compiled_and_wrapped_models_go(tmp_path, prefix):
    model = tiny()
    path = checkpoint(tmp_path, model, model={prefix + name: value for name, value in model.state_dict().items()})
    convert(path, tmp_path / "out")
    assert largest_difference(logits(tmp_path / "out"), model(IDS).detach()) < 1e-5


@pytest.mark.slow
def test_compiled_model_is_saved_with_the_prefix_that_is_removed():
    """What torch.compile names its parameters is not ours to say."""
    assert next(iter(torch.compile(tiny()).state_dict())).startswith("_orig_mod.")


def test_out_dir_stands_for_its_file_and_the_head_may_be_left_out(tmp_path):
    model = tiny()
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    checkpoint(tmp_path, model, model=weights)
    convert(tmp_path, tmp_path / "out")
    assert largest_difference(logits(tmp_path / "out"), model(IDS).detach()) < 1e-5


def test_zeros_stand_for_missing_biases(tmp_path):
    convert(checkpoint(tmp_path, tiny()), tmp_path / "out")
    biases = [p for name, p in GPT2LMHeadModel.from_pretrained(tmp_path / "out").named_parameters() if "bias" in name]
    assert len(biases) == 2 * 6 + 1
    assert not any(bias.any() for bias in biases)


# --- and back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "bias", "dtype"),
    [("nanogpt", False, torch.float32), ("mars", False, torch.float32), ("nanogpt", True, torch.bfloat16)],
)
def test_round_trip_is_bit_for_bit(tmp_path, code, bias, dtype):
    model = tiny(code, bias=bias).to(dtype)
    path = checkpoint(tmp_path, model)
    convert(path, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", "--to_nanogpt")
    before, after = (torch.load(file, weights_only=True) for file in (path, tmp_path / "back" / "ckpt.pt"))
    assert after["model_args"] == before["model_args"]
    assert (after["iter_num"], after["best_val_loss"], after["config"]) == (7, 3.25, before["config"])
    assert after["model"].keys() == before["model"].keys()
    for name, value in before["model"].items():
        assert torch.equal(after["model"][name], value) and after["model"][name].dtype in (dtype, torch.float32)
    assert after["model"]["lm_head.weight"].data_ptr() == after["model"]["transformer.wte.weight"].data_ptr()


@pytest.mark.parametrize(("code", "activation"), [("nanogpt", "gelu"), ("mars", "gelu_new")])
def test_a_model_of_transformers_goes_to_the_code_that_computes_it(tmp_path, code, activation):
    torch.manual_seed(1)
    convert(checkpoint(tmp_path, tiny(code, bias=True)), tmp_path / "folder")
    (tmp_path / "folder" / "nanogpt.json").unlink()  # as one that never came from nanoGPT
    convert(tmp_path / "folder", tmp_path / "out", "--to_nanogpt")
    content = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)
    model = tiny(code, bias=True)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(content["model"])  # strict: masks too
    assert model.model_args() == content["model_args"]
    assert largest_difference(logits(tmp_path / "folder"), model(IDS).detach()) < 1e-5
    assert (content["iter_num"], content["best_val_loss"]) == (0, 1e9)


def test_a_resume_without_the_optimizer_state_finds_a_fresh_one(tmp_path):
    """nanoGPT's resume loads an optimizer in any case."""
    for code in ("nanogpt", "mars"):
        model = tiny(code)
        (tmp_path / code).mkdir()
        convert(checkpoint(tmp_path / code, model), tmp_path / code / "folder")
        convert(tmp_path / code / "folder", tmp_path / code / "out", "--to_nanogpt")
        optimizer = torch.load(tmp_path / code / "out" / "ckpt.pt", weights_only=True)["optimizer"]
        assert optimizer["state"] == {}
        assert [group["weight_decay"] for group in optimizer["param_groups"]] == [
            {"nanogpt": 0.1, "mars": 0.01}[code],
            0.0,
        ]
        assert all(group["lr"] == 0.01 for group in optimizer["param_groups"])  # the run's own


def test_biases_that_are_zero_can_stay(tmp_path):
    convert(checkpoint(tmp_path, tiny()), tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "kept", "--to_nanogpt", "--bias", "true")
    content = torch.load(tmp_path / "kept" / "ckpt.pt", weights_only=True)
    assert content["model_args"]["bias"] is True
    assert not content["model"]["transformer.ln_f.bias"].any()


def test_biases_that_are_not_zero_are_named(tmp_path):
    convert(checkpoint(tmp_path, tiny()), tmp_path / "folder")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "folder")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[3] = 1e-30
    model.save_pretrained(tmp_path / "folder")
    line = refused(tmp_path / "folder", tmp_path / "out", "--to_nanogpt", "--bias", "false")
    assert "1 biases" in line and "transformer.h.1.mlp.c_fc.bias" in line
    convert(tmp_path / "folder", tmp_path / "out", "--to_nanogpt")  # they are kept
    assert torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)["model_args"]["bias"] is True


def test_another_gelu_is_refused_unless_it_is_meant(tmp_path):
    convert(checkpoint(tmp_path, tiny("mars")), tmp_path / "folder")
    line = refused(tmp_path / "folder", tmp_path / "out", "--to_nanogpt", "--code", "nanogpt")
    assert "gelu_new" in line and "--code mars" in line
    line = refused(
        *(tmp_path / "folder", tmp_path / "out", "--to_nanogpt", "--code", "nanogpt"),
        *("--activation_function", "gelu_new"),
    )
    assert "scale_attn_by_inverse_layer_idx=True" in line
    assert not (tmp_path / "out").exists()


def test_older_nanogpt_with_the_tanh_form_round_trips(tmp_path):
    convert(checkpoint(tmp_path, tiny(exact=False)), tmp_path / "folder", "--activation_function", "gelu_new")
    convert(tmp_path / "folder", tmp_path / "out", "--to_nanogpt")
    assert torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)["model_args"] == tiny().model_args()


# --- tokenizer -------------------------------------------------------------------------------------------------------


def with_vocabulary(folder: Path, rows: int) -> Path:
    model = tiny()
    model.transformer["wte"] = torch.nn.Embedding(rows, 12)
    model.lm_head.weight = model.transformer["wte"].weight
    return checkpoint(folder, model, model_args=model.model_args() | {"vocab_size": rows})


def test_tokenizer_is_saved_if_its_vocabulary_is_there(tmp_path, monkeypatch, capsys):
    small = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path))
    monkeypatch.setattr(gpt2_tokenizer, "build", lambda: small)
    convert(with_vocabulary(tmp_path, 50304), tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(small)
    assert "tokenizer  " not in capsys.readouterr().out
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out").config.eos_token_id == 50256


def test_tokenizer_is_left_out_if_its_vocabulary_is_not_there(tmp_path, monkeypatch, capsys):
    def build():
        raise gpt2_tokenizer.VocabularyError("cannot get it")

    monkeypatch.setattr(gpt2_tokenizer, "build", build)
    convert(with_vocabulary(tmp_path, 50257), tmp_path / "out")
    assert "tokenizer   none: cannot get it" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_other_vocabularies_get_no_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpt2_tokenizer, "build", lambda: pytest.fail("asked for GPT-2's"))
    convert(checkpoint(tmp_path, tiny()), tmp_path / "out")
    assert "a vocabulary of 40 is not GPT-2's" in capsys.readouterr().out
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out").config.eos_token_id is None


def make_tokenizer(folder: Path) -> Path:
    from transformers import GPT2Tokenizer

    GPT2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]).save_pretrained(folder / "small")
    return folder / "small"


# --- mistakes --------------------------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self):
        return os.mkdir, (str(Path("ran")),)


def test_code_in_a_checkpoint_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = checkpoint(tmp_path, tiny(), config={"x": Runs()})
    line = refused(path, tmp_path / "out")
    assert "mkdir, which may run code" in line and "accepted: tensors and plain values" in line
    pickle.loads(pickle.dumps(Runs()))  # it is one that would
    assert Path("ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["truncated", "random", "empty"])
def test_damaged_files_get_one_line(tmp_path, damage):
    path = checkpoint(tmp_path, tiny())
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "random": bytes(range(256)) * 9, "empty": b""}[damage])
    assert f"{path} is damaged" in refused(path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [path]


def test_other_contents_get_one_line(tmp_path):
    model = tiny()
    weights, args = model.state_dict(), model.model_args()
    name = "transformer.h.1.mlp.c_fc.weight"
    for changes, expected in (
        ({"model_args": None}, "no checkpoint of nanoGPT's: it holds model, iter_num"),
        ({"model": [1]}, "model is list; nanoGPT saves a dict"),
        ({"config": 3}, "config is int"),
        ({"iter_num": "x"}, "iter_num is x; nanoGPT saves a number"),
        ({"best_val_loss": torch.ones(2)}, "best_val_loss is tensor"),
        ({"model_args": {"n_layer": 2}}, "model_args lacks n_head, n_embd, block_size, vocab_size, bias"),
        ({"model_args": args | {"n_head": 0}}, "n_head=0, which is not a whole number from 1 on"),
        ({"model_args": args | {"n_head": 5}}, "not a multiple of n_head=5"),
        ({"model_args": args | {"bias": 1}}, "bias=1, which is not True or False"),
        ({"model_args": args | {"dropout": "much"}}, "dropout=much"),
        ({"model_args": args | {"bias": True}}, "lacks transformer.h.0.attn.c_attn.bias and 12 more"),
        ({"model_args": args | {"n_layer": 1}}, "has an unknown transformer.h.1.attn.c_attn.weight and 5 more"),
        ({"model_args": args | {"vocab_size": 41}}, "(40, 12); model_args say (41, 12)"),
        ({"model": weights | {name: weights[name].long()}}, f"{name} is Tensor, not a floating point tensor"),
        ({"model": weights | {name: 1}}, f"{name} is int"),
        ({"model": weights | {"lm_head.weight": weights["lm_head.weight"] + 1}}, "lm_head.weight differs"),
    ):
        path = checkpoint(tmp_path, model, **changes)
        assert expected in refused(path, tmp_path / "out")
        assert sorted(tmp_path.iterdir()) == [path]
    torch.save([1], tmp_path / "ckpt.pt")
    assert "no checkpoint of nanoGPT's: it holds list" in refused(tmp_path / "ckpt.pt", tmp_path / "out")


def test_folders_that_are_not_gpt2_get_one_line(tmp_path):
    convert(checkpoint(tmp_path, tiny()), tmp_path / "good")
    config = json.loads((tmp_path / "good" / "config.json").read_text())

    def with_config(name: str, **changes) -> Path:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    (tmp_path / "empty").mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(tmp_path / "llama")
    truncated = with_config("truncated")
    (truncated / "model.safetensors").write_bytes((truncated / "model.safetensors").read_bytes()[:100])
    damaged = with_config("damaged")
    (damaged / "nanogpt.json").write_text("{")
    for folder, expected in (
        (tmp_path / "empty", "has no config.json"),
        (tmp_path / "ckpt.pt", "no such folder"),
        (tmp_path / "llama", "a model of type llama; nanoGPT is gpt2"),
        (truncated, "cannot be loaded"),
        (damaged, "nanogpt.json is damaged; delete it"),
        (with_config("code", model_type="own", auto_map={"AutoConfig": "own.Own"}), "contains custom code"),
        (with_config("deep", n_layer=3), "is missing from the weights"),
        (with_config("relu", activation_function="relu"), "activation_function=relu"),
        (with_config("norm", layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06"),
        (with_config("scaled", scale_attn_by_inverse_layer_idx=True), "--code mars has it"),
    ):
        assert expected in refused(folder, tmp_path / "out", "--to_nanogpt")
        assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path):
    path = checkpoint(tmp_path, tiny())
    convert(path, tmp_path / "out")
    assert "exists already" in refused(path, tmp_path / "out")
    assert "has a ckpt.pt already" in refused(tmp_path / "out", tmp_path, "--to_nanogpt")


def test_what_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, tiny())
    convert(path, tmp_path / "folder")

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(nanogpt_folder.report, "write", fails)
    assert "No space left" in refused(path, tmp_path / "out")
    monkeypatch.setattr(torch, "save", fails)
    assert "No space left" in refused(tmp_path / "folder", tmp_path / "back", "--to_nanogpt")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out*"))
    assert not list((tmp_path / "back").iterdir())


def test_flags_that_do_nothing_are_refused(tmp_path):
    path = checkpoint(tmp_path, tiny())
    assert "no such file or folder" in refused(tmp_path / "none.pt", tmp_path / "out")
    assert "--bias goes with --to_nanogpt" in refused(path, tmp_path / "out", "--bias", "false")
    line = refused(path, tmp_path / "out", "--summed_micro_batches", "4")
    assert "--summed_micro_batches goes with --optimizer_state" in line
    assert "0' is not a whole number from 1 on" in refused(path, tmp_path / "out", "--summed_micro_batches", "0")
