"""Write a card's metadata, by which the Hub finds a model and shows its results."""

from __future__ import annotations

import math
from typing import Any

from mars_hf.training import card_facts
from mars_hf.training.card_facts import CardFacts

_UNKNOWN = "unknown"  # the Hub wants a name of each task and data set
_OF_ADAPTERS = "base_model:adapter:"  # what PEFT's tag of the base begins with


def complete(data: Any, trainer: Any, facts: CardFacts, name: str, *, mars: bool) -> None:
    """Fill in a card's metadata, and repair what Trainer guesses wrong; what is stated already stays.

    Args:
        data: huggingface_hub's ModelCardData.
        trainer: the Trainer.
        facts: what only the script knows; a licence that is stated there wins.
        name: the model's.
        mars: whether MARS trained it.
    """
    model = card_facts.model_of(trainer)
    base = card_facts.base_of(model, facts)
    task = card_facts.task_of(model, facts)
    stated = [name for name in card_facts.listed(data.base_model) if name != "None" and card_facts.on_hub(name)]
    if not stated:  # the Hub refuses a card whose base is a path
        data.base_model = base.name if base is not None and base.is_on_hub else None
    data.library_name = data.library_name or ("peft" if card_facts.is_adapter(model) else "transformers")
    data.pipeline_tag = data.pipeline_tag or task
    data.license = facts.license or data.license
    data.language = facts.language or data.language
    tags = card_facts.listed(data.tags) + card_facts.listed(facts.tags) + ["mars_hf", *(["mars"] if mars else [])]
    data.tags = [
        tag
        for tag in dict.fromkeys(tags)
        if not tag.startswith(_OF_ADAPTERS) or card_facts.on_hub(tag.removeprefix(_OF_ADAPTERS))
    ]
    trained_on = card_facts.data_set(trainer.train_dataset, facts)
    names = card_facts.listed(facts.dataset_tags) or card_facts.listed(trained_on.hub_name)
    data.datasets = data.datasets or [name for name in names if card_facts.on_hub(name)] or None
    _complete_results(data, trainer, facts, name, task or "other")


def _complete_results(data: Any, trainer: Any, facts: CardFacts, name: str, task: str) -> None:
    """Put the last evaluation into the results, in place of earlier values of the same metrics."""
    from huggingface_hub import EvalResult

    given = trainer.eval_dataset
    several = given if isinstance(given, dict) else {}
    last = card_facts.final_metrics(trainer)[0] | {f"eval_{name}": value for name, value in facts.results.items()}
    results = []
    renewed = set()
    for entry, value in last.items():
        metric, own = card_facts.split_metric(entry, given)
        evaluated = card_facts.data_set(several.get(own, given) if own else given, facts)
        renewed |= {(evaluated.hub_name or _UNKNOWN, metric), (_UNKNOWN, metric)}
        if not math.isfinite(value):
            continue
        results.append(
            EvalResult(
                task_type=task,
                dataset_type=evaluated.hub_name or _UNKNOWN,
                dataset_name=own or evaluated.name or _UNKNOWN,
                dataset_config=own or evaluated.config,
                dataset_split=evaluated.split,
                metric_type=metric,
                metric_name=_title(metric),
                metric_value=value,
            )
        )
    kept = [own for own in data.eval_results or () if (own.dataset_type, own.metric_type) not in renewed]
    data.eval_results = [*results, *kept] or None
    data.model_name = (data.model_name or name) if data.eval_results else None


def _title(metric: str) -> str:
    return metric.replace("_", " ").capitalize()
