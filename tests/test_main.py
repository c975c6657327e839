"""python -m mars_hf run: unmodified scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import helpers
import pytest
from transformers import TrainingArguments, default_data_collator

import mars_hf
from mars_hf.__main__ import main

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
        print("WEIGHTS", [param.double().sum().item() for param in trainer.model.parameters()])
"""


# tests/docs/test_examples.py runs `accelerate launch -m mars_hf run`.


@pytest.fixture(autouse=True)
def changes_nothing_here(monkeypatch):
    """Commands that run in this process leave Trainer as it is."""
    monkeypatch.setattr("mars_hf.__main__.replace_trainer", lambda: None)


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
@pytest.mark.parametrize("way", ["alone", "torchrun"])
def test_run_script(script, tmp_path, way):
    """It runs unmodified: exact MARS, with clipping, and the weights are those of MarsTrainer."""
    argv = [word.replace("gamma=0.05", "gamma=0.05,is_approx=false") for word in script_arguments(tmp_path)]
    argv += ["--max_grad_norm", "0.01", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant"]
    launch = ["-m", "mars_hf", "run", str(script)]
    if way == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", *launch]
    finished = run(*launch, *argv)
    assert finished.returncode == 0, finished.stderr
    assert f"RAN ahoy Mars 0.05 True {script}" in finished.stdout
    (found,) = [line.removeprefix("WEIGHTS ") for line in finished.stdout.splitlines() if line.startswith("WEIGHTS ")]

    mars_hf.register()
    own = {"optim": "mars_adamw", "optim_args": "gamma=0.05,is_approx=false", "learning_rate": 1e-2}
    args = TrainingArguments(
        str(tmp_path / "own"),
        max_steps=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        max_grad_norm=0.01,
        lr_scheduler_type="constant",
        **own,
    )
    trainer = mars_hf.MarsTrainer(
        helpers.gpt2(), args, train_dataset=helpers.Blocks(), data_collator=default_data_collator
    )
    trainer.train()
    expected = [param.double().sum().item() for param in trainer.model.parameters()]
    assert json.loads(found) == pytest.approx(expected, rel=1e-6, abs=1e-7)  # of steps of 1e-2


@pytest.mark.slow
def test_run_module(script, tmp_path):
    finished = run("-m", "mars_hf", "run", "-m", "script", *script_arguments(tmp_path), cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "RAN ahoy Mars 0.05 True" in finished.stdout


@pytest.mark.slow
def test_wrong_command_lines():
    finished = run("-m", "mars_hf", "run", "no_such_script.py")
    assert finished.returncode == 2
    line = "no such script: 'no_such_script.py' (give a path, or -m MODULE); --help shows how to use it"
    assert finished.stderr == f"python -m mars_hf: {line}\n"
    assert run("-m", "mars_hf").returncode == 2
    assert "SCRIPT" in run("-m", "mars_hf", "run", "--help").stdout


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["pytest_no_such_module"], "no such module: 'pytest_no_such_module'"),
        (["json.no_such_part"], "no such module: 'json.no_such_part'"),
        (["json.decoder.no_such_part"], "no such module: 'json.decoder.no_such_part'"),
        (["importlib"], "no such module: 'importlib'"),
        (["a..b"], "no such module: 'a..b'"),
        ([".json"], "no such module: '.json'"),
        (["nothing/there.py"], "no such module"),
    ],
)
def test_wrong_modules(argv, part, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", "-m", *argv])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert part in line and line.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (PermissionError(13, "Permission denied", "/x/file.pt"), "/x/file.pt: Permission denied"),
        (ValueError("x.pt cannot be read\n(damaged)"), "cannot be read (damaged)"),
        (ImportError("install deepspeed"), "install deepspeed"),
    ],
)
def test_to_universal_errors(error, part, monkeypatch, capsys):
    def fail(source, target):
        raise error

    monkeypatch.setattr("mars_hf.universal.to_universal", fail)
    with pytest.raises(SystemExit) as end:
        main(["to_universal", "source", "target"])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert part in line and line.count("\n") == 1


@pytest.mark.slow
def test_configs():
    finished = run("-m", "mars_hf", "configs")
    assert (Path(finished.stdout.strip()) / "ddp.yaml").is_file()
