"""Arms that train for the same seconds, from speeds made by hand."""

from __future__ import annotations

import json
import threading

import compare_optimizers
import pytest
from pretraining.compare import equal_time
from pretraining.compare.presets import Preset
from pretraining.run.arguments import read

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
    assert found["adamw"] == ["--max_steps", "500", "--warmup_steps", "50"]
    assert found["exact one"] == ["--max_steps", "200", "--warmup_steps", "20"]  # a tenth of the run, as before
    order = [argv[argv.index("--optimizer") + 1] for argv in measured]
    assert order == ["adamw", "mars_adamw"] * 3  # in turn
    assert all(argv[argv.index("--max_steps") + 1] == "500" for argv in measured)  # and, later on the line, 60
    assert all(argv[-len(equal_time._SHORT) - 2 : -2] == equal_time._SHORT for argv in measured)


@pytest.mark.parametrize(
    "shared",
    [
        ["--eval_steps", "100", "--eval_on_start", "true"],
        ["--eval_strategy", "no"],
        ["--eval_strategy", "epoch", "--warmup_steps", "100"],
    ],
)
def test_short_runs_take_any_setting_of_the_comparison(measured, tmp_path, shared):
    equal_time.steps_of(Preset(ARMS, equal="seconds"), shared, tmp_path, ["python"])
    assert {read(argv)[0].max_steps for argv in measured} == {60}


def test_equal_seconds_need_steps(measured, tmp_path):
    with pytest.raises(ValueError, match="max_steps -1: equal seconds are counted in steps of adamw; give --max_steps"):
        shared = ["--max_steps", "-1", "--num_train_epochs", "2"]
        equal_time.steps_of(Preset(ARMS, equal="seconds"), shared, tmp_path, ["python"])
    assert not measured


def test_a_warmup_that_is_a_share_of_the_run_stays_one(measured, tmp_path):
    found = equal_time.steps_of(Preset(ARMS, equal="seconds"), ["--warmup_steps", "0.1"], tmp_path, [])
    assert found["exact one"] == ["--max_steps", "200"]


def test_speeds_are_measured_once(measured, tmp_path):
    preset = Preset(ARMS, equal="seconds")
    first = equal_time.steps_of(preset, [], tmp_path, ["python"])
    assert len(measured) == 6
    assert equal_time.steps_of(preset, [], tmp_path, ["python"]) == first
    assert len(measured) == 6
    kept = json.loads((tmp_path / "speeds.json").read_text())
    assert {name: arm["speed"] for name, arm in kept.items()} == {"adamw": 1.0, "exact one": 0.4}


def test_further_arms_are_measured_beside_the_baseline(measured, tmp_path, monkeypatch):
    equal_time.steps_of(Preset(ARMS, equal="seconds"), [], tmp_path, [])
    measured.clear()
    monkeypatch.setitem(SPEEDS, "nadamw", [80.0, 80.0, 80.0])
    more = Preset({**ARMS, "nadamw": {"optimizer": "nadamw"}}, equal="seconds")
    found = equal_time.steps_of(more, [], tmp_path, [])
    assert {name: words[1] for name, words in found.items()} == {"adamw": "500", "exact one": "200", "nadamw": "400"}
    assert [argv[argv.index("--optimizer") + 1] for argv in measured] == ["adamw", "nadamw"] * 3


def test_speeds_with_other_settings_are_measured_anew(measured, tmp_path):
    preset = Preset(ARMS, equal="seconds")
    for count, shared in enumerate((["--bf16", "true"], ["--bf16", "false"]), start=1):
        equal_time.steps_of(preset, shared, tmp_path, [])
        assert len(measured) == 6 * count


def test_speeds_are_measured_one_at_a_time_and_runs_take_the_steps_they_give(tmp_path, monkeypatch):
    running, most, steps = [], [], {}
    both_run = threading.Barrier(2)

    def measured(argv, folder, launcher):
        running.append(folder.name)
        most.append(len(running))
        running.pop()
        return {"tokens_per_second": 100.0 if folder.name.startswith("adamw") else 40.0}

    def trained(argv, folder, launcher):
        both_run.wait(timeout=60)  # --jobs 2
        steps[folder.name] = argv[argv.index("--warmup_steps") - 1]
        (folder / "trainer_state.json").write_text('{"log_history": []}')
        metrics = {"learning_rate": 0.1, "eval_loss": 4.0, "tokens_per_second": 1.0}
        (folder / "metrics.json").write_text(json.dumps(metrics))

    monkeypatch.setattr(equal_time, "pretrain", measured)
    monkeypatch.setattr(compare_optimizers, "pretrain", trained)
    (tmp_path / "mine.yaml").write_text(f"arms: {json.dumps(ARMS)}\nequal: seconds\n")
    compare_optimizers.main(
        [
            *("--preset", str(tmp_path / "mine.yaml"), "--seeds", "1", "--jobs", "2", "--max_steps", "500"),
            *("--output_dir", str(tmp_path / "out")),
        ]
    )
    assert len(most) == 6 and max(most) == 1
    assert steps == {"adamw-1": "500", "exact_one-1": "200"}
