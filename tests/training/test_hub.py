"""What a run leaves for the Hub: the model card, and mars.json beside the weights."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from helpers import Blocks, arguments, gpt2, mars_trainer, trainer
from huggingface_hub import ModelCard, constants
from test_stale_pass import Dense
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, modelcard

import mars_hf
from mars_hf.training import hub

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
BY_NAME = {"optim": "mars_adamw", "learning_rate": 1e-3}
SAVES = {"save_strategy": "steps", "save_steps": 2}
WARMUP = {"lr_scheduler_type": "linear", "warmup_steps": 2}


@pytest.fixture(scope="module", autouse=True)
def registered():
    mars_hf.register()


@pytest.fixture(autouse=True)
def failures(caplog):
    """A card that cannot be written is a warning, so that the run goes on; no other test may pass with one."""
    caplog.set_level(logging.WARNING)
    yield lambda: [record.getMessage() for record in caplog.records if "could not describe" in record.getMessage()]
    assert not [record for record in caplog.records if "could not describe" in record.getMessage()]


def card_of(run) -> str:
    return Path(run.args.output_dir, "README.md").read_text()


def metadata_of(run):
    return ModelCard.load(Path(run.args.output_dir, "README.md")).data


def saved(folder) -> dict:
    return json.loads(Path(folder, "mars.json").read_text())


def evaluated(args, model=None, **settings) -> Trainer:
    return trainer(args, model, eval_dataset=Blocks(8), **settings)


# --- mars.json --------------------------------------------------------------------------------------------------------


def test_mars_json(tmp_path):
    run = trainer(arguments(tmp_path / "out", **BY_NAME, optim_args="gamma=0.05", **SAVES, **WARMUP))
    run.train()
    run.save_model(str(tmp_path / "elsewhere"))
    for folder in ("out", "out/checkpoint-2", "out/checkpoint-4", "elsewhere"):
        content = saved(tmp_path / folder)
        assert content["create"]["gamma"] == 0.05 and content["create"]["lr"] == 1e-3
        assert [group["rule"] for group in content["groups"]] == ["mars-adamw", "adamw"]
        assert [group["parameters"] for group in content["groups"]] == [2176, 224]
        assert [group["lr"] for group in content["groups"]] == [1e-3, 5e-4]  # the peaks of the schedule
        assert (tmp_path / folder / "model.safetensors").is_file() == (folder != "out")
        assert (tmp_path / folder / "README.md").is_file() == (folder == "out")
    again = mars_hf.create(gpt2(), like=tmp_path / "elsewhere")
    assert again.param_groups[0]["gamma"] == 0.05 and again.param_groups[1]["lr"] == 5e-4


def test_other_optimizers_and_processes(tmp_path, monkeypatch):
    run = evaluated(arguments(tmp_path / "adamw", optim="adamw_torch", **EVALUATED))
    run.train()
    assert not list((tmp_path / "adamw").iterdir())
    run.create_model_card()
    assert "with betas=(0.9,0.999)" in card_of(run) and "MARS" not in card_of(run) and run.model.model_tags is None
    run = trainer(arguments(tmp_path / "mars", **BY_NAME))
    monkeypatch.setattr(type(run.args), "process_index", 1)
    monkeypatch.setattr(type(run.args), "should_save", False)
    run.train()
    run.create_model_card()
    assert not (tmp_path / "mars").exists() or not list((tmp_path / "mars").iterdir())


def test_switch_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("MARS_HF_FILES", "0")
    run = evaluated(arguments(tmp_path, **EVALUATED, **BY_NAME))
    run.train()
    run.save_model()
    assert not list(tmp_path.rglob("mars.json")) and not list(tmp_path.rglob("README.md"))
    assert (tmp_path / "model.safetensors").is_file() and run.model.model_tags is None


def test_optimizer_made_by_hand_and_module_without_config(tmp_path):
    model = Dense()
    trainer(arguments(tmp_path, max_steps=1), model, optimizers=(mars_hf.Mars(model.parameters()), None)).train()
    assert [path.name for path in tmp_path.iterdir()] == ["mars.json"] and saved(tmp_path)["create"] is None


# --- the card ---------------------------------------------------------------------------------------------------------


def test_card_of_a_run(tmp_path):
    run = evaluated(arguments(tmp_path, optim="mars_m", learning_rate=1e-3, optim_args="gamma=0.05", **EVALUATED))
    run.train()
    card, data = card_of(run), metadata_of(run)
    loss = next(row["eval_loss"] for row in run.state.log_history if "eval_loss" in row)
    assert "This model was trained from scratch on an unknown dataset." in card and "[](" not in card
    assert f"- Loss: {loss:.4f}\n" in card  # Trainer's own text
    assert "\n- learning_rate: 0.001\n" in card and "\n- optimizer: MARS-M (mars-m), see below\n- lr_scheduler" in card
    assert "OptimizerNames" not in card and "gamma=" not in card and str(tmp_path) not in card
    header, _, *rows = [line for line in card.partition("## Optimizer")[2].splitlines() if line.startswith("|")]
    assert header.startswith("| group | rule | lr | betas | eps | weight_decay | weight_decay_mode | gamma |")
    assert rows == [
        "| matrix | mars-m | 0.001 | (0.95, 0.99) | 1e-08 | 0 | standard | 0.05 | 1 | True | none | 1,536 |",
        "| adamw | adamw | 0.001 | (0.9, 0.95) | 1e-08 | 0 | standard |  |  |  |  | 640 |",
        "| vector | adamw | 0.001 | (0.9, 0.95) | 1e-08 | 0 | standard |  |  |  |  | 224 |",
    ]
    assert "@article{liu2025marsm" in card and card.count("## Training results") == 1
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.task_type) == ("loss", loss, "text-generation")
    assert (data.pipeline_tag, data.library_name) == ("text-generation", "transformers")
    assert {"mars", "mars_hf", "generated_from_trainer"} <= set(data.tags)
    assert data.license is None and data.base_model is None


@pytest.mark.parametrize(
    ("optim", "name", "key", "link"),
    [
        ("mars_adamw", "MARS", "yuan2024mars", "https://arxiv.org/abs/2411.10438"),
        ("mars_m", "MARS-M", "liu2025marsm", "https://arxiv.org/abs/2510.21800"),
        ("muon", "Muon", "jordan2024muon", "https://kellerjordan.github.io/posts/muon"),
    ],
)
def test_card_cites_the_work_of_its_rule(tmp_path, optim, name, key, link):
    run = mars_trainer(arguments(tmp_path, optim=optim, learning_rate=1e-3), gpt2())
    run.train()
    card = card_of(run)
    assert f"## Optimizer\n\n[{name}]({link}), `mars_hf`" in card and f"- optimizer: {name} (" in card
    assert f"## Citation of {name}\n\n```bibtex\n@" in card
    assert re.findall(r"^@\w+\{(\w+),", card, re.MULTILINE) == [key]


def test_card_says_what_settings_add_to_the_rule(tmp_path):
    settings = "normalize_rows=0.9,weight_decay_mode=cautious"
    run = mars_trainer(arguments(tmp_path, optim="mars_m", weight_decay=0.1, optim_args=settings), gpt2())
    run.train()
    assert "| 0.1 | cautious | 0.025 | 1 | True | 0.9 | 1,536 |" in card_of(run)
    saved = json.loads((tmp_path / "mars.json").read_text())["create"]
    assert saved["normalize_rows"] == 0.9 and saved["weight_decay_mode"] == "cautious"


def test_card_of_a_given_optimizer(tmp_path):
    """With its learning rates."""
    model = gpt2()
    rules = [("*[x|w]te.weight", {"lr": 1e-4})]
    run = mars_trainer(arguments(tmp_path), model, optimizers=(mars_hf.create(model, lr=6e-3, param_rules=rules), None))
    run.train()
    card = card_of(run)
    assert "| matrix `*[x\\|w]te.weight` | mars-adamw | 0.0001 |" in card
    assert "- learning_rate: 0.006\n" in card and "5e-05" not in card and "OptimizerNames" not in card


def test_facts_of_the_user(tmp_path):
    """Without them Trainer calls the data set None, in the text and as a type that the Hub refuses."""
    ids = Blocks(8).ids.tolist()
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    args = arguments(tmp_path, **BY_NAME, **EVALUATED)
    run = trainer(args, eval_dataset=data, compute_metrics=lambda _: {"accuracy": 0.5, "nan": math.nan})
    run.train()
    results = [(result.dataset_type, result.metric_type) for result in metadata_of(run).eval_results]
    assert sorted(results) == [("unknown", "accuracy"), ("unknown", "loss")]
    assert "on an unknown dataset." in card_of(run) and metadata_of(run).datasets is None
    facts = {"license": "apache-2.0", "dataset": "blocks", "dataset_tags": "me/blocks", "dataset_args": "sample"}
    run.create_model_card(**facts, tags="tiny")
    run.save_model()
    run.train()  # leaves the user's card
    card, data = card_of(run), metadata_of(run)
    assert "This model was trained from scratch on the blocks dataset." in card
    assert (data.license, data.datasets) == ("apache-2.0", ["me/blocks"])
    assert {"tiny", "generated_from_trainer", "mars"} <= set(data.tags)
    accuracy, loss = sorted(data.eval_results, key=lambda result: result.metric_type)
    assert (accuracy.metric_type, accuracy.metric_value, accuracy.dataset_args) == ("accuracy", 0.5, "sample")
    assert (loss.metric_type, loss.dataset_type, loss.dataset_name) == ("loss", "me/blocks", "blocks")


EDITS = {
    "none": lambda card: card,
    "text": lambda card: card.replace(b"\n# ", b"\nMine.\n\n# "),
    "metadata": lambda card: card.replace(b"library_name", b"license: mit\nlibrary_name"),
    "empty": lambda card: b"",
    "binary": lambda card: b"\xff\xfe",
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_card_stays(tmp_path, edit):
    run = trainer(arguments(tmp_path, **BY_NAME, max_steps=1))
    run.train()
    path = tmp_path / "README.md"
    path.write_bytes(EDITS[edit](path.read_bytes()))
    before, wrapped = path.read_bytes(), (run.create_model_card, run.save_model)
    run.args.max_steps = 3
    run.train()
    run.save_model()
    assert (run.create_model_card, run.save_model) == wrapped and saved(tmp_path)["create"]["lr"] == 1e-3
    if edit == "none":
        assert "- training_steps: 3\n" in card_of(run)
    else:
        assert path.read_bytes() == before


def test_card_during_a_push(tmp_path):
    """Each push takes a card along; a push in the background would upload half of one, so only the end waits for it."""
    run, seen = trainer(arguments(tmp_path, **BY_NAME)), []

    class PushEachStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            run.callback_handler.on_push_begin(args, state, control)
            seen.append(card_of(run))

    run.add_callback(PushEachStep())
    run.train()
    assert len(seen) == 4 and all("- training_steps: 4\n" in card for card in seen)
    before, run.args.max_steps = card_of(run), 3
    waits = SimpleNamespace(is_done=lambda: False, wait_until_done=lambda: seen.append(card_of(run)))
    run.push_in_progress = waits
    run.train()
    assert seen[4:8] == [before] * 4 and "- training_steps: 3\n" in card_of(run)


def test_failing_card(tmp_path, failures, caplog, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space\nleft")

    run = trainer(arguments(tmp_path, **BY_NAME))
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "create_model_card", fail)
        run.train()
    assert failures() == [f"mars_hf could not describe the run in {tmp_path}: no space left"]
    monkeypatch.setattr(hub, "_optimizer", fail)
    run = trainer(arguments(tmp_path, **BY_NAME))
    run.train()
    run.create_model_card(license="mit")  # as before a push
    assert len(failures()) == 3 and metadata_of(run).license == "mit"
    caplog.clear()


def test_results_of_the_best_weights(tmp_path):
    """With load_best_model_at_end the weights that stay are not those of the last evaluation."""
    settings = {**SAVES, "max_steps": 4, "load_best_model_at_end": True}
    run = evaluated(arguments(tmp_path, **BY_NAME, **{**EVALUATED, **settings}, greater_is_better=True))
    run.train()
    losses = {row["step"]: row["eval_loss"] for row in run.state.log_history if "eval_loss" in row}
    assert losses[2] > losses[4], "the loss falls, and greater counts as better"
    assert metadata_of(run).eval_results[0].metric_value == losses[2]


@pytest.mark.parametrize("base", ["openai-community/gpt2", "base", "gone"])
def test_base_model(tmp_path, monkeypatch, base):
    """Training asks the Hub for nothing, not even for the licence of the base."""
    asked, model, is_public = [], gpt2(), "/" in base
    monkeypatch.setattr(modelcard, "is_offline_mode", lambda: False)
    monkeypatch.setattr(modelcard, "hf_api", lambda: asked.append("hub") or 1 / 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    model.config._name_or_path = base if base != "gone" else str(tmp_path / base)
    run = trainer(arguments(tmp_path, **BY_NAME), model)
    run.train()
    origin = f"[{base}](https://huggingface.co/{base})" if is_public else f"the local model `{base}`"
    for rewrite in (False, True):
        if rewrite:
            monkeypatch.setattr(modelcard, "is_offline_mode", lambda: True)
            run.create_model_card()  # as a script does: Trainer's own text says of a folder "trained from scratch"
        assert f"This model is a fine-tuned version of {origin} on" in card_of(run) and str(tmp_path) not in card_of(
            run
        )
        assert metadata_of(run).base_model == (base if is_public else None) and asked == []


@pytest.mark.parametrize("base", ["on the Hub", "a folder", "from scratch"])
def test_adapter_of_peft(tmp_path, base):
    from peft import LoraConfig, get_peft_model

    model = gpt2()
    if base == "a folder":
        model.save_pretrained(tmp_path / "base")
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    elif base == "on the Hub":
        model.config._name_or_path = "openai-community/gpt2"
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True))
    run = trainer(arguments(tmp_path / "out", **BY_NAME, save_strategy="steps", save_steps=2), adapted)
    run.train()
    run.save_model()
    for written in (tmp_path / "out/README.md", tmp_path / "out/checkpoint-2/README.md"):  # by PEFT, when it saves
        assert str(tmp_path) not in written.read_text() and ModelCard.load(written).data.library_name == "peft"
    assert hub._is_sealed(card_of(run))  # so that the next training may rewrite it
    run.create_model_card()
    card, data = card_of(run), metadata_of(run)
    assert {"lora", "mars"} <= set(data.tags) and not any(tag.endswith(":") for tag in data.tags)
    assert data.library_name == "peft"
    assert "- PEFT " in card and "## Optimizer" in card and str(tmp_path) not in card
    assert data.base_model == ("openai-community/gpt2" if base == "on the Hub" else None)
    assert "mars" in ModelCard.load(tmp_path / "out/checkpoint-2/README.md").data.tags  # PEFT's own card


def test_card_of_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install -e '.[test]'")
    from test_trl_trainers import METHODS, Dataset, build

    data = Dataset.from_list(METHODS["SFT"][2])
    run = build("SFT", tmp_path, trl.SFTTrainer, args={**EVALUATED, **BY_NAME}, eval_dataset=data)
    run.train()
    run.save_model()
    assert f"\n# Model Card for {tmp_path.name}\n" in card_of(run)
    run.create_model_card("tiny", dataset_name=str(tmp_path))
    card, data = card_of(run), metadata_of(run)
    assert {"trl", "sft", "mars", "generated_from_trainer"} <= set(data.tags)
    assert "This model was trained from scratch" in card and data.base_model is data.datasets is None
    assert str(tmp_path) not in str(data)
    assert "| matrix | mars-adamw |" in card and "Cite TRL as:" in card
    assert card.count("```python") == 1 and "None" not in card  # TRL's quick start
    assert f'pipeline("text-generation", model="{tmp_path.name}", ' in card
    assert "loss" in {result.metric_type for result in data.eval_results}


# --- settings taken up ------------------------------------------------------------------------------------------------


def test_like_in_factories(tmp_path):
    first = trainer(arguments(tmp_path / "first", **BY_NAME, optim_args="gamma=0.05,beta1=0.9", weight_decay=0.1))
    first.train()
    place = f"like={tmp_path / 'first'}"
    run = trainer(arguments(tmp_path / "second", optim="mars_adamw", learning_rate=2e-3, optim_args=place))
    run.train()
    wanted = {"gamma": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1, "lr": 2e-3}
    assert wanted.items() <= run.optimizer.optimizer.param_groups[0].items()
    assert wanted.items() <= (saved(tmp_path / "second")["create"] | {"betas": (0.9, 0.99)}).items()
    args = arguments(tmp_path / "third", learning_rate=2e-3, weight_decay=0.2)  # TrainingArguments win
    made, settings = mars_hf.factory(args, like=tmp_path / "first", gamma=0.025)
    mars = made()(gpt2(), **settings)
    assert (mars.param_groups[0]["weight_decay"], mars.param_groups[0]["gamma"]) == (0.2, 0.025)
    with pytest.raises(ValueError, match=r"optim='mars_lion' and the mars_type of like='.*', 'mars-adamw' contradict"):
        arguments(tmp_path / "fourth", optim="mars_lion", optim_args=place)
    with pytest.raises(ValueError, match=r"like='nowhere/at/all': no such folder"):
        arguments(tmp_path / "fifth", optim="mars_adamw", optim_args="like=nowhere/at/all")
    for convert in (
        lambda: arguments(tmp_path / "sixth", optim="mars_adamw", optim_args=f"{place},adamw_rates=true"),
        lambda: mars_hf.factory(args, like=tmp_path / "first", adamw_rates=True),
    ):
        with pytest.raises(ValueError, match=r"like='.*' has rates of MARS; leave adamw_rates out"):
            convert()


KEEP = [("*wte*", {"weight_decay": 0.0})]


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        ({"lr_1d": 1e-3, "betas_1d": (0.8, 0.9)}, {}, {"lr_1d": 1e-3, "betas_1d": [0.8, 0.9], "betas": [0.95, 0.99]}),
        ({"lr_embeddings": 1e-4}, {"lr_embeddings": 2e-4}, {"lr_embeddings": 1e-4, "lr": 3e-3}),
        ({"weight_decay": 0.1, "param_rules": KEEP}, {"param_rules": KEEP}, {"weight_decay": 0.1}),
    ],
)
def test_mars_json_after_resuming(tmp_path, before, now, kept):
    """They train, so a later create(like=...) takes them up; null where no call of create gives them."""

    def run(checkpoint=None, **settings):
        model = gpt2()
        made = trainer(
            arguments(tmp_path, **SAVES), model, optimizers=(mars_hf.create(model, **{"lr": 3e-3, **settings}), None)
        )
        made.train(resume_from_checkpoint=checkpoint)

    run(**before)
    run(str(tmp_path / "checkpoint-2"), **now)
    found = saved(tmp_path)
    assert kept.items() <= found["create"].items()
    model = gpt2()
    like = mars_hf.create(model, like=tmp_path)
    assert [group["lr"] for group in like.param_groups] == [group["lr"] for group in found["groups"]]


class Hub(SimpleHTTPRequestHandler):
    """Serve a folder to `hf_hub_download`, as the Hub does: OWNER/NAME/resolve/main/FILE."""

    def log_message(self, *_):
        self.server.requests.append(f"{self.command} {self.path}")

    def end_headers(self):
        self.send_header("ETag", "1")
        self.send_header("X-Repo-Commit", "0" * 40)
        super().end_headers()


def test_like_of_a_repository(tmp_path, monkeypatch):
    """From the server, then from the cache, and one line for everything that can be missing."""
    served = tmp_path / "hub/me/x/resolve/main"
    served.mkdir(parents=True)
    (served / "mars.json").write_text(json.dumps({"mars_hf": "0.1.0", "create": {"lr": 3e-3, "gamma": 0.05}}))
    model = gpt2()
    with HTTPServer(("127.0.0.1", 0), partial(Hub, directory=tmp_path / "hub")) as server, monkeypatch.context() as hub:
        server.requests = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        hub.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
        hub.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        assert mars_hf.create(model, like="me/x").param_groups[0]["gamma"] == 0.05
        asked = "/me/x/resolve/main/mars.json"
        assert set(server.requests) == {f"HEAD {asked}", f"GET {asked}"}  # one file, no listing
        reason = "no such folder, and the Hub does not give its mars.json"
        with pytest.raises(ValueError, match=rf"^like='me/nothing': {reason} \(\w+Error: "):
            mars_hf.create(model, like="me/nothing")
        server.shutdown()
    assert mars_hf.create(model, like="me/x").param_groups[0]["gamma"] == 0.05
