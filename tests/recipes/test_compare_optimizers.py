"""The comparison's command: the runs that it starts, resumes, skips and refuses; its statistics, page and presets."""

from __future__ import annotations

import concurrent.futures
import json
import math
import time
from dataclasses import asdict, replace

import compare_optimizers
import pytest
from helpers import refused
from pretraining import files
from pretraining.compare import comparison, launch, page, presets
from pretraining.compare.comparison import FinishedRun
from pretraining.compare.presets import Preset
from test_pretrain_gpt2 import TINY

# --- statistics and pages, from runs made by hand --------------------------------------------------------------------


def run(arm: str, seed: int, losses: list[float], *, lr: float = 1e-3, speed: float = 100.0) -> FinishedRun:
    curve = tuple((10 * index, loss) for index, loss in enumerate(losses))
    return FinishedRun(arm, seed, lr, losses[-1], speed, curve)


def of(arm: str, losses: list[float]) -> list[FinishedRun]:
    return [run(arm, seed, [8.0, loss]) for seed, loss in enumerate(losses)]


RUNS = [
    run("mars_adamw", 1, [8.0, 5.0, 4.2, 4.0], lr=2e-3, speed=80.0),
    # evaluated again where it was resumed
    FinishedRun("adamw", 1, 1e-3, 4.5, 100.0, ((0, 8.0), (10, 6.0), (17, 5.5), (20, 4.9), (30, 4.5))),
    run("mars_adamw", 2, [8.0, 5.2, 4.4, 4.2], lr=2e-3, speed=60.0),
    run("adamw", 2, [8.0, 6.0, 4.8, 4.4], speed=140.0),
]
DATA = {"dataset": "words", "vocabulary": 8, "train tokens": "0123456789abcdef", "val tokens": "fedc"}
DIVERGED = [replace(one, eval_loss=math.nan, tokens_per_second=math.nan, curve=()) for one in RUNS]
MARS, GAP = "| mars_adamw | 0.002 | 4.100 (4.000-4.200) | 18 of 30 (60%) | 0.58x |", "| mars_adamw | adamw |"
ADAMW = "| adamw | 0.001 | 4.450 (4.400-4.500) | 30 of 30 (100%) | 1.00x |"


@pytest.mark.parametrize(
    ("runs", "missing", "lines"),
    [
        (RUNS, 0, [MARS, ADAMW, f"{GAP} -0.350 (-2.256 to +1.556) | no |", "Seeds 1, 2; settings: --max_steps 30."]),
        ([run("adamw", 1, [8.0, 4.0]), run("mars_adamw", 1, [8.0, 4.1])], 0, ["| not reached in 10 |"]),
        ([DIVERGED[0], *RUNS[1:]], 0, ["| 1 of 2 diverged (others 4.200-4.200) |", f"{GAP} diverged |"]),
        ([RUNS[0], DIVERGED[1], RUNS[2], DIVERGED[3]], 0, ["| 2 of 2 diverged |"]),  # the baseline
        (RUNS[:3], 1, ["3 of 4 runs so far.", f"{GAP} -0.500 (one seed) |", "| 4.000 |"]),  # seed 2 of mars waits
    ],
    ids=["whole", "not reached", "one diverged", "the baseline diverged", "unfinished"],
)
def test_comparison_page(tmp_path, runs, missing, lines):
    preset = Preset({"mars_adamw": {"optimizer": "mars_adamw"}, "adamw": {"optimizer": "adamw"}})
    data = [DATA, DATA, {**DATA, "dataset": "others"}]
    page.write(tmp_path, preset, runs, missing=missing, data=data, arguments=["--max_steps", "30"])
    text = "\n".join(" ".join(line.split()) for line in (tmp_path / "comparison.md").read_text().splitlines())
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    numbers = json.loads((tmp_path / "comparison.json").read_text())
    assert [line for line in lines if line not in text] == [] and "nan" not in text
    assert numbers["machine"]["cpu"] in text and numbers["data"] == data[1:]
    finite = [{key: None if value != value else value for key, value in asdict(each).items()} for each in runs]
    assert numbers["runs"] == json.loads(json.dumps(finite))
    if missing:
        assert numbers["rows"][0]["seeds"] == 1 and numbers["differences"][0]["shown"] == "no"


def test_interval_is_paired_by_seed():
    """Gaps of -0.1, -0.2, -0.3: a mean of -0.2, a standard error of 0.1 / sqrt(3), and t(0.975, 2) = 4.302653."""
    base, mars = of("adamw", [4.0, 5.0, 6.0]), of("mars_adamw", [3.9, 4.8, 5.7])
    gap, half = comparison.difference(mars[::-1], base), 4.302653 * 0.1 / math.sqrt(3)
    # p is that of t = 3.4641 with 2 degrees of freedom
    assert (gap.mean, gap.low, gap.high, gap.p) == pytest.approx((-0.2, -0.2 - half, -0.2 + half, 0.0741799))
    assert comparison.difference(mars[:2], base).mean == pytest.approx(-0.15)


def test_holm_correction():
    assert comparison.holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.04, 0.09, 0.09, math.nan], nan_ok=True)
    assert comparison.holm([0.02, 0.9, 0.8]) == pytest.approx([0.06, 1.0, 1.0])  # in order, and 1 at most


def test_paired_differences():
    runs = [*of("adamw", [4.4, 4.5, 4.6]), *of("muon", [4.0, 4.1, 4.2001]), *of("mars_m", [4.3, 4.41, 4.57])]
    runs += [*of("lion", [4.39, 4.53, 4.58]), run("late", 9, [4.0])]
    gaps = comparison.differences(runs, "adamw", [("mars_m", "muon"), ("late", "muon")])
    assert [(gap.contender, gap.against, gap.shown) for gap in gaps] == [  # late shares no seed
        ("muon", "adamw", "yes"),
        ("mars_m", "adamw", "no"),
        ("lion", "adamw", "no"),
        ("mars_m", "muon", "yes"),
    ]
    assert gaps[0].holm == pytest.approx(4 * gaps[0].p) and gaps[0]._replace(holm=0.06).shown == "not by Holm"


# --- presets ---------------------------------------------------------------------------------------------------------


# Of larger models, how much of the rates of the controls they have; results of the other presets hold theirs.
SHARES = {"gpu": 1 / 2, "gpu-98m": 1 / 4}


@pytest.mark.parametrize("name", presets.names())
def test_shipped_presets_are_runs_of_the_recipe(name):
    preset, controls = presets.load(name), presets.load("controls").arms
    words = {arm: presets.words(settings) for arm, settings in preset.arms.items()}
    assert preset.about and len(set(map(tuple, words.values()))) == len(words) > 2
    for arm, settings in preset.arms.items():
        values = launch.settings_of(words[arm])
        assert values == values | {key: value for key, value in settings.items() if key in values}
        assert values["learning_rate"] > 5e-5  # not the default of TrainingArguments
        if name in SHARES:
            control, names = launch.settings_of(presets.words(controls[arm])), {*controls[arm], "lr_1d"} - {"optimizer"}
            shares = {key: SHARES[name] if key.startswith(("learning_rate", "lr_")) else 1 for key in names}
            expected = {key: control[key] and share * control[key] for key, share in shares.items()}
            assert {key: values[key] for key in expected} == pytest.approx(expected), arm


# --- the command -----------------------------------------------------------------------------------------------------

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
        loss = 4.0 + len(calls) + 0.1 * len(calls) ** 2
        contents = {
            "run": {"id": "1", "settings": {"data": DATA}},
            "metrics": {"learning_rate": 1e-3, "eval_loss": loss, "tokens_per_second": 10.0},
            "trainer_state": {"log_history": [{"step": 5, "loss": 6.0}, {"step": 5, "eval_loss": loss}]},
        }
        for name, content in contents.items():
            (output / f"{name}.json").write_text(json.dumps(content))

    monkeypatch.setattr(launch, "run_recipe", run_recipe)
    return calls


def compare(tmp_path, *argv: str) -> dict:
    compare_optimizers.main(["--output_dir", str(tmp_path / "compare"), *argv])
    return json.loads((tmp_path / "compare" / "comparison.json").read_text())


@pytest.mark.slow
def test_every_arm_runs_with_every_seed(tmp_path, started, capsys):
    """A run that diverged is a result, too, and not trained again."""
    names, launcher = ["mars_adamw_exact", "adamw", "mars_lion"], "accelerate launch --config_file 'my config.yaml'"
    argv = ["--seeds", "3", "4", "--launcher", launcher, "--max_steps", "5", "--learning_rate", "0.5", "--optimizers"]
    result = compare(tmp_path, *argv, *names)
    assert [(run["contender"], run["seed"]) for run in result["runs"]] == [(n, seed) for seed in (3, 4) for n in names]
    assert {tuple(argv[:4]) for argv in started} == {("accelerate", "launch", "--config_file", "my config.yaml")}
    assert {argv[argv.index("--max_steps") + 1] for argv in started} == {"5"}
    assert started[0][-6:] == ["--optimizer", "mars_adamw", "--is_approx", "false", "--seed", "3"]
    assert started[4][-4:] == ["--optimizer", "adamw", "--seed", "4"]
    exact, adamw, lion = result["rows"]
    assert (exact["loss"], adamw["loss"]) == pytest.approx((7.35, 8.95))  # of 5.1 and 9.6, 6.4 and 11.5
    assert (lion["diverged"], lion["learning_rate"]) == (2, 0.5)
    page, row = (tmp_path / "compare" / "comparison.md").read_text(), "| mars_adamw_exact |"
    assert result["data"] == [DATA] and "Data: words, SHA-256 0123456789ab." in page
    assert row in page and row in capsys.readouterr().out
    assert compare(tmp_path, *argv, *names) == result and len(started) == 6


@pytest.mark.slow
def test_preset_two_runs_at_a_time(tmp_path, started):
    path, names = tmp_path / "mine.yaml", [f"{name} {rate}" for name in ("adamw", "mars_m") for rate in (0.001, 0.002)]
    arms = [f"  {arm}: {{optimizer: {arm.split()[0]}, learning_rate: {arm.split()[1]}}}\n" for arm in names]
    path.write_text(
        f"about: Which rate?\narms:\n{''.join(arms)}baseline: adamw 0.002\nseeds: [7, 8]\naxis: learning_rate\n"
        "lines: optimizer\npairs: [[mars_m 0.002, mars_m 0.001]]\n"
    )
    result = compare(tmp_path, "--preset", str(path), "--jobs", "2")
    assert [(run["contender"], run["seed"]) for run in result["runs"]] == [(n, seed) for seed in (7, 8) for n in names]
    compared = [(gap["contender"], gap["against"]) for gap in result["differences"]]
    assert compared == [*((name, names[1]) for name in names if name != names[1]), ("mars_m 0.002", "mars_m 0.001")]
    assert (tmp_path / "compare" / "comparison.md").read_text().startswith("Which rate?\n\n| learning rate | ")
    some = compare(tmp_path, "--preset", str(path), "--arms", "mars_m 0.001")
    assert [row["contender"] for row in some["rows"]] == ["adamw 0.002", "mars_m 0.001"] and len(started) == 8


def test_equal_seconds(tmp_path, started):
    (tmp_path / "mine.yaml").write_text(
        "shared: {optimizer: adamw, lr_scheduler_kwargs: {min_lr: 1.0e-4}}\narms:\n"
        "  adamw: {learning_rate: 0.00200000041, bf16: true}\n  exact one: {optimizer: mars_adamw, is_approx: false}\n"
        "equal_seconds: true\nseeds: [1]\n"
    )
    argv = ["--preset", str(tmp_path / "mine.yaml"), "--max_steps", "500", "--eval_strategy", "no"]
    compare(tmp_path, *argv)
    compare(tmp_path, *argv)
    short, long = started[:6], started[6:]  # speeds are kept
    assert [argv[argv.index("--optimizer") + 1] for argv in short] == ["adamw", "mars_adamw"] * 3  # in turn
    assert {launch.settings_of(argv)["max_steps"] for argv in short} == {60}
    assert [argv[-6:-2] for argv in long] == [
        ["--max_steps", "500", "--warmup_steps", "50"],
        ["--max_steps", "200", "--warmup_steps", "20"],  # the schedule keeps its shape
    ]
    words = ["--lr_scheduler_kwargs", '{"min_lr": 0.0001}', "--learning_rate", "0.00200000041", "--bf16", "true"]
    assert long[0][-12:-6] == words


@pytest.mark.slow
def test_interrupted_comparison_goes_on(tmp_path, started, monkeypatch):
    """A run that has saved a checkpoint is resumed; one that a killed comparison left is waited for."""
    finish, page = launch.run_recipe, tmp_path / "compare" / "comparison.md"

    def interrupted(argv, output, launcher):
        if len(started) < 3:
            return finish(argv, output, launcher)
        while not page.exists() or "3 of 4 runs so far." not in page.read_text():
            time.sleep(0.01)  # as a real run takes its time
        (output / "checkpoint-3").mkdir()
        raise KeyboardInterrupt

    argv = ["--optimizers", "adamw", "mars_adamw", "--seeds", "1", "2"]
    monkeypatch.setattr(launch, "run_recipe", interrupted)
    with pytest.raises(SystemExit, match="130"):
        compare(tmp_path, *argv)
    monkeypatch.setattr(launch, "run_recipe", finish)
    result = compare(tmp_path, *argv)
    assert len(result["runs"]) == len(started) == 4
    assert [words[-2:] == ["--resume_from_checkpoint", "auto"] for words in started] == [False, False, False, True]
    folder, elsewhere = tmp_path / "compare" / "adamw-1", tmp_path / "metrics.json"
    (folder / "metrics.json").rename(elsewhere)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with files.locked(folder, "trains"):
            restarted = pool.submit(compare, tmp_path, *argv)
            with pytest.raises(concurrent.futures.TimeoutError):
                restarted.result(0.5)
            elsewhere.rename(folder / "metrics.json")  # it ends
        assert restarted.result() == result and len(started) == 4


def test_other_settings_and_folders_are_refused(tmp_path, started):
    """Before any run."""
    config, folder = tmp_path / "mine.yaml", tmp_path / "compare" / "adamw-1"
    argv = ["--config", str(config), "--seeds", "1", "--optimizers"]
    config.write_text("max_steps: 5\noptimizers: {adamw: {learning_rate: 1.0e-3}}\n")
    compare(tmp_path, *argv, "adamw")
    config.write_text("max_steps: 6\noptimizers: {adamw: {learning_rate: 2.0e-3}, mars_m: {learning_rate: 1.0e-3}}\n")
    changes = "learning_rate 0.001, now 0.002; .*max_steps 5, now 6"
    with refused(f"adamw-1 holds a run with other settings: .*{changes}; give another --output_dir"):
        compare(tmp_path, *argv, "mars_m", "adamw")
    (folder / "arguments.json").unlink()
    with refused("adamw-1 holds a run that is not of a comparison; give another --output_dir"):
        compare(tmp_path, *argv, "adamw")
    with files.locked(tmp_path / "compare", "compares"), refused(" compares there"):
        compare(tmp_path, "--optimizers", "adamw", "--seeds", "2")
    assert len(started) == 1
    (folder / "metrics.json").unlink()
    compare(tmp_path, *argv, "adamw")  # a run without output does not count
    assert len(started) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizers sgd", "invalid choice: 'sgd'"),
        ("--preset batch --max-steps=7", "--max_steps: the arms state it themselves; remove the flag"),
        ("--seed=3", "--seed differs between the runs; remove it: give --seeds"),
        ("--preset gamma --optimizers adamw", "argument --optimizers: not allowed with argument --preset"),
        ("--optimizers adamw --gamma 0.1", "optimizer adamw has no gamma"),
        ("--preset control", "--preset 'control': no such preset; accepted: batch, betas, controls"),
        ("--preset controls --arms mars-m", "--arms 'mars-m': no such arm; accepted: 'adamw', 'nadamw'"),
        ("--preset=", "--preset '': no such preset"),
        ("--seeds -1", "--seeds -1: give numbers from 0 on"),
        ("--learning_rate nan", "--learning_rate nan: give a finite number"),
        ("arms: {a: {learning_rate: 2020-01-01}}", "mine.yaml: found timestamp; write a number"),
        ("a: &a {}\narms: {a: *a}", "mine.yaml: found an alias"),
        ("arm: {a: {}}", "mine.yaml: .* unexpected keyword argument 'arm'"),
        ("arms: {a: {optimizer: adamw}}\nbaseline: b", "unknown arm 'b'; accepted: a"),
        ("arms: {a: {optimizer: adamw}}\npairs: [[a, c]]", "unknown arm 'c'"),
        ("arms: {a: {}", "mine.yaml: while parsing"),
    ],
)
def test_wrong_arguments_and_presets(tmp_path, started, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(words)
    with refused(message):
        compare(tmp_path, *(words.split() if words.startswith("--") else ["--preset", "mine.yaml"]))
    assert not started and not list(tmp_path.glob("compare/*"))


DIVERGES = (
    "print('pretrain_gpt2.py: 3 steps in a row with a non-finite loss or gradient; the last: step 3')\n"
    "print('the launcher says\\n' * 99)\nraise SystemExit(1)"
)


def test_how_a_run_ends(tmp_path, monkeypatch):
    """The log of an earlier attempt does not count."""
    script = tmp_path / "pretrain_gpt2.py"  # which does what its text says
    monkeypatch.setattr(launch, "SCRIPT", script)
    for text, error, words in (
        (DIVERGES, launch.Diverged, "out: 3 steps in a row with a non-finite loss"),
        ("raise SystemExit('pretrain_gpt2.py: --max_steps 0 is none')", ValueError, "out: --max_steps 0 is none"),
        ("raise SystemExit('pretrain_gpt2.py: lr=inf: a non-finite rate')", ValueError, "out: lr=inf: a non-finite"),
        ("raise OSError('disk full')", ValueError, "out ended with code 1; see .*out.log"),
        ("print('saved')", ValueError, "was stopped before its end; start again"),
    ):
        script.write_text(text)
        with pytest.raises(error, match=words) as end:
            launch.run_recipe([], tmp_path / "out")
        assert type(end.value) is error


@pytest.mark.slow
def test_real_runs(tmp_path, tokens):
    argv = [*TINY, "--data_dir", str(tokens)]
    result = compare(tmp_path, *argv, "--optimizers", "mars_adamw_exact", "adamw", "--seeds", "1", "--jobs", "2")
    exact, adamw = result["runs"]
    assert [step for step, _ in exact["curve"]] == [0, 4, 8]
    assert exact["curve"][0] == adamw["curve"][0]  # the same weights to start from
    assert exact["curve"][-1] != adamw["curve"][-1]
    metrics = json.loads((tmp_path / "compare" / "mars_adamw_exact-1" / "metrics.json").read_text())
    assert metrics["is_approx"] is False and metrics["eval_loss"] == exact["eval_loss"]
