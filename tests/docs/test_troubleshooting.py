"""Messages quoted on the Troubleshooting page exist in the code."""

from __future__ import annotations

import ast
import re

import pytest
from pages import PAGES, ROOT

GAP = "…"  # stands for a computed value, on the page and here


def text_of(node: ast.AST) -> str | None:
    """Return a string of the code with a gap for each value; None for anything but a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or GAP) + (text_of(node.right) or GAP)
    return None


def messages() -> list[str]:
    """Return every string of the package."""
    found = []
    for path in sorted((ROOT / "mars_hf").rglob("*.py")):
        found += [text for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if (text := text_of(node))]
    return found


def quoted() -> list[str]:
    """Return the messages quoted in the first column of the page's tables."""
    text = PAGES["troubleshooting.md"].read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:warning )?`([^`]+)`[^|]*\|", text, re.MULTILINE)
    return [row for row in rows if " " in row]


@pytest.fixture(scope="module")
def known() -> list[str]:
    return messages()


def occurs(quote: str, text: str) -> bool:
    """Return whether a quotation's words occur in a message in order, with the message's values in their gaps."""
    place = 0
    for piece in filter(None, quote.split(GAP)):
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


@pytest.mark.parametrize("quote", quoted())
def test_quoted_messages_are_in_the_code(quote, known):
    assert len(quote.replace(GAP, "")) >= 15, "too short to be found by"
    assert any(occurs(quote, text) for text in known), quote


def test_quotations_are_found_only_where_they_are(known):
    assert len(quoted()) > 10
    assert not any(occurs("lr=… for MARS and momentum=… contradict each other", text) for text in known)
    assert occurs("a=… is b", f"then a={GAP} is b") and not occurs("a=… is b", f"is b where a={GAP}")
