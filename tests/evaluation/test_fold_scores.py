from __future__ import annotations

import math

import numpy as np
import pytest

from lopsided.errors import InputError
from lopsided.evaluation.calibration import HeldBack
from lopsided.evaluation.folds import mean_evaluation, settle_crossed, settle_scores
from lopsided.evaluation.metrics import evaluate

CLASSES = ("common", "rare")
PRIOR = (0.8, 0.2)


def scores(seed: int = 0, num: int = 200) -> tuple[HeldBack, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = (rng.random(num) < 0.2).astype(np.int64)
    logit = 3.0 * (rng.normal(size=num) + 1.5 * labels - 0.75) + math.log(0.2 / 0.8)  # Too sure of itself.
    p = 1 / (1 + np.exp(-logit))
    return HeldBack(np.stack([1 - p, p], axis=1), labels), np.arange(num) % 5


@pytest.mark.parametrize("rule", ["balanced", "tuned", "recall:rare>=0.8", "cost:common=1,rare=9"])
@pytest.mark.parametrize("kind", ["affine", "temperature"])
def test_no_label_of_a_fold_changes_its_own_probabilities_or_decisions(rule: str, kind: str) -> None:
    held, folds = scores()
    p, decided = settle_crossed(rule, kind, CLASSES, PRIOR, held, folds)  # type: ignore[arg-type]
    own = folds == 2
    other = HeldBack(held.probabilities, np.where(own, 1 - held.labels, held.labels))
    p_other, decided_other = settle_crossed(rule, kind, CLASSES, PRIOR, other, folds)  # type: ignore[arg-type]
    assert np.array_equal(p[own], p_other[own])
    assert np.array_equal(decided[own], decided_other[own])
    assert not np.allclose(p[~own], p_other[~own])  # The labels do count for the other folds.


def test_out_of_fold_calibration_moves_scores_towards_the_truth() -> None:
    held, folds = scores(num=600)
    p, _ = settle_crossed("balanced", "affine", CLASSES, PRIOR, held, folds)
    rows = np.arange(600)
    before, after = (-np.log(each[rows, held.labels]).mean() for each in (held.probabilities, p))
    assert after < before - 0.02


def test_without_calibration_scores_stay_as_they_are_and_balanced_divides_by_the_prior() -> None:
    held, folds = scores()
    p, decided = settle_crossed("balanced", "none", CLASSES, PRIOR, held, folds)
    assert np.allclose(p, held.probabilities, rtol=1e-12)
    assert np.array_equal(decided, (held.probabilities / PRIOR).argmax(axis=1))


def test_a_tuned_rule_decides_on_calibrated_scores_as_on_the_original_ones() -> None:
    held, _ = scores()
    change, decision = settle_scores("tuned", "affine", CLASSES, PRIOR, held)
    _, plain = settle_scores("tuned", "none", CLASSES, PRIOR, held)
    calibrated = change(held.probabilities)
    assert not np.allclose(calibrated, held.probabilities)
    assert np.array_equal(decision.decide(calibrated), plain.decide(held.probabilities))


def test_a_fold_that_alone_holds_a_class_is_decided_by_balanced() -> None:
    held, folds = scores()
    folds = np.where(held.labels == 1, 0, 1 + folds % 2)
    p, decided = settle_crossed("recall:rare>=0.8", "none", CLASSES, PRIOR, held, folds)
    assert np.array_equal(decided[folds == 0], (p[folds == 0] / PRIOR).argmax(axis=1))


def test_repeats_average_values_and_limits_so_that_intervals_do_not_shrink() -> None:
    labels = np.array([0] * 30 + [1] * 10)
    found = []
    for wrong in (2, 4):
        decided = labels.copy()
        decided[-wrong:] = 0
        found.append(evaluate(labels, y_pred=decided, classes=CLASSES).to_dict())
    mean = mean_evaluation(found)
    for name in ("value", "low", "high"):
        assert mean["figures"]["uwa"][name] == pytest.approx(np.mean([each["figures"]["uwa"][name] for each in found]))
        recall = [each["per_class"][1]["recall"][name] for each in found]
        assert mean["per_class"][1]["recall"][name] == pytest.approx(np.mean(recall))
    assert mean["figures"]["uwa"]["value"] == pytest.approx((1 + 0.7) / 2)
    widths = [each["figures"]["uwa"]["high"] - each["figures"]["uwa"]["low"] for each in [mean, *found]]
    assert widths[0] >= min(widths[1:])
    assert mean["confusion"] == found[0]["confusion"]
    assert mean_evaluation(found[:1]) == found[0]


@pytest.mark.parametrize("rule", ["balanced", "recall:rare>=0.8"])
def test_the_one_image_of_a_class_says_nothing_about_the_models_that_do_not_know_the_class(rule: str) -> None:
    held, folds = scores()
    p = np.concatenate([np.pad(held.probabilities * 0.999, ((0, 0), (0, 1)), constant_values=0.001), [[0.5, 0.5, 0.0]]])
    classes, prior = (*CLASSES, "single"), (0.89, 0.1, 0.01)
    every = HeldBack(p, np.append(held.labels, 2))
    others = every.rows(np.arange(len(held.labels)))
    assert settle_scores(rule, "affine", classes, prior, every) == settle_scores(rule, "affine", classes, prior, others)
    found = settle_crossed(rule, "affine", classes, prior, every, np.append(folds, 0))
    expected = settle_crossed(rule, "affine", classes, prior, others, folds)
    assert all(np.array_equal(a[:-1], b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(InputError, match="single"):
        settle_scores("recall:single=0.9", "affine", classes, prior, every)
