"""A run's folder is told from other people's."""

from __future__ import annotations

import json

import pytest
from pretraining.run.foreign_files import foreign_files

OLD_METRICS = {"optimizer": "adamw", "bits_per_byte": 1.0, "tokens_per_second": 2.0}


def make(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        path = folder / name
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_text("{}")
    return folder


def test_folders_that_are_free(tmp_path):
    assert foreign_files(tmp_path / "none") == []
    assert foreign_files(make(tmp_path / "empty")) == []
    assert foreign_files(make(tmp_path / "seen", ".DS_Store")) == []


@pytest.mark.parametrize(
    "names",
    [
        ["README.md"],
        ["model.safetensors"],
        ["config.json"],
        ["train.py", ".git/"],
        ["training_args.bin"],
        ["tokenizer.json"],
        ["poetry.lock"],
        ["run.yaml"],
        ["checkpoints/"],
        ["README.md", "model.safetensors", "checkpoint-100/"],
    ],
)
def test_somebody_elses_files_are_named(tmp_path, names):
    expected = sorted(name.rstrip("/") for name in names if name != "checkpoint-100/")
    assert foreign_files(make(tmp_path / "project", *names)) == expected


def test_the_marker_makes_a_folder_a_runs(tmp_path):
    folder = make(tmp_path / "run", "run.json", "README.md", "model.safetensors", "notes.txt")
    assert foreign_files(folder) == []
    (folder / "run.json").unlink()
    (folder / "run.json").mkdir()  # a folder is no marker
    assert foreign_files(folder) == ["README.md", "model.safetensors", "notes.txt"]


def test_a_run_that_was_killed_before_there_was_a_marker(tmp_path):
    assert foreign_files(make(tmp_path / "early", "checkpoint-3/", "runs/", "arguments.json", "earlier-1/")) == []
    finished = make(tmp_path / "finished", "README.md", "model.safetensors", "trainer_state.json")
    assert foreign_files(finished) == ["README.md", "model.safetensors"]
    (finished / "metrics.json").write_text("not JSON")
    assert foreign_files(finished) == ["README.md", "model.safetensors"]
    (finished / "metrics.json").write_text(json.dumps({"eval_loss": 3}))  # another program's
    assert foreign_files(finished) == ["README.md", "model.safetensors"]
    (finished / "metrics.json").write_text(json.dumps(OLD_METRICS))
    assert foreign_files(finished) == []


def test_names_can_be_given(tmp_path):
    folder = make(tmp_path / "run", "mine-1", "metrics.json")
    assert foreign_files(folder, ours=["mine-*"]) == ["metrics.json"]
