"""Decision rules: laws over the rules, and the rules that are fitted."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, norm

from lopsided.errors import InputError
from lopsided.evaluation.calibration import Calibration, HeldBack, at_prevalence, fit_calibration, prior_of
from lopsided.evaluation.decision import (
    Decision,
    decide,
    explain,
    resolve,
    through,
)
from lopsided.evaluation.folds import crossed, figures_by_rule
from lopsided.evaluation.threshold_rules import images_for_recall, recall_confidence
from lopsided.recipe.rules import parse_rule

CLASSES = ("a", "b", "c")
PRIOR = (0.7, 0.25, 0.05)
RULES = (
    "plain",
    "balanced",
    "tuned",
    "prevalence:a=0.2,b=0.2,c=0.6",
    "cost:a=1,b=2,c=9",
    "cost:[[0, 1, 2], [3, 0, 1], [8, 5, 0]]",
    "recall:c>=0.8",
    "false-alarms:c<=0.2",
    "precision:c>=0.4",
    "alarms:c<=300",
    "alarms:300",
    "threshold:c=0.013",
)
MEANS = (0.0, 1.5, 3.0)
GRID = np.linspace(-8, 12, 40_001)


def posteriors(x: np.ndarray, prior: tuple[float, ...] = PRIOR) -> np.ndarray:
    joint = np.stack([share * norm.pdf(x, mean) for share, mean in zip(prior, MEANS, strict=True)], axis=1)
    return joint / joint.sum(axis=1, keepdims=True)


def draw(num: int, seed: int = 0, prior: tuple[float, ...] = PRIOR) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.choice(len(prior), num, p=prior)
    return posteriors(rng.normal(np.array(MEANS)[labels])), labels


def exact_uwa(decision: Decision) -> float:
    """The UWA on infinitely many images, by integration of the densities."""
    decided = decision.decide(posteriors(GRID))
    step = GRID[1] - GRID[0]
    return float(np.mean([step * norm.pdf(GRID, mean)[decided == c].sum() for c, mean in enumerate(MEANS)]))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_does_not_depend_on_the_order_of_the_classes(rule: str) -> None:
    p, labels = draw(400)
    order = np.array([2, 0, 1])
    where = np.argsort(order)
    matrix = "[[0, 1, 2], [3, 0, 1], [8, 5, 0]]"
    moved = np.array([[0, 1, 2], [3, 0, 1], [8, 5, 0]])[order][:, order].tolist()
    first = resolve(rule, CLASSES, PRIOR, HeldBack(p, labels))
    second = resolve(
        rule.replace(matrix, str(moved)),
        [CLASSES[i] for i in order],
        [PRIOR[i] for i in order],
        HeldBack(p[:, order], where[labels]),
    )
    np.testing.assert_array_equal(where[first.decide(p)], second.decide(p[:, order]))


def test_balanced_with_true_posteriors_has_the_highest_uwa() -> None:
    best = exact_uwa(resolve("balanced", CLASSES, PRIOR))
    rng = np.random.default_rng(1)
    others = [exact_uwa(Decision(offsets=tuple(-np.log(PRIOR) + rng.normal(0, s, 3)))) for s in (0.1, 0.5, 2.0) * 20]
    assert max(others) <= best
    assert exact_uwa(resolve("plain", CLASSES, PRIOR)) < best - 0.1
    # The best cuts between unit normals of equal weight lie in the middle between their means.
    expected = (norm.cdf(0.75) + (norm.cdf(0.75) - norm.cdf(-0.75)) + norm.cdf(0.75)) / 3
    assert best == pytest.approx(expected, abs=1e-4)


def test_the_prevalence_of_the_prior_and_costs_of_one_decide_like_plain() -> None:
    p, _ = draw(1000)
    for rule in ("prevalence:a=0.7,b=0.25,c=0.05", "cost:a=1,b=1,c=1", "cost:[[0,1,1],[1,0,1],[1,1,0]]"):
        np.testing.assert_array_equal(resolve(rule, CLASSES, PRIOR).decide(p), decide(p), err_msg=rule)


def test_a_uniform_prevalence_decides_like_balanced() -> None:
    p, _ = draw(1000)
    uniform = resolve('prevalence:{"a": 0.33333, "b": 0.33333, "c": 0.33334}', CLASSES, PRIOR)
    assert np.mean(uniform.decide(p) == resolve("balanced", CLASSES, PRIOR).decide(p)) > 0.999


def test_costs_decide_for_the_least_expected_cost() -> None:
    costs = np.array([[0, 1, 2], [3, 0, 1], [8, 5, 0]])
    p, _ = draw(300)
    expected = [min(range(3), key=lambda k: sum(row[c] * costs[c, k] for c in range(3))) for row in p]
    named = 'cost:{"a": {"b": 1, "c": 2}, "b": {"a": 3, "c": 1}, "c": {"a": 8, "b": 5}}'
    for rule in (f"cost:{costs.tolist()}", named):
        np.testing.assert_array_equal(resolve(rule, CLASSES, PRIOR).decide(p), expected)


def test_a_cost_per_class_is_the_cost_of_missing_it() -> None:
    # Missing b costs ten times as much, so that b is decided from a probability of 1 / 11 on.
    p = [[1 - 1 / 11.1, 1 / 11.1], [1 - 1 / 10.9, 1 / 10.9]]
    assert resolve("cost:a=1,b=10", ("a", "b"), (0.5, 0.5)).decide(p).tolist() == [0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_scores_and_decisions_agree_also_at_the_ends(rule: str) -> None:
    p, labels = draw(200)
    p[0], p[1] = (1, 0, 0), (0, 0, 1)
    found = resolve(rule, CLASSES, PRIOR, HeldBack(p, labels))
    scores = found.scores(p)
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(scores.argmax(axis=1), found.decide(p))
    np.testing.assert_array_equal(found.decide(p[5]), found.decide(p)[5])
    assert Decision.model_validate_json(found.model_dump_json()) == found


def test_recall_takes_the_highest_threshold_that_finds_enough() -> None:
    p = np.array([[1 - t, t] for t in np.linspace(0.05, 0.95, 19)])
    labels = np.array([0] * 9 + [1] * 10)  # The rare images have 0.5, 0.55, ... 0.95.
    found = resolve("recall:rare>=0.8", ("common", "rare"), (0.9, 0.1), HeldBack(p, labels))
    assert found.threshold == pytest.approx(0.6, rel=1e-5)
    assert found.decide(p)[labels == 1].mean() == 0.8
    assert found.decide([[0.41, 0.59]]) == 0
    assert found.decide([[0.4, 0.6]]) == 1


@pytest.mark.parametrize("num", [5, 30, 59, 100, 400])
def test_recall_is_as_sure_as_the_images_allow_and_never_asks_for_fewer_than_there_are(num: int) -> None:
    rng = np.random.default_rng(num)
    scores = rng.random(num)
    p = np.stack([1 - scores, scores], axis=1)
    found = resolve("recall:r>=0.95", ("c", "r"), (0.5, 0.5), HeldBack(p, np.ones(num, dtype=np.int64)))
    missed = int(np.sum(scores < found.threshold))
    sure = beta.sf(0.95, num - missed, missed + 1)
    assert (
        f"With {num} images, the confidence that it finds at least 95% of new images is {sure:.0%}." in found.notes[0]
    )
    if num >= 59:
        assert sure >= 0.95
        assert beta.sf(0.95, num - missed - 1, missed + 2) < 0.95, "A higher threshold would do."
        assert "needs at least" not in found.notes[0]
    else:
        assert missed == int(num * 0.05)
        assert "needs at least 59 images of r" in found.notes[0]


def test_groups_count_once_in_a_recall_and_stay_together_in_folds() -> None:
    rng = np.random.default_rng(0)
    scores = np.repeat(rng.random(20), 3)
    p = np.stack([1 - scores, scores], axis=1)
    groups = np.repeat([f"g{i}" for i in range(20)], 3)
    found = resolve("recall:r>=0.95", ("c", "r"), (0.5, 0.5), HeldBack(p, np.ones(60, dtype=np.int64), groups))
    assert "With 20 groups" in found.notes[0]
    alone = resolve("recall:r>=0.95", ("c", "r"), (0.5, 0.5), HeldBack(p[::3], np.ones(20, dtype=np.int64)))
    assert found.threshold == pytest.approx(alone.threshold)


def test_images_of_one_group_move_a_fit_as_one_image_does() -> None:
    p, labels = draw(60, seed=9)
    single = HeldBack(p, labels)
    tripled = HeldBack(np.repeat(p, 3, axis=0), np.repeat(labels, 3), np.repeat(np.arange(60), 3))
    for rule in (fit_calibration(single, PRIOR), fit_calibration(tripled, PRIOR)):
        assert rule.temperature == pytest.approx(fit_calibration(single, PRIOR).temperature, rel=1e-4)
    assert resolve("tuned", CLASSES, PRIOR, tripled).offsets == pytest.approx(
        resolve("tuned", CLASSES, PRIOR, single).offsets, abs=1e-3
    )


def test_a_decision_through_a_calibration_is_the_decision_before_it() -> None:
    p, labels = draw(500, seed=11)
    change = Calibration(1.7, (0.3, -0.2, 0.9))
    before = resolve("tuned", CLASSES, PRIOR, HeldBack(p, labels))
    np.testing.assert_array_equal(through(before, change).decide(change(p)), before.decide(p))


def test_the_confidence_of_a_recall_is_what_a_simulation_gives() -> None:
    rng = np.random.default_rng(0)
    scores = np.sort(rng.random((20_000, 30)), axis=1)
    true_recall = 1 - scores[:, 2]  # Scores are uniform, and the threshold lies at the third lowest.
    assert recall_confidence(30, 2, 0.85) == pytest.approx(np.mean(true_recall >= 0.85), abs=0.01)
    number = images_for_recall(0.9)
    assert recall_confidence(number, 0, 0.9) >= 0.95 > recall_confidence(number - 1, 0, 0.9)


def test_tuned_repairs_a_shift_with_many_images_and_stays_near_balanced_with_few() -> None:
    true, labels = draw(20_000, seed=2)
    shifted = true * np.exp([0.0, 0.8, -1.2])
    shifted /= shifted.sum(axis=1, keepdims=True)
    ideal = -np.log(np.array(PRIOR)) - np.array([0.0, 0.8, -1.2])
    many = resolve("tuned", CLASSES, PRIOR, HeldBack(shifted, labels))
    np.testing.assert_allclose(np.diff(many.offsets), np.diff(ideal), atol=0.15)
    assert many.scale == pytest.approx(1, abs=0.1)
    few = np.concatenate([np.flatnonzero(labels == c)[:2] for c in range(3)])
    near = resolve("tuned", CLASSES, PRIOR, HeldBack(shifted[few], labels[few]))
    gaps = [np.abs(np.diff(np.array(found.offsets) + np.log(PRIOR))).max() for found in (near, many)]
    assert gaps[0] < gaps[1] / 2


def test_calibration_restores_probabilities_that_were_distorted() -> None:
    true, labels = draw(20_000, seed=3)
    for temperature, bias in ((0.4, (0.0, 0.0, 0.0)), (1.0, (0.5, 0.3, -0.8)), (2.5, (0.0, 0.0, 0.0))):
        distorted = Calibration(temperature, bias)(true)
        found = fit_calibration(HeldBack(distorted, labels), PRIOR)
        assert found.temperature * temperature == pytest.approx(1, abs=0.05)
        np.testing.assert_allclose(found(distorted), true, atol=0.05)
        if not any(bias):
            alone = fit_calibration(HeldBack(distorted, labels), PRIOR, biases=False)
            assert alone.temperature * temperature == pytest.approx(1, abs=0.05)
            assert alone.bias == (0.0, 0.0, 0.0)


def test_calibration_weights_the_images_by_the_prior_that_the_probabilities_carry() -> None:
    _, labels = draw(30_000, seed=5)
    x = np.random.default_rng(6).normal(np.array(MEANS)[labels])
    rare = np.flatnonzero(labels == 2)
    x[rare[::2]] -= 3  # Half of the rare images look like the most frequent class.
    p = posteriors(x, (1 / 3, 1 / 3, 1 / 3))
    equal = np.concatenate([np.flatnonzero(labels == c)[: len(rare)] for c in range(3)])

    def temperature(rows: np.ndarray, prior: tuple[float, ...]) -> float:
        return fit_calibration(HeldBack(p[rows], labels[rows]), prior, biases=False).temperature

    everything = np.arange(len(labels))
    expected = temperature(equal, (1 / 3,) * 3)
    assert temperature(everything, (1 / 3,) * 3) == pytest.approx(expected, rel=0.05)
    assert temperature(everything, PRIOR) < 0.8 * expected


def test_a_calibration_is_finite_for_perfect_scores_and_for_a_class_without_images() -> None:
    p = np.array([[0.99, 0.01], [0.01, 0.99]] * 5)
    found = fit_calibration(HeldBack(p, np.array([0, 1] * 5)), (0.5, 0.5))
    assert 0.1 < found.temperature < 1
    q, labels = draw(300)
    kept = labels != 2
    assert fit_calibration(HeldBack(q[kept], labels[kept]), PRIOR).bias[2] == 0.0


def test_priors_of_batches_and_weights() -> None:
    assert prior_of([90, 10]) == (0.9, 0.1)
    assert prior_of([90, 10], [1 / 90, 1 / 10]) == (0.5, 0.5)
    assert prior_of([1, 1], [1 / 90, 1 / 10]) == (0.1, 0.9)


def test_moving_probabilities_to_another_prevalence_is_bayes() -> None:
    x = np.linspace(-2, 5, 50)
    np.testing.assert_allclose(at_prevalence(posteriors(x), PRIOR, (0.2, 0.3, 0.5)), posteriors(x, (0.2, 0.3, 0.5)))


def test_a_class_without_training_images_is_never_decided_by_balanced() -> None:
    found = resolve("balanced", CLASSES, (0.9, 0.1, 0.0))
    assert 2 not in found.decide([[0.1, 0.1, 0.8], [0.0, 0.0, 1.0]])


def test_figures_of_a_fitted_rule_never_use_the_label_of_the_image() -> None:
    p, labels = draw(300, seed=7)
    found = crossed("tuned", CLASSES, PRIOR, HeldBack(p, labels))
    assert found is not None
    changed = labels.copy()
    rare = int(np.flatnonzero(labels == 2)[0])
    noise = np.random.default_rng(0).random(p.shape)
    noise /= noise.sum(axis=1, keepdims=True)
    # Pure noise cannot be decided well without looking at the labels.
    blind = crossed("tuned", CLASSES, PRIOR, HeldBack(noise, changed))
    assert blind is not None
    recalls = [np.mean(blind[labels == c] == c) for c in range(3)]
    assert np.mean(recalls) < 0.45, rare
    assert crossed("tuned", ("a", "b"), (0.9, 0.1), HeldBack(p[:5, :2], np.array([0, 0, 0, 0, 1]))) is None


def test_figures_by_rule_are_those_of_the_confusion() -> None:
    p = np.array([[0.6, 0.4], [0.8, 0.2], [0.9, 0.1], [0.7, 0.3]])
    found = figures_by_rule(("plain", "balanced"), ("a", "b"), (0.75, 0.25), p, np.array([0, 0, 0, 1]))
    assert found["plain"] == {"uwa": 0.5, "recall": [1.0, 0.0]}
    assert found["balanced"] == {"uwa": pytest.approx((2 / 3 + 1) / 2), "recall": [pytest.approx(2 / 3), 1.0]}
    assert list(figures_by_rule(("plain", "tuned"), ("a", "b"), (0.75, 0.25), p, np.array([0, 0, 0, 1]))) == ["plain"]


@pytest.mark.parametrize(
    ("rule", "held", "words"),
    [
        ("prevalence:a=0.5,b=0.5", True, "there is no share for c"),
        ("prevalence:a=0.5,b=0.3,x=0.2", True, "no class 'x'"),
        ("cost:a=1,b=2", True, "there is no cost for c"),
        ("cost:[[0,1],[1,0]]", True, "3 rows and columns"),
        ('cost:{"a": {"b": 1}, "b": {"a": 1}, "x": {"a": 1}}', True, "no class 'x'"),
        ('cost:{"a": {"b": 1, "c": 1}, "b": {"a": 1, "c": 1}, "c": {"a": 1}}', True, "deciding b for an image of c"),
        ("recall:x>=0.9", True, "names no class of the model"),
        ("threshold:x=0.9", True, "names no class of the model"),
        ("alarms:c=20", False, "there are no validation images"),
        ("tuned", False, "there are no validation images"),
        ("recall:c>=0.9", False, "there are no validation images"),
    ],
)
def test_rules_that_do_not_fit_a_model_are_refused(rule: str, held: bool, words: str) -> None:
    p, labels = draw(100)
    with pytest.raises(InputError, match=words):
        resolve(rule, CLASSES, PRIOR, HeldBack(p, labels) if held else None)


def test_rules_that_are_fitted_need_images_of_the_class() -> None:
    p, labels = draw(200)
    kept = labels != 2
    held = HeldBack(p[kept], labels[kept])
    with pytest.raises(InputError, match="there are none of c"):
        resolve("tuned", CLASSES, PRIOR, held)
    with pytest.raises(InputError, match="needs validation images of c"):
        resolve("recall:c>=0.9", CLASSES, PRIOR, held)


def test_decisions_explain_themselves() -> None:
    pair = ("mel", "df")
    assert explain(Decision(), CLASSES) == "An image is called the most probable class (plain)."
    text = explain(resolve("balanced", pair, (0.98, 0.02)), pair)
    assert text == "An image is called df if its probability is at least 2.0 %, its share in training (balanced)."
    text = explain(resolve("balanced", pair, (0.99, 0.01)), pair, stated=True)
    assert text == "An image is called df if its probability is at least 1.0 %, its stated share (balanced)."
    many = explain(resolve("balanced", CLASSES, PRIOR), CLASSES)
    assert "highest relative to its share in training (balanced): a 70 %, b 25 %, c 5.0 %" in many
    cost = explain(resolve("cost:mel=1,df=9", pair, (0.9, 0.1)), pair)
    assert cost.startswith("An image is called df if its probability is at least 10 %: df decided as mel costs 9")
    assert "least expected cost" in explain(resolve("cost:a=1,b=1,c=9", CLASSES, PRIOR), CLASSES)
    assert "called df if its probability is at least 1.3 % (threshold:df=0.013)." in explain(
        resolve("threshold:df=0.013", pair, (0.9, 0.1)), pair
    )


def test_a_threshold_rule_decides_from_its_threshold_on() -> None:
    p = np.array([[0.99, 0.01], [0.987, 0.013], [0.5, 0.5]])
    assert resolve("threshold:r=0.013", ("c", "r"), (0.5, 0.5)).decide(p).tolist() == [0, 1, 1]


def test_a_precision_rule_takes_the_lowest_threshold_that_reaches_it_at_the_class_shares() -> None:
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    labels = np.array([1, 0, 1, 1, 0, 0, 1, 0])
    p = np.stack([1 - scores, scores], axis=1)
    found = resolve("precision:r=0.6", ("c", "r"), (0.5, 0.5), HeldBack(p, labels))
    assert found.decide(p).tolist() == [1, 1, 1, 1, 1, 0, 0, 0], "3 of 5 are right, and fewer further down."
    assert "calls 5 of the 8 validation images" in found.notes[0]
    assert "60%" in found.notes[0]
    rare = resolve("precision:r=0.6", ("c", "r"), (0.9, 0.1), HeldBack(p, labels))
    assert rare.decide(p).tolist() == [1, 0, 0, 0, 0, 0, 0, 0], "A false alarm weighs nine times as much."
    never = resolve("precision:r=0.9", ("c", "r"), (0.5, 0.5), HeldBack(p[1:], labels[1:]))
    assert "No threshold has a precision of 90%" in never.notes[0]


def test_an_alarm_rule_calls_at_most_so_many_images_of_ten_thousand() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.random(1000), (rng.random(1000) < 0.1).astype(np.int64)
    p = np.stack([1 - scores, scores], axis=1)
    shares = tuple((np.bincount(labels) / 1000).tolist())
    found = resolve("alarms:r=205", ("c", "r"), shares, HeldBack(p, labels))
    assert found.decide(p).sum() == 20, "21 of 1,000 would be 210 of 10,000."
    assert "200 of 10,000 at the class shares of the model" in found.notes[0]
    assert resolve("alarms:205", ("c", "r"), shares, HeldBack(p, labels)).threshold == found.threshold
    few = resolve("alarms:r=5", ("c", "r"), shares, HeldBack(p, labels))
    assert few.decide(p).sum() == 0
    assert "too few" in few.notes[0]


@pytest.mark.parametrize("text", ["alarms:r=100", "precision:r=0.5", "threshold:r=0.013", "alarms:100"])
def test_rules_with_a_threshold_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_rule(text)) == text
    assert str(parse_rule(text.replace("<", "").replace(">", ""))) == text


@pytest.mark.parametrize("text", ["alarms:r=0", "alarms:r=10000", "precision:r=1", "threshold:0.5", "precision:=0.5"])
def test_rules_with_a_threshold_need_a_class_and_a_number(text: str) -> None:
    with pytest.raises(InputError, match="must name a class and"):
        parse_rule(text)


@pytest.mark.parametrize(("num", "share"), [(19, 0.05), (30, 0.1), (200, 0.05)])
def test_a_threshold_gives_as_many_false_alarms_as_the_rule_allows(num: int, share: float) -> None:
    rng = np.random.default_rng(num)
    rates = []
    for _ in range(2000):  # The false-alarm rate of uniform scores is 1 minus the threshold.
        scores = rng.random(num)
        p = np.stack([1 - scores, scores], axis=1)
        found = resolve(f"false-alarms:r<={share}", ("c", "r"), (1.0, 0.0), HeldBack(p, np.zeros(num, dtype=np.int64)))
        assert found.threshold is not None
        rates.append(1 - found.threshold)
    assert share - 1 / (num + 1) - 0.005 <= np.mean(rates) <= share + 0.005


def test_false_alarms_count_groups_and_need_enough_images() -> None:
    scores = np.repeat(np.linspace(0.01, 0.5, 25), 2)
    scores[1::2] *= 0.5
    p, labels = np.stack([1 - scores, scores], axis=1), np.zeros(50, dtype=np.int64)
    groups = np.repeat([f"g{i}" for i in range(25)], 2)
    found = resolve("false-alarms:r=5%", ("c", "r"), (0.9, 0.1), HeldBack(p, labels, groups))
    assert found.rule == "false-alarms:r=0.05"
    assert found.threshold == pytest.approx(scores[0::2][24], rel=1e-4)  # The 25th of ceil(26 x 0.95) = 25 scores.
    assert found.decide(p).sum() == 0
    few = resolve("false-alarms:r=0.01", ("c", "r"), (0.9, 0.1), HeldBack(p, labels))
    assert few.decide([[1e-9, 1 - 1e-9]]) == 0
    assert "At least 99 are needed." in few.notes[0]
    with pytest.raises(InputError, match="that are not r, but there are none"):
        resolve("false-alarms:r=0.05", ("c", "r"), (0.9, 0.1), HeldBack(p, labels + 1))
