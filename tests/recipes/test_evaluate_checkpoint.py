"""The evaluation of a checkpoint: losses by hand and as the run reports them, tasks with known answers, mistakes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import evaluate_checkpoint
import numpy as np
import pretrain_gpt2
import pytest
import torch
from hub_server import HubServer
from pretraining.data import data_folder, embedded, token_checks, token_files
from pretraining.run import evaluation_tasks
from test_pretrain_gpt2 import TINY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "evaluate_checkpoint.py"
END = "<|endoftext|>"
WORDS = (END, "question", "yes", "no", "maybe", "never", "a", "b")
# What the model below gives each word, whatever came before.
SCORES = np.array([-1.0, -1.0, 2.0, 1.0, 0.5, -0.5, -1.0, -2.0])
LOG_SHARES = SCORES - np.log(np.exp(SCORES).sum())


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END)


def small(vocabulary: int = len(WORDS), context: int = 32) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": context, "vocab_size": vocabulary}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.fixture(scope="module")
def unigram(tmp_path_factory) -> Path:
    """Return a model that gives each word its score: the final norm yields (1, 0, ...); embeddings start with it."""
    model = small()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()[0] = 1.0
        model.transformer.wte.weight[:, 0] = torch.from_numpy(SCORES)
    folder = tmp_path_factory.mktemp("models") / "unigram"
    model.save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


def prepared(folder: Path, tokenizer: PreTrainedTokenizerFast, val: np.ndarray, val_bytes: int) -> Path:
    """Write a folder as prepare_data.py does."""
    meta = {"dataset": "words", "tokenizer": "words", "vocab_size": len(tokenizer), "end_of_text": 0}
    with token_files.writing(folder) as partial:
        tokenizer.save_pretrained(partial / "tokenizer")
        meta["tokenizer_files"] = token_checks.tokenizer_hashes(partial / "tokenizer")
        for split, ids, size in (("train", val[:9], 9), ("val", val, val_bytes)):
            file = token_files.TokenFile(partial / f"{split}.bin")
            file.write([ids], size)
            meta[split] = file.close()
        token_files.write_meta(partial, meta)
    return folder


VAL = np.random.default_rng(3).integers(0, len(WORDS), 103)
VAL_BYTES = 412


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "words", words(), VAL, VAL_BYTES)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokens) -> Path:
    """Return a run of pretrain_gpt2.py that reports both losses."""
    output = tmp_path_factory.mktemp("runs") / "mars"
    pretrain(output, tokens, "--official_eval_blocks", "11", "--save_strategy", "steps", "--save_steps", "4")
    return output


def pretrain(output: Path, tokens: Path, *argv: str) -> None:
    pretrain_gpt2.main([*TINY, "--data_dir", str(tokens), "--output_dir", str(output), *argv])


def evaluated(output: Path, *argv: object) -> dict:
    evaluate_checkpoint.main([*map(str, argv), "--output_file", str(output), "--use_cpu"])
    return json.loads(output.read_text())


def refused(tmp_path: Path, *argv: object) -> str:
    """Return the line of a refused evaluation, which leaves no file."""
    output = tmp_path / "refused.json"
    with pytest.raises(SystemExit) as exit:
        evaluated(output, *argv)
    assert exit.value.code == 2
    assert not output.exists()
    return str(exit.value.__context__)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_both_losses_equal_those_computed_by_hand(tmp_path, unigram, held_out, capsys):
    given = ["--model", unigram, "--data_dir", held_out, "--block_size", 10, "--official_blocks", 50]
    found = evaluated(tmp_path / "f.json", *given, "--official_seed", 7, "--batch_size", 4)

    whole = VAL[:100].reshape(10, 10)
    loss = -LOG_SHARES[whole[:, 1:]].mean()
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) * len(VAL) / VAL_BYTES, rel=1e-6)
    assert found["loss_blocks"] == 10 and found["block_size"] == 10

    starts = torch.randint(len(VAL) - 10, (50,), generator=torch.Generator().manual_seed(7)).numpy()
    each = np.array([-LOG_SHARES[VAL[start + 1 : start + 11]].mean() for start in starts])
    assert found["official_loss"] == pytest.approx(each.mean(), rel=1e-6)
    assert found["official_loss_stderr"] == pytest.approx(each.std(ddof=1) / math.sqrt(50), rel=1e-5)
    assert found["official_blocks"] == 50 and found["official_seed"] == 7
    printed = capsys.readouterr().out
    assert f"{found['loss']:.4f}  full pass over 10 blocks of 10 tokens" in printed
    assert f"{found['official_loss']:.4f} ± {found['official_loss_stderr']:.4f}  mean over 50 random blocks" in printed


def test_every_token_of_a_random_block_predicts_the_next(tmp_path, held_out):
    """The official loss sees each token with what precedes it in its block."""
    model = small().eval()
    model.save_pretrained(tmp_path / "model")
    found = evaluated(
        tmp_path / "f.json", "--model", tmp_path / "model", "--data_dir", held_out, "--block_size", 8,
        "--official_blocks", 20,
    )  # fmt: skip
    starts = torch.randint(len(VAL) - 8, (20,), generator=torch.Generator().manual_seed(5000)).tolist()
    ids = torch.from_numpy(np.stack([VAL[start : start + 9] for start in starts]))
    with torch.no_grad():  # the model shifts labels itself
        assert found["official_loss"] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)


def test_random_blocks_come_from_all_of_val_bin(held_out):
    from pretraining.run.evaluation import RandomBlocks

    blocks = RandomBlocks(held_out, 100, 200)
    assert sorted(set(blocks.starts)) == [0, 1, 2]  # 102 predicts nothing
    assert blocks[blocks.starts.index(2)]["targets"].tolist() == VAL[3:103].tolist()
    assert RandomBlocks(held_out, 10, 5, seed=1).starts != RandomBlocks(held_out, 10, 5, seed=2).starts


def test_the_losses_are_those_of_the_run(tmp_path, finished, tokens):
    metrics = json.loads((finished / "metrics.json").read_text())
    given = ["--model", finished, "--data_dir", tokens, "--max_eval_blocks", 8, "--official_blocks", 11]
    found = evaluated(tmp_path / "f.json", *given)
    assert found["loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(metrics["perplexity"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(metrics["bits_per_byte"], rel=1e-6)
    assert found["official_loss"] == pytest.approx(metrics["official_loss"], rel=1e-6)
    assert found["official_loss_stderr"] == pytest.approx(metrics["official_loss_stderr"], rel=1e-4)
    assert (found["official_blocks"], metrics["official_blocks"]) == (11, 11)
    assert (found["loss_blocks"], found["block_size"]) == (8, 32)
    assert found["parameters"] == metrics["parameters"]
    assert abs(found["loss"] - found["official_loss"]) > 1e-4  # two numbers, not one twice

    one = evaluated(tmp_path / "one.json", *given, "--batch_size", 3)
    assert one["loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert one["official_loss"] == pytest.approx(found["official_loss"], rel=1e-6)


def test_bfloat16_autocast_gives_the_loss_of_a_run_in_bfloat16(tmp_path, tokens):
    pretrain(tmp_path / "run", tokens, "--bf16", "true", "--use_cpu", "true", "--max_steps", "2")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    given = ["--model", tmp_path / "run", "--data_dir", tokens, "--max_eval_blocks", 8, "--official_blocks", 0]
    as_trained = evaluated(tmp_path / "as.json", *given, "--bf16", "--batch_size", 4)
    assert as_trained["loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    assert as_trained["bf16"] and as_trained["dtype"] == "float32"
    assert "official_loss" not in as_trained and "official_loss" not in metrics
    exact = evaluated(tmp_path / "exact.json", *given)
    rounded = evaluated(tmp_path / "rounded.json", *given, "--dtype", "bfloat16")
    assert len({found["loss"] for found in (as_trained, exact, rounded)}) == 3
    assert rounded["dtype"] == "bfloat16" and rounded["loss"] == pytest.approx(exact["loss"], rel=1e-2)


def test_without_data_the_embedded_corpus_beside_the_run_is_used(tmp_path, monkeypatch, capsys):
    corpus = embedded.Corpus(["import os\n" * 40] * 40, ["import sys\n" * 30] * 9, "f", embedded.Skipped())
    monkeypatch.setattr(embedded, "read_corpus", lambda name: corpus)
    folder = data_folder.prepare_embedded(tmp_path / "runs" / "data", 300)
    model = small(vocabulary=300)
    for place in (tmp_path / "runs" / "x", tmp_path / "runs" / "x" / "checkpoint-3"):
        model.save_pretrained(place)
        given = ["--model", place, "--embedded_vocab_size", 300, "--official_blocks", 2, "--max_eval_blocks", 2]
        found = evaluated(tmp_path / "f.json", *given)
        assert found["data_dir"] == str(folder) and found["dataset"] == "python-standard-library"
    assert [path.name for path in tmp_path.rglob("data")] == ["data"]


def test_a_result_is_replaced_whole_or_stays(tmp_path, unigram, held_out):
    output = tmp_path / "new" / "f.json"
    given = ["--model", unigram, "--data_dir", held_out, "--official_blocks", 2]
    first = evaluated(output, *given)
    second = evaluated(output, *given, "--block_size", 4)
    assert first["loss_blocks"] != second["loss_blocks"]
    with pytest.raises(SystemExit):
        evaluated(output, *given, "--block_size", 33)
    assert json.loads(output.read_text()) == second
    assert os.listdir(output.parent) == ["f.json"]


@pytest.mark.soak  # the next test evaluates on two processes too
@pytest.mark.multiprocess
def test_two_processes_give_the_losses_of_one(tmp_path, finished, tokens):
    """Five and eleven blocks divide neither by the batch nor by the processes."""
    given = ["--model", str(finished), "--data_dir", str(tokens), "--max_eval_blocks", "5", "--official_blocks", "11"]
    given += ["--batch_size", "2", "--use_cpu", "--output_file"]
    config = ["--config_file", str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *config, str(SCRIPT)]
    done = subprocess.run([*launch, *given, str(tmp_path / "two.json")], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("results are in") == 1
    evaluate_checkpoint.main([*given, str(tmp_path / "one.json")])
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["official_loss"] == pytest.approx(one["official_loss"], rel=1e-6)
    assert (two["loss_blocks"], two["official_blocks"]) == (5, 11)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_on_two_processes_reports_the_official_loss_of_its_weights(tmp_path, tokens):
    argv = [*TINY, "--data_dir", str(tokens), "--output_dir", str(tmp_path / "run"), "--official_eval_blocks", "7"]
    config = ["--config_file", str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *config, str(ROOT / "recipes" / "pretrain_gpt2.py")]
    done = subprocess.run([*launch, *argv], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    found = evaluated(
        tmp_path / "f.json", "--model", tmp_path / "run", "--data_dir", tokens, "--official_blocks", 7,
        "--max_eval_blocks", 1,
    )  # fmt: skip
    assert found["official_loss"] == pytest.approx(metrics["official_loss"], rel=1e-6)
    assert metrics["official_blocks"] == 7


@pytest.mark.slow
def test_a_model_of_the_hub(tmp_path, unigram, held_out):
    given = ["--data_dir", str(held_out), "--official_blocks", "5", "--use_cpu", "--output_file"]
    with HubServer() as hub:
        hub.repos.add("me/x")
        hub.files = {path.name: path.read_bytes() for path in unigram.iterdir()}
        command = [sys.executable, str(SCRIPT), "--model", "me/x", *given, str(tmp_path / "hub.json")]
        environment = {**os.environ, **hub.environment(str(tmp_path / "home")), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    from_hub = json.loads((tmp_path / "hub.json").read_text())
    local = evaluated(tmp_path / "local.json", "--model", unigram, *given[:-1])
    assert from_hub["loss"] == local["loss"] and from_hub["official_loss"] == local["official_loss"]
    assert from_hub["model"] == "me/x"


# --- tasks ------------------------------------------------------------------------------------------------------------

# Logarithms of the shares: yes -0.6, no -1.6, maybe -2.1, never -3.1. acc takes the highest, acc_norm the highest
# after division by the letters: yes -0.2, maybe -0.4, never -0.6, no -0.8.
QUESTIONS = [
    (["yes", "no"], 0),  # yes
    (["no", "yes"], 0),  # yes: wrong
    (["no", "never"], 0),  # no; by letters never: wrong
    (["maybe", "no"], 1),  # no; by letters maybe: wrong
    (["never", "maybe"], 1),  # maybe
    (["no", "maybe"], 1),  # no: wrong; by letters maybe
]


def by_hand(normalized: bool) -> float:
    """Return the share of questions whose highest score is the answer's."""
    right = 0
    for choices, answer in QUESTIONS:
        scores = [LOG_SHARES[WORDS.index(word)] / (len(word) if normalized else 1) for word in choices]
        right += int(np.argmax(scores) == answer)
    return right / len(QUESTIONS)


def describe(folder: Path, name: str, rows: list) -> None:
    """Write a task of lm-evaluation-harness and its data."""
    lines = [json.dumps({"choices": choices, "answer": answer}) + "\n" for choices, answer in rows]
    (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{validation: {folder / name}.jsonl}}, cache_dir: {folder / 'cache'}}}\n"
        "validation_split: validation\n"
        "output_type: multiple_choice\n"
        "doc_to_text: question\n"
        "doc_to_choice: choices\n"
        "doc_to_target: answer\n"
        "metric_list:\n"
        "  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
        "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n"
    )


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Return a folder with two tasks and the group of both."""
    folder = tmp_path_factory.mktemp("tasks")
    describe(folder, "tiny_choice", QUESTIONS)
    describe(folder, "tiny_easy", [QUESTIONS[0], QUESTIONS[4]])
    (folder / "group.yaml").write_text(
        "group: tiny_group\ntask: [tiny_choice, tiny_easy]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
    )
    return folder


needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed; it comes with the extra eval"
)


@needs_lm_eval
def test_the_accuracy_of_a_task_is_the_one_computed_by_hand(tmp_path, unigram, tasks, capsys):
    assert (by_hand(False), by_hand(True)) == (4 / 6, 3 / 6)
    found = evaluated(tmp_path / "f.json", "--model", unigram, "--tasks", "tiny_choice", "--include_path", tasks)
    row = found["tasks"]["tiny_choice"]
    assert row["acc"] == by_hand(False) and row["acc_norm"] == by_hand(True)
    assert row["metric"] == "acc_norm" and row["score"] == row["acc_norm"]
    assert row["acc_norm_stderr"] == pytest.approx(math.sqrt(0.5 * 0.5 / 5), rel=1e-6)
    assert row["questions"] == 6 and row["num_fewshot"] == 0
    assert "loss" not in found and found["mean_score"] == 0.5
    assert "lm_eval" in found["versions"]
    assert "tiny_choice  50.00 ± 22.36  acc_norm, 0-shot" in capsys.readouterr().out


@needs_lm_eval
def test_tasks_groups_and_losses_in_one_run(tmp_path, unigram, held_out, tasks, capsys):
    given = ["--model", unigram, "--data_dir", held_out, "--official_blocks", 3, "--batch_size", 2]
    given += ["--include_path", tasks, "--limit", 4, "--num_fewshot", 1]
    found = evaluated(tmp_path / "f.json", *given, "--tasks", "tiny_group")
    rows = found["tasks"]
    assert {name: row["is_part"] for name, row in rows.items()} == {
        "tiny_group": False,
        "tiny_choice": True,
        "tiny_easy": True,
    }
    assert rows["tiny_choice"]["acc"] == 3 / 4 and rows["tiny_choice"]["questions"] == 4
    assert rows["tiny_group"]["score"] == (3 / 4 + 1) / 2 == found["mean_score"]
    assert rows["tiny_choice"]["num_fewshot"] == 1
    assert found["loss"] > 0 and found["official_loss"] > 0
    line = refused(tmp_path, *given, "--tasks", "tiny_easy", "--num_fewshot", 2)  # it has two examples
    assert line.startswith("--tasks tiny_easy: lm_eval refuses to run them: ")
    assert "Duplicate task 'tiny_easy'" in refused(tmp_path, *given, "--tasks", "tiny_group,tiny_easy")
    printed = capsys.readouterr().out
    assert "tiny_group" in printed and "tiny_easy" not in printed


READS_ALL = [pytest.mark.slow]  # lm_eval's own tasks: a quarter of a minute


@needs_lm_eval
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("lost", "--tasks lost: their data cannot be loaded"),
        pytest.param(
            "hellaswag", "--tasks hellaswag: their data cannot be loaded", marks=[pytest.mark.soak]
        ),  # we are offline
        pytest.param(
            "tiny_chioce",
            "--tasks tiny_chioce: lm_eval has no such task (did you mean tiny_choice?)",
            marks=READS_ALL,
        ),
    ],
)
def test_tasks_that_cannot_run(tmp_path, unigram, tasks, name, line):
    describe(tasks, "lost", QUESTIONS)
    (tasks / "lost.jsonl").unlink()
    assert line in refused(tmp_path, "--model", unigram, "--include_path", tasks, "--tasks", name)


@needs_lm_eval
@pytest.mark.slow
def test_lm_evals_own_tasks_are_read_when_the_folder_lacks_one(tasks, tmp_path):
    (tmp_path / "mixed.yaml").write_text("group: mixed\ntask: [boolq, tiny_mine]\n")
    describe(tmp_path, "tiny_mine", QUESTIONS)
    manager = evaluation_tasks.manager(tmp_path, ["tiny_mine"])
    assert manager.all_tasks == ["mixed", "tiny_mine"]
    manager = evaluation_tasks.manager(tmp_path, ["mixed"])
    assert {"mixed", "tiny_mine", *evaluation_tasks.PAPER} <= set(manager.all_tasks)


@needs_lm_eval
def test_a_model_without_tokenizer_takes_no_tasks(tmp_path, tasks):
    small().save_pretrained(tmp_path / "model")
    given = ["--model", tmp_path / "model", "--tasks", "tiny_choice", "--include_path", tasks]
    assert "comes without one" in refused(tmp_path, *given)


def test_without_lm_eval_tasks_name_the_extra(tmp_path, unigram, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    line = refused(tmp_path, "--model", unigram, "--tasks", "hellaswag")
    assert line == "--tasks needs the package lm_eval, which is not installed: pip install -e '.[eval]'"


def test_losses_do_not_import_lm_eval(unigram, held_out, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    found = evaluated(tmp_path / "f.json", "--model", unigram, "--data_dir", held_out, "--official_blocks", 1)
    assert found["loss"] > 0 and found["official_loss_stderr"] is None


def test_names_of_tasks():
    known = {*evaluation_tasks.PAPER, "ARC-E", "mine"}
    assert evaluation_tasks.names(["paper"], known) == list(evaluation_tasks.PAPER)
    assert len(set(evaluation_tasks.PAPER)) == 9
    assert evaluation_tasks.names(["HellaSwag", "OBQA", "arc-c", "mine", "obqa"], known) == [
        "hellaswag",
        "openbookqa",
        "arc_challenge",
        "mine",
    ]
    assert evaluation_tasks.names(["ARC-E"], known) == ["ARC-E"]  # a task of that very name
    assert evaluation_tasks.names(["ARC-E"], known - {"ARC-E"}) == ["arc_easy"]
    with pytest.raises(ValueError, match=r"--tasks boolk: lm_eval has no such task \(did you mean boolq\?\)"):
        evaluation_tasks.names(["boolk"], known)


def test_a_mean_score_needs_all_scores():
    rows = {
        name: {"score": score, "is_part": part} for name, score, part in (("a", 0.2, 0), ("b", 0.4, 0), ("c", 9, 1))
    }
    assert evaluation_tasks.mean_score(rows) == pytest.approx(0.3)
    assert evaluation_tasks.mean_score(rows | {"d": {"score": None, "is_part": False}}) is None


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_evaluated(tmp_path, unigram, held_out):
    given = ["--data_dir", held_out, "--official_blocks", 2, "--model"]
    assert f"--model {tmp_path / 'none'}: no such folder" == refused(tmp_path, *given, tmp_path / "none")
    assert "transformers loads no causal language model" in refused(tmp_path, *given, "me/nowhere")  # tests are offline
    weights = unigram / "model.safetensors"
    assert f"--model {weights} is a file; give the folder" in refused(tmp_path, *given, weights)

    run = tmp_path / "run"
    run.mkdir()
    assert "no config.json in it, so it holds no model; did its run finish?" in refused(tmp_path, *given, run)
    for step in (4, 8):
        shutil.copytree(unigram, run / f"checkpoint-{step}")
        os.utime(run / f"checkpoint-{step}" / "config.json", (step, step))
    assert f"it holds {run / 'checkpoint-8'}: give that" in refused(tmp_path, *given, run)

    shutil.copytree(unigram, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(weights.read_bytes()[:100])
    line = refused(tmp_path, *given, tmp_path / "cut")
    assert f"--model {tmp_path / 'cut'}: transformers loads no causal language model from it" in line
    assert "\n" not in line

    bert = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    line = refused(tmp_path, *given, tmp_path / "bert")
    assert "lacks" in line and "of BertLMHeadModel (first: cls." in line


def test_models_that_do_not_fit_the_data(tmp_path, unigram, held_out):
    given = ["--data_dir", held_out, "--official_blocks", 2, "--model"]
    small(vocabulary=7).save_pretrained(tmp_path / "few")
    line = refused(tmp_path, *given, tmp_path / "few")
    assert line == (
        f"--model {tmp_path / 'few'} has 7 tokens, fewer than the 8 of the data in {held_out}; evaluate it on data "
        "made with its own tokenizer"
    )

    small().save_pretrained(tmp_path / "other")
    tokenizer = words()
    swapped = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["yes"], vocabulary["no"] = vocabulary["no"], vocabulary["yes"]
    end = {"bos_token": END, "eos_token": END, "unk_token": END}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(swapped)), **end)
    other.save_pretrained(tmp_path / "other")
    line = refused(tmp_path, *given, tmp_path / "other")
    assert "has another tokenizer" in line
    assert "id 2 is 'yes' in the data, but the model's tokenizer gives it the id 3" in line

    assert refused(tmp_path, *given, unigram, "--block_size", 33).startswith(
        "--block_size 33 is more than the 32 tokens"
    )
    assert "less than one block of 32" in refused(
        tmp_path, *given[2:], unigram, "--data_dir", prepared(tmp_path / "short", words(), VAL[:31], 9)
    )
    one_block = prepared(tmp_path / "block", words(), VAL[:32], 9)
    line = refused(tmp_path, "--model", unigram, "--data_dir", one_block)
    assert "has 32 tokens, but the official loss needs 33" in line


def test_a_model_with_more_tokens_than_the_data_is_evaluated(tmp_path, held_out):
    """GPT-2's vocabulary is padded to 50,304."""
    small(vocabulary=16).save_pretrained(tmp_path / "padded")
    words().save_pretrained(tmp_path / "padded")
    given = ["--model", tmp_path / "padded", "--data_dir", held_out, "--official_blocks", 0]
    assert evaluated(tmp_path / "f.json", *given)["loss"] == pytest.approx(math.log(16), rel=0.2)


def test_a_loss_that_is_not_finite_is_a_mistake(tmp_path, held_out):
    model = small()
    with torch.no_grad():
        model.transformer.wte.weight[3] = math.inf
    model.save_pretrained(tmp_path / "broken")
    given = ["--model", tmp_path / "broken", "--data_dir", held_out]
    assert "the loss is nan; are its weights finite?" in refused(tmp_path, *given)
    assert "the loss is nan; try --dtype float32" in refused(tmp_path, *given, "--bf16")


def test_too_large_a_batch_is_a_mistake(tmp_path, unigram, held_out, monkeypatch):
    def overflow(*_args, **_settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GPT2LMHeadModel, "forward", overflow)
    line = refused(tmp_path, "--model", unigram, "--data_dir", held_out, "--batch_size", 512)
    assert line == "--batch_size 512 needs more memory than there is; give less"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--model", ""], "--model: is empty"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--use_cpu", "maybe"], "--use_cpu: 'maybe' is neither true nor false"),
        (["--batch_size", "0"], "--batch_size: '0' is not a whole number from 1 on"),
        (["--official_blocks", "-1"], "--official_blocks: '-1' is not a whole number from 0 on"),
        (["--limit", "5"], "--limit goes with --tasks"),
        (["--num_fewshot", "0"], "--num_fewshot goes with --tasks"),
        (["--tasks", "x", "--include_path", "nowhere"], "--include_path nowhere: no such folder"),
        (["--data_dir", "d", "--embedded_corpus", "stdlib"], "--data_dir and --embedded_corpus both name the data"),
        (["--output_file", "."], "--output_file . is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_ends_in_one_line(argv, line, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        evaluate_checkpoint.main(["--model", "m", "--output_file", str(tmp_path / "f.json"), *argv])
    assert exit.value.code == 2 and line in capsys.readouterr().err


def test_tasks_take_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--tasks takes one process" in refused(tmp_path, "--model", "m", "--tasks", "boolq")
