"""Every Python example of README and docs runs, in one namespace per page."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from pages import PAGES, blocks, entry_points
from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

import mars_hf
from mars_hf import universal

ZERO = Path("out/checkpoint-500/global_step500")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Run in a temporary folder, and reset accelerate's state afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def logged(monkeypatch):
    """Collect messages of mars_hf, which transformers' loggers do not pass on to pytest."""
    messages: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("mars_hf")
    handler = Keeper()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def prepare(page: str) -> None:
    """Make the files that a page's examples read."""
    if page == "distributed.md":
        pages.save_zero_checkpoint(ZERO)
        universal.to_universal(ZERO, ZERO.with_name(f"{ZERO.name}_universal"))


def run(page: str, names: dict[str, Any], logged: list[str]) -> int:
    """Execute a page's examples, compare their output and logs with the page, and return their number."""
    count, printed = 0, ""
    for block in blocks(page):
        if block.language == "python":
            count += 1
            output = io.StringIO()
            source = "\n" * (block.line - 1) + block.text  # so that tracebacks have the page's line numbers
            with contextlib.redirect_stdout(output):
                exec(compile(source, str(PAGES[page]), "exec"), names)
            printed = output.getvalue()
        elif block.directive == "prints":
            assert [line.rstrip() for line in printed.splitlines()] == block.text.splitlines()
        elif block.directive == "logs":
            beginning = block.text.partition("...")[0].strip()
            assert any(message.startswith(beginning) for message in logged), (beginning, logged)
        else:
            assert not block.directive, f"{page}: unknown directive {block.directive}"
    return count


@pytest.mark.parametrize("page", [page for page in PAGES if any(one.language == "python" for one in blocks(page))])
def test_examples_run(page, place, logged):
    prepare(page)
    assert run(page, pages.names(place), logged)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((pages.ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebook(path, place, logged):
    torch.set_num_threads(1)
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    names = {"__name__": "notebook"}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert names["mars_loss"] < 4 and any(message.startswith("mars-m ") for message in logged)


def test_entry_points_of_readme(place):
    """The table's code builds a Mars where the table says."""
    names = {**pages.names(place), "mars_hf": mars_hf, "Trainer": Trainer, "TrainingArguments": TrainingArguments}
    names |= {"optimizer": mars_hf.create(names["model"], lr=6e-3), "SFTTrainer": SFTTrainer}
    python = [code for code in entry_points() if not code.startswith(("python ", "accelerate "))]
    assert len(python) == 8
    kinds = []
    for code in python:
        code = code.replace("(..., ", "(model, args, train_dataset=dataset, ")
        code = code.replace("args, ...)", "args, train_dataset=rows, processing_class=tokenizer)")
        made = eval(code.replace("TrainingArguments(", "TrainingArguments(use_cpu=True, "), names)
        kinds.append(type(made).__name__)
        if isinstance(made, Trainer):
            made.train()
            assert "mars/clip_fraction" in made.state.log_history[0]
        elif isinstance(made, TrainingArguments):
            make, settings = Trainer.get_optimizer_cls_and_kwargs(made, names["model"])
            assert make()(names["model"], **settings).param_groups[0]["mars_type"] == "mars-adamw"
    trainers = ["Trainer", "Trainer", "MarsTrainer", "MarsSFTTrainer", "MarsTrainer"]
    assert kinds == [*trainers, "NoneType", "TrainingArguments", "Mars"]
