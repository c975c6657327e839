"""The command that measures tracking along a run of the recipe."""

from __future__ import annotations

import json

import measure_tracking
import pretrain_gpt2
import pytest
import torch
from PIL import Image
from pretraining.compare import figures
from pretraining.compare.tracking import Moment
from safetensors.torch import load_file

TINY = [
    *("--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "32", "--embedded_vocab_size", "512"),
    *("--max_steps", "8", "--warmup_steps", "2", "--eval_steps", "4", "--max_eval_blocks", "8", "--cpu_threads", "1"),
    *("--per_device_train_batch_size", "4", "--sample_tokens", "0", "--disable_tqdm", "true"),
]


def grid(betas: list[str], clips: list[str], gammas: tuple[str, ...] = ("0", "0.05")) -> list[str]:
    return ["--every", "4", "--batches", "4", "--betas", *betas, "--gammas", *gammas, "--clips", *clips]


@pytest.mark.slow
def test_run_is_measured_and_not_changed(tokens, tmp_path, capsys):
    output = tmp_path / "measured"
    argv = [*TINY, "--data_dir", str(tokens), "--beta1", "0.9"]
    measured = [*grid(["0.9", "0.95"], ["0"]), *argv, "--output_dir", str(output)]
    measure_tracking.main(measured)
    printed = capsys.readouterr().out
    result = json.loads((output / "tracking.json").read_text())
    assert result["conclusion"] in printed and result["conclusion"].startswith("beta1 0.9 gamma ")
    assert {row["step"] for row in result["rows"]} == {4, 8}
    assert {"all", "matrix", "embedding", "vector", "layer 0"} == {row["scope"] for row in result["rows"]}
    page = (output / "tracking.md").read_text()
    assert result["conclusion"] in page and "| beta1 0.95 gamma 0.05 exact |" in page and "## layer 0" in page
    with Image.open(output / "tracking.png") as picture:
        assert picture.size[0] > 600

    pretrain_gpt2.main([*argv, "--output_dir", str(tmp_path / "plain")])
    changed, plain = (load_file(folder / "model.safetensors") for folder in (output, tmp_path / "plain"))
    assert all(torch.equal(changed[name], plain[name]) for name in plain)
    with pytest.raises(SystemExit):
        measure_tracking.main(measured)  # a finished run is not measured again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "beta1", "ending"),
    [(grid(["0.8"], ["0.5", "1"]), "0.8", " clip 1"), (grid(["0.5", "0.9"], ["0"], ("0", "0.025")), "0.9", "")],
    ids=["all clipped", "default beta1"],
)
def test_conclusion_is_about_the_beta1_of_the_run(tokens, tmp_path, settings, beta1, ending):
    output = tmp_path / "run"
    argv = [*settings, *TINY, "--optimizer", "mars_adamw", "--data_dir", str(tokens), "--output_dir", str(output)]
    measure_tracking.main(argv)
    conclusion = json.loads((output / "tracking.json").read_text())["conclusion"]
    assert conclusion.count("beta1") == conclusion.count(f"beta1 {beta1} ") == 3
    assert f"{ending} would have tracked" in conclusion


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--every", "0"], "--every 0 --batches 64: give 1 or more, and an even number"),
        (["--batches", "3"], "--every 50 --batches 3: give 1 or more"),
        (["--betas", "1.5"], "--betas [1.5]: give numbers from 0 to below 1"),
        (["--per_device_train_batch_size", "1"], "--per_device_train_batch_size 1: a measurement halves"),
        (["--max_steps", "4"], "--every 50: the run has 4 steps; give that or fewer"),
        (["--resume_from_checkpoint", "true"], "resume_from_checkpoint: checkpoints hold no averages"),
    ],
)
def test_wrong_arguments(tmp_path, argv, line, capsys):
    with pytest.raises(SystemExit) as end:
        measure_tracking.main([*argv, "--output_dir", str(tmp_path / "run")])
    assert end.value.code == 2
    assert f"measure_tracking.py: {line}" in capsys.readouterr().err


def test_several_processes_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        measure_tracking.main(["--output_dir", str(tmp_path / "run")])
    assert "2 processes: a measurement runs in one; start one" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["approx", "exact"])
def test_picture_has_the_forms_that_were_measured(tmp_path, monkeypatch, form):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    numbers = {"error": 1.0, "lag": 0.5, "noise": 0.5, "cosine": 0.5}
    medians = {Moment(0.9, 0.0, form, None): numbers, Moment(0.9, 0.1, form, None): {**numbers, "lag": -0.1}}
    measure_tracking.draw(medians, tmp_path / "tracking.png")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [f"beta1 0.9, {form}"]
    assert [axes.get_title() for axes in drawn[0].axes] == ["error", "lag", "noise"]
    assert drawn[0].axes[0].get_yscale() == "linear"  # a logarithmic one would leave a negative lag out
    figures.plt.close(drawn[0])
