"""Convert DeepSpeed's ZeRO checkpoints into universal ones."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from mars_hf.universal import folders, zero_files
from mars_hf.universal.safe_load import known_layout


def to_universal(source: str | Path, target: str | Path) -> None:
    """Convert a DeepSpeed ZeRO checkpoint into a universal one, and name it in `latest_universal` beside it.

    Nothing is left under the name of `target` unless it is complete. Whole parameters are made one at a time.

    Args:
        source: folder with the `*_optim_states.pt` of all ranks, such as `checkpoint-10/global_step10`.
        target: new folder beside it, such as `checkpoint-10/global_step10_universal`.

    Raises:
        ValueError: `source` is no such checkpoint, is incomplete or damaged, is laid out in a way that is not known
            here, or holds a class that is not known; `target` exists. Nothing in the files runs.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"{target} exists already; give a new folder, or remove it")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder, so {target.name!r} cannot be made in it")
    ranks, model = zero_files.read_zero(source)
    shapes = zero_files.shapes_of(model)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        with known_layout(source):
            _write_parameters(ranks, shapes, partial / "zero")
            common = _common_state(ranks[0])
        torch.save(common, partial / "zero" / "optimizer_state.pt")
        # ZeRO-1/2 and ZeRO-3 look for different files; of neither does a universal load read the weights.
        # DeepSpeed reads both without protection: they hold what was read here, not what the source may hold by now.
        torch.save(model, partial / folders.MODEL_FILES[ranks[0].zero3])
        torch.save({**model, "module": {}}, partial / folders.MODEL_FILES[not ranks[0].zero3])
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _replace_text(target.parent / "latest_universal", target.name)


def _replace_text(file: Path, text: str) -> None:
    """Write a file at once: whoever reads it finds the old text or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as written:
        written.write(text)
    try:
        Path(written.name).chmod(0o644)
        Path(written.name).replace(file)
    finally:
        Path(written.name).unlink(missing_ok=True)


def _write_parameters(ranks: list[zero_files.Rank], shapes: dict[str, torch.Size], folder: Path) -> None:
    """Make a folder for each parameter, with a file for its weights and each of its states."""
    from tqdm import tqdm

    everything = [(index, name) for index in range(len(ranks[0].places)) for name in zero_files.names(ranks, index)]
    for index, name in tqdm(everything, desc="parameters", delay=2):
        if (folder / name).exists():
            raise ValueError(f"the checkpoint has the parameter {name!r} twice, so its state cannot be told")
        (folder / name).mkdir(parents=True)
        for key, value in zero_files.whole(ranks, index, name, shapes[name]):
            torch.save(value if key == "step" else {"param": value, "cat_dim": 0}, folder / name / f"{key}.pt")


def _common_state(rank: zero_files.Rank) -> dict[str, Any]:
    """Return what belongs to no parameter; of the states ZeRO-3 asks for one step counter."""
    step = {0: {"step": next((folders.step_of(state["step"]) for state in rank.states if "step" in state), None)}}
    return {**rank.common, "optimizer_state_dict": {"state": step, "param_groups": rank.common["param_groups"]}}
