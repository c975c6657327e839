"""Run test_gpu.py in Triton's interpreter, in a process of its own (see there)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.7", reason="older interpreters, 3.6 for one, fail with NumPy 2.4")
HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", HERE / "test_gpu.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout and "skipped" not in finished.stdout, finished.stdout
