"""Break the package in one place at a time, and see that the test named for that place fails.

    python tests/mutations.py            # every mutation of mutations.yaml
    python tests/mutations.py rules      # those whose place, change or test contains the word
    python tests/mutations.py --check    # only whether each still applies, in seconds

A place is a name: `optimizer.Mars._step` is a method in mars_hf/optimizer.py, `recipes.finetune_lm.load` a function in
recipes/finetune_lm.py, `settings._BETA` what is assigned to a name, `optimizer.Mars.max_grad_norm.setter` the setter of
a property, `formulas` a whole module. What is done there:

    delete the call of NAME                    the statement that is this call
    delete `STATEMENT`
    replace `CODE` by `CODE`                   an expression, a constant too, or a statement
    drop `EXPRESSION`                          from the operands, elements, conditions or arguments among which it is
    give NAME `EXPRESSION` as KEYWORD          to the call of it; or `as argument NUMBER`, from 0
    compare `SIDE` by OPERATOR                 the comparison with this on its left or right
    negate the comparison with `SIDE`
    return `EXPRESSION` at once

Code is compared as parsed: its layout, quotes and comments do not matter. A NAME is that of a function, or its last
part. Files that are no Python have `old` and `new` text under their path.

Each mutation is applied in a temporary copy of the tree. It is `killed` if its test fails there and `survived` if not;
`stale` if its place does not hold what it changes exactly once, `broken` if its test fails without it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 600  # seconds for one test: a mutation may make it hang


class StaleError(ValueError):
    """Raised for a mutation that does not apply exactly once."""


# --- what is changed --------------------------------------------------------------------------------------------------


def mutated(tree: Path, place: str, mutation: dict[str, Any]) -> tuple[Path, str]:
    """Return a file of a tree and its text after a mutation.

    Raises:
        StaleError: the place does not hold what the mutation changes exactly once.
    """
    if "do" not in mutation:
        path = tree / place
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(mutation["old"])) != 1:
            raise StaleError(f"{count} times in {place}: {mutation['old']}")
        return path, text.replace(mutation["old"], mutation["new"])
    path, names = file_of(tree, place)
    module = ast.parse(_text(path))
    change(symbol_of(module, names, place), mutation["do"])
    return path, ast.unparse(ast.fix_missing_locations(module)) + "\n"


def file_of(tree: Path, place: str) -> tuple[Path, list[str]]:
    """Return the file of a place, and the names within it."""
    names = place.split(".")
    base = tree if names[0] in ("recipes", "benchmarks") else tree / "mars_hf"
    for count in range(len(names), 0, -1):
        module = base.joinpath(*names[:count])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file():
                return path, names[count:]
    raise StaleError(f"no module for {place}")


def symbol_of(module: ast.Module, names: list[str], place: str) -> ast.AST:
    """Return the definition of, or the assignment to, a qualified name."""
    symbol: Any = module
    for name in re.findall(r"\w+(?:\.setter)?", ".".join(names)):
        found = [statement for statement in _defining(symbol) if name in _defined_by(statement)]
        if len(found) != 1:
            raise StaleError(f"{len(found)} definitions of {name} for {place}")
        symbol = found[0]
    return symbol


def _defining(symbol: Any) -> Iterator[ast.stmt]:
    """Yield the statements of a body, those of its `if` and `try` blocks too."""
    for statement in getattr(symbol, "body", []):
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _defining(statement)


def _defined_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        setter = f"{statement.name}.setter"
        return [setter if setter in map(ast.unparse, statement.decorator_list) else statement.name]
    targets: list[Any] = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def change(symbol: Any, what: str) -> None:
    """Do one of the operators of this module to a symbol."""
    for pattern, operator in OPERATORS.items():
        if found := re.fullmatch(pattern, what, re.DOTALL):
            operator(symbol, *found.groups())
            return
    raise SystemExit(f"unknown operator: {what}")


def delete_call(symbol: Any, name: str) -> None:
    statements = [node for node in ast.walk(symbol) if isinstance(node, ast.Expr) and _calls(node.value, name)]
    _replace(symbol, _only(statements, f"a statement that calls {name}"), ast.Pass())


def delete_statement(symbol: Any, text: str) -> None:
    (wanted,) = ast.parse(text).body
    _replace(symbol, _only(_equals(symbol, wanted), text), ast.Pass())


def replace(symbol: Any, old: str, new: str) -> None:
    _replace(symbol, _only(_equals(symbol, _parsed(old)), old), _parsed(new))


def drop(symbol: Any, text: str) -> None:
    dropped = _only(_equals(symbol, _parsed(text)), text)
    for parent in ast.walk(symbol):
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and any(each is dropped for each in value):
                value[:] = [each for each in value if each is not dropped]
                return
    raise StaleError(f"not one of several: {text}")


def give_keyword(symbol: Any, name: str, value: str, keyword: str) -> None:
    keywords = [each for each in _call(symbol, name).keywords if each.arg == keyword]
    _only(keywords, f"argument {keyword} of {name}").value = _parsed(value)


def give_argument(symbol: Any, name: str, value: str, position: str) -> None:
    arguments = _call(symbol, name).args
    if int(position) >= len(arguments):
        raise StaleError(f"{len(arguments)} arguments without keyword in the call of {name}")
    arguments[int(position)] = _parsed(value)


def compare_by(symbol: Any, side: str, operator: str) -> None:
    comparison = _comparison(symbol, side)
    comparison.ops = _parsed(f"a {operator} b").ops


def negate_comparison(symbol: Any, side: str) -> None:
    comparison = _comparison(symbol, side)
    _replace(symbol, comparison, ast.UnaryOp(ast.Not(), comparison))


def return_at_once(symbol: Any, value: str) -> None:
    symbol.body.insert(ast.get_docstring(symbol) is not None, ast.Return(_parsed(value)))


OPERATORS: dict[str, Callable[..., None]] = {
    r"delete the call of ([\w.]+)": delete_call,
    r"delete `(.*)`": delete_statement,
    r"replace `(.*)` by `(.*)`": replace,
    r"drop `(.*)`": drop,
    r"give ([\w.]+) `(.*)` as argument (\d+)": give_argument,
    r"give ([\w.]+) `(.*)` as (\w+)": give_keyword,
    r"compare `(.*)` by ([<>=!]+|is|is not|in|not in)": compare_by,
    r"negate the comparison with `(.*)`": negate_comparison,
    r"return `(.*)` at once": return_at_once,
}


def _parsed(text: str) -> Any:
    """Return the expression in a text, or the statement if it is none."""
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _equal(one: ast.AST, other: ast.AST) -> bool:
    return type(one) is type(other) and ast.dump(one) == ast.dump(other)


def _equals(symbol: Any, wanted: ast.AST) -> list[Any]:
    return [node for node in ast.walk(symbol) if _equal(node, wanted)]


def _calls(node: Any, name: str) -> bool:
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called == name or called.endswith(f".{name}")


def _call(symbol: Any, name: str) -> Any:
    return _only([node for node in ast.walk(symbol) if _calls(node, name)], f"a call of {name}")


def _comparison(symbol: Any, side: str) -> Any:
    wanted = _parsed(side)
    comparisons = [
        node
        for node in ast.walk(symbol)
        if isinstance(node, ast.Compare) and any(_equal(each, wanted) for each in (node.left, node.comparators[-1]))
    ]
    return _only(comparisons, f"a comparison with {side}")


def _only(nodes: list[Any], what: str) -> Any:
    if len(nodes) != 1:
        raise StaleError(f"{len(nodes)} times: {what}")
    return nodes[0]


def _replace(symbol: Any, old: ast.AST, new: ast.AST) -> None:
    """Put a node in another one's place."""
    for parent in ast.walk(symbol):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
                return
            if isinstance(value, list) and (places := [place for place, each in enumerate(value) if each is old]):
                value[places[0]] = new
                return


# --- running the tests ------------------------------------------------------------------------------------------------


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
        options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", "-m", "", test]
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


def outcome(tree: Path, path: Path, text: str, mutation: dict[str, Any]) -> str:
    """Write the mutated text of a file into a tree, run the test, and undo it."""
    before = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        return "survived" if passes(tree, mutation["test"], mutation.get("environment", {})) else "killed"
    finally:
        path.write_text(before, encoding="utf-8")


@functools.cache
def load() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return mutations.yaml: `mutations` and `equivalent`, each by place."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def stale(tree: Path = ROOT) -> list[str]:
    """Return what does not apply in a tree: place and reason of each mutation, and tests that are not there."""
    problems = []
    for places in load().values():
        for place, mutations in places.items():
            for mutation in mutations:
                try:
                    mutated(tree, place, mutation)
                except StaleError as error:
                    places = elsewhere(tree, mutation)
                    moved = f"; it would apply in {' or '.join(places)}" if 0 < len(places) <= 3 else ""
                    problems.append(f"{place}: {mutation.get('do', mutation.get('breaks'))}: {error}{moved}")
                if "test" in mutation and not _is_there(tree, mutation["test"]):
                    problems.append(f"{place}: no test {mutation['test']}")
    return problems


def elsewhere(tree: Path, mutation: dict[str, Any]) -> list[str]:
    """Return the functions in which a stale mutation would apply: where its code may have moved."""
    places = []
    for path in sorted((tree / "mars_hf").rglob("*.py")) if "do" in mutation else ():
        module = path.relative_to(tree / "mars_hf").with_suffix("").parts
        for names, function in _functions(ast.parse(_text(path))):
            with contextlib.suppress(StaleError):
                change(copy.deepcopy(function), mutation["do"])
                places.append(".".join([*module, *names]).replace("__init__.", ""))
    return places


def _functions(symbol: Any) -> Iterator[tuple[list[str], ast.AST]]:
    """Yield functions and methods with their qualified names."""
    for statement in _defining(symbol):
        if isinstance(statement, ast.ClassDef):
            yield from (([statement.name, *names], function) for names, function in _functions(statement))
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield _defined_by(statement), statement


def _is_there(tree: Path, test: str) -> bool:
    """Return whether a file of tests, and the functions named after it, are there; parameters are not looked at."""
    file, *names = test.partition("[")[0].split("::")
    return (tree / file).is_file() and all(f"def {name}(" in _text(tree / file) for name in names)


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="only mutations whose place, change or test contains it")
    parser.add_argument("--check", action="store_true", help="only say which mutations are stale")
    args = parser.parse_args()
    if args.check:
        problems = stale()
        print("\n".join([*problems, f"{len(problems)} stale"]))
        sys.exit(bool(problems))
    chosen = [(place, each) for place, mutations in load()["mutations"].items() for each in mutations]
    chosen = [(place, each) for place, each in chosen if args.word in f"{place} {each}"]
    counts: Counter[str] = Counter()
    sys.path = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests")]
    for name in ("torch", "numpy", "hypothesis", "transformers", "peft"):
        importlib.import_module(name)
    sys.path.insert(0, "")  # the tree's place
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        sound: dict[tuple[str, str], bool] = {}
        for place, mutation in chosen:
            test, variables, started = mutation["test"], mutation.get("environment", {}), time.monotonic()
            key = (test, str(variables))
            try:
                path, text = mutated(tree, place, mutation)
            except StaleError as error:
                result = f"stale ({error})"
            else:
                if key not in sound:
                    sound[key] = passes(tree, test, variables)
                result = outcome(tree, path, text, mutation) if sound[key] else "broken"
            counts[result.split()[0]] += 1
            seconds = time.monotonic() - started
            print(f"{result:9} {seconds:4.0f} s  {place}: {mutation['breaks']}  [{test}]", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    sys.exit(not set(counts) <= {"killed"})


if __name__ == "__main__":
    main()
