"""Presets of a comparison: shipped ones, ones of a user's own, and mistakes in them."""

from __future__ import annotations

import json
import math

import pytest
from pretraining.compare import launch, presets


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


def test_arms_share_settings_and_state_their_own(tmp_path):
    mine = preset(
        tmp_path,
        "shared: {beta1: 0.8}\narms:\n  a: {optimizer: adamw}\n"
        "  b: {optimizer: mars_adamw, beta1: 0.95, is_approx: false}\n"
        "pairs: [[b, a]]\nbaseline: b\nseeds: [3, 4]\n",
    )
    assert mine.argv("a") == ["--beta1", "0.8", "--optimizer", "adamw"]
    assert mine.argv("b") == ["--beta1", "0.95", "--optimizer", "mars_adamw", "--is_approx", "false"]
    assert (mine.baseline, mine.pairs, mine.seeds, mine.place("a")) == ("b", [("b", "a")], [3, 4], None)


def test_grid(tmp_path):
    text = "grid: {optimizer: [adamw, muon], learning_rate: [1.0e-3, 2.0e-3]}\naxis: learning_rate\nlines: optimizer\n"
    mine = preset(tmp_path, text)
    assert list(mine.arms) == ["adamw 0.001", "adamw 0.002", "muon 0.001", "muon 0.002"]
    assert mine.place("muon 0.002") == ("muon", 0.002)
    numbers = preset(tmp_path, "grid: {gamma: [0, 0.05]}\nbaseline: 0\npairs: [[0.05, 0]]\n")
    assert (list(numbers.arms), numbers.baseline, numbers.pairs) == (["0", "0.05"], "0", [("0.05", "0")])


def test_lines_can_have_the_names_of_their_arms(tmp_path):
    arms = "arms: {one 0.9: {beta1: 0.9, gamma: 0.1}, 'one, too 0.8': {beta1: 0.8, gamma: 0.2}}"
    mine = preset(tmp_path, f"{arms}\naxis: beta1\nlines: name\n")
    assert [mine.place(arm) for arm in mine.arms] == [("one", 0.9), ("one, too", 0.8)]


def test_values_reach_the_run_as_they_are(tmp_path):
    mine = preset(
        tmp_path,
        "arms: {a: {learning_rate: 0.00200000041, beta2: 0.9999997, gamma: 0.0, bf16: true, "
        "lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1.0e-4}}}",
    )
    argv = dict(zip(mine.argv("a")[::2], mine.argv("a")[1::2], strict=True))
    assert (argv["--learning_rate"], argv["--gamma"], argv["--bf16"]) == ("0.00200000041", "0", "true")
    assert json.loads(argv["--lr_scheduler_kwargs"]) == {"min_lr": 1e-4}
    assert launch.settings_of(mine.argv("a"))["beta2"] in (0.9999997, "0.9999997")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arm: {a: {}}", "mine.yaml: unknown key 'arm'; accepted: about"),
        ("about: nothing", "no arms; give `arms`"),
        ("arms: {a: adamw}", "mine.yaml: 'str' object is not a mapping"),
        ("arms: {a: {optimizer: adamw}}\nbaseline: b", "unknown arm 'b'; accepted: a"),
        ("arms: {a: {optimizer: adamw}}\npairs: [[a, c]]", "unknown arm 'c'"),
        ("arms: {a: {optimizer: adamw}}\npairs: [a]", "mine.yaml: not enough values to unpack"),
        ("arms: {a: {optimizer: adamw}}\nequal: flops", "equal: 'flops' is neither tokens nor seconds"),
        ("arms: {a: {seed: 5}}", "a: seed differs between the runs of an arm; leave it out: give --seeds"),
        ("arms: {a: {}", "mine.yaml: while parsing"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
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
        *(("gpu", "", 1 / 2), ("gpu-small", "", 1 / 4)),
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
