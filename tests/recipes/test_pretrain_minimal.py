"""The recipe to copy: one file that trains, logs MARS's metrics and resumes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

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


def test_adamw_is_the_baseline(tokens, tmp_path):
    argv = ["--optim", "adamw_torch", "--learning_rate", "6e-4", "--weight_decay", "0.1"]
    assert_trained(run(tmp_path / "run", tokens, *argv), "adamw_torch")


def test_resume_to_the_bit(whole, tokens, tmp_path):
    """From the checkpoint after step 3, into another folder."""
    resumed = run(tmp_path / "run", tokens, "--resume_from_checkpoint", str(whole / "checkpoint-3"))
    assert resumed == log_of(whole) and equal_weights(whole, tmp_path / "run")


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
    """The end of the texts is held out; the model comes with the tokenizer."""
    folder, tokenizer = texts
    argv = [*TINY, "--dataset_name", str(folder), "--tokenizer_name", str(tokenizer), "--vocab_size", "320"]
    trainer = pretrain_minimal.main([*argv, "--output_dir", str(tmp_path)])
    log, read = log_of(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len([row for row in log if "mars/update_rms" in row]) == 6 and log[-1]["eval_loss"] < math.log(320)
    stream = [token for row in [*trainer.train_dataset, *trainer.eval_dataset] for token in row["input_ids"]]
    whole = "".join(f"{path.read_text()}{read.eos_token}" for path in sorted(folder.iterdir()))
    assert whole.startswith(read.decode(stream)) and len(trainer.eval_dataset) == 1


def test_blocks_cover_the_file(tokens):
    data, file = pretrain_minimal.TokenFile(tokens / "train.bin", BLOCK), np.fromfile(tokens / "train.bin", "<u2")
    assert len(data) == 40
    ids = np.concatenate([data[index]["input_ids"] for index in range(len(data))])
    assert ids.tolist() == file[: 40 * BLOCK].tolist()
    assert data[1]["labels"].tolist() == [-100, *file[BLOCK + 1 : 2 * BLOCK].tolist()]


def test_flags_count_without_data(tmp_path):
    trainer = pretrain_minimal.main([*TINY, "--vocab_size", "300", "--max_steps", "1", "--output_dir", str(tmp_path)])
    config = trainer.model.config
    assert (config.n_layer, config.n_embd, config.n_positions, config.vocab_size) == (1, 16, BLOCK, 300)


def test_data_that_cannot_train(tokens, texts, tmp_path):
    """One line says what to change, before training."""
    folder, tokenizer = texts
    (tmp_path / "val.bin").touch()
    (tmp_path / "train.bin").write_bytes((tokens / "train.bin").read_bytes())
    for argv, line in (
        (["--data_dir", tokens, "--dataset_name", folder], "are two sources of data"),
        (["--data_dir", tmp_path], "val.bin is missing or empty"),
        (
            ["--data_dir", tokens, "--block_size", 200],
            "the data fill 3 blocks of 200 tokens to train on, and 0 held out",
        ),
        (["--dataset_name", folder, "--tokenizer_name", tokenizer], "--vocab_size 64 is less than the tokenizer's"),
    ):
        with pytest.raises(SystemExit, match=line):
            pretrain_minimal.main([*TINY, *map(str, argv), "--output_dir", str(tmp_path / "run")])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_give_the_weights_of_one(tokens, tmp_path):
    """With the same batches; eps keeps the rounding noise in the gradients of key biases from becoming steps."""
    argv = ["--adam_epsilon", "1e-5", "--optim_args", "ns_dtype=float32"]
    run(tmp_path / "one", tokens, *argv)
    words = [*TINY, "--data_dir", tokens, "--output_dir", tmp_path / "two", *argv]
    ended = launch(*words, "--per_device_train_batch_size", "2", script=SCRIPT, config="cpu_ddp")
    assert "find_unused_parameters=True" not in ended.stderr
    assert_trained(log_of(tmp_path / "two"), "mars_m")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, expected in one.items():
        assert (two[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name
