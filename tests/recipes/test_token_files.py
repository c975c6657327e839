"""Token files round-trip, and appear complete or not at all."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
import torch
from pretraining.data import token_files


def write(directory, train=((1, 2, 3, 0), (4, 0)), val=((5, 0),), overwrite=False):
    with token_files.writing(directory, overwrite=overwrite) as partial:
        meta = {"dataset": "toy", "tokenizer": "toy", "vocab_size": 50, "end_of_text": 0}
        for split, documents in (("train", train), ("val", val)):
            file = token_files.TokenFile(partial / f"{split}.bin")
            for document in documents:
                file.write([np.array(document)], text_bytes=10)
            meta[split] = file.close()
        token_files.write_meta(partial, meta)


def test_round_trip(tmp_path):
    write(tmp_path / "data")
    tokens = np.memmap(tmp_path / "data" / "train.bin", dtype=np.uint16, mode="r")  # as nanoGPT reads it
    assert tokens.tolist() == [1, 2, 3, 0, 4, 0]
    meta = token_files.read_meta(tmp_path / "data")
    digest = hashlib.sha256((tmp_path / "data" / "train.bin").read_bytes()).hexdigest()
    assert meta["train"] == {"tokens": 6, "documents": 2, "bytes": 20, "sha256": digest, "sha256_parts": [digest[:16]]}


def test_blocks(tmp_path):
    write(tmp_path / "data")
    blocks = token_files.TokenDataset(tmp_path / "data", "train", block_size=4)
    assert len(blocks) == 1
    assert torch.equal(blocks[0]["input_ids"], torch.tensor([1, 2, 3, 0]))
    assert torch.equal(blocks[0]["labels"], torch.tensor([-100, 2, 3, 0]))
    assert len(token_files.TokenDataset(tmp_path / "data", "train", 2)) == 3
    assert len(token_files.TokenDataset(tmp_path / "data", "train", 2, max_blocks=2)) == 2
    with pytest.raises(ValueError, match=r"val\.bin .* has 2 tokens, less than one block of 4"):
        token_files.TokenDataset(tmp_path / "data", "val", 4)


def test_a_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), token_files.writing(tmp_path / "data") as partial:
        (partial / "train.bin").write_bytes(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten_silently(tmp_path):
    write(tmp_path / "data")
    with pytest.raises(ValueError, match="--overwrite"):
        write(tmp_path / "data")
    with pytest.raises(RuntimeError), token_files.writing(tmp_path / "data", overwrite=True):
        raise RuntimeError
    assert token_files.read_meta(tmp_path / "data")["train"]["tokens"] == 6  # the old one is still whole
    write(tmp_path / "data", train=((7, 0),), overwrite=True)
    assert token_files.read_meta(tmp_path / "data")["train"]["tokens"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_leavings_of_killed_runs_are_removed_and_those_of_running_ones_kept(tmp_path):
    directory = tmp_path / "data"
    dead = token_files.beside(directory, "partial", 999999999)
    alive = token_files.beside(directory, "partial", os.getppid())
    elsewhere = tmp_path / "data.partial-another-machine-999999999"
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    write(directory)
    assert not dead.exists()
    assert alive.exists() and elsewhere.exists()


def test_unprepared_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"prepare_data\.py"):
        token_files.read_meta(tmp_path)
