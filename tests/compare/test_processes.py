"""Runs in processes of their own: weights are those of the script alone, and kills lose nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from compare.scripts import compare, forked, run_alone, script, wait_for  # noqa: F401

from mars_hf.compare import runs
from mars_hf.compare.work import Work

pytestmark = pytest.mark.slow

SAVING = """
from transformers import HfArgumentParser
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
net = Net()
Trainer(net, args, train_dataset=data(64, 1), eval_dataset=data(32, 2)).train()
torch.save(net.state_dict(), os.environ["WEIGHTS"])
"""
OWN = ["--max_steps", "6", "--learning_rate", "1e-2", "--weight_decay", "0.1", "--use_cpu", "true"]


@pytest.mark.parametrize(
    ("arm", "module", "flags"),
    [
        ("adamw_torch", [], ["--optim", "adamw_torch"]),
        ("sgd", [], ["--optim", "sgd"]),
        ("mars_adamw", ["mars_hf", "run"], ["--optim", "mars_adamw", "--adam_beta1", "0.9"]),
        ("mars_m:is_approx=false", ["mars_hf", "run"], ["--optim", "mars_m"]),
    ],
)
def test_weights_are_those_of_the_script_alone(tmp_path, capsys, monkeypatch, forked, arm, module, flags):  # noqa: F811
    """Bit for bit: recording, evaluating and watching for NaN change nothing; MARS clips inside its step, as alone."""
    path = script(tmp_path, SAVING)
    monkeypatch.setenv("WEIGHTS", str(tmp_path / "compared.pt"))
    words = ["--optim", arm, "script", "--no_search", "--seeds", "1", "--max_runs", "1"]
    answer = compare(capsys, path, *words, "--", *OWN)
    assert answer.code == 0, answer.error
    (result,) = answer.results()
    order = result["order"]["arm"]
    if order.get("optim_args"):
        flags = [*flags, "--optim_args", order["optim_args"]]
    if module and "--adam_beta1" in flags:
        flags = [*flags[:2], *flags[4:]]
    monkeypatch.setenv("WEIGHTS", str(tmp_path / "alone.pt"))
    seeds = ["--seed", "1", "--data_seed", "1", "--report_to", "none", "--output_dir", str(tmp_path / "alone")]
    run_alone(module, path, [*OWN, *flags, *seeds], tmp_path / "alone.txt")
    compared, alone = torch.load(tmp_path / "compared.pt"), torch.load(tmp_path / "alone.pt")
    assert all(torch.equal(compared[name], alone[name]) for name in alone)
    assert result["training"]["trainer"] == ("MarsTrainer" if module else "Trainer")


ARGUMENTS = """
import dataclasses, json
from transformers import HfArgumentParser, Seq2SeqTrainingArguments
from trl import SFTConfig
from sentence_transformers import SentenceTransformerTrainingArguments


@dataclasses.dataclass
class Mine(TrainingArguments):
    learning_rate: float = 0.3
    optim: str = "adafactor"


yaml = os.path.join(os.path.dirname(os.path.abspath(__file__)), "args.yaml")
with open(yaml, "w") as file:
    file.write("output_dir: out\\noptim: sgd\\noptim_args: a=1\\nuse_cpu: true\\nseed: 5\\nsave_strategy: steps\\n")
kinds = [TrainingArguments, Mine, Seq2SeqTrainingArguments, SFTConfig, SentenceTransformerTrainingArguments]
usual = dict(output_dir="out", optim="rmsprop", optim_args="alpha=0.9", use_cpu=True, seed=3, bf16=False)
made = [kind(**usual) for kind in kinds]
made += [dataclasses.replace(made[0], max_steps=3), Mine("out", use_cpu=True)]
made += HfArgumentParser(TrainingArguments).parse_yaml_file(yaml)
names = ("optim", "optim_args", "seed", "data_seed", "learning_rate", "save_strategy", "max_steps")
with open("found.json", "w") as file:
    json.dump([{name: str(getattr(args, name)) for name in names} for args in made], file)
later = arguments()
later.optim, later.learning_rate, later.seed = "sgd", 0.7, 8
Trainer(Net(), later, train_dataset=data(64, 1)).train()
"""


def test_all_kinds_of_arguments_are_reached(tmp_path, capsys, monkeypatch, forked):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    words = ["--optim", "mars_m:learning_rate=0.02", "sgd", "--no_search", "--seeds", "1", "--max_runs", "1"]
    answer = compare(capsys, script(tmp_path, ARGUMENTS), *words, "--set", "max_steps=4")
    assert answer.code == 0, answer.error
    expected = {
        "optim": "OptimizerNames.MARS_M",
        "optim_args": "None",
        "seed": "1",
        "data_seed": "1",
        "learning_rate": "0.02",
        "save_strategy": "SaveStrategy.NO",
        "max_steps": "4",
    }
    for row in json.loads((tmp_path / "found.json").read_text()):
        assert {name: value.upper() for name, value in row.items()} == {k: v.upper() for k, v in expected.items()}
    row = next(answer.results())["training"]
    assert row["optimizer"] == "Mars" and row["steps"] == 4 and row["arguments"]["learning_rate"] == 0.02
    for what, now in (("optim='sgd'", "'mars_m'"), ("seed=8", "1")):
        assert f"the script set {what} in its TrainingArguments afterwards; it was set to {now}" in answer.page


LAUNCHER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(600)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


def test_workers_end_with_their_launcher(tmp_path, monkeypatch):
    """Also in a session of their own, as torchrun's have, and where they ignore SIGTERM."""
    monkeypatch.setattr(runs, "_GRACE", 0.5)
    log = tmp_path / "log.txt"
    launcher = runs.spawn([sys.executable, "-c", LAUNCHER, STUBBORN], log, dict(os.environ))
    wait_for(lambda: log.read_text().endswith("\n"))
    worker = psutil.Process(int(log.read_text()))
    runs.stop([launcher])
    assert launcher.poll() is not None
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)  # which nobody may collect


WORKER = """
import os, pathlib, time
import torch.distributed as dist
here = pathlib.Path(os.environ["HERE"])
dist.init_process_group("gloo")
(here / f"{os.environ['MASTER_PORT']}-{dist.get_rank()}-of-{dist.get_world_size()}").touch()
end = time.monotonic() + 240
while len(list(here.glob("*-of-2"))) < 4 and time.monotonic() < end:  # both launches run at once
    time.sleep(0.1)
dist.barrier()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "launcher",
    [
        "torch.distributed.run --nproc_per_node 2 -m",
        "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no -m",
    ],
    ids=["torchrun", "accelerate"],
)
def test_simultaneous_launches_have_ports_of_their_own(tmp_path, launcher):
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "here").mkdir()
    work, launches = Work(None, jobs=2), []
    own = {**os.environ, "PYTHONPATH": str(tmp_path), "HERE": str(tmp_path / "here")}
    for slot in range(2):
        words = [sys.executable, "-m", *launcher.split(), "worker"]
        launches.append(runs.spawn(words, tmp_path / f"log{slot}.txt", {**own, **work.environment(slot)}))
    try:
        codes = [launch.wait(280) for launch in launches]
    finally:
        runs.stop(launches)
    assert codes == [0, 0], (tmp_path / "log0.txt").read_text() + (tmp_path / "log1.txt").read_text()
    found = [path.name.split("-")[:2] for path in (tmp_path / "here").iterdir()]
    assert sorted(rank for _, rank in found) == ["0", "0", "1", "1"]
    assert len({port for port, _ in found} - {"29500"}) == 2  # the default, which both may find free


SLOW_STEPS = """
import time
from transformers import TrainerCallback


class Wait(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(0.1)
        while state.global_step >= 20 and os.path.exists(os.environ["STEPS"] + ".hold"):
            time.sleep(0.1)
        with open(os.environ["STEPS"], "a") as file:
            file.write(f"{os.getpid()} {state.global_step}\\n")


args = arguments(max_steps=40)
Trainer(Net(), args, train_dataset=data(64, 1), eval_dataset=data(32, 2), callbacks=[Wait()]).train()
"""


def steps_of(path: Path) -> list[tuple[int, int]]:
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def test_signals_end_the_runs_and_nothing_is_lost(tmp_path, monkeypatch):
    """SIGTERM ends the run with the command; SIGKILL leaves it training, and its result is taken."""
    path, steps = script(tmp_path, SLOW_STEPS), tmp_path / "steps"
    environment = {**os.environ, "STEPS": str(steps), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "mars_hf", "compare", str(path), "--output_dir", str(tmp_path / "compare")]
    words += ["--optim", "adamw_torch", "sgd", "--no_search", "--seeds", "1", "--max_runs", "1"]

    def start(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*words, *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    first = start()
    wait_for(lambda: len(steps_of(steps)) >= 5, 240)
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 130 and b"the same command goes on where it was" in out
    ((run, _), *_, (_, stopped_at)) = steps_of(steps)
    assert stopped_at < 20 and not Path(f"/proc/{run}").exists()
    hold = tmp_path / "steps.hold"
    hold.touch()
    second = start()
    wait_for(lambda: steps_of(steps)[-1][1] >= 19 or second.poll() is not None, 240)
    second.kill()
    second.communicate()
    assert next(step for pid, step in steps_of(steps) if pid != run) == 1  # it began again
    third = start("--max_runs", "0")
    seen = b""
    while b"still trains: waiting for it" not in seen:
        seen += os.read(third.stdout.fileno(), 4096)
    hold.unlink()
    third.communicate(timeout=240)
    (path,) = tmp_path.glob("compare/runs/*/*/result.json")
    result = json.loads(path.read_text())
    assert third.returncode == 0 and len({pid for pid, _ in steps_of(steps)}) == 2
    assert result["state"] == "complete" and result["training"]["steps"] == 40
    assert [row["step"] for row in result["training"]["evaluations"]] == [8, 16, 24, 32, 40]


@pytest.mark.multiprocess
def test_two_ranks_leave_one_result(tmp_path, capsys):
    """By torchrun, whose workers share the order: rank 0 writes, all of them evaluate at the end."""
    text = "Trainer(Net(), arguments(), train_dataset=data(64, 1), eval_dataset=data(32, 2)).train()\n"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2 -m"
    words = ["--optim", "mars_m", "adamw_torch", "--no_search", "--seeds", "1", "--max_runs", "1"]
    words += ["--set", "eval_strategy=no", "--launcher", torchrun]
    answer = compare(capsys, script(tmp_path, text), *words)
    assert answer.code == 0, answer.error
    row = next(answer.results())["training"]
    assert row["samples_per_step"] == 16 and row["ended"] and [one["step"] for one in row["evaluations"]] == [6]


def test_dry_run_is_for_a_cluster(tmp_path, capsys):
    """Commands that run anywhere: their results are taken from the folders, and the next wave follows from them."""
    path = script(tmp_path, "Trainer(Net(), arguments(), train_dataset=data(64, 1)).train()\n")
    words = ["--optim", "adamw_torch", "mars_m", "--no_search", "--seeds", "1", "--dry_run"]
    wave = compare(capsys, path, *words)
    (line,) = wave.out.splitlines()
    assert wave.code == 0 and not any(wave.results())
    subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    (line,) = compare(capsys, path, *words).out.splitlines()
    assert "mars_m" in line and "MARS_HF_COMPARE=" in line
    assert len(list(wave.results())) == 1
