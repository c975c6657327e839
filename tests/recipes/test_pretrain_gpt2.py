"""The main job, run as users run it, at a small size."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pretrain_gpt2
import pytest
import torch
from helpers import equal, refused
from huggingface_hub import HfApi, ModelCard
from PIL import Image
from pretraining.data import token_files
from pretraining.data.token_files import TokenDataset
from pretraining.run import arguments, processes, report
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "pretrain_gpt2.py"
TINY = (
    "--n_layer 2 --n_head 2 --n_embd 16 --block_size 32 --embedded_vocab_size 512 --max_steps 8 --warmup_steps 2 "
    "--logging_steps 2 --eval_steps 4 --max_eval_blocks 8 --per_device_train_batch_size 4 "
    "--per_device_eval_batch_size 4 --sample_tokens 8 --disable_tqdm true --cpu_threads 1"
).split()


def run(output: Path, tokens: Path, *argv: str) -> dict:
    pretrain_gpt2.main([*TINY, "--data_dir", str(tokens), "--output_dir", str(output), *argv])
    return metrics_of(output)


def metrics_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal_weights(a: Path, b: Path) -> bool:
    return equal(weights(a), weights(b))


def launch(*argv: object, config: str = "single_cpu", script: Path = SCRIPT, code: int = 0, **variables: str):
    """Launch a recipe with accelerate, and return what it printed."""
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    words = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / f"{config}.yaml"]
    words += ["--main_process_port", "0"]  # a free one: others launch, too
    command = [sys.executable, *map(str, [*words, script, *argv])]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert ended.returncode == code, ended.stderr[-3000:]
    return ended


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokens) -> Path:
    """A finished run, and what it printed in the file `printed`."""
    output = tmp_path_factory.mktemp("runs") / "mars"
    with (output.parent / "printed").open("w") as file, contextlib.redirect_stdout(file):
        run(output, tokens, "--sample_prompt", "import sys")
    return output


@pytest.mark.parametrize("prompt", ["a", "a" * 40])
def test_sample_ends_with_the_models_positions(prompt):
    """A model of short blocks has fewer positions than a sample has tokens."""
    tokenizer = GPT2Tokenizer(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[])
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=16, vocab_size=3, eos_token_id=None))
    assert len(report.sample(model, tokenizer, prompt, 96, seed=0).replace("<|endoftext|>", "e")) == 16


def test_model_and_metrics(finished, tokens):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(finished).eval(), AutoTokenizer.from_pretrained(finished)
    assert model.config.use_cache and len(tokenizer) == model.config.vocab_size == 512
    ids = tokenizer("import os", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] > ids.shape[1]
    assert "--- sample ---\nimport sys" in (finished.parent / "printed").read_text()

    metrics, blocks = metrics_of(finished), TokenDataset(tokens, "val", 32, max_blocks=8)
    with torch.no_grad():
        losses = [model(**{k: v[None] for k, v in blocks[i].items()}).loss.item() for i in range(8)]
    loss = sum(losses) / 8
    assert {key: metrics[key] for key in ("eval_loss", "perplexity", "bits_per_byte")} == pytest.approx(
        {
            "eval_loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) / token_files.load(tokens).bytes_per_token,
        },
        rel=1e-5,
    )
    assert (metrics["steps"], metrics["tokens"]) == (8, 8 * 4 * 32)
    assert metrics["tokens_per_second"] > 0 and metrics["train_loss"] > 0
    groups = json.loads((finished / "mars.json").read_text())["groups"]
    assert {group["role"]: (group["rule"], group["lr"], group["weight_decay"]) for group in groups} == {
        "matrix": ("mars-m", 1.6e-2, 0.1),  # of configs/embedded.yaml
        "adamw": ("adamw", 3.2e-2, 0.1),
        "vector": ("adamw", 1.6e-2, 0.1),
    }


def test_model_card_of_a_run(finished, tokens):
    card, name, loss = ModelCard.load(finished / "README.md"), token_files.load(tokens).name, metrics_of(finished)
    assert f"trained from scratch on the {name} dataset." in card.text
    assert f"| {loss['eval_loss']:.4f} " in card.text
    row = next(line for line in card.text.splitlines() if line.startswith("| matrix"))
    assert "mars-m" in row and "(0.95, 0.99)" in row and "| 0.05 |" in row
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("loss", loss["eval_loss"], name)
    assert json.loads((finished / "mars.json").read_text())["create"]["mars_type"] == "mars-m"


def test_picture_of_losses(finished):
    """On the card, too; AdamW's curve belongs to the default job alone."""
    assert Image.open(finished / "losses.png").size == (768, 432)
    assert "![Training and held-out loss over steps](losses.png)" in (finished / "README.md").read_text()
    assert "AdamW" not in (finished.parent / "printed").read_text()


def test_adamw_of_the_default_job():
    for optimizer in ("mars_m", "adamw"):
        curve = report.recorded_adamw(arguments.parse(["--optimizer", optimizer]))
        assert [step for step, _ in curve] == [100, 200, 300, 400, 500] and curve[-1][1] == pytest.approx(
            4.215, abs=1e-3
        )
    for other in (
        ["--n_layer", "2"],
        ["--max_steps", "100"],
        ["--per_device_train_batch_size", "8"],
        ["--data_dir", "x"],
    ):
        assert report.recorded_adamw(arguments.parse(other)) == []


def test_last_lines(capsys):
    metrics = {
        "eval_loss": 3.9,
        "eval_loss_at_step_0": 8.3,
        "perplexity": 49.4,
        "bits_per_byte": 2,
        "tokens_per_second": 9,
    }
    pretrain_gpt2.print_results(Path("out"), metrics, 4.2148)
    assert (
        "held-out loss     3.9000  (step 0: 8.3000)\nAdamW ends at     4.2148  (in this job" in capsys.readouterr().out
    )


def test_processes_that_do_not_know_of_each_other_stop(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a GPU config does on a machine without GPUs
    with pytest.raises(ValueError, match="2 processes were launched, but each sees 1"):
        processes.check(SimpleNamespace(world_size=1))


@pytest.mark.parametrize(("use_cpu", "has_gpu", "lines"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_run_on_the_cpu_tells_of_an_idle_gpu(monkeypatch, capsys, use_cpu, has_gpu, lines):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    processes.tell_of_idle_gpu(SimpleNamespace(use_cpu=use_cpu, process_index=0))
    assert capsys.readouterr().out.count("--use_cpu false trains there") == lines


def test_threads_of_a_launched_run(monkeypatch):
    """A launcher gives its worker OMP_NUM_THREADS=1 where the user has not set it."""
    found, training = [], SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    for variables in ({}, {"OMP_NUM_THREADS": "1"}):
        monkeypatch.setattr(processes.psutil.Process, "environ", lambda _, variables=variables: variables)
        processes.set_threads(training, None)
    processes.set_threads(training, 3)
    assert found == [os.cpu_count(), 3]


@pytest.mark.slow
def test_push_to_hub(tokens, tmp_path, monkeypatch):
    """What Trainer hands to huggingface_hub. All tests are offline, so other runs upload nothing."""
    pushed = set()

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns, **_):
        pushed.add(repo_id)
        ignore = shutil.ignore_patterns(*ignore_patterns)
        shutil.copytree(folder_path, tmp_path / "hub", ignore=ignore, dirs_exist_ok=True)

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **_: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    run(tmp_path / "out", tokens, "--push_to_hub", "true", "--hub_model_id", "me/x")
    names = {path.name for path in (tmp_path / "hub").rglob("*")}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "metrics.json", "mars.json"} <= names
    assert pushed == {"me/x"} and not names & {"train.bin", "optimizer.pt"}
    assert equal_weights(tmp_path / "hub", tmp_path / "out")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "# x" in card and "mars-m" in card and "| 0.05 |" in card
    data = ModelCard(card).data
    assert data.base_model is data.datasets is None and all(result.dataset_type for result in data.eval_results)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--attn_implementation", "flash_attention_2"], "[Ff]lash"),
        (["--max_eval_blocks", "0"], "--max_eval_blocks 0 is below 1"),
        (["--block_size", "0"], "--block_size 0 is below 2"),
        (["--model_type", "llama", "--n_kv_head", "3"], "n_head=2 is not a multiple of n_kv_head=3"),
        (["--n_kv_head", "1"], "n_kv_head=1 does nothing in gpt2; remove it"),
        (["--model_type", "llama", "--activation_function", "gelu"], "activation_function=gelu does nothing in llama"),
        (
            ["--dataloader_drop_last", "true", "--per_device_train_batch_size", "100000"],
            "no step was made: no epochs, or fewer tokens than a batch and --dataloader_drop_last true",
        ),
        (["--eps", "0", "--max_steps", "1"], "the held-out loss is nan; start again with a lower --learning_rate"),
    ],
)
def test_values_that_only_data_or_model_refuse(tmp_path, tokens, words, line):
    """No traceback, and no result."""
    with refused(line):
        run(tmp_path / "run", tokens, *words)
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.slow
def test_default_job(tmp_path):
    """The first command of the README, a tenth of its steps and less held-out text, on one core of two."""
    argv = ["--output_dir", tmp_path / "run", "--max_steps", "50", "--cpu_threads", "1", "--max_eval_blocks", "64"]
    ended, metrics = launch(*argv), metrics_of(tmp_path / "run")
    assert metrics["eval_loss"] <= 0.75 * metrics["eval_loss_at_step_0"]
    assert "--- sample ---" in ended.stdout and "50/50" in ended.stderr  # the progress bar
    assert "parameters: gpt2, 4 layers of 4 heads, width 128, context 128\n" in ended.stdout
    assert "loss_type" not in ended.stderr + ended.stdout


def test_divergence_stops_with_one_line(tmp_path, tokens):
    """A learning rate far too high ends a run in one line; what was trained before is kept."""
    saves = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1", "--warmup_steps", "0")
    line = "^3 steps in a row with a non-finite loss or gradient.* Start again with a lower --learning_rate and another"
    with refused(line):
        run(tmp_path, tokens, *saves, "--learning_rate", "1e20", "--max_steps", "20")
    (kept,) = tmp_path.glob("checkpoint-*")
    assert all(torch.isfinite(value).all() for value in weights(kept).values())
    assert not (tmp_path / "metrics.json").exists()
