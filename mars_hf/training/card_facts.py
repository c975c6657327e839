"""Collect what a model card states about a run: from the Trainer, and from what only the script knows."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mars_hf.distributed.placement import shape_of

# How data sets and models are named on the Hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILE = re.compile(r"hf://datasets/([^/@]+/[^/@]+|[^/@]+)@")
# Builders that read files, which say nothing about the data set.
_FILE_BUILDERS = ("arrow", "csv", "generator", "json", "pandas", "parquet", "text", "webdataset", "imagefolder")
# What Trainer adds to the metrics of an evaluation.
_NOT_METRICS = ("runtime", "samples_per_second", "steps_per_second", "tokens_per_second", "model_preparation_time")


@dataclass(frozen=True)
class CardFacts:
    """What only the script knows; a Trainer with an attribute `card_facts` of this class states it in its card.

    Those that `Trainer.create_model_card` and `push_to_hub` take have their names, and win if given there.

    Attributes:
        model_name: title of the card; None: the name of the repository, or of the output folder.
        license: of the model, as the Hub writes it (`apache-2.0`); None: not stated.
        language: of the data, as the Hub writes it (`en`).
        tags: further tags.
        finetuned_from: the base model; None: as the model's config says.
        tasks: the Hub's name of the task; None: by the model's class.
        dataset: names of the data; None: as a data set of `datasets` says, if it does.
        dataset_tags: their names on the Hub.
        tokens_per_sample: where all samples have as many; None: what Trainer has counted, if it has.
        results: further final metrics (`perplexity`), by name.
    """

    model_name: str | None = None
    license: str | None = None
    language: str | Sequence[str] | None = None
    tags: str | Sequence[str] | None = None
    finetuned_from: str | None = None
    tasks: str | Sequence[str] | None = None
    dataset: str | Sequence[str] | None = None
    dataset_tags: str | Sequence[str] | None = None
    tokens_per_sample: int | None = None
    results: Mapping[str, float] = field(default_factory=dict)

    def with_given(self, given: Mapping[str, Any]) -> CardFacts:
        """Return these facts with those of a call of `create_model_card`; TRL's is `dataset_name`."""
        given = {"dataset": given.get("dataset_name"), **given}
        known = {own.name for own in dataclasses.fields(self)}
        return dataclasses.replace(
            self, **{name: value for name, value in given.items() if name in known and value is not None}
        )


def model_of(trainer: Any) -> Any:
    """Return the model without the wrappers of engines and compilers."""
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def base_model_of(model: Any) -> Any:
    """Return the model below an adapter of PEFT; other models as they are."""
    return model.get_base_model() if is_adapter(model) else model


def is_adapter(model: Any) -> bool:
    """Return whether a model is one of PEFT, which saves its adapter only."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def count_parameters(model: Any) -> tuple[int, int]:
    """Return how many numbers the parameters of a model are, and how many of them train."""
    sizes = [(math.prod(shape_of(param)), param.requires_grad) for param in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


class Base(NamedTuple):
    """The model that training began with, a folder by its name alone; `is_on_hub` if it may be one of the Hub."""

    name: str
    is_on_hub: bool


def base_of(model: Any, facts: CardFacts) -> Base | None:
    """Return what a model was fine-tuned from, by the script or by its config; None for one from scratch."""
    config = getattr(base_model_of(model), "config", None)
    name = facts.finetuned_from or getattr(config, "name_or_path", None)
    if not name:
        return None
    return Base(name, True) if on_hub(name) else Base(Path(name).name, False)


def on_hub(name: Any) -> bool:
    """Return whether a name may be one of the Hub: no folder of this machine, and spelled as there."""
    return isinstance(name, str) and _HUB_NAME.fullmatch(name) is not None and not Path(name).is_dir()


def task_of(model: Any, facts: CardFacts) -> str | None:
    """Return the Hub's name of a model's task (`text-generation`); None if its class does not tell."""
    stated = listed(facts.tasks)
    if stated:
        return stated[0]
    from transformers import modelcard

    name = type(base_model_of(model)).__name__
    mapping: Mapping[str, Any] = modelcard.TASK_MAPPING
    for task, classes in mapping.items():
        for own in classes.values():
            if name == own or (isinstance(own, (list, tuple)) and name in own):
                return task
    return None


@dataclass(frozen=True)
class DataSet:
    """A data set as a card names it.

    Attributes:
        name: for readers; None if nobody has said.
        hub_name: on the Hub; None if it is not known to be there.
        config: of `load_dataset`.
        split: of `load_dataset`.
        samples: None for a stream.
        kind: its class.
    """

    name: str | None
    hub_name: str | None
    config: str | None
    split: str | None
    samples: int | None
    kind: str


def data_set(dataset: Any, facts: CardFacts) -> DataSet:
    """Return what is known of a data set; what the script says wins."""
    names, tags = listed(facts.dataset), listed(facts.dataset_tags)
    info = getattr(dataset, "info", None)
    builder = getattr(info, "builder_name", None)
    config = getattr(info, "config_name", None)
    files = getattr(info, "download_checksums", None) or {}
    found = next((match[1] for file in files if (match := _HUB_FILE.match(str(file)))), None)
    own = None if builder in (None, *_FILE_BUILDERS) else str(builder)
    hub_name = (tags[0] if len(tags) == 1 else None) if tags else found or (own if not names else None)
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError):
        samples = None
    return DataSet(
        name=", ".join(names) or ", ".join(tags) or found or own,
        hub_name=hub_name,
        config=None if config in (None, "default") or not hub_name else str(config),
        split=str(split) if (split := getattr(dataset, "split", None)) is not None else None,
        samples=samples,
        kind=type(dataset).__name__,
    )


def evaluations(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Return step and metrics of each evaluation, by their names in the log (`eval_loss`)."""
    merged: dict[int, dict[str, float]] = {}
    for row in history:
        found = {name: value for name, value in row.items() if _is_metric(name, value)}
        if found:
            merged.setdefault(int(row.get("step", 0)), {}).update(found)
    return sorted(merged.items())


def final_metrics(trainer: Any) -> tuple[dict[str, float], int | None]:
    """Return the evaluation of the weights that training ends with, and their step if it is not the last one."""
    state = trainer.state
    history = state.log_history
    rows = evaluations(history)
    ends = [index for index, row in enumerate(history) if "train_runtime" in row]
    best = state.best_global_step if trainer.args.load_best_model_at_end and state.best_model_checkpoint else None
    best = best if ends and best != state.global_step else None  # loaded at the end of training
    since = evaluations(history[ends[-1] + 1 :]) if ends else []
    if since or best is None:
        return ((since or rows)[-1][1] if rows else {}), best
    return dict(rows).get(best, {}), best


def _is_metric(name: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return name.startswith("eval_") and is_number and not name.endswith(_NOT_METRICS)


def split_metric(name: str, eval_dataset: Any) -> tuple[str, str | None]:
    """Return the metric of an entry of the log (`loss` of `eval_en_loss`), and the data set's name among several."""
    metric = name.removeprefix("eval_")
    for own in sorted(eval_dataset, key=len, reverse=True) if isinstance(eval_dataset, dict) else ():
        if metric.startswith(f"{own}_"):
            return metric.removeprefix(f"{own}_"), str(own)
    return metric, None


def listed(given: str | Sequence[str] | None) -> list[str]:
    """Return what may be one or several as a list."""
    return [given] if isinstance(given, str) else list(given or ())
