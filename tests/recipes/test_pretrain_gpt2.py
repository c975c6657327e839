"""The main job, run as users run it, at a small size."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pretrain_gpt2
import pytest
import torch
from helpers import refused
from hub_server import HubServer, mistakes_in
from huggingface_hub import ModelCard
from pretraining.data import token_files
from pretraining.data.token_files import TokenDataset
from pretraining.run import processes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "pretrain_gpt2.py"
TINY = [
    *("--n_layer", "2", "--n_head", "2", "--n_embd", "16", "--block_size", "32", "--embedded_vocab_size", "512"),
    *("--max_steps", "8", "--warmup_steps", "2", "--logging_steps", "2", "--eval_steps", "4", "--max_eval_blocks", "8"),
    *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4", "--sample_tokens", "8"),
    *("--disable_tqdm", "true", "--cpu_threads", "1"),
]


def run(output: Path, tokens: Path, *argv: str) -> dict:
    pretrain_gpt2.main([*TINY, "--data_dir", str(tokens), "--output_dir", str(output), *argv])
    return metrics_of(output)


def metrics_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal_weights(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def launch(*argv: object, config: str = "single_cpu", script: Path = SCRIPT, code: int = 0, **variables: str):
    """Launch a recipe with accelerate, and return what it printed."""
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    words = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / f"{config}.yaml"]
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


def test_model_and_metrics(finished, tokens):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(finished).eval(), AutoTokenizer.from_pretrained(finished)
    assert model.config.use_cache and len(tokenizer) == model.config.vocab_size == 512
    ids = tokenizer("import os", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] > ids.shape[1]
    assert "--- sample ---\nimport sys" in (finished.parent / "printed").read_text()

    metrics, blocks = metrics_of(finished), TokenDataset(tokens, "val", 32, max_blocks=8)
    with torch.no_grad():
        losses = [model(**{k: v[None] for k, v in blocks[i].items()}).loss.item() for i in range(8)]
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    per_token = token_files.load(tokens).bytes_per_token
    assert metrics["bits_per_byte"] == pytest.approx(metrics["eval_loss"] / math.log(2) / per_token)
    assert (metrics["steps"], metrics["tokens"], metrics["is_approx"]) == (8, 8 * 4 * 32, True)
    assert metrics["eval_loss"] < metrics["eval_loss_at_step_0"]
    assert metrics["tokens_per_second"] > 0 and metrics["train_loss"] > 0
    groups = {group["role"]: group for group in metrics["groups"]}
    shown = ("rule", "learning_rate", "weight_decay", "gamma")
    assert {role: tuple(group.get(key) for key in shown) for role, group in groups.items()} == {
        "matrix": ("mars-m", 1.6e-2, 0.1, 0.05),  # of configs/embedded.yaml
        "adamw": ("adamw", 3.2e-2, 0.1, None),
        "vector": ("adamw", 1.6e-2, 0.1, None),
    }


def test_card(finished, tokens):
    card, name, metrics = ModelCard.load(finished / "README.md"), token_files.load(tokens).name, metrics_of(finished)
    assert f"trained from scratch on the {name} dataset." in card.text
    assert f"| {metrics['eval_loss']:.4f} " in card.text and 'GPT2LMHeadModel.from_pretrained("mars")' in card.text
    assert card.data.library_name == "transformers" and "mars-m" in card.text
    row = next(line for line in card.text.splitlines() if line.startswith("| matrix"))
    assert "(0.95, 0.99)" in row and "| 0.05 |" in row
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("loss", metrics["eval_loss"], name)
    assert json.loads((finished / "mars.json").read_text())["create"]["mars_type"] == "mars-m"


def test_reproducible_and_not_overwritten(finished, tokens, tmp_path):
    run(tmp_path / "again", tokens)
    assert equal_weights(finished, tmp_path / "again")
    before = (finished / "metrics.json").read_bytes()
    with refused("--overwrite_output_dir"):
        run(finished, tokens)
    assert (finished / "metrics.json").read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "row"),
    [
        ("--is_approx false", "| 0.05 | 1 | False |"),
        ("--optimizer mars_adamw", "| matrix | mars-adamw |"),
        ("--optimizer mars_lion", "| matrix | mars-lion |"),
        ("--optimizer mars_shampoo", "| matrix | mars-shampoo |"),
        ("--optimizer adamw", ""),
    ],
)
def test_optimizers(finished, tokens, tmp_path, argv, row, capsys):
    metrics = run(tmp_path / "run", tokens, *argv.split())
    assert metrics["optimizer"] == (argv.split()[1] if "optimizer" in argv else "mars_m")
    assert metrics["eval_loss"] < metrics["eval_loss_at_step_0"] == metrics_of(finished)["eval_loss_at_step_0"]
    card = (tmp_path / "run" / "README.md").read_text()
    assert row in card and ("MARS" in card) == bool(row)
    exact = "approx" in argv
    assert metrics["is_approx"] == (not exact if row else None)
    assert ("is_approx=False: two gradients a step" in capsys.readouterr().out) == exact
    assert not equal_weights(finished, tmp_path / "run")


def test_processes_that_do_not_know_of_each_other_stop(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a GPU config does on a machine without GPUs
    with pytest.raises(ValueError, match="2 processes were launched, but each sees 1"):
        processes.check(SimpleNamespace(world_size=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_llama(tokens, tmp_path, kind):
    argv = ["--config", "llama", "--model_type", kind, "--n_kv_head", "1", "--n_inner", "48", "--max_steps", "20"]
    metrics = run(tmp_path / "run", tokens, *argv)
    assert metrics["eval_loss"] < metrics["eval_loss_at_step_0"] - 0.2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.num_key_value_heads == 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_give_the_weights_of_one(tokens, tmp_path):
    # eps 1e-6 and no biases: key biases have no gradient but rounding noise, which Adam would turn into steps. So
    # would Newton-Schulz in bfloat16, with any rounding.
    argv = [*TINY, "--data_dir", tokens, "--bias", "false", "--eps", "1e-6", "--sample_tokens", "0"]
    argv += ["--ns_dtype", "float32", "--output_dir"]
    launch(*argv, tmp_path / "ddp", "--per_device_train_batch_size", "2", config="cpu_ddp")
    launch(*argv, tmp_path / "one")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "ddp")
    for name in one:
        assert (one[name] - two[name]).abs().max() <= 5e-5 * one[name].abs().max(), name
    one, two = (metrics_of(tmp_path / name) for name in ("one", "ddp"))
    assert one["tokens"] == two["tokens"] and one["eval_loss"] == pytest.approx(two["eval_loss"], rel=1e-5)
    assert "- total_train_batch_size: 4\n" in (tmp_path / "ddp" / "README.md").read_text()


@pytest.mark.slow
def test_push_to_hub(tokens, tmp_path):
    argv = [*TINY, "--data_dir", tokens, "--output_dir"]
    with HubServer() as hub:
        environment = hub.environment(str(tmp_path / "home"))
        launch(*argv, tmp_path / "kept", **environment)
        assert hub.requests == []  # nothing is sent unless asked

        launch(*argv, tmp_path / "pushed", "--push_to_hub", "true", "--hub_model_id", "me/x", **environment)
        names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "metrics.json", "mars.json"}
        assert names <= set(hub.files) and not any(name.endswith(("train.bin", "optimizer.pt")) for name in hub.files)
        card = hub.files["README.md"].decode()
        assert mistakes_in(card) == [] and "# x" in card and "mars-m" in card and "| 0.05 |" in card
        assert hub.files["model.safetensors"] == (tmp_path / "pushed" / "model.safetensors").read_bytes()

        script = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            "model, tokenizer = (c.from_pretrained('me/x') for c in (AutoModelForCausalLM, AutoTokenizer))\n"
            "print(model.config.n_embd, tokenizer.decode(tokenizer('import os').input_ids))\n"
        )
        command, environment = [sys.executable, "-c", script], {**os.environ, **environment}
        loaded = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert loaded.stdout.strip() == "16 import os", loaded.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("omp_num_threads", "threads"), [(None, os.cpu_count()), ("1", 1)])
def test_omp_num_threads(tmp_path, tokens, monkeypatch, omp_num_threads, threads):
    """accelerate launch gives its worker OMP_NUM_THREADS=1 where the user has not set it."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import sys, torch, pretrain_gpt2\npretrain_gpt2.main(sys.argv[1:])\nprint('threads', torch.get_num_threads())"
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    argv = [*TINY[:-2], "--max_steps", "2", "--data_dir", tokens, "--output_dir", tmp_path / "run"]
    variables = {"OMP_NUM_THREADS": omp_num_threads} if omp_num_threads else {}
    assert f"threads {threads}" in launch(*argv, script=script, **variables).stdout.splitlines()


@pytest.mark.slow
def test_default_job(tmp_path):
    """The first command of the README, a fifth of its steps and less held-out text, on one core of two."""
    argv = ["--output_dir", tmp_path / "run", "--max_steps", "100", "--cpu_threads", "1", "--max_eval_blocks", "64"]
    ended, metrics = launch(*argv), metrics_of(tmp_path / "run")
    assert metrics["eval_loss"] <= 0.75 * metrics["eval_loss_at_step_0"]
    assert "--- sample ---" in ended.stdout and "100/100" in ended.stderr  # the progress bar


def test_divergence(tmp_path, tokens, capsys):
    """A learning rate far too high ends a run in one line; what was trained before is kept."""
    saves = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1", "--warmup_steps", "0")
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "out", tokens, *saves, "--learning_rate", "1e20", "--max_steps", "20")
    text = str(end.value.__context__)
    assert text.startswith("3 steps in a row with a non-finite loss or gradient")
    assert end.value.code == 2 and f"pretrain_gpt2.py: {text}\n" in capsys.readouterr().err
    (kept,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"Resume from {kept} with a lower learning rate" in text
    assert all(torch.isfinite(value).all() for value in weights(kept).values())
    assert not (tmp_path / "out" / "metrics.json").exists()
