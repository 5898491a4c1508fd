"""Typicality: how usual an image is among the known images of a model.

The score of an image is the mean distance of its features from its ``NEAREST`` known images. Its typicality is the
share of known images whose score is at least as high, the image itself counted among them:

    typicality = (1 + number of known scores >= score) / (1 + number of known scores)

The score of a known image leaves out the image itself, its copies and its group. This makes the typicality of a new
image a valid conformal p-value: a share of at most a of new images like the known ones has a typicality <= a. In full
conformal prediction (Vovk, Gammerman and Shafer, 2005) the new image would also count among the neighbours of each
known image, which could only lower the known scores. So the typicality here is never below the exact p-value.

Images of one group are alike, so that ten of them say little more than one. Both numbers count groups, and each image
counts as its share of its group (hierarchical conformal prediction; Lee, Barber and Willett, 2023). Then the p-value
holds for an image of a new group.

This holds for all images together. Those of a class with few images have few neighbours, and so low a typicality that
the very images would be left out that matter most. So a typicality of at most ``GUARDED`` is raised, up to this value,
to the highest probability by which an image of some class would have such a score or a higher one. Logarithms of scores
are taken as normal, with a mean for each class and one deviation for all, which is wider the fewer groups there are.
With fewer than ``ENOUGH`` known groups, ranks alone cannot reach a typicality of 0.01. There, an image that is farther
away than every known image has this probability as its typicality.

The bank of known images is bounded: of more than ``MOST_KNOWN`` images, every class gives the same number as far as it
has it, so that images of a rare class have their neighbours. Scores are compared with those of ``MOST_SCORES`` images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.errors import InputError, sentence

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]

NEAREST = 5
"""Known images whose distances are averaged."""
MOST_KNOWN, MOST_SCORES = 2_000, 4_000
FEW = 1_000
"""Up to this number of known images, the deviations of columns leave out an image for its own score."""
GUARDED, ENOUGH = 0.05, 99
LEVEL = 0.01
"""The usual share of familiar images that are marked as unfamiliar."""
TINY = 1e-12
_BLOCK = 512
_LEAST_SPREAD = 0.1
"""The smallest deviation of a column, as a share of the median: a column that is constant in training says much."""


def check_level(level: float) -> float:
    """Return a level. Raise unless it is between 0 and 1."""
    if not 0 < level < 1:
        must = "--level must be a share between 0 and 1 of familiar images that may be marked as unfamiliar"
        raise InputError(sentence(must, f"{level:g}", "0.01 is one image in 100."))
    return level


@dataclass(frozen=True, eq=False)
class Bank:
    """Features of known images, and the scores that those of new images are compared with.

    ``known`` (m, d) are centred by ``centre`` and divided by ``spread``, (d,). ``scores`` are ascending, and ``units``
    are the numbers of the groups that they come from. ``limits`` (c, 2) are mean and deviation of the logarithms of the
    score of a new image of each class that has two images or more.
    """

    known: npt.NDArray[np.float16]
    centre: Features
    spread: Features
    scores: Features
    units: npt.NDArray[np.int32]
    limits: Features

    @cached_property
    def num_units(self) -> int:
        """The number of groups that are compared with; of images, if each is its own group."""
        return len(np.unique(self.units))

    @property
    def num_groups(self) -> int | None:
        """The number of groups if some have several images."""
        return None if self.num_units == len(self.scores) else self.num_units

    @property
    def unit(self) -> str:
        """What is counted: groups, or images if each is its own group."""
        return "images" if self.num_groups is None else "groups"

    @property
    def is_guessed(self) -> bool:
        """Whether there are so few known images that low typicalities rest on an assumed distribution."""
        return self.num_units < ENOUGH and len(self.limits) > 0

    @property
    def lowest(self) -> float:
        """The lowest possible typicality: that of an image which is farther away than every known image."""
        return TINY if self.is_guessed else 1 / (self.num_units + 1)

    @cached_property
    def weights(self) -> Floats:
        """The share of each score in its group."""
        return _shares(self.units)

    def reached(self, level: float) -> float:
        """Return the level that the number of known groups allows: ``level``, or the lowest typicality if higher."""
        return max(check_level(level), self.lowest)

    def typicality(self, features: Features) -> Floats:
        """Return the typicality of images with these features (n, d)."""
        scores = self._scores(features)
        places = np.searchsorted(self.scores, scores, side="left")
        return self._guarded((1 + self._above[places]) / (self.num_units + 1), scores, places == len(self.scores))

    def usual(self) -> Floats:
        """Return the typicality of the known images, each among those of other groups."""
        above = self._above[np.searchsorted(self.scores, self.scores, side="left")]
        for unit in np.unique(self.units) if self.unit == "groups" else ():
            rows = np.flatnonzero(self.units == unit)
            own = len(rows) - np.searchsorted(self.scores[rows], self.scores[rows], side="left")
            above[rows] += 1 - own / len(rows)  # Its group counts as one, like that of a new image.
        return self._guarded(above / self.num_units, self.scores, above < 1 + TINY)

    @cached_property
    def _above(self) -> Floats:
        """The number of groups from each place of ``scores`` on."""
        return np.append(np.cumsum(self.weights[::-1])[::-1], 0.0)

    def _guarded(self, typicality: Floats, scores: Features, beyond: npt.NDArray[np.bool_]) -> Floats:
        """Return the typicality, changed where there are few images. ``beyond`` are images beyond all known ones."""
        found = np.array(typicality, dtype=np.float64)
        for row in np.flatnonzero((found <= GUARDED) | beyond):
            odds = (math.log(max(float(scores[row]), TINY)) - self.limits[:, 0]) / (math.sqrt(2) * self.limits[:, 1])
            highest = max((math.erfc(value) / 2 for value in odds.tolist()), default=0.0)
            if beyond[row] and self.is_guessed:
                found[row] = max(min(highest, found[row], GUARDED), TINY)
            elif found[row] <= GUARDED:
                found[row] = max(found[row], min(highest, GUARDED))
        return found

    def is_unfamiliar(self, typicality: Floats, level: float = LEVEL) -> npt.NDArray[np.bool_]:
        """Return which images are unfamiliar: at most the share ``level`` of images like the known ones."""
        return np.asarray(typicality <= self.reached(level) * (1 + 1e-12), dtype=np.bool_)

    @cached_property
    def _float_known(self) -> tuple[Features, Features]:
        known = self.known.astype(np.float32)
        return known.T.copy(), np.square(known).sum(axis=1)

    def _scores(self, features: Features, related: tuple[Codes, Codes] | None = None) -> Features:
        """Return the mean distance from the nearest known images, without those that share a code with the image.

        ``related`` are the codes of the images (n, c) and of the known images (m, c).
        """
        known, squares = self._float_known
        scores = np.empty(len(features), dtype=np.float32)
        for start in range(0, len(features), _BLOCK):
            x = (features[start : start + _BLOCK] - self.centre) / self.spread
            distance = np.square(x).sum(axis=1, keepdims=True) + squares - 2 * (x @ known)
            if related is not None:
                distance[(related[0][start : start + _BLOCK, None] == related[1]).any(axis=2)] = np.inf
            scores[start : start + _BLOCK] = _mean_of_nearest(distance)
        return scores


def sample_rows(labels: Codes, seed: int) -> tuple[Codes, Codes]:
    """Return the rows of the images for a bank, and of those whose scores are compared with, both ascending."""
    generator, num = np.random.default_rng(seed), len(labels)
    order = generator.permutation(num)
    judged = np.sort(order[:MOST_SCORES])
    if num <= MOST_KNOWN:
        return np.arange(num), judged
    rank = np.empty(num, dtype=np.int64)  # The place of an image in its class.
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        rank[rows] = np.arange(len(rows))
    return np.sort(order[np.argsort(rank[order], kind="stable")[:MOST_KNOWN]]), judged


def make_bank(known: Features, related: Codes, judged: Features, judged_related: Codes, labels: Codes) -> Bank | None:
    """Return the bank of ``known`` features, calibrated by the ``judged`` ones; None if there is nothing to compare.

    Images that are equal in a column of ``related`` and ``judged_related`` are not compared. The first column holds the
    groups, the last one the copies, of which one is judged. ``labels`` are the classes of the judged images.
    """
    if len(known) < 2 or not len(judged):
        return None
    centre = known.mean(axis=0, dtype=np.float64).astype(np.float32)
    spread = known.std(axis=0, dtype=np.float64)
    least = _LEAST_SPREAD * float(np.median(spread[spread > 0])) if (spread > 0).any() else 1.0
    spread = np.maximum(spread, least).astype(np.float32)
    limit = float(np.finfo(np.float16).max)
    bank = Bank(
        np.clip((known - centre) / spread, -limit, limit).astype(np.float16),
        centre,
        spread,
        np.empty(0, np.float32),
        np.empty(0, np.int32),
        np.empty((0, 2), np.float32),
    )
    if len(known) <= FEW and judged is known:
        scores = _scores_apart(known - centre, related, least)
    else:
        scores = bank._scores(judged, (judged_related, related))
    _, first = np.unique(judged_related[:, -1], return_index=True)  # Copies say no more than one of them.
    compared = np.sort(first[np.isfinite(scores[first])])
    if not len(compared):
        return None
    order = compared[np.argsort(scores[compared], kind="stable")]
    _, units = np.unique(judged_related[order, 0], return_inverse=True)
    limits = _limits(np.log(np.maximum(scores[compared], TINY)), labels[compared], judged_related[compared, 0])
    return Bank(bank.known, centre, spread, scores[order], units.astype(np.int32), limits)


def _scores_apart(x: Features, related: Codes, least: float) -> Features:
    """Return the score of each image among the others, whose deviations are those of the others alone.

    An image has a share in the deviation of each column. With few images and many columns this would make known images
    look much nearer than new ones.
    """
    apart = ~(related[:, None] == related).any(axis=2)
    number = np.maximum(apart.sum(axis=1, keepdims=True), 1)
    chosen = apart.astype(np.float32)
    mean, squares = chosen @ x / number, chosen @ np.square(x) / number
    weights = 1 / np.maximum(np.sqrt(np.maximum(squares - np.square(mean), 0)), least) ** 2
    distance = (weights * np.square(x)).sum(axis=1, keepdims=True) - 2 * (weights * x) @ x.T + weights @ np.square(x).T
    return _mean_of_nearest(np.where(apart, distance, np.inf))


def _mean_of_nearest(squares: Features) -> Features:
    """Return the mean distance from the nearest, given squared distances (n, m); infinite without any."""
    nearest = np.partition(squares, NEAREST - 1, axis=1)[:, :NEAREST] if squares.shape[1] > NEAREST else squares
    there = np.isfinite(nearest)
    total = np.sqrt(np.maximum(np.where(there, nearest, 0), 0)).sum(axis=1)
    number = there.sum(axis=1)
    return np.where(number > 0, total / np.maximum(number, 1), np.inf).astype(np.float32)


def _shares(units: npt.NDArray[np.integer[Any]]) -> Floats:
    """Return the share of each image in its group, 1 / the number of its images."""
    _, places, sizes = np.unique(units, return_inverse=True, return_counts=True)
    return np.asarray(1 / sizes[places], dtype=np.float64)


def _limits(logs: npt.NDArray[np.floating], labels: Codes, units: Codes) -> Features:
    """Return mean and deviation of a new value of each class that has two groups: the classes share a deviation."""
    from scipy.stats import norm as normal
    from scipy.stats import t as student

    parts, logs = [], np.asarray(logs, dtype=np.float64)
    for label in np.unique(labels):
        rows = labels == label
        weights, number = _shares(units[rows]), len(np.unique(units[rows]))
        if number > 1:
            mean = float(weights @ logs[rows]) / number
            parts.append((mean, float(weights @ np.square(logs[rows] - mean)), number))
    if not parts:
        return np.empty((0, 2), dtype=np.float32)
    freedom = sum(number - 1 for *_, number in parts)
    variance = sum(squares for _, squares, _ in parts) / freedom
    # The deviation is estimated: at the usual level, a normal value of this width is as rare as one of Student's t.
    width = float(student.isf(LEVEL, freedom) / normal.isf(LEVEL)) * math.sqrt(max(variance, TINY))
    return np.array([[mean, width * math.sqrt(1 + 1 / number)] for mean, _, number in parts], dtype=np.float32)


def codes_of(groups: npt.NDArray[np.str_] | None, features: Features) -> Codes:
    """Return what relates images to each other, (n, 2): their group, by default the image itself, and their copies."""
    copies: dict[bytes, int] = {}
    same = np.array([copies.setdefault(row.tobytes(), len(copies)) for row in features], dtype=np.int64)
    own = np.arange(len(features)) if groups is None else np.unique(groups, return_inverse=True)[1]
    return np.stack([own, same], axis=1)
