"""Score a model on zero-shot tasks with lm-evaluation-harness, which only this file imports."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretraining.run.errors import did_you_mean, one_line

# The paper's, in its order (tables 7 and 8).
PAPER = ("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande", "mmlu", "sciq")
_ALIASES = {"arc_e": "arc_easy", "arc_c": "arc_challenge", "obqa": "openbookqa", "wg": "winogrande"}
_FEWSHOT_SEED = 1234  # lm_eval's
# The first of these that a task reports is its score.
_SCORES = ("acc_norm", "acc", "exact_match", "f1")


def check_installed() -> None:
    """Raise ValueError without lm_eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--tasks needs the package lm_eval, which is not installed: pip install -e '.[eval]'")


def manager(include_path: Path | None, wanted: Iterable[str]) -> Any:
    """Return lm_eval's TaskManager, with its own tasks unless the folder holds all that are wanted.

    Args:
        include_path: folder with further task files; one that names a Python function runs it. None: none.
        wanted: what `names` will be given.
    """
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include_path:
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if all(_is_whole(name, own.task_index) for name in wanted):
            return own
    # Its own tasks are thousands of files, which take a quarter of a minute to read.
    return TaskManager(include_path=str(include_path) if include_path else None)


def _is_whole(name: Any, index: Mapping[str, Any]) -> bool:
    """Return whether a task, or a group with all of its parts, is in an index."""
    name = name.get("task") if isinstance(name, dict) else name
    entry = index.get(name) if isinstance(name, str) else None
    if entry is None or entry.cfg is None:  # a tag has no file: lm_eval's own tasks may carry it too
        return False
    parts = entry.cfg.get("task")
    return all(_is_whole(part, index) for part in parts) if isinstance(parts, list) else True


def names(given: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the harness's names of tasks.

    Args:
        given: the harness's names, the paper's (ARC-E, OBQA), or `paper` for its nine.
        known: names of all tasks.

    Raises:
        ValueError: a task is unknown.
    """
    known = set(known)
    found: list[str] = []
    for name in given:
        plain = name.lower().replace("-", "_")
        if name in known:
            found.append(name)
        elif plain == "paper":
            found.extend(PAPER)
        elif (plain := _ALIASES.get(plain, plain)) in known:
            found.append(plain)
        else:
            raise ValueError(
                f"--tasks {name}: lm_eval has no such task{did_you_mean(plain, known)}; accepted: paper "
                f"({', '.join(PAPER)}), any other task of lm_eval, or a task of --include_path"
            )
    return list(dict.fromkeys(found))


def load(names: Sequence[str], task_manager: Any, num_fewshot: int | None = None) -> Any:
    """Load tasks with their data.

    Args:
        names: from `names`.
        task_manager: from `manager`.
        num_fewshot: examples before each question, except in tasks that fix them at zero; None: the task's own number,
            zero for the paper's.

    Raises:
        ValueError: the data of a task cannot be loaded, or a task is there twice.
    """
    try:
        loaded = task_manager.load(list(names))
    except OSError as error:  # also datasets' and the network's
        raise ValueError(
            f"--tasks {' '.join(names)}: their data cannot be loaded: {one_line(error)}; run once with a network"
        ) from error
    except (ValueError, KeyError) as error:
        raise ValueError(f"--tasks {' '.join(names)}: lm_eval refuses them: {one_line(error)}") from error
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=(own or 0) if num_fewshot is None or own == 0 else num_fewshot)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    return loaded


def evaluate(
    model: Any,
    tokenizer: Any,
    loaded: Any,
    *,
    limit: int | None = None,
    batch_size: int = 8,
    bf16: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the results of each task, and of the parts of a group such as MMLU.

    Args:
        model: causal language model on its device.
        tokenizer: its tokenizer.
        loaded: tasks from `load`.
        limit: only the first questions of each task; None: all.
        batch_size: sequences per forward pass.
        bf16: True computes in bfloat16 autocast.

    Raises:
        ValueError: lm_eval refuses to run a task, for example because it has too few examples to show.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    mixed = "bfloat16" if bf16 else None
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, mixed_precision_dtype=mixed)
    try:
        results = lm_eval.evaluate(lm=harness, task_dict=loaded, limit=limit, log_samples=False)
    except ValueError as error:
        raise ValueError(f"--tasks {' '.join(loaded['tasks'])}: lm_eval refuses to run: {one_line(error)}") from error
    assert results is not None  # one process
    parts = {part for members in results["group_subtasks"].values() for part in members}
    return {
        name: _plain(row)
        | {
            "questions": results["n-samples"].get(name, {}).get("effective"),
            "num_fewshot": results["n-shot"].get(name),
            "version": results["versions"].get(name),
            "is_part": name in parts,
        }
        for name, row in results["results"].items()
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a task's numbers under plain names: `acc,none` is acc; `score` is the one to quote."""
    numbers = {}
    for key, value in row.items():
        name, comma, kind = key.partition(",")
        if comma and isinstance(value, (int, float)):
            numbers[name if kind == "none" else f"{name}_{kind}"] = float(value)
    metric = next((name for name in _SCORES if name in numbers), None)
    return {"metric": metric, "score": numbers.get(metric or ""), **numbers}


def mean_score(results: dict[str, dict[str, Any]]) -> float | None:
    """Return the mean score of the tasks, parts of groups left out; None if one has no score."""
    scores = [row["score"] for row in results.values() if not row["is_part"]]
    return sum(scores) / len(scores) if scores and None not in scores else None
