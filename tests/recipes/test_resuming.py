"""A run goes on from its newest whole checkpoint, or says why not; nothing of it is lost or mixed with another's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pretrain_gpt2
import psutil
import pytest
import test_pretrain_gpt2
import torch
from helpers import refused
from pretraining import files
from pretraining.run import checkpoints, resuming
from pretraining.run.checkpoints import PretrainingTrainer
from test_pretrain_gpt2 import SCRIPT, equal_weights, launch, metrics_of

TINY = [*test_pretrain_gpt2.TINY, "--n_layer", "1", "--sample_tokens", "0", "--save_strategy", "steps"]
TINY += ["--save_steps", "3"]
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
    """Leave out what differs between two runs of the same kind."""
    return {key: each for key, each in value.items() if "second" not in key and "runtime" not in key}


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
        "--optimizer mars_adamw",
        "--optimizer mars_adamw --is_approx false",
        "--optimizer mars_shampoo",
        "--optimizer muon",
        f"--optimizer mars_m {ACCUMULATED}",
        f"--optimizer adamw {ACCUMULATED}",
    ],
)
def test_resume_to_the_bit(tokens, tmp_path, argv):
    """Step 3 is between two log lines, so the loss of one step is not in Trainer's checkpoint."""
    argv, whole = argv.split(), tmp_path / "whole"
    run(whole, tokens, *argv)
    resumed = killed_after(whole, tmp_path / "resumed", 3)
    run(resumed, tokens, *argv, *RESUME)
    assert_same_run(whole, resumed)
    run(tmp_path / "by path", tokens, *argv, "--resume_from_checkpoint", str(whole / "checkpoint-6"))
    assert_same_run(whole, tmp_path / "by path")


def truncate(folder):
    with (folder / "optimizer.pt").open("r+b") as file:
        file.truncate(100)


def flip_a_bit(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def edit_manifest(old, new):
    def edit(folder):
        text = (folder / "manifest.json").read_text()
        assert old in text
        (folder / "manifest.json").write_text(text.replace(old, new))

    return edit


def give_to_another_run(folder):
    sealed = checkpoints.read(folder)
    checkpoints.seal(folder, run="another", step=6, settings=sealed.settings, progress=sealed.progress)


DAMAGES = {
    "truncated": (truncate, "optimizer.pt has 100 bytes, not the"),
    "a bit": (flip_a_bit, "model.safetensors is not what was written"),
    "no scheduler": (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing"),
    "never sealed": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    "half a manifest": (edit_manifest('"files": {', ""), "its manifest.json is damaged"),
    "another manifest": (edit_manifest('"step"', '"steps"'), "its manifest.json is damaged"),
    "edited": (
        edit_manifest('"last_logged_step": 6', '"last_logged_step": 4'),
        "its manifest.json is damaged (its SHA",
    ),
    "another run": (give_to_another_run, "it belongs to another run"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_passed_over(whole, killed, tokens, damage, capsys):
    change, words = DAMAGES[damage]
    change(killed / "checkpoint-6")
    run(killed, tokens, *RESUME)
    printed = capsys.readouterr().out
    assert f"{killed / 'checkpoint-6'} is passed over: {words}" in printed and printed.count("passed over") == 1
    assert_same_run(whole, killed)
    checkpoints.check(killed / "checkpoint-6")  # written anew


def test_no_checkpoint_is_whole(killed, tokens, capsys):
    for name in names(killed):
        truncate(killed / name)
    before = sorted(killed.rglob("*"))
    with refused(r"no checkpoint in .* is whole, of 2; give auto, or remove the flag, to start again"):
        run(killed, tokens, *RESUME)
    assert capsys.readouterr().out.count("is passed over") == 2 and sorted(killed.rglob("*")) == before
    run(killed, tokens, "--resume_from_checkpoint", "auto", "--max_steps", "2")
    printed = capsys.readouterr().out
    assert "no checkpoint in" in printed and "so a new run begins" in printed
    assert metrics_of(killed)["steps"] == 2 and (killed / "earlier-1" / "checkpoint-6").is_dir()


def test_checkpoints_that_cannot_be_resumed(tokens, tmp_path):
    output = tmp_path / "run"
    with refused("nowhere cannot be used: it has no manifest.json"):
        run(output, tokens, "--resume_from_checkpoint", str(tmp_path / "nowhere"))
    assert not output.exists()
    run(output, tokens, "--save_only_model", "true", "--max_steps", "3")
    with refused(r"it has no manifest.json: .* or had --save_only_model"):
        run(output, tokens, "--max_steps", "6", "--resume_from_checkpoint", str(output / "checkpoint-3"))
    with refused("is whole, of 1"):
        run(output, tokens, "--max_steps", "6", *RESUME)


def test_full_disk_keeps_older_checkpoints(whole, tokens, tmp_path, monkeypatch):
    output, save = tmp_path / "run", torch.save

    def full(content, path, *args, **kwargs):
        if "checkpoint-6" in str(path):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 15360 vs 15252")
        save(content, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with refused(r"checkpoint-6 cannot be written, with .* bytes free \(.*\); checkpoints before it are kept"):
            run(output, tokens, "--save_total_limit", "1")
    run(output, tokens, *RESUME, "--save_total_limit", "1")
    assert_same_run(whole, output)


@pytest.mark.parametrize(("argv", "left"), [((), ["6", "8"]), (("--save_total_limit", "1"), ["8"])])
def test_older_checkpoints_go(whole, killed, tokens, argv, left):
    """Remains of a killed deletion too; what the run needs is read before it goes."""
    (killed / "checkpoint-3" / "manifest.json").unlink()
    run(killed, tokens, *RESUME, *argv)
    assert names(killed) == [f"checkpoint-{step}" for step in left]
    assert_same_run(whole, killed)


def test_rotation_keeps_the_best_and_what_is_newer_than_the_last_sealed(tmp_path):
    for step in range(1, 7):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if step not in (2, 6):  # never sealed, or half deleted
            (folder / "manifest.json").write_text("{}")
    checkpoints.rotate(tmp_path, None)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (1, 3, 4, 5, 6)]
    checkpoints.rotate(tmp_path, 2, keep=tmp_path / "checkpoint-1")
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (1, 5, 6)]


# --- signals, and the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "number"), [("true", signal.SIGTERM), ("auto", signal.SIGUSR1)])
def test_one_command_starts_resumes_and_ends(whole, tokens, tmp_path, word, number, capsys, monkeypatch):
    """As a scheduler gives it, whatever came before. The signal comes in step 5, between log lines."""
    output, argv, handler = tmp_path / "run", ("--resume_from_checkpoint", word), signal.getsignal(number)
    original = PretrainingTrainer.training_step

    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step == 4:
            os.kill(os.getpid(), number)
        return original(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainingTrainer, "training_step", training_step)
        run(output, tokens, *argv)
    printed = capsys.readouterr().out
    assert f"--resume_from_checkpoint {word}: no run in {output}, so a new one begins" in printed
    assert f"stopped by {number.name} after step 5 of 8; {output / 'checkpoint-5'} is saved: go on with" in printed
    assert names(output) == ["checkpoint-3", "checkpoint-5"] and not (output / "metrics.json").exists()
    assert signal.getsignal(number) == handler
    run(output, tokens, *argv)
    assert_same_run(whole, output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    run(output, tokens, *argv)
    assert "holds this run, finished after step 8; nothing is missing" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_run_at_its_end_only_writes_its_result(whole, copied, tokens, capsys, monkeypatch):
    """As after a kill between the last checkpoint and metrics.json."""
    for name in ("metrics.json", "model.safetensors"):
        (copied / name).unlink()
    monkeypatch.setattr(PretrainingTrainer, "training_step", lambda *args: pytest.fail("it trained"))
    run(copied, tokens, *RESUME)
    assert "checkpoint-8 is the end of this run, step 8 of 8: only its result is written" in capsys.readouterr().out
    assert_same_run(whole, copied)
    first, second = (metrics_of(folder)["tokens_per_second"] for folder in (whole, copied))
    assert first / 20 < second < first * 20  # of the steps; this session made none


def test_finished_run_is_made_longer(copied, tokens, capsys):
    """What a resume takes as given is said."""
    changes = ("--per_device_train_batch_size", "2", "--seed", "3", "--max_grad_norm", "0.5", "--max_steps", "10")
    run(copied, tokens, *RESUME, *changes)
    printed = capsys.readouterr().out
    assert f"resuming: {copied} was trained with max_steps=8 (now 10), max_grad_norm=1.0 (now 0.5), " in printed
    assert "per_device_train_batch_size=4 (now 2)" in printed and "seed=1 (now 3)\n" in printed
    assert "metrics-earlier.json" in printed
    steps = [json.loads((copied / f"{name}.json").read_text())["steps"] for name in ("metrics", "metrics-earlier")]
    assert steps == [10, 8]


# --- another run, and another process --------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--overwrite_output_dir", "true"]], ids=["killed", "overwrite"])
def test_new_run_moves_an_earlier_one_aside(killed, copied, tokens, argv, capsys):
    output = copied if argv else killed
    (output / "notes.txt").write_text("not of a run")
    before = json.loads((output / "run.json").read_text())
    run(output, tokens, "--max_steps", "2", "--save_steps", "2", *argv)
    assert f"an earlier run's files are now in {output / 'earlier-1'}" in capsys.readouterr().out
    assert names(output) == ["checkpoint-2"] and json.loads((output / "run.json").read_text())["id"] != before["id"]
    assert json.loads((output / "earlier-1" / "run.json").read_text()) == before
    checkpoints.check(output / "earlier-1" / "checkpoint-6")
    assert (output / "notes.txt").read_text() == "not of a run"


@pytest.mark.parametrize("moves", range(4))
def test_kill_while_an_earlier_run_is_moved_loses_nothing(whole, copied, monkeypatch, moves):
    earlier, done = resuming.read_run(copied), []

    def move(*paths):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(os.rename(*paths))

    with monkeypatch.context() as patch:
        patch.setattr(resuming.shutil, "move", move)
        with pytest.raises(KeyboardInterrupt):
            resuming.begin(copied, {})
    now = resuming.read_run(copied)
    newest, _ = checkpoints.newest_whole(copied, now.id)
    assert (now == earlier) == (newest is not None)  # one run or the other, never both
    assert now == earlier or not (copied / "metrics.json").exists()
    resuming.begin(copied, {})
    assert {path.name for path in copied.glob("earlier-*/*")} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize("way", ["newest", "path"])
def test_other_settings_are_refused(killed, tokens, way):
    resume = RESUME if way == "newest" else ("--resume_from_checkpoint", str(killed / "checkpoint-6"))
    changes = {
        "n_layer": ("2", r"1 \(now 2\)"),
        "optimizer": ("mars_adamw", r"mars_m \(now mars_adamw\)"),
        "gamma": ("0.02", r"0\.05 \(now 0\.02\)"),
        "is_approx": ("false", r"None \(now False\)"),
        "learning_rate": ("1e-3", r"0\.016 \(now 0\.001\)"),
        "weight_decay": ("0.2", r"0\.1 \(now 0\.2\)"),
    }
    words = [word for name, (value, _) in changes.items() for word in (f"--{name}", value)]
    with refused(".*".join(f"{name}={change}" for name, (_, change) in changes.items())):
        run(killed, tokens, *resume, *words)


def test_files_of_others_are_refused(tmp_path, tokens):
    for name in ("README.md", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    with refused(r"files that no run of this recipe made: README\.md, model\.safetensors; give"):
        run(tmp_path, tokens, "--overwrite_output_dir", "true")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "README.md": "mine",
        "model.safetensors": "mine",
    }


def test_one_run_a_folder(tmp_path, tokens, monkeypatch):
    """A link to a folder is that folder; the lock itself does not follow a link."""
    output, victim = tmp_path / "run", tmp_path / "victim"
    (tmp_path / "link").symlink_to(output)
    for folder in (output, tmp_path / "link"):
        with (
            files.locked(output, "trains"),
            refused(f"{folder.name}: another process trains there; wait for it to end"),
        ):
            run(folder, tokens)
    with files.locked(output, "trains"):  # it is free again
        pass
    (tmp_path / ".run.lock").unlink(missing_ok=True)
    victim.write_text("precious")
    (tmp_path / ".run.lock").symlink_to(victim)
    with refused(r"\.run\.lock"):
        run(output, tokens)
    assert victim.read_text() == "precious" and not output.exists()
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for folder, kind in (("/", "the root"), ("loop", "a loop of links")):
        with refused(f"{folder} is {kind}; choose another folder"):
            run(Path(folder), tokens)


STOPPED = """
import os, signal, sys
import pretrain_gpt2
from pretraining.run import errors
from pretraining.run.checkpoints import PretrainingTrainer

original = PretrainingTrainer.training_step

def training_step(trainer, *args, **kwargs):
    if os.environ["RANK"] == "1" and trainer.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(trainer, *args, **kwargs)

if "--resume_from_checkpoint" not in sys.argv:
    PretrainingTrainer.training_step = training_step
errors.run(lambda: pretrain_gpt2.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_resume_to_the_bit(tokens, tmp_path):
    """A signal to the second stops both after step 5, between log lines: each has a loss of its own to take up."""
    whole, killed, stopped = tmp_path / "whole", tmp_path / "killed", tmp_path / "stopped.py"
    stopped.write_text(STOPPED)

    def two(output: Path, script: Path, *argv: str) -> str:
        argv = (*TINY, "--data_dir", tokens, "--output_dir", output, *argv)
        return launch(*argv, script=script, config="cpu_ddp").stdout

    two(whole, SCRIPT)
    assert "stopped by a signal to another process after step 5 of 8" in two(killed, stopped)
    assert len(checkpoints.read(killed / "checkpoint-5").progress["unlogged_losses"]) == 2
    two(killed, stopped, *RESUME)
    assert_same_run(whole, killed)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_launcher_leaves_no_workers(tokens, tmp_path):
    """They are killed while they import torch, after which they would wait for the launcher's store for minutes."""
    config = SCRIPT.parents[1] / "accelerate_configs" / "cpu_ddp.yaml"
    words = ["-m", "accelerate.commands.launch", "--config_file", config, SCRIPT, *TINY, "--data_dir", tokens]
    launcher = psutil.Popen([sys.executable, *map(str, words), "--output_dir", str(tmp_path / "run")])
    while len(workers := launcher.children(recursive=True)) < 2:
        time.sleep(0.05)
    time.sleep(1)
    launcher.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive and not (tmp_path / "run" / "metrics.json").exists()
