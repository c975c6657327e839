"""States in 8 bits: what must hold of codes and scales, for any shape, scale and step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.eight_bits import BLOCK, Coded

SHAPES = [(70, 64), (33, 200), (5000,), (40, 3, 5, 7), (8, 16, 128)]
STEPS = (0, 1, 77, 12345)


def coded(values: Tensor, dtype: torch.dtype, step: int = 1) -> Coded:
    first = eight_bits.first_dim_of_rows(values.shape)
    assert first is not None
    scales = torch.zeros(eight_bits.shape_of_scales(values.shape, first))
    result = Coded(torch.zeros(values.shape, dtype=dtype), scales)
    result.encode(values, step)
    return result


def draw(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 4.0) -> Tensor:
    """Return numbers of many sizes, some of them zero; not negative for second moments."""
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    values[torch.rand(shape, generator=generator) < 0.1] = 0
    return values.abs() if dtype == torch.uint8 else values


def blocks_of(values: Tensor, scales: Tensor) -> list[Tensor]:
    """Return the blocks in the order of their scales, by a loop."""
    rows = values.reshape(scales.shape[:-1].numel(), -1)
    return [row[start : start + BLOCK] for row in rows for start in range(0, len(row), BLOCK)]


every_code = pytest.mark.parametrize("dtype", eight_bits.DTYPES, ids=str)


@every_code
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_zeros_and_the_largest_are_exact(dtype, shape, step):
    values = draw(shape, dtype)
    found = coded(values, dtype, step)
    decoded = found.decode()
    assert torch.equal(decoded[values == 0], values[values == 0])
    pairs = zip(blocks_of(values, found.scales), blocks_of(decoded, found.scales), strict=True)
    for (block, decoded_block), scale in zip(pairs, found.scales.flatten(), strict=True):
        where = block.abs().argmax()
        assert block.abs().max() == scale and decoded_block[where] == block[where]


@every_code
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e30])
def test_a_decoded_number_keeps_its_code(dtype, shape, size):
    first = coded(draw(shape, dtype, 1.0) * size, dtype, 3)
    for step in STEPS:
        again = coded(first.decode(), dtype, step)
        assert torch.equal(again.codes, first.codes) and torch.equal(again.scales, first.scales)


@pytest.mark.parametrize("step", STEPS)
def test_rounding_error_of_codes(step):
    """Of a first moment a sixteenth and 1/3952 of the largest, of a root a 32nd and 1/8032; at most."""
    for dtype, share, floor in ((torch.int8, 1 / 16, 1 / 3952), (torch.uint8, 1 / 32, 1 / 8032)):
        values = draw((64, 192), dtype, 3.0)
        found = coded(values, dtype, step)
        decoded = found.decode()
        if dtype == torch.uint8:
            assert (decoded[values > 0] > 0).all()  # a step divides by it
            values, decoded = values.sqrt(), decoded.sqrt()
        for block, other in zip(blocks_of(values, found.scales), blocks_of(decoded, found.scales), strict=True):
            allowed = block.abs() * share + block.abs().max() * floor
            if dtype == torch.uint8:  # the smallest code that is not zero
                allowed = allowed.clamp_min(block.max() * 2 * floor)
            assert ((other - block).abs() <= allowed * (1 + 1e-5)).all()


def test_growth_by_coding():
    """How much larger the norm of what is stored may be, which last_norms.py counts on."""
    for step in range(0, 256, 5):
        values = draw((64, 64), torch.int8, 3.0)
        assert coded(values, torch.int8, step).decode().norm() <= values.norm() * eight_bits.LARGEST_GROWTH


def test_rounding_is_right_on_average():
    values = draw((16, 256), torch.int8, 1.0)
    values[:, 0] = 20.0  # the same scale in each step
    mean = torch.stack([coded(values, torch.int8, step).decode().double() for step in range(256)]).mean(0)
    nearest = coded(values, torch.int8, 5).decode().double()
    error, error_of_one = (mean - values).norm(), (nearest - values).norm()
    assert error < error_of_one / 50


@every_code
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(dtype, value):
    values = draw((64, 128), dtype)
    values[3, 70] = value
    found = coded(values, dtype)
    decoded = found.decode()
    assert not decoded[3, 70].isfinite() and not found.scales[3, 1].isfinite()
    assert decoded[3, :64].isfinite().all() and decoded[4:].isfinite().all()


def test_numbers_beyond_float32_become_infinite():
    values = torch.full((64, 64), 1.0, dtype=torch.float64)
    values[0, 0] = 1e300
    found = coded(values, torch.int8)
    assert found.scales[0, 0] == math.inf and not found.decode()[0, 0].isfinite()


def test_tiny_moments_vanish():
    values = torch.full((64, 64), 1e-37)
    assert not coded(values, torch.int8).decode().any()
    assert coded(values, torch.uint8).decode().equal(values)


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ((64, 63), None),  # too small
        ((4096,), 0),
        ((64, 64), 1),
        ((2, 32, 64), 2),
        ((128, 64, 3, 3), 1),
        ((16, 300, 5), 1),
        ((64, 64, 1), 1),
        ((2000, 3), None),  # rows shorter than a block
        ((0, 64), None),
        ((), None),
    ],
)
def test_rows_of_shapes(shape, first):
    assert eight_bits.first_dim_of_rows(torch.Size(shape)) == first


def test_parts_of_a_flat_tensor_share_no_scale():
    parts = [(700, 1), (0, 63), (63, 2), (65, 127), (192, 508), (701, 299)]
    scales = torch.arange(eight_bits.number_of_scales(1000, len(parts)))
    pieces = [piece.tolist() for piece in eight_bits.scales_of_parts(scales, parts)]
    assert [len(piece) for piece in pieces] == [-(-numel // BLOCK) for _, numel in parts]
    together = [scale for piece in pieces for scale in piece]
    assert len(set(together)) == len(together)


# --- bfloat16 with 8 bits more ----------------------------------------------------------------------------------------


def test_a_weight_of_24_bits():
    values = draw((100, 100), torch.int8)
    param, lost = eight_bits.split_weight(values)
    joined = eight_bits.join_weight(param, lost)
    assert ((joined - values).abs() <= values.abs() * 2.0**-16).all()
    assert ((param.float() - values).abs() <= values.abs() * (2.0**-8 + 2.0**-16)).all()  # the nearest
    again, lost_again = eight_bits.split_weight(joined)
    assert torch.equal(again, param) and torch.equal(lost_again, lost)
    kept = eight_bits.join_weight(*eight_bits.split_weight(param.float()))
    assert torch.equal(kept, param.float())  # a loaded parameter


def test_weights_that_are_not_finite():
    values = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0, 3.4e38, -3.4e38])
    param, lost = eight_bits.split_weight(values)
    joined = eight_bits.join_weight(param, lost)
    assert joined[:2].equal(values[:2]) and joined[2].isnan() and joined[3:5].equal(values[3:5])
    assert math.copysign(1, joined[3]) == -1 and joined[5] == math.inf == -joined[6]  # as bfloat16 rounds them
    # A parameter that somebody sets goes on from its new value.
    assert (
        eight_bits.join_weight(torch.zeros(2, dtype=torch.bfloat16), torch.tensor([-5, 5], dtype=torch.int8))
        .isfinite()
        .all()
    )


def test_smallest_moments_that_stay():
    """Down to 2^-118, far below what a gradient in float32 leaves."""
    for size in (1e-30, 1e-35):
        values = torch.full((64, 64), size)
        assert coded(values, torch.int8).decode().equal(values)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1])
def test_every_form_of_not_a_number_stays_one(bits):
    """CUDA's has all bits set, which rounding up would make a zero of."""
    param, lost = eight_bits.split_weight(torch.tensor([bits], dtype=torch.int32).view(torch.float32))
    assert param.isnan().all() and eight_bits.join_weight(param, lost).isnan().all()


def test_what_a_weight_lacks():
    """To a 256th of its last place, at most half a place; a sign or size that cannot be is nothing."""
    weight = torch.tensor([1.5, -1.5, 1.5, 1.5, math.inf, 0.0], dtype=torch.bfloat16)
    place = 2.0**-7
    values = weight.float() + place * torch.tensor([0.25, -0.25, 0.5, -0.5, 0.0, 0.0])
    assert eight_bits.lost_of(weight, values).tolist() == [64, 64, 127, -128, 0, 0]
    assert eight_bits.lost_of(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([-1.0])).tolist() == [-128]
