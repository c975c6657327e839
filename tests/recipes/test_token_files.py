"""Folders of tokens: written whole or not at all, refused where damaged; and the embedded corpora."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import prepare_data
import pytest
import torch
from helpers import refused
from pretraining.data import embedded, token_files
from pretraining.files import locked
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

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
    meta = json.loads((prepared / "meta.json").read_text())
    digest = hashlib.sha256(expected.astype("<u2").tobytes()).hexdigest()
    assert meta["train"] == {"tokens": 1000, "documents": 3, "bytes": 9, "sha256": digest}
    for path in (prepared / "tokenizer").iterdir():
        assert meta["tokenizer_files"][path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    for verify in (False, True):
        loaded = token_files.load(prepared, verify=verify)
        assert (loaded.name, len(loaded.tokenizer), loaded.bytes_per_token) == ("toy", VOCAB, 5.0)
        tokens = {"train tokens": digest, "val tokens": meta["val"]["sha256"]}
        assert loaded.identity == {"dataset": "toy", "vocabulary": VOCAB, **tokens}
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


def test_folders_are_replaced_once_complete(folder):
    with pytest.raises(RuntimeError), token_files.writing(folder.with_name("new")) as partial:
        (partial / "train.bin").write_bytes(b"half")
        raise RuntimeError
    before = (folder / "train.bin").read_bytes()
    with pytest.raises(ValueError, match="exists; choose another folder, or replace its token files with --overwrite"):
        write(folder)
    with pytest.raises(RuntimeError), token_files.writing(folder, overwrite=True):
        raise RuntimeError
    assert (folder / "train.bin").read_bytes() == before
    partial = folder.with_name(".data.partial")
    partial.mkdir()
    (partial / "train.bin").write_bytes(b"half")  # of a process that was killed
    write(folder, train=[np.array([7, 0])], overwrite=True)
    assert (folder / "train.bin").stat().st_size == 4
    token_files.load(folder, verify=True)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["data"]


def test_overwrite_spares_other_files(folder):
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds other files \('thesis.tex'\), which --overwrite would delete"):
        write(folder, overwrite=True)
    assert (folder / "thesis.tex").read_text() == "years of work"
    token_files.load(folder)


HOLDER = """
import sys
from pretraining.files import locked
with locked(sys.argv[1], "writes"):
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
        with refused("data: another process writes there; wait for it to end, or choose another"):
            prepare_data.main(["--files", __file__, "--output_dir", str(tmp_path / "data")])
        holder.kill()
    with locked(tmp_path / "data", "writes"):  # a killed process locks nobody out
        write(tmp_path / "data")


def test_size_mismatch(folder):
    path = folder / "train.bin"
    whole = path.read_bytes()
    for content in (whole[:-2], whole + b"xyz", b""):
        path.write_bytes(content)
        assert f"{path} has {len(content):,} bytes, but meta.json promises 2,000; copy" in message(folder)
    path.unlink()
    assert "has 0 bytes" in message(folder)


def test_ids_of_the_first_chunk_are_checked_or_all(folder, monkeypatch):
    set_token(folder / "val.bin", 73, VOCAB)
    assert f"{folder / 'val.bin'}: token 73 is 50, not below 50, the vocab_size" in message(folder)
    monkeypatch.setattr(token_files, "_CHUNK", 60)
    token_files.load(folder)
    assert "val.bin: token 73 is 50" in message(folder, verify=True)


def test_verify_compares_hashes(folder, monkeypatch):
    monkeypatch.setattr(token_files, "_CHUNK", 301)  # a hash of several chunks
    token_files.load(folder, verify=True)
    set_token(folder / "train.bin", 999, 7)
    token_files.load(folder)  # a wrong id below the vocabulary's size
    assert f"{folder / 'train.bin'} is not what was prepared: SHA-256 " in message(folder, verify=True)


def test_tokenizer_is_checked(folder):
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"w8 "'))
    assert "tokenizer: ['tokenizer.json'] is missing or not what was prepared" in message(folder)
    path.unlink()
    assert "['tokenizer.json'] is missing" in message(folder)


def test_vocabulary_that_uint16_does_not_hold(tmp_path):
    with pytest.raises(ValueError, match="a vocabulary of 65,537 does not fit uint16; give one of at most 65,536"):
        write(tmp_path / "data", vocab_size=2**16 + 1)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("content", [b"", b'{"dataset": "toy",\n', b"[1]", b"{}", b'{"train": {"tokens": 1}}', b"\xff"])
def test_damaged_meta_json(folder, content):
    (folder / "meta.json").write_bytes(content)
    text = message(folder)
    assert text.startswith(f"{folder / 'meta.json'} is damaged (") and "prepare_data.py --overwrite" in text


def test_unprepared_folder(tmp_path):
    assert f"{tmp_path} has no meta.json: make token files with prepare_data.py" in message(tmp_path)


def test_code_in_a_tokenizer_does_not_run(folder, monkeypatch):
    (folder / "tokenizer" / "own.py").write_text("raise SystemExit('it ran')\n")
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    token_files.write_meta(folder, json.loads((folder / "meta.json").read_text()))
    monkeypatch.setattr(builtins, "input", lambda prompt: "y")
    with pytest.raises(ValueError, match="contains custom code"):
        token_files.load(folder)


@pytest.mark.parametrize("name", embedded.NAMES)
def test_corpora_are_large_and_split_by_file(name):
    corpus = embedded.read_corpus(name)
    total = sum(map(len, corpus.train)) + sum(map(len, corpus.val))
    assert 5_000_000 < total < 40_000_000
    assert 0.02 < sum(map(len, corpus.val)) / total < 0.15
    assert len(corpus.train) > (500 if sys.version_info >= (3, 11) else 450)  # Python 3.10's library has fewer files
    mark = "class OrderedDict" if name == "stdlib" else "#include"
    assert any(mark in text for text in corpus.train + corpus.val)
    assert corpus == embedded.read_corpus(name)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 60 files, and some that are no part of the corpus."""
    root = tmp_path / "library"
    for name in [*(f"a/m{n}.py" for n in range(60)), "a/test/t.py", "encodings/e.py", "site-packages/s.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"x = '{name} äöü'\n")
    (root / "empty.py").write_text(" \n")
    (root / "gone.py").symlink_to(root / "nowhere")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_split_and_fingerprint(library):
    names = sorted([*(f"a/m{n}.py" for n in range(60)), "latin.py"])
    texts = {name: f"x = '{name} äöü'\n" if name[0] == "a" else "# caf\ufffd\n" for name in names}
    digests = {name: hashlib.sha256(name.encode()).digest() for name in names}
    corpus = embedded.read_corpus()
    assert corpus.val == [texts[name] for name in names if digests[name][0] % 20 == 0]
    assert corpus.train == [texts[name] for name in names if digests[name][0] % 20 != 0]
    assert corpus.val
    version = f"{sys.version_info[:3]} 20".encode()
    content = b"".join(digests[name] + hashlib.sha256(texts[name].encode()).digest() for name in names)
    assert corpus.fingerprint == hashlib.sha256(version + content).hexdigest()


def test_prepare(library, tmp_path, capsys):
    corpus = embedded.read_corpus()
    folder = embedded.prepare(tmp_path / "data", vocab_size=300)
    loaded = token_files.load(folder, verify=True)
    tokenizer = loaded.tokenizer
    assert len(tokenizer) == 300 and tokenizer.eos_token == embedded.END_OF_TEXT
    assert (
        tokenizer.decode(tokenizer("def f():\n\treturn 'ß\N{SNOWMAN}'").input_ids)
        == "def f():\n\treturn 'ß\N{SNOWMAN}'"
    )
    for split, texts in (("train", corpus.train), ("val", corpus.val)):
        tokens = np.fromfile(folder / f"{split}.bin", dtype="<u2")
        documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_token_id) + 1)
        assert [tokenizer.decode(document[:-1]) for document in documents[:-1]] == texts and not len(documents[-1])
    assert loaded.bytes_per_token == sum(len(text.encode()) for text in corpus.val) / len(tokens)

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    stamp = (folder / "meta.json").stat().st_mtime_ns
    assert embedded.prepare(tmp_path / "data", vocab_size=300) == folder
    assert (folder / "meta.json").stat().st_mtime_ns == stamp  # found, not made again
    assert embedded.prepare(tmp_path / "data", vocab_size=301) != folder
    (folder / "train.bin").write_bytes(b"")
    assert embedded.prepare(tmp_path / "data", vocab_size=300) == folder
    assert "the embedded corpus is made again" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_interpreter_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="--data_dir"):
        embedded.read_corpus()


def test_second_process_waits(library, tmp_path):
    made = embedded.prepare(tmp_path / "other", vocab_size=300)
    folder = tmp_path / "data" / made.name
    with ThreadPoolExecutor() as pool, locked(folder, "writes"):
        second = pool.submit(embedded.prepare, tmp_path / "data", 300)
        time.sleep(1)
        assert not second.done()
    assert second.result(60) == folder
    files = [{path.name: path.read_bytes() for path in parent.rglob("*.*")} for parent in (made, folder)]
    assert files[0] == files[1]  # tokenizers are trained alike
