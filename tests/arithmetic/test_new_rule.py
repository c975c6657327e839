"""A new rule is an entry of the table and its arithmetic: everything else in the package and the recipes follows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import copy_tree
from test_budgets import RULE_FILES, RULE_LINES

# AdEMAMix's second average of the signal, which hardly forgets (arXiv 2409.03137, with beta3 = 0.999 and alpha = 5).
# By file: texts, and the lines before which they go.
CHANGES = {
    "update_rules.py": {
        '    UpdateRule(name="mars-m", ': """\
    UpdateRule(name="mars-mix", arithmetic="mix", lr_1d_ratio=0.25, update_rms=lambda beta1, gamma: 2.0),
""",
    },
    "formulas.py": {
        "class Arithmetic(NamedTuple):": """\
def _write_mix(params, g, m, s, buffers, options):
    torch._foreach_lerp_(buffers["slow_avg"], s, 0.001)
    directions = torch._foreach_div(m, [1 - options.beta1**t for t in options.steps])
    torch._foreach_add_(directions, buffers["slow_avg"], alpha=5)
    torch._foreach_div_(directions, _denominators(s, buffers, options))
    numbers = {"weight_decay": options.weight_decay, "cautious": options.cautious, "rounding": options.rounding}
    apply(params, directions, lr=float(options.lr), **numbers)


""",
        '    "lion": Arithmetic(': """\
    "mix": Arithmetic(_write_mix, buffers={"slow_avg": torch.int8, "exp_avg_sq": torch.uint8}),
""",
    },
    "reference.py": {
        '        elif self.rule == "mars-shampoo":': """\
        elif self.rule == "mars-mix":
            self.slow = 0.999 * getattr(self, "slow", 0.0) + 0.001 * c
            self.v = beta2 * self.v + (1 - beta2) * c**2
            m_hat, v_hat = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
            direction = (m_hat + 5 * self.slow) / (v_hat.sqrt() + EPS)
""",
    },
}
WITHOUT_CORRECTION = '    UpdateRule(name="mars-plain", arithmetic="lion", corrects=False),\n'

SCRIPT = '''
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

import mars_hf
from mars_hf.__main__ import main
from mars_hf.arithmetic.reference import MarsReference
from mars_hf.groups.suggest import suggest

assert Path(mars_hf.__file__).parents[1] == Path.cwd()
OUTPUT = Path(sys.argv[1])
TOKENS = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))


def small_model():
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def check_formulas():
    """Whatever backend is asked for: 1.1M elements are where kernels run by themselves, which lack its arithmetic."""
    for settings in ({}, {"fused": True}, {"fused": False}, {"gamma": 0.0, "clip_threshold": None}):
        param = nn.Parameter(torch.randn(1100, 1000))
        optimizer = mars_hf.Mars([param], lr=1e-2, mars_type="mars-mix", weight_decay=0.1, **settings)
        reference = MarsReference(param.detach().double(), "mars-mix", lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            param.grad = 1e-4 * torch.randn_like(param)  # nothing is clipped
            reference.step(param.grad.double(), stale=param.grad.double() if "gamma" in settings else None)
            optimizer.step()
        torch.testing.assert_close(param.double(), reference.x, rtol=0, atol=1e-5)
        assert optimizer.state[param].keys() == {"step", "exp_avg", "slow_avg", "exp_avg_sq", "last_grad"}


def check_states():
    """Its own is as any other: loaded, checked, in bfloat16, in 8 bits, with Kahan's rounding and AMSGrad."""
    start = nn.Parameter(torch.randn(64, 80))
    def steps(**settings):
        param = nn.Parameter(start.detach().to(settings.pop("dtype", torch.float32), copy=True))
        optimizer = mars_hf.Mars([param], lr=1e-2, mars_type="mars-mix", **settings)
        for seed in range(4):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(param.dtype)
            optimizer.step()
        return param, optimizer
    param, optimizer = steps()
    again = mars_hf.Mars([nn.Parameter(param.detach().clone())], lr=1e-2, mars_type="mars-mix")
    again.load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()
    saved["state"][0]["slow_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="slow_avg"):
        again.load_state_dict(saved)
    moved = (param - start).norm()
    for state_dtype, dtype in (("bfloat16", torch.bfloat16), ("8bit", torch.int8)):
        other, of_other = steps(state_dtype=state_dtype)
        assert of_other.state[other]["slow_avg"].dtype == dtype
        error = (other - param).norm() / moved
        assert error < 0.1, (state_dtype, error)
    other, _ = steps(dtype=torch.bfloat16, rounding="kahan", state_dtype="8bit")
    assert (other - param).norm() < 0.2 * moved  # start and end are rounded to bfloat16
    assert "max_exp_avg_sq" in steps(amsgrad=True)[1].state_dict()["state"][0]


def check_names():
    """Its entry says how large its updates are, and messages name it."""
    assert suggest("mars-mix", 1e-3)["lr"] == suggest("mars-lion", 1e-3)["lr"] / 2
    main(["suggest", "--adamw-lr", "1e-3", "--rule", "mars_mix"])
    model = small_model()
    with pytest.raises(ValueError, match="did you mean 'mars-mix'.*'mars-mix'"):
        mars_hf.create(model, mars_type="mars-mux")
    with pytest.raises(ValueError, match="split_fused='none' would be ignored: .*under mars-mix"):
        mars_hf.create(model, mars_type="mars-mix", split_fused="none", lr=1e-3)
    with pytest.raises(ValueError, match="'mars-plain'.*accepted: "):  # CONTRIBUTING.md says why
        mars_hf.create(model, mars_type="mars-plain", lr=1e-3)


def check_trainer():
    """By `--optim`: rates, and a run that goes on from a checkpoint to the bit."""
    mars_hf.register()
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(OUTPUT), "--optim", "mars_mix", "--learning_rate", "1e-2", "--max_steps", "4"]
        + ["--save_steps", "2", "--per_device_train_batch_size", "2", "--use_cpu", "true", "--report_to", "none"]
    )
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    weights = []
    for checkpoint in (None, str(OUTPUT / "checkpoint-2")):
        trainer = Trainer(small_model(), args, train_dataset=data)
        trainer.train(resume_from_checkpoint=checkpoint)
        weights.append(trainer.model.state_dict())
    optimizer = trainer.optimizer.optimizer
    assert {group["initial_lr"] for group in optimizer.param_groups} == {1e-2, 0.25e-2}
    assert "mars-mix" in repr(optimizer) and "slow_avg" in next(iter(optimizer.state.values()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def check_recipe():
    sys.path.insert(0, "recipes")
    from pretraining.run import arguments, optimizers

    run = arguments.parse(["--optimizer", "mars_mix", "--learning_rate", "1e-3", "--output_dir", str(OUTPUT)])
    factory, settings = optimizers.for_trainer(run.optimizer, run.training)
    assert {group["mars_type"] for group in factory()(small_model(), **settings).param_groups} == {"mars-mix"}


def trained(model, rank=0, ranks=1):
    optimizer = mars_hf.create(model, lr=1e-3, mars_type="mars-mix", optimize_1d=True)
    rows = TOKENS.chunk(ranks)[rank]
    for _ in range(3):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_rank(rank, port):
    """Two processes that share a model by FSDP2 train as one does."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    start, model = small_model(), fully_shard(small_model(), mesh=dist.init_device_mesh("cpu", (2,)))
    expected = trained(small_model()).state_dict()
    for name, weights in trained(model, rank, 2).state_dict().items():
        moved = (expected[name] - start.state_dict()[name]).norm()
        assert (weights.full_tensor() - expected[name]).norm() <= 1e-3 * moved, name
    dist.destroy_process_group()


if __name__ == "__main__":
    check_formulas()
    check_states()
    check_names()
    check_trainer()
    check_recipe()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(check_rank, (store.port,), nprocs=2)
'''


def insert(path: Path, before: str, text: str) -> None:
    """Put text before a line that is in a file once."""
    source = path.read_text()
    assert source.count(before) == 1
    path.write_text(source.replace(before, text + before))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_rule_of_three_files(tmp_path):
    """With a state of its own."""
    tree = tmp_path / "tree"
    copy_tree(tree)
    lines = 0
    for file, texts in CHANGES.items():
        for before, text in texts.items():
            insert(tree / "mars_hf" / "arithmetic" / file, before, text)
            lines += len(text.split("\n")) - 1
    assert len(CHANGES) <= RULE_FILES and lines <= RULE_LINES
    insert(tree / "mars_hf" / "arithmetic" / "update_rules.py", '    UpdateRule(name="mars-m", ', WITHOUT_CORRECTION)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    finished = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "--optim mars_mix --learning_rate" in finished.stdout
