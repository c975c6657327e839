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
from helpers import gpt2, refused
from pretraining.data import embedded, token_files
from test_pretrain_gpt2 import SCRIPT, launch, run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

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
    model.transformer.ln_f.weight.data.zero_()
    model.transformer.ln_f.bias.data.zero_()[0] = 1.0
    model.transformer.wte.weight.data[:, 0] = torch.from_numpy(SCORES)
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


def test_loss_is_that_of_the_run(tmp_path, tokens, monkeypatch):
    output = tmp_path / "runs" / "mars"
    metrics = run(output, tokens, "--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2", "--bf16", "true")
    prepare = mock.Mock(return_value=tokens)
    monkeypatch.setattr(embedded, "prepare", prepare)
    numbers, one, plain, rounded = (
        evaluated(tmp_path / "f.json", "--max_eval_blocks", 8, "--model", *argv)
        for argv in (
            (output, "--bf16"),
            (output / "checkpoint-2", "--bf16", "--batch_size", 3),
            (output,),
            (output, "--dtype", "bfloat16"),
        )
    )
    assert prepare.call_args_list == [mock.call(tmp_path / "runs" / "data", 4096)] * 4  # beside the run
    expected = {"loss": metrics["eval_loss"], "loss_blocks": 8, "block_size": 32}
    expected |= {key: metrics[key] for key in ("perplexity", "bits_per_byte", "parameters")}
    assert {key: numbers[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert one["loss"] == pytest.approx(numbers["loss"], rel=1e-6) and numbers["data_dir"] == str(tokens)
    shown = [(each["bf16"], each["dtype"]) for each in (numbers, plain, rounded)]
    assert shown == [(True, "float32"), (False, "float32"), (False, "bfloat16")]
    losses = [each["loss"] for each in (numbers, plain, rounded)]
    assert len(set(losses)) == 3 and losses == pytest.approx(losses[:1] * 3, rel=1e-2)


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
    (["never", "maybe"], 1),  # maybe
    (["no", "maybe"], 1),  # no: wrong; by letters maybe
]
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}
validation_split: validation
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Path:
    """Return a folder with a task; lm_eval's own, which take ten seconds to read, are out."""
    manager = pytest.importorskip("lm_eval.tasks").TaskManager
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(manager, include_defaults=False))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [json.dumps({"choices": choices, "answer": answer}) + "\n" for choices, answer in QUESTIONS]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "tiny_choice.yaml").write_text(TASK.format(folder=folder))
    return folder


@pytest.mark.slow  # imports lm_eval
def test_tasks_by_hand(tmp_path, unigram, held_out, tasks, capsys):
    """With the loss in one run, or with a limit and examples."""
    argv = ["--model", unigram, "--batch_size", 2, "--include_path", tasks, "--tasks", "tiny_choice"]
    numbers = evaluated(tmp_path / "f.json", *argv, "--data_dir", held_out)
    row = numbers["tasks"]["results"]["tiny_choice"]
    assert (row["acc,none"], row["acc_norm,none"]) == (2 / 4, 3 / 4)
    assert numbers["loss"] > 0 and "tiny_choice" in capsys.readouterr().out
    numbers = evaluated(tmp_path / "f.json", *argv, "--limit", 3, "--num_fewshot", 1)
    assert numbers["tasks"]["results"]["tiny_choice"]["acc,none"] == 2 / 3 and "loss" not in numbers
    assert numbers["tasks"]["n-shot"]["tiny_choice"] == 1


@pytest.mark.slow
def test_names_of_tasks():
    pytest.importorskip("lm_eval")
    names, manager = evaluate_checkpoint.find_tasks(["paper", "lambada_openai"], None)
    assert names == [*evaluate_checkpoint.PAPER, "lambada_openai"] and len(set(names)) == 10
    assert set(names) <= set(manager.all_tasks)


def test_tasks_that_cannot_run(tmp_path, tasks, unigram, held_out, monkeypatch):
    output, argv = tmp_path / "f.json", ["--include_path", tasks, "--tasks", "tiny_choice"]
    small().save_pretrained(tmp_path / "model")
    unknown = "^--tasks nosuch: lm_eval has no such task; accepted: paper"
    for words, more in ((unknown, ["nosuch", "--model", "/nope"]), ("comes without", ["--model", tmp_path / "model"])):
        with refused(words):
            evaluated(output, *argv, *more)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with refused(r"^--tasks needs the package lm_eval: pip install -e '.\[eval\]'$"):
        evaluated(output, "--model", unigram, "--tasks", "hellaswag")
    assert not output.exists()
    assert evaluated(output, "--model", unigram, "--data_dir", held_out)["loss"] > 0


def test_models_that_cannot_be_evaluated(tmp_path, unigram, held_out, monkeypatch):
    """They are refused before the embedded corpus is tokenized. The model's vocabulary may be padded."""
    monkeypatch.setattr(embedded, "prepare", lambda *given: pytest.fail("tokenized"))
    cut, broken, few, other = (tmp_path / name for name in ("cut", "broken", "few", "other"))
    shutil.copytree(unigram, cut)
    (cut / "model.safetensors").write_bytes(b"\0" * 100)
    infinite = small()
    infinite.get_input_embeddings().weight.data[3] = math.inf
    infinite.save_pretrained(broken)
    small(vocabulary=7).save_pretrained(few)
    save(other, small(), words=(*WORDS[:2], "no", "yes", *WORDS[4:]))
    data = ["--data_dir", held_out]
    for model, argv, words in (
        (cut, [], "cut: transformers loads no causal language model from it"),
        (broken, data, r"the loss is nan; are its weights finite\?"),
        (few, data, "few has another tokenizer than"),
        (other, data, "other has another tokenizer than"),
        (unigram, [*data, "--block_size", 33], "33 tokens are longer than the model's context; give at most 32"),
        (unigram, ["--data_dir", "nowhere"], "nowhere has no meta.json"),
    ):
        with refused(words):
            evaluated(tmp_path / "f.json", "--model", model, *argv)
    with refused("is a folder; name a file for the results"):
        evaluated(tmp_path, "--model", unigram, *data)
    assert not (tmp_path / "f.json").exists()
    padded = evaluated(tmp_path / "f.json", *data, "--model", save(tmp_path / "padded", small(vocabulary=16)))
    assert padded["loss"] == pytest.approx(math.log(16), rel=0.2)
