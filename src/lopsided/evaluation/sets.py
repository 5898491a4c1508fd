"""Prediction sets and abstention: what a model may say if it may also say that it does not know.

**Sets.** A set holds every class that the image may be of: class c if its probability is at least the threshold t_c.
The thresholds are conformal, one class at a time (Vovk, Gammerman and Shafer, 2005): a new image of class c has c in
its set with at least the wanted probability, whatever the classes and their shares are. They come from images that the
model was not trained on. Images of one group count as one unit: each has the weight of its share of the group
(hierarchical conformal prediction; Lee, Barber and Willett, 2023). With n units of a class the highest level is
n / (n + 1); for a higher level the class is in every set.

With out-of-fold scores, those of several models, the guarantee is not exact (cross-conformal prediction; Vovk, 2015).
``studies/sets.py`` measures how often it holds.

**Abstention.** The most probable class is decided if its probability is at least 1 - error, and otherwise a person is
asked (Chow, 1970). If the probabilities are calibrated, the expected error of every decision is below ``error``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lopsided.evaluation.calibration import Floats, HeldBack

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class SetThresholds:
    """The thresholds of the classes, the units behind each, and the level that each reaches."""

    level: float
    thresholds: tuple[float, ...]
    units: tuple[int, ...]
    unit: str
    """images or groups"""

    @property
    def reached(self) -> tuple[float, ...]:
        """The highest level that the number of units of each class allows."""
        return tuple(number / (number + 1) for number in self.units)

    def words(self, classes: Sequence[str], kind: str) -> list[str]:
        """Return the guarantee, and which classes do not reach the level. ``kind`` is that of the images."""
        named = ", ".join(f"{number:,} of {name}" for name, number in zip(classes, self.units, strict=True))
        percent = f"{100 * self.level:g}%"
        words = [
            f"Each class is in the set of at least {percent} of its images. The thresholds are fitted to {kind} "
            f"{self.unit}: {named}."
        ]
        for name, number, best in zip(classes, self.units, self.reached, strict=True):
            if best < self.level:
                are, what, they = ("is", self.unit.removesuffix("s"), "it suffices")
                if number != 1:
                    are, what, they = "are", self.unit, "they suffice"
                words.append(
                    f"{number:,} {what} of {name} {are} too few for {percent}, so that {name} is in every set; {they} "
                    f"for {np.floor(1000 * best) / 10:g}%."
                )
        return words


def fit_sets(held: HeldBack, level: float) -> SetThresholds:
    """Return the thresholds by which each class is in its set with at least the probability ``level``."""
    found, units = [], []
    for c in range(held.probabilities.shape[1]):
        rows = held.labels == c
        scores = held.probabilities[rows, c]
        if held.groups is None:
            weights, number = np.ones(len(scores)), len(scores)
        else:
            _, group, sizes = np.unique(held.groups[rows], return_inverse=True, return_counts=True)
            weights, number = 1 / sizes[group], len(sizes)
        units.append(number)
        found.append(_lowest(scores, weights / (number + 1), 1 / (number + 1), 1 - level))
    return SetThresholds(level, tuple(found), tuple(units), "images" if held.groups is None else "groups")


def _lowest(scores: Floats, weights: Floats, unknown: float, missed: float) -> float:
    """Return the largest score below which at most the share ``missed`` lies; 0 if the ``unknown`` share is larger."""
    order = np.argsort(scores, kind="stable")
    values, first = np.unique(scores[order], return_index=True)
    below = unknown + np.concatenate([[0.0], np.cumsum(weights[order])])[first]
    allowed = values[below <= missed + 1e-9]
    # A little below the score, so that rounding in another program does not lose its image.
    return float(allowed[-1] * (1 - 1e-6)) if len(allowed) else 0.0


def members(probabilities: ArrayLike, thresholds: Sequence[float]) -> Bools:
    """Return which classes are in the set of each row of (n, K) or (K,).

    >>> members([[0.9, 0.1], [0.5, 0.5]], [0.6, 0.3]).tolist()
    [[True, False], [False, True]]
    """
    return np.asarray(np.asarray(probabilities) >= np.asarray(thresholds), dtype=np.bool_)


def asks(probabilities: ArrayLike, error: float) -> Bools:
    """Return whether a person is asked, for each row of (n, K) or (K,).

    >>> asks([[0.99, 0.01], [0.9, 0.1]], 0.02).tolist()
    [False, True]
    """
    return np.asarray(np.max(probabilities, axis=-1) < 1 - error, dtype=np.bool_)
