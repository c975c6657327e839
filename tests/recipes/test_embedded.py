"""The embedded corpora and their tokenizer."""

from __future__ import annotations

import hashlib
import sys
import threading

import numpy as np
import pytest
from pretraining.data import embedded, token_files
from transformers import AutoTokenizer


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
        assert token_files.read_meta(folder)[split]["bytes"] == sum(len(text.encode()) for text in texts)
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


def test_tokenizer_training_is_deterministic(tmp_path):
    documents = embedded.read_corpus().train[:60]
    for name in ("a", "b"):
        embedded.train_tokenizer(documents, 400).save_pretrained(tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b"))
    assert first == second
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == 400


def test_interpreter_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="--data_dir"):
        embedded.read_corpus()


def test_second_process_waits(library, tmp_path):
    with token_files.lock(embedded.prepare(tmp_path / "other", vocab_size=300)):
        pass
    folder = tmp_path / "data" / embedded.prepare(tmp_path / "other", vocab_size=300).name
    results = []
    thread = threading.Thread(target=lambda: results.append(embedded.prepare(tmp_path / "data", vocab_size=300)))
    with token_files.lock(folder):
        thread.start()
        thread.join(1)
        assert thread.is_alive()
    thread.join(60)
    assert results == [folder]
