"""The fine-tuning recipes: one file each that trains without flags, on local models and data, resumes, and refuses."""

from __future__ import annotations

import ast
import json
import math
import re
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
    TrainingArguments,
    pipeline,
)

import mars_hf
from mars_hf.groups.suggest import suggest

RECIPES = {"finetune_lm": finetune_lm, "sft_lora": sft_lora, "finetune_vit": finetune_vit}
QUIET = "--use_cpu true --disable_tqdm true --report_to none".split()
FEW = [*QUIET, *"--max_steps 20 --per_device_train_batch_size 8 --logging_steps 10".split()]
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
        "plain": [{"text": "say return None"}] * 40,
        "unknown": [{"question": "say"}] * 40,
    }
    for name, own in rows.items():
        (folder / name).mkdir()
        datasets.Dataset.from_list(own).to_json(folder / name / "train.jsonl")
    (folder / "txt").mkdir()
    (folder / "txt" / "one.txt").write_text(TEXT * 60)
    (folder / "short.txt").write_text("say")
    (folder / "torn.jsonl").write_text('{"text": "say"')
    for label, low in (("bright", 180), ("dark", 0)):
        (folder / "images" / label).mkdir(parents=True)
        for number, pixels in enumerate(np.random.default_rng(0).integers(low, low + 70, (20, 12, 12, 3), np.uint8)):
            Image.fromarray(pixels).save(folder / "images" / label / f"{number}.png")
    return folder


def tune(base: Path, output: Path, *argv: object, recipe=finetune_lm):
    return recipe.main([*FEW, "--model_name_or_path", str(base), "--output_dir", str(output), *map(str, argv)])


def losses(trainer) -> tuple[float, float]:
    """Return the held-out losses before the first step and after the last one."""
    found = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return found[0], found[-1]


# --- without flags ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_small_job_without_model_and_data(name, tmp_path, monkeypatch, capsys):
    """It says first what it trains and how long that takes, trains by MARS, and says what came out and where it is."""
    monkeypatch.chdir(tmp_path)
    steps = "60" if name == "finetune_vit" else "12"
    trainer = RECIPES[name].main([*QUIET, "--max_steps", steps, "--logging_steps", "6"])
    lines = capsys.readouterr().out.strip().splitlines()
    assert "random weights" in lines[0] and "minute" in lines[0] and "two CPU cores" in lines[0]
    before, after = losses(trainer)
    assert after < before - 0.1
    assert any(line.startswith(f"held-out loss: {before:.3f} before, {after:.3f} after") for line in lines)
    assert any(line.startswith("saved in finetuned-") and "--push_to_hub true" in line for line in lines)
    assert isinstance(trainer.optimizer.optimizer, mars_hf.Mars)
    assert any("mars/update_rms" in row for row in trainer.state.log_history)
    output = Path(trainer.args.output_dir)
    assert json.loads((output / "eval_results.json").read_text())["eval_loss"] == after
    assert "mars" in (output / "README.md").read_text() and (output / "mars.json").is_file()


def test_stories_and_chats_are_held_out():
    """Held-out stories and questions are not among those to train on, and each fact is asked about in training."""
    stories, chats = finetune_lm.stories(), sft_lora.chats()
    assert not set(stories["train"]["text"]) & set(stories["validation"]["text"])
    questions = [{row["prompt"][0]["content"] for row in chats[part]} for part in ("train", "test")]
    assert len(questions[1]) == 10 and not questions[0] & questions[1]
    answers = [{row["completion"][0]["content"] for row in chats[part]} for part in ("train", "test")]
    assert answers[1] <= answers[0] and "A cow lives in a barn." in answers[0]


# --- models and data of one's own -------------------------------------------------------------------------------------


def test_all_weights_train(base, data, tmp_path):
    argv = ["--dataset_name", data / "body", "--text_column", "body", "--learning_rate", "1e-2"]
    trainer = tune(base, tmp_path / "run", *argv)
    before, after = losses(trainer)
    assert after < before - 1
    weights = GPT2LMHeadModel.from_pretrained(base).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    for name, param in trainer.model.named_parameters():
        assert not torch.equal(param, weights[name]) and torch.equal(param, saved[name]), name
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run")) == len(AutoTokenizer.from_pretrained(base))


def test_text_files(base, data, tmp_path):
    """A .txt file is one document, in a folder and by its name; its end is held out, or another file is."""
    end = AutoTokenizer.from_pretrained(base).eos_token_id
    file = data / "txt" / "one.txt"
    for argv in (["--dataset_name", data / "txt"], ["--train_file", file]):
        trainer = tune(base, tmp_path / "run", *argv, "--max_steps", "1")
        parts = [[row["input_ids"] for row in part] for part in (trainer.train_dataset, trainer.eval_dataset)]
        assert sum(ids.count(end) for part in parts for own in part for ids in [own]) <= 1
        assert len(parts[1]) == math.ceil(0.05 * (len(parts[0]) + len(parts[1])))
        text = trainer.processing_class.decode([token for ids in [*parts[0], *parts[1]] for token in ids])
        assert (TEXT * 60).startswith(text)
    trainer = tune(base, tmp_path / "two", "--train_file", file, "--validation_file", file, "--max_steps", "1")
    assert len(trainer.eval_dataset) == len(trainer.train_dataset)


def test_documents_are_cut_into_blocks(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = ["def one():\n    return 1\n", "x", "", "class Two:\n    pass  # nothing\n"]
    documents = datasets.Dataset.from_dict({"body": texts, "other": texts})
    for end in ([tokenizer.eos_token_id], []):
        stream = [token for each in texts for token in [*tokenizer(each)["input_ids"], *end]]
        blocks = finetune_lm.blocks(documents, "body", tokenizer, 5)
        cut = [stream[at : at + 5] for at in range(0, len(stream) - 4, 5)]
        assert list(blocks["input_ids"]) == cut and list(blocks["labels"]) == [[-100, *ids[1:]] for ids in cut]
        tokenizer.eos_token = None


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


@pytest.mark.parametrize("name", ["chats", "plain"])
def test_other_columns_and_all_weights(name, base, data, tmp_path, capsys):
    argv = ["--dataset_name", data / name, "--use_peft", "false", "--max_steps", "2"]
    trainer = tune(base, tmp_path / "run", *argv, recipe=sft_lora)
    assert all(param.requires_grad for param in trainer.model.parameters())
    assert trainer.args.learning_rate == 2e-5 and "question: say" in capsys.readouterr().out


@pytest.mark.slow
def test_images_of_a_folder_and_another_head(data, tmp_path):
    """The digits train a model; a folder of photos with other classes fine-tunes it."""
    digits = finetune_vit.main([*QUIET, "--num_train_epochs", "5", "--output_dir", str(tmp_path / "digits")])
    assert len(digits.train_dataset) + len(digits.eval_dataset) == 1797
    assert digits.evaluate()["eval_accuracy"] > 0.9
    rows = digits.eval_dataset.with_format(None)
    counts = np.bincount(rows["label"])
    assert counts.min() >= 34 and counts.max() <= 38  # of 360 images: classes are balanced
    classify = pipeline("image-classification", model=str(tmp_path / "digits"), device="cpu")
    hits = [classify(row["image"].convert("RGB"))[0]["label"] == str(row["label"]) for row in rows.select(range(50))]
    assert np.mean(hits) > 0.8
    photos = ["--dataset_name", data / "images", "--max_steps", "3"]
    tuned = tune(tmp_path / "digits", tmp_path / "photos", *photos, recipe=finetune_vit)
    assert tuned.model.config.id2label == {0: "bright", 1: "dark"} and tuned.model.classifier.weight.shape == (2, 64)
    patches = "vit.embeddings.patch_embeddings.projection.weight"
    change = (tuned.model.state_dict()[patches] - digits.model.state_dict()[patches]).abs().max()
    assert len(tuned.eval_dataset) == 8 and 0 < change < 1e-3


def matrix_groups(trainer) -> list[dict]:
    return [group for group in trainer.optimizer.optimizer.param_groups if group["role"] == "matrix"]


@pytest.mark.parametrize(
    ("recipe", "argv", "rate", "rule"),
    [
        (finetune_lm, [], 2e-5, "mars-adamw"),
        (finetune_lm, ["--optim", "mars_m"], 2e-5, "mars-m"),
        (sft_lora, [], 2e-4, "mars-adamw"),
        (sft_lora, ["--use_peft", "false", "--learning_rate", "1e-5"], 1e-5, "mars-adamw"),
    ],
)
def test_rate_is_that_of_adamw(recipe, argv, rate, rule, base, data, tmp_path):
    """MARS trains at the rate that `suggest` derives from it; with --optim_args of one's own at the rate itself."""
    argv = ["--dataset_name", data / "plain", "--max_steps", "1", "--lr_scheduler_type", "constant", *argv]
    if recipe is finetune_lm:
        argv += ["--block_size", "8"]
    trainer = tune(base, tmp_path / "run", *argv, recipe=recipe)
    groups = matrix_groups(trainer)
    derived = suggest(rule, rate, (0.9, 0.999))["lr"]
    assert {group["mars_type"] for group in groups} == {rule}
    assert all(group["lr"] == pytest.approx(derived) for group in groups)
    trainer = tune(base, tmp_path / "own", *argv, "--optim_args", "gamma=0.05", recipe=recipe)
    assert {(group["lr"], group["gamma"]) for group in matrix_groups(trainer)} == {(rate, 0.05)}


# --- resume, launch, refuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["finetune_lm", pytest.param("sft_lora", marks=pytest.mark.slow)])
def test_resume_to_the_bit(name, base, data, tmp_path):
    """From the newest checkpoint of a run that was killed after step 3."""
    argv = ["--dataset_name", data / ("txt" if name == "finetune_lm" else "prompts"), "--max_steps", 6]
    argv += ["--save_strategy", "steps", "--save_steps", 3]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    tune(base, whole, *argv, recipe=RECIPES[name])
    shutil.copytree(whole / "checkpoint-3", killed / "checkpoint-3")
    (killed / "checkpoint-2").mkdir()
    trainer = tune(base, killed, *argv, "--resume_from_checkpoint", "True", recipe=RECIPES[name])
    assert trainer.state.global_step == 6
    if name == "finetune_lm":
        assert equal_weights(whole, killed)
    else:
        files = [folder / "adapter_model.safetensors" for folder in (whole, killed)]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", RECIPES)
def test_two_processes(name, base, data, tmp_path):
    words = [*FEW, "--max_steps", 3, "--logging_steps", 1, "--output_dir", tmp_path / "two", "--dataset_name"]
    words.append(data / {"finetune_lm": "txt", "sft_lora": "prompts", "finetune_vit": "images"}[name])
    if name != "finetune_vit":
        words += ["--model_name_or_path", base]
    ended = launch(*words, script=Path(RECIPES[name].__file__), config="cpu_ddp")
    assert ended.stdout.count("held-out loss: ") == 1
    state = json.loads((tmp_path / "two" / "trainer_state.json").read_text())
    assert state["global_step"] == 3 and any("mars/update_rms" in row for row in state["log_history"])


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("finetune_lm", "--dataset_name gone", "gone"),
        ("finetune_lm", "--train_file gone.txt", "gone.txt"),
        ("finetune_lm", "--train_file {data}/torn.jsonl", "error"),
        ("finetune_lm", "--model_name_or_path gone", "gone"),
        ("finetune_lm", "--train_file {data}/short.txt", "the text is shorter than two blocks of 64 tokens"),
        ("finetune_lm", "--dataset_name {data}/body", "--text_column text: the columns are body, other"),
        ("finetune_lm", "--optim_args gamma=much", "gamma='much' is not valid; accepted: a finite number"),
        ("finetune_lm", "--optim mars", "mars"),
        ("finetune_lm", "--blocksize 16", "['--blocksize', '16']"),
        ("finetune_lm", "--max_steps few", "invalid int value: 'few'"),
        ("finetune_lm", "--resume_from_checkpoint True", "--resume_from_checkpoint True: no checkpoint there"),
        ("sft_lora", "--dataset_name gone", "gone"),
        ("sft_lora", "--dataset_name {data}/unknown", "unknown: the columns are question; see the top"),
        ("sft_lora", "--dataset_train_split half", "--dataset_train_split half: "),
        ("sft_lora", "--report_to carrier_pigeon", "carrier_pigeon"),
        ("sft_lora", "--resume_from_checkpoint gone", "--resume_from_checkpoint gone: no checkpoint there"),
        ("finetune_vit", "--dataset_name gone", "gone"),
        ("finetune_vit", "--label_column_name class", "the data have the columns image, label; name one"),
        ("finetune_vit", "--train_val_split 2", "test_size=2"),
        ("finetune_vit", "--model_name_or_path gone", "gone"),
    ],
)
def test_wrong_input_is_one_line(name, words, line, base, data, tmp_path, capsys):
    argv = [*QUIET, "--output_dir", str(tmp_path / "run"), "--max_steps", "1"]
    if name != "finetune_vit":
        argv += [
            "--model_name_or_path",
            str(base),
            "--dataset_name",
            str(data / ("txt" if name == "finetune_lm" else "plain")),
        ]
    with pytest.raises(SystemExit) as end:
        RECIPES[name].main([*argv, *words.format(data=data).split()])
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and message.startswith(f"{name}.py: error: ") and line in message
    assert not (tmp_path / "run" / "mars.json").exists()


@pytest.mark.parametrize("recipe", [*RECIPES.values(), pretrain_minimal], ids=lambda recipe: recipe.__name__)
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
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)} - {"_exit"}  # Python documents it
    parts = attributes | {part for name in names for part in name.split(".")}
    assert not [part for part in parts if part.startswith("_")]
    of_mars = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mars_hf"}
    assert of_mars == {"register"} <= set(mars_hf.__all__)


def help_of(recipe, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        recipe.main(["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def flags_of(text: str) -> dict[str, str]:
    """Return the words of each flag of a --help."""
    blocks = [block for part in text.split("\n\n") for block in re.split(r"\n  (?=-)", part)]
    words = [" ".join(block.split()) for block in blocks if block.startswith("--")]
    return {re.match(r"--(\w+)", block)[1]: block for block in words}


@pytest.mark.parametrize("recipe", [*RECIPES.values(), pretrain_minimal], ids=lambda recipe: recipe.__name__)
def test_help_begins_with_own_flags(recipe, capsys):
    """The file's text, then the flags of the recipe, then those of transformers or TRL below a line of their own."""
    text = help_of(recipe, capsys)
    assert recipe.__doc__ in text
    base = "trl.SFTConfig" if recipe is sft_lora else "transformers.TrainingArguments"
    own, inherited = map(flags_of, text.split(f"\noptions of {base}:"))
    assert {"dataset_name", "use_peft" if recipe is sft_lora else "dataset_config_name"} <= own.keys() - inherited
    assert {"learning_rate", "optim", "output_dir", "max_grad_norm"} <= inherited.keys() - own
    assert not [flag for flag in own.values() if not re.search(r" [A-Z]\w+ .*\w.* \(default: ", flag)]


@pytest.mark.parametrize("recipe", [*RECIPES.values(), pretrain_minimal], ids=lambda recipe: recipe.__name__)
def test_help_states_the_defaults_of_the_bare_command(recipe, capsys, monkeypatch):
    """Where a default depends on the model, the words have it."""
    given = {}

    def stop(*parts):
        (training,) = (part for part in parts if isinstance(part, TrainingArguments))
        given.update(vars(training))
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "build", stop)
    with pytest.raises(KeyboardInterrupt):
        recipe.main([])
    capsys.readouterr()
    flags = flags_of(help_of(recipe, capsys))
    for name in ("optim", "output_dir", "warmup_steps", "per_device_train_batch_size", "learning_rate"):
        stated, default = re.fullmatch(r"(.*) \(default: (.*)\)", flags[name]).groups()
        if default == "None":
            default = re.search(r"without a model (\S+)\.$", stated)[1]
        value = getattr(given[name], "value", given[name])
        assert default == str(value) or float(default) == value, name
