"""Shared code of the scripts that torchrun starts: many runs in one launch, and a time limit for each."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WAIT = 60  # seconds for which a rank waits for the others
LIMIT = 100  # seconds that one run may take


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


def import_deepspeed() -> Any:
    """Set up DeepSpeed on CPUs without the shared-memory op that it would compile; any other op is an error."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    # Not deepspeed.comm.torch, which is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    OpBuilder.jit_load = compile_nothing
    return deepspeed


def compile_nothing(builder: Any, verbose: bool = True) -> None:
    raise RuntimeError(f"DeepSpeed would compile its op {builder.name}, which takes a minute")
