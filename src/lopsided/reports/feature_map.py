"""Two-dimensional maps of the features of a split. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lopsided.errors import InputError, MissingDependencyError, sentence
from lopsided.seeds import derive_seed

Floats = npt.NDArray[np.float32]
KINDS = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}
MOST_NEIGHBOURS = 3_000
"""Maximum number of images for t-SNE and UMAP. More would take minutes."""
_MOST_ASKED = 2_000
_MARGIN, _FRAME = 0.05, 0.02
"""Start and end of the margin for far points. The end keeps marks away from the frame."""


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """The position of each image in the unit square, or NaN if the image is not on the map."""

    kind: str
    xy: npt.NDArray[np.float64]
    note: str

    @property
    def title(self) -> str:
        """The display name of the method."""
        return KINDS[self.kind]


def check_kind(kind: str) -> None:
    """Raise an error if a map is unknown or its package is not installed."""
    if kind not in KINDS:
        raise InputError(sentence(f"--map must be one of {', '.join(KINDS)}", kind))
    if kind == "umap":
        from importlib.util import find_spec

        if find_spec("umap") is None:
            do = "Run pip install 'lopsided[umap]', or use --map tsne."
            raise MissingDependencyError(f"--map umap needs the package umap-learn, which is not installed. {do}")


def lay_out(features: Floats, kind: str, seed: int) -> FeatureMap:
    """Compute a map of the features. The same seed gives the same map."""
    if kind == "pca":
        xy, share = _pca(features)
        return FeatureMap(kind, _unit(xy), f"The two axes of the map explain {100 * share:.0f} % of the variance.")
    title = KINDS[kind]
    random_state = derive_seed(seed, "report", kind) % 2**32
    rows = np.random.default_rng(random_state).permutation(len(features))[:MOST_NEIGHBOURS]
    note = f"{title} keeps neighbours together. Large distances have little meaning."
    if len(rows) < len(features):
        note += f" It shows {len(rows):,} of {len(features):,} images."
    xy = np.full((len(features), 2), np.nan)
    xy[rows] = _unit((_tsne if kind == "tsne" else _umap)(features[rows], random_state))
    return FeatureMap(kind, xy, note)


def _pca(features: Floats) -> tuple[npt.NDArray[np.float64], float]:
    """Project on the two directions of largest variance. The largest weight of each direction is positive."""
    from sklearn.decomposition import PCA

    wide, xy = features.astype(np.float64), np.zeros((len(features), 2))
    if not np.ptp(wide, axis=0).any():  # All features are equal.
        return xy, 1.0
    solver = "covariance_eigh" if len(wide) >= wide.shape[1] else "full"
    model = PCA(min(2, *wide.shape), svd_solver=solver)
    found = model.fit_transform(wide)
    xy[:, : found.shape[1]] = found
    return xy, float(model.explained_variance_ratio_.sum())


def _tsne(features: Floats, random_state: int) -> npt.NDArray[np.float64]:
    from sklearn.manifold import TSNE

    if len(features) < 4 or not np.ptp(features, axis=0).any():  # Too few points, or all are equal.
        return _pca(features)[0]
    perplexity = min(30.0, (len(features) - 1) / 3)
    init = "pca" if min(features.shape) >= 2 else "random"
    model = TSNE(perplexity=perplexity, init=init, random_state=random_state)
    return np.asarray(model.fit_transform(features), dtype=np.float64)


def _umap(features: Floats, random_state: int) -> npt.NDArray[np.float64]:
    import umap  # type: ignore[import-not-found, unused-ignore]

    if len(features) < 5:
        return _pca(features)[0]
    model = umap.UMAP(n_neighbors=min(15, len(features) - 1), random_state=random_state, n_jobs=1)
    return np.asarray(model.fit_transform(features), dtype=np.float64)


def _unit(xy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Scale each axis to [0, 1]. Outliers are compressed into a margin, so that they do not squeeze other points."""
    low, high = np.quantile(xy, [0.001, 0.999], axis=0)
    share = (xy - low) / np.where(high > low, high - low, 1.0)
    inside = np.clip(share, 0.0, 1.0)
    beyond = share - inside
    return np.asarray(_MARGIN + (1 - 2 * _MARGIN) * inside + (_MARGIN - _FRAME) * beyond / (1 + np.abs(beyond)))


def neighbour_share(features: Floats, labels: npt.NDArray[np.int64], label: int) -> float | None:
    """Return the share of images of a class whose nearest other image (by angle) has the same class.

    Use the first 2,000 images of a large class. Return None if the class has no images.
    """
    rows = np.flatnonzero(labels == label)[:_MOST_ASKED]
    if not len(rows) or len(labels) < 2:
        return None
    wide = features.astype(np.float64)  # The square of a large float32 overflows.
    z = (wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    similarity = z[rows] @ z.T
    similarity[np.arange(len(rows)), rows] = -np.inf
    return float((labels[similarity.argmax(axis=1)] == label).mean())
