"""Break the package in one place at a time, and see that the test named for that place fails.

    python tests/mutations.py            # every mutation of mutations.yaml
    python tests/mutations.py rules.py   # those whose file, text or test contains the word
    python tests/mutations.py --check    # only whether each text is in its file exactly once

Each mutation is applied in a temporary copy of the tree. It is `killed` if its test fails there and `survived` if not;
`stale` if the text to replace is not in the file exactly once, `broken` if its test fails without it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 600  # seconds for one test: a mutation may make it hang


def copy_tree(target: Path) -> None:
    """Copy the files that git knows, with their present contents, and new ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def passes(tree: Path, test: str, variables: dict[str, str]) -> bool:
    """Return whether a test passes in a tree; an error or a timeout is no pass.

    It runs in a fork of this process, which has imported what takes seconds, and nothing of the tree; with variables,
    in a new one.
    """
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(tree)
        log = os.open(tree / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **variables}
        sys.dont_write_bytecode = True
        sys.path[0] = str(tree)
        options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", test]
        if variables:  # read at import, by Triton for one
            os.execv(sys.executable, [sys.executable, "-m", "pytest", *options])
        os._exit(pytest.main(options))
    ended = time.monotonic() + TIMEOUT
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(found[1])
    if code in (2, 3, 4, 5):  # no such test, or pytest itself is broken
        raise SystemExit(f"{test}: pytest ended with {code}\n{(tree / 'pytest.log').read_text()[-2000:]}")
    return code == 0


def outcome(tree: Path, mutation: dict[str, Any]) -> str:
    """Apply a mutation to a tree, run its test, and undo it."""
    path = tree / mutation["file"]
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation["old"], mutation["new"]), encoding="utf-8")
    try:
        return "survived" if passes(tree, mutation["test"], mutation.get("environment", {})) else "killed"
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="only mutations whose file, text or test contains it")
    parser.add_argument("--check", action="store_true", help="only say which mutations are stale")
    args = parser.parse_args()
    mutations = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    counts: Counter[str] = Counter()
    sys.path = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests")]
    if not args.check:
        for name in ("torch", "numpy", "hypothesis", "transformers", "peft"):
            importlib.import_module(name)
    sys.path.insert(0, "")  # the tree's place
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        sound: dict[str, bool] = {}
        for mutation in (mutation for mutation in mutations if args.word in str(mutation)):
            test, path, started = mutation["test"], tree / mutation["file"], time.monotonic()
            result = "stale"
            if path.is_file() and path.read_text(encoding="utf-8").count(mutation["old"]) == 1:
                result = "there"
                if not args.check and test not in sound:
                    sound[test] = passes(tree, test, mutation.get("environment", {}))
                if not args.check:
                    result = outcome(tree, mutation) if sound[test] else "broken"
            counts[result] += 1
            seconds = time.monotonic() - started
            print(f"{result:9} {seconds:4.0f} s  {mutation['file']}: {mutation['breaks']}  [{test}]", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    sys.exit(not set(counts) <= {"killed", "there"})


if __name__ == "__main__":
    main()
