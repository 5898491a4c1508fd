"""Names and weights of joined encoders, feature blocks and scaled features, as fields of a recipe."""

from __future__ import annotations

import pytest

from lopsided.errors import InputError
from lopsided.recipe import named_recipe
from lopsided.recipe.encoder_spec import EncoderSpec

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
    assert [part.weights for part in EncoderSpec.parse(TWO, weights).parts] == parts
    assert EncoderSpec.parse("resnet18", "/a+b.safetensors").parts[0].weights == "/a+b.safetensors"


def test_only_the_paths_among_weights_are_changed() -> None:
    def changed(name: str, weights: str) -> str:
        return EncoderSpec.parse(name, weights).change_files(lambda path: f"/there/{path}")

    assert changed(TWO, "embedded") == "embedded"
    assert changed("resnet18", "a+b.safetensors") == "/there/a+b.safetensors"
    for name in (TWO, f"{TWO}+pixels"):
        assert changed(name, "embedded+w.safetensors") == "embedded+/there/w.safetensors"
        spec = EncoderSpec.parse(name, "embedded+/here/w.safetensors")
        assert (spec.files, spec.without_folders()) == (["/here/w.safetensors"], "embedded+w.safetensors")
        assert (spec.names, spec.is_embedded, spec.weights_kind) == (TWO.split("+"), True, "file")
    assert EncoderSpec.parse("resnet18").files == []


def test_a_block_has_its_usual_weight_or_that_of_the_recipe() -> None:
    shares = [EncoderSpec.parse(f"resnet18+pixels{end}").blocks[0].share for end in ("", ":0.3", ":2")]
    assert shares == [0.3, 0.3, 2.0]
    for text in ("", "0", "-1", "nan", "much"):
        with pytest.raises(InputError, match=r"the weight of pixels in encoder\.name must be a number > 0, got"):
            EncoderSpec.parse(f"resnet18+pixels:{text}")


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
            "quick",
            {"encoder.name": TWO, "encoder.weights": "embedded+w.safetensors", "augment.normalisation": "half"},
            'augment.normalisation must be "weights" with joined encoders, got "half".',
        ),
        (
            "quick",
            {"encoder.name": TWO, "encoder.weights": "w.safetensors"},
            "encoder.weights must name weights for each of the 2 encoders tf_efficientnet_lite0, resnet18, got "
            "'w.safetensors'. Put + between them, as in encoder.name.",
        ),
        (
            "quick",
            {"encoder.name": TWO, "encoder.weights": "embedded+none"},
            "encoder.weights cannot hold \"none\" for one of several encoders, got 'embedded+none'.",
        ),
        (
            "quick",
            {"encoder.weights": "embedded+embedded"},
            "encoder.weights must be those of one encoder, got 'embedded+embedded'.",
        ),
        (
            "quick",
            {"encoder.name": "pixels"},
            "encoder.name must have pixels after the encoders that it is joined to, got pixels. Write it once, as in "
            "tf_efficientnet_lite0+pixels.",
        ),
        (
            "quick",
            {"encoder.name": "pixels+tf_efficientnet_lite0"},
            "encoder.name must have pixels after the encoders that it is joined to, got pixels+tf_efficientnet_lite0. "
            "Write it once, as in tf_efficientnet_lite0+pixels.",
        ),
        (
            "quick",
            {"encoder.name": "tf_efficientnet_lite0+pixels+pixels"},
            "encoder.name must have pixels after the encoders that it is joined to, got "
            "tf_efficientnet_lite0+pixels+pixels. Write it once, as in tf_efficientnet_lite0+pixels.",
        ),
        (
            "thorough",
            {"data.channels": 1},
            "data.channels must be unset or 3 with the encoder tf_efficientnet_lite0+stages+regions+pixels:1, got 1. "
            "Leave out data.channels: grey images are repeated to three channels. Or name one encoder, without +.",
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


def test_thorough_is_quick_with_more_views_of_larger_images() -> None:
    thorough, default = named_recipe("thorough"), named_recipe("quick")
    many, one = thorough.encoder.spec, default.encoder.spec
    assert (many.passes, one.passes) == (4, 1)
    assert (one.parts, one.blocks) == (many.parts, many.blocks)
    same = {"encoder": default.encoder, "data": default.data, "description": default.description}
    assert thorough.model_copy(update=same) == default


@pytest.mark.parametrize("normalisation", ["weights", "source"])
def test_models_of_scaled_features_can_be_an_ensemble(normalisation: str) -> None:
    fields = {"data.folds": 3, "final": "ensemble", "encoder.name": "resnet18", "encoder.weights": "x.safetensors"}
    changed = {**fields, "encoder.scaling": "root", "augment.normalisation": normalisation}
    for name, alone in (("quick", {}), ("fine-tune", {"fine_tune.blend": 0.0})):
        assert named_recipe(name).override(**changed, **alone).final == "ensemble"
