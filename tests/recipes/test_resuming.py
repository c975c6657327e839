"""A run goes on from its newest whole checkpoint, or says why not; nothing of it is lost or mixed with another's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pretrain_gpt2
import psutil
import pytest
import test_pretrain_gpt2
from helpers import refused
from pretraining.run import resuming
from pretraining.run.resuming import PretrainingTrainer
from test_pretrain_gpt2 import ROOT, SCRIPT, equal_weights, launch, metrics_of, weights
from transformers import TrainerState

from mars_hf.compare import files

TINY = [*test_pretrain_gpt2.TINY, "--n_layer", "1", "--sample_tokens", "0", "--save_strategy", "steps"]
TINY += ["--save_steps", "3", "--logging_steps", "1"]
RESUME = ("--resume_from_checkpoint", "true")


def run(output: Path, tokens: Path, *argv: str) -> None:
    pretrain_gpt2.main([*TINY, "--data_dir", str(tokens), "--output_dir", str(output), *argv])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokens) -> Path:
    """A finished run, with checkpoints after steps 3, 6 and 8; no test changes it."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    run(output, tokens)
    return output


def killed_after(whole: Path, output: Path, *steps: int) -> Path:
    """Copy a run as a kill leaves it that has saved after the given steps."""
    for step in steps:
        shutil.copytree(whole / f"checkpoint-{step}", output / f"checkpoint-{step}")
    shutil.copy(whole / "run.json", output)
    return output


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    return killed_after(whole, tmp_path / "killed", 3, 6)


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "copied")


def names(folder: Path) -> list[str]:
    """Return the names of a run's checkpoints, oldest first."""
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def timeless(value: dict) -> dict:
    """Leave out what differs between two runs of the same kind, and Trainer's mean loss since its start."""
    return {key: each for key, each in value.items() if not re.search("second|runtime|train_loss", key)}


def assert_same_run(a: Path, b: Path) -> None:
    assert equal_weights(a, b)
    first, second = (json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (a, b))
    assert list(map(timeless, first)) == list(map(timeless, second))
    assert timeless(metrics_of(a)) == timeless(metrics_of(b))


# --- whole checkpoints -----------------------------------------------------------------------------------------------

ACCUMULATED = "--dropout 0.1 --gradient_accumulation_steps 2"


@pytest.mark.parametrize(
    "argv",
    [
        f"--optimizer mars_adamw --is_approx false {ACCUMULATED}",
        "--optimizer mars_shampoo",
        "--optimizer muon",
        f"--optimizer mars_m {ACCUMULATED}",
        f"--optimizer adamw {ACCUMULATED}",
    ],
)
def test_resume_to_the_bit(tokens, tmp_path, argv, capsys):
    argv, whole = argv.split(), tmp_path / "whole"
    run(whole, tokens, *argv)
    is_mars, is_exact = argv[1].startswith("mars"), "--is_approx" in argv
    metrics, card = metrics_of(whole), (whole / "README.md").read_text()
    assert (metrics["optimizer"], metrics["is_approx"]) == (argv[1], not is_exact if is_mars else None)
    assert metrics["eval_loss"] < metrics["eval_loss_at_step_0"]
    assert (f"| matrix | {argv[1].replace('_', '-')} |" in card) == ("MARS" in card) == is_mars
    assert ("| False |" in card) == ("is_approx=False: two gradients a step" in capsys.readouterr().out) == is_exact

    resumed = killed_after(whole, tmp_path / "resumed", 3)
    run(resumed, tokens, *argv, *RESUME)
    assert_same_run(whole, resumed)


def test_resume_from_a_path(whole, tokens, tmp_path):
    run(tmp_path / "by path", tokens, "--resume_from_checkpoint", str(whole / "checkpoint-6"))
    assert_same_run(whole, tmp_path / "by path")
    for nowhere in ("nowhere", "auto"):
        with refused(f"--resume_from_checkpoint {nowhere}: no checkpoint there; give its folder, or true"):
            run(tmp_path / "run", tokens, "--resume_from_checkpoint", nowhere)
    assert not (tmp_path / "run").exists()


def test_checkpoint_that_a_kill_has_left_is_passed_over(killed, tokens, whole, capsys):
    """Trainer writes trainer_state.json last. Its remains are written over."""
    state = killed / "checkpoint-6" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:99])
    assert resuming.newest_whole(killed) == killed / "checkpoint-3"
    state.unlink()
    run(killed, tokens, *RESUME)
    printed = capsys.readouterr().out
    assert printed.count(f"{killed / 'checkpoint-6'} is passed over: a run was killed while writing it") == 2
    assert_same_run(whole, killed)
    assert names(killed) == names(whole)


def test_checkpoint_is_whole_with_its_last_file(tokens, tmp_path, monkeypatch):
    """What `resuming` rests on: trainer_state.json is the last file, and older checkpoints are deleted after that."""
    written, seen, save = [], [], TrainerState.save_to_json

    def look(state, path):
        folder = Path(path).parent
        if folder.name.startswith("checkpoint-"):
            written.append({file.name for file in folder.iterdir()})
            seen.append(names(folder.parent))
        save(state, path)

    monkeypatch.setattr(TrainerState, "save_to_json", look)
    run(tmp_path / "run", tokens, "--save_total_limit", "1")
    left = {file.name for file in (tmp_path / "run" / "checkpoint-8").iterdir()}
    assert left - written[-1] == {"trainer_state.json"}
    assert seen[1] == ["checkpoint-3", "checkpoint-6"] and names(tmp_path / "run") == ["checkpoint-8"]


def test_no_checkpoint_is_whole(killed, tokens, capsys):
    for name in names(killed):
        (killed / name / "trainer_state.json").unlink()
    run(killed, tokens, *RESUME, "--max_steps", "2")
    assert f"no checkpoint in {killed} is whole, so a new run begins" in capsys.readouterr().out
    assert metrics_of(killed)["steps"] == 2 and (killed.with_name("killed-earlier-1") / "checkpoint-6").is_dir()


# --- signals, and the end --------------------------------------------------------------------------------------------


def test_one_command_starts_resumes_and_ends(whole, tokens, tmp_path, capsys, monkeypatch):
    """As a scheduler gives it, whatever came before. The signal comes in step 5."""
    output, argv, number = tmp_path / "run", (*RESUME, "--save_total_limit", "1"), signal.SIGTERM
    handler, original = signal.getsignal(number), PretrainingTrainer.training_step

    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step == 4:
            os.kill(os.getpid(), number)
        return original(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainingTrainer, "training_step", training_step)
        run(output, tokens, *argv)
    printed = capsys.readouterr().out
    assert f"--resume_from_checkpoint true: no run in {output}, so a new one begins" in printed
    assert f"stopped by {number.name} after step 5 of 8; {output / 'checkpoint-5'} is saved: go on with" in printed
    assert names(output) == ["checkpoint-5"] and not (output / "metrics.json").exists()
    assert signal.getsignal(number) == handler
    run(output, tokens, *argv)
    assert_same_run(whole, output)
    assert names(output) == ["checkpoint-8"]
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    run(output, tokens, *argv)
    assert "holds this run, finished after step 8; nothing is missing" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_resume_finished_run(whole, copied, tokens, monkeypatch):
    """As after a kill between the last checkpoint and metrics.json; and with more steps."""
    for name in ("metrics.json", "model.safetensors"):
        (copied / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(PretrainingTrainer, "training_step", lambda *args: pytest.fail("it trained"))
        run(copied, tokens, *RESUME)
    assert_same_run(whole, copied)
    run(copied, tokens, *RESUME, "--per_device_train_batch_size", "2", "--max_steps", "10")
    assert metrics_of(copied)["steps"] == 10 and metrics_of(copied)["tokens_per_second"] > 0


# --- another run, and another process --------------------------------------------------------------------------------


def test_new_run_moves_an_earlier_one_aside(whole, copied, tokens, capsys):
    for number in (1, 2):
        run(copied, tokens, "--max_steps", "2", "--save_steps", "2")
        aside = copied.with_name(f"copied-earlier-{number}")
        assert f"the earlier run in {copied} is now in {aside}" in capsys.readouterr().out
        assert names(copied) == ["checkpoint-2"]
    assert_same_run(whole, copied.with_name("copied-earlier-1"))


def test_other_settings_are_refused(killed, tokens):
    changes = (
        "--n_layer 2 --optimizer mars_adamw --gamma 0.02 --is_approx false --learning_rate 1e-3 --weight_decay 0.2"
    )
    words = ["n_layer=1 (now 2)", "optimizer=mars_m (now mars_adamw)", "gamma=0.05 (now 0.02)"]
    words += ["is_approx=None (now False)", "learning_rate=0.016 (now 0.001)", "weight_decay=0.1 (now 0.2)"]
    for checkpoint in ("true", str(killed / "checkpoint-6")):
        with refused(".*".join(map(re.escape, words))):
            run(killed, tokens, "--resume_from_checkpoint", checkpoint, *changes.split())


def test_files_of_others_are_refused(tmp_path, tokens):
    (tmp_path / "model.safetensors").write_text("mine")
    with refused(r"files that no run of this recipe made: model\.safetensors; give"):
        run(tmp_path, tokens)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_one_run_a_folder(tmp_path, tokens):
    """A link to a folder is that folder; the lock itself does not follow a link."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "loop").symlink_to("loop")
    with files.locked(tmp_path / "run", "trains"), refused("link: another process trains there; wait for it to end"):
        run(tmp_path / "link", tokens)
    for folder, kind in ((Path("/"), "the root"), (tmp_path / "loop", "a loop of links")):
        with refused(f"{folder} is {kind}; choose another folder"):
            run(folder, tokens)


STOPPED = """
import os, signal, time
import torch
from pathlib import Path
from pretrain_gpt2 import main
from pretraining.run import processes
from pretraining.run.resuming import PretrainingTrainer
from transformers import TrainerState

original, save, save_to_json = PretrainingTrainer.training_step, torch.save, TrainerState.save_to_json

def slow_save(content, path, **kwargs):
    if "rng_state_1" in str(path):
        time.sleep(2)
    save(content, path, **kwargs)

def save_last(state, path):
    assert Path(path).with_name("rng_state_1.pth").is_file(), "what looks whole is not"
    save_to_json(state, path)

def training_step(trainer, *args, **kwargs):
    if os.environ["RANK"] == "1" and trainer.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(trainer, *args, **kwargs)

PretrainingTrainer.training_step = training_step
torch.save, TrainerState.save_to_json = slow_save, save_last
main()
processes.leave()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_resume_two_processes(tokens, tmp_path):
    """A signal to the second stops both after step 5; resumed, they end with the weights of one process."""
    stopped, script = tmp_path / "stopped", tmp_path / "stopped.py"
    script.write_text(STOPPED)
    # Key biases have no gradient but rounding noise, which Adam would turn into steps at a small eps. So would
    # Newton-Schulz in bfloat16, with any rounding.
    exact = ("--bias", "false", "--eps", "1e-6", "--ns_dtype", "float32")
    words = (*TINY, *exact, "--data_dir", tokens, "--output_dir", stopped)
    printed = launch(*words, script=script, config="cpu_ddp").stdout
    assert "stopped by a signal to another process after step 5 of 8" in printed
    launch(*words, *RESUME, config="cpu_ddp")

    run(tmp_path / "one", tokens, *exact, "--per_device_train_batch_size", "8")
    two, metrics, expected = weights(stopped), metrics_of(stopped), metrics_of(tmp_path / "one")
    for name, one in weights(tmp_path / "one").items():
        assert (one - two[name]).abs().max() <= 5e-5 * one.abs().max(), name
    assert metrics["tokens"] == expected["tokens"]
    assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], 1e-5)
    assert "- total_train_batch_size: 8\n" in (stopped / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_launcher_leaves_no_worker(tokens, tmp_path):
    """A worker that trains saves first; alone it would hold the folder."""
    output = tmp_path / "run"
    words = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / "single_cpu.yaml"]
    words += [SCRIPT, *TINY, "--data_dir", tokens, "--output_dir", output, "--max_steps", "100000"]
    process = psutil.Popen([sys.executable, *map(str, words)])
    while not names(output):
        time.sleep(0.1)
    workers = process.children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    for worker in alive:
        worker.kill()
    assert workers and not alive and resuming.newest_whole(output)
