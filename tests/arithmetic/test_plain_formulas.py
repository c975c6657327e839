"""The formulas in plain PyTorch: what depends on the device, and the decay of tiny weights."""

from __future__ import annotations

import pytest
import torch

from mars_hf.arithmetic import formulas
from mars_hf.distributed.norms import GroupSums


@pytest.mark.parametrize("error", [TypeError, RuntimeError])  # Apple's GPUs, Intel's Arc
def test_sums_on_devices_without_float64(monkeypatch, error):
    ones = torch.ones

    def ones_of_float32(*size, dtype=None, **settings):
        if dtype == torch.float64:
            raise error("this device has no float64")
        return ones(*size, dtype=dtype, **settings)

    monkeypatch.setattr(torch, "ones", ones_of_float32)
    cpu = torch.device("cpu")
    formulas.sum_dtype.cache_clear()
    try:
        assert formulas.sum_dtype(cpu) == torch.float32
        sums = formulas.sums([torch.full((2, 2), 3.0)], [torch.full((2, 2), 1.0)], k=0.5)
        assert sums.dtype == torch.float32 and sums.flatten().tolist() == [36.0, 12.0, 4.0, 64.0]
        assert GroupSums(1, 4, cpu)._dtype == torch.float32
    finally:
        formulas.sum_dtype.cache_clear()
        monkeypatch.undo()
    assert formulas.sum_dtype(cpu) == torch.float64


@pytest.mark.parametrize(("direction", "decays"), [(-1e-30, False), (1e-30, True), (0.0, True)])
def test_cautious_decay_of_tiny_weights(direction, decays):
    """Signs decide: a product of 1e-30 and -1e-30 is zero in float32."""
    x = torch.full((3,), 1e-30)
    formulas.apply([x], [torch.full((3,), direction)], lr=0.1, weight_decay=5.0, cautious=True)
    expected = 1e-30 * (0.5 if decays else 1.0) - 0.1 * direction
    torch.testing.assert_close(x, torch.full((3,), expected), rtol=1e-6, atol=0)
