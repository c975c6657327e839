"""python -m mars_hf run: unmodified scripts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import helpers
import pytest
import torch
from forks import run_in_forks

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


def run(*command: str, cwd: Path | None = None) -> list[str]:
    """Return the lines that a command prints."""
    finished = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=cwd)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["alone", "torchrun"])
def test_run_script(script, tmp_path, way):
    """It runs unmodified, by its path or as a module: exact MARS, with clipping, and the weights of MarsTrainer."""
    launch = ["-m", "mars_hf", "run", str(script)]
    if way == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", *launch[:-1], "-m", "script"]
    settings = {"learning_rate": 1e-2, "max_steps": 2, "max_grad_norm": 0.01, "lr_scheduler_type": "constant"}
    settings |= {"optim": "mars_adamw", "optim_args": "gamma=0.05,is_approx=false"}
    given = {"output_dir": tmp_path / "out", "greeting": "ahoy", "logging_steps": 1, "use_cpu": True, **settings}
    given |= {"report_to": "none", "save_strategy": "no"}
    lines = run(*launch, *(str(word) for name, value in given.items() for word in (f"--{name}", value)), cwd=tmp_path)
    assert f"RAN ahoy Mars 0.05 True {script}" in lines
    (found,) = [line.removeprefix("WEIGHTS ") for line in lines if line.startswith("WEIGHTS ")]

    mars_hf.register()
    args = helpers.arguments(tmp_path / "own", per_device_train_batch_size=8, **settings)
    args.data_seed = None
    trainer = helpers.mars_trainer(args, helpers.gpt2())
    trainer.train()
    expected = [param.double().sum().item() for param in trainer.model.parameters()]
    assert json.loads(found) == pytest.approx(expected, rel=1e-6, abs=1e-7)  # of steps of 1e-2


LOOPS = {
    "torch": """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.clone()
        try:
            optimizer.step()
        finally:
            print("MOVED", not torch.equal(model.weight, before))
    """,
    "accelerate": """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        net = torch.nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        before = net.weight.clone()
        try:
            optimizer.step()
        finally:
            print("MOVED", not torch.equal(net.weight, before))
    """,
    "own Mars": """
        import mars_hf, torch
        model = torch.nn.Linear(2, 2)
        head = torch.nn.Linear(2, 2)
        for optimizer in (mars_hf.create(model, lr=0.1), torch.optim.SGD(head.parameters())):
            head(model(torch.ones(1, 2))).sum().backward()
            optimizer.step()
        print("MOVED both")
    """,
    "another first": """
        import mars_hf, torch
        model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        mars = mars_hf.create(model, lr=0.1)
        for optimizer in (torch.optim.SGD(head.parameters()), mars):
            head(model(torch.ones(1, 2))).sum().backward()
            optimizer.step()
        print("MOVED both")
    """,
    "error caught": """
        import torch
        param = torch.nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        try:
            torch.optim.AdamW([param]).step()
        except Exception:
            print("MOVED False")
    """,
    "Mars never steps": """
        import mars_hf, sys, torch
        model = torch.nn.Linear(2, 2)
        mars_hf.create(model, lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
        sys.exit(0)
    """,
    "no training": "print('EVALUATED')",
    "no training, and an exit": "import sys; sys.exit(0)",
    "help": "import argparse; argparse.ArgumentParser().parse_args(['--help'])",
    "failure": "import sys; sys.exit(7)",
}
# Exit code, and what the last line of stderr has.
ENDS = {
    "torch": (1, r"AdamW would take this step, and MARS has taken none.*mars_hf\.create"),
    "accelerate": (1, r"SGD would take this step, and MARS has taken none.*mars_hf\.create"),
    "own Mars": (0, "SGD trains, too"),
    "another first": (0, "SGD trains, too"),
    "error caught": (1, "AdamW would take this step"),
    "Mars never steps": (1, "AdamW trained, and the Mars that was made has taken no step"),
    "no training": (0, "MARS has trained nothing in this process"),
    "no training, and an exit": (0, "MARS has trained nothing in this process"),
    "help": (0, None),
    "failure": (7, None),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run all loops."""
    arguments = {loop: ["--optim", "mars_m", *(["--help"] * (loop == "help"))] for loop in LOOPS}
    imports = ["accelerate", "transformers.trainer"]
    return run_in_forks(LOOPS, tmp_path_factory.mktemp("loops"), imports, ["-m", "mars_hf", "run"], arguments)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_run_stops_loops_without_mars(loop, ended):
    """At the first step of another optimizer, unless there is a Mars, too; at the end if none has trained."""
    finished = ended[loop]
    code, line = ENDS[loop]
    assert finished.returncode == code, finished.stderr
    if line is not None:
        assert re.search(line, finished.stderr.splitlines()[-1])
    else:
        assert "MARS" not in finished.stderr
    if code == 1 and loop != "Mars never steps":
        assert "MOVED False" in finished.stdout


def refused(capsys, *argv: str) -> str:
    """Return the one line with which a command ends."""
    with pytest.raises(SystemExit) as end:
        main([*argv])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_no_command_is_a_call_for_help(capsys):
    main([])
    assert capsys.readouterr().out.startswith("usage: python -m mars_hf [-h] [--version] COMMAND")


def test_version_of_the_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"mars_hf {mars_hf.__version__}\n"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"def f(:\n", "script.py is no Python: invalid syntax (script.py, line 1)"),
        (b"a = '\xff'\n", "script.py is no Python: (unicode error)"),
        (b"\0", "script.py is no Python: source code string cannot contain null bytes"),
    ],
)
def test_script_with_a_syntax_error(text, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_bytes(text)
    assert part in refused(capsys, "run", "script.py")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["x"], "COMMAND: invalid choice: 'x'"),
        (["run", "no_such_script.py"], "no such script: 'no_such_script.py' (give a path, or -m MODULE); --help shows"),
        (["run", "-m", "pytest_no_such_module"], "no such module: 'pytest_no_such_module'"),
        (["run", "-m", "json.no_such_part"], "no such module: 'json.no_such_part'"),
        (["run", "-m", "json.decoder.no_such_part"], "no such module: 'json.decoder.no_such_part'"),
        (["run", "-m", "importlib"], "no such module: 'importlib'"),
        (["run", "-m", "a..b"], "no such module: 'a..b'"),
        (["run", "-m", ".json"], "no such module: '.json'"),
        (["run", "-m", "nothing/there.py"], "no such module"),
    ],
)
def test_wrong_command_lines(argv, part, capsys):
    line = refused(capsys, *argv)
    assert line.startswith("python -m mars_hf: ") and part in line
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.AdamW([weight]).step()  # nothing watches this process any more


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (PermissionError(13, "Permission denied", "/x/file.pt"), "[Errno 13] Permission denied: '/x/file.pt'"),
        (ValueError("x.pt cannot be read\n(damaged)"), "cannot be read (damaged)"),
        (ImportError("install deepspeed"), "install deepspeed"),
    ],
)
def test_to_universal_errors(error, part, monkeypatch, capsys):
    def fail(source, target):
        raise error

    monkeypatch.setattr("mars_hf.universal.to_universal", fail)
    assert part in refused(capsys, "to_universal", "source", "target")


def test_configs_command(capsys):
    main(["configs"])
    assert (Path(capsys.readouterr().out.strip()) / "ddp.yaml").is_file()
