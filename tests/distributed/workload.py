"""The workload of every engine: one tiny GPT-2, its data and its hyperparameters. Independent of engines."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import mars_hf

STEPS = 8
ACCUMULATION = 2
MICRO_BATCH = 4  # sequences of one micro-batch, over all ranks
BLOCK = 12
VOCAB = 61
MAX_GRAD_NORM = 1.0
# Between the norms of the large and of the small parameters, so that c_t is clipped in some and not in others.
CLIP_THRESHOLD = 0.1
_LR = {"mars-adamw": 3e-3, "mars-lion": 1e-3, "mars-shampoo": 3e-3, "mars-m": 3e-3}


@dataclass(frozen=True)
class Case:
    """One setting of the optimizer, with peculiarities of the model's gradients."""

    mars_type: str = "mars-adamw"
    optimize_1d: bool = False
    frozen: bool = False  # position embeddings do not train
    skipping: bool = False  # the branch lacks a gradient in every other step
    clip_threshold: float | None = CLIP_THRESHOLD
    folded: bool = False  # the step clips by the global norm itself
    ns_dtype: str | None = None  # of Newton-Schulz, for mars-shampoo and mars-m
    normalize_rows: float | None = None
    state_dtype: str | None = None  # 8bit: of a wider model, whose rows are whole blocks
    kernels: bool = False  # the device's kernels, which a model of this size does not use by default

    def hyperparameters(self) -> dict[str, Any]:
        """Return all arguments of `mars_hf.create`, so that nothing depends on defaults.

        eps is 1e-6 because the key biases have no gradient but rounding noise (softmax does not see them), which a
        smaller eps would turn into steps: other noise, other steps.
        """
        return {
            "lr": _LR[self.mars_type],
            "eps": 1e-6,
            "gamma": 0.025,
            "weight_decay": 0.1,
            "mars_type": self.mars_type,
            "optimize_1d": self.optimize_1d,
            "clip_threshold": self.clip_threshold,
            "max_grad_norm": MAX_GRAD_NORM if self.folded else None,
            "ns_dtype": self.ns_dtype,
            "normalize_rows": self.normalize_rows,
            "state_dtype": self.state_dtype,
            "fused": self.kernels or None,
        }

    def uses_branch(self, step: int) -> bool:
        """Return whether the branch takes part; it does in the first step, where engines detect unused parameters."""
        return not self.skipping or step % 2 == 0

    def numel_of_sums(self, params: int) -> int:
        """Return how many numbers a step adds up over the ranks of a process group.

        For each parameter its norms and what is present, and under a rule that orthogonalizes, whether it has a
        gradient other than zero; one more column for the flag.
        """
        rows = 3 if self.folded else 1
        moving = 0 if self.mars_type in ("mars-adamw", "mars-lion") else params
        return (rows + 1) * (params + 1) + moving

    def create(self, model: nn.Module, **settings: Any) -> mars_hf.Mars:
        """Return the optimizer of a model."""
        return mars_hf.create(model, **self.hyperparameters(), **settings)


CASES = {
    "adamw": Case(),
    "adamw_1d": Case(optimize_1d=True),
    "adamw_frozen": Case(frozen=True),
    "adamw_skipping": Case(skipping=True),
    "adamw_1d_skipping": Case(optimize_1d=True, skipping=True),
    "lion": Case("mars-lion"),
    "lion_1d": Case("mars-lion", optimize_1d=True),
    "lion_1d_frozen": Case("mars-lion", optimize_1d=True, frozen=True),
    "adamw_unclipped": Case(clip_threshold=None),
    "adamw_folded": Case(folded=True),
    "adamw_1d_folded": Case(optimize_1d=True, folded=True),
    "lion_1d_folded": Case("mars-lion", optimize_1d=True, folded=True),
    "shampoo": Case("mars-shampoo", ns_dtype="float32"),
    "shampoo_1d": Case("mars-shampoo", ns_dtype="float32", optimize_1d=True),
    "m": Case("mars-m", ns_dtype="float32"),
    "m_unclipped": Case("mars-m", ns_dtype="float32", clip_threshold=None),
    "m_skipping": Case("mars-m", ns_dtype="float32", skipping=True),
    "m_folded": Case("mars-m", ns_dtype="float32", folded=True),
    "m_rows": Case("mars-m", ns_dtype="float32", normalize_rows=0.9),
    "shampoo_bf16": Case("mars-shampoo", ns_dtype="bfloat16"),
    "m_bf16": Case("mars-m", ns_dtype="bfloat16"),
    "adamw_8bit": Case(state_dtype="8bit"),
    "lion_8bit": Case("mars-lion", state_dtype="8bit"),
    "m_8bit": Case("mars-m", ns_dtype="float32", state_dtype="8bit"),
    "adamw_8bit_kernels": Case(state_dtype="8bit", kernels=True),
    "adamw_1d_kernels": Case(optimize_1d=True, kernels=True),
    "adamw_folded_kernels": Case(folded=True, kernels=True),
    "lion_kernels": Case("mars-lion", kernels=True),
    "m_kernels": Case("mars-m", ns_dtype="float32", kernels=True),
}


class TinyGPT2(GPT2LMHeadModel):
    """GPT-2 with a bottleneck of two units behind its last layer.

    Sizes are odd so that partitions cut through matrices; of the bottleneck's two rows some ranks hold nothing.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.narrow = nn.Linear(config.n_embd, 2)
        self.wide = nn.Linear(2, config.n_embd)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor, use_branch: bool = True) -> dict[str, Tensor]:
        """Return the loss; without `use_branch` the branch gets no gradient."""
        hidden = self.transformer(input_ids).last_hidden_state
        if use_branch:
            hidden = hidden + self.wide(torch.tanh(self.narrow(hidden)))
        logits = self.lm_head(hidden)[:, :-1].float()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def build_model(case: Case) -> TinyGPT2:
    """Build the model, with the same weights at every call."""
    torch.manual_seed(0)
    width = 18 if case.state_dtype is None else 64
    sizes = {
        "n_embd": width,
        "n_head": 3 if case.state_dtype is None else 4,
        "n_layer": 2,
        "n_positions": 16,
        "vocab_size": VOCAB,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0, use_cache=False)
    model = TinyGPT2(config)
    model.transformer.wpe.weight.requires_grad_(not case.frozen)
    return model


def build_llama(divided: bool = False) -> LlamaForCausalLM:
    """Build a Llama with heads for two ranks, over which transformers divides it by its own plan while it loads."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    if not divided:
        return model
    with tempfile.TemporaryDirectory() as temporary:
        folders = [temporary]
        dist.broadcast_object_list(folders)
        model.save_pretrained(folders[0])  # the first rank writes
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(folders[0], dtype=torch.float32, tp_plan="auto")
        dist.barrier()
    return model


class Tokens(Dataset):
    """All sequences of a run, in training order."""

    def __init__(self, steps: int = STEPS) -> None:
        """Draw random tokens, half of them repeated, so that there is something to learn."""
        generator = torch.Generator().manual_seed(7)
        half = torch.randint(0, VOCAB, (steps * ACCUMULATION * MICRO_BATCH, BLOCK // 2), generator=generator)
        self.ids = torch.cat([half, half], dim=1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}

    def micro_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        """Return a rank's share of one micro-batch."""
        start = (step * ACCUMULATION + micro) * MICRO_BATCH
        return self.ids[start : start + MICRO_BATCH].chunk(world)[rank]


def lr_factor(step: int) -> float:
    """Return a cosine schedule from 1 to 0 over the run, as Trainer's."""
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))
