"""Print what mars-m's exchange of matrices moves and how it divides the work, for models and ranks one need not have.

It calls the planner that a step uses; nothing is sent. `received_bytes` are those of the busiest rank.

    python benchmarks/exchange_on_paper.py --model llama-7b --ranks 512 --engine hsdp
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time

import torch

from mars_hf.arithmetic.directions import flops
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.arithmetic.newton_schulz import QUINTIC
from mars_hf.distributed.exchange import Matrix, Round, plan_rounds
from mars_hf.distributed.tensors import Slice

STEPS = 5  # of Newton-Schulz
BYTES = 2  # bfloat16


def gpt2(layers: int, width: int) -> list[tuple[tuple[int, int], MatrixLayout]]:
    """Return shapes and layouts of the matrices of a GPT-2."""
    fused = MatrixLayout(transposed=True, parts=(width, width, width))
    plain = MatrixLayout(transposed=True)
    layer = [
        ((width, 3 * width), fused),
        *[(s, plain) for s in ((width, width), (width, 4 * width), (4 * width, width))],
    ]
    return layer * layers


def llama(layers: int, width: int, key: int, inner: int) -> list[tuple[tuple[int, int], MatrixLayout]]:
    """Return shapes and layouts of the matrices of a Llama; `key` is the width of keys and values."""
    shapes = [
        (width, width),
        (key, width),
        (key, width),
        (width, width),
        (inner, width),
        (inner, width),
        (width, inner),
    ]
    return [(shape, MatrixLayout()) for shape in shapes] * layers


MODELS = {
    "gpt2": gpt2(12, 768),
    "gpt2-xl": gpt2(48, 1600),
    "llama-7b": llama(32, 4096, 4096, 11008),
    "llama-70b": llama(80, 8192, 1024, 28672),
}


def shard(rows: int, ranks: int, rank: int) -> Slice:
    """Return the rows that fully_shard leaves on a rank."""
    full = -(-rows // ranks)
    start = min(rank * full, rows)
    return Slice(0, start, min(full, rows - start))


def received(rounds: list[Round], replica: int, rank: int) -> int:
    """Return the elements that a rank receives from others in a step: its matrices, and its shards of all others."""
    elements = 0
    for matrix, owner in itertools.chain(*rounds):
        part = matrix.slice_of(rank)
        held = 0 if part is None else part.shape(matrix.shape).numel()
        elements += matrix.shape.numel() - held if owner == (replica, rank) else held
    return elements


def main() -> None:
    """Plan, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="number of processes")
    parser.add_argument("--engine", choices=("ddp", "fsdp2", "hsdp"), required=True)
    parser.add_argument("--shards", type=int, default=8, help="ranks of a copy under hsdp, as many as a node has GPUs")
    args = parser.parse_args()
    ranks = {"ddp": 1, "fsdp2": args.ranks, "hsdp": min(args.shards, args.ranks)}[args.engine]
    if args.ranks < 1 or args.ranks % ranks:
        parser.error(f"--ranks {args.ranks}: a multiple of --shards {args.shards} is needed")
    start = time.perf_counter()
    matrices = []
    for index, (shape, layout) in enumerate(MODELS[args.model]):
        cost = flops(shape, layout, [QUINTIC] * STEPS, torch.bfloat16, torch.device("cuda"))
        matrices.append(Matrix(index, torch.Size(shape), cost, functools.partial(shard, shape[0], ranks)))
    replicas = args.ranks // ranks
    rounds = plan_rounds(matrices, ranks=ranks, replicas=replicas)
    seconds = time.perf_counter() - start
    work: dict[tuple[int, int], float] = {}
    for matrix, owner in itertools.chain(*rounds):
        work[owner] = work.get(owner, 0.0) + matrix.cost
    owners = itertools.product(range(replicas), range(ranks))
    result = {
        **vars(args),
        "received_bytes": BYTES * max(received(rounds, *owner) for owner in owners),
        "flops_busiest_over_mean": round(max(work.values()) * args.ranks / sum(work.values()), 4),
        "planning_seconds": round(seconds, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
