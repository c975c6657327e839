"""Make runs on several ranks: many runs in one launch, each with a limit.

Ranks are forks of one server, which has imported what takes seconds and has no threads.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, multiprocessing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAIT = 60  # seconds for which a rank waits for the others
LIMIT = 100  # seconds that one run may take
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None  # importing it takes seconds; the server does
DEEPSPEED = ("deepspeed", "torch._inductor.compile_fx")  # with what it imports later
# By the type of the ranks' device. Whatever the server imports could have touched CUDA, which no fork survives.
START = {"cpu": "forkserver", "cuda": "spawn"}
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # offloaded parameters are on the CPU
Function = Callable[[str, Path], None]  # does `run(spec, OUTPUT/<spec>)`, on every rank


# --- for tests --------------------------------------------------------------------------------------------------------


def needs_deepspeed() -> None:
    """Skip a test if the `test` extra is not fully installed."""
    if not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed is not installed: pip install -e '.[test]'")


def launch(
    function: Function, output: Path, runs: Sequence[str], world: int, device: str = "cpu", **limits: int
) -> None:
    """Do all runs; after a failure, which writes a file with its error, launch the remaining ones again."""
    method = START[device]
    if method == "forkserver":
        start_server()
    remaining = list(runs)
    while remaining:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        arguments = (world, store.port, function, output, remaining, limits)
        with mock.patch.dict(os.environ, variables_of(device)):
            ranks = multiprocessing.start_processes(serve, arguments, world, False, True, method)
        reason: Any = None
        try:
            while not ranks.join():
                pass
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
            reason = error
        before = remaining
        remaining = [run for run in remaining if not (file_of(output, run).exists() or error_of(output, run))]
        if remaining == before:
            pytest.fail(f"no run was made or failed: {reason}\n{(output / 'log').read_text()[-3000:]}")


def start_server() -> None:
    """Start the server of forks, whose imports are those of this folder."""
    multiprocessing.set_forkserver_preload([*DEEPSPEED, *(path.stem for path in HERE.glob("test_*.py"))])
    with mock.patch.dict(os.environ, variables_of("cpu")):
        forkserver.ensure_running()


def variables_of(device: str) -> dict[str, str]:
    """Return the environment of ranks."""
    paths = os.pathsep.join(map(str, (ROOT, HERE, HERE.parent, *filter(None, [os.environ.get("PYTHONPATH")]))))
    return {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device}


def error_of(output: Path, run: str) -> str | None:
    """Return a run's error, from the rank with the longest one."""
    texts = [file.read_text() for file in output.glob(f"{run.replace('/', '-')}.error*")]
    return max(filter(None, texts), key=len, default=None)  # a run that goes on has empty files


def file_of(output: Path, run: str) -> Path:
    return output / f"{run.replace('/', '-')}.json"


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
    """The launches of a function; the first request for a run of a launch makes all of its runs."""

    def __init__(self, function: Function, factory: pytest.TempPathFactory, device: str = "cpu") -> None:
        self.function = function
        self.device = device
        self.root = factory.mktemp(function.__module__)

    def get(self, name: str, runs: Sequence[str], world: int, run: str) -> Run:
        """Return the results of one of the runs of a launch."""
        if uses_deepspeed(run):
            needs_deepspeed()
        folder = self.root / name
        if not folder.exists():
            folder.mkdir()
            possible = [run for run in runs if HAS_DEEPSPEED or not uses_deepspeed(run)]
            launch(self.function, folder, possible, world, self.device)
        error = error_of(folder, run)
        assert error is None, error
        file = file_of(folder, run)
        tensors = file.with_suffix(".safetensors")
        return Run(load_file(tensors) if tensors.exists() else {}, json.loads(file.read_text()))


# --- for ranks --------------------------------------------------------------------------------------------------------


def device() -> torch.device:
    """Return the device on which ranks train: the CPU, or the one GPU that they share."""
    return torch.device(os.environ.get("DS_ACCELERATOR", "cpu"))


def serve(
    rank: int, world: int, port: int, function: Function, output: Path, runs: list[str], limits: dict[str, int]
) -> None:
    """Do the runs; the first failure writes OUTPUT/<spec>.error<rank> and ends the launch."""
    log = os.open(output / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "DEEPSPEED_TIMEOUT": "1"}
    torch.set_num_threads(1)
    dist.init_process_group(BACKENDS[device().type], timeout=timedelta(seconds=limits.get("wait", WAIT)))
    gc.freeze()  # a collection would take a third of a second
    for spec in runs:
        file = output / spec.replace("/", "-")
        with open(f"{file}.error{rank}", "w") as error:
            # Some process groups ignore the first one's timeout, and nothing else interrupts a wait within one.
            faulthandler.dump_traceback_later(limits.get("limit", LIMIT), file=error, exit=True)
            try:
                function(spec, file)
            except Exception:
                error.write(traceback.format_exc())
                error.flush()
                os._exit(1)  # other ranks may hang, at exit as well: the first one's end ends them
            faulthandler.cancel_dump_traceback_later()
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


def import_deepspeed(*, fp16: bool = False) -> Any:
    """Set up DeepSpeed without the shared-memory op that it would compile on CPUs; any other op is an error."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    # Not deepspeed.comm.torch, which is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    OpBuilder.jit_load = _compile_nothing
    if dist.is_initialized():
        deepspeed.init_distributed("gloo" if device().type == "cpu" else "nccl")
    if fp16:  # DeepSpeed's kernels need a CPU with fp16 instructions; torch computes in fp16 anywhere
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


def _compile_nothing(builder: Any, verbose: bool = True) -> None:
    raise RuntimeError(f"DeepSpeed would compile its op {builder.name}, which takes a minute")
