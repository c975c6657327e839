"""The launch configs do what their names say, checked without GPUs through accelerate's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "accelerate_configs"

SECTIONS = {"fsdp_config": "fsdp_", "deepspeed_config": ""}  # with the prefix accelerate puts before a key
FSDP1_KEYS = {
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
}


@dataclass(frozen=True)
class Expected:
    """The launch that a config must cause."""

    distributed_type: str
    launcher: str
    processes: int
    precision: str | None = "bf16"
    machines: int = 1
    use_cpu: bool = False
    gpu_ids: str = "all"


EXPECTED = {
    "single_cpu": Expected("NO", "simple_launcher", 1, precision="no", use_cpu=True),
    # MULTI_CPU would use simple_launcher, which starts one process without an MPI host file.
    "cpu_ddp": Expected("MULTI_GPU", "multi_gpu_launcher", 2, precision="no", use_cpu=True),
    # gpu_ids=all would let Trainer use nn.DataParallel.
    "single_gpu": Expected("NO", "simple_launcher", 1, gpu_ids="0"),
    "ddp": Expected("MULTI_GPU", "multi_gpu_launcher", 8),
    "fsdp2": Expected("FSDP", "multi_gpu_launcher", 8),
    "zero1": Expected("DEEPSPEED", "deepspeed_launcher", 8),
    "zero2": Expected("DEEPSPEED", "deepspeed_launcher", 8),
    "zero3": Expected("DEEPSPEED", "deepspeed_launcher", 8),
    "zero2_offload": Expected("DEEPSPEED", "deepspeed_launcher", 8, precision=None),  # its JSON says bf16
    "multi_node": Expected("MULTI_GPU", "multi_gpu_launcher", 16, machines=2),
}
ZERO = {"zero1": (1, "none"), "zero2": (2, "none"), "zero3": (3, "none"), "zero2_offload": (2, "cpu")}
FILLED_BY_TRAINER = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

LAUNCH_VARIABLES = ("ACCELERATE_", "FSDP_", "MASTER_", "OMP_NUM_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_")
LAUNCHERS = ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher", "tpu_launcher", "sagemaker_launcher")
FOUND = sorted(path.stem for path in FOLDER.glob("*.y*ml"))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clear settings of an outer launch, and start in a folder that has nothing of the repository."""
    for name in list(os.environ):
        if name.startswith(LAUNCH_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def config_path(name: str) -> str:
    return str(FOLDER / f"{name}.yaml")


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load(Path(config_path(name)).read_text(encoding="utf-8"))


def nested(name: str) -> dict[str, Any]:
    """Return the sections' keys, spelled as options of `accelerate launch`."""
    keys = {}
    for section, values in content(name).items():
        if isinstance(values, dict):
            for key, value in values.items():
                prefix = SECTIONS[section]
                keys[key if key.startswith(prefix) else prefix + key] = value
    return keys


def resolve(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> tuple[str, Namespace]:
    """Return the function that `accelerate launch` would call, with its settings."""
    calls: list[tuple[str, Namespace]] = []
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launch, launcher, lambda args, launcher=launcher: calls.append((launcher, args)))
    parser = launch.launch_command_parser()
    launch.launch_command(parser.parse_args(["--config_file", config_path(name), *options, "x.py"]))
    (call,) = calls
    return call


def launch_environment(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> dict[str, str]:
    """Return the environment that a launch gives its processes."""
    launcher, args = resolve(monkeypatch, name, "--main_process_port", "0", *options)
    if launcher == "deepspeed_launcher":
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args) if launcher == "multi_gpu_launcher" else prepare_simple_launcher_cmd_env(args)[1]


def run_json(command: list[str], environment: dict[str, str]) -> list[Any]:
    """Run and return the output as JSON lines."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_set_of_configs() -> None:
    assert sorted(EXPECTED) == FOUND


@pytest.mark.parametrize("name", FOUND)
def test_every_key_is_known_and_arrives(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """accelerate silently drops unknown nested keys, and top-level keys whose option has a default."""
    load_config_from_file(config_path(name))  # refuses unknown top-level keys
    known = {action.dest for action in launch.launch_command_parser()._actions}
    assert set(nested(name)) <= known

    _, args = resolve(monkeypatch, name)
    plain = {key: value for key, value in content(name).items() if not isinstance(value, dict)}
    handled_apart = {"compute_environment", "distributed_type"}
    for key, value in {**plain, **nested(name)}.items():
        if key not in handled_apart:
            assert getattr(args, key) == value, key


@pytest.mark.parametrize("name", FOUND)
def test_what_is_started(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = EXPECTED[name]
    config = load_config_from_file(config_path(name))
    assert config.distributed_type == expected.distributed_type
    assert config.mixed_precision == expected.precision

    launcher, args = resolve(monkeypatch, name)
    assert launcher == expected.launcher
    assert (args.num_processes, args.num_machines) == (expected.processes, expected.machines)
    assert (args.use_cpu, args.gpu_ids) == (expected.use_cpu, expected.gpu_ids)
    assert args.mixed_precision == (expected.precision or "no")


@pytest.mark.parametrize("name", FOUND)
def test_header_shows_its_own_launch_line(name: str) -> None:
    path = f"accelerate_configs/{name}.yaml"
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    header = [line for line in lines[: lines.index("compute_environment: LOCAL_MACHINE")] if line.startswith("#")]
    assert f"accelerate launch --config_file {path}" in "\n".join(header)
    assert max(map(len, lines)) <= 120


@pytest.mark.slow
def test_fsdp2_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = launch_environment(monkeypatch, "fsdp2")
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    code = """
import json
from accelerate.utils import FullyShardedDataParallelPlugin
p = FullyShardedDataParallelPlugin()
policy, reshard = p.auto_wrap_policy.__name__, p.reshard_after_forward
print(json.dumps({"version": p.fsdp_version, "reshard": reshard, "policy": policy, "state": p.state_dict_type.name,
    "wrap": p.transformer_cls_names_to_wrap, "offload": type(p.cpu_offload).__name__,
    "efficient_loading": p.cpu_ram_efficient_loading, "checkpointing": p.activation_checkpointing}))
"""
    (plugin,) = run_json([sys.executable, "-c", code], environment)
    assert plugin == {
        "version": 2,
        "reshard": True,
        "policy": "transformer_auto_wrap_policy",
        "state": "SHARDED_STATE_DICT",
        "wrap": ["GPT2Block"],
        "offload": "OffloadPolicy",  # the policy that keeps everything on the GPU
        "efficient_loading": False,
        "checkpointing": False,
    }


PLUGIN_JSON = """
import json
import os
from accelerate.utils import DeepSpeedPlugin
p = DeepSpeedPlugin()
p.set_mixed_precision(os.environ["ACCELERATE_MIXED_PRECISION"])  # as TrainingArguments does
print(json.dumps({"stage": p.zero_stage, "offload": [p.offload_optimizer_device, p.offload_param_device],
    "save16": p.zero3_save_16bit_model, "init": p.zero3_init_flag, "config": p.deepspeed_config}))
"""


def test_offload_json() -> None:
    """The JSON decides with offload: each value here keeps MARS in place or leaves a setting to Trainer."""
    assert json.loads(nested("zero2_offload")["deepspeed_config_file"]) == {
        **dict.fromkeys(FILLED_BY_TRAINER, "auto"),
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_deepspeed_accepts_the_config(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed's own reading of the config needs deepspeed")
    environment = {**launch_environment(monkeypatch, name), "DS_ACCELERATOR": "cpu"}
    code = (
        PLUGIN_JSON
        + """
from deepspeed.runtime.config import DeepSpeedConfig
sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
c = DeepSpeedConfig({**p.deepspeed_config, **sizes, "gradient_clipping": 1.0})
device = c.zero_config.offload_optimizer.device
print(json.dumps({"stage": int(c.zero_optimization_stage), "bf16": c.bfloat16_config.enabled,
    "device": getattr(device, "value", device), "force_ds_cpu": c.zero_force_ds_cpu_optimizer}))
"""
    )
    _, config = run_json([sys.executable, "-c", code], environment)
    stage, offload = ZERO[name]
    assert (config["stage"], config["device"], config["bf16"]) == (stage, offload, True)
    assert config["force_ds_cpu"] is (offload == "none")  # true is DeepSpeed's default, harmless without offload


def test_multi_node(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--machine_rank", "1", "--main_process_ip", "10.0.0.1")
    launcher, args = resolve(monkeypatch, "multi_node", *options)
    prepare_multi_gpu_env(args)
    assert launcher == "multi_gpu_launcher"
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert args.rdzv_endpoint == "10.0.0.1:29500"


PROBE = """
import json
import torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), reduction="sum")
seen = {"processes": accelerator.num_processes, "rank": accelerator.process_index, "sum": total.item(),
        "type": accelerator.distributed_type.value, "backend": accelerator.state.backend,
        "device": accelerator.device.type, "precision": accelerator.mixed_precision}
print(json.dumps(seen) + "\\n", end="", flush=True)
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "processes", "distributed_type", "backend"),
    [("single_cpu", 1, "NO", None), ("cpu_ddp", 2, "MULTI_CPU", "gloo")],
)
def test_launch_on_cpu(tmp_path: Path, name: str, processes: int, distributed_type: str, backend: str | None) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE, encoding="utf-8")
    environment = dict(os.environ)
    if name == "cpu_ddp":
        environment["ACCELERATE_USE_CPU"] = "true"  # as in the file's header
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_path(name)]
    seen = run_json([*command, "--main_process_port", "0", str(script)], environment)
    assert sorted(line.pop("rank") for line in seen) == list(range(processes))
    common = {"type": distributed_type, "backend": backend, "device": "cpu", "precision": "no"}
    assert seen == [{"processes": processes, "sum": processes * (processes + 1) / 2, **common}] * processes
