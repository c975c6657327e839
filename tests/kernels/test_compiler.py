"""C++ files become libraries once, and a compiler that is missing or fails is named."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from helpers import needs_compiler

from mars_hf.kernels import compiler

SOURCE = """
#include <omp.h>
extern "C" int answer() {
    int threads = 0;
#pragma omp parallel num_threads(2) reduction(+ : threads)
    threads += 1;
    return 40 + threads;
}
"""

pytestmark = needs_compiler


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file to compile, and an empty cache for its library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def runs(monkeypatch):
    """The compiler's runs."""
    seen, original = [], compiler._run
    monkeypatch.setattr(compiler, "_run", lambda command: (seen.append(command), original(command)))
    return seen


def test_a_library_is_made_once(source, runs):
    assert compiler.load(source).answer() == 42
    assert compiler.load(source).answer() == 42
    assert len(runs) == 1
    assert [path.name for path in compiler.folder().iterdir()] == [path.name for path in compiler.folder().glob("*.so")]


def test_a_changed_source_makes_another(source, runs):
    compiler.load(source)
    source.write_text(SOURCE.replace("40", "50"))
    assert compiler.load(source).answer() == 52
    assert len(runs) == 2


def test_other_instructions_make_another(source, runs, monkeypatch):
    compiler.load(source)
    monkeypatch.setattr(compiler, "_instructions", lambda: ("-g",))
    compiler.load(source)
    assert len(runs) == 2


def test_processes_at_once(source):
    """All of them find a whole library."""
    code = "import sys, pathlib, mars_hf.kernels.compiler as c; print(c.load(pathlib.Path(sys.argv[1])).answer())"
    made = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in made] == ["42"] * 3
    assert len(list(compiler.folder().iterdir())) == 1


def test_what_the_compiler_says_is_passed_on(source):
    source.write_text("int answer() { return no_such_thing; }")
    with pytest.raises(RuntimeError, match=r"(?s)status 1: .*no_such_thing"):
        compiler.load(source)
    assert not list(compiler.folder().iterdir())


def test_no_compiler(source, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler \(g\+\+, clang\+\+, c\+\+\).*set CXX"):
        compiler.load(source)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler \(/no/such/compiler\)"):
        compiler.load(source)


def test_cxx_is_taken(source, tmp_path, monkeypatch):
    real, own = compiler.find(), tmp_path / "own-compiler"
    own.write_text(f'#!/bin/sh\ntouch {tmp_path}/ran\nexec {real} "$@"\n')
    own.chmod(own.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(own))
    assert compiler.load(source).answer() == 42
    assert (tmp_path / "ran").exists()


def test_a_cache_that_cannot_be_written(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = compiler.folder()
    assert folder.is_dir() and os.access(folder, os.W_OK) and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert compiler.load(source).answer() == 42
