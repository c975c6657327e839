"""The evaluation of a checkpoint: the loss by hand and as the run reports it, tasks with known answers, mistakes."""

from __future__ import annotations

import functools
import json
import math
import shutil
import sys
from pathlib import Path
from unittest import mock

import evaluate_checkpoint
import numpy as np
import pytest
import torch
from helpers import gpt2
from pretraining.data import embedded, token_files
from test_pretrain_gpt2 import SCRIPT, launch, run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
WORDS = (END, "question", "yes", "no", "maybe", "never", "a", "b")
# What the model below gives each word, whatever came before.
SCORES = np.array([-1.0, -1.0, 2.0, 1.0, 0.5, -0.5, -1.0, -2.0])
LOG_SHARES = SCORES - np.log(np.exp(SCORES).sum())
VAL, VAL_BYTES = np.random.default_rng(3).integers(0, len(WORDS), 103), 412


def save(folder: Path, model: torch.nn.Module, words: tuple[str, ...] = WORDS) -> Path:
    """Save a model with a tokenizer that has one token a word."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if model:
        model.save_pretrained(folder)
    end = {"bos_token": END, "eos_token": END, "unk_token": END}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end).save_pretrained(folder)
    return folder


def small(vocabulary: int = len(WORDS)) -> GPT2LMHeadModel:
    return gpt2(seed=1, n_layer=1, n_positions=32, vocab_size=vocabulary)


@pytest.fixture(scope="module")
def unigram(tmp_path_factory) -> Path:
    """Return a model that gives each word its score: the final norm yields (1, 0, ...); embeddings start with it."""
    model = small()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()[0] = 1.0
        model.transformer.wte.weight[:, 0] = torch.from_numpy(SCORES)
    return save(tmp_path_factory.mktemp("models") / "unigram", model)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    """Return a folder as prepare_data.py writes it."""
    folder = tmp_path_factory.mktemp("data")
    save(folder / "tokenizer", None)
    meta = {"dataset": "words", "tokenizer": "words", "vocab_size": len(WORDS), "end_of_text": 0}
    for split, ids, size in (("train", VAL[:9], 9), ("val", VAL, VAL_BYTES)):
        meta[split] = token_files.write_tokens(folder / f"{split}.bin", [(ids, size)])
    token_files.write_meta(folder, meta)
    return folder


def evaluated(output: Path, *argv: object) -> dict:
    evaluate_checkpoint.main([*map(str, argv), "--output_file", str(output), "--use_cpu"])
    return json.loads(output.read_text())


def refused(tmp_path: Path, *argv: object) -> str:
    """Return the line of a refused evaluation, which leaves no file."""
    output = tmp_path / "refused.json"
    with pytest.raises(SystemExit) as end:
        evaluated(output, *argv)
    assert end.value.code == 2 and not output.exists()
    return str(end.value.__context__)


def test_loss_by_hand(tmp_path, unigram, held_out, capsys):
    argv = ["--model", unigram, "--data_dir", held_out, "--block_size", 10, "--batch_size", 4]
    numbers = evaluated(tmp_path / "new" / "f.json", *argv)
    loss = -LOG_SHARES[VAL[:100].reshape(10, 10)[:, 1:]].mean()
    expected = {"loss": loss, "perplexity": math.exp(loss), "loss_blocks": 10, "block_size": 10}
    expected["bits_per_byte"] = loss / math.log(2) * len(VAL) / VAL_BYTES
    assert {key: numbers[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert f"loss          {numbers['loss']}" in capsys.readouterr().out
    first = evaluated(tmp_path / "new" / "f.json", *argv, "--max_eval_blocks", 3)
    assert first["loss"] == pytest.approx(-LOG_SHARES[VAL[:30].reshape(3, 10)[:, 1:]].mean(), rel=1e-6)


@pytest.mark.parametrize("bf16", [False, True])
def test_loss_is_that_of_the_run(tmp_path, tokens, bf16, monkeypatch):
    output, flag = tmp_path / "runs" / "mars", ["--bf16", str(bf16).lower()]
    metrics = run(output, tokens, "--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2", *flag)
    prepare = mock.Mock(return_value=tokens)
    monkeypatch.setattr(embedded, "prepare", prepare)
    argv = ["--max_eval_blocks", 8, "--model"]
    numbers = evaluated(tmp_path / "f.json", *argv, output, *flag)
    prepare.assert_called_once_with(tmp_path / "runs" / "data", 4096)  # beside the run
    expected = {"loss": metrics["eval_loss"], "loss_blocks": 8, "block_size": 32}
    expected |= {key: metrics[key] for key in ("perplexity", "bits_per_byte", "parameters")}
    assert {key: numbers[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert (numbers["bf16"], numbers["dtype"], numbers["data_dir"]) == (bf16, "float32", str(tokens))
    one = evaluated(tmp_path / "one.json", *argv, output / "checkpoint-2", *flag, "--batch_size", 3)
    assert one["loss"] == pytest.approx(numbers["loss"], rel=1e-6)
    assert prepare.call_args.args[0] == tmp_path / "runs" / "data"
    rounded = evaluated(tmp_path / "rounded.json", *argv, output, "--dtype", "bfloat16")
    assert rounded["dtype"] == "bfloat16" and rounded["loss"] != numbers["loss"]
    assert rounded["loss"] == pytest.approx(numbers["loss"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_give_the_loss_of_one(tmp_path, unigram, held_out):
    """Eleven blocks divide neither by the batch nor by the processes."""
    argv = ["--model", unigram, "--data_dir", held_out, "--block_size", "9", "--batch_size", "2"]
    script = SCRIPT.with_name("evaluate_checkpoint.py")
    ended = launch(*argv, "--use_cpu", "--output_file", tmp_path / "two.json", script=script, config="cpu_ddp")
    assert ended.stdout.count("results are in") == 1
    one, two = evaluated(tmp_path / "one.json", *argv), json.loads((tmp_path / "two.json").read_text())
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6) and two["loss_blocks"] == 11


# Logarithms of the shares: yes -0.6, no -1.6, maybe -2.1, never -3.1. acc takes the highest, acc_norm the highest
# after division by the letters: yes -0.2, maybe -0.4, never -0.6, no -0.8.
QUESTIONS = [
    (["yes", "no"], 0),  # yes
    (["no", "yes"], 0),  # yes: wrong
    (["no", "never"], 0),  # no; by letters never: wrong
    (["maybe", "no"], 1),  # no; by letters maybe: wrong
    (["never", "maybe"], 1),  # maybe
    (["no", "maybe"], 1),  # no: wrong; by letters maybe
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/{name}.jsonl}}, cache_dir: {folder}/cache}}
validation_split: validation
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
GROUP = (
    "group: tiny_group\ntask: [tiny_choice, tiny_easy]\naggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
)


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Path:
    """Return a folder with two tasks and the group of both; lm_eval's own, which take ten seconds to read, are out."""
    manager = pytest.importorskip("lm_eval.tasks").TaskManager
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(manager, include_defaults=False))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, rows in (("tiny_choice", QUESTIONS), ("tiny_easy", [QUESTIONS[0], QUESTIONS[4]])):
        lines = [json.dumps({"choices": choices, "answer": answer}) + "\n" for choices, answer in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder))
    (folder / "group.yaml").write_text(GROUP)
    return folder


def test_tasks_by_hand(tmp_path, unigram, held_out, tasks, capsys):
    """A group, with the loss in one run; or a task, with a limit and examples."""
    argv = ["--model", unigram, "--batch_size", 2, "--include_path", tasks, "--tasks"]
    numbers = evaluated(tmp_path / "f.json", *argv, "tiny_group", "--data_dir", held_out)
    results = numbers["tasks"]["results"]
    row = results["tiny_choice"]
    assert (row["acc,none"], row["acc_norm,none"], results["tiny_group"]["acc,none"]) == (4 / 6, 3 / 6, (4 / 6 + 1) / 2)
    assert row["acc_norm_stderr,none"] == pytest.approx(math.sqrt(0.5 * 0.5 / 5), rel=1e-6)
    assert numbers["loss"] > 0 and "tiny_choice" in capsys.readouterr().out
    numbers = evaluated(tmp_path / "f.json", *argv, "tiny_choice", "--limit", 4, "--num_fewshot", 1)
    assert numbers["tasks"]["results"]["tiny_choice"]["acc,none"] == 3 / 4 and "loss" not in numbers
    assert numbers["tasks"]["n-shot"]["tiny_choice"] == 1


@pytest.mark.slow
def test_names_of_tasks():
    pytest.importorskip("lm_eval")
    names, manager = evaluate_checkpoint.find_tasks(["paper", "lambada_openai"], None)
    assert names == [*evaluate_checkpoint.PAPER, "lambada_openai"] and len(set(names)) == 10
    assert set(names) <= set(manager.all_tasks)


def test_tasks_that_cannot_run(tmp_path, tasks, unigram, held_out, monkeypatch):
    line = refused(tmp_path, "--model", "/nope", "--include_path", tasks, "--tasks", "tiny_choice", "nosuch")
    assert line.startswith("--tasks nosuch: lm_eval has no such task; accepted: paper")
    small().save_pretrained(tmp_path / "model")
    argv = ["--model", tmp_path / "model", "--tasks", "tiny_choice", "--include_path", tasks]
    assert "comes without one" in refused(tmp_path, *argv)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    line = refused(tmp_path, "--model", unigram, "--tasks", "hellaswag")
    assert line == "--tasks needs the package lm_eval: pip install -e '.[eval]'"
    assert evaluated(tmp_path / "f.json", "--model", unigram, "--data_dir", held_out)["loss"] > 0


def test_models_that_cannot_be_evaluated(tmp_path, unigram, held_out, monkeypatch):
    """They are refused before the embedded corpus is tokenized. The model's vocabulary may be padded."""
    monkeypatch.setattr(embedded, "prepare", lambda *given: pytest.fail("tokenized"))
    shutil.copytree(unigram, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\0" * 100)
    bert = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    for model, words in (
        ("/nope", "/nope: transformers loads no causal language model"),
        ("me/nowhere", "me/nowhere: transformers loads no causal language model"),
        (tmp_path / "cut", "cut: transformers loads no causal language model from it"),
        (tmp_path / "bert", "of BertLMHeadModel (first: cls."),
    ):
        assert words in refused(tmp_path, "--model", model)
    broken = small()
    with torch.no_grad():
        broken.transformer.wte.weight[3] = math.inf
    broken.save_pretrained(tmp_path / "broken")
    small(vocabulary=7).save_pretrained(tmp_path / "few")
    save(tmp_path / "other", small(), words=(*WORDS[:2], "no", "yes", *WORDS[4:]))
    data = ["--data_dir", held_out, "--model"]
    for model, argv, words in (
        (tmp_path / "broken", [], "the loss is nan; are its weights finite?"),
        (tmp_path / "few", [], "few has another tokenizer than"),
        (tmp_path / "other", [], "other has another tokenizer than"),
        (unigram, ["--block_size", 33], "blocks of 33 tokens are longer than the model's context; give at most 32"),
        (unigram, ["--batch_size", 0], "batch_size=0"),
        (unigram, ["--data_dir", "nowhere"], "nowhere has no meta.json"),
    ):
        assert words in refused(tmp_path, *data, model, *argv)
    padded = evaluated(tmp_path / "f.json", *data, save(tmp_path / "padded", small(vocabulary=16)))
    assert padded["loss"] == pytest.approx(math.log(16), rel=0.2)
