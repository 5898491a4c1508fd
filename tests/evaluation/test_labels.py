from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.errors import InputError
from lopsided.evaluation.labels import check_labels, count_wrong, duplicates_table, labels_table, near_duplicates


def made(counts: tuple[int, ...], flipped: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels with some of them flipped, the probabilities of a good model at the class shares, and the flipped rows."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(counts)), counts)
    logits = rng.normal(size=(len(truth), len(counts))) + 4 * np.eye(len(counts))[truth] + np.log(counts)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    rows = rng.permutation(len(truth))[:flipped]
    labels = truth.copy()
    labels[rows] = (labels[rows] + 1) % len(counts)
    return labels, p / p.sum(axis=1, keepdims=True), rows


def test_thresholds_and_joint_are_those_of_confident_learning() -> None:
    p = np.array([[0.9, 0.1], [0.7, 0.3], [0.35, 0.65], [0.4, 0.6], [0.85, 0.15], [0.55, 0.45]])
    y = np.array([0, 0, 0, 1, 1, 1])
    check = check_labels(y, p)
    assert check.thresholds == pytest.approx([(0.9 + 0.7 + 0.35) / 3, (0.6 + 0.15 + 0.45) / 3])  # 0.65 and 0.4
    # The third image reaches only class 1 and the fifth only class 0; the last reaches only its own class.
    assert check.suggested.tolist() == [1, 1, 1, 0, 0, 0]
    assert check.suspect.tolist() == [False, False, True, False, True, False]
    assert check.joint.tolist() == [[2, 1], [1, 2]]
    assert check.order.tolist() == [4, 2, 5, 3, 1, 0]


def test_flipped_labels_come_first_even_if_a_class_is_rare() -> None:
    labels, p, flipped = made((300, 40, 12), 12)
    check = check_labels(labels, p)
    assert len(set(check.order[:24].tolist()) & set(flipped.tolist())) >= 11


def test_a_rare_class_that_no_probability_favours_is_still_checked() -> None:
    """All images are most probably of class 0, but the second class has its own, low threshold."""
    p = np.array([[0.95, 0.05]] * 6 + [[0.7, 0.3]] * 3 + [[0.6, 0.4]])
    labels = np.array([0] * 6 + [1] * 3 + [0])
    check = check_labels(labels, p)
    assert np.flatnonzero(check.suspect).tolist() == [9]
    assert check.suggested[9] == 1


@given(st.integers(0, 10_000), st.integers(2, 5))
def test_the_order_holds_every_image_once_and_the_joint_counts_the_suspects(seed: int, num_classes: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(num_classes), 30)
    labels = rng.integers(0, num_classes, 30)
    check = check_labels(labels, p)
    assert sorted(check.order.tolist()) == list(range(30))
    assert (np.diff(check.p_label[check.order]) >= 0).all()
    assert (check.suggested != labels).all()
    assert (p[check.suspect, check.suggested[check.suspect]] >= check.thresholds[check.suggested[check.suspect]]).all()
    assert check.joint.sum() - np.trace(check.joint) == check.num_suspects


def test_a_class_without_images_suggests_nothing() -> None:
    check = check_labels([0, 0, 1], [[0.4, 0.0, 0.6], [0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])
    assert 2 not in check.suggested[check.suspect]


def test_the_table_lists_the_most_doubtful_label_first() -> None:
    check = check_labels([0, 0, 1, 1], [[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.97, 0.03]])
    table = labels_table(check, ["a", "b", "c", 'd,"e'], ["cat", "dog"], ["1", "1", "2", "3"])
    rows = list(csv.DictReader(io.StringIO(table.decode())))
    assert rows[0] == {
        "rank": "1", "name": 'd,"e', "group": "3", "label": "dog", "suggested": "cat", "suspect": "yes",
        "p_label": "0.03", "p_suggested": "0.97",
    }  # fmt: skip
    assert [(row["name"], row["suspect"]) for row in rows[1:]] == [("b", "no"), ("a", "no"), ("c", "no")]


@pytest.mark.parametrize(
    ("labels", "p", "told"),
    [
        ([0, 1], [[1.0, 0.0]], "labels must be (n,) and probabilities (n, classes)"),
        ([0, 2], [[1.0, 0.0], [0.5, 0.5]], "labels must be class numbers from 0 to 1, got 0 to 2"),
        ([0, 1], [[1.0, 0.0], [np.nan, 0.5]], "probabilities must be between 0 and 1."),
    ],
)
def test_bad_input_is_refused(labels: list[int], p: list[list[float]], told: str) -> None:
    with pytest.raises(InputError) as caught:
        check_labels(labels, p)
    assert str(caught.value).startswith(told)


def near(seed: int = 0) -> np.ndarray:
    """Forty random vectors. The last three are nearly the first three."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 64)).astype(np.float32) * rng.uniform(0.1, 10, 64).astype(np.float32) + 5
    x[37:] = x[:3] + 0.01 * rng.normal(size=(3, 64)).astype(np.float32)
    return x


@pytest.mark.parametrize("block", [1, 7, 1024])
def test_near_duplicates_across_labels_and_groups_are_found_whatever_the_block(block: int) -> None:
    labels = np.array([0] * 20 + [1] * 20)
    groups = [f"g{i}" for i in range(40)]
    groups[38] = "g1"
    labels[38:] = 0
    found = near_duplicates(near(), labels, groups, block=block)
    # 37 has another label than 0; 38 is in the group of 1; 39 has the label of 2 and another group.
    assert {(pair.first, pair.second, pair.across) for pair in found} == {(0, 37, "label"), (2, 39, "group")}
    assert all(0.99 < pair.similarity <= 1 for pair in found)


def test_without_groups_every_other_image_counts() -> None:
    found = near_duplicates(near(), np.zeros(40, dtype=int))
    assert {(pair.first, pair.second, pair.across) for pair in found} == {(i, 37 + i, "image") for i in range(3)}


def test_identical_images_do_not_make_a_quadratic_number_of_pairs() -> None:
    x = np.repeat(near()[:2], 50, axis=0)
    assert len(near_duplicates(x, np.zeros(100, dtype=int))) <= 100


def test_a_constant_feature_and_a_mean_image_do_no_harm() -> None:
    x = near()
    x[:, 0] = 3.0
    x[5] = x.mean(axis=0)
    assert len(near_duplicates(x, np.zeros(40, dtype=int))) >= 3
    assert near_duplicates(np.ones((4, 2)), [0, 0, 1, 1]) == []


def test_the_table_of_near_duplicates_names_both_images() -> None:
    labels = [0] * 37 + [1, 0, 0]
    names = [f"{i}.png" for i in range(40)]
    pairs = near_duplicates(near(), labels)
    rows = list(csv.DictReader(io.StringIO(duplicates_table(pairs, names, labels, ["cat", "dog"]).decode())))
    across = [(row["name"], row["other_name"], row["other_label"]) for row in rows if row["across"] == "label"]
    assert across == [("0.png", "37.png", "dog")]


def test_bad_features_are_refused() -> None:
    with pytest.raises(InputError, match="features must be one vector for each label"):
        near_duplicates(np.ones((3, 2)), [0, 1])
    with pytest.raises(InputError, match="threshold must be above 0 and at most 1, got 2"):
        near_duplicates(np.ones((2, 2)), [0, 1], threshold=2)
    with pytest.raises(InputError, match="features must be finite numbers"):
        near_duplicates([[np.nan, 1.0]], [0])


def made_labels(flipped: int, seed: int, number: int = 448) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which some are flipped, and probabilities of a model that is too sure, of classes that overlap."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(number) < 0.2).astype(np.int64)
    logit = 1.8 * (rng.normal(size=number) + 3 * labels) - 4.5
    rows = rng.permutation(number)[:flipped]
    labels[rows] = 1 - labels[rows]
    p = 1 / (1 + np.exp(-2 * logit))
    return labels, np.stack([1 - p, p], axis=1)


def test_the_number_of_wrong_labels_tells_good_labels_from_flipped_ones() -> None:
    good = [count_wrong(*made_labels(0, seed)) for seed in range(12)]
    flipped = [count_wrong(*made_labels(12, seed)) for seed in range(12)]
    suspects = [check_labels(*made_labels(0, seed)).num_suspects for seed in range(12)]
    assert np.mean([found.value for found in good]) < 4 < np.mean(suspects), "Difficult images are no wrong labels."
    assert sum(found.low < 1 for found in good) >= 11
    assert 9 < np.mean([found.value for found in flipped]) < 15
    assert sum(found.low > 1 for found in flipped) >= 10
    assert sum(found.low <= 12 <= found.high for found in flipped) >= 10


def test_copies_do_not_make_the_number_of_wrong_labels_surer() -> None:
    labels, p = made_labels(12, 0)
    alone = count_wrong(labels, p)
    groups = np.repeat(np.arange(len(labels)).astype(str), 3)
    thrice = count_wrong(np.repeat(labels, 3), np.repeat(p, 3, axis=0), groups.tolist())
    assert thrice.value / 3 == pytest.approx(alone.value, rel=0.15)
    assert thrice.high / 3 == pytest.approx(alone.high, rel=0.15)
