"""Only this user's own, whole libraries are loaded; damage mends itself; killed compiles leave nothing."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import needs_compiler

from mars_hf.arithmetic.kernels import cpu_compiler as compiler
from mars_hf.arithmetic.kernels import library_cache as cache

SOURCE = 'extern "C" int answer() { return 42; }'

pytestmark = needs_compiler


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Return the folder of the libraries, which is not there yet; nothing of the machine's is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    cache._say_once.cache_clear()
    return tmp_path / "cache" / "mars_hf"


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def runs(monkeypatch) -> list:
    """Record the compiler's runs."""
    seen, original = [], compiler._run
    monkeypatch.setattr(compiler, "_run", lambda *args: (seen.append(args), original(*args)))
    return seen


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def other(tmp_path: Path) -> Path:
    """Return the folder that is used if the cache is not."""
    return tmp_path / "temporary" / f"mars_hf-{os.getuid()}"


@pytest.fixture
def planted(tmp_path, source) -> Path:
    """Return a library that answers otherwise, as an attacker would plant it."""
    evil = tmp_path / "evil.cpp"
    evil.write_text(SOURCE.replace("42", "666"))
    subprocess.run([*compiler.find(), "-shared", "-fPIC", str(evil), "-o", str(tmp_path / "evil.so")], check=True)
    (tmp_path / "evil.so").chmod(0o700)
    return tmp_path / "evil.so"


def name_of(library: Path, file: Path) -> str:
    """Return the name under which a file would pass for the library of the same key."""
    return f"{library.name.rpartition('_')[0]}_{hashlib.sha256(file.read_bytes()).hexdigest()}.so"


# --- private ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_folder_and_library_are_private(place, source, mask):
    before = os.umask(mask)
    try:
        assert compiler.load(source).answer() == 42
    finally:
        os.umask(before)
    assert mode(place) == mode(place.parent) == mode(only(place)) == 0o700


def test_the_name_holds_the_sha256_of_the_content(place, source):
    compiler.load(source)
    assert only(place).name == name_of(only(place), only(place))


@pytest.mark.parametrize("bits", [0o770, 0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_not_used(place, source, tmp_path, bits, planted, runs, caplog):
    compiler.load(source)
    planted.rename(place / name_of(only(place), planted))
    only_ours = [path for path in place.iterdir() if "evil" not in path.name]
    place.chmod(bits)
    assert compiler.load(source).answer() == 42
    assert compiler.load(source).answer() == 42
    assert len(runs) == 2  # kept in the other folder
    assert mode(other(tmp_path)) == 0o700 and len(list(other(tmp_path).iterdir())) == 1
    (line,) = caplog.messages
    assert f"{place} are not trusted: its mode {bits:o} lets others write it" in line and "set XDG_CACHE_HOME" in line
    assert sorted(place.iterdir()) == sorted(only_ours)


def owned_by_another(path: Path, monkeypatch) -> None:
    """Let a file or folder seem another user's; only root could give it away."""
    original = os.fstat

    def fstat(descriptor):
        found = original(descriptor)
        if not path.exists() or not os.path.samestat(found, path.stat()):
            return found
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))

    monkeypatch.setattr(os, "fstat", fstat)


def test_a_folder_of_another_user_is_not_used(place, source, tmp_path, monkeypatch, runs, caplog):
    compiler.load(source)
    owned_by_another(place, monkeypatch)
    assert compiler.load(source).answer() == 42
    assert len(runs) == 2 and only(other(tmp_path))
    (line,) = caplog.messages
    assert f"are not trusted: it belongs to user {os.getuid() + 1}, not to {os.getuid()}" in line


def test_a_library_of_another_user_is_made_again(place, source, monkeypatch, runs, caplog, planted):
    compiler.load(source)
    library = only(place)
    library.unlink()
    planted = planted.rename(place / name_of(library, planted))
    owned_by_another(planted, monkeypatch)
    assert compiler.load(source).answer() == 42
    assert len(runs) == 2 and only(place) == library
    (line,) = caplog.messages
    assert f"{planted} is not trusted: it belongs to user" in line and "made again" in line


@pytest.mark.parametrize("bits", [0o770, 0o707])
def test_a_library_that_others_can_write_is_made_again(place, source, runs, caplog, planted, bits):
    compiler.load(source)
    library = only(place)
    library.unlink()
    planted = planted.rename(place / name_of(library, planted))
    planted.chmod(bits)
    assert compiler.load(source).answer() == 42
    assert len(runs) == 2 and only(place) == library and mode(library) == 0o700
    assert f"is not trusted: its mode {bits:o} lets others write it" in caplog.text


def test_a_library_in_a_place_of_temporary_files_that_another_has_taken(place, source, tmp_path, runs, caplog):
    """The last resort is a folder for one process, which goes with it."""
    place.parent.write_text("no folder")
    other(tmp_path).mkdir()
    other(tmp_path).chmod(0o777)
    for count in (1, 2):
        assert compiler.load(source).answer() == 42
        assert len(runs) == count
    assert list(other(tmp_path).iterdir()) == []
    assert list((tmp_path / "temporary").iterdir()) == [other(tmp_path)]
    assert len(caplog.messages) == 2


def test_links_to_elsewhere(place, source, tmp_path, monkeypatch, runs, planted):
    """A user may move the cache to a larger disk; links of others are not followed, nor links to libraries."""
    place.parent.mkdir()
    (tmp_path / "large").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "large")
    assert compiler.load(source).answer() == 42
    library = only(tmp_path / "large")
    library.unlink()
    (place / name_of(library, planted)).symlink_to(planted)
    assert compiler.load(source).answer() == 42
    assert len(runs) == 2 and only(tmp_path / "large") == library and not library.is_symlink() and planted.exists()
    original = Path.lstat

    def lstat(path):
        found = original(path)
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:])) if path == place else found

    monkeypatch.setattr(Path, "lstat", lstat)
    assert list(cache.existing_folders()) == []


def test_a_library_that_is_exchanged_after_its_check_is_not_loaded(place, source, planted, monkeypatch):
    """What is loaded is what was hashed."""
    compiler.load(source)
    library = only(place)
    original = cache._load

    def exchanged(descriptor: int, path: Path) -> ctypes.CDLL:
        planted.rename(path)
        return original(descriptor, path)

    monkeypatch.setattr(cache, "_load", exchanged)
    assert compiler.load(source).answer() == 42
    assert library.read_bytes() != b"" and ctypes.CDLL(str(library)).answer() == 666


def test_a_folder_that_is_exchanged_after_its_check_is_not_read(place, source, planted, monkeypatch, tmp_path):
    compiler.load(source)
    library = only(place)
    original = cache.Folder.load

    def exchanged(folder: cache.Folder, name: str) -> ctypes.CDLL | None:
        place.rename(tmp_path / "aside")
        place.mkdir()
        planted.rename(place / name_of(library, planted))
        return original(folder, name)

    monkeypatch.setattr(cache.Folder, "load", exchanged)
    assert compiler.load(source).answer() == 42


# --- damaged ---------------------------------------------------------------------------------------------------------

DAMAGES = {
    "empty": lambda content: b"",
    "cut to a page": lambda content: content[:4096],
    "cut by a byte": lambda content: content[:-1],
    "garbage": lambda content: b"garbage",
    "one bit": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_made_again(place, source, runs, caplog, damage):
    compiler.load(source)
    library = only(place)
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(DAMAGES[damage](content))
    library.chmod(0o700)
    assert compiler.load(source).answer() == 42
    assert len(runs) == 2 and only(place).read_bytes() == content
    (line,) = caplog.messages
    assert line == f"The compiled library {library} is damaged; it is made again."


def test_garbage_with_a_fitting_name_is_made_again(place, source, runs, caplog, tmp_path):
    compiler.load(source)
    library = only(place)
    library.rename(tmp_path / "whole.so")
    (tmp_path / "garbage").write_bytes(b"\x7fELF garbage")
    garbage = (tmp_path / "garbage").rename(place / name_of(library, tmp_path / "garbage"))
    garbage.chmod(0o700)
    assert compiler.load(source).answer() == 42
    assert len(runs) == 2 and only(place) == library
    assert f"{garbage} cannot be loaded" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_waited_for(place, source, runs, kind):
    compiler.load(source)
    name = only(place).name
    only(place).unlink()
    os.mkfifo(place / name) if kind == "pipe" else (place / name).mkdir()
    assert compiler.load(source).answer() == 42
    assert compiler.load(source).answer() == 42
    assert (place / name).is_file() == (kind == "pipe")
    assert len(runs) == (2 if kind == "pipe" else 3)  # a folder is not removed: another place is tried


@pytest.mark.slow
def test_damaged_kernels_do_not_end_the_process(place, tmp_path):
    """A library that is cut off was mapped all the same, and reading beyond its end is SIGBUS."""
    script = (
        "import sys, pathlib; from mars_hf.arithmetic.kernels import cpu_compiler as c;"
        "print(c.load(pathlib.Path(sys.argv[1])).answer())"
    )
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    compiler.load(source)
    library = only(place)
    os.truncate(library.rename(tmp_path / "moved"), 4096)  # another inode: this process has it mapped
    library.write_bytes((tmp_path / "moved").read_bytes())
    library.chmod(0o700)
    finished = subprocess.run([sys.executable, "-c", script, str(source)], capture_output=True, text=True)
    assert finished.stdout.strip() == "42" and finished.returncode == 0, finished.stderr


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_nothing_is_made_here(place, source, tmp_path, monkeypatch, home):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert compiler.load(source).answer() == 42
    assert list((tmp_path / "here").iterdir()) == []
    assert only(other(tmp_path))


def test_a_home_that_only_the_password_file_knows(place, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path / "home")))
    assert next(cache._places()) == tmp_path / "home" / ".cache" / "mars_hf"


@pytest.mark.parametrize("value", ["relative/cache", "~/cache", "", "."])
def test_a_relative_cache_is_ignored(place, source, tmp_path, monkeypatch, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert compiler.load(source).answer() == 42
    assert list((tmp_path / "here").iterdir()) == []
    assert only(tmp_path / "home" / ".cache" / "mars_hf")


def test_a_cache_that_cannot_be_made(place, source, tmp_path, runs, caplog):
    place.parent.write_text("no folder")
    assert compiler.load(source).answer() == 42
    assert compiler.load(source).answer() == 42
    assert len(runs) == 1 and mode(other(tmp_path)) == 0o700
    (line,) = caplog.messages
    assert f"{place} cannot keep compiled libraries" in line


def test_a_home_that_cannot_be_written(place, source, tmp_path, monkeypatch, runs):
    """Root can write anywhere, so the system's refusal is put in."""
    place.mkdir(parents=True, mode=0o700)
    original = cache.tempfile.mkdtemp

    def mkdtemp(**settings):
        if Path(settings["dir"]) == place:
            raise OSError(30, "Read-only file system", str(place))
        return original(**settings)

    monkeypatch.setattr(cache.tempfile, "mkdtemp", mkdtemp)
    for _ in range(2):
        assert compiler.load(source).answer() == 42
    assert len(runs) == 1 and only(other(tmp_path))


def test_libraries_in_a_home_that_cannot_be_written_are_loaded(place, source, monkeypatch, runs):
    compiler.load(source)
    monkeypatch.setattr(cache.tempfile, "mkdtemp", pytest.fail)
    assert compiler.load(source).answer() == 42
    assert len(runs) == 1


def test_no_place_at_all(place, source, monkeypatch):
    def full(**settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.tempfile, "mkdtemp", full)
    with pytest.raises(RuntimeError, match=r"no folder can keep and run.*No space left.*set XDG_CACHE_HOME"):
        compiler.load(source)


# --- kills -----------------------------------------------------------------------------------------------------------


def test_workplaces_of_the_dead_are_removed_and_those_of_the_living_kept(place, source):
    place.mkdir(parents=True, mode=0o700)
    dead, living, unlocked, new = (place / f"{cache.WORKPLACE}{name}" for name in ("dead", "living", "unlocked", "new"))
    for folder in (dead, living, unlocked, new):
        folder.mkdir()
        (folder / "cc1.s").write_text("half")
    (dead / cache.LOCK).touch()
    (living / cache.LOCK).touch()
    os.utime(unlocked, (time.time() - 3600,) * 2)
    os.utime(living, (time.time() - 10**6,) * 2)
    with (living / cache.LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiler.load(source)
        assert not dead.exists() and not unlocked.exists() and living.exists() and new.exists()
    (only_library,) = place.glob("*.so")
    only_library.unlink()
    compiler.load(source)
    assert not living.exists()


def test_a_workplace_is_swept_by_nobody_while_it_is_used(tmp_path):
    with cache.workplace(tmp_path) as one, cache.workplace(tmp_path) as two:
        assert one.exists() and two.exists() and one != two and mode(one) == 0o700
    assert list(tmp_path.iterdir()) == []


def test_a_workplace_that_is_swept_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    original, swept = fcntl.flock, []

    def flock(descriptor, operation):
        if not swept:
            swept.append(only(tmp_path))
            cache.shutil.rmtree(swept[0])
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.workplace(tmp_path) as path:
        assert path.exists() and path != swept[0]


def test_without_locks_only_the_old_are_removed(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    old, young = tmp_path / f"{cache.WORKPLACE}old", tmp_path / f"{cache.WORKPLACE}young"
    for folder in (old, young):
        folder.mkdir()
        (folder / cache.LOCK).touch()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    with cache.workplace(tmp_path) as path:
        assert path.exists() and young.exists() and not old.exists()


@pytest.mark.parametrize("moment", ["chmod", "fsync", "rename"])
def test_a_kill_while_a_library_is_kept_leaves_none_or_a_whole_one(place, source, moment, monkeypatch, runs):
    """The process ends at each step of keeping, without any of its clean-up."""
    child = os.fork()
    if not child:
        os_kills = lambda *args, **settings: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        monkeypatch.setattr(*((Path, "chmod") if moment == "chmod" else (os, moment)), os_kills)
        compiler.load(source)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not list(place.glob("*.so")) and len(list(place.glob(f"{cache.WORKPLACE}*"))) == 1
    assert compiler.load(source).answer() == 42
    assert only(place).suffix == ".so" and len(runs) == 1


def test_two_processes_at_once(place, source):
    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            os._exit(compiler.load(source).answer())
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [42, 42]
    assert only(place).name == name_of(only(place), only(place))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_kills_at_any_time_leave_nothing(place, source, monkeypatch):
    started = time.monotonic()
    compiler.load(source)
    took = time.monotonic() - started
    for attempt in range(20):
        for library in place.glob("*.so"):
            library.unlink()
        child = os.fork()
        if not child:
            compiler.load(source)
            os._exit(0)
        time.sleep(took * attempt / 15)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    # A kill between a folder and its lock leaves one that is swept when it is old; nobody else makes any now.
    monkeypatch.setattr(cache, "UNLOCKED_AGE", 0)
    # The compilers of the dead end by themselves; until then they write their files.
    deadline = time.monotonic() + 20 + 2 * took
    files: list[Path] = []
    while [file.suffix for file in files] != [".so"] and time.monotonic() < deadline:
        time.sleep(took)
        for library in place.glob("*.so"):
            library.unlink()
        assert compiler.load(source).answer() == 42
        files = list(place.iterdir())
    assert [file.suffix for file in files] == [".so"]
