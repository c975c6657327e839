"""Runs pushed to a server that speaks the Hub's protocol, and loaded back by transformers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import HubServer, mistakes_in
from safetensors.torch import load

TESTS = Path(__file__).resolve().parents[1]

TRAIN = """
import sys
sys.path.insert(0, {tests!r})
import torch
from helpers import Blocks, arguments, gpt2
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, default_data_collator
import mars_hf

mars_hf.register()
ids = {{"<pad>": 0, "The": 1, "cat": 2, **{{f"w{{i}}": i for i in range(3, 64)}}}}
words = Tokenizer(models.WordLevel(ids, "<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
settings = {{"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}}
settings |= {{"push_to_hub": True, "hub_model_id": "me/x", "hub_strategy": "every_save", "hub_always_push": True}}
model, given = gpt2(), {{}}
if sys.argv[1] == "Trainer":
    settings |= {{"optim": "mars_adamw", "optim_args": "gamma=0.05", "learning_rate": 1e-3}}
else:
    given["optimizers"] = (mars_hf.create(model, lr=1e-3, gamma=0.05), None)
kind = {{"Trainer": Trainer, "MarsTrainer": mars_hf.MarsTrainer}}[sys.argv[1]]
run = kind(
    model, arguments(sys.argv[2], **settings), train_dataset=Blocks(), eval_dataset=Blocks(8),
    data_collator=default_data_collator, processing_class=tokenizer, **given,
)
run.train()
run.push_to_hub(license="mit", dataset="blocks")
"""

# Nothing here knows mars_hf: importing it fails.
LOAD = """
import json, sys
sys.modules["mars_hf"] = None
from huggingface_hub import ModelCard, hf_hub_download
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained("me/x") for kind in (AutoModelForCausalLM, AutoTokenizer))
card = ModelCard.load("me/x")
(code,) = [part.partition("```")[0] for part in card.text.split("```python\\n")[1:]]
names = {}
exec(code, names)
assert not any(name.startswith("mars_hf") for name, module in sys.modules.items() if module is not None)
print(json.dumps({
    "results": [vars(own) for own in card.data.eval_results],
    "card": {"license": card.data.license, "pipeline": card.data.pipeline_tag, "tags": card.data.tags},
    "sum": sum(float(param.double().sum()) for param in model.parameters()),
    "code": code,
    "loaded": bool(all((a == b).all() for a, b in zip(model.parameters(), names["model"].parameters()))),
    "ids": tokenizer("The cat").input_ids,
}))
"""

LIKE = """
import sys
import torch
import mars_hf

model = torch.nn.Sequential(torch.nn.Linear(4, 4))
for name in sys.argv[1:]:
    try:
        print(mars_hf.create(model, like=name).param_groups[0]["gamma"])
    except ValueError as error:
        print(error)
"""


def python(code: str, *argv: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Trainer", "MarsTrainer"])
def test_a_pushed_run_is_used_without_mars_hf(tmp_path, kind):
    with HubServer() as hub:
        environment = hub.environment(str(tmp_path / "home"))
        python(TRAIN.format(tests=str(TESTS)), kind, str(tmp_path / "x"), **environment)
        assert {"README.md", "mars.json", "model.safetensors", "tokenizer.json"} <= set(hub.files)
        assert not [name for name in hub.files if "partial" in name or name.startswith("checkpoint")]
        assert mistakes_in(hub.files["README.md"].decode()) == []
        assert len([line for line in hub.requests if "/commit/" in line]) == 3  # two checkpoints, the end
        settings = json.loads(hub.files["mars.json"])
        assert settings["create"]["gamma"] == 0.05 and settings["create"]["lr"] == 1e-3

        found = json.loads(python(LOAD, **hub.environment(str(tmp_path / "other home"))).splitlines()[-1])
        weights = load(hub.files["model.safetensors"])
        total = sum(float(value.double().sum()) for value in weights.values() if isinstance(value, torch.Tensor))
        assert found["sum"] == pytest.approx(total, abs=1e-9) and found["ids"] == [1, 2]
        assert found["loaded"] and 'from_pretrained("me/x")' in found["code"]
        (result,) = found["results"]
        assert (result["metric_type"], result["dataset_name"]) == ("loss", "blocks")
        assert found["card"]["license"] == "mit" and found["card"]["pipeline"] == "text-generation"
        assert "mars" in found["card"]["tags"]


@pytest.mark.slow
def test_settings_of_a_repository_are_taken_up(tmp_path):
    """From the server, then from the cache, and one line for everything that can be missing."""
    with HubServer() as hub:
        hub.repos.add("me/x")
        hub.empty.add("me/empty")
        hub.files["mars.json"] = json.dumps({"format": 1, "mars_hf": "0.1.0", "create": {"gamma": 0.05}}).encode()
        environment = hub.environment(str(tmp_path / "home"))
        gamma, nothing, empty = python(LIKE, "me/x", "me/nothing", "me/empty", **environment).splitlines()
        assert gamma == "0.05"
        assert {line for line in hub.requests if "me/x" in line} == {
            *("HEAD /me/x/resolve/main/mars.json", "GET /me/x/resolve/main/mars.json")  # one file, no listing
        }
        reason = "no such folder, and the Hub does not give its mars.json"
        assert nothing.startswith(f"like='me/nothing': {reason} (RepositoryNotFoundError")
        assert "EntryNotFoundError" in empty and empty.startswith(f"like='me/empty': {reason}")
    gamma, gone = python(LIKE, "me/x", "me/never", **environment).splitlines()  # the server is gone
    assert gamma == "0.05"
    assert gone.startswith(f"like='me/never': {reason} (LocalEntryNotFoundError")


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("license: mit\nbase_model: me/x", []),
        ("license: Apache 2.0", ['"license" must be one of apache-2.0, mit, ...: Apache 2.0']),
        ("base_model: /tmp/x", ['"base_model" with value "/tmp/x" is not valid']),
    ],
)
def test_the_server_refuses_what_the_hub_refuses(text, mistakes):
    assert [own["message"] for own in mistakes_in(f"---\n{text}\n---\n")] == mistakes
