"""The picture of a run."""

from __future__ import annotations

import math
import sys

from PIL import Image

from mars_hf.training import loss_curve

ROWS = [{"step": step, "loss": 4.0 - step / 10} for step in range(1, 6)]
EVALUATIONS = [{"step": 2, "eval_loss": 4.1}, {"step": 5, "eval_loss": 3.9}]


def test_a_curve_is_drawn(tmp_path):
    assert loss_curve.draw([*ROWS, *EVALUATIONS], tmp_path / "x.png", "a title")
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.format == "PNG" and picture.size == (840, 504)
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 50
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_a_few_points_are_no_curve(tmp_path):
    assert not loss_curve.draw(ROWS, tmp_path / "x.png", "a title")
    rows = [*ROWS, {"step": 6, "loss": math.nan}, {"step": 6, "train_loss": 3.5}, {"eval_loss": 3.0}]
    assert not loss_curve.draw(rows, tmp_path / "x.png", "a title")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not loss_curve.draw([*ROWS, *EVALUATIONS], tmp_path / "x.png", "a title")


def test_losses_of_several_data_sets_are_curves():
    names = ["eval_loss", "eval_en_loss", "loss", "eval_accuracy", "train_loss"]
    assert [loss_curve.is_held_out_loss(name) for name in names] == [True, True, False, False, False]
