"""Where the parts of a parameter are: `ShardSpec` for each tensor of the optimizer that an engine has sharded.

FSDP2 and tensor parallelism make DTensors, which say it themselves. DeepSpeed ZeRO steps flat tensors that hold parts
of many parameters; the parameters of the model, which keep their identity there, say which (see `zero`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mars_hf import _compat

# ProcessGroup, or None for no group.
Group = Any


class Region(NamedTuple):
    """The part of a whole parameter that a rank holds.

    `dim=None`: elements [start, start + length) of the parameter flattened in row-major order. Otherwise indices
    [start, start + length) along dimension `dim`, of those only what `inner` says of later dimensions. With `stripes`,
    dimension `dim` consists of that many equal blocks, and the part is [start, start + length) of each.
    """

    dim: int | None
    start: int
    length: int
    inner: Region | None = None
    stripes: int = 1

    @property
    def offset(self) -> int:
        """Return a number that two parts of one parameter have in common only if they are the same part."""
        return self.start if self.inner is None else self.start + (self.inner.offset + 1 << 32)

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a whole parameter as a view; stripes have a dimension before that of their indices."""
        if self.dim is None:
            return whole.view(-1)[self.start : self.start + self.length]
        if self.inner is not None:
            whole = self.inner.of(whole)
        if self.stripes == 1:
            return whole.narrow(self.dim, self.start, self.length)
        return whole.unflatten(self.dim, (self.stripes, -1)).narrow(self.dim + 1, self.start, self.length)

    def shape(self, whole: torch.Size) -> torch.Size:
        """Return the shape of this part as a rank holds it: its stripes follow each other."""
        if self.dim is None:
            return torch.Size([self.length])
        shape = whole if self.inner is None else self.inner.shape(whole)
        return torch.Size([*shape[: self.dim], self.stripes * self.length, *shape[self.dim + 1 :]])


class Shard(NamedTuple):
    """One parameter's part of a local tensor: `numel` of its `whole` elements, from element `start` of the tensor on.

    `param_index` is the parameter's index among all parameters of the optimizer, the same on every rank.
    """

    param_index: int
    start: int
    numel: int
    whole: int
    region: Region


class ShardSpec(NamedTuple):
    """The shards in a local tensor (none if it is all padding), and the ranks that hold the others.

    `replicas` are ranks that hold the same shards; None means none.
    """

    shards: tuple[Shard, ...]
    group: Group
    replicas: Group = None

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the shards of a local tensor as views."""
        if [shard.numel for shard in self.shards] == [tensor.numel()]:
            return [tensor]
        return [tensor[shard.start : shard.start + shard.numel] for shard in self.shards]


def shape_of(param: Tensor) -> torch.Size:
    """Return the parameter's own shape, also if DeepSpeed's `zero.Init` has left an empty tensor in its place."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def reject_parts(param: Tensor) -> None:
    """Raise RuntimeError for a parameter flattened by FSDP1 or divided by tensor parallelism without DTensors.

    Its shape is no longer that of the whole, and nothing says where the rest is.
    """
    if _compat.is_of_tensor_parallelism(param):
        raise RuntimeError(
            f"a parameter of shape {tuple(shape_of(param))} that DeepSpeed's AutoTP or Megatron has marked as one part "
            "(tensor_model_parallel): MARS needs norms over whole parameters, and only DTensors say where the other "
            'parts are. Use torch\'s tensor parallelism (tp_plan="auto" in from_pretrained, or parallelize_module), or '
            "ZeRO without AutoTP"
        )
    if _compat.is_flattened_by_fsdp1(param):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} that FSDP1 has flattened: MARS needs the parameters' shapes; "
            "use FSDP2 (fully_shard, or fsdp_version: 2 in the accelerate config)"
        )


class Shards:
    """Find the ShardSpec of every tensor in a step.

    It keeps the shapes and ids of the parameters the optimizer was made from, and no references: a strong one would
    keep the unsharded model alive while accelerate shards it, a weak one makes `torch.utils.swap_tensors` refuse the
    tensor. The model is asked for the parameters when DeepSpeed has replaced them by flat tensors.
    """

    def __init__(self, param_groups: Iterable[Mapping[str, Any]] = ()) -> None:
        """Remember the parameters of these groups."""
        self.shapes: list[torch.Size] = []  # of the whole parameters, by index
        self._roles: list[str] = []
        self._indices: dict[int, int] = {}  # by id
        # Parameters that DeepSpeed has put into flat tensors, by index.
        self._originals: dict[int, weakref.ref[Tensor]] = {}
        # An engine's flat tensor to its spec and the facts that the spec follows from.
        self._flat: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Mesh to specs, by index, placements and shape of a DTensor.
        self._meshes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for group in param_groups:
            self.extend(group)

    def extend(self, group: Mapping[str, Any]) -> None:
        """Remember the parameters of one more group."""
        for param in group["params"]:
            self._indices[id(param)] = len(self.shapes)
            self.shapes.append(shape_of(param))
            self._roles.append(group["role"])
        self._originals.clear()
        self._flat.clear()

    def locate(
        self, param_groups: Iterable[Mapping[str, Any]], wanted: Sequence[bool], model: weakref.ref[nn.Module] | None
    ) -> dict[Tensor, ShardSpec]:
        """Return the specs of sharded tensors, those without a gradient included; whole parameters have none.

        Args:
            param_groups: the optimizer's, as the step finds them.
            wanted: for each group, whether a step needs norms or directions of its parameters.
            model: the model that the optimizer was made from; None if it is not known.

        Raises:
            RuntimeError: a tensor is a part of something unknown; the message describes it.
        """
        specs, index = {}, -1
        for group, is_wanted in zip(param_groups, wanted, strict=True):
            for param in group["params"]:
                index += 1
                if not is_wanted:
                    continue
                spec = self.spec_of(param, index, model)
                if spec is not None:
                    specs[param] = spec
        return specs

    def spec_of(self, param: Tensor, index: int, model: weakref.ref[nn.Module] | None = None) -> ShardSpec | None:
        """Return the spec of the optimizer's tensor at an index; None for a whole parameter; raises as `locate`."""
        if is_dtensor(param):
            return self._spec_of_dtensor(param, index)
        known = self._indices.get(id(param))  # ids of freed parameters are reused: the shape must be the same
        if known is not None and self.shapes[known] == param.shape:
            return None
        return self._spec_of_unknown(param, index, model)

    def _spec_of_dtensor(self, tensor: Any, index: int) -> ShardSpec | None:
        from mars_hf.distributed import dtensors

        known = self._meshes.setdefault(tensor.device_mesh, {})
        key = (index, tensor.placements, tensor.shape)
        if key not in known:
            known[key] = dtensors.spec_of(tensor, index)
        spec: ShardSpec | None = known[key]
        if spec is not None:
            part = tensor.to_local().shape
            if part != spec.shards[0].region.shape(tensor.shape) if spec.shards else part.numel():
                raise RuntimeError(
                    f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements} has a part of shape "
                    f"{tuple(part)} on this rank, which is not how torch divides it: MARS supports what fully_shard, "
                    "parallelize_module and distribute_tensor make"
                )
        return spec

    def _spec_of_unknown(self, tensor: Tensor, index: int, model: weakref.ref[nn.Module] | None) -> ShardSpec | None:
        reject_parts(tensor)
        if tensor.ndim > 1:
            if index < len(self.shapes) and tensor.shape != self.shapes[index]:
                self._find_originals(model)  # an engine's copy of a part, or the user has resized the parameter
            self._replace(index, tensor)
            return None
        if tensor in self._flat:
            spec, facts = self._flat[tensor]
            if facts == self._facts(tensor, spec):
                return spec
        self._find_originals(model)
        spec = self._spec_of_flat(tensor)
        if spec is not None:
            self._flat[tensor] = spec, self._facts(tensor, spec)
            return spec
        # A vector the user replaced or added; an unknown engine would have flattened matrices too.
        if not self._originals and (index >= len(self.shapes) or self._roles[index] == "vector"):
            self._replace(index, tensor)
            return None
        raise RuntimeError(
            f"a flat tensor of shape {tuple(tensor.shape)} that is none of the parameters Mars was built with: the "
            "norm of a corrected gradient cannot be taken over a piece of unknown origin. Supported are DDP, FSDP2 and "
            "DeepSpeed ZeRO-1/2/3, with Mars built from the model's own parameters"
        )

    def _replace(self, index: int, tensor: Tensor) -> None:
        """Remember a parameter that the user has replaced or added."""
        self._indices[id(tensor)] = index
        if index < len(self.shapes):
            self.shapes[index] = tensor.shape

    def _find_originals(self, model: weakref.ref[nn.Module] | None) -> None:
        """Find the parameters that DeepSpeed has flattened: those of the model, else among all objects, in 50 ms."""
        candidates = () if model is None or (origin := model()) is None else origin.parameters()
        originals = self._originals_among(candidates)
        if not originals:
            frozen = gc.get_freeze_count()
            gc.unfreeze()  # what is frozen is not listed
            originals = self._originals_among([one for one in gc.get_objects() if id(one) in self._indices])
            if frozen:
                gc.freeze()
        self._originals = dict(sorted(originals.items()))

    def _originals_among(self, candidates: Iterable[Any]) -> dict[int, weakref.ref[Tensor]]:
        originals = {}
        for param in candidates:
            index = self._indices.get(id(param))
            if index is None or not issubclass(type(param), Tensor):
                continue
            reject_parts(param)
            flattened = _compat.is_of_zero12(param) or _compat.zero3_optimizer(param) is not None
            if flattened and shape_of(param) == self.shapes[index]:
                originals[index] = weakref.ref(param)
        return originals

    def _spec_of_flat(self, tensor: Tensor) -> ShardSpec | None:
        from mars_hf.distributed import zero

        originals = [(index, param) for index, ref in self._originals.items() if (param := ref()) is not None]
        return zero.spec_of_zero3(tensor, originals) or zero.spec_of_zero12(tensor, originals)

    def _facts(self, tensor: Tensor, spec: ShardSpec) -> tuple[Any, ...]:
        """Return the facts behind a flat tensor's spec, which is valid while they stay the same."""
        from mars_hf.distributed import zero

        originals = [
            self._originals[shard.param_index]() if shard.param_index in self._originals else None
            for shard in spec.shards
        ]
        offsets = [None if param is None else zero.offset_in(tensor, param) for param in originals]
        return (tensor.shape, tensor.storage_offset(), *offsets)


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is sharded or replicated by torch.distributed.tensor."""
    if type(tensor) in (Tensor, nn.Parameter) or not dist.is_available():  # the usual case, and a fast test
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor; shares its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def ranks_of(group: Group) -> Sequence[int]:
    """Return the global ranks of a process group; empty for one that has been destroyed."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return []
