"""The entry points in docs/trainer.md and all sources pass type checkers, and wrong settings do not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from pages import ROOT, entry_points

HEAD = """\
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments
from trl import SFTTrainer

import mars_hf


def rows(model: GPT2LMHeadModel, args: TrainingArguments, optimizer: mars_hf.Mars, scheduler: LambdaLR) -> None:
"""
WRONG = ["mars_hf.create(model, gama=0.1)", 'mars_hf.factory(args, gamma="much")', "mars_hf.create(model, fused=8)"]
# mypy checks the sources too: most of its minute is for torch and transformers. basedpyright has its own defaults.
CHECKERS = [["mypy", "mars_hf", "recipes", "benchmarks"], ["basedpyright", "--level", "error"]]


def rows_of_readme() -> list[str]:
    """Return the Python of the table of ways in; `...` stands for arguments of the Trainer."""
    code = [span for span in entry_points() if "(" in span]
    return [span.replace("(..., ", "(model, args, ").replace(", ...)", ")") for span in code]


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS, ids=lambda command: command[0])
def test_type_checker_passes(tmp_path, checker):
    rows = rows_of_readme()
    assert len(rows) >= 7
    file = tmp_path / "rows.py"
    file.write_text(HEAD + "".join(f"    {row}\n" for row in [*rows, *WRONG]))
    folder = ROOT if checker[0] == "mypy" else tmp_path  # where its settings are, or none
    result = subprocess.run([*checker, file], cwd=folder, capture_output=True, text=True)
    # In no other file, and on no other line.
    errors = re.findall(r"(\S+\.pyi?):(\d+).*\berror\b", result.stdout)
    first = HEAD.count("\n") + len(rows) + 1
    expected = {("rows.py", first + place) for place in range(len(WRONG))}
    assert {(Path(name).name, int(line)) for name, line in errors} == expected, result.stdout
