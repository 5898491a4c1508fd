from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from sklearn.decomposition import PCA

from lopsided.errors import InputError, MissingDependencyError
from lopsided.reports import feature_map
from lopsided.reports.feature_map import check_kind, lay_out, neighbour_share


def features(n: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(0, 1, (n, width)) * np.linspace(3, 0.1, width)).astype(np.float32)


@pytest.mark.parametrize(("n", "width"), [(60, 8), (10, 40)])
def test_pca_is_that_of_scikit_learn_up_to_shift_scale_and_sign(n: int, width: int) -> None:
    x = features(n, width)
    model = PCA(2).fit(x)
    found, expected = lay_out(x, "pca", 0), model.transform(x)
    for axis in range(2):
        assert abs(np.corrcoef(found.xy[:, axis], expected[:, axis])[0, 1]) == pytest.approx(1.0, abs=1e-2)
    assert f"hold {100 * model.explained_variance_ratio_.sum():.0f} % of the variance" in found.note


def test_a_map_lies_in_the_unit_square_and_is_the_same_each_time() -> None:
    x = features(40, 6)
    for kind in ("pca", "tsne"):
        first, again = (lay_out(x, kind, 3) for _ in range(2))
        assert (first.xy == again.xy).all()
        assert first.xy.min() >= 0
        assert first.xy.max() <= 1


def test_far_points_keep_off_the_frame_and_apart() -> None:
    x = features(4000, 2)
    x[:3] = [[40, 0], [400, 0], [-4000, 0]]
    xy = lay_out(x, "pca", 0).xy
    assert xy.min() >= 0.02
    assert xy.max() <= 0.98
    along = np.sort(xy[:3, 0]) if xy[0, 0] < xy[1, 0] else np.sort(1 - xy[:3, 0])
    assert along[0] < 0.05
    assert 0.95 < along[1] < along[2], "The farther one lies outside."
    assert np.ptp(xy[3:, 0]) > 0.5, "The others are not squeezed."


def test_neighbours_of_very_large_features_are_found() -> None:
    x, labels = features(25, 4), np.arange(25) % 3
    assert neighbour_share(x * np.float32(1e25), labels, 1) == neighbour_share(x, labels, 1)


@pytest.mark.parametrize("x", [np.zeros((5, 4)), np.ones((2, 1)), np.eye(3)])
def test_features_that_hardly_differ_still_have_a_map(x: np.ndarray) -> None:
    for kind in ("pca", "tsne"):
        assert np.isfinite(lay_out(x.astype(np.float32), kind, 0).xy).all()


def test_tsne_of_very_many_images_shows_a_sample_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_map, "MOST_NEIGHBOURS", 12)
    found = lay_out(features(30, 5), "tsne", 0)
    assert np.isfinite(found.xy[:, 0]).sum() == 12
    assert "It shows 12 of 30 images." in found.note


def test_the_share_of_neighbours_is_that_of_a_search_by_hand() -> None:
    x = features(25, 4)
    labels = np.arange(25) % 3
    same = []
    for i in np.flatnonzero(labels == 1):
        cosine = {j: x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j]) for j in range(25) if j != i}
        same.append(labels[max(cosine, key=cosine.__getitem__)] == 1)
    assert neighbour_share(x, labels, 1) == pytest.approx(np.mean(same))
    assert neighbour_share(x, labels, 7) is None


def test_a_map_that_cannot_be_drawn_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"^--map must be one of pca, tsne, umap, got pcb\.$"):
        check_kind("pcb")
    if importlib.util.find_spec("umap") is None:
        with pytest.raises(MissingDependencyError, match=r"^--map umap must have the package umap-learn, got none\. "):
            check_kind("umap")
