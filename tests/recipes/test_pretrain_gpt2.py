"""The main job, run as users run it, at a small size."""

from __future__ import annotations

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
from helpers import refused
from hub_server import HubServer, mistakes_in
from huggingface_hub import ModelCard
from pretraining.data import token_files
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
    return json.loads((output / "metrics.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def assert_close_weights(a: Path, b: Path, bar: float) -> None:
    first, second = weights(a), weights(b)
    for name in first:
        scale = first[name].abs().max()
        assert (first[name] - second[name]).abs().max() <= bar * scale, name


def launch(*argv: str, config: str | None = None, **environment: str) -> subprocess.CompletedProcess:
    chosen = ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")] if config else []
    command = [sys.executable, "-m", "accelerate.commands.launch", *chosen, str(SCRIPT), *argv]
    finished = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokens) -> Path:
    output = tmp_path_factory.mktemp("runs") / "mars"
    run(output, tokens)
    return output


def test_what_a_run_leaves(finished):
    model = AutoModelForCausalLM.from_pretrained(finished)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    assert model.config.use_cache
    assert len(tokenizer) == model.config.vocab_size == 512
    ids = tokenizer("import os", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] > ids.shape[1]


def test_metrics(finished, tokens):
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["steps"] == 8 and metrics["tokens"] == 8 * 4 * 32
    assert metrics["eval_loss"] < metrics["eval_loss_at_step_0"]
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    per_token = token_files.load(tokens).bytes_per_token
    assert metrics["bits_per_byte"] == pytest.approx(metrics["eval_loss"] / math.log(2) / per_token)
    assert metrics["tokens_per_second"] > 0 and metrics["train_loss"] > 0


def test_eval_loss_is_the_mean_over_held_out_blocks(finished, tokens):
    from pretraining.data.token_files import TokenDataset

    model = AutoModelForCausalLM.from_pretrained(finished).eval()
    blocks = TokenDataset(tokens, "val", 32, max_blocks=8)
    with torch.no_grad():
        losses = [model(**{k: v[None] for k, v in blocks[i].items()}).loss.item() for i in range(8)]
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)


def test_the_card_states_data_and_results(tmp_path, tokens):
    metrics = run(tmp_path / "run", tokens, "--max_steps", "2", "--eval_steps", "2")
    card = ModelCard.load(tmp_path / "run" / "README.md")
    name = token_files.load(tokens).name
    assert f"trained from scratch on the {name} dataset." in card.text
    assert f"| {metrics['eval_loss']:.4f} " in card.text and 'GPT2LMHeadModel.from_pretrained("run")' in card.text
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("loss", metrics["eval_loss"], name)
    assert json.loads((tmp_path / "run" / "mars.json").read_text())["create"]["mars_type"] == "mars-m"


def test_the_card_names_the_optimizer_and_its_settings(finished):
    card = (finished / "README.md").read_text()
    assert "mars-m" in card and "library_name: transformers" in card
    row = next(line for line in card.splitlines() if line.startswith("| matrix"))
    assert "(0.95, 0.99)" in row and "| 0.05 |" in row  # of configs/embedded.yaml


def test_a_run_is_reproducible(finished, tokens, tmp_path):
    run(tmp_path / "again", tokens)
    assert_equal_weights(finished, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "mars_adamw", "mars_lion", "mars_shampoo"])
def test_other_optimizers(finished, tokens, tmp_path, optimizer):
    metrics = run(tmp_path / "run", tokens, "--optimizer", optimizer)
    assert metrics["optimizer"] == optimizer
    assert metrics["eval_loss"] < metrics["eval_loss_at_step_0"]
    card = (tmp_path / "run" / "README.md").read_text()
    assert ("MARS" not in card) if optimizer == "adamw" else (f"| matrix | {optimizer.replace('_', '-')} |" in card)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(weights(finished).values(), weights(tmp_path / "run").values(), strict=True)
    )


def test_exact_mars(finished, tokens, tmp_path, capsys):
    metrics = run(tmp_path / "run", tokens, "--is_approx", "false")
    assert metrics["is_approx"] is False
    assert "is_approx=False: two gradients a step" in capsys.readouterr().out
    assert "| 0.05 | 1 | False |" in (tmp_path / "run" / "README.md").read_text()
    assert metrics["eval_loss"] < metrics["eval_loss_at_step_0"]
    approx = json.loads((finished / "metrics.json").read_text())
    assert approx["is_approx"] is True
    assert metrics["eval_loss_at_step_0"] == approx["eval_loss_at_step_0"]
    assert any(
        not torch.equal(a, b)
        for a, b in zip(weights(finished).values(), weights(tmp_path / "run").values(), strict=True)
    )


ACCUMULATED = ["--dropout", "0.1", "--gradient_accumulation_steps", "2"]


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        pytest.param(optimizer, extra, id=f"{name}-{kind}", marks=[] if (name, kind) in quick else [pytest.mark.slow])
        for quick in [{("mars_adamw", "plain"), ("exact", "accumulated")}]
        for name, optimizer in {
            "mars_adamw": ["mars_adamw"],
            "exact": ["mars_adamw", "--is_approx", "false"],
            "mars_shampoo": ["mars_shampoo"],
            "mars_m": ["mars_m"],
            "adamw": ["adamw"],
        }.items()
        for kind, extra in {"plain": [], "accumulated": ACCUMULATED}.items()
    ],
)
def test_resuming_continues_to_the_bit(tokens, tmp_path, optimizer, extra):
    argv = ["--save_strategy", "steps", "--save_steps", "3", "--optimizer", *optimizer, *extra]
    run(tmp_path / "whole", tokens, *argv)
    # As after a kill between steps 3 and 6.
    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "whole" / "run.json", tmp_path / "resumed")
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    metrics = run(tmp_path / "resumed", tokens, *argv, "--resume_from_checkpoint", "true")
    assert_equal_weights(tmp_path / "whole", tmp_path / "resumed")
    assert metrics["eval_loss"] == json.loads((tmp_path / "whole" / "metrics.json").read_text())["eval_loss"]
    by_path = str(tmp_path / "whole" / "checkpoint-6")
    run(tmp_path / "by_path", tokens, *argv, "--resume_from_checkpoint", by_path)
    assert_equal_weights(tmp_path / "whole", tmp_path / "by_path")


def test_a_finished_run_is_not_overwritten_silently(finished, tokens):
    before = (finished / "metrics.json").read_bytes()
    with refused("--overwrite_output_dir"):
        run(finished, tokens)
    assert (finished / "metrics.json").read_bytes() == before


def test_processes_that_do_not_know_of_each_other_stop(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a GPU config does on a machine without GPUs
    with pytest.raises(ValueError, match="2 processes were launched, but each sees 1"):
        processes.check(SimpleNamespace(world_size=1))


def test_a_paper_config_trains_from_prepared_tokens(tokens, tmp_path):
    argv = ["--config", "gpt2-small", "--bf16", "false", "--tf32", "false", "--use_cpu", "true", "--vocab_size", "576"]
    argv += ["--dataloader_num_workers", "0", "--gradient_accumulation_steps", "2", "--tokens_per_step", "256"]
    metrics = run(tmp_path / "run", tokens, *argv)
    assert metrics["tokens"] == 8 * 4 * 32 * 2
    trained = weights(tmp_path / "run")
    assert trained["transformer.wte.weight"].shape[0] == 576
    assert not any(value.any() for name, value in trained.items() if name.endswith(".bias"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_llama(tokens, tmp_path, kind, capsys):
    argv = ["--config", "llama", "--model_type", kind, "--n_kv_head", "1", "--n_inner", "48", "--max_steps", "20"]
    metrics = run(tmp_path / "run", tokens, *argv)
    assert metrics["eval_loss"] < metrics["eval_loss_at_step_0"] - 0.2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.num_key_value_heads == 1
    printed = capsys.readouterr().out
    assert "--- sample ---" in printed and "is_approx=True" in printed


def test_the_sample_is_printed(tokens, tmp_path, capsys):
    run(tmp_path / "run", tokens, "--sample_prompt", "import sys")
    assert "--- sample ---\nimport sys" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ddp_on_two_cpu_processes_gives_the_weights_of_one(tokens, tmp_path):
    # eps 1e-6 and no biases: key biases have no gradient but rounding noise, which Adam would turn into steps. So
    # would Newton-Schulz in bfloat16, with any rounding.
    shared = [*TINY, "--data_dir", str(tokens), "--bias", "false", "--eps", "1e-6", "--sample_tokens", "0"]
    shared += ["--ns_dtype", "float32"]
    launch(*shared, "--output_dir", str(tmp_path / "ddp"), "--per_device_train_batch_size", "2", config="cpu_ddp")
    launch(*shared, "--output_dir", str(tmp_path / "one"), "--per_device_train_batch_size", "4", config="single_cpu")
    assert_close_weights(tmp_path / "one", tmp_path / "ddp", bar=5e-5)
    one, two = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "ddp"))
    assert one["tokens"] == two["tokens"]
    assert "- total_train_batch_size: 4\n" in (tmp_path / "ddp" / "README.md").read_text()
    assert one["eval_loss"] == pytest.approx(two["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_push_to_hub(tokens, tmp_path):
    argv = [*TINY, "--data_dir", str(tokens)]
    with HubServer() as hub:
        environment = hub.environment(str(tmp_path / "home"))
        launch(*argv, "--output_dir", str(tmp_path / "kept"), config="single_cpu", **environment)
        assert hub.requests == []  # nothing is sent unless asked

        pushed = ["--push_to_hub", "true", "--hub_model_id", "me/x", "--output_dir", str(tmp_path / "pushed")]
        launch(*argv, *pushed, config="single_cpu", **environment)
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "metrics.json"} <= set(hub.files)
        assert "mars.json" in hub.files and mistakes_in(hub.files["README.md"].decode()) == []
        assert not any(name.endswith(("train.bin", "optimizer.pt")) for name in hub.files)
        card = hub.files["README.md"].decode()
        assert "# x" in card and "mars-m" in card and "| 0.05 |" in card
        assert hub.files["model.safetensors"] == (tmp_path / "pushed" / "model.safetensors").read_bytes()

        script = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            "model, tokenizer = (c.from_pretrained('me/x') for c in (AutoModelForCausalLM, AutoTokenizer))\n"
            "print(model.config.n_embd, tokenizer.decode(tokenizer('import os').input_ids))\n"
        )
        loaded = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}
        )
        assert loaded.stdout.strip() == "16 import os", loaded.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("omp_num_threads", "expected"), [(None, os.cpu_count()), ("1", 1)])
def test_omp_num_threads_wins(tmp_path, tokens, omp_num_threads, expected):
    """accelerate launch gives its worker OMP_NUM_THREADS=1 where the user has not set it."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import sys, torch, pretrain_gpt2\npretrain_gpt2.main(sys.argv[1:])\nprint('threads', torch.get_num_threads())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(SCRIPT.parent)} | (
        {"OMP_NUM_THREADS": omp_num_threads} if omp_num_threads else {}
    )
    argv = [*TINY[:-2], "--max_steps", "2", "--data_dir", str(tokens), "--output_dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "accelerate.commands.launch", str(script), *argv]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert f"threads {expected}" in finished.stdout.splitlines(), finished.stderr[-3000:]


@pytest.mark.slow
def test_the_default_job_learns(tmp_path):
    """The first command of the README, a fifth of its steps and less held-out text, on one core of two."""
    finished = launch(
        "--output_dir", str(tmp_path / "run"), "--max_steps", "100", "--cpu_threads", "1", "--max_eval_blocks", "64"
    )
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["eval_loss"] <= 0.75 * metrics["eval_loss_at_step_0"]
    assert "--- sample ---" in finished.stdout
    assert "100/100" in finished.stderr  # the progress bar


def test_a_run_that_diverges_ends_in_one_line(tmp_path, tokens, capsys):
    """A learning rate far too high; what was trained before is kept."""
    saves = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1", "--warmup_steps", "0")
    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "out", tokens, *saves, "--learning_rate", "1e20", "--max_steps", "20")
    text = str(exit.value.__context__)
    assert text.startswith("3 steps in a row with a non-finite loss or gradient")
    assert exit.value.code == 2 and f"pretrain_gpt2.py: {text}\n" in capsys.readouterr().err
    (kept,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"Resume from {kept} with a lower learning rate" in text
    assert all(torch.isfinite(value).all() for value in weights(kept).values())
    assert not (tmp_path / "out" / "metrics.json").exists()
