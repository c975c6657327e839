"""Documents to tokenize, by the readers of datasets: the Hub, or local files."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

TEXT = "text"
# Names that --dataset accepts besides those on the Hub: name there, and configuration.
ALIASES = {
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-100BT"),
}
# The branch to which the Hub converts data sets that scripts made.
PARQUET = "refs/convert/parquet"
# Suffix to the reader of datasets. A .txt file is one document.
READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_named(
    name: str,
    *,
    config: str | None,
    revision: str | None = None,
    split: str,
    text_column: str,
    num_proc: int | None = None,
) -> datasets.Dataset:
    """Load a data set of the Hub, or of its local cache, with one column, `text`.

    Raises:
        ValueError: neither cached nor reachable, no such configuration, revision, split or column, or a data set that a
            script of its authors makes, which `datasets` no longer runs.
    """
    try:
        dataset = datasets.load_dataset(name, config, revision=revision, split=split, num_proc=num_proc)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if "scripts are no longer supported" in str(error):
            raise ValueError(
                f"--dataset {name!r:.200} is made by a script, which datasets {datasets.__version__} does not run; "
                f"the Hub keeps such data sets as parquet files: give --dataset_revision {PARQUET}"
            ) from error
        raise ValueError(
            f"--dataset {name!r:.200}, --dataset_config {config}, --train_split {split}: {str(error)!r:.200}; it needs "
            "a network or a cached copy (HF_HOME), and some need a login (hf auth login); local files need --files"
        ) from error
    return _text_only(dataset, text_column, f"--dataset {name}")


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Return files, all files of a known kind below folders, and matches of globs: each once, sorted in a pattern.

    Raises:
        ValueError: a pattern matches nothing, a file is of an unknown kind, or the kinds differ.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        if Path(pattern).is_dir():
            paths = [path for path in Path(pattern).rglob("*") if path.suffix.lower() in READERS]
        else:
            paths = [
                Path(name) for name in ([pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True))
            ]
        matches = [path.resolve() for path in sorted(paths) if path.is_file()]
        if not matches:
            raise ValueError(f"--files {pattern!r:.200}: no {', '.join(READERS)} file there")
        files.update(dict.fromkeys(matches))
    suffixes = sorted({path.suffix.lower() for path in files})
    if len({READERS.get(suffix) for suffix in suffixes}) > 1 or suffixes[0] not in READERS:
        raise ValueError(f"--files: cannot read {suffixes!r:.200}; give files of one kind: {', '.join(READERS)}")
    return list(files)


def load_files(files: Sequence[Path], *, text_column: str, cache_dir: Path) -> datasets.Dataset:
    """Load local files of one kind as a data set with one column, `text`.

    A document is a .txt file, with its line ends as newlines, or a row. A copy of the texts is in `cache_dir`.

    Raises:
        ValueError: a file cannot be read, or has no such column.
    """
    reader = READERS[files[0].suffix.lower()]
    flag = f"--files {str(files[0])!r:.200}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    settings: dict[str, Any] = {"sample_by": "document", "encoding": "utf-8-sig"} if reader == "text" else {}
    paths = [glob.escape(str(path)) for path in files]
    try:
        dataset = datasets.load_dataset(reader, data_files=paths, split="train", cache_dir=str(cache_dir), **settings)
        dataset.data.validate(full=True)  # json does not look at UTF-8
    except Exception as error:  # of any of the readers' libraries
        raise ValueError(f"{flag}: cannot read as {reader} in UTF-8: {error.__cause__ or error!r:.200}") from error
    return _text_only(dataset, text_column, flag)


def _text_only(dataset: datasets.Dataset, column: str, flag: str) -> datasets.Dataset:
    """Return the data set with one column, `text`; every document must be text."""
    if column not in dataset.column_names:
        raise ValueError(f"{flag} has no column {column!r:.200}; --text_column accepts {dataset.column_names!r:.200}")
    if getattr(dataset.features[column], "dtype", None) not in ("string", "large_string"):
        raise ValueError(f"{flag}: column {column!r:.200} is {dataset.features[column]!r:.200}, not text; name another")
    if nulls := dataset.data.column(column).null_count:
        raise ValueError(f"{flag}: column {column!r:.200} is missing or null in {nulls} row(s); remove them")
    return dataset.select_columns([column]).rename_columns({column: TEXT})


def split(documents: datasets.Dataset, *, test_size: float, seed: int, cache_dir: Path) -> dict[str, datasets.Dataset]:
    """Hold documents out as nanoGPT does: `train_test_split` with shuffling; its test set is `val`.

    A single document is cut: its end is held out, from the start of a line where it has several. The shuffled order is
    in `cache_dir`.

    Raises:
        ValueError: no document would be left to train on.
    """
    if len(documents) == 1:
        text = documents[0][TEXT]
        cut = int(len(text) * (1 - test_size))
        cut = text.rfind("\n", 0, cut) + 1 or cut
        if not 0 < cut < len(text):
            raise ValueError(f"a single document of {len(text)} characters is too short to hold a part of it out")
        features = datasets.Features({TEXT: datasets.Value("large_string")})
        return {
            name: datasets.Dataset.from_dict({TEXT: [part]}, features)
            for name, part in (("train", text[:cut]), ("val", text[cut:]))
        }
    halves = documents.train_test_split(
        test_size=test_size,  # rounded up to whole documents
        seed=seed,
        train_indices_cache_file_name=str(cache_dir / "train_indices.arrow"),
        test_indices_cache_file_name=str(cache_dir / "val_indices.arrow"),
    )
    return {"train": halves["train"], "val": halves["test"]}
