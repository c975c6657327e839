"""Measure a model's loss on held-out tokens: the full pass over val.bin, and the official validation loss.

Full pass: consecutive blocks of val.bin, each token predicted once but the first of a block; `eval_loss` of
pretrain_gpt2.py. Official: blocks from anywhere in val.bin, with replacement, each of their tokens predicting the next
one; what nanoGPT and the official trainer of MARS report.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from pretraining.data.token_files import DTYPE, TokenDataset

# The official trainer averages 200 batches of 15 blocks for GPT-2 small and medium, of 5 for large and XL. The mean
# over equal batches is the mean over blocks, so only their number counts.
OFFICIAL_BLOCKS = 3000
OFFICIAL_SEED = 5000
_NOT_PREDICTED = -100


class Loss(NamedTuple):
    """A mean loss over blocks.

    Attributes:
        mean: nats per predicted token.
        stderr: standard error of the mean over blocks; None for a single block.
        blocks: number of blocks.
    """

    mean: float
    stderr: float | None
    blocks: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean, of at most e^700."""
        return math.exp(min(self.mean, 700.0))

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """Return the bits to encode a byte of text."""
        return self.mean / math.log(2) / bytes_per_token


class RandomBlocks(Dataset[dict[str, torch.Tensor]]):
    """Draw blocks that start anywhere in val.bin, with replacement; the last token predicts the one after the block."""

    def __init__(
        self, directory: Path, block_size: int, blocks: int = OFFICIAL_BLOCKS, seed: int = OFFICIAL_SEED
    ) -> None:
        """Draw the starts.

        Args:
            directory: folder with token files.
            block_size: tokens per block.
            blocks: number of blocks.
            seed: of the starts.

        Raises:
            ValueError: val.bin does not hold one block and the token after it.
        """
        self.tokens = np.memmap(Path(directory) / "val.bin", dtype=DTYPE, mode="r")
        self.block_size = block_size
        if len(self.tokens) <= block_size:
            raise ValueError(
                f"val.bin in {directory} has {len(self.tokens)} tokens, but the official loss needs {block_size + 1}: "
                "a block and the next token; lower --block_size, prepare more text, or leave out the official loss"
            )
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(self.tokens) - block_size, (blocks,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]
        ids = torch.from_numpy(self.tokens[start : start + self.block_size + 1].astype(np.int64))
        return {"input_ids": ids[:-1], "targets": ids[1:]}


@torch.no_grad()
def measure(
    model: Any,
    blocks: TokenDataset | RandomBlocks,
    accelerator: Accelerator,
    *,
    batch_size: int = 8,
    bf16: bool = False,
    name: str = "loss",
) -> Loss:
    """Return the mean loss over blocks, which does not depend on batch size or number of processes.

    Args:
        model: causal language model on `accelerator.device`, or what an engine wrapped it in; every process calls it.
        blocks: TokenDataset for the full pass, RandomBlocks for the official loss.
        accelerator: processes that share the work.
        batch_size: blocks per forward pass and process.
        bf16: True computes in bfloat16 autocast.
        name: of the progress bar.
    """
    loader: Any = accelerator.prepare_data_loader(DataLoader(blocks, batch_size=batch_size))
    found: list[torch.Tensor] = []
    with _evaluating(model), torch.autocast(accelerator.device.type, torch.bfloat16, enabled=bf16):
        for batch in tqdm(loader, desc=name, unit="batch", disable=not accelerator.is_main_process):
            losses = _block_losses(model(input_ids=batch["input_ids"]).logits, _targets(batch))
            found.append(accelerator.gather_for_metrics(losses).double().cpu())
    each = torch.cat(found)
    stderr = float(each.std() / math.sqrt(len(each))) if len(each) > 1 else None
    return Loss(float(each.mean()), stderr, len(each))


def as_metrics(official: Loss) -> dict[str, Any]:
    """Return the official validation loss as keys of a JSON file."""
    return {
        "official_loss": official.mean,
        "official_loss_stderr": official.stderr,
        "official_blocks": official.blocks,
    }


def _targets(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what each position predicts; labels of a block are its inputs, one position too early."""
    if "targets" in batch:
        return batch["targets"]
    return functional.pad(batch["labels"][:, 1:], (0, 1), value=_NOT_PREDICTED)


def _block_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each block."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=_NOT_PREDICTED, reduction="none"
    )
    return losses.view_as(targets).sum(1) / (targets != _NOT_PREDICTED).sum(1)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
