"""The command that measures tracking along a run of the recipe."""

from __future__ import annotations

import json

import measure_tracking
import pytest
from PIL import Image
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
        (["--batches", "3"], "--batches=3: give an even number"),
        (["--betas", "1.5"], "--betas=[1.5]: give one value or more"),
        (["--forms", "both"], "--forms=['both']: give one value or more"),
        (["--optimizer", "sgd"], "--optimizer 'sgd' is unknown"),
        (["--resume_from_checkpoint", "true"], "resume_from_checkpoint: checkpoints hold no averages"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, argv, line, capsys):
    with pytest.raises(SystemExit) as end:
        measure_tracking.main([*argv, "--output_dir", str(tmp_path / "run")])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"measure_tracking.py: {line}")


@pytest.mark.slow
def test_a_run_that_ends_before_the_first_measurement(tokens, tmp_path):
    with pytest.raises(SystemExit, match="--every 100: the run ended before step 100"):
        measure_tracking.main(
            ["--every", "100", *TINY, "--data_dir", str(tokens), "--output_dir", str(tmp_path / "run")]
        )
