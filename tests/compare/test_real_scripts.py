"""Scripts of others, unmodified, that are installed with their packages: one comparison each, with a tiny model."""

import json
from pathlib import Path

import pytest
import torch
from compare.scripts import Answer, command_of_module, forked  # noqa: F401
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mars_hf.compare import command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

WORDS = "the cat sat on a mat and saw one dog that ran to it with some red ball of wool".split()
TEMPLATE = "{% for message in messages %}{{ message['content'] }} </s>{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a model, and data sets of texts and of preferences."""
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {word: at for at, word in enumerate(["<unk>", "<pad>", "</s>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(vocabulary), pad_token_id=1, eos_token_id=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    for name in ("texts", "pairs"):
        (folder / name).mkdir()
        for split, count in (("train", 32), ("test", 8)):
            rows = []
            for at in range(count):
                one, other = (" ".join(WORDS[(at * step + place) % 18] for place in range(9)) for step in (3, 5))
                texts, pairs = {"text": one}, {"prompt": one, "chosen": f" {other}", "rejected": f" {one}"}
                rows.append(json.dumps(texts if name == "texts" else pairs))
            (folder / name / f"{split}.jsonl").write_text("\n".join(rows))
    return folder


def words_of(tiny, data):
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", tiny / data, "--output_dir", "out"]
    words += ["--max_steps", "4", "--per_device_train_batch_size", "4", "--use_cpu", "true", "--bf16", "false"]
    return list(map(str, words))


QUICK = ["--optim", "adamw_torch", "mars_adamw", "--no_search", "--seeds", "1"]
EVALUATE = ["--set", "eval_strategy=steps", "eval_steps=0.5"]


@pytest.mark.parametrize(
    ("module", "data", "words", "more", "metric"),
    [
        # Its eval_dataset depends on eval_strategy, so there is none unless one is set: the line says that.
        ("trl.scripts.sft", "texts", [], [], "loss"),
        ("trl.scripts.sft", "texts", EVALUATE, [], "eval_loss"),
        ("trl.scripts.sft", "texts", EVALUATE, ["--use_peft", "true", "--lora_r", "4"], "eval_loss"),
        ("trl.scripts.dpo", "pairs", EVALUATE, [], "eval_loss"),
    ],
    ids=["sft", "sft_evaluated", "sft_lora", "dpo"],
)
def test_scripts_of_trl(tiny, tmp_path, capsys, monkeypatch, module, data, words, more, metric):
    monkeypatch.chdir(tmp_path)
    answer = command_of_module(capsys, module, tmp_path, *QUICK, *words, "--", *words_of(tiny, data), *more)
    assert answer.code == 0, answer.error
    assert answer.numbers["metric"]["name"] == metric
    if metric == "loss":
        assert "--set eval_strategy=steps eval_steps=0.2" in answer.out
    rows = [one["training"] for one in answer.results()]
    assert [row["optimizer"] for row in rows] == ["AdamW", "Mars"] and {row["steps"] for row in rows} == {4}
    assert rows[0]["weights"] == rows[1]["weights"] and rows[0]["batch"] == rows[1]["batch"] is not None
    assert (rows[0]["trainable"] < rows[0]["parameters"] / 2) == bool(more)
    assert not (tmp_path / "out").exists() and not any(answer.folder.glob("runs/*/*/output"))


PLAN = """
rates: [learning_rate, lr_embeddings]
arguments: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16, embedded_vocab_size: 300, per_device_train_batch_size: 2,
  per_device_eval_batch_size: 2, max_eval_blocks: 4, max_steps: 3, warmup_steps: 1, eval_steps: 3, sample_tokens: 0}
arms:
  adamw: {arguments: {optimizer: adamw}, first: [0.002, 0.016]}
  mars_m: {arguments: {optimizer: mars_m, lr_1d: "{twice}"}, first: [0.008, 0.032]}
seeds: [1]
search_seeds: []
further: {max_eval_blocks: 2}
"""


def test_recipe_with_two_rates(tmp_path, capsys):
    """Our own plans: a recipe that chooses its optimizer by a flag, and a rate of embeddings that is a flag, too."""
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "pretrain_gpt2.py"
    (tmp_path / "plan.yaml").write_text(PLAN)
    code = command.main([str(recipe), "--plan", str(tmp_path / "plan.yaml"), "--output_dir", str(tmp_path / "out")])
    answer = Answer(code, *capsys.readouterr(), tmp_path / "out")
    assert answer.code == 0, answer.error
    rows = {one["training"]["optimizer"]: one for one in answer.results()}
    assert set(rows) == {"AdamW", "Mars"} and answer.numbers["metric"]["name"] == "eval_loss"
    words, args = rows["Mars"]["order"]["arguments"], rows["Mars"]["training"]["arguments"]
    given = {name: words[at + 1] for at, name in enumerate(words) if name in ("--lr_1d", "--lr_embeddings")}
    assert args["learning_rate"] == 0.008 and given == {"--lr_1d": "0.016", "--lr_embeddings": "0.032"}
    assert words[words.index("--max_eval_blocks") + 1] == "2"
