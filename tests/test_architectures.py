"""Roles and layouts of real architectures, against architectures.json.

`python tests/test_architectures.py` writes the file anew: review the difference, row by row.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import mars_hf
from mars_hf.matrix_layouts import MatrixLayout, matrix_shapes

TABLE = Path(__file__).with_name("architectures.json")
ROWS = json.loads(TABLE.read_text())


def build(row: dict) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, row["model"])(getattr(transformers, row["config"])(**row["settings"]))


def described(model: nn.Module) -> dict[str, str]:
    """Map names of parameters, numbers as `*`, to the matrices that mars-m orthogonalizes, or to what it does not."""
    parameters: dict[str, str] = {}
    for group in mars_hf.create(model, mars_type="mars-m").param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if param.ndim < 2:
                text = group["role"]
            elif group["role"] == "matrix":
                shapes = matrix_shapes(param.shape, MatrixLayout(**group["layout"]))
                text = " + ".join("x".join(map(str, shape)) for shape in shapes)
                text += " transposed" if group["layout"]["transposed"] else ""
            else:
                text = f"{group['role']}: {group['left_out'][name]}"
            key = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            known = parameters.get(key, text)
            parameters[key] = known if text in known.split(", ") else f"{known}, {text}"
    return {name: text for name, text in parameters.items() if text != "vector"}


@pytest.mark.parametrize("row", ROWS)
def test_roles_and_layouts(row):
    assert described(build(ROWS[row])) == ROWS[row]["parameters"]


if __name__ == "__main__":
    for row in ROWS.values():
        row["parameters"] = described(build(row))
    TABLE.write_text(json.dumps(ROWS, indent=1) + "\n")
