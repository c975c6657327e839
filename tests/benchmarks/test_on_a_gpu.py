"""The script that does everything on a GPU: its commands exist, and no part stops the next."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import on_a_gpu
import pytest
import step_cost
from pretraining.compare import presets


def test_its_commands_exist(tmp_path):
    for _, command in on_a_gpu.parts(tmp_path).values():
        assert command[0] == sys.executable
        assert command[1] == "-m" or (on_a_gpu.ROOT / command[1]).is_file()
    _, command = on_a_gpu.parts(tmp_path)["step_cost"]
    sizes = command[command.index("--size") + 1 : command.index("--output")]
    assert set(sizes) <= set(step_cost.SIZES)
    assert {"gpu-30m", "gpu-98m"} <= set(presets.names())


@pytest.mark.slow
def test_a_part_ends_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(on_a_gpu, "_GRACE", 2.0)
    child = "import os, pathlib, time; pathlib.Path('child').write_text(str(os.getpid())); time.sleep(600)"
    code = f"import os, subprocess, sys; os.chdir({str(tmp_path)!r}); subprocess.run([sys.executable, '-c', {child!r}])"
    assert on_a_gpu.run("controls", [sys.executable, "-c", code], tmp_path, 5) == "out of time"
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while (state := Path(f"/proc/{pid}/stat")).exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_part_that_fails_or_hangs_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    def of(code):
        return [sys.executable, "-c", code]

    monkeypatch.setattr(
        on_a_gpu,
        "parts",
        lambda output: {
            "tests": (0.2, of("raise SystemExit('no GPU')")),
            "step_cost": (0.2, of("import time; time.sleep(60)")),
            "controls": (0.2, of("print('all well')")),
        },
    )
    ends = on_a_gpu.main(["--output_dir", str(tmp_path), "--minutes", "0.25"])
    assert ends == {"tests": "failed", "step_cost": "out of time", "controls": "done"}
    assert "no GPU" in (tmp_path / "tests.log").read_text()
    assert "all well" in (tmp_path / "controls.log").read_text()
    assert "step_cost: out of time after" in capsys.readouterr().out
    assert on_a_gpu.main(["--output_dir", str(tmp_path), "--only", "controls"]) == {"controls": "done"}
