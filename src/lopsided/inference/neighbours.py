"""Nearness of images to known images of a class, by their features."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]

NEAREST = 5
"""Known images that count for the nearness of an image, on each side."""
MOST = 2_000
"""The largest number of known images on each side. More are thinned out, evenly in their order."""


@dataclass(frozen=True, eq=False)
class Known:
    """Features of images that are known to be of a class, and of images that are known not to be.

    The nearness of an image is the mean cosine to its ``NEAREST`` known images of the class, minus the mean cosine to
    its ``NEAREST`` known images of other classes, if there are any. Without the second term, an image that looks like
    everything in the pool would come first. Features are centred by the mean of all known images.
    """

    wanted: Features
    others: Features

    def __post_init__(self) -> None:
        object.__setattr__(self, "wanted", _thinned(self.wanted))
        object.__setattr__(self, "others", _thinned(self.others))

    @property
    def key(self) -> str:
        """A hash of the features."""
        digest = hashlib.sha256(self.wanted.tobytes())
        digest.update(b"/" + self.others.tobytes())
        return digest.hexdigest()

    def nearness(self, features: Features) -> Floats:
        """Return the nearness of images with these features (n, f): from -2 to 2, or -1 to 1 without other classes."""
        centre = np.zeros(features.shape[1])
        if len(self.others):
            centre = np.concatenate([self.wanted, self.others]).mean(axis=0, dtype=np.float64)
        x = unit(features, centre)
        found = _mean_of_nearest(x @ unit(self.wanted, centre).T)
        return found - _mean_of_nearest(x @ unit(self.others, centre).T) if len(self.others) else found


def unit(features: Features, centre: Floats | float = 0.0) -> Floats:
    """Return centred features of length 1. A feature at the centre stays 0."""
    x = features.astype(np.float64) - centre
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.where(length > 0, length, 1.0))


def spread(features: Features, relevance: Floats, number: int, weight: float) -> npt.NDArray[np.int64]:
    """Return ``number`` rows, chosen one by one: relevant, and unlike those that were chosen before.

    This is maximal marginal relevance (Carbonell and Goldstein, 1998): each step takes the row with the largest
    (1 - weight) * relevance - weight * (largest cosine to a chosen row). Memory is that of the features.
    """
    x = unit(features, features.mean(axis=0, dtype=np.float64)).astype(np.float32)
    likeness = np.zeros(len(x), dtype=np.float32)  # Of centred features, 0 is neither like nor unlike.
    left = np.ones(len(x), dtype=np.bool_)
    chosen = []
    for _ in range(min(number, len(x))):
        gain = (1 - weight) * relevance - weight * likeness
        row = int(np.argmax(np.where(left, gain, -np.inf)))
        chosen.append(row)
        left[row] = False
        np.maximum(likeness, x @ x[row], out=likeness)
    return np.array(chosen, dtype=np.int64)


def _mean_of_nearest(cosines: Floats) -> Floats:
    number = min(NEAREST, cosines.shape[1])
    return np.asarray(np.partition(cosines, -number, axis=1)[:, -number:].mean(axis=1))


def _thinned(features: Features) -> Features:
    if len(features) <= MOST:
        return features
    return features[np.linspace(0, len(features) - 1, MOST).round().astype(np.int64)]


MOST_COMPARED = 5_000
"""The largest number of known images that an image is compared with. Of more, rare classes keep all of theirs."""


class Neighbours:
    """Labelled images and their features (n, f), centred and of length 1."""

    def __init__(self, ids: Sequence[str], labels: Sequence[str], features: Features) -> None:
        self.ids, self.labels = tuple(ids), tuple(labels)
        self._centre = features.mean(axis=0, dtype=np.float64)
        self._features = unit(features, self._centre).astype(np.float32)

    def nearest(self, features: Features, number: int) -> list[tuple[str, str, float]]:
        """Return id, label and cosine of the nearest known images of one image with these features (f,)."""
        cosines = self._features @ unit(features[None], self._centre).astype(np.float32)[0]
        order = np.argsort(-cosines, kind="stable")[:number]
        return [(self.ids[row], self.labels[row], float(cosines[row])) for row in order.tolist()]


def chosen_rows(labels: Sequence[str], most: int = MOST_COMPARED) -> npt.NDArray[np.int64]:
    """Return which of many labelled images to compare with: equally many of each class, as far as there are any.

    >>> chosen_rows(["a", "a", "a", "a", "b"], 3).tolist()
    [0, 3, 4]
    """
    names = np.array(labels)
    parts = sorted((np.flatnonzero(names == name) for name in dict.fromkeys(labels)), key=len)
    chosen, left = [], most
    for place, rows in enumerate(parts):
        number = min(len(rows), left // (len(parts) - place))
        left -= number
        chosen.append(rows[np.linspace(0, len(rows) - 1, number).round().astype(np.int64)])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)
