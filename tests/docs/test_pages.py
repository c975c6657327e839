"""What the pages say: their style, the messages that Troubleshooting quotes, the numbers of docs/choosing.md."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
import statistics

import pytest
import tune
import update_rms as measuring
from pages import PAGES, ROOT, blocks, commands

from mars_hf.__main__ import main
from mars_hf.suggest import AdamW, first_moment_rms, suggest, update_rms

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


@pytest.mark.parametrize("page", PROSE)
def test_prose(page):
    """No phrase that the style rules out, and no long line but rows of tables, which cannot wrap."""
    text = PROSE[page].read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`", text))
    assert not [match[0] for pattern in RULED_OUT for match in re.finditer(pattern, text, re.IGNORECASE)]


# --- messages that Troubleshooting quotes -----------------------------------------------------------------------------

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


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Return every string of the package."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "mars_hf").rglob("*.py"))]
    return [text for tree in trees for node in ast.walk(tree) if (text := text_of(node))]


def occurs(quote: str, text: str) -> bool:
    """Return whether a quotation's words occur in a message in order, with the message's values in their gaps."""
    place = 0
    for piece in filter(None, quote.split(GAP)):
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def test_quoted_messages_are_in_the_code(messages):
    """In the first column of the page's tables."""
    text = PAGES["troubleshooting.md"].read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:warning )?`([^`]+)`[^|]*\|", text, re.MULTILINE)
    quotes = [row for row in rows if " " in row]
    assert len(quotes) > 10 and all(len(quote.replace(GAP, "")) >= 15 for quote in quotes)
    assert [quote for quote in quotes if not any(occurs(quote, text) for text in messages)] == []
    assert not any(occurs("lr=… for MARS and momentum=… contradict each other", text) for text in messages)
    assert occurs("a=… is b", f"then a={GAP} is b") and not occurs("a=… is b", f"is b where a={GAP}")


# --- docs/choosing.md: its output is the command's, its table that of the sweeps --------------------------------------

WIDTH = 128
# Rule, its sweep at the rate of vectors and embeddings that is best, the sweep at AdamW's rate for them, AdamW's betas.
ROWS = {
    "mars-adamw": ("mars (0.9, 0.95)", "mars (0.9, 0.95)", (0.9, 0.95)),
    "mars-adamw, betas (0.95, 0.99)": ("mars (0.95, 0.99)", "mars (0.95, 0.99)", (0.95, 0.99)),
    "mars-lion": ("mars-lion (0.9)", "mars-lion (0.9)", (0.9, 0.95)),
    "mars-shampoo": ("mars-shampoo, lr_1d 0.016", "mars-shampoo, lr_1d 0.004", (0.9, 0.95)),
    "mars-m": ("mars-m, lr_1d 0.016", "mars-m, lr_1d 0.004", (0.9, 0.95)),
}
MISSES = {"mars-adamw, betas (0.95, 0.99)"}


@pytest.fixture(scope="module")
def losses():
    search = tune.Search("embedded")
    return search.losses(json.loads(search.file.read_text())["runs"])


def row_of(name: str, losses) -> tuple[float, str]:
    """Return the factor between suggestion and sweep, and the row of the table."""
    best_sweep, near_sweep, betas = ROWS[name]
    (rate,) = tune.best(losses[f"adamw {betas}"])
    settings = suggest(name.partition(",")[0], AdamW(rate, betas), width=WIDTH)
    (tuned,) = tune.best(losses[best_sweep])
    loss = statistics.mean(losses[best_sweep][(tuned,)].values())
    factor = tuned / settings["lr"]
    near = min(losses[near_sweep], key=lambda rates: abs(math.log(rates[0] / settings["lr"])))
    there = statistics.mean(losses[near_sweep][near].values())
    return factor, f"| {name} | {rate:g} | {settings['lr']:.2g} | {tuned:g} | {factor:.2f} | {loss:.3f} | {there:.3f} |"


@pytest.mark.parametrize("name", ROWS)
def test_table_of_the_sweeps(name, losses):
    factor, row = row_of(name, losses)
    assert row in PAGES["choosing.md"].read_text(encoding="utf-8").splitlines()
    assert (0.5 <= factor <= 2) != (name in MISSES)


@pytest.mark.parametrize("page", ["README.md", "choosing.md"])
def test_rates_to_start_from(page):
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    starts = {"from scratch": "3e-4", "all weights of a pretrained model": "2e-5", "LoRA adapters": "2e-4"}
    for name, lr in starts.items():
        adamw = AdamW(float(lr)) if name == "from scratch" else AdamW(float(lr), (0.9, 0.999), 0.0)
        rates = [f"{suggest(rule, adamw)['lr']:.3g}" for rule in ("mars-adamw", "mars-m", "mars-lion")]
        assert f"| {name} | {lr} | {' | '.join(rates)} |" in lines


def test_output_of_suggest(capsys):
    (command,) = [words for words in map(shlex.split, commands("choosing.md")) if "suggest" in words][:1]
    main(command[3:])
    shown = next(block.text for block in blocks("choosing.md") if block.language == "text")
    assert capsys.readouterr().out == shown


def test_predicted_sizes_of_updates():
    text = PAGES["choosing.md"].read_text(encoding="utf-8")
    near, far = (update_rms("mars-adamw", beta1=beta1, gamma=0.025) for beta1 in (0.9, 0.95))
    assert f"| {near:.3f} at `beta1` 0.9, {far:.3f} at 0.95 |" in text
    assert f"| {update_rms('mars-shampoo', beta1=0.95, gamma=0.025, width=768):.3f} at width 768 |" in text
    assert f"| `0.2 s` | {update_rms('mars-m', beta1=0.95, gamma=0.025):.2g} |" in text


@pytest.mark.parametrize(
    ("index", "beta1", "tolerance"), [(0, 0.9, 0.4), (1, 0.9, 0.4), (2, 0.95, 0.03), (3, 0.95, 0.03)]
)
def test_measured_sizes_of_updates(index, beta1, tolerance):
    row = json.loads(measuring.RESULTS.read_text())["runs"][index]
    rule = row["optimizer"].replace("_", "-")
    predicted = first_moment_rms(beta1) if rule == "adamw" else update_rms(rule, beta1=beta1, gamma=0.025, width=WIDTH)
    measured = row["rms"]["matrices"]
    assert measured == pytest.approx(predicted, rel=tolerance)
    shown = f"| {rule} | {predicted:.3f} | {measured:.3f} | {measured / predicted:.2f} |"
    assert shown in PAGES["choosing.md"].read_text(encoding="utf-8").splitlines()
