"""Typicality of images among known ones, and drift."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lopsided.errors import InputError
from lopsided.evaluation.drift import compare
from lopsided.evaluation.typicality import MOST_KNOWN, MOST_SCORES, Bank, codes_of, make_bank, sample_rows


def features(generator: np.random.Generator, num: int, shift: float = 0.0, width: int = 6) -> np.ndarray:
    heavy = generator.standard_t(4, size=(num, width)) if width > 6 else generator.normal(size=(num, width))
    return (heavy + shift).astype(np.float32)


def bank_of(known: np.ndarray, groups: np.ndarray | None = None, labels: np.ndarray | None = None) -> Bank:
    codes = codes_of(groups, known)
    bank = make_bank(known, codes, known, codes, np.zeros(len(known), int) if labels is None else labels)
    assert bank is not None
    return bank


@pytest.mark.parametrize(("num", "width", "repeats"), [(12, 6, 300), (60, 6, 300), (30, 400, 100)])
def test_images_like_the_known_ones_have_a_low_typicality_as_often_as_it_says(
    num: int, width: int, repeats: int
) -> None:
    generator, levels = np.random.default_rng(0), (0.1, 0.3, 0.5)
    found = []
    for _ in range(repeats):
        typicality = bank_of(features(generator, num, width=width)).typicality(features(generator, 5, width=width))
        found.append([(typicality <= level).mean() for level in levels])
    for level, share in zip(levels, np.mean(found, axis=0), strict=True):
        assert 0.5 * level < share < level + (0.03 if width == 6 else 0.05)


def test_an_image_of_another_kind_is_unfamiliar_and_a_copy_of_a_known_one_is_not() -> None:
    known = features(np.random.default_rng(1), 120)
    bank = bank_of(known)
    far, copy = bank.typicality(np.full((1, 6), 9, dtype=np.float32)), bank.typicality(known[:1])
    assert far == bank.lowest == 1 / 121
    assert copy > 0.9
    assert bank.is_unfamiliar(np.concatenate([far, copy])).tolist() == [True, False]


def test_with_few_known_images_the_level_is_an_estimate_and_with_more_it_has_a_lowest_value() -> None:
    few, more = (bank_of(features(np.random.default_rng(2), num)) for num in (10, 120))
    assert few.is_guessed
    assert few.reached(0.01) == 0.01
    assert few.typicality(np.full((1, 6), 50, dtype=np.float32)) < 1e-3
    alarms = [few.is_unfamiliar(few.typicality(features(np.random.default_rng(seed), 20))).mean() for seed in range(50)]
    assert np.mean(alarms) < 0.05
    assert not more.is_guessed
    assert more.reached(0.001) == pytest.approx(1 / 121)
    for level in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"^--level must be a share between 0 and 1"):
            more.reached(level)


def test_copies_and_images_of_one_group_do_not_vouch_for_each_other() -> None:
    generator = np.random.default_rng(3)
    apart = features(generator, 100)
    double, groups = np.repeat(apart, 2, axis=0), np.repeat(np.arange(100), 2).astype(str)
    near = double + generator.normal(scale=1e-3, size=double.shape).astype(np.float32)
    new = features(generator, 400)
    for bank in (bank_of(double), bank_of(near, groups)):
        assert (bank.typicality(new) <= 0.1).mean() < 0.15
    assert (bank_of(near).typicality(new) <= 0.1).mean() > 0.25, "Without groups there would be many false alarms."


@pytest.mark.parametrize(("num", "size"), [(20, 10), (110, 3)])
def test_groups_of_images_that_are_alike_keep_the_share_of_false_alarms(num: int, size: int) -> None:
    generator, level = np.random.default_rng(10), 0.1
    by_group, by_image = [], []
    for _ in range(100):
        known = np.repeat(features(generator, num, width=20), size, axis=0)
        known += 0.1 * features(generator, num * size, width=20)
        bank = bank_of(known, np.repeat(np.arange(num), size).astype(str))
        assert bank.num_units == bank.num_groups == num
        new = features(generator, 40, width=20)
        by_group.append((bank.typicality(new) <= level).mean())
        counted = replace(bank, units=np.arange(len(known), dtype=np.int32))
        by_image.append((counted.typicality(new) <= level).mean())
    assert 0.5 * level < np.mean(by_group) < 1.15 * level
    assert np.mean(by_image) > np.mean(by_group), "Images of one group are not so many independent ones."


def test_images_count_as_their_share_of_their_group() -> None:
    known = np.zeros((4, 1), dtype=np.float32)
    scores, units = np.array([1, 2, 3, 4], dtype=np.float32), np.array([0, 0, 0, 1], dtype=np.int32)
    ones = np.ones(1, dtype=np.float32)
    bank = Bank(known.astype(np.float16), 0 * ones, ones, scores, units, np.empty((0, 2), dtype=np.float32))
    typicality = bank.typicality(np.array([[0.5], [1.5], [2.5], [3.5], [4.5]], dtype=np.float32))
    np.testing.assert_allclose(typicality, [1, (1 + 2 / 3 + 1) / 3, (1 + 1 / 3 + 1) / 3, 2 / 3, 1 / 3])
    assert bank.lowest == pytest.approx(1 / 3)
    np.testing.assert_allclose(bank.usual(), [1, 1, 1, 1 / 2])


def test_a_bank_is_bounded_and_holds_what_is_rare() -> None:
    labels = np.repeat([0, 1, 2], [MOST_SCORES, MOST_KNOWN, 40])
    rows, judged = sample_rows(labels, 0)
    assert (len(rows), len(judged)) == (MOST_KNOWN, MOST_SCORES)
    assert np.bincount(labels[rows]).tolist() == [980, 980, 40]
    assert len(np.unique(rows)) == len(rows)
    assert np.bincount(labels[judged])[2] < 40


def test_one_group_alone_cannot_be_compared() -> None:
    known = features(np.random.default_rng(4), 8)
    codes = codes_of(np.full(8, "same"), known)
    labels = np.zeros(8, int)
    assert make_bank(known, codes, known, codes, labels) is None
    assert make_bank(known[:1], codes[:1], known[:1], codes[:1], labels[:1]) is None


def test_images_of_a_class_with_few_images_are_not_left_out() -> None:
    generator, alarms, without, caught = np.random.default_rng(9), [], [], []
    for _ in range(60):
        known = np.concatenate([features(generator, 200), features(generator, 12, shift=6.0)])
        bank = bank_of(known, labels=np.repeat([0, 1], [200, 12]))
        rare = features(generator, 10, shift=6.0)
        alarms.append(bank.is_unfamiliar(bank.typicality(rare)).mean())
        caught.append(bank.is_unfamiliar(bank.typicality(features(generator, 10, shift=-25.0))).mean())
        without.append(bank.is_unfamiliar(replace(bank, limits=bank.limits[:0]).typicality(rare)).mean())
    assert np.mean(without) > 0.06
    assert np.mean(alarms) < 0.03
    assert np.mean(caught) == 1


def test_constant_columns_are_no_error_and_a_change_in_them_is_seen() -> None:
    known = features(np.random.default_rng(5), 150)
    known[:, 3] = 2.0
    bank, new = bank_of(known), features(np.random.default_rng(6), 1)
    new[:, 3] = 2.0
    assert bank.typicality(new) > 0.01
    new[:, 3] = 5.0
    assert bank.typicality(new) == bank.lowest


def test_drift_is_seen_and_images_like_the_known_ones_are_none() -> None:
    generator = np.random.default_rng(7)
    p_values = []
    for _ in range(40):
        bank = bank_of(features(generator, 80))
        p_values.append(compare(bank, bank.typicality(features(generator, 40)), 0.05).p_value)
    assert np.mean(np.array(p_values) <= 0.2) < 0.35
    drift = compare(bank, bank.typicality(features(generator, 40, shift=1.5)), 0.05)
    assert drift.is_alarm
    assert drift.unfamiliar > 10
    assert not compare(bank, bank.typicality(np.full((1, 6), 9, dtype=np.float32)), 0.05).is_alarm


def test_one_odd_group_is_no_drift() -> None:
    generator = np.random.default_rng(8)
    bank = bank_of(features(generator, 60))
    odd = features(generator, 1, shift=4.0) + 0.01 * features(generator, 20)
    typicality = bank.typicality(np.concatenate([features(generator, 19), odd]))
    groups = np.array([*map(str, range(19)), *["odd"] * 20])
    assert compare(bank, typicality, 0.05).is_alarm
    assert not compare(bank, typicality, 0.05, groups).is_alarm


def test_groups_like_the_known_groups_are_no_drift_and_other_groups_are() -> None:
    generator, by_group, by_image = np.random.default_rng(11), [], []

    def groups_of(num: int, shift: float = 0.0) -> np.ndarray:
        alike = np.repeat(features(generator, num, shift), 6, axis=0)
        return alike + 0.05 * features(generator, len(alike))

    def names(num: int) -> np.ndarray:
        return np.repeat(np.arange(num), 6).astype(str)

    for _ in range(25):
        bank = bank_of(groups_of(30), names(30))
        typicality = bank.typicality(groups_of(15))
        by_group.append(compare(bank, typicality, 0.05, names(15)).p_value <= 0.2)
        by_image.append(compare(bank, typicality, 0.05).p_value <= 0.2)
    assert np.mean(by_group) < 0.35
    assert np.mean(by_image) > np.mean(by_group)
    assert compare(bank, bank.typicality(groups_of(15, shift=2.5)), 0.05, names(15)).is_alarm


def test_copies_of_a_known_image_count_as_one() -> None:
    known = features(np.random.default_rng(3), 50)
    bank = bank_of(np.repeat(known, 3, axis=0))
    assert len(bank.scores) == 50
    assert bank.is_guessed
