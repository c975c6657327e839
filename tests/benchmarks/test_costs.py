"""The benchmarks measure what they say: turns and ratios, steps, training, memory, updates; and the script for GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path
from unittest import mock

import host_time
import interleave
import memory
import on_a_gpu
import psutil
import pytest
import step_cost
import torch
import train_cost
import update_rms
from forks import run_in_forks
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch.utils.flop_counter import FlopCounterMode
from train_cost import ADAMW, EXACT, MARS, Block

import mars_hf

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_missing_package_names_the_extra(tmp_path):
    hide = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); sys.modules['matplotlib'] = None"
    scripts = {script: f"{hide}; import {script}" for script in ("step_cost", "memory")}
    for ended in run_in_forks(scripts, tmp_path, ["torch", "transformers.trainer"]).values():
        assert ended.returncode == 1 and ended.stdout == ""
        line = ended.stderr.splitlines()[-1]
        assert "matplotlib" in line and "benchmarks need pip install -c constraints.txt -e '.[recipes]'" in line
        assert "Traceback" not in ended.stderr


# --- interleave.py ---------------------------------------------------------------------------------------------------


def test_turns_and_ratios(monkeypatch):
    """Every round begins with another contender, and ratios are taken within rounds."""
    order = []
    contenders = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    measured = interleave.take_turns(contenders, 4, every={"b": 3})
    assert "".join(order) == "abc" + "ca" + "ca" + "abc"
    assert measured == {"a": [1, 5, 7, 8], "b": [2, None, None, 9], "c": [3, 4, 6, 10]}
    # The second round is three times slower: the ratio of medians would be 1.
    assert interleave.ratio([2.0, 6.0, None], [1.0, 3.0, 2.0]) == 2.0
    assert interleave.quartiles([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == (2.0, 4.0)
    assert interleave.quartiles([3.0, None], [2.0, 1.0]) == (1.5, 1.5)
    assert interleave.median([5.0, None, 1.0]) == 3.0
    monkeypatch.setattr(interleave.time, "perf_counter", iter([1.0, 2.0, 5.0, 7.0]).__next__)
    assert interleave.Clock(CPU).time(lambda: None) == interleave.Timing(seconds=3.0, host=6.0)


def test_memory_of_a_call():
    """Its peak is what it holds at once; what it returns stays."""

    def call():
        first = torch.empty(1000)
        second = torch.empty(3000)
        del first
        return second, torch.empty(500)

    assert interleave.trace_memory(call, CPU) == (4 * 3500, 4 * 4000)


# --- step_cost.py ----------------------------------------------------------------------------------------------------


def player(name, work):
    contender = step_cost.contenders()[name]
    return step_cost.Player(contender, contender.make(work.named), work, interleave.Clock(CPU))


@pytest.fixture
def work(monkeypatch):
    monkeypatch.setattr(step_cost, "COPY_BYTES", {"cpu": 2**16})
    return step_cost.Workload("tiny", CPU, gradient_norm=3.0)


def test_step_cost(tmp_path, capsys, monkeypatch, work):
    """A contender that cannot run is named, and the others go on."""
    known = {
        **step_cost.contenders(),
        "broken": step_cost.Contender(mock.Mock(side_effect=ImportError("not here")), 28),
    }
    monkeypatch.setattr(step_cost, "contenders", lambda: known)
    output, clipped = tmp_path / "step_cost.json", "AdamW fused + clip_grad_norm_"
    argv = ["--size", "tiny", "--device", "cpu", "--rounds", "2", "--output", str(output), "--contenders"]
    step_cost.main([*argv, "AdamW|^Mars$|max_grad_norm|without|mars-m$|broken"])
    result = json.loads(output.read_text())["sizes"]["tiny"]
    rows = result["contenders"]
    assert result["failed"] == {"broken": "ImportError: not here"} and not result["pairwise"]
    assert rows["AdamW fused"]["against_adamw"] == rows[clipped]["against_clipped_adamw"] == 1.0
    assert all(math.isfinite(value) for row in rows.values() for value in row.values() if isinstance(value, float))
    assert [name for name, row in rows.items() if row.get("clips")] == [
        clipped,
        "Mars max_grad_norm",
        "Mars 8bit max_grad_norm",
    ]
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in rows if name != step_cost.COPY)
    assert output.with_suffix(".png").stat().st_size > 10_000
    step_cost.main([*argv, "^Mars$", "--pairwise"])
    rows = json.loads(output.read_text())["sizes"]["tiny"]["contenders"]
    assert list(rows) == ["copy", "AdamW fused", "Mars", clipped]


def test_contenders_that_orthogonalize_take_the_same_matrices(work):
    muon, width = player("Muon, AdamW for the rest", work).optimizers[0], step_cost.SIZES["tiny"].n_embd
    for name in ("mars-shampoo", "mars-m", "mars-m, split c_attn"):
        groups = player(name, work).optimizers[0].param_groups
        taken = {p: group["layout"]["parts"] for group in groups if group["role"] == "matrix" for p in group["params"]}
        assert taken.keys() == set(muon.param_groups[0]["params"]) and len(taken) == 4
        assert [parts for parts in taken.values() if parts] == [(width,) * 3] * ("split" in name)


def test_shared_gradients(work):
    """Contenders leave them as they were."""
    before = [[gradient.clone() for gradient in gradients] for gradients in work._gradients[True]]
    assert torch.cat([gradient.flatten() for gradient in before[0]]).norm() > step_cost.MAX_NORM  # or nothing clips
    names = [name for name in step_cost.contenders() if name.startswith(("AdamW", "Mars", "mars"))]
    players = {name: player(name, work) for name in names}
    for one in list(players.values()) * 3:
        one()
    torch.testing.assert_close(work._gradients[True], before, rtol=1e-5, atol=0)
    torch.testing.assert_close(work._gradients[False], before, rtol=0, atol=0)
    (lean,) = players["Mars without last_grad"].optimizers
    assert not any("last_grad" in state for state in lean.state.values())


# --- train_cost.py ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_cost(tmp_path, capsys):
    output = tmp_path / "cost.json"
    argv = "--size tiny --device cpu --block 16 --batch 2 --steps 3 --rounds 1 --accumulation 2 --peak_tflops 1".split()
    train_cost.main([*argv, "--output", str(output)])
    result = json.loads(output.read_text())["result"]
    rows = result["contenders"]
    assert result["tokens_per_step"] == 2 * 2 * 16 and all(0 < row["update_share"] < 1 for row in rows.values())
    assert rows[MARS]["mfu"] == pytest.approx(rows[MARS]["tokens_per_second"] * result["flops_per_token"] / 1e12)
    printed = capsys.readouterr().out
    assert "| Mars exact " in printed and "two passes and one update would take" in printed


def test_blocks_are_medians_and_ratios_are_taken_within_rounds():
    meter = train_cost.Meter(interleave.Clock(CPU))
    meter.begins, meter.gradients, meter.updates = [0.0, 2.0, 5.0, 9.0], [1.0, 4.0, 7.0], [1.5, 4.75, 7.25]
    assert meter.pop() == Block(step=3.0, update=0.5)
    assert meter.begins == meter.gradients == meter.updates == []
    measured = {  # the second round is ten times slower
        name: [Block(step, 0.1), Block(10 * step, 1.0), Block(step, 0.1)]
        for name, step in ((ADAMW, 0.4), (MARS, 0.5), (EXACT, 0.8))
    }
    rows = train_cost.summarize(measured, tokens=100, seconds_per_token=0.001)
    assert rows[EXACT]["against"] == pytest.approx({ADAMW: 2.0, MARS: 1.6, EXACT: 1.0})
    assert (rows[EXACT]["step_ms"], rows[EXACT]["update_ms"]) == pytest.approx((800, 100))
    assert (rows[ADAMW]["tokens_per_second"], rows[ADAMW]["mfu"]) == pytest.approx((250, 0.25))
    assert train_cost.exact_bound(measured[MARS]) == pytest.approx(0.9 / 0.5)


def test_flops_are_those_of_the_matrix_products():
    # Attention written out: the counter does not know the fused one of CPUs.
    size = dataclasses.replace(train_cost.SIZES["tiny"], attn_implementation="eager")
    gpt2, ids = train_cost.model.build(size, 1, 0), torch.zeros(1, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        gpt2(input_ids=ids, labels=ids).loss.backward()
    vectors = sum(param.numel() for param in gpt2.parameters() if param.ndim == 1)
    options = argparse.Namespace(size="tiny", block=16)
    assert counter.get_total_flops() / 16 == train_cost.flops_per_token(options, gpt2) - 6 * vectors


# --- memory.py -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_benchmark(tmp_path, monkeypatch, capsys):
    """Bytes of the tiny model's training; what is kept by mistake is growth."""
    leaked = []

    def leaking(model):
        optimizer = mars_hf.create(model, lr=3e-3)
        optimizer.register_step_post_hook(lambda *_: leaked.append(torch.empty(25)))
        return optimizer

    forms = {name: memory.FORMS[name] for name in ("SGD", "mars-adamw", "mars-adamw, exact")}
    monkeypatch.setattr(memory, "FORMS", {**forms, "leaking": leaking})
    monkeypatch.setattr(memory, "BLOCK", 3)
    output = tmp_path / "memory.json"
    memory.main(["--size", "tiny", "--device", "cpu", "--steps", "6", "--output", str(output)])
    forms, params = json.loads(output.read_text())["forms"], step_cost.Workload("tiny", CPU).params
    growth = {name: [row["growth"] for row in loops.values()] for name, loops in forms.items()}
    assert growth == {name: [600, 600] if name == "leaking" else [0, 0] for name in forms}
    numel, kept = sum(p.numel() for p in params), sum(p.numel() * (16 if p.ndim > 1 else 12) for p in params)
    for loop in ("plain loop", "Trainer"):
        sgd, mars, exact = (forms[name][loop] for name in ("SGD", "mars-adamw", "mars-adamw, exact"))
        assert sgd["weights"] == sgd["gradients"] == 4 * numel <= sgd["held"] <= 4 * numel + 8 and sgd["states"] == 0
        assert all(
            kept <= count <= kept + 8 * len(params) for count in (mars["weights"] + mars["states"], mars["held"])
        )
        assert 4 * numel - 4 * len(params) <= exact["states"] - mars["states"] <= 4 * numel
        assert mars["peak"] > mars["held"] + mars["gradients"] == mars["held"] + 4 * numel
    assert "| mars-adamw, exact, Trainer " in capsys.readouterr().out
    assert output.with_suffix(".png").stat().st_size > 10_000


# --- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "name", "title"),
    [
        (step_cost, "step_cost_h100", "Time of the optimizer's step on NVIDIA H100 80GB HBM3"),
        (
            step_cost,
            "orthogonalized_avx2_intel_xeon",
            "Time of the optimizer's step on Intel(R) Xeon(R) Processor, AVX2",
        ),
        (memory, "memory_h100", "Peak memory of a training step: GPT-2, 27.8M parameters, NVIDIA H100 80GB HBM3"),
    ],
)
def test_pictures_state_machine_model_and_direction(script, name, title, monkeypatch, capsys):
    """Drawn from published results; an optimizer has its name, and mars-m is the form that `create` makes."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    script.main(["--report", "--device", "cpu", "--output", str(script.RESULTS / f"{name}.json")])
    (figure,) = drawn
    figure.canvas.draw()
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert figure.get_suptitle().startswith(title)
    assert any("lower is better" in text for text in texts) and any("M parameters" in text for text in texts)
    assert not [text for text in texts if text.startswith("Mars")] and "Mars" not in capsys.readouterr().err
    if name == "step_cost_h100":
        assert {"mars-adamw", "mars-m", "mars-m, split_fused=none"} <= set(texts) and "6.24x" in " ".join(texts)


# --- update_rms.py ---------------------------------------------------------------------------------------------------


def test_updates_are_measured_without_rate_and_decay():
    """Signs have a root mean square of 1 whatever the decay is; an embedding is told by its name."""
    shapes = {"a.wte.weight": (4, 4), "b.weight": (4, 4), "b.bias": (4,)}
    named = {name: torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    settings = {"mars_type": "mars-lion", "weight_decay": 0.5, "optimize_1d": True}
    optimizer, meter = mars_hf.Mars(list(named.items()), lr=0.01, **settings), update_rms.Meter(after=1)
    for step in range(3):
        assert meter.rms() == {} or step > 1
        for param in named.values():
            param.grad = torch.randn_like(param)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + step)
        meter.begin(optimizer)
        optimizer.step()
        meter.end(optimizer)
    assert meter.rms() == pytest.approx({"embeddings": 1.0, "matrices": 1.0, "vectors": 1.0})


def test_shipped_updates_are_those_of_the_script():
    shipped = [(row["optimizer"], row["arguments"]) for row in json.loads(update_rms.RESULTS.read_text())["runs"]]
    assert shipped == [(optimizer, [*update_rms.COMMON, *settings]) for optimizer, settings in update_rms.RUNS]


# --- on_a_gpu.py -----------------------------------------------------------------------------------------------------


def test_commands_on_a_gpu(tmp_path):
    """Files, sizes and plans are there; README promises fifteen minutes without the comparisons."""
    parts = on_a_gpu.parts(tmp_path)
    for part in parts.values():
        scripts = [word for word in part.command if word.endswith(".py") or word.startswith("tests/")]
        assert sys.executable in part.command and all((on_a_gpu.ROOT / script).exists() for script in scripts)
        if "--size" in part.command:
            sizes = itertools.takewhile(step_cost.SIZES.__contains__, part.command[part.command.index("--size") + 1 :])
            assert list(sizes)
    plans = {part.command[part.command.index("--plan") + 1] for part in parts.values() if "--plan" in part.command}
    assert len(plans) == 3 and all((on_a_gpu.ROOT / plan).is_file() for plan in plans)
    seconds = [part.seconds for name, part in parts.items() if not (part.beside or name.startswith("controls"))]
    assert sum(seconds) <= 15 * 60
    marked = {path for path in Path("tests").rglob("test_*.py") if re.search(r"on_a_gpu|mark\.gpu", path.read_text())}
    marked -= {Path("tests/benchmarks/test_costs.py")}
    assert all(str(path).startswith((*on_a_gpu.TESTS, on_a_gpu.ENGINES)) for path in marked)


@pytest.mark.slow
def test_failing_part_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    """What hangs ends with all that it started; parts beside each other run at once; what is done is not done again."""
    sleeps = "import subprocess as s, sys; s.run([sys.executable, '-c', 'import time; time.sleep(99)', sys.argv[1]])"
    meets = (
        "import pathlib, sys, time\nmine, other = map(pathlib.Path, sys.argv[2:])\nmine.touch()\n"
        "while not other.exists(): time.sleep(0.1)"
    )
    codes = {"check": "raise SystemExit('no GPU')", "step_cost": sleeps, "controls": "print('well')"}
    commands = {name: [sys.executable, "-c", code, str(tmp_path)] for name, code in codes.items()}
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    parts = {name: on_a_gpu.Part(command, 2.0) for name, command in commands.items()}
    for name, order in (("memory", paths), ("memory_beside", paths[::-1])):
        command = [sys.executable, "-c", meets, str(tmp_path), *order]
        parts[name] = on_a_gpu.Part(command, 30.0, beside="beside" in name)
    parts["gone"] = on_a_gpu.Part(["no-such-program"], 2.0)
    monkeypatch.setattr(on_a_gpu, "parts", lambda output: parts)
    ends = on_a_gpu.main(["--output_dir", str(tmp_path)])
    both = {"memory": "done", "memory_beside": "done"}
    expected = {"check": "failed", "step_cost": "out of time", "controls": "done", **both, "gone": "failed"}
    assert ends == expected
    assert "no GPU" in (tmp_path / "check.log").read_text() and "well" in (tmp_path / "controls.log").read_text()
    assert "step_cost: out of time after" in capsys.readouterr().out
    alive = [one for one in psutil.process_iter(["cmdline", "status"]) if str(tmp_path) in (one.info["cmdline"] or ())]
    assert [one for one in alive if one.info["status"] != psutil.STATUS_ZOMBIE] == []
    assert on_a_gpu.main(["--output_dir", str(tmp_path), "--only", "contr"]) == {"controls": "done before"}


def test_parts_go_on_where_they_stopped(tmp_path, work):
    """Sizes, forms and parts in the output are kept; those of another machine are measured again."""
    output = tmp_path / "step_cost.json"
    argv = ["--device", "cpu", "--rounds", "1", "--contenders", "^Mars$", "--output", str(output), "--resume"]
    step_cost.main([*argv, "--size", "tiny"])
    written = json.loads(output.read_text())
    written["sizes"]["tiny"]["kept"] = True
    output.write_text(json.dumps(written))
    step_cost.main([*argv, "--size", "tiny"])
    assert json.loads(output.read_text())["sizes"]["tiny"]["kept"]
    output.write_text(json.dumps({**written, "machine": {"cpu": "another"}}))
    step_cost.main([*argv, "--size", "tiny"])
    assert "kept" not in json.loads(output.read_text())["sizes"]["tiny"]


# --- gpu_kernels.py --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/kernels/test_gpu.py runs it interpreted")
def test_gpu_kernels(tmp_path, monkeypatch, capsys):
    """All sizes of blocks give one result; FLOPs are those of the iteration's products."""
    import gpu_kernels

    monkeypatch.setattr(gpu_kernels, "TILES", (1024, 8192))
    monkeypatch.setattr(gpu_kernels, "BLOCKS", (512,))
    results = []
    for sizes in gpu_kernels.sizes():
        gpu_kernels.set_sizes(*sizes)
        kernels = gpu_kernels.Kernels([torch.ones(100)], [torch.full((100,), 2.0)])
        kernels.last_grad[0].fill_(1.0)
        results.append(kernels.sums())
    assert len(results) == 5
    torch.testing.assert_close(results, [results[0]] * 5, rtol=1e-12, atol=0)
    gpu_kernels.set_sizes(*gpu_kernels.sizes()[0])
    output = tmp_path / "kernels.json"
    gpu_kernels.main(["--device", "cpu", "--size", "tiny", "--rounds", "1", "--output", str(output)])
    result = json.loads(output.read_text())["sizes"]["tiny"]
    assert [row["today"] for row in result["blocks"]].count(True) == 2
    rates = result["newton_schulz"]
    assert all(row["tflops"] > 0 for row in rates.values()) and rates["matrix product"]["of_product"] == 1.0
    assert set(result["launches"]) == set(gpu_kernels.PROFILED)
    forms = [(tuple(row["shape"]), row["form"]) for row in result["forms"]]
    assert forms == [(shape, form) for shape in ((16, 48), (16, 16), (16, 64)) for form in gpu_kernels.FORMS]
    assert all(row["of_plain"] > 0 for row in result["forms"])
    assert [row["elements"] for row in result["chunks"]] == gpu_kernels.CHUNKS
    assert all(row["ms"] > 0 and 0 < row["bytes"] < 50 for row in result["chunks"])
    assert gpu_kernels.newton_schulz.GRAM_RATIO == 2 and gpu_kernels.exchange.CHUNK_ELEMENTS == 2**25
    assert "| one by one " in capsys.readouterr().out
    matrix = torch.randn(12, 30)
    with FlopCounterMode(display=False) as counter:
        plain = gpu_kernels.plain_newton_schulz(matrix)
    assert counter.get_total_flops() == gpu_kernels.plain_flops(matrix.shape)
    (ours,) = gpu_kernels.orthogonalize([matrix])
    torch.testing.assert_close(plain, ours, rtol=0, atol=0.05)


def test_host_time(tmp_path, capsys):
    host_time.main(["--count", "8", "12", "--rounds", "3", "--output_dir", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert [*written["tensors"]] == ["8", "12"]
    assert all(rows.keys() == host_time.MAKE.keys() for rows in written["tensors"].values())
    assert all(row["ms"] > 0 for rows in written["tensors"].values() for row in rows.values())
    assert written["tensors"]["8"][host_time.BASELINE]["ratio"] == 1.0
    assert f"in {path}" in capsys.readouterr().out
