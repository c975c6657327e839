"""What only the compiled CPU kernels have, and how they are compiled; `test_contract.py` compares their results."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from contract import STEP, buffers_of, problem
from helpers import needs_compiler

from mars_hf import kernels
from mars_hf.arithmetic import eight_bits, formulas
from mars_hf.arithmetic.formulas import CODES
from mars_hf.kernels import cpu as compiled

ROW = 4096  # elements that have one partial sum
SIZES = (0, 1, 2, 7, 4095, 4096, 4097, 2 * ROW - 1, 2 * ROW, 2 * ROW + 1, 5 * ROW + 777, 100_003)

pytestmark = needs_compiler


def run(lists, **settings):
    """Run `update` on the lists of a problem."""
    count = len(lists["params"])
    settings = {**STEP, "arithmetic": "adamw", "steps": [1.0] * count, "lr": 0.01, **settings}
    compiled.update(lists["params"], lists["gradients"], buffers_of(lists), formulas.Options(**settings))
    return [tensor for tensors in lists.values() for tensor in tensors]


def convert(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Convert values by the momentum rule, which can copy; return the first moment."""
    average = torch.zeros(len(values))
    numbers = {**STEP, "beta1": 0.0, "arithmetic": "momentum", "steps": [1.0], "lr": 0.0}
    compiled.update([target], [values], {"exp_avg": [average]}, formulas.Options(**numbers))
    return average


def test_rounding_to_16_bits_is_that_of_pytorch():
    """Of numbers of all sizes, midpoints between neighbours, the largest numbers, inf and NaN; all 16 bits are read."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    wide = torch.empty(len(every))
    convert(every, wide)
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    middles = (wide[:-1].double() + wide[1:].double()).float() / 2
    values = torch.cat([any_bits, wide, middles, torch.tensor([3.3961e38, torch.inf])])
    target = torch.empty(len(values), dtype=torch.bfloat16)
    average = convert(values, target)
    torch.testing.assert_close(target, average.bfloat16(), rtol=0, atol=0, equal_nan=True)
    finite = values.isfinite()
    assert torch.equal(average[finite], values[finite])


@pytest.mark.slow
def test_threads_change_no_bit():
    sizes, results = (1_300_003, 5, 0, 700_000, 100_003, 4096, 900_001), []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)  # conftest.py restores it
        lists = problem(sizes, "cpu")
        total = compiled.sums(lists["gradients"], lists["last_grad"])
        results.append([total, *run(lists, grad_scale=torch.tensor(0.5))])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_above_their_bound_are_clipped(known, threads, monkeypatch):
    """Of tensors in several waves, those whose <g, g> is at most their bound take the usual update, however long c is.

    Others take the one by factors of their <c, c>, to the bit; a bound below zero, or a gradient with NaN, is no bound.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = [3, 700_000, 0, 5000, 600_000, 9000, 1_100_000, 17, 8, 20_000, 6000]
    lists, updated = (problem(sizes, "cpu", without=("max_exp_avg_sq",), gradients=torch.bfloat16) for _ in range(2))
    for one in (lists, updated):
        one["gradients"][5][4321] = torch.nan
        one["gradients"][10].mul_(1e-6)  # short enough
        one["last_grad"][10].mul_(1e-6)
    scale = torch.tensor(-0.5)
    squares = torch.stack([(0.5 * gradient.double()).square().sum() for gradient in lists["gradients"]])
    of_square = torch.tensor([1.01, 0.99, 1, 1.01, 1.01, 1, -1, 0, -1, -1, 0], dtype=torch.float64)
    above, threshold = [1, 5, 6, 7, 8, 9, 10], 1.7
    corrected = compiled.sums(lists["gradients"], lists["last_grad"], grad_scale=scale, k=STEP["k"])[3]
    assert (corrected[[1, 3, 4, 6, 7, 8, 9]] > threshold**2).all() and corrected[10] < threshold**2
    factors = torch.ones(len(sizes), dtype=torch.float64)
    factors[above] = formulas.clip_factors(corrected[above], threshold)
    expected = run(updated, grad_scale=scale, factors=factors)
    settings = {
        **STEP,
        "arithmetic": "adamw",
        "steps": [1.0] * len(sizes),
        "lr": 0.01,
        "grad_scale": scale,
        "clip_bounds": (squares * of_square).tolist(),
        "clip_threshold": threshold,
    }
    options = formulas.Options(**settings, squares=squares if known else None)
    taken = compiled.update(lists["params"], lists["gradients"], buffers_of(lists), options)
    torch.testing.assert_close(taken, squares, rtol=1e-6, atol=0, equal_nan=True)
    for found, wanted in zip([tensor for tensors in lists.values() for tensor in tensors], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_no_thread_updates_before_all_sums_are_there(monkeypatch):
    """The first thread's rows are done early: the second one's overflow float32, and are summed twice."""
    size = 2**20
    lists = problem([size], "cpu")
    small, large = (torch.full((size,), 1e-3) for _ in range(2))
    large[size // 2 :] = 1e30
    for bound in 3 * [1e3, 0.0, -1.0]:
        for gradient in (small, large):  # memory that is reused holds small sums
            alone, together = ({name: list(map(torch.clone, lists[name])) for name in lists} for _ in range(2))
            ends = []
            for one, threads in ((alone, 1), (together, 2)):
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                one["gradients"] = [gradient]
                ends.append(run(one, clip_bounds=[bound], clip_threshold=2.0))
            assert all(map(torch.equal, *ends))


def test_default_device_changes_nothing():
    results = []
    for device in ("cpu", "meta"):
        lists = problem((5000, 3), "cpu")
        with torch.device(device):
            total = compiled.sums(lists["gradients"], lists["last_grad"])
            results.append([total, *run(lists)])
    assert all(map(torch.equal, *results))


LARGE = 2**31 + 5 * ROW + 7


@pytest.mark.slow
def test_sums_beyond_31_bits():
    """Memory that is only read costs nothing: all its pages map to one page of zeros."""
    memory = mmap.mmap(-1, 4 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    g = torch.frombuffer(memory, dtype=torch.float32)
    g[-3:] = 2.0
    g[2**31 - 1 : 2**31 + 1] = 3.0
    assert compiled.sums([g], [])[0].tolist() == [3 * 4 + 2 * 9]
    assert compiled.sums([g, g[-3:]], [g, g[-3:]], k=1.0).T.tolist() == [[30.0] * 4, [12.0] * 4]


@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 12 * 2**30, reason="needs 9 GB of memory")
def test_update_beyond_31_bits():
    memory = mmap.mmap(-1, 2 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    g = torch.frombuffer(memory, dtype=torch.bfloat16)
    marked = [0, 2**31 - 1, 2**31, 2**31 + ROW, LARGE - 1]
    g[marked] = 1.0
    param, average = (torch.zeros(LARGE, dtype=torch.bfloat16) for _ in range(2))
    numbers = {**STEP, "weight_decay": 0.0, "arithmetic": "lion", "steps": [1.0], "lr": 0.5}
    compiled.update([param], [g], {"exp_avg": [average]}, formulas.Options(**numbers))
    assert torch.nonzero(param).flatten().tolist() == marked
    assert (param[marked] == -0.5).all()


def test_weights_of_24_bits_are_those_of_pytorch():
    """Of all sizes, ties, infinities and NaN, and zeros that somebody has written over weights; with what they lack."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**15), 2**15, (60_000,), generator=generator).to(torch.int16)
    words[:6] = torch.tensor([0x7F80, -0x80, 0x7FFF, -1, 0, -(2**15)])  # infinities, NaN, zeros
    param = words.view(torch.bfloat16)
    lost = torch.randint(-128, 128, (len(words),), generator=generator).to(torch.int8)
    gradient = torch.ones(len(words))
    gradient[6:10] = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    for lr in (0.0, 1.7e-4, 3.0):
        start = eight_bits.join_weight(param, lost)
        expected, expected_lost = eight_bits.split_weight(start - lr * gradient.sign().where(gradient == 1, gradient))
        found, found_lost = param.clone(), lost.clone()
        rounding = formulas.Rounding(kind="kahan", compensations=[found_lost])
        numbers = {**STEP, "weight_decay": 0.0, "arithmetic": "lion", "steps": [1.0], "lr": lr, "rounding": rounding}
        compiled.update([found], [gradient], {"exp_avg": [torch.zeros(len(words))]}, formulas.Options(**numbers))
        assert torch.equal(found_lost, expected_lost)
        assert torch.equal(found.view(torch.int16)[~found.isnan()], expected.view(torch.int16)[~expected.isnan()])
        assert torch.equal(found.isnan(), expected.isnan())


def test_failure_is_logged_once(monkeypatch, caplog):
    def failing(source):
        raise RuntimeError("no g++")

    compiled._library.cache_clear()
    monkeypatch.setattr(compiled, "load", failing)
    try:
        with caplog.at_level(logging.WARNING):
            assert not any(compiled.is_available(torch.device("cpu")) for _ in range(2))
        assert len(caplog.records) == 1 and "no g++" in caplog.text and "slower" in caplog.text
    finally:
        compiled._library.cache_clear()


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_take_plain_pytorch(monkeypatch, caplog, system):
    """Apple's clang knows no -fopenmp: whoever reads the message should not look for another compiler."""
    monkeypatch.setattr(compiled.sys, "platform", system)
    compiled._library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="the compiled kernels are made for Linux; elsewhere plain PyTorch"):
            compiled.load(compiled.SOURCE)
        with caplog.at_level(logging.WARNING):
            assert not compiled.is_available(torch.device("cpu"))
        assert "made for Linux" in caplog.text and "install" not in caplog.text
    finally:
        compiled._library.cache_clear()


def test_enums_of_the_source():
    source = compiled.SOURCE.read_text()
    assert f"enum Rule {{ {', '.join(compiled.ARITHMETICS).upper()} }};" in source
    types = [str(dtype).removeprefix("torch.").upper() for dtype in compiled.TYPES]
    assert f"enum Type {{ ABSENT, {', '.join(types)} }};" in source and list(compiled.TYPES.values()) == [1, 2, 3, 4, 5]


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("arithmetic", compiled.ARITHMETICS)
def test_states_in_8_bits_without_avx2(monkeypatch, arithmetic):
    """The vectors of the compiler stand for those of the processor."""
    monkeypatch.setattr(compiled, "X86_FLAGS", {})
    library = functools.cache(compiled._library.__wrapped__)
    monkeypatch.setattr(compiled, "_library", library)
    states = ("exp_avg", "exp_avg_sq", "last_grad") if arithmetic == "adamw" else ("exp_avg", "last_grad")
    dtypes = {"params": torch.float32, "grads": torch.float32, **{name: CODES[name] for name in states}}
    check = kernels.compare_with_plain.__wrapped__
    backend = kernels.Backend(compiled.NAME, compiled)
    assert check(backend, torch.device("cpu"), tuple(dtypes.items()), arithmetic, "corrected") == ""


# --- compiling --------------------------------------------------------------------------------------------------------

SOURCE = """
extern "C" int answer() {
    int threads = 0;
#pragma omp parallel num_threads(2) reduction(+ : threads)
    threads += 1;
    return 40 + threads;
}
"""


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
    commands, original = [], compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda command: (commands.append(command), original(command)))
    return commands


def test_compiles_once_into_a_private_folder(cache, source, runs):
    umask = os.umask(0)
    try:
        assert [compiled.load(source).answer() for _ in range(2)] == [42, 42]
    finally:
        os.umask(umask)
    assert len(runs) == len(list(cache.iterdir())) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not list(cache.parents[1].glob("tmp/*"))


def test_key_covers_source_and_command(cache, source, runs, monkeypatch):
    compiled.load(source)
    monkeypatch.setenv("CXX", f"{compiled.find_compiler()[0]} -DTHREADS=2")
    assert compiled.load(source).answer() == 42
    source.write_text(SOURCE.replace("40", "50"))
    assert compiled.load(source).answer() == 52
    assert len(runs) == len(list(cache.iterdir())) == 3


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_compiler_of_c(cache, monkeypatch):
    """PEFT's BOFT sets CXX=gcc in the process that uses it; gcc alone links no C++ library."""
    monkeypatch.setenv("CXX", "gcc")
    library = compiled.load(compiled.SOURCE)
    dynamic = subprocess.run(["readelf", "-d", library._name], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in dynamic


def test_threads_at_once(cache, source):
    with ThreadPoolExecutor(2) as pool:
        assert [library.answer() for library in pool.map(compiled.load, [source, source])] == [42, 42]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_damaged_library_is_compiled_again(cache, source, runs, monkeypatch, content):
    def refuse(path: str) -> None:
        raise OSError

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(ctypes, "CDLL", refuse)  # a loaded library cannot be written to
        compiled.load(source)
    (library,) = cache.iterdir()
    library.write_bytes(content)
    assert compiled.load(source).answer() == 42
    assert len(runs) == 2 and library.stat().st_size > 1000


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
    assert [compiled.load(source).answer() for _ in range(2)] == [42, 42]
    assert len(runs) == 2  # nothing was kept, nothing taken from there
    monkeypatch.undo()
    assert not [path for path in cache.parents[1].rglob("*") if "answer_" in path.name]
    assert "cannot be cached" in caplog.messages[0] and "XDG_CACHE_HOME" in caplog.messages[0]


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("/no/such/compiler", r"no C\+\+ compiler \(/no/such/compiler\) is on the PATH"),
        ("g++ 'unclosed", r"CXX=.* is not a command \(No closing quotation\)"),
        ("false", r"false -std.*failed with status 1"),
        ("sh -c 'echo no_such_thing; exit 3'", r"failed with status 3: .*no_such_thing"),
        ("sh -c 'exec sleep 9'", "the compiler cannot be run: .* timed out"),
        (None, r"no C\+\+ compiler \(g\+\+, clang\+\+, c\+\+\).*set CXX"),
    ],
)
def test_broken_compiler(cache, source, monkeypatch, cxx, message):
    if cxx is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CXX", cxx)
    monkeypatch.setattr(compiled, "TIMEOUT", 0.5)
    with pytest.raises(RuntimeError, match=message):
        compiled.load(source)
    assert not list(cache.glob("*"))
