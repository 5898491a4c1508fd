"""Names and weights of joined encoders, and scaled features, as fields of a recipe."""

from __future__ import annotations

import pytest

from lopsided.errors import InputError
from lopsided.recipe import named_recipe
from lopsided.recipe.weights import change_files, split_weights, trained_names, weight_files

TWO = "tf_efficientnet_lite0+resnet18"


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ("embedded", ["embedded", "embedded"]),
        ("embedded+w.safetensors", ["embedded", "w.safetensors"]),
        ("w.safetensors+timm", ["w.safetensors", "timm"]),
        ("/a+b/w.safetensors+/c+embedded+d/v.safetensors", ["/a+b/w.safetensors", "/c+embedded+d/v.safetensors"]),
    ],
)
def test_weights_of_joined_encoders_are_split_where_a_word_or_a_file_ends(weights: str, parts: list[str]) -> None:
    assert split_weights(weights, TWO.split("+")) == parts
    assert split_weights("/a+b.safetensors", ["resnet18"]) == ["/a+b.safetensors"]


def test_only_the_paths_among_weights_are_changed() -> None:
    assert change_files(TWO, "embedded+w.safetensors", lambda path: f"/there/{path}") == "embedded+/there/w.safetensors"
    assert change_files(TWO, "embedded", lambda path: f"/there/{path}") == "embedded"
    assert change_files("resnet18", "a+b.safetensors", lambda path: f"/there/{path}") == "/there/a+b.safetensors"
    assert weight_files(TWO, "embedded+w.safetensors") == ["w.safetensors"]
    assert weight_files("resnet18", "none") == []
    coloured = f"{TWO}+pixels"
    changed = change_files(coloured, "embedded+w.safetensors", lambda path: f"/there/{path}")
    assert changed == "embedded+/there/w.safetensors"
    assert weight_files(coloured, "embedded+w.safetensors") == ["w.safetensors"]


@pytest.mark.parametrize(
    ("base", "changes", "text"),
    [
        (
            "from-scratch",
            {"encoder.scaling": "root"},
            'encoder.scaling must be "none" with method "two-stage", got "root". Only the features of a pretrained '
            "encoder are scaled.",
        ),
        (
            "fine-tune",
            {"encoder.name": TWO, "encoder.weights": "embedded+w.safetensors"},
            'encoder.name must be one encoder with method "fine-tune", got tf_efficientnet_lite0+resnet18. Only frozen '
            "encoders can be joined.",
        ),
        (
            "from-scratch",
            {"encoder.name": TWO, "encoder.weights": "embedded+w.safetensors"},
            'encoder.name must be one encoder with method "two-stage", got tf_efficientnet_lite0+resnet18. Only frozen '
            "encoders can be joined.",
        ),
        (
            "default",
            {"encoder.name": TWO, "encoder.weights": "embedded+w.safetensors", "augment.normalisation": "half"},
            'augment.normalisation must be "weights" with joined encoders, got "half".',
        ),
        (
            "default",
            {"encoder.name": TWO, "encoder.weights": "w.safetensors"},
            "encoder.weights must name weights for each of the 2 encoders tf_efficientnet_lite0, resnet18, got "
            "'w.safetensors'. Put + between them, as in encoder.name.",
        ),
        (
            "default",
            {"encoder.name": TWO, "encoder.weights": "embedded+none"},
            "encoder.weights cannot hold \"none\" for one of several encoders, got 'embedded+none'.",
        ),
        (
            "default",
            {"encoder.weights": "embedded+embedded"},
            "encoder.weights must be those of one encoder, got 'embedded+embedded'.",
        ),
        (
            "default",
            {"encoder.name": "pixels"},
            "encoder.name must have pixels after the encoders that it is joined to, got pixels. Write it once, as in "
            "tf_efficientnet_lite0+pixels.",
        ),
        (
            "default",
            {"encoder.name": "pixels+tf_efficientnet_lite0"},
            "encoder.name must have pixels after the encoders that it is joined to, got pixels+tf_efficientnet_lite0. "
            "Write it once, as in tf_efficientnet_lite0+pixels.",
        ),
        (
            "default",
            {"encoder.name": "tf_efficientnet_lite0+pixels+pixels"},
            "encoder.name must have pixels after the encoders that it is joined to, got "
            "tf_efficientnet_lite0+pixels+pixels. Write it once, as in tf_efficientnet_lite0+pixels.",
        ),
        (
            "thorough",
            {"data.channels": 1},
            "data.channels must be unset or 3 with the encoder tf_efficientnet_lite0+tf_efficientnet_lite1+"
            "tf_efficientnet_lite2+pixels, got 1. Leave out data.channels: grey images are repeated to three channels. "
            "Or name one encoder, without +.",
        ),
        (
            "thorough",
            {"data.folds": 5, "final": "ensemble"},
            'final cannot be "ensemble" if encoder.views is auto: each fold may choose other views. Name the views, or '
            'use final = "refit".',
        ),
        (
            "thorough",
            {"encoder.name": "+".join(["resnet18"] * 17)},
            "encoder.name must join at most 16 encoders, none of them empty, got 17.",
        ),
    ],
)
def test_what_joined_encoders_or_scaled_features_cannot_be_is_one_sentence(
    base: str, changes: dict[str, object], text: str
) -> None:
    with pytest.raises(InputError) as caught:
        named_recipe(base).override(**changes)
    assert str(caught.value) == text


def test_thorough_is_default_with_more_encoders_and_views() -> None:
    thorough, default = named_recipe("thorough"), named_recipe("default")
    section = thorough.encoder
    assert (len(trained_names(section.name)), section.passes, default.encoder.passes) == (3, 12, 1)
    assert trained_names(default.encoder.name) == trained_names(section.name)[:1]
    same = {"encoder": default.encoder, "data": default.data, "description": default.description}
    assert thorough.model_copy(update=same) == default


@pytest.mark.parametrize("normalisation", ["weights", "source"])
def test_models_of_scaled_features_can_be_an_ensemble(normalisation: str) -> None:
    fields = {"data.folds": 3, "final": "ensemble", "encoder.name": "resnet18", "encoder.weights": "x.safetensors"}
    changed = {**fields, "encoder.scaling": "root", "augment.normalisation": normalisation}
    for name, alone in (("default", {}), ("fine-tune", {"fine_tune.blend": 0.0})):
        assert named_recipe(name).override(**changed, **alone).final == "ensemble"
