"""The command and the versions that a card states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mars_hf.training import run_command


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--hub_token abc --lr 1", "--hub_token *** --lr 1"),
        ("--hub-token=abc", "--hub-token=***"),
        ("hub_token=abc", "hub_token=***"),
        ("--wandb.api_key abc", "--wandb.api_key ***"),
        ("--password x --secret=y --credentials z", "--password *** --secret=*** --credentials ***"),
        ("--token --verbose", "--token --verbose"),
        (
            "--max_tokens 5 --tokenizer_name gpt2 --sample_tokens 9",
            "--max_tokens 5 --tokenizer_name gpt2 --sample_tokens 9",
        ),
        ("--data x=hf_abcdefghijklmnopqrstuvwxyz", "--data x=***"),
        ("--out runs/hf_transformers_mars", "--out runs/hf_transformers_mars"),
        ("https://me:pass@host/x ghp_abcdefghijklmnopqrstu", "https://***@host/x ***"),
        ("sk-proj-abcdefghijklmnopqrstuv", "***"),
        ("--name known-secret-1", "--name ***-1"),
    ],
)
def test_secrets_are_hidden(words, expected):
    assert run_command.redacted(words.split(), ["known-secret", None, ""]) == expected.split()


@pytest.mark.parametrize(
    ("own", "script"),
    [
        ("python x.py --a 1", "x.py --a 1"),
        ("python -u -X dev -W error x.py", "x.py"),
        ("python -m pack.age --a", "pack.age --a"),
        ("python -c print()", ""),
        ("python - a", ""),
        ("python -u", ""),
    ],
)
def test_script_and_arguments_follow_the_interpreter(own, script, monkeypatch):
    assert run_command._script_and_arguments(own.split()) == script.split()


def test_a_launcher_is_part_of_the_command(tmp_path):
    """Only one whose arguments end in the script and its arguments; a shell is not."""
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('run_command', {run_command.__file__!r})\n"
        "own = importlib.util.module_from_spec(spec); spec.loader.exec_module(own)\n"
        "print(own.command())\n"
    )
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-u', *sys.argv[2:]], check=True)\n")

    def printed(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    name = Path(sys.executable).name
    own = [str(script), "--lr", "1e-3", "a b", "--hub_token", "abc"]
    shown = f"{script} --lr 1e-3 'a b' --hub_token '***'"
    assert printed(sys.executable, *own) == f"{name} {shown}"
    assert printed(sys.executable, str(launcher), "--procs=2", *own) == f"{name} {launcher} --procs=2 {shown}"
    shell = " ".join([sys.executable, *map("'{}'".format, own)]) + "; true"
    assert printed("/bin/sh", "-c", shell) == f"{name} {shown}"


def test_a_program_of_the_environment_is_named_as_it_was_typed():
    assert run_command._readable(["/env/bin/python", "/env/bin/accelerate", "launch", "x.py"]) == [
        *("accelerate", "launch", "x.py")
    ]
    assert run_command._readable(["/env/bin/python", "/work/x.py"]) == ["python", "/work/x.py"]


def test_a_notebook_has_no_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    assert run_command.command() is None


def test_versions_are_those_of_what_was_imported(monkeypatch):
    import torch
    import transformers

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__="1.2"))
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    found = run_command.versions(SimpleNamespace(is_deepspeed_enabled=True))
    assert found["torch"] == torch.__version__ and found["transformers"] == transformers.__version__
    assert found["deepspeed"] == "1.2" and "mars_hf" in found and "trl" not in found
    assert "deepspeed" not in run_command.versions(SimpleNamespace(is_deepspeed_enabled=False))
    assert os.sep not in "".join(found.values())
