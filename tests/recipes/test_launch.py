"""How a run in a process of its own ended, from its exit code and its log."""

from __future__ import annotations

import pytest
from pretraining.compare import launch
from pretraining.compare.launch import Diverged, RunFailed


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a stand-in for the recipe, which does what its text says."""
    path = tmp_path / "pretrain_gpt2.py"
    monkeypatch.setattr(launch, "SCRIPT", path)
    return path


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("raise SystemExit('pretrain_gpt2.py: --max_steps 0 is none')", ValueError, "out: --max_steps 0 is none"),
        (f"raise SystemExit('pretrain_gpt2.py: 3 {launch._DIVERGED}')", Diverged, "out: 3 steps in a row"),
        (
            f"print('pretrain_gpt2.py: 3 {launch._DIVERGED}')\nprint('the launcher says\\n' * 99)\nraise SystemExit(1)",
            *(Diverged, "out: 3 steps in a row"),
        ),
        ("raise OSError('disk full')", RunFailed, "ended with code 1(?s:.*)disk full"),
        ("print('saved')", RunFailed, "was stopped before its end; start again"),
    ],
)
def test_ends(tmp_path, script, text, error, words):
    script.write_text(text)
    with pytest.raises(error, match=words):
        launch.pretrain([], tmp_path / "out")


def test_the_log_of_an_earlier_attempt_does_not_count(tmp_path, script):
    script.write_text(f"raise SystemExit('pretrain_gpt2.py: 3 {launch._DIVERGED}')")
    with pytest.raises(Diverged):
        launch.pretrain([], tmp_path / "out")
    script.write_text("raise SystemExit(9)")
    with pytest.raises(RunFailed, match="ended with code 9") as failure:
        launch.pretrain([], tmp_path / "out")
    assert not isinstance(failure.value, Diverged) and launch._DIVERGED not in str(failure.value.__context__)
    assert launch._DIVERGED in (tmp_path / "out.log").read_text()
