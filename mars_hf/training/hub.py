"""Leave mars.json beside the weights of a run, and state in its model card what MARS did.

The card is Trainer's own, or TRL's, completed. A checksum in its last line tells whether somebody has edited it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard
from transformers import modelcard

import mars_hf
from mars_hf import log
from mars_hf.arithmetic.update_rules import UPDATE_RULES
from mars_hf.groups import saved_settings
from mars_hf.groups.settings import MUON
from mars_hf.groups.summary import main_group, trained_groups
from mars_hf.optimizer import Mars
from mars_hf.training.guard import unwrap_optimizer

CARD = "README.md"
LOSSES = "losses.png"  # a picture that a script may leave beside the card
SWITCH = "MARS_HF_FILES"  # an environment variable: 0 leaves neither card nor mars.json
TAGS = ("mars", "mars_hf")
# The last line of a card that nobody has edited, with the checksum of the lines above it.
_SEAL_BEGINS = "<!-- mars_hf "
_SEAL = _SEAL_BEGINS + "{}: training rewrites this file unless somebody has edited it. -->\n"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_BASE_SENTENCE = re.compile(
    r"(?<=^This model )(is a fine-tuned version of \[.*?\]\(https://huggingface\.co/.*?\)|was trained from scratch)",
    re.MULTILINE,
)
_ADAPTER = "base_model:adapter:"
# Of the table; groups under AdamW do not use the last ones.
_COLUMNS = ("lr", "betas", "eps", "weight_decay", "weight_decay_mode")
_MARS_COLUMNS = ("gamma", "clip_threshold", "is_approx", "normalize_rows")


class _Work(NamedTuple):
    """What a card names and cites."""

    name: str
    url: str
    bibtex: str


_MARS = _Work(
    "MARS",
    "https://arxiv.org/abs/2411.10438",
    """@article{yuan2024mars,
  title   = {MARS: Unleashing the Power of Variance Reduction for Training Large Models},
  author  = {Yuan, Huizhuo and Liu, Yifeng and Wu, Shuang and Zhou, Xun and Gu, Quanquan},
  journal = {arXiv preprint arXiv:2411.10438},
  year    = {2024}
}""",
)
_MARS_M = _Work(
    "MARS-M",
    "https://arxiv.org/abs/2510.21800",
    """@article{liu2025marsm,
  title   = {MARS-M: When Variance Reduction Meets Matrices},
  author  = {Liu, Yifeng and Yuan, Angela and Gu, Quanquan},
  journal = {arXiv preprint arXiv:2510.21800},
  year    = {2025}
}""",
)
_MUON = _Work(
    "Muon",
    "https://kellerjordan.github.io/posts/muon",
    """@misc{jordan2024muon,
  title  = {Muon: An optimizer for hidden layers in neural networks},
  author = {Jordan, Keller and Jin, Yuchen and Boza, Vlado and You, Jiacheng and Cesista, Franz and Newhouse, Laker and
            Bernstein, Jeremy},
  year   = {2024},
  url    = {https://kellerjordan.github.io/posts/muon}
}""",
)


def attach_card(trainer: Any) -> None:
    """Make a Trainer save mars.json with the model and complete its model cards; safe to call twice.

    The methods are wrapped on the instance: subclasses override them, and runs without MARS stay as they are.
    """
    save, create = trainer.save_model, trainer.create_model_card
    if hasattr(save, "saves_mars") or not _writes_files():
        return

    @functools.wraps(save)
    def save_model(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        folder = Path(str(output_dir or trainer.args.output_dir))
        before = _read_card(folder)
        result = save(output_dir, *args, **kwargs)
        save_settings(trainer, folder)
        if isinstance(unwrap_optimizer(trainer.optimizer), Mars) and trainer.args.should_save:
            with _warning(trainer):
                _mend_card_of_adapter(folder, before)
        return result

    @functools.wraps(create)
    def create_model_card(*args: Any, **kwargs: Any) -> Any:
        result = create(*args, **kwargs)
        mars = unwrap_optimizer(trainer.optimizer)
        if isinstance(mars, Mars) and trainer.is_world_process_zero():
            with _warning(trainer):
                _complete_card(trainer, mars, _listed(kwargs.get("dataset")))
        return result

    save_model.saves_mars = True  # type: ignore[attr-defined]
    trainer.save_model, trainer.create_model_card = save_model, create_model_card
    if hasattr(trainer.model, "add_model_tags"):  # for the cards of PEFT and of `model.push_to_hub`
        trainer.model.add_model_tags(list(TAGS))


def _writes_files() -> bool:
    """Return whether runs leave a card and mars.json: unless the environment variable says no."""
    return os.environ.get(SWITCH) != "0"


def _read_card(folder: Path) -> str | None:
    """Return the card in a folder, if there is one."""
    card = folder / CARD
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None


def _mend_card_of_adapter(folder: Path, before: str | None) -> None:
    """Mend what saving an adapter did to a card: PEFT adds the base's name, a local folder too, and breaks the seal."""
    after = _read_card(folder)
    if after is None or after == before:
        return
    was_sealed = before is not None and _is_sealed(before)
    card = ModelCard(after.rpartition(_SEAL_BEGINS)[0] if was_sealed else after, ignore_metadata_errors=True)
    _drop_local_names(card.data)
    content = str(card)
    (folder / CARD).write_text(_sealed(content) if was_sealed else content, encoding="utf-8")


def save_settings(trainer: Any, folder: Path) -> None:
    """Write mars.json into a folder that exists, from the process that writes there, if MARS trains."""
    mars = unwrap_optimizer(trainer.optimizer)
    if isinstance(mars, Mars) and trainer.args.should_save and folder.is_dir() and _writes_files():
        groups = trained_groups(mars.param_groups, trainer.model)
        saved_settings.write(folder, mars_hf.__version__, mars.created_with, groups)


def write_card(trainer: Any) -> None:
    """Write mars.json and the model card into the output folder; a card that another has written or edited stays."""
    if not _writes_files():
        return
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
        if not has_config or not trainer.is_world_process_zero():
            return
        before = _read_card(folder)
        if before is not None and not _is_sealed(before):
            return
        arguments = {}
        if "finetuned_from" in inspect.signature(trainer.create_model_card).parameters:
            # With a base model Trainer asks the Hub for its licence, and training must not wait for a network.
            arguments["finetuned_from"] = ""
        trainer.create_model_card(**arguments)
        card.write_text(_sealed(card.read_text(encoding="utf-8")), encoding="utf-8")


@contextlib.contextmanager
def _warning(trainer: Any) -> Iterator[None]:
    """Turn any error into a warning: a trained model must not be lost for its card."""
    try:
        yield
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        log.warning(f"mars_hf could not describe the run in {trainer.args.output_dir}: {line or repr(error)}")


def _complete_card(trainer: Any, mars: Mars, dataset: list[str]) -> None:
    """Add MARS to the card that the Trainer has just written, and correct what it states about optimizer and base."""
    path = Path(str(trainer.args.output_dir)) / CARD
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    groups = trained_groups(mars.param_groups, trainer.model)
    main = main_group(groups)
    card = ModelCard.load(path, ignore_metadata_errors=True)
    _complete_metadata(card.data, trainer, model, dataset)

    origin = _origin(card.data.base_model, getattr(model.config, "name_or_path", None))
    text = _BASE_SENTENCE.sub(lambda _: origin, card.text).replace("on the None dataset", "on an unknown dataset")
    name = path.absolute().parent.name  # which TRL's card lacks without a repository
    text = text.replace("\n# Model Card for None\n", f"\n# Model Card for {name}\n")
    text = text.replace('model="None"', f"model={json.dumps(name)}")
    text = re.sub(r"^- learning_rate: .*$", f"- learning_rate: {main['lr']:g}", text, flags=re.MULTILINE)
    work = _work_of(mars, main["rule"])
    optimizer = f"- optimizer: {work.name} ({main['rule']}), see below\n"
    text = re.sub(r"^- optimizer: .*?\n(?=- )", optimizer, text, flags=re.MULTILINE | re.DOTALL)
    picture = ""
    if path.with_name(LOSSES).is_file():
        picture = f"![Training and held-out loss over steps]({LOSSES})\n\n"
    citation = f"## Citation of {work.name}\n\n```bibtex\n{work.bibtex}\n```"
    card.text = f"{text.rstrip()}\n\n{picture}{_optimizer(groups, work)}\n\n{citation}\n"
    card.save(path)


def _work_of(mars: Mars, rule: str) -> _Work:
    """Return the work behind an optimizer; Muon is a name for mars-m with other settings."""
    created_with = mars.created_with or {}
    if created_with.get("mars_type") == MUON:
        return _MUON
    return _MARS_M if rule == "mars-m" else _MARS


def _origin(base: str | None, name_or_path: str | None) -> str:
    """Return the sentence about a model's origin: of a folder, Trainer says "from scratch", TRL links to the Hub."""
    if base is not None:
        return f"is a fine-tuned version of [{base}](https://huggingface.co/{base})"
    if name_or_path:
        return f"is a fine-tuned version of the local model `{Path(name_or_path).name}`"
    return "was trained from scratch"


def _complete_metadata(data: Any, trainer: Any, model: Any, dataset: list[str]) -> None:
    """Add tags, task and the last evaluation to a card's metadata, and drop names that the Hub refuses: local paths."""
    _drop_local_names(data)
    name_or_path = getattr(model.config, "name_or_path", None)
    if data.base_model is None and _is_on_hub(name_or_path):
        data.base_model = name_or_path
    data.tags = list(dict.fromkeys([*_listed(data.tags), *TAGS]))  # each once
    # None leaves an entry out of the card.
    data.datasets = list(filter(_is_on_hub, _listed(data.datasets))) or None
    if not data.pipeline_tag:
        data.pipeline_tag = modelcard.TrainingSummary.from_trainer(trainer, finetuned_from="").tasks
    data.eval_results = _eval_results(data, trainer, dataset) or None
    if data.eval_results and not data.model_name:
        data.model_name = Path(str(trainer.args.output_dir)).absolute().name


def _drop_local_names(data: Any) -> None:
    """Drop local paths, which the Hub refuses, from the base model and the tags of a card's metadata."""
    if not _is_on_hub(data.base_model):
        data.base_model = None
    tags = []
    for tag in _listed(data.tags):
        _, is_adapter, base = tag.partition(_ADAPTER)
        if not is_adapter or _is_on_hub(base):
            tags.append(tag)
    data.tags = tags or None


def _eval_results(data: Any, trainer: Any, dataset: list[str]) -> list[EvalResult]:
    """Return the results in a card's metadata, and those at the end of training that they lack."""
    results = [result for result in data.eval_results or () if result.dataset_type]
    if not _has_ended(trainer):
        return results
    known_types = {result.metric_type for result in results}
    datasets = _listed(data.datasets)
    hub_name = datasets[0] if len(datasets) == 1 else "unknown"
    for metric, value in _final_metrics(trainer).items():
        metric_type = metric.lower().replace(" ", "_")
        if metric_type in known_types:
            continue
        result = EvalResult(
            task_type=data.pipeline_tag or "other",
            dataset_type=hub_name,
            dataset_name=", ".join(dataset or datasets) or "unknown",
            metric_type=metric_type,
            metric_value=value,
            metric_name=metric,
        )
        results.append(result)
    return results


def _final_metrics(trainer: Any) -> dict[str, float]:
    """Return the last evaluation's finite metrics by name, of the weights that stay: the best ones, if loaded."""
    state = trainer.state
    rows = state.log_history
    loads_best = trainer.args.load_best_model_at_end and state.best_model_checkpoint
    if loads_best:
        rows = [row for row in rows if row["step"] <= state.best_global_step or "train_runtime" in row]
    *_, last_evaluation = modelcard.parse_log_history(rows)
    metrics = (last_evaluation or {}).items()
    return {name: value for name, value in metrics if isinstance(value, (int, float)) and math.isfinite(value)}


def _has_ended(trainer: Any) -> bool:
    return any("train_runtime" in row for row in trainer.state.log_history)


def _optimizer(groups: Sequence[Mapping[str, Any]], work: _Work) -> str:
    """Return the section with one row per kind of parameter group; groups may differ in settings without a column."""
    header = ["group", "rule", *_COLUMNS, *_MARS_COLUMNS, "parameters"]
    sizes: dict[tuple[str, ...], int] = {}
    for group in groups:
        cells = tuple(_cell(value) for value in _values(group))
        sizes[cells] = sizes.get(cells, 0) + group.get("parameters", 0)
    lines = [header, ["---"] * len(header)]
    for cells, size in sizes.items():
        lines.append([*cells, f"{size:,}" if size else ""])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    intro = f"[{work.name}]({work.url}), `mars_hf` {mars_hf.__version__}."
    if work is _MUON:
        intro += " It is the rule mars-m with gamma = 1 - beta1."
    settings = f"Learning rates are the peaks; `{saved_settings.FILE}` has every setting."
    return f"## Optimizer\n\n{intro} {settings}\n\n{table}"


def _values(group: Mapping[str, Any]) -> list[Any]:
    """Return a group's entries of the table, but for its parameters."""
    name = group["role"]
    if "pattern" in group:
        name = f"{name} `{group['pattern']}`"
    values = [name, group["rule"]]
    values += [group[column] for column in _COLUMNS]
    corrects = UPDATE_RULES[group["rule"]].corrects
    values += [group[column] if corrects else "" for column in _MARS_COLUMNS]
    return values


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value).replace("|", "\\|")


def _is_on_hub(name: Any) -> bool:
    """Return whether a name may be one of the Hub: spelled as there, and no folder of this machine."""
    if not isinstance(name, str) or name == "None":
        return False
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).is_dir()


def _listed(value: str | Sequence[str] | None) -> list[str]:
    """Return one name or several as a list, without empty ones."""
    if isinstance(value, str):
        return [value]
    return [name for name in value or () if name]


def _sealed(content: str) -> str:
    """Return a card with its checksum as last line."""
    return content + _SEAL.format(hashlib.sha256(content.encode()).hexdigest()[:16])


def _is_sealed(text: str) -> bool:
    """Return whether a card is as `_sealed` left it."""
    content = text.rpartition(_SEAL_BEGINS)[0]
    return text == _sealed(content)
