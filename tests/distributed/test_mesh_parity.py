"""Tensor parallelism, alone and under FSDP2, gives the weights and states of one process in plain torch.

Runs are ENGINE/CASE[/FLAG ...]. Engines:

    single     one process, plain torch
    tp         tensor parallelism over all processes; what its plan leaves out is repeated
    fsdp2_tp   the same over two processes, and FSDP2 over the others
    hsdp_tp    the same, with FSDP2's shards repeated over two processes

Flags:

    exact        with the stale gradient of every batch
    resumed      stopped after half of the steps, saved, built anew and loaded
    tied         the head is the embedding
    llama        a Llama that transformers divides by its own plan (tp_plan="auto")
    local_norms  without the sums over ranks inside `Mars.step`: wrong on purpose, to prove that the comparison notices
    partial      gradients of parameters that tensor parallelism repeats come as partial sums
    wide         with rows of whole blocks of 8-bit states, which both dimensions of a mesh divide
    metrics      also notes the metrics of every step
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import Launches, Run, from_all_ranks, leave
from test_parity import MATRIX_CASES, SAME_BLOCKS_SHARE, check_metrics, check_noticed, check_same, share_that_agrees
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train import TorchRun
from workload import ACCUMULATION, BLOCK, MAX_GRAD_NORM, STEPS, VOCAB, build_llama
from workload import CASES as SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

WIDTH, HIDDEN, BOTTLENECK = 16, 27, 3


class Block(nn.Module):
    """A feed-forward network, and a bottleneck of so few units that some ranks hold none."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.narrow, self.wide = nn.Linear(width, BOTTLENECK), nn.Linear(BOTTLENECK, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.gelu(self.up(y))) + self.wide(torch.tanh(self.narrow(y)))


class Model(nn.Module):
    """A language model without attention, which sees one token; `mix` is a matrix that no plan divides."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(BLOCK, width)
        self.mix = nn.Linear(width, width)
        self.blocks = nn.Sequential(Block(width, hidden), Block(width, hidden))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        x = self.blocks(self.mix(self.embedding(ids) + self.positions.weight))
        logits = self.lm_head(self.norm(x))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build_model(flags: set[str]) -> Model:
    """Build the model, with the same weights at every call."""
    torch.manual_seed(0)
    model = Model(64, 256) if "wide" in flags else Model()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):  # norms below and above MAX_GRAD_NORM and CLIP_THRESHOLD
            narrow = BOTTLENECK in module.weight.shape
            nn.init.normal_(module.weight, std=0.2 if isinstance(module, nn.Embedding) else 0.075 if narrow else 0.15)
    if "tied" in flags:
        model.lm_head.weight = model.embedding.weight
    return model


def make_mesh(engine: str) -> DeviceMesh | None:
    world = dist.get_world_size()
    shapes = {"tp": (world,), "fsdp2_tp": (world // 2, 2), "hsdp_tp": (2, world // 4, 2)}
    if engine == "single":
        return None
    shape = shapes[engine]
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp", "tp")[-len(shape) :])


def parallelize(model: Model, mesh: DeviceMesh, flags: set[str]) -> None:
    """Divide the linears as usual; uneven parts need the activations to stay DTensors."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"blocks.*.{name}": ColwiseParallel(use_local_output=False) for name in ("up", "narrow")},
        **{f"blocks.*.{name}": RowwiseParallel() for name in ("down", "wide")},
    }
    parallelize_module(model, mesh["tp"], plan)
    if "tied" in flags:  # parallelize_module gives each module a parameter of its own
        model.lm_head.weight = model.embedding.weight
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    if names:
        for block in model.blocks:
            fully_shard(block, mesh=mesh[names])
        fully_shard(model, mesh=mesh[names])


def clip_gradients(model: nn.Module) -> Tensor:
    """Scale gradients to a norm of at most MAX_GRAD_NORM and return it; clip_grad_norm_ takes one mesh only."""
    meshes: dict[Any, list[Tensor]] = {}
    for param in model.parameters():
        if param.grad is not None:
            meshes.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    norms: list[Any] = [nn.utils.get_total_norm([param.grad for param in params]) for params in meshes.values()]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for params in meshes.values():
        nn.utils.clip_grads_with_norm_(params, MAX_GRAD_NORM, norm)
    return norm


def split_gradients(model: nn.Module) -> None:
    """Leave gradients as partial sums where that is possible, as SequenceParallel does."""
    for param in model.parameters():
        if isinstance(param.grad, DTensor) and param.grad.placements == (Replicate(),):
            mesh = param.grad.device_mesh
            param.grad = DTensor.from_local(param.grad.to_local() / mesh.size(), mesh, [Partial()])


class MeshRun(TorchRun):
    """A model and its optimizer on a mesh."""

    def build(self) -> nn.Module:
        """Build the model, on its mesh, and note which part of the data is this rank's."""
        mesh = make_mesh(self.engine)
        copies = 1 if mesh is None else mesh["tp"].size()
        self.part, self.parts = dist.get_rank() // copies, dist.get_world_size() // copies
        if "llama" in self.flags:
            return build_llama(divided=self.engine != "single")
        model = build_model(self.flags)
        if mesh is not None:
            parallelize(model, mesh, self.flags)
        return model

    def backward(self, step: int) -> None:
        if self.mars.is_exact and self.mars.has_previous_params:
            with self.mars.previous_params():
                self.add_gradients(step)
            self.clip()
            self.mars.update_previous_grad()
            self.mars.update_last_grad()
            self.mars.zero_grad()
        self.add_gradients(step)

    def add_gradients(self, step: int) -> None:
        for micro in range(ACCUMULATION):
            ids = self.tokens.micro_batch(step, micro, self.part, self.parts)
            loss = self.model(ids, labels=ids).loss if "llama" in self.flags else self.model(ids)
            (loss / ACCUMULATION).backward()

    def clip(self) -> Tensor:
        norm = clip_gradients(self.model)
        if "partial" in self.flags:
            split_gradients(self.model)
        return norm


def run(spec: str, file: Path) -> None:
    """Do one run."""
    engine, case, *rest = spec.split("/")
    flags = set(rest)
    own, first = MeshRun(engine, SETTINGS[case], flags), 0
    if "resumed" in flags:
        folder, stopped, first = Path(f"{file}-checkpoint"), own, STEPS // 2
        stopped.train(0, first)
        stopped.save(folder)
        own = MeshRun(engine, SETTINGS[case], flags)
        own.total_norms = stopped.total_norms
        own.load(folder)
    own.train(first, STEPS)
    placements = {name: str(getattr(param, "placements", None)) for name, param in own.model.named_parameters()}
    empty = sum(param.to_local().numel() == 0 for param in own.model.parameters() if isinstance(param, DTensor))
    dtypes = sorted({str(state["exp_avg"].dtype) for state in own.mars.state.values()})
    notes = {**own.notes(), "placements": placements, "empty": sum(from_all_ranks(empty)), "dtypes": dtypes}
    leave(file, notes, own.results())


# --- tests ----------------------------------------------------------------------------------------------------------

# Number of processes, engine, cases.
RUNS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "tp": (
            "adamw",
            "lion_1d/partial",
            "adamw_1d_folded",
            "m",
            "adamw/tied",
            "adamw/llama",
            "m/llama",
            "adamw_8bit/wide",
        )
    },
    4: {
        "fsdp2_tp": (
            "adamw",
            "lion",
            "adamw_1d_folded",
            "shampoo",
            "m/exact",
            "m_folded/resumed",
            "adamw_8bit/wide/resumed",
        ),
        "hsdp_tp": ("m_folded",),
        "tp": ("adamw_1d", "m"),
    },
}
# `pytest -m soak` runs these.
SOAK: dict[int, dict[str, tuple[str, ...]]] = {
    4: {
        "fsdp2_tp": ("adamw/exact", "adamw/tied", "adamw_1d_folded/resumed", "lion_1d_folded", "m", "m_bf16"),
        "hsdp_tp": ("adamw_1d", "shampoo"),
    },
    8: {"fsdp2_tp": ("adamw_1d", "m"), "hsdp_tp": ("adamw_1d_folded", "lion_1d", "shampoo", "m/exact")},
}
FURTHER = {
    2: ("tp/adamw/local_norms", "tp/m/local_norms", "tp/adamw_1d/metrics"),
    4: ("fsdp2_tp/adamw/local_norms", "fsdp2_tp/lion/local_norms", "fsdp2_tp/adamw_1d/metrics"),
}
CASES = [
    pytest.param(world, engine, case, id=f"{engine}-{world}-{case}", marks=marks)
    for runs, marks in ((RUNS, []), (SOAK, [pytest.mark.soak]))
    for world, engines in runs.items()
    for engine, cases in engines.items()
    for case in cases
]


def plain(case: str) -> str:
    """Return the case of one process: clipped before the step, without a stop, with whole gradients."""
    return case.replace("_folded", "").removesuffix("/resumed").removesuffix("/partial")


def specs(world: int, soak: bool) -> list[str]:
    """Return the runs of one launch."""
    if world == 1:
        return [*sorted({f"single/{plain(param.values[2])}" for param in CASES}), "single/adamw_1d/metrics"]
    runs = [f"{engine}/{case}" for engine, cases in (SOAK if soak else RUNS)[world].items() for case in cases]
    return runs if soak else [*runs, *FURTHER[world]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Run]:
    """Return the results of a run; the first request trains all runs of its launch."""
    launches = Launches(run, tmp_path_factory)

    def get(world: int, run: str) -> Run:
        soak = world > 1 and (world not in RUNS or run not in specs(world, soak=False))
        return launches.get(f"{world}{soak}", specs(world, soak), world, run)

    return get


def settings_of(case: str) -> str:
    return case.partition("/")[0]


@pytest.mark.parametrize(("world", "engine", "case"), CASES)
def test_mesh_parity(trained, world, engine, case):
    expected, found = trained(1, f"single/{plain(case)}"), trained(world, f"{engine}/{case}")
    for key in ("weight", "exp_avg") if case.endswith("/exact") else ("weight", "exp_avg", "last_grad"):
        check_same(expected, found, key, settings_of(case))
    if "_8bit" in case:
        for key in ("weight", "exp_avg", "last_grad"):
            assert share_that_agrees(expected.named(key), found.named(key)) >= SAME_BLOCKS_SHARE
        assert found.notes["dtypes"] == ["torch.float32", "torch.int8"]
    if "_folded" in case:  # the step takes the global norm of all gradients
        norms = expected.notes["total_norms"]
        assert min(norms) < MAX_GRAD_NORM < max(norms)
        assert found.notes["total_norms"] == pytest.approx(norms, rel=1e-5)


def test_placements_of_a_mesh(trained):
    """As torch names them; ranks hold uneven and empty parts."""
    alone = trained(2, "tp/adamw").notes
    assert set(alone["placements"].values()) == {
        "None",
        "(Shard(dim=0),)",
        "(Shard(dim=1),)",
        "(Replicate(),)",
    }
    both = trained(4, "fsdp2_tp/adamw").notes
    assert set(both["placements"].values()) == {
        "(Shard(dim=0),)",
        "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "(Shard(dim=0), Shard(dim=1))",
        "(Shard(dim=0), Replicate())",
    }
    assert both["empty"] > 0


@pytest.mark.parametrize(("world", "run"), [(world, run) for world, runs in FURTHER.items() for run in runs])
def test_local_norms_and_metrics(trained, world, run):
    _, case, flag = run.split("/")
    if flag == "metrics":
        check_metrics(trained(1, "single/adamw_1d/metrics"), trained(world, run))
    else:
        check_noticed(trained(1, f"single/{case}"), trained(world, run), case)


@pytest.mark.parametrize(
    ("world", "engine", "case"), [p for p in CASES if settings_of(p.values[2]) not in MATRIX_CASES]
)
def test_all_reduces_of_norms(trained, world, engine, case):
    """Under FSDP2, what tensor parallelism divides is shared with other ranks than what it leaves out or repeats.

    Of a mesh (dp, tp): all ranks share what both divide, those of dp what tensor parallelism leaves out. The biases
    that it repeats, which have a norm if vectors have one, are the same along tp, whose ranks exchange flags. Of a mesh
    (replicate, dp, tp): the ranks of (dp, tp), those of dp unless they are one, and those of replicate.
    """
    notes = trained(world, f"{engine}/{case}").notes
    numel = SETTINGS[settings_of(case)].numel_of_sums(notes["params"])
    for call in notes["calls"]:
        found = call["collectives"]
        if case.endswith("/partial"):  # partial sums are reduced first
            assert len(found) > 1
            found = found[-1:]
        vectors = "_1d" in case or "_folded" in case
        assert len(found) == {"tp": 1, "fsdp2_tp": 2 + vectors, "hsdp_tp": 2 + (world > 4)}[engine]
        assert set(found) == {numel}


@pytest.mark.parametrize(("world", "engine", "case"), [p for p in CASES if settings_of(p.values[2]) in MATRIX_CASES])
def test_work_on_matrices(trained, world, engine, case):
    """But for `mix`, which no plan divides: tensor parallelism repeats it, and nothing tells its ranks."""
    calls = trained(world, f"{engine}/{case}").notes["calls"]
    whole = trained(1, f"single/{plain(case)}").notes["calls"]
    mix, largest = WIDTH * WIDTH, WIDTH * HIDDEN
    for one, other in zip(whole[-len(calls) :], calls, strict=True):
        assert other["orthogonalized"] <= (one["orthogonalized"] - mix) / world + largest + mix
