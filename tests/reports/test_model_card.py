"""Sentences of a model card that a whole run would make slow to test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lopsided.recipe import Recipe, named_recipe
from lopsided.reports.model_card import _data, _licence, _origin, recipe_lines
from lopsided.reports.run_words import Facts

TABLES = ["/home/me/secret/marks.csv", "/home/me/secret/more.csv"]


def data(recipe: Recipe, counts: dict[str, dict[str, int]], folds: int | None) -> list[str]:
    metrics: Any = SimpleNamespace(
        classes=["cat", "dog"],
        counts=SimpleNamespace(**counts),
        folds=None if folds is None else SimpleNamespace(folds=folds),
        unreadable=[],
    )
    return list(_data(Facts(recipe, metrics, "test")))


@pytest.mark.parametrize("folds", [None, 5])
def test_tables_of_further_labels_are_counted_and_not_named(folds: int | None) -> None:
    recipe = Recipe().override(**{"data.source": "/home/me/secret/photos", "data.more": TABLES})
    counts = {"train": {"cat": 31, "dog": 1010}, "val": {}, "test": {"cat": 30, "dog": 8}}
    text = "\n".join([*data(recipe, counts, folds), recipe_lines(recipe)])
    assert "secret" not in text
    if folds is None:
        assert "The training images include those of 2 tables of further labels. None of these is tested." in text
    else:
        assert "| class | images |" in text
        assert "| dog | 8 |" in text
        assert "Every image of this table was tested by a model that was not trained on it (5 folds)." in text
        further = "Further training images, from 2 tables of further labels: 1 cat, 1,002 dog."
        assert f"{further} They are never tested." in text


LITE = "tf_efficientnet_lite"
OURS = "that are part of lopsided (Apache-2.0), a port of the weights of the TensorFlow authors."


@pytest.mark.parametrize(
    ("name", "changes", "base", "expected"),
    [
        (
            "quick",
            {"encoder.name": f"{LITE}1"},
            "timm/x",
            [
                f"The encoder has the ImageNet weights of EfficientNet-Lite1 {OURS} "
                "The hub has another port as `timm/x`."
            ],
        ),
        ("fine-tune", {}, None, [f"The encoder started from the ImageNet weights of EfficientNet-Lite0 {OURS}"]),
        (
            "quick",
            {"encoder.name": f"{LITE}2+resnet18+resnet34", "encoder.weights": "embedded+/home/a.safetensors+timm"},
            None,
            [
                f"The encoder `{LITE}2` has the ImageNet weights of EfficientNet-Lite2 {OURS}",
                "The encoder `resnet18` has the weights of the file `a.safetensors`.",
                "The encoder `resnet34` has the pretrained weights of timm.",
            ],
        ),
        ("from-scratch", {}, None, []),
    ],
)
def test_the_origin_of_the_weights_of_each_encoder_is_told(
    name: str, changes: dict[str, Any], base: str | None, expected: list[str]
) -> None:
    recipe = named_recipe(name).override(**changes)
    assert list(_origin(recipe, base)) == expected
    assert ("Apache License 2.0" in _licence(recipe)) is any("Apache" in text for text in expected)
