"""Describe the machine that a result was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def describe() -> dict[str, str | int]:
    """Return processor, cores, accelerator and versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def note(result: dict[str, Any]) -> None:
    """Add this machine to a result, unless the result names it: a search may go on where another machine stopped."""
    here = describe()
    if here not in (result.setdefault("machine", here), *result.get("further_machines", ())):
        result.setdefault("further_machines", []).append(here)
