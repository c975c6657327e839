"""What a run leaves for the Hub: the model card, its picture, and mars.json beside the weights."""

from __future__ import annotations

import json
import logging
import math
import sys
import weakref
from pathlib import Path

import pytest
import torch
from helpers import Blocks, arguments, gpt2, mars_trainer, trainer
from huggingface_hub import ModelCard
from torch import nn
from transformers import Trainer, default_data_collator

import mars_hf
from mars_hf.training import hub
from mars_hf.training.card_facts import CardFacts

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}  # too few points for a curve, which takes time
BY_NAME = {"optim": "mars_adamw", "learning_rate": 1e-3}


@pytest.fixture(scope="module", autouse=True)
def registered():
    mars_hf.register()


@pytest.fixture(autouse=True)
def nothing_failed(caplog):
    """A card that cannot be written is a warning, so that the run goes on; no test may pass with one."""
    caplog.set_level(logging.WARNING)
    yield
    assert not [record for record in caplog.records if "could not describe" in record.getMessage()]


def card_of(run) -> str:
    return Path(run.args.output_dir, "README.md").read_text()


def metadata_of(run):
    return ModelCard.load(Path(run.args.output_dir, "README.md")).data


def saved(folder) -> dict:
    return json.loads(Path(folder, "mars.json").read_text())


def evaluated(args, model=None, **settings) -> Trainer:
    return trainer(args, model, eval_dataset=Blocks(8), **settings)


# --- a run leaves a card ----------------------------------------------------------------------------------------------


def test_a_run_leaves_a_card_that_says_what_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "train.py", "--lr", "1e-3", "--hub_token", "abc"])
    run = evaluated(arguments(tmp_path, **BY_NAME, **{**EVALUATED, "max_steps": 6}, gradient_accumulation_steps=2))
    run.train()
    card, data = card_of(run), metadata_of(run)
    assert "A `GPT2LMHeadModel` (2.4k parameters), trained from scratch with [MARS]" in card
    assert (
        "| training | not named (a `Blocks`) | 64 |" in card and "| evaluation | not named (a `Blocks`) | 8 |" in card
    )
    assert "| steps | 6 |" in card and "| samples a step | 8 (4 a process × 2 accumulated) |" in card
    assert "| matrix | 0.001 | (0.95, 0.99) |" in card and "| 2,176 |" in card
    assert "```bash\npython3 train.py --lr 1e-3 --hub_token '***'\n```" in card and "abc" not in card
    assert f"| torch | {torch.__version__} |" in card and f"| mars_hf | {mars_hf.__version__} |" in card
    assert "## License\n\nNot stated.\n" in card and "2411.10438" in card
    assert (tmp_path / "loss_curve.png").is_file() and "(loss_curve.png)" in card

    rows = [row for row in run.state.log_history if "eval_loss" in row]
    assert [f"| {row['step']} | {row['eval_loss']:.4f} |" in card for row in rows] == [True] * 3
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("loss", rows[-1]["eval_loss"])
    assert (result.task_type, data.pipeline_tag, data.library_name) == (
        *("text-generation", "text-generation", "transformers"),
    )
    assert {"mars_hf", "mars"} <= set(data.tags) and data.license is None and data.base_model is None


def test_mars_json_is_beside_the_weights_wherever_they_are_saved(tmp_path):
    run = trainer(arguments(tmp_path / "out", **BY_NAME, optim_args="gamma=0.05", save_strategy="steps", save_steps=2))
    run.train()
    run.save_model(str(tmp_path / "elsewhere"))
    for folder in ("out", "out/checkpoint-2", "out/checkpoint-4", "elsewhere"):
        content = saved(tmp_path / folder)
        assert content["create"]["gamma"] == 0.05 and content["create"]["lr"] == 1e-3
        assert [group["rule"] for group in content["groups"]] == ["mars-adamw", "adamw"]
        assert [group["parameters"] for group in content["groups"]] == [2176, 224]
        assert (tmp_path / folder / "model.safetensors").is_file() == (folder != "out")
    again = mars_hf.create(gpt2(), like=tmp_path / "elsewhere")
    assert again.param_groups[0]["gamma"] == 0.05 and again.param_groups[1]["lr"] == 5e-4


def test_groups_state_the_peak_of_the_schedule(tmp_path):
    run = trainer(arguments(tmp_path, **BY_NAME, lr_scheduler_type="linear", warmup_steps=2))
    run.train()
    assert [group["lr"] for group in saved(tmp_path)["groups"]] == [1e-3, 5e-4]


def test_other_optimizers_leave_nothing(tmp_path):
    trainer(arguments(tmp_path, optim="adamw_torch")).train()
    assert not list(tmp_path.iterdir())


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    run = trainer(arguments(tmp_path, **BY_NAME))
    monkeypatch.setattr(type(run.args), "process_index", 1)
    monkeypatch.setattr(type(run.args), "should_save", False)
    run.train()
    run.create_model_card()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("made", ["by hand", "like"])
def test_an_instance_keeps_what_create_was_given(tmp_path, made):
    model = gpt2()
    optimizer = mars_hf.Mars(model.parameters()) if made == "by hand" else mars_hf.create(model, gamma=0.1)
    trainer(arguments(tmp_path, max_steps=1), model, optimizers=(optimizer, None)).train()
    found = saved(tmp_path)["create"]
    assert found is None if made == "by hand" else found["gamma"] == 0.1


# --- cards that are there ---------------------------------------------------------------------------------------------


def test_training_twice_writes_one_part_anew_and_keeps_the_text_around_it(tmp_path):
    run = evaluated(arguments(tmp_path, **BY_NAME, **EVALUATED))
    run.train()
    path = tmp_path / "README.md"
    text = path.read_text()
    path.write_text(
        text.replace("library_name", "license: mit\nlibrary_name").replace("\n# ", "\nWritten by me.\n\n# ")
        + "\nMine.\n"
    )
    wrapped = run.create_model_card, run.save_model
    run.args.max_steps = 3
    run.train()
    assert (run.create_model_card, run.save_model) == wrapped
    card = card_of(run)
    assert card.count("## Usage") == 1 and "| steps | 3 |" in card and "| steps | 2 |" not in card
    assert "\nWritten by me.\n" in card and card.rstrip().endswith("<!-- mars_hf: end -->\nMine.")
    data = metadata_of(run)
    assert data.license == "mit" and "## License\n\nmit\n" in card and len(data.eval_results) == 1


def test_a_card_of_somebody_else_stays(tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    run = trainer(arguments(tmp_path, **BY_NAME))
    run.train()
    assert card_of(run) == "# My project\n"
    assert saved(tmp_path)["create"]["lr"] == 1e-3


def test_trainers_own_card_is_completed_and_repaired(tmp_path):
    run = evaluated(arguments(tmp_path, **BY_NAME, **EVALUATED))
    run.train()
    run.create_model_card(license="apache-2.0", dataset="blocks", dataset_tags="me/blocks", tags="tiny")
    card, data = card_of(run), metadata_of(run)
    assert "This model was trained from scratch on the blocks dataset." in card and "[](" not in card
    assert "### Training hyperparameters" in card and "- learning_rate: 0.001\n" in card  # its own text
    assert card.count("More information needed") == 1  # uses and limitations, which nobody but the author knows
    assert "| training | [blocks](https://huggingface.co/datasets/me/blocks) | 64 |" in card
    assert data.license == "apache-2.0" and data.datasets == ["me/blocks"]
    assert {"tiny", "generated_from_trainer", "mars"} <= set(data.tags)
    (result,) = data.eval_results
    assert (result.dataset_type, result.dataset_name, result.metric_type) == ("me/blocks", "blocks", "loss")


class TemplateTrainer(Trainer):
    """With a card of its own, as TRL's."""

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        base = None
        text = f"This model is a fine-tuned version of [{base}](https://huggingface.co/{base}).\nIt has been trained."
        Path(self.args.output_dir, "README.md").write_text(
            f"---\nbase_model: {base}\nmodel_name: {model_name}\n---\n\n# Model Card\n\n{text}\n"
        )


def test_a_card_from_a_template_is_completed(tmp_path):
    run = TemplateTrainer(
        gpt2(), arguments(tmp_path, **BY_NAME), train_dataset=Blocks(), data_collator=default_data_collator
    )
    run.train()
    run.create_model_card("tiny", dataset_name="blocks")
    card, data = card_of(run), metadata_of(run)
    assert "This model was trained from scratch.\nIt has been trained." in card and "## Optimizer" in card
    assert data.base_model is None and "| training | blocks | 64 |" in card


@pytest.mark.slow
def test_results_of_others_stay_in_the_metadata(tmp_path):
    run = evaluated(arguments(tmp_path, **BY_NAME, **EVALUATED))
    run.train()
    from huggingface_hub import EvalResult

    card = ModelCard.load(tmp_path / "README.md")
    theirs = EvalResult("text-generation", "hellaswag", "HellaSwag", "acc_norm", 0.3)
    card.data.eval_results = [*card.data.eval_results, theirs]
    card.save(tmp_path / "README.md")
    run.train()
    assert [(own.dataset_name, own.metric_type) for own in metadata_of(run).eval_results] == [
        *(("unknown", "loss"), ("HellaSwag", "acc_norm")),
    ]


def test_a_card_that_cannot_be_read_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "README.md").write_text(f"---\n: [\n---\n{hub._BEGIN}\n")
    trainer(arguments(tmp_path, **BY_NAME)).train()
    (line,) = [record.getMessage() for record in caplog.records if "could not describe" in record.getMessage()]
    assert "\n" not in line and str(tmp_path) in line
    assert (tmp_path / "README.md").read_text().startswith("---\n: [")
    caplog.clear()


# --- facts ------------------------------------------------------------------------------------------------------------


def test_a_script_states_facts_once(tmp_path):
    run = evaluated(arguments(tmp_path, **BY_NAME, **EVALUATED))
    run.card_facts = CardFacts(
        model_name="Tiny", license="mit", dataset="blocks", tokens_per_sample=12, results={"perplexity": 42.5}
    )
    run.train()
    card, data = card_of(run), metadata_of(run)
    assert "# Tiny\n" in card and "| tokens a step | 48 |" in card and "| tokens | 96 |" in card
    assert "| perplexity | 42.5000 |" in card and data.license == "mit"
    assert {own.metric_type: own.metric_value for own in data.eval_results}["perplexity"] == 42.5
    run.create_model_card(license="apache-2.0")
    assert metadata_of(run).license == "apache-2.0" and "blocks" in card_of(run)


def test_data_sets_of_the_hub_are_named(tmp_path):
    import datasets

    blocks = Blocks(16)
    data = datasets.Dataset.from_dict({"input_ids": blocks.ids.tolist(), "labels": blocks.ids.tolist()}, split="train")
    data.info.builder_name, data.info.config_name = "parquet", "sample"
    data.info.download_checksums = {"hf://datasets/me/words@0123abc/data/a.parquet": {}}
    run = Trainer(gpt2(), arguments(tmp_path, **BY_NAME), train_dataset=data, data_collator=default_data_collator)
    run.train()
    assert "| training | [me/words](https://huggingface.co/datasets/me/words) (sample, split train) | 16 |" in card_of(
        run
    )
    assert metadata_of(run).datasets == ["me/words"]


def test_several_evaluation_sets_have_results_of_their_own(tmp_path):
    args = arguments(tmp_path, **BY_NAME, **EVALUATED)
    run = trainer(args, eval_dataset={"en": Blocks(8), "de_at": Blocks(4)})
    run.train()
    found = {(own.dataset_name, own.metric_type) for own in metadata_of(run).eval_results}
    assert found == {("en", "loss"), ("de_at", "loss")}
    card = card_of(run)
    assert "| step | en_loss | de_at_loss |" in card and "| evaluation: de_at | not named (a `Blocks`) | 4 |" in card


def test_values_that_are_not_finite_are_no_results(tmp_path):
    run = evaluated(arguments(tmp_path, **BY_NAME, **EVALUATED))
    run.train()
    run.state.log_history[-2]["eval_loss"] = math.nan
    hub.write_model_card(run)
    assert metadata_of(run).eval_results is None and "model-index" not in card_of(run) and "| 2 | nan |" in card_of(run)


def test_the_best_weights_have_their_own_result(tmp_path):
    """With load_best_model_at_end the weights that stay are not those of the last evaluation."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    args = arguments(tmp_path, **BY_NAME, **{**EVALUATED, **settings}, greater_is_better=True)
    run = evaluated(args)
    run.train()
    losses = {row["step"]: row["eval_loss"] for row in run.state.log_history if "eval_loss" in row}
    best = max(losses, key=losses.get)
    assert best == 2, "the loss falls, and greater counts as better"
    assert metadata_of(run).eval_results[0].metric_value == losses[2]
    assert "The weights are those of step 2, the best." in card_of(run)
    loss = run.evaluate()["eval_loss"]
    run.create_model_card()
    assert metadata_of(run).eval_results[0].metric_value == loss == pytest.approx(losses[2])


def test_the_base_of_a_fine_tuned_model_is_named(tmp_path):
    model = gpt2()
    model.config._name_or_path = "openai-community/gpt2"
    run = trainer(arguments(tmp_path, **BY_NAME), model)
    run.train()
    card = card_of(run)
    assert "fine-tuned from [openai-community/gpt2](https://huggingface.co/openai-community/gpt2) with" in card
    assert metadata_of(run).base_model == "openai-community/gpt2"
    model.config._name_or_path = str(tmp_path)  # a folder of this machine is no model of the Hub
    (tmp_path / "README.md").unlink()
    hub.write_model_card(run)
    assert f"fine-tuned from `{tmp_path.name}`" in card_of(run) and metadata_of(run).base_model is None


def test_the_norm_that_clipped_is_stated_while_the_step_owns_it(tmp_path):
    """MarsTrainer takes max_grad_norm off the optimizer while it trains, when the card is written."""
    model = gpt2()
    run = mars_trainer(arguments(tmp_path), model, optimizers=(mars_hf.create(model, max_grad_norm=5.0), None))
    run.train()
    assert "| max_grad_norm | 5.0 |" in card_of(run)


# --- snippets ---------------------------------------------------------------------------------------------------------


def snippet_of(run) -> str:
    return card_of(run).partition("```python\n")[2].partition("```")[0]


def test_the_snippet_loads_what_was_saved(tmp_path):
    run = trainer(arguments(tmp_path, **BY_NAME))
    run.train()
    run.save_model()
    names: dict = {}
    exec(snippet_of(run), names)
    assert all(torch.equal(a, b) for a, b in zip(names["model"].parameters(), run.model.parameters(), strict=True))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1)

    def forward(self, input_ids, labels=None):
        return {"loss": self.linear(input_ids.float()).square().mean()}


def test_a_module_that_is_not_of_transformers_has_a_snippet_too(tmp_path):
    run = trainer(arguments(tmp_path, **BY_NAME), Regression())
    run.train()
    run.save_model()
    names: dict = {}
    exec(snippet_of(run), names)
    assert torch.equal(names["weights"]["linear.weight"], run.model.linear.weight)
    assert metadata_of(run).pipeline_tag is None


@pytest.mark.parametrize("base", ["a folder", "from scratch"])
def test_an_adapter_is_loaded_by_peft(tmp_path, base):
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    model = gpt2()
    if base == "a folder":
        model.save_pretrained(tmp_path / "base")
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False))
    run = trainer(arguments(tmp_path / "out", **BY_NAME), adapted)
    run.train()
    run.save_model()
    run.create_model_card()
    card, data = card_of(run), metadata_of(run)
    trained = sum(param.numel() for param in adapted.parameters() if param.requires_grad)
    assert "An adapter of a `GPT2LMHeadModel` (" in card and f" parameters, {trained} of them trained)" in card
    assert data.base_model is None and not any(str(tmp_path) in tag or tag.endswith(":") for tag in data.tags)
    assert data.library_name == "peft" and data.pipeline_tag == "text-generation"
    assert "## Optimizer" in card and card.count("## Usage") == 1
    names: dict = {}
    code = snippet_of(run)
    if base == "from scratch":
        assert "base = ...  # the GPT2LMHeadModel that the adapter was trained on" in code
        code, names = code.replace("base = ...", "base = made()"), {"made": gpt2}
    exec(code, names)
    ids = Blocks().ids[:2]
    assert torch.equal(names["model"].eval()(ids).logits, adapted.eval()(ids).logits)


# --- continued pretraining --------------------------------------------------------------------------------------------


def test_factories_take_up_saved_settings(tmp_path):
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
    with pytest.raises(ValueError, match=r"optim='mars_lion' and like='.*', which was trained with 'mars-adamw'"):
        arguments(tmp_path / "fourth", optim="mars_lion", optim_args=place)
    with pytest.raises(ValueError, match=r"like='nowhere/at/all': no such folder"):
        arguments(tmp_path / "fifth", optim="mars_adamw", optim_args="like=nowhere/at/all")


def test_groups_given_by_a_script_keep_the_options_for_models(tmp_path):
    model = gpt2()
    made, settings = mars_hf.factory(mars_type="mars-m", adamw=["*.mlp.c_fc.weight"])
    mars = made(list(model.parameters()), model=model, **settings)
    assert mars.created_with["adamw"] == ["*.mlp.c_fc.weight"] and mars.created_with["mars_type"] == "mars-m"


RESUMED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        ({"lr": 1e-2, "gamma": 0.1}, {"lr": 4e-3, "gamma": 0.05}, {"lr": 1e-2, "gamma": 0.1, "lr_1d": None}),
        ({"lr_1d": 1e-3, "betas_1d": (0.8, 0.9)}, {}, {"lr_1d": 1e-3, "betas_1d": [0.8, 0.9], "betas": [0.95, 0.99]}),
        ({"lr_embeddings": 1e-4}, {"lr_embeddings": 2e-4}, {"lr_embeddings": 1e-4, "lr": 3e-3}),
        ({"weight_decay": 0.1, "no_decay": ["*wte*"]}, {"no_decay": ["*wte*"]}, {"weight_decay": 0.1}),
    ],
)
def test_after_a_resume_the_checkpoints_settings_are_kept(tmp_path, before, now, kept):
    """They train, so a later create(like=...) takes them up; null where no call of create gives them."""

    def run(checkpoint=None, **settings):
        model = gpt2()
        made = trainer(arguments(tmp_path, **RESUMED), model, optimizers=(mars_hf.create(model, **settings), None))
        made.train(resume_from_checkpoint=checkpoint)

    run(**before)
    run(str(tmp_path / "checkpoint-2"), **now)
    found = saved(tmp_path)
    assert kept.items() <= found["create"].items()
    model = gpt2()
    like = mars_hf.create(model, like=tmp_path)
    assert [group["lr"] for group in like.param_groups] == [group["lr"] for group in found["groups"]]


def test_a_trainer_is_not_kept_alive():
    class Small:
        def save_model(self, output_dir=None):
            pass

        def create_model_card(self):
            pass

    own = Small()
    hub.attach(own)
    reference = weakref.ref(own)
    del own
    assert reference() is None
