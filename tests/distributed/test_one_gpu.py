"""On one GPU, engines give the weights of a plain run on a CPU; what they do to precision is what it costs.

On CPUs the same runs show that the test itself works.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import train
from helpers import on_a_gpu
from launching import Launches, Run
from test_parity import BF16_WEIGHT_BAR, check_same, plain, together

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# Of each engine: those that shard, offload or compile, and those that compute the model in another precision.
EXACT = {
    "single": "adamw adamw_1d lion m adamw_8bit adamw_folded_kernels m_kernels",
    "compiled": "adamw",
    "fsdp2": "adamw adamw_1d_kernels lion m m_rows adamw_8bit adamw_8bit_kernels",
    "fsdp2_offload": "adamw adamw_1d_kernels m",
    "zero1": "adamw adamw_1d_kernels m adamw_8bit",
    "zero2": "adamw m_kernels adamw_8bit_kernels",
    "zero3": "adamw lion m m_rows adamw_8bit",
    "zero2_offload": "adamw m",
    "zero3_offload": "adamw m",
    "trainer_zero2": "adamw m",
}
ROUNDED = {"autocast": "adamw m", "scaled": "adamw m", "zero2_bf16": "adamw m_bf16"}
ON_TWO = {"fsdp2": "adamw m", "zero2": "adamw m"}
ON_CPUS = {"compiled", "fsdp2_offload", "autocast", "scaled"}  # the others are test_parity.py's


def params(engines: dict[str, str]) -> list[object]:
    """Return all cases on a GPU, and on a CPU those that no other test has."""
    return [
        pytest.param(device, engine, case, id=f"{device}-{engine}-{case}", marks=on_a_gpu if device == "cuda" else [])
        for engine, cases in engines.items()
        for case in cases.split()
        for device in ("cpu", "cuda")
        if device == "cuda" or engine in ON_CPUS
    ]


def runs(device: str, *engines: dict[str, str]) -> list[str]:
    """Return the runs of a launch."""
    return ["/".join(param.values[1:]) for kind in engines for param in params(kind) if param.values[0] == device]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return the results of a run by its device and number of processes; the first request trains its launch."""
    launches = {device: Launches(train.run, tmp_path_factory, device) for device in ("cpu", "cuda")}
    expected = sorted({f"single/{plain(run.partition('/')[2])}" for run in runs("cuda", EXACT, ROUNDED)})

    def get(device: str, run: str, world: int = 1) -> Run:
        if run in expected and device == "cpu":
            return launches["cpu"].get("single", expected, 1, run)
        engines = (EXACT, ROUNDED) if world == 1 else (ON_TWO,)
        return launches[device].get(f"on {world}", runs(device, *engines), world, run)

    return get


@pytest.mark.parametrize(("device", "engine", "case"), params(EXACT))
def test_engine_on_one_device(trained, device, engine, case):
    expected = trained("cpu", f"single/{plain(case)}")
    check_same(expected, trained(device, f"{engine}/{case}"), "weight", case)


@pytest.mark.parametrize(("device", "engine", "case"), params(ROUNDED))
def test_low_precision_on_one_device(trained, device, engine, case):
    expected, found = trained("cpu", f"single/{plain(case)}"), trained(device, f"{engine}/{case}")
    apart = together(expected.named("weight"), found.named("weight"))
    assert 0 < apart <= BF16_WEIGHT_BAR


@pytest.mark.parametrize(("device", "engine", "case"), params(ON_TWO))
def test_two_processes_on_one_gpu(trained, device, engine, case):
    try:
        found = trained(device, f"{engine}/{case}", 2)
    except AssertionError as error:
        if "Duplicate GPU" in str(error):
            pytest.skip("NCCL takes one process for each GPU")
        raise
    check_same(trained("cpu", f"single/{case}"), found, "weight", case)
