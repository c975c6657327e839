"""Fine-tuning on text: all weights and adapters, blocks of tokens, starting rates, and what stops a run."""

from __future__ import annotations

import json

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
    return finetune_lm.train([*FEW, *paths, "--text_column", "body", *argv])


def test_all_weights_train(base, text, tmp_path):
    trainer, found = run(base, text, tmp_path / "run", "--learning_rate", "1e-2")
    assert found["eval_loss"] < found["at_step_0"]["eval_loss"] - 1
    assert found["trainable_parameters"] == found["parameters"]
    before = GPT2LMHeadModel.from_pretrained(base).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    for name, param in trainer.model.named_parameters():
        assert not torch.equal(param, before[name]) and torch.equal(param, saved[name]), name
    card = (tmp_path / "run" / "README.md").read_text()
    assert "mars-adamw" in card and (tmp_path / "run" / "mars.json").is_file()


@pytest.mark.parametrize("optim", ["mars_m", pytest.param("mars_adamw", marks=pytest.mark.slow)])
def test_only_adapters_train(optim, base, text, tmp_path):
    argv = ["--use_peft", "true", "--learning_rate", "2e-2", "--lora_target_modules", "c_attn,c_proj", "--optim", optim]
    trainer, found = run(base, text, tmp_path / "run", *argv)
    assert found["eval_loss"] < found["at_step_0"]["eval_loss"] - 0.05
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
    assert list(found["input_ids"]) == list(found["labels"]) == [stream[5 * i : 5 * i + 5] for i in range(count)]


def test_a_tokenizer_may_have_no_end_of_text(tokens):
    tokenizer = token_files.load(tokens).tokenizer
    tokenizer.eos_token = None
    found = finetune_lm.blocks(datasets.Dataset.from_dict({"text": ["x = 1\n"] * 9}), "text", tokenizer, 4)
    assert found[0]["input_ids"] == (tokenizer("x = 1\n")["input_ids"] * 9)[:4]


@pytest.mark.slow
def test_the_default_text_is_headers():
    name, train, held_out = finetune_lm.load(finetune_lm.ScriptArguments())
    assert name == "torch-headers" and len(train) > 200 and len(held_out) > 80
    assert "#include" in train[0]["text"] and not set(train["text"]) & set(held_out["text"])


@pytest.mark.parametrize("use_peft", [False, True])
def test_rates_for_pretrained_models_are_those_of_the_command(use_peft):
    adamw = finetune_lm.STARTS_PRETRAINED[use_peft]["adamw_torch"].learning_rate
    for optim, start in finetune_lm.STARTS_PRETRAINED[use_peft].items():
        if optim != "adamw_torch":
            assert start.learning_rate == pytest.approx(
                suggest(optim.replace("_", "-"), AdamW(adamw), width=768)["lr"], rel=0.03
            )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dataset_name gone", ("--dataset_name gone", "check the name")),
        ("--text_column prose", ("columns body", "accepted: prose, or what --text_column names")),
        ("--model_name_or_path gone", ("--model_name_or_path gone", "give a folder or a name on the Hub")),
        ("--block_size 33", ("--block_size 33 is above the model's context", "at most 32")),
        ("--optim sgd", ("--optim sgd", "no learning rate", "give --learning_rate")),
        ("--use_peft true --lora_target_modules nothing", ("--lora_target_modules nothing", "or all-linear")),
    ],
)
def test_mistakes(words, said, base, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = {"--model_name_or_path": str(base), "--dataset_name": str(text), "--text_column": "body"}
    argv = [word for flag, value in given.items() if flag not in words for word in (flag, value)]
    with pytest.raises(SystemExit) as end:
        finetune_lm.main(["--use_cpu", "true", *argv, *words.split()])
    assert end.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(part in line for part in said), line
    assert not list(tmp_path.glob("runs/*/metrics.json"))


def test_text_shorter_than_a_block(base, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    argv = ["--model_name_or_path", str(base), "--dataset_name", str(tmp_path / "text"), "--test_size", "0.5"]
    with pytest.raises(SystemExit):
        finetune_lm.main(["--use_cpu", "true", "--output_dir", str(tmp_path / "run"), *argv])
    assert "the text has fewer than --block_size 32 tokens" in capsys.readouterr().err
