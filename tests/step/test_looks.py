"""Changes that make a tensor look different, with torch's guards and without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mars_hf.step import looks


@pytest.fixture(params=[True, False], ids=["guards", "python"])
def guards(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(looks._compat, "tensor_guards", lambda tensors: None)
    return request.param


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(3, 4), nn.Parameter(torch.zeros(5)), torch.zeros(()), torch.zeros(0, 2)]


def test_other_tensors_that_look_the_same(guards):
    look = looks.Look(tensors())
    assert (look._guards is not None) is guards
    assert look.fits(tensors())
    assert look.fits([torch.zeros(6, 4)[2:5], *tensors()[1:]])


CHANGES = {
    "transposed": lambda t: [t[0].new_zeros(4, 3).t(), *t[1:]],
    "another shape": lambda t: [t[0].view(4, 3), *t[1:]],
    "another dtype": lambda t: [t[0].bfloat16(), *t[1:]],
    "another device": lambda t: [t[0].to("meta"), *t[1:]],
    "expanded": lambda t: [torch.zeros(3, 1).expand(3, 4), *t[1:]],
    "sliced": lambda t: [torch.zeros(3, 8)[:, ::2], *t[1:]],
    "negated": lambda t: [torch.zeros(3, 4, dtype=torch.complex64).conj().imag, *t[1:]],
    "tracked": lambda t: [t[0].requires_grad_(), *t[1:]],
    "another type": lambda t: [t[0], t[1].detach(), *t[2:]],
    "a number": lambda t: [*t[:2], 1.0, t[3]],
    "nothing": lambda t: [*t[:2], None, t[3]],
    "sparse": lambda t: [t[0].to_sparse(), *t[1:]],
    "fewer": lambda t: t[:3],
    "more": lambda t: [*t, t[0].clone()],
    "the same twice": lambda t: [t[0], t[1], t[0][0, 0], t[3]],
    "misaligned": lambda t: [torch.zeros(14)[1:13].view(3, 4), *t[1:]],
    "freed": lambda t: (t[0].untyped_storage().resize_(0), t)[1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(guards, change):
    assert not looks.Look(tensors()).fits(CHANGES[change](tensors()))


def test_a_look_holds_no_tensor(guards):
    import gc
    import weakref

    made = tensors()
    look = looks.Look(made)
    refs = [weakref.ref(tensor) for tensor in made]
    del made
    gc.collect()
    assert look.fits(tensors())
    assert not any(ref() is not None for ref in refs)


def test_a_list_with_one_address_twice_fits_nothing(guards):
    one = torch.zeros(3)
    assert not looks.Look([one, one]).fits([one, one])


def test_overlapping():
    memory = torch.zeros(40)
    parts = [memory[:10], memory[10:20], memory[15:25].view(2, 5), memory[30:40:3], memory[31:32], torch.zeros(0)]
    assert looks.overlapping(parts) == {1, 2, 3, 4}
    assert looks.overlapping([memory[::2], torch.zeros(3)]) == set()


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1), (2, 3, 4, 5), (0, 3), ()])
def test_fill_alike(shape):
    base = torch.zeros(shape)
    assert looks.fill_alike([base, torch.ones(shape)])
    if base.ndim == 4:
        assert not looks.fill_alike([base, base.to(memory_format=torch.channels_last)])
        assert looks.fill_alike([base.to(memory_format=torch.channels_last)] * 2)
    if base.ndim == 2 and min(shape) > 1:
        assert not looks.fill_alike([base, base.new_zeros(shape[::-1]).t()])
        assert not looks.fill_alike([base[:, ::2]])
