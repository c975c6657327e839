"""How many processes a run of the tests takes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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


@pytest.mark.slow
def test_workers_start_no_workers(tmp_path):
    """A worker reads this conftest too, with its number of processes reset."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text(CONFTEST.read_text())
    (tests / "test_one.py").write_text("import os\ndef test(): assert os.environ['PYTEST_XDIST_WORKER']\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0 and "1 passed" in finished.stdout, finished.stdout[-2000:]
