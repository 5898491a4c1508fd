"""The thresholds of the rules ``recall``, ``precision``, ``alarms`` and ``false-alarms``, fitted to held-back images.

Each rule decides for one class from a threshold of its probability on. What precision and alarms count depends on how
frequent the classes are, so each image is weighted as if the classes had the given shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lopsided.evaluation.calibration import TINY, Floats, HeldBack
from lopsided.evaluation.intervals import share_interval
from lopsided.recipe.rules import PER, Rule

CONFIDENCE = 0.95
"""The confidence for which a note says how many images a recall rule would need."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Held-back images by their probability of one class: whether they are of it, and their weights, which sum to 1."""

    held: HeldBack
    target: int
    name: str
    shares: Sequence[float]

    @property
    def scores(self) -> Floats:
        """The probability of the class, of each image."""
        return self.held.probabilities[:, self.target]

    @property
    def positive(self) -> np.ndarray:
        """Whether each image is of the class."""
        return np.asarray(self.held.labels == self.target)

    @property
    def weights(self) -> Floats:
        """The weight of each image if the classes have the shares. A class without images has none."""
        counts = self.held.counts()
        shares = np.where(counts > 0, np.asarray(self.shares, dtype=np.float64), 0.0)
        per_image = shares / max(shares.sum(), TINY) / np.maximum(counts, 1)
        weights: Floats = per_image[self.held.labels]
        return weights


def fit_threshold(rule: Rule, scored: Scored) -> tuple[float, str]:
    """Return the threshold of a rule that is fitted, and a note on what it does to the images it is fitted to."""
    threshold, note = _FITS[rule.kind](rule, scored)
    # A little below the score of the last image, so that rounding in another program does not lose it.
    return float(np.clip(threshold * (1 - 1e-6), TINY, 1 - 1e-12)), note


def _recall(rule: Rule, scored: Scored) -> tuple[float, str]:
    scores, held, least = scored.scores[scored.positive], scored.held, rule.bound
    # Images of one group are not independent, so that the lowest score of each group counts.
    own, units = scores, "images"
    if held.groups is not None:
        _, places = np.unique(held.groups[scored.positive], return_inverse=True)
        own, units = np.full(places.max() + 1, np.inf), "groups"
        np.minimum.at(own, places, scores)
    own = np.sort(own)
    num, enough = len(own), images_for_recall(least)
    missed = math.floor(num * (1 - least) + 1e-9)
    if num >= enough:
        missed = max(m for m in range(missed + 1) if recall_confidence(num, m, least) >= CONFIDENCE)
    sure, threshold = recall_confidence(num, missed, least), float(own[missed])
    note = (
        f"The threshold {threshold:.3g} finds {np.mean(scores >= threshold):.0%} of the {len(scores):,} {held.kind} "
        f"images of {scored.name} that it was fitted to. With {num:,} {units}, the confidence that it finds at least "
        f"{_percent(least)} of new {units} is {sure:.0%}."
    )
    if num < enough:
        note += f" A confidence of {CONFIDENCE:.0%} needs at least {enough:,} {units} of {scored.name}."
    return threshold, note


def _precision(rule: Rule, scored: Scored) -> tuple[float, str]:
    """Take the threshold that finds most images of the class among those that reach the precision."""
    order, ends = _ranked(scored)
    right = np.cumsum((scored.weights * scored.positive)[order])[ends]
    precision = right / np.cumsum(scored.weights[order])[ends]
    reaching = np.flatnonzero(precision >= rule.bound - 1e-12)
    is_reached = len(reaching) > 0
    place = int(reaching[-1] if is_reached else precision.argmax())
    threshold = float(scored.scores[order][ends[place]])
    called, true = int(ends[place]) + 1, int(scored.positive[order][: ends[place] + 1].sum())
    share = share_interval(float(precision[place]), called, CONFIDENCE)
    first = "" if is_reached else f"No threshold has a precision of {_percent(rule.bound)}. "
    note = (
        f"{first}The threshold {threshold:.3g} calls {called:,} of the {len(order):,} {scored.held.kind} images that "
        f"it was fitted to {scored.name}, and {true:,} of them are: at the class shares of the model a precision of "
        f"{_interval(share.value, share.low, share.high)}."
    )
    return threshold, note


def _alarms(rule: Rule, scored: Scored) -> tuple[float, str]:
    """Take the lowest threshold that calls at most so many images the class, true or not."""
    order, ends = _ranked(scored)
    called = np.cumsum(scored.weights[order])[ends]
    allowed = np.flatnonzero(called <= rule.bound / PER + 1e-12)
    if not len(allowed):
        threshold = float(np.nextafter(scored.scores.max(), 1.0)) / (1 - 1e-6)
        note = (
            f"The threshold {threshold:.3g} calls none of the {len(order):,} {scored.held.kind} images {scored.name}: "
            f"there are too few of them to fit {rule.bound:g} of {PER:,}."
        )
        return threshold, note
    place = int(allowed[-1])
    threshold, number = float(scored.scores[order][ends[place]]), int(ends[place]) + 1
    share = share_interval(float(called[place]), len(order), CONFIDENCE)
    true = int(scored.positive[order][: ends[place] + 1].sum())
    low, high = (f"{PER * limit:,.0f}" for limit in (share.low, share.high))
    note = (
        f"The threshold {threshold:.3g} calls {number:,} of the {len(order):,} {scored.held.kind} images that it was "
        f"fitted to {scored.name}: {PER * share.value:,.0f} of {PER:,} at the class shares of the model (95 % interval "
        f"{low} to {high}). It finds {true:,} of the {int(scored.positive.sum()):,} images of {scored.name}."
    )
    return threshold, note


def _false_alarms(rule: Rule, scored: Scored) -> tuple[float, str]:
    """Take the lowest threshold that a new image of another class reaches with at most the probability of the rule.

    This is split conformal prediction: among n held-back images of other classes and a new one, each is equally likely
    to have the k-th lowest score. So a new one is above the k-th lowest of the n, k = ceil((n + 1) (1 - share)), with a
    probability of at most the share, and of at least the share minus 1 / (n + 1) if no scores are equal.
    """
    held, others = scored.held, ~scored.positive
    scores, units = scored.scores[others], "images"
    if held.groups is not None:  # Images of one group are not independent, so that its highest score counts.
        _, places = np.unique(held.groups[others], return_inverse=True)
        highest = np.zeros(places.max() + 1)
        np.maximum.at(highest, places, scores)
        scores, units = highest, "groups"
    num, rank = len(scores), math.ceil((len(scores) + 1) * (1 - rule.bound) - 1e-9)
    if rank > num:
        note = (
            f"{num:,} {held.kind} {units} that are not {scored.name} are too few for {_percent(rule.bound)} false "
            f"alarms, so that there are no alarms. At least {math.ceil(1 / rule.bound - 1e-9) - 1:,} are needed."
        )
        return 1 / (1 - 1e-6), note
    last = float(np.clip(np.sort(scores)[rank - 1], TINY, 1 - 1e-12))
    # Above the last score without an alarm, by more than rounding in another program.
    threshold = 1 / (1 + math.exp(-(math.log(last) - math.log1p(-last) + 1e-5)))
    note = (
        f"The threshold {threshold:.3g} comes from {num:,} {held.kind} {units} that are not {scored.name}: a new one "
        f"of them is called {scored.name} with a probability of at most {_percent(rule.bound)}."
    )
    return threshold / (1 - 1e-6), note


_FITS: dict[str, Callable[[Rule, Scored], tuple[float, str]]] = {
    "recall": _recall,
    "precision": _precision,
    "alarms": _alarms,
    "false-alarms": _false_alarms,
}


def _ranked(scored: Scored) -> tuple[np.ndarray, np.ndarray]:
    """Return the images by falling score, and the last place of each score: images that tie are called together."""
    order = np.argsort(-scored.scores, kind="stable")
    ranked = scored.scores[order]
    return order, np.append(np.flatnonzero(np.diff(ranked) < 0), len(ranked) - 1)


def _percent(share: float) -> str:
    return f"{100 * share:.6g}%"


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.0%} (95 % interval {low:.0%} to {high:.0%})"


def recall_confidence(num: int, missed: int, least: float) -> float:
    """Return the probability that a threshold at the score of rank ``missed`` among ``num`` has recall ``least``.

    The recall on new images of such a threshold follows the beta distribution (num - missed, missed + 1).

    >>> round(recall_confidence(59, 0, 0.95), 3)
    0.952
    """
    from scipy.stats import beta

    return float(beta.sf(least, num - missed, missed + 1))


def images_for_recall(least: float, confidence: float = CONFIDENCE) -> int:
    """Return the number of images from which on the lowest score as threshold has recall ``least`` with confidence.

    >>> images_for_recall(0.95), images_for_recall(0.5)
    (59, 5)
    """
    return math.ceil(math.log(1 - confidence) / math.log(least) - 1e-9)
