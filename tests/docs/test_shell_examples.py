"""Every shell example of README and docs runs with small settings, or is parsed, with the reason for not running it.

A command in neither table fails the test, and so does a row that no page uses.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import prelude
import pytest
import yaml
from accelerate.commands import launch
from pages import PAGES, ROOT, blocks, commands, entry_points
from pretraining.data import embedded, token_files
from pretraining.run import arguments
from tiny_nanogpt import TinyGPT, save
from transformers import TrainingArguments

import mars_hf
from mars_hf.__main__ import main

TINY = [
    *("--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "32", "--embedded_vocab_size", "512"),
    *("--max_steps", "2", "--warmup_steps", "1", "--logging_steps", "1", "--eval_steps", "2", "--max_eval_blocks", "4"),
    *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4", "--sample_tokens", "4"),
    *("--cpu_threads", "1", "--disable_tqdm", "true"),
]
SCRIPT = [
    "--output_dir",
    "out",
    "--max_steps",
    "2",
    "--use_cpu",
    "true",
    "--report_to",
    "none",
    "--save_strategy",
    "no",
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Return the embedded corpus, tokenized once."""
    return embedded.prepare(tmp_path_factory.mktemp("data"), vocab_size=512)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Make a folder to run in, with the repository's folders and a user's script."""
    for name in ("accelerate_configs", "recipes", "benchmarks", "constraints.txt", "setup.cfg"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").write_text(prelude.SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


# What runs


def runs_as_written(extra: list[str], expected: str) -> Callable[[str, Path], None]:
    def run(command: str, tokens: Path) -> None:
        assert expected in process([*shlex.split(command), *extra])

    return run


def pretrains(command: str, tokens: Path) -> None:
    """Run the recipe in this process, which saves imports."""
    name, argv = script_of(shlex.split(command))
    assert name == "pretrain_gpt2"
    given = [] if "--data_dir" in argv else ["--data_dir", str(tokens)]
    importlib.import_module(name).main([*argv, *TINY, *given, "--output_dir", "run"])
    assert json.loads(Path("run", "metrics.json").read_text())["steps"] == 2


def main_of(extra: list[str], result: str) -> Callable[[str, Path], None]:
    def run(command: str, tokens: Path) -> None:
        name, argv = script_of(shlex.split(command))
        importlib.import_module(name).main([*argv, *extra])
        assert Path(result).is_file()

    return run


def converts(command: str, tokens: Path) -> None:
    python, _, package, *argv = shlex.split(command)
    assert (python, package) == ("python", "mars_hf")
    _, source, target = argv
    prelude.save_zero_checkpoint(Path(source))
    main(argv)
    assert (Path(target) / "zero" / "optimizer_state.pt").is_file()


def converts_nanogpt(command: str, tokens: Path) -> None:
    Path("out").mkdir()
    path = save(Path("out", "ckpt.pt"), TinyGPT("mars"))
    name, argv = script_of(shlex.split(command))
    made = Path("converted", "config.json")
    if "--to_nanogpt" in argv:
        importlib.import_module(name).main([str(path), argv[0]])
        path.unlink()
        made = path
    importlib.import_module(name).main(argv)
    assert made.is_file()


# What is parsed


def is_pip(command: str) -> None:
    """Check that the constraints and every named extra exist."""
    words = shlex.split(command)
    assert words[:3] == ["pip", "install", "-c"] and Path(words[3]).is_file() and words[4] == "-e"
    extras = configparser.ConfigParser()
    extras.read("setup.cfg")
    for extra in words[5].removeprefix(".").strip("[]").split(","):
        assert not extra or extra in extras["options.extras_require"]


def recipe_parses(command: str) -> None:
    name, argv = script_of(shlex.split(command))
    assert name == "pretrain_gpt2"
    assert arguments.parse([*argv, "--use_cpu", "true", "--bf16", "false", "--tf32", "false"]).config.is_file()


class _Parsed(Exception):
    """Raised when the command line was parsed without error."""


def script_parses(command: str) -> None:
    """Parse the arguments with the script's own parser, and stop there."""
    name, argv = script_of(shlex.split(command))
    read = argparse.ArgumentParser.parse_known_args

    def read_and_stop(*given, **settings):
        _, rest = read(*given, **settings)
        assert not rest
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", read_and_stop)
        importlib.import_module(name).main(argv)


def passes_on(command: str) -> None:
    """Parse the arguments with the script's own parser, and what it passes on with the recipe's."""
    name, argv = script_of(shlex.split(command))
    *_, rest = importlib.import_module(name).parse(argv)
    arguments.parse(rest)


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


def nothing(command: str) -> None:
    """Parse nothing."""


def evaluates(command: str, tokens: Path) -> None:
    name, argv = script_of(shlex.split(command))
    model, output = (argv[argv.index(flag) + 1] for flag in ("--model", "--output_file"))
    source = token_files.load(tokens)
    gpt2 = prelude.tiny_gpt2()
    gpt2.resize_token_embeddings(len(source.tokenizer), mean_resizing=False)
    for part in (gpt2, source.tokenizer):
        part.save_pretrained(model)
    importlib.import_module(name).main([*argv, "--data_dir", str(tokens), "--max_eval_blocks", "4", "--use_cpu"])
    assert json.loads(Path(output).read_text())["loss"] > 0


def trains_classifier(command: str, tokens: Path) -> None:
    name, argv = script_of(shlex.split(command))
    few = ["--max_steps", "2", "--eval_strategy", "no"]
    importlib.import_module(name).main([*argv, *few, *QUIET])
    assert json.loads(Path("run", "metrics.json").read_text())["eval_accuracy"] >= 0


def trains_llama(command: str, tokens: Path) -> None:
    name, argv = script_of(shlex.split(command))
    sizes = ["--n_embd", "16", "--n_inner", "32", "--n_layer", "1", "--block_size", "32"]
    few = ["--data_dir", str(tokens), "--max_steps", "2", "--eval_steps", "2", "--max_eval_blocks", "4"]
    importlib.import_module(name).main([*argv, *sizes, *few, *QUIET])
    assert json.loads(Path("run", "metrics.json").read_text())["steps"] == 2


def trains_adapter(command: str, tokens: Path) -> None:
    fine_tunes(command, tokens, {"prompt": "a", "completion": "b"})


def trains_on_text(command: str, tokens: Path) -> None:
    fine_tunes(command, tokens, {"text": "print(1)\n" * 20})


def fine_tunes(command: str, tokens: Path, row: dict[str, str]) -> None:
    name, argv = script_of(shlex.split(command))
    if "--model_name_or_path" in argv:
        model = argv[argv.index("--model_name_or_path") + 1]
    else:
        model = "tiny"
        argv = [*argv, "--model_name_or_path", model]
    source = token_files.load(tokens)
    gpt2 = prelude.tiny_gpt2()
    gpt2.resize_token_embeddings(len(source.tokenizer), mean_resizing=False)
    for part in (gpt2, source.tokenizer):
        part.save_pretrained(model)
    Path("rows").mkdir()
    Path("rows", "train.jsonl").write_text("\n".join([json.dumps(row)] * 40))
    few = ["--dataset_name", "rows", "--max_steps", "2", "--eval_strategy", "no"]
    importlib.import_module(name).main([*argv, *few, *QUIET])
    assert json.loads(Path("run", "metrics.json").read_text())["trainable_parameters"] > 0


QUIET = ["--output_dir", "run", "--disable_tqdm", "true", "--use_cpu", "true"]
TRAINED = "TRAINED WITH Mars "
TINY_TRAINING = ["--size", "tiny", "--device", "cpu", "--block", "16", "--rounds", "1", "--steps", "2"]
RUN: dict[str, Callable[[str, Path], None]] = {
    "accelerate launch recipes/pretrain_gpt2.py": pretrains,  # launched in full by tests/recipes/test_pretrain_gpt2.py
    "accelerate launch recipes/pretrain_gpt2.py --optimizer adamw": pretrains,
    "accelerate launch recipes/pretrain_gpt2.py --save_strategy steps --save_steps 100": pretrains,
    "accelerate launch recipes/pretrain_gpt2.py --is_approx false": pretrains,
    "accelerate launch recipes/pretrain_gpt2.py --optimizer mars_adamw": pretrains,
    "python -m mars_hf run train.py --optim mars_adamw --learning_rate 6e-4": runs_as_written(
        SCRIPT, TRAINED + "mars-adamw"
    ),
    "accelerate launch -m mars_hf run train.py --optim mars_lion --learning_rate 7e-5": runs_as_written(
        SCRIPT, TRAINED + "mars-lion"
    ),
    "python -m mars_hf to_universal out/checkpoint-500/global_step500 out/checkpoint-500/global_step500_universal": (
        converts
    ),
    "python recipes/convert_nanogpt.py out/ckpt.pt converted": converts_nanogpt,
    "python recipes/convert_nanogpt.py runs/pretrain-mars_adamw out --to_nanogpt": converts_nanogpt,
    "python recipes/evaluate_checkpoint.py --model runs/embedded-mars_m --output_file runs/evaluation.json": (
        evaluates
    ),
    "python recipes/finetune_vit.py": trains_classifier,  # in full in tests/recipes/test_finetuning.py
    "python recipes/sft_lora.py": trains_adapter,
    "python recipes/sft_lora.py --model_name_or_path runs/embedded-mars_m": trains_adapter,
    "python recipes/finetune_lm.py": trains_on_text,
    "python recipes/finetune_lm.py --use_peft true": trains_on_text,
    "python recipes/finetune_lm.py --optim mars_m": trains_on_text,
    "python recipes/pretrain_gpt2.py --config llama": trains_llama,
    "python recipes/pretrain_gpt2.py --config llama --model_type phi3 --optimizer mars_adamw": trains_llama,
    "python -m mars_hf suggest --adamw-lr 3e-4 --batch-tokens 524288 --rule mars-m": runs_as_written([], "mars-m "),
    "python benchmarks/step_cost.py --size 28m small": main_of(
        ["--size", "tiny", "--device", "cpu", "--rounds", "1", "--contenders", "^Mars$", "--output", "step.json"],
        "step.json",
    ),
    "python benchmarks/step_cost.py --size default 28m --contenders 'Muon|^mars-m$|^mars-shampoo$'": main_of(
        ["--size", "tiny", "--device", "cpu", "--rounds", "1", "--contenders", "^mars-m$", "--output", "step.json"],
        "step.json",
    ),
    "python benchmarks/train_cost.py --size small --batch 1 --block 512 --rounds 8 --steps 4": main_of(
        [*TINY_TRAINING, "--contenders", "Mars", "--output", "rate.json"],
        "rate.json",
    ),
    "python benchmarks/train_cost.py --size default --batch 16 --block 128": main_of(
        [*TINY_TRAINING, "--output", "exact.json"],
        "exact.json",
    ),
}
PARSED: dict[str, tuple[str, Callable[[str], None]]] = {
    "pip install -c constraints.txt -e .": ("installs packages", is_pip),
    "pip install -c constraints.txt -e '.[recipes]'": ("installs packages", is_pip),
    "pip install -c constraints.txt -e '.[recipes,finetune]'": ("installs packages", is_pip),
    "pip install -c constraints.txt -e '.[test]'": ("installs packages; .ci/run runs it", is_pip),
    "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu": ("installs a package", nothing),
    "pip install --no-deps -e .": ("installs packages", nothing),
    "axolotl train config.yaml": (
        "needs Axolotl; tests/training/test_axolotl.py checks the page's config, and trains where Axolotl is installed",
        nothing,
    ),
    "python -m mars_hf run -m llamafactory.cli train config.yaml": ("needs LLaMA-Factory", llama_factory_parses),
    "python -m pytest": ("is this run of the tests", nothing),
    "python recipes/finetune_vit.py --dataset_name photos --optim mars_adamw": (
        "needs photos; tests/recipes/test_finetuning.py trains on a folder of images",
        script_parses,
    ),
    "python recipes/finetune_vit.py --dataset_name food101 --model_name_or_path google/vit-base-patch16-224-in21k": (
        "needs the Hub; tests/recipes/test_finetuning.py goes on with a local model",
        script_parses,
    ),
    "python recipes/finetune_lm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name roneneldan/TinyStories": (
        "needs the Hub; tests/recipes/test_finetuning.py has a local model and data",
        script_parses,
    ),
    "python recipes/sft_lora.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara": (
        "needs the Hub; tests/recipes/test_finetuning.py has a local model and data",
        script_parses,
    ),
    "python recipes/compare_optimizers.py": (
        "sixteen runs; tests/recipes/test_compare_optimizers.py runs it with two small ones",
        script_parses,
    ),
    "python recipes/compare_optimizers.py --preset controls --jobs 2 --cpu_threads 1": (
        "fifty runs; tests/recipes/test_comparison.py parses every arm",
        passes_on,
    ),
    "python recipes/compare_optimizers.py --preset controls --bf16 true --jobs 2 --cpu_threads 1 "
    "--eval_steps 100 --eval_on_start false": (
        "fifty runs; tests/recipes/test_comparison.py parses every arm",
        passes_on,
    ),
    "python recipes/compare_optimizers.py --preset controls --embedded_corpus torch-headers "
    "--bf16 true --jobs 2 --cpu_threads 1 --eval_steps 100 --eval_on_start false": (
        "fifty runs; tests/recipes/test_comparison.py parses every arm",
        passes_on,
    ),
    "python recipes/compare_optimizers.py --preset gamma --seeds 1 2 3 --bf16 true --jobs 2 --cpu_threads 1": (
        "27 runs; tests/recipes/test_comparison.py parses every arm",
        passes_on,
    ),
    "python recipes/compare_optimizers.py --preset controls --arms muon mars_m": (
        "fifteen runs; tests/recipes/test_comparison.py parses every arm",
        passes_on,
    ),
    "python recipes/measure_tracking.py --output_dir runs/tracking": (
        "ten minutes; tests/recipes/test_tracking.py runs it with a small model",
        passes_on,
    ),
    "python recipes/measure_tracking.py --output_dir runs/tracking "
    "--optimizer mars_adamw --gamma 0.025 --learning_rate 0.002 --lr_embeddings 0.064": (
        "ten minutes; tests/recipes/test_tracking.py runs it with a small model",
        passes_on,
    ),
    "python recipes/prepare_data.py --dataset openwebtext --output_dir data/openwebtext": (
        "downloads 54 GB",
        script_parses,
    ),
    "python recipes/prepare_data.py --dataset fineweb-edu --max_tokens 50000000000 --output_dir data/fineweb-edu": (
        "downloads 290 GB",
        script_parses,
    ),
    "python recipes/prepare_data.py --files corpus/*.jsonl --text_column body --output_dir data/mine": (
        "needs GPT-2's vocabulary; tests/recipes/test_prepare_data.py has it and runs such commands",
        script_parses,
    ),
    "accelerate launch recipes/pretrain_gpt2.py --data_dir data/mine": (
        "reads what the command before it prepares; tests/recipes/test_prepare_data.py trains on such data",
        recipe_parses,
    ),
    "accelerate launch --config_file accelerate_configs/ddp.yaml recipes/pretrain_gpt2.py --config gpt2-small": (
        "needs 8 GPUs and 18 GB of tokens",
        recipe_parses,
    ),
    "python recipes/evaluate_checkpoint.py --model runs/gpt2-small-mars_adamw --data_dir data/openwebtext --bf16 "
    "--output_file small.json": ("needs a trained model and 18 GB of tokens", script_parses),
    "python recipes/evaluate_checkpoint.py --model openai-community/gpt2 --tasks paper --output_file gpt2.json": (
        "needs the Hub; tests/recipes/test_evaluate_checkpoint.py runs local tasks",
        script_parses,
    ),
    "accelerate launch recipes/pretrain_gpt2.py --save_strategy steps --save_steps 100 --resume_from_checkpoint true": (
        "needs the run before it; tests/recipes/test_resuming.py resumes runs",
        recipe_parses,
    ),
    "accelerate launch --config_file accelerate_configs/cpu_ddp.yaml recipes/pretrain_gpt2.py": (
        "tests/recipes/test_pretrain_gpt2.py runs it on two processes",
        recipe_parses,
    ),
    "accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 4 recipes/pretrain_gpt2.py "
    "--config gpt2-small --gradient_accumulation_steps 8": ("needs 4 GPUs and 18 GB of tokens", recipe_parses),
    "accelerate launch --num_processes 4 train.py --resume_from_checkpoint out/checkpoint-500": (
        "needs DeepSpeed on 4 processes; tests/distributed/test_checkpoints.py runs such a script",
        launch_parses,
    ),
}


def shown() -> list[str]:
    """Return every command of README and docs once, with parts joined by && separated."""
    found = [command for page in PAGES for command in commands(page)]
    found += [code for code in entry_points() if code.startswith(("python ", "accelerate "))]
    return list(dict.fromkeys(part.strip() for command in found for part in command.split(" && ")))


def test_every_command_is_accounted_for():
    assert set(shown()) == {*RUN, *PARSED}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_command_runs(command, place, tokens):
    RUN[command](command, tokens)


@pytest.mark.parametrize("command", PARSED)
def test_command_parses(command, place):
    _, parses = PARSED[command]
    parses(command)
