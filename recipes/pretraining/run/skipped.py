"""Count and name the files that a reader skips."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_NAMED = 3


@dataclass
class Skipped:
    """Skipped files by reason.

    Attributes:
        counts: reason to how many.
        first: reason to the names of the first.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, reason: str) -> None:
        """Count one file."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        first = self.first.setdefault(reason, [])
        if len(first) < _NAMED:
            first.append(name)

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        reasons = []
        for reason, count in self.counts.items():
            more = ", ..." if count > _NAMED else ""
            reasons.append(f"{count:,} {reason} ({', '.join(self.first[reason])}{more})")
        return f"skipped {len(self):,} file(s): {'; '.join(reasons)}"

    def as_meta(self) -> dict[str, Any]:
        """Return the entry of meta.json."""
        reasons = {reason: {"files": count, "first": self.first[reason]} for reason, count in self.counts.items()}
        return {"files": len(self), "reasons": reasons}
