"""Two diagnostics of a feature space: sample alignment accuracy and class alignment consistency.

Both are from Mildenberger et al., 2025. A contrastive loss on imbalanced classes can collapse the majority to one
point. The distance between classes does not show this; the neighbours of each feature do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import cdist

from lopsided.errors import InputError, sentence

Floats = NDArray[np.float64]
_BLOCK = 2**22
"""Largest number of distances that are computed at once."""


def sample_alignment_accuracy(features: ArrayLike, labels: ArrayLike) -> dict[Any, float]:
    """Return, for each class, how often the nearest neighbour of a view is another view of the same image.

    ``features`` are (n, views, d) with at least 2 views of n images, ``labels`` are (n,). The neighbours of a view are
    all other views of all images, by the Euclidean distance. If neighbours tie, a view counts by the share of views of
    its own image among them. So features that have collapsed to a point get the share of chance, not 1.

    >>> sample_alignment_accuracy([[[0.0], [0.1]], [[1.0], [1.1]], [[1.0], [3.0]]], ["many", "few", "few"])
    {'few': 0.125, 'many': 1.0}
    """
    z, y = _features(features, 3), _labels(labels)
    n, views = z.shape[:2]
    _check_length(y, n)
    if views < 2:
        raise InputError(sentence("features must hold at least 2 views of each image", views))
    if n < 2:
        raise InputError(sentence("features must hold at least 2 images", n))
    image = np.repeat(np.arange(n), views)
    hits = np.empty(n * views)
    for rows, distances in _distances(z.reshape(n * views, -1)):
        nearest = distances == distances.min(axis=1, keepdims=True)
        own = nearest & (image[rows][:, None] == image)
        hits[rows] = own.sum(axis=1) / nearest.sum(axis=1)
    return _means(hits, y[image])


def class_alignment_consistency(
    features: ArrayLike, labels: ArrayLike, neighbours: float | int = 0.05
) -> dict[Any, float]:
    """Return, for each class, the mean share of the same class among the nearest neighbours of its features.

    ``features`` are (n, d), ``labels`` are (n,). ``neighbours`` is the number of neighbours, or the share of all n
    features if it is a float: 0.05 as in the paper, rounded down, but at least 1. A feature is not its own neighbour.
    If neighbours tie at the end of the list, all of them count with equal weights.

    >>> class_alignment_consistency([[0.0], [0.1], [0.2], [5.0]], [0, 0, 0, 1], neighbours=1)
    {0: 1.0, 1: 0.0}
    """
    z, y = _features(features, 2), _labels(labels)
    _check_length(y, len(z))
    if len(z) < 2:
        raise InputError(sentence("features must hold at least 2 images", len(z)))
    k = _number(neighbours, len(z))
    shares = np.empty(len(z))
    for rows, distances in _distances(z):
        last = np.partition(distances, k - 1, axis=1)[:, k - 1 : k]
        nearer, tied = distances < last, distances == last
        same = y[rows][:, None] == y
        room = (k - nearer.sum(axis=1)) / tied.sum(axis=1)
        shares[rows] = ((nearer & same).sum(axis=1) + room * (tied & same).sum(axis=1)) / k
    return _means(shares, y)


def _distances(z: Floats) -> Iterator[tuple[slice, Floats]]:
    """Yield rows of features and their distances to all features, infinite to themselves."""
    size = max(_BLOCK // len(z), 1)
    for start in range(0, len(z), size):
        rows = slice(start, min(start + size, len(z)))
        distances: Floats = cdist(z[rows], z)
        distances[np.arange(rows.stop - start), np.arange(start, rows.stop)] = np.inf
        yield rows, distances


def _means(values: Floats, labels: NDArray[Any]) -> dict[Any, float]:
    classes, codes = np.unique(labels, return_inverse=True)
    sums = np.bincount(codes, weights=values) / np.bincount(codes)
    return dict(zip(classes.tolist(), sums.tolist(), strict=True))


def _features(features: ArrayLike, ndim: int) -> Floats:
    z = np.asarray(features, dtype=np.float64)
    if z.ndim != ndim:
        shape = "(n, views, d)" if ndim == 3 else "(n, d)"
        raise InputError(sentence(f"features must have shape {shape}", z.shape))
    if not np.isfinite(z).all():
        raise InputError(sentence("features must be finite", "NaN or infinite numbers"))
    return z


def _labels(labels: ArrayLike) -> NDArray[Any]:
    y = np.asarray(labels)
    if y.ndim != 1:
        raise InputError(sentence("labels must be one label per image", f"an array of shape {y.shape}"))
    return y


def _check_length(labels: NDArray[Any], n: int) -> None:
    if len(labels) != n:
        raise InputError(sentence(f"labels must be as many as the images ({n})", len(labels)))


def _number(neighbours: float | int, n: int) -> int:
    """Return the number of neighbours among n - 1 other features."""
    if isinstance(neighbours, bool) or not isinstance(neighbours, (int, float)) or not math.isfinite(neighbours):
        raise InputError(sentence("neighbours must be a number or a share of all features", repr(neighbours)))
    if isinstance(neighbours, float):
        if not 0 < neighbours < 1:
            do = "For a number of neighbours, pass an int."
            raise InputError(sentence("neighbours must be > 0 and < 1 if it is a share", neighbours, do))
        return min(max(int(neighbours * n), 1), n - 1)
    if not 1 <= neighbours < n:
        raise InputError(sentence(f"neighbours must be >= 1 and < {n}, the number of features", neighbours))
    return neighbours
