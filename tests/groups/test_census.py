"""What mars-m leaves to AdamW and which fused projections it does not split, in every model type of transformers.

`python tests/groups/test_census.py` writes census.json anew, for the installed transformers: review the difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from small_models import classes_by_type, shallow_model

import mars_hf
from mars_hf.groups import summary

FILE = Path(__file__).with_name("census.json")


def census_of(kind: Any) -> dict[str, Any] | None:
    """Return a class's parameters under AdamW by reason, and fused ones, digits as `*`; None if none can be made."""
    model = shallow_model(kind)
    if model is None:
        return None
    groups = mars_hf.create(model, mars_type="mars-m", lr=1e-3).param_groups
    found: dict[str, Any] = {"class": kind.__name__}
    left_out = summary.names_left_out(groups)
    found |= {reason: sorted(names) for reason, names in sorted(left_out.items()) if reason != "bias or norm"}
    fused = sorted(summary.names_of_fused(groups))
    return {**found, "fused": fused} if fused else found


def census() -> dict[str, Any]:
    """Return the census of the first class of every model type: one with a head, where there is one."""
    types = {model_type: census_of(kinds[0]) for model_type, kinds in sorted(classes_by_type().items())}
    return {"transformers": transformers.__version__, "types": types}


SAVED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.skipif(
    transformers.__version__ != SAVED["transformers"], reason=f"the file is of transformers {SAVED['transformers']}"
)
def test_census_of_architectures():
    found = census()["types"]
    assert found.keys() == SAVED["types"].keys()
    assert {name: row for name, row in found.items() if row != SAVED["types"][name]} == {}


def test_census_is_of_every_family():
    """Of few types no model can be made: their defaults do not fit, or need packages that are not here."""
    rows = SAVED["types"]
    made = {name: row for name, row in rows.items() if row is not None}
    assert len(rows) > 590 and len(made) > 540
    routers = {name for name, row in made.items() if "router" in row}
    assert {"mixtral", "llama4", "jetmoe", "phimoe", "afmoe", "gemma3n_text"} <= routers
    fused = {name for name, row in made.items() if "fused" in row}
    assert {"falcon", "persimmon", "gpt_bigcode", "qwen3_next"} <= fused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("fsmt", "model.decoder.output_projection.weight"),
        ("dia", "logits_dense.weight"),
        ("mobilebert", "cls.predictions.dense.weight"),
        ("ovis2", "model.vision_tower.head_linear.weight"),
    ],
)
def test_heads_by_shape_and_place(model_type, head):
    kinds = {kind.__name__: kind for kind in classes_by_type()[model_type]}
    kind = kinds.get("MobileBertForMaskedLM") or next(iter(kinds.values()))
    row = census_of(kind)
    assert row is not None and head in row["head"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "name"), [("distilbert", "pre_classifier"), ("sam3", "ref_point_head"), ("uvdoc", "resnet_head")]
)
def test_layers_with_names_of_heads(model_type, name):
    for kind in classes_by_type()[model_type]:
        row = census_of(kind)
        assert row is not None and not any(name in parameter for parameter in row.get("head", []))


if __name__ == "__main__":
    FILE.write_text(json.dumps(census(), indent=1) + "\n", encoding="utf-8")
