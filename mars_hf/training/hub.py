"""Leave a model card and mars.json beside the weights of a run, so that every push includes them."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging

from mars_hf.groups import saved_settings
from mars_hf.groups.saved_settings import write_whole
from mars_hf.optimizer import Mars
from mars_hf.training import card_facts, card_metadata, card_sections, loss_curve
from mars_hf.training import provenance as origins
from mars_hf.training.card_facts import CardFacts
from mars_hf.training.guard import innermost

logger = logging.get_logger(__name__)

CARD = "README.md"
# What stands between them is written anew; what stands outside is kept.
_BEGIN = "<!-- mars_hf writes what follows from the run, and writes it anew; text outside the two marks stays. -->"
_END = "<!-- mars_hf: end -->"

# What transformers and TRL write about a model without a base, in which they name one that does not exist.
_NO_BASE = re.compile(r"is a fine-tuned version of \[(?:None)?\]\(https://huggingface\.co/(?:None)?\)")
# Headings of transformers' card that nothing but our sections answers.
_UNANSWERED = re.compile(
    r"^## (?:Model description|Training and evaluation data)\n+More information needed\n+", re.MULTILINE
)


def attach(trainer: Any) -> None:
    """Make a Trainer leave mars.json wherever it saves the model, and complete its model cards; safe to call twice.

    On the instance, because subclasses have `create_model_card` of their own.
    """
    for name, makes in (("save_model", _saving), ("create_model_card", _completing)):
        if not hasattr(getattr(trainer, name), "leaves_mars"):
            setattr(trainer, name, makes(trainer))


def _saving(trainer: Any) -> Callable[..., Any]:
    """Return a `save_model` that writes mars.json beside the weights, before they are pushed or sealed."""
    save, own = _method(trainer, "save_model")

    @functools.wraps(save)
    def save_model(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        result = save(output_dir, *args, **kwargs)
        if (trainer := own()) is not None:
            save_settings(trainer, Path(str(output_dir or trainer.args.output_dir)))
        return result

    save_model.leaves_mars = True  # type: ignore[attr-defined]
    return save_model


def _completing(trainer: Any) -> Callable[..., Any]:
    """Return a `create_model_card` that completes what the Trainer's own has written."""
    create, own = _method(trainer, "create_model_card")

    @functools.wraps(create)
    def create_model_card(*args: Any, **kwargs: Any) -> Any:
        result = create(*args, **kwargs)
        trainer = own()
        if trainer is not None and trainer.is_world_process_zero():
            given = inspect.signature(create).bind(*args, **kwargs).arguments
            _unless_it_fails(trainer, lambda: write_model_card(trainer, facts_of(trainer).with_given(given)))
        return result

    create_model_card.leaves_mars = True  # type: ignore[attr-defined]
    return create_model_card


def _method(trainer: Any, name: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Return a method, and what returns its Trainer without keeping it alive."""
    own = weakref.ref(trainer)
    if name in vars(trainer):  # somebody else's, who has put it there
        return getattr(trainer, name), own
    function = getattr(type(trainer), name)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(own(), *args, **kwargs)

    method.__signature__ = inspect.signature(getattr(trainer, name))  # type: ignore[attr-defined]
    return method, own


def save_settings(trainer: Any, folder: Path) -> None:
    """Write mars.json into a folder that exists, from the process that writes there, if MARS trains."""
    from mars_hf import __version__

    mars = innermost(trainer.optimizer)
    if isinstance(mars, Mars) and trainer.args.should_save and folder.is_dir():
        saved_settings.write(folder, __version__, mars.created_with, origins.trained_groups(mars))


def leave(trainer: Any) -> None:
    """Write mars.json and the card into the output folder; a card that is not ours stays as it is."""
    output = Path(str(trainer.args.output_dir))
    if not output.is_dir():
        return
    _unless_it_fails(trainer, lambda: save_settings(trainer, output))
    if trainer.is_world_process_zero():
        _unless_it_fails(trainer, lambda: _refresh(trainer, output / CARD))


def _refresh(trainer: Any, path: Path) -> None:
    if not path.exists() or _BEGIN in path.read_text(encoding="utf-8"):
        write_model_card(trainer)


def _unless_it_fails(trainer: Any, work: Callable[[], Any]) -> None:
    """Do what a trained model must not be lost for: a folder that cannot be written, metadata that is no YAML."""
    try:
        work()
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        logger.warning(f"mars_hf could not describe the run in {trainer.args.output_dir}: {line or repr(error)}")


def facts_of(trainer: Any) -> CardFacts:
    """Return what the script has stated as `trainer.card_facts`, if it has."""
    facts = getattr(trainer, "card_facts", None)
    return facts if isinstance(facts, CardFacts) else CardFacts()


def create_model_card(trainer: Any, *args: Any, **given: Any) -> None:
    """Write our card alone; for a Trainer's class that has `create_model_card = hub.create_model_card`.

    Args:
        trainer: the Trainer.
        *args: as Trainer's method, which has `language`, `license` and `tags` first.
        **given: as there.
    """
    if trainer.is_world_process_zero():
        given |= dict(zip(("language", "license", "tags", "model_name"), args, strict=False))
        write_model_card(trainer, facts_of(trainer).with_given(given))


create_model_card.leaves_mars = True  # type: ignore[attr-defined]


def write_model_card(trainer: Any, facts: CardFacts | None = None) -> Path:
    """Write README.md into the output folder: what ran, on what, for how long, how well, and how to use it.

    The text of a card that is there stays: our part of it, between two marks, is written anew, or added. Metadata are
    completed.

    Args:
        trainer: a Trainer, after or during training.
        facts: what only the script knows; None takes `trainer.card_facts`.

    Returns:
        The path of the card.

    Raises:
        ValueError: the metadata of the card that is there are no YAML.
    """
    from huggingface_hub import ModelCard

    facts = facts_of(trainer) if facts is None else facts
    output = Path(str(trainer.args.output_dir))
    path = output / CARD
    name = facts.model_name or Path(str(trainer.args.hub_model_id or output.absolute())).name
    text = path.read_text(encoding="utf-8") if path.exists() else f"---\n{{}}\n---\n\n# {name}\n"
    card = ModelCard(text, ignore_metadata_errors=True)
    optimizer = innermost(trainer.optimizer)
    data: Any = card.data
    card_metadata.complete(data, trainer, facts, name, mars=isinstance(optimizer, Mars))
    title = card_sections.title(trainer, optimizer, facts)
    has_picture = loss_curve.draw(trainer.state.log_history, output / loss_curve.FILE, title)
    lines = card_sections.sections(trainer, optimizer, facts, data.license, has_picture=has_picture)
    card.text = _with_ours(_repaired(card.text, facts), "\n".join(lines).rstrip())
    write_whole(path, str(card))
    return path


def _repaired(text: str, facts: CardFacts) -> str:
    """Return another's text without what is wrong in it, and without questions that our part answers."""
    text = _NO_BASE.sub("was trained from scratch", text)
    names = " and ".join(card_facts.listed(facts.dataset))
    if names:
        text = text.replace("on an unknown dataset.", f"on {names}.")
    return _UNANSWERED.sub("", text)


def _with_ours(text: str, ours: str) -> str:
    """Return a text with our part in place of an earlier one, or at its end."""
    before, found, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END) if found else ("", "", "")
    return f"{before.rstrip()}\n\n{_BEGIN}\n\n{ours}\n\n{_END}\n{after.lstrip()}"
