"""A small GPT with nanoGPT's names, and the trainers' optimizers in straight-line code; nothing here is the package's.

What the two trainers do is in PAPER.md's words: nanoGPT averages gradients and gives AdamW matrices, then vectors; the
official trainer sums them and gives its optimizer linear maps, then all others, each sorted by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from reference import newton_schulz
from torch import Tensor, nn
from torch.nn import functional as F

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


def linear_and_others(model: TinyGPT) -> tuple[list[str], list[str]]:
    """Return the parameters as the official trainer sorts them."""
    names = [name for name, _ in model.named_parameters()]
    linear = sorted(name for name in names if ".c_" in name and name.endswith("weight"))
    return linear, sorted(set(names) - set(linear))


class OfficialMars(torch.optim.Optimizer):
    """One step of the official MARS, approximate form (PAPER.md, 1.1 and 1.2)."""

    def __init__(self, model: TinyGPT, *, lr: float, lr_1d: float, mars_type: str, optimize_1d: bool = False) -> None:
        params = dict(model.named_parameters())
        linear, others = linear_and_others(model)
        groups = [
            {"params": [params[name] for name in linear], "weight_decay": 0.01},
            {"params": [params[name] for name in others], "weight_decay": 0.0},
        ]
        shared = {"lr": lr, "betas": (0.95, 0.99), "eps": 1e-8, "amsgrad": False, "mars_type": mars_type}
        super().__init__(groups, {**shared, "gamma": 0.025, "optimize_1d": optimize_1d, "weight_decay_1d": 0.1})
        self.factor = lr_1d / lr

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s |= {"step": 0, **{key: torch.zeros_like(p) for key in ("exp_avg", "last_grad", "exp_avg_sq")}}
                self._one(group, p, s, p.grad)
                s["last_grad"] = p.grad.clone()

    def _one(self, group: dict[str, Any], p: Tensor, s: dict[str, Any], g: Tensor) -> None:
        is_mars = p.ndim == 2 or group["optimize_1d"]
        beta1, beta2 = group["betas"] if is_mars else (0.9, 0.95)
        lr = group["lr"] * (1 if is_mars else self.factor)
        decay = group["weight_decay"] if is_mars else group["weight_decay_1d"]
        s["step"] += 1
        if is_mars:
            g = g + group["gamma"] * beta1 / (1 - beta1) * (g - s["last_grad"])
            g = g / max(1.0, float(g.norm()))
        s["exp_avg"] = beta1 * s["exp_avg"] + (1 - beta1) * g
        rule = group["mars_type"] if is_mars else "mars-adamw"
        if rule == "mars-lion":
            direction = s["exp_avg"].sign()
        elif rule == "mars-shampoo" and p.ndim == 2:
            direction = newton_schulz(s["exp_avg"] / (1 - beta1), group["eps"]) * max(1, p.shape[0] / p.shape[1]) ** 0.5
        else:
            s["exp_avg_sq"] = beta2 * s["exp_avg_sq"] + (1 - beta2) * g**2
            m, v = s["exp_avg"] / (1 - beta1 ** s["step"]), s["exp_avg_sq"] / (1 - beta2 ** s["step"])
            direction = m / (v.sqrt() + group["eps"])
        p -= lr * (direction + decay * p)


class OfficialMarsM(torch.optim.Optimizer):
    """One step of the official MARS-M, approximate form (PAPER.md, 2)."""

    def __init__(self, model: TinyGPT, *, lr: float) -> None:
        params = dict(model.named_parameters())
        linear, _ = linear_and_others(model)
        first = [name for name in params if name in linear]
        settings = {"lr": lr, "wd": 0.01, "momentum": 0.95, "ns_steps": 5, "adamw_betas": (0.9, 0.95)}
        # The official eps is added to the uncorrected root; this one is too small to show.
        settings |= {
            "adamw_eps": 1e-30,
            "gamma": 0.025,
            "mars_factor": 0.025 * 0.95 / (1 - 0.95),
            "clip_c": False,
            "is_approx": True,
        }
        super().__init__([params[name] for name in (*first, *(name for name in params if name not in first))], settings)
        self.linear = [params[name] for name in first]
        for p in params.values():
            self.state[p]["use_muon"] = any(p is one for one in self.linear)

    @torch.no_grad()
    def step(self) -> None:
        [group] = self.param_groups
        for p in group["params"]:
            s, g, lr = self.state[p], p.grad, group["lr"]
            p *= 1 - lr * group["wd"]
            if s["use_muon"]:
                last = s.get("last_grad", torch.zeros_like(p))
                c = g + group["mars_factor"] * (g - last)
                c = c / max(1.0, float(c.norm()))
                s["momentum_buffer"] = 0.95 * s.get("momentum_buffer", torch.zeros_like(p)) + 0.05 * c
                p -= lr * 0.2 * max(p.shape) ** 0.5 * newton_schulz(s["momentum_buffer"], 1e-7)
                s["last_grad"] = g.clone()
            else:
                s["step"] = s.get("step", 0) + 1
                s["moment1"] = 0.9 * s.get("moment1", torch.zeros_like(p)) + 0.1 * g
                s["moment2"] = 0.95 * s.get("moment2", torch.zeros_like(p)) + 0.05 * g**2
                scale = (1 - 0.9 ** s["step"]) / (1 - 0.95 ** s["step"]) ** 0.5
                p -= lr / scale * s["moment1"] / (s["moment2"].sqrt() + group["adamw_eps"])


def adamw(model: TinyGPT, lr: float) -> torch.optim.AdamW:
    """Return torch's AdamW with the groups of nanoGPT's trainer, or of the official one."""
    params = dict(model.named_parameters())
    first = [name for name, param in params.items() if param.ndim == 2]
    parts: Sequence[list[str]] = (first, [name for name in params if name not in first])
    if model.code == "mars":
        parts = linear_and_others(model)
    groups = [
        {"params": [params[name] for name in part], "weight_decay": decay}
        for part, decay in zip(parts, (0.1, 0.0), strict=True)
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def gradients(forward: Any, params: Sequence[Tensor], batches: Sequence[Tensor], *, average: bool, clip: float) -> None:
    """Set the gradients of a step: of the micro-batches' losses, summed or averaged, clipped to a global norm."""
    for param in params:
        param.grad = None
    for batch in batches:
        logits = forward(batch)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        (loss / len(batches) if average else loss).backward()
    norm = torch.stack([param.grad.norm() for param in params]).norm()
    for param in params:
        param.grad *= min(1.0, clip / float(norm))


def save(path: Path, model: nn.Module, optimizer: Any, step: int, args: dict[str, Any], config: dict[str, Any]) -> Path:
    """Write a checkpoint with the keys of both trainers."""
    content = {"model": model.state_dict(), "model_args": args, "iter_num": step, "config": config}
    content |= {"best_val_loss": torch.tensor(3.25)}
    torch.save(content | ({"optimizer": optimizer.state_dict()} if optimizer else {}), path)
    return path
