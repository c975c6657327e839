"""The plugin for Axolotl: against a stand-in for the names of Axolotl that it uses, and against Axolotl itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers import Blocks, arguments, gpt2
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

import mars_hf
from mars_hf.training.trainer import TrainerWithMars

ROOT = Path(__file__).resolve().parents[2]


class BasePlugin:
    """Axolotl's hooks that the plugin extends."""

    def register(self, cfg: Any) -> None: ...

    def pre_model_load(self, cfg: Any) -> None: ...


class AxolotlRewardTrainer(Trainer):
    """Known by identity in Axolotl, and without `dataset_tags`."""


class OwnTrainer(Trainer):
    """A class that Axolotl chooses."""

    def __init__(self, *args: Any, dataset_tags: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.fixture
def plugin(monkeypatch) -> Any:
    """Return the plugin, as Axolotl loads it."""

    class TrainerBuilderBase:
        def __init__(self, cfg: Any) -> None:
            self.cfg = cfg

        def hook_pre_create_trainer(self, trainer_kwargs: Any, trainer_cls: Any) -> tuple[Any, Any]:
            return trainer_kwargs, trainer_cls

        def build(self, trainer_cls: Any, **given: Any) -> Any:
            kwargs, kind = self.hook_pre_create_trainer(given, trainer_cls)
            if kind is not AxolotlRewardTrainer:
                kwargs["dataset_tags"] = ["rows"]
            return kind(**kwargs)

    names = {"integrations.base": {"BasePlugin": BasePlugin}}
    names["core.builders.base"] = {"TrainerBuilderBase": TrainerBuilderBase}
    for name in ("axolotl", "axolotl.integrations", "axolotl.core", "axolotl.core.builders"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, found in names.items():
        module = ModuleType(f"axolotl.{name}")
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, f"axolotl.{name}", module)
    monkeypatch.delitem(sys.modules, "mars_hf.training.axolotl", raising=False)
    made = mars_hf.AxolotlPlugin()
    yield SimpleNamespace(of=made, builder=TrainerBuilderBase)
    sys.modules.pop("mars_hf.training.axolotl", None)  # its base class is the stand-in


class Config(dict):
    """Keys as attributes, None where there is none, as in Axolotl's."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def config(**settings: Any) -> Config:
    return Config(optimizer="mars_adamw", learning_rate=6e-3, **settings)


def build(plugin: Any, cfg: Config, folder: Path, kind: type = OwnTrainer, **settings: Any) -> Any:
    """Go through a run of Axolotl, up to the trainer."""
    plugin.of.register(cfg)
    plugin.of.pre_model_load(cfg)
    plugin.of.pre_model_load(cfg)
    args = arguments(folder, optim=cfg.optimizer, max_steps=2, **settings)
    return plugin.builder(cfg).build(kind, model=gpt2(), args=args, train_dataset=Blocks())


def test_exact_mars(plugin, tmp_path):
    """Exact MARS is what a trainer without it refuses."""
    cfg = config(optim_args={"gamma": 0.05, "is_approx": False, "clip_threshold": None})
    given = ",".join(f"{key}={value}" for key, value in cfg.optim_args.items())
    trainer = build(plugin, cfg, tmp_path, optim_args=given)
    assert isinstance(trainer, TrainerWithMars) and isinstance(trainer, OwnTrainer)
    trainer.train()
    mars = trainer.optimizer.optimizer
    assert mars.is_exact and mars.param_groups[0]["gamma"] == 0.05
    assert mars.param_groups[0]["clip_threshold"] is None


def test_reward_trainer_and_another_optimizer(plugin, tmp_path):
    trainer = build(plugin, config(), tmp_path, AxolotlRewardTrainer)
    assert type(trainer) is AxolotlRewardTrainer
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, mars_hf.Mars)
    assert type(build(plugin, Config(optimizer="adamw_torch"), tmp_path)) is OwnTrainer  # others keep theirs


def test_config_of_the_docs(plugin):
    page = (ROOT / "docs" / "elsewhere.md").read_text()
    cfg = Config(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    assert cfg.plugins == ["mars_hf.AxolotlPlugin"]
    plugin.of.register(cfg)


CONFIG = """\
base_model: tiny
datasets: [{path: rows.jsonl, type: completion}]
sequence_len: 32
plugins: [mars_hf.AxolotlPlugin]
optimizer: mars_adamw
optim_args: {is_approx: false}
learning_rate: 6e-3
micro_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 2
num_epochs: 1
logging_steps: 1
val_set_size: 0
bf16: false
dataset_num_proc: 1
dataset_prepared_path: prepared
output_dir: out
"""


@pytest.mark.slow
def test_axolotl_trains(tmp_path):
    pytest.importorskip("axolotl", reason="axolotl is not installed; it pins other versions than the test extra has")
    words = ["<unk>", "<eos>", *"to be or not that is the question".split()]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<eos>", "bos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path / "tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path / "tiny")
    Path(tmp_path, "rows.jsonl").write_text("\n".join([json.dumps({"text": " ".join(words[2:])})] * 32))
    Path(tmp_path, "config.yaml").write_text(CONFIG)
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", "config.yaml"],
        cwd=tmp_path,
        env={**os.environ, **quiet, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output[-3000:]
    assert "mars-adamw (exact, gamma" in output and "mars/grad_cosine" in output
