"""Presets of a comparison: shipped ones, ones of a user's own, and mistakes in them."""

from __future__ import annotations

import json
import math

import pytest
from pretraining.compare import presets
from pretraining.run.arguments import read


@pytest.mark.parametrize("name", presets.names())
def test_shipped_presets_are_runs_of_the_recipe(name):
    preset = presets.load(name)
    assert preset.about and len(preset.arms) > 2
    for arm in preset.arms:
        values, _, _ = read(preset.argv(arm))
        for key, value in preset.arms[arm].items():
            assert getattr(values, key) == (value if key != "lr_scheduler_kwargs" else dict(value))
        assert values.learning_rate > 5e-5  # not the default of TrainingArguments
    assert len({tuple(preset.argv(arm)) for arm in preset.arms}) == len(preset.arms)


def preset(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return presets.load(str(path))


def test_arms_share_settings_and_state_their_own(tmp_path):
    found = preset(
        tmp_path,
        "shared: {beta1: 0.8}\narms:\n  a: {optimizer: adamw}\n"
        "  b: {optimizer: mars_adamw, beta1: 0.95, is_approx: false}\n"
        "pairs: [[b, a]]\nbaseline: b\nseeds: [3, 4]\n",
    )
    assert found.argv("a") == ["--beta1", "0.8", "--optimizer", "adamw"]
    assert found.argv("b") == ["--beta1", "0.95", "--optimizer", "mars_adamw", "--is_approx", "false"]
    assert (found.baseline, found.pairs, found.seeds, found.place("a")) == ("b", (("b", "a"),), (3, 4), None)


def test_a_grid_has_an_arm_for_every_combination(tmp_path):
    found = preset(
        tmp_path,
        "grid: {optimizer: [adamw, muon], learning_rate: [1e-3, 2e-3]}\naxis: learning_rate\nlines: optimizer\n",
    )
    assert list(found.arms) == ["adamw 0.001", "adamw 0.002", "muon 0.001", "muon 0.002"]
    assert found.place("muon 0.002") == ("muon", 0.002)


def test_arms_may_have_numbers_for_names(tmp_path):
    found = preset(tmp_path, "grid: {gamma: [0, 0.05]}\nbaseline: 0\npairs: [[0.05, 0]]\n")
    assert (list(found.arms), found.baseline, found.pairs) == (["0", "0.05"], "0", (("0.05", "0"),))


def test_values_reach_the_run_as_they_are(tmp_path):
    found = preset(
        tmp_path,
        "arms: {a: {learning_rate: 0.00200000041, beta2: 0.9999997, eps: 1.0e-08, gamma: 0.0, bf16: true, "
        "lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1.0e-4}}}",
    )
    argv = found.argv("a")
    assert dict(zip(argv[::2], argv[1::2], strict=True)) == {
        **{"--learning_rate": "0.00200000041", "--beta2": "0.9999997", "--eps": "1e-08", "--gamma": "0"},
        **{"--bf16": "true", "--lr_scheduler_type": "cosine_with_min_lr"},
        "--lr_scheduler_kwargs": '{"min_lr": 0.0001}',
    }
    values, _, _ = read(argv)
    assert (values.learning_rate, values.beta2) == (0.00200000041, 0.9999997)
    assert json.loads(values.lr_scheduler_kwargs) == {"min_lr": 1e-4}


def test_lines_can_have_the_names_of_their_arms(tmp_path):
    arms = "arms: {one 0.9: {beta1: 0.9, gamma: 0.1}, 'one, too 0.8': {beta1: 0.8, gamma: 0.2}}"
    found = preset(tmp_path, f"{arms}\naxis: beta1\nlines: name\n")
    assert [found.place(arm) for arm in found.arms] == [("one", 0.9), ("one, too", 0.8)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arm: {a: {}}", r"mine.yaml, line 1: unknown key 'arm' \(did you mean arms\?\); accepted: about"),
        ("about: nothing", "no arms; give `arms`"),
        ("arms: {a: adamw}", "arms: a is not a section"),
        ("arms: {a: {optimizer: adamw}}\nbaseline: b", "unknown arm 'b'; accepted: a"),
        ("arms: {a: {optimizer: adamw}}\npairs: [[a, c]]", "unknown arm 'c'"),
        ("arms: {a: {optimizer: adamw}}\npairs: [a]", "line 2: pairs: .* is not a list of two arms each"),
        ("grid: {learning_rate: 0.1}", "grid: learning_rate: 0.1 is not a list of values"),
        ("arms: {a: {optimizer: adamw}}\nequal: flops", "line 2: equal: 'flops' is not tokens or seconds"),
        ("arms: {a: {optimizer: adamw}}\nseeds: 3", "line 2: seeds: 3 is not a list of whole numbers"),
        ("arms: [adamw]", "line 1: arms: .* is not a section"),
        ("arms: {a b: {gamma: 0.1}, A_b: {gamma: 0.2}}", "the arms 'a b' and 'A_b' have one folder, A_b; rename one"),
        ("arms: {a: {gamma: 0.1}}\naxis: gama", r"line 2: axis: no arm has a setting 'gama' \(did you mean gamma\?\)"),
        ("arms: {a: {gamma: 0.1}}\naxis: gamma\nlines: [gamma]", r"line 3: lines: no arm has a setting \['gamma'\]"),
        ("arms: {a: {optimizer: muon}}\naxis: optimizer", "line 2: axis: optimizer is 'muon' in 'a'; choose a setting"),
        ("arms: {a: {seed: 5}}", "arms: a: seed differs between the runs of an arm; leave it out, and use seeds"),
        ("arms: {a: {}}\nshared: {output_dir: x}", "shared: output_dir differs .* use --output_dir"),
        ("arms: {a: {gamma: null}}", "arms: a: gamma: None is no value of a flag; give a number or a word"),
        ("grid: {gamma: [0.1, [0.2]]}", r"grid: gamma: \[0.2\] is no value of a flag"),
        ("grid: {gamma: [0, 0.05]}\nbaseline: 1", "unknown arm '1'; accepted: 0, 0.05"),
        ("arms: {a: {gamma: 0.1}}\npairs: [[a, [b]]]", r"unknown arm \"\['b'\]\""),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        preset(tmp_path, text)


def test_an_unknown_preset_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"--preset 'control': no such preset \(did you mean controls\?\); accepted: "):
        presets.load("control")


@pytest.mark.parametrize(
    ("name", "ending", "share"),
    [
        *(("time", "", 1), ("batch", " 2048", 1), ("parts", "", 1), ("lr", "", 1)),
        *(("gpu", "", 1 / 2), ("gpu-small", "", 1 / 4)),
    ],
)
def test_other_presets_have_the_rates_of_the_controls(name, ending, share):
    """`lr` has them among others, at the tuned rate of matrices; larger models have a share of them."""

    def facts(arm):
        return tuple(arm.get(key) for key in ("optimizer", "gamma", "is_approx"))

    def rates(preset, arm):
        values, _, _ = read(preset.argv(arm))
        names = ("learning_rate", "lr_embeddings", "lr_1d", "weight_decay", "weight_decay_1d", "beta1", "beta2")
        return {key: getattr(values, key) for key in names}

    controls, preset = presets.load("controls"), presets.load(name)
    tuned = {facts(own): (arm, own) for arm, own in controls.arms.items()}
    compared = 0
    for arm, own in preset.arms.items():
        if facts(own) not in tuned or "second_moment" in own or not arm.endswith(ending):
            continue
        control, settings = tuned[facts(own)]
        if name != "lr" or own["learning_rate"] == settings["learning_rate"]:
            wanted = rates(controls, control)
            for key in ("learning_rate", "lr_embeddings", "lr_1d"):
                wanted[key] = None if wanted[key] is None else share * wanted[key]
            assert rates(preset, arm) == pytest.approx(wanted), arm
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("name", ["gamma", "betas"])
def test_rates_grow_with_the_corrected_gradient(name):
    """By the root of Var(c) / Var(g): updates then have AdamW's size at every gamma and beta1."""
    tuned, preset = presets.load("controls").arms["adamw"], presets.load(name)
    for arm, own in preset.arms.items():
        strength = own.get("gamma", 0.0) * own["beta1"] / (1 - own["beta1"])
        growth = math.hypot(1 + strength, strength)
        assert own["learning_rate"] == pytest.approx(tuned["learning_rate"] * growth, rel=0.03), arm
        assert own["lr_embeddings"] == tuned["lr_embeddings"], arm


def test_some_arms_of_a_preset():
    whole = presets.load("controls")
    found = whole.only(["muon", "mars_m"])
    assert list(found.arms) == ["adamw", "muon", "mars_m"]  # with the baseline, in the preset's order
    assert found.arms["muon"] == whole.arms["muon"]
    assert found.pairs == (("mars_m", "muon"),)


def test_some_arms_of_a_preset_without_a_baseline_keep_the_one_of_all_arms(tmp_path):
    arms = "arms: {a: {optimizer: muon}, b: {optimizer: mars_m}, c: {optimizer: mars_lion}}"
    found = preset(tmp_path, arms).only(["c"])
    assert (list(found.arms), found.baseline) == (["a", "c"], "a")
    found = preset(tmp_path, arms.replace("b: {optimizer: mars_m}", "adamw: {optimizer: adamw}")).only(["c"])
    assert (list(found.arms), found.baseline) == (["adamw", "c"], "adamw")


def test_an_unknown_arm_is_named_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"--arms 'mars-m': no such arm \(did you mean mars_m\?\); accepted: adamw, nadamw, 'mars"
    ):
        presets.load("controls").only(["mars-m"])
