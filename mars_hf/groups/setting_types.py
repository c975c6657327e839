"""Types of the settings for editors and type checkers; settings.py has defaults, meanings and what is accepted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from typing_extensions import TypedDict

# Names as plain strings are accepted too: they may come from a command line.
Pair = tuple[float, float] | list[float]
Dtype = torch.dtype | Literal["float16", "bfloat16", "float32", "float64"] | str


class CreateSettings(TypedDict, total=False):
    """Settings of `create`."""

    lr: float | torch.Tensor
    betas: Pair
    eps: float
    weight_decay: float
    gamma: float
    mars_type: Literal["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "muon"] | str
    is_approx: bool
    clip_threshold: float | None
    amsgrad: bool
    optimize_1d: bool
    lr_1d: float | torch.Tensor | None
    betas_1d: Pair
    weight_decay_1d: float | None
    weight_decay_mode: Literal["standard", "cautious", "decoupled"] | str
    second_moment: Literal["corrected", "gradient"] | str
    ns_steps: int
    ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]]
    ns_dtype: Dtype | None
    normalize_rows: float | None
    max_grad_norm: float | None
    state_dtype: Dtype | Literal["8bit"] | None
    rounding: Literal["nearest", "stochastic", "kahan"] | str
    maximize: bool
    fused: bool | None
    split_fused: Literal["auto", "none"] | str | Mapping[str, Sequence[int]]
    lr_embeddings: float | None
    param_rules: Iterable[tuple[str, Mapping[str, Any]] | Mapping[str, Any]]
    adamw_rates: bool
    release_gradients: bool


class FactorySettings(CreateSettings, total=False):
    """Settings of `factory` and `mars_kwargs`."""

    beta1: float
    beta2: float
    beta1_1d: float
    beta2_1d: float
    like: str | os.PathLike[str] | None
