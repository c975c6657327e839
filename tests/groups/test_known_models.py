"""The weights of plain modules that are orthogonalized."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from mars_hf.groups import known_models, matrix_layouts

UNKNOWN = "{} is not known to multiply activations with it"
GROUPED = "depthwise or grouped convolution"
PART = "part of a parametrized weight"


def reasons(model: nn.Module, **options) -> dict[str, str | None]:
    """Return why each parameter of two or more dimensions is not orthogonalized; None if it is."""
    found = matrix_layouts.left_out(model, **options)
    return {
        name: found.get(name) for name, param in model.named_parameters() if len(matrix_layouts.shape_of(param)) > 1
    }


class Holds(nn.Module):
    """Return a module with parameters of its own."""

    def __init__(self, **params):
        super().__init__()
        for name, shape in params.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))


class Multiplies(Holds):
    def forward(self, x):
        return nn.functional.linear(x, self.plain) + torch.nn.functional.linear(input=x, weight=self.cast.to(x.dtype))


class MultipliesExperts(Holds):
    def forward(self, x, expert):
        return nn.functional.linear(x, self.stack[expert])


class DoesOtherThings(Holds):
    def forward(self, x):
        return nn.functional.linear(self.first, x) + nn.functional.linear(x, self.normal / self.normal.norm())


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(4, 3), {"weight": None}),
        (nn.Linear(4, 1), {"weight": "a single row or column"}),
        (nn.Linear(1, 4), {"weight": "a single row or column"}),
        (nn.Bilinear(3, 4, 5), {"weight": None}),
        (nn.Conv1d(4, 6, 3), {"weight": None}),
        (nn.Conv1d(4, 1, 3), {"weight": "a single row or column"}),
        (nn.Conv2d(1, 6, 3), {"weight": None}),
        (nn.Conv2d(4, 4, 3, groups=4), {"weight": GROUPED}),
        (nn.Conv3d(4, 6, 3, groups=2), {"weight": GROUPED}),
        (nn.ConvTranspose2d(4, 6, 3), {"weight": None}),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), {"weight": GROUPED}),
        (nn.Embedding(5, 4), {"weight": "embedding"}),
        (nn.EmbeddingBag(5, 4), {"weight": "embedding"}),
        (
            nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=3),
            {
                **{"q_proj_weight": None, "k_proj_weight": None, "v_proj_weight": None, "out_proj.weight": None},
                **{"bias_k": UNKNOWN.format("MultiheadAttention"), "bias_v": UNKNOWN.format("MultiheadAttention")},
            },
        ),
        (nn.GRU(3, 4), {"weight_ih_l0": None, "weight_hh_l0": None}),
        (
            nn.LSTM(3, 4, proj_size=2, bidirectional=True),
            {f"weight_{kind}_l0{end}": None for end in ("", "_reverse") for kind in ("ih", "hh", "hr")},
        ),
        (nn.RNNCell(3, 4), {"weight_ih": None, "weight_hh": None}),
        (nn.ParameterList([nn.Parameter(torch.ones(3, 4))]), {"0": UNKNOWN.format("ParameterList")}),
        (Holds(scale=(4, 1, 1)), {"scale": UNKNOWN.format("Holds")}),
    ],
    ids=lambda value: str(value).splitlines()[0] if isinstance(value, nn.Module) else "",
)
def test_modules_of_torch(module, expected):
    assert reasons(module) == expected


@pytest.mark.parametrize("inside", ["", "layer."])
def test_parametrized_weights(inside):
    def nested(module: nn.Module) -> nn.Module:
        return nn.ModuleDict({"layer": module}) if inside else module

    def of(module: nn.Module) -> dict[str, str | None]:
        return {name.removeprefix(inside): reason for name, reason in reasons(nested(module)).items()}

    at = "parametrizations.weight.original"
    assert of(parametrizations.weight_norm(nn.Linear(4, 3))) == {f"{at}0": PART, f"{at}1": None}
    assert of(parametrizations.weight_norm(nn.Conv1d(4, 4, 3, groups=2))) == {f"{at}0": PART, f"{at}1": GROUPED}
    assert of(parametrizations.spectral_norm(nn.ConvTranspose1d(4, 3, 3))) == {at: None}
    assert of(parametrizations.orthogonal(nn.Linear(4, 4))) == {at: PART}
    assert of(nn.utils.weight_norm(nn.Linear(4, 3))) == {"weight_g": UNKNOWN.format("Linear"), "weight_v": None}
    assert of(nn.utils.spectral_norm(nn.Linear(4, 3))) == {"weight_orig": None}
    assert of(prune.random_unstructured(nn.Linear(4, 3), "weight", 0.5)) == {"weight_orig": None}


def test_layouts_of_parametrized_weights_are_those_of_their_modules():
    model = nn.ModuleDict({"up": parametrizations.weight_norm(nn.ConvTranspose1d(4, 3, 5))})
    found = matrix_layouts.of_model(model)["up.parametrizations.weight.original1"]
    assert matrix_layouts.matrix_shapes((4, 3, 5), found) == [(3, 20)]


def test_unknown_parametrizations_take_adamw():
    class Doubles(nn.Module):
        def forward(self, x):
            return 2 * x

    for twice in (False, True):
        linear = parametrizations.spectral_norm(nn.Linear(4, 3)) if twice else nn.Linear(4, 3)
        parametrize.register_parametrization(linear, "weight", Doubles())
        assert reasons(linear) == {"parametrizations.weight.original": PART}


def test_classes_that_are_made_at_run_time_are_known_by_their_bases():
    conv1d = type("Conv1D", (Holds,), {})
    for kind in (nn.Linear, conv1d, type("SomeExperts", (Holds,), {})):
        sharded = type(f"FSDP{kind.__name__}", (kind,), {})  # as fully_shard does
        module = nn.Linear(4, 3) if kind is nn.Linear else kind(weight=(2, 4, 3) if "Experts" in str(kind) else (4, 3))
        before = reasons(module)
        module.__class__ = sharded
        assert reasons(module) == before == {"weight": None}
    assert known_models.reading(conv1d(weight=(4, 3)), "weight", (4, 3)) == {"transposed": True}


def test_embeddings_by_name():
    class QuantEmbedding(Holds):
        pass

    class PatchEmbedding(nn.Conv2d):
        pass

    class TimeEmbedding(nn.Linear):
        pass

    assert reasons(QuantEmbedding(weight=(5, 4), table=(5, 4))) == {"weight": "embedding", "table": "embedding"}
    assert reasons(PatchEmbedding(3, 8, 2)) == {"weight": None}
    assert reasons(TimeEmbedding(3, 8)) == {"weight": None}


# --- code ------------------------------------------------------------------------------------------------------------


def test_code_that_hands_a_parameter_to_linear():
    assert reasons(Multiplies(plain=(3, 4), cast=(3, 4), other=(3, 4))) == {
        "plain": None,
        "cast": None,
        "other": UNKNOWN.format("Multiplies"),
    }
    model = MultipliesExperts(stack=(2, 3, 4))
    assert reasons(model) == {"stack": None}
    assert matrix_layouts.matrix_shapes((2, 3, 4), matrix_layouts.of_model(model)["stack"]) == [(2, 3, 4)]
    assert set(reasons(DoesOtherThings(first=(3, 4), normal=(3, 4))).values()) == {UNKNOWN.format("DoesOtherThings")}


def test_code_without_source_is_unknown():
    scope = {"Holds": Holds, "nn": nn}
    exec("class Made(Holds):\n  def forward(self, x):\n    return nn.functional.linear(x, self.w)", scope)
    assert reasons(scope["Made"](w=(3, 4))) == {"w": UNKNOWN.format("Made")}


def test_linear_layers_of_other_libraries_state_their_sizes():
    module = Holds(weight=(3, 4), factors=(3, 4))
    assert set(reasons(module).values()) == {UNKNOWN.format("Holds")}
    module.in_features, module.out_features = 4, 3
    assert reasons(module) == {"weight": None, "factors": UNKNOWN.format("Holds")}
    module.in_features = 5
    assert reasons(module)["weight"] == UNKNOWN.format("Holds")


def test_a_pattern_of_split_fused_vouches_for_what_is_unknown():
    model = nn.ModuleDict({"odd": Holds(w=(6, 4), table=(6, 4)), "conv": nn.Conv1d(4, 4, 1, groups=2)})
    assert reasons(model, projections=["odd.w", "conv.*"]) == {
        "odd.w": None,
        "odd.table": UNKNOWN.format("Holds"),
        "conv.weight": GROUPED,
    }


# --- what is shared --------------------------------------------------------------------------------------------------


def test_tied_weights_are_left_out_with_their_embedding():
    model = nn.ModuleDict({"out": nn.Linear(4, 9, bias=False), "table": nn.Embedding(9, 4)})
    assert reasons(model)["out.weight"] is None
    model["out"].weight = model["table"].weight
    assert reasons(model) == {"out.weight": "embedding"}


def test_a_weight_that_another_module_holds_as_well_is_still_a_weight():
    holder = Holds()
    holder.alias, layers = nn.Parameter(torch.ones(3, 4)), nn.ModuleDict({"linear": nn.Linear(4, 3)})
    layers["linear"].weight = holder.alias
    holder.layers = layers
    assert reasons(holder) == {"alias": None}


def test_shapes_that_zero_init_has_emptied():
    model = nn.ModuleDict({"wide": nn.Linear(4, 3), "row": nn.Linear(4, 1), "classifier": nn.Linear(4, 3)})
    expected = reasons(model)
    for param in model.parameters():
        param.ds_shape = param.shape
        param.data = torch.empty(0)
    assert (
        reasons(model)
        == expected
        == {"wide.weight": None, "row.weight": "a single row or column", "classifier.weight": "head"}
    )
