"""Arms and plans from words and files, where each arm starts, the metric, and the command's own refusals."""

import importlib.util
import json
import math
import os
import sys
from dataclasses import replace

import pytest

from mars_hf.compare import command
from mars_hf.compare.comparison import Comparison
from mars_hf.compare.metric import Metric, find_metric
from mars_hf.compare.order import Order
from mars_hf.compare.plan import Arm, Plan, Script, arguments_of_arm, setting, words
from mars_hf.compare.runs import Run
from mars_hf.compare.work import Work, count_runs
from mars_hf.groups.settings import parse_optim_args
from mars_hf.groups.suggest import suggest

SCRIPT = Script(2e-4, (0.9, 0.999), 0.1, width=64)


def plan(*names, **settings):
    return Plan([Arm.of_text(name) for name in names], **settings)


def rate(run):
    return run.order.arm["learning_rate"]


def test_arms_of_text():
    """Settings reach TrainingArguments, or the optimizer; `learning_rate` is the first rate."""
    assert Arm.of_text("script") == Arm("script")
    arm = Arm.of_text("mars_m:clip_threshold=none,learning_rate=0.01,warmup_steps=5")
    assert arm.set == {"optim": "mars_m", "warmup_steps": 5} and arm.first == [0.01] and arm.rule == "mars-m"
    assert arm.optim_args == {"clip_threshold": None}
    arm = Arm.of_text("rmsprop:alpha=0.9,adam_beta1=0.8,momentum=0.5")
    assert arm.set == {"optim": "rmsprop", "adam_beta1": 0.8}
    assert arguments_of_arm(arm, Plan([arm]), 1, None, None)["optim_args"] == "alpha=0.9,momentum=0.5"
    assert Arm.of_text("muon").rule == "muon" and Arm.of_text("adamw_torch").rule is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim", "adam", "script"], "arm adam: optim 'adam'; accepted are adamw_torch, "),
        (["--optim", "script:adam_beta1=0.8", "muon"], "optim 'script'; accepted are "),
        (["--optim", "adamw_torch", "mars_m:gama=1"], "--optim mars_m:gama=1: "),
        (["--optim", "adamw_torch"], "give two or more different arms"),
        (["--optim", "muon", "muon"], "give two or more different arms"),
        (["--set", "max_steps"], "'max_steps': give NAME=VALUE"),
        (["--set", "seed=3"], "--set seed: the comparison sets it itself"),
        (["--set", "seed=3", "--set", "max_steps=3"], "--set seed: the comparison sets it itself"),
        (["--optim", "sgd:seed=3", "muon"], "arm sgd:seed=3: seed: the comparison sets it itself"),
        (["--optim", "sgd", "mars_m:adam_beta1=0.8"], "sets adam_beta1 itself; give MARS's setting beta1 instead"),
        (["--optim", "sgd", "--plan", "plan.yaml"], "--plan and --optim both say what is compared"),
        (["--search_seeds", "42", "42"], "search_seeds: one of 42, 42 is there twice"),
        (["--greater_is_better"], "--greater_is_better is of --metric; give both"),
        (["--search_seeds", "42", "2"], "seed 2 is one of the search and of the comparison"),
        (["--seeds", "0"], "--seeds: give one or more"),
        (["--jobs", "0"], "--jobs: give 1 or more"),
        (["--plan", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_words_end_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert command.main(["train.py", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_arguments_of_the_script_come_after_two_dashes(capsys):
    with pytest.raises(SystemExit):
        command.main(["train.py", "--max_steps", "5"])
    assert "unknown arguments: --max_steps 5; the script's own come after --" in capsys.readouterr().err


def test_missing_packages_and_scripts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["nowhere.py"]) == 2
    assert "no such script: 'nowhere.py' (give a path, or -m MODULE)" in capsys.readouterr().err
    for name, message in (("nowhere", "no such module: 'nowhere'"), ("nowhere.at_all", "-m nowhere.at_all: Module")):
        assert command.main(["-m", name]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else object())
    assert command.main(["nowhere.py"]) == 2
    assert capsys.readouterr().err == "python -m mars_hf compare needs scipy: pip install 'mars_hf[compare]'\n"


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0 and all(len(line) <= 120 for line in text.splitlines())
    assert "--optim adamw_torch mars_adamw mars_m muon -- --its own" in text and "docs/compare.md" in text


def test_plan_of_a_file(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("""
about: AdamW's beta1, and MARS-M
arms:
  adamw 0.8: {set: {optim: adamw_torch, adam_beta1: 0.8}, first: [1e-3]}
  mars_m: {set: {optim: mars_m}, optim_args: {gamma: 0.05}}
  script:
pairs: [[mars_m, script]]
seeds: [1, 2]
search_seeds: [100]
set: {max_steps: 10}
arguments: {block_size: 128}
""")
    read = Plan.of_file(str(path))
    read.check()
    assert [arm.name for arm in read.arms] == ["adamw 0.8", "mars_m", "script"] and read.baseline.first == [1e-3]
    assert read.pairs == [("mars_m", "script")] and list(read.seeds) == [1, 2] and read.set == {"max_steps": 10}
    for text, message in [
        ("arms: {a: {sett: {}}}", "arm a: unknown 'sett'; accepted: set, optim_args"),
        ("arm: {}", "unknown 'arm'; accepted: arms"),
        ("about: nothing", "'arms'"),
        ("arms: {a: {}, b: {}}\nseeds: 3", "seeds: give a list, as in [3]"),
        ("arms: {a: {first: 1e-3}, b: {}}", "arm a: first: give a list, as in [0.001]"),
        ("arms: {a: {}, b: {}}\nrates: learning_rate", "rates: give a list, as in [learning_rate]"),
        ("arms: {a: {set: sgd}, b: {}}", "arm a: set: give a mapping"),
        ("arms: [", "plan.yaml: "),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=r"docs/compare\.md has an example") as error:
            Plan.of_file(str(path))
        assert message in str(error.value)
    with pytest.raises(ValueError, match="pairs: unknown arm 'c'"):
        Plan([Arm("a"), Arm("b")], pairs=[("a", "c")]).check()
    with pytest.raises(ValueError, match="arm a: optim 'adan'"):
        Plan([Arm("a", {"optim": "adan"}), Arm("b")]).check()
    with pytest.raises(ValueError, match="arm a: give `first`, a rate for each of learning_rate, lr_embeddings"):
        Plan([Arm("a", first=[1e-3]), Arm("b")], rates=("learning_rate", "lr_embeddings")).check()


def test_baseline_starts_as_the_script_stands():
    """Its first run sets nothing but the optimizer: it tells what the script has."""
    both = plan("adamw_torch", "mars_adamw")
    assert arguments_of_arm(both.baseline, both, 1, None, None) == {"optim": "adamw_torch", "optim_args": None}
    assert arguments_of_arm(both.baseline, both, 1, SCRIPT, None) == {"optim": "adamw_torch", "optim_args": None}
    assert arguments_of_arm(both.baseline, both, 0.5, SCRIPT, None)["learning_rate"] == 1e-4
    of_mars = plan("mars_m:gamma=0.05", "adamw_torch")
    assert arguments_of_arm(of_mars.baseline, of_mars, 1, None, None)["optim_args"] == "gamma=0.05"


@pytest.mark.parametrize("name", ["mars_adamw", "mars_lion", "mars_shampoo", "mars_m", "muon"])
def test_rules_of_mars_start_at_suggested_settings(name):
    """Of the baseline's best rate: the script's betas and decay are converted, and no setting contradicts another."""
    both = plan("adamw_torch", name)
    found = arguments_of_arm(both.arms[1], both, 2.0, SCRIPT, 8e-4)
    expected = suggest(both.arms[1].rule, 8e-4, SCRIPT.betas, SCRIPT.weight_decay, width=64)
    settings = parse_optim_args(found["optim_args"])
    assert found["learning_rate"] == pytest.approx(2 * expected["lr"], rel=1e-5)
    assert settings["lr_1d"] == pytest.approx(2 * expected["lr_1d"], rel=1e-5)
    assert found["weight_decay"] == pytest.approx(expected["weight_decay"], rel=1e-5)
    assert (settings["beta1"], settings["beta2"]) == pytest.approx(expected["betas"], rel=1e-5)
    assert (found["adam_beta1"], found["adam_beta2"]) == (settings["beta1"], settings["beta2"])
    assert (settings["beta1_1d"], settings["beta2_1d"]) == SCRIPT.betas


def test_others_start_at_the_best_rate_of_the_baseline():
    arms = plan("adamw_torch", "adafactor", "script", "muon:learning_rate=0.02", "mars_m:beta1=0.8,weight_decay=0.3")
    found = [arguments_of_arm(arm, arms, 2.0, SCRIPT, 8e-4) for arm in arms.arms[1:]]
    assert found[0] == {"optim": "adafactor", "optim_args": None, "learning_rate": 1.6e-3}
    assert found[1] == {"learning_rate": 4e-4}  # the script as it stands, from its own rate
    assert found[2]["learning_rate"] == pytest.approx(0.04)
    assert (found[3]["adam_beta1"], found[3]["weight_decay"]) == (0.8, 0.3)


def test_best_rate_of_another_rule_is_not_adamws():
    lion = plan("mars_lion", "mars_adamw")
    found = arguments_of_arm(lion.arms[1], lion, 1.0, SCRIPT, 1e-4)["learning_rate"]
    ratio = suggest("mars-adamw", 1.0, SCRIPT.betas)["lr"] / suggest("mars-lion", 1.0, SCRIPT.betas)["lr"]
    assert found == pytest.approx(1e-4 * ratio, rel=1e-5) and ratio > 2


def test_settings_of_mars_and_training_arguments_never_contradict():
    """MARS refuses two values of one setting: a baseline's settings replace those of the script, too."""
    both = plan("mars_adamw:weight_decay=0.3,beta1=0.8", "adamw_torch")
    found = arguments_of_arm(both.baseline, both, 1, None, None)
    assert (found["weight_decay"], found["adam_beta1"]) == (0.3, 0.8) and "adam_beta2" not in found
    for name in ("learning_rate", "optim_args"):
        with pytest.raises(ValueError, match=f"arm a: the comparison sets {name} itself"):
            Plan([Arm("a", {name: 1}), Arm("b")]).check()
    with pytest.raises(ValueError, match="arm a: the comparison sets weight_decay itself"):
        Plan([Arm("a", {"optim": "muon", "weight_decay": 0.1}), Arm("b")]).check()


def test_values_of_settings():
    pairs = ["a=1e-3", "b=true", "c=False", "d=None", "e=no", 'f={"x": 1}']
    assert [setting(pair)[1] for pair in pairs] == [1e-3, True, False, None, "no", {"x": 1}]


def test_command_line_overrides_a_plan(tmp_path):
    """As with --set; flags of an arm, which make it another than the others, stay. Braces are no trouble."""
    arms = [Arm("a", arguments={"b": 1, "lr_1d": "{twice}", "c": '{"x": {rate}}'}, first=[0.01]), Arm("b")]
    template = Order("train.py", arguments=["--steps=3", "--b", "2"])
    run = Comparison(Plan(arms, arguments={"steps": 9, "size": 4}), template, tmp_path).first
    words = ["--steps=3", "--b", "2", "--size", "4", "--b", "1", "--lr_1d", "0.02", "--c", '{"x": 0.01}']
    assert run.order.arguments == words


def test_rates_in_flags_need_a_first_rate():
    """Only the first run tells the script's own rate, and would have `nan` in its flags."""
    flags = {"lr_1d": "{twice}"}
    unknown, known = Arm("a"), Arm("a", first=[0.01])
    for plan in (
        Plan([replace(unknown, arguments=flags), Arm("b")]),
        Plan([unknown, Arm("b")], arguments=flags),
        Plan([unknown, Arm("b")], further={"name": "{rate}"}),
    ):
        with pytest.raises(ValueError, match=r"{(rate|twice)}': give arm a a `first`, the rate it begins at"):
            plan.check()
        replace(plan, arms=[replace(plan.arms[0], first=known.first), Arm("b")]).check()
    Plan([unknown, Arm("b", arguments=flags)]).check()  # its rate follows from the baseline's best


@pytest.mark.parametrize("name", ["alone", "pack.inner", "pack"])
def test_edits_of_a_module_are_seen(tmp_path, monkeypatch, name):
    """A package stands for its __main__."""
    (tmp_path / "pack").mkdir()
    paths = {"alone": "alone.py", "pack.inner": "pack/inner.py", "pack": "pack/__main__.py"}
    for path in (*paths.values(), "pack/__init__.py"):
        (tmp_path / path).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    order = command._template(command.parser().parse_args(["-m", name]), [])
    assert order.is_of_this_text and name not in set(sys.modules) - {"pack"}
    (tmp_path / "pack" / "__init__.py").write_text("1")
    assert order.is_of_this_text
    (tmp_path / paths[name]).write_text("1")
    assert not order.is_of_this_text


def test_words_of_a_command_line():
    settings = {"a": 0.1, "b": True, "c": {"x": 1}, "d": 1 / 3, "e": "text"}
    assert words(settings) == ["--a", "0.1", "--b", "true", "--c", '{"x": 1}', "--d", repr(1 / 3), "--e", "text"]


def training(*evaluations, losses=(), **arguments):
    return {"evaluations": list(evaluations), "losses": list(losses), "arguments": arguments}


def test_metric_found_in_evaluations():
    seen = {"step": 5, "eval_f1": 0.5, "eval_loss": 2.0, "eval_b_loss": 1.0}
    assert find_metric(training(seen), None, False) == (
        Metric("eval_loss"),
        "metric: eval_loss, the last of each run (--metric: eval_f1, eval_b_loss)",
    )
    own = training(seen, metric_for_best_model="f1", greater_is_better=True, load_best_model_at_end=True)
    assert find_metric(own, None, False)[0] == Metric("eval_f1", greater_is_better=True, best=True)
    assert find_metric(own, "b_loss", False)[0] == Metric("eval_b_loss", best=True)
    assert find_metric(own, "f1", False)[0] == Metric("eval_f1", greater_is_better=True, best=True)
    only = training({"step": 5, "eval_f1": 0.5}, losses=[3.0, 2.0])
    metric, line = find_metric(only, None, False)
    assert metric.name == "loss" and "THE TRAINING LOSS, because its evaluations have no loss" in line
    assert "--metric eval_f1" in line


def test_values_and_curves_of_a_metric():
    row = training({"step": 5, "eval_loss": 2.0}, {"step": 9, "eval_loss": 3.0}, {"step": 10, "eval_f1": 1.0})
    assert Metric("eval_loss").value(row) == 3.0 and Metric("eval_loss", best=True).value(row) == 2.0
    assert Metric("eval_loss", greater_is_better=True, best=True).value(row) == 3.0
    assert Metric("eval_f1").curve(row) == [(10, 1.0)] and Metric("eval_x").value(row) is None
    diverged = training({"step": 5, "eval_loss": None})
    assert math.isnan(Metric("eval_loss").value(diverged))
    row = training(losses=[float(step) for step in range(1, 41)])
    assert Metric("loss").value(row) == 38.5 and Metric("loss").curve(row)[:2] == [(2, 1.5), (4, 3.5)]


def test_script_read_from_its_first_run():
    arguments = {"learning_rate": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.9, "weight_decay": 0.2}
    row = {"arguments": arguments, "width": 32}
    assert Script.of_training(row) == Script(1e-3, (0.8, 0.9), 0.2, 32)
    assert Script.of_training(row, 5e-5).learning_rate == 5e-5  # of a run at another rate than the script's


def test_slots_share_a_machine(monkeypatch):
    """Each job has its GPUs, its share of the cores, and a port of its own; runs that share a device have no speeds."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    pair = Work(None, jobs=2, gpus=["0,1", "2,3"])
    found = [pair.environment(slot) for slot in range(2)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["0,1", "2,3"] and not pair.share_a_device
    assert {one["OMP_NUM_THREADS"] for one in found} == {"4"} and all(int(one["MASTER_PORT"]) > 0 for one in found)
    assert Work(None, jobs=2).share_a_device and Work(None, jobs=3, gpus=["0", "1"]).share_a_device
    assert Work(None).environment(0) == {} and not Work(None).share_a_device


def test_arms_have_folders_of_their_own(tmp_path):
    """Names that differ in punctuation alone, too; a name is never a path."""
    names = ["muon a", "muon_a", "muon-a", "muon/a", "muon: a", "../muon", "muon:gamma=0.1,beta1=0.9"]
    comparison = Comparison(Plan([Arm(name) for name in names]), Order("train.py"), tmp_path)
    folders = {comparison.run(arm, (0,), 1).folder.parent for arm in comparison.plan.arms}
    assert len(folders) == len(names) and {folder.parent for folder in folders} == {tmp_path / "runs"}


def test_grids_and_plans_without_a_search(tmp_path):
    """A grid runs all its rates with all search seeds; without search seeds the first rates are taken."""
    arms = [Arm(name, first=[1e-3]) for name in "ab"]
    grid = Comparison(Plan(arms, grid=[-2, 0, 2], search_seeds=[8, 9]), Order("train.py"), tmp_path)
    assert count_runs(grid.plan) == (2 * (3 * 2 + 3),) * 2
    grid.metric = Metric("eval_loss")  # as after the first run
    grid.refresh()
    assert {(rate(run), run.seed) for run in grid.missing()} == {(r, s) for r in (2.5e-4, 1e-3, 4e-3) for s in (8, 9)}
    given = Comparison(Plan(arms, search_seeds=[]), Order("train.py"), tmp_path)
    assert count_runs(given.plan) == (6, 6)
    given.metric = Metric("eval_loss")
    given.refresh()
    found = {(run.arm, rate(run), run.seed) for run in given.missing()}
    assert found == {(arm, 1e-3, seed) for arm in "ab" for seed in (1, 2, 3)}


def test_other_settings_are_told_where_they_differ(tmp_path):
    """Also far behind in a long list of arguments."""
    words = [f"--setting_{number}={number}" for number in range(40)]
    run = Run("a", 1, Order("train.py", arguments=[*words, "--lora_r", "16"], folder=str(tmp_path)))
    other = {"state": "complete", "order": replace(run.order, arguments=[*words, "--lora_r", "8"]).what_trains()}
    (tmp_path / "result.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r'"--lora_r", "8"\], now .*"--lora_r", "16"\]\): give another --output_dir'):
        run.is_finished  # noqa: B018


def test_comparison_of_a_new_folder_starts_with_the_baseline(tmp_path):
    """From least to most runs: four arms, three rates or more, two further seeds for three, three new seeds."""
    arms = plan("adamw_torch", "mars_adamw", "mars_m", "muon")
    comparison = Comparison(arms, Order("train.py", arguments=["--a", "1"]), tmp_path)
    (run,) = comparison.missing()
    assert (run.arm, run.seed, run.name) == ("adamw_torch", 42, "adamw_torch, the script's own rate, seed 42")
    assert run.order.shared == {"seed": 42, "data_seed": 42} and not run.order.with_mars
    assert run.command[1:] == ["-m", "mars_hf.compare.child", "train.py", "--a", "1"]
    assert count_runs(comparison.plan) == (4 * (3 + 6 + 3), 4 * (6 + 8 + 3))
    pair = replace(comparison.plan, rates=("learning_rate", "lr_embeddings"))
    assert count_runs(pair)[0] == 4 * (9 + 18 + 3)  # around the best of two rates are eight others
    assert Order(**json.loads(run.order.text())) == replace(run.order, launcher=[])
