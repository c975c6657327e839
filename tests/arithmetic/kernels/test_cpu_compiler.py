"""C++ files compile once, and errors name a compiler that is missing or fails."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

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


def kept(source: Path) -> list[Path]:
    """Return what the cache holds; all of it is libraries."""
    found = sorted(source.with_name("cache").glob("mars_hf/*"))
    assert all(re.fullmatch(r"answer_[0-9a-f]{16}_[0-9a-f]{64}\.so", path.name) for path in found), found
    return found


@pytest.fixture
def runs(monkeypatch):
    """Record the compiler's runs."""
    seen, original = [], compiler._run
    monkeypatch.setattr(compiler, "_run", lambda *args: (seen.append(args[0]), original(*args)))
    return seen


def test_a_library_is_made_once(source, runs):
    assert compiler.load(source).answer() == 42
    assert compiler.load(source).answer() == 42
    assert len(runs) == 1
    assert len(kept(source)) == 1


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
@pytest.mark.multiprocess
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
    assert len(kept(source)) == 1


def test_what_the_compiler_says_is_passed_on(source):
    source.write_text("int answer() { return no_such_thing; }")
    with pytest.raises(RuntimeError, match=r"(?s)status 1: .*no_such_thing"):
        compiler.load(source)
    assert kept(source) == []


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
    assert len(kept(source)) == 2
    assert "-DTHREADS=2" in runs[1] and "-DTHREADS=2" not in runs[0]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_sanitizers_are_built_by_arguments_in_cxx(source, runs, monkeypatch):
    """tests/fuzz/test_sanitizers.py builds the kernels this way."""
    monkeypatch.setenv("CXX", "g++ -fsanitize=undefined -fno-sanitize-recover=undefined -g")
    source.write_text(SOURCE.replace("return 40", "volatile int shift = threads - 2; return (40 << shift)"))
    assert compiler.load(source).answer() == 42
    libraries = kept(source)
    assert len(libraries) == 1 and b"__ubsan_handle" in libraries[0].read_bytes()


# --- compilers that misbehave ----------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fake(tmp_path: Path, monkeypatch, body: str) -> Path:
    """Make CXX a script."""
    path = tmp_path / "fake"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_a_compiler_that_hangs_is_ended_with_its_children(source, tmp_path, monkeypatch):
    monkeypatch.setenv("MARS_HF_COMPILE_TIMEOUT", "1")
    fake(tmp_path, monkeypatch, f"sleep 300 &\necho $! $$ > {tmp_path}/pids\nwait")
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        compiler.load(source)
    assert time.monotonic() - start < 20
    line = str(error.value)
    assert "\n" not in line and f"{tmp_path}/fake -std=c++17" in line and str(source) in line
    assert "did not end within 1 seconds" in line and "set CXX" in line and "MARS_HF_COMPILE_TIMEOUT=600" in line
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    for _ in range(100):
        if not any(map(alive, pids)):
            break
        time.sleep(0.05)
    assert len(pids) == 2 and not any(map(alive, pids))
    assert kept(source) == []


def test_a_compiler_has_two_minutes(monkeypatch):
    monkeypatch.delenv("MARS_HF_COMPILE_TIMEOUT", raising=False)
    assert compiler._patience() == 120
    monkeypatch.setenv("MARS_HF_COMPILE_TIMEOUT", " 7.5 ")
    assert compiler._patience() == 7.5


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "2m"])
def test_a_time_that_is_none_is_named(source, monkeypatch, value):
    monkeypatch.setenv("MARS_HF_COMPILE_TIMEOUT", value)
    with pytest.raises(RuntimeError, match=f"MARS_HF_COMPILE_TIMEOUT='{value}' is no time; accepted: seconds above 0"):
        compiler.load(source)


def test_a_keyboard_interrupt_ends_the_compiler(source, tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pids\nsleep 300")

    def wait(process, timeout=None):
        while timeout is not None and not (tmp_path / "pids").exists():
            time.sleep(0.01)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        compiler.load(source)
    assert not alive(int((tmp_path / "pids").read_text()))
    assert kept(source) == []


def test_a_server_that_the_compiler_starts_is_not_waited_for(source, tmp_path, monkeypatch):
    """As sccache does: it holds what it was given as standard output."""
    fake(tmp_path, monkeypatch, f'sleep 60 &\necho $! > {tmp_path}/pids\nexec {compiler_path()} "$@"')
    start = time.monotonic()
    try:
        assert compiler.load(source).answer() == 42
        assert time.monotonic() - start < 30
        assert alive(int((tmp_path / "pids").read_text()))
    finally:
        os.kill(int((tmp_path / "pids").read_text()), 9)


def test_a_compiler_that_reads_gets_nothing(source, tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, f'cat\nexec {compiler_path()} "$@"')
    assert compiler.load(source).answer() == 42


def test_what_is_said_in_another_encoding_is_one_line(source, tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, r"printf 'Datei \344\366\374\377 fehlt\nzweite Zeile\n' >&2; exit 3")
    with pytest.raises(RuntimeError, match=r"failed with status 3: Datei \ufffd+ fehlt zweite Zeile$"):
        compiler.load(source)


@pytest.mark.slow
def test_the_c_locale(source, tmp_path):
    """Nothing depends on what Python takes for the encoding."""
    source.write_text(f"// \N{SNOWMAN}\n{SOURCE}", encoding="utf-8")
    code = (
        "import sys, pathlib, mars_hf.arithmetic.kernels.cpu_compiler as c; "
        "print(sys.flags.utf8_mode, c.load(pathlib.Path(sys.argv[1])).answer())"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    made = subprocess.run([sys.executable, "-c", code, str(source)], env=environment, capture_output=True, text=True)
    assert made.stdout.strip() == "0 42", made.stderr


def test_a_library_that_is_not_written(source, monkeypatch):
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(RuntimeError, match="ended well but wrote no library"):
        compiler.load(source)


def test_a_library_that_cannot_be_loaded_is_not_kept(source, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fake(tmp_path, monkeypatch, 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"')
    with pytest.raises(RuntimeError, match=r"no folder can keep and run a compiled library.*set XDG_CACHE_HOME"):
        compiler.load(source)
    assert kept(source) == []


def test_temporary_files_of_a_killed_compiler_go_too(source, tmp_path, monkeypatch):
    """Compilers write them where TMPDIR says, and one that is killed leaves them."""
    monkeypatch.setenv("MARS_HF_COMPILE_TIMEOUT", "1")
    fake(tmp_path, monkeypatch, f'echo "$TMPDIR" > {tmp_path}/place\necho x > "$TMPDIR/cc1.s"\nsleep 300')
    with pytest.raises(RuntimeError, match="did not end"):
        compiler.load(source)
    place = Path((tmp_path / "place").read_text().strip())
    assert place.parent == tmp_path / "cache" / "mars_hf" and not place.exists()
