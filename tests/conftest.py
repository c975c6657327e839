"""Every test runs offline, seeded and on the CPU."""

from __future__ import annotations

import dataclasses
import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# huggingface_hub and datasets read these at import, so set them before any test module is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several that share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

if TYPE_CHECKING:
    import torch.distributed as dist

# Fixtures import torch themselves: the process that only starts the workers should not wait for it.


@pytest.fixture(scope="session")
def threads() -> int:
    """Return how many torch has before any test runs."""
    import torch

    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def seeded(threads: int) -> None:
    """Seed, and restore the number of threads, which recipes change: it decides how sums are rounded."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(threads)


@pytest.fixture
def foreach(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plain PyTorch take whole lists on the CPU, as it does on accelerators, or one tensor after the other."""
    from mars_hf.kernels import Backend, choose_backend

    def chosen(*args: Any, **options: Any) -> Backend:
        return dataclasses.replace(choose_backend(*args, **options), foreach=request.param)

    monkeypatch.setattr("mars_hf.step.lists.choose_backend", chosen)


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """Take what earlier imports made out of the garbage collector's sight.

    Trainer collects garbage in every run, which took three quarters of a short one: a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """Be the one rank of a process group, which this is."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def pytest_unconfigure() -> None:
    """Let the interpreter end with everything in sight, or Triton's bindings report leaks."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give a run of all tests every core; named files and `--pdb` stay in one process, and `-n` decides if given."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.pluginmanager.hasplugin("xdist"):  # a worker starts none
        return
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if not named and not config.option.usepdb and config.option.numprocesses is None:
        config.option.numprocesses = min(os.cpu_count() or 1, 8)
        config.option.dist = "loadfile"  # files share what their fixtures make
        config.option.loadscopereorder = False  # in the order below


# Files that take a minute or more, the longest first: one that begins last would keep one core busy alone.
LONGEST = (
    "distributed/test_checkpoints.py",
    "distributed/test_parity.py",
    "kernels/test_gpu.py",
    "fuzz/test_edits.py",
    "fuzz/test_sanitizers.py",
    "docs/test_types.py",
    "training/test_converted_weights.py",
    "distributed/test_mesh_parity.py",
    "soak/test_soak.py",
    "recipes/test_resuming.py",
    "recipes/test_pretrain_gpt2.py",
)


def _sort_longest_first(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    tests = Path(__file__).parent
    items.sort(key=lambda item: places.get(item.path.relative_to(tests).as_posix(), len(places)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to run what the default leaves out."""
    if config.option.markexpr == "not slow and not soak":
        terminalreporter.write_line("The slow tests, a quarter of an hour: python -m pytest -m 'slow and not soak'")


# Tests that train, a second or two each: the quick set takes one case of each.
ONE_CASE_EACH = ("tests/training/", "tests/recipes/test_resuming.py", "tests/recipes/test_pretrain_gpt2.py")
ALL_CASES = ("tests/training/test_guard.py",)  # which take milliseconds
# Of these tests the quick set runs one case in N, chosen by a hash of its name.
SAMPLED = {
    "tests/distributed/test_placement.py::test_parts_on_a_mesh": 8,
    "tests/distributed/test_ranks_in_threads.py::test_error_of_one_rank_stops_all": 3,
    "tests/distributed/test_ranks_in_threads.py::test_ranks_agree_on_what_rests": 8,
    "tests/distributed/test_ranks_in_threads.py::test_shared_matrices": 6,
    "tests/kernels/test_gpu.py::test_states_in_8_bits_compile_without_spills": 3,
    "tests/kernels/test_symmetric.py::test_compiles_without_spills": 4,
    "tests/recipes/test_paper_configs.py::test_groups_of_every_optimizer": 2,
    "tests/recipes/test_paper_configs.py::test_paper_configs_averaged_gradients": 3,
    "tests/step/test_coded.py::test_formulas_in_8_bits": 4,
    "tests/step/test_exact.py::test_exact_steps": 3,
    "tests/step/test_formulas.py::test_autocast_and_metrics_change_no_bit": 3,
    "tests/step/test_formulas.py::test_small_steps_add_up": 3,
    "tests/step/test_formulas.py::test_step_is_the_formula": 4,
    "tests/step/test_last_norms.py::test_changed_last_gradients": 3,
    "tests/step/test_memory.py::test_bytes_held": 2,
    "tests/step/test_resting.py::test_forty_idle_steps": 6,
}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `-m "not slow"` leaves out: soaks, and most cases of tests that train or have many. Sort files."""
    seen = set()
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.slow)
        name, bracket, _ = item.nodeid.partition("[")
        trains = name.startswith(ONE_CASE_EACH) and not name.startswith(ALL_CASES)
        if bracket and trains and not item.get_closest_marker("slow"):
            if name in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(name)
        if zlib.crc32(item.nodeid.encode()) % SAMPLED.get(name, 1):
            item.add_marker(pytest.mark.slow)
    _sort_longest_first(items)
