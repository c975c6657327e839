"""The launch configs do what their names say, checked without GPUs through accelerate's own launcher.

tests/recipes launch those for the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "accelerate_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.y*ml"))
SECTIONS = {"fsdp_config": "fsdp_", "deepspeed_config": ""}  # with the prefix that accelerate puts before a key
LAUNCH_VARIABLES = ("ACCELERATE_", "FSDP_", "MASTER_", "OMP_NUM_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_")
LAUNCHERS = ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher", "tpu_launcher", "sagemaker_launcher")

# Distributed type, launcher, processes, machines, precision, whether on the CPU, GPUs.
EXPECTED = {
    "single_cpu": ("NO", "simple_launcher", 1, 1, "no", True, "all"),
    # MULTI_CPU would use simple_launcher, which starts one process without an MPI host file.
    "cpu_ddp": ("MULTI_GPU", "multi_gpu_launcher", 2, 1, "no", True, "all"),
    # gpu_ids=all would let Trainer use nn.DataParallel.
    "single_gpu": ("NO", "simple_launcher", 1, 1, "bf16", False, "0"),
    "ddp": ("MULTI_GPU", "multi_gpu_launcher", 8, 1, "bf16", False, "all"),
    "fsdp2": ("FSDP", "multi_gpu_launcher", 8, 1, "bf16", False, "all"),
    "zero1": ("DEEPSPEED", "deepspeed_launcher", 8, 1, "bf16", False, "all"),
    "zero2": ("DEEPSPEED", "deepspeed_launcher", 8, 1, "bf16", False, "all"),
    "zero3": ("DEEPSPEED", "deepspeed_launcher", 8, 1, "bf16", False, "all"),
    "zero2_offload": ("DEEPSPEED", "deepspeed_launcher", 8, 1, None, False, "all"),  # its JSON says bf16
    "multi_node": ("MULTI_GPU", "multi_gpu_launcher", 16, 2, "bf16", False, "all"),
}
ZERO = {"zero1": (1, "none"), "zero2": (2, "none"), "zero3": (3, "none"), "zero2_offload": (2, "cpu")}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clear settings of an outer launch, and start in a folder that has nothing of the repository."""
    for name in list(os.environ):
        if name.startswith(LAUNCH_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def config_path(name: str) -> str:
    return str(FOLDER / f"{name}.yaml")


def options_of(name: str) -> dict[str, Any]:
    """Return the keys of a config, those of sections spelled as options of `accelerate launch`."""
    content = yaml.safe_load(Path(config_path(name)).read_text(encoding="utf-8"))
    options = {key: value for key, value in content.items() if not isinstance(value, dict)}
    for section in SECTIONS.keys() & content.keys():
        prefix = SECTIONS[section]
        options |= {prefix + key.removeprefix(prefix): value for key, value in content[section].items()}
    return options


def resolve(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> tuple[str, Namespace]:
    """Return the function that `accelerate launch` would call, with its settings."""
    calls: list[tuple[str, Namespace]] = []
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launch, launcher, lambda args, launcher=launcher: calls.append((launcher, args)))
    parser = launch.launch_command_parser()
    launch.launch_command(parser.parse_args(["--config_file", config_path(name), *options, "x.py"]))
    (call,) = calls
    return call


@pytest.mark.parametrize("name", NAMES)
def test_launch_configs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """accelerate silently drops unknown nested keys, and top-level keys whose option has a default."""
    assert sorted(EXPECTED) == NAMES
    config = load_config_from_file(config_path(name))  # refuses unknown top-level keys
    launcher, args = resolve(monkeypatch, name)
    processes = (args.num_processes, args.num_machines)
    where = (config.mixed_precision, args.use_cpu, args.gpu_ids)
    assert (config.distributed_type, launcher, *processes, *where) == EXPECTED[name]
    assert args.mixed_precision == (config.mixed_precision or "no")
    options = options_of(name)
    handled_apart = {"compute_environment": "LOCAL_MACHINE", "distributed_type": config.distributed_type}
    assert {key: getattr(args, key) for key in options.keys() - handled_apart.keys()} | handled_apart == options
    lines = Path(config_path(name)).read_text(encoding="utf-8").splitlines()
    header = "\n".join(lines[: lines.index("compute_environment: LOCAL_MACHINE")])
    assert f"accelerate launch --config_file accelerate_configs/{name}.yaml" in header
    assert max(map(len, lines)) <= 120


def test_offload_json() -> None:
    """The JSON decides with offload: each value here keeps MARS in place or leaves a setting to Trainer."""
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert json.loads(options_of("zero2_offload")["deepspeed_config_file"]) == {
        **dict.fromkeys((*batches, "gradient_clipping"), "auto"),
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }


def test_multi_node(monkeypatch: pytest.MonkeyPatch) -> None:
    _, args = resolve(monkeypatch, "multi_node", "--machine_rank", "1", "--main_process_ip", "10.0.0.1")
    prepare_multi_gpu_env(args)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert args.rdzv_endpoint == "10.0.0.1:29500"


PLUGINS = """
import json, os, sys
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from deepspeed.runtime.config import DeepSpeedConfig

environments = json.load(sys.stdin)
os.environ.update(environments.pop("fsdp2"))
p = FullyShardedDataParallelPlugin()
policy, reshard = p.auto_wrap_policy.__name__, p.reshard_after_forward
print(json.dumps({"version": p.fsdp_version, "reshard": reshard, "policy": policy, "state": p.state_dict_type.name,
    "wrap": p.transformer_cls_names_to_wrap, "offload": type(p.cpu_offload).__name__,
    "efficient_loading": p.cpu_ram_efficient_loading, "checkpointing": p.activation_checkpointing}))
sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
for environment in environments.values():
    os.environ.clear()
    os.environ.update(environment)
    p = DeepSpeedPlugin()
    p.set_mixed_precision(os.environ["ACCELERATE_MIXED_PRECISION"])  # as TrainingArguments does
    c = DeepSpeedConfig({**p.deepspeed_config, **sizes, "gradient_clipping": 1.0})
    device = c.zero_config.offload_optimizer.device
    print(json.dumps({"stage": int(c.zero_optimization_stage), "device": getattr(device, "value", device),
        "bf16": c.bfloat16_config.enabled, "force_ds_cpu": c.zero_force_ds_cpu_optimizer}))
"""


@pytest.mark.slow
def test_engines_accept_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed's own reading of the config needs deepspeed")
    environments = {}
    for name in ("fsdp2", *ZERO):
        launcher, args = resolve(monkeypatch, name, "--main_process_port", "0")
        is_zero = launcher == "deepspeed_launcher"
        environments[name] = prepare_deepspeed_cmd_env(args)[1] if is_zero else prepare_multi_gpu_env(args)
        environments[name] |= {"DS_ACCELERATOR": "cpu"} if is_zero else {}
    assert environments["fsdp2"]["ACCELERATE_USE_FSDP"] == "true"
    assert environments["fsdp2"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    done = subprocess.run(
        [sys.executable, "-c", PLUGINS],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        input=json.dumps(environments),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    fsdp2, *zero = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert fsdp2 == {
        "version": 2,
        "reshard": True,
        "policy": "transformer_auto_wrap_policy",
        "state": "SHARDED_STATE_DICT",
        "wrap": ["GPT2Block"],
        "offload": "OffloadPolicy",  # the policy that keeps everything on the GPU
        "efficient_loading": False,
        "checkpointing": False,
    }
    # force_ds_cpu is true by default, and harmless without offload.
    assert zero == [
        {"stage": stage, "device": device, "bf16": True, "force_ds_cpu": device == "none"}
        for stage, device in ZERO.values()
    ]
