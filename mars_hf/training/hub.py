"""Leave mars.json beside the weights of a run, and state in its model card what MARS did.

The card is Trainer's own, or TRL's, completed. A checksum in its last line tells whether somebody has edited it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from transformers import modelcard
from transformers.utils import logging

import mars_hf
from mars_hf import saved_settings
from mars_hf.optimizer import Mars
from mars_hf.summary import trained_groups
from mars_hf.training.guard import innermost
from mars_hf.update_rules import UPDATE_RULES

logger = logging.get_logger(__name__)

CARD = "README.md"
TAGS = ("mars", "mars_hf")
_SEAL = "<!-- mars_hf {}: training rewrites this file unless somebody has edited it. -->\n"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_BASE_SENTENCE = re.compile(r"is a fine-tuned version of \[.*?\]\(https://huggingface\.co/.*?\)")
_ADAPTER = "base_model:adapter:"
_COLUMNS = ("lr", "betas", "eps", "weight_decay")
_MARS_COLUMNS = ("gamma", "clip_threshold", "is_approx")  # groups under AdamW do not use them
_CITATION = """```bibtex
@article{yuan2024mars,
  title   = {MARS: Unleashing the Power of Variance Reduction for Training Large Models},
  author  = {Yuan, Huizhuo and Liu, Yifeng and Wu, Shuang and Zhou, Xun and Gu, Quanquan},
  journal = {arXiv preprint arXiv:2411.10438},
  year    = {2024}
}
```"""


def attach(trainer: Any) -> None:
    """Make a Trainer save mars.json with the model and complete its model cards; safe to call twice.

    The methods are wrapped on the instance: subclasses override them, and runs without MARS stay as they are.
    """
    save, create = trainer.save_model, trainer.create_model_card
    if hasattr(save, "saves_mars"):
        return

    @functools.wraps(save)
    def save_model(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        result = save(output_dir, *args, **kwargs)
        save_settings(trainer, Path(str(output_dir or trainer.args.output_dir)))
        return result

    @functools.wraps(create)
    def create_model_card(*args: Any, **kwargs: Any) -> Any:
        result = create(*args, **kwargs)
        mars = innermost(trainer.optimizer)
        if isinstance(mars, Mars) and trainer.is_world_process_zero():
            with _warning(trainer):
                _complete_card(trainer, mars, _listed(kwargs.get("dataset")))
        return result

    save_model.saves_mars = True  # type: ignore[attr-defined]
    trainer.save_model, trainer.create_model_card = save_model, create_model_card
    if hasattr(trainer.model, "add_model_tags"):  # for the cards of PEFT and of `model.push_to_hub`
        trainer.model.add_model_tags(list(TAGS))


def save_settings(trainer: Any, folder: Path) -> None:
    """Write mars.json into a folder that exists, from the process that writes there, if MARS trains."""
    mars = innermost(trainer.optimizer)
    if isinstance(mars, Mars) and trainer.args.should_save and folder.is_dir():
        groups = trained_groups(mars.param_groups, trainer.model)
        saved_settings.write(folder, mars_hf.__version__, mars.created_with, groups)


def leave(trainer: Any) -> None:
    """Write mars.json and the model card into the output folder; a card that another has written or edited stays."""
    folder = Path(str(trainer.args.output_dir))
    card = folder / CARD
    with _warning(trainer):
        save_settings(trainer, folder)
        push = getattr(trainer, "push_in_progress", None)
        if push is not None and not push.is_done():  # it reads the card
            if not _has_ended(trainer):
                return
            push.wait_until_done()
        has_config = hasattr(trainer.model, "config")  # which Trainer's card reads
        text = card.read_text(encoding="utf-8", errors="replace") if card.exists() else _sealed("")
        is_ours = text == _sealed(text.rpartition(_SEAL.partition("{")[0])[0])
        if has_config and trainer.is_world_process_zero() and is_ours:
            # With a base model Trainer asks the Hub for its licence, and training must not wait for a network.
            is_accepted = "finetuned_from" in inspect.signature(trainer.create_model_card).parameters
            trainer.create_model_card(**({"finetuned_from": ""} if is_accepted else {}))
            card.write_text(_sealed(card.read_text(encoding="utf-8")), encoding="utf-8")


@contextlib.contextmanager
def _warning(trainer: Any) -> Iterator[None]:
    """Turn any error into a warning: a trained model must not be lost for its card."""
    try:
        yield
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        logger.warning(f"mars_hf could not describe the run in {trainer.args.output_dir}: {line or repr(error)}")


def _complete_card(trainer: Any, mars: Mars, dataset: list[str]) -> None:
    """Add MARS to the card that the Trainer has just written, and correct what it states about optimizer and base."""
    path = Path(str(trainer.args.output_dir)) / CARD
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    groups = trained_groups(mars.param_groups, trainer.model)
    main = next((group for group in groups if UPDATE_RULES[group["rule"]].corrects), groups[0])
    card = ModelCard.load(path, ignore_metadata_errors=True)
    _complete_metadata(card.data, trainer, model, dataset)

    base = card.data.base_model
    origin = f"is a fine-tuned version of [{base}](https://huggingface.co/{base})"
    if base is None:  # Trainer and TRL link to one that does not exist
        is_local = getattr(model.config, "name_or_path", None)
        origin = "is a fine-tuned version of a local model" if is_local else "was trained from scratch"
    text = _BASE_SENTENCE.sub(lambda _: origin, card.text).replace("on the None dataset", "on an unknown dataset")
    text = re.sub(r"^- learning_rate: .*$", f"- learning_rate: {main['lr']:g}", text, flags=re.MULTILINE)
    optimizer = f"- optimizer: MARS ({main['rule']}), see below\n"
    text = re.sub(r"^- optimizer: .*?\n(?=- )", optimizer, text, flags=re.MULTILINE | re.DOTALL)
    card.text = f"{text.rstrip()}\n\n{_optimizer(groups)}\n\n## Citation of MARS\n\n{_CITATION}\n"
    card.save(path)


def _complete_metadata(data: Any, trainer: Any, model: Any, dataset: list[str]) -> None:
    """Add tags, task and the last evaluation to a card's metadata, and drop names that the Hub refuses: local paths."""
    name = getattr(model.config, "name_or_path", None)
    data.base_model = next((base for base in (data.base_model, name) if _on_hub(base)), None)
    tags = [tag for tag in _listed(data.tags) if not tag.startswith(_ADAPTER) or _on_hub(tag.removeprefix(_ADAPTER))]
    data.tags = list(dict.fromkeys((*tags, *TAGS)))
    data.datasets = [name for name in _listed(data.datasets) if _on_hub(name)] or None
    data.pipeline_tag = data.pipeline_tag or modelcard.TrainingSummary.from_trainer(trainer, finetuned_from="").tasks
    data.eval_results = _eval_results(data, trainer, dataset) or None
    if data.eval_results:
        data.model_name = data.model_name or Path(str(trainer.args.output_dir)).absolute().name


def _eval_results(data: Any, trainer: Any, dataset: list[str]) -> list[EvalResult]:
    """Return the results in a card's metadata, and those at the end of training that they lack."""
    results = [result for result in data.eval_results or () if result.dataset_type]
    metric_types = [result.metric_type for result in results]
    state, rows = trainer.state, trainer.state.log_history
    if not _has_ended(trainer):
        return results
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint:  # whose weights stay
        rows = [row for row in rows if row["step"] <= state.best_global_step or "train_runtime" in row]
    hub_name = data.datasets[0] if data.datasets and len(data.datasets) == 1 else "unknown"
    name = ", ".join(dataset or _listed(data.datasets)) or "unknown"
    for metric, value in (modelcard.parse_log_history(rows)[2] or {}).items():
        metric_type = metric.lower().replace(" ", "_")
        if metric_type not in metric_types and isinstance(value, (int, float)) and math.isfinite(value):
            results.append(
                EvalResult(data.pipeline_tag or "other", hub_name, name, metric_type, value, metric_name=metric)
            )
    return results


def _has_ended(trainer: Any) -> bool:
    return any("train_runtime" in row for row in trainer.state.log_history)


def _optimizer(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the section with one row per kind of parameter group; groups may differ in settings without a column."""
    header = ("group", "rule", *_COLUMNS, *_MARS_COLUMNS, "parameters")
    sizes: dict[tuple[str, ...], int] = {}
    for group in groups:
        name = f"{group['role']} `{group['pattern']}`" if "pattern" in group else group["role"]
        values = [name, group["rule"], *(group[column] for column in _COLUMNS)]
        values += [group[column] if UPDATE_RULES[group["rule"]].corrects else "" for column in _MARS_COLUMNS]
        row = tuple(f"{value:g}" if isinstance(value, float) else str(value).replace("|", "\\|") for value in values)
        sizes[row] = sizes.get(row, 0) + group.get("parameters", 0)
    rows = [(*row, f"{size:,}" if size else "") for row, size in sizes.items()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (header, ("---",) * len(header), *rows))
    intro = f"[MARS](https://arxiv.org/abs/2411.10438), `mars_hf` {mars_hf.__version__}. Learning rates are the peaks;"
    return f"## Optimizer\n\n{intro} `{saved_settings.FILE}` has every setting.\n\n{table}"


def _on_hub(name: Any) -> bool:
    """Return whether a name may be one of the Hub: spelled as there, and no folder of this machine."""
    return isinstance(name, str) and name != "None" and bool(_HUB_NAME.fullmatch(name)) and not Path(name).is_dir()


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else [name for name in value or () if name]


def _sealed(content: str) -> str:
    """Return a card with its checksum as last line."""
    return content + _SEAL.format(hashlib.sha256(content.encode()).hexdigest()[:16])
