"""The searches of learning rates, and their shipped results: recipes, presets and pages have the best ones."""

from __future__ import annotations

import json
import math
import statistics

import finetune_lm
import finetune_vit
import pytest
import sft_lora
import tune
from PIL import Image
from pretraining.compare import launch, presets
from pretraining.run import arguments
from tune import Search

RESULTS = {name: json.loads(Search(name).file.read_text()) for name in tune.SEARCHES}
LOSSES = {name: Search(name).losses(RESULTS[name]["runs"]) for name in tune.SEARCHES}
ARMS = [(name, arm) for name in tune.SEARCHES for arm in Search(name).arms]

# --- searches --------------------------------------------------------------------------------------------------------


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
    assert {seed for _, seed in follow("finetuning", "mars_adamw lora mars_m", loss)} == {100}


@pytest.mark.parametrize("center", [(2.4, 4.2), (5.2, 3.1), (0.2, 7.3), (3.0, 4.0)])
def test_search_of_two_rates(center):
    def places(rates):
        return [math.log2(rate / 1e-3) for rate in rates]

    def loss(rates):
        return sum((place - middle) ** 2 for place, middle in zip(places(rates), center, strict=True))

    runs = follow("controls", "adamw", loss)
    best = (round(center[0]), round(center[1]))
    around = {(best[0] + one, best[1] + other) for one in (-1, 0, 1) for other in (-1, 0, 1)}
    assert around <= {tuple(map(round, places(rates))) for rates, _ in runs} and len(runs) < 25

    def ridge(rates):  # each rate alone is best where it is, and both together are better doubled
        one, other = places(rates)
        return 9 * (one - other + 4) ** 2 + (one + other - 10) ** 2

    assert ((0.008, 0.128), 100) in follow("controls", "adamw", ridge)


def test_search_that_diverges_goes_down():
    def loss(rates):
        return None if max(rates) > 6e-4 else abs(math.log2(rates[0] / 6.25e-5)) - rates[1]

    runs = follow("controls", "adamw", loss)
    assert runs[5] == ((6.25e-5, 5e-4), 100) and len(runs) < 25


def test_best_rates_and_settings_of_a_run():
    """Rates with all seeds count; settings follow the rate; a report marks the best one."""
    losses = {(1e-3,): {1: 5.0, 2: 4.0}, (2e-3,): {1: 4.0, 2: 4.5}, (4e-3,): {1: 4.1}}
    assert tune.best(losses) == tune.best({(1e-3,): {1: math.nan}, (2e-3,): {1: 5.0}}) == (2e-3,)
    argv = Search("finetuning").argv("mars_adamw full mars_shampoo", (8e-3,), 1)
    assert argv[argv.index("--optim_args") + 1] == "beta1=0.95,lr_1d=0.001"
    assert argv[-4:] == ["--learning_rate", "0.008", "--seed", "1"]
    lines = Search("tasks").report(RESULTS["tasks"]["runs"]).splitlines()[2:]
    assert len(lines) == 9 and all(line.count("**") == 2 and "not ended" not in line for line in lines)
    diverged = {"recipe": "sft_lora", "optim": "mars_m", "learning_rate": 4e-3, "seed": 42, "eval_loss": None}
    assert "**0.004: diverged** (the search has not ended)" in Search("tasks").report([diverged])


@pytest.mark.parametrize("name", [name for name, spec in tune.SEARCHES.items() if "panel" in spec])
def test_pictures(tmp_path, name):
    Search(name).draw(RESULTS[name]["runs"][::20], tmp_path / "rates.png")
    with Image.open(tmp_path / "rates.png") as picture:
        picture.verify()


def test_command_runs_what_is_missing(tmp_path, monkeypatch, capsys):
    """One run is gone; the command makes it again in the recipe's own process and adds it to the result."""
    key, runs, started = ("sft_lora", "mars_m", 0.032), RESULTS["tasks"]["runs"], []
    gone = next(row for row in runs if (row["recipe"], row["optim"], row["learning_rate"]) == key)
    file = tmp_path / "benchmarks" / "results" / "tune_tasks.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"machine": {}, "runs": [row for row in runs if row != gone]}))

    def run_recipe(argv, output, script):
        started.append((script.name, argv))
        return {"eval_loss": gone["eval_loss"], "steps": gone["steps"], "seed": 42}

    monkeypatch.setattr(launch, "run_recipe", run_recipe)
    monkeypatch.setattr(tune, "ROOT", tmp_path)
    tune.main(["tasks", "--bf16", "true"])
    ((script, argv),) = started
    assert script == "sft_lora.py" and argv[-2:] == ["--bf16", "true"]
    assert argv[argv.index("--learning_rate") + 1] == "0.032"
    result = json.loads(file.read_text())
    assert (
        result["runs"][-1]["eval_loss"] == gone["eval_loss"]
        and result["runs"][-1].items() <= {**gone, "argv": argv}.items()
    )
    assert len(result["runs"]) == len(runs) and len(result["further_machines"]) == 1
    assert "not ended" not in capsys.readouterr().out


# --- shipped results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arm"), ARMS, ids=" ".join)
def test_shipped_searches_ended(name, arm):
    """With arms that are runs of the recipe, and the best rates between others."""
    search, losses = Search(name), LOSSES[name][arm]
    assert search.wanted(arm, losses) is None
    if "grid" not in search.arms[arm]:
        searched = [rates for rates, by_seed in losses.items() if search.seed in by_seed]
        for rates, others in zip(tune.best(losses), zip(*searched, strict=True), strict=True):
            assert min(others) < rates < max(others)
    if name in ("controls", "embedded"):
        rates, by_seed = next(iter(losses.items()))
        values = launch.settings_of(search.argv(arm, rates, next(iter(by_seed))))
        assert [float(values[rate]) for rate in search.rates] == list(rates)
    if name == "embedded":  # one rate for all matrices, embeddings included, or lr_1d for embeddings and vectors
        assert float(values["lr_embeddings"]) == float(values["lr_1d"] if "lr_1d" in arm else rates[0])
        assert (values["gamma"] is None) == arm.startswith("adamw")


def test_every_shipped_run_is_of_an_arm():
    for name in ("controls", "embedded", "tasks", "bases"):
        arms = {*Search(name).arms, *(Search("finetuning").arms if name == "bases" else ())}
        assert {Search(name).arm_of(row) for row in RESULTS[name]["runs"]} == arms


@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "muon", "mars_adamw", "mars_m"])
def test_default_job_has_the_best_settings_of_controls(optimizer):
    losses, preset = LOSSES["controls"], presets.load("controls")
    for name, settings in preset.arms.items():
        assert (settings["learning_rate"], settings["lr_embeddings"]) == tune.best(losses[name]), name
    lowest = {
        arm: losses[arm][tune.best(losses[arm])][100]
        for arm, settings in preset.arms.items()
        if settings["optimizer"] == optimizer and settings.get("is_approx") is not False
    }
    arm = min(lowest, key=lambda arm: lowest[arm])
    assert arm == (f"{optimizer}, gamma 1 - beta1" if "mars" in optimizer else optimizer)
    run, tuned = (
        arguments.parse([*argv, "--output_dir", "out"])
        for argv in (["--optimizer", optimizer], presets.words(preset.arms[arm]))
    )
    assert run.optimizer == tuned.optimizer
    assert run.training.learning_rate == tuned.training.learning_rate
    assert run.training.weight_decay == tuned.training.weight_decay


@pytest.mark.parametrize("optimizer", ["mars_lion", "mars_shampoo"])
def test_default_job_has_the_best_settings_of_the_sweeps(optimizer):
    search, losses = Search("embedded"), LOSSES["embedded"]
    arms = [arm for arm in losses if search.arms[arm]["settings"]["optimizer"] == optimizer]
    by_seed = {arm: losses[arm][tune.best(losses[arm])] for arm in arms}
    most = max(map(len, by_seed.values()))
    means = {arm: statistics.fmean(own.values()) for arm, own in by_seed.items() if len(own) == most}
    arm = min(means, key=lambda arm: means[arm])
    chosen = arguments.parse(["--optimizer", optimizer, "--output_dir", "out"])
    assert chosen.training.learning_rate == pytest.approx(tune.best(losses[arm])[0])
    for name, value in search.arms[arm]["settings"].items():
        if name not in ("optimizer", "gamma", "lr_embeddings"):  # gamma is the class's
            assert float(getattr(chosen.optimizer, name)) == value


@pytest.mark.parametrize(
    ("search", "arms", "starts"),
    [
        ("tasks", "finetune_vit", finetune_vit.STARTS),
        ("tasks", "sft_lora", sft_lora.STARTS),
        ("finetuning", "mars_adamw full", finetune_lm.STARTS[False]),
        ("finetuning", "mars_adamw lora", finetune_lm.STARTS[True]),
    ],
    ids=["vit", "instructions", "full", "lora"],
)
def test_recipes_start_from_the_best_rates(search, arms, starts):
    assert len(starts) >= 3
    for optim, start in starts.items():
        rates = tune.best(LOSSES[search][f"{arms} {optim}"])
        argv = Search(search).argv(f"{arms} {optim}", rates, 1)
        optim_args = argv[argv.index("--optim_args") + 1] if "--optim_args" in argv else None
        assert (start.learning_rate, start.optim_args) == (*rates, optim_args), optim


def test_llama_starts_from_the_best_rates():
    for arm, optimizer in (("mars_m", "mars_m"), ("mars_adamw", "mars_adamw"), ("adamw_torch", "adamw")):
        run = arguments.parse(["--config", "llama", "--optimizer", optimizer])
        assert (run.training.learning_rate,) == tune.best(LOSSES["tasks"][f"pretrain_llama {arm}"])


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
            key = {"base": base, "mode": "full", "optim": optim}.items()
            runs = [row for row in RESULTS["bases"]["runs"] if key <= row.items() and row["seed"] in (1, 2)]
            new, old = ([row[key] for row in runs] for key in ("eval_loss", "pretraining_loss"))
            deviation = f"{statistics.mean(new):.3f} ± {statistics.stdev(new):.3f}"
            cells.append(f"{deviation} (old text {statistics.mean(old):.3f})")
        assert f"| {base} | {' | '.join(cells)} |" in page
