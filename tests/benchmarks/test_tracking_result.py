"""The shipped measurement of first moments: the page shows its numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import measure_tracking
from pretraining.compare import tracking

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "tracking_embedded.json").read_text())
NUMBERS = ("error", "lag", "noise", "cosine", "variance_ratio", "noise_scale")
PAGE = (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8").replace("\\\n ", "")


ROWS = [{**row, **{name: math.nan for name in NUMBERS if row[name] is None}} for row in RESULT["rows"]]


def test_it_has_the_whole_grid():
    settings, _ = measure_tracking.parse([])
    moments = tracking.grid(settings.betas, settings.gammas, settings.clips)
    assert set(tracking.medians(ROWS)) == set(moments) and len(moments) == 54
    assert {"matrix", "embedding", "vector", "layer 0", "layer 3"} <= set(RESULT["medians"])
    assert len({row["step"] for row in ROWS}) == 10
    flags = RESULT["arguments"].removeprefix("--").split(" --")
    assert [flag for flag in flags if f"--{flag}" not in PAGE] == []


def test_the_page_shows_moments_without_clipping():
    assert tracking.conclusion(ROWS, 0.9) == RESULT["conclusion"]
    shown = [line for line in tracking.table(ROWS).splitlines() if line.startswith("| beta1") and " clip " not in line]
    wanted = [line for line in shown if " 0.0125" not in line and " gamma 0.05" not in line]
    assert len(wanted) == 15
    assert [line for line in wanted if line not in PAGE] == []


def test_the_page_shows_every_role():
    """The errors at beta1 0.9 and the noise scale, in samples."""

    def row(name: str, medians: list[dict[str, Any]]) -> str:
        own = {(m["gamma"], m["form"]): m for m in medians if m["beta1"] == 0.9 and m["clip"] is None}
        columns = [(0.0, "approx"), (0.025, "approx"), (0.025, "exact"), (0.1, "approx"), (0.1, "exact")]
        errors = " | ".join(f"{own[column]['error']:.3f}" for column in columns)
        return f"| {name} | {errors} | {own[columns[0]]['noise_scale']:.0f} |"

    whole = [{**moment._asdict(), **numbers} for moment, numbers in tracking.medians(ROWS).items()]
    rows = [row("all", whole), *(row(role, RESULT["medians"][role]) for role in ("embedding", "vector", "matrix"))]
    assert [line for line in rows if line not in PAGE] == []
