"""A small GPT with nanoGPT's names; nothing here is the package's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, BLOCK, WIDTH = 40, 16, 12


class Norm(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        y = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight
        return y if self.bias is None else y + self.bias


class Attention(nn.Module):
    def __init__(self, heads: int, bias: bool, mask: int | None, divisor: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.heads, self.divisor = heads, divisor
        if mask:
            self.register_buffer("bias", torch.ones(1, 1, mask, mask).tril())

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1]) / self.divisor
        hidden = torch.ones(length, length).triu(1).bool()
        mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.c_proj(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Mlp(nn.Module):
    def __init__(self, bias: bool, exact: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        self.exact = exact

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        if self.exact:
            x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
        else:
            x = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return self.c_proj(x)


class Layer(nn.Module):
    def __init__(self, bias: bool, exact: bool, mask: int | None, divisor: int) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(bias), Attention(3, bias, mask, divisor)
        self.ln_2, self.mlp = Norm(bias), Mlp(bias, exact)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TinyGPT(nn.Module):
    """nanoGPT's model, or with `code="mars"` that of the official repository: tanh, causal masks, scaled scores."""

    def __init__(
        self, code: str = "nanogpt", *, bias: bool = False, exact: bool | None = None, layers: int = 2
    ) -> None:
        super().__init__()
        official = code == "mars"
        exact = not official if exact is None else exact
        self.code, self.bias, self.layers = code, bias, layers
        blocks = [
            Layer(bias, exact, BLOCK if official else None, index + 1 if official else 1) for index in range(layers)
        ]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(BLOCK, WIDTH),
                "h": nn.ModuleList(blocks),
                "ln_f": Norm(bias),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        with torch.no_grad():
            for param in self.parameters():  # large, so that GELUs and scales show
                param.add_(torch.randn_like(param), alpha=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))

    def model_args(self) -> dict[str, Any]:
        found = {"n_layer": self.layers, "n_head": 3, "n_embd": WIDTH, "block_size": BLOCK, "bias": self.bias}
        found |= {"vocab_size": VOCAB, "dropout": 0.0}
        return found | ({"scale_attn_by_inverse_layer_idx": True} if self.code == "mars" else {})


def save(path: Path, model: nn.Module, /, **changes: Any) -> Path:
    """Write a checkpoint with the keys of both trainers; changes state others, or leave keys out as None."""
    content = {"model": model.state_dict(), "model_args": model.model_args(), "iter_num": 7, "config": {"dataset": "x"}}
    content |= {"best_val_loss": torch.tensor(3.25), **changes}
    torch.save({key: value for key, value in content.items() if value is not None}, path)
    return path
