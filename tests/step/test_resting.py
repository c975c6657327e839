"""Steps whose whole gradient is exactly zero; test_ranks_in_threads.py has those of shards."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import fused_and_plain, gpt2, newton_schulz_in, on_a_gpu
from test_formulas import references
from torch import Tensor, nn

from mars_hf import Mars, create
from mars_hf.arithmetic import resting
from mars_hf.arithmetic.resting import Units, moving_flags, put_to_rest

NORMALIZING = ["mars-m", "mars-shampoo", "mars-lion"]
every_normalizing = pytest.mark.parametrize("mars_type", NORMALIZING)
every_orthogonalizing = pytest.mark.parametrize("mars_type", ["mars-m", "mars-shampoo"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(draw(*shape, seed=seed).to(dtype)) for seed, shape in enumerate(shapes)]


def step(optimizer: Mars, *gradients: Tensor | None) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else gradient.to(param.dtype)
    optimizer.step()


@fused_and_plain
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_threshold": None},
        {"max_grad_norm": 1.0},
        {"gamma": 0.0, "maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("mars_type", [*NORMALIZING, "mars-adamw"])
def test_forty_idle_steps(mars_type, settings, fused):
    """After ten real ones: weights stay where they are but for decay, states decay; mars-adamw's steps fade."""
    params = made((24, 16), (3, 8, 16), dtype=torch.float64)
    settings = {
        "lr": 0.01,
        "weight_decay": 0.1,
        "mars_type": mars_type,
        **newton_schulz_in("float64", mars_type),
        **settings,
    }
    optimizer = Mars(params, fused=fused, **settings)
    lines = references(params, **{key: value for key, value in settings.items() if key != "max_grad_norm"})
    for number in range(50):
        gradients = [0.01 * draw(*param.shape, seed=number) * (number < 10) for param in params]
        step(optimizer, *gradients)
        for line, gradient in zip(lines, gradients, strict=True):
            line.step(-gradient if settings.get("maximize") else gradient)
        if number == 9:
            before = [param.detach().clone() for param in params]
    decay = (1 - 0.01 * 0.1) ** 40
    for param, line, old in zip(params, lines, before, strict=True):
        assert (param - line.x).abs().max() < 1e-8  # float64 but for the gradient's own digits
        assert ((param - decay * old).abs().max() < 1e-12) == (mars_type != "mars-adamw")
        if "clip_threshold" not in settings:  # otherwise it holds an average of gradients
            torch.testing.assert_close(optimizer.state[param]["exp_avg"], line.m, rtol=1e-6, atol=1e-12)
        assert optimizer.state[param]["step"] == 50


@pytest.mark.parametrize("mars_type", ["mars-m", "muon", "mars-shampoo", "mars-lion"])
def test_an_expert_without_tokens(mars_type):
    """In a stack it rests from its first idle step on, as in a ModuleList; the others train as there."""
    stack, modules = draw(4, 12, 8), [nn.Parameter(part.clone()) for part in draw(4, 12, 8)]
    stack = nn.Parameter(stack)
    settings = {"mars_type": mars_type, "lr": 0.01, "clip_threshold": None, **newton_schulz_in("float32", mars_type)}
    groups = [[{"params": params, "role": "matrix"}] for params in ([stack], modules)]
    together, apart = (create(group, **settings) for group in groups)
    for number in range(210):
        gradient = draw(4, 12, 8, seed=number)
        gradient[1] = 0  # never had a token
        if number >= 10:
            gradient[2] = 0
        step(together, gradient)
        step(apart, *[part if part.any() else None for part in gradient])
        if number == 9:
            before = stack[2].clone()
    assert torch.equal(stack[2], before) and torch.equal(stack[1], draw(4, 12, 8)[1])
    for part, module in zip(stack, modules, strict=True):
        torch.testing.assert_close(part, module, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_units_with_an_element_other_than_zero(device):
    """Wherever it is, and whatever a unit adds up to; first moments of the others become zero, but NaN stays NaN."""
    zeros, last, nan, tiny, opposite = (torch.zeros(3, size) for size in (9000, 9000, 5, 5, 2))
    stack, turned, flat = torch.zeros(4, 5, 600), torch.zeros(5, 600, 4).permute(2, 0, 1), torch.zeros(1500)
    last[-1, -1], nan[2, 4], tiny[0, 0], opposite[0] = 1, torch.nan, 1e-45, torch.tensor([1.0, -1.0])
    stack[0, 4, 599], stack[2, 0, 0], turned[1, 0, 3] = 1, torch.inf, 1  # experts of the second are last in memory
    flat[399], flat[1100] = 1, 1  # a shard that begins 300 elements into an expert of 700
    gradients = [tensor.to(device) for tensor in (zeros, last, nan, tiny, opposite, stack, turned, flat)]
    units = [*[Units([0])] * 5, *[Units(range(4))] * 2, Units(range(4), 700, 300)]
    flags = moving_flags(gradients, units)
    expected = [[0], [1], [1], [1], [1], [1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0]]
    assert [of_tensor.tolist() for of_tensor in flags] == expected

    momenta = [torch.ones_like(gradient, dtype=torch.bfloat16) for gradient in gradients]
    momenta[0][0, 0] = torch.nan
    put_to_rest(momenta, units, flags)
    assert momenta[0].sum().isnan() and momenta[0].nansum() == 0
    assert all((momentum == 1).all() for momentum in momenta[1:5])
    for stacked, moves in zip(momenta[5:7], expected[5:7], strict=True):
        assert stacked.mean((1, 2)).tolist() == moves
    assert [part.mean().item() for part in momenta[7].split([400, 700, 400])] == [1, 0, 1]


@fused_and_plain
@pytest.mark.parametrize("order", [(1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_an_expert_of_a_stack_in_any_order_of_memory(order, fused):
    """The right one rests: what is stored first need not be the first expert."""
    shape = (4, 12, 8)
    stored = [shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(3)]
    param = nn.Parameter(draw(*stored).permute(back))
    assert param.shape == shape
    optimizer = Mars([param], lr=0.01, mars_type="mars-lion", fused=fused)
    for number in range(3):
        before = param.detach().clone()
        gradient = draw(*stored, seed=number).permute(back)
        if number:
            gradient[2] = 0
        step(optimizer, gradient)
        moved = (param != before).flatten(1)
        assert moved[[0, 1, 3]].all() and moved[2].any() == (number == 0)


@every_normalizing
def test_rest_with_normalized_rows(mars_type):
    """Rows of a matrix that rests are zeros, which nothing divides by: its weights stay, and are finite."""
    params = made((6, 4), (3, 6, 4))
    settings = {} if mars_type == "mars-lion" else {"normalize_rows": 0.9, "ns_dtype": "float32"}
    optimizer = Mars(params, lr=0.01, mars_type=mars_type, **settings)
    never, first = (param.detach().clone() for param in params)
    for number in range(3):
        gradient = draw(3, 6, 4, seed=number)
        gradient[1] = 0
        step(optimizer, torch.zeros(6, 4), gradient)
    assert torch.equal(params[0], never) and torch.equal(params[1][1], first[1])
    assert params[1].isfinite().all() and not torch.equal(params[1][0], first[0])


@every_orthogonalizing
def test_a_row_of_zeros_is_no_case(mars_type):
    """A matrix that has any gradient at all is orthogonalized as a whole, with its momentum."""
    params = made((6, 4), (6, 4))
    optimizer = Mars(params, lr=0.01, mars_type=mars_type, **newton_schulz_in("float32", mars_type))
    step(optimizer, draw(6, 4), draw(6, 4))
    before = [param.detach().clone() for param in params]
    with_a_row, tiny = torch.zeros(6, 4), torch.zeros(6, 4)
    with_a_row[0], tiny[5, 3] = 1, 1e-45
    step(optimizer, with_a_row, tiny)
    moved = [(param - old).abs() for param, old in zip(params, before, strict=True)]
    assert moved[0][1:].max() > 1e-3 and moved[1].max() > 1e-3


@fused_and_plain
@every_normalizing
def test_nan_is_not_zero(mars_type, fused):
    """A NaN gradient reaches the weights; and a NaN norm those of a gradient that is zero."""
    zeros, nan = torch.zeros(6, 4), torch.zeros(6, 4)
    nan[5, 3] = torch.nan
    for max_grad_norm in (None, 1.0):
        params = made((6, 4), (6, 4))
        optimizer = Mars(
            params,
            mars_type=mars_type,
            **newton_schulz_in("float32", mars_type),
            fused=fused,
            max_grad_norm=max_grad_norm,
        )
        step(optimizer, draw(6, 4), draw(6, 4))
        step(optimizer, zeros, nan)
        assert params[1].isnan().any()
        assert params[0].isnan().any() == (max_grad_norm is not None)


@every_normalizing
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_rest_of_rounded_weights(mars_type, rounding):
    params = made((6, 4), (3, 5, 4), dtype=torch.bfloat16)
    optimizer = Mars(params, lr=0.03, mars_type=mars_type, **newton_schulz_in("float32", mars_type), rounding=rounding)
    step(optimizer, draw(6, 4), draw(3, 5, 4))
    before = [param.detach().clone() for param in params]
    for _ in range(3):
        gradient = draw(3, 5, 4)
        gradient[1] = 0
        step(optimizer, torch.zeros(6, 4), gradient)
    assert torch.equal(params[0], before[0]) and torch.equal(params[1][1], before[1][1])
    assert not torch.equal(params[1][0], before[1][0])


@every_normalizing
def test_rest_in_the_exact_form(mars_type):
    """The gradient decides, whatever the stale one is."""
    (param,) = params = made((6, 4))
    optimizer = Mars(params, mars_type=mars_type, **newton_schulz_in("float32", mars_type), is_approx=False)
    step(optimizer, draw(6, 4))
    before = param.detach().clone()
    param.grad = draw(6, 4, seed=1)
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    step(optimizer, torch.zeros(6, 4))
    assert torch.equal(param, before)


@every_normalizing
def test_rest_with_released_gradients(mars_type):
    layer = nn.Linear(6, 4, bias=False)
    optimizer = create(layer, mars_type=mars_type, release_gradients=True, lr=3e-3)
    layer(draw(3, 6)).sum().backward()
    before = layer.weight.detach().clone()
    assert not optimizer.step()
    (0 * layer(draw(3, 6)).sum()).backward()
    assert torch.equal(layer.weight, before)


def test_zeros_without_eps():
    (param,) = params = made((6, 4))
    optimizer = Mars(params, mars_type="mars-shampoo", eps=0.0, ns_dtype="float32")
    before = param.detach().clone()
    step(optimizer, torch.zeros(6, 4))
    assert torch.equal(param, before)


@pytest.mark.parametrize(
    ("layout", "rests"),
    [({"batched": True}, True), ({"batched": False}, False), (None, True), ({"batched": True, "parts": (2, 3)}, True)],
    ids=str,
)
def test_layouts_say_what_an_expert_is(layout, rests):
    """A convolution (out, in, length) is one matrix where its layout says so."""
    (param,) = made((3, 5, 4))
    optimizer = Mars([{"params": [param], "layout": layout}], mars_type="mars-m", ns_dtype="float32")
    step(optimizer, draw(3, 5, 4))
    before, gradient = param.detach().clone(), draw(3, 5, 4, seed=1)
    gradient[1] = 0
    step(optimizer, gradient)
    assert torch.equal(param[1], before[1]) == rests


@every_orthogonalizing
def test_a_row_at_rest_with_normalized_rows(mars_type):
    """An output without gradient, whose mean square is 0, stays finite, and so do the others."""
    (param,) = made((6, 4))
    optimizer = Mars([param], lr=0.1, mars_type=mars_type, normalize_rows=0.9, ns_dtype="float32")
    gradient = draw(6, 4, seed=1)
    gradient[2] = 0
    before = param.detach().clone()
    for _ in range(3):
        step(optimizer, gradient)
    assert param.isfinite().all() and optimizer.state[param]["row_avg_sq"][2] < 1e-12
    assert (param[[0, 1, 3, 4, 5]] != before[[0, 1, 3, 4, 5]]).any(1).all()


def test_rows_are_counted_in_the_layout():
    """GPT-2 stores (inputs, outputs), query, key and value in one: a row is an output."""
    model = gpt2()
    mars = create(model, lr=1e-3, mars_type="mars-m", normalize_rows=0.9)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    mars.step()
    block = model.transformer.h[0]
    for layer in (block.attn.c_attn, block.mlp.c_fc, block.mlp.c_proj):
        assert mars.state[layer.weight]["row_avg_sq"].shape == (layer.weight.shape[1],)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_flags_of_accelerators_are_those_of_cpus(dtype):
    """From sums of absolute values: the smallest number moves, as infinity and NaN do; an empty part does not."""
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    values = [0.0, -0.0, smallest, -smallest, largest, -largest, math.inf, math.nan]
    stack = torch.zeros(len(values), 3, 5, dtype=dtype)
    stack[:, 1, 2] = torch.tensor(values, dtype=dtype)
    stack[4:6] = stack[4:6, 1:2, 2:3]  # sums overflow
    of_stack, shard = resting.Units(range(len(values))), resting.Units(range(3), size=15, start=20)
    tensors, units = [stack, stack[:, :0], stack.view(-1)[20:45]], [of_stack, of_stack, shard]
    parts = [resting._parts(*pair) for pair in zip(tensors, units, strict=True)]
    by_sums = resting._moving_flags_by_sums(parts, stack.device)
    assert all(map(torch.equal, by_sums, resting.moving_flags(tensors, units)))
    assert by_sums[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1] and not by_sums[1].any()
    assert [len(flags) for flags in resting._moving_flags_by_sums([[], parts[0]], stack.device)] == [0, len(values)]
