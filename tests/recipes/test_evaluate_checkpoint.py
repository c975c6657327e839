"""The evaluation of a checkpoint: the loss by hand and as the run reports it, tasks with known answers, mistakes."""

from __future__ import annotations

import functools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import evaluate_checkpoint
import numpy as np
import pretrain_gpt2
import pytest
import torch
from pretraining.data import embedded, token_files
from test_pretrain_gpt2 import TINY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "evaluate_checkpoint.py"
END = "<|endoftext|>"
WORDS = (END, "question", "yes", "no", "maybe", "never", "a", "b")
# What the model below gives each word, whatever came before.
SCORES = np.array([-1.0, -1.0, 2.0, 1.0, 0.5, -0.5, -1.0, -2.0])
LOG_SHARES = SCORES - np.log(np.exp(SCORES).sum())


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END)


def small(vocabulary: int = len(WORDS), context: int = 32) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": context, "vocab_size": vocabulary}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.fixture(scope="module")
def unigram(tmp_path_factory) -> Path:
    """Return a model that gives each word its score: the final norm yields (1, 0, ...); embeddings start with it."""
    model = small()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()[0] = 1.0
        model.transformer.wte.weight[:, 0] = torch.from_numpy(SCORES)
    folder = tmp_path_factory.mktemp("models") / "unigram"
    model.save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


def prepared(folder: Path, tokenizer: PreTrainedTokenizerFast, val: np.ndarray, val_bytes: int) -> Path:
    """Write a folder as prepare_data.py does."""
    meta = {"dataset": "words", "tokenizer": "words", "vocab_size": len(tokenizer), "end_of_text": 0}
    with token_files.writing(folder) as partial:
        tokenizer.save_pretrained(partial / "tokenizer")
        for split, ids, size in (("train", val[:9], 9), ("val", val, val_bytes)):
            meta[split] = token_files.write_tokens(partial / f"{split}.bin", [(ids, size)])
        token_files.write_meta(partial, meta)
    return folder


VAL = np.random.default_rng(3).integers(0, len(WORDS), 103)
VAL_BYTES = 412


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "words", words(), VAL, VAL_BYTES)


def evaluated(output: Path, *argv: object) -> dict:
    evaluate_checkpoint.main([*map(str, argv), "--output_file", str(output), "--use_cpu"])
    return json.loads(output.read_text())


def refused(tmp_path: Path, *argv: object) -> str:
    """Return the line of a refused evaluation, which leaves no file."""
    output = tmp_path / "refused.json"
    with pytest.raises(SystemExit) as exit:
        evaluated(output, *argv)
    assert exit.value.code == 2
    assert not output.exists()
    return str(exit.value.__context__)


def test_loss_by_hand(tmp_path, unigram, held_out, capsys):
    given = ["--model", unigram, "--data_dir", held_out, "--block_size", 10, "--batch_size", 4]
    found = evaluated(tmp_path / "new" / "f.json", *given)
    loss = -LOG_SHARES[VAL[:100].reshape(10, 10)[:, 1:]].mean()
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) * len(VAL) / VAL_BYTES, rel=1e-6)
    assert found["loss_blocks"] == 10 and found["block_size"] == 10
    assert f"loss          {found['loss']}" in capsys.readouterr().out
    first = evaluated(tmp_path / "new" / "f.json", *given, "--max_eval_blocks", 3)
    assert first["loss"] == pytest.approx(-LOG_SHARES[VAL[:30].reshape(3, 10)[:, 1:]].mean(), rel=1e-6)


@pytest.mark.parametrize("bf16", [False, True])
def test_loss_is_that_of_the_run(tmp_path, tokens, bf16, monkeypatch):
    output, flag = tmp_path / "runs" / "mars", ["--bf16", str(bf16).lower()]
    steps = ["--save_strategy", "steps", "--save_steps", "2"]
    pretrain_gpt2.main(
        [*TINY, "--data_dir", str(tokens), "--output_dir", str(output), "--max_steps", "2", *steps, *flag]
    )
    metrics = json.loads((output / "metrics.json").read_text())
    made = mock.Mock(return_value=tokens)
    monkeypatch.setattr(embedded, "prepare", made)
    given = ["--model", output, "--max_eval_blocks", 8]
    found = evaluated(tmp_path / "f.json", *given, *flag)
    made.assert_called_once_with(tmp_path / "runs" / "data", 4096)  # beside the run
    for key, name in (("loss", "eval_loss"), ("perplexity", "perplexity"), ("bits_per_byte", "bits_per_byte")):
        assert found[key] == pytest.approx(metrics[name], rel=1e-6)
    assert (found["loss_blocks"], found["block_size"], found["parameters"]) == (8, 32, metrics["parameters"])
    assert (found["bf16"], found["dtype"], found["data_dir"]) == (bf16, "float32", str(tokens))
    given[1] = output / "checkpoint-2"
    one = evaluated(tmp_path / "one.json", *given, *flag, "--batch_size", 3)
    assert one["loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert made.call_args.args[0] == tmp_path / "runs" / "data"
    rounded = evaluated(tmp_path / "rounded.json", *given, "--dtype", "bfloat16")
    assert rounded["dtype"] == "bfloat16" and rounded["loss"] != found["loss"]
    assert rounded["loss"] == pytest.approx(found["loss"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_give_the_loss_of_one(tmp_path, unigram, held_out):
    """Eleven blocks divide neither by the batch nor by the processes."""
    given = ["--model", str(unigram), "--data_dir", str(held_out), "--block_size", "9", "--batch_size", "2"]
    given += ["--use_cpu", "--output_file"]
    config = ["--config_file", str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *config, str(SCRIPT)]
    done = subprocess.run([*launch, *given, str(tmp_path / "two.json")], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("results are in") == 1
    evaluate_checkpoint.main([*given, str(tmp_path / "one.json")])
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
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


def describe(folder: Path, name: str, rows: list) -> None:
    """Write a task of lm-evaluation-harness and its data."""
    lines = [json.dumps({"choices": choices, "answer": answer}) + "\n" for choices, answer in rows]
    (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{validation: {folder / name}.jsonl}}, cache_dir: {folder / 'cache'}}}\n"
        "validation_split: validation\n"
        "output_type: multiple_choice\n"
        "doc_to_text: question\n"
        "doc_to_choice: choices\n"
        "doc_to_target: answer\n"
        "metric_list:\n"
        "  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
        "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n"
    )


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Return a folder with two tasks and the group of both."""
    folder = tmp_path_factory.mktemp("tasks")
    describe(folder, "tiny_choice", QUESTIONS)
    describe(folder, "tiny_easy", [QUESTIONS[0], QUESTIONS[4]])
    (folder / "group.yaml").write_text(
        "group: tiny_group\ntask: [tiny_choice, tiny_easy]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
    )
    return folder


@pytest.fixture
def only_own_tasks(monkeypatch):
    """Leave out lm_eval's own tasks, which take ten seconds to read."""
    manager = pytest.importorskip("lm_eval.tasks").TaskManager
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(manager, include_defaults=False))


@pytest.mark.usefixtures("only_own_tasks")
def test_accuracy_of_a_task_by_hand(tmp_path, unigram, tasks, capsys):
    found = evaluated(tmp_path / "f.json", "--model", unigram, "--tasks", "tiny_choice", "--include_path", tasks)
    row = found["tasks"]["results"]["tiny_choice"]
    assert row["acc,none"] == 4 / 6 and row["acc_norm,none"] == 3 / 6
    assert row["acc_norm_stderr,none"] == pytest.approx(math.sqrt(0.5 * 0.5 / 5), rel=1e-6)
    assert "loss" not in found
    assert "|tiny_choice|" in capsys.readouterr().out


@pytest.mark.usefixtures("only_own_tasks")
def test_group_limit_examples_and_loss_in_one_run(tmp_path, unigram, held_out, tasks):
    given = ["--model", unigram, "--data_dir", held_out, "--batch_size", 2, "--include_path", tasks]
    found = evaluated(tmp_path / "f.json", *given, "--limit", 4, "--num_fewshot", 1, "--tasks", "tiny_group")
    results = found["tasks"]["results"]
    assert results["tiny_choice"]["acc,none"] == 3 / 4 and found["tasks"]["n-shot"]["tiny_choice"] == 1
    assert results["tiny_group"]["acc,none"] == (3 / 4 + 1) / 2
    assert found["loss"] > 0


@pytest.mark.slow
def test_names_of_tasks():
    pytest.importorskip("lm_eval")
    names, manager = evaluate_checkpoint.find_tasks(["paper", "lambada_openai"], None)
    assert names == [*evaluate_checkpoint.PAPER, "lambada_openai"] and len(set(names)) == 10
    assert set(names) <= set(manager.all_tasks)


@pytest.mark.usefixtures("only_own_tasks")
def test_tasks_that_cannot_run(tmp_path, tasks, unigram, held_out, monkeypatch):
    line = refused(tmp_path, "--model", "/nope", "--include_path", tasks, "--tasks", "tiny_choice", "nosuch")
    assert line.startswith("--tasks nosuch: lm_eval has no such task; accepted: paper")
    small().save_pretrained(tmp_path / "model")
    given = ["--model", tmp_path / "model", "--tasks", "tiny_choice", "--include_path", tasks]
    assert "comes without one" in refused(tmp_path, *given)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    line = refused(tmp_path, "--model", unigram, "--tasks", "hellaswag")
    assert line == "--tasks needs the package lm_eval: pip install -e '.[eval]'"
    assert evaluated(tmp_path / "f.json", "--model", unigram, "--data_dir", held_out)["loss"] > 0


def test_models_that_cannot_be_evaluated(tmp_path, unigram, held_out, monkeypatch):
    """They are refused before the embedded corpus is tokenized."""
    monkeypatch.setattr(embedded, "prepare", lambda *given: pytest.fail("tokenized"))
    assert refused(tmp_path, "--model", "/nope").startswith("/nope: no such folder; give one with config.json")
    assert "me/nowhere: transformers loads no causal language model" in refused(tmp_path, "--model", "me/nowhere")
    shutil.copytree(unigram, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\0" * 100)
    assert "loads no causal language model from it" in refused(tmp_path, "--model", tmp_path / "cut")
    bert = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    line = refused(tmp_path, "--model", tmp_path / "bert")
    assert "lacks" in line and "of BertLMHeadModel (first: cls." in line
    model = small()
    with torch.no_grad():
        model.transformer.wte.weight[3] = math.inf
    model.save_pretrained(tmp_path / "broken")
    line = refused(tmp_path, "--model", tmp_path / "broken", "--data_dir", held_out)
    assert "the loss is nan; are its weights finite?" in line


def test_models_and_data(tmp_path, unigram, held_out):
    """The vocabulary of the model may be padded, but has the data's tokens."""
    given = ["--data_dir", held_out, "--model"]
    small(vocabulary=16).save_pretrained(tmp_path / "padded")
    words().save_pretrained(tmp_path / "padded")
    assert evaluated(tmp_path / "f.json", *given, tmp_path / "padded")["loss"] == pytest.approx(math.log(16), rel=0.2)
    small(vocabulary=7).save_pretrained(tmp_path / "few")
    assert "few has another tokenizer than" in refused(tmp_path, *given, tmp_path / "few")
    small().save_pretrained(tmp_path / "other")
    swapped = json.loads(words().backend_tokenizer.to_str())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["yes"], vocabulary["no"] = vocabulary["no"], vocabulary["yes"]
    end = {"bos_token": END, "eos_token": END, "unk_token": END}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(swapped)), **end)
    other.save_pretrained(tmp_path / "other")
    assert "other has another tokenizer than" in refused(tmp_path, *given, tmp_path / "other")
    line = refused(tmp_path, *given, unigram, "--block_size", 33)
    assert line == "blocks of 33 tokens are longer than the model's context; give at most 32"
    assert "batch_size=0" in refused(tmp_path, *given, unigram, "--batch_size", 0)
    assert "nowhere has no meta.json" in refused(tmp_path, "--model", unigram, "--data_dir", "nowhere")
