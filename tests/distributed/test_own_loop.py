"""A loop with accelerate and without Trainer, stopped and resumed in the middle, gives one process's weights.

All runs are one launch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import error_of, launch, needs_deepspeed
from safetensors.torch import load_file
from test_parity import Run, apart, bar_of, worst

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ENGINES = ("ddp", "fully_shard", "zero2")
CASES = ("adamw", "m")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return the results of a run; the first request trains all."""
    launched: list[Path] = []

    def get(run: str) -> Run:
        if run.startswith("zero2"):
            needs_deepspeed()
        if not launched:
            launched.append(tmp_path_factory.mktemp("own_loop"))
            engines = [own for own in ENGINES if own != "zero2" or importlib.util.find_spec("deepspeed")]
            runs = [f"{engine}/{case}" for engine in ("plain", *engines) for case in CASES]
            launch("own_loop.py", launched[0], runs, 2)
        error = error_of(launched[0], run)
        assert error is None, error
        return Run(load_file(launched[0] / f"{run.replace('/', '-')}.safetensors"), {})

    return get


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_loop_gives_the_weights_of_one_process(trained, engine, case):
    expected, found = trained(f"plain/{case}"), trained(f"{engine}/{case}")
    for kind in ("weight", "exp_avg", "last_grad"):
        differences = apart(expected.named(kind), found.named(kind))
        assert max(differences.values()) <= bar_of(case), worst(differences)
