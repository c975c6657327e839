"""A new rule is an entry of the table and its arithmetic: everything else in the package and the recipes follows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import copy_tree

ENTRY = '    UpdateRule(name="mars-m", '
NEW_ENTRY = (
    '    UpdateRule(name="mars-toy", arithmetic="toy", lr_1d_ratio=0.25, update_rms=lambda beta1, gamma: 2.0),\n'
)
# Beside the first moment it keeps an average of the signal that hardly forgets, as AdEMAMix does (arXiv 2409.03137).
ARITHMETIC = """
def _write_toy(params, m, s, buffers, options):
    slow = buffers["slow_avg"]
    torch._foreach_lerp_(slow, s, 0.5)
    directions = [2.0 * moment + average for moment, average in zip(m, slow, strict=True)]
    apply(params, directions, lr=float(options.lr), weight_decay=options.weight_decay)


ARITHMETICS["toy"] = Arithmetic(_write_toy, buffers=("slow_avg",))
"""
REFERENCE = '        elif self.rule == "mars-shampoo":'
NEW_REFERENCE = """        elif self.rule == "mars-toy":
            self.slow = 0.5 * (getattr(self, "slow", 0.0) + c)
            direction = 2.0 * self.m + self.slow
"""

SCRIPT = """
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import mars_hf
from mars_hf.__main__ import main
from mars_hf.arithmetic.reference import MarsReference
from mars_hf.groups.suggest import suggest

assert Path(mars_hf.__file__).parents[1] == Path.cwd()

# 1.1M elements: where kernels run by themselves, which do not have its arithmetic.
for fused in (None, True, False):
    param = nn.Parameter(torch.randn(1100, 1000))
    optimizer = mars_hf.Mars([param], lr=1e-2, mars_type="mars-toy", weight_decay=0.1, fused=fused)
    reference = MarsReference(param.detach().double(), "mars-toy", lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        param.grad = torch.randn_like(param)
        reference.step(param.grad.double())
        optimizer.step()
    torch.testing.assert_close(param.double(), reference.x, rtol=0, atol=1e-5)
    assert optimizer.state[param].keys() == {"step", "exp_avg", "slow_avg", "last_grad"}

# Its own state is as any other: loaded, checked, in another dtype, and in float32 beside states in 8 bits.
again = mars_hf.Mars([nn.Parameter(param.detach().clone())], lr=1e-2, mars_type="mars-toy")
again.load_state_dict(optimizer.state_dict())
saved = optimizer.state_dict()
saved["state"][0]["slow_avg"] = torch.zeros(3)
with pytest.raises(ValueError, match="slow_avg"):
    again.load_state_dict(saved)
for state_dtype, expected in (("bfloat16", torch.bfloat16), ("8bit", torch.float32)):
    optimizer = mars_hf.Mars([param], lr=1e-2, mars_type="mars-toy", state_dtype=state_dtype)
    optimizer.step()
    assert optimizer.state[param]["slow_avg"].dtype == expected

# By name in a Trainer: the plain class, with register().
mars_hf.register()
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
args = TrainingArguments(sys.argv[1], optim="mars_toy", learning_rate=1e-2, report_to="none", use_cpu=True)
made = Trainer(model, args, train_dataset=[]).create_optimizer()
assert [group["lr"] for group in made.param_groups] == [1e-2, 0.25e-2]
assert "mars-toy" in repr(made)

# Its entry says how large its updates are, and messages name it.
assert suggest("mars-toy", 1e-3)["lr"] == suggest("mars-lion", 1e-3)["lr"] / 2
main(["suggest", "--adamw-lr", "1e-3", "--rule", "mars_toy"])
with pytest.raises(ValueError, match="did you mean 'mars-toy'.*'mars-toy'"):
    mars_hf.create(model, mars_type="mars-toys")
with pytest.raises(ValueError, match="split_fused='none' would be ignored: .*under mars-toy"):
    mars_hf.create(model, mars_type="mars-toy", split_fused="none", lr=1e-3)

# The recipe.
sys.path.insert(0, "recipes")
from pretraining.run import arguments, optimizers

run = arguments.parse(["--optimizer", "mars_toy", "--learning_rate", "1e-3", "--output_dir", sys.argv[1]])
factory, settings = optimizers.for_trainer(run.optimizer, run.training)
assert {group["mars_type"] for group in factory()(model, **settings).param_groups} == {"mars-toy"}
"""


def insert(path: Path, before: str, text: str) -> None:
    """Put text before a line that is in a file once."""
    source = path.read_text()
    assert source.count(before) == 1
    path.write_text(source.replace(before, text + before))


@pytest.mark.slow
def test_rule_of_three_files(tmp_path):
    tree = tmp_path / "tree"
    copy_tree(tree)
    insert(tree / "mars_hf" / "arithmetic" / "update_rules.py", ENTRY, NEW_ENTRY)
    insert(tree / "mars_hf" / "arithmetic" / "reference.py", REFERENCE, NEW_REFERENCE)
    with (tree / "mars_hf" / "arithmetic" / "rules.py").open("a") as rules:
        rules.write(ARITHMETIC)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    finished = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "--optim mars_toy --learning_rate" in finished.stdout
