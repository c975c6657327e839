"""The searches of learning rates, and their shipped results: recipes, presets and pages have the best ones."""

from __future__ import annotations

import importlib
import json
import math
import statistics

import finetune_lm
import pytest
import tune
from PIL import Image
from pretraining.compare import launch, presets
from pretraining.run import arguments
from tune import Search

RESULTS = {name: json.loads(Search(name).file.read_text()) for name in tune.SEARCHES}
ARMS = [(name, arm) for name in tune.SEARCHES for arm in Search(name).arms]


def losses_of(name: str) -> dict[str, tune.Losses]:
    return Search(name).losses(RESULTS[name]["runs"])


def follow(name: str, arm: str, loss) -> list[tuple[tune.Rates, int]]:
    """Return the runs of a search in which `loss` gives the loss of rates."""
    search, rows = Search(name), []

    def run(arm, rates, seed):
        parts = arm.split() if len(search.columns) > 1 else [arm]
        row = dict(zip(search.columns, parts, strict=True)) | dict(zip(search.rates, rates, strict=True))
        rows.append({**row, "seed": seed, "eval_loss": loss(rates)})

    tune.work_on(search, arm, rows, run)
    runs = [(search.rates_of(row), row["seed"]) for row in rows]
    assert len(set(runs)) == len(runs)  # nothing is repeated
    return runs


@pytest.mark.parametrize(
    ("diverges_from", "searched"),
    [
        (8e-3, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3]),
        (2e-3, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]),  # the first rate is one of those
    ],
)
def test_search_of_one_rate(diverges_from, searched):
    """It ends with a best rate between worse ones, and goes on with the further seeds there."""

    def loss(rates):
        return math.log2(rates[0] / 5e-4) ** 2 if rates[0] < diverges_from else None

    runs = follow("finetuning", "mars_adamw full adamw_torch", loss)
    assert sorted(rates[0] for rates, seed in runs if seed == 100) == searched
    assert [run for run in runs if run[1] != 100] == [((5e-4,), 1), ((5e-4,), 2)]
    runs = follow("finetuning", "mars_adamw lora mars_m", loss)
    assert {seed for _, seed in runs} == {100}


@pytest.mark.parametrize("center", [(2.4, 4.2), (5.2, 3.1), (0.2, 7.3), (3.0, 4.0)])
def test_search_of_two_rates(center):
    places = []

    def loss(rates):
        places.append(tuple(math.log2(rate / 1e-3) for rate in rates))
        return sum((place - middle) ** 2 for place, middle in zip(places[-1], center, strict=True))

    runs = follow("controls", "adamw", loss)
    best = (round(center[0]), round(center[1]))
    around = {(best[0] + one, best[1] + other) for one in (-1, 0, 1) for other in (-1, 0, 1)}
    assert around <= {tuple(map(round, place)) for place in places} and len(runs) < 25


def test_search_follows_a_ridge():
    """Each rate alone is best where it is, and both together are better doubled."""

    def loss(rates):
        one, other = (math.log2(rate / 1e-3) for rate in rates)
        return 9 * (one - other + 4) ** 2 + (one + other - 10) ** 2

    assert ((0.008, 0.128), 100) in follow("controls", "adamw", loss)


def test_search_that_diverges_goes_down():
    runs = follow(
        "controls", "adamw", lambda rates: None if max(rates) > 6e-4 else abs(math.log2(rates[0] / 6.25e-5)) - rates[1]
    )
    assert runs[:6][-1] == ((6.25e-5, 5e-4), 100) and len(runs) < 25


def test_best_counts_rates_with_all_seeds_only():
    losses = {(1e-3,): {1: 5.0, 2: 4.0}, (2e-3,): {1: 4.0, 2: 4.5}, (4e-3,): {1: 4.1}}
    assert tune.best(losses) == (2e-3,)
    assert tune.best({(1e-3,): {1: math.nan}, (2e-3,): {1: 5.0}}) == (2e-3,)


@pytest.mark.parametrize(("name", "arm"), ARMS, ids=" ".join)
def test_shipped_searches_ended(name, arm):
    losses = losses_of(name)[arm]
    assert Search(name).wanted(arm, losses) is None
    if "grid" not in Search(name).arms[arm]:  # and the best rates stand between others
        searched = [rates for rates, by_seed in losses.items() if Search(name).seed in by_seed]
        for rates, others in zip(tune.best(losses), zip(*searched, strict=True), strict=True):
            assert min(others) < rates < max(others)


def test_every_shipped_run_is_of_an_arm():
    for name in ("controls", "embedded", "tasks"):
        search = Search(name)
        assert {search.arm_of(row) for row in RESULTS[name]["runs"]} == set(search.arms)
    shipped = {Search("bases").arm_of(row) for row in RESULTS["bases"]["runs"]}
    assert shipped == {*Search("bases").arms, *Search("finetuning").arms}


@pytest.mark.parametrize(("name", "arm"), [pair for pair in ARMS if pair[0] in ("controls", "embedded")], ids=" ".join)
def test_arms_are_runs_of_the_recipe(name, arm):
    search = Search(name)
    rates, by_seed = next(iter(losses_of(name)[arm].items()))
    values = launch.settings_of(search.argv(arm, rates, next(iter(by_seed))))
    assert [float(values[rate]) for rate in search.rates] == list(rates)
    if name == "embedded":  # one rate for all matrices, embeddings included, or lr_1d for embeddings and vectors
        lr_1d = values["lr_1d"] if "lr_1d" in arm else rates[0]
        assert float(values["lr_embeddings"]) == float(lr_1d)
        assert (values["gamma"] is None) == arm.startswith("adamw")


def test_settings_follow_the_rate():
    search = Search("finetuning")
    argv = search.argv("mars_adamw full mars_shampoo", (8e-3,), 1)
    assert argv[argv.index("--optim_args") + 1] == "beta1=0.95,lr_1d=0.001"
    assert argv[-4:] == ["--learning_rate", "0.008", "--seed", "1"]
    assert (tune.ROOT / "recipes" / "finetune_lm.py").is_file()


def test_preset_has_the_best_rates():
    for arm, settings in presets.load("controls").arms.items():
        rates = tune.best(losses_of("controls")[arm])
        assert (settings["learning_rate"], settings["lr_embeddings"]) == rates, arm


DEFAULTS = {"mars_adamw": "mars_adamw, gamma 1 - beta1", "mars_m": "mars_m, gamma 1 - beta1"}


@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "muon", "mars_adamw", "mars_m"])
def test_default_job_has_the_best_settings_of_controls(optimizer):
    losses, arms = losses_of("controls"), presets.load("controls").arms
    lowest = {
        arm: losses[arm][tune.best(losses[arm])][100]
        for arm, settings in arms.items()
        if settings["optimizer"] == optimizer and settings.get("is_approx") is not False
    }
    arm = min(lowest, key=lambda arm: lowest[arm])
    assert arm == DEFAULTS.get(optimizer, optimizer)
    run, tuned = (
        arguments.parse([*argv, "--output_dir", "out"])
        for argv in (["--optimizer", optimizer], presets.load("controls").argv(arm))
    )
    assert run.optimizer == tuned.optimizer
    assert run.training.learning_rate == tuned.training.learning_rate
    assert run.training.weight_decay == tuned.training.weight_decay


@pytest.mark.parametrize("optimizer", ["mars_lion", "mars_shampoo"])
def test_default_job_has_the_best_settings_of_the_sweeps(optimizer):
    search, losses = Search("embedded"), losses_of("embedded")
    arms = [arm for arm in losses if search.arms[arm]["settings"]["optimizer"] == optimizer]
    means = {arm: losses[arm][tune.best(losses[arm])] for arm in arms}
    seeds = max(map(len, means.values()))
    arm = min((arm for arm in arms if len(means[arm]) == seeds), key=lambda arm: statistics.fmean(means[arm].values()))
    rate = tune.best(losses[arm])[0]
    chosen = arguments.parse(["--optimizer", optimizer, "--output_dir", "out"])
    assert chosen.training.learning_rate == pytest.approx(rate)
    for name, value in search.arms[arm]["settings"].items():
        if name not in ("optimizer", "gamma", "lr_embeddings"):  # gamma is the class's
            assert float(getattr(chosen.optimizer, name)) == value


@pytest.mark.parametrize("recipe", ["finetune_vit", "sft_lora"])
def test_recipes_start_from_the_best_rates(recipe):
    starts_from_the_best("tasks", {f"{recipe} {optim}": start for optim, start in start_of(recipe).items()})


@pytest.mark.parametrize(("arm", "optimizer"), [("mars_m",) * 2, ("mars_adamw",) * 2, ("adamw_torch", "adamw")])
def test_llama_starts_from_the_best_rates(arm, optimizer):
    run = arguments.parse(["--config", "llama", "--optimizer", optimizer])
    assert (run.training.learning_rate,) == tune.best(losses_of("tasks")[f"pretrain_llama {arm}"])


@pytest.mark.parametrize(("mode", "use_peft"), [("full", False), ("lora", True)])
def test_finetuning_starts_from_the_best_rates(mode, use_peft):
    starts = finetune_lm.STARTS[use_peft]
    starts_from_the_best("finetuning", {f"mars_adamw {mode} {optim}": start for optim, start in starts.items()})


def start_of(recipe: str) -> dict:
    return importlib.import_module(recipe).STARTS


def starts_from_the_best(name: str, starts: dict) -> None:
    search = Search(name)
    assert len(starts) >= 3
    for arm, start in starts.items():
        rates = tune.best(losses_of(name)[arm])
        argv = search.argv(arm, rates, 1)
        assert (start.learning_rate,) == rates, arm
        assert start.optim_args == (argv[argv.index("--optim_args") + 1] if "--optim_args" in argv else None), arm


def test_bases_are_those_of_the_result():
    saved = {base: own["settings"] for base, own in RESULTS["bases"]["bases"].items()}
    assert saved == tune.SEARCHES["finetuning"]["bases"] | tune.SEARCHES["bases"]["bases"]
    searched = presets.words(saved["mars_adamw"])
    mine, theirs = (arguments.parse([*argv, "--output_dir", "x"]) for argv in (finetune_lm._BASE_SETTINGS, searched))
    assert mine.optimizer == theirs.optimizer and mine.model == theirs.model
    assert mine.training.learning_rate == theirs.training.learning_rate


def test_page_shows_the_searches_and_the_bases():
    page = (tune.ROOT / "docs" / "finetuning.md").read_text()
    rows = Search("finetuning").report(RESULTS["finetuning"]["runs"]).splitlines()[2:]
    assert len(rows) == 10 and all(row.replace("| mars_adamw | ", "| ", 1) in page for row in rows)
    for base in ("mars_adamw", "adamw", "muon"):
        cells = [f"{RESULTS['bases']['bases'][base]['eval_loss']:.3f}"]
        for optim in ("adamw_torch", "mars_adamw", "mars_m"):
            runs = [row for row in RESULTS["bases"]["runs"] if (row["base"], row["optim"]) == (base, optim)]
            runs = [row for row in runs if row["mode"] == "full" and row["seed"] in (1, 2)]
            new, old = ([row[key] for row in runs] for key in ("eval_loss", "pretraining_loss"))
            cells.append(
                f"{statistics.mean(new):.3f} ± {statistics.stdev(new):.3f} (old text {statistics.mean(old):.3f})"
            )
        assert f"| {base} | {' | '.join(cells)} |" in page


def test_report_marks_the_best_rate():
    table = Search("tasks").report(RESULTS["tasks"]["runs"])
    assert len(table.splitlines()) == 2 + 9
    assert all(line.count("**") == 2 for line in table.splitlines()[2:]) and "not ended" not in table
    diverged = {"recipe": "sft_lora", "optim": "mars_m", "learning_rate": 4e-3, "seed": 42, "eval_loss": None}
    assert "**0.004: diverged** (the search has not ended)" in Search("tasks").report([diverged])


@pytest.mark.parametrize("name", [name for name, spec in tune.SEARCHES.items() if "panel" in spec])
@pytest.mark.parametrize("share", [1, 20])
def test_pictures(tmp_path, name, share):
    Search(name).draw(RESULTS[name]["runs"][::share], tmp_path / "rates.png")
    with Image.open(tmp_path / "rates.png") as picture:
        picture.verify()


def test_command_runs_what_is_missing(tmp_path, monkeypatch, capsys):
    """One run is gone; the command makes it again in the recipe's own process and adds it to the result."""
    file = tmp_path / "tune_tasks.json"
    key = ("sft_lora", "mars_m", 0.032)
    gone = next(row for row in RESULTS["tasks"]["runs"] if (row["recipe"], row["optim"], row["learning_rate"]) == key)
    file.write_text(json.dumps({"machine": {}, "runs": [row for row in RESULTS["tasks"]["runs"] if row != gone]}))
    started = []

    def run_recipe(argv, output, script):
        started.append((script.name, argv))
        return {"eval_loss": gone["eval_loss"], "steps": gone["steps"], "seed": 42}

    monkeypatch.setattr(launch, "run_recipe", run_recipe)
    monkeypatch.setattr(tune, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir()
    file.rename(tmp_path / "benchmarks" / "results" / file.name)
    tune.main(["tasks", "--bf16", "true"])
    ((script, argv),) = started
    assert script == "sft_lora.py" and argv[-2:] == ["--bf16", "true"]
    assert argv[argv.index("--learning_rate") + 1] == f"{gone['learning_rate']:g}"
    result = json.loads((tmp_path / "benchmarks" / "results" / file.name).read_text())
    assert {**gone, **result["runs"][-1]}.keys() >= gone.keys() and result["runs"][-1]["eval_loss"] == gone["eval_loss"]
    assert len(result["runs"]) == len(RESULTS["tasks"]["runs"]) and len(result["further_machines"]) == 1
    assert "not ended" not in capsys.readouterr().out
