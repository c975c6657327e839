"""Define the settings of a pretraining run: dataclasses filled from a YAML file and the command line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from mars_hf.groups.settings import PAIR_KEYS, SETTINGS

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_CONFIG = CONFIGS / "embedded.yaml"
OPTIMIZERS = ("mars_adamw", "mars_lion", "mars_shampoo", "mars_m", "adamw")


@dataclass
class ModelArguments:
    """Size and settings of GPT-2."""

    n_layer: int = field(default=12, metadata={"help": "Number of blocks."})
    n_head: int = field(default=12, metadata={"help": "Attention heads per block."})
    n_embd: int = field(default=768, metadata={"help": "Width of the residual stream."})
    block_size: int = field(default=1024, metadata={"help": "Tokens in a sequence."})
    vocab_size: int | None = field(
        default=None, metadata={"help": "Rows of the embedding; left out: the tokenizer's. The paper pads to 50304."}
    )
    activation_function: str = field(
        default="gelu_new", metadata={"help": "gelu_new (tanh approximation) or gelu (exact)."}
    )
    bias: bool = field(default=True, metadata={"help": "False: every bias is zero and frozen, as in the paper."})
    scale_attn_by_inverse_layer_idx: bool = field(
        default=False, metadata={"help": "Divide attention scores by the number of the block; True in the paper."}
    )
    dropout: float = field(default=0.0, metadata={"help": "Dropout of embeddings, attention and residuals."})
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa, eager or flash_attention_2."})


@dataclass
class DataArguments:
    """Source of the tokens."""

    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder made by prepare_data.py; left out: the embedded corpus."},
    )
    embedded_vocab_size: int = field(default=4096, metadata={"help": "Vocabulary trained on the embedded corpus."})
    max_eval_blocks: int | None = field(
        default=None, metadata={"help": "Evaluate on the first blocks of the held-out tokens; left out: on all."}
    )


@dataclass
class _Optimizer:
    """Optimizer and its settings; learning rate and decay are --learning_rate and --weight_decay.

    A setting left out has the optimizer's own default: that of `mars_hf.Mars` or `torch.optim.AdamW`.
    """

    optimizer: str = field(default="mars_adamw", metadata={"help": f"One of {', '.join(OPTIMIZERS)}."})


# Settings that transformers.TrainingArguments, --optimizer or the recipe itself decides.
_DECIDED_ELSEWHERE = (
    "lr",
    "weight_decay",
    "max_grad_norm",
    "mars_type",
    "layout",
    "take_grad",
    "maximize",
    "capturable",
)
_HELP = {
    "betas": "Decay rate of the {} moment.",
    "betas_1d": "Decay rate of the {} moment of what takes AdamW.",
    "clip_threshold": "Largest norm of a corrected gradient; left out: 1.0; 0: no clipping.",
}


def _mars_fields() -> list[tuple[str, Any, Any]]:
    """Return the settings of MARS as dataclass fields: pairs as two halves; None means left out."""
    fields = []
    for name, setting in SETTINGS.items():
        if name in _DECIDED_ELSEWHERE:
            continue
        text = _HELP.get(name, setting.help)
        halves = [half for half, (pair, _) in PAIR_KEYS.items() if pair == name]
        for half, moment in zip(halves, ("first", "second"), strict=False):
            fields.append((half, float | None, field(default=None, metadata={"help": text.format(moment)})))
        if not halves:
            fields.append((name, setting.kind.type | None, field(default=None, metadata={"help": text})))
    return fields


if TYPE_CHECKING:
    OptimizerArguments = _Optimizer
else:
    OptimizerArguments = make_dataclass("OptimizerArguments", _mars_fields(), bases=(_Optimizer,))
    OptimizerArguments.__doc__ = _Optimizer.__doc__


@dataclass
class PretrainingArguments(TrainingArguments):
    """transformers.TrainingArguments plus the recipe's own settings."""

    output_dir: str | None = field(
        default=None,
        metadata={"help": "Where the run goes; left out: runs/CONFIG-OPTIMIZER, or ...-exact."},
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Start again in a folder that holds a finished run."}
    )
    cpu_threads: int | None = field(
        default=None, metadata={"help": "Threads of a process on CPU; left out: the cores divided by the processes."}
    )
    on_nonfinite: Literal["stop", "skip", "ignore"] = field(
        default="stop",
        metadata={"help": "What a non-finite loss or gradient does: see mars_hf.NonFiniteCallback."},
    )
    nonfinite_patience: int = field(
        default=3, metadata={"help": "Steps in a row with a non-finite loss or gradient that stop the run."}
    )
    sample_prompt: str = field(default="def ", metadata={"help": "What the sample at the end continues."})
    sample_tokens: int = field(default=96, metadata={"help": "Length of the sample; 0 for none."})


class _Loader(yaml.SafeLoader):
    """Load YAML as people write it: 6e-3 is a number, although YAML 1.1 requires a dot."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


class RunArguments(NamedTuple):
    """All settings of a run."""

    model: ModelArguments
    data: DataArguments
    optimizer: OptimizerArguments
    training: PretrainingArguments
    config: Path


def parse(argv: Sequence[str] | None = None) -> RunArguments:
    """Read settings from `--config FILE` (default: configs/embedded.yaml); the command line overrides them.

    A config's top-level keys are settings. Its section `optimizers` holds settings per optimizer, which apply if that
    optimizer is chosen.

    Args:
        argv: command line without the program's name; None reads sys.argv.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=str(DEFAULT_CONFIG))
    first.add_argument("--optimizer")
    first.add_argument("--is_approx", type=string_to_bool)
    known, _ = first.parse_known_args(argv)

    dataclasses: Any = [ModelArguments, DataArguments, OptimizerArguments, PretrainingArguments]
    parser = HfArgumentParser(
        dataclasses,
        description="Pretrain GPT-2 with MARS or AdamW.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=str(DEFAULT_CONFIG), help="YAML file of settings; see recipes/configs.")
    path = _find(known.config, parser)
    settings = _read(path, parser)
    sections = settings.pop("optimizers", {})
    chosen = known.optimizer or settings.get("optimizer", "mars_adamw")
    if chosen not in OPTIMIZERS:
        parser.error(f"--optimizer {chosen!r} is unknown; accepted: {', '.join(OPTIMIZERS)}")
    _reject_unknown(sections, OPTIMIZERS, f"{path}: optimizers", parser)
    settings |= sections.get(chosen) or {}
    settings["optimizer"] = chosen
    actions = {action.dest: action for action in parser._actions}
    _reject_unknown(settings, actions, str(path), parser)
    parser.set_defaults(**{key: _as_written(actions[key], value) for key, value in settings.items()})
    if not any(argument == "--output_dir" or argument.startswith("--output_dir=") for argument in argv):
        approx = settings.get("is_approx") if known.is_approx is None else known.is_approx
        name = f"{path.stem}-{chosen}" + ("-exact" if approx is False else "")
        parser.set_defaults(output_dir=settings.get("output_dir") or f"runs/{name}")
    model, data, optimizer, training, _ = parser.parse_args_into_dataclasses(argv)
    return RunArguments(model, data, optimizer, training, path)


def _find(name: str, parser: argparse.ArgumentParser) -> Path:
    """Find a config by path, or by the name of a shipped one."""
    for path in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    return parser.error(f"--config {name!r}: no such file, and not one of the shipped ones ({shipped})")


def _read(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        return parser.error(f"{path} is not YAML: {error}")
    if not isinstance(settings, dict):
        return parser.error(f"{path} holds {type(settings).__name__}, not settings (key: value)")
    return settings


def _reject_unknown(names: Any, accepted: Any, where: str, parser: argparse.ArgumentParser) -> None:
    unknown = [name for name in names if name not in accepted]
    if unknown:
        parser.error(f"{where}: unknown {', '.join(unknown)}; accepted are {', '.join(sorted(accepted))}")


def _as_written(action: argparse.Action, value: Any) -> Any:
    """Parse a YAML value as if it came from the command line, so that the same rules read both."""
    if value is None or isinstance(value, (bool, dict, list)):
        return value
    return action.type(str(value)) if callable(action.type) else value
