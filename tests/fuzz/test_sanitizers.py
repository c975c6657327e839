"""The fuzz test and the contract with kernels built with the address and undefined behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"


def runtime(name: str) -> str | None:
    """Return the path of a sanitizer's library, None if the compiler has none."""
    if shutil.which("g++") is None:
        return None
    path = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return path if os.path.isabs(path) else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or None in (runtime("libasan.so"), runtime("libubsan.so")),
        reason="needs g++ on Linux with libasan.so and libubsan.so",
    ),
]


def run(arguments: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with sanitized kernels, in a cache of their own."""
    environment = {
        **os.environ,
        "CXX": f"g++ {FLAGS}",
        "XDG_CACHE_HOME": str(cache),
        # The C++ library too: Python does not link it, and ASAN looks for what throws when the process starts.
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0:exitcode=77",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=78",
        "PYTHONMALLOC": "malloc",  # Python's own blocks are watched too
        "OMP_NUM_THREADS": "2",
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=HERE.parents[1], capture_output=True, text=True
    )


def said(finished: subprocess.CompletedProcess[str]) -> str:
    """Return the end of pytest's output and the start of a report."""
    start = max(0, min(finished.stderr.find(sign) for sign in ("ERROR: AddressSanitizer", "runtime error:", "")))
    return finished.stdout[-10_000:] + finished.stderr[start : start + 10_000]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sanitized")


@pytest.mark.parametrize(
    "chosen",
    [
        ["fuzz/test_edits.py", "-k", "(test_edits_and_layouts or test_more) and (compiled or auto)"],
        # Sums of 4,096 float32 products are held to errors that vectors reach, and sanitized loops have none.
        ["kernels/test_contract.py", "-k", "compiled and not sums_of_dtypes"],
    ],
    ids=lambda chosen: chosen[0],
)
def test_nothing_is_reported(chosen, cache):
    # -s: pytest's capture would swallow the report, which ends the process.
    options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    finished = run(["-m", "pytest", *options, str(HERE.parent / chosen[0]), *chosen[1:]], cache)
    text = said(finished)
    assert "ERROR: AddressSanitizer" not in text and "runtime error:" not in text, text
    assert finished.returncode == 0 and " passed" in finished.stdout, text
    libraries = list(cache.glob("mars_hf/cpu_*.so"))
    assert libraries and all(b"__asan_report" in library.read_bytes() for library in libraries)


CALL = """
import torch
from mars_hf.kernels import cpu as compiled
tensor, original = torch.ones(100), compiled._descriptor

def wrong(*given):
    words = original(*given)
    {change}
    return words

compiled._descriptor = wrong
print(compiled.sums([tensor], []).tolist())
"""


@pytest.mark.parametrize(
    ("change", "report"),
    [
        ("words[words.index(100)] += 40", "heap-buffer-overflow"),  # a size too large
        ("words[words.index(tensor.data_ptr())] += 2", "misaligned address"),
        ("", "100.0"),  # a correct call, for comparison
    ],
)
def test_wrong_calls_are_reported(change, report, cache):
    finished = run(["-c", CALL.format(change=change or "pass")], cache)
    assert report in finished.stdout + finished.stderr, said(finished)
    assert (finished.returncode == 0) == (not change), said(finished)
