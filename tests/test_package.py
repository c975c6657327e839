"""The modules that importing mars_hf loads."""

from __future__ import annotations

import subprocess
import sys

import mars_hf


def test_import_brings_torch_and_nothing_heavy():
    script = (
        "import sys, mars_hf\n"
        "heavy = {'transformers', 'accelerate', 'deepspeed', 'triton', 'datasets', 'matplotlib', 'peft', 'tiktoken'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "mars_hf.create, mars_hf.Mars\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_is_there():
    assert set(mars_hf.__all__) == {
        *("LastGradientCallback", "Mars", "MarsTrainer", "NonFiniteCallback", "NonFiniteError"),
        *("create", "factory", "register", "with_mars"),
    }
    for name in mars_hf.__all__:
        assert getattr(mars_hf, name).__doc__
