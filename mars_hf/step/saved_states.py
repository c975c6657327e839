"""What `Mars.load_state_dict` accepts, and how it takes the tensors over."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from mars_hf import matrix_layouts, settings
from mars_hf.step import states


def check(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless a state can be that of an optimizer with these groups."""
    for index, (saved, own) in enumerate(zip(state_dict["param_groups"], groups, strict=False)):
        if "role" not in saved:
            raise ValueError(
                f"param group {index} of this state has no 'role', so another optimizer than Mars saved it (its keys: "
                f"{', '.join(saved)}). To train on from its weights with a fresh Mars, load the checkpoint as the "
                "model, with from_pretrained, or, without DeepSpeed, resume from a copy of it without optimizer.pt and "
                "scheduler.pt, which also starts the schedule anew"
            )
        patterns = [group.get("pattern") for group in (saved, own)]
        if None not in patterns and patterns[0] != patterns[1]:
            raise ValueError(
                f"param group {index} was saved with the pattern {patterns[0]!r} of param_rules and has "
                f"{patterns[1]!r} here; build the optimizer with the param_rules it was saved with, in their order"
            )
        for key in ("role", "mars_type", "is_approx"):
            if saved[key] != own[key]:
                raise ValueError(
                    f"param group {index} was saved with {key}={saved[key]!r} and is {own[key]!r} here; build the "
                    "optimizer from the same parameters, in the same order and with the same settings, as when it "
                    "was saved"
                )
        if matrix_layouts.from_plain(saved.get("layout")) != matrix_layouts.from_plain(own["layout"]):
            raise ValueError(
                f"param group {index} was saved with layout={saved.get('layout')!r} and is {own['layout']!r} here; "
                "build the optimizer with the split_fused it was saved with"
            )
        try:
            settings.check(saved)
        except ValueError as error:
            raise ValueError(f"param group {index} of this state cannot be used: {error}") from error
    for id_, param in _pairs(state_dict, groups):
        states.check(param, state_dict["state"].get(id_, {}), "the saved state of a parameter", anywhere=True)


def copy_into(
    state: MutableMapping[Tensor, Any], state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Copy saved tensors, in the dtypes they have, over the state that torch made of them."""
    for id_, param in _pairs(state_dict, groups):
        for key, value in state_dict["state"].get(id_, {}).items():
            if key == "step":
                value = states.step_of(value)
            if isinstance(value, Tensor):
                device = value.device if key == "step" else param.device
                state[param][key] = value.detach().to(device, copy=True)


def _pairs(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Tensor]]:
    """Return saved ids, and the parameters they belong to."""
    ids = [id_ for group in state_dict["param_groups"] for id_ in group["params"]]
    params = [param for group in groups for param in group["params"]]
    return list(zip(ids, params, strict=False))  # torch complains of other lengths
