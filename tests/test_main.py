"""python -m mars_hf run: unmodified scripts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# An ordinary Hugging Face script: a parser and a Trainer, without MARS.
SCRIPT = """
    import sys
    from dataclasses import dataclass
    from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator
    import neighbour  # next to the script, as scripts expect

    @dataclass
    class Own:
        greeting: str = "hello"

    if __name__ == "__main__":
        own, args = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
        trainer = Trainer(neighbour.gpt2(), args, train_dataset=neighbour.Blocks(), data_collator=default_data_collator)
        trainer.train()
        while hasattr(trainer.optimizer, "optimizer"):
            trainer.optimizer = trainer.optimizer.optimizer
        row = trainer.state.log_history[0]
        print("RAN", own.greeting, type(trainer.optimizer).__name__, trainer.optimizer.param_groups[0]["gamma"],
              "mars/update_rms" in row, sys.argv[0])
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "neighbour.py").write_text((TESTS / "helpers.py").read_text())
    return path


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=cwd)


def script_arguments(tmp_path: Path) -> list[str]:
    return [
        *("--output_dir", str(tmp_path / "out"), "--greeting", "ahoy", "--optim", "mars_adamw"),
        *("--optim_args", "gamma=0.05", "--max_steps", "2", "--logging_steps", "1", "--use_cpu", "true"),
        *("--report_to", "none", "--save_strategy", "no"),
    ]


@pytest.mark.slow
def test_a_script_runs_unmodified(script, tmp_path):
    finished = run("-m", "mars_hf", "run", str(script), *script_arguments(tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert f"RAN ahoy Mars 0.05 True {script}" in finished.stdout


@pytest.mark.slow
def test_a_module_runs_unmodified(script, tmp_path):
    finished = run("-m", "mars_hf", "run", "-m", "script", *script_arguments(tmp_path), cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "RAN ahoy Mars 0.05 True" in finished.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
def test_under_accelerate_launch(script, tmp_path):
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m", "mars_hf", "run"]
    finished = run(*launch, str(script), *script_arguments(tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert "RAN ahoy Mars 0.05 True" in finished.stdout


@pytest.mark.slow
def test_without_the_launcher_the_name_is_unknown(script, tmp_path):
    finished = run(str(script), *script_arguments(tmp_path))
    assert finished.returncode == 2
    assert "mars_adamw" in finished.stderr


def test_mistakes_are_told_in_one_line():
    finished = run("-m", "mars_hf", "run", "no_such_script.py")
    assert finished.returncode == 2
    assert (
        finished.stderr.strip()
        .splitlines()[-1]
        .endswith("no such script: 'no_such_script.py' (give a path, or -m MODULE)")
    )
    assert run("-m", "mars_hf").returncode == 2
    assert "SCRIPT" in run("-m", "mars_hf", "run", "--help").stdout


# Like `trl sft`: a command that starts its trainer through accelerate.
STARTER = """
    import sys
    from accelerate.commands.launch import launch_command, launch_command_parser
    from transformers import HfArgumentParser, TrainingArguments

    HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[2:], return_remaining_strings=True)
    launch_command(launch_command_parser().parse_args(["--cpu", "--num_processes", "1", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("folder", ["here", "elsewhere"])
def test_a_script_that_starts_another_one(script, tmp_path, folder):
    """The child knows MARS too, also from a folder other than mars_hf's."""
    (tmp_path / "starter.py").write_text(textwrap.dedent(STARTER))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cwd = None if folder == "here" else elsewhere
    finished = run(
        "-m", "mars_hf", "run", str(tmp_path / "starter.py"), str(script), *script_arguments(tmp_path), cwd=cwd
    )
    assert finished.returncode == 0, finished.stderr
    assert f"RAN ahoy Mars 0.05 True {script}" in finished.stdout
    assert "MARS trains with mars-adamw" in finished.stderr


def test_the_launch_configs_are_found():
    finished = run("-m", "mars_hf", "configs")
    assert (Path(finished.stdout.strip()) / "ddp.yaml").is_file()
