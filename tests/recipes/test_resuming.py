"""A run goes on from its newest whole checkpoint, or says why not; nothing of it is lost or mixed with another's."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import signal
import textwrap
from pathlib import Path

import pretrain_gpt2
import pytest
import test_pretrain_gpt2
import torch
from helpers import refused
from pretraining import files
from pretraining.run import checkpoints, resuming
from pretraining.run.checkpoints import PretrainingTrainer
from test_pretrain_gpt2 import SCRIPT, equal_weights, launch, metrics_of, weights
from transformers import Trainer

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
        "--optimizer mars_lion",
        "--optimizer mars_shampoo",
        "--optimizer muon",
        f"--optimizer mars_m {ACCUMULATED}",
        f"--optimizer adamw {ACCUMULATED}",
    ],
)
def test_resume_to_the_bit(tokens, tmp_path, argv, capsys):
    """Step 3 is between two log lines, so the loss of one step is not in Trainer's checkpoint."""
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
    run(tmp_path / "by path", tokens, *argv, "--resume_from_checkpoint", str(whole / "checkpoint-6"))
    assert_same_run(whole, tmp_path / "by path")


def rewrite(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def give_to_another_run(folder):
    sealed = checkpoints.read(folder)
    checkpoints.seal(folder, run="another", step=6, settings=sealed.settings, progress=sealed.progress)


truncate = rewrite("optimizer.pt", lambda content: content[:100])
DAMAGES = {
    "truncated": (truncate, "optimizer.pt has 100 bytes, not the"),
    "a bit": (
        rewrite("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        "model.safetensors is not what was written",
    ),
    "no scheduler": (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing"),
    "never sealed": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    "half a manifest": (rewrite("manifest.json", lambda text: text[:99]), "its manifest.json is damaged"),
    "another manifest": (
        rewrite("manifest.json", lambda text: text.replace(b'"step"', b'"steps"')),
        "its manifest.json is damaged",
    ),
    "edited": (
        rewrite("manifest.json", lambda text: text.replace(b'"last_logged_step": 6', b'"last_logged_step": 4')),
        "its manifest.json is damaged (its SHA",
    ),
    "another run": (give_to_another_run, "it belongs to another run"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_passed_over(killed, damage):
    change, words = DAMAGES[damage]
    change(killed / "checkpoint-6")
    newest, (line,) = checkpoints.newest_whole(killed, resuming.read_run(killed).id)
    assert newest == killed / "checkpoint-3"
    assert line.startswith(f"{killed / 'checkpoint-6'} is passed over: {words}")


def test_no_checkpoint_is_whole(killed, tokens, capsys):
    for name in names(killed):
        truncate(killed / name)
    before = sorted(killed.rglob("*"))
    with refused(r"no checkpoint in .* is whole, of 2; give auto, or remove the flag, to start again"):
        run(killed, tokens, *RESUME)
    assert sorted(killed.rglob("*")) == before
    run(killed, tokens, "--resume_from_checkpoint", "auto", "--max_steps", "2")
    printed = capsys.readouterr().out
    assert "is whole, of 2, so a new run begins" in printed and printed.count("is passed over") == 2 * 2
    assert metrics_of(killed)["steps"] == 2 and (killed / "earlier-1" / "checkpoint-6").is_dir()


def test_checkpoints_that_cannot_be_resumed(tokens, tmp_path):
    output = tmp_path / "run"
    with refused("nowhere: no such folder"):
        run(output, tokens, "--resume_from_checkpoint", str(tmp_path / "nowhere"))
    assert not output.exists()
    run(output, tokens, "--save_only_model", "true", "--max_steps", "3")
    with refused(r"it has no manifest.json: .* or had --save_only_model"):
        run(output, tokens, "--max_steps", "6", "--resume_from_checkpoint", str(output / "checkpoint-3"))


def test_full_disk_keeps_older_checkpoints(whole, tokens, tmp_path, monkeypatch, capsys):
    """A resume passes over what it left of the new one, and writes that anew; remains of a killed deletion go."""
    output, save = tmp_path / "run", torch.save

    def full(content, path, *args, **kwargs):
        if "checkpoint-6" in str(path):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 15360 vs 15252")
        save(content, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with refused(r"checkpoint-6 cannot be written, with .* bytes free \(.*\); checkpoints before it are kept"):
            run(output, tokens, "--save_total_limit", "1")
    (output / "checkpoint-1").mkdir()
    run(output, tokens, *RESUME)
    printed = capsys.readouterr().out
    assert f"{output / 'checkpoint-6'} is passed over: it has no" in printed and printed.count("passed over") == 1
    assert_same_run(whole, output)
    assert [checkpoints.check(output / name).step for name in names(output)] == [3, 6, 8]


def test_rotation_keeps_best_and_newest(tmp_path):
    for step in range(1, 7):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (1, 3, 4, 5):  # the others were never sealed, or are half deleted
        (tmp_path / f"checkpoint-{step}" / "manifest.json").write_text("{}")
    checkpoints.rotate(tmp_path, None)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (1, 3, 4, 5, 6)]
    checkpoints.rotate(tmp_path, 2, keep=tmp_path / "checkpoint-1")
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (1, 5, 6)]


def names_of_itself(tree: ast.AST) -> set[str]:
    """Return the private names that a class reads from `self` and `super()`, sets there, or defines."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_private_names_of_trainer_are_listed():
    """And none that the class gives itself is one of Trainer's."""
    ours, theirs = (
        names_of_itself(ast.parse(textwrap.dedent(inspect.getsource(kind)))) for kind in (PretrainingTrainer, Trainer)
    )
    assert ours & theirs == checkpoints.PRIVATE_NAMES.keys()


# --- signals, and the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "number"), [("true", signal.SIGTERM), ("auto", signal.SIGUSR1)])
def test_one_command_starts_resumes_and_ends(whole, tokens, tmp_path, word, number, capsys, monkeypatch):
    """As a scheduler gives it, whatever came before. The signal comes in step 5, between log lines."""
    output, argv = tmp_path / "run", ("--resume_from_checkpoint", word, "--save_total_limit", "1")
    handler, original = signal.getsignal(number), PretrainingTrainer.training_step

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
    assert names(output) == ["checkpoint-5"] and not (output / "metrics.json").exists()
    assert signal.getsignal(number) == handler
    run(output, tokens, *argv)
    assert_same_run(whole, output)
    assert names(output) == ["checkpoint-8"]
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    run(output, tokens, *argv)
    assert "holds this run, finished after step 8; nothing is missing" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_resume_finished_run(whole, copied, tokens, capsys, monkeypatch):
    """As after a kill between the last checkpoint and metrics.json. What a resume takes as given is said."""
    for name in ("metrics.json", "model.safetensors"):
        (copied / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(PretrainingTrainer, "training_step", lambda *args: pytest.fail("it trained"))
        run(copied, tokens, *RESUME)
    assert "checkpoint-8 is the end of this run, step 8 of 8: only its result is written" in capsys.readouterr().out
    assert_same_run(whole, copied)
    first, second = (metrics_of(folder)["tokens_per_second"] for folder in (whole, copied))
    assert first / 20 < second < first * 20  # of the steps; this session made none

    changes = ("--per_device_train_batch_size", "2", "--seed", "3", "--max_grad_norm", "0.5", "--max_steps", "10")
    run(copied, tokens, *RESUME, *changes)
    printed = capsys.readouterr().out
    assert f"resuming: {copied} was trained with max_steps=8 (now 10), max_grad_norm=1.0 (now 0.5), " in printed
    assert "per_device_train_batch_size=4 (now 2)" in printed and "seed=1 (now 3)\n" in printed
    assert metrics_of(copied)["steps"] == 10
    assert json.loads((copied / "metrics-earlier.json").read_text())["steps"] == 8


# --- another run, and another process --------------------------------------------------------------------------------


def test_finished_run_is_moved_aside_only_if_asked(whole, copied, tokens, capsys):
    (copied / "notes.txt").write_text("not of a run")
    with refused("holds a finished run; give another --output_dir, or --overwrite_output_dir"):
        run(copied, tokens)
    run(copied, tokens, "--max_steps", "2", "--save_steps", "2", "--overwrite_output_dir", "true")
    assert f"an earlier run's files are now in {copied / 'earlier-1'}" in capsys.readouterr().out
    assert names(copied) == ["checkpoint-2"] and resuming.read_run(copied).id != resuming.read_run(whole).id
    assert resuming.read_run(copied / "earlier-1") == resuming.read_run(whole)
    assert_same_run(whole, copied / "earlier-1")
    assert (copied / "notes.txt").read_text() == "not of a run"


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
        run(tmp_path, tokens, "--overwrite_output_dir", "true")
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
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".run.lock").unlink(missing_ok=True)
    (tmp_path / ".run.lock").symlink_to(victim)
    with refused(r"\.run\.lock"):
        run(tmp_path / "run", tokens)
    assert victim.read_text() == "precious" and not (tmp_path / "run").exists()


STOPPED = """
from pretraining.run import errors

if __name__ == "__main__":
    errors.run("stopped")

import os, signal, sys
from pretrain_gpt2 import main
from pretraining.run.checkpoints import PretrainingTrainer

original = PretrainingTrainer.training_step

def training_step(trainer, *args, **kwargs):
    if os.environ["RANK"] == "1" and trainer.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(trainer, *args, **kwargs)

if "--resume_from_checkpoint" not in sys.argv:
    PretrainingTrainer.training_step = training_step
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_resume_two_processes(tokens, tmp_path):
    """A signal to the second stops both after step 5, between log lines: each has a loss of its own to take up."""
    whole, killed, stopped = tmp_path / "whole", tmp_path / "killed", tmp_path / "stopped.py"
    stopped.write_text(STOPPED)
    # Key biases have no gradient but rounding noise, which Adam would turn into steps at a small eps. So would
    # Newton-Schulz in bfloat16, with any rounding.
    exact = ("--bias", "false", "--eps", "1e-6", "--ns_dtype", "float32")

    def two(output: Path, script: Path, *argv: str) -> str:
        argv = (*TINY, *exact, "--data_dir", tokens, "--output_dir", output, *argv)
        return launch(*argv, script=script, config="cpu_ddp").stdout

    two(whole, SCRIPT)
    assert "stopped by a signal to another process after step 5 of 8" in two(killed, stopped)
    assert len(checkpoints.read(killed / "checkpoint-5").progress["unlogged_losses"]) == 2
    two(killed, stopped, *RESUME)
    assert_same_run(whole, killed)

    run(tmp_path / "one", tokens, *exact, "--per_device_train_batch_size", "8")
    two_weights, metrics, expected = weights(whole), metrics_of(whole), metrics_of(tmp_path / "one")
    for name, one in weights(tmp_path / "one").items():
        assert (one - two_weights[name]).abs().max() <= 5e-5 * one.abs().max(), name
    assert metrics["tokens"] == expected["tokens"] and metrics["eval_loss"] == pytest.approx(
        expected["eval_loss"], 1e-5
    )
    assert "- total_train_batch_size: 8\n" in (whole / "README.md").read_text()
