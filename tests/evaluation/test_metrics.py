import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as peer

from lopsided.errors import InputError
from lopsided.evaluation.intervals import (
    Estimate,
    auroc_interval,
    calibrated_sums,
    confusion_draws,
    macro_interval,
    mean_interval,
    mean_of_shares_interval,
    paired_difference,
    resampled_sums,
    share_interval,
)
from lopsided.evaluation.metrics import (
    accuracy,
    balanced_accuracy,
    confusion_figures,
    evaluate,
)


def task(num_classes=3, num=200, seed=0, step=None):
    """Labels of which class 0 is most frequent, and probabilities that know something about them."""
    rng = np.random.default_rng(seed)
    weights = 0.5 ** np.arange(num_classes)
    y = np.concatenate([np.arange(num_classes), rng.choice(num_classes, num - num_classes, p=weights / weights.sum())])
    logits = rng.normal(size=(num, num_classes)) + 1.5 * np.eye(num_classes)[y]
    if step is not None:
        logits = np.round(logits / step) * step  # makes ties
    p = np.exp(logits)
    return y, p / p.sum(axis=1, keepdims=True)


def score(y, p=None, **options):
    classes = options.pop("classes", list(range(3)) if p is None else list(range(np.shape(p)[1])))
    return evaluate(y, p, classes=classes, bootstrap=options.pop("bootstrap", 200), **options)


def values(evaluation):
    return {name: figure.value for name, figure in evaluation.figures.items()}


# Parity with scikit-learn


def test_the_figures_of_a_confusion_are_those_of_scikit_learn_whatever_its_scale():
    confusion = np.array([[40, 3, 9], [1, 6, 2], [7, 0, 3]])
    y = np.repeat(np.arange(3), confusion.sum(axis=1))
    predicted = np.concatenate([np.repeat(np.arange(3), row) for row in confusion])
    expected = {
        "accuracy": peer.accuracy_score(y, predicted),
        "uwa": peer.balanced_accuracy_score(y, predicted),
        "macro_f1": peer.f1_score(y, predicted, average="macro"),
        "g_mean": np.prod(np.diagonal(confusion) / confusion.sum(axis=1)) ** (1 / 3),
        "mcc": peer.matthews_corrcoef(y, predicted),
    }
    assert confusion_figures(confusion) == pytest.approx(expected)
    assert confusion_figures(confusion / 1000) == pytest.approx(expected)


@pytest.mark.parametrize("num_classes", [2, 3, 7])
@pytest.mark.parametrize("step", [None, 1.0])
def test_every_figure_is_that_of_scikit_learn(num_classes, step):
    y, p = task(num_classes, step=step)
    guess = p.argmax(axis=1)
    names = np.arange(num_classes)
    one_hot = np.eye(num_classes)[y]
    recalls = peer.recall_score(y, guess, average=None)
    ours = values(score(y, p))
    theirs = {
        "accuracy": peer.accuracy_score(y, guess),
        "uwa": peer.balanced_accuracy_score(y, guess),
        "macro_f1": peer.f1_score(y, guess, average="macro"),
        "g_mean": np.prod(recalls) ** (1 / num_classes),
        "mcc": peer.matthews_corrcoef(y, guess),
        "auroc": np.mean([peer.roc_auc_score(one_hot[:, c], p[:, c]) for c in names]),
        "average_precision": np.mean([peer.average_precision_score(one_hot[:, c], p[:, c]) for c in names]),
        "brier": peer.brier_score_loss(y, p, scale_by_half=True),
        "log_loss": peer.log_loss(y, p),
    }
    if num_classes > 2:
        assert theirs["auroc"] == pytest.approx(peer.roc_auc_score(y, p, multi_class="ovr", average="macro"))
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs)
    assert set(ours) == set(theirs) | {"calibration_error"}


def test_the_figures_of_each_class_and_the_confusion_are_those_of_scikit_learn():
    y, p = task(4)
    guess = p.argmax(axis=1)
    result = score(y, p)
    precision, recall, f1, support = peer.precision_recall_fscore_support(y, guess)
    assert [row.precision.value for row in result.per_class] == pytest.approx(precision)
    assert [row.recall.value for row in result.per_class] == pytest.approx(recall)
    assert [row.f1.value for row in result.per_class] == pytest.approx(f1)
    assert [row.support for row in result.per_class] == support.tolist()
    assert [row.predicted for row in result.per_class] == np.bincount(guess).tolist()
    assert [list(row) for row in result.confusion] == peer.confusion_matrix(y, guess).tolist()


def test_the_calibration_error_is_the_weighted_gap_of_fifteen_bins():
    y, p = task(3)
    confidence, hit = p.max(axis=1), p.argmax(axis=1) == y
    expected = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(hit[inside].mean() - confidence[inside].mean())
    assert values(score(y, p))["calibration_error"] == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40), st.booleans())
def test_accuracy_and_uwa_are_those_of_scikit_learn_for_numbers_and_for_texts(pairs, as_text):
    y, guess = np.array(pairs).T
    if as_text:
        y, guess = y.astype(str), guess.astype(str)
    assert accuracy(y, guess) == pytest.approx(peer.accuracy_score(y, guess))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns about classes that are predicted only.
        assert balanced_accuracy(y, guess) == pytest.approx(peer.balanced_accuracy_score(y, guess))


def test_intervals_of_what_is_below_0_or_above_1_are_not_cut_there():
    y = np.repeat([0, 1], 20)
    wrong = np.where(np.arange(40) % 10 == 0, y, 1 - y)
    result = score(y, np.where(np.eye(2)[wrong] == 1, 0.99, 0.01))
    mcc, log_loss = result.figures["mcc"], result.figures["log_loss"]
    assert mcc.value == pytest.approx(-0.8)
    assert -1 <= mcc.low < mcc.value < mcc.high < 0
    assert 1 < log_loss.low < log_loss.value < log_loss.high


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(1, 30), st.integers(0, 2**32 - 1), st.booleans())
def test_every_defined_figure_lies_in_its_interval_and_the_interval_in_its_range(num_classes, num, seed, grouped):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, num_classes, num)
    p = rng.dirichlet(np.full(num_classes, 0.3), num)
    result = score(y, p, groups=rng.integers(0, 5, num) if grouped else None)
    rows = [getattr(row, k) for row in result.per_class for k in ("precision", "recall", "f1", "auroc")]
    for name, figure in [*result.figures.items(), *(("", figure) for figure in rows)]:
        if not math.isnan(figure.value):
            bottom = -1 if name == "mcc" else 0
            top = math.inf if name == "log_loss" else 1
            assert bottom <= figure.low <= figure.value <= figure.high <= top, name
        else:
            assert math.isnan(figure.low)
            assert math.isnan(figure.high)
    json.dumps(result.to_dict(), allow_nan=False)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 1000))
def test_renaming_the_classes_changes_no_value(order, seed):
    y, p = task(4, 60, seed)
    names = np.array(["a", "b", "c", "d"])
    first = evaluate(names[y], p, classes=names.tolist(), bootstrap=100)
    second = evaluate(names[y], p[:, order], classes=names[order].tolist(), bootstrap=100)
    assert values(first) == pytest.approx(values(second))


# Undefined and odd cases


def test_a_class_without_test_images_is_left_out_of_the_means_and_named():
    y, p = (
        np.array(["a", "a", "b", "b"]),
        np.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.2, 0.7, 0.1], [0.1, 0.8, 0.1]]),
    )
    result = evaluate(y, p, classes=["a", "b", "c"], bootstrap=100)
    assert result.figures["uwa"].value == pytest.approx((1 / 2 + 1) / 2)
    assert result.figures["macro_f1"].value == pytest.approx((2 / 3 + 1) / 2)
    assert result.figures["g_mean"].value == pytest.approx(math.sqrt(1 / 2))
    assert not math.isnan(result.figures["auroc"].value)
    absent = result.per_class[2]
    assert (absent.support, absent.predicted) == (0, 1)
    assert math.isnan(absent.recall.value)
    assert math.isnan(absent.f1.value)
    assert absent.precision.value == 0
    assert result.notes == ("The test set has no image of c: means over classes omit such classes.",)
    assert result.to_dict()["per_class"][2]["recall"] == {"value": None, "low": None, "high": None}


def test_a_test_set_of_one_class_has_no_auroc_and_raises_nothing():
    result = evaluate([0, 0], [[0.9, 0.1], [0.4, 0.6]], classes=["a", "b"], bootstrap=100)
    assert math.isnan(result.figures["auroc"].value)
    assert math.isnan(result.figures["average_precision"].value)
    assert result.figures["uwa"].value == result.figures["accuracy"].value == 0.5
    assert result.figures["mcc"].value == 0
    assert result.majority.uwa == 1
    assert "The test set has only one class: AUROC and average precision are not defined." in result.notes
    assert str(result.figures["auroc"]) == "not defined"


def test_a_class_that_is_never_predicted_has_no_precision_and_an_f1_of_0():
    row = evaluate([0, 0, 1], y_pred=[0, 0, 0], classes=["a", "b"], bootstrap=100).per_class[1]
    assert math.isnan(row.precision.value)
    assert row.f1.value == 0


def test_one_image_can_be_evaluated():
    result = evaluate(["a"], [[0.9, 0.1]], classes=["a", "b"], bootstrap=100)
    assert result.num_images == 1
    assert result.figures["accuracy"].low < 0.5


def test_without_probabilities_the_figures_that_need_them_are_left_out():
    names = set(evaluate([0, 1], y_pred=[0, 1], classes=["a", "b"], bootstrap=100).figures)
    assert names == {"accuracy", "uwa", "macro_f1", "g_mean", "mcc"}


def test_given_predictions_win_over_the_most_probable_class_except_in_the_calibration_error():
    p = np.array([[0.9, 0.1], [0.9, 0.1]])
    result = evaluate([0, 1], p, [0, 1], classes=["a", "b"], bootstrap=100)
    assert result.figures["accuracy"].value == 1
    assert result.figures["calibration_error"].value == pytest.approx(0.4)


def test_the_majority_vote_at_98_to_2_has_98_percent_accuracy_and_half_the_uwa():
    y = ["top"] * 98 + ["shirt"] * 2
    majority = evaluate(y, y_pred=y, classes=["shirt", "top"], bootstrap=100).majority
    assert (majority.label, majority.accuracy, majority.uwa) == ("top", 0.98, 0.5)


def test_integers_are_positions_when_the_classes_are_texts_and_labels_otherwise():
    by_position = evaluate([0, 1, 1], y_pred=[0, 1, 0], classes=["a", "b"], bootstrap=100)
    by_label = evaluate([7, 3, 3], y_pred=[7, 3, 7], classes=[7, 3], bootstrap=100)
    by_text = evaluate(
        np.array(["a", "b", "b"], dtype=object), y_pred=["a", "b", "a"], classes=["a", "b"], bootstrap=100
    )
    assert by_position.confusion == by_label.confusion == by_text.confusion == ((1, 0), (1, 1))


def test_probabilities_that_rounding_led_above_1_count_as_1():
    figures = values(evaluate([0, 1], [[1.0005, 0.0], [0.0, 1.0]], classes=["a", "b"], bootstrap=100))
    assert figures["log_loss"] == figures["brier"] == figures["calibration_error"] == 0


def test_the_same_seed_gives_the_same_intervals_and_another_seed_others():
    y, p = task()
    assert score(y, p, seed=1) == score(y, p, seed=1)
    assert score(y, p) == score(y, p, seed=0)
    assert score(y, p, seed=1).figures["macro_f1"] != score(y, p, seed=2).figures["macro_f1"]
    assert score(y, p, seed=1).figures["brier"] != score(y, p, seed=2).figures["brier"]


# Intervals


def test_the_uwa_of_six_minority_images_that_are_all_recognised_keeps_a_wide_interval():
    y = np.array([0] * 294 + [1] * 6)
    figure = evaluate(y, y_pred=y, classes=["a", "b"]).figures["uwa"]
    assert figure.value == figure.high == 1
    assert figure.low < 0.85  # a recall of 0.65 shows six hits in 13 sets of 100


def test_perfect_separation_by_six_images_does_not_close_the_interval_of_auroc():
    y = np.array([0] * 294 + [1] * 6)
    p = np.where(y == 1, 0.9, 0.1)
    figures = evaluate(y, np.stack([1 - p, p], axis=1), classes=["a", "b"], bootstrap=100).figures
    assert figures["auroc"].value == figures["auroc"].high == 1
    assert 0.6 < figures["auroc"].low < 0.95
    assert figures["average_precision"].low < 0.95


@given(st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.99))
def test_the_interval_of_a_share_is_wilsons(pair, level):
    hits, size = pair
    theirs = stats.binomtest(hits, size).proportion_ci(level, method="wilson")
    ours = share_interval(hits / size, size, level)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_the_interval_of_a_mean_of_shares_is_agresti_and_caffos_for_two():
    # Agresti and Caffo (2000) add one success and one failure to each of two samples; worked out by hand for 8/10, 1/4.
    p, q = 9 / 12, 2 / 6
    half = 1.959964 * math.sqrt(p * (1 - p) / 12 + q * (1 - q) / 6) / 2
    figure = mean_of_shares_interval(np.array([0.8, 0.25]), np.array([10.0, 4.0]), 0.95)
    assert (figure.low, figure.high) == pytest.approx(((p + q) / 2 - half, (p + q) / 2 + half), abs=1e-6)


def test_the_limits_of_auroc_solve_newcombes_equation():
    value, m, n = 0.9, 12, 40
    figure = auroc_interval(value, m, n, 0.95)
    size = (m + n) / 2
    for t in (figure.low, figure.high):
        variance = t * (1 - t) * (1 + (size - 1) * (1 - t) / (2 - t) + (size - 1) * t / (1 + t)) / (m * n)
        assert abs(value - t) == pytest.approx(1.959964 * math.sqrt(variance), abs=1e-6)


def test_drawn_recalls_follow_the_beta_posterior_and_drawn_confusions_keep_their_totals():
    confusion = np.array([[40, 5, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 6]])
    rng = np.random.default_rng(0)
    chunks = list(confusion_draws(confusion, confusion.sum(axis=1).astype(float), 20_000, rng))
    hits, predicted = (np.concatenate(part) for part in zip(*chunks, strict=True))
    assert predicted.sum(axis=1) == pytest.approx(54)
    assert (predicted >= hits - 1e-9).all()
    assert (predicted[:, 2] > 0).all()
    for c, right, size in ((0, 40, 45), (1, 2, 3), (3, 6, 6)):
        posterior = stats.beta(right + 1 / 3, size - right + 1 / 3)
        assert stats.kstest(hits[:, c] / size, posterior.cdf).pvalue > 1e-3


def test_draws_in_many_chunks_are_as_many_as_asked_for(monkeypatch):
    monkeypatch.setattr("lopsided.evaluation.intervals.CHUNK", 50)
    confusion = np.array([[4, 5], [1, 2]])
    chunks = list(confusion_draws(confusion, np.array([9.0, 3.0]), 101, np.random.default_rng(0)))
    assert len(chunks) > 5
    assert sum(len(hits) for hits, _ in chunks) == 101
    sums = resampled_sums(np.ones((10, 1)), 101, np.random.default_rng(0))
    assert (sums == 10).all()


def test_resampling_has_the_bootstraps_centre_and_spread():
    rows = np.arange(20.0)[:, None]
    sums = resampled_sums(rows, 20_000, np.random.default_rng(0))[:, 0]
    assert sums.mean() == pytest.approx(rows.sum(), rel=0.01)
    assert sums.std() == pytest.approx(math.sqrt(20) * rows.std(), rel=0.03)


def test_copies_of_each_image_narrow_no_interval_when_their_group_is_known():
    y, p = task(2, 80)
    thrice = np.repeat(y, 3), np.repeat(p, 3, axis=0)
    alone = evaluate(y, p, classes=["a", "b"])
    known = evaluate(*thrice, classes=["a", "b"], groups=np.repeat(np.arange(80), 3))
    unknown = evaluate(*thrice, classes=["a", "b"])
    assert known.num_groups == 80
    for name in alone.figures:
        width = [e.figures[name].high - e.figures[name].low for e in (alone, known, unknown)]
        assert width[1] == pytest.approx(width[0], rel=0.15), name
        assert width[2] < 0.8 * width[0], name


def test_a_wider_level_gives_a_wider_interval():
    y, p = task()
    narrow, wide = score(y, p, level=0.8), score(y, p, level=0.99)
    for name, figure in narrow.figures.items():
        assert wide.figures[name].low < figure.low
        assert wide.figures[name].high > figure.high


def test_the_mean_over_runs_has_students_interval():
    runs = [0.70, 0.74, 0.71, 0.78]
    theirs = stats.ttest_1samp(runs, 0).confidence_interval(0.9)
    ours = mean_interval(runs, level=0.9)
    assert (ours.value, ours.low, ours.high) == pytest.approx((np.mean(runs), theirs.low, theirs.high))
    alone = mean_interval([0.7])
    assert alone.value == 0.7
    assert math.isnan(alone.low)
    assert str(alone) == "0.700"


def test_runs_that_all_agree_have_no_interval():
    for runs in ([0.5, 0.5], [10.1, 10.0 + 0.1, 3 * 10.1 / 3]):
        figure = mean_interval(runs)
        assert figure.value == pytest.approx(runs[0])
        assert math.isnan(figure.low)
        assert math.isnan(figure.high)
    assert not paired_difference([0.7, 0.8], [0.6, 0.7]).leaves_out_0
    assert paired_difference([0.7, 0.8001], [0.6, 0.7]).leaves_out_0


def test_a_paired_difference_is_that_of_the_paired_t_test():
    x, y = [0.72, 0.75, 0.71, 0.9], [0.70, 0.72, 0.70, 0.8]
    theirs = stats.ttest_rel(x, y).confidence_interval(0.95)
    ours = paired_difference(x, y)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


def test_the_auroc_of_a_class_has_the_interval_of_its_images_against_the_rest():
    y, p = task(3)
    for c, row in enumerate(score(y, p).per_class):
        assert row.auroc == auroc_interval(row.auroc.value, np.sum(y == c), np.sum(y != c), 0.95)
        assert row.average_precision == share_interval(row.average_precision.value, np.sum(y == c), 0.95)


def test_the_macro_figure_of_two_classes_averages_their_limits_and_that_of_four_equals_halves_their_distance():
    figure = Estimate(0.8, 0.6, 0.9)
    two, four = macro_interval([figure] * 2), macro_interval([figure] * 4)
    assert (two.value, two.low, two.high) == pytest.approx((0.8, 0.6, 0.9))
    assert (four.value, four.low, four.high) == pytest.approx((0.8, 0.7, 0.85))


@pytest.mark.parametrize(("share", "calibrated"), [(0.9, True), (0.6, False)])
def test_the_calibration_error_of_a_calibrated_model_may_be_0_and_that_of_a_boaster_may_not(share, calibrated):
    rng = np.random.default_rng(0)
    p = np.tile([0.9, 0.1], (400, 1))
    y = (rng.random(400) > share).astype(int)
    figure = evaluate(y, p, classes=["a", "b"]).figures["calibration_error"]
    assert (figure.low == 0) == calibrated
    assert figure.low <= 0.9 - share <= figure.high


def test_the_calibration_error_of_a_calibrated_model_may_be_0_when_many_bins_add_up_by_chance():
    may_be_0 = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        confidence = rng.uniform(0.5, 1, 300)
        y = (rng.random(300) > confidence).astype(int)
        p = np.stack([confidence, 1 - confidence], axis=1)
        may_be_0 += evaluate(y, p, classes=["a", "b"], bootstrap=500).figures["calibration_error"].low == 0
    assert may_be_0 >= 17


def test_the_interval_of_the_calibration_error_takes_its_bias_off():
    y, p = task(2, 300)
    figure = evaluate(y, p, classes=["a", "b"]).figures["calibration_error"]
    assert figure.value - figure.low > figure.high - figure.value


def test_chance_alone_gives_calibrated_hits_together_in_a_group():
    confidence = np.full(4, 0.75)
    rng = np.random.default_rng(0)
    apart, together = (
        calibrated_sums(confidence, units, np.ones((4, 1)), 5000, rng)[:, 0]
        for units in (np.arange(4), np.zeros(4, int))
    )
    assert apart.mean() == pytest.approx(0, abs=0.1)
    assert apart.std() == pytest.approx(math.sqrt(4 * 0.75 * 0.25), rel=0.05)
    assert set(together) == {-1.0, 3.0}


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: score([]), "y_true must hold at least one label, got 0."),
        (lambda: accuracy([], []), "y_true must hold at least one label, got 0."),
        (lambda: accuracy([1, 2], [1]), "y_pred must be as long as y_true (2), got 1."),
        (
            lambda: accuracy([1], ["1"]),
            "y_true and y_pred must both be integers or both be strings, got int64 and <U1.",
        ),
        (lambda: accuracy([1.5], [1.5]), "y_true must hold integers or strings, got an array of float64."),
        (lambda: accuracy([[1]], [[1]]), "y_true must be one label per image, got an array of shape (1, 1)."),
        (lambda: score([0]), "probabilities or y_pred must be given, got neither."),
        (lambda: score([9], y_pred=[0]), "y_true must hold only labels from [0, 1, 2], got 9."),
        (
            lambda: score(["z"], y_pred=["a"], classes=["a", "b"]),
            "y_true must hold only labels from ['a', 'b'], got 'z'.",
        ),
        (lambda: score([2], y_pred=[0], classes=["a", "b"]), "y_true must hold only labels from [0, 1], got 2."),
        (lambda: score([0], y_pred=[0], classes=["a"]), "classes must be at least two different names, got ['a']."),
        (
            lambda: score([0], y_pred=[0], classes=["a", "a"]),
            "classes must be at least two different names, got ['a', 'a'].",
        ),
        (
            lambda: score([0], y_pred=[0], level=1.0),
            "level must be between 0 and 1, got 1.0. 0.95 is the usual choice.",
        ),
        (lambda: score([0], y_pred=[0], bootstrap=5), "bootstrap must be >= 100, got 5. 2000 is the usual choice."),
        (
            lambda: evaluate([0, 1], [[1.0, 0.0]], classes=["a", "b"]),
            "probabilities must have one row per image and one column per class, (2, 2), got (1, 2).",
        ),
        (
            lambda: score([0], [[3.0, -2.0]]),
            "probabilities must be finite and between 0 and 1, got values from -2 to 3. Apply softmax to logits.",
        ),
        (
            lambda: score([0], [[math.nan, 1.0]]),
            "probabilities must be finite and between 0 and 1, got NaN or an infinity. Apply softmax to logits.",
        ),
        (
            lambda: score([0], [[0.5, 0.4]]),
            "probabilities must sum to 1 in each row, got 0.9 in row 0. Apply softmax to logits.",
        ),
        (lambda: score([0], y_pred=[0], groups=[1, 2]), "groups must be as long as y_true (1), got 2."),
        (
            lambda: score([0], y_pred=[0], groups=[[1]]),
            "groups must be one name per image, got an array of shape (1, 1).",
        ),
        (
            lambda: confusion_figures([[0, 0], [0, 0]]),
            "confusion must be a square matrix of counts, not all 0, got shape (2, 2).",
        ),
        (
            lambda: score([0, 1], [[1.0, 0.0], [0.2, 0.8015]]),
            "probabilities must sum to 1 in each row, got 1.002 in row 1. Apply softmax to logits.",
        ),
        (
            lambda: score([0], [[1.0015, 0.0]]),
            "probabilities must be finite and between 0 and 1, got values from 0 to 1.002. Apply softmax to logits.",
        ),
        (
            lambda: score([0, 0], [[1.0, 0.0], [1.1, -0.1]]),
            "probabilities must be finite and between 0 and 1, got values from -0.1 to 1.1. Apply softmax to logits.",
        ),
        (
            lambda: score([0], [[1.0005, -0.0005]]),
            "probabilities must be finite and between 0 and 1, got values from -0.0005 to 1. Apply softmax to logits.",
        ),
        (lambda: score([0, 1], y_pred=[0, 3]), "y_pred must hold only labels from [0, 1, 2], got 3."),
        (lambda: score([0, 1], y_pred=[0]), "y_pred must be as long as y_true (2), got 1."),
        (lambda: accuracy([1], [[1]]), "y_pred must be one label per image, got an array of shape (1, 1)."),
        (
            lambda: accuracy(np.array(["a", 1], dtype=object), ["a", "b"]),
            "y_true must hold integers or strings, got an array of object.",
        ),
        (
            lambda: accuracy(np.array([0, 1], dtype=object), ["a", "b"]),
            "y_true must hold integers or strings, got an array of object.",
        ),
        (
            lambda: score([0], y_pred=[0], classes=[0.5, 1.5]),
            "classes must hold integers or strings, got an array of float64.",
        ),
        (lambda: mean_interval([]), "values must be a list of at least one number, got shape (0,)."),
        (
            lambda: paired_difference([1, 2], [1]),
            "x and y must hold one value for each of the same runs, got (2,) and (1,).",
        ),
    ],
)
def test_input_that_cannot_be_used_is_refused_in_one_sentence(call, message):
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == message


# Each of these holds a line to its word that the tests above would let change.


def test_an_evaluation_as_a_dictionary_has_its_fields_and_lists_in_place_of_tuples():
    y, p = task()
    result = score(y, p, classes=["a", "b", "c"])
    told = result.to_dict()
    assert set(told) == set(vars(result))
    assert told["classes"] == ["a", "b", "c"]
    assert told["notes"] == []
    assert told["confusion"] == [list(row) for row in result.confusion]


def test_the_defaults_are_those_of_the_documentation():
    result = evaluate([0, 1], y_pred=[0, 1], classes=["a", "b"])
    assert (result.bootstrap, result.level, result.seed) == (2000, 0.95, 0)


def test_the_interval_of_accuracy_counts_the_images_of_all_classes():
    y, p = task()
    found = score(y, p).figures["accuracy"]
    assert found == share_interval(np.mean(p.argmax(axis=1) == y), len(y), 0.95)


def test_a_class_of_one_image_has_an_auroc():
    y, p = [0, 0, 0, 1], [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]]
    assert score(y, p).per_class[1].auroc.value == pytest.approx(2 / 3)


def test_groups_of_one_image_each_change_no_interval_that_has_a_formula():
    y, p = task()
    p = np.concatenate([p, np.zeros((len(y), 1))], axis=1)  # A class without test images.
    alone, grouped = score(y, p), score(y, p, groups=np.arange(len(y)))
    for name in ("accuracy", "uwa", "auroc", "average_precision"):
        assert grouped.figures[name] == alone.figures[name]


def test_classes_without_test_images_are_all_named():
    result = score([0, 1], y_pred=[0, 1], classes=["a", "b", "c", "d"])
    assert result.notes == ("The test set has no image of c, d: means over classes omit such classes.",)


def test_a_probability_may_be_above_1_by_a_thousandth():
    assert score([0, 1], [[1.001, 0.0], [0.0, 1.0]]).figures["accuracy"].value == 1.0


def test_each_of_the_fifteen_bins_is_apart_from_its_neighbours():
    confidence = np.array([0.06, 0.1, 0.17, 0.24, 0.3, 0.37, 0.44, 0.5, 0.57, 0.63, 0.7, 0.77, 0.84, 0.9, 0.97])
    hit = np.arange(15) % 2 == 0
    p = np.tile((1 - confidence[:, None]) / 19, (1, 20))
    p[:, 0] = confidence
    y = np.where(hit, 0, 1)
    assert p.argmax(axis=1).tolist() == [0] * 15
    assert score(y, p).figures["calibration_error"].value == pytest.approx(np.abs(confidence - hit).mean())


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_bootstrap_interval_of_a_mean_has_the_width_of_its_standard_error(level):
    y, p = task(num=600)
    found = score(y, p, level=level, bootstrap=20_000).figures
    for name, parts in {
        "brier": ((p - np.eye(3)[y]) ** 2).sum(axis=1) / 2,
        "log_loss": -np.log(p[np.arange(len(y)), y]),
    }.items():
        half = stats.norm.ppf((1 + level) / 2) * parts.std() / math.sqrt(len(y))
        assert found[name].value - found[name].low == pytest.approx(half, rel=0.08)
        assert found[name].high - found[name].value == pytest.approx(half, rel=0.08)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_interval_of_g_mean_leaves_out_as_many_posterior_draws_below_as_above(level):
    y, p = task()
    result = score(y, p, level=level, bootstrap=5000)
    counts, support = np.array(result.confusion), np.array(result.confusion).sum(axis=1)
    hits = np.concatenate(
        [hits for hits, _ in confusion_draws(counts, support * 1.0, 50_000, np.random.default_rng(1))]
    )
    drawn = np.prod(hits / support, axis=1) ** (1 / 3)
    found = result.figures["g_mean"]
    assert np.mean(drawn < found.low) == pytest.approx((1 - level) / 2, rel=0.25)
    assert np.mean(drawn > found.high) == pytest.approx((1 - level) / 2, rel=0.25)


def test_folds_average_the_rank_figures_of_each_model_and_leave_the_others_alone() -> None:
    rng = np.random.default_rng(0)
    y = np.array([0] * 60 + [1] * 20)
    folds = np.arange(80) % 2
    logit = rng.normal(size=80) + 2 * y + 5 * folds  # The second model has other scores.
    p = np.stack([1 / (1 + np.exp(logit)), 1 / (1 + np.exp(-logit))], axis=1)
    together, apart = (evaluate(y, p, classes=[0, 1], folds=f).figures for f in (None, folds))
    by_fold = [evaluate(y[folds == k], p[folds == k], classes=[0, 1]).figures["auroc"].value for k in (0, 1)]
    assert apart["auroc"].value == pytest.approx(np.mean(by_fold))  # Ten rare images in each fold.
    assert apart["auroc"].value > together["auroc"].value + 0.05
    assert apart["auroc"].low < apart["auroc"].value < apart["auroc"].high
    for name in ("uwa", "accuracy"):
        assert apart[name].value == together[name].value
    for name in ("brier", "log_loss"):
        assert apart[name] == together[name]


def test_a_fold_with_one_class_does_not_count_in_rank_figures() -> None:
    y = np.array([0, 0, 1, 1, 0, 0])
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.1, 0.9], [0.8, 0.2], [0.7, 0.3]])
    found = evaluate(y, p, classes=[0, 1], folds=[0, 0, 0, 0, 1, 1])
    assert found.per_class[1].auroc.value == pytest.approx(0.75)  # Of four pairs in the first fold, three are in order.
    alone = evaluate(y, p, classes=[0, 1], folds=[0, 0, 1, 1, 0, 0])
    assert alone.per_class[1].auroc.value == pytest.approx(evaluate(y, p, classes=[0, 1]).per_class[1].auroc.value)


def folds_of_one_threshold_each(recalls: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """600 frequent and 15 rare images in five folds; each fold has another recall of the frequent class."""
    labels, folds = np.repeat([0, 1], [600, 15]), np.concatenate([np.arange(600) % 5, np.arange(15) % 5])
    rank = np.concatenate([np.arange(600) // 5 / 120, np.arange(15) // 5 / 3])
    right = np.where(labels == 0, rank < np.array(recalls)[folds], rank < 0.6)
    return labels, np.where(right, labels, 1 - labels), folds


def test_folds_that_differ_by_more_than_chance_widen_the_intervals_of_decisions() -> None:
    labels, predicted, folds = folds_of_one_threshold_each((0.83, 0.51, 0.92, 0.68, 0.51))
    pooled = evaluate(labels, y_pred=predicted, classes=["a", "b"])
    by_fold = evaluate(labels, y_pred=predicted, classes=["a", "b"], folds=folds)

    def width(figure: Estimate) -> float:
        return figure.high - figure.low

    # The recalls of five folds have the deviation 0.18: their mean and a sixth model can be 0.2 apart.
    assert width(by_fold.per_class[0].recall) > 4 * width(pooled.per_class[0].recall)
    assert width(by_fold.per_class[1].precision) > 2 * width(pooled.per_class[1].precision)
    assert width(by_fold.per_class[1].recall) > 1.1 * width(pooled.per_class[1].recall)
    assert width(by_fold.figures["accuracy"]) > 4 * width(pooled.figures["accuracy"])
    assert [row.recall.value for row in by_fold.per_class] == [row.recall.value for row in pooled.per_class]


def test_folds_that_differ_by_chance_leave_the_intervals_as_they_are() -> None:
    labels, predicted, folds = folds_of_one_threshold_each((0.7, 0.72, 0.68, 0.71, 0.69))
    pooled = evaluate(labels, y_pred=predicted, classes=["a", "b"])
    by_fold = evaluate(labels, y_pred=predicted, classes=["a", "b"], folds=folds)
    assert by_fold.figures == pooled.figures
    assert by_fold.per_class == pooled.per_class


def test_the_auroc_of_two_classes_is_the_same_for_both_also_by_folds() -> None:
    rng = np.random.default_rng(1)
    y, folds = np.repeat([0, 1], [50, 13]), np.concatenate([np.arange(50) % 4, np.arange(13) % 3])
    logit = rng.normal(size=63) + y + folds
    p = np.stack([1 / (1 + np.exp(logit)), 1 / (1 + np.exp(-logit))], axis=1)
    first, second = (row.auroc for row in evaluate(y, p, classes=[0, 1], folds=folds).per_class)
    assert first.value == pytest.approx(second.value)
    assert first.low == pytest.approx(second.low)


def test_the_cost_of_decisions_has_an_interval_also_if_none_is_wrong() -> None:
    y = np.repeat([0, 1], [90, 10])
    wrong = np.concatenate([np.repeat([0, 1], [81, 9]), np.repeat([0, 1], [2, 8])])
    costs = [[0, 1], [20, 0]]
    found = evaluate(y, y_pred=wrong, classes=["a", "b"], costs=costs)
    assert found.figures["cost"].value == pytest.approx((9 * 1 + 2 * 20) / 100)
    assert found.majority.cost == pytest.approx(10 * 20 / 100)
    # Two of ten are missed: by Jeffreys' posterior their share is between 4 and 51 %.
    low, high = (share_interval(0.2, 10, 0.95).low, share_interval(0.2, 10, 0.95).high)
    assert found.figures["cost"].low == pytest.approx(0.09 + 2 * low, abs=0.1)
    assert found.figures["cost"].high == pytest.approx(0.09 + 2 * high, abs=0.15)
    right = evaluate(y, y_pred=y, classes=["a", "b"], costs=costs).figures["cost"]
    assert (right.value, right.low) == (0.0, 0.0)
    assert right.high > 0.2
    assert "cost" not in evaluate(y, y_pred=y, classes=["a", "b"]).to_dict()["majority"]


def test_five_sure_and_right_images_do_not_close_the_intervals_of_probabilities() -> None:
    p = np.array([[1e-4, 1 - 1e-4]] * 5)
    alone = evaluate([1] * 5, p, classes=[0, 1]).figures
    for name in ("brier", "log_loss", "calibration_error"):
        assert alone[name].high > 0.1, name
