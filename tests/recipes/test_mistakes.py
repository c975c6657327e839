"""What a user can get wrong on a command line, in a config or in prepared data: one line, exit code 2."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import compare_optimizers
import prepare_data
import pretrain_gpt2
import pytest
from pretraining.run import mistakes
from pretraining.run.mistakes import Mistake, told

from mars_hf.__main__ import main as mars_main

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "pretrain": (pretrain_gpt2.main, "pretrain_gpt2.py: "),
    "compare": (compare_optimizers.main, "compare_optimizers.py: "),
    "prepare": (prepare_data.main, "prepare_data.py: "),
    "mars_hf": (mars_main, "python -m mars_hf: "),
}


def of(program: str, *rows: tuple[str, ...]) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """Return cases: a command's words, split at blanks (`_` for an empty word), and what its line must contain."""
    return [(program, ["" if word == "_" else word for word in row[0].split()], row[1:]) for row in rows]


# Every number with its range. The flag, bad values, a part of the accepted range.
NUMBERS = [
    ("n_layer", "-1 0 nan yes 1.5", "a whole number from 1 on"),
    ("n_head", "0 -4 x", "a whole number from 1 on"),
    ("n_embd", "0 1e3", "a whole number from 1 on"),
    ("block_size", "1 0 -128", "a whole number from 2 on"),
    ("vocab_size", "0 -1", "a whole number from 1 on"),
    ("embedded_vocab_size", "256 65537 0 many", "a whole number from 257 to 65,536"),
    ("dropout", "1 -0.1 nan yes", "a number from 0 to below 1"),
    ("max_eval_blocks", "0 -1 all", "a whole number from 1 on"),
    ("max_steps", "0 -5 1e3 nan 99999999999", "a whole number from 1 on"),
    ("num_train_epochs", "0 -1 inf", "a finite number above 0"),
    ("learning_rate", "-1e-3 nan inf -inf yes 1,5", "a finite number from 0 on"),
    ("weight_decay", "-0.1 nan no", "a finite number from 0 on"),
    ("max_grad_norm", "nan -1 none", "a finite number from 0 on"),
    ("warmup_steps", "-1 1.5 nan", "a whole number from 0 on or a share"),
    ("per_device_train_batch_size", "0 -1 2.5", "a whole number from 1 on"),
    ("per_device_eval_batch_size", "0 -8", "a whole number from 1 on"),
    ("gradient_accumulation_steps", "0 -1", "a whole number from 1 on"),
    ("eval_steps", "0 -50 1.5 nan", "a whole number from 1 on or a share"),
    ("logging_steps", "0 -1 2.5", "a whole number from 1 on or a share"),
    ("save_steps", "0 -1 inf", "a whole number from 1 on or a share"),
    ("save_total_limit", "0 -1", "a whole number from 1 on"),
    ("seed", "-1 4294967296 1.5 x", "a whole number from 0 to 2**32 - 1"),
    ("data_seed", "-1", "a whole number from 0 to 2**32 - 1"),
    ("cpu_threads", "0 -2", "a whole number from 1 on"),
    ("tokens_per_step", "-1 1.5 all", "a whole number from 0 on"),
    ("sample_tokens", "-1 few", "a whole number from 0 on"),
    ("dataloader_num_workers", "-1", "a whole number from 0 on"),
    ("dataloader_prefetch_factor", "0", "a whole number from 1 on"),
    ("label_smoothing_factor", "1.5 -1", "a number from 0 to below 1"),
    ("ddp_timeout", "0", "a whole number from 1 on"),
    ("gamma", "-1 nan yes", "a finite number from 0 on"),
    ("beta1", "1 -0.1 nan", "a number from 0 to below 1"),
    ("beta2_1d", "1.5", "a number from 0 to below 1"),
    ("eps", "-1e-8 nan", "a finite number from 0 on"),
    ("lr_1d", "-1 inf", "a finite number from 0 on"),
    ("weight_decay_1d", "-1", "a finite number from 0 on"),
    ("clip_threshold", "-1 nan", "a finite number from 0 on"),
    ("ns_steps", "0 -1 2.5", "a whole number from 1 on"),
]
RANGES = [
    ("pretrain", [f"--{name}", value], (f"--{name}: {value!r} is not ", accepted))
    for name, values, accepted in NUMBERS
    for value in values.split()
]

FLAGS = of(
    "pretrain",
    # ignored flags
    ("--optim adafactor", "--optim would be ignored", "--optimizer"),
    ("--optim nothing", "--optim would be ignored", "--optimizer"),
    ("--optim_args gamma=0.1", "--optim_args would be ignored", "--gamma 0.025"),
    ("--adam_beta1 0.8", "--adam_beta1 would be ignored", "use --beta1"),
    ("--adam_beta2 0.8", "use --beta2"),
    ("--adam-epsilon 1e-6", "use --eps"),
    ("--do_train", "would be ignored", "leave it out"),
    ("--do_predict true", "would be ignored"),
    ("--label_names x", "would be ignored"),
    ("--auto_find_batch_size true", "--per_device_train_batch_size"),
    ("--parallelism_config x", "only Python code can make its value"),
    ("--save_steps 5", "--save_steps 5 would be ignored", "save_strategy no", "--save_strategy steps"),
    ("--save_total_limit 2", "would be ignored", "--save_strategy steps"),
    ("--eval_strategy no --eval_steps 5", "--eval_steps 5 would be ignored", "--eval_strategy no"),
    ("--hub_model_id me/x", "would be ignored", "--push_to_hub true"),
    ("--num_train_epochs 2", "--num_train_epochs 2 would be ignored", "max_steps 500", "--max_steps -1"),
    ("--max_steps -1", "--num_train_epochs"),
    ("--max_steps 20 --warmup_steps 30", "--warmup_steps 30 is more than --max_steps 20"),
    # unknown flags and words
    ("--n_layers 3", "unknown flag --n_layers", "did you mean --n_layer?", "--help"),
    ("--learningrate 3", "unknown flag --learningrate", "--learning_rate"),
    ("--xyz", "unknown flag --xyz", "--help"),
    ("mars_adamw", "'mars_adamw' belongs to no flag"),
    ("--n_layer", "--n_layer has no value"),
    ("--config", "--config has no value"),
    ("--output_dir _", "--output_dir: is empty"),
    ("--data_dir _", "--data_dir: is empty"),
    # choices
    ("--optimizer sgd", "'sgd' is unknown; accepted: mars_adamw, mars_lion, mars_shampoo, mars_m, adamw"),
    ("--optimizer _", "'' is unknown", "mars_adamw"),
    ("--config gpt2-tiny", "no such file", "gpt2-small"),
    ("--config _", "no such file", "embedded"),
    ("--bias maybe", "'maybe' is neither true nor false"),
    ("--is_approx 2", "'2' is neither true nor false"),
    ("--use_cpu perhaps", "'perhaps' is neither true nor false"),
    ("--attn_implementation flash", "'flash' is unknown; accepted: 'sdpa', 'eager'"),
    ("--activation_function swoosh", "'swoosh' is unknown", "'gelu_new'"),
    ("--lr_scheduler_type cosin", "'cosin'", "cosine"),
    ("--save_strategy often", "'often'", "steps"),
    ("--log_level loud", "'loud'", "warning"),
    ("--report_to loki", "unknown loki; accepted: none, all", "tensorboard"),
    ("--report_to wandb", "wandb is not installed", "--report_to none"),
    ("--torch_compile_backend fast", "--torch_compile_backend fast is unknown", "inductor"),
    ("--rounding up", "'up' is not valid; accepted: 'nearest'"),
    ("--state_dtype int8", "'int8' is not valid", "'bfloat16'"),
    ("--ns_coefficients cubic", "'cubic' is not valid", "'quintic'"),
    ("--embedded_corpus stdlib --data_dir data", "--embedded_corpus stdlib would be ignored, because of --data_dir"),
    ("--embedded_corpus c++", "'stdlib', 'torch-headers'"),
    ("--optimizer mars_m --split_fused yes", "'yes' is unknown; accepted: 'auto', 'none'"),
    # settings that contradict each other
    ("--n_head 3", "n_embd 128 is not a multiple of --n_head 3", "2, 4"),
    ("--n_embd 130", "--n_embd 130 is not a multiple of", "n_head 4"),
    ("--gamma 0.1 --optimizer adamw", "--gamma 0.1", "adamw has no gamma", "it takes beta1, beta2, eps"),
    ("--is_approx false --optimizer adamw", "adamw has no is_approx"),
    ("--optimizer mars_adamw --ns_steps 3", "mars_adamw has no ns_steps, which mars_shampoo and mars_m have"),
    (
        '--param_rules [["*",{"gamma":0.1}]] --optimizer adamw',
        "adamw has no gamma of its own",
        "lr, role, weight_decay",
    ),
    (
        '--param_rules [["*.nothing",{"lr":1}]]',
        "--param_rules",
        "'*.nothing' matches no parameter",
        "transformer.",
    ),
    ("--param_rules *.mlp.*;lr", "--param_rules: '*.mlp.*;lr' cannot be read", "a list in JSON"),
    ("--param_rules nowhere.yaml", "--param_rules: 'nowhere.yaml' cannot be read"),
    ("--fp16 true --bf16 true", "fp16 and bf16"),
    ("--fp16 true", "needs a GPU"),
    ("--tf32 true", "--tf32 false"),
    ("--lr_scheduler_type linear", "unknown min_lr_rate; linear takes no settings", "--lr_scheduler_kwargs '{"),
    ("--lr_scheduler_kwargs {}", "min_lr or min_lr_rate", "cosine_with_min_lr takes"),
    ("--lr_scheduler_kwargs {a", "is not a JSON object"),
    ('--lr_scheduler_kwargs {"min_lr_rate":NaN}', "not a finite number"),
    ('--lr_scheduler_kwargs {"min_rate":0.1}', "unknown min_rate (did you mean min_lr_rate"),
    ("--deepspeed nofile.json", "'nofile.json' is no file"),
    ("--fsdp_config nofile.json", "'nofile.json' is no file"),
    ("--load_best_model_at_end true", "load_best_model_at_end"),
    # folders
    ("--data_dir nowhere", "nowhere: no such folder", "prepare_data.py"),
    ("--data_dir folder", "folder: no meta.json in it", "prepare_data.py"),
    ("--output_dir file.txt", "file.txt is a file"),
    ("--output_dir file.txt/run", "file.txt is a file"),
)

CONFIGS = [  # text of the config, parts of the line
    ("n_layers: 3", "c.yaml, line 1: unknown n_layers", "did you mean n_layer"),
    ("n_layer: 3\nn_layer: 4", "c.yaml, line 2: n_layer is there twice, first in line 1"),
    ("n_layer: 3\n\nlearning_rate: yes", "c.yaml, line 3: learning_rate: 'yes' is not a finite number"),
    ("learning_rate: .nan", "line 1: learning_rate: '.nan' is not a finite number"),
    ("n_layer: 2.5", "line 1: n_layer: '2.5' is not a whole number"),
    ("n_layer: true", "line 1: n_layer: 'true' is not a whole number"),
    ("n_layer: -1", "line 1: n_layer: '-1' is not a whole number from 1 on"),
    ("n_layer: [2]", "line 1: n_layer is a list, not a whole number"),
    ("n_layer: {a: 2}", "line 1: n_layer is a mapping, not a whole number"),
    ("n_layer:", "line 1: n_layer has no value"),
    ("bias: 7", "line 1: bias: '7' is neither true nor false"),
    ("optimizer: sgd", "line 1: optimizer 'sgd' is unknown"),
    ("optimizer: [adamw]", "line 1: optimizer ['adamw'] is unknown"),
    ("optim: adafactor", "line 1: optim would be ignored", "--optimizer"),
    ("save_strategy: often", "line 1: save_strategy: 'often' is unknown; accepted: no, steps"),
    ("lr_scheduler_kwargs: {min_lr: .inf}", "line 1: lr_scheduler_kwargs: min_lr: inf is not a finite number"),
    ("param_rules: {a: 1}", "line 1: param_rules: ", "is no list of rules"),
    ("param_rules:\n- {pattern: a, gama: 1}", "line 1: param_rules: ", "'a': unknown 'gama'"),
    ("param_rules:\n- {pattern: '*.a', lr: 1}", "line 1: param_rules", "'*.a' matches no parameter", "transformer."),
    ("optimizers: 3", "line 1: optimizers is not a section"),
    ("optimizers:\n  sgd: {}", "line 2: optimizers: unknown sgd", "accepted: mars_adamw"),
    ("optimizers:\n  mars_adamw: 3", "line 2: optimizers: mars_adamw is not a section"),
    ("optimizers:\n  mars_adamw:\n    gama: 1", "line 3: optimizers: mars_adamw: unknown gama", "gamma"),
    ("optimizers:\n  mars_adamw:\n    gamma: -1", "line 3: optimizers: mars_adamw: gamma: '-1' is not"),
    ("optimizers:\n  mars_adamw: {gamma: 1, gamma: 2}", "line 2: gamma is there twice"),
    ("n_head: 3\nn_embd: 8", "line 2: n_embd 8 is not a multiple of", "line 1: n_head 3"),
    ("max_steps: 10\nwarmup_steps: 20", "line 2: warmup_steps 20 is more than", "line 1: max_steps 10"),
    ("max_steps: 10\nnum_train_epochs: 2", "line 2: num_train_epochs 2 would be ignored", "line 1: max_steps 10"),
    ("- 3", "holds list, not settings"),
    ("", "holds nothing, not settings"),
    ("a: [", "line 1, is not YAML"),
    ("a: b: c", "line 1, is not YAML"),
    ("? [a]\n: b", "line 1: a key must be a word"),
    ("a: !!python/object:os.system x", "is not YAML"),
    ("n_layer: 3\n---\nn_layer: 4", "is not YAML"),
]

COMPARE = of(
    "compare",
    ("--optimizers mars_adamw sgd", "unknown sgd; accepted are mars_adamw", "mars_m_exact"),
    ("--optimizers adamw_exact", "unknown adamw_exact"),
    ("--optimizers", "--optimizers has no value"),
    ("--optimizer adamw", "use --optimizers"),
    ("--seed=3", "use --seeds"),
    ("--is_approx false", "use --optimizers NAME_exact"),
    ("--seeds 1 -1", "'-1' is not a whole number from 0"),
    ("--seeds one", "'one' is not a whole number"),
    ("--seeds 1.5", "'1.5' is not a whole number"),
    ("--max_steps 0", "--max_steps: '0' is not a whole number"),
    ("--n_layers 3", "unknown flag --n_layers"),
    ("--config nothing", "--config 'nothing': no such file"),
    ("--learning_rate nan", "'nan' is not a finite number"),
    ("--optim adafactor", "--optim would be ignored"),
    ("--optimizers adamw --gamma 0.1", "adamw has no gamma"),
    ("--launcher 'open", "No closing quotation"),
    ("--launcher no-such-launcher --max_steps 2", "no program 'no-such-launcher'"),
    ("--output_dir file.txt", "file.txt is a file"),
)

PREPARE = of(
    "prepare",
    ("--output_dir out", "one of the arguments --dataset --files is required"),
    ("--files a --output_dir", "--output_dir has no value"),
    ("--files file.txt", "--output_dir"),
    ("--files file.txt --dataset b --output_dir out", "not allowed with argument"),
    ("--files file.txt --dataset_config b --output_dir out", "--dataset_config goes with --dataset"),
    ("--files file.txt --train_split b --output_dir out", "--train_split goes with --dataset"),
    ("--dataset _ --output_dir out", "--dataset: is empty"),
    ("--dataset a --output_dir _", "--output_dir: is empty"),
    ("--dataset a --output_dir out --test_size 0", "'0' is not a share between 0 and 1"),
    ("--dataset a --output_dir out --test_size 1", "'1' is not a share between 0 and 1"),
    ("--dataset a --output_dir out --test_size nan", "'nan' is not a share"),
    ("--dataset a --output_dir out --test_size -1e-3", "'-1e-3' is not a share"),
    ("--dataset a --output_dir out --seed -1", "'-1' is not a whole number from 0 to 2**32 - 1"),
    ("--dataset a --output_dir out --seed 4294967296", "2**32 - 1"),
    ("--dataset a --output_dir out --num_proc 0", "'0' is not a whole number from 1 on"),
    ("--dataset a --output_dir out --num_proc two", "'two' is not a whole number"),
    ("--dataset a --output_dir out --tokenizer gpt3", "'gpt3'", "gpt2"),
    ("--dataset a --output_dir out --outputdir x", "unknown flag --outputdir", "--output_dir"),
    ("--dataset a --output_dir out word", "'word' belongs to no flag"),
    ("--files file.txt --output_dir file.txt", "file.txt is a file"),
    ("--files file.txt --output_dir file.txt/out", "file.txt is a file"),
    ("--files file.txt --output_dir folder --overwrite", "holds other files (notes.md)", "choose another folder"),
    ("--files folder --output_dir folder/new", "is inside --files folder"),
)

MARS_HF = of(
    "mars_hf",
    ("run", "SCRIPT"),
    ("run nothing.py", "no such script: 'nothing.py'"),
    ("run folder", "'folder' is a folder"),
    ("run -m no_such_module_at_all", "no such module: 'no_such_module_at_all'"),
    ("run -m no_such_module_at_all.part", "no such module"),
    ("train", "'train'", "run"),
    ("configs more", "unrecognized arguments: more"),
    ("to_universal", "INPUT_FOLDER"),
    ("to_universal folder", "OUTPUT_FOLDER"),
    ("to_universal nowhere out", "nowhere"),
    ("to_universal folder out", "no *_optim_states.pt in it"),
    ("to_universal folder folder", "exists already"),
)

CASES = [
    *RANGES,
    *FLAGS,
    *(("pretrain", ["--config", "c.yaml"], (text, *parts)) for text, *parts in CONFIGS),
    *COMPARE,
    *PREPARE,
    *MARS_HF,
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to run in, with a file and a folder of somebody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    (tmp_path / "file.txt").write_text("words")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.md").write_text("notes")
    return tmp_path


def test_the_table_is_long_enough():
    assert len(CASES) >= 150
    assert {program for program, *_ in CASES} == set(PROGRAMS)


@pytest.mark.parametrize(
    ("program", "argv", "parts"), CASES, ids=[f"{program} {argv} {parts[0][:40]}" for program, argv, parts in CASES]
)
def test_a_mistake_is_one_line(place, capsys, program, argv, parts):
    if argv[:2] == ["--config", "c.yaml"]:
        (place / "c.yaml").write_text(parts[0])
        parts = parts[1:]
    main, name = PROGRAMS[program]
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if not line.startswith(("[transformers]", "\r"))]
    assert len(lines) == 1 and lines[0].startswith(name), printed.err
    for part in parts:
        assert part in lines[0]
    assert "usage:" not in printed.err and "Traceback" not in printed.err


def test_a_traceback_is_kept_for_our_bugs():
    @told("program")
    def main(error: Exception) -> None:
        raise error

    for bug in (ValueError("x"), KeyError("x"), SystemExit(3), SystemExit(None), FileNotFoundError(errno.ENOENT, "x")):
        with pytest.raises(type(bug)) as raised:
            main(bug)
        assert raised.value is bug


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Mistake("two\n  lines"), "program: two lines\n"),
        (Mistake("program: named already"), "program: named already\n"),
        (SystemExit("a text"), "program: a text\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/disk/x"), "program: /disk/x: No space left on device\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "program: /x: Permission denied\n"),
    ],
)
def test_only_the_first_process_of_a_machine_speaks(error, line, capsys, monkeypatch):
    @told("program")
    def main() -> None:
        raise error

    for rank, expected in (("0", line), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert capsys.readouterr().err == expected


def test_errors_of_the_hub_are_told(capsys):
    from huggingface_hub.errors import OfflineModeIsEnabled

    @told("program")
    def main() -> None:
        raise OfflineModeIsEnabled("offline")

    with pytest.raises(SystemExit):
        main()
    assert "hf auth login" in capsys.readouterr().err


def test_negative_numbers_are_values_not_flags():
    parser = mistakes.OneLine()
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seeds", type=int, nargs="+")
    assert parser.parse_args(["--rate", "-1e-3", "--seeds", "-1", "2"]).rate == -1e-3
    assert parser.parse_args(["--rate", "-inf"]).rate == float("-inf")


def test_every_number_of_our_own_has_a_range():
    from dataclasses import fields
    from typing import get_type_hints

    from pretraining.run import arguments, ranges

    own = (arguments.ModelArguments, arguments.DataArguments, arguments.OptimizerArguments)
    named = {"cpu_threads", "sample_tokens"}
    for kind in own:
        hints = get_type_hints(kind)
        named |= {field.name for field in fields(kind) if hints[field.name] in (int, float, int | None, float | None)}
    assert named and named <= ranges.NUMBERS.keys()


# As users run them


def process(*command: str, **settings) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, **settings)


@pytest.mark.parametrize("argv", [["--files", "nothing.txt", "--output_dir", "out", "--test_size", "2"]])
def test_prepare_data_answers_before_it_imports(place, argv):
    code = (
        "import sys\nimport prepare_data\n"
        "try: prepare_data.main(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, {'torch', 'datasets', 'transformers'} & set(sys.modules))"
    )
    ended = process("-c", code, *argv, cwd=place, env={"PYTHONPATH": str(ROOT / "recipes")})
    assert ended.stdout == "2 set()\n"
    assert ended.stderr == "prepare_data.py: --test_size: '2' is not a share between 0 and 1, like 0.0005\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["recipes/pretrain_gpt2.py", "--n_layer", "-1"], "pretrain_gpt2.py: --n_layer: '-1' is not"),
        (["recipes/compare_optimizers.py", "--optimizers", "sgd"], "compare_optimizers.py: --optimizers: unknown sgd"),
        (["-m", "mars_hf", "run", "nothing.py"], "python -m mars_hf: no such script: 'nothing.py'"),
    ],
)
def test_the_programs_themselves(command, line):
    ended = process(*command, cwd=ROOT)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1 and ended.stderr.startswith(line), ended.stderr
    assert ended.stdout == ""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_tell_it_once(tmp_path):
    config = str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")
    launch = ["-m", "accelerate.commands.launch", "--config_file", config, "recipes/pretrain_gpt2.py"]
    ended = process(*launch, "--n_head", "3", "--output_dir", str(tmp_path / "run"), cwd=ROOT)
    assert ended.returncode != 0
    assert ended.stderr.count("is not a multiple of --n_head 3") == 1


def test_a_run_that_is_refused_ends_the_comparison_with_its_line(tmp_path, monkeypatch, capsys):
    def start(command, *, stdout, **settings):
        stdout.write("[rank0] noise\npretrain_gpt2.py: --data_dir x: no such folder\nlauncher: exit code 2\n")
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", start)
    with pytest.raises(SystemExit):
        compare_optimizers.main(["--output_dir", str(tmp_path / "c"), "--seeds", "1", "--optimizers", "adamw"])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == f"compare_optimizers.py: {tmp_path / 'c' / 'adamw-1'}: --data_dir x: no such folder"
    assert json.loads((tmp_path / "c" / "adamw-1" / "arguments.json").read_text())["argv"]
