"""docs/choosing.md: its output is the command's, and its table is that of the sweeps."""

from __future__ import annotations

import json
import math
import shlex
import statistics

import pytest
import tune
import update_rms as measuring
from pages import PAGES, blocks, commands

from mars_hf.__main__ import main
from mars_hf.suggest import AdamW, first_moment_rms, suggest, update_rms

WIDTH = 128
# Rule, its sweep at the rate of vectors and embeddings that is best, the sweep at AdamW's rate for them, AdamW's betas.
ROWS = {
    "mars-adamw": ("mars (0.9, 0.95)", "mars (0.9, 0.95)", (0.9, 0.95)),
    "mars-adamw, betas (0.95, 0.99)": ("mars (0.95, 0.99)", "mars (0.95, 0.99)", (0.95, 0.99)),
    "mars-lion": ("mars-lion (0.9)", "mars-lion (0.9)", (0.9, 0.95)),
    "mars-shampoo": ("mars-shampoo, lr_1d 0.016", "mars-shampoo, lr_1d 0.004", (0.9, 0.95)),
    "mars-m": ("mars-m, lr_1d 0.016", "mars-m, lr_1d 0.004", (0.9, 0.95)),
}
MISSES = {"mars-adamw, betas (0.95, 0.99)"}


@pytest.fixture(scope="module")
def losses():
    search = tune.Search("embedded")
    return search.losses(json.loads(search.file.read_text())["runs"])


def row_of(name: str, losses) -> tuple[float, str]:
    """Return the factor between suggestion and sweep, and the row of the table."""
    best_sweep, near_sweep, betas = ROWS[name]
    (rate,) = tune.best(losses[f"adamw {betas}"])
    settings = suggest(name.partition(",")[0], AdamW(rate, betas), width=WIDTH)
    (tuned,) = tune.best(losses[best_sweep])
    loss = statistics.mean(losses[best_sweep][(tuned,)].values())
    factor = tuned / settings["lr"]
    near = min(losses[near_sweep], key=lambda rates: abs(math.log(rates[0] / settings["lr"])))
    there = statistics.mean(losses[near_sweep][near].values())
    return factor, f"| {name} | {rate:g} | {settings['lr']:.2g} | {tuned:g} | {factor:.2f} | {loss:.3f} | {there:.3f} |"


@pytest.mark.parametrize("name", ROWS)
def test_the_table_is_that_of_the_sweeps(name, losses):
    factor, row = row_of(name, losses)
    assert row in PAGES["choosing.md"].read_text(encoding="utf-8").splitlines()
    assert (0.5 <= factor <= 2) != (name in MISSES)


@pytest.mark.parametrize("page", ["README.md", "choosing.md"])
def test_the_rates_to_start_from_are_those_suggested(page):
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    starts = {"from scratch": "3e-4", "all weights of a pretrained model": "2e-5", "LoRA adapters": "2e-4"}
    for name, lr in starts.items():
        adamw = AdamW(float(lr)) if name == "from scratch" else AdamW(float(lr), (0.9, 0.999), 0.0)
        rates = [f"{suggest(rule, adamw)['lr']:.3g}" for rule in ("mars-adamw", "mars-m", "mars-lion")]
        assert f"| {name} | {lr} | {' | '.join(rates)} |" in lines


def test_the_output_is_that_of_the_command(capsys):
    (command,) = [words for words in map(shlex.split, commands("choosing.md")) if "suggest" in words][:1]
    main(command[3:])
    shown = next(block.text for block in blocks("choosing.md") if block.language == "text")
    assert capsys.readouterr().out == shown


def test_the_sizes_of_updates_are_the_predicted_ones():
    text = PAGES["choosing.md"].read_text(encoding="utf-8")
    near, far = (update_rms("mars-adamw", beta1=beta1, gamma=0.025) for beta1 in (0.9, 0.95))
    assert f"| {near:.3f} at `beta1` 0.9, {far:.3f} at 0.95 |" in text
    assert f"| {update_rms('mars-shampoo', beta1=0.95, gamma=0.025, width=768):.3f} at width 768 |" in text
    assert f"| `0.2 s` | {update_rms('mars-m', beta1=0.95, gamma=0.025):.2g} |" in text


@pytest.mark.parametrize(
    ("index", "beta1", "tolerance"), [(0, 0.9, 0.4), (1, 0.9, 0.4), (2, 0.95, 0.03), (3, 0.95, 0.03)]
)
def test_the_sizes_on_the_default_job_are_those_measured(index, beta1, tolerance):
    row = json.loads(measuring.RESULTS.read_text())["runs"][index]
    rule = row["optimizer"].replace("_", "-")
    predicted = first_moment_rms(beta1) if rule == "adamw" else update_rms(rule, beta1=beta1, gamma=0.025, width=WIDTH)
    measured = row["rms"]["matrices"]
    assert measured == pytest.approx(predicted, rel=tolerance)
    shown = f"| {rule} | {predicted:.3f} | {measured:.3f} | {measured / predicted:.2f} |"
    assert shown in PAGES["choosing.md"].read_text(encoding="utf-8").splitlines()
