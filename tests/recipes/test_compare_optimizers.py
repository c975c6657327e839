"""The comparison's command: the runs that it starts, resumes, skips and refuses."""

from __future__ import annotations

import json
import os
import re
import time

import compare_optimizers
import pytest
from helpers import refused
from PIL import Image
from pretraining.compare.launch import Diverged, pretrain
from pretraining.run import checkpoints, folder_lock, run_folder
from pretraining.run.arguments import OPTIMIZERS
from test_pretrain_gpt2 import TINY


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """Record the arguments of the runs, which finish at once."""
    calls = []

    def pretrain(argv, output, launcher):
        calls.append([*launcher, *argv])
        metrics = {"learning_rate": 1e-3, "eval_loss": 4.0 + len(calls), "tokens_per_second": 10.0}
        history = [{"step": 5, "loss": 6.0}, {"step": 5, "eval_loss": metrics["eval_loss"]}]
        (output / "metrics.json").write_text(json.dumps(metrics))
        (output / "trainer_state.json").write_text(json.dumps({"log_history": history}))

    monkeypatch.setattr(compare_optimizers, "pretrain", pretrain)
    return calls


@pytest.fixture
def diverging(monkeypatch, started) -> None:
    """Make MARS-Lion's runs diverge, as its real ones do at such a rate."""
    finish = compare_optimizers.pretrain

    def pretrain(argv, output, launcher):
        finish(argv, output, launcher)
        if "mars_lion" in argv:
            (output / "metrics.json").unlink()
            (output / "trainer_state.json").unlink()
            raise Diverged("3 steps in a row with a non-finite loss or gradient")

    monkeypatch.setattr(compare_optimizers, "pretrain", pretrain)


def compare(tmp_path, *argv: str) -> dict:
    compare_optimizers.main(["--output_dir", str(tmp_path / "compare"), *argv])
    return json.loads((tmp_path / "compare" / "comparison.json").read_text())


def test_a_run_that_diverges_is_a_result(tmp_path, diverging, started, capsys):
    argv = ["--optimizers", "mars_lion", "mars_adamw", "adamw", "--seeds", "3", "4", "--learning_rate", "0.5"]
    result = compare(tmp_path, *argv)
    lion, mars, _ = result["rows"]
    assert (lion["loss"], lion["learning_rate"], lion["steps"], lion["speed"]) == (None, 0.5, 0, None)
    assert mars["against_baseline"]["mean"] == -1
    assert result["verdicts"][0] == "mars_lion: nothing to compare, mars_lion diverged with 2 of 2 seeds"
    assert result["runs"][0]["eval_loss"] is None and result["runs"][0]["curve"] == []
    table = capsys.readouterr().out
    assert "| 2 of 2 diverged |" in " ".join(table.split()) and "nan" not in table
    with Image.open(tmp_path / "compare" / "comparison.png") as picture:
        picture.verify()
    # It is not trained again.
    assert len(started) == 6
    assert compare(tmp_path, *argv)["rows"] == result["rows"] and len(started) == 6


@pytest.mark.slow
def test_a_real_run_that_diverges_is_told_from_a_mistake(tmp_path, tokens):
    argv = [*TINY, "--data_dir", str(tokens), "--warmup_steps", "0", "--max_steps", "20", "--learning_rate"]
    with pytest.raises(Diverged, match="3 steps in a row with a non-finite loss"):
        pretrain([*argv, "1e20"], tmp_path / "run")
    with pytest.raises(ValueError, match="learning_rate"):
        pretrain([*argv, "-1"], tmp_path / "other")


def test_every_contender_runs_with_every_seed(tmp_path, started, capsys):
    names = ["mars_lion_exact", "adamw"]
    launcher = "accelerate launch --config_file 'my config.yaml'"
    result = compare(tmp_path, "--optimizers", *names, "--seeds", "3", "4", "--launcher", launcher, "--max_steps", "5")
    assert [(run["contender"], run["seed"]) for run in result["runs"]] == [(n, seed) for seed in (3, 4) for n in names]
    assert all(argv[:4] == ["accelerate", "launch", "--config_file", "my config.yaml"] for argv in started)
    assert all(" --max_steps 5 " in " ".join(argv) for argv in started)
    assert started[0][-6:] == ["--optimizer", "mars_lion", "--is_approx", "false", "--seed", "3"]
    assert started[3][-4:] == ["--optimizer", "adamw", "--seed", "4"]
    # Losses 5 to 8, in the order of the runs.
    assert [row["loss"] for row in result["rows"]] == [6.0, 7.0]
    assert [row["against_baseline"]["mean"] for row in result["rows"]] == [-1.0, 0.0]
    # A gap of -1 with either seed.
    assert result["verdicts"] == [
        "mars_lion_exact: ahead of adamw by 1.000 nats per token (95% interval -1.000 to -1.000, 2 seeds)"
    ]
    page = (tmp_path / "compare" / "comparison.md").read_text()
    printed = capsys.readouterr().out
    assert "| mars_lion_exact |" in page and "| mars_lion_exact |" in printed and result["verdicts"][0] in printed
    (difference,) = result["differences"]
    assert (difference["contender"], difference["shown"], difference["gap"]["mean"]) == ("mars_lion_exact", "yes", -1.0)
    assert "| mars_lion_exact | adamw            | -1.000 (-1.000 to -1.000) |   yes |      0.000 |" in page
    assert "Seeds 3, 4" in page and "--max_steps 5" in page
    with Image.open(tmp_path / "compare" / "comparison.png") as picture:
        picture.verify()


DATA = {"dataset": "words", "vocabulary": 8, "train tokens": "0123456789abcdef", "val tokens": "fedc"}


def name_data(monkeypatch, name_of) -> None:
    """Let runs name their data, as real ones do."""
    trained = compare_optimizers.pretrain

    def pretrain(argv, output, launcher):
        trained(argv, output, launcher)
        run_folder.begin(output / "made", {"data": DATA | {"dataset": name_of(argv)}})
        (output / "made" / "run.json").rename(output / "run.json")

    monkeypatch.setattr(compare_optimizers, "pretrain", pretrain)


def test_the_result_names_data_and_machine(tmp_path, started, monkeypatch):
    name_data(monkeypatch, lambda argv: "other" if "mars_m" in argv else "words")
    result = compare(tmp_path, "--optimizers", "adamw", "mars_lion", "mars_m", "--seeds", "1")
    assert result["data"] == [DATA, DATA | {"dataset": "other"}]
    assert {"cpu", "cores", "torch", "mars_hf"} <= set(result["machine"])
    page = (tmp_path / "compare" / "comparison.md").read_text()
    assert "Data: words, SHA-256 0123456789ab. Data: other, SHA-256 0123456789ab." in page
    assert f"{result['machine']['cpu']}, torch {result['machine']['torch']}" in page


def test_runs_of_one_arm_on_different_data_are_refused(tmp_path, started, monkeypatch):
    name_data(monkeypatch, lambda argv: f"words {len(started)}")
    with refused(r"adamw-1 and .*adamw-2 read different data; remove the one"):
        compare(tmp_path, "--optimizers", "adamw", "--seeds", "1", "2")
    assert len(started) == 2
    with refused("read different data"):
        compare(tmp_path, "--optimizers", "adamw", "--seeds", "1", "2", "3")
    assert len(started) == 2


def test_every_optimizer_is_compared_by_default(tmp_path, started):
    result = compare(tmp_path, "--seeds", "1")
    rows = [row["contender"] for row in result["rows"]]
    assert rows == ["mars_adamw", "mars_adamw_exact", "mars_lion", "mars_shampoo", "mars_m", "adamw", "nadamw", "muon"]
    chosen = {argv[argv.index("--optimizer") + 1] for argv in started}
    assert chosen == set(OPTIMIZERS)


def unpadded(table):
    """Return a table's text with cells as narrow as their values."""
    return re.sub(" {2,}", " ", table)


def test_a_preset_is_compared_two_runs_at_a_time(tmp_path, started, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "about: Which rate?\ngrid: {optimizer: [adamw, mars_m], learning_rate: [1e-3, 2e-3]}\n"
        "baseline: adamw 0.002\npairs: [[mars_m 0.002, mars_m 0.001]]\naxis: learning_rate\nlines: optimizer\n"
        "seeds: [7, 8]\n"
    )
    result = compare(tmp_path, "--preset", str(path), "--jobs", "2")
    names = ["adamw 0.001", "adamw 0.002", "mars_m 0.001", "mars_m 0.002"]
    assert [(run["contender"], run["seed"]) for run in result["runs"]] == [(n, seed) for seed in (7, 8) for n in names]
    assert {tuple(argv[-6:-2]) for argv in started} == {
        ("--optimizer", name, "--learning_rate", rate) for name in ("adamw", "mars_m") for rate in ("0.001", "0.002")
    }
    judged = [line.split(":")[0] for line in result["verdicts"]]
    assert judged == ["adamw 0.001", "mars_m 0.001", "mars_m 0.002", "mars_m 0.002"]
    assert result["arms"]["mars_m 0.001"] == {"optimizer": "mars_m", "learning_rate": 1e-3}
    page = unpadded((tmp_path / "compare" / "comparison.md").read_text())
    assert page.startswith("Which rate?\n\n| learning_rate | 0.001 |") and "\n| optimizer" in page
    assert "![Losses along the axis](axis.png)" in page
    with Image.open(tmp_path / "compare" / "axis.png") as picture:
        picture.verify()
    printed = unpadded(capsys.readouterr().out)
    assert printed.count("| adamw 0.002 ") > 1  # while it runs, and at the end
    assert printed.count("| learning_rate | 0.001 |") == 1
    again = len(started)
    assert compare(tmp_path, "--preset", str(path)) == result
    assert len(started) == again


def test_many_intervals_come_with_a_warning(tmp_path, started):
    for count, expected in ((9, False), (11, True)):
        path = tmp_path / f"grid{count}.yaml"
        rates = ", ".join(f"{rate}e-4" for rate in range(1, count + 1))
        path.write_text(f"grid: {{optimizer: [adamw], learning_rate: [{rates}]}}\n")
        compare_optimizers.main(["--preset", str(path), "--seeds", "1", "2", "--output_dir", str(tmp_path / path.stem)])
        page = (tmp_path / path.stem / "comparison.md").read_text()
        assert ("Of 10 intervals at 95%, 0.5 miss the truth on average; by Holm's correction " in page) is expected


def test_arms_belong_to_a_preset(tmp_path, started):
    with refused("--arms names arms of a preset; give --preset"):
        compare(tmp_path, "--arms", "adamw")


def test_a_preset_and_optimizers_exclude_each_other(tmp_path, started):
    with refused("--preset and --optimizers both say what is compared"):
        compare(tmp_path, "--preset", "gamma", "--optimizers", "adamw")


def test_an_interrupted_comparison_goes_on(tmp_path, started):
    compare(tmp_path, "--optimizers", "adamw", "--seeds", "1")
    result = compare(tmp_path, "--optimizers", "mars_adamw", "adamw", "--seeds", "1", "2")
    assert len(started) == 4 and len(result["runs"]) == 4
    assert all("--resume_from_checkpoint" not in argv for argv in started)


@pytest.mark.parametrize(("finished", "rows"), [(1, []), (3, ["adamw", "mars_m"]), (4, ["adamw", "mars_m"])])
def test_what_is_finished_is_on_the_page_at_once(tmp_path, started, monkeypatch, finished, rows):
    finish = compare_optimizers.pretrain
    page = tmp_path / "compare" / "comparison.md"

    def pretrain(argv, output, launcher):
        if len(started) == finished:
            while rows and not (page.exists() and f"{finished} of 6" in page.read_text()):
                time.sleep(0.01)  # as a real run takes its time
            raise KeyboardInterrupt
        finish(argv, output, launcher)

    monkeypatch.setattr(compare_optimizers, "pretrain", pretrain)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "arms: {mars_m: {optimizer: mars_m}, adamw: {optimizer: adamw}, muon: {optimizer: muon}}\n"
        "pairs: [[muon, mars_m]]\n"
    )
    with pytest.raises(SystemExit, match="130"):
        compare(tmp_path, "--preset", str(path))
    assert page.exists() == bool(rows)
    if rows:
        assert f"{finished} of 6 runs so far." in page.read_text()
        found = json.loads((tmp_path / "compare" / "comparison.json").read_text())
        assert len(found["runs"]) == finished and {row["contender"] for row in found["rows"]} == {*rows, "muon"}


def test_a_config_that_changed_under_its_name_is_refused(tmp_path, started):
    config = tmp_path / "mine.yaml"
    argv = ["--config", str(config), "--optimizers", "adamw"]
    config.write_text("max_steps: 5\noptimizers: {adamw: {learning_rate: 1.0e-3}}\n")
    compare(tmp_path, *argv, "--seeds", "1")
    config.write_text("max_steps: 5\noptimizers: {adamw: {learning_rate: 2.0e-3}}\n")
    with refused(r"adamw-1 holds a run with other settings: learning_rate 0\.001, now 0\.002;"):
        compare(tmp_path, *argv, "--seeds", "1", "2")
    assert len(started) == 1


@pytest.mark.parametrize("flag", ["--max_steps", "--max-steps", "--weight_decay=0"])
def test_what_the_arms_state_is_no_setting_of_all_runs(tmp_path, started, flag):
    with refused("the arms of batch state it themselves; leave it out, or give a YAML"):
        compare(tmp_path, "--preset", "batch", flag, *([] if "=" in flag else ["7"]))
    assert not started


def test_a_run_with_checkpoints_is_taken_up(tmp_path, started):
    compare(tmp_path, "--optimizers", "adamw", "--seeds", "1")
    folder = tmp_path / "compare" / "adamw-1"
    (folder / "metrics.json").unlink()
    run, _ = run_folder.begin(folder, {})
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir()
    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (checkpoint / name).touch()
    checkpoints.seal(checkpoint, run=run.id, step=3, settings={}, progress={})
    compare(tmp_path, "--optimizers", "adamw", "--seeds", "1")
    assert started[1][-2:] == ["--resume_from_checkpoint", "true"]
    assert started[1][:-2] == started[0]
    # Killed while it wrote its only checkpoint: it starts anew.
    (folder / "metrics.json").unlink()
    (checkpoint / "manifest.json").unlink()
    compare(tmp_path, "--optimizers", "adamw", "--seeds", "1")
    assert started[2] == started[0]


def test_two_comparisons_in_one_folder_are_refused(tmp_path, started):
    output = tmp_path / "compare"
    with (
        folder_lock.held(output, "compares"),
        refused(rf"compare: process {os.getpid()} on .* compares there"),
    ):
        compare(tmp_path, "--optimizers", "adamw", "--seeds", "1")
    assert not started


def test_runs_with_other_settings_are_refused_before_any_is_started(tmp_path, started):
    compare(tmp_path, "--optimizers", "adamw", "--seeds", "1", "--max_steps", "5")
    with refused(r"adamw-1 holds a run with other settings(?s:.*)--max_steps 5(?s:.*)--max_steps 6"):
        compare(tmp_path, "--optimizers", "mars_adamw", "adamw", "--seeds", "1", "--max_steps", "6")
    assert len(started) == 1
    # A run without output, such as one with wrong arguments, does not count.
    (tmp_path / "compare" / "adamw-1" / "metrics.json").unlink()
    compare(tmp_path, "--optimizers", "adamw", "--seeds", "1", "--max_steps", "6")
    assert len(started) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--optimizers", "mars_adamw", "sgd"],
            "unknown sgd; accepted are mars_adamw, mars_lion, mars_shampoo, mars_m, adamw, nadamw, muon, mars_ad",
        ),
        (["--optimizers", "adamw_exact"], "unknown adamw_exact"),
        (["--optimizer", "adamw"], "use --optimizers"),
        (["--seed=3"], "use --seeds"),
        (["--resume_from_checkpoint", "true"], "an interrupted comparison goes on by itself; leave it out"),
        (["--is_approx", "false"], "use --optimizers NAME_exact"),
    ],
)
def test_mistakes_are_one_line(tmp_path, started, argv, message):
    with pytest.raises(SystemExit) as failure:
        compare(tmp_path, *argv)
    assert message in str(failure.value.__context__) and "\n" not in str(failure.value.__context__)
    assert started == []


def test_a_setting_that_one_optimizer_lacks_ends_it_before_the_first_run(tmp_path):
    with refused(r"--gamma 0\.1: optimizer adamw has no gamma"):
        compare(tmp_path, *TINY, "--optimizers", "adamw", "--seeds", "1", "--gamma", "0.1")
    assert not (tmp_path / "compare").exists()


@pytest.mark.slow
def test_the_command_in_full(tmp_path):
    result = compare(tmp_path, *TINY, "--optimizers", "mars_adamw_exact", "adamw", "--seeds", "1")
    exact, adamw = result["runs"]
    assert [step for step, _ in exact["curve"]] == [0, 4, 8]
    assert exact["curve"][0] == adamw["curve"][0]  # the same weights to start from
    assert exact["curve"][-1] != adamw["curve"][-1]
    metrics = json.loads((tmp_path / "compare" / "mars_adamw_exact-1" / "metrics.json").read_text())
    assert metrics["is_approx"] is False and metrics["eval_loss"] == exact["eval_loss"]
