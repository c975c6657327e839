"""A folder of token files that comes with code runs none of it, and nobody is asked to."""

from __future__ import annotations

import builtins
import contextlib
import json

import pytest
from pretraining.data import data_folder, token_checks, token_files
from transformers import AutoTokenizer


def test_code_in_a_tokenizer_does_not_run(tmp_path, monkeypatch):
    folder, marker = tmp_path / "tokenizer", tmp_path / "executed"
    folder.mkdir()
    code = f"import os; os.mkdir({str(marker)!r})\nfrom transformers import PreTrainedTokenizer as Own\n"
    (folder / "own.py").write_text(code)
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(builtins, "input", lambda prompt: "y")
    with contextlib.suppress(Exception):  # the class is no whole tokenizer
        AutoTokenizer.from_pretrained(folder)
    assert marker.exists()  # the folder is one that would run
    marker.rmdir()
    meta = {"dataset": "x", "val": {"bytes": 1, "tokens": 1}}
    monkeypatch.setattr(token_files, "read_meta", lambda directory: meta)
    monkeypatch.setattr(token_checks, "check", lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match="contains custom code"):
        data_folder.load(tmp_path)
    assert not marker.exists()
