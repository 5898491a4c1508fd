"""How a model did that may say that it does not know: coverage of its sets, errors left where it decided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lopsided.evaluation.calibration import Codes, Floats, HeldBack, at_prevalence
from lopsided.evaluation.decision import Decision
from lopsided.evaluation.intervals import UNDEFINED, Estimate, around, share_interval
from lopsided.evaluation.sets import Bools, asks, fit_sets, members
from lopsided.recipe.rules import parse_rule

LEVEL = 0.95
ERRORS = (0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
"""The highest expected errors of the points of a trade-off."""
Groups = NDArray[Any] | None


def measure_doubt(
    decision: Decision, p: Floats, labels: Codes, classes: Sequence[str], groups: Groups = None
) -> dict[str, Any]:
    """Return how sets or abstention did on labelled images, for JSON; nothing if the rule has neither."""
    if decision.sets:
        return {"sets": measure_sets(decision.members(p), labels, classes, groups)}
    if decision.error is not None:
        return {"abstain": _abstained(decision.asks(p), decision.decide(p) != labels, labels, classes, groups)}
    return {}


def measured_words(
    decision: Decision, held: HeldBack, classes: Sequence[str], *, fitted_to: bool = False, seed: int = 0
) -> list[str]:
    """Return in sentences how sets or abstention did on labelled images; nothing if the rule has neither.

    If the thresholds of the sets are ``fitted_to`` these images, each is judged by thresholds of other images.
    """
    if fitted_to and decision.sets:
        sets = cross_sets(held, parse_rule(decision.rule).bound, seed)
        return doubt_words({"sets": measure_sets(sets, held.labels, classes, held.groups)})
    return doubt_words(measure_doubt(decision, held.probabilities, held.labels, classes, held.groups))


def measure_sets(sets: Bools, labels: Codes, classes: Sequence[str], groups: Groups = None) -> dict[str, Any]:
    """Return the coverage of each class by the sets (n, K) of images, and the sizes of the sets, for JSON."""
    covered, sizes = sets[np.arange(len(labels)), labels], sets.sum(axis=1)
    return {
        "per_class": [
            {
                "label": name,
                "images": int((labels == c).sum()),
                "coverage": _share(covered, labels == c, groups).to_dict(),
                "size": float(sizes[labels == c].mean()) if (labels == c).any() else None,
            }
            for c, name in enumerate(classes)
        ],
        "sizes": np.bincount(sizes, minlength=len(classes) + 1).tolist(),
    }


def _abstained(asked: Bools, wrong: Bools, labels: Codes, classes: Sequence[str], groups: Groups) -> dict[str, Any]:
    every = np.ones(len(labels), dtype=np.bool_)
    return {
        "asked": _share(asked, every, groups).to_dict(),
        "errors": _share(wrong, ~asked, groups).to_dict(),
        "per_class": [
            {
                "label": name,
                "images": int((labels == c).sum()),
                "asked": _share(asked, labels == c, groups).to_dict(),
                "errors": _share(wrong, (labels == c) & ~asked, groups).to_dict(),
            }
            for c, name in enumerate(classes)
        ],
    }


def trade_off(
    p: Floats,
    labels: Codes,
    groups: Groups = None,
    moved: tuple[Sequence[float], Sequence[float]] | None = None,
    errors: Sequence[float] = ERRORS,
) -> list[dict[str, Any]]:
    """Return for each expected error the share of images that a person must see, and the errors left in the others.

    ``moved`` are the class shares that the probabilities carry and those of the place of use: there, the images of a
    class count as often as its share says.
    """
    weights = np.ones(len(labels))
    if moved is not None:
        carried, shares = moved
        p = at_prevalence(p, carried, shares)
        counts = np.bincount(labels, minlength=p.shape[1])
        weights = (np.asarray(shares) * len(labels) / np.maximum(counts, 1))[labels]
    wrong = p.argmax(axis=1) != labels
    points = []
    for error in errors:
        asked = asks(p, error)
        left = _share(wrong, ~asked, groups, weights)
        every = np.ones(len(labels), dtype=np.bool_)
        points.append(
            {"error": error, "asked": _share(asked, every, groups, weights).to_dict(), "errors": left.to_dict()}
        )
    return points


def _share(hits: Bools, among: Bools, groups: Groups, weights: Floats | None = None) -> Estimate:
    """Return the share of hits among some images, with Wilson's interval. Images of one group count as copies.

    With unequal weights or groups, the effective number of images is Kish's.
    """
    if not among.any():
        return UNDEFINED
    own = np.ones(int(among.sum())) if weights is None else weights[among]
    units = np.arange(len(own)) if groups is None else np.unique(groups[among], return_inverse=True)[1]
    mass = np.bincount(units, weights=own)
    if not own.sum():
        return UNDEFINED
    share = float(own[hits[among]].sum() / own.sum())
    figure = share_interval(share, float(mass.sum() ** 2 / np.square(mass).sum()), LEVEL)
    return around(share, figure.low, figure.high)


def doubt_words(found: Mapping[str, Any]) -> list[str]:
    """Return the result of ``measure_doubt`` in sentences."""
    if "sets" in found:
        sets = found["sets"]
        named = ", ".join(f"{row['label']} {_figure(row['coverage'])}" for row in sets["per_class"])
        total = sum(sets["sizes"])
        sizes = [f"{number / total:.0%} have {_size(size)}" for size, number in enumerate(sets["sizes"]) if number]
        return [f"Images whose set holds their class: {named}.", f"Of the sets, {', '.join(sizes)}."]
    if "abstain" in found:
        part = found["abstain"]
        named = ", ".join(f"{row['label']} {_figure(row['errors'])}" for row in part["per_class"])
        return [
            f"A person is asked about {_figure(part['asked'])} of the images. Of the others, {_figure(part['errors'])} "
            f"are wrong; by class: {named}."
        ]
    return []


def _size(size: int) -> str:
    return {0: "no class", 1: "one class"}.get(size, f"{size} classes")


def _figure(figure: Mapping[str, float | None]) -> str:
    numbers = [math.nan if figure[name] is None else float(figure[name] or 0) for name in ("value", "low", "high")]
    return str(Estimate(*numbers))


def cross_sets(held: HeldBack, level: float, seed: int = 0, folds: int = 5) -> Bools:
    """Return the sets (n, K) of held-back images, each by thresholds of other images: those of the other folds.

    Images of one group are in one fold.
    """
    units = np.arange(len(held.labels)) if held.groups is None else np.unique(held.groups, return_inverse=True)[1]
    order = np.random.default_rng(seed).permutation(int(units.max()) + 1)
    fold, sets = order[units] % folds, np.ones(held.probabilities.shape, dtype=np.bool_)
    for number in range(folds):
        here = np.flatnonzero(fold == number)
        others = held.rows(np.flatnonzero(fold != number))
        sets[here] = members(held.probabilities[here], fit_sets(others, level).thresholds)
    return sets
