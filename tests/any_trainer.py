"""Train any class of trainers with MARS, and in straight lines: autograd's gradients, the rest in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from reference import clip, place, references, trajectory
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import mars_hf

STEPS = 3
LR_1D = 5e-3
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "gamma": 0.05}


def apart(found: dict[str, nn.Parameter], expected: dict[str, nn.Parameter], start: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the farthest that a weight has moved.

    Adam's steps are of one size; weights whose gradient is 0 but for rounding move by chance, and hardly.
    """
    moved = {name: (weight.detach() - start[name]).abs().max().item() for name, weight in expected.items()}
    assert all(torch.equal(found[name], start[name]) for name in moved if moved[name] == 0)  # weights without use
    farthest = max(moved.values())
    assert sorted(moved.values())[len(moved) // 2] > farthest / 5
    return max((found[name] - expected[name]).abs().max().item() for name in moved) / farthest


def trained(trainer: Any) -> dict[str, nn.Parameter]:
    """Return what a trainer trains, by name: the model, and weights of a loss."""
    loss = getattr(trainer, "loss", None)
    named = {param: f"0.{name}" for name, param in trainer.model.named_parameters()}
    if isinstance(loss, nn.Module):
        named = {param: f"1.{name}" for name, param in loss.named_parameters()} | named  # a loss may hold the model
    return {name: param for param, name in named.items() if param.requires_grad}


def hold_to_straight_lines(make: Callable[..., Any], kind: type, *, exact: bool, bar: float = 2e-4) -> Any:
    """Train with `with_mars(kind)`, and in straight lines with the losses of a plain `kind`; return the trainer.

    Args:
        make: returns a trainer of a class, always with the same weights and data.
        kind: the class.
        exact: whether MARS is exact.
        bar: on the difference, relative to the farthest that a weight has moved.
    """
    run = make(mars_hf.with_mars(kind), lambda params: optimizer_of(params, exact))
    found = trained(run)
    start = {name: param.detach().clone() for name, param in found.items()}
    run.train()
    plain = make(kind, lambda params: torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    expected = trained(plain)
    rows = iter(plain.get_train_dataloader())
    batches = [plain.get_batch_samples(rows, 1, plain.args.device) for _ in range(STEPS)]
    plain.model.train()
    clipped = {name for name in expected if name.startswith("0.")}

    def gradients(step: int, at: dict[str, Tensor]) -> dict[str, Tensor]:
        place(expected, at)
        ((inputs,), items) = copy.deepcopy(batches[step])
        loss = plain.compute_loss(plain.model, plain._prepare_inputs(inputs), num_items_in_batch=items)
        found = torch.autograd.grad(loss, list(expected.values()), allow_unused=True)
        return clip({name: g.double() for name, g in zip(expected, found, strict=True) if g is not None}, clipped)

    place(expected, trajectory(references(expected, SETTINGS, LR_1D), gradients, STEPS, exact=exact)[-1])
    assert apart(found, expected, start) < bar
    return run


def optimizer_of(params: Any, exact: bool) -> mars_hf.Mars:
    return mars_hf.Mars(params, **SETTINGS, lr_1d=LR_1D, clip_threshold=1.0, is_approx=not exact)


WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]
TEXTS = [" ".join(WORDS[(i * k) % 8] for i in range(1, 5 + k % 4)) for k in range(1, 25)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
