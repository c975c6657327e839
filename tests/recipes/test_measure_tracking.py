"""The command that measures tracking along a run of the recipe."""

from __future__ import annotations

import json

import measure_tracking
import pytest
from helpers import refused
from PIL import Image
from pretraining.compare import figures
from test_resuming import TINY, load_file, run, torch

PROBE = ["--every", "4", "--batches", "4", "--betas", "0.9", "0.95", "--gammas", "0", "0.05", "--clips", "0"]


@pytest.mark.slow
def test_a_run_is_measured_and_not_changed(tokens, tmp_path, capsys):
    output = tmp_path / "measured"
    measure_tracking.main([*PROBE, *TINY, "--data_dir", str(tokens), "--output_dir", str(output), "--beta1", "0.9"])
    printed = capsys.readouterr().out
    found = json.loads((output / "tracking.json").read_text())
    assert found["conclusion"] in printed and found["conclusion"].startswith("beta1 0.9 gamma ")
    assert {row["step"] for row in found["rows"]} == {4, 8}
    assert {"all", "matrix", "embedding", "vector", "layer 0"} == {row["scope"] for row in found["rows"]}
    page = (output / "tracking.md").read_text()
    assert found["conclusion"] in page and "| beta1 0.95 gamma 0.05 exact |" in page and "## layer 0" in page
    assert page.count("Simple noise scale: ") == 5
    with Image.open(output / "tracking.png") as picture:
        assert picture.size[0] > 600

    run(tmp_path / "plain", tokens, "--beta1", "0.9")
    measured, plain = (load_file(folder / "model.safetensors") for folder in (output, tmp_path / "plain"))
    assert all(torch.equal(measured[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_moments_that_are_all_clipped_at_another_beta1(tokens, tmp_path):
    output = tmp_path / "clipped"
    grid = ["--every", "4", "--batches", "4", "--betas", "0.8", "--gammas", "0", "0.05", "--clips", "0.5", "1"]
    measure_tracking.main([*grid, *TINY, "--data_dir", str(tokens), "--output_dir", str(output)])
    assert " clip 1 would have tracked" in json.loads((output / "tracking.json").read_text())["conclusion"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--every", "0"], "--every: '0' is not"),
        (["--batches", "3"], "--batches 3: give an even number"),
        (["--betas", "1.5"], "--betas: '1.5' is not a number from 0 to below 1"),
        (["--gammas", "inf"], "--gammas: 'inf' is not a finite number from 0 on"),
        (["--forms", "both"], "--forms: invalid choice: 'both'"),
        (["--per_device_train_batch_size", "1"], "--per_device_train_batch_size 1: a measurement halves"),
        (["--max_steps", "4"], "--every 50: the run has 4 steps; give 4 or fewer"),
        (["--optimizer", "sgd"], "--optimizer 'sgd' is unknown"),
        (["--resume_from_checkpoint", "true"], "resume_from_checkpoint: checkpoints hold no averages"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, argv, line, capsys):
    with pytest.raises(SystemExit) as end:
        measure_tracking.main([*argv, "--output_dir", str(tmp_path / "run")])
    assert end.value.code == 2
    assert line in capsys.readouterr().err


def test_several_processes_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        measure_tracking.main(["--output_dir", str(tmp_path / "run")])
    assert capsys.readouterr().err.startswith("measure_tracking.py: 2 processes: a measurement runs in one; start one")


@pytest.mark.slow
def test_epochs_that_end_before_the_first_measurement(tokens, tmp_path):
    epochs = ["--max_steps", "-1", "--num_train_epochs", "0.002", "--warmup_steps", "0"]
    with refused("--every 100: the run ended before step 100; give fewer steps"):
        measure_tracking.main(
            ["--every", "100", *TINY, *epochs, "--data_dir", str(tokens), "--output_dir", str(tmp_path / "run")]
        )


@pytest.mark.slow
def test_a_run_that_was_finished_before(tokens, tmp_path):
    argv = [*PROBE, *TINY, "--data_dir", str(tokens), "--output_dir", str(tmp_path / "run")]
    measure_tracking.main(argv)
    with refused(r"run holds a finished run; give another --output_dir"):
        measure_tracking.main(argv)


def row(beta1, gamma, form, **numbers):
    found = {"error": 1.0, "lag": 0.5, "noise": 0.5, "cosine": 0.5, **numbers}
    return {"scope": "all", "clip": None, "step": 4, "beta1": beta1, "gamma": gamma, "form": form, **found}


@pytest.mark.parametrize("form", ["approx", "exact"])
def test_the_picture_has_the_forms_that_were_measured(tmp_path, monkeypatch, form):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.append(figure))
    figures.tracking([row(0.9, 0.0, form), row(0.9, 0.1, form, lag=-0.1)], tmp_path / "tracking.png")
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"{form}: {name}" for name in ("error", "lag", "noise")]
    assert figure.axes[0].get_yscale() == "linear"  # a logarithmic one would leave a negative lag out
    figures.plt.close(figure)


@pytest.mark.slow
def test_moments_at_the_beta1_of_the_run_are_compared(tokens, tmp_path):
    """Its default counts too."""
    grid = ["--every", "4", "--batches", "4", "--betas", "0.5", "0.9", "--gammas", "0", "0.025", "--clips", "0"]
    argv = [*grid, *TINY, "--optimizer", "mars_adamw", "--data_dir", str(tokens), "--output_dir", str(tmp_path / "run")]
    measure_tracking.main(argv)
    conclusion = json.loads((tmp_path / "run" / "tracking.json").read_text())["conclusion"]
    beta1 = json.loads((tmp_path / "run" / "metrics.json").read_text())["groups"][0]["betas"][0]
    assert f"beta1 {beta1:g} " in conclusion and conclusion.count("beta1") == 3 == conclusion.count(f"beta1 {beta1:g} ")
