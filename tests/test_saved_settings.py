"""mars.json, and the settings that create(like=...) takes up."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from torch import nn

import mars_hf
from mars_hf import saved_settings
from mars_hf.settings import DEFAULTS, MODEL_DEFAULTS, SETTINGS


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.linear = nn.Linear(4, 4)


def settings_of(mars: mars_hf.Mars) -> list[dict]:
    return [{key: value for key, value in group.items() if key != "params"} for group in mars.param_groups]


def leave(folder, mars) -> None:
    saved_settings.write(folder, "0.1.0", mars.created_with, [])


def as_json(groups: list[dict]) -> str:
    return json.dumps(groups, default=str).replace("torch.", "")  # a dtype, or its name


def edit(folder, **changes) -> None:
    path = folder / "mars.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


# Every setting that is kept, each with a value that is not its default.
OTHERS = {
    **{"lr": 2e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.1, "gamma": 0.05, "is_approx": False},
    **{"clip_threshold": None, "amsgrad": True, "optimize_1d": True, "lr_1d": 1e-3, "betas_1d": (0.8, 0.9)},
    **{"weight_decay_1d": 0.01, "second_moment": "gradient"},
    **{"state_dtype": torch.bfloat16, "rounding": "kahan", "maximize": True, "lr_embeddings": 4e-3},
    "param_rules": [("*wte*", {"weight_decay": 0.0}), ("linear.*", {"lr": 5e-4, "betas": (0.7, 0.8)})],
}
ORTHOGONAL = {
    **{"mars_type": "mars-m", "ns_steps": 2, "ns_coefficients": [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5)]},
    **{"ns_dtype": torch.float32},
    "split_fused": {"linear.weight": [2, 2]},
}


def test_examples_are_complete():
    assert OTHERS.keys() | ORTHOGONAL.keys() == set(saved_settings.KEPT)
    assert set(SETTINGS) - set(saved_settings.KEPT) == {"max_grad_norm", "fused"}


@pytest.mark.parametrize("settings", [{}, OTHERS, ORTHOGONAL], ids=["defaults", "others", "orthogonal"])
def test_like(tmp_path, settings):
    first = mars_hf.create(Tiny(), **settings)
    leave(tmp_path, first)
    second = mars_hf.create(Tiny(), like=tmp_path)
    assert as_json(settings_of(second)) == as_json(settings_of(first))


def test_defaults_are_written(tmp_path):
    leave(tmp_path, mars_hf.create(Tiny()))
    created = json.loads((tmp_path / "mars.json").read_text())["create"]
    defaults = {**DEFAULTS, **MODEL_DEFAULTS}
    assert created == json.loads(json.dumps({name: defaults[name] for name in saved_settings.KEPT}))


@pytest.mark.parametrize("given", [{"gamma": 0.0}, {"param_rules": []}, {"lr_embeddings": None}, {"betas": (0.5, 0.6)}])
def test_arguments_win(tmp_path, given):
    leave(tmp_path, mars_hf.create(Tiny(), **OTHERS))
    mars = mars_hf.create(Tiny(), like=tmp_path / "mars.json", **given)
    assert settings_of(mars) == settings_of(mars_hf.create(Tiny(), **{**OTHERS, "state_dtype": "bfloat16", **given}))


def test_rates_of_vectors(tmp_path):
    leave(tmp_path, mars_hf.create(Tiny(), lr=2e-3))
    assert mars_hf.create(Tiny(), like=tmp_path, lr=1e-3).param_groups[1]["lr"] == 5e-4
    leave(tmp_path, mars_hf.create(Tiny(), lr=2e-3, lr_1d=1e-3))
    assert mars_hf.create(Tiny(), like=tmp_path, lr=1e-3).param_groups[1]["lr"] == 1e-3


def test_settings_that_are_not_kept(tmp_path):
    leave(tmp_path, mars_hf.create(Tiny(), max_grad_norm=1.0, fused=False))
    mars = mars_hf.create(Tiny(), like=str(tmp_path))
    assert mars.max_grad_norm is None and mars.param_groups[0]["fused"] is None


def test_plain_parameters(tmp_path):
    leave(tmp_path, mars_hf.create(Tiny().parameters(), gamma=0.05))
    assert mars_hf.create(Tiny().parameters(), like=tmp_path).param_groups[0]["gamma"] == 0.05
    leave(tmp_path, mars_hf.create(Tiny(), lr_embeddings=1e-3))
    with pytest.raises(ValueError, match="plain parameters have neither names nor modules"):
        mars_hf.create(Tiny().parameters(), like=tmp_path)


def test_values_without_json(tmp_path):
    rules = iter([("*wte*", {"lr": np.float64(0.5)})])  # read once, by create
    mars = mars_hf.create(Tiny(), lr=torch.tensor(2e-3), gamma=np.float64(0.05), param_rules=rules)
    leave(tmp_path, mars)
    created = json.loads((tmp_path / "mars.json").read_text())["create"]
    assert (
        created["lr"] == pytest.approx(2e-3)
        and created["gamma"] == 0.05
        and created["param_rules"] == [["*wte*", {"lr": 0.5}]]
    )


def test_failed_write(tmp_path, monkeypatch):
    leave(tmp_path, mars_hf.create(Tiny(), gamma=0.05))

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "replace", full)
    with pytest.raises(OSError, match="No space"):
        leave(tmp_path, mars_hf.create(Tiny(), gamma=0.1))
    assert os.listdir(tmp_path) == ["mars.json"]
    assert mars_hf.create(Tiny(), like=tmp_path).param_groups[0]["gamma"] == 0.05


# --- what cannot be taken up ------------------------------------------------------------------------------------------


def refusal(like) -> str:
    with pytest.raises(ValueError) as raised:
        mars_hf.create(Tiny(), like=like)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("create", "line"),
    [
        ({"lr": "fast"}, "lr='fast' is not valid; accepted: a finite number >= 0"),
        ({"betas": [0.9]}, "betas=[0.9] is not valid; accepted: two numbers in [0, 1)"),
        ({"mars_type": ["mars-m"]}, "mars_type=['mars-m'] is not valid; did you mean 'mars-m'"),
        ({"split_fused": {"a": ["b"]}}, "split_fused={'a': ['b']} is not valid"),
        ({"param_rules": [["*", {"lr": -1}]]}, "param_rules '*': lr=-1 is not valid"),
        ({"warp": 9}, ", of mars_hf '9.1': create: unknown 'warp'; accepted: lr, "),
        ({"max_grad_norm": 1.0}, "unknown 'max_grad_norm'"),
        (None, "holds no arguments of create: the optimizer was made as Mars(params)"),
    ],
)
def test_wrong_values(tmp_path, create, line):
    leave(tmp_path, mars_hf.create(Tiny()))
    edit(tmp_path, create=create, mars_hf="9.1")
    found = refusal(tmp_path)
    assert found.startswith(f"like='{tmp_path}': its mars.json") and line in found


def test_unknown_setting(tmp_path):
    leave(tmp_path, mars_hf.create(Tiny()))
    edit(tmp_path, create={"warp": 9})
    assert "unknown 'warp'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"lr": 1}', "cannot be read (KeyError('create'))"),
        ('{"create": {"lr": -1}, "mars_hf": "9.1"}', "of mars_hf '9.1': lr=-1"),
        ("[" * 100_000, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_wrong_files(tmp_path, text, line):
    (tmp_path / "mars.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert line in refusal(tmp_path)


def test_optimizer_made_by_hand(tmp_path):
    leave(tmp_path, mars_hf.Mars(Tiny().parameters(), lr=1e-3))
    assert json.loads((tmp_path / "mars.json").read_text())["create"] is None
    assert "give the settings in its 'groups' yourself" in refusal(tmp_path)


def test_no_settings(tmp_path):
    assert "the folder has no mars.json, which Trainer leaves" in refusal(tmp_path)
    assert "no such folder, and the Hub does not give" in refusal(tmp_path / "nowhere")


def test_offline(monkeypatch, tmp_path):
    """The tests run with HF_HUB_OFFLINE=1."""
    line = refusal("nobody/nothing")
    assert "no such folder, and the Hub does not give its mars.json (LocalEntryNotFoundError" in line
