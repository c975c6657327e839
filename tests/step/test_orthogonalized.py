"""mars-shampoo and mars-m in the optimizer: one update, however a matrix is stored, grouped or computed."""

from __future__ import annotations

import pytest
import torch
from helpers import gpt2
from reference import Reference, newton_schulz
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

import mars_hf
from mars_hf import Mars
from mars_hf import orthogonalize as orthogonalize_module
from mars_hf.matrix_layouts import MatrixLayout
from mars_hf.newton_schulz import POLAR_EXPRESS, QUINTIC, muon_scale, orthogonalize, shampoo_scale
from mars_hf.orthogonalize import NewtonSchulz, Orthogonalizer, compute_directions, flops

TYPES = ("mars-shampoo", "mars-m")
every_type = pytest.mark.parametrize("mars_type", TYPES)


def random(shape, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(*shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(random(shape, index, dtype)) for index, shape in enumerate(shapes)]


def run(params, optimizer: Mars, steps: range = range(4), scale: float = 1.0) -> list[torch.Tensor]:
    """Take steps with random gradients, clipped at some steps and not at others."""
    for step in steps:
        for index, param in enumerate(params):
            gradient = random(param.shape, 100 * step + index + 7, torch.float64) * scale * (0.02 + 0.1 * (step % 3))
            param.grad = gradient.to(param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def changes(model: nn.Module, gradients, **settings) -> dict[str, torch.Tensor]:
    """Return the change of each parameter of a model over three steps."""
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = mars_hf.create(model, ns_dtype="float32", lr=0.01, **settings)
    for step in range(3):
        for name, param in model.named_parameters():
            param.grad = gradients(name, step)
        optimizer.step()
    return {name: param.detach() - before[name] for name, param in model.named_parameters()}


def close(found, expected, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# --- directions ------------------------------------------------------------------------------------------------------


def settings_of(rule: str, layout: MatrixLayout | None = None, **changed) -> NewtonSchulz:
    plain = {"coefficients": (QUINTIC,) * 5, "eps": 1e-7, "dtype": torch.bfloat16}
    return NewtonSchulz(rule=rule, layout=layout or MatrixLayout(), **{**plain, **changed})


def directions(momenta, settings, out_dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    found = compute_directions(list(momenta.values()), [settings[key] for key in momenta], out_dtype)
    return dict(zip(momenta, found, strict=True))


def test_products_are_shared():
    momenta = {key: random((8, 24) if key % 2 else (8, 8), key) for key in range(8)}
    settings = {
        key: settings_of(TYPES[key % 3 == 0], MatrixLayout(transposed=True, parts=(8, 8, 8) if key % 2 else None))
        for key in momenta
    }
    products = []
    bmm = torch.bmm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bmm", lambda a, b: products.append(len(a)) or bmm(a, b))
        directions(momenta, settings)
    assert products == [4 * 1 + 4 * 3] * 5


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rule", "scale"), [("mars-shampoo", shampoo_scale), ("mars-m", muon_scale)])
def test_scale_rounds_once(rule, scale, out_dtype):
    m = random((12, 5), 0).bfloat16()
    (found,) = directions({0: m}, {0: settings_of(rule)}, out_dtype=out_dtype).values()
    (plain,) = orthogonalize([m], out_dtype=torch.bfloat16)
    assert found.dtype == out_dtype
    torch.testing.assert_close(found, (plain.double() * scale(12, 5)).to(out_dtype), rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((6, 18), MatrixLayout(transposed=True, parts=(6, 6, 6))),
        ((6, 18), MatrixLayout()),
        ((3, 5, 4), MatrixLayout(batched=True)),
        ((8, 3, 2, 2), MatrixLayout()),
    ],
    ids=str,
)
def test_flops(shape, layout):
    settings = settings_of("mars-m", layout, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        directions({0: random(shape, 0)}, {0: settings})
    assert flops(shape, layout, steps=5) == counter.get_total_flops()


def test_chunks(monkeypatch):
    monkeypatch.setattr(orthogonalize_module, "MAX_ELEMENTS_CPU", 64)
    params = make((4, 6), (4, 4), (6, 4), (4, 6), (4, 4), (40, 40), (40, 40), (4, 8))
    double = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    layout = {"transposed": True, "parts": (4, 4), "batched": False}
    mars = Mars([*params[:-1], double], mars_type="mars-m")
    mars.add_param_group({"params": params[-1:], "role": "matrix", "layout": layout})
    for param in (*params, double):
        param.grad = torch.zeros_like(param)
    chunk_of = Orthogonalizer().assign(mars.param_groups, {}, mars._shards.shapes, None)
    a, b, c, d, e, big, other, apart, fused = (chunk_of[index] for index in range(9))
    assert a == c != d  # with the third there would be more than 64 elements
    assert b == e == fused != a
    assert big != other
    assert apart != b


def straight_line(m: torch.Tensor, layout: MatrixLayout, scale) -> torch.Tensor:
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
            out[rows] = (newton_schulz(matrix, 1e-7) * scale(*matrix.shape)).view(out[rows].shape)
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


@pytest.mark.parametrize("rule", ["mars-m", "mars-shampoo"])
@pytest.mark.parametrize("strides", STRIDED)
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
def test_directions_of_any_strides(shape, layout, strides, rule):
    m = STRIDED[strides](shape).double()
    scale = {"mars-m": muon_scale, "mars-shampoo": shampoo_scale}[rule]
    (found,) = directions({0: m}, {0: settings_of(rule, layout, dtype=torch.float64)}, out_dtype=torch.float64).values()
    assert found.shape == m.shape
    assert all(stride > 0 for stride, size in zip(found.stride(), found.shape, strict=True) if size > 1)
    # A constant matrix has rank 1: rounding noise in the other singular values grows by up to 485.
    close(found, straight_line(m, layout, scale), 1e-9)


@pytest.mark.parametrize("rule", ["mars-m", "mars-shampoo"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        *(((0, 4), MatrixLayout(transposed=transposed)) for transposed in (False, True)),
        *(((4, 0), MatrixLayout(transposed=transposed)) for transposed in (False, True)),
        *(((0, 3, 4), MatrixLayout(batched=True)), ((2, 0, 4), MatrixLayout(batched=True))),
        *(((0, 4), MatrixLayout(parts=(2, 2))), ((4, 0, 3, 3), MatrixLayout()), ((0, 0), MatrixLayout())),
    ],
    ids=str,
)
def test_empty_matrices(shape, layout, rule):
    m = {0: torch.empty(shape), 1: random((5, 4), 0)}
    with_empty = directions(m, {0: settings_of(rule, layout), 1: settings_of(rule)})
    assert with_empty[0].shape == shape
    assert torch.equal(with_empty[1], directions({1: m[1]}, {1: settings_of(rule)})[1])
    params = [torch.empty(shape, requires_grad=True), random((5, 4), 0).requires_grad_()]
    mars = Mars([{"params": params[:1], "layout": layout}, {"params": params[1:]}], mars_type=rule)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        mars.step()
        assert params[1].isfinite().all()


# --- layouts ---------------------------------------------------------------------------------------------------------


def to_linear(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, Conv1D):
            linear = nn.Linear(child.nx, child.nf)
            linear.weight = nn.Parameter(child.weight.detach().T.clone())
            linear.bias = nn.Parameter(child.bias.detach().clone())
            setattr(module, name, linear)
        else:
            to_linear(child)


@every_type
@pytest.mark.parametrize("split_fused", ["auto", "none"])
def test_conv1d_and_linear(mars_type, split_fused):
    """Return GPT-2 with Conv1D, whose weights are (in, out), and with nn.Linear."""
    found = []
    for convert in (False, True):
        model = gpt2(n_embd=16).double()
        if convert:
            to_linear(model)
        optimizer = mars_hf.create(model, mars_type=mars_type, split_fused=split_fused, lr=0.02, weight_decay=0.1)
        ids = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(3))
        losses = []
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, {name: p.detach() for name, p in model.named_parameters()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    assert found[0][0][-1] < found[0][0][0]
    assert len(found[0][1]) == len(found[1][1])
    for name, weight in found[0][1].items():
        is_conv1d = any(f"{part}.weight" in name for part in ("c_attn", "c_proj", "c_fc"))
        close(found[1][1][name].T if is_conv1d else found[1][1][name], weight, 1e-9)


@every_type
def test_fused_projection(mars_type):
    fused = nn.Module()
    fused.attn = gpt2(n_embd=16).transformer.h[0].attn
    apart = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
    # A clip sees the whole parameter before any split, so it is off here.
    settings = {"mars_type": mars_type, "clip_threshold": None, "weight_decay": 0.0}
    gradient = [random((16, 48), seed) for seed in range(3)]
    together = changes(
        fused,
        lambda name, step: gradient[step] if name == "attn.c_attn.weight" else None,
        **settings,
    )["attn.c_attn.weight"]
    separate = changes(
        apart, lambda name, step: gradient[step].split(16, dim=1)[int(name[0])].T.contiguous(), **settings
    )
    expected = torch.cat([separate[f"{index}.weight"].T for index in range(3)], dim=1)
    close(together, expected)
    unsplit = gpt2(n_embd=16).transformer.h[0].attn
    whole = changes(
        unsplit, lambda name, step: gradient[step] if name == "c_attn.weight" else None, split_fused="none", **settings
    )["c_attn.weight"]
    assert (whole - together).norm() > 0.1 * together.norm()


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


# --- the update ------------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("shape", [(24, 24), (24, 96), (96, 24)], ids=str)
def test_singular_values_of_the_update(mars_type, shape):
    (param,) = make(shape)
    optimizer = Mars([param], lr=1.0, mars_type=mars_type)
    scale = (shampoo_scale if mars_type == "mars-shampoo" else muon_scale)(*shape)
    for step in range(5):
        before = param.detach().clone()
        param.grad = random(shape, step) * 10.0 ** (step - 3)
        optimizer.step()
        values = torch.linalg.svdvals((param.detach() - before).double()) / scale
        assert values.max() < 1.22
        assert values.median() > 0.67


@every_type
@pytest.mark.parametrize(
    "option",
    [
        {"ns_steps": 4},
        {"ns_coefficients": "polar-express"},
        {"ns_coefficients": (3.0, -3.2, 1.2)},
        {"ns_coefficients": list(POLAR_EXPRESS[:3]), "ns_steps": 3},
        {"ns_dtype": "bfloat16"},
        {"layout": MatrixLayout(parts=(4, 4))},
        {"layout": {"transposed": True, "parts": [2, 3]}},
    ],
    ids=str,
)
def test_options_are_observable(mars_type, option):
    plain, changed = make((8, 5)), make((8, 5))
    settings = {"mars_type": mars_type, "ns_dtype": "float32"}
    groups = [{"params": changed, **option}]
    (a,), (b,) = run(plain, Mars(plain, **settings)), run(changed, Mars(groups, **settings))
    assert (a - b).abs().max() > 1e-5


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": MatrixLayout(parts=(4,))}, r"shape \(6, 4\): the parts do not fit its 6 outputs"),
        ({"layout": {"batched": True}}, r"shape \(6, 4\): too few dimensions"),
        (
            {"ns_steps": 4, "ns_coefficients": "polar-express"},
            "'polar-express' is a schedule of 5 steps and ns_steps=4",
        ),
    ],
    ids=str,
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Mars([{"params": make((6, 4)), **settings}], mars_type="mars-m")


def test_split_fused_without_effect():
    with pytest.raises(ValueError, match=r"split_fused=.*mars-adamw.*orthogonalizes nothing.*'mars-shampoo', 'mars-m'"):
        mars_hf.create(gpt2(), split_fused="none")
    with pytest.raises(ValueError, match=r"split_fused=.*pass the model"):
        mars_hf.create(make((4, 4)), mars_type="mars-m", split_fused="none")
    with pytest.raises(ValueError, match="split_fused='all'"):
        mars_hf.create(gpt2(), mars_type="mars-m", split_fused="all")


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
    monkeypatch.setattr(orthogonalize_module, "cpu_multiplies_bfloat16", lambda: multiplies)
    param = torch.nn.Parameter(torch.ones(4, 3, dtype=dtype, device=device))
    (group,) = mars_hf.Mars([param], mars_type="mars-m").param_groups
    assert orthogonalize_module.iteration_dtype(group, param, param.device) == expected
    assert (
        orthogonalize_module.iteration_dtype({**group, "ns_dtype": "bfloat16"}, param, param.device) == torch.bfloat16
    )
    if expected == torch.float32:  # CPU offload: a GPU does the work
        assert orthogonalize_module.iteration_dtype(group, param, torch.device("meta")) == torch.bfloat16


@pytest.mark.parametrize("mars_type", TYPES)
@pytest.mark.parametrize("multiplies", [True, False])
def test_step_takes_the_dtype_of_the_iteration(monkeypatch, mars_type, multiplies):
    weights = []
    for ns_dtype in (None, "bfloat16" if multiplies else "float32", "float32" if multiplies else "bfloat16"):
        monkeypatch.setattr(orthogonalize_module, "cpu_multiplies_bfloat16", lambda: multiplies)
        param = torch.nn.Parameter(torch.zeros(12, 8))
        param.grad = random((12, 8), 0)
        mars_hf.Mars([param], mars_type=mars_type, ns_dtype=ns_dtype).step()
        weights.append(param.detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
