"""The recipe to copy: one file that trains, logs MARS's metrics, resumes, and names what is wrong with its input."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pretrain_minimal
import pytest
from test_pretrain_gpt2 import equal_weights, launch, weights
from transformers import AutoTokenizer, GPT2Tokenizer

SCRIPT = Path(pretrain_minimal.__file__)
VOCAB, BLOCK = 64, 16
TINY = [
    *f"--n_layer 1 --n_head 2 --n_embd 16 --block_size {BLOCK} --vocab_size {VOCAB}".split(),
    *"--max_steps 6 --logging_steps 1 --save_steps 3 --per_device_train_batch_size 4".split(),
    *"--use_cpu true --disable_tqdm true --report_to none".split(),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Return a folder of token files: 40 blocks and a half, and 9."""
    folder, random = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for name, blocks in (("train.bin", 40.5), ("val.bin", 9)):
        random.integers(0, VOCAB, int(blocks * BLOCK)).astype("<u2").tofile(folder / name)
    return folder


def run(output: Path, tokens: Path, *argv: str) -> list[dict[str, float]]:
    """Run the recipe in this process, and return the log of its run."""
    pretrain_minimal.main([*TINY, "--data_dir", str(tokens), "--output_dir", str(output), *argv])
    return log_of(output)


def log_of(output: Path) -> list[dict[str, float]]:
    """Return the log of a run without what a clock has measured, and without Trainer's mean loss since its start."""
    rows = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    left_out = re.compile("second|runtime|train_loss")
    return [{name: value for name, value in row.items() if not left_out.search(name)} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokens) -> Path:
    """A finished run with checkpoints after steps 3 and 6; no test changes it."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    run(output, tokens)
    return output


def assert_trained(log: list[dict[str, float]], rule: str) -> None:
    """Check losses of random tokens, and that MARS's metrics are there if the rule is MARS's."""
    losses = [row["loss"] for row in log if "loss" in row]
    assert len(losses) == 6 and all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)  # a label too many would make it a sixteenth less
    assert log[-1]["eval_loss"] == pytest.approx(math.log(VOCAB), abs=0.1)
    measured = [row["mars/update_rms"] for row in log if "mars/update_rms" in row]
    assert len(measured) == (6 if rule.startswith("mars_") else 0) and all(rms > 0 for rms in measured)


def test_mars_m_is_the_default(whole):
    assert_trained(log_of(whole), "mars_m")
    assert json.loads((whole / "mars.json").read_text(encoding="utf-8"))["create"]["mars_type"] == "mars-m"


@pytest.mark.parametrize("rule", ["mars_adamw", pytest.param("adamw_torch", marks=pytest.mark.slow)])
def test_other_rules_by_name(tokens, tmp_path, rule):
    assert_trained(run(tmp_path / "run", tokens, "--optim", rule, "--learning_rate", "1e-3"), rule)


def test_resume_to_the_bit(whole, tokens, tmp_path):
    """From the newest checkpoint of a run killed after step 3, and from a path into another folder."""
    killed = tmp_path / "killed"
    shutil.copytree(whole / "checkpoint-3", killed / "checkpoint-3")
    for output, start in ((killed, "True"), (tmp_path / "by path", str(whole / "checkpoint-3"))):
        assert run(output, tokens, "--resume_from_checkpoint", start) == log_of(whole)
        assert equal_weights(whole, output)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> tuple[Path, Path]:
    """Return a folder of three texts, and one with a tokenizer of theirs."""
    folder, tokenizer = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("tokenizer")
    texts = [f"def function_{number}():\n    return {number}\n" * 40 for number in range(3)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    GPT2Tokenizer().train_new_from_iterator(texts, 300).save_pretrained(tokenizer)
    return folder, tokenizer


def test_texts_are_tokenized(texts, tmp_path):
    """A file is a document that ends with the end of text; a share is held out; the model comes with its tokenizer."""
    folder, tokenizer = texts
    argv = [*TINY, "--dataset_name", str(folder), "--tokenizer_name", str(tokenizer), "--vocab_size", "320"]
    pretrain_minimal.main([*argv, "--output_dir", str(tmp_path)])
    log = log_of(tmp_path)
    assert len([row for row in log if "mars/update_rms" in row]) == 6 and log[-1]["eval_loss"] < math.log(320)
    read = AutoTokenizer.from_pretrained(tmp_path)
    args = pretrain_minimal.Arguments(dataset_name=str(folder), block_size=BLOCK)
    parts = [part["input_ids"] for part in pretrain_minimal.tokenized(args, read)]
    stream = [
        token
        for number in range(3)
        for token in [*read((folder / f"{number}.txt").read_text())["input_ids"], read.eos_token_id]
    ]
    blocks = [stream[at : at + BLOCK] for at in range(0, len(stream) - BLOCK + 1, BLOCK)]
    assert sorted([*parts[0], *parts[1]]) == sorted(blocks) and len(parts[1]) == 1


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--vocab_size 64", "--vocab_size 64: the tokenizer has "),
        ("--block_size 5000", "is shorter than two sequences of --block_size 5000 tokens"),
        ("--text_column body", "--text_column body: the columns are text"),
        ("--dataset_name gone", "gone"),
    ],
)
def test_texts_that_do_not_fit(texts, tmp_path, capsys, argv, line):
    folder, tokenizer = map(str, texts)
    words = [*TINY, "--dataset_name", folder, "--tokenizer_name", tokenizer, "--vocab_size", "320", *argv.split()]
    with pytest.raises(SystemExit) as end:
        pretrain_minimal.main([*words, "--output_dir", str(tmp_path)])
    assert end.value.code == 2 and line in capsys.readouterr().err.strip().splitlines()[-1]


def test_blocks_cover_the_file(tokens):
    args = pretrain_minimal.Arguments(block_size=BLOCK, vocab_size=VOCAB)
    data, file = pretrain_minimal.TokenFile(tokens / "train.bin", args), np.fromfile(tokens / "train.bin", "<u2")
    assert len(data) == 40
    ids = np.concatenate([data[index]["input_ids"] for index in range(len(data))])
    assert ids.tolist() == file[: 40 * BLOCK].tolist()
    assert data[1]["labels"].tolist() == [-100, *file[BLOCK + 1 : 2 * BLOCK].tolist()]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--data_dir .", "--data_dir . has no train.bin; give a folder with train.bin and val.bin"),
        ("--dataset_name half", "give the text: either --dataset_name, or --data_dir with train.bin and val.bin"),
        ("--data_dir half", "--data_dir half has no val.bin; give a folder"),
        ("--data_dir empty", "--block_size 16: empty/train.bin has 0 tokens; give at least 1, at most those"),
        ("--block_size 145", "val.bin has 144 tokens; give at least 1, at most those"),
        ("--block_size 0", "--block_size 0: "),
        ("--vocab_size 50", "/train.bin has token id 63; give at least 64"),
        ("--n_head 0", "--n_head 0: give at least 1"),
        ("--n_layer -1", "--n_layer -1: give at least 1"),
        ("--learning_rate nan", "--learning_rate nan: give a number >= 0"),
        ("--report_to wandb", "wandb"),
        ("--n_head 3", "divisible by num_heads"),
        ("--resume_from_checkpoint True", "True: no checkpoint there; give the folder of one, True for the newest"),
        ("--resume_from_checkpoint gone", "--resume_from_checkpoint gone: no checkpoint there; give the folder"),
        ("--optim mars", "--optim: invalid choice: 'mars'"),
        ("--optim_args gama=1", "gama"),
        ("--blocksize 16", "['--blocksize', '16']"),
    ],
)
def test_wrong_input_is_one_line(tokens, tmp_path, monkeypatch, capsys, argv, line):
    monkeypatch.chdir(tmp_path)
    for folder in ("half", "empty"):
        Path(folder).mkdir()
    shutil.copy(tokens / "train.bin", "half")
    Path("empty", "train.bin").touch()
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "run", tokens, *argv.split())
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and message.startswith("pretrain_minimal.py: error: ") and line in message


def test_processes_that_do_not_know_of_each_other_stop(monkeypatch):
    training: Any = SimpleNamespace(world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a config for GPUs does on a machine without them
    with pytest.raises(ValueError, match="processes are not connected, so each would train alone; add --use_cpu true"):
        pretrain_minimal.build(pretrain_minimal.Arguments(), training)


# Relative to the largest element of a tensor; tests/distributed/test_parity.py has them too.
BARS = {"mars_adamw": 5e-5, "mars_m": 1e-5}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("rule", BARS)
def test_two_processes_give_the_weights_of_one(tokens, tmp_path, rule):
    """With the same batches; eps keeps the rounding noise in the gradients of key biases from becoming steps."""
    argv = ["--optim", rule, "--adam_epsilon", "1e-5"]
    if rule == "mars_m":
        argv += ["--optim_args", "ns_dtype=float32"]
    run(tmp_path / "one", tokens, *argv)
    words = [*TINY, "--data_dir", tokens, "--output_dir", tmp_path / "two", *argv]
    ended = launch(*words, "--per_device_train_batch_size", "2", script=SCRIPT, config="cpu_ddp")
    assert "find_unused_parameters=True" not in ended.stderr
    assert_trained(log_of(tmp_path / "two"), rule)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, expected in one.items():
        assert (two[name] - expected).abs().max() <= BARS[rule] * expected.abs().max(), name
