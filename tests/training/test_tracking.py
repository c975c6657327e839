"""TrackingProbe: closed forms on a quadratic trained by MarsTrainer, and a run that does not notice it."""

from __future__ import annotations

import math

import datasets
import pytest
import torch
from helpers import gpt2
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import mars_hf
from mars_hf import TrackingProbe
from mars_hf.training.shadow_moments import Moment

SIZE, BATCH, STEPS = 20_000, 4, 80
CURVATURE, NOISE = 2.0, 3.0


class Quadratic(nn.Module):
    """A loss with the gradient CURVATURE * x plus the mean of a batch's noise."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.full((SIZE,), 0.5))

    def forward(self, noise):
        return {"loss": CURVATURE / 2 * self.x.square().sum() + (noise @ self.x).mean()}


class Noise(Dataset):
    """Independent noise, a vector for each sample."""

    def __len__(self):
        return 5000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"noise": NOISE * torch.randn(SIZE, generator=generator)}


def arguments(tmp_path, **settings):
    return TrainingArguments(
        **{
            **{"output_dir": str(tmp_path), "use_cpu": True, "max_steps": STEPS, "max_grad_norm": 0.0},
            **{"per_device_train_batch_size": BATCH, "report_to": [], "save_strategy": "no", "seed": 1},
            **settings,
        }
    )


def probe_of(tmp_path, steps_by=0.0, accumulation=1, **settings):
    """Train the quadratic along x_t = 0.5 - t * steps_by, with the probe; return it."""
    probe = TrackingProbe(every=STEPS, batches=2, betas=(0.9,), **{"clips": (None,), **settings})
    model = Quadratic()

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with torch.no_grad():
                model.x -= steps_by

    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = mars_hf.MarsTrainer(
        model,
        arguments(tmp_path, gradient_accumulation_steps=accumulation),
        train_dataset=Noise(),
        optimizers=(sgd, None),
        callbacks=[probe, Steps()],
    )
    trainer.train()
    return probe


@pytest.mark.slow
def test_a_quadratic_has_its_closed_forms(tmp_path):
    """Within 2%; noise of a moment as in test_shadow_moments.py."""
    speed = 0.02
    probe = probe_of(tmp_path, speed, gammas=(0.0, 0.05))
    truth = CURVATURE * (0.5 - speed * (STEPS - 1))
    variance = NOISE**2 / BATCH
    for moment, found in probe.means().items():
        gamma = moment.gamma if moment.is_approx else 0.0
        average = 0.1 / 1.9
        noise = ((1 - gamma) ** 2 * average + gamma**2 + 2 * gamma * (1 - gamma) * 0.1) * variance
        behind = (1 - moment.gamma) * 9 * CURVATURE * speed
        assert found["noise"] == pytest.approx(noise / truth**2, rel=0.02)
        assert found["lag"] == pytest.approx(behind**2 / truth**2, rel=0.02)
        assert found["error"] == pytest.approx((noise + behind**2) / truth**2, rel=0.02)
        weight = gamma * 9
        assert found["variance_ratio"] == pytest.approx((1 + weight) ** 2 + weight**2, rel=0.02)
        assert found["noise_scale"] == pytest.approx(NOISE**2 / truth**2, rel=0.02)
        assert found["cosine"] == pytest.approx(
            (truth - behind) / math.sqrt((truth - behind) ** 2 + noise) * (1 if truth > 0 else -1), rel=0.02
        )
    assert len(probe.means()) == 3
    line = probe.conclusion(0.9)
    best = min(probe.means(), key=lambda moment: probe.means()[moment]["error"])
    assert line.startswith(f"{best} would have tracked the gradient best here")
    assert str(Moment(0.9, 0.05, True, None)) in probe.table()


@pytest.mark.slow
def test_a_clipped_moment_has_its_closed_forms(tmp_path):
    """Within 2%. In many dimensions the norm of a corrected gradient is a constant, and clipping scales by it."""
    probe = probe_of(tmp_path, gammas=(0.0, 0.05), forms=("approx",), clips=(50.0,))
    truth, variance, average = CURVATURE * 0.5, NOISE**2 / BATCH, 0.1 / 1.9
    for moment, found in probe.means().items():
        weight = moment.gamma * 9
        factor = 50 / math.sqrt(SIZE * (truth**2 + ((1 + weight) ** 2 + weight**2) * variance))
        gamma = moment.gamma
        noise = ((1 - gamma) ** 2 * average + gamma**2 + 2 * gamma * (1 - gamma) * 0.1) * variance * factor**2
        assert found["noise"] == pytest.approx(noise / truth**2, rel=0.02)
        assert found["lag"] == pytest.approx((1 - factor) ** 2, rel=0.02)
        assert found["error"] == pytest.approx(noise / truth**2 + (1 - factor) ** 2, rel=0.02)
    assert {moment.clip_threshold for moment in probe.means()} == {50.0} and len(probe.means()) == 2
    assert " clip 50 would have tracked" in probe.conclusion()


@pytest.mark.slow
def test_the_noise_scale_counts_the_samples_of_all_micro_batches(tmp_path):
    probe = probe_of(tmp_path, accumulation=2, gammas=(0.0,))
    (found,) = probe.means().values()
    assert found["noise_scale"] == pytest.approx(NOISE**2 / (CURVATURE * 0.5) ** 2, rel=0.02)
    assert "Simple noise scale: 9 samples." in probe.table()


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path):
    rows = [{**{name: ids.tolist() for name, ids in Tokens()[index].items()}, "idx": index} for index in range(16)]
    probe = TrackingProbe(every=2, batches=2, betas=(0.9,), gammas=(0.0,))
    settings = arguments(tmp_path, max_steps=2)
    mars_hf.MarsTrainer(gpt2(), settings, train_dataset=datasets.Dataset.from_list(rows), callbacks=[probe]).train()
    assert {row["step"] for row in probe.rows} == {2}


def test_steps_whose_gradient_drowns_in_noise_are_left_out_of_medians():
    probe = TrackingProbe(betas=(0.9,), gammas=(0.0, 0.1), forms=("approx",), clips=(None,))
    for gamma, errors in ((0.0, (1.0, math.nan, 2.0, 0.5)), (0.1, (math.nan,) * 4)):
        for step, error in enumerate(errors):
            numbers = dict.fromkeys(("lag", "noise", "cosine", "variance_ratio", "noise_scale"), error)
            row = {"step": step, "scope": "all", "beta1": 0.9, "gamma": gamma, "form": "approx", "clip": None}
            probe.rows.append({**row, **numbers, "error": error})
    assert probe.means()[Moment(0.9, 0.0, True, None)]["error"] == 1.0
    assert probe.conclusion().startswith("beta1 0.9 gamma 0 would have tracked the gradient best here: error 1")
    del probe.rows[:4]
    assert probe.conclusion() == "the gradient drowned in its noise: measure with more than 64 micro-batches"
    assert "At 4 of 4 steps the gradient drowned in its noise." in probe.table()


def test_a_second_training_is_measured_anew(tmp_path):
    probe = TrackingProbe(every=2, batches=2, betas=(0.9,), gammas=(0.0,), clips=(None,))
    for _ in range(2):
        mars_hf.MarsTrainer(gpt2(), arguments(tmp_path, max_steps=2), train_dataset=Tokens(), callbacks=[probe]).train()
        assert [row["step"] for row in probe.rows if row["scope"] == "all"] == [2]


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("is_approx", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_run_is_the_one_without_it(tmp_path, is_approx, accumulation):
    ends = []
    for callbacks in ([], [TrackingProbe(every=2, batches=2)]):
        torch.manual_seed(0)
        model = gpt2(resid_pdrop=0.1, attn_pdrop=0.1)
        settings = arguments(tmp_path, max_steps=4, gradient_accumulation_steps=accumulation, max_grad_norm=1.0)
        trainer = mars_hf.MarsTrainer(
            model,
            settings,
            train_dataset=Tokens(),
            optimizers=(mars_hf.create(model, is_approx=is_approx), None),
            callbacks=callbacks,
        )
        trainer.train()
        ends.append([param.detach() for param in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))
    (probe,) = callbacks
    assert {row["step"] for row in probe.rows} == {2, 4}
    scopes = {row["scope"] for row in probe.rows}
    assert {"all", "matrix", "vector", "embedding", "layer 0"} <= scopes
    assert len(probe.rows) == 2 * len(scopes) * len(probe.moments)
    assert any(math.isfinite(row["noise"]) for row in probe.rows)  # NaN where the norm of G drowns in its noise


class Counting(mars_hf.MarsTrainer):
    """Takes the labels out of its inputs, and counts and logs as its documentation says."""

    seen = rows = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        self.rows += len(labels)
        if not self.in_stale_pass:
            self.seen += len(labels)
        self.log({"rows": float(self.rows)})
        return super().compute_loss(model, {**inputs, "labels": labels}, return_outputs, num_items_in_batch)


def test_passes_of_the_probe_do_not_count(tmp_path):
    settings = arguments(tmp_path, max_steps=4, label_smoothing_factor=0.1, logging_steps=1)
    ends = []
    for callbacks in ([], [TrackingProbe(every=2, batches=2)]):
        torch.manual_seed(0)
        trainer = Counting(gpt2(), settings, train_dataset=Tokens(), callbacks=callbacks)
        trainer.train()
        ends.append(
            (trainer.seen, trainer.rows, [row.get("rows", row.get("loss")) for row in trainer.state.log_history])
        )
    assert ends[0] == ends[1] and ends[0][:2] == (16, 16)


@pytest.mark.parametrize(("size", "steps"), [(11, {3, 6}), (9, {3, 6}), (3, {1, 2})])
def test_the_last_batch_of_an_epoch_may_be_odd(tmp_path, size, steps):
    """Of 3 samples, of 1, and of 3 that are all there are."""

    class Few(Tokens):
        def __len__(self):
            return size

    probe = TrackingProbe(every=min(steps), batches=2, betas=(0.9,), gammas=(0.0, 0.1))
    settings = arguments(tmp_path, max_steps=max(steps))
    mars_hf.MarsTrainer(gpt2(), settings, train_dataset=Few(), callbacks=[probe]).train()
    assert {row["step"] for row in probe.rows} == steps


@pytest.mark.parametrize(
    ("optimizer", "beta1"),
    [
        (lambda model: mars_hf.create(model, mars_type="mars-m", betas=(0.8, 0.95), betas_1d=(0.7, 0.95)), 0.8),
        (lambda model: torch.optim.AdamW(model.parameters(), betas=(0.6, 0.95)), 0.6),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), 0.5),
        (lambda model: torch.optim.Adagrad(model.parameters()), None),
    ],
)
def test_it_knows_the_beta1_of_the_run(tmp_path, optimizer, beta1):
    model = gpt2()
    probe = TrackingProbe(every=1, batches=2, betas=(0.9,), gammas=(0.0,))
    settings = arguments(tmp_path, max_steps=1)
    mars_hf.MarsTrainer(
        model, settings, train_dataset=Tokens(), optimizers=(optimizer(model), None), callbacks=[probe]
    ).train()
    assert probe.beta1 == beta1


def test_stale_gradients_are_those_of_the_same_batch(tmp_path):
    """With steps that move nothing the exact correction vanishes, and the approximate one does not."""
    model = gpt2()
    probe = TrackingProbe(every=3, batches=2, betas=(0.9,), gammas=(0.1,), clips=(None,))
    settings = arguments(tmp_path, max_steps=3, learning_rate=1e-9)
    mars_hf.MarsTrainer(model, settings, train_dataset=Tokens(), callbacks=[probe]).train()
    ratios = {row["form"]: row["variance_ratio"] for row in probe.rows if row["scope"] == "all"}
    assert ratios["exact"] == pytest.approx(1, rel=1e-4)
    assert ratios["approx"] > 2


def test_parts_add_up_to_the_whole(tmp_path):
    model = gpt2()
    probe = TrackingProbe(every=2, batches=2, betas=(0.9,), gammas=(0.05,), clips=(None,))
    settings = arguments(tmp_path, max_steps=2)
    mars_hf.MarsTrainer(model, settings, train_dataset=Tokens(), callbacks=[probe]).train()
    rows = {(row["scope"], row["form"]): row for row in probe.rows}
    assert rows["all", "approx"]["error"] == pytest.approx(
        rows["all", "approx"]["lag"] + rows["all", "approx"]["noise"]
    )
    with pytest.raises(ValueError, match="scope='head' was not measured; there are"):
        probe.means("head")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every=0"),
        ({"batches": 3}, "even number"),
        ({"betas": (1.0,)}, "betas="),
        ({"gammas": ()}, "gammas="),
        ({"forms": ("both",)}, "forms="),
        ({"clips": (0.0,)}, "clips=.*each > 0, or None"),
        ({"gammas": (math.inf,)}, "gammas=.*each >= 0 and finite"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        TrackingProbe(**settings)


def test_what_it_cannot_measure_is_said(tmp_path):
    probe = TrackingProbe()
    with pytest.raises(RuntimeError, match=r"which Trainer does not offer; use mars_hf\.MarsTrainer"):
        Trainer(gpt2(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[probe]).train()
    single = arguments(tmp_path, per_device_train_batch_size=1)
    with pytest.raises(ValueError, match="splits a step in two halves"):
        mars_hf.MarsTrainer(gpt2(), single, train_dataset=Tokens(), callbacks=[TrackingProbe()]).train()
