"""C++ files compile once, and errors name a compiler that is missing or fails."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys

import pytest
from helpers import needs_compiler

from mars_hf.arithmetic.kernels import cpu_compiler as compiler

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
    """Return a file to compile, with an empty cache for its library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def runs(monkeypatch):
    """Record the compiler's runs."""
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


@pytest.mark.slow
def test_processes_at_once(source):
    """Every process finds a complete library."""
    code = (
        "import sys, pathlib, mars_hf.arithmetic.kernels.cpu_compiler as c; "
        "print(c.load(pathlib.Path(sys.argv[1])).answer())"
    )
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


@pytest.fixture
def script(tmp_path):
    """Write a script that logs its arguments and runs a command with them."""

    def make(name: str, runs: str):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/ran"\nexec {runs} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return make


def arguments(tmp_path) -> list[str]:
    """Return the arguments of the script's calls."""
    return (tmp_path / "ran").read_text().splitlines()


def compiler_path() -> str:
    (path,) = compiler.find()
    return path


def test_cxx_is_taken(source, tmp_path, script, monkeypatch):
    own = script("own-compiler", compiler_path())
    monkeypatch.setenv("CXX", str(own))
    assert compiler.load(source).answer() == 42
    assert arguments(tmp_path)[0] == compiler.FLAGS[0]


def test_cxx_may_be_a_launcher_with_a_compiler_and_arguments(source, tmp_path, script, monkeypatch):
    """CXX may hold a command, as for build tools: CXX="ccache g++ -O2"."""
    name, directory = os.path.basename(compiler_path()), os.path.dirname(compiler_path())
    script("bin/launcher", "env")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), directory, os.environ["PATH"]]))
    monkeypatch.setenv("CXX", f"launcher {name} -O2")
    assert compiler.find() == [str(tmp_path / "bin" / "launcher"), name, "-O2"]
    assert compiler.load(source).answer() == 42
    assert arguments(tmp_path)[:2] == [name, "-O2"]


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("{}", []),
        ("'{}'", []),
        ('"{}"', []),
        ("'{}' -O1", ["-O1"]),
        ('"{}" -O1 "-I two words"', ["-O1", "-I two words"]),
    ],
)
def test_a_path_with_spaces(source, tmp_path, script, monkeypatch, written, options):
    own = script("two words/own compiler", compiler_path())
    monkeypatch.setenv("CXX", written.format(own))
    assert compiler.find() == [str(own), *options]
    assert compiler.load(source).answer() == 42
    assert arguments(tmp_path)[: len(options)] == options


@pytest.mark.parametrize("empty", ["", " ", "\t\n"])
def test_an_empty_cxx_is_none(monkeypatch, empty):
    monkeypatch.delenv("CXX", raising=False)
    expected = compiler.find()
    monkeypatch.setenv("CXX", empty)
    assert compiler.find() == expected


@pytest.mark.parametrize("value", ["g++ 'unclosed", '"', "g++ -O2 \\"])
def test_quotes_that_do_not_match_are_named(monkeypatch, value):
    monkeypatch.setenv("CXX", value)
    with pytest.raises(
        RuntimeError, match=r"CXX=.*cannot be split into words \(No .*\); accepted: .*'ccache g\+\+ -O2'"
    ):
        compiler.find()


@pytest.mark.parametrize("value", ["/no/such/compiler -O2", "no-such-compiler g++", "''", "'' g++"])
def test_the_first_word_must_be_there(monkeypatch, value):
    monkeypatch.setenv("CXX", value)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler \([^)]*\) is on the PATH"):
        compiler.find()


def test_arguments_in_cxx_make_another_library(source, runs, monkeypatch):
    compiler.load(source)
    monkeypatch.setenv("CXX", f"{compiler_path()} -DTHREADS=2")
    compiler.load(source)
    compiler.load(source)
    assert len(runs) == 2
    assert len(list(compiler.folder().glob("*.so"))) == 2
    assert "-DTHREADS=2" in runs[1] and "-DTHREADS=2" not in runs[0]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_sanitizers_are_built_by_arguments_in_cxx(source, runs, monkeypatch):
    """tests/fuzz/test_sanitizers.py builds the kernels this way."""
    monkeypatch.setenv("CXX", "g++ -fsanitize=undefined -fno-sanitize-recover=undefined -g")
    source.write_text(SOURCE.replace("return 40", "volatile int shift = threads - 2; return (40 << shift)"))
    assert compiler.load(source).answer() == 42
    libraries = list(compiler.folder().glob("*.so"))
    assert len(libraries) == 1 and b"__ubsan_handle" in libraries[0].read_bytes()


def test_a_cache_that_cannot_be_written(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = compiler.folder()
    assert folder.is_dir() and os.access(folder, os.W_OK) and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert compiler.load(source).answer() == 42
