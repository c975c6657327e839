"""Run scripts in forks of one process, which has imported what takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

# Each fork goes on as `python WORDS` does after these imports, and ends as that.
_SERVER = """
import importlib, json, os, runpy, sys
commands, imports = json.loads(sys.argv[1])
for name in imports:
    importlib.import_module(name)
codes = {}
for name, words in commands.items():
    if (child := os.fork()) == 0:
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(json.dumps(codes))
    sys.exit()
os.chdir(name)
for descriptor, file in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
if words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
"""


def run_in_forks(
    scripts: Mapping[str, str],
    folder: Path,
    imports: Sequence[str],
    launcher: Sequence[str] = (),
    arguments: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run `python [LAUNCHER] script.py [ARGUMENTS]` for each script, in FOLDER/<name>; return what each has left.

    Python's own filters of warnings apply, and no launcher's variables are set.
    """
    commands = {name: [*launcher, "script.py", *(arguments or {}).get(name, ())] for name in scripts}
    for name, script in scripts.items():
        (folder / name).mkdir()
        (folder / name / "script.py").write_text(textwrap.dedent(script))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONWARNINGS", "RANK", "LOCAL_RANK"):
        environment.pop(name, None)
    server = [sys.executable, "-c", _SERVER, json.dumps([commands, list(imports)])]
    finished = subprocess.run(server, capture_output=True, text=True, cwd=folder, env=environment)
    assert finished.returncode == 0, finished.stderr
    left = {}
    for name, code in json.loads(finished.stdout.splitlines()[-1]).items():
        written = [(folder / name / file).read_text() for file in ("stdout", "stderr")]
        left[name] = subprocess.CompletedProcess(commands[name], code, *written)
    return left
