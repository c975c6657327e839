"""Every test runs offline, seeded and on the CPU."""

from __future__ import annotations

import os

# huggingface_hub and datasets read these at import, so set them before any test module is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several that share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give a run of all tests every core; named files and `--pdb` stay in one process, and `-n` decides if given."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.pluginmanager.hasplugin("xdist"):  # a worker starts none
        return
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if not named and not config.option.usepdb and config.option.numprocesses is None:
        config.option.numprocesses = min(os.cpu_count() or 1, 8)
        config.option.dist = "loadfile"  # files share what their fixtures make


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark soaks slow: `-m "not slow"` replaces the -m of pyproject.toml that leaves them out."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.slow)
