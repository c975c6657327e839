"""The embedded corpus and its tokenizer."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from pretraining.data import data_folder, embedded, token_files
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def corpus():
    return embedded.read_corpus()


@pytest.mark.parametrize("name", embedded.SOURCES)
def test_an_embedded_corpus_is_large_and_its_halves_share_no_file(name):
    corpus = embedded.read_corpus(name)
    total = sum(map(len, corpus.train)) + sum(map(len, corpus.val))
    assert 5_000_000 < total < 40_000_000
    assert 0.02 < sum(map(len, corpus.val)) / total < 0.15
    assert len(corpus.train) > (500 if sys.version_info >= (3, 11) else 450)  # Python 3.10's library has fewer files


def test_the_second_corpus_is_another_language():
    headers = embedded.read_corpus("torch-headers")
    assert headers.fingerprint != embedded.read_corpus().fingerprint
    assert sum("#include" in text for text in headers.train) > 0.8 * len(headers.train)


def test_corpus_is_the_same_at_every_reading_and_split_by_file(corpus):
    assert corpus == embedded.read_corpus()
    assert not set(corpus.train) & set(corpus.val)
    total = sum(map(len, corpus.train)) + sum(map(len, corpus.val))
    assert total > 5_000_000
    assert 0.02 < sum(map(len, corpus.val)) / total < 0.15
    assert any("class OrderedDict" in text for text in corpus.train + corpus.val)


@pytest.mark.slow
def test_prepared_corpus(corpus, tmp_path):
    directory = data_folder.prepare_embedded(tmp_path, vocab_size=512)
    stamp = (directory / "meta.json").stat().st_mtime_ns
    assert data_folder.prepare_embedded(tmp_path, vocab_size=512) == directory
    assert (directory / "meta.json").stat().st_mtime_ns == stamp  # found, not made again
    loaded = data_folder.load(directory)
    tokenizer = loaded.tokenizer
    assert len(tokenizer) == 512
    assert tokenizer.eos_token == embedded.END_OF_TEXT
    text = "def f(x):\n    return 'äöü \N{SNOWMAN}'  # ...\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text

    tokens = np.fromfile(directory / "val.bin", dtype=token_files.DTYPE)
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_token_id) + 1)[:-1]
    assert [tokenizer.decode(document[:-1]) for document in documents[:5]] == corpus.val[:5]
    meta = token_files.read_meta(directory)
    assert meta["val"]["documents"] == len(documents) == len(corpus.val)
    assert meta["val"]["bytes"] == sum(len(text.encode()) for text in corpus.val)
    assert loaded.bytes_per_token == pytest.approx(meta["val"]["bytes"] / len(tokens))


def test_tokenizer_training_is_deterministic(corpus, tmp_path):
    for name in ("a", "b"):
        embedded.train_tokenizer(corpus.train[:60], 400).save_pretrained(tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b"))
    assert first == second
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == 400


def test_an_interpreter_without_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="--data_dir"):
        embedded.read_corpus()
