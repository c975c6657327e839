"""Short forms of the soak: kills, a long run, and processes that lose one of their number."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))

import kill

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.mark.parametrize(
    "kills",
    [
        1,  # while a checkpoint is written
        pytest.param(2, marks=pytest.mark.soak),  # and while the result is
    ],
)
def test_killed_runs_end_to_the_bit(tmp_path, kills):
    rows = kill.trials(kills, tmp_path, jobs=1, first=1)
    assert [row["verdict"] for row in rows] == ["to the bit"] * kills, rows
    assert kill.table(rows).splitlines()[-1].startswith(f"| all | {kills} | ")


def test_a_difference_is_seen(tmp_path):
    """The comparison that the soaks rest on."""
    for name, loss, weight in (("one", 1.0, 0.0), ("two", 2.0, 0.0), ("three", 1.0, 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.json").write_text(json.dumps({"eval_loss": loss, "tokens_per_second": loss}))
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 1.0, "train_runtime": loss}]}))
        save_file({"w": torch.full((2,), weight)}, folder / "model.safetensors")
    verdicts = {name: kill.difference(tmp_path / "one", tmp_path / name) for name in ("one", "two", "three", "none")}
    assert verdicts == {"one": None, "two": "another metrics.json", "three": "other weights", "none": "not finished"}


@pytest.mark.soak
def test_twenty_thousand_steps(tmp_path):
    result = kill.long(tmp_path, 20_000)
    assert result["difference"] is None and result["growth_bytes"] < 8 * 2**20


def test_the_others_end_when_one_of_three_is_killed(tmp_path):
    """They end with an error within a minute, and the run goes on from its last checkpoint."""
    data, output = kill.prepare(tmp_path), tmp_path / "run"
    config = str(kill.ROOT / "accelerate_configs" / "cpu_ddp.yaml")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "3"]
    launcher += ["--main_process_port", "0"]  # a free one: other tests launch, too
    argv = ["--use_cpu", "true", "--save_steps", "10", "--max_steps"]
    process, deadline = kill.start(output, data, [*argv, "4000"], launcher), time.monotonic() + 300
    while not list(output.glob("checkpoint-*/trainer_state.json")):
        assert process.poll() is None and time.monotonic() < deadline, output.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.2)
    workers = [one for one in kill.family(process.pid) if one.environ().get("RANK")]
    assert len(workers) == 3
    killed = time.monotonic()
    next(one for one in workers if one.environ()["RANK"] == "2").kill()
    assert process.wait(60) != 0
    _, alive = psutil.wait_procs(workers, timeout=60 - (time.monotonic() - killed))
    assert not alive
    step = max(int(path.parent.name.partition("-")[2]) for path in output.glob("checkpoint-*/trainer_state.json"))
    code = kill.end(kill.start(output, data, [*argv, str(step + 5)], launcher), [])
    assert code == 0, output.with_suffix(".log").read_text()[-3000:]
    assert json.loads((output / "metrics.json").read_text())["steps"] == step + 5
