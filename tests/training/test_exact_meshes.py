"""Exact MARS in MarsTrainer where tensor parallelism divides some of a model's parameters and not others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import VOCAB
from test_stale_pass import exact_run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import TrainerCallback

import mars_hf

MAX_GRAD_NORM = 0.3


class Model(nn.Module):
    """Predict each token's label from the token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCAB)

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.mix(self.embed(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def partly_parallel() -> Model:
    """Return the model with an embedding and a head of DTensors, each on a mesh of its own."""
    model = Model()
    one, other = (init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("tp", "tp_of_the_head"))
    parallelize_module(model.embed, one, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model.head, other, ColwiseParallel(output_layouts=Replicate()))
    # As transformers' models that a `tp_plan` divides, which Trainer leaves where they are.
    model.is_distributed_loading_by_transformers = True
    return model


class Norms(TrainerCallback):
    """Record the norm of every stale gradient."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.trainer: Any = None

    def on_optimizer_step(self, args, state, control, **_):
        norm = self.trainer._stale_pass.norm
        self.found.append(-1.0 if norm is None else norm.item())


def test_gradients_of_several_meshes_are_clipped_by_their_common_norm(alone, tmp_path):
    """The stale ones too, and as those of a model without DTensors; torch's own functions take one mesh only."""
    models, norms = (Model(), partly_parallel()), (Norms(), Norms())
    for model, own in zip(models, norms, strict=True):
        run = exact_run(
            tmp_path, model, kind=mars_hf.MarsTrainer, max_steps=4, max_grad_norm=MAX_GRAD_NORM, callbacks=[own]
        )
        own.trainer = run
        run.train()
    meshes = {getattr(param, "device_mesh", None) for param in models[1].parameters()}
    assert len(meshes) == 3
    assert norms[1].found == pytest.approx(norms[0].found, rel=1e-5)
    assert norms[0].found[0] == -1.0 and min(norms[0].found[1:]) > MAX_GRAD_NORM  # so that all were clipped
    for (name, plain), divided in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        found = divided.full_tensor() if isinstance(divided, DTensor) else divided
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5 * plain.abs().max().item(), msg=name)
