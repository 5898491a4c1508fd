from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import make_classification

from lopsided import LopsidedClassifier, TwoStageClassifier
from lopsided.errors import DataError
from lopsided.evaluation.metrics import balanced_accuracy


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    x, y = make_classification(150, weights=[0.85], class_sep=1.5, random_state=0)
    return x, np.where(y == 1, "rare", "common")


def test_folds_test_every_sample_and_the_model_is_that_of_all_samples(data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    model = LopsidedClassifier(folds=5, random_state=0).fit(x, y)
    assert model.oof_proba_.shape == (150, 2)
    np.testing.assert_allclose(model.oof_proba_.sum(axis=1), 1, rtol=1e-5)
    assert np.bincount(model.oof_fold_).tolist() == [30] * 5
    expected = [balanced_accuracy(y[model.oof_fold_ == k], model.oof_pred_[model.oof_fold_ == k]) for k in range(5)]
    np.testing.assert_allclose(model.cv_results_["test_score"], expected)
    assert model.oof_figures_["num_images"] == 150
    assert model.card_.calibrated_on == 150
    whole = LopsidedClassifier(random_state=0).fit(x, y)
    # Calibration is monotone, so the order of the scores is that of the model without folds.
    before, after = (np.argsort(each.predict_proba(x)[:, 1], kind="stable") for each in (whole, model))
    assert np.array_equal(before, after)
    assert not np.allclose(whole.predict_proba(x), model.predict_proba(x))


def test_out_of_fold_scores_come_from_models_without_the_sample(data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    settings = {"decision.calibration": "none"}
    model = LopsidedClassifier(folds=3, random_state=0, settings=settings).fit(x, y)
    changed = np.where((model.oof_fold_ == 1) & (np.arange(150) == np.flatnonzero(model.oof_fold_ == 1)[0]), 50.0, 0.0)
    other = LopsidedClassifier(folds=3, random_state=0, settings=settings).fit(x + changed[:, None], y)
    own = model.oof_fold_ == 1
    rest = own & (changed == 0)
    np.testing.assert_array_equal(model.oof_proba_[rest], other.oof_proba_[rest])
    assert not np.allclose(model.oof_proba_[~own], other.oof_proba_[~own])


def test_groups_stay_in_one_fold(data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    groups = np.arange(150) // 3
    model = LopsidedClassifier(folds=4, random_state=0).fit(x, y, groups)
    assert all(len(np.unique(model.oof_fold_[groups == group])) == 1 for group in range(50))
    assert model.oof_figures_["num_groups"] == 50


def test_a_fitted_rule_needs_no_validation_samples_with_folds(data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    model = LopsidedClassifier(folds=3, decide="recall:rare>=0.9", random_state=0).fit(x, y)
    assert model.card_.decision.threshold is not None
    assert "out-of-fold images of rare" in model.card_.decision.notes[0]


def test_a_trained_encoder_has_folds_too_and_survives_saving(
    data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = data
    model = TwoStageClassifier(loss="ce", folds=2, epochs=1, classifier_epochs=1, encoder="mlp-8", random_state=0).fit(
        x, y
    )
    assert model.oof_pred_.shape == (150,)
    model.save(tmp_path / "model")
    loaded = TwoStageClassifier.load(tmp_path / "model")
    assert loaded.folds == 2
    np.testing.assert_allclose(loaded.predict_proba(x), model.predict_proba(x), rtol=1e-5)


@pytest.mark.slow
def test_images_have_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path))
    rng = np.random.default_rng(0)
    y = np.array([0] * 20 + [1] * 6)
    x = np.clip(rng.normal(40 + 160 * y[:, None, None, None], 20, (26, 16, 16, 3)), 0, 255).astype(np.uint8)
    model = LopsidedClassifier(folds=2, image_size=32, random_state=0).fit(x, y)
    assert balanced_accuracy(y, model.oof_pred_) > 0.75  # By chance it would be 0.5.
    assert model.predict(x[:3]).shape == (3,)


def test_more_folds_than_samples_of_the_rare_class_are_an_error(data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    with pytest.raises(DataError, match=r"got 100 for \d+ images of 'rare' in samples\. Use at most"):
        LopsidedClassifier(folds=100).fit(x, y)
