"""Fine-tuning on text, instructions and images: what trains, what is saved, what is refused; and the metrics."""

from __future__ import annotations

import json
import math
import textwrap

import datasets
import finetune_lm
import finetune_vit
import metrics
import numpy as np
import pytest
import sft_lora
import torch
from helpers import arguments, gpt2, refused
from peft import AutoPeftModelForCausalLM
from PIL import Image
from pretraining.compare import launch
from pretraining.data import embedded, token_files
from tasks import finetuning
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoImageProcessor, AutoModelForCausalLM, EvalPrediction, GPT2LMHeadModel, Trainer, pipeline

import mars_hf
from mars_hf.groups.suggest import suggest

FEW = [
    "--max_steps",
    "20",
    "--per_device_train_batch_size",
    "8",
    "--warmup_steps",
    "2",
    "--logging_steps",
    "10",
    "--eval_strategy",
    "no",
    "--disable_tqdm",
    "true",
    "--use_cpu",
    "true",
]
TEXT = "for number in range(10):\n    print(number)\n"


@pytest.fixture(scope="module")
def base(tokens, tmp_path_factory):
    """Save a random GPT-2 with the tokenizer of the test corpus."""
    tokenizer, folder = token_files.load(tokens).tokenizer, tmp_path_factory.mktemp("base")
    end = tokenizer.eos_token_id
    sizes = {"n_embd": 32, "n_positions": 32, "vocab_size": len(tokenizer)}
    gpt2(**sizes, bos_token_id=end, eos_token_id=end).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write data sets of text and of instructions with one answer, and a folder of bright and dark images."""
    folder = tmp_path_factory.mktemp("data")
    instructions = [{"prompt": f"say {number}\n", "completion": "return None\n"} for number in range(100)]
    for name, rows in {"text": [{"body": TEXT}] * 200, "instructions": instructions}.items():
        (folder / name).mkdir()
        datasets.Dataset.from_list(rows).to_json(folder / name / "train.jsonl")
    for label, low in (("bright", 180), ("dark", 0)):
        (folder / "images" / label).mkdir(parents=True)
        for number, pixels in enumerate(np.random.default_rng(0).integers(low, low + 70, (20, 12, 12, 3), np.uint8)):
            Image.fromarray(pixels).save(folder / "images" / label / f"{number}.png")
    return folder


def tune(base, data, output, *argv):
    paths = ["--model_name_or_path", str(base), "--dataset_name", str(data / "text"), "--output_dir", str(output)]
    return finetune_lm.main([*FEW, *paths, "--text_column", "body", *argv])


def first(trainer):
    """Return the evaluation before the first step."""
    return next(row for row in trainer.state.log_history if "eval_loss" in row)


def assert_only_adapters_train(trainer, count, base, output):
    """Other weights are the base's, A and B of `count` layers a block train, and the saved adapters are those."""
    before, trained = GPT2LMHeadModel.from_pretrained(base).state_dict(), set()
    for name, param in trainer.model.named_parameters():
        if param.requires_grad:
            trained.add(name)
            assert "lora_" in name and param.abs().max() > 0  # B is zero at first
        else:
            original = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            assert torch.equal(param, before[original]), name
    groups = trainer.optimizer.optimizer.param_groups
    assert len(trained) == 2 * 2 * count and {name for group in groups for name in group["param_names"]} == trained
    loaded, ids = AutoPeftModelForCausalLM.from_pretrained(output).eval(), torch.arange(10)[None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_all_weights_train(base, data, tmp_path):
    trainer, numbers = tune(base, data, tmp_path / "run", "--learning_rate", "1e-2")
    assert numbers["eval_loss"] < first(trainer)["eval_loss"] - 1
    assert numbers["trainable_parameters"] == numbers["parameters"]
    before = GPT2LMHeadModel.from_pretrained(base).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    for name, param in trainer.model.named_parameters():
        assert not torch.equal(param, before[name]) and torch.equal(param, saved[name]), name
    assert "mars-adamw" in (tmp_path / "run" / "README.md").read_text() and (tmp_path / "run" / "mars.json").is_file()
    assert numbers["eval_perplexity"] == pytest.approx(math.exp(numbers["eval_loss"]), rel=1e-4)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == numbers


def test_only_adapters_train(base, data, tmp_path):
    argv = ["--use_peft", "true", "--learning_rate", "2e-2", "--lora_target_modules", "c_attn,c_proj"]
    trainer, numbers = tune(base, data, tmp_path / "run", *argv, "--optim", "mars_m")
    assert numbers["eval_loss"] < first(trainer)["eval_loss"] - 0.05
    assert isinstance(trainer.optimizer.optimizer, mars_hf.Mars)
    assert_only_adapters_train(trainer, 3, base, tmp_path / "run")


def test_held_out_text_is_no_training_text(tmp_path):
    """Of the headers that come with torch, and of a data set with one part or several."""
    args = finetune_lm.FinetuneArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    train_text, held_out_text = (set(part[args.text_column]) for part in finetune_lm.load(args))
    corpus = embedded.read_corpus("torch-headers")
    assert held_out_text == set(corpus.val) and train_text <= set(corpus.train)
    assert train_text and not train_text & held_out_text


def test_split_is_the_same_in_every_run():
    """Whatever seed the run has set: results of several runs are on the same rows."""
    rows = datasets.Dataset.from_dict({"row": list(range(100))})
    splits = []
    for seed in (0, 1):
        np.random.seed(seed)
        train_rows, held_out = finetuning.split(datasets.DatasetDict({"train": rows}), 0.1)
        assert len(held_out) == 10 and sorted([*train_rows["row"], *held_out["row"]]) == list(range(100))
        splits.append((train_rows["row"][:], held_out["row"][:]))
    assert splits[0] == splits[1]
    parts = datasets.DatasetDict({"train": rows.select(range(90)), "test": rows.select(range(90, 100))})
    assert finetuning.split(parts, 0.5)[1]["row"][:] == list(range(90, 100))


def test_documents_are_cut_into_blocks(tokens):
    tokenizer = token_files.load(tokens).tokenizer
    texts = ["def one():\n    return 1\n", "x", "", "class Two:\n    pass  # nothing\n"]
    documents = datasets.Dataset.from_dict({"body": texts, "other": texts})
    for end in ([tokenizer.eos_token_id], []):
        stream = [token for each in texts for token in [*tokenizer(each)["input_ids"], *end]]
        blocks = finetune_lm.blocks(documents, "body", tokenizer, 5)
        cut = [stream[at : at + 5] for at in range(0, len(stream) - 4, 5)]
        assert list(blocks["input_ids"]) == cut and list(blocks["labels"]) == [[-100, *ids[1:]] for ids in cut]
        tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the text has fewer than --block_size 999 tokens"):
        finetune_lm.blocks(documents, "body", tokenizer, 999)


def test_rates_to_start_from():
    suggested = pytest.approx(suggest("mars-m", 2e-4)["lr"], rel=0.03)
    lora = {"model_name_or_path": "x", "use_peft": True}
    stated = {"learning_rate": 1.0, "optim_args": "gamma=0.1", "output_dir": "x"}
    for settings, *expected in (
        ({}, "runs/finetune-full-mars_m", 1.6e-2, "beta1=0.95,lr_1d=0.016"),
        (lora, "runs/finetune-lora-mars_m", suggested, "beta1=0.95,beta2=0.999,lr_1d=0.0002"),
        (stated, "x", 1.0, "gamma=0.1"),
    ):
        args = finetune_lm.FinetuneArguments(optim="mars_m", **settings)
        assert [args.output_dir, args.learning_rate, args.optim_args] == expected
        assert args.adam_beta2 == (0.999 if args.model_name_or_path else 0.95)


def test_finished_run_is_not_overwritten_and_divergence_is_named(base, data, tmp_path):
    (tmp_path / "metrics.json").write_text("{}")
    with refused("holds a finished run; give another --output_dir, or delete it"):
        tune(base, data, tmp_path)
    with refused(f"^({launch.DIVERGED.pattern})"):
        argv = ["--learning_rate", "1e30", "--max_grad_norm", "0", "--optim", "adamw_torch"]
        tune(base, data, tmp_path / "diverged", *argv)


def test_instructions_with_lora(base, data, tmp_path):
    argv = ["--model_name_or_path", str(base), "--dataset_name", str(data / "instructions"), "--learning_rate", "2e-2"]
    trainer, numbers = sft_lora.main([*FEW, *argv, "--output_dir", str(tmp_path / "run")])
    assert len(trainer.train_dataset) == 95 and len(trainer.eval_dataset) == 5
    assert numbers["eval_loss"] < first(trainer)["eval_loss"] - 0.2
    assert trainer.args.max_length == 32  # the model's context
    groups = trainer.optimizer.optimizer.param_groups
    assert {(group["role"], group["mars_type"]) for group in groups} == {("matrix", "mars-adamw")}
    assert_only_adapters_train(trainer, 4, base, tmp_path / "run")
    row = trainer.data_collator([trainer.train_dataset[0]])
    text = trainer.processing_class.decode(row["input_ids"][0][row["labels"][0] != -100])
    assert text.startswith("return None") and "say" not in text  # only completions count


def test_functions_and_docstrings():
    source = '''
        class Queue:
            def put(self, item, block=True):
                """Put an item.

                More.
                """

            def get(self):
                return 1

        async def wait(*, seconds: float = 1): "Wait."
    '''
    rows = list(sft_lora.described_functions(["not python (", textwrap.dedent(source)]))
    assert rows == [
        {"prompt": "async def wait(*, seconds: float=1):\n", "completion": '    """Wait."""\n'},
        {"prompt": "def put(self, item, block=True):\n", "completion": '    """Put an item."""\n'},
    ]


@pytest.mark.slow
def test_the_base_is_made_once_and_adapters_improve_it(tmp_path, monkeypatch, capsys):
    corpus = embedded.read_corpus()
    part = corpus._replace(train=corpus.train[::20], val=corpus.val[::20])
    monkeypatch.setattr(embedded, "read_corpus", lambda name="stdlib": part)
    tiny = "--n_layer 1 --n_head 2 --n_embd 32 --max_steps 20 --embedded_vocab_size 512 --warmup_steps 2"
    tiny += " --eval_strategy no --max_eval_blocks 4 --disable_tqdm true --sample_tokens 0"
    monkeypatch.setattr(sft_lora, "_BASE_SETTINGS", tiny.split())
    argv = [*FEW, "--max_steps", "30", "--learning_rate", "1e-2", "--output_dir", str(tmp_path / "runs" / "sft")]
    trainer, numbers = sft_lora.main(argv)
    assert numbers["eval_loss"] < first(trainer)["eval_loss"] - 0.02
    assert finetuning.small_gpt2(tmp_path / "runs" / "sft-base", tiny.split()) == str(tmp_path / "runs" / "sft-base")
    assert capsys.readouterr().out.count("pretraining a small GPT-2") == 1


@pytest.mark.slow
def test_finetune_images(data, tmp_path):
    """The digits by the default run, and a folder of images with the model of the digits."""

    def train(name, *argv):
        return finetune_vit.main(["--disable_tqdm", "1", "--use_cpu", "1", *argv, "--output_dir", str(tmp_path / name)])

    trainer, numbers = train("digits")
    assert len(trainer.train_dataset) + len(trainer.eval_dataset) == 1797
    assert numbers["optim"] == "mars_m" and numbers["eval_accuracy"] > 0.9
    rows = trainer.eval_dataset.with_format(None)
    counts = np.bincount(rows["label"])
    assert counts.min() >= 34 and counts.max() <= 38  # of 360 images: classes are balanced
    classify = pipeline("image-classification", model=str(tmp_path / "digits"), device="cpu")
    hits = [classify(row["image"].convert("RGB"))[0]["label"] == str(row["label"]) for row in rows.select(range(50))]
    assert np.mean(hits) > 0.8

    photos = ["--dataset_name", str(data / "images"), "--eval_strategy", "no", "--max_steps"]
    more, numbers = train("new", *photos, "20")
    assert (len(more.eval_dataset), numbers["eval_accuracy"]) == (8, 1)
    assert more.model.config.id2label == {0: "bright", 1: "dark"}
    patches = "vit.embeddings.patch_embeddings.projection.weight"
    before = trainer.model.state_dict()[patches].clone()
    more, numbers = train("more", *photos, "3", "--model_name_or_path", str(tmp_path / "digits"))
    assert numbers["learning_rate"] == 6.4e-5 and more.model.classifier.weight.shape == (2, 64)
    assert 0 < (more.model.state_dict()[patches] - before).abs().max() < 1e-3
    assert AutoImageProcessor.from_pretrained(tmp_path / "more").size == {"height": 8, "width": 8}


@pytest.mark.parametrize(
    ("recipe", "words", "line"),
    [
        (finetune_lm, "--dataset_name gone", "gone"),
        (finetune_lm, "--model_name_or_path gone", "gone: transformers loads no causal language model from it"),
        (finetune_lm, "--block_size 33", "blocks of 33 tokens are longer than the model's context; give at most 32"),
        (finetune_lm, "--block_size 0", "--block_size 0: give an integer from 1 on"),
        (finetune_lm, "--learning_rate nan", "--learning_rate nan: give a finite number"),
        (finetune_lm, "--use_peft true --lora_r 0", "--lora_r 0: give an integer from 1 on"),
        (finetune_lm, "--optim mars-m", "--optim mars-m: the recipe has no learning rate for it, only for adamw_torch"),
        (finetune_lm, "--optim_args gamma=much", "gamma='much' is not valid; accepted: a finite number"),
        (sft_lora, "--test_size 2", "--test_size 2.0: give a share between 0 and 1"),
        (sft_lora, "--report_to carrier_pigeon", "--report_to carrier_pigeon: unknown, or not installed"),
        (finetune_vit, "--gradient_accumulation_steps 0", "--gradient_accumulation_steps 0: give an integer from 1"),
        (finetune_lm, "--optim sgd", "--optim sgd: the recipe has no learning rate for it, only for adamw_torch"),
        (finetune_lm, "--metric_for_best_model f1 --text_column prompt", "--metric_for_best_model f1 is none of"),
        (sft_lora, "--dataset_name {text}", "columns body; accepted: prompt and completion, or messages"),
        (sft_lora, "--max_length -1", "--max_length -1: give an integer from 1 on"),
        (sft_lora, "--label_names x", "--label_names x: the recipe's data have labels alone"),
        (finetune_lm, "--deepspeed 0", "--deepspeed 0: no such file"),
        (sft_lora, "--per_device_train_batch_size 999999999", "--per_device_train_batch_size 999999999: the data"),
        (finetune_vit, "--eval_accumulation_steps 0", "--eval_accumulation_steps 0: give an integer from 1 on"),
        (
            finetune_vit,
            "--lr_scheduler_kwargs [",
            "--lr_scheduler_type cosine with '\\[': .*; give --lr_scheduler_kwargs",
        ),
        (sft_lora, "--max_length 65", "blocks of 65 tokens are longer than the model's context"),
        (finetune_vit, "--label_column class", "the data have the columns image, label; name one"),
        (finetune_vit, "--optim adam --learning_rate 1", "adam is not a valid OptimizerNames"),
    ],
)
def test_wrong_input(recipe, words, line, base, data, tmp_path):
    argv = ["--use_cpu", "true", "--test_size", "0.5", "--output_dir", str(tmp_path)]
    if recipe is not finetune_vit:
        argv += ["--model_name_or_path", str(base), "--dataset_name", str(data / "instructions")]
    with refused(line):
        recipe.main([*argv, *words.format(text=data / "text").split()])
    assert not (tmp_path / "metrics.json").exists()


def test_metrics_by_hand():
    assert metrics.Perplexity().compute(losses=[1.0, 2.0, 3.0]) == {"perplexity": pytest.approx(math.e**2)}
    assert metrics.Perplexity().compute(losses=[1e9])["perplexity"] == math.exp(700)
    functions, labels = metrics.classification(), torch.tensor([0, 1, 1, 2, 2])
    predictions = functions["preprocess_logits_for_metrics"](torch.eye(4)[[0, 0, 1, 2, 3]], labels)
    numbers = functions["compute_metrics"](EvalPrediction(predictions.numpy(), labels.numpy()))
    # F1: of 0 2/3, of 1 2/3, of 2 2/3, of 3 (never right) 0
    assert numbers == {"accuracy": 3 / 5, "macro_f1": pytest.approx(2 / 3 * 3 / 4)}


@pytest.mark.parametrize("by_batch", [False, True])
def test_metrics_of_a_language_model_in_trainer(tmp_path, by_batch):
    """Three sequences, padded where they are batched: 3 + 2 + 1 predicted tokens."""
    model, rows = gpt2(vocab_size=11), [[3, 1, 4, 1], [5, 9, 2, -100], [6, 5]]

    def collate(batch):
        labels = pad_sequence(list(map(torch.tensor, batch)), batch_first=True, padding_value=-100)
        return {"input_ids": labels.clamp(min=0), "labels": labels}

    settings = {"batch_eval_metrics": by_batch, "remove_unused_columns": False, "per_device_eval_batch_size": 2}
    args = arguments(tmp_path, **settings)
    trainer = Trainer(model, args, data_collator=collate, eval_dataset=rows, **metrics.language_modeling())
    for _ in range(2):  # an evaluation leaves nothing for the next
        numbers = trainer.evaluate()
    hits, losses = [], []
    for row in rows:
        ids = torch.tensor([token for token in row if token >= 0])
        scores = model.eval()(ids[None]).logits[0, :-1].log_softmax(-1)
        hits += (scores.argmax(-1) == ids[1:]).tolist()
        losses += (-scores[range(len(ids) - 1), ids[1:]]).tolist()
    assert len(losses) == 3 + 2 + 1
    assert numbers["eval_accuracy"] == pytest.approx(np.mean(hits))
    assert numbers["eval_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
