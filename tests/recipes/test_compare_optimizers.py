"""The comparison's command: the runs that it starts, resumes, skips and refuses; its statistics, page and presets."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import compare_optimizers
import pytest
import yaml
from pretraining import files
from pretraining.compare import comparison, launch, page, presets
from pretraining.compare.comparison import Run
from pretraining.compare.presets import Preset
from test_pretrain_gpt2 import TINY

# --- statistics and pages, from runs made by hand --------------------------------------------------------------------


def run(arm: str, seed: int, losses: list[float], *, lr: float = 1e-3, speed: float = 100.0) -> Run:
    curve = tuple((10 * index, loss) for index, loss in enumerate(losses))
    return Run(arm, seed, lr, losses[-1], speed, curve)


def of(arm: str, losses: list[float]) -> list[Run]:
    return [run(arm, seed, [8.0, loss]) for seed, loss in enumerate(losses)]


RUNS = [
    run("mars_adamw", 1, [8.0, 5.0, 4.2, 4.0], lr=2e-3, speed=80.0),
    run("adamw", 1, [8.0, 6.0, 4.9, 4.5], speed=100.0),
    run("mars_adamw", 2, [8.0, 5.2, 4.4, 4.2], lr=2e-3, speed=60.0),
    run("adamw", 2, [8.0, 6.0, 4.8, 4.4], speed=140.0),
]
DIVERGED = [replace(one, eval_loss=math.nan, tokens_per_second=math.nan, curve=()) for one in RUNS]
MARS = "| mars_adamw | 0.002 | 4.100 (4.000-4.200) | 20 of 30 (67%) | 0.58x |"
ADAMW = "| adamw | 0.001 | 4.450 (4.400-4.500) | 30 of 30 (100%) | 1.00x |"
GAP = "| mars_adamw | adamw |"


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
def test_page(tmp_path, runs, missing, lines):
    preset = Preset({"mars_adamw": {"optimizer": "mars_adamw"}, "adamw": {"optimizer": "adamw"}})
    page.write(tmp_path, preset, runs, missing=missing, arguments=["--max_steps", "30"])
    text = "\n".join(" ".join(line.split()) for line in (tmp_path / "comparison.md").read_text().splitlines())
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    numbers = json.loads((tmp_path / "comparison.json").read_text())
    assert [line for line in lines if line not in text] == [] and "nan" not in text
    assert numbers["machine"]["cpu"] in text
    losses = [one["eval_loss"] for one in numbers["runs"]]
    assert losses == [None if math.isnan(one.eval_loss) else one.eval_loss for one in runs]
    if runs == RUNS:
        assert numbers["runs"] == json.loads(json.dumps([asdict(run) for run in RUNS]))
    if missing:
        assert numbers["rows"][0]["seeds"] == 1 and numbers["differences"][0]["shown"] == "no"


def test_interval_is_paired_by_seed():
    """Gaps of -0.1, -0.2, -0.3: a mean of -0.2, a standard error of 0.1 / sqrt(3), and t(0.975, 2) = 4.302653."""
    base, mars = of("adamw", [4.0, 5.0, 6.0]), of("mars_adamw", [3.9, 4.8, 5.7])
    gap = comparison.difference(list(reversed(mars)), base)
    error = 0.1 / math.sqrt(3)
    assert gap.mean == pytest.approx(-0.2)
    assert (gap.low, gap.high) == (pytest.approx(-0.2 - 4.302653 * error), pytest.approx(-0.2 + 4.302653 * error))
    assert gap.p == pytest.approx(0.0741799)  # of t = 3.4641 with 2 degrees of freedom
    assert comparison.difference(mars[:2], base).mean == pytest.approx(-0.15)


def test_holm():
    assert comparison.holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.04, 0.09, 0.09, math.nan], nan_ok=True)
    assert comparison.holm([0.02, 0.9, 0.8]) == pytest.approx([0.06, 1.0, 1.0])  # in order, and 1 at most
    assert comparison.holm([]) == []


def test_differences():
    runs = [*of("adamw", [4.4, 4.5, 4.6]), *of("muon", [4.0, 4.1, 4.2001]), *of("mars_m", [4.3, 4.41, 4.57])]
    runs += [*of("lion", [4.39, 4.53, 4.58]), run("late", 9, [4.0])]
    gaps = comparison.differences(runs, "adamw", [("mars_m", "muon"), ("late", "muon")])
    assert [(gap.contender, gap.against) for gap in gaps] == [  # late shares no seed
        *(("muon", "adamw"), ("mars_m", "adamw"), ("lion", "adamw"), ("mars_m", "muon"))
    ]
    assert [gap.shown for gap in gaps] == ["yes", "no", "no", "yes"]
    assert gaps[0].holm == pytest.approx(4 * gaps[0].p)
    assert gaps[0]._replace(holm=0.06).shown == "not by Holm"


def test_curve_has_the_steps_of_all_seeds():
    resumed = Run("adamw", 2, 1e-3, 4.0, 100.0, ((0, 8.0), (7, 5.5), (10, 5.0)))  # evaluated again where it resumed
    assert comparison.mean_curve([run("adamw", 1, [8.0, 4.0]), resumed]) == [(0, 8.0), (10, 4.5)]


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.names())
def test_shipped_presets_are_runs_of_the_recipe(name):
    preset = presets.load(name)
    assert preset.about and len(preset.arms) > 2
    for arm, settings in preset.arms.items():
        values = launch.settings_of(presets.words(preset.arms[arm]))
        assert {key: values[key] for key in settings if key in values} == {
            key: value for key, value in settings.items() if key in values
        }
        assert values["learning_rate"] > 5e-5  # not the default of TrainingArguments
    assert len({tuple(presets.words(preset.arms[arm])) for arm in preset.arms}) == len(preset.arms)


def preset(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    return presets.load(str(tmp_path / "mine.yaml"))


def test_preset_of_a_file(tmp_path):
    mine = preset(
        tmp_path,
        "shared: {beta1: 0.8}\narms:\n  a: {optimizer: adamw, learning_rate: 0.00200000041, bf16: true}\n"
        "  b 0.95: {optimizer: mars_adamw, beta1: 0.95, lr_scheduler_kwargs: {min_lr: 1.0e-4}}\n"
        "pairs: [[b 0.95, a]]\nbaseline: b 0.95\nseeds: [3, 4]\naxis: beta1\nlines: name\n",
    )
    shared = ["--beta1", "0.8", "--optimizer", "adamw"]
    assert presets.words(mine.arms["a"]) == [*shared, "--learning_rate", "0.00200000041", "--bf16", "true"]
    assert presets.words(mine.arms["b 0.95"])[:4] == ["--beta1", "0.95", "--optimizer", "mars_adamw"]
    assert json.loads(presets.words(mine.arms["b 0.95"])[-1]) == {"min_lr": 1e-4}
    assert (mine.baseline, mine.pairs, mine.seeds) == ("b 0.95", [("b 0.95", "a")], [3, 4])
    assert (mine.place("a"), mine.place("b 0.95")) == (("", 0.8), ("b", 0.95))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arm: {a: {}}", "mine.yaml: .* unexpected keyword argument 'arm'"),
        ("arms: {a: adamw}", "mine.yaml: 'str' object is not a mapping"),
        ("arms: {a: {optimizer: adamw}}\nbaseline: b", "unknown arm 'b'; accepted: a"),
        ("arms: {a: {optimizer: adamw}}\npairs: [[a, c]]", "unknown arm 'c'"),
        ("arms: {a: {}", "mine.yaml: while parsing"),
    ],
)
def test_mistakes_in_a_preset(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        preset(tmp_path, text)


def test_only_some_arms(tmp_path):
    part = presets.load("controls").only(["muon", "mars_m"])  # with the baseline, in the preset's order
    assert list(part.arms) == ["adamw", "muon", "mars_m"] and part.pairs == [("mars_m", "muon")]
    part = preset(tmp_path, "arms: {a: {optimizer: muon}, b: {optimizer: mars_m}, c: {optimizer: mars_lion}}").only(
        ["c"]
    )
    assert (list(part.arms), part.baseline) == (["a", "c"], "a")  # the baseline of all arms


@pytest.mark.parametrize(
    ("name", "ending", "share"),
    [
        *(("time", "", 1), ("batch", " 2048", 1), ("parts", "", 1), ("lr", "", 1)),
        *(("gpu", "", 1 / 2), ("gpu-98m", "", 1 / 4)),
    ],
)
def test_other_presets_have_the_rates_of_the_controls(name, ending, share):
    """`lr` has them among others, at the tuned rate of matrices; larger models have a share of them."""

    def facts(settings):
        return tuple(settings.get(key) for key in ("optimizer", "gamma", "is_approx"))

    def rates(settings, share=1):
        values = launch.settings_of(presets.words(settings))
        shares = dict.fromkeys(("learning_rate", "lr_embeddings", "lr_1d"), share)
        shares |= dict.fromkeys(("weight_decay", "weight_decay_1d", "beta1", "beta2"), 1)
        return {key: None if values[key] is None else factor * float(values[key]) for key, factor in shares.items()}

    controls = {facts(settings): settings for settings in presets.load("controls").arms.values()}
    arms = {
        arm: (settings, controls[facts(settings)])
        for arm, settings in presets.load(name).arms.items()
        if facts(settings) in controls and "second_moment" not in settings and arm.endswith(ending)
    }
    if name == "lr":
        arms = {arm: both for arm, both in arms.items() if both[0]["learning_rate"] == both[1]["learning_rate"]}
    assert len(arms) >= 5
    for arm, (settings, control) in arms.items():
        assert rates(settings) == pytest.approx(rates(control, share)), arm


@pytest.mark.parametrize("name", ["gamma", "betas"])
def test_rates_grow_with_the_corrected_gradient(name):
    """By the root of Var(c) / Var(g): updates then have AdamW's size at every gamma and beta1."""
    tuned = presets.load("controls").arms["adamw"]
    for arm, settings in presets.load(name).arms.items():
        strength = settings.get("gamma", 0.0) * settings["beta1"] / (1 - settings["beta1"])
        growth = math.hypot(1 + strength, strength)
        assert settings["learning_rate"] == pytest.approx(tuned["learning_rate"] * growth, rel=0.03), arm
        assert settings["lr_embeddings"] == tuned["lr_embeddings"], arm


# --- the command -----------------------------------------------------------------------------------------------------

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
        loss = 4.0 + len(calls) + 0.1 * len(calls) ** 2
        metrics = {"learning_rate": 1e-3, "eval_loss": loss, "tokens_per_second": 10.0}
        history = [{"step": 5, "loss": 6.0}, {"step": 5, "eval_loss": loss}]
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
    """A run that diverged is a result, too, and not trained again."""
    names = ["mars_adamw_exact", "adamw", "mars_lion"]
    launcher = "accelerate launch --config_file 'my config.yaml'"
    argv = ["--optimizers", *names, "--seeds", "3", "4", "--launcher", launcher, "--max_steps", "5"]
    argv += ["--learning_rate", "0.5"]
    result = compare(tmp_path, *argv)
    assert [(run["contender"], run["seed"]) for run in result["runs"]] == [(n, seed) for seed in (3, 4) for n in names]
    assert all(argv[:4] == ["accelerate", "launch", "--config_file", "my config.yaml"] for argv in started)
    assert all(" --max_steps 5 " in " ".join(argv) for argv in started)
    assert started[0][-6:] == ["--optimizer", "mars_adamw", "--is_approx", "false", "--seed", "3"]
    assert started[4][-4:] == ["--optimizer", "adamw", "--seed", "4"]
    exact, adamw, lion = result["rows"]
    assert (exact["loss"], adamw["loss"]) == pytest.approx((7.35, 8.95))  # of 5.1 and 9.6, 6.4 and 11.5
    assert (lion["diverged"], lion["learning_rate"]) == (2, 0.5)
    page = (tmp_path / "compare" / "comparison.md").read_text()
    assert result["data"] == [DATA] and "Data: words, SHA-256 0123456789ab." in page
    assert "| mars_adamw_exact |" in page and "| mars_adamw_exact |" in capsys.readouterr().out
    assert compare(tmp_path, *argv) == result and len(started) == 6


def test_preset_two_runs_at_a_time(tmp_path, started):
    path, names = tmp_path / "mine.yaml", [f"{name} {rate}" for name in ("adamw", "mars_m") for rate in (0.001, 0.002)]
    arms = {arm: dict(zip(("optimizer", "learning_rate"), arm.split(), strict=True)) for arm in names}
    sections = {"about": "Which rate?", "arms": arms, "baseline": "adamw 0.002", "seeds": [7, 8]}
    sections |= {"pairs": [["mars_m 0.002", "mars_m 0.001"]], "axis": "learning_rate", "lines": "optimizer"}
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    result = compare(tmp_path, "--preset", str(path), "--jobs", "2")
    assert [(run["contender"], run["seed"]) for run in result["runs"]] == [(n, seed) for seed in (7, 8) for n in names]
    compared = [(gap["contender"], gap["against"]) for gap in result["differences"]]
    assert compared == [*((name, names[1]) for name in names if name != names[1]), ("mars_m 0.002", "mars_m 0.001")]
    page = (tmp_path / "compare" / "comparison.md").read_text()
    assert page.startswith("Which rate?\n\n| learning_rate | ")
    run = tmp_path / "compare" / "mars_m_0.001-7" / "run.json"
    run.write_text(run.read_text().replace("words", "others"))
    some = compare(tmp_path, "--preset", str(path), "--arms", "mars_m 0.001")
    assert [row["contender"] for row in some["rows"]] == ["adamw 0.002", "mars_m 0.001"] and len(started) == 8
    assert {data["dataset"] for data in some["data"]} == {"words", "others"}


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


@pytest.mark.parametrize("saved", [True, False])
def test_interrupted_comparison_goes_on(tmp_path, started, monkeypatch, saved):
    """A run that has saved a checkpoint is resumed."""
    finish, page = launch.run_recipe, tmp_path / "compare" / "comparison.md"

    def interrupted(argv, output, launcher):
        if len(started) < 3:
            return finish(argv, output, launcher)
        while not page.exists() or "3 of 4 runs so far." not in page.read_text():
            time.sleep(0.01)  # as a real run takes its time
        if saved:
            (output / "checkpoint-3").mkdir()
        raise KeyboardInterrupt

    argv = ["--optimizers", "adamw", "mars_adamw", "--seeds", "1", "2"]
    monkeypatch.setattr(launch, "run_recipe", interrupted)
    with pytest.raises(SystemExit, match="130"):
        compare(tmp_path, *argv)
    monkeypatch.setattr(launch, "run_recipe", finish)
    assert len(compare(tmp_path, *argv)["runs"]) == len(started) == 4
    assert [words[-2:] == ["--resume_from_checkpoint", "auto"] for words in started] == [False, False, False, saved]


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


def test_other_settings_and_folders_are_refused(tmp_path, started, capsys):
    """Before any run."""
    config, folder = tmp_path / "mine.yaml", tmp_path / "compare" / "adamw-1"
    argv = ["--config", str(config), "--seeds", "1"]
    config.write_text("max_steps: 5\noptimizers: {adamw: {learning_rate: 1.0e-3}}\n")
    compare(tmp_path, *argv, "--optimizers", "adamw")
    config.write_text("max_steps: 6\noptimizers: {adamw: {learning_rate: 2.0e-3}}\n")
    line = refusal(tmp_path, capsys, *argv, "--optimizers", "mars_m", "adamw")
    assert "adamw-1 holds a run with other settings: " in line and "give another --output_dir" in line
    assert "learning_rate 0.001, now 0.002" in line and "max_steps 5, now 6" in line
    (folder / "arguments.json").unlink()
    line = refusal(tmp_path, capsys, *argv, "--optimizers", "adamw")
    assert "adamw-1 holds a run that is not of a comparison; give another --output_dir" in line
    with files.locked(tmp_path / "compare", "compares"):
        assert " compares there" in refusal(tmp_path, capsys, "--optimizers", "adamw", "--seeds", "2")
    assert len(started) == 1
    (folder / "metrics.json").unlink()
    compare(tmp_path, *argv, "--optimizers", "adamw")  # a run without output does not count
    assert len(started) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--optimizers", "sgd"], "invalid choice: 'sgd'"),
        (["--optimizer", "adamw"], "--optimizer: the arms state it themselves; remove the flag"),
        (["--preset", "batch", "--max-steps=7"], "--max_steps: the arms state it themselves"),
        (["--seed=3"], "--seed differs between the runs; remove it: give --seeds"),
        (["--resume_from_checkpoint", "true"], "an interrupted comparison goes on by itself"),
        (["--preset", "gamma", "--optimizers", "adamw"], "argument --optimizers: not allowed with argument --preset"),
        (["--optimizers", "adamw", "--gamma", "0.1"], "optimizer adamw has no gamma"),
        (["--preset", "control"], "--preset 'control': no such preset; accepted: batch, betas, controls"),
        (["--preset", "controls", "--arms", "mars-m"], "--arms 'mars-m': no such arm; accepted: 'adamw', 'nadamw'"),
    ],
)
def test_wrong_arguments(tmp_path, started, capsys, argv, message):
    assert message in refusal(tmp_path, capsys, *argv)
    assert not started and not list(tmp_path.glob("compare/*"))


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
def test_how_a_run_ends(tmp_path, monkeypatch, text, error, words):
    script = tmp_path / "pretrain_gpt2.py"  # which does what its text says
    monkeypatch.setattr(launch, "SCRIPT", script)
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
