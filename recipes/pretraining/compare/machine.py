"""Describe the machine that a result was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers

import mars_hf


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
        "mars_hf": mars_hf.__version__,
    }
