#!/usr/bin/env python
"""Measure an optimizer step's time and bandwidth, beside torch's AdamW, Muon and other implementations of MARS.

    python benchmarks/step_cost.py                                  # 28M parameters; keep the machine idle meanwhile
    python benchmarks/step_cost.py --size small medium --rounds 50
    python benchmarks/step_cost.py --contenders '^mars|timm'        # a regular expression; AdamW always takes part
    python benchmarks/step_cost.py --gradient-norm 100              # every corrected gradient is clipped
    python benchmarks/step_cost.py --report                         # table and picture from existing results

Parameters have the shapes of GPT-2 and are float32; gradients are random. All contenders take turns in one process,
step by step, on the same parameters and gradients; ratios to AdamW are taken within a round. If memory is short, each
takes turns with AdamW alone. DeepSpeedCPUAdam, timm, pytorch_optimizer and the official code (its folder MARS on
PYTHONPATH) take part if installed, on a GPU also bitsandbytes and flashoptim. Results go to
benchmarks/results/step_cost_DEVICE.json, and a picture beside them.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interleave
import matplotlib

matplotlib.use("Agg")
import psutil
import torch
from matplotlib import pyplot as plt
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm

import mars_hf
from mars_hf import _compat
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.arithmetic.update_rules import update_rule
from mars_hf.compare import picture
from mars_hf.compare.files import write_json
from mars_hf.step.lists import build_lists

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
from pretraining.run import model as gpt2  # noqa: E402
from pretraining.run.arguments import ModelArguments  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SIZES = {
    "tiny": ModelArguments(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=64),
    "default": ModelArguments(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=4096),  # of the default job
    "28m": ModelArguments(n_layer=8, n_head=8, n_embd=512, vocab_size=4096),
    "small": ModelArguments(n_layer=12, n_head=12, n_embd=768, vocab_size=50304),
    "medium": ModelArguments(n_layer=24, n_head=16, n_embd=1024, vocab_size=50304),
    "large": ModelArguments(n_layer=36, n_head=20, n_embd=1280, vocab_size=50304),
    "xl": ModelArguments(n_layer=48, n_head=25, n_embd=1600, vocab_size=50304),
}
ADAMW, CLIPPED_ADAMW, COPY = "AdamW fused", "AdamW fused + clip_grad_norm_", "copy"
LR = 1e-5
MAX_NORM = 1.0
# Norm of all gradients together, as in the default job after its first steps (0.5 to 0.8). As there, no corrected
# gradient exceeds the threshold, which costs less than clipping.
GRADIENT_NORM = 0.6
WARM_UP = 3
# A contender slower than SLOW times AdamW has a turn in every SLOW-th round only.
SLOW = 5
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
# Bytes per parameter: parameters and four sets of gradients; AdamW's states; a contender's states; its copies.
SHARED, ADAMW_STATE, OWN_STATE, TRANSIENT = 20, 8, 12, 12

Named = Mapping[str, Tensor]
Make = Callable[[Named], list[torch.optim.Optimizer]]


@dataclass(frozen=True)
class Contender:
    """An optimizer and its step.

    `traffic` is the memory traffic that a step needs, in bytes per parameter: each pass reads every tensor it needs
    once and writes every tensor it changes once. Passes that cannot merge count separately: norms must be known before
    they are used. On CPUs part of the traffic comes from the cache. None if arithmetic dominates. GPUs read the last
    gradients for their norms, which CPUs remember: `gpu_traffic`, where it differs.
    """

    make: Make
    traffic: int | None
    gpu_traffic: int | None = None
    dtype: torch.dtype = torch.float32  # of parameters and gradients
    clips: bool = False  # clips the global norm of the gradients
    before: Callable[[Iterable[Tensor]], Tensor] | None = None  # clips the gradients, returns their norm


def _adamw(**settings: Any) -> Make:
    return lambda named: [torch.optim.AdamW(named.values(), lr=LR, weight_decay=0.1, **settings)]


def _mars(**settings: Any) -> Make:
    return lambda named: [mars_hf.Mars(named.values(), lr=LR, weight_decay=0.1, **settings)]


def _is_hidden(name: str, param: Tensor) -> bool:
    """Return whether this is a matrix of a block, for Muon and the like; embeddings and vectors use AdamW."""
    return param.ndim == 2 and ".h." in name


def _muon(named: Named) -> list[torch.optim.Optimizer]:
    hidden = [param for name, param in named.items() if _is_hidden(name, param)]
    rest = [param for name, param in named.items() if not _is_hidden(name, param)]
    return [torch.optim.Muon(hidden, lr=LR), torch.optim.AdamW(rest, lr=LR, fused=True)]


def _orthogonal(mars_type: str, *, split: bool = False, **settings: Any) -> Make:
    """Return a maker of mars-shampoo or mars-m on the matrices of `_muon`; `split` separates query, key and value."""

    def make(named: Named) -> list[torch.optim.Optimizer]:
        groups: dict[str, dict[str, Any]] = {}
        for name, param in named.items():
            own: dict[str, Any] = {"role": "vector" if param.ndim < 2 else "adamw"}
            if _is_hidden(name, param):
                fused = split and name.endswith(".c_attn.weight")
                parts = (param.shape[1] // 3,) * 3 if fused else None
                own = {"role": "matrix", "layout": MatrixLayout(transposed=True, parts=parts)}  # (in, out)
            groups.setdefault(repr(own), {"params": [], **own})["params"].append(param)
        return [mars_hf.Mars(groups.values(), lr=LR, weight_decay=0.1, mars_type=mars_type, **settings)]

    return make


def _clip(params: Iterable[Tensor]) -> Tensor:
    return clip_grad_norm_(params, MAX_NORM)


def contenders() -> dict[str, Contender]:
    """Return all contenders that can run here, by name."""
    adamw, mars = _adamw(fused=True), _mars()
    return {
        ADAMW: Contender(adamw, 28),
        "AdamW foreach": Contender(_adamw(foreach=True), 28),
        "Mars": Contender(mars, 40, 44),
        "Mars cautious": Contender(_mars(weight_decay_mode="cautious"), 40, 44),
        "Mars 8bit": Contender(_mars(state_dtype="8bit"), 22, 23),
        "Mars without last_grad": Contender(_mars(second_moment="gradient", clip_threshold=None), 28),
        "Mars fused=False": Contender(_mars(fused=False), 40, 44),
        **low_precision(),
        "mars-lion": Contender(_mars(mars_type="mars-lion"), 32, 36),
        "mars-lion 8bit": Contender(_mars(mars_type="mars-lion", state_dtype="8bit"), 20, 21),
        "Muon, AdamW for the rest": Contender(_muon, None),
        "mars-shampoo": Contender(_orthogonal("mars-shampoo"), None),
        "mars-m": Contender(_orthogonal("mars-m"), None),
        "mars-m, split c_attn": Contender(_orthogonal("mars-m", split=True), None),
        "mars-m 8bit": Contender(_orthogonal("mars-m", state_dtype="8bit"), None),
        **peers(),
        CLIPPED_ADAMW: Contender(adamw, 40, clips=True, before=_clip),
        "Mars + clip_grad_norm_": Contender(mars, 52, 56, clips=True, before=_clip),
        "Mars max_grad_norm": Contender(_mars(max_grad_norm=MAX_NORM), 40, 44, clips=True),
        "Mars 8bit max_grad_norm": Contender(_mars(max_grad_norm=MAX_NORM, state_dtype="8bit"), 22, 23, clips=True),
    }


def low_precision() -> dict[str, Contender]:
    """Return Mars on bfloat16 parameters and gradients, on a GPU: a CPU that shares its caches tells little of them."""
    if not torch.cuda.is_available():
        return {}
    bfloat16 = torch.bfloat16
    small = _mars(rounding="stochastic", state_dtype=bfloat16)
    return {
        "Mars bfloat16, stochastic": Contender(_mars(rounding="stochastic"), 36, dtype=bfloat16),
        "Mars bfloat16, kahan": Contender(_mars(rounding="kahan"), 40, dtype=bfloat16),
        "Mars bfloat16, kahan, 8bit": Contender(_mars(rounding="kahan", state_dtype="8bit"), 17, dtype=bfloat16),
        "Mars bfloat16, states too": Contender(small, 22, dtype=bfloat16),
    }


def peers() -> dict[str, Contender]:
    """Return the installed other implementations of MARS, and the AdamW whose place Mars takes under offload."""
    found = {}
    timm = importlib.util.find_spec("timm")
    if timm is not None and timm.submodule_search_locations:
        # Import its optimizers alone: the package needs torchvision.
        package = types.ModuleType("timm_optim")
        package.__path__ = [str(Path(timm.submodule_search_locations[0]) / "optim")]
        sys.modules[package.__name__] = package
        found["timm Mars"] = Contender(_peer("timm_optim.mars", "Mars"), 44)
    if importlib.util.find_spec("pytorch_optimizer") is not None:
        found["pytorch_optimizer MARS"] = Contender(_peer("pytorch_optimizer", "MARS"), 44)
    if importlib.util.find_spec("optimizers") is not None:  # keeps the gradient itself, without a copy
        found["official MARS"] = Contender(_peer("optimizers.mars", "MARS"), 40)
    if importlib.util.find_spec("deepspeed") is not None and importlib.util.find_spec("ninja") is not None:
        found["DeepSpeedCPUAdam"] = Contender(_peer("deepspeed.ops.adam", "DeepSpeedCPUAdam"), 28)  # compiles
    if torch.cuda.is_available() and importlib.util.find_spec("bitsandbytes") is not None:
        found["bitsandbytes AdamW8bit"] = Contender(_peer("bitsandbytes.optim", "AdamW8bit"), 16)
    if torch.cuda.is_available() and importlib.util.find_spec("flashoptim") is not None:  # weights of 24 bits
        found["flashoptim FlashAdamW, bfloat16"] = Contender(
            _peer("flashoptim", "FlashAdamW"), 12, dtype=torch.bfloat16
        )
    return found


def _peer(module: str, name: str) -> Make:
    def make(named: Named) -> list[torch.optim.Optimizer]:
        cls = getattr(importlib.import_module(module), name)
        return [cls(list(named.values()), lr=LR, betas=(0.95, 0.99), weight_decay=0.1)]

    return make


class Workload:
    """Hold parameters with GPT-2's shapes and two sets of gradients, which all contenders share.

    Two sets, so that the last gradient differs from the gradient. Contenders that scale gradients in place have two
    sets of their own: a loop never changes gradients that an optimizer has taken.
    """

    def __init__(self, size: str, device: torch.device, gradient_norm: float = GRADIENT_NORM) -> None:
        """Draw parameters, and gradients with this norm over all parameters together."""
        with torch.device("meta"):
            model = gpt2.build(SIZES[size], 1, 0)
        generator = torch.Generator(device).manual_seed(0)

        def draw(param: Tensor) -> Tensor:
            return torch.empty(param.shape, device=device).normal_(generator=generator)

        self.named = {name: draw(param).mul_(0.02).requires_grad_() for name, param in model.named_parameters()}
        self.params = list(self.named.values())
        self.numel = sum(param.numel() for param in self.params)
        size_of_one = gradient_norm / self.numel**0.5
        kept = [[draw(param).mul_(size_of_one) for param in self.params] for _ in range(2)]
        scaled = [[gradient.clone() for gradient in gradients] for gradients in kept]
        self._gradients = {False: kept, True: scaled}

    def of_dtype(self, dtype: torch.dtype) -> Workload:
        """Return a workload with copies of the parameters and gradients in this dtype; itself if it has the dtype."""
        if self.params[0].dtype == dtype:
            return self
        other = copy.copy(self)
        other.named = {name: param.detach().to(dtype).requires_grad_() for name, param in self.named.items()}
        other.params = list(other.named.values())
        other._gradients = {
            scales: [[gradient.to(dtype) for gradient in gradients] for gradients in sets]
            for scales, sets in self._gradients.items()
        }
        return other

    def present(self, turn: int, *, scales: bool = False) -> None:
        """Set the gradients of a contender's turn without a copy; `scales`: it scales them in place."""
        for param, gradient in zip(self.params, self._gradients[scales][turn % 2], strict=True):
            param.grad = gradient

    def unclip(self, turn: int, norm: Tensor) -> None:
        """Undo an in-place scaling to MAX_NORM."""
        torch._foreach_mul_(self._gradients[True][turn % 2], (norm / MAX_NORM).clamp(min=1.0))


class Player:
    """Run a contender's steps."""

    def __init__(
        self, contender: Contender, optimizers: list[torch.optim.Optimizer], work: Workload, clock: interleave.Clock
    ) -> None:
        """Start with a contender and its optimizers, which another contender may share."""
        self.contender = contender
        self.optimizers = optimizers
        self._work = work
        self._clock = clock
        self._turn = 0

    def __call__(self) -> interleave.Timing:
        """Take a step and time it."""
        self._work.present(self._turn, scales=self.contender.before is not None)
        norms = []

        def step() -> None:
            if self.contender.before is not None:
                norms.append(self.contender.before(self._work.params))
            for optimizer in self.optimizers:
                optimizer.step()

        timing = self._clock.time(step)
        for norm in norms:
            self._work.unclip(self._turn, norm)
        self._turn += 1
        return timing

    def backend(self) -> str:
        """Return the names of a Mars optimizer's backends; empty for other optimizers."""
        self._work.present(self._turn)
        names: dict[str, None] = {}
        for mars in self.optimizers:
            if isinstance(mars, mars_hf.Mars):
                lists, _ = build_lists(
                    mars.param_groups, list(map(update_rule, mars.param_groups)), dict(mars.state), {}, {}
                )
                names |= dict.fromkeys(tensors.backend.name for tensors in lists)
        return ", ".join(names)


def make_copy(device: torch.device, clock: interleave.Clock) -> tuple[Callable[[], interleave.Timing], int]:
    """Return a timed copy of a large buffer, and the bytes that it reads and writes."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda: clock.time(lambda: target.copy_(source)), 2 * source.nbytes


def measure(
    work: Workload, wanted: Sequence[str], device: torch.device, rounds: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Let contenders take turns.

    Args:
        work: the shared parameters and gradients.
        wanted: names of the contenders, AdamW's included.
        device: device of the workload.
        rounds: steps per contender.

    Returns:
        The measurements of each contender, and the error of each contender that could not run.
    """
    clock = interleave.Clock(device)
    available = contenders()
    made: dict[Make, list[torch.optim.Optimizer]] = {}
    players: dict[str, Player] = {}
    failed: dict[str, str] = {}
    warm: dict[str, float] = {}
    for name in wanted:
        contender = available[name]
        try:
            own_work = work.of_dtype(contender.dtype)
            if contender.make not in made:
                made[contender.make] = contender.make(own_work.named)
            player = Player(contender, made[contender.make], own_work, clock)
            warm[name] = min([player().seconds for _ in range(WARM_UP)][1:])
        except Exception as error:  # a peer's own error, or out of memory: the others continue
            made.pop(contender.make, None)
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        players[name] = player
    every = {name: SLOW for name, seconds in warm.items() if name in players and seconds > SLOW * warm[ADAMW]}
    copying, copied = make_copy(device, clock)
    copying()
    with tqdm(total=rounds * (len(players) + 1), unit="turn", leave=False) as progress:
        timings = interleave.take_turns({COPY: copying, **players}, rounds, every, progress.update)
    seconds = {name: [timing and timing.seconds for timing in taken] for name, taken in timings.items()}
    rates = [copied / one if one else None for one in seconds[COPY]]
    rows: dict[str, dict[str, Any]] = {COPY: {"gb_per_s": interleave.median(rates) / 1e9}}
    for name, player in players.items():
        rows[name] = {
            "ms": 1e3 * interleave.median(seconds[name]),
            "host_ms": 1e3 * interleave.median([timing and timing.host for timing in timings[name]]),
            "adamw_ms": 1e3 * interleave.median(seconds[ADAMW]),
            "against_adamw": interleave.ratio(seconds[name], seconds[ADAMW]),
            "against_adamw_quartiles": interleave.quartiles(seconds[name], seconds[ADAMW]),
            "against_clipped_adamw": interleave.ratio(seconds[name], seconds[CLIPPED_ADAMW]),
            "against_clipped_adamw_quartiles": interleave.quartiles(seconds[name], seconds[CLIPPED_ADAMW]),
            "steps": sum(one is not None for one in seconds[name]),
            "clips": player.contender.clips,
            "backend": player.backend(),
        }
        traffic = player.contender.traffic
        if device.type == "cuda" and player.contender.gpu_traffic is not None:
            traffic = player.contender.gpu_traffic
        if traffic is not None:
            moved = traffic * work.numel
            own = [moved / one if one else None for one in seconds[name]]
            rows[name]["gb_per_s"] = interleave.median(own) / 1e9
            rows[name]["of_copy"] = interleave.ratio(own, rates)
    for param in work.params:
        param.grad = None
    return rows, failed


def sessions(names: Sequence[str], numel: int, free: int, pairwise: bool | None) -> list[list[str]]:
    """Return the contenders of each session, AdamW's always included; no session if none fits into memory.

    Args:
        names: names of the contenders.
        numel: elements of the parameters.
        free: bytes available.
        pairwise: True runs every contender alone with AdamW; None does so if all at once do not fit.
    """
    baselines = [ADAMW, CLIPPED_ADAMW]
    others = [name for name in names if name not in baselines]
    alone = numel * (SHARED + ADAMW_STATE + OWN_STATE + TRANSIENT)
    if alone > free:
        return []
    together = alone + numel * OWN_STATE * max(0, len(others) - 1)
    if pairwise or (pairwise is None and together > free):
        return [[*baselines, name] for name in others] or [baselines]
    return [[name for name in contenders() if name in {*baselines, *others}]]


def measure_size(
    size: str, names: Sequence[str], device: torch.device, rounds: int, pairwise: bool | None, gradient_norm: float
) -> dict[str, Any] | None:
    """Measure all contenders on one size; None if it does not fit into memory."""
    with torch.device("meta"):
        numel = gpt2.build(SIZES[size], 1, 0).num_parameters()
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    plan = sessions(names, numel, int(0.9 * free), pairwise)
    if not plan:
        return None
    work = Workload(size, device, gradient_norm)
    rows: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for session in plan:
        measured, unable = measure(work, session, device, rounds)
        rows |= measured
        failed |= unable
    order = [COPY, *contenders()]
    return {
        "parameters": work.numel,
        "tensors": len(work.params),
        "pairwise": len(plan) > 1,
        "contenders": {name: rows[name] for name in order if name in rows},
        "failed": failed,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the results of one size as a Markdown table."""
    header = [
        "optimizer",
        "backend",
        "ms",
        "host ms",
        "AdamW's ms then",
        "GB/s",
        "of copy",
        "against AdamW",
        "against AdamW + clip",
    ]
    rows = []
    for name, row in result["contenders"].items():
        if name != COPY:
            rate = [f"{row['gb_per_s']:.1f}", f"{100 * row['of_copy']:.0f}%"] if "of_copy" in row else ["", ""]
            ratios = [f"{row['against_adamw']:.2f}x", f"{row['against_clipped_adamw']:.2f}x"]
            times = [f"{row[key]:.2f}" for key in ("ms", "host_ms", "adamw_ms")]
            rows.append([name, row["backend"], *times, *rate, *ratios])
    return interleave.markdown([header, *rows])


def _instructions(device: torch.device) -> dict[str, str]:
    if device.type != "cpu":
        return {}
    capability = torch.backends.cpu.get_cpu_capability()
    return {"instructions": f"{capability} with{'' if _compat.cpu_multiplies_bfloat16() else 'out'} bfloat16"}


def report(written: Mapping[str, Any], picture: Path) -> None:
    """Print the tables and draw the picture."""
    for size, result in written["sizes"].items():
        copied = result["contenders"][COPY]["gb_per_s"]
        how = "each with AdamW alone" if result["pairwise"] else "all in turn"
        print(f"\nGPT-2 {size}, {result['parameters'] / 1e6:.1f}M parameters, {written['device']}, {how}")
        print(f"copy of a large tensor: {copied:.1f} GB/s\n")
        print(table(result))
        for name, error in result["failed"].items():
            print(f"{name} did not run: {error}")
    for size in written["left_out"]:
        print(f"GPT-2 {size} does not fit into memory")
    if written["sizes"]:
        draw(written, picture)


def draw(written: Mapping[str, Any], path: Path) -> None:
    """Draw bars of the ratios to AdamW, one column per size: elementwise rules, orthogonalizing ones, global clipping.

    Lines at the ends of bars span the first to the third quartile.
    """
    sizes = written["sizes"]
    panels: dict[str, list[str]] = {}
    for name, row in _all_rows(sizes).items():
        unclipped = "elementwise rules" if "of_copy" in row else "rules that orthogonalize"
        panels.setdefault("clipping (1: clipping AdamW)" if row["clips"] else unclipped, []).append(name)
    panels = {text: names for text, names in panels.items() if {*names} - {ADAMW, CLIPPED_ADAMW}} or panels
    heights = [len(names) + 0.5 for names in panels.values()]
    figure, grid = _grid(heights, len(sizes))
    for column, result in zip(grid.T, sizes.values(), strict=True):
        model = f"GPT-2, {result['parameters'] / 1e6:.1f}M parameters"
        for axes, (text, names) in zip(column, panels.items(), strict=True):
            _bars(axes, names, result["contenders"], "against_clipped_adamw" if "clip" in text else "against_adamw")
            quartiles = [max(line.get_xdata()) for line in axes.lines]
            _scale(axes, [*(bar.get_width() for bar in axes.patches), *quartiles])
        column[0].set_title(model, fontsize=9, pad=18)
    for axes, text in zip(grid[:, 0], panels, strict=True):
        axes.annotate(text, (0, 1), xycoords="axes fraction", xytext=(-4, 3), textcoords="offset points", fontsize=8)
    device = ", ".join(filter(None, [written["device"], written["machine"].get("instructions")]))
    figure.suptitle(f"Time of the optimizer's step on {device}", fontsize=10)
    figure.supxlabel(
        "times AdamW's time, lower is better; grey lines: from the first to the third quartile", fontsize=8
    )
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _grid(heights: Sequence[float], columns: int) -> tuple[Any, Any]:
    """Return a figure, and its axes by panel and size; of a single panel, sizes are below each other."""
    if len(heights) == 1:
        figure, grid = plt.subplots(
            nrows=columns,
            figsize=(6.4, 0.9 + columns * (0.6 + 0.24 * sum(heights))),
            squeeze=False,
            layout="constrained",
        )
        return figure, grid.T
    return plt.subplots(
        nrows=len(heights),
        ncols=columns,
        figsize=(2.2 + 2.2 * columns, 0.9 + 0.4 * len(heights) + 0.24 * sum(heights)),
        height_ratios=heights,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )


def _label(name: str) -> str:
    """Return the name of a contender in the picture: its rule, as `create` makes it by default."""
    forms = {"mars-m": "mars-m, split_fused=none", "mars-m, split c_attn": "mars-m"}
    return forms.get(name, re.sub(r"^Mars\b", "mars-adamw", name))


def _all_rows(sizes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: row for result in sizes.values() for name, row in result["contenders"].items() if name != COPY}


def _bars(axes: Any, names: Sequence[str], rows: Mapping[str, Any], key: str) -> None:
    for place, name in enumerate(names):
        if name in rows:
            value, (low, high) = rows[name][key], rows[name][f"{key}_quartiles"]
            axes.barh(place, value, height=0.7, color=picture.color(name))
            axes.plot([low, high], [place, place], color="black", alpha=0.5, linewidth=1.5)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0}
            axes.text(
                max(value, high), place, f" {value:.{2 if value < 10 else 1}f}x", va="center", fontsize=8, bbox=box
            )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.tick_params(labelsize=8)
    axes.set(ylim=(len(names) - 0.4, -0.6), axisbelow=True)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(axes: Any, values: Sequence[float]) -> None:
    """Scale an axis linearly from zero, or logarithmically if a linear one would hide the shortest bars."""
    if max(values) > 30 * min(values):
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, 0.8 * min(values)), 4 * max(values))
        ticks = [tick for tick in (1, 10, 100, 1000) if tick <= 4 * max(values)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("log scale", fontsize=8)
    else:
        axes.set_xlim(0, 1.25 * max(values))


def main(argv: list[str] | None = None) -> None:
    """Measure, write, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["28m"], help="%(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each contender: %(default)s")
    parser.add_argument("--contenders", default="", help="regular expression of names; left out: all")
    parser.add_argument(
        "--pairwise", action=argparse.BooleanOptionalAction, help="each with AdamW alone; left out: if memory is short"
    )
    parser.add_argument(
        "--gradient-norm", type=float, default=GRADIENT_NORM, help="of all gradients together: %(default)s"
    )
    parser.add_argument("--threads", type=int, help="of PyTorch on CPU; left out: its own choice")
    parser.add_argument("--resume", action="store_true", help="keep what the output has of this device")
    parser.add_argument("--output", type=Path, help="JSON file; left out: benchmarks/results/step_cost_DEVICE.json")
    parser.add_argument("--report", action="store_true", help="measure nothing: table and picture of what is there")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    name = interleave.device_name(device)
    output = arguments.output or RESULTS / f"step_cost_{interleave.slug(name)}.json"
    if not arguments.report:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        names = [name for name in contenders() if re.search(arguments.contenders, name, re.IGNORECASE)]
        written: dict[str, Any] = {
            "machine": {**interleave.describe_machine(), **_instructions(device)},
            "device": name,
            "rounds": arguments.rounds,
            "gradient_norm": arguments.gradient_norm,
            "sizes": {},
            "left_out": [],
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        if arguments.resume:
            written = interleave.resume(output, written)
        for size in arguments.size:
            if size in written["sizes"]:
                continue
            result = measure_size(size, names, device, arguments.rounds, arguments.pairwise, arguments.gradient_norm)
            if result is None:
                written["left_out"].append(size)
            else:
                written["sizes"][size] = result
            write_json(output, written)  # what is measured stays if the next size is not
    report(json.loads(output.read_text()), output.with_suffix(".png"))


if __name__ == "__main__":
    main()
