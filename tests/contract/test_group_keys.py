"""Keys of groups beside parameters: settings, misspelt settings, wrappers' keys; and groups added later."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mars_info import EVERY_IMPLEMENTATION, IMPLEMENTATIONS
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from transformers import TrainingArguments

import mars_hf
from mars_hf import Mars

every_implementation = pytest.mark.parametrize("implementation", EVERY_IMPLEMENTATION)


def make() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 1, value: float = 2.0) -> None:
    for _ in range(steps):
        for param in params:
            param.grad = torch.full_like(param, value)
        optimizer.step()


# --- keys that are not ours -------------------------------------------------------------------------------------

# Keys of timm's layer decay, SAM, schedulers, Megatron and others that label groups.
FOREIGN = {
    **{"lr_scale": 0.5, "lr_mult": 2.0, "rho": 0.05, "adaptive": True, "max_lr": 0.1, "min_lr": 0.0},
    **{"group_name": "decay", "use_muon": False, "is_expert": False, "fan": [1, 2]},
}


def test_keys_of_wrappers_are_carried():
    """Every part of a group split by role keeps such keys."""
    params = make()
    optimizer = Mars([{"params": params, **FOREIGN}], lr=0.1)
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        assert {key: group[key] for key in FOREIGN} == FOREIGN
    train(params, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr_scale": 0.25})
    assert optimizer.param_groups[-1]["lr_scale"] == 0.25
    repr(optimizer)


def test_keys_of_wrappers_are_saved_and_loaded():
    params = make()
    optimizer = Mars([{"params": params, **FOREIGN}])
    train(params, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = Mars(make())
    other.load_state_dict(torch.load(file, weights_only=True))
    for group in other.param_groups:
        assert {key: group[key] for key in FOREIGN} == FOREIGN


def test_keys_set_later_are_carried():
    params = make()
    optimizer = Mars(params)
    for group in optimizer.param_groups:
        group["lr_scale"] = 0.5
    train(params, optimizer, 2)
    other = Mars(make())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr_scale"] for group in other.param_groups] == [0.5, 0.5]


@every_implementation
def test_keys_of_wrappers_change_no_bit(implementation):
    plain, keyed = make(), make()
    train(plain, Mars(plain, **IMPLEMENTATIONS[implementation]), 3)
    train(keyed, Mars([{"params": keyed, **FOREIGN}], **IMPLEMENTATIONS[implementation]), 3)
    assert all(map(torch.equal, plain, keyed))


def test_layer_decay_as_timm_schedules_it():
    """A scheduler of timm multiplies each group's rate by its `lr_scale`."""
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    scales = (0.25, 0.5, 1.0)
    groups = [{"params": [param], "lr_scale": scale} for param, scale in zip(params, scales, strict=True)]
    optimizer = Mars(groups, lr=0.1, clip_threshold=None, gamma=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * group["lr_scale"]
    train(params, optimizer)
    for param, scale in zip(params, scales, strict=True):
        torch.testing.assert_close(param.detach(), torch.full((2, 2), 1 - 0.1 * scale), rtol=0, atol=1e-6)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as a wrapper that shares groups with its base, as public implementations do."""

    def __init__(self, params: Any, base: Callable[..., torch.optim.Optimizer], rho: float = 0.05, **settings: Any):
        super().__init__(params, {"rho": rho, "adaptive": False, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        moves = [param.grad * (self.param_groups[0]["rho"] / norm) for param in params]
        for param, move in zip(params, moves, strict=True):
            param.add_(move)
        with torch.enable_grad():
            closure()
        for param, move in zip(params, moves, strict=True):
            param.sub_(move)
        self.base_optimizer.step()


def test_sharpness_aware_minimization():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    given = torch.randn(8, 4)
    optimizer = SAM(model.parameters(), Mars, lr=0.05)

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(given).pow(2).sum()
        loss.backward()
        return loss

    before = closure().item()
    for _ in range(10):
        optimizer.step(closure)
    assert closure().item() < before
    assert all(group["rho"] == 0.05 for group in optimizer.param_groups)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_zero_redundancy_optimizer_is_refused():
    """It copies its own groups' settings over those of its rank's optimizer, which are split by role."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    roles = [{"params": [param], "role": role} for param, role in zip(make(), ("matrix", "vector"), strict=True)]
    for params in (make(), roles):
        with pytest.raises(RuntimeError, match=r"ZeroRedundancyOptimizer.*FSDP2 \(fully_shard\) or DeepSpeed ZeRO"):
            ZeroRedundancyOptimizer(params, optimizer_class=Mars, lr=0.02)


# --- keys that are meant to be ours -----------------------------------------------------------------------------

MISSPELT = {
    "weigth_decay": "weight_decay",
    "weight_decy": "weight_decay",
    "weight-decay": "weight_decay",
    "gama": "gamma",
    "beta": "betas",
    "Lr": "lr",
    "lrs": "lr",
    "max_grad_nrom": "max_grad_norm",
    "clip_treshold": "clip_threshold",
    "mars_typ": "mars_type",
    "optimise_1d": "optimize_1d",
    "lr1d": "lr_1d",
    "betas1d": "betas_1d",
    "second_momentum": "second_moment",
    "state_dtpye": "state_dtype",
    "roles": "role",
}


@pytest.mark.parametrize(
    ("given", "door"),
    [
        (given, door)
        for given in MISSPELT
        for door in ("Mars", "create", "group", "add_param_group")
        if given != "roles" or "group" in door  # only groups can have a role
    ],
)
def test_a_near_miss_is_an_error_that_names_what_was_meant(given, door):
    params = make()
    with pytest.raises((ValueError, TypeError), match=given) as refused:
        if door == "Mars":
            Mars(params, **{given: 0.1})
        elif door == "create":
            mars_hf.create(params, **{given: 0.1})
        elif door == "group":
            Mars([{"params": params, given: 0.1}])
        else:
            Mars(params[:1]).add_param_group({"params": params[1:], given: 0.1})
    if door != "Mars":  # Python itself refuses it there
        assert MISSPELT[given] in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("mars_type", value) for value in ("adamw", "lion", "mars-muon", None)],
        *[("role", value) for value in ("bias", "matrices", None)],
        ("second_moment", "c"),
        ("rounding", "up"),
        ("state_dtype", "int8"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_an_unknown_value_in_a_group_stops_the_step(name, value, steps):
    """None of them may run the arithmetic of another, AdamW's above all."""
    params = make()
    optimizer = Mars(params)
    if steps:
        train(params, optimizer)
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"{name}={value!r} .*accepted"):
        train(params, optimizer)
    assert all(map(torch.equal, params, before))
    assert all(optimizer.state[param]["step"] == steps for param in params if param in optimizer.state)


# --- tensors as betas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["betas", "betas_1d"])
@pytest.mark.parametrize(
    "given",
    [
        (torch.tensor(0.9), torch.tensor(0.99)),
        (torch.tensor([0.9]), torch.tensor([[0.99]])),
        (0.9, torch.tensor(0.99)),
        torch.tensor([0.9, 0.99]),
        torch.tensor([0.9, 0.99], dtype=torch.float64),
    ],
    ids=["0-d", "one element", "mixed", "one tensor", "one tensor in float64"],
)
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion", "mars-m"])
@every_implementation
def test_tensor_betas_are_right_or_refused(implementation, mars_type, given, name):
    settings = {"mars_type": mars_type, **IMPLEMENTATIONS[implementation]}
    plain = make()
    numbers = Mars(plain, **{name: (0.9, 0.99)}, **settings)
    params = make()
    try:
        optimizer = Mars(params, **{name: given}, **settings)
    except ValueError as refused:
        assert name in str(refused)
        assert "number" in str(refused)
        return
    for one, each in ((plain, numbers), (params, optimizer)):
        train(one, each, 3)
        repr(each)
        copy.deepcopy(each.state_dict())
    for a, b in zip(plain, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- groups added later -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [1.0, None])
@every_implementation
def test_a_group_added_after_max_grad_norm_was_set(implementation, given):
    """A new group gets the others' max_grad_norm: one norm covers all groups."""
    settings = {"max_grad_norm": 0.5, **IMPLEMENTATIONS[implementation]}
    params = make()
    optimizer = Mars(params[:1], **settings)
    optimizer.max_grad_norm = given
    train(params[:1], optimizer)
    optimizer.add_param_group({"params": params[1:]})
    assert optimizer.max_grad_norm == given
    train(params, optimizer)

    plain = make()
    other = Mars(plain, **{**settings, "max_grad_norm": given})
    train(plain[:1], other)
    train(plain, other)
    assert all(map(torch.equal, params, plain))


def test_a_group_added_with_a_norm_of_its_own_is_refused():
    params = make()
    optimizer = Mars(params[:1], max_grad_norm=1.0)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.add_param_group({"params": params[1:], "max_grad_norm": 2.0})
        train(params, optimizer)


def thawing() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("named", [False, True], ids=["tensors", "pairs"])
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_thawed_parameters_are_added_to_the_optimizer_of_a_model(mars_type, named):
    """New groups may hold plain tensors, although the groups of `create(model)` have names."""
    model = thawing()
    optimizer = mars_hf.create(model, mars_type=mars_type)
    train([param for param in model.parameters() if param.requires_grad], optimizer)
    model[0].requires_grad_(True)
    thawed = [(f"0.{name}", param) for name, param in model[0].named_parameters()]
    given = thawed if named else [param for _, param in thawed]
    try:
        optimizer.add_param_group({"params": given, "lr": 0.1})
    except ValueError as refused:
        assert not named
        assert any(hint in str(refused) for hint in ("named_parameters", "(name, tensor)"))  # the remedy
        assert len(optimizer.param_groups) == 2
        return
    before = model[0].weight.detach().clone()
    train(list(model.parameters()), optimizer)
    assert not torch.equal(model[0].weight, before)
    assert optimizer.state[model[0].weight]["step"] == 1
    assert optimizer.state[model[2].weight]["step"] == 2
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        assert len(group.get("param_names", group["params"])) == len(group["params"])
    optimizer.load_state_dict(copy.deepcopy(saved))
    train(list(model.parameters()), optimizer)


@pytest.mark.parametrize("index", [0, 1], ids=["matrix", "vector"])
@every_implementation
def test_a_parameter_of_a_group_may_be_replaced(implementation, index):
    """A parameter of another shape, as after resizing an embedding, gets a new state."""
    params = make()
    optimizer = Mars(params, lr=0.1, max_grad_norm=100.0, **IMPLEMENTATIONS[implementation])
    train(params, optimizer, 3)
    new = nn.Parameter(torch.ones((6, 4) if index == 0 else (9,)))
    optimizer.param_groups[index]["params"][0] = new
    optimizer.state.pop(params[index])
    params[index] = new
    train(params, optimizer, 3)
    assert optimizer.state[new]["step"] == 3
    assert (new < 1).all()
    fresh = nn.Parameter(torch.ones_like(new))
    train([fresh], Mars([fresh], lr=0.1, **IMPLEMENTATIONS[implementation]), 3)
    torch.testing.assert_close(new, fresh, rtol=1e-5, atol=1e-6)


def test_a_group_may_be_removed():
    params = make()
    optimizer = Mars(params)
    train(params, optimizer, 2)
    del optimizer.param_groups[0]
    before = params[0].detach().clone()
    train(params, optimizer, 2)
    assert torch.equal(before, params[0])
    assert optimizer.state[params[1]]["step"] == 4


# --- schedulers with one rate for all ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_one_scalar_rate_for_all_groups_keeps_their_ratio_or_says_that_it_does_not(kind):
    """PyTorch writes the same rate into every group; lr_1d is half of lr unless told otherwise."""
    params = make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer = Mars(params, lr=0.1)
        if kind == "OneCycleLR":
            scheduler: Any = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        else:
            scheduler = CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=4)
        moved = []
        for _ in range(3):
            before = [param.detach().clone() for param in params]
            train(params, optimizer, value=1e-3)
            moved.append([(old - param).abs().max().item() for old, param in zip(before, params, strict=True)])
            scheduler.step()
    keeps_ratio = all(matrix == pytest.approx(2 * vector, rel=0.2) for matrix, vector in moved)
    says_so = any("max_lr" in str(one.message) or "lr_1d" in str(one.message) for one in told)
    documented = kind in (Mars.__doc__ or "")
    assert keeps_ratio or says_so or documented


# --- a rate of vectors that dwarfs that of matrices -------------------------------------------------------------


def warnings_of(make_optimizer: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_optimizer()
    return [str(warning.message) for warning in caught if "lr_1d" in str(warning.message)]


def training_arguments() -> TrainingArguments:
    return TrainingArguments(output_dir="unused", learning_rate=5e-5, use_cpu=True, report_to="none")


def a_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda kind: Mars(make(), lr=5e-5, lr_1d=3e-3, mars_type=kind),
        lambda kind: mars_hf.create(a_model(), lr=5e-5, lr_1d=3e-3, mars_type=kind),
        lambda kind: Mars([{"params": make(), "lr": 5e-5, "lr_1d": 3e-3}], mars_type=kind),
        lambda kind: mars_hf.factory(training_arguments(), lr_1d=3e-3)[0](make(), mars_type=kind),
    ],
    ids=["Mars", "create", "group", "factory"],
)
def test_vectors_at_many_times_the_rate_of_matrices_are_said_once(make_optimizer, mars_type):
    (said,) = warnings_of(lambda: make_optimizer(mars_type))
    assert "lr_1d=0.003" in said
    assert "lr=5e-05" in said
    assert "learning_rate" in said


@pytest.mark.parametrize("settings", [{"lr": 3e-4, "lr_1d": 3e-3}, {"lr": 5e-5}, {"lr_1d": 0.01}], ids=str)
def test_vectors_at_a_usual_rate_say_nothing(settings):
    assert not warnings_of(lambda: Mars(make(), **settings))
    assert not warnings_of(lambda: mars_hf.create(a_model(), **settings))


def test_a_rate_of_embeddings_is_not_one_of_vectors():
    for kind in ("mars-adamw", "mars-m"):
        assert not warnings_of(lambda kind=kind: mars_hf.create(a_model(), lr=1e-3, lr_embeddings=0.1, mars_type=kind))
