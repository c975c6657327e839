"""Damaged token files are found before the first step, with file and position."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from pretraining.data import data_folder, embedded, meta_file, token_checks, token_files
from pretraining.run.skipped import Skipped
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

VOCAB = 50


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "data"
    words = {f"w{n}": n for n in range(1, VOCAB)} | {"<end>": 0}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<end>")), eos_token="<end>"
    )
    with token_files.writing(folder) as partial:
        tokenizer.save_pretrained(partial / "tokenizer")
        meta = {"dataset": "toy", "tokenizer": "words", "vocab_size": VOCAB, "end_of_text": 0}
        meta["tokenizer_files"] = token_checks.tokenizer_hashes(partial / "tokenizer")
        for split, count in (("train", 1000), ("val", 100)):
            file = token_files.TokenFile(partial / f"{split}.bin")
            file.write([np.arange(count) % VOCAB], text_bytes=5 * count)
            meta[split] = file.close()
        token_files.write_meta(partial, meta)
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy to damage."""
    return shutil.copytree(prepared, tmp_path / "data")


def set_token(path, index, value):
    tokens = np.memmap(path, dtype=token_files.DTYPE, mode="r+")
    tokens[index] = value
    tokens.flush()


def edit(folder, change):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta, indent=2))


def message(folder, **settings):
    with pytest.raises(ValueError) as mistake:
        data_folder.load(folder, **settings)
    assert "\n" not in str(mistake.value)
    return str(mistake.value)


def test_good_data_passes(prepared, capsys):
    for verify in (False, True):
        loaded = data_folder.load(prepared, verify=verify)
        assert (loaded.name, len(loaded.tokenizer), loaded.bytes_per_token) == ("toy", VOCAB, 5.0)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "checking train.bin" in printed.err and "2.00k/2.00k" in printed.err  # the bar of bytes


def test_sizes(folder):
    path = folder / "train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-401])
    text = message(folder)
    assert f"{path} has 1,599 bytes, but meta.json promises 2,000: it ends after token 799 of 1,000" in text
    assert "prepare_data.py --overwrite" in text
    path.write_bytes(whole + b"xyz")
    assert "3 bytes too many" in message(folder)
    path.write_bytes(b"")
    assert "it ends after token 0 of 1,000" in message(folder)
    path.unlink()
    assert "No such file" in message(folder) and "1,000 tokens" in message(folder)


def test_ids_of_small_files_count_everywhere(folder):
    set_token(folder / "val.bin", 73, VOCAB)
    text = message(folder)
    assert f"{folder / 'val.bin'}: token 73 (byte 146) is 50, not below the vocabulary's size 50" in text


def test_ids_of_large_files_count_in_windows_and_on_demand_everywhere(folder, monkeypatch):
    monkeypatch.setattr(token_checks, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(token_checks, "_WINDOWS", 3)
    monkeypatch.setattr(token_checks, "_WINDOW_TOKENS", 10)
    set_token(folder / "train.bin", 300, 60_000)  # between the windows 0-9, 495-504 and 990-999
    data_folder.load(folder)
    assert "train.bin: token 300 (byte 600) is 60000" in message(folder, verify=True)
    for index in (0, 9, 495, 504, 990, 999):
        set_token(folder / "train.bin", index, 60_000)
        assert f"train.bin: token {index:,} (byte {2 * index:,}) is 60000" in message(folder)
        set_token(folder / "train.bin", index, 1)


def test_hashes_on_demand_name_the_damaged_part(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "PART_BYTES", 64)
    monkeypatch.setattr(token_checks, "_READ_TOKENS", 50)  # parts need not end where reads do
    folder = shutil.copytree(prepared, tmp_path / "data")
    file = token_files.TokenFile(folder / "train.bin")
    file.write([np.arange(1000) % VOCAB], text_bytes=5000)
    entry = file.close()
    assert len(entry["sha256_parts"]) == 32  # 2,000 bytes
    edit(folder, lambda meta: meta.update(train=entry))
    data_folder.load(folder, verify=True)
    set_token(folder / "train.bin", 500, 7)
    data_folder.load(folder)  # a wrong id below the vocabulary's size
    text = message(folder, verify=True)
    assert f"{folder / 'train.bin'}, bytes 960 to 1,023, differs from what was prepared: SHA-256 " in text
    edit(folder, lambda meta: meta["train"].pop("sha256_parts"))
    assert "train.bin differs from what was prepared" in message(folder, verify=True)


def test_older_data_without_hashes(folder, capsys):
    def forget(meta):
        for split in ("train", "val"):
            del meta[split]["sha256"], meta[split]["sha256_parts"]
        del meta["tokenizer_files"]

    edit(folder, forget)
    data_folder.load(folder)
    assert capsys.readouterr().out == ""
    data_folder.load(folder, verify=True)
    out = capsys.readouterr().out.splitlines()
    assert [line.partition(": meta.json has no hash")[0].rpartition("/")[2] for line in out] == [
        "train.bin",
        "val.bin",
        "tokenizer",
    ]


def test_the_tokenizer(folder):
    path = folder / "tokenizer" / "tokenizer.json"
    whole = path.read_text()
    path.write_text(whole.replace('"w7"', '"w8 "'))
    assert f"{path} differs from what was prepared: SHA-256" in message(folder)
    path.unlink()
    assert f"{path}: No such file" in message(folder)
    path.write_text(whole)
    edit(folder, lambda meta: meta.update(vocab_size=VOCAB + 1))
    assert "tokenizer has 50 tokens, but vocab_size in meta.json is 51" in message(folder)
    edit(folder, lambda meta: meta.update(vocab_size=VOCAB, end_of_text=3))
    assert "the end of text is 0, but end_of_text in meta.json is 3" in message(folder)
    edit(folder, lambda meta: (meta.update(end_of_text=0), meta.pop("tokenizer_files")))
    path.write_text(whole[:100])
    assert "transformers cannot load this tokenizer" in message(folder)
    shutil.rmtree(folder / "tokenizer")
    assert "tokenizer: no such folder" in message(folder)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda meta: meta.pop("vocab_size"), ("line 1: the key 'vocab_size' (a whole number", "is missing")),
        (lambda meta: meta["val"].pop("tokens"), ("val: the key 'tokens'", "is missing")),
        (lambda meta: meta.pop("val"), ("the key 'val' (an object) is missing",)),
        (
            lambda meta: meta.update(vocab_size="50"),
            ("line 4: vocab_size: '50' is not a whole number from 1 to",),
        ),
        (lambda meta: meta.update(vocab_size=True), ("vocab_size: True is not a whole number",)),
        (lambda meta: meta.update(vocab_size=0), ("vocab_size: 0 is not",)),
        (lambda meta: meta.update(vocab_size=70_000), ("vocab_size: 70000 is not",)),
        (lambda meta: meta.update(end_of_text=50), ("line 5: end_of_text 50 is not below vocab_size 50",)),
        (lambda meta: meta["train"].update(tokens=-1), ("train: tokens: -1 is not a whole number from 1 on",)),
        (lambda meta: meta["train"].update(tokens=1e3), ("train: tokens: 1000.0 is not a whole number",)),
        (lambda meta: meta["val"].update(tokens=0), ("val: tokens: 0 is not",)),
        (lambda meta: meta["val"].update(sha256="x"), ("val: sha256: 'x' is not a SHA-256",)),
        (lambda meta: meta["val"].update(sha256_parts=["x"]), ("val: sha256_parts: ['x'] is not",)),
        (lambda meta: meta.update(train=[1]), ("train: [1] is not an object",)),
        (lambda meta: meta.update(vocabsize=3), ("unknown key 'vocabsize' (did you mean vocab_size?)",)),
        (lambda meta: meta["val"].update(token=3), ("val: unknown key 'token' (did you mean tokens?)",)),
        (lambda meta: meta.update(tokenizer_files={"a": 1}), ("tokenizer_files: {'a': 1} is not",)),
    ],
)
def test_meta_json_is_checked_key_by_key(folder, change, parts):
    edit(folder, change)
    text = message(folder)
    assert text.startswith(f"{folder / 'meta.json'}")
    for part in (*parts, "prepare_data.py --overwrite"):
        assert part in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "line 1, column 1: not JSON"),
        ('{"dataset": "toy",\n "vocab_size": ', "line 2, column 16: not JSON"),
        ("[1]", "holds list, not a JSON object"),
        ('{"dataset": "a",\n\t"dataset": "b"}', "line 2: dataset is there twice, first in line 1"),
        ("\x00", "not JSON"),
    ],
)
def test_meta_json_that_is_no_json(folder, text, part):
    (folder / "meta.json").write_text(text)
    assert part in message(folder)
    (folder / "meta.json").write_bytes(b"\xff\xfe")
    assert "is not text in UTF-8 (byte 0" in message(folder)


def test_lines_are_those_of_the_file(folder):
    meta = meta_file.read(folder)
    lines = (folder / "meta.json").read_text().splitlines()
    for section in (meta, meta["train"], meta["val"]):
        for key, line in section.lines.items():
            assert f'"{key}":' in lines[line - 1]


def test_a_damaged_embedded_corpus_is_made_again(tmp_path, capsys, monkeypatch):
    skipped = Skipped()
    skipped.add("empty.py", "empty")
    corpus = embedded.Corpus([f"x = {n}" for n in range(50)], ["y = 1"], "fingerprint", skipped)
    monkeypatch.setattr(embedded, "read_corpus", lambda name: corpus)
    made = data_folder.prepare_embedded(tmp_path, vocab_size=300)
    whole = (made / "train.bin").read_bytes()
    (made / "train.bin").write_bytes(whole[:-2])
    capsys.readouterr()
    assert data_folder.prepare_embedded(tmp_path, vocab_size=300) == made
    assert "the embedded corpus is made again" in capsys.readouterr().out
    assert (made / "train.bin").read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    assert meta_file.read(made)["skipped"] == {"files": 1, "reasons": {"empty": {"files": 1, "first": ["empty.py"]}}}
