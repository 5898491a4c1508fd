"""The two diagnostics of the feature space, by hand and by laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lopsided.errors import InputError
from lopsided.evaluation import alignment
from lopsided.metrics import class_alignment_consistency, sample_alignment_accuracy


def on_a_line(*views: list[float]) -> np.ndarray:
    return np.array(views)[:, :, None]


def test_sample_alignment_counts_views_whose_nearest_neighbour_is_of_the_same_image() -> None:
    # The nearest neighbours of 0, 1 and 10, 10.1, and of 2.5, 8: 1, 0; 10.1, 10; 1 (of another image), 10 (of another).
    found = sample_alignment_accuracy(on_a_line([0.0, 1.0], [10.0, 10.1], [2.5, 8.0]), [0, 1, 1])
    assert found == {0: 1.0, 1: 0.5}


def test_features_that_have_collapsed_get_the_share_of_chance() -> None:
    found = sample_alignment_accuracy(np.zeros((5, 2, 3)), [0, 0, 0, 0, 1])
    assert found == pytest.approx({0: 1 / 9, 1: 1 / 9})  # One of the nine other views is of the same image.
    consistency = class_alignment_consistency(np.zeros((5, 3)), [0, 0, 0, 0, 1], neighbours=2)
    assert consistency == pytest.approx({0: 3 / 4, 1: 0.0})


def test_class_alignment_is_the_share_of_the_class_among_the_neighbours() -> None:
    z = np.array([0.0, 1.0, 2.5, 4.5, 7.0])[:, None]
    # The two nearest of each: (1, 2.5), (0, 2.5), (1, 4.5), (2.5, 7), (4.5, 2.5).
    found = class_alignment_consistency(z, ["a", "a", "b", "b", "a"], neighbours=2)
    assert found == pytest.approx({"a": (1 / 2 + 1 / 2 + 0) / 3, "b": (1 / 2 + 1 / 2) / 2})


def test_the_neighbours_of_the_paper_are_one_in_twenty() -> None:
    z = np.arange(60.0)[:, None] ** 1.1
    y = np.arange(60) % 2
    assert class_alignment_consistency(z, y) == class_alignment_consistency(z, y, neighbours=3)
    assert class_alignment_consistency(z[:7], y[:7]) == class_alignment_consistency(z[:7], y[:7], neighbours=1)


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_blocks_and_order_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(12, 2, 3)), np.arange(12) % 3
    expected = sample_alignment_accuracy(z, y), class_alignment_consistency(z[:, 0], y, neighbours=4)
    monkeypatch.setattr(alignment, "_BLOCK", block)
    order = rng.permutation(12)
    found = (
        sample_alignment_accuracy(z[order], y[order]),
        class_alignment_consistency(z[order, 0], y[order], neighbours=4),
    )
    assert [each == pytest.approx(right) for each, right in zip(found, expected, strict=True)] == [True, True]


THREE, VIEWS = np.ones((3, 2)), np.ones((3, 2, 2))


@pytest.mark.parametrize(
    ("function", "given", "text"),
    [
        (sample_alignment_accuracy, (THREE, [0, 1, 1]), "features must have shape (n, views, d), got (3, 2)."),
        (
            sample_alignment_accuracy,
            (VIEWS[:, :1], [0, 1, 1]),
            "features must hold at least 2 views of each image, got 1.",
        ),
        (sample_alignment_accuracy, (VIEWS[:1], [0]), "features must hold at least 2 images, got 1."),
        (sample_alignment_accuracy, (VIEWS, [0, 1]), "labels must be as many as the images (3), got 2."),
        (
            class_alignment_consistency,
            (np.nan * THREE, [0, 1, 1]),
            "features must be finite, got NaN or infinite numbers.",
        ),
        (
            class_alignment_consistency,
            (THREE, [[0, 1, 1]]),
            "labels must be one label per image, got an array of shape (1, 3).",
        ),
        (
            class_alignment_consistency,
            (THREE, [0, 1, 1], 3),
            "neighbours must be >= 1 and < 3, the number of features, got 3.",
        ),
        (
            class_alignment_consistency,
            (THREE, [0, 1, 1], 1.5),
            "neighbours must be > 0 and < 1 if it is a share, got 1.5. For a number of neighbours, pass an int.",
        ),
        (
            class_alignment_consistency,
            (THREE, [0, 1, 1], True),
            "neighbours must be a number or a share of all features, got True.",
        ),
    ],
)
def test_bad_input_is_refused(function: Any, given: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        function(*given)
    assert str(caught.value) == text
