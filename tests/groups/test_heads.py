"""Heads of models by name, and other modules with such names."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from torch import nn

from mars_hf.groups import matrix_layouts


def takes_adamw(model, **options) -> set[str]:
    return set(matrix_layouts.left_out(model, **options))


def heads(model: nn.Module) -> set[str]:
    return {name for name, reason in matrix_layouts.left_out(model).items() if reason == "head"}


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(rows, cols) for rows, cols in pairwise(sizes)))


class Model(nn.Module):
    """Return a module with the given children."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


@pytest.mark.parametrize(
    "name",
    [
        *("classifier", "score", "qa_outputs", "lm_head", "head", "heads", "logits_proj", "class_embed", "ctc_head"),
        *("sequence_summary", "bbox_predictor", "distillation_classifier", "v_head", "reward_head", "audio_lm_head"),
        *("seq_relationship", "embed_out", "rank_output", "predict_action", "class_labels_classifier", "codec_head"),
    ],
)
def test_names_of_heads(name):
    assert heads(Model(body=nn.Linear(4, 4), **{name: nn.Linear(4, 3)})) == {f"{name}.weight"}
    nested = Model(model=Model(body=nn.Linear(4, 4), **{name: nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])}))
    assert heads(nested) == {f"model.{name}.0.weight", f"model.{name}.1.weight"}


@pytest.mark.parametrize(
    "name", ["body", "query_pos_head", "ref_point_head", "message_fc", "scorer", "classify", "conv_head"]
)
def test_names_that_are_none(name):
    layer = nn.Linear(4, 4) if name == "conv_head" else mlp(4, 4, 4)
    assert heads(Model(**{name: layer}, last=nn.Linear(4, 4))) == set()


def test_a_few_linear_layers_are_a_head_and_of_a_larger_one_the_last_is():
    assert heads(Model(classifier=mlp(4, 4, 3))) == {"classifier.0.weight", "classifier.1.weight"}
    convolutions = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.ReLU())
    assert heads(Model(head=convolutions)) == {"head.3.weight"}
    recurrent = Model(cell=nn.GRUCell(4, 4), out=mlp(4, 4, 3))
    assert heads(Model(head=recurrent)) == {"head.out.1.weight"}


def test_modules_that_only_have_the_name():
    class PoolingHead(Model):
        pass

    class OddAttention(Model):
        pass

    class TokenRouter(Model):
        pass

    model = Model(
        vision=Model(head=PoolingHead(dense=nn.Linear(4, 4))),
        attention=OddAttention(q_head=nn.Linear(4, 4), v_head=nn.Linear(4, 4)),
        router=TokenRouter(classifier=nn.Linear(4, 3)),
    )
    assert heads(model) == set()


def test_the_last_layer_of_an_image_model_is_its_head():
    def resnet(**last) -> Model:
        return Model(conv1=nn.Conv2d(3, 8, 3), layer1=Model(fc=nn.Conv2d(8, 8, 1)), avgpool=nn.Flatten(), **last)

    assert heads(resnet(fc=nn.Linear(8, 5))) == {"fc.weight"}
    assert heads(Model(timm_model=resnet(fc=nn.Linear(8, 5)))) == {"timm_model.fc.weight"}
    assert heads(resnet(fc=nn.Linear(8, 5), decoder=nn.Linear(5, 9))) == set()
    assert heads(Model(conv=nn.Conv1d(3, 8, 3), fc=nn.Linear(8, 5))) == set()
    assert heads(Model(blocks=nn.ModuleList([Model(pool=resnet(fc=nn.Linear(8, 5)))]))) == set()


def test_what_a_model_calls_its_outputs():
    class Timm(Model):
        def get_classifier(self):
            return self.odd, self.odd_too

    class Language(Model):
        def get_output_embeddings(self):
            return self.odd

    class Asks(Model):
        def get_classifier(self, name):
            raise AssertionError

    layers = {"odd": nn.Linear(4, 3), "odd_too": nn.Linear(4, 3), "other": nn.Linear(4, 3)}
    assert heads(Asks(**layers)) == set()
    assert heads(Timm(**layers)) == {"odd.weight", "odd_too.weight"}
    assert heads(Model(inner=Language(**layers))) == {"inner.odd.weight"}


def test_models_without_outputs():
    class Base(Model):
        def get_output_embeddings(self):
            raise NotImplementedError

    class Without(Model):
        def get_output_embeddings(self):
            return None

    for kind in (Base, Without):
        assert heads(kind(body=nn.Linear(4, 4), lm_head=nn.Linear(4, 9))) == {"lm_head.weight"}


def test_hidden_layers_of_language_heads_are_no_heads():
    class Language(Model):
        def get_output_embeddings(self):
            return self.lm_head.decoder

    language = Language(lm_head=Model(dense=nn.Linear(4, 4), decoder=nn.Linear(4, 9)))
    assert heads(language) == {"lm_head.decoder.weight"}
    assert heads(Model(mlm_head=Model(dense=nn.Linear(4, 4), decoder=nn.Linear(4, 9)))) == {"mlm_head.decoder.weight"}


def test_layers_beside_the_backbone_with_an_output_for_each_label():
    class ForLabels(Model):
        base_model_prefix = "model"
        config = SimpleNamespace(num_labels=3, vocab_size=9)

    layers = {"odd": nn.Linear(4, 3), "tokens": nn.Linear(4, 9), "other": nn.Linear(4, 4)}
    assert heads(ForLabels(model=nn.Linear(4, 3), **layers)) == {"odd.weight", "tokens.weight"}
    assert heads(ForLabels(**layers)) == set()  # a backbone itself


def test_a_model_that_knows_its_outputs_has_no_other_heads_of_unknown_names():
    """A bottleneck of two units is not a layer of two labels."""

    class WithBottleneck(Model):
        base_model_prefix = "model"
        config = SimpleNamespace(num_labels=2, vocab_size=9)

        def get_output_embeddings(self):
            return self.out

    model = WithBottleneck(model=nn.Linear(4, 4), narrow=nn.Linear(4, 2), wide=nn.Linear(2, 4), out=nn.Linear(4, 9))
    assert heads(model) == {"out.weight"}


def test_what_is_tied_to_a_head_is_left_out_with_it():
    model = Model(body=nn.Linear(4, 3), score=nn.Linear(4, 3))
    model.body.weight = model.score.weight
    assert heads(model) == {"body.weight"}
