"""What the optimizer keeps per parameter: the buffers that its rule needs, their dtypes, and which ones it refuses."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mars_hf import log
from mars_hf.arithmetic import eight_bits, matrix_layouts
from mars_hf.arithmetic.directions import count_rows
from mars_hf.arithmetic.formulas import CODES, HALF_DTYPES, SCALES, parse_dtype
from mars_hf.arithmetic.update_rules import UpdateRule, update_rule
from mars_hf.distributed.tensors import ShardSpec, local
from mars_hf.groups import settings
from mars_hf.step import coded
from mars_hf.step.coded import UnfitStateError, described

# Tensors of a state that have the parameter's shape.
BUFFERS = {*CODES, "max_exp_avg_sq", "previous_grad", "previous_param"}

# The running means of NorMuon, one for each row of whole matrices; under ZeRO, of all in a flat tensor, in their order.
# A rank that holds nothing of a parameter has none: nobody would update them, and a checkpoint might take them.
ROWS = "row_avg_sq"

# A step count in a Trainer's optimizer.pt. Where mars_hf is not imported, torch's optimizers want a number, and their
# error shows this text; with a number they would go on from MARS's states in silence.
_NAMED_STEP = (
    b"step %d of MARS (mars_hf): resume with the optimizer that saved it, such as optim='mars_adamw', or load the "
    b"checkpoint as the model, with from_pretrained"
)


@dataclass(frozen=True, eq=False)
class BufferKeys:
    """The keys of the buffers that a step reads and writes; `of` has one object for all parameters with the same."""

    buffers: tuple[str, ...]  # all of the parameter's shape
    coded: tuple[str, ...]  # those in 8 bits

    @staticmethod
    @functools.cache
    def of(buffers: tuple[str, ...], coded: tuple[str, ...] = ()) -> BufferKeys:
        """Return the one object for these keys."""
        return BufferKeys(buffers, coded)

    @functools.cached_property
    def with_scales(self) -> tuple[str, ...]:
        """Return the keys of the buffers in 8 bits that have scales."""
        return tuple([key for key in self.coded if key in SCALES])

    @functools.cached_property
    def scales(self) -> tuple[str, ...]:
        """Return the keys of these scales."""
        return tuple([SCALES[key] for key in self.with_scales])

    @functools.cached_property
    def _needed(self) -> frozenset[str]:
        return frozenset(["step", *self.buffers, *self.scales])

    def are_in(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state has all these buffers with their scales, and no scales if none are needed."""
        has_scales = SCALES["exp_avg"] in state
        return has_scales == bool(self.scales) and state.keys() >= self._needed


def prepare(
    param: Tensor, group: Mapping[str, Any], state: dict[str, Any], keys: BufferKeys, spec: ShardSpec | None = None
) -> None:
    """Check a state, add the buffers that it lacks as zeros, and put the others into 8 bits or floating point.

    Raises:
        RuntimeError: the state does not fit its parameter, or lacks the last gradient of its first moment.
    """
    check_state(param, state)
    if lacks_last_grad(group, state):
        shape = tuple(param.shape)
        if "gamma_of_average" in group:
            raise RuntimeError(
                f"a parameter of shape {shape} has no last gradient, which clip_threshold={group['clip_threshold']!r} "
                f"and second_moment={group['second_moment']!r} need and the steps before did not. Set both back, or "
                "start the run with clip_threshold=1e30 (keeps last gradients, never clips)"
            )
        raise RuntimeError(
            f"the state of a parameter of shape {shape} has a first moment and no last gradient: DeepSpeed's own "
            "converter drops it. Convert with python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER"
        )
    state["step"] = to_step_count(state.get("step", 0))
    for key in keys.buffers:
        if key in keys.coded:
            coded.encode(param, state, key, spec)
        elif key in state:
            coded.decode(param, state, key, spec)
        else:
            dtype = param.dtype if key == "compensation" else buffer_dtype(param, group, state)
            state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    check_codes(param, state, keys, spec)


def check_codes(param: Tensor, state: Mapping[str, Any], keys: BufferKeys, spec: ShardSpec | None) -> None:
    """Raise UnfitStateError unless the buffers in 8 bits have the scales of their codes."""
    for key in keys.with_scales:
        coded.check(param, state, key, spec, "the state of a parameter")


def prepare_rows(param: Tensor, group: Mapping[str, Any], state: dict[str, Any], spec: ShardSpec | None) -> None:
    """Check the running means of rows in a state, and make those that are missing, as zeros.

    Raises:
        UnfitStateError: they do not fit the parameter.
    """
    numel = sum(rows_of_shards(param, group, spec))
    if numel == 0:
        return
    device = local(param).device
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    rows = state.setdefault(ROWS, torch.zeros(numel, dtype=dtype, device=device))
    fits = type(rows) is Tensor and rows.shape == (numel,) and rows.is_floating_point()
    if not fits or rows.device != device:
        raise UnfitStateError(
            f"the state of a tensor of shape {tuple(param.shape)} has {ROWS} of {described(rows)}, and normalize_rows "
            f"needs shape ({numel},), in floating point, on {device}. Under ZeRO resume on as many processes"
        )
    state[ROWS] = rows.to(dtype)  # a parameter may have been converted


def rows_of_shards(param: Tensor, group: Mapping[str, Any], spec: ShardSpec | None) -> list[int]:
    """Return how many rows each parameter in a tensor has, if its rows are normalized, else 0."""
    if spec is None:
        return [count_rows(group, param.shape)]
    return [count_rows(group, shard.shape) for shard in spec.shards]


def split_rows(
    param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], spec: ShardSpec | None
) -> list[Tensor]:
    """Return the row means of each parameter in a tensor; empty tensors if rows are not normalized."""
    counts = rows_of_shards(param, group, spec)
    if sum(counts) == 0:
        return [torch.empty(0, device="cpu")] * len(counts)
    return list(state[ROWS].split(counts))


def keys_of(rule: UpdateRule, param: Tensor, group: Mapping[str, Any], state: Container[str]) -> BufferKeys:
    """Return the keys of the buffers that a step of a parameter reads and writes."""
    buffers = ["exp_avg", *rule.buffers]
    if rule.has_second_moment and group["amsgrad"]:
        buffers.append("max_exp_avg_sq")
    if rule.corrects:
        keeps_last_grad = "last_grad" in state or not averages_gradients(rule, group)
        if keeps_last_grad:
            buffers.append("last_grad")
    if group["rounding"] == "kahan" and param.dtype == torch.bfloat16:
        buffers.append("compensation")
    if group["state_dtype"] != eight_bits.NAME:
        return BufferKeys.of(tuple(buffers))
    return BufferKeys.of(tuple(buffers), coded.coded_keys(rule, param, group, buffers))


def buffer_dtype(param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a new buffer: that of a loaded first moment, else `state_dtype`, else at least float32.

    With 8-bit states, those buffers that are not in 8 bits are in float32.
    """
    if group["state_dtype"] == eight_bits.NAME:
        return torch.float32
    if "exp_avg" in state and state["exp_avg"].is_floating_point():
        return state["exp_avg"].dtype
    if group["state_dtype"] is not None:
        return parse_dtype(group["state_dtype"])
    return torch.float32 if param.dtype in HALF_DTYPES else param.dtype


def averages_gradients(rule: UpdateRule, group: Mapping[str, Any]) -> bool:
    """Return whether first moments follow from averages of the gradients alone, without last gradients.

    A state that already has a last gradient keeps using it.
    """
    if not rule.corrects or not group["is_approx"] or group["clip_threshold"] is not None:
        return False
    return not rule.has_second_moment or group["second_moment"] == "gradient"


def lacks_last_grad(group: Mapping[str, Any], state: Container[str]) -> bool:
    """Return whether a state lacks the last gradient that belongs to its first moment; only its keys are needed."""
    rule = update_rule(group)
    if not rule.corrects or averages_gradients(rule, group):
        return False
    if not group["is_approx"]:  # its last gradient is there during a step only
        return False
    return "exp_avg" in state and "last_grad" not in state


def name_steps(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict whose step counts no other optimizer accepts; a hook of `state_dict`."""
    named = {}
    for id_, state in state_dict["state"].items():
        named[id_] = {**state, "step": _NAMED_STEP % int(state["step"])} if "step" in state else state
    return {**state_dict, "state": named}


def _is_named_step(value: Any) -> bool:
    return isinstance(value, bytes) and value.startswith(b"step ") and value.split()[1].isdigit()


def to_step_count(value: Any) -> Tensor:
    """Return a step count as a 0-d float32 tensor on CPU; one that already is one is returned itself."""
    if _is_named_step(value):
        value = value.split()[1]
    if isinstance(value, Tensor):
        has_form = value.ndim == 0 and value.dtype == torch.float32
        if has_form and value.device.type == "cpu":
            return value
    return torch.full((), float(value), dtype=torch.float32, device="cpu")


def check_state(
    param: Tensor, state: Mapping[str, Any], what: str = "the state of a parameter", *, anywhere: bool = False
) -> None:
    """Raise UnfitStateError unless every tensor of a state fits its parameter.

    Args:
        param: the parameter.
        state: its state.
        what: name of the state in the message.
        anywhere: whether tensors may be on another device than the parameter, as while loading.
    """
    for key, value in state.items():
        if key == "step":
            _check_step(param, value, what)
        elif key in BUFFERS:
            has_dtype = isinstance(value, Tensor) and _has_dtype(key, value, state.get(SCALES.get(key, "")))
            _check_buffer(param, key, value, what, fits=has_dtype, anywhere=anywhere)


def _check_step(param: Tensor, value: Any, what: str) -> None:
    is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))
    if not is_number and not _is_named_step(value):
        raise UnfitStateError(f"{what} of shape {tuple(param.shape)} has step={described(value)}; a number is needed")


def _has_dtype(key: str, value: Tensor, scales: Any) -> bool:
    """Return whether a buffer is in floating point, or in 8 bits with scales.

    Scales beside floating point are of codes that an engine has replaced, when it loaded a state.
    """
    if value.is_floating_point():
        return True
    has_scales = isinstance(scales, Tensor) and scales.dtype == torch.float32
    return value.dtype == CODES.get(key) and (has_scales or key not in SCALES)


def _check_buffer(param: Tensor, key: str, value: Any, what: str, *, fits: bool, anywhere: bool) -> None:
    found = f"{what} of shape {tuple(param.shape)} on {param.device} has {key} of {described(value)}"
    if not fits:
        raise UnfitStateError(
            f"{found}; a floating point tensor of the parameter's shape is needed, or one in 8 bits with float32 scales"
        )
    if value.shape != param.shape:
        raise UnfitStateError(
            f"{found}, not the parameter's shape. A model that has been resized since cannot go on with this state: "
            "start a new run from its weights, with from_pretrained"
        )
    if not anywhere and value.device != param.device:
        raise UnfitStateError(
            f"{found}, another device: a model that moves after its first step leaves the states of its optimizer "
            "behind. Move them too, state[key] = state[key].to(param.device), or load the optimizer's state_dict() anew"
        )


def with_all_settings(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return saved groups with the defaults of settings that are newer than they; another optimizer's stay."""
    missing = {key: value for key, value in settings.GROUP_DEFAULTS.items() if key != "lr"}
    return [{**missing, **group} if "role" in group else group for group in groups]


def check_loaded(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless a state_dict can be that of an optimizer with these groups."""
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=False)):
        check_saved_group(index, saved, group)
    _check_counts(state_dict["param_groups"], groups)
    _check_names(state_dict["param_groups"], groups)
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=False)):
        names = group.get("param_names", ["a parameter"] * len(group["params"]))
        saved_states = [state_dict["state"].get(id_, {}) for id_ in saved["params"]]
        in_8_bits = eight_bits.NAME in (saved["state_dtype"], group["state_dtype"])
        for param, state, name in zip(group["params"], saved_states, names, strict=False):
            what = f"the saved state of {name}"
            coded.check_loaded(param, state, what, in_8_bits=in_8_bits)
            check_state(param, state, what, anywhere=True)
        if saved["state_dtype"] != eight_bits.NAME and coded.have_lost_values(saved_states):
            raise UnfitStateError(
                f"param group {index} was saved with state_dtype={saved['state_dtype']!r}, and its states arrive in 8 "
                "bits without any value: the loader has copied numbers into codes. Make the optimizer without "
                "state_dtype='8bit', load, and then set group['state_dtype'] = '8bit' in each group"
            )


def _check_counts(saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for another number of groups or parameters, before shapes are compared one with another's."""
    was, now = ([len(group["params"]) for group in each] for each in (saved_groups, groups))
    if was != now:
        raise ValueError(
            f"this state is of param groups with {was} parameters, and the optimizer's have {now}: other layers train, "
            "or param_rules, lr_embeddings or decays form other groups. Build the optimizer from the same parameters "
            "and with the same settings as when it was saved, or start a new run from the model, with from_pretrained"
        )


def _check_names(saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a parameter would get the state of another one, and warn if it may be another's.

    States go by their places. Names that are unknown here may be those of parameters that have been renamed.
    """
    own_names = {name for group in groups for name in group.get("param_names", ())}
    renamed = []
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if any(isinstance(id_, str) for id_ in saved["params"]):  # torch.distributed.checkpoint goes by names itself
            continue
        for was, now in zip(saved.get("param_names", ()), group.get("param_names", ()), strict=False):
            if _are_one_name(was, now):
                continue
            if was in own_names:
                raise ValueError(
                    f"param group {index} was saved with {was} in the place of {now}, which would get its state; build "
                    "the optimizer from the same parameters, in the same order and with the same settings as when it "
                    "was saved"
                )
            renamed.append(f"{now} that of {was}")
    if renamed:
        log.warning(
            f"{len(renamed)} parameters take the states of other names, {renamed[0]}. That is right if they have been "
            "renamed; if other layers train than before, start a new run from the model"
        )


def _are_one_name(one: str, other: str) -> bool:
    """Return whether two names differ by wrappers around the model or its layers alone, such as torch.compile's."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        one, other = one.replace(wrapper, ""), other.replace(wrapper, "")
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def check_saved_group(index: int, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raise ValueError unless a saved group can take the place of this one: of its number, role, rule and form."""
    if "role" not in saved and not saved.get("params"):
        raise ValueError(
            f"param group {index} of this state is empty: it has neither parameters nor settings. Loaders that go by "
            "names, as torch.distributed.checkpoint, leave that where the state has none of this group's parameters; "
            "load the state of a model whose trainable parameters have the names of this one's"
        )
    if "role" not in saved:
        raise ValueError(
            f"param group {index} of this state has no 'role', so another optimizer saved it. To train on from its "
            "weights, load the checkpoint as the model (from_pretrained), or, without DeepSpeed, resume from a "
            "copy without optimizer.pt and scheduler.pt"
        )
    if "lr" not in saved:
        raise ValueError(f"param group {index} of this state has no 'lr', so it is damaged; take another checkpoint")
    both_have_patterns = "pattern" in saved and "pattern" in group
    if both_have_patterns and saved["pattern"] != group["pattern"]:
        raise ValueError(
            f"param group {index} was saved with the pattern {saved['pattern']!r} of param_rules and has "
            f"{group['pattern']!r} here; build the optimizer with the param_rules it was saved with, in their order"
        )
    was = {**saved, "layout": matrix_layouts.to_plain(saved.get("layout"))}
    now = {**group, "layout": matrix_layouts.to_plain(group.get("layout"))}
    for key in ("role", "mars_type", "is_approx", "layout"):
        if was[key] != now[key]:
            raise ValueError(
                f"param group {index} was saved with {key}={was[key]!r} and is {now[key]!r} here; build the "
                "optimizer from the same parameters, in the same order and with the same settings (of layouts: "
                "split_fused) as when it was saved"
            )
    try:
        settings.check_values(saved)
    except ValueError as error:
        raise ValueError(f"param group {index} of this state cannot be used: {error}") from error


def copy_loaded(
    state: MutableMapping[Tensor, Any], state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Copy saved tensors, in the dtypes they have, over the state that torch made of them."""
    for id_, param in _pairs(state_dict, groups):
        saved = state_dict["state"].get(id_, {})
        for key, value in saved.items():
            if key == "step":
                state[param][key] = to_step_count(value).clone()
            elif isinstance(value, Tensor):
                state[param][key] = value.detach().to(param.device, copy=True)
        for key, scales_key in SCALES.items():
            if scales_key in saved and coded.is_whole_beside_part(saved[key], saved[scales_key]):
                state[param][key] = coded.decode_by_whole_scales(param, state[param][key], saved[scales_key])
                del state[param][scales_key]


def _pairs(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Tensor]]:
    """Return saved ids and the parameters they belong to; torch complains of groups of other lengths."""
    pairs: list[tuple[Any, Tensor]] = []
    for saved, group in zip(state_dict["param_groups"], groups, strict=False):
        pairs += zip(saved["params"], group["params"], strict=False)
    return pairs
