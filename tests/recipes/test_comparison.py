"""Statistics and pages of a comparison, from runs made by hand, and its presets."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from pretraining.compare import comparison, launch, page, presets
from pretraining.compare.comparison import Run
from pretraining.compare.presets import Preset


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
ARMS = {"mars_adamw": {"optimizer": "mars_adamw"}, "adamw": {"optimizer": "adamw"}}


def write(folder, runs, arms=ARMS, **settings) -> tuple[str, dict]:
    """Write a page; return it with single spaces, and its numbers."""
    page.write(folder, Preset(arms), runs, **settings)
    text = (folder / "comparison.md").read_text()
    return "\n".join(" ".join(line.split()) for line in text.splitlines()), json.loads(
        (folder / "comparison.json").read_text()
    )


def test_page(tmp_path):
    text, numbers = write(tmp_path, RUNS, arguments=["--max_steps", "30"])
    assert "| mars_adamw | 0.002 | 4.100 (4.000-4.200) | 20 of 30 (67%) | 0.58x |" in text
    assert "| adamw | 0.001 | 4.450 (4.400-4.500) | 30 of 30 (100%) | 1.00x |" in text
    assert "| mars_adamw | adamw | -0.350 (-2.256 to +1.556) | no |" in text
    assert "Seeds 1, 2; settings: --max_steps 30." in text and numbers["machine"]["cpu"] in text
    assert numbers["runs"] == json.loads(json.dumps([asdict(run) for run in RUNS]))
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    text, _ = write(tmp_path, [run("adamw", 1, [8.0, 4.0]), run("mars_adamw", 1, [8.0, 4.1])])
    assert "| not reached in 10 |" in text


def test_diverged_runs(tmp_path):
    diverged = [replace(one, eval_loss=math.nan, tokens_per_second=math.nan, curve=()) for one in RUNS]
    text, numbers = write(tmp_path, [diverged[0], *RUNS[1:]])
    assert "| 1 of 2 diverged (others 4.200-4.200) |" in text and "| mars_adamw | adamw | diverged |" in text
    assert numbers["runs"][0]["eval_loss"] is None and numbers["rows"][0]["loss"] is None
    text, _ = write(tmp_path, [RUNS[0], diverged[1], RUNS[2], diverged[3]])  # the baseline
    assert "| 2 of 2 diverged |" in text and "nan" not in text


def test_unfinished_comparison(tmp_path):
    """Seeds that the baseline lacks wait."""
    text, numbers = write(tmp_path, [*RUNS[:2], RUNS[2]], missing=1)
    assert "3 of 4 runs so far." in text and "-0.500 (one seed)" in text
    assert len(numbers["runs"]) == 3 and numbers["rows"][0]["seeds"] == 1
    assert numbers["differences"][0]["low"] is None and numbers["differences"][0]["shown"] == "no"


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


@pytest.mark.parametrize("name", presets.names())
def test_shipped_presets_are_runs_of_the_recipe(name):
    preset = presets.load(name)
    assert preset.about and len(preset.arms) > 2
    for arm, settings in preset.arms.items():
        values = launch.settings_of(preset.argv(arm))
        assert {key: values[key] for key in settings if key in values} == {
            key: value for key, value in settings.items() if key in values
        }
        assert values["learning_rate"] > 5e-5  # not the default of TrainingArguments
    assert len({tuple(preset.argv(arm)) for arm in preset.arms}) == len(preset.arms)


def preset(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return presets.load(str(path))


def test_preset_of_a_file(tmp_path):
    mine = preset(
        tmp_path,
        "shared: {beta1: 0.8}\narms:\n  a: {optimizer: adamw, learning_rate: 0.00200000041, bf16: true}\n"
        "  b 0.95: {optimizer: mars_adamw, beta1: 0.95, lr_scheduler_kwargs: {min_lr: 1.0e-4}}\n"
        "pairs: [[b 0.95, a]]\nbaseline: b 0.95\nseeds: [3, 4]\naxis: beta1\nlines: name\n",
    )
    shared = ["--beta1", "0.8", "--optimizer", "adamw"]
    assert mine.argv("a") == [*shared, "--learning_rate", "0.00200000041", "--bf16", "true"]
    assert mine.argv("b 0.95")[:4] == ["--beta1", "0.95", "--optimizer", "mars_adamw"]
    assert json.loads(mine.argv("b 0.95")[-1]) == {"min_lr": 1e-4}
    assert (mine.baseline, mine.pairs, mine.seeds) == ("b 0.95", [("b 0.95", "a")], [3, 4])
    assert (mine.place("a"), mine.place("b 0.95")) == (("", 0.8), ("b", 0.95))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arm: {a: {}}", "mine.yaml: .* unexpected keyword argument 'arm'"),
        ("about: nothing", "no arms; give `arms`"),
        ("arms: {a: adamw}", "mine.yaml: 'str' object is not a mapping"),
        ("arms: {a: {optimizer: adamw}}\nbaseline: b", "unknown arm 'b'; accepted: a"),
        ("arms: {a: {optimizer: adamw}}\npairs: [[a, c]]", "unknown arm 'c'"),
        ("arms: {a: {seed: 5}}", "a: seed differs between the runs of an arm; leave it out: give --seeds"),
        ("arms: {a: {}", "mine.yaml: while parsing"),
    ],
)
def test_mistakes_in_a_preset(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        preset(tmp_path, text)


def test_only_some_arms(tmp_path):
    whole = presets.load("controls")
    part = whole.only(["muon", "mars_m"])
    assert list(part.arms) == ["adamw", "muon", "mars_m"]  # with the baseline, in the preset's order
    assert part.arms["muon"] == whole.arms["muon"] and part.pairs == [("mars_m", "muon")]
    arms = "arms: {a: {optimizer: muon}, b: {optimizer: mars_m}, c: {optimizer: mars_lion}}"
    part = preset(tmp_path, arms).only(["c"])
    assert (list(part.arms), part.baseline) == (["a", "c"], "a")  # the baseline of all arms
    with pytest.raises(ValueError, match="--arms 'mars-m': no such arm; accepted: 'adamw', 'nadamw'"):
        whole.only(["mars-m"])


@pytest.mark.parametrize(
    ("name", "ending", "share"),
    [
        *(("time", "", 1), ("batch", " 2048", 1), ("parts", "", 1), ("lr", "", 1)),
        *(("gpu-30m", "", 1 / 2), ("gpu-98m", "", 1 / 4)),
    ],
)
def test_other_presets_have_the_rates_of_the_controls(name, ending, share):
    """`lr` has them among others, at the tuned rate of matrices; larger models have a share of them."""

    def facts(settings):
        return tuple(settings.get(key) for key in ("optimizer", "gamma", "is_approx"))

    def rates(preset, arm):
        values = launch.settings_of(preset.argv(arm))
        names = ("learning_rate", "lr_embeddings", "lr_1d", "weight_decay", "weight_decay_1d", "beta1", "beta2")
        return {key: None if values[key] is None else float(values[key]) for key in names}

    controls, preset = presets.load("controls"), presets.load(name)
    tuned = {facts(settings): arm for arm, settings in controls.arms.items()}
    compared = 0
    for arm, settings in preset.arms.items():
        control = tuned.get(facts(settings))
        if control is None or "second_moment" in settings or not arm.endswith(ending):
            continue
        if name == "lr" and settings["learning_rate"] != controls.arms[control]["learning_rate"]:
            continue
        expected = rates(controls, control)
        for key in ("learning_rate", "lr_embeddings", "lr_1d"):
            expected[key] = None if expected[key] is None else share * expected[key]
        assert rates(preset, arm) == pytest.approx(expected), arm
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("name", ["gamma", "betas"])
def test_rates_grow_with_the_corrected_gradient(name):
    """By the root of Var(c) / Var(g): updates then have AdamW's size at every gamma and beta1."""
    tuned = presets.load("controls").arms["adamw"]
    for arm, settings in presets.load(name).arms.items():
        strength = settings.get("gamma", 0.0) * settings["beta1"] / (1 - settings["beta1"])
        growth = math.hypot(1 + strength, strength)
        assert settings["learning_rate"] == pytest.approx(tuned["learning_rate"] * growth, rel=0.03), arm
        assert settings["lr_embeddings"] == tuned["lr_embeddings"], arm
