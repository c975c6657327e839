"""Train a small model whose linears tensor parallelism divides, alone and under FSDP2; see test_mesh_parity.py.

    torchrun --nproc_per_node 4 mesh.py OUTPUT ENGINE/CASE[/FLAG ...] ...

Each run leaves OUTPUT/<run>.safetensors with whole fp32 weights and states, and OUTPUT/<run>.json with notes.

Engines:

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
    metrics      also notes the metrics of every step
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import from_all_ranks, leave, main
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train import TorchRun
from workload import ACCUMULATION, BLOCK, CASES, MAX_GRAD_NORM, STEPS, VOCAB

WIDTH, HEADS, HIDDEN, BOTTLENECK = 16, 4, 27, 3


class Block(nn.Module):
    """Attention and a feed-forward network, and a bottleneck of so few units that some ranks hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # softmax does not see it: its gradient is rounding noise
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.narrow, self.wide = nn.Linear(WIDTH, BOTTLENECK), nn.Linear(BOTTLENECK, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the parts' outputs to `x`, of shape (batch, length, width)."""
        y = self.norm1(x)
        heads = [part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.attention_inputs()]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(nn.functional.gelu(self.up(y))) + self.wide(torch.tanh(self.narrow(y)))

    def attention_inputs(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.query, self.key, self.value


class Model(nn.Module):
    """A language model; `mix` is a matrix that no plan divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        x = self.mix(self.embedding(ids) + self.positions.weight)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build_model(flags: set[str]) -> Model:
    """Build the model, with the same weights at every call."""
    torch.manual_seed(0)
    model = Model()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):  # gradient norms below and above MAX_GRAD_NORM
            nn.init.normal_(module.weight, std=0.2 if isinstance(module, nn.Embedding) else 0.15)
    if "tied" in flags:
        model.lm_head.weight = model.embedding.weight
    return model


def build_llama(engine: str) -> nn.Module:
    """Build a Llama, with the same weights at every call; transformers divides while it loads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 28, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=2))
    if engine == "single":
        return model
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        model.save_pretrained(folders[0])  # the first rank writes
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(folders[0], dtype=torch.float32, tp_plan="auto")
        dist.barrier()
    return model


def make_mesh(engine: str) -> DeviceMesh | None:
    world = dist.get_world_size()
    if engine == "single":
        return None
    if engine == "tp":
        return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    if engine == "fsdp2_tp":
        return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=("replicate", "dp", "tp"))


def parallelize(model: Model, mesh: DeviceMesh, flags: set[str]) -> None:
    """Divide the linears as usual; uneven parts need the activations to stay DTensors."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        **{f"blocks.*.{name}": ColwiseParallel(use_local_output=False) for name in ("up", "narrow")},
        **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down", "wide")},
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
        names = () if mesh is None else mesh.mesh_dim_names or ()
        self.part, self.parts = 0, 1
        for name in names:
            if name != "tp":
                size = mesh[name].size()
                self.part, self.parts = self.part * size + mesh[name].get_local_rank(), self.parts * size
        if "llama" in self.flags:
            return build_llama(self.engine)
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
    own = MeshRun(engine, CASES[case], flags)
    if "resumed" in flags:
        folder = Path(f"{file}-checkpoint")
        own.train(0, STEPS // 2)
        own.save(folder)
        norms = own.total_norms
        own = MeshRun(engine, CASES[case], flags)
        own.total_norms = norms
        own.load(folder)
        own.train(STEPS // 2, STEPS)
    else:
        own.train(0, STEPS)
    placements = {name: str(getattr(param, "placements", None)) for name, param in own.model.named_parameters()}
    empty = sum(param.to_local().numel() == 0 for param in own.names if isinstance(param, DTensor))
    leave(file, {**own.notes(), "placements": placements, "empty": sum(from_all_ranks(empty))}, own.results())


if __name__ == "__main__":
    main(run)
