"""Folders of tokens: written whole or not at all, read back, and refused with file and position when damaged."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from pretraining.data import token_files
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

VOCAB = 50
TRAIN = [np.arange(n) % VOCAB for n in (600, 1, 399)]


def write(folder, train=tuple(TRAIN), overwrite=False, **changes):
    words = {f"w{n}": n for n in range(1, VOCAB)} | {"<end>": 0}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<end>")), eos_token="<end>"
    )
    with token_files.writing(folder, overwrite=overwrite) as partial:
        tokenizer.save_pretrained(partial / "tokenizer")
        meta = {"dataset": "toy", "tokenizer": "words", "vocab_size": VOCAB, "end_of_text": 0}
        meta["train"] = token_files.write_tokens(partial / "train.bin", [(ids, 3) for ids in train])
        meta["val"] = token_files.write_tokens(partial / "val.bin", [(np.arange(100) % VOCAB, 500)])
        token_files.write_meta(partial, meta | changes)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "data"
    write(folder)
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy to damage."""
    return shutil.copytree(prepared, tmp_path / "data")


def set_token(path, index, value):
    tokens = np.memmap(path, dtype="<u2", mode="r+")
    tokens[index] = value
    tokens.flush()


def message(folder, **settings):
    with pytest.raises(ValueError) as error:
        token_files.load(folder, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_round_trip(prepared, capsys):
    expected = np.concatenate(TRAIN)
    assert np.memmap(prepared / "train.bin", dtype=np.uint16, mode="r").tolist() == expected.tolist()  # as nanoGPT
    meta = token_files.read_meta(prepared)
    digest = hashlib.sha256(expected.astype("<u2").tobytes()).hexdigest()
    assert meta["train"] == {"tokens": 1000, "documents": 3, "bytes": 9, "sha256": digest}
    for path in (prepared / "tokenizer").iterdir():
        assert meta["tokenizer_files"][path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    for verify in (False, True):
        loaded = token_files.load(prepared, verify=verify)
        assert (loaded.name, len(loaded.tokenizer), loaded.bytes_per_token) == ("toy", VOCAB, 5.0)
        assert loaded.identity == {
            "dataset": "toy",
            "vocabulary": VOCAB,
            "train tokens": digest,
            "val tokens": meta["val"]["sha256"],
        }
    assert "checking train.bin" in capsys.readouterr().err


def test_max_tokens_keeps_whole_documents(tmp_path):
    documents = [(np.arange(n), 1) for n in (3, 2, 4)]
    for limit, count in ((3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (10, 3), (None, 3)):
        entry = token_files.write_tokens(tmp_path / "a.bin", documents, limit)
        assert (entry["documents"], entry["bytes"]) == (count, count)
        assert entry["tokens"] == sum(len(ids) for ids, _ in documents[:count])
        assert (tmp_path / "a.bin").stat().st_size == 2 * entry["tokens"]
    with pytest.raises(ValueError, match="--max_tokens 2: the first document has 3; give more"):
        token_files.write_tokens(tmp_path / "a.bin", documents, 2)


def test_dataset_blocks(tmp_path):
    write(tmp_path / "data", train=[np.array([1, 2, 3, 0]), np.array([4, 5, 0])])
    blocks = token_files.TokenDataset(tmp_path / "data", "train", block_size=3)
    assert len(blocks) == 2
    assert torch.equal(blocks[1]["input_ids"], torch.tensor([0, 4, 5]))
    assert torch.equal(blocks[1]["labels"], torch.tensor([-100, 4, 5]))
    assert len(token_files.TokenDataset(tmp_path / "data", "train", 2, max_blocks=2)) == 2
    assert len(token_files.TokenDataset(tmp_path / "data", "train", 2, max_blocks=9)) == 3
    with pytest.raises(ValueError, match=r"train\.bin .* has 7 tokens, less than one block of 8"):
        token_files.TokenDataset(tmp_path / "data", "train", 8)


def test_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), token_files.writing(tmp_path / "data") as partial:
        (partial / "train.bin").write_bytes(b"half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == [".data.lock"]


def test_overwrite_replaces_token_files_once_complete(folder):
    before = (folder / "train.bin").read_bytes()
    with pytest.raises(ValueError, match="exists; choose another folder, or replace its token files with --overwrite"):
        write(folder)
    with pytest.raises(RuntimeError), token_files.writing(folder, overwrite=True):
        assert (folder / "train.bin").read_bytes() == before
        raise RuntimeError
    assert (folder / "train.bin").read_bytes() == before
    write(folder, train=[np.array([7, 0])], overwrite=True)
    assert token_files.read_meta(folder)["train"]["tokens"] == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == [".data.lock", "data"]


def test_overwrite_spares_other_files(folder):
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds other files \('thesis.tex'\), which --overwrite would delete"):
        write(folder, overwrite=True)
    assert (folder / "thesis.tex").read_text() == "years of work"
    token_files.load(folder)


def test_kills_leave_no_trace(folder):
    """A process killed while writing leaves .data.partial; one killed between the renames leaves .data.replaced."""
    partial, replaced = folder.with_name(".data.partial"), folder.with_name(".data.replaced")
    partial.mkdir()
    (partial / "train.bin").write_bytes(b"half")
    folder.rename(replaced)
    with pytest.raises(ValueError, match="exists"):
        write(folder)
    token_files.load(folder)  # back under its name
    replaced.mkdir()  # the old one of a process killed after both renames
    write(folder, overwrite=True)
    token_files.load(folder, verify=True)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".data.lock", "data"]


HOLDER = """
import sys
from pretraining.data import token_files
with token_files.lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_a_folder(tmp_path):
    recipes = str(Path(token_files.__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": recipes},
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="data: another process writes it; wait for it to end, or choose another"):
            write(tmp_path / "data")
        holder.kill()
    write(tmp_path / "data")  # a killed process locks nobody out


def test_lock_does_not_follow_links(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".data.lock").symlink_to(victim)
    with contextlib.suppress(OSError, filelock.Timeout), token_files.lock(tmp_path / "data").acquire(timeout=0.2):
        pytest.fail("took a lock through a symbolic link")
    assert victim.read_text() == "precious"


def test_size_mismatch(folder):
    path = folder / "train.bin"
    whole = path.read_bytes()
    for content in (whole[:-2], whole + b"xyz", b""):
        path.write_bytes(content)
        assert f"{path} has {len(content):,} bytes, but meta.json promises 2,000; copy" in message(folder)
    path.unlink()
    assert "has 0 bytes" in message(folder)


def test_ids_of_small_files_are_all_checked(folder):
    set_token(folder / "val.bin", 73, VOCAB)
    assert f"{folder / 'val.bin'}: token 73 is 50, not below 50, the vocab_size" in message(folder)


def test_ids_of_large_files_are_sampled(folder, monkeypatch):
    for name, value in (("_CHUNK", 101), ("_WINDOW", 10), ("_WINDOWS", 3)):
        monkeypatch.setattr(token_files, name, value)
    set_token(folder / "train.bin", 300, 60_000)  # between the windows 0-9, 495-504 and 990-999
    token_files.load(folder)
    assert "train.bin: token 300 is 60000" in message(folder, verify=True)
    for index in (0, 9, 495, 504, 990, 999):
        set_token(folder / "train.bin", index, 60_000)
        assert f"train.bin: token {index:,} is 60000" in message(folder)
        set_token(folder / "train.bin", index, 1)


def test_verify_compares_hashes(folder, monkeypatch):
    monkeypatch.setattr(token_files, "_CHUNK", 301)  # a hash of several chunks
    token_files.load(folder, verify=True)
    set_token(folder / "train.bin", 999, 7)
    token_files.load(folder)  # a wrong id below the vocabulary's size
    assert f"{folder / 'train.bin'} is not what was prepared: SHA-256 " in message(folder, verify=True)


def test_tokenizer_is_checked(folder):
    path = folder / "tokenizer" / "tokenizer.json"
    whole = path.read_text()
    path.write_text(whole.replace('"w7"', '"w8 "'))
    assert "tokenizer: ['tokenizer.json'] is missing or not what was prepared" in message(folder)
    path.unlink()
    assert "['tokenizer.json'] is missing" in message(folder)
    path.write_text(whole)
    meta = json.loads((folder / "meta.json").read_text())
    for key, value in (("vocab_size", VOCAB + 1), ("end_of_text", 3)):
        (folder / "meta.json").write_text(json.dumps(meta | {key: value}))
        assert f"{key} is {meta[key]}, but {value} in meta.json" in message(folder)
    path.write_text("{\x1b[31m")
    (folder / "meta.json").write_text(json.dumps(meta))
    with token_files.writing(folder.with_name("broken")) as partial:
        shutil.copytree(folder, partial, dirs_exist_ok=True)
        token_files.write_meta(partial, meta)
    text = message(folder.with_name("broken"))
    assert "transformers cannot load it" in text and text.isprintable()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("dataset", [None, "", 3, "a\nb", "\x1b[31mred", "x" * 201]),
        ("vocab_size", [None, "50", True, 0, 70_000, 50.0]),
        ("end_of_text", [None, -1, 2**16]),
        ("train", [None, [1], {}]),
        ("train: tokens", [None, -1, 0, 1e3, 2**60]),
        ("val: documents", [None, 0]),
        ("val: bytes", [None, -1, "5"]),
        ("val: sha256", [None, "x", "A" * 64, "0" * 64 + "\n"]),
        ("tokenizer_files", [None, {}, {"a": 1}, {"a\x1b[31m": "x" * 1000}]),
    ],
)
def test_meta_json_values_are_checked(folder, key, values):
    section, _, name = key.partition(": ")
    for value in values:
        meta = json.loads((folder / "meta.json").read_text())
        (meta[section] if name else meta)[name or section] = value
        (folder.parent / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(ValueError) as error:
            token_files.read_meta(folder.parent)
        text = str(error.value)
        assert text.startswith(f"{folder.parent / 'meta.json'}: '{key}") and "prepare_data.py --overwrite" in text
        assert text.isprintable() and len(text) < 800


def test_written_meta_can_be_read(tmp_path):
    with pytest.raises(ValueError, match="'vocab_size' is 65537, not a whole number from 1 to 65536"):
        write(tmp_path / "data", vocab_size=2**16 + 1)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("content", [b"", b'{"dataset": "toy",\n', b"[1]", b"\x00", b"\xff\xfe", b"[" * 100_000])
def test_meta_json_that_is_no_object(folder, content):
    (folder / "meta.json").write_bytes(content)
    text = message(folder)
    assert text.startswith(str(folder / "meta.json")) and "prepare_data.py --overwrite" in text


def test_unprepared_folder(tmp_path):
    assert f"{tmp_path} has no meta.json: make token files with prepare_data.py" in message(tmp_path)


def test_code_in_a_tokenizer_does_not_run(folder, tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    code = f"import os; os.mkdir({str(marker)!r})\nfrom transformers import PreTrainedTokenizer as Own\n"
    (folder / "tokenizer" / "own.py").write_text(code)
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    token_files.write_meta(folder, json.loads((folder / "meta.json").read_text()))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(builtins, "input", lambda prompt: "y")
    with contextlib.suppress(Exception):  # the class is no whole tokenizer
        AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert marker.exists()  # the folder is one that would run
    marker.rmdir()
    assert "contains custom code" in message(folder)
    assert not marker.exists()
