"""Phrases that the style of the prose rules out, in README, docs and changelog."""

from __future__ import annotations

import re

import pytest
from pages import PAGES, ROOT

PROSE = PAGES | {"CHANGELOG.md": ROOT / "CHANGELOG.md"}
RULED_OUT = [
    r"\bto the bit\b",  # bit-for-bit
    r"\bof which\b",
    r"\b(?:is|are|was|were) to be\b",
    r"\bas ever\b",
    r"\bgoes? on where\b",  # resumes
    r"\bof (?:your|one's) own making\b",
    r"\bwhat a (?:matrix|vector|group) takes\b",
    r"\bcancels?\b",  # noise: what the correction does is measured
    r"\bengines? that does? the arithmetic\b",  # backend
    r"\bvariance-reduced optimizer\b",  # of the exact form only
]


def prose(page: str) -> str:
    """Return a page without fenced blocks and code, its lines joined."""
    text = PROSE[page].read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`", text))


@pytest.mark.parametrize("page", PROSE)
def test_prose(page):
    found = [match[0] for pattern in RULED_OUT for match in re.finditer(pattern, prose(page), re.IGNORECASE)]
    assert not found


@pytest.mark.parametrize("page", PROSE)
def test_lines_fit_the_screen(page):
    """Lines fit, except rows of tables, which cannot wrap."""
    lines = PROSE[page].read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
