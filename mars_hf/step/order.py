"""Keep the order of the buckets from step to step, as places in the step's list of entries; never a tensor.

Sorting some hundred tensors takes milliseconds, as long as a GPU needs for the update itself. A step therefore reuses
the previous step's order if all its tensors look the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mars_hf.settings import STRUCTURAL_KEYS
from mars_hf.step import looks
from mars_hf.step.buckets import Entry, Recipe, may_move


class Order:
    """Remember how a step was sorted, for as long as later steps look like it; holds no tensor."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        param_groups: Sequence[Mapping[str, Any]],
        entries: Sequence[Entry],
        take_grad: bool,
    ) -> None:
        """Remember the recipes of `plan_buckets` for these entries."""
        self.recipes = recipes
        self._take_grad = take_grad
        self._structure = structure(param_groups)
        self._slots = [entry.slot for entry in entries]
        keys: dict[int, tuple[str, ...]] = {place: recipe.keys for recipe in recipes for place in recipe.places}
        self._keys = [keys[place] for place in range(len(entries))]
        self._has_last = ["last_grad" in own for own in self._keys]
        self._moves = [False] * len(entries)
        for recipe in recipes:
            for place in recipe.places:
                self._moves[place] = recipe.moves
        self._look = looks.Look(self._tensors(entries))

    @staticmethod
    def covers(entries: Sequence[Entry]) -> bool:
        """Return whether `fits` can judge these entries: only plain tensors."""
        return all(type(entry.param) in (Tensor, nn.Parameter) for entry in entries)

    def fits(self, param_groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry], take_grad: bool) -> bool:
        """Return whether every tensor of a step looks like its predecessor and every setting is the same."""
        if take_grad != self._take_grad:
            return False
        if [entry.slot for entry in entries] != self._slots or structure(param_groups) != self._structure:
            return False
        if ["last_grad" in entry.state for entry in entries] != self._has_last:
            return False
        try:
            tensors = self._tensors(entries)
        except KeyError:
            return False
        if not self._look.fits(tensors):
            return False
        return not take_grad or all(
            moves is may_move(entry, param_groups[entry.group])
            for entry, moves in zip(entries, self._moves, strict=True)
        )

    def _tensors(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Return every tensor that the step reads or writes."""
        tensors: list[Any] = []
        for (param, state, _, _), keys in zip(entries, self._keys, strict=True):
            tensors += (param, param.grad, state["step"], *[state[key] for key in keys])
        return tensors


def structure(param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return each group's size and the settings that decide how its tensors are sorted."""
    return [(len(group["params"]), *[group[name] for name in STRUCTURAL_KEYS]) for group in param_groups]
