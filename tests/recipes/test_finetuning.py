"""The fine-tuning recipes: one file each, on local models and data; their commands in docs run in test_examples.py."""

from __future__ import annotations

import ast
import json
import math
import shutil
import sys
from pathlib import Path

import datasets
import finetune_lm
import finetune_vit
import numpy as np
import pretrain_minimal
import pytest
import sft_lora
import torch
from helpers import gpt2
from peft import AutoPeftModelForCausalLM
from PIL import Image
from test_pretrain_gpt2 import equal_weights, launch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

import mars_hf
from mars_hf.groups.suggest import suggest

RECIPES = [finetune_lm, finetune_vit, pretrain_minimal, sft_lora]
FEW = "--use_cpu true --disable_tqdm true --report_to none --max_steps 20 --logging_steps 10".split()
TEXT = "for number in range(10):\n    print(number)\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Save a random GPT-2 and a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = GPT2Tokenizer().train_new_from_iterator([TEXT, "say return None"], 300)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, sft_lora.CHAT_TEMPLATE
    gpt2(n_embd=32, n_positions=64, vocab_size=len(tokenizer), **ends).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Write texts as .jsonl and as .txt, prompts with one answer, chats, and a folder of bright and dark images."""
    folder = tmp_path_factory.mktemp("data")
    chat = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "return None"}]
    rows = {
        "body": [{"body": TEXT, "other": 1}] * 200,
        "prompts": [{"prompt": f"say {number}\n", "completion": "return None\n"} for number in range(100)],
        "chats": [{"messages": chat}] * 40,
    }
    for name, own in rows.items():
        (folder / name).mkdir()
        datasets.Dataset.from_list(own).to_json(folder / name / "train.jsonl")
    (folder / "txt").mkdir()
    (folder / "txt" / "one.txt").write_text(TEXT * 60)
    for label, low in (("bright", 180), ("dark", 0)):
        (folder / "images" / label).mkdir(parents=True)
        for number, pixels in enumerate(np.random.default_rng(0).integers(low, low + 70, (20, 12, 12, 3), np.uint8)):
            Image.fromarray(pixels).save(folder / "images" / label / f"{number}.png")
    return folder


def tune(base: Path, output: Path, *argv: object, recipe=finetune_lm):
    argv = ("--model_name_or_path", base, "--output_dir", output, *argv)
    if recipe is finetune_lm:
        argv = ("--block_size", 64, *argv)
    return recipe.main([*FEW, *map(str, argv)])


def losses(trainer) -> tuple[float, float]:
    """Return the held-out losses before the first step and after the last one."""
    found = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return found[0], found[-1]


def matrix_groups(trainer) -> list[dict]:
    return [group for group in trainer.optimizer.optimizer.param_groups if group["role"] == "matrix"]


def test_all_weights_train(base, data, tmp_path):
    """At MARS's rate for the AdamW's; the folder gets the weights, tokenizer, card, settings and losses."""
    argv = ["--dataset_name", data / "body", "--text_column", "body", "--learning_rate", "1e-2"]
    trainer = tune(base, tmp_path / "run", *argv)
    before, after = losses(trainer)
    assert after < before - 1
    weights = GPT2LMHeadModel.from_pretrained(base).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    for name, param in trainer.model.named_parameters():
        assert not torch.equal(param, weights[name]) and torch.equal(param, saved[name]), name
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run")) == len(AutoTokenizer.from_pretrained(base))
    rate = suggest("mars-adamw", 1e-2, (0.9, 0.999))["lr"]
    assert all(group["initial_lr"] == pytest.approx(rate) for group in matrix_groups(trainer))
    assert json.loads((tmp_path / "run" / "eval_results.json").read_text())["eval_loss"] == after
    assert "mars" in (tmp_path / "run" / "README.md").read_text() and (tmp_path / "run" / "mars.json").is_file()
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert any("mars/update_rms" in row for row in state["log_history"])


def test_text_files(base, data, tmp_path):
    """A .txt file is one document, whose end is held out; another rule steps at its own rate."""
    trainer = tune(base, tmp_path, "--dataset_name", data / "txt", "--max_steps", 1, "--optim", "mars_m")
    parts = [[row["input_ids"] for row in part] for part in (trainer.train_dataset, trainer.eval_dataset)]
    text = trainer.processing_class.decode([token for ids in [*parts[0], *parts[1]] for token in ids])
    assert len(text) > 2000 and (TEXT * 60).startswith(text) and len(parts[1]) == 1
    assert trainer.args.learning_rate == 2e-5
    rate = suggest("mars-m", 2e-5, (0.9, 0.999))["lr"]
    assert all(group["initial_lr"] == pytest.approx(rate) for group in matrix_groups(trainer))


def test_jsonl_beside_a_licence(base, data, tmp_path):
    """The reader is that of most files; an empty cell is an empty document."""
    shutil.copytree(data / "body", tmp_path / "data")
    (tmp_path / "data" / "LICENSE.txt").write_text("free")
    with open(tmp_path / "data" / "train.jsonl", "a") as file:
        file.write('{"body": null, "other": 1}\n')
    for recipe in (finetune_lm, pretrain_minimal):
        args = recipe.Arguments(dataset_name=str(tmp_path / "data"), text_column="body", block_size=16)
        texts = recipe.load_texts(args)
        assert len(texts["train"]) == 201
        assert recipe.cut(texts, args, AutoTokenizer.from_pretrained(base)).keys() > {"train"}


def test_data_that_cannot_train(base, data, tmp_path):
    """One line says what to change, before training."""
    (tmp_path / "short.jsonl").write_text('{"body": "def"}\n')
    body, short = ["--dataset_name", data / "body"], ["--dataset_name", tmp_path, "--text_column", "body"]
    one_image = data / "images" / "dark"
    for recipe, argv, line in (
        (finetune_lm, body, "no column 'text' in a split 'train': {'train': \\['body', 'other'\\]}"),
        (finetune_lm, short, "0 blocks of 64 tokens to train on, and 0 held out; give more text or a lower --block"),
        (
            finetune_lm,
            [*short, "--block_size", 65],
            "--block_size 65 is more than the 64 tokens of the model's context",
        ),
        (sft_lora, [*body, "--dataset_train_split", "one"], "lacks the split one and test; it has train"),
        (sft_lora, [*body, "--dataset_streaming", "true"], "lacks the split test; it has train"),
        (finetune_vit, ["--dataset_name", one_image], "needs a column 'image', and 'label' of type ClassLabel"),
    ):
        with pytest.raises(SystemExit, match=line):
            tune(base, tmp_path / "run", *argv, recipe=recipe)


def test_documents_are_cut_into_blocks(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = ["def one():\n    return 1\n", "x", "", "class Two:\n    pass  # nothing\n"]
    rows = datasets.Dataset.from_dict({"body": texts, "other": texts})
    stream = [token for each in texts for token in [*tokenizer(each)["input_ids"], tokenizer.eos_token_id]]
    expected = [stream[at : at + 5] for at in range(0, len(stream) - 4, 5)]
    for recipe in (finetune_lm, pretrain_minimal):
        args = recipe.Arguments(text_column="body", block_size=5)
        cut = recipe.cut(datasets.DatasetDict(train=rows, validation=rows), args, tokenizer)["train"]
        assert list(cut["input_ids"]) == expected and list(cut["labels"]) == [[-100, *ids[1:]] for ids in expected]


def test_chats_are_held_out():
    """Held-out questions are not among those to train on, and what they ask about is."""
    chats = sft_lora.chats()
    questions = [{row["prompt"][0]["content"] for row in chats[part]} for part in ("train", "test")]
    assert len(questions[1]) == 4 and not questions[0] & questions[1]
    answers = [{row["completion"][0]["content"] for row in chats[part]} for part in ("train", "test")]
    assert answers[1] <= answers[0] and "A cow moos." in answers[0]


def test_only_adapters_train(base, data, tmp_path):
    """Completions alone count; other weights stay the base's, and the saved adapters are the trained ones."""
    argv = ["--dataset_name", data / "prompts", "--learning_rate", "2e-2"]
    trainer = tune(base, tmp_path / "run", *argv, recipe=sft_lora)
    assert len(trainer.train_dataset) == 95 and len(trainer.eval_dataset) == 5
    before, after = losses(trainer)
    assert after < before - 0.2
    weights, trained = GPT2LMHeadModel.from_pretrained(base).state_dict(), set()
    for name, param in trainer.model.named_parameters():
        if param.requires_grad:
            trained.add(name)
            assert "lora_" in name and param.abs().max() > 0  # B is zero at first
        else:
            original = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            assert torch.equal(param, weights[original]), name
    groups = trainer.optimizer.optimizer.param_groups
    assert len(trained) == 2 * 2 * 4 and {name for group in groups for name in group["param_names"]} == trained
    loaded, ids = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run").eval(), torch.arange(10)[None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)
    row = trainer.data_collator([trainer.train_dataset[0]])
    text = trainer.processing_class.decode(row["input_ids"][0][row["labels"][0] != -100])
    assert text.startswith("return None") and "say" not in text


def test_chats_train_all_weights(base, data, tmp_path):
    argv = ["--dataset_name", data / "chats", "--use_peft", "false", "--max_steps", "2"]
    trainer = tune(base, tmp_path / "run", *argv, recipe=sft_lora)
    assert all(param.requires_grad for param in trainer.model.parameters())
    assert trainer.model.dtype == torch.float32 and trainer.args.learning_rate == 2e-4


def test_settings_of_the_model_and_a_stream(base, data, tmp_path):
    """--model_init_kwargs adds to what ModelConfig gives; a stream needs a split to evaluate on."""
    shutil.copy(data / "chats" / "train.jsonl", tmp_path / "train.jsonl")
    shutil.copy(data / "chats" / "train.jsonl", tmp_path / "test.jsonl")
    argv = ["--dataset_name", tmp_path, "--dataset_streaming", "true", "--max_steps", "1"]
    argv += ["--model_init_kwargs", '{"attn_implementation": "eager"}']
    trainer = tune(base, tmp_path / "run", *argv, recipe=sft_lora)
    assert trainer.model.config._attn_implementation == "eager"
    assert isinstance(trainer.train_dataset, datasets.IterableDataset)


def test_small_model_on_long_chats(tmp_path):
    """Without a model the context is that of --max_length, and the split may have another name."""
    text = {"text": " ".join(map(str, range(400)))}
    datasets.Dataset.from_list([text] * 20).to_json(tmp_path / "test.jsonl")
    argv = ["--dataset_name", tmp_path, "--dataset_train_split", "test", "--max_steps", "1", "--max_length", "200"]
    trainer = sft_lora.main([*FEW, *map(str, argv), "--output_dir", str(tmp_path / "run")])
    assert trainer.model.config.n_positions == 200 and math.isfinite(losses(trainer)[1])


def test_images_of_a_folder_and_another_head(data, tmp_path):
    """The images have two classes and the model three, so it gets a new head; a fifth of them is held out."""
    base, size = tmp_path / "base", {"height": 8, "width": 8}
    sizes = {"image_size": 8, "patch_size": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    before = ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=1, num_labels=3))
    for part in (before, ViTImageProcessor(size=size)):
        part.save_pretrained(base)
    argv = ["--dataset_name", data / "images", "--learning_rate", "1e-2", "--warmup_steps", "0"]
    trainer = tune(base, tmp_path / "run", *argv, recipe=finetune_vit)
    assert trainer.model.config.id2label == {0: "bright", 1: "dark"} and trainer.model.classifier.weight.shape == (
        2,
        16,
    )
    patches = "vit.embeddings.patch_embeddings.projection.weight"
    assert 0 < (trainer.model.state_dict()[patches] - before.state_dict()[patches]).abs().max() < 0.1
    assert trainer.eval_dataset.with_format(None)["label"].count(0) == 4 and len(trainer.eval_dataset) == 8
    assert trainer.evaluate()["eval_accuracy"] == 1


def test_digits_and_their_classes():
    rows = finetune_vit.digits()["train"]
    assert len(rows) == 1797 and rows.features["label"].names == list("0123456789")
    assert rows[0]["label"] == 0 and rows[0]["image"].size == (8, 8)


def test_resume_to_the_bit(base, data, tmp_path):
    """From a checkpoint of a run that was killed after step 3."""
    argv = ["--dataset_name", data / "body", "--text_column", "body", "--max_steps", 6]
    argv += ["--save_strategy", "steps", "--save_steps", 3]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    tune(base, whole, *argv)
    shutil.copytree(whole / "checkpoint-3", killed / "checkpoint-3")
    tune(base, killed, *argv, "--resume_from_checkpoint", killed / "checkpoint-3")
    assert equal_weights(whole, killed)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes(base, data, tmp_path):
    words = [*FEW, "--max_steps", 3, "--logging_steps", 1, "--output_dir", tmp_path / "two"]
    words += ["--dataset_name", data / "prompts", "--model_name_or_path", base]
    ended = launch(*words, script=Path(sft_lora.__file__), config="cpu_ddp")
    assert ended.stdout.count("***** eval metrics *****") == 1
    state = json.loads((tmp_path / "two" / "trainer_state.json").read_text())
    assert state["global_step"] == 3 and any("mars/update_rms" in row for row in state["log_history"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_only_packages_are_imported(recipe):
    """No other file of this repository but the package, and no name that begins with an underscore."""
    nodes = list(ast.walk(ast.parse(Path(recipe.__file__).read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    roots = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert roots <= {"datasets", "mars_hf", "numpy", "PIL", "sklearn", "torch", "transformers", "trl"}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)} - {"__file__"}
    parts = attributes | {part for name in names for part in name.split(".")}
    assert not [part for part in parts if part.startswith("_")]
    of_mars = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mars_hf"}
    assert of_mars == {"register"} <= set(mars_hf.__all__)
