"""Keep an optimizer's settings in mars.json beside the weights, and read them back for `create(like=...)`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mars_hf.groups.settings import DEFAULTS, MODEL_DEFAULTS, UnknownHyperparameterError, check, plain, reject_unknown
from mars_hf.param_rules import Rule, rules_of

FILE = "mars.json"
_FORMAT = 1
# What the loop (clipping) and the machine (backends) decide.
_NOT_KEPT = ("max_grad_norm", "fused")
KEPT = tuple(name for name in (*DEFAULTS, *MODEL_DEFAULTS) if name not in _NOT_KEPT)

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def write(
    folder: Path, version: str, created_with: Mapping[str, Any] | None, groups: Iterable[Mapping[str, Any]]
) -> Path:
    """Write mars.json into a folder; a kill leaves the earlier file or the new one.

    Args:
        folder: it exists.
        version: of mars_hf.
        created_with: arguments of the call of `create`; those left out are kept with their defaults. None if no call
            of `create` gives this optimizer.
        groups: what trained each parameter group, for readers.

    Returns:
        The file.
    """
    content = {"format": _FORMAT, "mars_hf": version, "create": to_json(created_with), "groups": list(groups)}
    path = folder / FILE
    write_whole(path, json.dumps(_as_json(content), indent=2) + "\n")
    return path


def to_json(created_with: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return arguments of `create` as JSON holds them, with the defaults of those left out; None for None."""
    if created_with is None:
        return None
    given = {**DEFAULTS, **MODEL_DEFAULTS, **created_with}
    arguments = plain({name: given[name] for name in KEPT})
    arguments["param_rules"] = [_kept(rule) for rule in arguments["param_rules"]]
    found: dict[str, Any] = _as_json(arguments)
    return found


def _kept(rule: Rule) -> Rule:
    """Return a rule without what the loop and the machine decide."""
    return Rule(rule.pattern, {name: value for name, value in rule.settings.items() if name not in _NOT_KEPT})


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under its final name only when it is whole; pushes leave out the name it has before."""
    partial = path.with_name(f"_{path.name}.partial")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _as_json(value: Any) -> Any:
    """Return a setting, or a container of them, as what JSON holds: dtypes become names, tensors numbers."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(own) for own in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.item() if hasattr(value, "item") else value  # of torch and NumPy


def read(like: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments for `create` that a mars.json holds, checked as a caller's are.

    Args:
        like: a folder with a mars.json, the file itself, or the name of a repository of the Hub. A folder counts first.

    Raises:
        ValueError: there is none, it cannot be read, or it holds no arguments; one line says what is wrong.
    """
    if not isinstance(like, (str, os.PathLike)):
        raise ValueError(f"like={like!r} is no path; accepted: a folder, a {FILE}, or a name on the Hub (user/name)")
    where = f"like={os.fspath(like)!r}"
    path = _find(like, where)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: its {FILE} cannot be read ({error}); save the run's settings again") from None
    if not isinstance(content, dict) or not {"format", "create"} <= content.keys():
        raise ValueError(f"{where}: its {FILE} is none of mars_hf, which have 'format' and 'create'")
    writer = f"mars_hf {content.get('mars_hf', '(unknown)')}"
    if content["format"] != _FORMAT:
        raise ValueError(
            f"{where}: its {FILE}, of {writer}, has format {content['format']!r}; this mars_hf reads format {_FORMAT}: "
            "install the version that wrote it, or give the settings themselves"
        )
    found = content["create"]
    if found is None:
        raise ValueError(
            f"{where}: its {FILE} holds no arguments of create: the optimizer was made as Mars(params), or a loaded "
            "checkpoint gave its groups settings that no call of create gives; its 'groups' say what trained them, "
            "give those settings yourself"
        )
    try:
        return _checked(found)
    except UnknownHyperparameterError as error:
        raise UnknownHyperparameterError(f"{where}: its {FILE} is of {writer}; {error}; upgrade mars_hf") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: its {FILE}: {error}") from None


def _checked(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"create={found!r} is not an object of settings")
    reject_unknown(found, KEPT, "create")
    check(found)
    split = found.get("split_fused", "auto")
    if not (isinstance(split, dict) and all(map(_are_sizes, split.values()))) and split not in ("auto", "none"):
        raise ValueError(f"split_fused={split!r} is unknown; accepted: 'auto', 'none', or patterns with their sizes")
    return plain(found)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and not isinstance(size, bool) for size in value)


def _find(like: str | os.PathLike[str], where: str) -> Path:
    """Return the path of the mars.json that `like` names, from the Hub's cache if it is there."""
    path = Path(like).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / FILE).is_file():
            return path / FILE
        raise ValueError(
            f"{where}: the folder has no {FILE}, which Trainer leaves beside the weights of a run with MARS; give such "
            "a folder, or the settings themselves"
        )
    name = os.fspath(like)
    if not _REPOSITORY.fullmatch(name):
        raise ValueError(f"{where}: no such folder, and not a name on the Hub (user/name)")
    return _download(name, where)


def _download(name: str, where: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ValueError(f"{where}: no such folder, and huggingface_hub is not installed to ask the Hub") from None
    try:
        return Path(huggingface_hub.hf_hub_download(name, FILE))
    except errors.LocalEntryNotFoundError:
        why = f"no such folder, and the Hub cannot be reached for {name}, whose {FILE} is not in the cache"
        remedy = "connect (HF_HUB_OFFLINE=0), or give a local folder"
    except errors.EntryNotFoundError:
        why, remedy = f"{name} on the Hub has no {FILE}", "give a model that was pushed from a run with MARS"
    except errors.RepositoryNotFoundError:
        why = f"no such folder, and the Hub shows no such repository ({name})"
        remedy = "check the name, or log in (hf auth login) if it is private"
    except (OSError, ValueError) as error:  # no connection, a name that the Hub does not allow
        why = f"no such folder, and the Hub does not give {name} ({' '.join(str(error).split())[:200]})"
        remedy = "give a local folder"
    raise ValueError(f"{where}: {why}; {remedy}") from None


def normalized(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `create` with rules as a list: an iterator could be read once only."""
    return {name: rules_of(value) if name == "param_rules" else value for name, value in arguments.items()}
