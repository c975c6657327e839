"""Wrong input and refusals of the machine end a recipe with one line and exit code 2."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from pretraining.run.errors import one_line_errors

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("two\n  lines"), 2, "program: two lines\n"),
        (OSError(errno.ENOSPC, "No space left", "/disk/x"), 2, "program: [Errno 28] No space left: '/disk/x'\n"),
        (OverflowError("too large"), 2, "program: too large\n"),
        (ValueError("\x1b[31mred " + "9" * 400), 2, f"program: \\x1b[31mred {'9' * 200}...\n"),
        (KeyboardInterrupt(), 130, "program: interrupted\n"),
    ],
    ids=["value", "system", "number", "text of others", "ctrl-c"],
)
def test_one_line_of_the_first_process(error, code, line, capsys, monkeypatch):
    @one_line_errors("program")
    def main() -> None:
        raise error

    for rank, printed in (("0", line), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code and end.value.__cause__ is error
        assert capsys.readouterr().err == printed


def test_environment_that_is_no_number(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(SystemExit):
        one_line_errors("program")(lambda: None)()
    assert "LOCAL_WORLD_SIZE=two in the environment is not a number" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyError("x"), SystemExit(3)], ids=lambda error: repr(error))
def test_other_errors_pass(error):
    @one_line_errors("program")
    def main() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        main()
    assert raised.value is error


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_print_one_line(tmp_path):
    config = str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")
    launch = ["-m", "accelerate.commands.launch", "--config_file", config, "recipes/pretrain_gpt2.py"]
    command = [sys.executable, *launch, "--optimizer", "sgd", "--output_dir", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode != 0
    assert ended.stderr.count("optimizer 'sgd' is unknown") == 1


ENDING = """
import atexit, sys
from pretraining.run import errors

class Kept:
    def __del__(self):
        print("the interpreter ends")

kept = Kept()
atexit.register(print, "at exit")

@errors.one_line_errors("program")
def main():
    print("done")
    if sys.argv[1] == "fails":
        raise ValueError("no")

errors.run(main)
"""


@pytest.mark.parametrize(
    ("processes", "how", "code", "printed"),
    [
        ("1", "succeeds", 0, "done\nat exit\nthe interpreter ends\n"),
        ("2", "succeeds", 0, "done\nat exit\n"),
        ("2", "fails", 2, "done\nat exit\nthe interpreter ends\n"),
    ],
)
def test_a_process_of_several_ends_before_the_interpreter(processes, how, code, printed):
    """Threads of gloo abort an interpreter that ends; what is registered to run at exit runs, and no output is lost."""
    environment = {"WORLD_SIZE": processes, "PYTHONPATH": str(ROOT / "recipes")}
    ended = subprocess.run([sys.executable, "-c", ENDING, how], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr
