"""How many processes a run of the tests takes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

SOURCES = pytest.Config.ArgsSource
CONFTEST = Path(__file__).parent / "conftest.py"
# By its path: there are others of this name.
spec = importlib.util.spec_from_file_location("conftest_of_all_tests", CONFTEST)
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)


def processes(monkeypatch, *, source=SOURCES.TESTPATHS, worker=False, plugin=True, **options) -> int | None:
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    else:
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    option = SimpleNamespace(**{"usepdb": False, "numprocesses": None, "dist": "no", **options})
    manager = SimpleNamespace(hasplugin=lambda name: plugin)
    conftest.pytest_cmdline_main(SimpleNamespace(option=option, args_source=source, pluginmanager=manager))
    return option.numprocesses


def test_a_run_of_all_tests_takes_every_core(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert processes(monkeypatch) == 2


@pytest.mark.parametrize(
    "options", [{"source": SOURCES.ARGS}, {"worker": True}, {"plugin": False}, {"usepdb": True}], ids=str
)
def test_others_take_none_more(monkeypatch, options):
    assert processes(monkeypatch, **options) is None


def test_the_command_line_decides(monkeypatch):
    assert processes(monkeypatch, numprocesses=3) == 3
