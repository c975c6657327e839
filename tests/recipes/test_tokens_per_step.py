"""A run has the tokens of a step that its config states, or says what to change."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pretrain_gpt2
import pytest
from helpers import refused
from pretraining.run import tokens_per_step

PAPER = 480 * 1024


def run(batch, accumulation, processes, *, block=1024, stated=PAPER, devices=1):
    """Return what the check reads of a run's arguments; `devices` are those of one process, under DataParallel."""
    training = SimpleNamespace(
        per_device_train_batch_size=batch,
        train_batch_size=batch * max(1, devices),
        gradient_accumulation_steps=accumulation,
        world_size=processes,
        n_gpu=devices,
        tokens_per_step=stated,
    )
    return SimpleNamespace(training=training, model=SimpleNamespace(block_size=block))


@pytest.mark.parametrize(
    ("batch", "accumulation", "processes", "remedy"),
    [
        (15, 4, 4, "give --gradient_accumulation_steps 8, or"),
        (15, 4, 1, "give --gradient_accumulation_steps 32, or"),
        (15, 4, 16, "give --gradient_accumulation_steps 2, or"),
        (5, 12, 32, "give --gradient_accumulation_steps 3, or"),
        (16, 4, 8, "give --per_device_train_batch_size 15 --gradient_accumulation_steps 4, or"),
        (15, 4, 3, "give --per_device_train_batch_size 10 --gradient_accumulation_steps 16, or"),
        (15, 4, 7, "7 devices cannot share 480 sequences evenly: launch 6, or"),
        (15, 4, 64, "64 devices cannot share 480 sequences evenly: launch 60, or"),
    ],
)
def test_another_number_of_processes_is_told_what_to_change(batch, accumulation, processes, remedy):
    with pytest.raises(ValueError) as error:
        tokens_per_step.check(run(batch, accumulation, processes))
    found = batch * accumulation * processes * 1024
    assert str(error.value) == (
        f"a step has {found:,} tokens ({batch} sequences x {accumulation} accumulation steps x {processes} processes x "
        f"1,024 tokens), but tokens_per_step is 491,520; {remedy} --tokens_per_step 0 for any number"
    )


@pytest.mark.parametrize("devices", [0, 1, 2])  # of a process: a CPU, a GPU, DataParallel
@pytest.mark.parametrize("batch", [1, 5, 7, 15, 16, 64])
def test_a_run_that_follows_the_remedy_passes(batch, devices):
    for processes in range(1, 41):
        given = run(batch, 1, processes, devices=devices)
        try:
            tokens_per_step.check(given)
            continue
        except ValueError as mistake:
            told = str(mistake)
        words = dict(re.findall(r"--(\w+) (\d+)", told.partition(", or ")[0]))
        if "launch" in told:
            of_all = int(told.partition("launch ")[2].partition(",")[0])
            assert 480 % (processes * max(1, devices)) and 480 % of_all == 0 and of_all < processes * max(1, devices)
            continue
        size = int(words.get("per_device_train_batch_size", batch))
        assert size <= batch  # a larger one may not fit into memory
        tokens_per_step.check(run(size, int(words["gradient_accumulation_steps"]), processes, devices=devices))


def test_blocks_that_do_not_fill_the_total():
    with pytest.raises(ValueError, match="give a --block_size that divides 491,520, or --tokens_per_step 0"):
        tokens_per_step.check(run(15, 4, 8, block=1000))


@pytest.mark.parametrize("stated", [None, 0])
def test_without_a_stated_number_any_is_right(stated):
    tokens_per_step.check(run(3, 5, 7, stated=stated))


def test_the_recipe_stops_before_it_makes_or_reads_anything(tmp_path, capsys):
    argv = ["--use_cpu", "true", "--data_dir", str(tmp_path / "nowhere"), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        pretrain_gpt2.main([*argv, "--tokens_per_step", "4096"])
    assert end.value.code == 2 and not (tmp_path / "out").exists()
    assert capsys.readouterr().err == (
        "pretrain_gpt2.py: a step has 2,048 tokens (16 sequences x 1 accumulation steps x 1 processes x 128 tokens), "
        "but tokens_per_step is 4,096; give --gradient_accumulation_steps 2, or --tokens_per_step 0 for any number\n"
    )
    with refused("nowhere"):  # the data come next
        pretrain_gpt2.main([*argv, "--tokens_per_step", "4096", "--gradient_accumulation_steps", "2"])
