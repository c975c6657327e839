"""Non-finite losses and gradients: reported, kept out of the weights, and the end of a run that gives nothing else."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import VOCAB, arguments, gpt2
from safetensors.torch import load_file, save_file
from test_stale_pass import use_fp16_on_cpu
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, default_data_collator

import mars_hf
from mars_hf import NonFiniteCallback, NonFiniteError
from mars_hf.training.good_checkpoints import newest_good

GOOD, LOSS, GRADIENT, BOTH, INFINITE = range(5)  # what a batch does


class _Poison(torch.autograd.Function):
    """Return the input, and put NaN into its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[1] = torch.nan
        return grad


class Model(GPT2LMHeadModel):
    """A GPT-2 with running statistics whose batches may poison the loss, one gradient, or both."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor, kind: Tensor, **_: Any) -> dict[str, Tensor]:
        kinds = set(kind.tolist())
        loss = super().forward(input_ids=input_ids, labels=labels).loss
        if self.training:
            self.seen += loss.detach()
        if GRADIENT in kinds:
            loss = loss + 0 * _Poison.apply(self.transformer.h[1].mlp.c_fc.weight).sum()
        if LOSS in kinds:
            loss = loss + torch.full_like(loss, torch.inf)
        if BOTH in kinds:
            loss = loss * torch.nan
        if INFINITE in kinds:
            loss = loss * torch.inf
        return {"loss": loss}


class Batches(Dataset):
    """Rows of tokens; the rows of some batches are poisoned or left out."""

    def __init__(self, size: int, poison: dict[int, int] | None = None, without: tuple[int, ...] = ()) -> None:
        ids = torch.randint(0, VOCAB, (48, 12), generator=torch.Generator().manual_seed(7))
        kinds = [(poison or {}).get(row // size, GOOD) for row in range(len(ids))]
        rows = [row for row in range(len(ids)) if row // size not in without]
        self._rows = [{"input_ids": ids[row], "labels": ids[row], "kind": torch.tensor(kinds[row])} for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._rows[index]


def model(**settings: Any) -> Model:
    config = gpt2(**settings).config
    torch.manual_seed(0)
    return Model(config)


MARS = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1}


def make(
    folder: Path,
    data: Dataset,
    *callbacks: Any,
    kind: type[Trainer] = mars_hf.MarsTrainer,
    own: Any = None,
    optimizer: dict[str, Any] | None = None,
    evaluates: bool = False,
    **settings: Any,
) -> Trainer:
    """Return a Trainer of two rows a micro-batch, in order, at a rate that changes from step to step."""
    own = model() if own is None else own
    defaults = {
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "lr_scheduler_type": "inverse_sqrt",  # does not depend on the number of steps
        "warmup_steps": 2,
        "max_steps": 6,
    }
    args = arguments(folder, **{**defaults, **settings})
    if optimizer is None:
        made: Any = torch.optim.AdamW(own.parameters(), lr=1e-2)
    else:
        made = mars_hf.create(own, **{**MARS, **optimizer})
    return kind(
        own,
        args,
        train_dataset=data,
        eval_dataset=torch.utils.data.Subset(Batches(2), range(2)) if evaluates else None,
        data_collator=default_data_collator,
        optimizers=(made, None),
        callbacks=list(callbacks),
    )


def state_of(run: Trainer) -> dict[str, Any]:
    """Return weights, buffers, the optimizer's state, rates and the random state, as tensors."""
    saved = run.optimizer.state_dict()
    found = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    for index, state in saved["state"].items():
        found |= {f"{key}.{index}": torch.as_tensor(value) for key, value in state.items()}
    for index, group in enumerate(saved["param_groups"]):
        found[f"lr.{index}"] = torch.tensor(group["lr"], dtype=torch.float64)
        found[f"keys.{index}"] = sorted(set(group) - {"params"})
    found["schedule"] = torch.tensor(run.lr_scheduler.last_epoch)
    return {**found, "random": torch.get_rng_state()}


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return [name for name in one | other if name not in one or name not in other or not same(one[name], other[name])]


def rows(run: Trainer, key: str = "loss") -> list[dict[str, Any]]:
    return [row for row in run.state.log_history if key in row]


@pytest.fixture
def reports(caplog) -> Any:
    """Return a function that lists the lines logged about steps, so far."""
    caplog.set_level(logging.WARNING)
    logger = logging.getLogger("mars_hf.training.nonfinite")
    logger.addHandler(caplog.handler)
    yield lambda start="step ": [
        record.getMessage()
        for record in dict.fromkeys(caplog.records)
        if record.name == logger.name and record.getMessage().startswith(start)
    ]
    logger.removeHandler(caplog.handler)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["stopp", "", None])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(ValueError, match=r"on_nonfinite=.* is unknown; accepted: stop, skip, ignore$"):
        NonFiniteCallback(mode)


@pytest.mark.parametrize("patience", [0, -1, 2.5, True, "3"])
def test_a_patience_below_one_is_refused(patience):
    with pytest.raises(ValueError, match=r"^patience=.*>= 1$"):
        NonFiniteCallback(patience=patience)


@pytest.mark.slow
def test_it_can_be_the_first_name_that_is_used():
    """Importing transformers.trainer imports a part of mars_hf, which must not meet itself half imported."""
    command = [sys.executable, "-c", "import mars_hf; mars_hf.NonFiniteCallback"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_mars_trainer_has_one(tmp_path):
    def of(run: Trainer) -> list[Any]:
        return [own for own in run.callback_handler.callbacks if isinstance(own, NonFiniteCallback)]

    (default,) = of(make(tmp_path, Batches(2)))
    assert (default.on_nonfinite, default.patience) == ("stop", 3)
    given = NonFiniteCallback("skip", patience=7)
    assert of(make(tmp_path, Batches(2), given)) == [given]
    assert of(make(tmp_path, Batches(2), kind=Trainer)) == []


# --- skip ------------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "lion": {"mars_type": "mars-lion", "optimize_1d": True},
    "shampoo": {"mars_type": "mars-shampoo"},
    "m": {"mars_type": "mars-m"},
    "averaging": {"mars_type": "mars-lion", "clip_threshold": None},
    "amsgrad": {"amsgrad": True},
    "exact": {"is_approx": False},
    "exact-m": {"is_approx": False, "mars_type": "mars-m"},
    "own-norm": {"max_grad_norm": 0.3},
    "stochastic": {"rounding": "stochastic"},
    "kahan": {"rounding": "kahan"},
}


def compare(tmp_path: Path, poison: dict[int, int], *, of: int = 1, dtype: Any = None, **settings: Any) -> Trainer:
    """Train with poisoned steps and without their batches, and compare; `of` batches make a step."""
    dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    steps = {batch // of for batch in poison}
    without = tuple(batch for step in steps for batch in range(step * of, step * of + of))
    ends = []
    for data, less in ((Batches(2, poison), 0), (Batches(2, without=without), len(steps))):
        more = {"max_steps": 6 - less, "gradient_accumulation_steps": of, "own": model(**dropout).to(dtype), **settings}
        run = make(tmp_path / str(less), data, NonFiniteCallback("skip"), **more)
        run.train()
        ends.append((run, state_of(run)))
    (skipping, one), (clean, other) = ends
    assert different(one, other) == []
    counted = [row["loss"] for row in rows(skipping) if "nonfinite_steps" not in row]
    assert counted == [row["loss"] for row in rows(clean)]
    assert [row["step"] - 1 for row in rows(skipping) if "nonfinite_steps" in row] == sorted(steps)
    assert all(torch.isfinite(value).all() for name, value in one.items() if name.startswith("model."))
    return skipping


def quick(*cases: Any) -> list[Any]:
    """Return all rules as parameters, those that are not named marked slow."""
    return [case if case in cases else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", quick("adamw", "m", "exact"))
def test_skip_leaves_no_trace(tmp_path, case):
    dtype = torch.bfloat16 if "rounding" in CASES[case] else None
    compare(tmp_path, {3: BOTH}, optimizer=CASES[case], dtype=dtype)


@pytest.mark.parametrize("what", [LOSS, GRADIENT, pytest.param(INFINITE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["approximate", pytest.param("exact", marks=pytest.mark.slow), "torch"])
def test_skip_whatever_is_not_finite(tmp_path, form, what):
    optimizer = None if form == "torch" else {"is_approx": form == "approximate"}
    compare(tmp_path, {2: what, 4: what}, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["averaging", "exact"])
def test_skip_at_the_first_step_and_twice_in_a_row(tmp_path, case):
    compare(tmp_path, {0: BOTH, 3: GRADIENT, 4: LOSS}, optimizer=CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adamw", "exact"])
def test_skip_at_the_last_step(tmp_path, case):
    compare(tmp_path, {5: BOTH}, optimizer=CASES[case])


@pytest.mark.parametrize("case", ["adamw", "averaging"])
def test_skipped_steps_alone_make_no_states(tmp_path, case):
    run = make(tmp_path, Batches(2, {0: BOTH}), NonFiniteCallback("skip"), optimizer=CASES[case], max_steps=1)
    fresh = mars_hf.create(run.model, **{**MARS, **CASES[case]})
    run.train()
    assert not run.optimizer.state_dict()["state"]
    assert [set(group) for group in run.optimizer.param_groups] == [
        {*group, "initial_lr"} for group in fresh.param_groups
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adamw", "exact"])
def test_one_bad_micro_batch_leaves_out_the_step(tmp_path, case):
    compare(tmp_path, {5: BOTH, 8: GRADIENT}, of=2, optimizer=CASES[case])


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", [None, {}, {"max_grad_norm": 0.3}], ids=["torch", "mars", "mars-own-norm"])
def test_skip_in_plain_trainer(tmp_path, optimizer, max_grad_norm):
    if optimizer and max_grad_norm:
        max_grad_norm = 1.0
    compare(tmp_path, {1: GRADIENT, 3: BOTH}, kind=Trainer, optimizer=optimizer, max_grad_norm=max_grad_norm)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adamw", "exact"])
def test_skip_without_clipping(tmp_path, case):
    compare(tmp_path, {1: GRADIENT, 3: BOTH}, optimizer=CASES[case], max_grad_norm=0.0)


@pytest.mark.slow
def test_a_stale_gradient_counts_too(tmp_path, reports):
    """A weight that overflowed in between gives a stale gradient that is not finite, and an ordinary one that is."""
    run = make(tmp_path, Batches(2), NonFiniteCallback("skip"), optimizer=CASES["exact"], max_steps=4)
    commit = run._stale_pass._commit

    def poisoned(mars: mars_hf.Mars) -> None:
        if run.state.global_step == 2:
            next(run.model.parameters()).grad[0] = torch.nan
        commit(mars)

    run._stale_pass._commit = poisoned
    run.train()
    (line,) = reports()
    assert line.startswith("step 3: non-finite") and "(stale)" in line and "loss" not in line
    assert all(torch.isfinite(value).all() for value in run.model.parameters())
    assert [row.get("nonfinite_steps") for row in rows(run)] == [None, None, 1, None]


@pytest.mark.slow
def test_the_logged_loss_leaves_skipped_steps_out(tmp_path):
    run = make(tmp_path, Batches(2, {1: BOTH}), NonFiniteCallback("skip"), optimizer={}, logging_steps=3)
    run.train()
    clean = make(tmp_path, Batches(2, without=(1,)), optimizer={}, max_steps=5)
    clean.train()
    losses = [row["loss"] for row in rows(clean)]
    first, second = rows(run)
    assert first["loss"] == pytest.approx(sum(losses[:2]) / 2) and first["nonfinite_steps"] == 1
    assert second["loss"] == pytest.approx(sum(losses[2:]) / 3) and "nonfinite_steps" not in second
    (last,) = rows(run, "train_loss")
    assert last["train_loss"] == pytest.approx(sum(losses) / 5) and last["nonfinite_steps"] == 1


# --- stop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, Trainer])
@pytest.mark.parametrize("patience", [1, 3])
def test_stop_names_the_newest_good_checkpoint(tmp_path, reports, kind, patience):
    poison = dict.fromkeys(range(3, 20), BOTH)
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 20}
    run = make(tmp_path, Batches(2, poison), NonFiniteCallback(patience=patience), kind=kind, optimizer={}, **saves)
    with pytest.raises(NonFiniteError) as error:
        run.train()
    text = str(error.value)
    assert text.startswith(f"{patience} steps in a row with a non-finite loss or gradient (on_nonfinite='stop')")
    assert f"step {3 + patience}: non-finite loss nan" in text and "\n" not in text
    assert f"newest good checkpoint is {tmp_path / 'checkpoint-3'}:" in text
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert [int(line.split()[1][:-1]) for line in reports()] == list(range(4, 4 + patience))
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    own = run.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in saved.items())  # no bad step has changed anything
    # Nothing is left behind.
    assert not {"training_step", "log", "_save_checkpoint"} & set(vars(run))
    assert "clip_grad_norm_" not in vars(run.accelerator)


@pytest.mark.parametrize(
    ("first", "remedy"),
    [(2, "has no good checkpoint: set save_strategy='steps' and save_steps below 2$"), (1, "check the data and the m")],
)
def test_stop_without_a_checkpoint_says_how_to_get_one(tmp_path, first, remedy):
    run = make(tmp_path, Batches(2, dict.fromkeys(range(first - 1, 9), BOTH)), optimizer={})
    with pytest.raises(NonFiniteError, match=remedy):
        run.train()


@pytest.mark.slow
def test_good_steps_in_between_start_the_count_again(tmp_path, reports):
    poison = {1: LOSS, 2: GRADIENT, 4: BOTH, 5: LOSS}
    run = make(tmp_path, Batches(2, poison), NonFiniteCallback("stop"), optimizer={}, max_steps=8)
    run.train()
    assert [line[line.index("(") :] for line in reports()] == [
        *("(1 in a row, the run stops at 3)", "(2 in a row, the run stops at 3)"),
        *("(1 in a row, the run stops at 3)", "(2 in a row, the run stops at 3)"),
    ]
    assert run.state.global_step == 8 and run.lr_scheduler.last_epoch == 8  # the schedule counts every step
    states = run.optimizer.optimizer.state.values()
    assert {state["step"].item() for state in states} == {4}
    assert all(torch.isfinite(tensor).all() for tensor in run.model.state_dict().values())


@pytest.mark.slow
def test_skip_stops_too(tmp_path):
    run = make(tmp_path, Batches(2, dict.fromkeys(range(2, 9), GRADIENT)), NonFiniteCallback("skip", 2), optimizer={})
    with pytest.raises(NonFiniteError, match=r"^2 steps in a row .*on_nonfinite='skip'.*step 4: non-finite"):
        run.train()


@pytest.mark.slow
def test_another_run_counts_from_zero(tmp_path):
    run = make(tmp_path, Batches(2, {1: BOTH, 2: BOTH}), optimizer={}, max_steps=3)
    run.train()
    run.train()


# --- reports and log lines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, Trainer])
@pytest.mark.parametrize("optimizer", [None, {}], ids=["torch", "mars"])
def test_a_report_names_step_and_parameters(tmp_path, reports, kind, optimizer):
    """Those before clipping, which would spread NaN over all gradients."""
    run = make(tmp_path, Batches(2, {2: GRADIENT}), NonFiniteCallback(), kind=kind, optimizer=optimizer, max_steps=4)
    run.train()
    (line,) = reports()
    named = "step 3: non-finite 1 of 28 gradients: transformer.h.1.mlp.c_fc.weight. The step is left out (1 in a row"
    assert line.startswith(named)


def test_a_report_lists_few_names(tmp_path, reports):
    make(tmp_path, Batches(2, {0: BOTH}), optimizer={}, max_steps=1).train()
    (line,) = reports()
    names = "transformer.wte.weight, transformer.wpe.weight, transformer.h.0.ln_1.weight, ..."
    assert line.startswith(f"step 1: non-finite loss nan; 28 of 28 gradients: {names}. The step is left out")


@pytest.mark.parametrize("nan_filter", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["stop", "skip", pytest.param("ignore", marks=pytest.mark.slow)])
def test_the_log_shows_what_was_not_finite(tmp_path, mode, nan_filter):
    """transformers logs a loss of 0 for a first step that is NaN, and NaN ever after without its filter."""
    settings = {"optimizer": {}, "max_steps": 4, "logging_nan_inf_filter": nan_filter}
    run = make(tmp_path, Batches(2, {0: LOSS, 2: LOSS}), NonFiniteCallback(mode), **settings)
    run.train()
    losses = [row["loss"] for row in rows(run)]
    shown = math.isnan if mode == "skip" else math.isinf
    assert shown(losses[0]) and shown(losses[2]) and math.isfinite(losses[1]) and math.isfinite(losses[3])
    assert [row.get("nonfinite_steps") for row in rows(run)] == [1, None, 1, None]
    (last,) = rows(run, "train_loss")
    assert last["nonfinite_steps"] == 2 and last["train_loss"] != 0
    plain = make(tmp_path, Batches(2, {0: BOTH}), kind=Trainer, optimizer={}, max_steps=1)
    plain.train()
    assert rows(plain)[0]["loss"] == 0  # what this is for


@pytest.mark.slow
def test_ignore_trains_as_trainer_does(tmp_path, reports):
    """Weights that are not finite are the same ones; only reports and logged losses differ."""
    ends = []
    for callbacks in ([NonFiniteCallback("ignore")], []):
        run = make(tmp_path, Batches(2, {2: GRADIENT}), *callbacks, kind=Trainer, optimizer={})
        run.train()
        ends.append(run.model.state_dict())
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*map(dict.values, ends), strict=True))
    assert any(value.isnan().any() for value in ends[0].values())
    assert [line.split(":")[0] for line in reports()] == ["step 3", "step 4", "step 5", "step 6"]
    assert all("The step is taken" in line for line in reports())


@pytest.mark.parametrize("mode", ["stop", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("skip", "ignore"))])
@pytest.mark.parametrize("case", ["adamw", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_run_without_any_is_trained_to_the_bit(tmp_path, case, mode):
    ends = []
    for callbacks in ([NonFiniteCallback(mode)], []):
        run = make(tmp_path, Batches(2), *callbacks, optimizer=CASES[case], gradient_accumulation_steps=2)
        if not callbacks:
            assert run.pop_callback(NonFiniteCallback) is not None
        run.train()
        ends.append((state_of(run), rows(run)))
    assert different(ends[0][0], ends[1][0]) == []
    assert ends[0][1] == ends[1][1]


class Huge(nn.Module):
    """A model whose gradients are finite, and their norm is not in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": (self.weight * 1e30).sum() * 1e-3}


@pytest.mark.parametrize("optimizer", [None, {}], ids=["torch", "mars"])
def test_a_norm_that_overflows_is_not_a_gradient_that_does(tmp_path, reports, optimizer):
    run = make(tmp_path, Batches(2), own=Huge(), optimizer=optimizer, max_steps=4, include_for_metrics=[])
    run.train()
    assert reports() == []
    assert run.state.global_step == 4


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_due_at_a_bad_step_is_made_up_for(tmp_path, reports):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "optimizer": {}}
    make(tmp_path, Batches(2, {3: BOTH}), NonFiniteCallback("skip"), **settings).train()
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-5", "checkpoint-6"]
    (line,) = reports("checkpoint-4")
    assert "is not written: the last step was not finite" in line


class OnceGood(Batches):
    """Six rows, which are poisoned from the second epoch on."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._served = getattr(self, "_served", 0) + 1
        row = super().__getitem__(index)
        return row if self._served > len(self) else {**row, "kind": torch.tensor(GOOD)}


class EverBetter(TrainerCallback):
    """A metric that calls every evaluation the best one."""

    def on_evaluate(self, args, state, control, metrics=None, **_):
        metrics["eval_best"] = state.global_step


SAVES: dict[str, dict[str, Any]] = {
    "steps": {"save_steps": 1},
    "epoch": {},
    "best": {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "best", "greater_is_better": True},
}


@pytest.mark.parametrize("strategy", SAVES)
def test_poisoned_weights_replace_no_checkpoint(tmp_path, reports, strategy):
    """Ignored NaN, in weights that a metric may still call the best."""
    data = OnceGood(2, {0: GRADIENT}) if strategy == "epoch" else Batches(2, {3: GRADIENT})
    saves = {"save_strategy": strategy, "save_total_limit": 1, **SAVES[strategy]}
    callbacks = [EverBetter(), NonFiniteCallback("ignore")]
    run = make(tmp_path, data, *callbacks, evaluates=strategy == "best", optimizer={}, **saves)
    run.train()
    kept = [path for path in tmp_path.glob("checkpoint-*")]
    assert [path.name for path in kept] == ["checkpoint-3"]
    assert newest_good(tmp_path) == kept[0]
    assert reports("checkpoint-")[-1].startswith("checkpoint-6 is not written: the last step was not finite")


def test_weights_that_no_loss_shows_are_not_saved(tmp_path, reports):
    """The update itself overflows, in a weight that no batch uses."""

    class Overflows(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            if state.global_step == 3:
                model.transformer.wpe.weight.data[15] = torch.inf  # behind the last position

    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 6}
    run = make(tmp_path, Batches(2), Overflows(), optimizer={}, **settings)
    run.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert reports() == []
    assert "weights are not finite (transformer.wpe.weight)" in reports("checkpoint-4")[0]


def test_the_newest_good_checkpoint_is_whole_and_finite(tmp_path):
    def write(name: str, value: float, *, whole: bool = True) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file(
            {"a": torch.ones(3), "b": torch.tensor([value]), "n": torch.ones(2).long()}, folder / "model.safetensors"
        )
        if whole:
            (folder / "trainer_state.json").write_text(json.dumps({}))
        return folder

    assert newest_good(tmp_path) is None and newest_good(tmp_path / "absent") is None
    write("checkpoint-1", 1.0)
    good = write("checkpoint-20", 1.0)
    write("checkpoint-100", math.nan)
    write("checkpoint-101", 1.0, whole=False)
    (write("checkpoint-102", 1.0) / "model.safetensors").write_bytes(b"garbage")
    write("checkpoint-new", 1.0)
    assert newest_good(tmp_path) == good


# --- fp16 ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_search_for_the_scale_does_not_count(tmp_path, reports, monkeypatch):
    """The scaler skips the first steps by itself; more of them than the patience."""
    run = make(tmp_path, Batches(2), NonFiniteCallback(patience=2), optimizer={}, max_steps=8)
    use_fp16_on_cpu(run, 2.0**20, monkeypatch)
    weight = run.model.transformer.h[0].mlp.c_fc.weight
    # At 2^20, 2^19 and 2^18; a real fp16 gradient overflows likewise.
    weight.register_hook(lambda grad: grad * torch.inf if run.accelerator.scaler.get_scale() > 2**17 else grad)
    run.train()
    assert reports() == [] and not any("nonfinite_steps" in row for row in rows(run))
    steps = {state["step"].item() for state in run.optimizer.optimizer.state.values()}
    assert steps == {5.0}


@pytest.mark.slow
def test_a_bad_batch_is_told_from_the_search_for_the_scale(tmp_path, reports, monkeypatch):
    """A loss that is not finite counts, and skipping it leaves the scale as it is."""
    scales = []
    for data, steps in ((Batches(2, {2: BOTH, 3: LOSS}), 6), (Batches(2, without=(2, 3)), 4)):
        run = make(tmp_path, data, NonFiniteCallback("skip"), optimizer={}, max_steps=steps)
        use_fp16_on_cpu(run, 8.0, monkeypatch)
        run.train()
        scales.append((run.accelerator.scaler.state_dict(), state_of(run)))
    assert [line.split(":")[0] for line in reports()] == ["step 3", "step 4"]
    assert scales[0][0] == scales[1][0]
    assert different(scales[0][1], scales[1][1]) == []


@pytest.mark.slow
def test_a_gradient_that_no_scale_helps_counts(tmp_path, reports, monkeypatch):
    run = make(tmp_path, Batches(2, dict.fromkeys(range(20), GRADIENT)), optimizer={}, max_steps=20)
    use_fp16_on_cpu(run, 8.0, monkeypatch)
    with pytest.raises(NonFiniteError):
        run.train()
    assert [line.split(":")[0] for line in reports()] == ["step 4", "step 5", "step 6"]  # 8, 4 and 2 come first
