"""What a rule decides for images whose labels it has not seen, and the figures by several rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lopsided.errors import InputError
from lopsided.evaluation.calibration import Codes, Floats, HeldBack
from lopsided.evaluation.decision import resolve
from lopsided.recipe.rules import parse_rule


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
    needed = [list(classes).index(parsed.target)] if parsed.kind == "recall" else list(range(len(classes)))
    fewest = min(len(np.unique(groups[held.labels == c])) for c in needed)
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
    """Return UWA and the recall of each class by several rules, as far as they can be resolved.

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
