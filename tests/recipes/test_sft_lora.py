"""Instructions with LoRA: functions and their docstrings, data of one's own, and what trains."""

from __future__ import annotations

import json
import textwrap

import pytest
import sft_lora
import torch
from peft import AutoPeftModelForCausalLM
from pretraining.data import embedded, token_files
from transformers import GPT2Config, GPT2LMHeadModel

import mars_hf

FEW = [
    *("--max_steps", "30", "--per_device_train_batch_size", "8", "--warmup_steps", "2", "--logging_steps", "10"),
    *("--eval_strategy", "no", "--disable_tqdm", "true", "--use_cpu", "true"),
]


@pytest.fixture(scope="module")
def base(tokens, tmp_path_factory):
    """Save a random GPT-2 with the tokenizer of the test corpus."""
    torch.manual_seed(0)
    tokenizer = token_files.load(tokens).tokenizer
    end = tokenizer.eos_token_id
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": len(tokenizer)}
    folder = tmp_path_factory.mktemp("base")
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def instructions(tmp_path_factory):
    """Write a data set that has one answer."""
    folder = tmp_path_factory.mktemp("instructions")
    rows = [{"prompt": f"say {number}\n", "completion": "return None\n"} for number in range(100)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(base, instructions, output, *argv):
    paths = ["--model_name_or_path", str(base), "--dataset_name", str(instructions), "--output_dir", str(output)]
    return sft_lora.main([*FEW, *paths, *argv])


def first(trainer):
    """Return the evaluation before the first step."""
    return next(row for row in trainer.state.log_history if "eval_loss" in row)


def original(name: str) -> str:
    """Return a parameter's name before PEFT wrapped its layer."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


@pytest.fixture(scope="module")
def finished(base, instructions, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "sft"
    return output, *run(base, instructions, output, "--learning_rate", "2e-2")


def test_a_run_learns(finished):
    output, trainer, found = finished
    assert len(trainer.train_dataset) == 95 and len(trainer.eval_dataset) == 5
    assert found["eval_loss"] < first(trainer)["eval_loss"] - 0.4
    assert found["eval_mean_token_accuracy"] > first(trainer)["eval_mean_token_accuracy"]
    assert json.loads((output / "metrics.json").read_text()) == found
    assert trainer.args.max_length == 64  # the model's context
    card = (output / "README.md").read_text()
    assert "mars-adamw" in card and (output / "mars.json").is_file()


def test_only_adapters_train(finished, base):
    _, trainer, found = finished
    before = GPT2LMHeadModel.from_pretrained(base).state_dict()
    adapters = 0
    for name, param in trainer.model.named_parameters():
        if "lora_" in name:
            adapters += 1
            assert param.requires_grad
            if "lora_B" in name:  # zero at first
                assert param.abs().max() > 0, name
        else:
            assert not param.requires_grad
            assert torch.equal(param, before[original(name)]), name
    assert adapters == 2 * 4 * 2  # A and B of four projections in two blocks
    assert found["trainable_parameters"] < found["parameters"] / 2


@pytest.mark.parametrize("optim", ["mars_adamw", pytest.param("mars_m", marks=pytest.mark.slow)])
def test_a_and_b_take_the_rule(optim, finished, base, instructions, tmp_path):
    trainer = finished[1]
    if optim != "mars_adamw":
        trainer = run(base, instructions, tmp_path / "run", "--optim", optim, "--max_steps", "2")[0]
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, mars_hf.Mars)
    names = set()
    for group in optimizer.param_groups:
        assert group["role"] == "matrix" and group["mars_type"] == optim.replace("_", "-")
        names |= set(group["param_names"])
    assert names == {name for name, param in trainer.model.named_parameters() if param.requires_grad}
    assert any("lora_A" in name for name in names) and any("lora_B" in name for name in names)
    assert ("exp_avg_sq" in next(iter(optimizer.state.values()))) == (optim == "mars_adamw")


def test_the_saved_adapter_gives_the_same_logits(finished):
    output, trainer, _ = finished
    loaded = AutoPeftModelForCausalLM.from_pretrained(output).eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_only_completions_count(finished):
    _, trainer, _ = finished
    (row,) = [trainer.data_collator([trainer.train_dataset[0]])]
    counted = row["labels"][0] != -100
    text = trainer.processing_class.decode(row["input_ids"][0][counted])
    assert text.startswith("return None") and "say" not in text


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
    found = list(sft_lora.described_functions(["not python (", textwrap.dedent(source)]))
    assert found == [
        {"prompt": "async def wait(*, seconds: float=1):\n", "completion": '    """Wait."""\n'},
        {"prompt": "def put(self, item, block=True):\n", "completion": '    """Put an item."""\n'},
    ]


@pytest.mark.slow
def test_the_default_data_are_thousands_of_functions():
    train, held_out = sft_lora.load(sft_lora.SftArguments(use_cpu=True))
    assert len(train) > 3000 and len(held_out) > 100
    assert train.column_names == ["prompt", "completion"]


@pytest.mark.slow
def test_the_base_is_made_once_and_adapters_improve_it(tmp_path, monkeypatch, capsys):
    corpus = embedded.read_corpus()
    part = corpus._replace(train=corpus.train[::10], val=corpus.val[::4])
    monkeypatch.setattr(embedded, "read_corpus", lambda name="stdlib": part)
    tiny = ["--n_layer", "1", "--n_head", "2", "--n_embd", "32", "--max_steps", "20", "--embedded_vocab_size", "512"]
    more = ["--warmup_steps", "2", "--eval_steps", "20", "--max_eval_blocks", "4", "--disable_tqdm", "true"]
    monkeypatch.setattr(sft_lora, "_BASE_SETTINGS", [*tiny, *more, "--sample_tokens", "0"])
    argv = [*FEW, "--learning_rate", "1e-2"]
    for run_name in ("first", "second"):
        trainer, found = sft_lora.main([*argv, "--output_dir", str(tmp_path / "runs" / run_name)])
        assert found["eval_loss"] < first(trainer)["eval_loss"] - 0.02
    assert capsys.readouterr().out.count("pretraining a small GPT-2") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--dataset_name gone", "gone"),
        (
            "--dataset_name columns",
            "--dataset_name columns: columns a, b; accepted: prompt and completion, or messages",
        ),
        ("--lora_target_modules nothing", "nothing"),
        ("--lora_r 0", "r"),
        ("--max_length 65", "blocks of 65 tokens are longer than the model's context; give at most 64"),
        ("--optim mars_shampoo", "--optim mars_shampoo: the recipe has no learning rate for it"),
    ],
)
def test_wrong_input(words, line, base, instructions, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "columns").mkdir()
    (tmp_path / "columns" / "train.csv").write_text("a,b\n1,2\n3,4\n")
    given = {"--model_name_or_path": str(base), "--dataset_name": str(instructions)}
    argv = [word for flag, value in given.items() if flag not in words for word in (flag, value)]
    with pytest.raises(SystemExit) as end:
        sft_lora.main(["--use_cpu", "true", *argv, *words.split()])
    assert end.value.code == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sft_lora.py: ")]
    assert line in said
