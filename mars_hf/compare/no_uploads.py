"""In the process of a run: nothing goes to the Hub. A comparison makes many runs, and nobody asked for their models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import huggingface_hub
from transformers.trainer import Trainer

# Parts of the addresses by which huggingface_hub makes repositories and commits, and asks where to put large files.
_WRITING = ("/api/repos/", "/preupload/", "/commit/", "/branch/", "/tag/", "/lfs/objects/batch", "/xet-write-token/")


def refuse_uploads(note: Callable[[str], None]) -> None:
    """Refuse every request that would write to the Hub; `note` hears of it."""

    def refuse(request: Any) -> None:
        url = str(request.url)
        writes = request.method not in ("GET", "HEAD") or "/xet-write-token/" in url
        if writes and any(part in url for part in _WRITING):
            note("the script would have uploaded to the Hub; nothing was")
            raise RuntimeError("python -m mars_hf compare uploads nothing")

    def push_nothing(self: Trainer, *args: Any, **kwargs: Any) -> None:
        note("the script would have uploaded to the Hub; nothing was")

    # Functions of huggingface_hub are imported by name in many places, so the session that all of them share refuses;
    # it is made anew after a fork, or an error.
    session = huggingface_hub.get_session()
    hooks = {**session.event_hooks, "request": [refuse, *session.event_hooks.get("request", [])]}
    make: Any = type(session)
    huggingface_hub.set_client_factory(
        lambda: make(event_hooks=hooks, follow_redirects=session.follow_redirects, timeout=session.timeout)
    )
    Trainer.push_to_hub = push_nothing  # type: ignore[method-assign,assignment]
