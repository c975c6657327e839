"""The guard: Mars steps and trains the model, without any callback being passed."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from helpers import arguments, gpt2, mars_trainer, trainer
from peft import LoraConfig, get_peft_model
from transformers import GPT2LMHeadModel

import mars_hf
from mars_hf.training import guard

MAKERS = pytest.mark.parametrize("make", [trainer, mars_trainer], ids=["Trainer", "MarsTrainer"])


def lora(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))


def given(model, way, args):
    """Return Trainer's arguments beside model and TrainingArguments."""
    if way == "factory":
        return {"optimizer_cls_and_kwargs": mars_hf.factory(args)}
    return {"optimizers": (mars_hf.create(model, lr=1e-2), None)}


# --- parameters ------------------------------------------------------------------------------------------------------


@MAKERS
def test_an_optimizer_made_before_lora_stops_the_run(tmp_path, make):
    """The optimizer has base weights only, which LoRA freezes: the run would train nothing without an error."""
    model = gpt2()
    optimizers = (mars_hf.create(model), None)
    run = make(arguments(tmp_path), lora(model), optimizers=optimizers)
    with pytest.raises(RuntimeError, match=r"has none of the model's \d+ trainable .*lora_A.*mars_hf\.factory"):
        run.train()
    assert run.state.global_step == 0


@MAKERS
@pytest.mark.parametrize("way", ["instance", "factory"])
def test_lora_is_trained_by_what_is_made_after_it(tmp_path, make, way):
    model = lora(gpt2())
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    args = arguments(tmp_path, learning_rate=1e-2)
    make(args, model, **given(model, way, args)).train()
    changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert changed == {name for name in before if "lora" in name}


@MAKERS
def test_a_new_head_stops_the_run(tmp_path, make):
    model = gpt2()
    optimizer = mars_hf.create(model)
    model.lm_head = torch.nn.Linear(8, 64)
    run = make(arguments(tmp_path), model, optimizers=(optimizer, None))
    with pytest.raises(
        RuntimeError, match=r"28 of the model's 30 .*lacks lm_head\.weight of shape \(64, 8\) and 1 more"
    ):
        run.train()


@MAKERS
def test_another_copy_of_the_model_stops_the_run(tmp_path, make):
    model = gpt2()
    run = make(arguments(tmp_path), copy.deepcopy(model), optimizers=(mars_hf.create(model), None))
    with pytest.raises(RuntimeError, match="another copy of the model"):
        run.train()


@MAKERS
def test_frozen_parameters_are_nobodys_business(tmp_path, make):
    """Parameters may be frozen before or after the optimizer is built; an optimizer may train more than the model."""
    model = gpt2()
    model.transformer.wpe.requires_grad_(False)
    extra = torch.nn.Linear(2, 2)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}, {"params": list(extra.parameters())}]
    optimizer = mars_hf.create(groups)
    model.transformer.h[0].requires_grad_(False)
    make(arguments(tmp_path), model, optimizers=(optimizer, None)).train()


def test_tied_and_wrapped_parameters_are_found():
    model = gpt2()
    optimizer = mars_hf.create(model)
    guard.require_parameters(optimizer, model)
    guard.require_parameters(optimizer, torch.nn.DataParallel(model))


@pytest.mark.parametrize("name", ["fp16_groups", "bit16_groups", "bf16_groups"])
def test_under_flat_tensors_the_engines_parameters_are_compared(name):
    """DeepSpeed leaves an optimizer in this form; ZeRO-3 and half precision without ZeRO, ZeRO-1/2, bf16."""
    model, other = gpt2(), gpt2()
    optimizer = mars_hf.create(model)
    engine = SimpleNamespace(optimizer=optimizer, **{name: [group["params"] for group in optimizer.param_groups]})
    for group in optimizer.param_groups:
        group["params"] = [torch.nn.Parameter(torch.cat([param.detach().flatten() for param in group["params"]]))]
    guard.require_parameters(SimpleNamespace(optimizer=engine), model)
    for optimizers, trained in ((engine, other), (optimizer, model)):
        with pytest.raises(RuntimeError, match="has none"):
            guard.require_parameters(optimizers, trained)


def test_sharded_parameters_are_those_of_the_model(tmp_path):
    """FSDP2 puts DTensors into the model and accelerate the same ones into the optimizer."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = gpt2()
        before = mars_hf.create(model)
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        guard.require_parameters(mars_hf.create(model), model)
        with pytest.raises(RuntimeError, match="has none"):
            guard.require_parameters(before, model)
    finally:
        dist.destroy_process_group()


# --- the optimizer ---------------------------------------------------------------------------------------------------


class Swapping:
    """Put another optimizer in Mars's place, as DeepSpeed does."""

    def create_scheduler(self, *args, **kwargs):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return super().create_scheduler(*args, **kwargs)


@MAKERS
@pytest.mark.parametrize("way", ["instance", "factory"])
def test_a_swapped_optimizer_stops_the_run(tmp_path, make, way):
    model = gpt2()
    args = arguments(tmp_path)
    run = make(args, model, **given(model, way, args))
    run.__class__ = type("Swapped", (Swapping, type(run)), {})
    with pytest.raises(RuntimeError, match="SGD, not Mars"):
        run.train()
    assert run.state.global_step == 0


def test_the_innermost_optimizer():
    steps = SimpleNamespace()
    assert guard.innermost(SimpleNamespace(optimizer=SimpleNamespace(optimizer=steps))) is steps


@pytest.mark.slow
@pytest.mark.parametrize("way", ["import transformers", "factory"])
def test_it_is_installed_by_create_and_factory(tmp_path, way):
    """A loop of one's own, which needs no TrainingArguments, does not pay for importing Trainer."""
    script = f"""
        import sys, torch, mars_hf
        model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        mars_hf.create(model)
        assert not any(name.startswith("transformers") for name in sys.modules)
        {way if way != "factory" else "import transformers"}
        mars_hf.create(model)
        assert "transformers.trainer" not in sys.modules
        import transformers
        args = transformers.TrainingArguments({str(tmp_path)!r}, use_cpu=True, report_to="none", max_steps=1)
        if {way == "factory"}:
            settings = {{"optimizer_cls_and_kwargs": mars_hf.factory(args)}}
        else:
            settings = {{"optimizers": (mars_hf.create(other), None)}}
        run = transformers.Trainer(model, args, train_dataset=[{{"x": 1}}], **settings)
        print("callbacks:", str(run.callback_handler.callbacks).count("LastGradientCallback"))
        run.create_optimizer()
        if {way == "factory"}:
            run.optimizer = torch.optim.SGD(model.parameters())
            run.create_optimizer = lambda *_: run.optimizer
        try:
            run.train()
        except RuntimeError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = finished.stdout.splitlines()
    assert "callbacks: 1" in lines
    assert ("SGD, not Mars" if way == "factory" else "has none of the model's 2 trainable parameters") in lines[-1]


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["Trainer", "MarsTrainer"])
def test_another_optimizer_does_not_resume_a_checkpoint_of_mars(tmp_path, make):
    """torch.optim.AdamW loads all of it, and would train with MARS's betas and learning rates."""
    args = {"save_strategy": "steps", "save_steps": 2}
    model = gpt2()
    own = arguments(tmp_path, **args)
    trainer(own, model, **given(model, "factory", own)).train()
    model = gpt2()
    if make == "Trainer":
        run = trainer(arguments(tmp_path / "other", **args), model)
    else:
        params = sorted(model.parameters(), key=lambda param: param.ndim == 1)  # as MARS groups them
        adamw = torch.optim.AdamW([{"params": params[:10]}, {"params": params[10:]}])
        run = mars_trainer(arguments(tmp_path / "other", **args), model, optimizers=(adamw, None))
    message = r"MARS saved the checkpoint of step 2, and AdamW would resume.*optim='mars_adamw'.*from_pretrained"
    with pytest.raises(RuntimeError, match=message):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert run.state.global_step == 2
    mars_trainer(arguments(tmp_path, **args), gpt2()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_another_optimizer_resumes_a_checkpoint_of_mars_that_holds_no_state(tmp_path):
    args = {"save_strategy": "steps", "save_steps": 2}
    mars_trainer(arguments(tmp_path, save_only_model=True, **args), gpt2()).train()
    run = trainer(arguments(tmp_path / "adamw", **args), gpt2())
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert run.state.global_step == 4
    again = trainer(arguments(tmp_path / "again", **args), gpt2())  # what it saved is AdamW's
    again.train(resume_from_checkpoint=str(tmp_path / "adamw" / "checkpoint-4"))


def test_mars_does_not_resume_a_checkpoint_of_another_optimizer_and_the_remedies_work(tmp_path):
    args = {"save_strategy": "steps", "save_steps": 2}
    trainer(arguments(tmp_path, **args), gpt2()).train()
    checkpoint = tmp_path / "checkpoint-2"
    run = mars_trainer(arguments(tmp_path / "mars", **args), gpt2())
    with pytest.raises(
        ValueError, match=r"another optimizer than Mars.*from_pretrained.*without DeepSpeed.*without optimizer\.pt"
    ):
        run.train(resume_from_checkpoint=str(checkpoint))
    copied = tmp_path / "copied" / "checkpoint-2"
    shutil.copytree(checkpoint, copied, ignore=shutil.ignore_patterns("optimizer.pt", "scheduler.pt"))
    run = mars_trainer(arguments(tmp_path / "mars", **args), gpt2())
    run.train(resume_from_checkpoint=str(copied))
    assert run.state.global_step == 4 and isinstance(guard.innermost(run.optimizer), mars_hf.Mars)
    assert run.optimizer.optimizer.state[run.model.transformer.wte.weight]["step"] == 2
    mars_trainer(arguments(tmp_path / "new"), GPT2LMHeadModel.from_pretrained(checkpoint)).train()
