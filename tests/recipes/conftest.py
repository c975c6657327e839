"""A twentieth of the embedded corpus, tokenized once for all tests of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock
from pretraining.data import embedded


@pytest.fixture(scope="session")
def tokens(shared_folder: Path) -> Path:
    """Return a folder of token files with a vocabulary of 512."""
    corpus = embedded.read_corpus()
    part = corpus._replace(train=corpus.train[::20], val=corpus.val[::4])
    # The processes of pytest-xdist share the folder.
    with FileLock(shared_folder / "tokens.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "read_corpus", lambda name: part)
        return embedded.prepare(shared_folder / "tokens", vocab_size=512)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return a temporary folder that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own
