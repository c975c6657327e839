"""Orthogonalized updates, however a matrix is stored and grouped, and the plan that divides matrices among ranks.

`distributed/test_ranks_in_threads.py` has the exchange that follows the plan.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from typing import Any

import exchange_on_paper
import pytest
import torch
from reference import Reference, newton_schulz
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mars_hf
from mars_hf import Mars
from mars_hf.arithmetic import directions as directions_module
from mars_hf.arithmetic.directions import NewtonSchulz, compute_directions, flops
from mars_hf.arithmetic.matrix_layouts import MatrixLayout, count_rows
from mars_hf.arithmetic.newton_schulz import POLAR_EXPRESS, QUINTIC, muon_scale, shampoo_scale
from mars_hf.distributed import exchange
from mars_hf.distributed.exchange import Matrix, MatrixPlanner, plan_rounds
from mars_hf.distributed.tensors import Slice

SCALES = {"mars-shampoo": shampoo_scale, "mars-m": muon_scale}
every_type = pytest.mark.parametrize("mars_type", SCALES)


def random(shape, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(*shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(random(shape, index, dtype)) for index, shape in enumerate(shapes)]


def close(found, expected, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# --- directions ------------------------------------------------------------------------------------------------------


def settings_of(rule: str, layout: MatrixLayout | None = None, **changed) -> NewtonSchulz:
    plain = {"coefficients": (QUINTIC,) * 5, "eps": 1e-7, "dtype": torch.bfloat16}
    return NewtonSchulz(update_scale=SCALES[rule], layout=layout or MatrixLayout(), **{**plain, **changed})


def test_products_are_shared():
    momenta = [random((8, 24) if key % 2 else (8, 8), key) for key in range(8)]
    layouts = [MatrixLayout(transposed=True, parts=(8, 8, 8) if key % 2 else None) for key in range(8)]
    settings = [settings_of(list(SCALES)[key % 3 == 0], layout) for key, layout in enumerate(layouts)]
    products = []
    bmm = torch.bmm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bmm", lambda a, b: products.append(len(a)) or bmm(a, b))
        compute_directions(momenta, settings, torch.float32)
    assert products == [4 * 1 + 4 * 3] * 5


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((6, 18), MatrixLayout(transposed=True, parts=(6, 6, 6))),
        ((6, 18), MatrixLayout()),
        ((3, 5, 4), MatrixLayout(batched=True)),
        ((8, 3, 2, 2), MatrixLayout()),
        ((6, 40), MatrixLayout()),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_flops_of_newton_schulz(shape, layout, dtype):
    """In float32 the last shape takes its steps on the Gram matrix."""
    with FlopCounterMode(display=False) as counter:
        compute_directions([random(shape, 0)], [settings_of("mars-m", layout, dtype=dtype)], torch.float32)
    assert flops(shape, layout, [QUINTIC] * 5, dtype, torch.device("cpu")) == counter.get_total_flops()


def test_chunks_of_a_step(monkeypatch):
    monkeypatch.setattr(exchange, "CHUNK_ELEMENTS_CPU", 64)
    params = make((4, 6), (4, 4), (6, 4), (4, 6), (4, 4), (40, 40), (40, 40))
    double, fused = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)), make((4, 8))
    layout = {"transposed": True, "parts": (4, 4), "batched": False}
    mars = Mars([{"params": [*params, double]}, {"params": fused, "layout": layout}], mars_type="mars-m")
    for param in (*params, double, *fused):
        param.grad = torch.zeros_like(param)
    chunk_of = MatrixPlanner().assign(mars.param_groups, {}, mars._ranks.shards.shapes, None)
    chunks = [[index for index in range(9) if chunk_of[index] == chunk] for chunk in set(chunk_of.values())]
    # The third (4, 6) would make more than 64 elements, and (40, 40) has more by itself.
    assert sorted(chunks) == [[0, 2], [1, 4, 8], [3], [5], [6], [7]]


def straight_line(m: torch.Tensor, layout: MatrixLayout, scale, eps=1e-7, coefficients=(QUINTIC,) * 5) -> torch.Tensor:
    """Compute directions in float64, with the rows of each matrix written out by `MatrixLayout`'s definition."""
    found = torch.zeros(m.shape, dtype=torch.float64)
    source, target = m.double(), found
    if layout.transposed:
        source, target = (x.transpose(int(layout.batched), int(layout.batched) + 1) for x in (source, target))
    pairs = zip(source, target, strict=True) if layout.batched else [(source, target)]
    for stack, out in pairs:
        parts = layout.parts or (len(stack),)
        for index, size in enumerate(parts):
            first = sum(parts[:index])
            rows = [row for row in range(len(stack)) if first <= row % sum(parts) < first + size]
            matrix = stack[rows].reshape(len(rows), -1)
            out[rows] = (newton_schulz(matrix, eps, coefficients) * scale(*matrix.shape)).view(out[rows].shape)
    return found


LAYOUTS = [
    ((6, 4), MatrixLayout()),
    ((6, 12), MatrixLayout(transposed=True, parts=(4, 4, 4))),
    ((12, 5), MatrixLayout(parts=(2, 1))),
    ((3, 5, 4), MatrixLayout(batched=True)),
    ((3, 4, 8), MatrixLayout(batched=True, transposed=True, parts=(1, 1))),
    ((8, 3, 2, 2), MatrixLayout()),
    ((3, 8, 2, 2), MatrixLayout(transposed=True)),
]
STRIDED = {
    "sliced": lambda shape: random((*shape[:-1], 2 * shape[-1]), 0)[..., ::2],
    "turned": lambda shape: random(tuple(reversed(shape)), 0).permute(*reversed(range(len(shape)))),
    "one row": lambda shape: random((1, *shape[1:]), 0).expand(shape),
    "real part": lambda shape: torch.view_as_complex(random((*shape, 2), 0)).real,
}


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
def test_normalized_rows(shape, layout):
    """Over ten steps, in float64: each output's update, from the directions without normalization."""
    setting = settings_of("mars-m", layout, dtype=torch.float64)
    rows = torch.zeros(count_rows(shape, layout), dtype=torch.float64)
    averages: dict[int, float] = {}  # by the number of an output
    for step in range(10):
        momentum = random(shape, step).double() * torch.logspace(0, 3, shape[-1]).double()
        (plain,) = compute_directions([momentum], [setting], torch.float64)
        (found,) = compute_directions([momentum], [setting._replace(row_beta=0.8)], torch.float64, [rows])
        out_dim = int(layout.batched)
        expected = plain.clone()
        outputs = expected.transpose(out_dim, out_dim + 1) if layout.transposed else expected
        stacks = list(outputs) if layout.batched else [outputs]
        for number, stack in enumerate(stacks):
            parts = layout.parts or (len(stack),)
            for part, size in enumerate(parts):
                first = sum(parts[:part])
                chosen = [row for row in range(len(stack)) if first <= row % sum(parts) < first + size]
                scale = SCALES["mars-m"](len(chosen), stack[0].numel())
                before = sum(float(stack[row].square().sum()) for row in chosen)
                for row in chosen:
                    key = number * len(stack) + row
                    mean = float((stack[row] / scale).square().mean())
                    averages[key] = 0.8 * averages.get(key, 0.0) + 0.2 * mean
                    stack[row] /= averages[key] ** 0.5
                after = sum(float(stack[row].square().sum()) for row in chosen)
                for row in chosen:
                    stack[row] *= (before / after) ** 0.5
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.norm(), plain.norm())
    torch.testing.assert_close(rows.sort().values, torch.tensor(sorted(averages.values())).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", SCALES)
@pytest.mark.parametrize("strides", STRIDED)
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
def test_directions_of_any_strides(shape, layout, strides, rule):
    m = STRIDED[strides](shape).double()
    (found,) = compute_directions([m], [settings_of(rule, layout, dtype=torch.float64)], torch.float64)
    assert found.shape == m.shape
    assert all(stride > 0 for stride, size in zip(found.stride(), found.shape, strict=True) if size > 1)
    # A constant matrix has rank 1: rounding noise in the other singular values grows by up to 485.
    close(found, straight_line(m, layout, SCALES[rule]), 1e-9)


@pytest.mark.parametrize("rule", SCALES)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((0, 4), MatrixLayout()),
        ((4, 0), MatrixLayout(transposed=True)),
        ((0, 3, 4), MatrixLayout(batched=True)),
        ((0, 4), MatrixLayout(parts=(2, 2))),
        ((4, 0, 3, 3), MatrixLayout()),
        ((0, 0), MatrixLayout()),
    ],
    ids=str,
)
def test_empty_matrices(shape, layout, rule):
    params, (twin,) = [torch.empty(shape, requires_grad=True), *make((5, 4))], make((5, 4))
    start = twin.detach().clone()
    groups = [{"params": params[:1], "layout": layout}, {"params": params[1:]}]
    optimizers = Mars(groups, mars_type=rule), Mars([twin], mars_type=rule)
    for _ in range(2):
        for param in (*params, twin):
            param.grad = torch.ones_like(param)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(params[1], twin) and not torch.equal(twin, start) and params[0].shape == shape


def test_clip_precedes_the_split():
    (param,) = make((6, 18), dtype=torch.float64)
    layout = MatrixLayout(transposed=True, parts=(6, 6, 6))
    rule = Reference(param, rule="mars-lion", lr=0.0, betas=(0.95, 0.99), clip_threshold=0.3)
    optimizer = Mars([{"params": [param], "layout": layout}], mars_type="mars-m", clip_threshold=0.3)
    for step in range(3):
        param.grad = random((6, 18), step, torch.float64) * 0.1
        rule.step(param.grad)
        optimizer.step()
    close(optimizer.state[param]["exp_avg"], rule.m, 1e-12)


@every_type
@pytest.mark.parametrize(
    ("options", "coefficients"),
    [
        ({"ns_steps": 4}, [QUINTIC] * 4),
        ({"ns_coefficients": "polar-express"}, POLAR_EXPRESS),
        ({"ns_coefficients": (3.0, -3.2, 1.2)}, [(3.0, -3.2, 1.2)] * 5),
        ({"ns_coefficients": list(POLAR_EXPRESS[:3]), "ns_steps": 3}, POLAR_EXPRESS[:3]),
        ({"layout": MatrixLayout(transposed=True, parts=(2, 3))}, [QUINTIC] * 5),
    ],
    ids=str,
)
def test_options_of_the_iteration(mars_type, options, coefficients):
    (param,) = make((8, 5), dtype=torch.float64)
    start = param.detach().clone()
    optimizer = Mars([{"params": [param], **options}], mars_type=mars_type, lr=0.5, eps=1e-3, betas=(0.9, 0.99))
    param.grad = random((8, 5), 1, torch.float64)
    optimizer.step()
    m = optimizer.state[param]["exp_avg"]
    eps = 1e-7 if mars_type == "mars-m" else 1e-3 * (1 - 0.9)
    direction = straight_line(m, options.get("layout", MatrixLayout()), SCALES[mars_type], eps, coefficients)
    close(param, start - 0.5 * direction, 1e-11)


@every_type
@pytest.mark.parametrize(
    "different",
    [
        [{"eps": 1e-3}, {"eps": 1.0}],
        [{"ns_coefficients": "quintic"}, {"ns_coefficients": "polar-express"}],
        [{"ns_dtype": "float32"}, {"ns_dtype": "bfloat16"}],
        [{"betas": (0.9, 0.99)}, {"betas": (0.5, 0.99)}],  # which scale mars-shampoo's eps
        [{"layout": MatrixLayout()}, {"layout": MatrixLayout(parts=(3, 3))}],
    ],
    ids=lambda groups: next(iter(groups[0])),
)
def test_matrices_of_one_shape_with_different_settings(mars_type, different):
    """Each goes through Newton-Schulz with those of its own group, as in an optimizer of its own."""
    together, apart = make((6, 6), (6, 6)), make((6, 6), (6, 6))
    settings = {"mars_type": mars_type, "lr": 0.5, "eps": 1e-2, "ns_dtype": "float32"}
    optimizers = [
        Mars([{"params": [param], **own} for param, own in zip(together, different, strict=True)], **settings)
    ]
    optimizers += [Mars([{"params": [param], **own}], **settings) for param, own in zip(apart, different, strict=True)]
    for param, twin, size in zip(together, apart, (1e-2, 1e-1), strict=True):
        param.grad = size * random((6, 6), 5)
        twin.grad = param.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    close([param.detach() for param in together], [param.detach() for param in apart])


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": MatrixLayout(parts=(4,))}, r"shape \(6, 4\): the parts do not fit its 6 outputs"),
        ({"layout": {"batched": True}}, r"shape \(6, 4\): too few dimensions"),
    ],
    ids=str,
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Mars([{"params": make((6, 4)), **settings}], mars_type="mars-m")


def test_split_fused_without_a_model():
    with pytest.raises(ValueError, match=r"split_fused=.*pass the model"):
        mars_hf.create(make((4, 4)), mars_type="mars-m", split_fused="none", lr=3e-3)


@pytest.mark.parametrize(
    ("multiplies", "device", "dtype", "expected"),
    [
        (True, "cpu", torch.float32, torch.bfloat16),
        (False, "cpu", torch.float32, torch.float32),
        (False, "cpu", torch.bfloat16, torch.float32),
        (False, "cpu", torch.float64, torch.float64),
        (False, "meta", torch.float32, torch.bfloat16),  # stands for a GPU
    ],
)
def test_dtype_of_the_iteration(monkeypatch, multiplies, device, dtype, expected):
    monkeypatch.setattr(directions_module, "cpu_multiplies_bfloat16", lambda: multiplies)
    param = torch.nn.Parameter(torch.ones(4, 3, dtype=dtype, device=device))
    (group,) = mars_hf.Mars([param], mars_type="mars-m").param_groups
    dtype_of, stated = directions_module.iteration_dtype, {**group, "ns_dtype": "bfloat16"}
    assert (dtype_of(group, param, param.device), dtype_of(stated, param, param.device)) == (expected, torch.bfloat16)
    if expected == torch.float32:  # CPU offload: a GPU does the work
        assert dtype_of(group, param, torch.device("meta")) == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [
        ((7, 0), None, torch.float32),  # V100
        ((7, 5), None, torch.float32),  # T4
        ((8, 0), None, torch.bfloat16),
        ((9, 0), None, torch.bfloat16),
        ((9, 0), "6.4", torch.bfloat16),  # MI100 and later
    ],
)
def test_dtype_of_the_iteration_on_gpus(monkeypatch, capability, hip, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    param = torch.nn.Parameter(torch.ones(4, 3))
    (group,) = mars_hf.Mars([param], mars_type="mars-m").param_groups
    assert directions_module.iteration_dtype(group, param, torch.device("cuda:0")) == expected


@every_type
@pytest.mark.parametrize("multiplies", [True, False])
def test_step_takes_the_dtype_of_the_iteration(monkeypatch, mars_type, multiplies):
    monkeypatch.setattr(directions_module, "cpu_multiplies_bfloat16", lambda: multiplies)
    weights, dtypes = [], ("bfloat16", "float32") if multiplies else ("float32", "bfloat16")
    for ns_dtype in (None, *dtypes):
        param = torch.nn.Parameter(torch.zeros(12, 8))
        param.grad = random((12, 8), 0)
        mars_hf.Mars([param], mars_type=mars_type, ns_dtype=ns_dtype).step()
        weights.append(param.detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


# --- the plan ---------------------------------------------------------------------------------------------------------


def rows(shape: tuple[int, ...], ranks: int) -> Any:
    full = -(-shape[0] // ranks)
    return lambda rank: Slice(0, min(rank * full, shape[0]), max(0, min(full, shape[0] - rank * full)))


def matrices(shapes: list[tuple[int, int]], ranks: int = 1) -> list[Matrix]:
    return [
        Matrix(index, torch.Size(shape), float(shape[0] * shape[1] * min(shape)), rows(shape, ranks))
        for index, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize("ranks", [3, 8, 100, 512])
@pytest.mark.parametrize("model", ["gpt2", "llama-7b"])
def test_work_is_divided(monkeypatch, capsys, model, ranks, engine):
    shards = 8 if ranks % 8 == 0 else 2 if ranks % 2 == 0 else 1
    command = ["x", "--model", model, "--ranks", str(ranks), "--engine", engine, "--shards", str(shards)]
    monkeypatch.setattr(sys, "argv", command)
    exchange_on_paper.main()
    result = json.loads(capsys.readouterr().out)
    assert result["received_bytes"] > 0
    atomic = len(exchange_on_paper.MODELS[model]) / ranks
    assert result["flops_busiest_over_mean"] <= (1.25 if atomic >= 4 else 4 / atomic)


def owners(matrices: list[Matrix], **ranks: int) -> dict[int, tuple[int, int]]:
    """Return the owner of each matrix, by its index."""
    return {matrix.param_index: owner for matrix, owner in itertools.chain(*plan_rounds(matrices, **ranks))}


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 512), (512, 1), (8, 64), (64, 8), (4, 2)])
def test_nobody_idles_while_another_has_two(ranks, replicas):
    plan = owners(matrices([(64, 64)] * 48 + [(64, 192)] * 24, ranks), ranks=ranks, replicas=replicas)
    assert sorted(plan) == list(range(72))
    by_rank, by_replica = Counter(plan.values()), Counter(replica for replica, _ in plan.values())
    assert max(by_rank.values()) == 1 or len(by_rank) == ranks * replicas
    assert max(by_replica.values()) - min(by_replica[replica] for replica in range(replicas)) <= max(1, 72 % replicas)


@pytest.mark.parametrize("replicas", [1, 4])
def test_rounds_bound_what_a_rank_receives(replicas):
    rounds = plan_rounds(
        matrices([(10, 10)] * 40 + [(30, 30)], 2), ranks=2, replicas=replicas, max_elements=400 * replicas
    )
    for matrices_of_round in rounds:
        held = Counter()
        for matrix, owner in matrices_of_round:
            held[owner] += matrix.shape.numel()
        assert all(elements <= 400 or elements == 900 for elements in held.values())
    assert sorted(matrix.param_index for matrix, _ in itertools.chain(*rounds)) == list(range(41))


def test_the_plan_is_the_same_in_any_order():
    orders = itertools.permutations(matrices([(8, 8), (4, 16), (8, 8), (2, 40)], 2))
    plans = [owners(list(order), ranks=2, replicas=2) for order in orders]
    assert all(plan == plans[0] for plan in plans)
