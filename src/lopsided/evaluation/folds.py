"""Scores of images that a model did not see: calibrate and decide by the other folds, and average over repeats.

The score of an image comes from a model that was not trained on it. Calibration and a fitted rule are chosen on the
scores of the other folds, so no image is evaluated with numbers that its own score chose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lopsided.errors import InputError
from lopsided.evaluation.calibration import Calibration, Codes, Floats, HeldBack, fit_calibration
from lopsided.evaluation.decision import Decision, resolve, target_of, through
from lopsided.recipe.rules import parse_rule

Kind = Literal["affine", "temperature", "none"]


def unmeasured_classes(counts: Codes) -> Codes:
    """Return the classes of one image, given the images of each class: the model that is tested on it knows none.

    It gives the class a probability of about 0, and cannot do otherwise. Only between two classes, a distance from the
    other one can tell the first image, and a model without it has no other way to be tested.

    >>> unmeasured_classes(np.array([9, 1, 2])), unmeasured_classes(np.array([9, 1]))
    (array([1]), array([], dtype=int64))
    """
    return np.flatnonzero(counts == 1) if len(counts) > 2 else np.empty(0, dtype=np.int64)


def settle_scores(
    rule: str, kind: Kind, classes: Sequence[str], prior: Sequence[float], held: HeldBack
) -> tuple[Calibration, Decision]:
    """Return the calibration that is fitted to held-back scores, and the decision on calibrated probabilities."""
    return _settled(rule, kind, classes, prior, held.rows(_measured(held)))


def _measured(held: HeldBack) -> Codes:
    return np.flatnonzero(~np.isin(held.labels, unmeasured_classes(held.counts())))


def _settled(
    rule: str, kind: Kind, classes: Sequence[str], prior: Sequence[float], held: HeldBack
) -> tuple[Calibration, Decision]:
    change = Calibration(1.0, (0.0,) * len(classes))
    if kind != "none":
        change = fit_calibration(held, prior, biases=kind == "affine")
    parsed = parse_rule(rule)
    if parsed.kind == "tuned":  # It contains a calibration of its own, so it is fitted to the original scores.
        return change, through(resolve(parsed, classes, prior, held), change)
    return change, resolve(parsed, classes, prior, held.moved(change(held.probabilities)))


def settle_crossed(
    rule: str, kind: Kind, classes: Sequence[str], prior: Sequence[float], held: HeldBack, folds: Codes
) -> tuple[Floats, Codes]:
    """Return calibrated probabilities and decisions. Those of a fold are settled on the scores of the other folds.

    A fold decides by ``balanced`` if a fitted rule needs a class that no other fold holds.
    """
    p, decided, measured = np.empty_like(held.probabilities), np.empty_like(held.labels), _measured(held)
    for fold in np.unique(folds):
        here, rest = np.flatnonzero(folds == fold), held.rows(measured[folds[measured] != fold])
        try:
            change, decision = _settled(rule, kind, classes, prior, rest)
        except InputError:
            change, decision = _settled("balanced", kind, classes, prior, rest)
        p[here] = change(held.probabilities[here])
        decided[here] = decision.decide(p[here])
    return p, decided


def crossed(rule: str, classes: Sequence[str], prior: Sequence[float], held: HeldBack, seed: int = 0) -> Codes | None:
    """Return the classes that a fitted rule decides for images whose labels it did not see, by up to five folds.

    Images of one group are in one fold. None if a class has fewer than two images or groups, so that some fold could
    not be fitted.
    """
    parsed = parse_rule(rule)
    if not parsed.fitted:
        return resolve(parsed, classes, prior).decide(held.probabilities)
    names = np.arange(len(held.labels)) if held.groups is None else held.groups
    _, groups = np.unique(names, return_inverse=True)
    target = target_of(parsed, classes, prior)
    needed = [held.labels == c for c in (range(len(classes)) if target is None else [target])]
    if parsed.by_others:
        needed = [~needed[0]]
    fewest = min(len(np.unique(groups[rows])) for rows in needed)
    if fewest < 2:
        return None
    fold_of = np.full(groups.max() + 1, -1)
    rng = np.random.default_rng(seed)
    for c in np.argsort(held.counts()):  # The groups of the rarest class are spread evenly over the folds.
        own = rng.permutation(np.unique(groups[held.labels == c]))
        own = own[fold_of[own] < 0]
        fold_of[own] = np.arange(len(own)) % min(5, fewest)
    fold = fold_of[groups]
    decided = np.empty(len(held.labels), dtype=np.int64)
    for number in np.unique(fold):
        rest, here = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        try:
            found = resolve(parsed, classes, prior, held.rows(rest))
        except InputError:  # A group with two labels can leave a class without images.
            return None
        decided[here] = found.decide(held.probabilities[here])
    return decided


def decided_unseen(rule: str, classes: Sequence[str], prior: Sequence[float], held: HeldBack, seed: int = 0) -> Codes:
    """Return the decisions for the images that a rule is fitted to: by ``crossed``, or else by ``balanced``."""
    found = crossed(rule, classes, prior, held, seed)
    return resolve("balanced", classes, prior).decide(held.probabilities) if found is None else found


def figures_by_rule(
    rules: Sequence[str],
    classes: Sequence[str],
    prior: Sequence[float],
    p: Floats,
    labels: Codes,
    held: HeldBack | None = None,
) -> dict[str, Any]:
    """Return balanced accuracy and recalls by several rules, as far as they can be resolved.

    ``held`` are other images than those of ``p``, for rules that are fitted.
    """
    found: dict[str, Any] = {}
    for rule in rules:
        try:
            decided = resolve(rule, classes, prior, held).decide(p)
        except InputError:
            continue
        hits = np.bincount(labels[decided == labels], minlength=len(classes))
        counts = np.bincount(labels, minlength=len(classes))
        recalls = [int(h) / int(n) if n else None for h, n in zip(hits, counts, strict=True)]
        known = [recall for recall in recalls if recall is not None]
        found[rule] = {"uwa": math.fsum(known) / len(known), "recall": recalls}
    return found


def mean_evaluation(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of evaluations of the same images, in the form of ``Evaluation.to_dict``.

    The limits of an interval are the means of the limits, because another repeat does not bring new images: it makes
    the value steadier, but not the images more numerous. The confusion is that of the first evaluation.
    """
    first = dict(evaluations[0])
    if len(evaluations) == 1:
        return first
    first["figures"] = {name: _mean([each["figures"][name] for each in evaluations]) for name in first["figures"]}
    first["per_class"] = [
        {
            name: _mean([each["per_class"][i][name] for each in evaluations]) if isinstance(value, Mapping) else value
            for name, value in row.items()
        }
        for i, row in enumerate(first["per_class"])
    ]
    return first


def _mean(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    found = {}
    for name in ("value", "low", "high"):
        known = [value for figure in figures if (value := figure[name]) is not None]
        found[name] = math.fsum(known) / len(known) if len(known) == len(figures) else None
    return found
