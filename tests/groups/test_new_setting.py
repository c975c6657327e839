"""A new setting is a row of the table, a type, a keyword and the code that reads it: all doors know it from there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mutations import copy_tree
from test_budgets import SETTING_FILES

# A decay that ends after some steps. By file: texts, and the lines before which they go.
CHANGES = {
    "mars_hf/groups/settings.py": {
        '    Setting("max_grad_norm", ': """\
    Setting("decay_steps", 0, _STEPS_OR_NONE, "Steps with weight decay; 0: all.", readers=_ORTHOGONALIZED),
""",
        "    max_grad_norm: float | None\n": "    decay_steps: int\n",
        "class Setting(NamedTuple):": """\
_STEPS_OR_NONE = Kind("an integer >= 0", lambda value: type(value) is int and value >= 0, type=int)


""",
    },
    "mars_hf/optimizer.py": {
        "        max_grad_norm: largest global": "        decay_steps: steps of matrices with decay; 0 for all.\n",
        "        max_grad_norm: float | None = None,\n": "        decay_steps: int = 0,\n",
    },
    "mars_hf/step/update.py": {
        "    formulas.apply(\n": """\
    if 0 < group["decay_steps"] < tensors.steps[0]:
        group = {**group, "weight_decay": 0.0}
""",
    },
    "tests/groups/test_settings.py": {
        '    "fused": (0, 1, "auto"),\n': '    "decay_steps": (-1, 1.0, None),\n',
        '    **{"maximize": "true", ': '    "decay_steps": "3",\n',
    },
    "tests/step/test_formulas.py": {'    "is_approx",\n': '    "decay_steps",\n'},
}

SCRIPT = """
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import mars_hf
from mars_hf.__main__ import main
from mars_hf.groups.settings import parse_optim_args

assert Path(mars_hf.__file__).parents[1] == Path.cwd()
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
settings = {"lr": 1e-3, "mars_type": "mars-m", "weight_decay": 0.1}

# It does what it says.
mars = mars_hf.create(model, decay_steps=2, **settings)
weight = model.transformer.h[0].mlp.c_fc.weight
for step in range(4):
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)  # rests, and decays
    mars.step()
    assert torch.equal(weight, before) == (step >= 2)

# The doors: groups, options by text, overrides, saved settings.
assert parse_optim_args("decay_steps=3") == {"decay_steps": 3}
group = {"params": [torch.nn.Parameter(torch.ones(2, 2))], "role": "matrix", "decay_steps": 5}
assert mars_hf.Mars([group], mars_type="mars-m").param_groups[0]["decay_steps"] == 5
of_override = mars_hf.create(model, param_rules=[("*.c_fc.*", {"decay_steps": 7})], **settings)
assert {group["decay_steps"] for group in of_override.param_groups} == {0, 7}
assert mars.created_with["decay_steps"] == 2
again = mars_hf.create(model, decay_steps=2, **settings)
again.load_state_dict(mars.state_dict())

# What is refused: a wrong value, a typo, and a rule that does not read it.
with pytest.raises(ValueError, match="decay_steps=-1.*an integer >= 0"):
    mars_hf.create(model, decay_steps=-1, **settings)
with pytest.raises((TypeError, ValueError), match="decay_steps"):
    mars_hf.create(model, decay_stepz=1, **settings)
with pytest.raises(ValueError, match="decay_steps=3 would be ignored.*mars-m"):
    mars_hf.create(model, decay_steps=3, lr=1e-3)
"""


@pytest.mark.slow
def test_setting_of_six_files(tmp_path):
    """Three of them are sources; the sixth is the changelog."""
    tree = tmp_path / "tree"
    copy_tree(tree)
    for file, texts in CHANGES.items():
        path = tree / file
        for before, text in texts.items():
            source = path.read_text()
            assert source.count(before) == 1, before
            path.write_text(source.replace(before, text + before))
    assert len(CHANGES) + 1 <= SETTING_FILES
    env = {**os.environ, "PYTHONPATH": str(tree)}
    finished = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tree, env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    of_all = ["tests/groups/test_settings.py", "tests/step/test_formulas.py", "-k", "setting or value or text"]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", *of_all]
    finished = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout
