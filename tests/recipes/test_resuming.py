"""A run goes on from its newest whole checkpoint, or says why not; nothing of it is lost or mixed with another's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pretrain_gpt2
import psutil
import pytest
import torch
from helpers import refused
from pretraining import files
from pretraining.run import checkpoints, resuming
from pretraining.run.checkpoints import PretrainingTrainer
from safetensors.torch import load_file

TINY = [
    *("--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "32", "--embedded_vocab_size", "512"),
    *("--max_steps", "8", "--warmup_steps", "2", "--logging_steps", "2", "--eval_steps", "4", "--max_eval_blocks", "8"),
    *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4", "--sample_tokens", "0"),
    *("--cpu_threads", "1", "--disable_tqdm", "true", "--save_strategy", "steps", "--save_steps", "3"),
]
RESUME = ("--resume_from_checkpoint", "true")
# What differs between two runs of the same kind.
TIMED = ("runtime", "per_second")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokens) -> Path:
    """A finished run, with checkpoints after steps 3, 6 and 8; no test changes it."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    run(output, tokens)
    return output


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    """The same run, killed after step 6."""
    output = tmp_path / "killed"
    output.mkdir()
    for name in ("checkpoint-3", "checkpoint-6"):
        shutil.copytree(whole / name, output / name)
    shutil.copy(whole / "run.json", output)
    return output


def run(output: Path, tokens: Path, *argv: str) -> None:
    pretrain_gpt2.main([*TINY, "--data_dir", str(tokens), "--output_dir", str(output), *argv])


def rows(folder: Path) -> list[dict]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{key: value for key, value in row.items() if not key.endswith(TIMED)} for row in history]


def results(folder: Path) -> dict:
    metrics = json.loads((folder / "metrics.json").read_text())
    return {key: value for key, value in metrics.items() if "second" not in key}


def assert_same_run(a: Path, b: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (a, b))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert rows(a) == rows(b)
    assert results(a) == results(b)


# --- whole checkpoints -----------------------------------------------------------------------------------------------


def test_log_and_result_are_those_of_the_uninterrupted_run(whole, killed, tokens):
    """Step 3 is between two log lines, so the loss of one step is not in Trainer's checkpoint."""
    shutil.rmtree(killed / "checkpoint-6")
    run(killed, tokens, *RESUME)
    assert_same_run(whole, killed)


def truncate(folder):
    with (folder / "optimizer.pt").open("r+b") as file:
        file.truncate(100)


def flip_a_bit(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def lose_the_scheduler(folder):
    (folder / "scheduler.pt").unlink()


def never_sealed(folder):
    (folder / "manifest.json").unlink()


def half_a_manifest(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def another_manifest(folder):
    (folder / "manifest.json").write_text('{"files": []}')


def an_edited_manifest(folder):
    """Who edits a file and its hash leaves the manifest's own."""
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"last_logged_step": 6', '"last_logged_step": 4'))


def of_another_run(folder):
    sealed = checkpoints.read(folder)
    checkpoints.seal(folder, run="another", step=6, settings=sealed.settings, progress=sealed.progress)


DAMAGES = {
    truncate: "optimizer.pt has 100 bytes, not the",
    flip_a_bit: "model.safetensors is not what was written",
    lose_the_scheduler: "scheduler.pt is missing",
    never_sealed: "it has no manifest.json",
    half_a_manifest: "its manifest.json is damaged",
    another_manifest: "its manifest.json is damaged",
    an_edited_manifest: "its manifest.json is damaged (its SHA-256 differs)",
    of_another_run: "it belongs to another run",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_is_not_whole_is_passed_over(killed, damage):
    damage(killed / "checkpoint-6")
    found, lines = checkpoints.newest_whole(killed, resuming.read_run(killed).id)
    assert found == killed / "checkpoint-3"
    assert len(lines) == 1 and lines[0].startswith(f"{killed / 'checkpoint-6'} is passed over: {DAMAGES[damage]}")


def test_the_run_goes_on_from_the_one_before(whole, killed, tokens, capsys):
    truncate(killed / "checkpoint-6")
    run(killed, tokens, *RESUME)
    assert "checkpoint-6 is passed over" in capsys.readouterr().out
    assert_same_run(whole, killed)
    checkpoints.check(killed / "checkpoint-6")  # written anew


def test_none_is_whole(killed, tokens, capsys):
    for folder in checkpoints.checkpoints(killed):
        truncate(folder)
    before = sorted(killed.rglob("*"))
    with refused(r"no checkpoint in .* is whole, of 2; give auto, or leave it out, to start again"):
        run(killed, tokens, *RESUME)
    assert capsys.readouterr().out.count("is passed over") == 2
    assert [path for path in sorted(killed.rglob("*"))] == before
    run(killed, tokens, "--resume_from_checkpoint", "auto", "--max_steps", "2")
    printed = capsys.readouterr().out
    assert "no checkpoint in" in printed and "so a new run begins" in printed
    assert results(killed)["steps"] == 2 and (killed / "earlier-1" / "checkpoint-6").is_dir()


@pytest.mark.parametrize("word", ["true", "auto"])
def test_one_command_starts_resumes_and_ends(whole, tokens, tmp_path, word, capsys, monkeypatch):
    """As a scheduler gives it, whatever came before."""
    output = tmp_path / "run"
    argv = ("--resume_from_checkpoint", word)
    with monkeypatch.context() as patch:
        patch.setattr(PretrainingTrainer, "training_step", stopped_after(5))
        run(output, tokens, *argv)
    assert f"--resume_from_checkpoint {word}: no run in {output}, so a new one begins" in capsys.readouterr().out
    run(output, tokens, *argv)
    assert_same_run(whole, output)
    run(output, tokens, *argv)
    assert "nothing is missing" in capsys.readouterr().out


def test_no_such_checkpoint(tokens, tmp_path):
    with refused("nowhere cannot be used: it has no manifest.json"):
        run(tmp_path / "run", tokens, "--resume_from_checkpoint", str(tmp_path / "nowhere"))
    assert not (tmp_path / "run").exists()


def test_without_states_a_checkpoint_is_not_resumed(tokens, tmp_path):
    output = tmp_path / "run"
    run(output, tokens, "--save_only_model", "true", "--max_steps", "3")
    with refused(r"it has no manifest.json: .* or had --save_only_model"):
        run(output, tokens, "--max_steps", "6", "--resume_from_checkpoint", str(output / "checkpoint-3"))
    with refused("is whole, of 1"):
        run(output, tokens, "--max_steps", "6", *RESUME)


def test_a_limit_counts_whole_checkpoints(whole, killed, tokens):
    """Older ones go only when the new one is sealed, and what the run needs is read before."""
    run(killed, tokens, *RESUME, "--save_total_limit", "1")
    assert [folder.name for folder in checkpoints.checkpoints(killed)] == ["checkpoint-8"]
    assert_same_run(whole, killed)


def test_rotation_keeps_the_best_and_what_is_newer_than_the_last_sealed(tmp_path):
    for step in range(1, 7):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if step not in (2, 6):  # never sealed, or half deleted
            (folder / "manifest.json").write_text("{}")
    checkpoints.rotate(tmp_path, None)
    assert [folder.name for folder in checkpoints.checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (1, 3, 4, 5, 6)]
    checkpoints.rotate(tmp_path, 2, keep=tmp_path / "checkpoint-1")
    assert [folder.name for folder in checkpoints.checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (1, 5, 6)]


def test_remains_of_a_killed_deletion_go_when_the_run_is_resumed(whole, tokens, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    (output / "metrics.json").unlink()
    (output / "checkpoint-3" / "manifest.json").unlink()
    (output / "checkpoint-3" / "optimizer.pt").unlink()
    run(output, tokens, *RESUME)
    assert [folder.name for folder in checkpoints.checkpoints(output)] == ["checkpoint-6", "checkpoint-8"]


def test_a_full_disk_keeps_older_checkpoints(whole, tokens, tmp_path, monkeypatch):
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


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_run_at_its_end_only_writes_its_result(whole, tmp_path, tokens, capsys, monkeypatch):
    """As after a kill between the last checkpoint and metrics.json."""
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    for name in ("metrics.json", "model.safetensors"):
        (output / name).unlink()
    monkeypatch.setattr(PretrainingTrainer, "training_step", lambda *args: pytest.fail("it trained"))
    run(output, tokens, *RESUME)
    assert "checkpoint-8 is the end of this run, step 8 of 8: only its result is written" in capsys.readouterr().out
    assert_same_run(whole, output)
    assert results(whole)["tokens"] == results(output)["tokens"]
    speed = [json.loads((folder / "metrics.json").read_text())["tokens_per_second"] for folder in (whole, output)]
    assert speed[0] / 20 < speed[1] < speed[0] * 20  # of the steps; this session made none


def test_a_finished_run_is_left_as_it_is(whole, tmp_path, tokens, capsys):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    run(output, tokens, *RESUME)
    assert "holds this run, finished after step 8; nothing is missing" in capsys.readouterr().out
    now = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    assert now == before


def test_a_finished_run_can_be_made_longer(whole, tmp_path, tokens, capsys):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    run(output, tokens, *RESUME, "--max_steps", "10")
    said = capsys.readouterr().out
    assert "was trained with max_steps=8 (now 10)\n" in said and "metrics-earlier.json" in said
    assert json.loads((output / "metrics.json").read_text())["steps"] == 10
    assert json.loads((output / "metrics-earlier.json").read_text())["steps"] == 8


# --- another run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--overwrite_output_dir", "true"]], ids=["killed", "overwrite"])
def test_a_new_run_moves_an_earlier_one_aside(whole, killed, tmp_path, tokens, argv, capsys):
    if argv:
        shutil.copytree(whole, killed, dirs_exist_ok=True)
    mine = killed / "notes.txt"
    mine.write_text("not of a run")
    before = resuming.read_run(killed)
    run(killed, tokens, "--max_steps", "2", "--save_steps", "2", *argv)
    assert f"an earlier run's files are now in {killed / 'earlier-1'}" in capsys.readouterr().out
    assert [folder.name for folder in checkpoints.checkpoints(killed)] == ["checkpoint-2"]
    assert resuming.read_run(killed).id != before.id
    assert resuming.read_run(killed / "earlier-1") == before
    checkpoints.check(killed / "earlier-1" / "checkpoint-6")
    assert mine.read_text() == "not of a run"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--optimizer", "adamw"], r"optimizer=mars_m \(now adamw\)"),
        (["--learning_rate", "1e-3"], r"learning_rate=0\.016 \(now 0\.001\)"),
        (["--gamma", "0.02"], r"gamma=0\.05 \(now 0\.02\)"),
        (["--weight_decay", "0.2"], r"weight_decay=0\.1 \(now 0\.2\)"),
        (["--n_layer", "2"], r"n_layer=1 \(now 2\)"),
        (["--is_approx", "false"], r"is_approx=None \(now False\)"),
    ],
)
@pytest.mark.parametrize("way", ["newest", "path"])
def test_other_settings_are_refused(killed, tokens, argv, said, way):
    resume = RESUME if way == "newest" else ("--resume_from_checkpoint", str(killed / "checkpoint-6"))
    with refused(said):
        run(killed, tokens, *resume, *argv)


def test_what_a_resume_takes_as_given_is_said(killed, tokens, capsys):
    run(killed, tokens, *RESUME, "--per_device_train_batch_size", "2", "--seed", "3", "--max_grad_norm", "0.5")
    said = capsys.readouterr().out
    assert f"resuming: {killed} was trained with max_grad_norm=1 (now 0.5), " in said
    assert "per_device_train_batch_size=4 (now 2)" in said and "seed=1 (now 3)\n" in said


def test_other_peoples_files_are_refused(tmp_path, tokens):
    for name in ("README.md", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    with refused(r"files that no run of this recipe made: README\.md, model\.safetensors; give"):
        run(tmp_path, tokens, "--overwrite_output_dir", "true")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "model.safetensors"]


@pytest.mark.parametrize("moves", range(4))
def test_a_kill_while_an_earlier_run_is_moved_loses_nothing(whole, tmp_path, monkeypatch, moves):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    earlier = resuming.read_run(output)
    done = []

    def move(*paths):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(os.rename(*paths))

    with monkeypatch.context() as patch:
        patch.setattr(resuming.shutil, "move", move)
        with pytest.raises(KeyboardInterrupt):
            resuming.begin(output, {})
    now = resuming.read_run(output)
    found, _ = checkpoints.newest_whole(output, now.id)
    assert (now == earlier) == (found is not None)  # one run or the other, never both
    resuming.begin(output, {})
    assert {path.name for path in output.glob("earlier-*/*")} == {path.name for path in whole.iterdir()}


def test_metrics_say_what_trained(whole):
    groups = results(whole)["groups"]
    by_role = {group["role"]: group for group in groups}
    assert set(by_role) == {"matrix", "adamw", "vector"}
    matrix, embedding, vector = by_role["matrix"], by_role["adamw"], by_role["vector"]
    assert (matrix["learning_rate"], matrix["gamma"], matrix["weight_decay"]) == (1.6e-2, 0.05, 0.1)
    assert (embedding["rule"], embedding["learning_rate"]) == ("adamw", 3.2e-2)
    assert (vector["rule"], vector["learning_rate"]) == ("adamw", 1.6e-2) and "gamma" not in vector


# --- one run a folder ------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused(tmp_path, tokens):
    output = tmp_path / "run"
    with files.locked(output, "trains"):
        with refused("another process trains there; wait for it to end"):
            run(output, tokens)
        assert not output.exists()
    with files.locked(output, "trains"):  # it is free again
        pass


def test_a_lock_does_not_follow_a_symbolic_link(tmp_path, tokens):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".run.lock").symlink_to(victim)
    with refused(r"\.run\.lock"):
        run(tmp_path / "run", tokens)
    assert victim.read_text() == "precious" and not (tmp_path / "run").exists()


@pytest.mark.parametrize("folder", ["/", "loop"])
def test_no_folder_can_be_there(tmp_path, tokens, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with refused(f"{folder} is (the root|a loop of links); choose another folder"):
        run(Path(folder), tokens)


def test_a_link_to_a_folder_in_use_is_refused(tmp_path, tokens):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with files.locked(tmp_path / "run", "trains"), refused("link: another process trains there"):
        run(tmp_path / "link", tokens)


# --- signals ---------------------------------------------------------------------------------------------------------


def stopped_after(step, number=signal.SIGTERM):
    """Return a training step that sends a signal in the given step."""
    original = PretrainingTrainer.training_step

    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step == step - 1:
            os.kill(os.getpid(), number)
        return original(trainer, *args, **kwargs)

    return training_step


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_saves_and_ends_the_run(whole, tmp_path, tokens, monkeypatch, capsys, number):
    """The signal comes in step 5, between log lines; the run ends after it, and goes on as if nothing had been."""
    output = tmp_path / "run"
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(PretrainingTrainer, "training_step", stopped_after(5, number))
        run(output, tokens)
    assert signal.getsignal(number) == handler
    assert f"stopped by {number.name} after step 5 of 8" in capsys.readouterr().out
    assert not (output / "metrics.json").exists()
    assert [folder.name for folder in checkpoints.checkpoints(output)] == ["checkpoint-3", "checkpoint-5"]
    run(output, tokens, *RESUME)
    assert_same_run(whole, output)


# --- two processes ---------------------------------------------------------------------------------------------------

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
    recipes = Path(pretrain_gpt2.__file__).parent
    config = recipes.parent / "accelerate_configs" / "cpu_ddp.yaml"
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)

    def launch(path: Path, output: str, *argv: str) -> str:
        words = ["-m", "accelerate.commands.launch", "--config_file", config, path, *TINY, "--data_dir", tokens]
        ended = subprocess.run(
            [sys.executable, *map(str, words), "--output_dir", str(tmp_path / output), *argv],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(recipes)},
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    launch(recipes / "pretrain_gpt2.py", "whole")
    assert "stopped by a signal to another process after step 5 of 8" in launch(script, "killed")
    assert len(checkpoints.read(tmp_path / "killed" / "checkpoint-5").progress["unlogged_losses"]) == 2
    launch(script, "killed", *RESUME)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_launcher_leaves_no_workers(tokens, tmp_path):
    """They are killed while they import torch, after which they would wait for the launcher's store for minutes."""
    recipes = Path(pretrain_gpt2.__file__).parent
    config = recipes.parent / "accelerate_configs" / "cpu_ddp.yaml"
    words = ["--config_file", config, recipes / "pretrain_gpt2.py", *TINY, "--data_dir", tokens]
    words = ["-m", "accelerate.commands.launch", *words, "--output_dir", tmp_path / "run"]
    launcher = psutil.Popen([sys.executable, *map(str, words)])
    while len(workers := launcher.children(recursive=True)) < 2:
        time.sleep(0.05)
    time.sleep(1)
    launcher.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive and not (tmp_path / "run" / "metrics.json").exists()
