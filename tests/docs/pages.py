"""The pages of the documentation and the examples in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": ROOT / "README.md"} | {path.name: path for path in sorted((ROOT / "docs").glob("*.md"))}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\|(.*)\|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int  # of its first line of code
    language: str
    text: str
    directive: str  # the HTML comment on the line before it: says what the text below a Python example is


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    content = PAGES[page].read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(content):
        before = content[: match.start()]
        comment = re.search(r"<!-- (\w+) -->\n\Z", before)
        found.append(Block(page, before.count("\n") + 2, match[1], match[2], comment[1] if comment else ""))
    return found


def commands(page: str) -> Iterator[str]:
    """Return the shell commands of a page, without comments, each on one line."""
    for block in blocks(page):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"\s+# .*$", "", " ".join(line.split())).strip()
                if command and not command.startswith("#"):
                    yield command


def entry_points() -> list[str]:
    """Return the code in the right column of README's table of entry points."""
    content = PAGES["README.md"].read_text(encoding="utf-8")
    table = content[content.index("| you have | you write |") :].split("\n\n")[0]
    rows = _ROW.findall(table)[2:]
    return [code for row in rows for code in _CODE.findall(row.split(" | ")[1])]
