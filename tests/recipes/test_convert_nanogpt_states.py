"""An optimizer's state moves over: the next steps are those of the trainer that it left, written out in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import convert_nanogpt
import pretrain_gpt2
import pytest
import torch
import yaml
from pretraining.run import arguments
from pretraining.run.model import freeze_biases
from pretraining.run.optimizers import TorchFactory
from tiny_nanogpt import BLOCK, VOCAB, OfficialMars, OfficialMarsM, TinyGPT, adamw, gradients, save
from transformers import GPT2LMHeadModel, TrainerCallback, TrainerState

import mars_hf

G = 4  # micro-batches of a step
PEAK, NOW = 0.02, 0.015  # learning rates
STEPS = 3
# mars-m adds 1e-7 to the norm of a moment, whether gradients are summed or averaged.
TOLERANCE = (1e-9, 1e-6)
UNDECAYED = [("*.w[tp]e.weight", {"weight_decay": 0.0})]
ORTHOGONAL = [("*.w[tp]e.weight", {"weight_decay": 0.0, "role": "matrix"})]
CONFIG = {"learning_rate": PEAK, "lr_1d": 0.01, "is_approx": True, "gradient_accumulation_steps": G, "dataset": "x"}


class Case(NamedTuple):
    """One of the trainers, and the settings of ours that decide its groups."""

    code: str
    make: Callable[[TinyGPT], Any]
    ours: dict[str, Any]
    bias: bool = False


def mars(mars_type: str, **settings: Any) -> Callable[[TinyGPT], OfficialMars]:
    return lambda model: OfficialMars(model, lr=PEAK, lr_1d=0.01, mars_type=mars_type, **settings)


WHOLE = {"split_fused": "none"}
CASES = {
    "mars-adamw": Case("mars", mars("mars-adamw"), {"param_rules": UNDECAYED}),
    "mars-adamw with biases": Case("mars", mars("mars-adamw"), {"param_rules": UNDECAYED}, bias=True),
    "mars-adamw of vectors": Case(
        "mars", mars("mars-adamw", optimize_1d=True), {"param_rules": UNDECAYED, "optimize_1d": True}
    ),
    "mars-lion": Case("mars", mars("mars-lion"), {"mars_type": "mars-lion", "param_rules": UNDECAYED}),
    "mars-shampoo": Case(
        "mars",
        mars("mars-shampoo"),
        {"mars_type": "mars-shampoo", "param_rules": ORTHOGONAL, **WHOLE},
    ),
    "mars-m": Case("mars", lambda model: OfficialMarsM(model, lr=PEAK), {"mars_type": "mars-m", **WHOLE}),
    "adamw": Case("nanogpt", lambda model: adamw(model, PEAK), {}),
    "adamw with biases": Case("nanogpt", lambda model: adamw(model, PEAK), {}, bias=True),
    "official adamw": Case("mars", lambda model: adamw(model, PEAK), {"param_rules": UNDECAYED}),
}

# The quick set has one of each kind.
QUICK = ("mars-adamw", "mars-m", "adamw")
SOME = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]


def batches(step: int) -> list[torch.Tensor]:
    return list(torch.randint(VOCAB, (G, 2, BLOCK), generator=torch.Generator().manual_seed(step)))


def train(model: TinyGPT, optimizer: Any, first: int, last: int) -> None:
    """Make the steps of the trainer that a checkpoint comes from."""
    for step in range(first, last):
        gradients(model, list(model.parameters()), batches(step), average=model.code == "nanogpt", clip=1.0)
        optimizer.step()


def trained(case: Case, steps: int = STEPS) -> tuple[TinyGPT, Any]:
    """Return a model and its optimizer after some steps, with the rate of the next one set, as the trainers do."""
    torch.manual_seed(0)
    model = TinyGPT(case.code, bias=case.bias).double()
    optimizer = case.make(model)
    train(model, optimizer, 0, steps)
    for group in optimizer.param_groups:
        group["lr"] = NOW
    return model, optimizer


def write(folder: Path, gpt: TinyGPT, made: Any, **changes: Any) -> Path:
    path = save(folder / "ckpt.pt", gpt, made, STEPS, gpt.model_args(), CONFIG)
    torch.save(torch.load(path, weights_only=True) | changes, path)
    return path


def convert(*argv: object) -> None:
    convert_nanogpt.main([str(word) for word in argv])


def refused(*argv: object) -> str:
    with pytest.raises(SystemExit) as told:
        convert(*argv, "--optimizer_state")
    assert told.value.code == 2
    return str(told.value.__context__)


def load(folder: Path, case: Case, **settings: Any) -> tuple[GPT2LMHeadModel, Any]:
    """Return the converted model and an optimizer of ours that has taken up the state."""
    gpt2 = GPT2LMHeadModel.from_pretrained(folder).eval()
    if not case.bias:
        freeze_biases(gpt2)
    if isinstance(case.make(TinyGPT(case.code)), torch.optim.AdamW):
        made = {"lr": 1.0, "betas": (0.5, 0.5), "eps": 1.0, "weight_decay": 1.0}
        optimizer = TorchFactory()(gpt2, optimizer="adamw", **made, **case.ours)
    else:
        optimizer = mars_hf.create(gpt2, **case.ours, **settings)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return gpt2, optimizer


def go_on(gpt2: GPT2LMHeadModel, optimizer: Any, first: int, last: int, clip: float | None) -> None:
    """Make steps as Trainer does: gradients are averages."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, last):
        gradients(lambda ids: gpt2(ids).logits, params, batches(step), average=True, clip=clip or torch.inf)
        optimizer.step()


def assert_same_weights(gpt2: GPT2LMHeadModel, model: TinyGPT, tolerance: float = 1e-9) -> None:
    ours = dict(gpt2.named_parameters())
    for name, param in model.named_parameters():
        turned = ".c_" in name and name.endswith("weight")
        found = ours[name].T if turned else ours[name]
        torch.testing.assert_close(found, param, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", SOME)
def test_next_steps_are_those_of_the_trainer_it_left(tmp_path, name):
    case = CASES[name]
    model, optimizer = trained(case)
    convert(write(tmp_path, model, optimizer), tmp_path / "there", "--optimizer_state")
    gpt2, ours = load(tmp_path / "there", case)
    assert_same_weights(gpt2, model, 0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, STEPS, STEPS + 2)
    go_on(gpt2, ours, STEPS, STEPS + 2, 1.0 if case.code == "nanogpt" else 1 / G)
    assert_same_weights(gpt2, model, TOLERANCE[name == "mars-m"])
    assert all((before[key] - value).abs().max() > 1e-4 for key, value in model.named_parameters())


@pytest.mark.parametrize("name", SOME)
def test_and_back(tmp_path, name):
    """A run that moved over and made steps here makes its next steps there."""
    case = CASES[name]
    model, optimizer = trained(case)
    convert(write(tmp_path, model, optimizer), tmp_path / "there", "--optimizer_state")
    gpt2, ours = load(tmp_path / "there", case)
    go_on(gpt2, ours, STEPS, STEPS + 2, 1.0 if case.code == "nanogpt" else 1 / G)
    gpt2.save_pretrained(tmp_path / "there")
    torch.save(ours.state_dict(), tmp_path / "there" / "optimizer.pt")
    state = TrainerState(global_step=STEPS + 2, log_history=[{"eval_loss": 2.5, "step": STEPS + 1}])
    state.save_to_json(str(tmp_path / "there" / "trainer_state.json"))

    convert(tmp_path / "there", tmp_path / "back", "--to_nanogpt", "--optimizer_state")
    content = torch.load(tmp_path / "back" / "ckpt.pt", weights_only=True)
    assert (content["iter_num"], content["best_val_loss"]) == (STEPS + 2, 2.5)
    again = TinyGPT(case.code, bias=case.bias).double()
    again.load_state_dict(content["model"])
    theirs = case.make(again)
    keys = [set(group) for group in theirs.state_dict()["param_groups"]]
    assert [set(group) for group in content["optimizer"]["param_groups"]] == keys
    theirs.load_state_dict(content["optimizer"])
    train(again, theirs, STEPS + 2, STEPS + 4)
    train(model, optimizer, STEPS, STEPS + 4)
    for found, expected in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[case.ours.get("mars_type") == "mars-m"])


@pytest.mark.parametrize("name", SOME)
def test_round_trip_is_bit_for_bit(tmp_path, name):
    """All that the rule reads; the official MARS also keeps last gradients of vectors, and squares that Lion skips."""
    case = CASES[name]
    path = write(tmp_path, *trained(case))
    convert(path, tmp_path / "there", "--optimizer_state")
    convert(tmp_path / "there", tmp_path / "back", "--to_nanogpt", "--optimizer_state")
    before, after = (torch.load(file, weights_only=True)["optimizer"] for file in (path, tmp_path / "back" / "ckpt.pt"))
    for old, new in zip(before["param_groups"], after["param_groups"], strict=True):
        assert old.keys() == new.keys()
        if old.get("optimize_1d"):  # nobody reads it then
            old["weight_decay_1d"] = new["weight_decay_1d"]
        assert old == new
    assert before["state"].keys() == after["state"].keys()
    for number, old in before["state"].items():
        new = after["state"][number]
        assert old.keys() == new.keys()
        for key, value in old.items():
            vector = isinstance(value, torch.Tensor) and value.ndim == 1
            unread = (key == "last_grad" and vector and "of vectors" not in name) or (
                key == "exp_avg_sq" and not vector and name in ("mars-lion", "mars-shampoo")
            )
            expected = torch.zeros_like(value) if unread else torch.as_tensor(value)
            assert torch.equal(torch.as_tensor(new[key]), expected)


def test_last_gradients_that_are_still_to_be_scaled_move(tmp_path):
    """MarsTrainer lets the optimizer clip, which leaves a scale beside the last gradient."""
    case = CASES["mars-adamw"]
    model, optimizer = trained(case)
    convert(write(tmp_path, model, optimizer), tmp_path / "there", "--optimizer_state")
    gpt2, ours = load(tmp_path / "there", case, max_grad_norm=1 / G)
    ours.take_grad = True
    go_on(gpt2, ours, STEPS, STEPS + 1, None)
    assert any(float(state.get("last_grad_scale", 1)) < 1 for state in ours.state.values())
    gpt2.save_pretrained(tmp_path / "there")
    torch.save(ours.state_dict(), tmp_path / "there" / "optimizer.pt")
    convert(tmp_path / "there", tmp_path / "back", "--to_nanogpt", "--optimizer_state")
    train(model, optimizer, STEPS, STEPS + 1)
    saved = torch.load(tmp_path / "back" / "ckpt.pt", weights_only=True)["optimizer"]["state"]
    for number, state in optimizer.state_dict()["state"].items():
        if state["exp_avg"].ndim == 2:
            # clip_grad_norm_'s 1e-6 beside the norm
            torch.testing.assert_close(saved[number]["last_grad"], state["last_grad"], rtol=1e-5, atol=0)


def test_eps_and_threshold_are_divided_by_the_summed_micro_batches(tmp_path):
    model, optimizer = trained(CASES["mars-adamw"])
    path = write(tmp_path, model, optimizer)
    for argv, expected in (((), 4), (("--summed_micro_batches", "32"), 32), (("--code", "nanogpt"), 1)):
        folder = tmp_path / str(expected)
        convert(path, folder, "--optimizer_state", *argv)
        content = torch.load(folder / "optimizer.pt", weights_only=True)
        for group in content["param_groups"]:
            assert group["clip_threshold"] == 1 / expected
            assert group["eps"] == pytest.approx(1e-8 / expected)
        first = content["state"][content["param_groups"][0]["params"][0]]
        saved = optimizer.state[model.transformer["h"][0].attn.c_attn.weight]
        torch.testing.assert_close(first["last_grad"], saved["last_grad"].T / expected)
        torch.testing.assert_close(first["exp_avg_sq"], saved["exp_avg_sq"].T / expected**2)
        assert first["step"] == STEPS


def test_rates_have_their_peaks_and_their_place_in_the_schedule(tmp_path):
    convert(write(tmp_path, *trained(CASES["mars-adamw"])), tmp_path / "out", "--optimizer_state")
    groups = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["param_groups"]
    assert [(group["role"], group["initial_lr"]) for group in groups] == [
        ("matrix", PEAK),
        ("vector", 0.01),
        ("matrix", PEAK),
    ]
    assert [group["lr"] for group in groups] == pytest.approx([NOW, 0.01 * NOW / PEAK, NOW])
    assert [group["weight_decay"] for group in groups] == [0.01, 0.1, 0.0]
    schedule = torch.load(tmp_path / "out" / "scheduler.pt", weights_only=True)
    assert schedule["base_lrs"] == [PEAK, 0.01, PEAK]
    assert schedule["last_epoch"] == STEPS


def test_state_of_exact_mars_moves_and_does_not_come_back(tmp_path):
    """Its last gradient is of the next batch, as the official trainer finds it when it resumes."""
    model, optimizer = trained(CASES["mars-adamw"])
    for state in optimizer.state.values():
        state["previous_grad"] = state["last_grad"].clone()
    path = write(tmp_path, model, optimizer, config=CONFIG | {"is_approx": False})
    convert(path, tmp_path / "there", "--optimizer_state")
    gpt2, ours = load(
        tmp_path / "there", CASES["mars-adamw"]._replace(ours={"param_rules": UNDECAYED, "is_approx": False})
    )
    go_on(gpt2, ours, STEPS, STEPS + 1, 1 / G)
    train(model, optimizer, STEPS, STEPS + 1)
    assert_same_weights(gpt2, model)
    torch.save(ours.state_dict(), tmp_path / "there" / "optimizer.pt")
    assert "has is_approx=False" in refused(tmp_path / "there", tmp_path / "back", "--to_nanogpt")


# --- a run that moves over -------------------------------------------------------------------------------------------


def official_config() -> dict[str, Any]:
    rest = {"max_iters": 8, "lr_decay_iters": 8, "warmup_iters": 2, "min_lr": 1e-3, "batch_size": 2, "grad_clip": 1.0}
    return CONFIG | rest | {"decay_lr": True, "eval_interval": 4, "dtype": "float32", "schedule": "cosine"}


def test_config_of_the_moved_run_says_what_the_checkpoint_says(tmp_path):
    convert(
        write(tmp_path, *trained(CASES["mars-adamw"]), config=official_config()), tmp_path / "out", "--optimizer_state"
    )
    run = arguments.parse(["--config", str(tmp_path / "out" / "pretrain.yaml"), "--use_cpu", "true"])
    assert (run.model.n_layer, run.model.n_head, run.model.n_embd, run.model.block_size) == (2, 3, 12, BLOCK)
    assert (run.model.activation_function, run.model.bias, run.model.vocab_size) == ("gelu_new", False, VOCAB)
    assert run.model.scale_attn_by_inverse_layer_idx and run.data.data_dir == "data/x"
    training = run.training
    assert (training.max_steps, training.warmup_steps, training.max_grad_norm) == (8, 2, 0.25)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.learning_rate, training.weight_decay) == (PEAK, 0.01)
    assert training.lr_scheduler_type == "cosine_with_min_lr" and training.lr_scheduler_kwargs == {"min_lr": 1e-3}
    optimizer = vars(run.optimizer)
    assert optimizer["optimizer"] == "mars_adamw" and optimizer["param_rules"] == [
        [pattern, settings] for pattern, settings in UNDECAYED
    ]
    assert (optimizer["lr_1d"], optimizer["weight_decay_1d"], optimizer["clip_threshold"]) == (0.01, 0.1, 0.25)
    text = (tmp_path / "out" / "pretrain.yaml").read_text()
    assert "sums 4 gradients" in text and "(step + 1)" not in text


def test_config_says_where_the_two_trainers_differ(tmp_path):
    changes = {"lr_decay_iters": 6, "schedule": "wsd"}
    path = write(tmp_path, *trained(CASES["adamw"]), config=official_config() | changes)
    convert(path, tmp_path / "out", "--optimizer_state")
    text = (tmp_path / "out" / "pretrain.yaml").read_text()
    for expected in ("minimum at step 6", "schedule was wsd", "divide it by the number of processes", "(step + 1)"):
        assert expected in text
    settings = yaml.safe_load(text)
    assert settings["data_dir"] == "data/x"
    assert settings["optimizers"]["adamw"]["learning_rate"] == PEAK and settings["max_grad_norm"] == 1.0
    path = write(tmp_path, *trained(CASES["adamw"]), config={"learning_rate": PEAK, "decay_lr": False})
    convert(path, tmp_path / "constant", "--optimizer_state")
    settings = yaml.safe_load((tmp_path / "constant" / "pretrain.yaml").read_text())
    assert settings["lr_scheduler_type"] == "constant"
    assert settings["data_dir"] == "data"  # not the embedded corpus


class Gradients(TrainerCallback):
    """Keep the gradients that the optimizer gets."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append({name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mars-adamw", "adamw"])
def test_recipe_goes_on_with_a_run_that_moved_over(tmp_path, tokens, monkeypatch, name):
    """The official optimizer, in float64 and on the gradients that Trainer computes, ends at the same weights."""
    monkeypatch.setattr("tiny_nanogpt.VOCAB", 512)
    case = CASES[name]
    torch.manual_seed(0)
    model = TinyGPT(case.code).float()
    optimizer = case.make(model)
    train(model, optimizer, 0, STEPS)
    lr = 1e-3 + (PEAK - 1e-3) * 0.9330127018922194  # the cosine after 3 of 8 steps, 2 of them warmup
    for group in optimizer.param_groups:
        group["lr"] = lr
    args = model.model_args() | {"vocab_size": 512}
    path = save(tmp_path / "ckpt.pt", model, optimizer, STEPS, args, official_config())
    convert(path, tmp_path / "there", "--optimizer_state")

    seen = Gradients()
    argv = ["--config", "pretrain.yaml", "--resume_from_checkpoint", ".", "--data_dir", tokens, "--output_dir", "run"]
    argv += ["--max_steps", "8", "--use_cpu", "true", "--sample_tokens", "0", "--max_eval_blocks", "4"]
    monkeypatch.chdir(tmp_path / "there")
    argv += ["--disable_tqdm", "true", "--cpu_threads", "1"]
    pretrain_gpt2.train([*map(str, argv)], lambda trainer: trainer.add_callback(seen))
    assert json.loads(Path("run/metrics.json").read_text())["steps"] == 8
    assert len(seen.seen) == 8 - STEPS

    model.double()
    for state in optimizer.state.values():
        state |= {key: value.double() for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim}
    params = dict(model.named_parameters())
    summed = 1 if case.code == "nanogpt" else G
    for step, found in enumerate(seen.seen, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 + (PEAK - 1e-3) * (1 + torch.tensor((step - 2) / 6 * torch.pi).cos().item()) / 2
        for key, param in params.items():
            param.grad = found[key].T if ".c_" in key else found[key]
            param.grad = param.grad * summed
        norm = torch.stack([param.grad.norm() for param in params.values()]).norm()
        for param in params.values():
            param.grad *= min(1.0, 1 / float(norm))
        optimizer.step()
    gpt2 = GPT2LMHeadModel.from_pretrained("run").double()
    assert_same_weights(gpt2, model, 2e-5)

    convert("run/checkpoint-8", "back", "--to_nanogpt", "--optimizer_state")
    content = torch.load("back/ckpt.pt", weights_only=True)
    assert (content["iter_num"], content["model_args"]) == (8, args)
    TinyGPT(case.code).load_state_dict(content["model"])
    for number, state in optimizer.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq", "last_grad"):
            if key in state and (key != "last_grad" or state[key].ndim == 2):
                found, expected = content["optimizer"]["state"][number][key].double(), state[key]
                assert (found - expected).norm() < 1e-3 * expected.norm()


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_states_that_do_not_fit_get_one_line(tmp_path):
    model, optimizer = trained(CASES["mars-adamw"])
    saved, config = optimizer.state_dict(), CONFIG

    def with_state(**changes: Any) -> dict[str, Any]:
        return saved | {"state": saved["state"] | {0: {**saved["state"][0], **changes}}}

    first = {key: value for key, value in saved["state"][0].items() if key != "last_grad"}
    groups = [dict(group) for group in saved["param_groups"]]
    moonlight = {number: {"use_muon": True, "momentum_buffer": torch.zeros(2)} for number in saved["state"]}
    two = saved | {"param_groups": [groups[0], groups[1] | {"lr": 0.5}]}
    decayed = saved | {"param_groups": [groups[0], groups[1] | {"weight_decay": 0.5}]}
    shorter = saved | {"param_groups": [groups[0], groups[1] | {"params": groups[1]["params"][1:]}]}
    without = {key: value for key, value in config.items() if key != "gradient_accumulation_steps"}
    for changes, expected in (
        ({"optimizer": None}, "has no optimizer; leave it out to convert the weights alone"),
        ({"optimizer": 3}, "optimizer is int"),
        ({"optimizer": {"state": {}}}, "is not laid out as expected (KeyError: 'param_groups')"),
        ({"optimizer": {"state": 1, "param_groups": groups}}, "is not laid out as expected"),
        ({"optimizer": saved | {"state": moonlight}}, "keeps momentum_buffer, use_muon; accepted are"),
        ({"optimizer": shorter}, "has groups of 8, 6 parameters"),
        ({"optimizer": saved | {"state": saved["state"] | {0: first}}}, "lacks last_grad, which a matrix under mars-"),
        ({"optimizer": saved | {"state": saved["state"] | {0: {}}}}, "no state for transformer.h.0.attn.c_attn.weight"),
        ({"optimizer": with_state(exp_avg=torch.zeros(3))}, "exp_avg of transformer.h.0.attn.c_attn.weight has the"),
        ({"optimizer": with_state(exp_avg=2.0)}, "exp_avg of transformer.h.0.attn.c_attn.weight has 2.0; its"),
        ({"optimizer": with_state(step="x")}, "step of transformer.h.0.attn.c_attn.weight is x, not a number"),
        ({"optimizer": two}, "has lr=0.5 for group 1 and 0.015 for group 0"),
        ({"optimizer": decayed}, "decays its embeddings by 0.5"),
        ({"config": {}}, "has gradient_accumulation_steps=None"),
        ({"config": without | {"gradient_accumulation_steps": 1, "learning_rate": 0}}, "learning_rate=0; the peak"),
        ({"config": config | {"is_approx": "perhaps"}}, "is_approx='perhaps'"),
    ):
        path = write(tmp_path, model, optimizer, **changes)
        assert expected in refused(path, tmp_path / "out")
        assert sorted(tmp_path.iterdir()) == [path]
    convert(write(tmp_path, model, optimizer, optimizer=None), tmp_path / "out")  # the weights alone
    assert not (tmp_path / "out" / "optimizer.pt").exists()


def test_states_that_the_other_side_has_no_place_for_get_one_line(tmp_path):
    case = CASES["mars-adamw"]
    convert(write(tmp_path, *trained(case)), tmp_path / "there", "--optimizer_state")
    gpt2, _ = load(tmp_path / "there", case)
    ids = torch.zeros(1, 4, dtype=torch.long)

    def saved(optimizer: Any) -> Path:
        gpt2(ids, labels=ids).loss.backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "there" / "optimizer.pt")
        return tmp_path / "there"

    back = (tmp_path / "back", "--to_nanogpt")
    named = [(name, param) for name, param in gpt2.named_parameters() if param.requires_grad]
    fits = {"param_rules": UNDECAYED, "clip_threshold": 0.25}
    for optimizer, expected in (
        (mars_hf.create(gpt2, clip_threshold=0.3), "clip_threshold=0.3; the official code clips sums"),
        (mars_hf.create(gpt2, clip_threshold=None), "clip_threshold=None; the official code clips sums"),
        (mars_hf.create(gpt2, second_moment="gradient"), "has second_moment=gradient"),
        (mars_hf.create(gpt2, **fits, lr_embeddings=1.0), "has lr=1.0 for transformer.w"),
        (mars_hf.create(gpt2, mars_type="mars-shampoo"), "in a group of role adamw, and the official code treats"),
        (mars_hf.create(named[:-1]), f"trains no {named[-1][0]}"),
        (mars_hf.create([param for _, param in named]), "have no names of parameters"),
        (torch.optim.AdamW([{"params": named}]), "give that number as --summed_micro_batches"),
        (torch.optim.NAdam([{"params": named}]), "accepted are AdamW and MARS"),
        (TorchFactory()(gpt2, optimizer="muon", lr=0.1, betas=(0.9, 0.9), eps=1e-8), "the state of muon; accepted are"),
    ):
        folder = saved(optimizer)
        notes = json.loads((folder / "nanogpt.json").read_text())
        (folder / "nanogpt.json").write_text(json.dumps(notes | {"summed_micro_batches": None}))
        assert expected in refused(folder, *back)
        assert not (tmp_path / "back").exists()
    folder = saved(mars_hf.create(gpt2, **fits))
    gpt2.config.scale_attn_by_inverse_layer_idx = False  # which alone would refuse it
    gpt2.save_pretrained(folder)
    line = refused(folder, *back, "--code", "nanogpt", "--activation_function", "gelu_new")
    assert "nanoGPT's trainer runs AdamW; give --code mars" in line
    assert "which is that of 4; leave it out" in refused(folder, *back, "--summed_micro_batches", "8")
    assert "trains no transformer.h.0.attn.c_attn.bias" in refused(folder, *back, "--bias", "true")
    content = torch.load(folder / "optimizer.pt", weights_only=True)
    torch.save(content | {"state": {}}, folder / "optimizer.pt")
    assert "has no state for transformer.h.0.attn.c_attn.weight" in refused(folder, *back)
    (folder / "optimizer.pt").write_bytes(b"x")
    assert "optimizer.pt is damaged" in refused(folder, *back)
    (folder / "optimizer.pt").unlink()
    assert "has no optimizer.pt; give a checkpoint of Trainer" in refused(folder, *back)


def test_biases_that_train_are_kept_even_while_they_are_zero(tmp_path):
    case = CASES["mars-adamw"]
    convert(write(tmp_path, *trained(case)), tmp_path / "there", "--optimizer_state")
    gpt2 = GPT2LMHeadModel.from_pretrained(tmp_path / "there")
    optimizer = mars_hf.create(gpt2, clip_threshold=0.25, param_rules=UNDECAYED, lr=0.0)
    ids = torch.zeros(1, 4, dtype=torch.long)
    gpt2(ids, labels=ids).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "there" / "optimizer.pt")
    line = refused(tmp_path / "there", tmp_path / "back", "--to_nanogpt")
    assert "trains transformer.h.0.attn.c_attn.bias" in line and "--bias true" in line
    convert(tmp_path / "there", tmp_path / "back", "--to_nanogpt", "--optimizer_state", "--bias", "true")
    model = TinyGPT("mars", bias=True).double()
    content = torch.load(tmp_path / "back" / "ckpt.pt", weights_only=True)
    model.load_state_dict(content["model"])
    OfficialMars(model, lr=PEAK, lr_1d=0.01, mars_type="mars-adamw").load_state_dict(content["optimizer"])
