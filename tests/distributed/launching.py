"""Start the scripts of this folder with torchrun, as users start theirs: many runs in one launch, each with a limit.

`launch` and `Launches` are for the tests, `main` for the scripts.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAIT = 60  # seconds for which a rank waits for the others
LIMIT = 100  # seconds that one run may take
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None  # importing it takes seconds; the launches do


# --- for tests --------------------------------------------------------------------------------------------------------


def needs_deepspeed() -> None:
    """Skip a test if the `test` extra is not fully installed."""
    if not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed is not installed: pip install -e '.[test]'")


def launch(script: str, output: Path, runs: Sequence[str], world: int, *options: str) -> None:
    """Launch all runs; after a failure, which writes a file with its error, launch the remaining ones again."""
    remaining = list(runs)
    while remaining:
        stderr = _torchrun([str(HERE / script), str(output), *remaining, *options], world)
        before = remaining
        remaining = [run for run in remaining if not list(output.glob(f"{run.replace('/', '-')}.[je]*"))]
        if remaining == before:
            pytest.fail(f"no run was made or failed:\n{stderr[-3000:]}")


def error_of(output: Path, run: str) -> str | None:
    """Return a run's error, from the rank with the longest one."""
    texts = [file.read_text() for file in output.glob(f"{run.replace('/', '-')}.error*")]
    return max(texts, key=len, default=None)


def _torchrun(arguments: list[str], world: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=1800)[1]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            raise


@dataclass(frozen=True)
class Run:
    """What one run has left."""

    tensors: dict[str, Tensor]
    notes: Any

    def named(self, kind: str) -> dict[str, Tensor]:
        """Return its `weight`s, `exp_avg`s or `last_grad`s, or those of a part (`whole.weight`), by parameter name."""
        return {name.removeprefix(f"{kind}."): t for name, t in self.tensors.items() if name.startswith(f"{kind}.")}


def uses_deepspeed(run: str) -> bool:
    return bool(re.search(r"zero\d|stage\d", run))


class Launches:
    """The launches of a script; the first request for a run of a launch makes all of its runs."""

    def __init__(self, script: str, factory: pytest.TempPathFactory) -> None:
        self.script = script
        self.root = factory.mktemp(script.removesuffix(".py"))

    def get(self, name: str, runs: Sequence[str], world: int, run: str) -> Run:
        """Return the results of one of the runs of a launch."""
        if uses_deepspeed(run):
            needs_deepspeed()
        folder = self.root / name
        if not folder.exists():
            folder.mkdir()
            launch(self.script, folder, [run for run in runs if HAS_DEEPSPEED or not uses_deepspeed(run)], world)
        error = error_of(folder, run)
        assert error is None, error
        file = folder / f"{run.replace('/', '-')}.json"
        tensors = file.with_suffix(".safetensors")
        return Run(load_file(tensors) if tensors.exists() else {}, json.loads(file.read_text()))


# --- for scripts ------------------------------------------------------------------------------------------------------


def main(run: Callable[[str, Path], None]) -> None:
    """Serve `SCRIPT OUTPUT SPEC ...`: call `run(spec, OUTPUT/<spec>)` for each spec.

    The first failure writes OUTPUT/<spec>.error<rank> and ends the launch.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--wait", type=int, default=WAIT)
    parser.add_argument("--limit", type=int, default=LIMIT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["DEEPSPEED_TIMEOUT"] = "1"  # minutes
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.wait))
    freeze_imports()
    for spec in args.runs:
        file = args.output / spec.replace("/", "-")
        error = Path(f"{file}.error{dist.get_rank()}")
        try:
            with at_most(args.limit, error):
                run(spec, file)
        except Exception:
            error.write_text(traceback.format_exc())
            os._exit(1)  # other ranks may hang, at exit as well: torchrun ends them, and launch() starts the rest again
        if spec == args.runs[0]:
            freeze_imports()  # those of the engine
        gc.collect()
    dist.destroy_process_group()


def leave(file: Path, notes: Any, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a run's <file>.json and <file>.safetensors, from the first rank."""
    if dist.get_rank() == 0:
        if tensors is not None:
            save_file({name: value.contiguous().clone() for name, value in tensors.items()}, f"{file}.safetensors")
        Path(f"{file}.json").write_text(json.dumps(notes))


def from_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def freeze_imports() -> None:
    """Take what imports made out of the garbage collector's sight: a third of a second for each collection."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def at_most(seconds: float, error: Path) -> Iterator[None]:
    """End the process after `seconds`, with every thread's traceback written to `error`.

    Some process groups ignore the first one's timeout, and nothing else interrupts a wait within one.
    """

    def end() -> None:
        with error.open("w") as file:
            file.write(f"not done after {seconds} seconds\n")
            file.flush()
            faulthandler.dump_traceback(file)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def import_deepspeed(*, fp16: bool = False) -> Any:
    """Set up DeepSpeed on CPUs without the shared-memory op that it would compile; any other op is an error."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    # Not deepspeed.comm.torch, which is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    OpBuilder.jit_load = _compile_nothing
    if dist.is_initialized():
        deepspeed.init_distributed("gloo")
    if fp16:  # DeepSpeed's kernels need a CPU with fp16 instructions; torch computes in fp16 anywhere
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


def _compile_nothing(builder: Any, verbose: bool = True) -> None:
    raise RuntimeError(f"DeepSpeed would compile its op {builder.name}, which takes a minute")
