"""Write, check and read a folder of tokens: `train.bin`, `val.bin` (uint16, as nanoGPT), `meta.json`, `tokenizer/`."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

DTYPE = np.dtype("<u2")
SPLITS = ("train", "val")
_NAMES = {"train.bin", "val.bin", "meta.json", "tokenizer"}
_AGAIN = "copy the folder again, or make it again with prepare_data.py --overwrite"


class Data(NamedTuple):
    """A folder of token files, its tokenizer, the bytes of text per held-out token, and what tells it from others."""

    directory: Path
    tokenizer: PreTrainedTokenizerBase
    name: str
    bytes_per_token: float
    identity: dict[str, Any]


def load(directory: Path) -> Data:
    """Load a folder of prepare_data.py whose files are as large as its meta.json says.

    Raises:
        ValueError: the folder holds no prepared data, or is damaged.
    """
    path = Path(directory) / "meta.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no meta.json: make token files with prepare_data.py, and give their folder")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        expected = {split: meta[split]["tokens"] * DTYPE.itemsize for split in SPLITS}
        identity = {"dataset": meta["dataset"], "vocabulary": meta["vocab_size"]}
        identity |= {f"{split} tokens": meta[split]["sha256"] for split in SPLITS}
        bytes_per_token = meta["val"]["bytes"] / meta["val"]["tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r:.200}); {_AGAIN}") from error
    for split, size in expected.items():
        tokens = Path(directory) / f"{split}.bin"
        if (found := tokens.stat().st_size if tokens.is_file() else 0) != size:
            raise ValueError(f"{tokens} has {found:,} bytes, but meta.json promises {size:,}; {_AGAIN}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(directory) / "tokenizer", trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(
            f"{directory}/tokenizer: transformers loads no tokenizer from it ({error!r:.200}); {_AGAIN}"
        ) from error
    return Data(Path(directory), tokenizer, meta["dataset"], bytes_per_token, identity)


@contextmanager
def writing(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to write token files into; it becomes `directory`, which is locked, once the block succeeds.

    It is `.NAME.partial` beside `directory`. What a killed process left there is removed. With `overwrite`, token files
    are replaced, and stay until the new ones are complete.

    Raises:
        ValueError: the folder holds token files without `overwrite`, or other files.
    """
    directory = Path(directory).resolve()  # a link stays; its target is written
    partial, old = (directory.with_name(f".{directory.name}.{state}") for state in ("partial", "old"))
    names = {path.name for path in directory.iterdir()} if directory.exists() else set()
    if names and not overwrite:
        raise ValueError(f"{directory} exists; choose another folder, or replace its token files with --overwrite")
    if others := sorted(names - _NAMES):
        raise ValueError(
            f"{directory} holds other files ({str(others[:3])[1:-1]:.200}), which --overwrite would delete; choose "
            "another folder"
        )
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if names:
            directory.rename(old)
        partial.replace(directory)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, last of all.

    Raises:
        ValueError: token files cannot hold the vocabulary.
    """
    if meta["vocab_size"] > 2**16:
        raise ValueError(f"a vocabulary of {meta['vocab_size']:,} does not fit uint16; give one of at most {2**16:,}")
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def write_tokens(
    path: Path, documents: Iterable[tuple[np.ndarray, int]], max_tokens: int | None = None
) -> dict[str, Any]:
    """Write one split, document by document; return its entry of meta.json.

    Args:
        path: the file.
        documents: token ids below 2**16, and the bytes of the document's text in UTF-8.
        max_tokens: end after the last whole document within so many tokens; None writes all.
    """
    entry = {"tokens": 0, "documents": 0, "bytes": 0}
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for ids, text_bytes in documents:
            if max_tokens is not None and entry["tokens"] + len(ids) > max_tokens:
                break
            data = ids.astype(DTYPE).tobytes()
            file.write(data)
            digest.update(data)
            entry["tokens"] += len(ids)
            entry["documents"] += 1
            entry["bytes"] += text_bytes
    return entry | {"sha256": digest.hexdigest()}


class TokenDataset(Dataset[dict[str, torch.Tensor]]):
    """Cut a split into consecutive blocks; labels are the inputs (the model shifts them), without the first."""

    def __init__(self, directory: Path, split: str, block_size: int, max_blocks: int | None = None) -> None:
        """Map `train.bin` or `val.bin` into memory; an incomplete last block is dropped, None keeps all other blocks.

        Raises:
            ValueError: the split does not fill one block, or no token of a block has one before it.
        """
        if block_size < 2:
            raise ValueError(f"--block_size {block_size} is below 2: a block holds a token and the one after it")
        if max_blocks is not None and max_blocks < 1:
            raise ValueError(f"--max_eval_blocks {max_blocks} is below 1; leave it out for all blocks")
        self.tokens = np.memmap(Path(directory) / f"{split}.bin", dtype=DTYPE, mode="r")
        self.block_size = block_size
        blocks = len(self.tokens) // block_size
        if blocks == 0:
            raise ValueError(
                f"{split}.bin in {directory} has {len(self.tokens)} tokens, less than one block of {block_size}; "
                "lower --block_size or prepare more text"
            )
        self.blocks = blocks if max_blocks is None else min(blocks, max_blocks)

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.tokens[index * self.block_size : (index + 1) * self.block_size]
        ids = torch.from_numpy(block.astype(np.int64))
        labels = ids.clone()
        # Nothing predicts the first token. Trainer divides the loss by the number of valid labels, so a label there
        # would understate every loss by one part in block_size.
        labels[0] = -100
        return {"input_ids": ids, "labels": labels}
