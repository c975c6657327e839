"""The Triton kernels compile for GPUs without having one, and the assembly shows what makes them fast."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest

triton = pytest.importorskip("triton", reason="needs triton (extra `test`)")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mars_hf.kernels import gpu as kernels  # noqa: E402
from mars_hf.kernels import gpu_device  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
MI300 = GPUTarget("hip", "gfx942", 64)
SIZES = {"TILE": kernels.TILE, "BLOCK": kernels.BLOCK, "REST": kernels.REST}
POINTERS = {
    "table": "*i64",
    "count": "i32",
    "tiles": "i32",
    "steps": "*fp32",
    "lr": "*fp32",
    "scale": "*fp64",
    "last_scales": "*fp32",
    "factors": "*fp64",
    "seeds": "*i64",
    "partials": "*fp64",
    "sums": "*fp64",
}


def compiled(kernel, target=HOPPER, options=kernels.OPTIONS, **constants):
    signature = {name: POINTERS.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: value for name, value in {**SIZES, **constants}.items() if signature.get(name) == "constexpr"}
    return triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)


def update(param, gradient, state, last, vector, target=HOPPER, compute=tl.float32, **flags):
    dtypes = {"PARAM": param, "GRADIENT": gradient, "LAST": last, "COMPUTE": compute}
    dtypes |= dict.fromkeys(("EXP_AVG", "EXP_AVG_SQ"), state)
    flags = {
        "RULE": "adamw",
        "CORRECTED": True,
        "KEEP_LAST": last is not None,
        **flags,
    }
    return compiled(gpu_device.update, target, VECTOR=vector, **dtypes, **flags)


def totals(last):
    return compiled(gpu_device.total_sums, options=kernels.OPTIONS_OF_TOTALS, LAST=last, BLOCK=kernels.TOTALS)


def spilled(code, folder):
    """Return the bytes per thread that spill from registers to memory."""
    (folder / "kernel.cubin").write_bytes(code.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", folder / "kernel.cubin"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


def accesses(code, width):
    """Return the numbers of device memory reads and writes that move `width` registers at once."""
    found = Counter(re.findall(rf"(ld|st)\.global\.{re.escape(width)}", code.asm["ptx"]))
    return found["ld"], found["st"]


def test_whole_blocks_in_float32_move_128_bits_at_once():
    """Each thread has eight elements: two accesses for each of 5 tensors read and 4 written."""
    code = update(tl.float32, tl.float32, tl.float32, tl.float32, 4)
    assert accesses(code, "v4.b32") == (10, 8)


def test_mixed_dtypes_stay_in_registers():
    """bfloat16 parameters, gradients and last gradients with float32 states: no exchange through shared memory."""
    code = update(tl.bfloat16, tl.bfloat16, tl.float32, tl.bfloat16, 4)
    assert accesses(code, "v4.b32") == (4, 4)
    assert accesses(code, "v2.b32") == (6, 4)
    assert code.metadata.shared == 0


def test_a_last_gradient_that_is_not_kept_is_not_written():
    code = update(tl.float32, tl.float32, tl.float32, tl.float32, 4, KEEP_LAST=False)
    assert accesses(code, "v4.b32") == (10, 6)


def sums(gradient, last, vector, target=HOPPER, compute=tl.float32):
    dtypes = {"GRADIENT": gradient, "LAST": last, "COMPUTE": compute}
    return compiled(gpu_device.partial_sums, target, VECTOR=vector, **dtypes)


@pytest.mark.parametrize("last", [tl.float32, None], ids=["last", "no_last"])
def test_sums_move_128_bits_at_once(last):
    assert accesses(sums(tl.float32, last, 4), "v4.b32")[0] == (2 if last is None else 4)


@pytest.mark.parametrize("flags", [{"RULE": "lion"}, {"RULE": "momentum"}, {"CORRECTED": False}], ids=str)
def test_every_rule_compiles(flags):
    assert update(tl.float16, tl.float32, tl.float32, None, 4, **flags).asm["cubin"]


def test_float64_compiles():
    dtype = tl.float64
    assert update(dtype, dtype, dtype, dtype, 2, compute=dtype).asm["cubin"]
    assert sums(dtype, dtype, 2, compute=dtype).asm["cubin"]


@pytest.mark.parametrize("last", [tl.float32, None], ids=["last", "no_last"])
def test_no_register_is_spilled(last, tmp_path):
    dtypes = tl.float32, tl.float32, tl.float32, last
    for code in (update(*dtypes, 4), sums(tl.float32, last, 4), totals(last)):
        assert spilled(code, tmp_path) == 0


def test_kernels_compile_for_amd():
    assert update(tl.float32, tl.float32, tl.float32, tl.float32, 4, target=MI300).asm["hsaco"]
    assert sums(tl.float32, tl.float32, 4, target=MI300).asm["hsaco"]
