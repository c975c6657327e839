"""Fine-tuning on text: all weights and adapters, blocks of tokens, starting rates, and what stops a run."""

from __future__ import annotations

import json
import math

import datasets
import finetune_lm
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from pretraining.data import token_files
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import mars_hf
from mars_hf.suggest import AdamW, suggest

FEW = [
    *("--max_steps", "20", "--per_device_train_batch_size", "8", "--warmup_steps", "2", "--logging_steps", "10"),
    *("--eval_strategy", "no", "--disable_tqdm", "true", "--use_cpu", "true"),
]
TEXT = "for number in range(10):\n    print(number)\n"


@pytest.fixture(scope="module")
def base(tokens, tmp_path_factory):
    """Save a random GPT-2 with the tokenizer of the test corpus."""
    torch.manual_seed(0)
    tokenizer = token_files.load(tokens).tokenizer
    end = tokenizer.eos_token_id
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": len(tokenizer)}
    folder = tmp_path_factory.mktemp("base")
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Write a data set of one document, many times."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.jsonl").write_text((json.dumps({"body": TEXT}) + "\n") * 200)
    return folder


def run(base, text, output, *argv):
    paths = ["--model_name_or_path", str(base), "--dataset_name", str(text), "--output_dir", str(output)]
    return finetune_lm.main([*FEW, *paths, "--text_column", "body", *argv])


def first(trainer):
    """Return the loss before the first step."""
    return next(row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)


def test_all_weights_train(base, text, tmp_path):
    trainer, found = run(base, text, tmp_path / "run", "--learning_rate", "1e-2")
    assert found["eval_loss"] < first(trainer) - 1
    assert found["trainable_parameters"] == found["parameters"]
    before = GPT2LMHeadModel.from_pretrained(base).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    for name, param in trainer.model.named_parameters():
        assert not torch.equal(param, before[name]) and torch.equal(param, saved[name]), name
    card = (tmp_path / "run" / "README.md").read_text()
    assert "mars-adamw" in card and (tmp_path / "run" / "mars.json").is_file()
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]), rel=1e-4)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == found


@pytest.mark.parametrize("optim", ["mars_m", pytest.param("mars_adamw", marks=pytest.mark.slow)])
def test_only_adapters_train(optim, base, text, tmp_path):
    argv = ["--use_peft", "true", "--learning_rate", "2e-2", "--lora_target_modules", "c_attn,c_proj", "--optim", optim]
    trainer, found = run(base, text, tmp_path / "run", *argv)
    assert found["eval_loss"] < first(trainer) - 0.05
    trained = {name for name, param in trainer.model.named_parameters() if param.requires_grad}
    assert len(trained) == 2 * 3 * 2 and all("lora_" in name for name in trained)  # A and B of three layers a block
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, mars_hf.Mars)
    assert {name for group in optimizer.param_groups for name in group["param_names"]} == trained
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_documents_are_cut_into_blocks(tokens):
    tokenizer = token_files.load(tokens).tokenizer
    texts = ["def one():\n    return 1\n", "x", "", "class Two:\n    pass  # nothing\n"]
    stream = [token for each in texts for token in [*tokenizer(each)["input_ids"], tokenizer.eos_token_id]]
    found = finetune_lm.blocks(datasets.Dataset.from_dict({"body": texts, "other": texts}), "body", tokenizer, 5)
    count = len(stream) // 5
    assert count > 2 and len(stream) % 5
    assert list(found["input_ids"]) == [stream[5 * i : 5 * i + 5] for i in range(count)]
    assert list(found["labels"]) == [[-100, *ids[1:]] for ids in found["input_ids"]]


def test_a_tokenizer_may_have_no_end_of_text(tokens):
    tokenizer = token_files.load(tokens).tokenizer
    tokenizer.eos_token = None
    found = finetune_lm.blocks(datasets.Dataset.from_dict({"text": ["x = 1\n"] * 9}), "text", tokenizer, 4)
    assert found[0]["input_ids"] == (tokenizer("x = 1\n")["input_ids"] * 9)[:4]


@pytest.mark.slow
def test_default_text():
    train, held_out = finetune_lm.load(finetune_lm.FinetuneArguments())
    assert len(train) > 200 and len(held_out) > 80
    assert "#include" in train[0]["text"] and not set(train["text"]) & set(held_out["text"])


def test_rates_to_start_from():
    args = finetune_lm.FinetuneArguments(optim="mars_m")
    assert (args.output_dir, args.learning_rate) == ("runs/finetune-full-mars_m", 1.6e-2)
    args = finetune_lm.FinetuneArguments(optim="mars_m", model_name_or_path="x", use_peft=True)
    assert args.output_dir == "runs/finetune-lora-mars_m"
    assert args.learning_rate == pytest.approx(suggest("mars-m", AdamW(2e-4))["lr"], rel=0.03)
    assert args.optim_args == "beta1=0.95,beta2=0.95,lr_1d=0.0002"
    args = finetune_lm.FinetuneArguments(optim="mars_m", learning_rate=1.0, optim_args="gamma=0.1", output_dir="x")
    assert (args.output_dir, args.learning_rate, args.optim_args) == ("x", 1.0, "gamma=0.1")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--dataset_name gone", "gone"),
        ("--text_column prose", "prose"),
        ("--model_name_or_path gone", "gone: transformers loads no causal language model from it"),
        ("--block_size 33", "blocks of 33 tokens are longer than the model's context; give at most 32"),
        (
            "--optim sgd",
            "--optim sgd: the recipe has no learning rate for it, only for adamw_torch, mars_adamw, mars_m",
        ),
        ("--use_peft true --lora_target_modules nothing", "nothing"),
        ("--epochs 3", "--epochs"),
        ("--block_size 32 --dataset_name short", "the text has fewer than --block_size 32 tokens"),
    ],
)
def test_wrong_input(words, line, base, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "train.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    given = {"--model_name_or_path": str(base), "--dataset_name": str(text), "--text_column": "body"}
    argv = [word for flag, value in given.items() if flag not in words for word in (flag, value)]
    with pytest.raises(SystemExit) as end:
        finetune_lm.main(["--use_cpu", "true", "--test_size", "0.5", *argv, *words.split()])
    assert end.value.code == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("finetune_lm.py: ")]
    assert line in said
    assert not list(tmp_path.glob("runs/*/metrics.json"))


def test_finished_run_is_not_overwritten_and_divergence_is_named(base, text, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").write_text("{}")
    with pytest.raises(SystemExit):
        run(base, text, tmp_path / "run")
    assert "run holds a finished run; give another --output_dir, or delete it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        argv = ["--learning_rate", "1e30", "--max_grad_norm", "0", "--optim", "adamw_torch"]
        run(base, text, tmp_path / "diverged", *argv)
    assert "non-finite; give a --learning_rate below 1e+30" in capsys.readouterr().err
