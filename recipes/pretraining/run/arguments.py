"""Define the settings of a pretraining run: dataclasses filled from a YAML file and the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.activations import ACT2FN

from mars_hf.groups import plain_yaml
from mars_hf.groups.effects import may_read
from mars_hf.groups.settings import MARS_TYPES, PAIR_KEYS, SETTINGS
from pretraining.run import checks

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """Kind and size of the model."""

    model_type: Literal["gpt2", "llama", "phi3"] = _option("gpt2", "phi3: a Llama that fuses its projections.")
    n_layer: int = _option(12, "Number of blocks.")
    n_head: int = _option(12, "Attention heads per block.")
    n_kv_head: int | None = _option(None, "Key and value heads of llama and phi3; left out: n_head.")
    n_embd: int = _option(768, "Width of the residual stream.")
    n_inner: int | None = _option(None, "Width of the MLP; left out: 4 n_embd.")
    block_size: int = _option(1024, "Tokens in a sequence.")
    vocab_size: int | None = _option(None, "Rows of the embedding; left out: the tokenizer's. The paper pads to 50304.")
    activation_function: str = _option("gelu_new", "Of gpt2: gelu_new (tanh approximation) or gelu (exact).")
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
    verify_data: bool = _option(False, "Read the token files whole before training: hashes and every id.")
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

    output_dir: str | None = _option(None, "Where the run goes; left out: runs/CONFIG-OPTIMIZER, or ...-exact.")
    overwrite_output_dir: bool = _option(False, "Start again in a folder that holds a finished run.")
    resume_from_checkpoint: str | None = _option(
        None, "true: the newest whole checkpoint; auto: the same, or a new run without one; or a checkpoint's path."
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
        training, block, wanted = self.training, self.model.block_size, self.training.tokens_per_step
        if not wanted or self.count_tokens() == wanted:
            return
        devices = training.world_size * max(1, training.n_gpu)
        sequences = wanted // block // devices  # of a device; the largest batch that fits where the configured one fits
        batches = [size for size in range(1, training.per_device_train_batch_size + 1) if sequences % size == 0]
        if wanted == sequences * block * devices:
            flags = "--per_device_train_batch_size {} --gradient_accumulation_steps {}"
            remedy = flags.format(batches[-1], sequences // batches[-1])
        else:
            remedy = f"another --block_size or number of devices, whose product divides {wanted:,}"
        raise ValueError(
            f"a step has {self.count_tokens():,} tokens ({training.train_batch_size} sequences x "
            f"{training.gradient_accumulation_steps} accumulation steps x {training.world_size} processes x {block:,} "
            f"tokens), but tokens_per_step is {wanted:,}; give {remedy}, or --tokens_per_step 0 for any number"
        )


def parse(argv: Sequence[str] | None = None) -> RunArguments:
    """Return the settings of `read` as dataclasses; making TrainingArguments initializes the device.

    Raises:
        ValueError: the config is for GPUs, and there is none; the message names all flags that it needs on CPU.
    """
    values, path = read(argv)
    is_for_gpus = values.tf32 and not torch.cuda.is_available()
    if is_for_gpus:
        values.use_cpu, values.tf32 = True, False
    model, data, optimizer, training = _parser().parse_dict(vars(values), allow_extra_keys=True)
    run = RunArguments(model, data, optimizer, training, path)
    if not is_for_gpus:
        return run
    problems = ["tf32 needs an NVIDIA GPU, and there is none; give --use_cpu true --tf32 false"]
    if run.data.data_dir and not Path(run.data.data_dir, "meta.json").is_file():
        problems.append(f"{run.data.data_dir} holds no tokens; give --data_dir and a folder of prepare_data.py")
    try:
        run.check_tokens()
    except ValueError as error:
        problems.append(str(error))
    raise ValueError(f"{path.name}: {'. Also, '.join(problems)}")


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
    if not isinstance(sections, dict) or not all(isinstance(section or {}, dict) for section in sections.values()):
        raise ValueError(f"{path.name}: optimizers={sections!r} is no mapping of optimizers to their settings")
    chosen = settings.get("optimizer", "mars_adamw") if known.optimizer is None else known.optimizer
    for name in (chosen, *sections):
        if str(name) not in OPTIMIZERS:
            raise ValueError(f"optimizer {name!r} is unknown{_meant(str(name))}; accepted: {', '.join(OPTIMIZERS)}")
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
    checks.numbers(vars(values))
    checks.words(vars(values))
    checks.schedule(values.lr_scheduler_type, values.lr_scheduler_kwargs)
    _check_model(values)
    _check_run(values)
    return values, path


class RecipeParser(HfArgumentParser):
    """HfArgumentParser whose --help sets a recipe's own options apart, above those that it inherits."""

    def __init__(self, dataclasses: Any, inherited: type[TrainingArguments], **options: Any) -> None:
        """Build the parser; `inherited` is the class of transformers or TRL among the dataclasses or their bases."""
        super().__init__(dataclasses, **options)
        self._optionals.title = "options of the recipe"
        names = {each.name for each in fields(inherited)}
        of_base = self.add_argument_group(f"options of {inherited.__name__}")
        for action in list(self._optionals._group_actions):  # argparse has no public way to move one
            if action.dest in names:
                self._optionals._group_actions.remove(action)
                of_base._group_actions.append(action)


def _parser() -> HfArgumentParser:
    parser = RecipeParser(
        (ModelArguments, DataArguments, OptimizerArguments, PretrainingArguments),
        TrainingArguments,
        usage="%(prog)s [--config NAME|FILE] [--SETTING VALUE ...]",
        description="Pretrain GPT-2 or Llama with MARS, AdamW, NAdamW or Muon.",
        allow_abbrev=False,
    )
    shipped = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    parser.add_argument("--config", default="embedded", help=f"YAML file of settings, or one of {shipped}.")
    own = parser._optionals._group_actions
    own.sort(key=lambda action: action.dest not in ("help", "config", "optimizer"))  # those first
    return parser


def _find(name: str) -> Path:
    """Find a config by path, or by the name of a shipped one."""
    for path in (Path(name), CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    raise ValueError(f"--config {name!r}: no such file, and not one of the shipped ones ({shipped})")


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
    if values.metric_for_best_model not in (None, "loss", "eval_loss"):
        raise ValueError(f"--metric_for_best_model {values.metric_for_best_model}: accepted: loss, the held-out one")
    accepted = OPTIMIZERS[values.optimizer]
    for name in dict.fromkeys(name for names in OPTIMIZERS.values() for name in names):
        if name not in accepted and getattr(values, name) is not None:
            raise ValueError(f"--{name}: optimizer {values.optimizer} has no {name}; it takes {', '.join(accepted)}")


def _meant(name: str) -> str:
    """Return a hint at the optimizer that has this name elsewhere."""
    ours = name.lower().replace("-", "_")
    return f"; did you mean {ours!r}?" if ours in OPTIMIZERS else ""


_MOST_PARAMETERS = 10**12


def _check_model(values: argparse.Namespace) -> None:
    """Raise ValueError for a model that cannot be made."""
    if not 0 <= values.dropout < 1:
        raise ValueError(f"--dropout {values.dropout}: give a number in [0, 1)")
    if values.activation_function not in ACT2FN:
        raise ValueError(f"--activation_function {values.activation_function}: accepted: {', '.join(sorted(ACT2FN))}")
    if values.n_embd % values.n_head:
        raise ValueError(f"--n_embd {values.n_embd} is no multiple of --n_head {values.n_head}")
    inner = values.n_inner or 4 * values.n_embd
    of_block = values.n_embd * (4 * values.n_embd + 2 * inner)
    rows = (values.vocab_size or 0) + values.block_size
    if values.n_layer * of_block + rows * values.n_embd > _MOST_PARAMETERS:
        raise ValueError(
            f"--n_layer {values.n_layer} --n_embd {values.n_embd} --vocab_size {values.vocab_size} --block_size "
            f"{values.block_size}: such a model has over 10^12 parameters; give smaller numbers"
        )


def _check_run(values: argparse.Namespace) -> None:
    """Raise ValueError for steps that the run could not make."""
    changes_gradients = values.max_grad_norm or values.gradient_accumulation_steps > 1 or values.fp16
    if values.release_gradients and changes_gradients:
        raise ValueError(
            f"--release_gradients with --max_grad_norm {values.max_grad_norm} --gradient_accumulation_steps "
            f"{values.gradient_accumulation_steps} --fp16 {values.fp16}: parameters step inside backward(); give "
            "--max_grad_norm 0, --gradient_accumulation_steps 1 and no fp16"
        )
