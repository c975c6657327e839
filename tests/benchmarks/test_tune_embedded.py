"""The report on the tuning of the default job."""

from __future__ import annotations

import json

import pytest
import tune_embedded
from PIL import Image
from pretraining.run import arguments


def rows(**losses):
    """Return one row per loss, from contender -> learning rate -> losses of seeds 1, 2, ..."""
    return [
        {"contender": name, "learning_rate": lr, "seed": seed, "eval_loss": loss}
        for name, by_lr in losses.items()
        for lr, own in by_lr.items()
        for seed, loss in enumerate(own, start=1)
    ]


def test_the_best_rate_is_sought_among_those_with_all_seeds():
    assert tune_embedded.best({1e-3: [5.0, 4.0], 2e-3: [4.0, 4.5], 4e-3: [4.1]}) == (2e-3, 4.25)


def test_a_family_has_the_columns_of_its_own_rates():
    lines = tune_embedded.table({"a": {1e-3: [5.0, 4.0]}, "b": {1e-2: [4.25]}}).splitlines()
    assert lines[0] == "| optimizer | lr 0.001 | lr 0.01 |"
    assert lines[2:] == ["| a | 5.000 / 4.000 | - |", "| b | - | 4.250 |"]


def test_losses_are_sorted_by_rate_and_seed():
    name = tune_embedded.BASELINE
    losses = tune_embedded.losses_of(rows(**{name: {2e-3: [4.0, 4.5], 1e-3: [5.0]}})[::-1])
    assert list(losses) == [name] and list(losses[name].items()) == [(1e-3, [5.0]), (2e-3, [4.0, 4.5])]


def test_every_shipped_run_is_wanted_and_its_contender_parses(tmp_path):
    shipped = json.loads(tune_embedded.RESULTS.read_text())["runs"]
    keys = [(row["contender"], row["learning_rate"], row["seed"]) for row in shipped]
    wanted = tune_embedded.wanted()
    assert len(set(keys)) == len(keys) and set(keys) == set(wanted)
    for name, lr, seed in wanted[:: len(tune_embedded.GRID)]:
        run = arguments.parse([*tune_embedded.argv(name, lr, seed), "--output_dir", str(tmp_path)])
        assert run.optimizer.optimizer == tune_embedded.CONTENDERS[name].family
        assert (run.training.learning_rate, run.training.seed) == (lr, seed)
        assert run.optimizer.lr_embeddings == (run.optimizer.lr_1d or lr)
        assert run.optimizer.gamma == (None if run.optimizer.optimizer == "adamw" else 0.025)


def test_the_shipped_defaults_are_the_best_settings_found(tmp_path):
    losses = tune_embedded.losses_of(json.loads(tune_embedded.RESULTS.read_text())["runs"])
    for family in ("mars_lion", "mars_shampoo"):  # the other rules' are those of tune_controls
        own = {name: by_lr for name, by_lr in losses.items() if tune_embedded.CONTENDERS[name].family == family}
        seeds = {name: len(by_lr[tune_embedded.best(by_lr)[0]]) for name, by_lr in own.items()}
        found = {name: tune_embedded.best(by_lr) for name, by_lr in own.items() if seeds[name] == max(seeds.values())}
        name = min(found, key=lambda name: found[name][1])
        argv = tune_embedded.CONTENDERS[name].argv
        chosen = arguments.parse(["--optimizer", family, "--output_dir", str(tmp_path)])
        tuned = arguments.parse([*argv, "--output_dir", str(tmp_path)])
        assert chosen.training.learning_rate == pytest.approx(found[name][0])
        assert chosen.optimizer == tuned.optimizer


def test_the_report_draws_every_family(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune_embedded, "PICTURE", tmp_path / "tune.png")
    tune_embedded.report(rows(**{name: {1e-3: [5.0, 4.0], 2e-3: [4.5]} for name in tune_embedded.CONTENDERS}))
    printed = capsys.readouterr().out
    assert f"{tune_embedded.BASELINE}: best 4.5000 at lr 0.001 (seeds: 2)" in printed
    with Image.open(tmp_path / "tune.png") as picture:
        picture.verify()
