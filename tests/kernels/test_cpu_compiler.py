"""The library is cached in a private folder; without one it is compiled for the process, without a compiler refused."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import needs_compiler

from mars_hf.kernels import cpu_compiler as compiler

SOURCE = """
extern "C" int answer() {
    int threads = 0;
#pragma omp parallel num_threads(2) reduction(+ : threads)
    threads += 1;
    return 40 + threads;
}
"""

pytestmark = needs_compiler


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Return the folder of the libraries, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache" / "mars_hf"


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def runs(monkeypatch) -> list[list[str]]:
    """Record the compiler's commands."""
    commands, original = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda command: (commands.append(command), original(command)))
    return commands


def test_compiles_once_into_a_private_folder(cache, source, runs):
    umask = os.umask(0)
    try:
        assert [compiler.load(source).answer() for _ in range(2)] == [42, 42]
    finally:
        os.umask(umask)
    assert len(runs) == len(list(cache.iterdir())) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not list(cache.parents[1].glob("tmp/*"))


def test_key_covers_source_and_command(cache, source, runs, monkeypatch):
    compiler.load(source)
    monkeypatch.setenv("CXX", f"{compiler.find_compiler()[0]} -DTHREADS=2")
    assert compiler.load(source).answer() == 42
    source.write_text(SOURCE.replace("40", "50"))
    assert compiler.load(source).answer() == 52
    assert len(runs) == len(list(cache.iterdir())) == 3


def start(source: Path) -> subprocess.Popen:
    """Load the library in another process, which prints the answer."""
    code = "import sys, pathlib, mars_hf.kernels.cpu_compiler as c;print(c.load(pathlib.Path(sys.argv[1])).answer())"
    return subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True)


def test_processes_at_once(cache, source):
    processes = [start(source), start(source)]
    assert [process.communicate()[0].strip() for process in processes] == ["42", "42"]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_damaged_library_is_compiled_again(cache, source, runs, content):
    start(source).communicate()
    (library,) = cache.iterdir()
    library.write_bytes(content)
    assert compiler.load(source).answer() == 42
    assert len(runs) == 1 and library.stat().st_size > 1000


def symlink(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def full(*_, **__):
    raise OSError(28, "No space left on device")


BROKEN_FOLDERS = {
    "file": lambda folder, _: folder.write_text("no folder"),
    "symlink": lambda folder, _: symlink(folder),
    "others can write": lambda folder, _: (folder.mkdir(), folder.chmod(0o777)),
    "others can read": lambda folder, _: (folder.mkdir(), folder.chmod(0o755)),
    "another user's": lambda folder, patch: patch.setattr(os, "getuid", lambda: folder.parent.stat().st_uid + 1),
    "full": lambda folder, patch: patch.setattr(shutil, "copyfile", full),
    "unwritable": lambda folder, patch: patch.setattr(Path, "mkdir", full),
}


@pytest.mark.parametrize("case", BROKEN_FOLDERS)
def test_compiles_for_the_process_without_a_private_folder(cache, source, runs, monkeypatch, caplog, case):
    cache.parent.mkdir()
    BROKEN_FOLDERS[case](cache, monkeypatch)
    assert [compiler.load(source).answer() for _ in range(2)] == [42, 42]
    assert len(runs) == 2  # nothing was kept, nothing taken from there
    monkeypatch.undo()
    assert not [path for path in cache.parents[1].rglob("*") if "answer_" in path.name]
    assert "cannot be cached" in caplog.messages[0] and "XDG_CACHE_HOME" in caplog.messages[0]


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("/no/such/compiler", r"no C\+\+ compiler \(/no/such/compiler\) is on the PATH"),
        ("g++ 'unclosed", r"CXX=.* is no command \(No closing quotation\)"),
        ("false", r"false -std.*failed with status 1"),
        ("sh -c 'exec sleep 9'", "the compiler cannot be run: .* timed out"),
    ],
)
def test_broken_compiler(cache, source, monkeypatch, cxx, message):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setattr(compiler, "TIMEOUT", 0.5)
    with pytest.raises(RuntimeError, match=message):
        compiler.load(source)
    assert not list(cache.glob("*"))


def test_compiler_output_is_in_the_error(cache, source):
    source.write_text("int answer() { return no_such_thing; }")
    with pytest.raises(RuntimeError, match=r"failed with status 1: .*no_such_thing"):
        compiler.load(source)


def test_no_compiler_on_the_path(cache, source, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler \(g\+\+, clang\+\+, c\+\+\).*set CXX"):
        compiler.load(source)
