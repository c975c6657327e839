"""A pass that does not count leaves nothing behind."""

from __future__ import annotations

from collections import Counter, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from mars_hf.training import snapshots
from mars_hf.training.snapshots import attributes_kept, buffers_kept, copied, difference

# --- modules ---------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Count in every way that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("in_the_dict", torch.zeros(2))
        self.register_buffer("both", torch.zeros(2))
        self.register_buffer("exchanged", torch.zeros(2))
        self.register_buffer("none", None)
        self.number = 0
        self.average = 0.5
        self.attribute = torch.zeros(2)
        self.noted = [0]
        self.flag = False

    def forward(self) -> None:
        self.in_place += 1
        self.assigned = self.assigned + 1
        self._buffers["in_the_dict"] = self.in_the_dict + 1
        self.both += 1
        self.both = self.both + 1
        self.exchanged.data = torch.ones(3)
        self.none = torch.ones(1)
        self.register_buffer("new", torch.ones(1))
        self.number += 1
        self.average *= 0.9
        self.attribute += 1
        self.flag = True


def buffers_of(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.named_buffers()}


def test_buffers_are_the_same_tensors_with_the_same_values():
    module = nn.Sequential(Counting())
    before, tensors = buffers_of(module), dict(module.named_buffers())
    with buffers_kept(module):
        module[0]()
        assert buffers_of(module) != before
    assert buffers_of(module) == before
    assert all(buffer is tensors[name] for name, buffer in module.named_buffers())
    assert module[0].none is None


def test_counters_of_modules_are_put_back():
    module = Counting()
    attribute = module.attribute
    with buffers_kept(module, module):
        module()
    assert (module.number, module.average, module.attribute.tolist()) == (0, 0.5, [0, 0])
    assert module.attribute is attribute
    assert module.flag  # what has been set up stays set up


def test_counters_of_engines_are_theirs():
    class Engine(nn.Module):
        count = 0

    Engine.__module__ = "torch.nn.parallel.distributed"
    engine = Engine()
    engine.count = 1
    with buffers_kept(engine):
        engine.count += 1
    assert engine.count == 2


def test_a_tensor_with_a_graph_is_bound_again_and_not_written():
    module = nn.Module()
    module.loss = (torch.ones(1, requires_grad=True) * 2).sum()
    loss = module.loss
    with buffers_kept(module):
        module.loss = loss + 1
    assert module.loss is loss
    loss.backward()


def test_they_come_back_after_an_error():
    module, holder = nn.BatchNorm1d(3), SimpleNamespace(count=[1])
    with pytest.raises(KeyError), buffers_kept(module), attributes_kept(holder):
        module(torch.randn(5, 3))
        holder.count.append(2)
        raise KeyError
    assert not module.running_mean.any()
    assert holder.count == [1]


# --- attributes ------------------------------------------------------------------------------------------------------


def test_attributes_are_put_back():
    other = SimpleNamespace(untouched=1)
    holder = SimpleNamespace(
        number=1,
        text="a",
        metrics={"train": defaultdict(list, loss=[1.0]), "eval": {}},
        window=deque([1, 2], maxlen=2),
        names={"a"},
        counts=Counter(a=2),
        nested=([1], {"x": [torch.zeros(2)]}),
        tensor=torch.zeros(2),
        rebound=other,
        gone=1,
        itself=None,
    )
    holder.itself = [holder.metrics]
    inner, weight = holder.metrics["train"], nn.Parameter(torch.zeros(2))
    holder.weight = weight
    with attributes_kept(holder):
        holder.number += 1
        holder.text += "b"
        holder.metrics["train"]["loss"].append(2.0)
        holder.metrics["train"]["new"].append(2.0)
        holder.metrics["eval"] = None
        holder.window.append(3)
        holder.names.add("b")
        holder.counts["a"] += 1
        holder.nested[0].append(2)
        holder.nested[1]["x"][0].add_(1)
        holder.tensor.add_(1)
        holder.rebound = SimpleNamespace()
        holder.new = 1
        holder.weight.data.add_(1)
        other.untouched = 2
        del holder.gone
    assert holder.number == 1 and holder.text == "a" and holder.gone == 1 and not hasattr(holder, "new")
    assert holder.metrics == {"train": {"loss": [1.0]}, "eval": {}} and holder.metrics["train"] is inner
    assert list(holder.window) == [1, 2] and holder.window.maxlen == 2
    assert holder.names == {"a"} and holder.counts == {"a": 2}
    assert holder.nested[0] == [1] and not holder.nested[1]["x"][0].any() and not holder.tensor.any()
    assert holder.rebound is other and other.untouched == 2  # other objects are not looked into
    assert weight.data.all()  # parameters are not ours to restore


def test_skipped_attributes_are_bound_again_only():
    holder = SimpleNamespace(data=[1])
    data = holder.data
    with attributes_kept(holder, ["data"]):
        holder.data.append(2)
        holder.data = None
    assert holder.data is data and data == [1, 2]


def test_what_is_too_large_is_named(caplog):
    snapshots.logger.warning_once.cache_clear()
    many = [0] * (snapshots._MOST_ITEMS + 1)
    holder = SimpleNamespace(many=many, large=torch.zeros(snapshots._MOST_ELEMENTS + 1), small=[1])
    with attributes_kept(holder):
        holder.small.append(2)
    assert holder.small == [1] and not caplog.text
    with attributes_kept(holder):
        holder.many.append(1)
    assert "SimpleNamespace.many was changed" in caplog.text and "in_stale_pass" in caplog.text


# --- batches ---------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    values: torch.Tensor
    name: str


def batch() -> dict[str, Any]:
    ids = torch.arange(4)
    return {
        "ids": ids,
        "again": ids,
        "array": numpy.arange(3.0),
        "nested": [{"x": torch.zeros(2)}, (torch.zeros(1), "text")],
        "pair": Pair(torch.ones(1), 2),
        "encoding": BatchEncoding({"y": torch.zeros(2)}),
        "record": Record(torch.zeros(2), "r"),
        "scale": torch.ones(1, requires_grad=True),
        "nan": torch.tensor([float("nan")]),
        "object": object(),
        "flag": True,
    }


def test_a_copy_may_be_changed():
    original = batch()
    found = copied(original)
    assert difference(original, found) is None
    assert found["ids"] is found["again"]
    assert found["object"] is original["object"]
    assert type(found["pair"]) is Pair and type(found["encoding"]) is BatchEncoding
    assert found["scale"].requires_grad
    with torch.no_grad():
        for tensor in (
            *(found[key] for key in ("ids", "scale")),
            found["nested"][0]["x"],
            found["nested"][1][0],
            found["pair"].left,
            found["encoding"]["y"],
            found["record"].values,
        ):
            tensor.add_(1)
    found["array"] += 1
    found["nested"].append(1)
    found.pop("flag")
    assert difference(original, batch() | {"object": original["object"]}) is None
    assert len(found["nested"]) == 3


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda b: b["ids"].add_(1), "inputs['ids']"),
        (lambda b: b.update(ids=b["ids"].float()), "inputs['ids']"),
        (lambda b: b.update(ids=b["ids"][:3]), "inputs['ids']"),
        (lambda b: b["array"].fill(0), "inputs['array']"),
        (lambda b: b.pop("flag"), "the keys of inputs"),
        (lambda b: b["nested"].append(1), "the length of inputs['nested']"),
        (lambda b: b["nested"][0]["x"].add_(1), "inputs['nested'][0]['x']"),
        (lambda b: b.update(flag=False), "inputs['flag']"),
        (lambda b: b.update(flag=None), "inputs['flag']"),
        (lambda b: b["nan"].fill_(0), "inputs['nan']"),
        (lambda b: b["encoding"]["y"].add_(1), "inputs['encoding']['y']"),
    ],
)
def test_a_difference_is_found(change, where):
    one, other = batch(), batch()
    change(other)
    assert difference(one, other) == where
