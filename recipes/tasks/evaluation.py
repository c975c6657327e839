"""Evaluate a causal language model: its loss on held-out blocks, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

# The paper's, in its order (tables 7 and 8).
PAPER = ("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande", "mmlu", "sciq")


@torch.no_grad()
def mean_loss(
    model: Any, blocks: Dataset[Any], accelerator: Accelerator, *, batch_size: int = 8, bf16: bool = False
) -> float:
    """Return the mean loss over blocks, which does not depend on batch size or number of processes.

    Args:
        model: causal language model on `accelerator.device`; every process calls it.
        blocks: with `input_ids` and `labels` of equal length; the first token of a block is not predicted.
        accelerator: processes that share the work.
        batch_size: blocks per forward pass and process.
        bf16: True computes in bfloat16 autocast.
    """
    loader: Any = accelerator.prepare_data_loader(DataLoader(blocks, batch_size=batch_size))
    losses: list[torch.Tensor] = []
    model.eval()
    with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=bf16):
        for batch in tqdm(loader, desc="loss", unit="batch", disable=not accelerator.is_main_process):
            logits = model(input_ids=batch["input_ids"]).logits.float()
            targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            means = each.view_as(targets).sum(1) / (targets != -100).sum(1)
            losses.append(accelerator.gather_for_metrics(means).double().cpu())
    return float(torch.cat(losses).mean())


def find_tasks(names: Sequence[str], include_path: Path | None) -> tuple[list[str], Any]:
    """Return lm_eval's names of tasks and the TaskManager that has them, which takes some ten seconds.

    Args:
        names: of lm_eval; `paper` stands for the paper's nine.
        include_path: folder with further task files; Python functions that they name are run. None: none.

    Raises:
        ValueError: lm_eval has no such task, or is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("--tasks needs the package lm_eval: pip install -e '.[eval]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    names = [task for name in names for task in (PAPER if name == "paper" else (name,))]
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        raise ValueError(
            f"--tasks {' '.join(unknown)}: lm_eval has no such task; accepted: paper, what `lm_eval ls tasks` "
            "lists, or a task of --include_path"
        )
    return names, manager


def run_tasks(model: Any, tokenizer: Any, names: list[str], manager: Any, **settings: Any) -> dict[str, Any]:
    """Return the results of lm_eval.

    Args:
        model: causal language model on its device.
        tokenizer: its tokenizer.
        names: from `find_tasks`.
        manager: from `find_tasks`.
        **settings: `batch_size` and `bf16` as of `mean_loss`; `num_fewshot` and `limit` of lm_eval.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    dtype = "bfloat16" if settings.pop("bf16") else None
    batch_size = settings.pop("batch_size")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, mixed_precision_dtype=dtype)
    results = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, log_samples=False, **settings)
    assert results is not None  # one process
    return dict(results)
