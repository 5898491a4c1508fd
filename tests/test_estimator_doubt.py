"""What the estimators do not know: typicality and sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lopsided import LopsidedClassifier, TwoStageClassifier
from lopsided.errors import RunError


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    y = np.repeat([0, 1], [150, 40])
    return generator.normal(size=(190, 5)) + 1.2 * y[:, None], y


def test_sets_and_typicality_survive_saving(samples: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    X, y = samples
    estimator = LopsidedClassifier(decide="sets:0.9", folds=3, random_state=0).fit(X, y)
    sets = estimator.predict_set(X)
    assert np.mean([label in found for label, found in zip(y, sets, strict=True)]) > 0.85
    far = estimator.typicality(np.full((1, 5), 30.0))
    assert far == pytest.approx(1 / 191)
    assert np.median(estimator.typicality(X)) > 0.3
    estimator.save(tmp_path)
    again = LopsidedClassifier.load(tmp_path)
    np.testing.assert_array_equal(again.typicality(X), estimator.typicality(X))
    assert [found.tolist() for found in again.predict_set(X)] == [found.tolist() for found in sets]


def test_without_held_out_samples_a_trained_encoder_knows_none(samples: tuple[np.ndarray, np.ndarray]) -> None:
    X, y = samples
    estimator = TwoStageClassifier(epochs=1, classifier_epochs=1, random_state=0).fit(X, y)
    with pytest.raises(RunError, match=r"^The estimator knows no samples to compare with\."):
        estimator.typicality(X)
    assert all(len(found) == 1 for found in estimator.predict_set(X[:5]))
    held = TwoStageClassifier(epochs=1, classifier_epochs=1, val=0.3, random_state=0).fit(X, y)
    assert held.typicality(np.full((1, 5), 30.0)) < 0.01
