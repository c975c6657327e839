"""Short forms of the soak: kills, long runs, and processes that lose one of their number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import kill  # noqa: E402
import long  # noqa: E402

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
    for name, loss in (("one", 1.0), ("two", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.json").write_text(json.dumps({"eval_loss": loss, "tokens_per_second": loss}))
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 1.0, "train_runtime": loss}]}))
        kill.torch.save({}, folder / "unused")
        from safetensors.torch import save_file

        save_file({"w": kill.torch.zeros(2)}, folder / "model.safetensors")
    assert kill.difference(tmp_path / "one", tmp_path / "two") == "another metrics.json"
    assert kill.difference(tmp_path / "one", tmp_path / "one") is None
    assert kill.difference(tmp_path / "one", tmp_path / "nowhere") == "not finished"


@pytest.mark.soak
def test_twenty_thousand_steps(tmp_path):
    result = long.soak(tmp_path, 20_000, 5)
    assert result["difference"] is None
    assert result["growth_bytes"] < 8 * 2**20


def test_the_others_end_when_one_of_three_is_killed(tmp_path):
    """They end with an error within a minute, and the run goes on from its last checkpoint."""
    sys.path.insert(0, str(kill.ROOT / "recipes"))
    from pretraining.data import embedded
    from pretraining.run import checkpoints

    tokens = embedded.prepare(tmp_path, vocab_size=512)
    config = kill.ROOT / "accelerate_configs" / "cpu_ddp.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "3"]
    output = tmp_path / "run"
    argv = [kill.SCRIPT, *kill.SMALL, "--use_cpu", "true", "--max_steps", "4000", "--save_steps", "10"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*launch, *argv, "--data_dir", tokens, "--output_dir", output], stdout=log, stderr=log, env=environment
        )
        deadline = time.monotonic() + 300
        while not list(output.glob("checkpoint-*/manifest.json")):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log.txt").read_text()[-3000:]
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        workers = [one for one in family if one.environ().get("RANK")]
        assert len(workers) == 3
        killed = time.monotonic()
        next(one for one in workers if one.environ()["RANK"] == "2").kill()
        assert process.wait(60) != 0
        _, alive = psutil.wait_procs(family, timeout=60 - (time.monotonic() - killed))
        assert not alive
    step = checkpoints.read(checkpoints.checkpoints(output)[-1]).step
    resumed = subprocess.run(
        [
            *(*launch, *argv[:-4], "--max_steps", str(step + 5), "--data_dir", tokens, "--output_dir", output),
            *("--resume_from_checkpoint", "true"),
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert json.loads((output / "metrics.json").read_text())["steps"] == step + 5
