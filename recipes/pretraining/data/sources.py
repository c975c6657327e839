"""Load documents to tokenize: a data set of the Hugging Face Hub, or local files."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pretraining.run.errors import one_line
from pretraining.run.skipped import Skipped

if TYPE_CHECKING:
    import datasets

# Functions import what takes seconds: prepare_data.py reads its command line first.
TEXT = "text"


class HubName(NamedTuple):
    """A data set's name on the Hub, and one of its configurations; None if there is only one."""

    name: str
    config: str | None = None


# Names that --dataset accepts besides those on the Hub.
ALIASES = {
    "openwebtext": HubName("Skylion007/openwebtext"),
    "fineweb-edu": HubName("HuggingFaceFW/fineweb-edu", "sample-100BT"),
}
_KINDS = {".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


class SourceError(ValueError):
    """Raised when the requested documents are not available."""


class Found(NamedTuple):
    """Files to read.

    Attributes:
        files: the files, each once.
        by_search: those found in a folder or by a glob; a .txt among them that holds no text is skipped, while a file
            that the user has named must be readable.
        skipped: what was skipped so far; reading adds to it.
    """

    files: list[Path]
    by_search: frozenset[Path]
    skipped: Skipped


def load_hub(
    name: str, *, config: str | None, split: str, text_column: str, num_proc: int | None = None
) -> datasets.Dataset:
    """Load a data set of the Hub, or of its local cache, with one column, `text`.

    Args:
        name: name on the Hub.
        config: name of the configuration; None if there is only one.
        split: name of the split.
        text_column: the column with the documents.
        num_proc: processes that download and read; None uses this one.

    Raises:
        SourceError: neither cached nor reachable, or no such configuration, split or column.
    """
    import datasets

    try:
        dataset = datasets.load_dataset(name, config, split=split, num_proc=num_proc)
    except ConnectionError as error:
        raise SourceError(
            f"--dataset {name}: the Hugging Face Hub cannot be reached and the data set is not cached; it needs a "
            "network, or a cached copy (HF_HOME), or pass local files with --files"
        ) from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise SourceError(
            f"--dataset {name}: no such data set on the Hugging Face Hub, or it needs a login (hf auth login); "
            "check the name, or pass local files with --files"
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise SourceError(
            f"--dataset {name}: {one_line(error)} (--dataset_config {config}, --train_split {split})"
        ) from error
    _check_column(dataset, text_column, f"--dataset {name}")
    dataset = dataset.select_columns([text_column])
    return dataset if text_column == TEXT else dataset.rename_column(text_column, TEXT)


def find_files(patterns: Sequence[str]) -> Found:
    """Return the files behind paths: files, all files of a known kind below a folder, matches of a glob.

    Files of other kinds below a folder are skipped.

    Args:
        patterns: files, folders and globs.

    Returns:
        The files: patterns in the given order, files of one pattern sorted by path.

    Raises:
        SourceError: a pattern matches nothing, or a file is of an unknown kind, or the kinds differ.
    """
    files: dict[Path, None] = {}
    searched: set[Path] = set()
    named: set[Path] = set()
    skipped = Skipped()
    for pattern in patterns:
        found = _expand(pattern, skipped)
        files.update(dict.fromkeys(found))
        (named if Path(pattern).is_file() else searched).update(found)
    kinds = {_KINDS[path.suffix.lower()] for path in files}
    if len(kinds) > 1:
        raise SourceError(
            f"--files {' '.join(patterns)}: {' and '.join(sorted(kinds))} files together; give files of one kind"
        )
    return Found(list(files), frozenset(searched - named), skipped)


def kind(files: Sequence[Path]) -> str:
    """Return the kind of the files of `find_files`: txt, jsonl or parquet."""
    return _KINDS[files[0].suffix.lower()]


def load_files(found: Found, *, text_column: str, cache_dir: Path) -> datasets.Dataset:
    """Load local files as a data set with one column, `text`.

    A document is a .txt file, a line of .jsonl (or .json), or a row of .parquet.

    Args:
        found: the files of `find_files`; skipped ones are added to its count.
        text_column: the column, or JSON key, with the documents; unused for .txt files.
        cache_dir: folder for a copy of the texts; it must outlive the data set.

    Raises:
        SourceError: a file cannot be read, is not UTF-8, or has no such column.
    """
    import datasets

    skipped = cache_dir / "skipped.jsonl"  # a file: datasets copies what it gives to a generator
    skipped.touch()
    settings = {
        "files": tuple((str(path), path in found.by_search) for path in found.files),  # datasets cuts lists apart
        "text_column": text_column,
        "skipped": str(skipped),
    }
    try:
        dataset = datasets.Dataset.from_generator(
            _read,
            features=datasets.Features({TEXT: datasets.Value("large_string")}),
            cache_dir=str(cache_dir),
            gen_kwargs=settings,
        )
    except datasets.exceptions.DatasetsError as error:
        cause = error.__cause__ or error
        if isinstance(cause, SourceError):
            raise cause from None
        raise SourceError(f"--files: {one_line(cause)}") from error
    with skipped.open(encoding="utf-8") as lines:
        for line in lines:
            found.skipped.add(*json.loads(line))
    return dataset


def split(dataset: datasets.Dataset, *, test_size: float, seed: int, cache_dir: Path) -> dict[str, datasets.Dataset]:
    """Hold documents out as nanoGPT does: `train_test_split` with shuffling; its test set is `val`.

    Args:
        dataset: the documents.
        test_size: share to hold out, rounded up to whole documents: at least one.
        seed: seed of the shuffle.
        cache_dir: folder for the shuffled order; it must outlive the result.

    Raises:
        SourceError: no document would be left to train on.
    """
    try:
        parts = dataset.train_test_split(
            test_size=test_size,
            seed=seed,
            shuffle=True,
            train_indices_cache_file_name=str(cache_dir / "train_indices.arrow"),
            test_indices_cache_file_name=str(cache_dir / "val_indices.arrow"),
        )
    except ValueError as error:
        raise SourceError(
            f"--test_size {test_size} of {len(dataset)} document(s) leaves none to train on; give at least 2 "
            "documents (a .txt file is one; .jsonl has one a line) and a smaller --test_size"
        ) from error
    return {"train": parts["train"], "val": parts["test"]}


def _check_column(dataset: datasets.Dataset, column: str, what: str) -> None:
    if column not in dataset.column_names:
        raise SourceError(_no_column(what, column, dataset.column_names))
    feature = dataset.features[column]
    if getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise SourceError(f"{what}: column {column!r} is not text but {feature}; name another with --text_column")
    nulls = dataset.data.column(column).null_count
    if nulls:
        raise SourceError(f"{what}: column {column!r} is null in {nulls} row(s); remove them, or name another column")


def _no_column(what: str, column: str, present: Sequence[str]) -> str:
    return f"{what} has no column {column!r}; --text_column must be one of: {', '.join(present)}"


def _expand(pattern: str, skipped: Skipped) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        below = [file for file in sorted(path.rglob("*")) if file.is_file()]
        found = [file for file in below if file.suffix.lower() in _KINDS]
        for file in below:
            if file.suffix.lower() not in _KINDS:
                skipped.add(str(file.relative_to(path)), "of another kind")
        if not found:
            raise SourceError(f"--files {pattern}: no {', '.join(_KINDS)} file in this folder or below")
    else:
        found = [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        found = [file for file in found if file.is_file()]
        if not found:
            raise SourceError(f"--files {pattern}: no such file or folder, and as a glob it matches no file")
    for file in found:
        if file.suffix.lower() not in _KINDS:
            raise SourceError(f"--files {file}: cannot read {file.suffix or 'such'} files; give {', '.join(_KINDS)}")
    return [file.resolve() for file in found]


def _read(files: tuple[tuple[str, bool], ...], text_column: str, skipped: str) -> Iterator[dict[str, str]]:
    import pyarrow

    count = 0
    reasons = Skipped()
    for file, is_searched in files:
        path = Path(file)
        kind = _KINDS[path.suffix.lower()]
        if kind == "txt" and is_searched:
            text, reason = _text_or_reason(path)
            if not reason:
                count += 1
                yield {TEXT: text}
                continue
            reasons.add(path.name, reason)
            with open(skipped, "a", encoding="utf-8") as lines:
                lines.write(json.dumps([path.name, reason]) + "\n")
            continue
        try:
            for text in _READERS[kind](path, text_column):
                count += 1
                yield {TEXT: text}
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            raise SourceError(f"{path} is not valid UTF-8 ({error.reason}); convert it to UTF-8") from error
        except (OSError, pyarrow.ArrowException) as error:
            raise SourceError(f"cannot read {path}: {one_line(error)}") from error
    if count == 0:
        why = f"; {reasons}" if reasons else ""
        raise SourceError(f"--files: no document in {len(files)} file(s) (first: {files[0][0]}){why}")


def _text_or_reason(path: Path) -> tuple[str, str]:
    """Return a file's text, or why it has none."""
    try:
        content = path.read_bytes()
    except OSError:
        return "", "unreadable"
    if not content:
        return "", "empty"
    if b"\0" in content:
        return "", "binary"
    try:
        return content.decode("utf-8-sig"), ""
    except UnicodeDecodeError:
        return "", "not UTF-8"


def _read_txt(path: Path, text_column: str) -> Iterator[str]:
    yield path.read_bytes().decode("utf-8-sig")  # read_text would change line ends


def _read_jsonl(path: Path, text_column: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number},"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise SourceError(f"{where} is not JSON ({error.msg}); each line must be one JSON object") from error
            if not isinstance(row, dict):
                raise SourceError(f"{where} is not a JSON object, but {one_line(row)}; each line must be one")
            if text_column not in row:
                raise SourceError(_no_column(where, text_column, list(row)))
            yield _text(row[text_column], f"{where} column {text_column!r}")


def _read_parquet(path: Path, text_column: str) -> Iterator[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if text_column not in names:
            raise SourceError(_no_column(str(path), text_column, names))
        row = 0
        for batch in table.iter_batches(batch_size=1000, columns=[text_column]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield _text(value, f"{path}, row {row}, column {text_column!r}")


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    "txt": _read_txt,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SourceError(f"{where} is not text, but {one_line(value)}; remove it, or name another with --text_column")
    value.encode()  # raises for half a surrogate pair, which JSON can contain
    return value
