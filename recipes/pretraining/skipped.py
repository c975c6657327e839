"""Count and name the files that a reader skips."""

from __future__ import annotations

from typing import Any

_NAMED = 3


class Skipped:
    """Skipped files by reason: how many, and the names of the first."""

    def __init__(self) -> None:
        """Start with none."""
        self._counts: dict[str, int] = {}
        self._first: dict[str, list[str]] = {}

    def add(self, name: str, reason: str) -> None:
        """Count one file."""
        self._counts[reason] = self._counts.get(reason, 0) + 1
        first = self._first.setdefault(reason, [])
        if len(first) < _NAMED:
            first.append(name)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __str__(self) -> str:
        reasons = []
        for reason, count in self._counts.items():
            more = ", ..." if count > _NAMED else ""
            reasons.append(f"{count:,} {reason} ({', '.join(self._first[reason])}{more})")
        return f"skipped {len(self):,} file(s): {'; '.join(reasons)}"

    def as_meta(self) -> dict[str, Any]:
        """Return the entry of meta.json."""
        reasons = {reason: {"files": count, "first": self._first[reason]} for reason, count in self._counts.items()}
        return {"files": len(self), "reasons": reasons}
