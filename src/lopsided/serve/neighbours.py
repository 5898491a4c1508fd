"""The known images that are nearest to an image, by their features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lopsided.inference.neighbours import Features, unit

MOST = 5_000
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


def chosen_rows(labels: Sequence[str], most: int = MOST) -> npt.NDArray[np.int64]:
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
