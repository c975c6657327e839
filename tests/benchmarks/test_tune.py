"""The searches of learning rates, and their shipped results: recipes, presets and pages have the best ones."""

from __future__ import annotations

import json
import math
import statistics
from unittest import mock

import pytest
import tune
from pretraining.compare import launch, presets
from pretraining.run import arguments
from tune import Search

SHIPPED = [name for name in tune.SEARCHES if Search(name).file.is_file()]
RESULTS = {name: json.loads(Search(name).file.read_text()) for name in SHIPPED}
LOSSES = {name: Search(name).losses(RESULTS[name]["runs"]) for name in SHIPPED}

# It takes many hours: the file has the arms that have ended.
UNFINISHED = {"smollm2"}

# --- searches --------------------------------------------------------------------------------------------------------


def parse(argv):
    return arguments.parse([*argv, "--output_dir", "out"])


def follow(name: str, arm: str, loss) -> list[tuple[tune.Rates, int]]:
    """Return the runs of a search in which `loss` gives the loss of rates."""
    search, losses, runs = Search(name), {}, []
    while point := search.wanted(arm, losses):
        assert point not in runs  # nothing is repeated
        runs.append(point)
        losses.setdefault(point[0], {})[point[1]] = loss(point[0])
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
        return math.log2(rates[0] / 5e-4) ** 2 if rates[0] < diverges_from else math.nan

    runs = follow("finetuning", "mars_adamw full adamw_torch", loss)
    assert sorted(rates[0] for rates, seed in runs if seed == 100) == searched
    assert [run for run in runs if run[1] != 100] == [((5e-4,), 1), ((5e-4,), 2)]
    assert {seed for _, seed in follow("finetuning", "mars_adamw lora mars_m", loss)} == {100}


def places(rates):
    return [math.log2(rate / 1e-3) for rate in rates]


@pytest.mark.parametrize("center", [(2.4, 4.2), (5.2, 3.1), (0.2, 7.3), (3.0, 4.0)])
def test_search_of_two_rates(center):
    """It tries every point around the best one: both rates may be better doubled together than alone."""
    runs = follow("controls", "adamw", lambda rates: math.dist(places(rates), center))
    around = {(round(center[0]) + one, round(center[1]) + other) for one in (-1, 0, 1) for other in (-1, 0, 1)}
    assert around <= {tuple(map(round, places(rates))) for rates, _ in runs} and len(runs) < 25


def test_search_that_diverges_goes_down():
    def loss(rates):
        return math.nan if max(rates) > 6e-4 else abs(math.log2(rates[0] / 6.25e-5)) - rates[1]

    runs = follow("controls", "adamw", loss)
    assert runs[5] == ((6.25e-5, 5e-4), 100) and len(runs) < 25


def test_best_rates_and_settings_of_a_run():
    """Rates with all seeds count; settings follow the rate; a report marks the best one."""
    losses = {(1e-3,): {1: 5.0, 2: 4.0}, (2e-3,): {1: 4.0, 2: 4.5}, (4e-3,): {1: 4.1}}
    assert tune.best(losses) == tune.best({(1e-3,): {1: math.nan}, (2e-3,): {1: 5.0}}) == (2e-3,)
    argv = Search("finetuning").argv("mars_adamw full mars_shampoo", (8e-3,), 1)
    assert argv[argv.index("--optim_args") + 1] == "beta1=0.95,lr_1d=0.001"
    assert argv[-4:] == ["--learning_rate", "0.008", "--seed", "1"]
    of_search, of_seed = (Search("betas").argv("adamw 0.8", (2e-3,), seed) for seed in (100, 1))
    assert of_seed[of_seed.index("--eval_steps") + 1] == "50" and "--eval_steps" not in of_search
    diverged = {"recipe": "pretrain_llama", "optim": "mars_m", "learning_rate": 4e-3, "seed": 42, "eval_loss": None}
    assert "**0.004: diverged** (the search has not ended)" in Search("tasks").report([diverged])


def test_command_runs_what_is_missing(tmp_path, monkeypatch, capsys):
    """One run is gone; the command makes it again in the recipe's own process and adds it to the result."""
    search, runs = Search("finetuning"), RESULTS["finetuning"]["runs"]
    gone = next(row for row in runs if search.arm_of(row) == "mars_adamw full mars_m" and row["seed"] == 2)
    file = tmp_path / search.file.relative_to(tune.ROOT)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"machine": {}, "runs": [row for row in runs if row != gone]}))
    train = mock.Mock(return_value={key: gone[key] for key in ("eval_loss", "steps")})
    monkeypatch.setattr(launch, "run_recipe", train)
    monkeypatch.setattr(tune, "make_base", lambda search, name: name)
    monkeypatch.setattr(tune, "ROOT", tmp_path)
    tune.main(["finetuning", "--tf32", "false"])
    (argv, _), script = train.call_args.args, train.call_args.kwargs["script"]
    assert train.call_count == 1 and script.name == "finetune.py" and argv[-2:] == ["--tf32", "false"]
    assert argv[argv.index("--learning_rate") + 1] == "0.016"
    result = json.loads(file.read_text())
    assert {**gone, "argv": argv}.items() >= result["runs"][-1].items() >= {"eval_loss": gone["eval_loss"]}.items()
    assert len(result["runs"]) == len(runs) and len(result["further_machines"]) == 1
    assert "not ended" not in capsys.readouterr().out


# --- shipped results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_searches_ended(name):
    """With runs of the search's arms, which the recipe takes, and with the best rates between others.

    The preset of the controls has the best rates.
    """
    search = Search(name)
    others = tune.SEARCHES if name in ("finetuning", "bases") else [name]  # which share a file
    known = {arm for other in others for arm in Search(other).arms}
    assert set(LOSSES[name]) <= set(search.arms) and set(map(search.arm_of, RESULTS[name]["runs"])) <= known
    assert name in UNFINISHED or set(LOSSES[name]) == set(search.arms)
    for arm, losses in LOSSES[name].items():
        assert search.wanted(arm, losses) is None, arm
        if "grid" not in search.arms[arm]:
            searched = [rates for rates, by_seed in losses.items() if search.seed in by_seed]
            for best, rates in zip(tune.best(losses), zip(*searched, strict=True), strict=True):
                assert min(rates) < best < max(rates), arm
        if name == "controls":
            own = search.arms[arm]["settings"]
            assert (own["learning_rate"], own["lr_embeddings"]) == tune.best(losses), arm
        if name in ("controls", "embedded"):
            rates = next(iter(losses))
            values = launch.settings_of(search.argv(arm, rates, search.seed))
            assert [float(values[rate]) for rate in search.rates] == list(rates), arm
        if name == "embedded":  # one rate for all matrices, embeddings included, or lr_1d for embeddings and vectors
            assert float(values["lr_embeddings"]) == float(values["lr_1d"] if "lr_1d" in arm else rates[0]), arm
            assert (values["gamma"] is None) == arm.startswith("adamw"), arm


@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "muon", "mars_adamw", "mars_m"])
def test_default_job_has_the_best_settings_of_controls(optimizer):
    settings = presets.load("controls").arms
    arms = [arm for arm, own in settings.items() if (own["optimizer"], own.get("is_approx", True)) == (optimizer, True)]
    arm = min(arms, key=lambda arm: min(by_seed[100] for by_seed in LOSSES["controls"][arm].values()))
    assert arm == (f"{optimizer}, gamma 1 - beta1" if "mars" in optimizer else optimizer)
    run, tuned = parse(["--optimizer", optimizer]), parse(presets.words(settings[arm]))
    assert run.optimizer == tuned.optimizer
    assert run.training.learning_rate == tuned.training.learning_rate
    assert run.training.weight_decay == tuned.training.weight_decay


@pytest.mark.parametrize("optimizer", ["mars_lion", "mars_shampoo"])
def test_default_job_has_the_best_settings_of_the_sweeps(optimizer):
    arms = {arm: own["settings"] for arm, own in Search("embedded").arms.items()}
    losses = {
        (arm, *rates): by_seed
        for arm, own in arms.items()
        for rates, by_seed in LOSSES["embedded"][arm].items()
        if own["optimizer"] == optimizer
    }
    arm, rate = tune.best(losses)
    chosen = parse(["--optimizer", optimizer])
    assert chosen.training.learning_rate == pytest.approx(rate)
    for name, value in arms[arm].items():
        if name not in ("optimizer", "gamma", "lr_embeddings"):  # gamma is the class's
            assert float(getattr(chosen.optimizer, name)) == value


def test_llama_starts_from_the_best_rates():
    for arm, optimizer in (("mars_m", "mars_m"), ("mars_adamw", "mars_adamw"), ("adamw_torch", "adamw")):
        start = parse(["--config", "llama", "--optimizer", optimizer]).training.learning_rate
        assert (start,) == tune.best(LOSSES["tasks"][f"pretrain_llama {arm}"])


def test_bases_are_those_of_the_result():
    saved = {base: own["settings"] for base, own in RESULTS["bases"]["bases"].items()}
    assert saved == tune.SEARCHES["finetuning"]["bases"] | tune.SEARCHES["bases"]["bases"]


def test_page_shows_the_runs_of_a_pretrained_model():
    page = (tune.ROOT / "docs" / "finetuning.md").read_text()
    texts, modes = {"kjv": "Bible", "headers": "C++"}, {"all": "all weights", "lora": "LoRA"}
    optims = {"adamw(0.9)": "AdamW", "adamw(0.8)": "AdamW, `beta1` 0.8", "mars_adamw": "mars-adamw", "mars_m": "mars-m"}
    optims |= {"mars_adamw(8bit)": "mars-adamw, states in 8 bits", "muon": "Muon", "mars_lion": "mars-lion"}
    search, rows = Search("smollm2"), []
    for arm, losses in LOSSES["smollm2"].items():
        text, mode, optim = arm.split()
        (best,) = tune.best(losses)
        if "grid" in search.arms[arm]:  # at the best rate of float32 states
            assert sorted(losses[best,]) == [1, 2, 3] and (best,) == tune.best(LOSSES["smollm2"]["kjv all mars_adamw"])
        else:
            assert sorted(losses[best,]) == [1, 2, 3, search.seed]
            assert {(best / 2,), (best * 2,)} <= losses.keys()
        key = {"text": text, "mode": mode, "optim": optim, "learning_rate": best, "steps": 60}.items()
        new = [row for row in RESULTS["smollm2"]["runs"] if key <= row.items() and row["seed"] != search.seed]
        learned, python = (statistics.mean(row[key] for row in new) for key in ("eval_loss", "general_loss"))
        what = f"{texts[text]}, {modes[mode]}"
        rows.append(f"| {what} | {optims[optim]} | {best:g} | {learned:.3f} | {python:.3f} |")
    shown = [line for line in page.splitlines() if line.startswith(tuple(f"| {text}," for text in texts.values()))]
    assert sorted(shown) == sorted(rows)


def test_page_compares_seeds_of_a_pretrained_model():
    page = " ".join((tune.ROOT / "docs" / "finetuning.md").read_text().split())

    def difference(what: str, optim: str, other: str) -> float:
        """Return how much higher `optim` ends than `other`, a mean over seeds; all of them agree on the sign."""
        ours, theirs = ([_loss_of_new_seed(f"{what} {each}", seed) for seed in (1, 2, 3)] for each in (optim, other))
        of_seed = [loss - other_loss for loss, other_loss in zip(ours, theirs, strict=True)]
        assert len({value > 0 for value in of_seed}) == 1
        return statistics.mean(of_seed)

    pairs = [difference(what, "mars_adamw", "adamw(0.9)") for what in ("kjv all", "kjv lora", "headers lora")]
    assert "0.001 and 0.005 lower on the Bible, 0.008 higher on C++" in page
    assert [round(value, 3) for value in pairs] == [-0.001, -0.005, 0.008]
    coded = [_loss_of_new_seed("kjv all mars_adamw(8bit)", seed) for seed in (1, 2, 3)]
    less = [one - _loss_of_new_seed("kjv all mars_adamw", seed) for seed, one in enumerate(coded, 1)]
    assert "seeds end {:+.3f}, {:+.3f} and {:+.3f} from float32".format(*less) in page
    assert f"`beta1` 0.8 ends {difference('kjv lora', 'mars_adamw', 'adamw(0.8)'):.3f} below mars-adamw" in page
    few, many = (tune.best(LOSSES["smollm2"][arm])[0] for arm in ("kjv all adamw(0.9)", "kjv lora mars_lion"))
    matrices, lora = (difference(what, "mars_m", "adamw(0.9)") for what in ("kjv all", "headers lora"))
    assert f"ends {matrices:.2f} above AdamW with all weights**, and {lora:.2f} above with LoRA on C++" in page
    low = [LOSSES["smollm2"][f"kjv all {optim}"][2e-5,][100] for optim in ("mars_m", "adamw(0.9)")]
    assert f"Runs this short need {few / 2e-5:.0f} to {many / 4.6e-5:.0f} times the usual rates" in page
    assert f"At 2e-5 it is far behind, {low[0]:.2f} to {low[1]:.2f}" in page


def _loss_of_new_seed(arm: str, seed: int) -> float:
    losses = LOSSES["smollm2"][arm]
    return losses[tune.best(losses)][seed]


def test_page_shows_the_bases():
    page = (tune.ROOT / "docs" / "finetuning.md").read_text()
    for base in ("mars_adamw", "adamw", "muon"):
        cells = [f"{base} ({RESULTS['bases']['bases'][base]['eval_loss']:.3f})"]
        for optim in ("adamw_torch", "mars_adamw", "mars_m"):
            key = {"base": base, "mode": "full", "optim": optim}.items()
            runs = [row for row in RESULTS["bases"]["runs"] if key <= row.items() and row["seed"] in (1, 2)]
            new, old = ([row[key] for row in runs] for key in ("eval_loss", "pretraining_loss"))
            deviation = f"{statistics.mean(new):.3f} ± {statistics.stdev(new):.3f}"
            cells.append(f"{deviation} ({statistics.mean(old):.3f})")
        assert f"| {' | '.join(cells)} |" in page
