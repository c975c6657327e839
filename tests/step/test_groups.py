"""Parameter groups: foreign keys, groups added, removed and refused, and rates that are warned of."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from helpers import arguments, equal, gpt2, logged
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import SWALR

import mars_hf
from mars_hf import Mars
from mars_hf.arithmetic.update_rules import update_rule
from mars_hf.step.lists import build_lists


def make() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 1, value: float = 2.0) -> None:
    for _ in range(steps):
        for param in params:
            param.grad = torch.full_like(param, value)
        optimizer.step()


# Keys of timm's layer decay, SAM, schedulers, Megatron and others that label groups.
FOREIGN = {
    **{"lr_scale": 0.5, "lr_mult": 2.0, "rho": 0.05, "adaptive": True, "max_lr": 0.1, "min_lr": 0.0},
    **{"group_name": "decay", "use_muon": False, "is_expert": False, "fan": [1, 2]},
}


def test_foreign_keys_are_carried():
    """Every part of a group split by role keeps them, through a saved state too; they change no bit."""
    params, plain = make(), make()
    optimizer = Mars([{"params": params, **FOREIGN}], lr=0.1)
    optimizer.state[params[0]]["theirs"] = {"rank": 3, "factors": [torch.ones(2)]}  # any shape and type
    train(params, optimizer, 3)
    train(plain, Mars(plain, lr=0.1), 3)
    assert all(map(torch.equal, params, plain))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr_scale": 0.25})
    assert optimizer.param_groups[-1]["lr_scale"] == 0.25
    other = Mars([*({"params": [param]} for param in make()), {"params": [nn.Parameter(torch.ones(2, 2))]}])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert equal(*(each.state_dict()["state"][0]["theirs"] for each in (optimizer, other)))
    for one in (optimizer, other):
        assert all({key: group[key] for key in FOREIGN} == FOREIGN for group in one.param_groups[:2])


def test_zero_redundancy_optimizer_is_refused(alone):
    """It copies its own groups' settings over those of its rank's optimizer, which are split by role."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with pytest.raises(RuntimeError, match=r"ZeroRedundancyOptimizer.*FSDP2 \(fully_shard\) or DeepSpeed ZeRO"):
        ZeroRedundancyOptimizer(make(), optimizer_class=Mars, lr=0.02)


@pytest.mark.filterwarnings("default:optimizer contains")
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (lambda a, b: a, TypeError, "should be an iterable of Tensors or dicts"),
        (lambda a, b: [{"params": a}, {"params": a}], ValueError, "appear in more than one parameter group"),
        (lambda a, b: [("a", a), b], ValueError, "with/without names"),
        (lambda a, b: [{"params": [a]}, {"params": [("b", b)]}], ValueError, "should be with/without names"),
        (lambda a, b: [a, 1], TypeError, "got int"),
        (lambda a, b: [{"params": {a}}], TypeError, "set"),
        (lambda a, b: [], ValueError, "empty parameter list"),
        (lambda a, b: [a * 2], ValueError, "non-leaf"),
        (lambda a, b: [{"params": [a], "gama": 0.1}], ValueError, "'gama'.*gamma"),
        (lambda a, b: [{"params": [b], "role": "matrix"}], ValueError, r"role='matrix' for .* shape \(5,\)"),
        (lambda a, b: [{"params": [a], "role": "tensor"}], ValueError, "'matrix', 'vector', 'adamw'"),
    ],
)
def test_parameters_that_are_refused(params, error, message):
    with pytest.raises(error, match=message):
        Mars(params(*make()))


def test_refused_group_leaves_the_optimizer_as_it_was():
    params, new = make(), nn.Parameter(torch.ones(3, 3))
    optimizer = Mars(params, max_grad_norm=1.0)
    # The vector is there already, and the matrix is added first.
    for group in ({"params": [new, params[1]]}, {"params": [new], "lr": -1}, {"params": [new], "gama": 1}):
        with pytest.raises(ValueError):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 2
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([new])
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.add_param_group({"params": [new], "max_grad_norm": 2.0})
        train([*params, new], optimizer)


@pytest.mark.parametrize("limit", [1.0, None])
def test_added_group_shares_the_global_norm(limit):
    """Also if the owner of the loop has set it since."""
    params, plain = make(), make()
    optimizer, other = Mars(params[:1], max_grad_norm=0.5), Mars(plain, max_grad_norm=limit)
    optimizer.max_grad_norm = limit
    train(params[:1], optimizer)
    optimizer.add_param_group({"params": params[1:]})
    assert optimizer.max_grad_norm == limit
    train(params, optimizer)
    train(plain[:1], other)
    train(plain, other)
    assert all(map(torch.equal, params, plain))


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), "1"], ids=str)
def test_max_grad_norm_is_checked_where_it_is_set(value):
    optimizer = Mars(make(), max_grad_norm=0.5)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.max_grad_norm = value
    assert optimizer.max_grad_norm == 0.5


def test_names_of_added_groups_differ():
    """Plain tensors are named by their place among all parameters, so that no two groups share a name."""
    optimizer = Mars([("weight", make()[0])])
    for _ in range(2):
        optimizer.add_param_group({"params": make()})
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert names == ["weight", "added_1", "added_2", "added_3", "added_4"]


@pytest.mark.parametrize("named", [False, True], ids=["tensors", "pairs"])
def test_thawed_parameters_are_added(named):
    """New groups may hold plain tensors, although the groups of `create(model)` have names."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = mars_hf.create(model, mars_type="mars-m", lr=3e-3)
    train([param for param in model.parameters() if param.requires_grad], optimizer)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].named_parameters() if named else model[0].parameters())})
    train(list(model.parameters()), optimizer)
    assert [optimizer.state[model[index].weight]["step"] for index in (0, 2)] == [1, 2]
    saved = optimizer.state_dict()
    assert all(len(group["param_names"]) == len(group["params"]) for group in saved["param_groups"])
    optimizer.load_state_dict(copy.deepcopy(saved))


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "steps_before"),
    [
        (lambda mars, lr: OneCycleLR(mars, max_lr=lr, total_steps=10), 0),
        (lambda mars, lr: SWALR(mars, swa_lr=lr), 2),  # in the middle of a run
    ],
    ids=["OneCycleLR", "SWALR"],
)
def test_one_rate_for_all_groups_is_said(schedule, steps_before):
    """lr_1d is half of lr; a list of rates keeps the ratio."""
    for lr, count in ((0.1, 1), ([0.1, 0.05], 0)):
        params = make()
        optimizer = Mars(params, lr=0.1)
        assert not logged(functools.partial(train, params, optimizer, steps_before), "learning rate")
        scheduler = schedule(optimizer, lr)

        def run(params=params, optimizer=optimizer, scheduler=scheduler) -> None:
            for _ in range(2):
                train(params, optimizer)
                scheduler.step()

        assert len(logged(run, "groups have the learning rate")) == count


def assign_one_rate(optimizer: Mars, step: int) -> None:
    """As the training loop of nanoGPT does."""
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (step + 1)


def warm_up_as_deepspeed(optimizer: Mars, step: int) -> None:
    lr_schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="needs deepspeed (extra `deepspeed`)")
    if step == 0:
        optimizer.warm_up = lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.1, warmup_num_steps=4)
    optimizer.warm_up.step()


def decay_to_zero(optimizer: Mars, step: int) -> None:
    """As schedulers do, which scale each group's own rate."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - step / 5)


@pytest.mark.parametrize(("schedule", "count"), [(assign_one_rate, 1), (warm_up_as_deepspeed, 1), (decay_to_zero, 0)])
@pytest.mark.parametrize("lr_1d", [0.05, 0.1])
def test_one_number_assigned_to_all_groups_is_said_once(schedule, count, lr_1d):
    """Vectors train at a multiple of their rate then; groups made with one rate lose nothing."""
    params = make()
    optimizer = Mars(params, lr=0.1, lr_1d=lr_1d)

    def run() -> None:
        for step in range(6):
            schedule(optimizer, step)
            train(params, optimizer)

    said = logged(run, "groups have the learning rate")
    assert len(said) == (count if lr_1d != 0.1 else 0)
    assert all("were made with 0.05 to 0.1" in message for message in said)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m", "muon"])
@pytest.mark.parametrize("named", [False, True])
def test_groups_added_later_are_those_of_the_model(mars_type, named):
    """Unfreezing part by part ends in the groups of a model that was never frozen: roles, layouts and decay."""
    settings = {"mars_type": mars_type, "param_rules": [("*.mlp.c_proj.weight", {"weight_decay": 0.3})]}
    model, whole_model = gpt2(), gpt2()
    whole = mars_hf.create(whole_model, **{"lr": 3e-3, **settings})
    for part in (model.transformer.wte, model.transformer.h[1]):
        part.requires_grad_(False)
    optimizer = mars_hf.create(model, **{"lr": 3e-3, **settings})
    for part in (model.transformer.wte, model.transformer.h[1]):
        part.requires_grad_(True)
        entries = [(f"a.{name}", param) for name, param in part.named_parameters()] if named else part.parameters()
        assert not logged(lambda entries=entries: optimizer.add_param_group({"params": entries}), "group")
    keys = ("role", "layout", "lr", "betas", "weight_decay", "mars_type")
    described = []
    for one, its_model in ((whole, whole_model), (optimizer, model)):
        names = {param: name for name, param in its_model.named_parameters()}
        groups = [(names[p], [group[key] for key in keys]) for group in one.param_groups for p in group["params"]]
        described.append(dict(groups))
    assert described[0] == described[1]


def test_groups_of_unknown_parameters_are_said():
    model = gpt2()
    optimizer = mars_hf.create(model, mars_type="mars-m", lr=3e-3)
    (message,) = logged(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 3))]}), "group")
    assert "1 of 1 parameters in a new group are not trainable parameters of the model" in message
    stated = {"params": [nn.Parameter(torch.ones(4, 3))], "role": "adamw"}
    assert not logged(lambda: optimizer.add_param_group(stated), "group")
    assert [group["role"] for group in optimizer.param_groups[-2:]] == ["matrix", "adamw"]


def a_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda kind, _: Mars(make(), lr=5e-5, lr_1d=3e-3, mars_type=kind),
        lambda kind, _: mars_hf.create(a_model(), lr=5e-5, lr_1d=3e-3, mars_type=kind),
        lambda kind, _: Mars([{"params": make(), "lr": 5e-5, "lr_1d": 3e-3}], mars_type=kind),
        lambda kind, folder: mars_hf.factory(arguments(folder), lr_1d=3e-3)[0](make(), mars_type=kind),
    ],
    ids=["Mars", "create", "group", "factory"],
)
def test_fast_vectors_are_said_once(make_optimizer, kind, tmp_path):
    (said,) = logged(lambda: make_optimizer(kind, tmp_path), "rate of vectors")
    assert "lr_1d=0.003" in said and "lr=5e-05" in said and "learning_rate" in said


@pytest.mark.parametrize("settings", [{"lr": 3e-4, "lr_1d": 3e-3}, {"lr": 5e-5}, {"lr_embeddings": 0.1}], ids=str)
def test_usual_rates_say_nothing(settings):
    for kind in ("mars-adamw", "mars-m"):
        assert not logged(
            lambda kind=kind: mars_hf.create(a_model(), mars_type=kind, **{"lr": 3e-3, **settings}), "rate"
        )


def test_chunks_are_of_matrices_alone():
    """A tensor of ZeRO that holds several parameters may be at the index of a matrix."""
    vector = nn.Parameter(torch.ones(3))
    vector.grad = torch.ones(3)
    optimizer = Mars([{"params": [vector], "role": "adamw"}], mars_type="mars-m")
    (tensors,), _ = build_lists(
        optimizer.param_groups, [update_rule(optimizer.param_groups[0])], optimizer.state, {}, {0: "of a matrix"}
    )
    assert tensors.chunk is None
