"""Keep an optimizer's settings in mars.json beside the weights, and read them back for `create(like=...)`."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mars_hf.groups import plain_yaml
from mars_hf.groups.settings import (
    DEFAULTS,
    MODEL_DEFAULTS,
    MUON,
    check_arguments,
    check_names,
    loaded_state_dtype,
    shown,
)

FILE = "mars.json"
# The name of a repository on the Hub: it cannot be absolute, nor begin with a dot or tilde, nor have two slashes.
_REPOSITORY = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")
# Not what the loop and the machine decide.
KEPT = tuple(name for name in (*DEFAULTS, *MODEL_DEFAULTS) if name not in ("max_grad_norm", "fused"))


def write(
    folder: Path, version: str, created_with: Mapping[str, Any] | None, groups: Iterable[Mapping[str, Any]]
) -> None:
    """Write mars.json into a folder that exists; a kill leaves the earlier file or the new one.

    Args:
        folder: where to.
        version: of mars_hf.
        created_with: arguments of the call of `create`; those left out are kept with their defaults. None if no call
            of `create` gives this optimizer.
        groups: what trained each parameter group, for readers.
    """
    content = {"mars_hf": version, "create": to_json(created_with), "groups": list(groups)}
    write_whole(folder / FILE, json.dumps(content, indent=2, default=_plain) + "\n")


def to_json(created_with: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return checked arguments of `create` as JSON holds them, with the defaults of those left out; None for None."""
    if created_with is None:
        return None
    values = {**DEFAULTS, **MODEL_DEFAULTS, **created_with}
    return dict(json.loads(json.dumps({name: values[name] for name in KEPT}, default=_plain)))


def as_loaded(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer that has loaded a checkpoint.

    Settings that are newer than the checkpoint take their defaults. Between 8 bits and floating point the optimizer's
    own `state_dtype` stays, and the states are converted.

    Args:
        saved: arguments in the checkpoint, as JSON holds them.
        own: those that the optimizer was created with, in the same form.
    """
    loaded = {**(to_json({}) or {}), **saved}
    loaded["state_dtype"] = loaded_state_dtype(loaded["state_dtype"], own["state_dtype"])
    saved_overrides, own_overrides = loaded["param_rules"], own["param_rules"]
    if [pattern for pattern, _ in saved_overrides] != [pattern for pattern, _ in own_overrides]:
        return loaded
    overrides = []
    for (pattern, before), (_, now) in zip(saved_overrides, own_overrides, strict=True):
        settings = dict(before)
        if "state_dtype" in before and "state_dtype" in now:
            settings["state_dtype"] = loaded_state_dtype(before["state_dtype"], now["state_dtype"])
        overrides.append([pattern, settings])
    return {**loaded, "param_rules": overrides}


def _plain(value: Any) -> Any:
    """Return what JSON holds for a dtype, or for a number of torch or NumPy."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value.item()


def write_whole(path: Path, content: str) -> None:
    """Write a file under its final name only when it is whole; pushes leave out the name it has before."""
    partial = path.with_name(f"_{path.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read(like: str | os.PathLike[str], mars_type: Any = None) -> dict[str, Any]:
    """Return the arguments for `create` that a mars.json holds, checked as a caller's are.

    Args:
        like: a folder with a mars.json, the file itself, or the name of a repository of the Hub. A folder counts first.
        mars_type: that of the caller, which wins; only `"muon"`, a name for settings, must be the file's too.

    Raises:
        ValueError: there is none, it cannot be read, or it holds no arguments; one line says what is wrong.
    """
    where = f"like={shown(os.fspath(like))}"
    path = _find(like, where)
    try:
        content = plain_yaml.read_json(path.read_text(encoding="utf-8"))
        arguments = content["create"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: its {FILE} cannot be read ({error!r}); save the run's settings again") from None
    if arguments is None:
        raise ValueError(
            f"{where}: its {FILE} has no create() arguments: the run used Mars(params), or took its settings from a "
            "checkpoint. Copy the settings you want from its 'groups'"
        )
    try:
        check_names(arguments, KEPT, "create")
        arguments = check_arguments(arguments)
    except ValueError as error:
        version = shown(content.get("mars_hf", "(unknown)"))
        raise ValueError(f"{where}: its {FILE}, of mars_hf {version}: {error}") from None
    asks_for_muon = mars_type == MUON
    if asks_for_muon and arguments["mars_type"] != MUON:
        raise ValueError(
            f"mars_type={MUON!r} and {where}, settings of {arguments['mars_type']}, contradict each other; give one"
        )
    return arguments


def check_rates(like: str | os.PathLike[str] | None, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if arguments of `create` would convert rates of AdamW: those in a mars.json are MARS's."""
    if like is not None and arguments.get("adamw_rates"):
        raise ValueError(f"like={shown(os.fspath(like))} has rates of MARS; leave adamw_rates out")


def _hint_of_folder(path: Path) -> str:
    """Return the names near a path that does not exist, beside it."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"; did you mean {' or '.join(repr(str(path.parent / name)) for name in close)}?" if close else ""


def _find(like: str | os.PathLike[str], where: str) -> Path:
    """Return the path of the mars.json that `like` names, from the Hub's cache if it is there."""
    try:
        path = Path(like).expanduser()
        for file in (path, path / FILE):
            if file.is_file():
                return file
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name that no file can have; no such user
        raise ValueError(f"{where}: no such folder ({error.__class__.__name__})") from None
    if is_folder:
        raise ValueError(
            f"{where}: the folder has no {FILE}, which Trainer leaves beside the weights of a run with MARS"
        )
    if not _REPOSITORY.fullmatch(os.fspath(like)):
        raise ValueError(
            f"{where}: no such folder, and the Hub does not give its {FILE}: that is no name of a repository"
            f"{_hint_of_folder(path)}"
        )
    try:
        import huggingface_hub

        return Path(huggingface_hub.hf_hub_download(os.fspath(like), FILE))
    except (ImportError, OSError, ValueError) as error:  # all errors of the Hub are among them
        reason = f"{type(error).__name__}: {shown(' '.join(str(error).split()))}"
        raise ValueError(
            f"{where}: no such folder, and the Hub does not give its {FILE} ({reason}); check the name, log in if it "
            f"is private, or give a local folder{_hint_of_folder(path)}"
        ) from None
