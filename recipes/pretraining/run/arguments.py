"""Define the settings of a pretraining run: dataclasses filled from a YAML file and the command line."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_type_hints

import torch
from transformers import HfArgumentParser, TrainingArguments

from mars_hf.settings import PAIR_KEYS, SETTINGS
from pretraining.run import agreement, model, optimizers, reading
from pretraining.run.errors import one_line
from pretraining.run.marked import Marked, read_yaml

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
DEFAULT_CONFIG = CONFIGS / "embedded.yaml"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
OPTIMIZERS = ("mars_adamw", "mars_lion", "mars_shampoo", "mars_m", "adamw", "nadamw", "muon")


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
    verify_data: bool = field(
        default=False, metadata={"help": "Read the token files whole before training: hashes and every id."}
    )
    embedded_corpus: Literal["stdlib", "torch-headers"] = field(
        default="stdlib",
        metadata={"help": "stdlib (Python's standard library) or torch-headers (C++), which nothing was tuned on."},
    )
    embedded_vocab_size: int = field(default=4096, metadata={"help": "Vocabulary trained on the embedded corpus."})
    max_eval_blocks: int | None = field(
        default=None, metadata={"help": "Evaluate on the first blocks of the held-out tokens; left out: on all."}
    )
    official_eval_blocks: int | None = field(
        default=None,
        metadata={"help": "At the end, also measure the official loss, on this many random blocks; left out: do not."},
    )


@dataclass
class _Optimizer:
    """Optimizer and its settings; learning rate and decay are --learning_rate and --weight_decay.

    A setting left out has the optimizer's own default: that of `mars_hf.Mars`, or of AdamW, NAdam and Muon in torch.
    """

    optimizer: str = field(default="mars_adamw", metadata={"help": f"One of {', '.join(OPTIMIZERS)}."})
    momentum_decay: float | None = field(
        default=None,
        metadata={"help": "momentum_decay of torch.optim.NAdam; left out: beta1 counts whole from the first step."},
    )
    adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = field(
        default=None,
        metadata={
            "help": "Scale of torch.optim.Muon: match_rms_adamw, that of mars_m, when left out; original, the paper's."
        },
    )
    gamma_schedule: Literal["constant", "linear", "cosine"] | None = field(
        default=None, metadata={"help": "How gamma falls to 0 over the run: linear or cosine; left out: constant."}
    )


# Settings that transformers.TrainingArguments, --optimizer or the recipe itself decides.
_DECIDED_ELSEWHERE = (
    "lr",
    "weight_decay",
    "max_grad_norm",
    "mars_type",
    "layout",
    "maximize",
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
    tokens_per_step: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of an optimizer step, over all processes and accumulation steps; a run with another number "
            "stops before it trains. Left out, or 0: any number."
        },
    )
    cpu_threads: int | None = field(
        default=None,
        metadata={
            "help": "Threads of a process on CPU; left out: OMP_NUM_THREADS, or the cores divided by the processes."
        },
    )
    nonfinite_patience: int = field(
        default=3, metadata={"help": "Steps in a row with a non-finite loss or gradient that stop the run."}
    )
    sample_prompt: str = field(default="def ", metadata={"help": "What the sample at the end continues."})
    sample_tokens: int = field(default=96, metadata={"help": "Length of the sample; 0 for none."})
    license: str | None = field(
        default=None, metadata={"help": "Licence of the model for its card, as the Hub writes it: apache-2.0, mit."}
    )

    def __post_init__(self) -> None:
        """Check the licence, which the Hub would refuse after the run."""
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise ValueError(
                f"--license {self.license!r} is not how the Hub writes licences; accepted: lower case without spaces, "
                "such as apache-2.0, mit, cc-by-4.0, other"
            )
        super().__post_init__()


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

    Raises:
        ValueError: a setting is unknown, out of range, ignored, or contradicts another.
    """
    values, origins, path = read(argv)
    sizes, data, optimizer, training = (make(kind, values) for kind in _KINDS)
    run = RunArguments(sizes, data, optimizer, training, path)
    agreement.check_device(run.training, origins)
    _check_optimizer(run, origins)
    return run


def read(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, agreement.Origins, Path]:
    """Read and check settings as `parse`, but leave the device alone, which TrainingArguments takes hold of.

    Returns:
        The settings, where they come from, and the config's path.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=str(DEFAULT_CONFIG))
    first.add_argument("--optimizer")
    first.add_argument("--is_approx", "--is-approx", nargs="?", const="true")
    known, _ = first.parse_known_args(argv)

    parser = HfArgumentParser(
        _KINDS,  # type: ignore[arg-type]
        usage="%(prog)s [--config NAME] [--SETTING VALUE ...]",
        description="Pretrain GPT-2 with MARS, AdamW, NAdamW or Muon.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=str(DEFAULT_CONFIG), help="YAML file of settings; see recipes/configs.")
    actions = {action.dest: action for action in reversed(parser._actions)}  # the first of a name, not its --no_ form
    options = {option: action.dest for action in parser._actions for option in action.option_strings}
    on_command_line = {options[word]: word for word in (word.partition("=")[0] for word in argv) if word in options}
    agreement.refuse_ignored(on_command_line)
    for action in parser._actions:
        action.type = reading.reader(action)
    path = _find(known.config)
    in_files, chosen = _settings(path, known.optimizer)
    agreement.refuse_ignored({name: value.where for name, value in in_files.items()})
    reading.refuse_unknown(in_files, [name for name in actions if name not in ("help", "config")], "setting")
    hints = {name: hint for kind in _KINDS for name, hint in get_type_hints(kind).items()}
    given = {
        name: reading.as_on_command_line(actions[name], value, hints[name])
        for name, value in in_files.items()
        if name != "optimizer"
    }
    parser.set_defaults(**given, optimizer=chosen)
    values = parser.parse_args(argv)
    if values.output_dir is None:
        name = f"{path.stem}-{chosen}" + ("-exact" if values.is_approx is False else "")
        values.output_dir = f"runs/{name}"
    origins = agreement.Origins(values, set(on_command_line), in_files)
    optimizers.check(make(OptimizerArguments, values), origins)
    agreement.check(values, origins)
    return values, origins, path


_KINDS = (ModelArguments, DataArguments, OptimizerArguments, PretrainingArguments)


def make(kind: Any, values: argparse.Namespace) -> Any:
    """Return an instance of a dataclass from parsed settings.

    Raises:
        ValueError: it refuses a value.
    """
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    try:
        return kind(**{name: getattr(values, name) for name in names})
    except (ValueError, TypeError, NotImplementedError, ImportError, OSError) as error:
        remedy = "; this machine needs --tf32 false" if "--tf32" in str(error) else ""
        raise ValueError(one_line(error) + remedy) from error


def _settings(path: Path, optimizer: str | None) -> tuple[dict[str, reading.Value], str]:
    """Return a config's settings for the chosen optimizer, and its name; None takes the config's."""
    top = read_yaml(path)
    label = path.name if path.parent == CONFIGS else str(path)
    named = reading.from_file(top, label)
    sections = named.pop("optimizers", None)
    where = "--optimizer" if optimizer is not None else named["optimizer"].where if "optimizer" in named else ""
    chosen = optimizer if optimizer is not None else top.get("optimizer", "mars_adamw")
    if chosen not in OPTIMIZERS:
        raise ValueError(f"{where} {chosen!r} is unknown; accepted: {', '.join(OPTIMIZERS)}")
    if sections is None or sections.value is None:
        return named, chosen
    if not isinstance(sections.value, Marked):
        raise ValueError(f"{sections.where} is not a section; write each optimizer's settings below its name")
    every = reading.from_file(sections.value, label, "optimizers: ")
    reading.refuse_unknown(every, OPTIMIZERS, "optimizer")
    for one in every.values():
        if one.value is not None and not isinstance(one.value, Marked):
            raise ValueError(f"{one.where} is not a section; write the optimizer's settings below its name")
    own = sections.value.get(chosen)
    return named | (reading.from_file(own, label, f"optimizers: {chosen}: ") if own else {}), chosen


def _find(name: str) -> Path:
    """Find a config by path, or by the name of a shipped one."""
    for path in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    raise ValueError(f"--config {name!r}: no such file, and not one of the shipped ones ({shipped})")


def _check_optimizer(run: RunArguments, origins: agreement.Origins) -> None:
    """Raise ValueError for values that the optimizer refuses, and for patterns of names that match no parameter."""
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    if not vars(run.optimizer)["param_rules"]:
        return
    with torch.device("meta"):  # the names without the memory
        gpt2 = model.build(run.model, 1, 0)
    try:
        make()(gpt2, **settings)
    except ValueError as error:
        raise ValueError(f"{origins('param_rules')}: {one_line(error)}") from None
