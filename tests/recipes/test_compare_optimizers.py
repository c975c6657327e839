"""The comparison's command: the runs that it starts, resumes, skips and refuses."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import compare_optimizers
import pytest
import yaml
from pretraining import files
from pretraining.compare import launch
from test_pretrain_gpt2 import TINY

DATA = {"dataset": "words", "vocabulary": 8, "train tokens": "0123456789abcdef", "val tokens": "fedc"}
SPEEDS = {"adamw": [50.0, 100.0, 110.0], "exact_one": [20.0, 40.0, 42.0]}  # medians 100, 40


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """Record the arguments of the runs, which finish at once with rising losses; those of mars_lion diverge."""
    calls = []

    def run_recipe(argv, output, launcher):
        if output.parent.name == "speeds":
            arm, _, repeat = output.name.rpartition("-")
            calls.append(argv)
            return {"tokens_per_second": SPEEDS[arm][int(repeat)]}
        calls.append([*launcher, *argv])
        if "mars_lion" in argv:
            raise launch.Diverged("3 steps in a row")
        metrics = {
            "learning_rate": 1e-3,
            "eval_loss": 4.0 + len(calls) + 0.1 * len(calls) ** 2,
            "tokens_per_second": 10.0,
        }
        history = [{"step": 5, "loss": 6.0}, {"step": 5, "eval_loss": metrics["eval_loss"]}]
        (output / "run.json").write_text(json.dumps({"id": "1", "settings": {"data": DATA}}))
        (output / "metrics.json").write_text(json.dumps(metrics))
        (output / "trainer_state.json").write_text(json.dumps({"log_history": history}))

    monkeypatch.setattr(launch, "run_recipe", run_recipe)
    return calls


def compare(tmp_path, *argv: str) -> dict:
    compare_optimizers.main(["--output_dir", str(tmp_path / "compare"), *argv])
    return json.loads((tmp_path / "compare" / "comparison.json").read_text())


def refusal(tmp_path, capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        compare(tmp_path, *argv)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_every_arm_runs_with_every_seed(tmp_path, started, capsys):
    names = ["mars_adamw_exact", "adamw"]
    launcher = "accelerate launch --config_file 'my config.yaml'"
    result = compare(tmp_path, "--optimizers", *names, "--seeds", "3", "4", "--launcher", launcher, "--max_steps", "5")
    assert [(run["contender"], run["seed"]) for run in result["runs"]] == [(n, seed) for seed in (3, 4) for n in names]
    assert all(argv[:4] == ["accelerate", "launch", "--config_file", "my config.yaml"] for argv in started)
    assert all(" --max_steps 5 " in " ".join(argv) for argv in started)
    assert started[0][-6:] == ["--optimizer", "mars_adamw", "--is_approx", "false", "--seed", "3"]
    assert started[3][-4:] == ["--optimizer", "adamw", "--seed", "4"]
    assert [row["loss"] for row in result["rows"]] == pytest.approx([6.5, 8.0])  # of 5.1, 6.4, 7.9, 9.6
    assert result["data"] == [DATA]
    page = (tmp_path / "compare" / "comparison.md").read_text()
    assert "Data: words, SHA-256 0123456789ab." in page
    assert "| mars_adamw_exact |" in page and "| mars_adamw_exact |" in capsys.readouterr().out


def test_diverged_run_is_a_result(tmp_path, started):
    argv = ["--optimizers", "mars_lion", "adamw", "--seeds", "3", "4", "--learning_rate", "0.5"]
    result = compare(tmp_path, *argv)
    assert (result["rows"][0]["diverged"], result["rows"][0]["learning_rate"]) == (2, 0.5)
    assert compare(tmp_path, *argv) == result and len(started) == 4  # it is not trained again


def test_preset_two_runs_at_a_time(tmp_path, started):
    path, rates = tmp_path / "mine.yaml", (0.001, 0.002)
    arms = {
        f"{name} {rate}": {"optimizer": name, "learning_rate": rate} for name in ("adamw", "mars_m") for rate in rates
    }
    sections = {"about": "Which rate?", "arms": arms, "baseline": "adamw 0.002", "seeds": [7, 8]}
    sections |= {"pairs": [["mars_m 0.002", "mars_m 0.001"]], "axis": "learning_rate", "lines": "optimizer"}
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    result = compare(tmp_path, "--preset", str(path), "--jobs", "2")
    names = list(arms)
    assert [(run["contender"], run["seed"]) for run in result["runs"]] == [(n, seed) for seed in (7, 8) for n in names]
    compared = [(gap["contender"], gap["against"]) for gap in result["differences"]]
    assert compared == [*((name, names[1]) for name in names if name != names[1]), ("mars_m 0.002", "mars_m 0.001")]
    page = (tmp_path / "compare" / "comparison.md").read_text()
    assert page.startswith("Which rate?\n\n| learning_rate | ") and "![Losses along the axis](axis.png)" in page
    assert (tmp_path / "compare" / "axis.png").is_file()
    some = compare(tmp_path, "--preset", str(path), "--arms", "mars_m 0.001")
    assert [row["contender"] for row in some["rows"]] == ["adamw 0.002", "mars_m 0.001"] and len(started) == 8


def test_equal_seconds(tmp_path, started, monkeypatch):
    (tmp_path / "mine.yaml").write_text(
        "arms: {adamw: {optimizer: adamw}, exact one: {optimizer: mars_adamw, is_approx: false}}\nequal_seconds: true\n"
    )
    argv = ["--preset", str(tmp_path / "mine.yaml"), "--seeds", "1", "--max_steps", "500", "--eval_strategy", "no"]
    compare(tmp_path, *argv)
    short, long = started[:6], started[6:]
    assert [argv[argv.index("--optimizer") + 1] for argv in short] == ["adamw", "mars_adamw"] * 3  # in turn
    assert {launch.settings_of(argv)["max_steps"] for argv in short} == {60}
    assert [argv[-6:-2] for argv in long] == [
        ["--max_steps", "500", "--warmup_steps", "50"],
        ["--max_steps", "200", "--warmup_steps", "20"],  # the schedule keeps its shape
    ]
    compare(tmp_path, *argv)
    assert len(started) == 8  # speeds are kept


def test_interrupted_comparison_goes_on(tmp_path, started, monkeypatch):
    finish, page = launch.run_recipe, tmp_path / "compare" / "comparison.md"

    def interrupted(argv, output, launcher):
        if len(started) == 3:
            while not page.exists() or "3 of 4 runs so far." not in page.read_text():
                time.sleep(0.01)  # as a real run takes its time
            raise KeyboardInterrupt
        finish(argv, output, launcher)

    argv = ["--optimizers", "adamw", "mars_adamw", "--seeds", "1", "2"]
    monkeypatch.setattr(launch, "run_recipe", interrupted)
    with pytest.raises(SystemExit, match="130"):
        compare(tmp_path, *argv)
    monkeypatch.setattr(launch, "run_recipe", finish)
    assert len(compare(tmp_path, *argv)["runs"]) == len(started) == 4
    assert all("--resume_from_checkpoint" not in argv for argv in started)


def test_run_with_a_checkpoint_is_resumed(tmp_path, started):
    argv = ["--optimizers", "adamw", "--seeds", "1"]
    compare(tmp_path, *argv)
    folder = tmp_path / "compare" / "adamw-1"
    (folder / "checkpoint-3").mkdir()
    (folder / "metrics.json").unlink()
    compare(tmp_path, *argv)
    assert started[1] == [*started[0], "--resume_from_checkpoint", "auto"]


def test_run_that_a_killed_comparison_left_is_waited_for(tmp_path, started):
    argv = ["--optimizers", "adamw", "--seeds", "1"]
    result = compare(tmp_path, *argv)
    folder = tmp_path / "compare" / "adamw-1"
    (folder / "metrics.json").rename(tmp_path / "metrics.json")
    with ThreadPoolExecutor() as pool:
        with files.locked(folder, "trains"):
            restarted = pool.submit(compare, tmp_path, *argv)
            time.sleep(1)
            assert not restarted.done()
            (tmp_path / "metrics.json").rename(folder / "metrics.json")  # it ends
        assert restarted.result() == result
    assert len(started) == 1


def test_other_settings_are_refused_before_any_run(tmp_path, started, capsys):
    config = tmp_path / "mine.yaml"
    argv = ["--config", str(config), "--seeds", "1"]
    config.write_text("max_steps: 5\noptimizers: {adamw: {learning_rate: 1.0e-3}}\n")
    compare(tmp_path, *argv, "--optimizers", "adamw")
    config.write_text("max_steps: 6\noptimizers: {adamw: {learning_rate: 2.0e-3}}\n")
    line = refusal(tmp_path, capsys, *argv, "--optimizers", "mars_m", "adamw")
    assert "adamw-1 holds a run with other settings: " in line and "give another --output_dir" in line
    assert "learning_rate 0.001, now 0.002" in line and "max_steps 5, now 6" in line and len(started) == 1
    (tmp_path / "compare" / "adamw-1" / "metrics.json").unlink()
    compare(tmp_path, *argv, "--optimizers", "adamw")  # a run without output does not count
    assert len(started) == 2


def test_other_folders_are_refused(tmp_path, started, capsys):
    folder = tmp_path / "compare" / "adamw-1"
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text("{}")
    line = refusal(tmp_path, capsys, "--optimizers", "adamw", "--seeds", "1")
    assert "adamw-1 holds a run that is not of a comparison; give another --output_dir" in line
    with files.locked(tmp_path / "compare", "compares"):
        assert " compares there" in refusal(tmp_path, capsys, "--optimizers", "adamw", "--seeds", "2")
    assert not started and (folder / "metrics.json").read_text() == "{}"


def test_page_states_all_data(tmp_path, started):
    argv = ["--optimizers", "adamw", "mars_m", "--seeds", "1"]
    compare(tmp_path, *argv)
    run = tmp_path / "compare" / "mars_m-1" / "run.json"
    run.write_text(run.read_text().replace("words", "others"))
    assert compare(tmp_path, *argv)["data"] == [DATA, {**DATA, "dataset": "others"}]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--optimizers", "sgd"], "invalid choice: 'sgd'"),
        (["--optimizer", "adamw"], "--optimizer: the arms state it themselves; leave it out"),
        (["--preset", "batch", "--max-steps=7"], "--max_steps: the arms state it themselves"),
        (["--seed=3"], "--seed differs between the runs; leave it out: give --seeds"),
        (["--resume_from_checkpoint", "true"], "an interrupted comparison goes on by itself"),
        (["--preset", "gamma", "--optimizers", "adamw"], "argument --optimizers: not allowed with argument --preset"),
        (["--optimizers", "adamw", "--gamma", "0.1"], "optimizer adamw has no gamma"),
        (["--preset", "control"], "--preset 'control': no such preset; accepted: batch, betas, controls"),
    ],
)
def test_wrong_arguments(tmp_path, started, capsys, argv, message):
    assert message in refusal(tmp_path, capsys, *argv)
    assert not started and not (tmp_path / "compare").exists()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a stand-in for the recipe, which does what its text says."""
    path = tmp_path / "pretrain_gpt2.py"
    monkeypatch.setattr(launch, "SCRIPT", path)
    return path


DIVERGES = (
    "print('pretrain_gpt2.py: 3 steps in a row with a non-finite loss or gradient; the last: step 3')\n"
    "print('the launcher says\\n' * 99)\nraise SystemExit(1)"
)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("raise SystemExit('pretrain_gpt2.py: --max_steps 0 is none')", ValueError, "out: --max_steps 0 is none"),
        ("raise SystemExit('pretrain_gpt2.py: lr=inf: a non-finite rate')", ValueError, "out: lr=inf: a non-finite"),
        (DIVERGES, launch.Diverged, "out: 3 steps in a row with a non-finite loss"),
        ("raise OSError('disk full')", ValueError, "out ended with code 1; see .*out.log"),
        ("print('saved')", ValueError, "was stopped before its end; start again"),
    ],
)
def test_how_a_run_ends(tmp_path, script, text, error, words):
    script.write_text(DIVERGES)
    with pytest.raises(launch.Diverged):
        launch.run_recipe([], tmp_path / "out")
    script.write_text(text)  # the log of an earlier attempt does not count
    with pytest.raises(error, match=words) as end:
        launch.run_recipe([], tmp_path / "out")
    assert type(end.value) is error


@pytest.mark.slow
def test_real_runs(tmp_path, tokens):
    argv = [*TINY, "--data_dir", str(tokens)]
    result = compare(tmp_path, *argv, "--optimizers", "mars_adamw_exact", "adamw", "--seeds", "1")
    exact, adamw = result["runs"]
    assert [step for step, _ in exact["curve"]] == [0, 4, 8]
    assert exact["curve"][0] == adamw["curve"][0]  # the same weights to start from
    assert exact["curve"][-1] != adamw["curve"][-1]
    metrics = json.loads((tmp_path / "compare" / "mars_adamw_exact-1" / "metrics.json").read_text())
    assert metrics["is_approx"] is False and metrics["eval_loss"] == exact["eval_loss"]
    with pytest.raises(launch.Diverged, match="3 steps in a row with a non-finite loss"):
        launch.run_recipe([*argv, "--max_steps", "20", "--learning_rate", "1e20"], tmp_path / "diverges")
    with pytest.raises(ValueError, match=r"refused: lr=-1\.0 is not valid"):
        launch.run_recipe([*argv, "--learning_rate", "-1"], tmp_path / "refused")
