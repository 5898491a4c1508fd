"""Columns of a table as features: what they become, and when one of them gives the label away."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from lopsided.data.stored import DescribedPath, cells_of
from lopsided.errors import DataError
from lopsided.models.blocks.block import Layout
from lopsided.models.blocks.columns import (
    MOST_CATEGORIES,
    SHARE,
    CategoryColumn,
    NumberColumn,
    encode,
    fit_column,
    telling,
)


def test_numbers_are_standardised_by_the_training_images_and_missing_ones_are_marked() -> None:
    column = fit_column("age", ["40", " 60 ", "", "NA", "nan"])
    assert column == NumberColumn(name="age", mean=50.0, std=10.0)
    assert column.encode(["70", "?", "50"]).tolist() == [[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]


def test_a_constant_number_is_only_centred() -> None:
    assert fit_column("age", ["3", "3"]).encode(["3", "5"]).tolist() == [[0.0, 0.0], [2.0, 0.0]]


def test_a_text_among_numbers_is_refused_in_new_images_and_makes_categories_in_training() -> None:
    with pytest.raises(DataError, match=r"age must hold numbers, or be empty, got 'old'"):
        fit_column("age", ["40", "60"]).encode(["old"])
    assert fit_column("age", ["40", "old"]) == CategoryColumn(name="age", values=("40", "old"))


def test_categories_get_a_mark_each_and_one_for_what_is_missing_or_unknown() -> None:
    column = fit_column("site", ["back", "arm", "", "arm"])
    assert column == CategoryColumn(name="site", values=("arm", "back"))
    assert column.encode(["back", "knee", "none"]).tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 1]]


def test_codes_are_categories_if_the_user_says_so() -> None:
    assert fit_column("site:category", ["1", "2", "2"]) == CategoryColumn(name="site", values=("1", "2"))


def test_an_empty_column_and_one_of_too_many_categories_are_refused() -> None:
    with pytest.raises(DataError, match="The column age is empty in all 2 training images"):
        fit_column("age", ["", "NA"])
    with pytest.raises(DataError, match=f"must have at most {MOST_CATEGORIES} categories, got 101 in 101"):
        fit_column("id", [f"p{i}" for i in range(MOST_CATEGORIES + 1)])


def test_features_of_columns_stand_side_by_side_and_rows_without_cells_are_counted() -> None:
    columns = [fit_column("age", ["40", "60"]), fit_column("sex", ["f", "m"])]
    assert encode(columns, [("60", "m"), ("", "f")]).tolist() == [[1, 0, 0, 1, 0], [0, 1, 1, 0, 0]]
    with pytest.raises(DataError, match=r"takes the columns age, sex beside each image, got none for 1 of 2 images"):
        encode(columns, [("60", "m"), ()])


@pytest.mark.parametrize(
    ("cells", "is_high"),
    [
        (["a"] * 10 + ["b"] * 4, True),
        ([""] * 10 + ["7"] * 4, True),  # Only the rare class was measured.
        ([str(i) for i in range(10)] + [str(100 + i) for i in range(4)], True),
        (["a", "b"] * 7, False),
        ([str(i % 5) for i in range(14)], False),
        ([f"p{i}" for i in range(14)], False),  # A name for each image says nothing about other images.
    ],
)
def test_a_column_that_gives_the_label_away_is_noticed_and_another_is_not(cells: list[str], is_high: bool) -> None:
    labels = np.array([0] * 10 + [1] * 4)
    reached = telling(cells, labels, fit_column("x", cells))
    assert (reached >= 0.95) == is_high
    assert is_high or reached < 0.75


def test_a_class_without_training_images_does_not_count() -> None:
    labels = np.array([0] * 5 + [2] * 5)
    assert telling(["a"] * 5 + ["b"] * 5, labels, fit_column("x", ["a", "b"])) == 1.0


def test_a_regression_weighs_columns_of_a_table_by_their_share() -> None:
    weights = Layout.final(30).importance(beside=4)
    assert weights is not None
    assert weights[:30].tolist() == [1.0] * 30
    assert np.square(weights[30:]).sum() == pytest.approx(30 * SHARE)
    assert Layout.final(30).importance() is None


def test_cells_go_with_a_path_and_to_other_processes() -> None:
    path = DescribedPath.of(Path("photos/a.jpg"), ["50", "f"])
    assert path == Path("photos/a.jpg")
    assert hash(path) == hash(Path("photos/a.jpg"))
    sent = pickle.loads(pickle.dumps(path))
    assert (sent, cells_of(sent)) == (path, ("50", "f"))
    assert cells_of(Path("photos/a.jpg")) == ()
