"""Examples of README and docs: Python runs in one namespace per page, commands run with small settings or are parsed.

A command that commands.yaml lacks fails the test, and so does a row of it that no page uses.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import dataclasses
import importlib
import io
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.state import AcceleratorState, GradientState
from helpers import gpt2
from pages import PAGES, ROOT, blocks, commands, entry_points
from pretraining.data import embedded, token_files
from pretraining.run import arguments
from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

import mars_hf
from mars_hf import universal
from mars_hf.__main__ import main

COMMANDS = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text(encoding="utf-8"))
PARSED = [command for of_a_reason in COMMANDS["parsed"].values() for command in of_a_reason]
TINY = [
    *("--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "32", "--embedded_vocab_size", "512"),
    *("--max_steps", "2", "--warmup_steps", "1", "--logging_steps", "1", "--eval_steps", "2", "--max_eval_blocks", "4"),
    *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4", "--sample_tokens", "4"),
    *("--cpu_threads", "1", "--disable_tqdm", "true"),
]
SCRIPT = ["--output_dir", "out", "--max_steps", "2", "--use_cpu", "true", "--report_to", "none"]
SCRIPT += ["--save_strategy", "no"]
FEW = ["--output_dir", "run", "--disable_tqdm", "true", "--use_cpu", "true", "--max_steps", "2"]
FEW += ["--eval_strategy", "no"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Return the embedded corpus, tokenized once."""
    return embedded.prepare(tmp_path_factory.mktemp("data"), vocab_size=512)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Run in a folder with the repository's folders and a user's script; reset accelerate's state afterwards."""
    for name in ("accelerate_configs", "recipes", "benchmarks", "constraints.txt", "setup.cfg"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").write_text(pages.SCRIPT)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def logged():
    """Collect messages of mars_hf, which transformers' loggers do not pass on to pytest."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("mars_hf").addHandler(handler)
    yield messages
    logging.getLogger("mars_hf").removeHandler(handler)


@pytest.mark.parametrize("page", [page for page in PAGES if any(one.language == "python" for one in blocks(page))])
def test_python(page, place, logged):
    """What they print and log is on the page too, below a comment `prints` or `logs`."""
    names, printed = pages.names(place), ""
    if page == "distributed.md":
        folder = Path("out/checkpoint-500/global_step500")
        pages.save_zero_checkpoint(folder)
        universal.to_universal(folder, folder.with_name(f"{folder.name}_universal"))
    for block in blocks(page):
        if block.language == "python":
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


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
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


# --- commands ---------------------------------------------------------------------------------------------------------


def process(command: list[str]) -> str:
    """Run a command in a process of its own; return its output."""
    program = {"python": [sys.executable], "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"]}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [*program[command[0]], *command[1:]], capture_output=True, text=True, env=environment, timeout=300
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def launched(command: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line of `accelerate launch` into accelerate's arguments and the script with its own."""
    assert command[:2] == ["accelerate", "launch"]
    read = launch.launch_command_parser().parse_args(command[2:])
    if read.config_file:
        assert Path(read.config_file).is_file(), read.config_file
    launch._validate_launch_command(read)
    return read, [read.training_script, *read.training_script_args]


def script_of(command: list[str]) -> tuple[str, list[str]]:
    """Return the name of a script of the repository that a command starts, and its arguments."""
    script, *argv = launched(command)[1] if command[0] == "accelerate" else command[1:]
    assert (ROOT / script).is_file(), script
    return Path(script).stem, argv


# --- what runs: in this process where that is possible, which saves imports -------------------------------------------


def runs_as_written(command: str) -> None:
    if " run " in command:
        rule = "mars-lion" if "mars_lion" in command else "mars-adamw"
        assert f"TRAINED WITH Mars {rule}" in process([*shlex.split(command), *SCRIPT])
    else:
        assert "mars-m " in process(shlex.split(command))


def converts(command: str) -> None:
    *_, source, target = argv = shlex.split(command)[3:]
    pages.save_zero_checkpoint(Path(source))
    main(argv)
    assert (Path(target) / "zero" / "optimizer_state.pt").is_file()


def pretrains(run: Any, argv: list[str], tokens: Path) -> None:
    inner = ["--n_inner", "32"] if "llama" in argv else []
    run([*argv, *TINY, *inner, "--data_dir", str(tokens), "--output_dir", "run"])
    assert json.loads(Path("run", "metrics.json").read_text())["steps"] == 2


def converts_nanogpt(run: Any, argv: list[str], tokens: Path) -> None:
    back = "--to_nanogpt" in argv
    gpt2().save_pretrained(argv[0] if back else "model")
    if not back:
        run(["model", "out", "--to_nanogpt"])
    run(argv)
    assert Path("out/ckpt.pt" if back else "converted/config.json").is_file()


def save_model(folder: str, tokens: Path) -> None:
    source, model = token_files.load(tokens), gpt2()
    model.resize_token_embeddings(len(source.tokenizer), mean_resizing=False)
    for part in (model, source.tokenizer):
        part.save_pretrained(folder)


def evaluates(run: Any, argv: list[str], tokens: Path) -> None:
    model, output = (argv[argv.index(flag) + 1] for flag in ("--model", "--output_file"))
    save_model(model, tokens)
    run([*argv, "--data_dir", str(tokens), "--max_eval_blocks", "4", "--use_cpu"])
    assert json.loads(Path(output).read_text())["loss"] > 0


def trains_classifier(run: Any, argv: list[str], tokens: Path) -> None:
    run([*argv, *FEW])
    assert json.loads(Path("run", "metrics.json").read_text())["eval_accuracy"] >= 0


def fine_tunes(run: Any, argv: list[str], tokens: Path) -> None:
    if "--model_name_or_path" not in argv:
        argv = [*argv, "--model_name_or_path", "tiny"]
    save_model(argv[argv.index("--model_name_or_path") + 1], tokens)
    row = {"text": "print(1)\n" * 20} if "finetune_lm" in run.__module__ else {"prompt": "a", "completion": "b"}
    Path("rows").mkdir()
    Path("rows", "train.jsonl").write_text("\n".join([json.dumps(row)] * 40))
    run([*argv, "--dataset_name", "rows", *FEW])
    assert json.loads(Path("run", "metrics.json").read_text())["trainable_parameters"] > 0


def measures(run: Any, argv: list[str], tokens: Path) -> None:
    few = ["--size", "tiny", "--device", "cpu", "--rounds", "1", "--output", "result.json"]
    few += ["--block", "16", "--steps", "2"] if run.__module__ == "train_cost" else ["--contenders", "^Mars$|^mars-m$"]
    run([*argv, *few])
    assert Path("result.json").is_file()


RUNNERS: dict[str, Callable[[Any, list[str], Path], None]] = {
    "pretrain_gpt2": pretrains,  # launched in full by tests/recipes/test_pretrain_gpt2.py
    "convert_nanogpt": converts_nanogpt,
    "evaluate_checkpoint": evaluates,
    "finetune_vit": trains_classifier,
    **dict.fromkeys(("finetune_lm", "sft_lora"), fine_tunes),
    **dict.fromkeys(("step_cost", "train_cost"), measures),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS["run"])
def test_command_runs(command, place, tokens):
    if "to_universal" in command:
        converts(command)
    elif "-m mars_hf" in command:
        runs_as_written(command)
    elif "exchange_on_paper" in command:
        assert json.loads(process(shlex.split(command)))["received_bytes"] > 0
    else:
        name, argv = script_of(shlex.split(command))
        RUNNERS[name](importlib.import_module(name).main, argv, tokens)


# --- what is parsed ---------------------------------------------------------------------------------------------------


def is_pip(command: str) -> None:
    """Check that the constraints and every named extra exist."""
    words = shlex.split(command)
    assert words[:3] == ["pip", "install", "-c"] and Path(words[3]).is_file() and words[4] == "-e"
    extras = configparser.ConfigParser()
    extras.read("setup.cfg")
    for extra in words[5].removeprefix(".").strip("[]").split(","):
        assert not extra or extra in extras["options.extras_require"]


class _Parsed(Exception):
    """Raised when the command line was parsed without error."""


def script_parses(command: str) -> None:
    """Parse the arguments with the script's own parser, and what it passes on with the recipe's."""
    name, argv = script_of(shlex.split(command))
    if name == "pretrain_gpt2":
        assert arguments.parse([*argv, "--use_cpu", "true", "--bf16", "false", "--tf32", "false"]).config.is_file()
        return
    if name in ("compare_optimizers", "measure_tracking"):
        *_, rest = importlib.import_module(name).parse(argv)
        arguments.parse(rest)
        return
    read = argparse.ArgumentParser.parse_known_args

    def read_and_stop(*given, **settings):
        _, rest = read(*given, **settings)
        assert not rest
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", read_and_stop)
        importlib.import_module(name).main(argv)


def launch_parses(command: str) -> None:
    read, (script, *_) = launched(shlex.split(command))
    assert Path(script).is_file() and read.num_processes == 4


def llama_factory_parses(command: str) -> None:
    """Make TrainingArguments, to which LLaMA-Factory hands the config."""
    texts = [block.text for block in blocks("elsewhere.md") if block.language == "yaml"]
    config = next(found for found in map(yaml.safe_load, texts) if "optim" in found)
    mars_hf.register()
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    args = TrainingArguments(**{key: value for key, value in config.items() if key in known}, use_cpu=True)
    assert args.optim == "mars_adamw"


@pytest.mark.parametrize("command", PARSED)
def test_command_parses(command, place):
    if command.startswith("pip install -c"):
        is_pip(command)
    elif "llamafactory" in command:
        llama_factory_parses(command)
    elif " train.py" in command:
        launch_parses(command)
    elif not command.startswith(("pip ", "axolotl ", "python -m pytest")):
        script_parses(command)


def test_every_command_is_accounted_for():
    """Commands of README and docs, with parts joined by && separated."""
    found = [command for page in PAGES for command in commands(page)]
    found += [code for code in entry_points() if code.startswith(("python ", "accelerate "))]
    shown = {part.strip() for command in found for part in command.split(" && ")}
    assert shown == {*COMMANDS["run"], *PARSED}
