"""What only the Triton kernels have: tables, tiles, streams, assembly. `test_contract.py` compares their results.

Triton reads TRITON_INTERPRET at import, once per process, so the interpreter has a process of its own, at the end of
this file. Kernels compile for GPUs without having one. On a GPU: CUDA_VISIBLE_DEVICES=0 python -m pytest -m gpu
tests/kernels.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from contract import (
    INTERPRETED,
    STEP,
    assert_close,
    buffers_of,
    check_sums,
    check_update,
    draw,
    expected_update,
    problem,
)
from helpers import on_a_gpu

from mars_hf import Mars
from mars_hf.arithmetic import formulas
from mars_hf.kernels import gpu as kernels

triton = pytest.importorskip("triton", reason="needs triton (extra `test`)")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mars_hf.kernels import gpu_device  # noqa: E402

HERE = Path(__file__).resolve().parent
gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_a_gpu)])
here = pytest.mark.parametrize("device", ["cpu"]) if INTERPRETED else gpu
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")


@here
@pytest.mark.parametrize("dtype", sorted(kernels.FLOATS, key=str), ids=str)
@pytest.mark.parametrize("gradient", [torch.float32, torch.float64], ids=str)
def test_dtypes_of_scales(device, dtype, gradient):
    lists = problem([1500, 5, 700, 0], device, gradients=gradient)
    scale = torch.tensor(-3.0, dtype=dtype, device=device)
    check_sums("triton", lists["gradients"], lists["last_grad"], grad_scale=scale, k=0.4)
    check_update(
        "triton", lists, grad_scale=scale, factors=torch.tensor([0.25, 1.0, 0.0, 0.5], dtype=dtype, device=device)
    )


@here
def test_more_partial_sums_than_one_block(device, monkeypatch):
    for name, value in {"TILE": 64, "BLOCK": 64, "MASKED_BLOCK": 32, "TOTALS": 16}.items():
        monkeypatch.setattr(kernels, name, value)
    sizes = [64 * 70 + 5, 3]
    check_sums("triton", draw(sizes, device=device), draw(sizes, device=device, seed=1), k=0.4)


def locate(words, count, tile, device):
    """Return the result of `gpu_device.locate` for one tile: tensor, first element, number of elements."""

    @triton.jit(do_not_specialize=["tile"])  # 1 would be a constant
    def kernel(table, count, tile, out, locate: tl.constexpr, TILE: tl.constexpr):
        tensor, start, length = locate(table, count, tile.to(tl.int64), TILE)
        tl.store(out, tensor.to(tl.int64))
        tl.store(out + 1, start)
        tl.store(out + 2, length.to(tl.int64))

    out = torch.zeros(3, dtype=torch.int64, device=device)
    table = torch.tensor(words, device=device)
    kernel[(1,)](table, count, tile, out, gpu_device.locate, kernels.TILE)
    return out.tolist()


@here
def test_positions_beyond_31_bits(device):
    """The tensors exceed memory here, so the test reads the places of their tiles off the table."""
    sizes = (5, 2**31 + 10, 0, 2**33 + 1, 2**45)
    words, tiles = kernels._content_of_table(sizes, ((0,) * 5,), ())
    first = words[8:13]
    assert tiles == sum(-(-size // kernels.TILE) for size in sizes)
    per = kernels.TILE
    for tile, expected in [
        (0, [0, 0, 5]),
        (1, [1, 0, per]),
        (first[3] - 1, [1, 2**31, 10]),
        (first[3], [3, 0, per]),
        (first[4] - 1, [3, 2**33, 1]),
        (tiles - 1, [4, 2**45 - per, per]),
    ]:
        assert locate(words, 5, tile, device) == expected


@here
def test_update_beyond_31_bits(device):
    """The tile at element 2**33 belongs to tensors whose address is 2**33 elements before real memory."""
    start, length = 2**33, 1300
    lists = problem([length], device)
    expected = expected_update(lists, **STEP, steps=[1.0], lr=1e-2, arithmetic="adamw")
    order = ("gradients", "last_grad", "params", "exp_avg", "exp_avg_sq")
    addresses = tuple((lists[name][0].data_ptr() - 4 * start,) for name in order)
    numbers = (0.475, 0.0, 0.95, math.log(0.95), 0.99, math.log(0.99), 1e-8, 0.1)
    words, tiles = kernels._content_of_table((start + length,), addresses, numbers)
    assert locate(words, 1, tiles - 1, device) == [0, start, length]
    words[8] = 1 - tiles  # as if the launch began at the last tile
    steps, lr = (torch.tensor(values, device=device) for values in ([1.0], 1e-2))
    gpu_device.update[(1,)](
        torch.tensor(words, device=device), 1, steps, lr, None, None, None,
        PARAM=tl.float32, GRADIENT=tl.float32, EXP_AVG=tl.float32, EXP_AVG_SQ=tl.float32, LAST=tl.float32,
        LOST=None, EXP_AVG_SCALE=None, EXP_AVG_SQ_SCALE=None, LAST_SCALE=None,
        COMPUTE=tl.float32, RULE="adamw", CORRECTED=True, CAUTIOUS=False,
        TILE=kernels.TILE, BLOCK=kernels.BLOCK, MASKED_BLOCK=kernels.MASKED_BLOCK, VECTOR=4,
    )  # fmt: skip
    assert_close(lists, expected)


@here
def test_tables_are_kept_by_content(device):
    kernels._cached_table.cache_clear()
    gradients = draw([10, 20], device=device)
    kernels.sums(gradients, [])
    kernels.sums(gradients, [])
    assert kernels._cached_table.cache_info().misses == 1
    moved = [gradients[0].clone(), gradients[1]]
    assert torch.equal(kernels.sums(moved, []), kernels.sums(gradients, []))
    assert kernels._cached_table.cache_info().misses == 2


@here
def test_only_tensors_with_every_address_aligned_are_called_aligned(device):
    """An error here is invisible on the CPU and a misaligned access on a GPU."""
    addresses = ((0, 16, 32, 8), (), (4096, 4100, 48, 16))
    words, _ = kernels._content_of_table((9, 9, 9, 9), addresses, ())
    assert words[8 + 2 * 4 : 8 + 3 * 4] == [1, 0, 1, 0]


@here
def test_tensors_at_odd_addresses_have_no_whole_blocks(device):
    """Whole blocks are read without a mask and with a stated alignment, which an interpreter does not check."""

    @triton.jit
    def kernel(table, count, out, whole_blocks: tl.constexpr, BLOCK: tl.constexpr):
        for tensor in range(0, count):
            tl.store(out + tensor, whole_blocks(table, count, tensor, 2 * BLOCK + 5, BLOCK))

    words, _ = kernels._content_of_table((9, 9, 9), ((0, 8, 32), (4096, 16, 4100)), ())
    out = torch.zeros(3, dtype=torch.int32, device=device)
    kernel[(1,)](torch.tensor(words, device=device), 3, out, gpu_device._whole_blocks, kernels.BLOCK)
    assert out.tolist() == [2 * kernels.BLOCK, 0, 0]


@pytest.mark.parametrize(
    ("dtypes", "elements"),
    [
        ([torch.bfloat16, torch.bfloat16], 8),
        ([torch.bfloat16, torch.float32], 4),
        ([torch.float16, torch.float64], 2),
    ],
    ids=str,
)
def test_a_thread_moves_16_bytes_of_the_widest_dtype(dtypes, elements):
    """With 16 bytes of the narrowest, values would pass through shared memory."""
    constants = kernels._constants([[torch.zeros(3, dtype=dtype)] for dtype in dtypes] + [[]])
    assert constants["VECTOR"] == elements


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_tables_are_kept_by_stream(monkeypatch):
    """The memory of an evicted table is reused only after the kernels that read it, on their stream."""
    kept = []
    monkeypatch.setattr(kernels, "_cached_table", lambda *content: kept.append(content) or (None, 0))
    tensor = torch.zeros(10).as_subclass(OnCuda)
    for stream in (7, 8, 7):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_, stream=stream: SimpleNamespace(cuda_stream=stream))
        kernels._table([[tensor]], (0.5,))
    assert kept[0] == kept[2] != kept[1]


@gpu
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_the_optimizer_never_waits_for_the_gpu(device, settings):
    shapes = (300, 40), (17,), (64, 64)
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    optimizer = Mars(params, lr=0.01, **settings)
    for step in range(5):
        for param in params:
            param.grad = torch.randn_like(param)
        try:
            if step > 1:  # creates states and compiles kernels
                torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@gpu
def test_sums_of_a_hundred_million_elements(device):
    gradient = torch.rand(100_000_000, device=device)
    last = torch.rand(100_000_000, device=device)
    first = check_sums("triton", [gradient], [last], k=0.4)
    assert torch.equal(first, kernels.sums([gradient], [last], k=0.4))


@gpu
def test_a_step_on_another_stream(device):
    results, stream = [], torch.cuda.Stream()
    for current in (torch.cuda.current_stream(), stream):
        lists = problem([3000, 17], device)
        current.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(current):
            factors = formulas.clip_factors(kernels.sums(lists["gradients"], lists["last_grad"], k=STEP["k"])[3], 1.0)
            settings = {**STEP, "arithmetic": "adamw", "steps": [1.0, 1.0], "lr": 1e-2, "factors": factors}
            kernels.update(lists["params"], lists["gradients"], buffers_of(lists), formulas.Options(**settings))
        torch.cuda.current_stream().wait_stream(current)
        results.append(lists["params"])
    assert all(map(torch.equal, *results))


# --- graphs and compilers ---------------------------------------------------------------------------------------------


def network(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7)).to(device)
    return model, Mars(model.parameters(), lr=0.01, fused=True)


def trained(device, train):
    """Return the weights after `train(model, optimizer, batch)` on each of five batches."""
    model, optimizer = network(device)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        train(model, optimizer, torch.randn(16, 24, generator=generator).to(device))
    return [param.detach() for param in model.parameters()]


def eager(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@gpu
def test_a_step_after_each_replay_of_a_graph(device):
    """Forward and backward in a CUDA graph, the step outside it, as its error says."""
    state = {}

    def replay(model, optimizer, batch):
        if not state:
            stream, state["batch"] = torch.cuda.Stream(), batch.clone()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    model(state["batch"]).square().mean().backward()
            torch.cuda.current_stream().wait_stream(stream)
            optimizer.zero_grad()
            state["graph"] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(state["graph"]):
                model(state["batch"]).square().mean().backward()
        state["batch"].copy_(batch)
        state["graph"].replay()
        optimizer.step()

    torch.testing.assert_close(trained(device, replay), trained(device, eager), rtol=1e-5, atol=1e-6)


@gpu
def test_a_captured_step_is_refused(device):
    model, optimizer = network(device)
    eager(model, optimizer, torch.ones(16, 24, device=device))
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    torch.cuda.synchronize()
    assert all(map(torch.equal, before, model.parameters()))
    eager(model, optimizer, torch.ones(16, 24, device=device))  # it goes on


@gpu
def test_a_step_in_a_compiled_function(device):
    compiled = torch.compile(eager)
    torch.testing.assert_close(trained(device, compiled), trained(device, eager), rtol=1e-4, atol=1e-5)


# --- the assembly -----------------------------------------------------------------------------------------------------

HOPPER, MI300 = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
SIZES = {"TILE": kernels.TILE, "BLOCK": kernels.BLOCK, "MASKED_BLOCK": kernels.MASKED_BLOCK}
POINTERS = {"count": "i32", "tiles": "i32", "steps": "*fp32", "lr": "*fp32"}
POINTERS |= dict.fromkeys(("table", "seeds"), "*i64") | dict.fromkeys(("scale", "factors", "partials", "sums"), "*fp64")
WIDE = (tl.float32,) * 4


def compiled(kernel, target=HOPPER, options=kernels.LAUNCH_OPTIONS, **constants):
    signature = {name: POINTERS.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: value for name, value in {**SIZES, **constants}.items() if signature.get(name) == "constexpr"}
    return triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)


def update(param, gradient, state, last, compute=tl.float32, **flags):
    dtypes = {"PARAM": param, "GRADIENT": gradient, "EXP_AVG": state, "EXP_AVG_SQ": state, "LAST": last}
    dtypes |= {name: flags.pop(name) for name in dtypes if name in flags}
    no_scales = dict.fromkeys(("EXP_AVG_SCALE", "EXP_AVG_SQ_SCALE", "LAST_SCALE"))
    usual = {"RULE": "adamw", "CORRECTED": True, "CAUTIOUS": False, "LOST": None, "VECTOR": 4}
    flags = {**usual, **no_scales, **flags}
    return compiled(gpu_device.update, COMPUTE=compute, **dtypes, **flags)


def sums(gradient, last, compute=tl.float32, **flags):
    flags = {"VECTOR": 4, "LAST_SCALE": None, **flags}
    return compiled(gpu_device.partial_sums, GRADIENT=gradient, LAST=last, COMPUTE=compute, **flags)


def accesses(code, width):
    """Return the numbers of device memory reads and writes that move `width` registers at once."""
    counts = Counter(re.findall(rf"(ld|st)\.global\.{re.escape(width)}", code.asm["ptx"]))
    return counts["ld"], counts["st"]


@compiles
@pytest.mark.parametrize(
    ("dtypes", "flags", "expected"),
    [
        (WIDE, {}, {"v4.b32": (10, 8)}),
        (WIDE, {"CAUTIOUS": True}, {"v4.b32": (10, 8)}),
        ((tl.bfloat16, tl.bfloat16, tl.float32, tl.bfloat16), {}, {"v4.b32": (4, 4), "v2.b32": (6, 4)}),
    ],
    ids=["float32", "cautious", "bfloat16 with float32 states"],
)
def test_whole_blocks_move_128_bits_at_once(dtypes, flags, expected):
    """Each thread has eight elements, two accesses for each tensor; nothing goes through shared memory."""
    code = update(*dtypes, **flags)
    assert {width: accesses(code, width) for width in expected} == expected and code.metadata.shared == 0


@compiles
@pytest.mark.parametrize(
    "flags",
    [
        {"RULE": "lion"},
        {"RULE": "lion", "CAUTIOUS": True},
        {"RULE": "momentum"},
        {"CORRECTED": False},
    ],
    ids=str,
)
def test_every_rule_compiles(flags):
    assert update(tl.float16, tl.float32, tl.float32, None, **flags).asm["cubin"]


@compiles
def test_division_and_root_are_rounded_correctly():
    """Those of `/` and `tl.sqrt` differ from PyTorch's in the last bit; the interpreter computes both exactly."""
    code = update(*WIDE).asm["ptx"]
    assert "div.rn.f32" in code and "sqrt.rn.f32" in code
    assert not re.search(r"(div\.full|div\.approx|sqrt\.approx)(\.ftz)?\.f32", code)


@compiles
def test_kahan_compiles():
    code = update(tl.bfloat16, tl.bfloat16, tl.float32, tl.float32, LOST=tl.bfloat16)
    assert accesses(code, "v2.b32") == (6, 4) and code.metadata.shared == 0


@compiles
def test_float64_and_amd_compile():
    dtypes, settings = (tl.float64,) * 4, {"compute": tl.float64, "VECTOR": 2}
    assert update(*dtypes, **settings).asm["cubin"] and sums(*dtypes[:2], **settings).asm["cubin"]
    assert update(*WIDE, target=MI300).asm["hsaco"] and sums(*WIDE[:2], target=MI300).asm["hsaco"]


@compiles
@pytest.mark.parametrize("last", [tl.float32, None], ids=["last", "no_last"])
def test_sums_move_128_bits_without_spills(last, tmp_path):
    of_sums = sums(tl.float32, last)
    assert accesses(of_sums, "v4.b32")[0] == (2 if last is None else 4)
    totals = compiled(gpu_device.total_sums, options=kernels.LAUNCH_OPTIONS_OF_TOTALS, LAST=last, BLOCK=kernels.TOTALS)
    for code in (update(*WIDE[:3], last), of_sums, totals):
        assert stack_of(code, tmp_path) == 0


def stack_of(code, folder):
    """Return the bytes of a thread's registers that a kernel spills."""
    (folder / "kernel.cubin").write_bytes(code.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", folder / "kernel.cubin"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


CODED = {"EXP_AVG": tl.int8, "EXP_AVG_SQ": tl.uint8, "LAST": tl.int8}
CODED |= dict.fromkeys(("EXP_AVG_SCALE", "EXP_AVG_SQ_SCALE", "LAST_SCALE"), tl.float32)


@compiles
@pytest.mark.parametrize("target", [GPUTarget("cuda", 80, 32), HOPPER, MI300], ids=["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("param", [tl.float32, tl.bfloat16], ids=str)
def test_states_in_8_bits_compile_without_spills(target, param, tmp_path):
    lost = tl.int8 if param == tl.bfloat16 else None
    code = update(param, param, None, None, target=target, LOST=lost, **CODED)
    of_sums = sums(param, tl.int8, target=target, LAST_SCALE=tl.float32)
    if target is MI300:
        assert all(re.search(r"\.private_segment_fixed_size: 0\b", each.asm["amdgcn"]) for each in (code, of_sums))
    else:
        assert stack_of(code, tmp_path) == stack_of(of_sums, tmp_path) == 0


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="runs this file in the interpreter")
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton", minversion="3.7", reason="older interpreters, 3.6 for one, fail with NumPy 2.4")
    fuzz = HERE.parent / "fuzz" / "test_edits.py::test_edits_and_layouts"
    benchmark = HERE.parent / "benchmarks" / "test_costs.py::test_gpu_kernels"
    names = ("test_check.py", "test_contract.py", "test_gpu.py", "test_symmetric.py")
    files = [*[HERE / name for name in names], fuzz, benchmark]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu and not multiprocess"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert finished.returncode == 0 and " passed" in finished.stdout, finished.stdout + finished.stderr
