"""mars.json, and the settings that create(like=...) takes up."""

from __future__ import annotations

import json
import os
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import mars_hf
from mars_hf.groups import saved_settings
from mars_hf.groups.settings import DEFAULTS, MODEL_DEFAULTS, SETTINGS


def tiny() -> nn.ModuleDict:
    return nn.ModuleDict({"wte": nn.Embedding(8, 4), "linear": nn.Linear(4, 4)})


def settings_of(mars: mars_hf.Mars) -> list[dict]:
    return [{key: value for key, value in group.items() if key != "params"} for group in mars.param_groups]


def leave(folder, mars) -> dict:
    """Write mars.json and return its arguments of create."""
    saved_settings.write(folder, "0.1.0", mars.created_with, [])
    return json.loads((folder / "mars.json").read_text())["create"]


# Every setting that is kept, each with a value that is not its default.
OTHERS = {
    **{"lr": 2e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.1, "gamma": 0.05, "is_approx": False},
    **{"clip_threshold": None, "amsgrad": True, "optimize_1d": True, "lr_1d": 1e-3, "betas_1d": (0.8, 0.9)},
    **{"weight_decay_1d": 0.01, "weight_decay_mode": "cautious", "second_moment": "gradient"},
    **{"state_dtype": torch.bfloat16, "rounding": "kahan", "maximize": True, "lr_embeddings": 4e-3},
    "param_rules": [("*wte*", {"weight_decay": 0.0}), ("linear.*", {"lr": 5e-4, "betas": (0.7, 0.8)})],
}
ORTHOGONAL = {
    **{"mars_type": "mars-m", "ns_steps": 2, "ns_coefficients": [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5)]},
    **{"ns_dtype": torch.float32, "normalize_rows": 0.9},
    "split_fused": {"linear.weight": [2, 2]},
}


@pytest.mark.parametrize("settings", [{}, OTHERS, ORTHOGONAL], ids=["defaults", "others", "orthogonal"])
def test_like_a_saved_run(tmp_path, settings):
    first = mars_hf.create(tiny(), **{"lr": 3e-3, **settings})
    leave(tmp_path, first)
    groups = [settings_of(mars) for mars in (first, mars_hf.create(tiny(), like=tmp_path))]
    texts = [json.dumps(group, default=str).replace("torch.", "") for group in groups]  # a dtype, or its name
    assert texts[0] == texts[1]


def test_kept_settings(tmp_path):
    assert (
        OTHERS.keys() | ORTHOGONAL.keys()
        == set(saved_settings.KEPT)
        == set(SETTINGS) - {"max_grad_norm", "fused", "adamw_rates", "release_gradients"}
    )
    defaults = {name: {**DEFAULTS, **MODEL_DEFAULTS}[name] for name in saved_settings.KEPT}
    assert leave(tmp_path, mars_hf.create(tiny(), lr=3e-3)) == json.loads(json.dumps(defaults))
    leave(tmp_path, mars_hf.create(tiny(), max_grad_norm=1.0, fused=False, lr=3e-3))
    mars = mars_hf.create(tiny(), like=str(tmp_path))
    assert mars.max_grad_norm is None and mars.param_groups[0]["fused"] is None


@pytest.mark.parametrize("given", [{"gamma": 0.0}, {"param_rules": []}, {"lr_embeddings": None}, {"betas": (0.5, 0.6)}])
def test_arguments_win(tmp_path, given):
    leave(tmp_path, mars_hf.create(tiny(), **OTHERS))
    mars = mars_hf.create(tiny(), like=tmp_path / "mars.json", **given)
    assert settings_of(mars) == settings_of(mars_hf.create(tiny(), **{**OTHERS, "state_dtype": "bfloat16", **given}))


@pytest.mark.parametrize(("stated", "expected"), [({}, 5e-4), ({"lr_1d": 1e-3}, 1e-3)])
def test_rates_of_vectors(tmp_path, stated, expected):
    leave(tmp_path, mars_hf.create(tiny(), lr=2e-3, **stated))
    assert mars_hf.create(tiny(), like=tmp_path, lr=1e-3).param_groups[1]["lr"] == expected


def test_plain_parameters(tmp_path):
    leave(tmp_path, mars_hf.create(tiny().parameters(), gamma=0.05, lr=3e-3))
    assert mars_hf.create(tiny().parameters(), like=tmp_path).param_groups[0]["gamma"] == 0.05
    leave(tmp_path, mars_hf.create(tiny(), lr_embeddings=1e-3, lr=3e-3))
    with pytest.raises(ValueError, match="plain parameters have neither names nor modules"):
        mars_hf.create(tiny().parameters(), like=tmp_path)


def test_values_without_json(tmp_path):
    rules = iter([("*wte*", {"lr": np.float64(0.5)})])  # read once, by create
    mars = mars_hf.create(tiny(), lr=torch.tensor(2e-3), gamma=np.float64(0.05), param_rules=rules)
    expected = {"gamma": 0.05, "param_rules": [["*wte*", {"lr": 0.5}]], "lr": pytest.approx(2e-3)}
    created = leave(tmp_path, mars)
    assert {name: created[name] for name in expected} == expected


def test_failed_write(tmp_path, monkeypatch):
    leave(tmp_path, mars_hf.create(tiny(), gamma=0.05, lr=3e-3))
    before = (tmp_path / "mars.json").read_bytes()
    monkeypatch.setattr(type(tmp_path), "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        leave(tmp_path, mars_hf.create(tiny(), gamma=0.1, lr=3e-3))
    assert os.listdir(tmp_path) == ["mars.json"] and (tmp_path / "mars.json").read_bytes() == before


# --- what cannot be taken up ------------------------------------------------------------------------------------------


def refusal(like) -> str:
    with pytest.raises(ValueError) as raised:
        mars_hf.create(tiny(), like=like)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("create", "line"),
    [
        ({"lr": "fast"}, "lr='fast' is not valid; accepted: a finite number >= 0"),
        ({"mars_type": ["mars-m"]}, "mars_type=['mars-m'] is not valid; did you mean 'mars-m'"),
        ({"param_rules": [["a.*", {"gama": 1}]]}, "unknown 'gama'"),
        ({"param_rules": [["a.*"]]}, "is not an override"),
        ({"param_rules": "a.*"}, "is not a list of overrides"),
        ({"warp": 9}, ", of mars_hf '9.1': create: unknown 'warp'; accepted: lr, "),
        ({"max_grad_norm": 1.0}, "unknown 'max_grad_norm'"),
    ],
)
def test_wrong_values(tmp_path, create, line):
    (tmp_path / "mars.json").write_text(json.dumps({"create": create, "mars_hf": "9.1"}))
    message = refusal(tmp_path)
    assert message.startswith(f"like='{tmp_path}': its mars.json") and line in message


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"lr": 1}', b"[" * 100_000, b"\xff\xfe"], ids=len)
def test_wrong_files(tmp_path, text):
    (tmp_path / "mars.json").write_bytes(text)
    assert "cannot be read" in refusal(tmp_path)


def test_optimizer_made_by_hand(tmp_path):
    leave(tmp_path, mars_hf.Mars(tiny().parameters(), lr=1e-3))
    line = refusal(tmp_path)
    assert "its mars.json has no create() arguments: the run used Mars(params)" in line
    assert "Copy the settings you want from its 'groups'" in line


def test_no_settings(tmp_path):
    """The tests run with HF_HUB_OFFLINE=1."""
    assert "the folder has no mars.json, which Trainer leaves" in refusal(tmp_path)
    assert "no such folder, and the Hub does not give" in refusal(tmp_path / "nowhere")
    assert "the Hub does not give its mars.json (LocalEntryNotFoundError" in refusal("nobody/nothing")


@pytest.mark.parametrize("name", ["/nowhere", "./run", "~/no/run", "a/b/c", "x" * 5000, "~nobody_here/run", "a\0b"])
def test_names_of_no_folder_and_no_repository(name):
    """In our own words: the Hub's would explain the names of its repositories."""
    line = refusal(name)
    assert "no such folder" in line and "Repo id" not in line and len(line) < 400


def test_near_names_of_folders(tmp_path):
    (tmp_path / "run-large").mkdir()
    assert f"did you mean {str(tmp_path / 'run-large')!r}?" in refusal(tmp_path / "run-larg")


def test_a_setting_twice_in_mars_json(tmp_path):
    (tmp_path / "mars.json").write_text('{"create": {"lr": 0.1, "lr": 0.2}}')
    assert "found lr twice; write it once" in refusal(tmp_path)
