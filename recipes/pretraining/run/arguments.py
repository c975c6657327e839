"""Define the settings of a pretraining run: dataclasses filled from a YAML file and the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from transformers import HfArgumentParser, TrainingArguments, get_scheduler

from mars_hf.groups import plain_yaml
from mars_hf.groups.effects import may_read
from mars_hf.groups.settings import MARS_TYPES, PAIR_KEYS, SETTINGS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """Kind and size of the model."""

    model_type: Literal["gpt2", "llama", "phi3"] = _option("gpt2", "phi3: a Llama that fuses its projections.")
    n_layer: int = _option(12, "Number of blocks.")
    n_head: int = _option(12, "Attention heads per block.")
    n_kv_head: int | None = _option(None, "Of llama and phi3: heads of keys and values; left out: n_head.")
    n_embd: int = _option(768, "Width of the residual stream.")
    n_inner: int | None = _option(None, "Width of the MLP; left out: 4 n_embd.")
    block_size: int = _option(1024, "Tokens in a sequence.")
    vocab_size: int | None = _option(None, "Rows of the embedding; left out: the tokenizer's. The paper pads to 50304.")
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu"] = _option(
        "gelu_new", "Of gpt2: gelu_new (tanh), gelu_pytorch_tanh (the same in one kernel) or gelu (exact)."
    )
    bias: bool = _option(True, "Of gpt2; false: every bias is zero and frozen, as in the paper.")
    scale_attn_by_inverse_layer_idx: bool = _option(
        False, "Of gpt2: divide attention scores by the number of the block, as the paper."
    )
    dropout: float = _option(0.0, "Dropout of attention, and with gpt2 of embeddings and residuals.")
    attn_implementation: str = _option("sdpa", "sdpa, eager or flash_attention_2.")


@dataclass
class DataArguments:
    """Source of the tokens."""

    data_dir: str | None = _option(None, "Folder made by prepare_data.py; left out: the embedded corpus.")
    embedded_corpus: Literal["stdlib", "torch-headers"] = _option(
        "stdlib", "stdlib (Python's standard library) or torch-headers (C++), which nothing was tuned on."
    )
    embedded_vocab_size: int = _option(4096, "Vocabulary trained on the embedded corpus.")
    max_eval_blocks: int | None = _option(None, "Evaluate on the first blocks of the held-out tokens; left out: all.")


@dataclass
class _Optimizer:
    """Optimizer and its settings; learning rate and decay are --learning_rate and --weight_decay.

    A setting left out has the optimizer's own default: that of `mars_hf.Mars`, or of AdamW, NAdam and Muon in torch.
    """

    optimizer: str = _option(
        "mars_adamw", "mars_adamw, mars_lion, mars_shampoo, mars_m, mars_muon, adamw, nadamw or muon (torch's)."
    )
    adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = _option(
        None, "Scale of muon: match_rms_adamw, that of mars_m, when left out; original, the paper's."
    )
    gamma_schedule: Literal["constant", "linear", "cosine"] | None = _option(
        None, "How gamma falls to 0 over the run: linear or cosine; left out: constant."
    )


def _mars_fields() -> list[tuple[str, Any, Any]]:
    """Return the settings of MARS as dataclass fields, pairs as two halves; None means left out."""
    fields = []
    for name, setting in SETTINGS.items():
        if name in ("lr", "weight_decay", "max_grad_norm", "mars_type", "maximize"):  # decided by other arguments
            continue
        halves = [half for half, (pair, _) in PAIR_KEYS.items() if pair == name]
        kind = float if halves else setting.kind.type
        fields += [(each, kind | None, _option(None, setting.help)) for each in halves or [name]]
    return fields


if TYPE_CHECKING:
    OptimizerArguments = _Optimizer
else:
    OptimizerArguments = make_dataclass("OptimizerArguments", _mars_fields(), bases=(_Optimizer,))
    OptimizerArguments.__doc__ = _Optimizer.__doc__

_MARS = (*(name for name, _, _ in _mars_fields()), "gamma_schedule")


def _read_under(rule: str) -> tuple[str, ...]:
    """Return the settings that some parameters read under a rule."""
    return tuple(name for name in _MARS if name not in SETTINGS or may_read(rule, name))


_ADAM = ("beta1", "beta2", "eps", "param_rules", "lr_embeddings")
_MUON = ("beta1", "lr_1d", "beta1_1d", "beta2_1d", "weight_decay_1d", "eps", "ns_steps", "param_rules", "lr_embeddings")
# Optimizer to the settings that it has.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    **{rule.replace("-", "_"): _read_under(rule) for rule in MARS_TYPES},
    "mars_muon": _MARS,
    "adamw": _ADAM,
    "nadamw": _ADAM,
    "muon": (*_MUON, "adjust_lr_fn"),
}


@dataclass
class PretrainingArguments(TrainingArguments):
    """transformers.TrainingArguments plus the recipe's own settings."""

    _argument_group_name = "options of the Trainer, and of the run at their end"
    output_dir: str | None = _option(None, "Where the run goes; left out: runs/CONFIG-OPTIMIZER, or ...-exact.")
    resume_from_checkpoint: str | None = _option(
        None, "true: the newest whole checkpoint, or a new run where there is none; or a checkpoint's path."
    )
    tokens_per_step: int | None = _option(
        None,
        "Tokens of an optimizer step, over all processes and accumulation steps; a run with another number stops "
        "before it trains. Left out, or 0: any number.",
    )
    cpu_threads: int | None = _option(
        None, "Threads of a process on CPU; left out: OMP_NUM_THREADS, or the cores divided by the processes."
    )
    nonfinite_patience: int = _option(3, "Steps in a row with a non-finite loss or gradient that stop the run.")
    sample_prompt: str = _option("def ", "What the sample at the end continues.")
    sample_tokens: int = _option(96, "Length of the sample; 0 for none.")


class RunArguments(NamedTuple):
    """All settings of a run."""

    model: ModelArguments
    data: DataArguments
    optimizer: OptimizerArguments
    training: PretrainingArguments
    config: Path

    def count_tokens(self) -> int:
        """Return the tokens of an optimizer step: of all processes, devices and accumulation steps."""
        training = self.training
        sequences = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
        return sequences * self.model.block_size

    def check_tokens(self) -> None:
        """Raise ValueError if the tokens of a step are not `tokens_per_step`; the message says what to change."""
        training, wanted = self.training, self.training.tokens_per_step
        if not wanted or self.count_tokens() == wanted:
            return
        steps, rest = divmod(wanted * training.gradient_accumulation_steps, self.count_tokens())
        flag = "another --per_device_train_batch_size" if rest else f"--gradient_accumulation_steps {steps}"
        raise ValueError(
            f"a step has {self.count_tokens():,} tokens ({training.train_batch_size} sequences x "
            f"{training.gradient_accumulation_steps} accumulation steps x {training.world_size} processes x "
            f"{self.model.block_size:,} tokens), but tokens_per_step is {wanted:,}; give {flag}, or --tokens_per_step "
            "0 for any number"
        )


def parse(argv: Sequence[str] | None = None) -> RunArguments:
    """Return the settings of `read` as dataclasses; making TrainingArguments initializes the device.

    Raises:
        ValueError: the config is for GPUs, and there is none.
    """
    values, path = read(argv)
    if values.tf32 and not torch.cuda.is_available():
        raise ValueError(f"{path.name}: tf32 needs an NVIDIA GPU, and there is none; give --use_cpu true --tf32 false")
    model, data, optimizer, training = _parser().parse_dict(vars(values), allow_extra_keys=True)
    return RunArguments(model, data, optimizer, training, path)


def read(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Path]:
    """Read settings from `--config NAME|FILE` (default: configs/embedded.yaml); the command line overrides them.

    A config's top-level keys are settings. Its section `optimizers` holds settings per optimizer, which apply if that
    optimizer is chosen.

    Args:
        argv: command line without the program's name; None reads sys.argv.

    Returns:
        All settings by name, and the config's path.

    Raises:
        ValueError: the config cannot be read, has no learning rate for the optimizer, or settings do not fit one
            another; argparse ends the program for values of a wrong type and unknown names.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default="embedded")
    first.add_argument("--optimizer")
    known, _ = first.parse_known_args(argv)
    path = _find(known.config)
    settings = _read(path)
    sections = settings.pop("optimizers", None) or {}
    chosen = settings.get("optimizer", "mars_adamw") if known.optimizer is None else known.optimizer
    for name in (chosen, *sections):
        if str(name) not in OPTIMIZERS:
            raise ValueError(f"optimizer {name!r} is unknown; accepted: {', '.join(OPTIMIZERS)}")
    settings |= sections.get(chosen) or {}
    if sections and chosen not in sections and "learning_rate" not in " ".join([*settings, *argv]).replace("-", "_"):
        raise ValueError(f"{path.name} has no settings for {chosen}; give --learning_rate")

    parser = _parser()
    parser.prog = path.name  # for errors in the file
    words = {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    values = parser.parse_args([f"--{name}={word}" for name, word in words.items() if word != "null"])
    parser = _parser()
    # For --help; parse_args itself starts from `values`.
    parser.set_defaults(**{name: each for name, each in vars(values).items() if each != parser.get_default(name)})
    parser.description = f"{parser.description} Defaults are those of {path.name} with {chosen}."
    values = parser.parse_args(argv, values)
    _check_names(values)
    if values.output_dir is None:
        values.output_dir = f"runs/{path.stem}-{chosen}" + ("-exact" if values.is_approx is False else "")
    _check_schedule(values.lr_scheduler_type, values.lr_scheduler_kwargs)
    return values, path


def _parser() -> HfArgumentParser:
    kinds: Any = (ModelArguments, DataArguments, OptimizerArguments, PretrainingArguments)
    parser = HfArgumentParser(
        kinds,
        usage="%(prog)s [--config NAME|FILE] [--SETTING VALUE ...]",
        description="Pretrain GPT-2 or Llama with MARS, AdamW, NAdamW or Muon.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="embedded", help=f"YAML file of settings, or one of {_shipped()}.")
    return parser


def _shipped() -> str:
    return ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))


def _find(name: str) -> Path:
    """Find a config by path, or by the name of a shipped one."""
    for path in (Path(name), CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ValueError(f"--config {name!r}: no such file, and not one of the shipped ones ({_shipped()})")


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = plain_yaml.read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not YAML of settings: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no settings; write them as 'key: value', one a line")
    return settings


def _check_names(values: argparse.Namespace) -> None:
    """Raise ValueError for settings that the chosen optimizer does not have, and for names that nothing has."""
    if values.optim != TrainingArguments.optim or values.optim_args:
        raise ValueError("--optim and --optim_args would be ignored; give --optimizer, and settings as --gamma 0.1")
    if values.max_steps <= 0:
        raise ValueError(f"--max_steps {values.max_steps}: the recipe does not count epochs; give a number of steps")
    accepted = OPTIMIZERS[values.optimizer]
    for name in dict.fromkeys(name for names in OPTIMIZERS.values() for name in names):
        if name not in accepted and getattr(values, name) is not None:
            raise ValueError(f"--{name}: optimizer {values.optimizer} has no {name}; it takes {', '.join(accepted)}")


def _check_schedule(kind: Any, settings: Any) -> None:
    """Raise ValueError for settings that a schedule does not take, such as those of the config's with another kind."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    try:
        settings = json.loads(settings) if isinstance(settings, str) else settings
        get_scheduler(kind, optimizer, 1, 10, scheduler_specific_kwargs=settings)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--lr_scheduler_type {kind} with {settings!r:.200}: {error}; give --lr_scheduler_kwargs "
            "'{\"NAME\": VALUE}', or '{}' for none"
        ) from None
