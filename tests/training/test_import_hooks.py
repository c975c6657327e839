"""Import hooks, and MARS in the child processes of `python -m mars_hf run`."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mars_hf.training import child_processes, import_hooks


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Return the name of a module that is not imported yet."""
    name = f"hooked_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("VALUE = 1\nif VALUE < 0: raise ValueError\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield name
    sys.modules.pop(name, None)
    sys.meta_path[:] = finders


def test_an_action_waits_for_the_import(fresh):
    seen = []
    for number in range(2):  # two hooks for one module
        import_hooks.after_import(fresh, lambda number=number: seen.append((number, sys.modules[fresh].VALUE)))
    assert importlib.util.find_spec(fresh).origin.endswith(f"{fresh}.py")  # looking is not importing
    assert seen == []
    importlib.import_module(fresh)
    assert sorted(seen) == [(0, 1), (1, 1)]
    importlib.reload(sys.modules[fresh])
    assert len(seen) == 2
    import_hooks.after_import(fresh, lambda: seen.append("at once"))
    assert seen[-1] == "at once"


def test_a_failed_import_calls_nothing_and_may_be_repeated(fresh):
    seen = []
    import_hooks.after_import(fresh, lambda: seen.append(1))
    path = Path(importlib.util.find_spec(fresh).origin)
    works = path.read_text()
    path.write_text("raise ValueError\n")
    with pytest.raises(ValueError):
        importlib.import_module(fresh)
    assert seen == []
    path.write_text(works + "# longer, so that no cached bytecode is taken\n")
    importlib.invalidate_caches()
    assert importlib.import_module(fresh).VALUE == 1
    assert seen == [1]


def test_the_path_is_inherited_once():
    environment = {"PYTHONPATH": "/one:/two"}
    for _ in range(2):
        child_processes.inherit(environment)
    assert environment["PYTHONPATH"] == os.pathsep.join([child_processes.FOLDER, "/one:/two"])
    for empty in ({}, {"PYTHONPATH": ""}):
        child_processes.inherit(empty)
        assert empty["PYTHONPATH"] == child_processes.FOLDER


def child(script: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    inherited = {**os.environ, **environment}
    child_processes.inherit(inherited)
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, env=inherited, cwd=cwd, check=False)


def test_a_child_without_transformers_pays_nothing():
    finished = child(
        "import sys; print([name for name in ('torch', 'transformers', 'mars_hf', 'numpy') if name in sys.modules])"
    )
    assert (finished.stdout.strip(), finished.stderr) == ("[]", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "from transformers.training_args import TrainingArguments",
        "import transformers.trainer_optimizer",
        "import transformers, mars_hf",
    ],
)
def test_a_child_knows_mars_whatever_it_imports_first(imports, tmp_path):
    """The child also works from a folder where mars_hf cannot be found."""
    path = str(Path(child_processes.FOLDER).parents[2]) if "mars_hf" in imports else ""
    finished = child(
        f"""
        {imports}
        from transformers import Trainer, TrainingArguments
        from transformers.trainer import DEFAULT_CALLBACKS
        args = TrainingArguments(output_dir={str(tmp_path)!r}, optim="mars_adamw", use_cpu=True, report_to="none")
        print(Trainer.get_optimizer_cls_and_kwargs(args)[0].__name__)
        print([kind.__name__ for kind in DEFAULT_CALLBACKS].count("DefaultMarsCallback"))
        """,
        cwd=tmp_path,
        PYTHONPATH=path,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["MarsFactory", "1"]


def test_a_sitecustomize_that_was_there_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.found_me = __file__\n")
    finished = child(
        "import sys, sitecustomize; print(sys.found_me == sitecustomize.__file__)", PYTHONPATH=str(tmp_path)
    )
    assert finished.stdout.strip() == "True", finished.stderr


def test_a_child_that_cannot_import_mars_hf_says_so_and_goes_on(tmp_path):
    """Simulate another Python, with transformers and without torch."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "training_args.py").write_text("")
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    finished = child("import transformers.training_args; print('went on')", PYTHONPATH=str(tmp_path))
    assert finished.stdout.strip() == "went on"
    assert "--optim mars_* is unknown in this process: no torch here" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("below", ["on its own", "below a run"])
@pytest.mark.parametrize(
    "first",
    [
        "import mars_hf; mars_hf.register()",
        "from mars_hf import MarsTrainer",
        "import transformers.trainer, mars_hf",
        "import mars_hf.training.callbacks",
        "from transformers import Seq2SeqTrainer",
    ],
)
def test_the_trainer_module_runs_once_whatever_is_imported_first(first, below):
    """The hook's action imported a half-initialized module, failed, and Python ran transformers.trainer again."""
    code = f"""
        import sys

        runs = []

        def count(event, arguments):
            if event == "exec" and getattr(arguments[0], "co_filename", "").endswith("transformers/trainer.py"):
                runs.append(event)

        sys.addaudithook(count)
        {first}
        from transformers.trainer import DEFAULT_CALLBACKS
        own = [callback.__name__ for callback in DEFAULT_CALLBACKS].count("DefaultMarsCallback")
        from transformers import Seq2SeqTrainer, Trainer
        print(len(runs), own, Trainer.__name__, "MarsTrainer" in [kind.__name__ for kind in Seq2SeqTrainer.__mro__])
    """
    environment = dict(os.environ)
    if below == "below a run":
        child_processes.inherit(environment)
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    expected = ["MarsTrainer", "True"] if below == "below a run" else ["Trainer", "False"]
    own = "1" if below == "below a run" or "mars_hf" in first else "0"
    assert finished.stdout.split() == ["1", own, *expected], finished.stderr
