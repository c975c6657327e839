"""Register MARS in the processes that a script starts, such as the trainer behind `trl sft`.

`sitecustomize.py` in this folder runs at the start of every Python that has the folder on PYTHONPATH.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)


def inherit(environment: MutableMapping[str, str]) -> None:
    """Give processes started with this environment `--optim mars_adamw`, the other names, and MarsTrainer.

    Args:
        environment: changed in place, such as `os.environ`; PYTHONPATH keeps its entries.
    """
    paths = environment.get("PYTHONPATH", "")
    if FOLDER not in paths.split(os.pathsep):
        environment["PYTHONPATH"] = FOLDER + (os.pathsep + paths if paths else "")
