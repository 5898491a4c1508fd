"""Prediction sets and abstention."""

from __future__ import annotations

import numpy as np
import pytest

from lopsided.errors import InputError
from lopsided.evaluation.calibration import HeldBack
from lopsided.evaluation.decision import ASK, Decision, explain, resolve
from lopsided.evaluation.doubt import cross_sets, doubt_words, measure_doubt, measure_sets, measured_words, trade_off
from lopsided.evaluation.sets import SetThresholds, fit_sets, members
from lopsided.recipe.rules import parse_rule


def held_back(num: int, seed: int, rare: float = 0.3, groups: int | None = None) -> HeldBack:
    generator = np.random.default_rng(seed)
    labels = (generator.random(num) < rare).astype(np.int64)
    units = None if groups is None else generator.integers(0, groups, num)
    shift = np.zeros(num) if units is None else generator.normal(size=groups)[units]
    odds = generator.normal(size=num) + shift + 1.5 * (2 * labels - 1)
    p = 1 / (1 + np.exp(-odds))
    return HeldBack(np.stack([1 - p, p], axis=1), labels, None if units is None else units.astype(str))


def test_a_class_is_in_a_set_by_the_definition_of_a_conformal_p_value() -> None:
    held, new = held_back(83, 0), held_back(60, 1)
    for level in (0.5, 0.8, 0.9, 0.95, 0.99):
        fitted = fit_sets(held, level)
        for c in (0, 1):
            known = held.probabilities[held.labels == c, c]
            p_values = [(1 + (known <= p).sum()) / (len(known) + 1) for p in new.probabilities[:, c]]
            expected = np.array(p_values) > 1 - level + 1e-9
            np.testing.assert_array_equal(members(new.probabilities, fitted.thresholds)[:, c], expected)


@pytest.mark.parametrize(("groups", "level"), [(None, 0.9), (12, 0.8)])
def test_sets_hold_each_class_as_often_as_they_say(groups: int | None, level: float) -> None:
    covered: dict[int, list[float]] = {0: [], 1: []}
    for seed in range(300):
        held, new = held_back(60, seed, groups=groups), held_back(40, 10_000 + seed, groups=groups)
        sets = members(new.probabilities, fit_sets(held, level).thresholds)
        for c, shares in covered.items():
            if (new.labels == c).any():
                shares.append(sets[new.labels == c, c].mean())
    for shares in covered.values():
        assert level - 0.015 < np.mean(shares) < level + 0.1


def test_a_group_counts_as_one_however_many_images_it_has() -> None:
    held = held_back(40, 3)
    groups = np.arange(40).astype(str)
    double = HeldBack(np.repeat(held.probabilities, 3, axis=0), np.repeat(held.labels, 3), np.repeat(groups, 3))
    assert fit_sets(double, 0.8).thresholds == fit_sets(held, 0.8).thresholds
    assert fit_sets(double, 0.8).unit == "groups"


def test_a_class_with_too_few_images_is_in_every_set_and_the_level_it_allows_is_told() -> None:
    p = np.array([[0.9, 0.1]] * 40 + [[0.3, 0.7]] * 3)
    held = HeldBack(p, np.repeat([0, 1], [40, 3]))
    decision = resolve("sets:0.95", ["mel", "df"], (0.9, 0.1), held)
    assert decision.sets[1] == 0
    assert decision.members([[1.0, 0.0]]).tolist() == [[True, True]]
    assert decision.notes[1] == (
        "3 images of df are too few for 95%, so that df is in every set; they suffice for 75%."
    )
    assert decision.notes[0].startswith("Each class is in the set of at least 95% of its images.")
    assert "df from 0" in explain(decision, ["mel", "df"])
    assert resolve("sets:0.75", ["mel", "df"], (0.9, 0.1), held).sets[1] == pytest.approx(0.7, rel=1e-5)


def test_a_class_without_images_is_in_every_set() -> None:
    held = HeldBack(np.array([[0.9, 0.1]] * 40), np.zeros(40, dtype=np.int64))
    assert fit_sets(held, 0.9).thresholds[1] == 0
    assert fit_sets(held, 0.9).reached[1] == 0


def test_a_person_is_asked_unless_the_expected_error_is_small() -> None:
    decision = resolve("abstain:2%", ["mel", "df"], (0.9, 0.1))
    assert decision.rule == "abstain:0.02"
    p = np.array([[0.99, 0.01], [0.97, 0.03], [0.01, 0.99]])
    assert [decision.answer(row, ["mel", "df"]) for row in p] == ["mel", ASK, "df"]
    assert explain(decision, ["mel", "df"]).endswith("otherwise a person is asked.")
    with pytest.raises(InputError, match="which is a class of the model"):
        resolve("abstain:0.02", ["ask", "df"], (0.9, 0.1))


@pytest.mark.parametrize("text", ["sets:0", "sets:1", "sets:x", "sets:-0.5", "abstain:0", "abstain:1.5", "abstain:nan"])
def test_a_level_that_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^The decision rule (sets|abstain) needs .* between 0 and 1, got"):
        parse_rule(text)
    with pytest.raises(InputError, match=r"needs values\. Example: sets:0\.95\.$"):
        parse_rule("sets")


def test_rules_are_written_as_they_are_read() -> None:
    for text in ("sets:0.95", "abstain:0.02", "recall:df=0.9"):
        assert str(parse_rule(text)) == text


def test_other_rules_have_sets_of_one_class_and_ask_nobody() -> None:
    p = np.array([[0.2, 0.8], [0.7, 0.3]])
    assert Decision().members(p).tolist() == [[False, True], [True, False]]
    assert not Decision().asks(p).any()
    assert Decision().set_of(p[0], ["a", "b"]) is None


def test_what_sets_and_abstention_did_is_counted() -> None:
    p, labels = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.99, 0.01]]), np.array([0, 1, 1, 1])
    sets = measure_doubt(Decision(rule="sets:0.9", sets=(0.5, 0.3)), p, labels, ["a", "b"])
    assert [row["coverage"]["value"] for row in sets["sets"]["per_class"]] == [1.0, pytest.approx(2 / 3)]
    assert sets["sets"]["sizes"] == [0, 3, 1]
    assert "25% have 2 classes" in " ".join(doubt_words(sets))
    asked = measure_doubt(Decision(rule="abstain:0.15", error=0.15), p, labels, ["a", "b"])["abstain"]
    assert asked["asked"]["value"] == 0.5
    assert asked["errors"]["value"] == 0.5
    assert measure_doubt(Decision(), p, labels, ["a", "b"]) == {}
    assert measured_words(Decision(), HeldBack(p, labels), ["a", "b"]) == []


def test_one_image_is_singular() -> None:
    words = SetThresholds(0.9, (0.0, 0.3), (1, 2), "groups").words(["a", "b"], "validation")
    assert words[1] == "1 group of a is too few for 90%, so that a is in every set; it suffices for 50%."
    assert words[2] == "2 groups of b are too few for 90%, so that b is in every set; they suffice for 66.6%."


def test_sets_that_are_fitted_to_the_images_are_judged_by_thresholds_of_others() -> None:
    held = held_back(60, 3)
    decision = resolve("sets:0.9", ["a", "b"], (0.9, 0.1), held)
    words = [measured_words(decision, held, ["a", "b"], fitted_to=fitted) for fitted in (False, True)]
    assert words[0] == doubt_words(measure_doubt(decision, held.probabilities, held.labels, ["a", "b"], held.groups))
    crossed = measure_sets(cross_sets(held, 0.9), held.labels, ["a", "b"], held.groups)
    assert words[1] == doubt_words({"sets": crossed}) != words[0]


def test_the_trade_off_holds_where_the_model_is_used() -> None:
    held = held_back(4000, 5, rare=0.5)
    here = trade_off(held.probabilities, held.labels)
    assert [point["asked"]["value"] for point in here] == sorted(point["asked"]["value"] for point in here)
    there = trade_off(held.probabilities, held.labels, moved=((0.5, 0.5), (0.95, 0.05)), errors=(0.05,))
    other = held_back(4000, 6, rare=0.05)
    odds = np.log(other.probabilities[:, 1] / other.probabilities[:, 0]) + np.log(0.05 / 0.95)
    p = 1 / (1 + np.exp(-odds))
    expected = trade_off(np.stack([1 - p, p], axis=1), other.labels, errors=(0.05,))
    assert there[0]["asked"]["value"] == pytest.approx(expected[0]["asked"]["value"], abs=0.03)
    assert there[0]["errors"]["value"] == pytest.approx(expected[0]["errors"]["value"], abs=0.015)
