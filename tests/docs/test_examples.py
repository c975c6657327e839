"""Examples of README and docs: Python runs in one namespace per page, commands run with small settings or are parsed.

A command that commands.yaml lacks fails the test, and so does a row of it that no page uses.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from mars_hf.compare import command as compare
from mars_hf.compare.plan import Plan

COMMANDS = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text(encoding="utf-8"))
PARSED = [command for of_a_reason in COMMANDS["parsed"].values() for command in of_a_reason]
FEW = ["--output_dir", "run", "--max_steps", "2", "--use_cpu", "true", "--disable_tqdm", "true"]
TRAIN = [*FEW, "--report_to", "none", "--save_strategy", "no"]
EVALUATE = ["--data_dir", "data", "--max_eval_blocks", "4", "--use_cpu"]
TINY = (
    "--n_layer 1 --n_head 2 --n_embd 16 --block_size 32 --embedded_vocab_size 512 --max_steps 2 --warmup_steps 1 "
    "--logging_steps 1 --eval_steps 2 --max_eval_blocks 4 --per_device_train_batch_size 2 "
    "--per_device_eval_batch_size 4 --sample_tokens 4 --cpu_threads 1 --disable_tqdm true --data_dir data "
    "--output_dir run"
).split()
MINIMAL = [*TRAIN, *"--vocab_size 512 --block_size 32 --n_layer 1 --n_head 2 --n_embd 16 --logging_steps 1".split()]
MEASURE = ["--size", "tiny", "--device", "cpu", "--rounds", "1", "--output", "result.json"]
# Scripts that run: more arguments, the file they write, and whether its content is right.
RUNS: dict[str, tuple[list[str], str, Callable[[dict[str, Any]], bool]]] = {
    "pretrain_gpt2": (TINY, "run/metrics.json", lambda metrics: metrics["steps"] == 2),
    "pretrain_minimal": (MINIMAL, "run/trainer_state.json", lambda state: "mars/update_rms" in state["log_history"][0]),
    "evaluate_checkpoint": (EVALUATE, "runs/evaluation.json", lambda metrics: metrics["loss"] > 0),
    "finetune_vit": (FEW, "run/eval_results.json", lambda metrics: metrics["eval_accuracy"] >= 0),
    "finetune_lm": (FEW, "run/eval_results.json", lambda metrics: metrics["eval_loss"] > 0),
    "sft_lora": (FEW, "run/eval_results.json", lambda metrics: metrics["eval_loss"] > 0),
    "step_cost": ([*MEASURE, "--contenders", "^Mars$|^mars-m$"], "result.json", bool),
    "train_cost": ([*MEASURE, "--block", "16", "--steps", "2"], "result.json", bool),
}


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
def test_python_examples(page, place, logged, monkeypatch):
    """What they print and log is on the page too, below a comment `prints` or `logs`."""
    names, printed = pages.names(place), ""
    if page == "distributed.md":
        folder = Path("out/checkpoint-500/global_step500")
        pages.save_zero_checkpoint(folder)
        universal.to_universal(folder, folder.with_name(f"{folder.name}_universal"))
    if page == "elsewhere.md":  # which ms-swift imports
        plugins = types.ModuleType("swift.optimizers")
        plugins.OptimizerCallback, plugins.optimizers_map = object, {}
        monkeypatch.setitem(sys.modules, "swift", types.ModuleType("swift"))
        monkeypatch.setitem(sys.modules, "swift.optimizers", plugins)
    if page == "README.md":
        pages.save_small_llama(Path("HuggingFaceTB/SmolLM2-135M-Instruct"))
        Path("train.txt").write_text("1 2 3 4 5\n" * 8, encoding="utf-8")
    if page == "trl_peft.md":
        pages.save_small_qwen3(Path("Qwen/Qwen3-0.6B"))
        pages.save_chats(Path("trl-lib/Capybara"))
    if page == "resuming.md":
        gpt2().save_pretrained("out/checkpoint-500")
    for block in blocks(page):
        if block.directive == "bitsandbytes":
            continue  # test_quantized_example runs it
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
    if page == "elsewhere.md":
        plugin = plugins.optimizers_map["mars"]()
        plugin.args, plugin.trainer = names["args"], SimpleNamespace(model=gpt2())
        assert isinstance(plugin.create_optimizer(), mars_hf.Mars)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no extra brings bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_example(bits, place, logged):
    """TRL makes the adapters of a quantized model bfloat16; Kahan's rounding keeps their updates, and nothing warns."""
    pages.save_small_qwen3(Path("Qwen/Qwen3-0.6B"))
    pages.save_chats(Path("trl-lib/Capybara"))
    names = pages.names(place)
    first, quantized, *_ = [block.text for block in blocks("trl_peft.md") if block.language == "python"]
    exec(first, names)
    logged.clear()
    call = quantized[quantized.index("BitsAndBytesConfig(\n") :].partition("\n)\n")[0] + "\n)"
    if bits == 8:
        quantized = quantized.replace(call, "BitsAndBytesConfig(load_in_8bit=True)")
        quantized = quantized.replace('"rounding": "kahan"', '"rounding": "kahan", "state_dtype": "8bit"')
    exec(quantized, names)
    kinds = {type(module).__name__ for module in names["trainer"].model.modules()}
    assert ("Linear4bit" if bits == 4 else "Linear8bitLt") in kinds
    groups = names["trainer"].optimizer.optimizer.param_groups
    assert {param.dtype for group in groups for param in group["params"]} == {torch.bfloat16}
    assert any(message.startswith("mars-adamw ") for message in logged)
    assert not any("do not move" in message for message in logged)


NOTEBOOK = ROOT / "docs" / "notebooks" / "quick_start.ipynb"


def outputs_of_notebook() -> str:
    """Return the text of all stored outputs."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "\n".join("".join(output.get("text", "")) for output in outputs)


def test_stored_outputs_of_the_notebook():
    """They are complete, with two pictures, and name neither a machine's folders nor warnings of packages."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    kinds = [kind for cell in cells for output in cell.get("outputs", ()) for kind in output.get("data", ())]
    assert kinds.count("image/png") == 2 and "use_cpu" not in NOTEBOOK.read_text(encoding="utf-8")
    text = outputs_of_notebook()
    assert "**mars_m helps**" in text and not re.search(r"Warning|\[\w+\] `|(?<![\w.])/\w+/|[A-Z]:\\\\", text)


@pytest.mark.slow
def test_notebook_runs(place, logged, capsys, monkeypatch):
    """Its cells print what is stored, to a tolerance; of the comparison only the first rates train here."""
    torch.set_num_threads(1)
    jupyter = SimpleNamespace(Image=lambda path, width: Path(path).stat(), get_ipython=lambda: None, version_info=(9,))
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, jupyter)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = {"__name__": "notebook"}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("--search_seeds 42 ", "--no_search --seeds 1 "), names)
    printed, stored = capsys.readouterr().out, outputs_of_notebook()
    for line in (r"AdamW: (\S+) nats", r"mars-m: (\S+) nats", r"adamw_torch, .* seed 1: eval_loss (\S+)"):
        ours, theirs = (float(re.search(line, text)[1]) for text in (printed, stored))
        assert ours == pytest.approx(theirs, abs=0.05), line
    assert any(message.startswith("mars-m ") for message in logged)


def test_entry_points_of_trainer(place):
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
    if command[:2] == ["accelerate", "launch"]:  # on a free port: other tests launch, too
        command = [*command[:2], "--main_process_port", "0", *command[2:]]
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


def prepare(name: str, argv: list[str], tokens: Path) -> list[str]:
    """Make what a script reads, and return its arguments."""
    Path("data").symlink_to(tokens)
    if "data/mine" in argv:
        argv[argv.index("data/mine")] = "data"
    if "--model" in argv:
        tokenizer, model = token_files.load(tokens).tokenizer, gpt2()
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for part in (model, tokenizer):
            part.save_pretrained(argv[argv.index("--model") + 1])
    return [*argv, *(("--n_inner", "32") if "llama" in argv else ())]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS["run"])
def test_command_runs(command, place, tokens, capsys):
    words = shlex.split(command)
    if "-m mars_hf run" in command:
        rule = "mars-lion" if "mars_lion" in command else "mars-adamw"
        assert f"TRAINED WITH Mars {rule}" in process([*words, *TRAIN])
    elif "-m mars_hf suggest" in command:
        assert "mars-m " in process(words)
    elif "exchange_on_paper" in command:
        assert json.loads(process(words))["received_bytes"] > 0
    elif "-m mars_hf to_universal" in command:
        pages.save_zero_checkpoint(Path(words[4]))
        main(words[3:])
        assert (Path(words[5]) / "zero" / "optimizer_state.pt").is_file()
    elif "convert_nanogpt" in command:
        convert, back = importlib.import_module("convert_nanogpt").main, "--to_nanogpt" in words
        gpt2().save_pretrained(words[2] if back else "model")
        if not back:
            convert(["model", "out", "--to_nanogpt"])
        convert(words[2:])
        assert Path("out/ckpt.pt" if back else "converted/config.json").is_file()
    else:
        name, argv = script_of(words)
        more, made, is_right = RUNS[name]
        recipe = importlib.import_module(name)
        recipe.main([*prepare(name, argv, tokens), *more])
        assert is_right(json.loads(Path(made).read_text()))
        if not argv and hasattr(recipe, "Arguments"):  # one to copy says first how long its small job takes
            assert "on two CPU cores in about " in capsys.readouterr().out.partition("\n")[0]


# --- what is parsed ---------------------------------------------------------------------------------------------------


def is_pip(command: str) -> None:
    """Check that the constraints and every named extra exist."""
    words = shlex.split(command)
    assert words[:3] == ["pip", "install", "-c"] and Path(words[3]).is_file() and words[4] == "-e"
    extras = configparser.ConfigParser()
    extras.read("setup.cfg")
    for extra in words[5].removeprefix(".").strip("[]").split(","):
        assert not extra or extra in extras["options.extras_require"]


def script_parses(command: str) -> None:
    """Parse the arguments with the script's own parser, and what it passes on with the recipe's."""
    name, argv = script_of(shlex.split(command))
    if name == "pretrain_gpt2":
        assert arguments.parse([*argv, "--use_cpu", "true", "--bf16", "false", "--tf32", "false"]).config.is_file()
    elif name == "measure_tracking":
        arguments.parse(importlib.import_module(name).parse(argv)[-1])
    else:
        read = argparse.ArgumentParser.parse_known_args

        def read_and_stop(*arguments, **settings):
            assert not read(*arguments, **settings)[1]
            raise EOFError

        with pytest.MonkeyPatch.context() as patch, pytest.raises(EOFError):
            patch.setattr(argparse.ArgumentParser, "parse_known_args", read_and_stop)
            importlib.import_module(name).main(argv)


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
    elif command.startswith("python -m mars_hf compare"):
        words = shlex.split(command.partition(" -- ")[0])[4:]
        options = compare.parser().parse_args(words)
        assert options.script == "train.py" or Path(options.script).is_file()
        assert options.plan is None or Plan.of_file(options.plan).arms
    elif "llamafactory" in command:
        llama_factory_parses(command)
    elif " train.py" in command:
        read, (script, *_) = launched(shlex.split(command))
        assert Path(script).is_file() and read.num_processes == 4
    elif not command.startswith(("pip ", "axolotl ", "python -m pytest")):
        script_parses(command)


def test_every_command_is_accounted_for():
    """Commands of README and docs, with parts joined by && separated."""
    found = [command for page in PAGES for command in commands(page)]
    found += [code for code in entry_points() if code.startswith(("python ", "accelerate "))]
    shown = {part.strip() for command in found for part in command.split(" && ")}
    assert shown == {*COMMANDS["run"], *PARSED}
