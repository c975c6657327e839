"""Training image classifiers: the digits, a folder of images, and a model that was trained before."""

from __future__ import annotations

import json

import finetune_vit
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

import mars_hf

TINY = [
    *("--hidden_size", "32", "--num_hidden_layers", "1", "--max_steps", "120", "--eval_strategy", "no"),
    *("--logging_steps", "20", "--disable_tqdm", "true", "--use_cpu", "true"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train a tiny ViT on the digits."""
    output = tmp_path_factory.mktemp("runs") / "vit"
    trainer, found = finetune_vit.main([*TINY, "--learning_rate", "1e-2", "--output_dir", str(output)])
    return output, trainer, found


def test_a_run_on_the_digits_learns(finished):
    output, trainer, found = finished
    assert len(trainer.train_dataset) + len(trainer.eval_dataset) == 1797
    first = next(row for row in trainer.state.log_history if "eval_loss" in row)
    assert first["eval_accuracy"] < 0.25 and found["eval_accuracy"] > 0.35
    assert json.loads((output / "metrics.json").read_text()) == found
    card = (output / "README.md").read_text()
    assert "mars-m" in card and "scikit-learn digits" in card and "pipeline_tag: image-classification" in card


def test_the_optimizer_is_mars_and_classes_are_balanced(finished):
    _, trainer, _ = finished
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, mars_hf.Mars)
    assert {group["mars_type"] for group in optimizer.param_groups} == {"mars-m"}
    roles = {name: group["role"] for group in optimizer.param_groups for name in group["param_names"]}
    assert set(roles) == {name for name, _ in trainer.model.named_parameters()}
    assert roles["vit.embeddings.patch_embeddings.projection.weight"] == "matrix"
    assert roles["classifier.weight"] == roles["vit.embeddings.position_embeddings"] == "adamw"
    assert roles["classifier.bias"] == "vector"
    counts = np.bincount(trainer.eval_dataset.with_format(None)["label"])
    assert counts.min() >= 34 and counts.max() <= 38  # of 360 images


def test_the_saved_model_classifies_images(finished):
    output, trainer, _ = finished
    classify = pipeline("image-classification", model=str(output), device="cpu")
    rows = trainer.eval_dataset.with_format(None).select(range(50))
    hits = [classify(row["image"].convert("RGB"))[0]["label"] == str(row["label"]) for row in rows]
    assert np.mean(hits) > 0.3


@pytest.fixture
def folder(tmp_path):
    """Make a folder of bright and dark images."""
    for label, low in (("bright", 180), ("dark", 0)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng(number).integers(low, low + 70, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{number}.png")
    return tmp_path / "images"


def test_a_folder_of_images(folder, tmp_path):
    argv = ["--dataset_name", str(folder), "--image_size", "8", "--output_dir", str(tmp_path / "run")]
    trainer, found = finetune_vit.main([*TINY, *argv, "--max_steps", "20"])
    assert len(trainer.eval_dataset) == 8 and found["dataset"] == str(folder)
    assert found["eval_accuracy"] == 1
    assert trainer.model.config.id2label == {0: "bright", 1: "dark"}


def test_a_pretrained_model_goes_on_with_other_classes(finished, folder, tmp_path):
    source, _, _ = finished
    argv = ["--dataset_name", str(folder), "--model_name_or_path", str(source), "--output_dir", str(tmp_path / "run")]
    few = ["--max_steps", "3", "--eval_strategy", "no", "--disable_tqdm", "true", "--use_cpu", "true"]
    trainer, found = finetune_vit.main([*few, *argv])
    assert found["learning_rate"] == 6.4e-5
    before = AutoModelForImageClassification.from_pretrained(source).state_dict()
    after = trainer.model.state_dict()
    assert after["classifier.weight"].shape == (2, 32)
    name = "vit.embeddings.patch_embeddings.projection.weight"
    assert 0 < (after[name] - before[name]).abs().max() < 1e-3
    assert AutoImageProcessor.from_pretrained(tmp_path / "run").size == {"height": 8, "width": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim",
    [optim if optim == "mars_m" else pytest.param(optim, marks=pytest.mark.soak) for optim in finetune_vit.STARTS],
)
def test_the_default_run_ends_above_nine_tenths(optim, tmp_path):
    argv = ["--optim", optim, "--output_dir", str(tmp_path / "run"), "--disable_tqdm", "true", "--use_cpu", "true"]
    _, found = finetune_vit.main(argv)
    assert found["eval_accuracy"] > 0.9


def test_a_run_is_reproducible(tmp_path):
    runs = []
    for number in range(2):
        trainer, _ = finetune_vit.main([*TINY, "--max_steps", "4", "--output_dir", str(tmp_path / str(number))])
        runs.append(list(trainer.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--dataset_name gone", "gone"),
        ("--label_column class", "the data have the columns image, label; name one"),
        ("--test_size 2", "test_size=2"),
        ("--num_attention_heads 5", "--num_attention_heads 5 must divide --hidden_size 64"),
        ("--patch_size 3", "--patch_size 3 must divide --image_size 8"),
        ("--model_name_or_path gone", "couldn't find them in the cached files"),
        ("--optim adam --learning_rate 1", "adam is not a valid OptimizerNames"),
        (
            "--optim sgd",
            "--optim sgd: the recipe has no learning rate for it, only for mars_m, mars_adamw, adamw_torch",
        ),
    ],
)
def test_wrong_input(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        finetune_vit.main(["--use_cpu", "true", *words.split()])
    assert end.value.code == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("finetune_vit.py: ")]
    assert line in said
    assert not (tmp_path / "runs").exists()
