"""What pages say: style, quoted messages, the numbers of docs/choosing.md; the site builds, links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys

import published
import pytest
import torch
import update_rms as measuring
import yaml
from matplotlib.text import Text
from pages import PAGES, ROOT, blocks, commands
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

import mars_hf
from mars_hf.__main__ import main
from mars_hf.arithmetic import newton_schulz
from mars_hf.arithmetic.update_rules import first_moment_rms
from mars_hf.groups import suggest as suggest_module
from mars_hf.groups.settings import SETTINGS
from mars_hf.groups.suggest import suggest, update_rms

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
def test_prose_of_pages(page):
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


def occurs(quote: str, text: str) -> bool:
    """Return whether a quotation's words occur in a message in order, with the message's values in their gaps."""
    return re.search(".*?".join(map(re.escape, quote.split(GAP))), text, re.DOTALL) is not None


def test_quoted_messages():
    """Those in the first column of the page's tables are in the code."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "mars_hf").rglob("*.py"))]
    messages = {text for tree in trees for node in ast.walk(tree) if " " in (text := text_of(node) or "")}
    page = PAGES["troubleshooting.md"].read_text(encoding="utf-8")
    quotes = [row for row in re.findall(r"^\| (?:warning )?`([^`]+)`[^|]*\|", page, re.MULTILINE) if " " in row]
    assert len(quotes) > 10 and all(len(quote.replace(GAP, "")) >= 15 for quote in quotes)
    assert [quote for quote in quotes if not any(occurs(quote, text) for text in messages)] == []
    assert not any(occurs("lr=… for MARS and momentum=… contradict each other", text) for text in messages)
    assert occurs("a=… is b", f"then a={GAP} is b") and not occurs("a=… is b", f"is b where a={GAP}")


def test_silent_faults():
    """Every test that the table names is there."""
    tests = ROOT / "tests"
    rows = re.findall(r"^\| (?!script |---).*\| ([^|]+) \|$", (tests / "silent_faults.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        place = None
        for file, name in re.findall(r"`([\w/.]*)::(\w+)`", row):
            place = file or place
            assert f"def {name}(" in (tests / place).read_text(encoding="utf-8"), (place, name)
        assert place is not None, row


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
CHOOSING = PAGES["choosing.md"].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ROWS)
def test_table_of_the_sweeps(name):
    losses = published.searched("embedded")
    best_sweep, near_sweep, betas = ROWS[name]
    (rate,), (tuned,) = published.best(losses[f"adamw {betas}"]), published.best(losses[best_sweep])
    lr = suggest(name.partition(",")[0], rate, betas, width=WIDTH)["lr"]
    near = min(losses[near_sweep], key=lambda rates: abs(math.log(rates[0] / lr)))
    best, nearest = (statistics.mean(runs.values()) for runs in (losses[best_sweep][tuned,], losses[near_sweep][near]))
    row = f"| {name} | {lr:.2g} ({rate:g}) | {tuned:g}, {tuned / lr:.2f} times | {best:.3f} ({nearest:.3f}) |"
    assert row in CHOOSING.splitlines()
    assert (0.5 <= tuned / lr <= 2) != (name in MISSES)


@pytest.mark.parametrize("page", ["README.md", "choosing.md"])
def test_rates_to_start_from(page):
    text = PAGES[page].read_text(encoding="utf-8")
    assert all(f"| {' | '.join(row)} |\n" in text for row in suggest_module.cells_of_table())


def test_rates_of_fine_tuning_on_readme():
    """What README says of mars-m is what the search on SmolLM2 found with all weights."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "tune_smollm2.json").read_text(encoding="utf-8"))["runs"]
    losses = {}
    for optim in ("adamw(0.9)", "mars_m"):
        chosen = {"text": "kjv", "mode": "all", "optim": optim, "seed": 100}.items()
        losses[optim] = {run["learning_rate"]: run["eval_loss"] for run in runs if chosen <= run.items()}
    near, best = losses["mars_m"][2e-5], min(losses["mars_m"], key=losses["mars_m"].get)
    text = f"at 2e-5, mars-m ended at {near:.2f} and AdamW at {losses['adamw(0.9)'][2e-5]:.2f}. The best rate of"
    assert f"{text} mars-m there was {best:.1e}.".replace("e-0", "e-") in words_of(ROOT / "README.md")


def test_output_of_suggest(capsys):
    command = next(words for words in map(shlex.split, commands("choosing.md")) if "suggest" in words)
    main(command[3:])
    assert capsys.readouterr().out == next(block.text for block in blocks("choosing.md") if block.language == "text")


def test_predicted_sizes_of_updates():
    near, far = (update_rms("mars-adamw", beta1=beta1, gamma=0.025) for beta1 in (0.9, 0.95))
    assert f"| {near:.3f} at `beta1` 0.9, {far:.3f} at 0.95 |" in CHOOSING
    assert f"| {update_rms('mars-shampoo', beta1=0.95, gamma=0.025, width=768):.3f} at width 768 |" in CHOOSING
    assert f"| `0.2 s` | {update_rms('mars-m', beta1=0.95, gamma=0.025):.2g} |" in CHOOSING


@pytest.mark.parametrize(
    ("index", "beta1", "tolerance"), [(0, 0.9, 0.4), (1, 0.9, 0.4), (2, 0.95, 0.03), (3, 0.95, 0.03)]
)
def test_measured_sizes_of_updates(index, beta1, tolerance):
    row = json.loads(measuring.RESULTS.read_text())["runs"][index]
    rule, measured = row["optimizer"].replace("_", "-"), row["rms"]["matrices"]
    predicted = first_moment_rms(beta1) if rule == "adamw" else update_rms(rule, beta1=beta1, gamma=0.025, width=WIDTH)
    assert measured == pytest.approx(predicted, rel=tolerance)
    assert f"| {rule} | {predicted:.3f} | {measured:.3f} | {measured / predicted:.2f} |" in CHOOSING.splitlines()


# --- docs/speed.md and README.md: numbers of an H100 -----------------------------------------------------------------


def measured_on_h100(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}_h100.json").read_text(encoding="utf-8"))


def words_of(path):
    return " ".join(path.read_text(encoding="utf-8").split())


def times(ratio):
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def test_steps_on_h100():
    page = PAGES["speed.md"].read_text(encoding="utf-8").splitlines()
    sizes = [result["contenders"] for result in measured_on_h100("step_cost")["sizes"].values()]
    shares = ", ".join(f"{rows['AdamW fused']['of_copy']:.0%}" for rows in sizes)
    took = " | ".join(f"{rows['AdamW fused']['ms']:.2f} ms" for rows in sizes)
    assert f"| AdamW fused | {took} | {shares} |" in page
    for label, name in {
        "mars-adamw": "Mars",
        "mars-adamw, bfloat16, stochastic": "Mars bfloat16, stochastic",
        "mars-adamw, bfloat16, states too": "Mars bfloat16, states too",
        "mars-adamw, no last gradient": "Mars without last_grad",
        "mars-lion": "mars-lion",
        "mars-adamw, `fused=False`": "Mars fused=False",
        "mars-adamw, bfloat16, Kahan, without a kernel": "Mars bfloat16, kahan",
        "timm's MARS": "timm Mars",
        "mars-m": "mars-m, split c_attn",  # the default
        'mars-m, `split_fused="none"`': "mars-m",
        "Muon, AdamW for the rest": "Muon, AdamW for the rest",
    }.items():
        ratios = " | ".join(times(rows[name]["against_adamw"]) for rows in sizes)
        shares = ", ".join(f"{rows[name]['of_copy']:.0%}" for rows in sizes if "of_copy" in rows[name])
        assert f"| {label} | {ratios} | {shares} |".replace("  ", " ") in page
    clipped = [f"{rows['Mars max_grad_norm']['against_clipped_adamw']:.2f}" for rows in sizes]
    text = f"a step takes {clipped[0]}, {clipped[1]} and {clipped[2]} times as long"
    assert text in words_of(PAGES["speed.md"])
    of_muon = [rows["mars-m, split c_attn"]["ms"] / rows["Muon, AdamW for the rest"]["ms"] for rows in sizes]
    text = "takes {:.2f}, {:.2f} and {:.2f} times as long as that of torch's Muon".format(*of_muon)
    assert text in words_of(PAGES["speed.md"])
    _, small, _ = sizes
    low, high = map(times, small["Muon, AdamW for the rest"]["against_adamw_quartiles"])
    assert f"its quartiles are {low} and {high}" in words_of(PAGES["speed.md"])
    assert f"plain PyTorch took {small['Mars fused=False']['against_adamw']:.2f} times" in words_of(ROOT / "README.md")
    peaks = {name: [peak_of(machine, name) for machine in ("amd_epyc", "h100")] for name in PEAKS}
    for label, step, name in (
        ("AdamW, fused", f"{small['AdamW fused']['ms']:.2f} ms", "AdamW fused"),
        ("mars-adamw", times(small["Mars"]["against_adamw"]), "mars-adamw"),
        ("mars-lion", times(small["mars-lion"]["against_adamw"]), "mars-lion"),
        ("mars-m", f"{times(small['mars-m, split c_attn']['against_adamw'])}; {of_muon[1]:.2f}x Muon's", "mars-m"),
    ):
        (row,) = [line for line in words_of_lines("README.md") if line.startswith(f"| {label} | ") and step in line]
        assert row.endswith(f" | {step} | {' | '.join(peaks[name])} |")
    assert f" | 0.95x | {clipped[1]}x | {peaks['mars-adamw'][0]} | |" in words_of(ROOT / "README.md")


PEAKS = ("AdamW fused", "mars-adamw", "mars-lion", "mars-m")


def peak_of(machine, name):
    memory = json.loads((ROOT / "benchmarks" / "results" / f"memory_{machine}.json").read_text(encoding="utf-8"))
    return f"{memory['forms'][name]['plain loop']['peak'] / memory['parameters']:.1f}"


def words_of_lines(page):
    return [" ".join(line.split()) for line in PAGES[page].read_text(encoding="utf-8").splitlines()]


def test_training_on_h100():
    page = PAGES["speed.md"].read_text(encoding="utf-8")
    runs = [measured_on_h100(name)["result"]["contenders"] for name in ("train_cost", "train_cost_default")]
    took = [f"{rows['AdamW fused']['step_ms']:.1f} ms" for rows in runs]
    assert f"| AdamW fused | {' | '.join(took)} |" in page
    for label, name in {"mars-adamw": "Mars", "mars-m": "mars-m", "mars-adamw, exact": "Mars exact"}.items():
        cells = []
        for rows in runs:
            low, high = rows[name]["against_adamw_quartiles"]
            cells.append(f"{rows[name]['against']['AdamW fused']:.2f}x ({low:.2f} to {high:.2f})")
        assert f"| {label} | {' | '.join(cells)} |" in page
    assert f"runs at {runs[0]['AdamW fused']['mfu']:.0%}".replace("%", " %") in words_of(PAGES["speed.md"])
    mars, mars_m = (f"{runs[0][name]['against']['AdamW fused']:.2f}" for name in ("Mars", "mars-m"))
    assert f"takes {mars} times AdamW's with mars-adamw, {mars_m} with mars-m" in words_of(ROOT / "README.md")


class CountedProducts:
    """Symmetric products that count half of their FLOPs."""

    saved = 0.0

    @classmethod
    def multiply(cls, left, right):
        cls.saved += left.shape[-1] * left.shape[-2] ** 2
        return left @ right

    @classmethod
    def add(cls, added, left, right, *, beta=1.0, alpha=1.0):
        cls.saved += left.shape[-1] * left.shape[-2] ** 2
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)


@pytest.mark.parametrize("shape", [(768, 768), (768, 3072), (1280, 5120), (2048, 4096), (4096, 14336)], ids=str)
def test_floors_of_newton_schulz(shape, monkeypatch):
    """FLOPs are counted on the device "meta"; the time is the larger of those of arithmetic and of memory."""
    monkeypatch.setattr(newton_schulz, "HALF_DEVICES", ("meta",))
    rows, cols = shape
    cells = []
    for ratio in (math.inf, 2):
        monkeypatch.setattr(newton_schulz, "GRAM_RATIO", ratio)
        is_gram = cols >= ratio * rows
        moved = 12 * rows * cols + 90 * rows**2 if is_gram else 30 * rows * cols + 40 * rows**2
        CountedProducts.saved = 0.0
        with FlopCounterMode(display=False) as counter:
            matrix = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            newton_schulz.orthogonalize([matrix], products=CountedProducts)
        for flops in (counter.get_total_flops(), counter.get_total_flops() - CountedProducts.saved):
            time = max(flops / 802e12, moved / 3.35e12)
            cells.append(f"{flops / 1e9:.1f}, {moved / 1e6:.0f}, {1e6 * time:.0f} µs")
    row = f"| {rows} x {cols} | {' | '.join(cells if cols >= 2 * rows else [*cells[:2], '', ''])} |".replace(
        "|  |", "| |"
    )
    assert row.replace("|  |", "| |") in PAGES["speed.md"].read_text(encoding="utf-8")


def test_kernels_and_memory_on_h100():
    words = words_of(PAGES["speed.md"])
    small, large = (measured_on_h100("gpu_kernels")["sizes"][size] for size in ("small", "large"))
    mars, fused, foreach = (small["launches"][name]["launches"] for name in ("Mars", "AdamW fused", "AdamW foreach"))
    assert f"launches {mars:.0f} kernels and copies, AdamW fused {fused:.0f}, AdamW foreach {foreach:.0f}" in words
    forms = [small["newton_schulz"], large["newton_schulz"]]
    share = {name: [f"{form[name]['of_product']:.0%}" for form in forms] for name in forms[0]}
    product = small["newton_schulz"]["matrix product"]["tflops"]
    assert f"reaches {share['batched'][0]} of a large product's {product:.0f} TFLOP/s" in words
    assert f"and {share['batched'][1]} with GPT-2 large's" in words
    assert f"matrix by matrix {' and '.join(share['one by one'])}" in words
    assert f"a plain loop {' and '.join(share['plain loop'])}" in words
    for dtype in ("torch.float32", "torch.bfloat16"):
        rows = [row for row in small["blocks"] if row["dtype"] == dtype]
        took = {row["today"]: row["sums_ms"] + row["update_ms"] for row in rows}
        assert took[True] <= 1.02 * min(row["sums_ms"] + row["update_ms"] for row in rows)
    memory = measured_on_h100("memory")
    names = ("AdamW fused", "mars-adamw", "mars-m")
    peaks = [memory["forms"][name]["plain loop"]["peak"] / memory["parameters"] for name in names]
    assert "AdamW {:.1f} bytes a parameter, mars-adamw {:.1f}, mars-m {:.1f}".format(*peaks) in words
    assert f"({peak_of('h100', 'mars-m, no clip')} with `clip_threshold=None`)" in words
    assert f"and {peak_of('h100', 'mars-adamw, fused=False')} for mars-adamw with `fused=False`" in words


def test_host_time_on_the_page():
    """Microseconds a tensor and ratios of docs/speed.md are those of the results."""
    file = ROOT / "benchmarks" / "results" / "host_time_intel_xeon.json"
    page = PAGES["speed.md"].read_text(encoding="utf-8")
    for count, rows in json.loads(file.read_text(encoding="utf-8"))["tensors"].items():
        cells = [f"{rows['AdamW foreach']['us_a_tensor']:.0f} µs"]
        for name in ("mars-adamw, kernels", "mars-adamw, plain PyTorch"):
            cells.append(f"{rows[name]['us_a_tensor']:.0f} µs, {rows[name]['ratio']:.2f}x")
        assert f"| {int(count):,} | {' | '.join(cells)} |" in page


# --- docs/speed.md: states in 8 bits ---------------------------------------------------------------------------------


def measured(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_steps_with_states_in_8_bits():
    words = words_of(PAGES["speed.md"])
    sizes = measured("eight_bits_amd_epyc")["sizes"]
    columns = [sizes["28m"], sizes["small"], measured("clipped_intel_xeon")["sizes"]["28m"]]
    for label, name in {
        "mars-adamw": "Mars",
        "mars-adamw, 8 bits": "Mars 8bit",
        "mars-lion": "mars-lion",
        "mars-lion, 8 bits": "mars-lion 8bit",
    }.items():
        ratios = " | ".join(times(size["contenders"][name]["against_adamw"]) for size in columns)
        assert f"| {label} | {ratios} |" in words
    small, large = (size["contenders"]["Mars 8bit max_grad_norm"]["against_clipped_adamw"] for size in columns[:2])
    assert f"8 bits take {small:.2f} and {large:.2f} times AdamW and `clip_grad_norm_`" in words


def test_memory_of_states_in_8_bits():
    memory = measured("memory_8bit_amd_epyc")
    words = words_of(PAGES["speed.md"])

    def of(form):
        row = memory["forms"][form]["plain loop"]
        return f"{row['states'] / memory['parameters']:.1f}, {row['peak'] / memory['parameters']:.1f}"

    assert f'| `state_dtype="8bit"` | 22 | {of("mars-adamw, state_dtype=8bit")} |' in words
    assert f"| the same, `mars-lion` | 20 | {of('mars-lion, state_dtype=8bit')} |" in words
    short = of("bfloat16, kahan, state_dtype=8bit")
    released = of("bfloat16, kahan, state_dtype=8bit, release_gradients").partition(", ")[2]
    row = f'`rounding="kahan"` | | {short} | weights of 24 bits; {released} with `release_gradients=True` |'
    assert row in words


def test_loss_with_states_in_8_bits():
    result = measured("eight_bits_embedded")
    assert {row["seeds"] for row in result["rows"]} == {5}
    names = {"mars_adamw": "mars-adamw", "mars_lion": "mars-lion", "mars_m": "mars-m", "mars_muon": "muon"}
    pairs = [gap for gap in result["differences"] if gap["contender"] == f"{gap['against']} 8bit"]
    texts = []
    for gap in pairs:
        half = (gap["high"] - gap["low"]) / 2
        texts.append(f"{names[gap['against']]} {gap['mean']:+.3f} ± {half:.3f}")
        assert abs(gap["mean"]) < min(half, 0.01)  # none is shown
        if gap["against"] == "mars_adamw":
            assert abs(gap["mean"]) + half < 0.01
    assert len(pairs) == 4
    assert f"five seeds (`eight_bits_embedded.json`): {', '.join(texts)}." in words_of(PAGES["speed.md"])


def test_long_run_with_states_in_8_bits():
    losses = measured("eight_bits_long_amd_epyc")["losses"]
    differences = [one - other for one, other in zip(losses["8bit"], losses["float32"], strict=True)]
    assert len(differences) == 500
    farthest = max(map(abs, differences))
    assert f"no loss differed by more than {farthest:.3f}" in words_of(PAGES["speed.md"])


@pytest.mark.parametrize(
    ("label", "weights", "states", "gradients"),
    [
        ("AdamW, float32 states", 2, 8, 2),
        ("mars-adamw, 8 bits, Kahan", 3, 3 * (1 + 4 / 64), 2),
        ("with `release_gradients`", 3, 3 * (1 + 4 / 64), 0),
        ("muon, 8 bits, Kahan, released", 3, 1 + 4 / 64, 0),
    ],
)
def test_arithmetic_of_whole_models(label, weights, states, gradients):
    size = weights + states + gradients

    def shown(number):
        return f"{number:.0f}" if number >= 10 or f"{number:.1f}".endswith(".0") else f"{number:.1f}"

    cells = [", ".join(shown(billions * size / cards) for cards in (1, 2, 8)) for billions in (1, 8, 14, 70)]
    assert f"| {label} | {shown(size)} | {' | '.join(cells)} |" in words_of(PAGES["speed.md"])


# --- docs/pretraining.md: hours and memory are estimates, by the counts that the page states --------------------------


@pytest.mark.parametrize("size", ["small", "medium", "large", "xl"])
def test_estimates_of_the_papers_runs(size):
    """Hours at 30% of 8 GPUs' bfloat16 peak; weights count 26 bytes, 30 in exact MARS."""
    page = PAGES["pretraining.md"].read_text(encoding="utf-8")
    config = yaml.safe_load((ROOT / "recipes" / "configs" / f"gpt2-{size}.yaml").read_text(encoding="utf-8"))
    layers, width, block = config["n_layer"], config["n_embd"], config["block_size"]
    params = 12 * layers * width**2 + (config["vocab_size"] + block) * width
    flops = (6 * params + 12 * layers * width * block) * config["tokens_per_step"] * config["max_steps"]
    hours = [f"{flops / (8 * 0.3 * peak) / 3600:.0f}" for peak in (312e12, 989e12)]  # A100, H100
    assert f" | {', '.join(hours)} |" in next(line for line in page.splitlines() if line.startswith(f"| `gpt2-{size}`"))
    batch = config["per_device_train_batch_size"]
    activations, logits = 88 * width * batch * block * layers, 14 * batch * block * config["vocab_size"]
    whole = 26 * params + activations + logits
    weights, activations, logits, whole, exact = (
        f"{size / 1e9:.0f}" for size in (26 * params, activations, logits, whole, whole + 4 * params)
    )
    cells = f"{batch} × {config['gradient_accumulation_steps']} | {weights} GB | {activations} + {logits} GB"
    assert f"| `{size}`, {cells} | {whole} ({exact}) GB |" in page


# --- the site, its figures and links ----------------------------------------------------------------------------------


needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="the test extra brings mkdocs-material and mkdocstrings",
)


@needs_mkdocs
@pytest.mark.slow
def test_site_builds(tmp_path):
    """It has every public name, all pictures and the changelog, and loads nothing from elsewhere.

    In a copy with five mistakes: a missing page, section and picture, and two in the changelog. Each is a warning, and
    there is no other.
    """
    copy, site = tmp_path / "copy", tmp_path / "site"
    for part in ("docs", "mars_hf", "benchmarks/results"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("*.json", "__pycache__"))
    for file in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / file, copy / file)
    with (copy / "docs" / "hub.md").open("a", encoding="utf-8") as page:
        page.write("\n[a](nopage.md) [b](speed.md#nosection) ![c](images/nopicture.png)\n")
    with (copy / "CHANGELOG.md").open("a", encoding="utf-8") as page:
        page.write("\n[d](docs/nochange.md) ![e](benchmarks/results/noresult.png)\n")
    environment = {**os.environ, "PYTHONPATH": str(copy), "NO_MKDOCS_2_WARNING": "1"}
    # Not with --quiet, under which mkdocs counts no warnings and --strict never fails; it writes the site first.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    finished = subprocess.run(build, cwd=copy, capture_output=True, text=True, env=environment)
    assert finished.returncode != 0
    for wrong in ("nopage.md", "#nosection", "nopicture.png", "nochange.md", "noresult.png"):
        assert wrong in finished.stderr, finished.stderr
    assert "Aborted with 5 warnings" in finished.stderr + finished.stdout, finished.stderr
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert [name for name in mars_hf.__all__ if f'id="mars_hf.{name}"' not in page] == []
    assert [name for name in SETTINGS if f'<code id="{name}">' not in page] == []
    loads = re.compile(r"""<(?:script|link|img)\b[^>]*?(?:src|href)=["']?(https?://[^"'\s>]+)""")
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert loads.findall(html) == [], page
        assert f"mars_hf {mars_hf.__version__}" in html or page.name == "404.html", page
    assert (site / "changelog" / "index.html").is_file()
    notebook = (site / "notebooks" / "quick_start" / "index.html").read_text(encoding="utf-8")
    assert "mars_m helps" in notebook and "-m mars_hf compare tiny.py" in notebook.replace("\n", " ")
    assert (site / "notebooks" / re.search(r'href="\.\./([^"]+)" download', notebook)[1]).is_file()
    pictures = re.findall(r'<img[^>]* src="\.\./(quick_start_\d\.png)"', notebook)
    assert len(pictures) == 2 and all((site / "notebooks" / name).is_file() for name in pictures)
    assert 'href="notebooks/quick_start/"' in (site / "index.html").read_text(encoding="utf-8")
    # Code in tables may wrap after brackets and equals signs, short names and code elsewhere not.
    page = (site / "trainer" / "index.html").read_text(encoding="utf-8")
    assert "optimizer_cls_and_kwargs=<wbr>mars_hf.factory(<wbr>args" in page and page.count("<wbr>") < 40
    page = (site / "muon" / "index.html").read_text(encoding="utf-8")
    assert '<code class="option">zero3_init/m<' not in page and "<code>step()</code></td>" in page
    assert '<code class="option">gpt2-small</code>' in (site / "pretraining" / "index.html").read_text()
    shown = re.findall(r"benchmarks/results/(\w+\.png)", PAGES["speed.md"].read_text(encoding="utf-8"))
    assert shown and all((site / "images" / "results" / name).is_file() for name in shown)


def test_navigation_groups():
    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for part in (entry if isinstance(entry, list) else entry.values()) for leaf in leaves(part)]

    class Loader(yaml.SafeLoader):
        """Reads mkdocs' tag for variables of the environment."""

    Loader.add_constructor("!ENV", lambda loader, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    assert sorted(leaves(nav)) == sorted([*(PAGES.keys() - {"README.md"}), "changelog.md", "notebooks/quick_start.md"])
    sizes = {title: len(leaves(pages)) for group in nav for title, pages in group.items()}
    assert list(sizes) == ["Start", "In your training", "Distributed", "Evidence", "Reference"]
    assert max(sizes.values()) <= 8


@pytest.mark.parametrize("page", ["controls.md", "does_it_help.md", "other_settings.md"])
def test_glossary_has_the_arms(page):
    """The optimizer that an arm's name begins with, and whatever follows it but the value of beta1."""
    explained = set(re.findall(r"`([^`]+)`", PAGES["glossary.md"].read_text(encoding="utf-8")))
    rows = re.findall(r"^\| ([^|]+) \|", PAGES[page].read_text(encoding="utf-8"), re.MULTILINE)
    arms = [row for row in rows if re.match(r"n?adamw|mars_|muon", row)]
    assert len(arms) > 8
    for arm in arms:
        optimizer, addition = re.fullmatch(r"(\w+),? ?(.*?)(?:(?<= )0\.\d+)?", arm).groups()
        addition = addition.strip()
        assert optimizer in explained and (not addition or addition in explained), arm


def test_every_picture_is_on_a_page():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in PAGES.values())
    pictures = [*(ROOT / "docs" / "images").glob("*.png"), *(ROOT / "benchmarks" / "results").glob("*.png")]
    assert len(pictures) > 10
    assert [path.name for path in pictures if not re.search(rf"!\[.+\]\(\S*/{path.name}\)", pages)] == []


@pytest.mark.slow
def test_figures_are_drawn_from_results(tmp_path, monkeypatch):
    """Sizes are those of the kept pictures, pixels differ with matplotlib's version; every figure has a title.

    Those of losses, errors and metrics say that lower is better.
    """
    spec = importlib.util.spec_from_file_location("draw_figures", ROOT / "docs" / "figures" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    figures = []
    monkeypatch.setattr(draw.plt, "close", figures.append)
    draw.main(["--output_dir", str(tmp_path)])
    for name, figure in zip(draw.FIGURES, figures, strict=True):
        with Image.open(tmp_path / name) as new, Image.open(ROOT / "docs" / "images" / name) as kept:
            assert new.size == kept.size
        assert figure.get_suptitle() or any(axes.get_title() for axes in figure.axes), name
        texts = " ".join(text.get_text() for text in figure.findobj(Text)).replace("\n", " ")
        assert "lower is better" in texts or name in ("weights_of_past_gradients.png", "step.png"), name
        figure.draw_without_rendering()  # all that is drawn lies inside, titles too
        inside, tight = figure.bbox, figure.get_tightbbox().transformed(figure.dpi_scale_trans)
        assert inside.x0 - 1 <= tight.x0 and tight.x1 <= inside.x1 + 1, name


def test_readme_length():
    lines = PAGES["README.md"].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 152
    first, second, *_ = commands("README.md")
    assert first == "pip install -c constraints.txt -e '.[recipes]' && accelerate launch recipes/pretrain_gpt2.py"
    assert second == "pip install -c constraints.txt -e '.[test]' && python -m pytest"
    # .ci/run looks for it with sed, at the beginning of a line
    assert sum(bool(re.fullmatch(r"pip install .*\[test\].*pytest", line)) for line in lines) == 1


def test_links_of_readme():
    text = PAGES["README.md"].read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], link


# --- rates in examples ------------------------------------------------------------------------------------------------

# Twice AdamW's 3e-4, from scratch, as choosing.md says of them; under mars-lion its own.
USUAL, OF_LION = "6e-4", "7e-5"
# Rates that a page explains: of fine-tuning, of suggest, of an experiment.
EXPLAINED = {
    "README.md": {"2e-5", "3e-4"},
    "choosing.md": {"0.000382"},
    "how_mars_works.md": {"5e-5"},
    "hub.md": {"1e-3"},
    "pretraining.md": {"1e-2"},
    "rules.md": {"1e-3"},
    "tracking.md": {"0.002"},
    "trl_peft.md": {"2e-4"},
}


@pytest.mark.parametrize("page", PAGES)
def test_examples_state_rates_that_are_right(page):
    for line in PAGES[page].read_text(encoding="utf-8").splitlines():
        usual = OF_LION if "lion" in line else USUAL
        for rate in re.findall(r"(?<!adamw-)\b(?:lr|learning_rate)[= ]([0-9][0-9.e-]*[0-9])", line):
            assert rate == usual or rate in EXPLAINED.get(page, ()), line


@pytest.mark.parametrize("page", PAGES)
def test_examples_give_a_rate(page):
    """`create` needs one; `(...)` stands for arguments, and `like=` brings them."""
    text = PAGES[page].read_text(encoding="utf-8")
    for match in re.finditer(r"\bcreate\((?=model|\[)", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        call = text[match.start() : end]
        is_name = call in ("create(model)", "create([a, b])", "create([model, loss])", "create(model, ...)")
        assert is_name or re.search(r"\blr=|like=", call), call


def test_help_shows_a_rate_of_fine_tuning():
    (rate,) = re.findall(r"run run_clm.py .*--learning_rate (\S+)", (ROOT / "mars_hf" / "__main__.py").read_text())
    assert float(rate) == pytest.approx(suggest("mars-adamw", 2e-5, (0.9, 0.999))["lr"], rel=0.02)
