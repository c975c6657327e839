"""Arms that train for the same seconds, from speeds made by hand."""

from __future__ import annotations

import json

import compare_optimizers
import pytest
from pretraining import equal_time
from pretraining.presets import Preset

ARMS = {"adamw": {"optimizer": "adamw"}, "exact one": {"optimizer": "mars_adamw", "is_approx": False}}
# Of three rounds; the first is slow, as first runs are. Medians: 100 and 40.
SPEEDS = {"adamw": [50.0, 100.0, 110.0], "exact one": [20.0, 40.0, 42.0]}


@pytest.fixture
def measured(monkeypatch) -> list[list[str]]:
    """Record the short runs, which have the speeds above."""
    calls = []

    def pretrain(argv, folder, launcher):
        calls.append(argv)
        name, _, repeat = folder.name.rpartition("-")
        return {"tokens_per_second": SPEEDS[name.replace("_", " ")][int(repeat)]}

    monkeypatch.setattr(equal_time, "pretrain", pretrain)
    return calls


def test_slower_arms_take_fewer_steps(measured, tmp_path):
    preset = Preset(ARMS, equal="seconds")
    found = equal_time.steps_of(preset, ["--max_steps", "500"], tmp_path, ["python"])
    assert found == {"adamw": ["--max_steps", "500"], "exact one": ["--max_steps", "200"]}
    order = [argv[argv.index("--optimizer") + 1] for argv in measured]
    assert order == ["adamw", "mars_adamw"] * 3  # in turn
    assert all(argv[argv.index("--max_steps") + 1] == "500" for argv in measured)  # and, later on the line, 60
    assert all(argv[-len(equal_time._SHORT) - 2 : -2] == equal_time._SHORT for argv in measured)


def test_speeds_are_measured_once(measured, tmp_path):
    preset = Preset(ARMS, equal="seconds")
    first = equal_time.steps_of(preset, [], tmp_path, ["python"])
    assert len(measured) == 6
    assert equal_time.steps_of(preset, [], tmp_path, ["python"]) == first
    assert len(measured) == 6
    assert json.loads((tmp_path / "speeds.json").read_text()) == {"adamw": 100.0, "exact one": 40.0}


def test_runs_at_the_same_time_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare_optimizers.main(["--preset", "time", "--jobs", "2", "--output_dir", str(tmp_path)])
    assert "--jobs 2: runs at the same time slow each other" in capsys.readouterr().err
