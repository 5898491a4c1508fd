from __future__ import annotations

import importlib.util
import sys
import types

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
    assert f"explain {100 * model.explained_variance_ratio_.sum():.0f} % of the variance" in found.note


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


def test_umap_is_asked_for_no_more_neighbours_than_there_are_and_for_the_same_map_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, int]] = []

    class Umap:
        def __init__(self, n_neighbors: int, random_state: int, n_jobs: int) -> None:
            asked.append({"n_neighbors": n_neighbors, "random_state": random_state, "n_jobs": n_jobs})

        def fit_transform(self, x: np.ndarray) -> np.ndarray:
            return x[:, :2].astype(np.float32)

    # A stand-in, because the package brings a compiler along.
    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=Umap))
    found = lay_out(features(9, 5), "umap", 0)
    assert (found.title, found.xy.shape) == ("UMAP", (9, 2))
    assert np.isfinite(found.xy).all()
    lay_out(features(40, 5), "umap", 0)
    lay_out(features(40, 5), "umap", 1)
    assert [each["n_neighbors"] for each in asked] == [8, 15, 15]
    assert [each["n_jobs"] for each in asked] == [1, 1, 1]  # With more, umap-learn says that the seed forbids it.
    assert asked[0]["random_state"] == asked[1]["random_state"] != asked[2]["random_state"]


def test_a_map_that_cannot_be_drawn_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^--map must be one of pca, tsne, umap, got pcb\.$"):
        check_kind("pcb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    must = r"^--map umap needs the package umap-learn, which is not installed\. "
    with pytest.raises(
        MissingDependencyError, match=must + r"Run pip install 'lopsided\[umap\]', or use --map tsne\.$"
    ):
        check_kind("umap")
