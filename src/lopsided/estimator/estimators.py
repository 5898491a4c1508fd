"""The two estimators: a regression on features of pretrained encoders, and an encoder that is trained."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from lopsided.data.images import Images
from lopsided.estimator.classifiers import Classifier, Kind
from lopsided.models.model import ModelCard
from lopsided.recipe import Recipe, find_recipe
from lopsided.runs.fitting import QUICK, usual_recipe


class LopsidedClassifier(Classifier):
    """Classifier for class-imbalanced images or vectors: a logistic regression on features of a pretrained encoder.

    ``X`` is as in ``TwoStageClassifier``, and so are all methods. Images go through embedded encoders. ``settings``
    select another one, such as {"encoder.name": "resnet50", "encoder.weights": "resnet50.safetensors"}. Vectors are
    only standardised. Inner folds choose the strength of the regression. Features of images are cached on disk.

    Args:
        recipe: Name of a recipe, or a TOML file. None: what ``lopsided fit`` takes, which is few if one of two classes
            is rare or missing, thorough for up to 3,000 images with at least 50 of each class that are larger than 32
            pixels, and quick otherwise and for vectors.
        decide: Decision rule of ``predict``, as in ``TwoStageClassifier``.
        tta: Test-time augmentation, as in ``TwoStageClassifier``.
        folds: Number of folds that test every sample, as in ``TwoStageClassifier``, by group if ``fit`` gets groups.
        image_size: Side to which images are resized; None: the size that belongs to the encoder's weights.
        columns: Columns of a data frame with a column path that the classifier gets beside each image, such as ["age",
            "sex"]: numbers or categories.
        settings: Any fields of the recipe by their dotted names, such as {"regression.strength": 0.01}. Each is also
            a parameter of ``set_params`` and of a grid search: ``regression__strength``.
        random_state: Seed of all random choices.
        device: "auto", "cpu", "cuda", "mps".
        num_threads: Number of CPU threads; None: torch's setting.
        verbose: 1 prints a line per epoch of recipes that have epochs.

    >>> from sklearn.datasets import make_classification
    >>> X, y = make_classification(200, weights=[0.9], class_sep=3.0, random_state=0)
    >>> LopsidedClassifier(random_state=0).fit(X, y).predict(X[:3]).shape
    (3,)
    """

    def __init__(
        self,
        *,
        recipe: str | os.PathLike[str] | None = None,
        decide: str | None = None,
        tta: str | None = None,
        folds: int | None = None,
        image_size: int | None = None,
        columns: Sequence[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        num_threads: int | None = None,
        verbose: int = 0,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Fit the recipe to inputs ``X`` with one label each in ``y``.

        Inputs of one group, such as photographs of one patient, stay together in the inner folds. ``sample_weight`` are
        numbers >= 0, one for each input: a weight of 2 is as if the input were there twice.
        """
        return self._fit(X, y, groups, sample_weight)

    def _changes(self, kind: Kind) -> dict[str, Any]:
        return {"data.val": 0.0, "encoder.name": {"vector": "mlp"}.get(kind)}

    def _base(self, images: Images | None, counts: Sequence[int], weighted: bool) -> Recipe:
        if self.recipe or images is None:
            return find_recipe(self.recipe or QUICK)
        counts = counts if len(counts) > 1 else [0, *counts]
        return find_recipe(usual_recipe(counts, images, distance=not weighted)[0])

    @classmethod
    def _of_card(cls, card: ModelCard) -> dict[str, Any]:
        return {"image_size": card.image_size}


class TwoStageClassifier(Classifier):
    """Classifier for class-imbalanced images or vectors: a contrastive first stage, then a linear layer.

    ``X`` is a list or series of paths, of Pillow images or of arrays, of any sizes; a data frame with the column path;
    an array or tensor of images, (n, h, w), (n, h, w, c) or (n, c, h, w), uint8 or floats in [0, 1]; or a matrix of
    vectors, (n, d). The estimator standardises the columns of vectors. ``score`` is the balanced accuracy.
    ``transform`` returns the encoder's features. Probabilities and features are float32.

    Args:
        loss: Name of a loss in the catalogue, or a mapping with its ``name`` and parameters; None: the recipe's loss. A
            classification loss trains end to end for ``epochs + classifier_epochs`` epochs, which is the same budget.
        recipe: Name of a recipe, or a TOML file. It sets all arguments below that are None.
        eta, gamma: Parameters of the loss, if it has them.
        encoder: Name of a timm model, "mlp", or "mlp-64-32" for layers of 64 and 32; "auto": "mlp" for vectors, the
            recipe's encoder for images.
        epochs, lr: Epochs and learning rate of the first stage.
        classifier_epochs: Epochs of the second stage.
        batch_size: Batch size of both stages.
        image_size: Side to which images are resized; None: the median of their shorter sides, at most 224, if sizes
            differ, and no resizing if they do not, so that all images must have the size of ``fit``.
        val: Share of the samples held out to select the epoch; 0: train on all samples and keep the last epoch.
        decide: Decision rule of ``predict``: "balanced", "plain", "cost:a=10,b=1", "recall:a=0.95" or another rule of
            a recipe; None: the recipe's rule, by default "balanced". The rules "recall" and "tuned" need ``val`` or
            ``folds``.
        tta: Test-time augmentation, the views of an image whose features are averaged: "none", "flip", "flips",
            "dihedral", names such as "identity,rot180", or "auto" for a frozen encoder; None: those of the recipe, by
            default "none".
        folds: Number of folds that test every sample, before the model is trained on all samples; None: no folds. The
            scores of the folds calibrate the model and fit its rule.
        settings: Any other fields of the recipe by their dotted names, such as {"encoder_training.views": 2}. Each is
            also a parameter of ``set_params`` and of a grid search: ``encoder_training__views``.
        random_state: Seed of all random choices.
        device: "auto", "cpu", "cuda", "mps".
        num_threads: Number of CPU threads; None: torch's setting.
        verbose: 1 prints a line per epoch.

    After ``fit`` with ``folds``, there are further attributes. ``save`` does not write them.

    Attributes:
        oof_proba_: Calibrated probabilities (n, K) of each sample, from a model that was not trained on it. They are
            calibrated, and decided, by the scores of the other folds.
        oof_pred_: The class that the rule decides for each sample.
        oof_fold_: The fold of each sample, from 0.
        oof_figures_: The figures of all samples with intervals, as in the ``metrics.json`` of a run.
        cv_results_: One entry per fold: ``fold``, ``num_samples`` and ``test_score``, the balanced accuracy.

    >>> from sklearn.datasets import make_classification
    >>> X, y = make_classification(200, weights=[0.9], class_sep=3.0, random_state=0)
    >>> TwoStageClassifier(random_state=0).fit(X, y).predict(X[:3]).shape
    (3,)
    """

    loss: str | Mapping[str, Any] | None
    eta: float | None
    gamma: float | None
    encoder: str
    epochs: int | None
    classifier_epochs: int | None
    batch_size: int | None
    lr: float | None
    val: float

    def __init__(
        self,
        *,
        loss: str | Mapping[str, Any] | None = None,
        recipe: str | os.PathLike[str] = "from-scratch",
        eta: float | None = None,
        gamma: float | None = None,
        encoder: str = "auto",
        epochs: int | None = None,
        classifier_epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        image_size: int | None = None,
        val: float = 0.0,
        decide: str | None = None,
        tta: str | None = None,
        folds: int | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        num_threads: int | None = None,
        verbose: int = 0,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any) -> Self:
        """Train both stages on inputs ``X`` with one label each in ``y``."""
        return self._fit(X, y, None)

    def _changes(self, kind: Kind) -> dict[str, Any]:
        return {
            "encoder_training.loss": self.loss,
            "encoder_training.loss.eta": self.eta,
            "encoder_training.loss.gamma": self.gamma,
            "encoder_training.epochs": self.epochs,
            "encoder_training.batch_size": self.batch_size,
            "encoder_training.lr": self.lr,
            "classifier.epochs": self.classifier_epochs,
            "classifier.batch_size": self.batch_size,
            "data.val": self.val,
            "encoder.name": {"vector": "mlp"}.get(kind) if self.encoder == "auto" else self.encoder,
        }

    def _base(self, images: Images | None, counts: Sequence[int], weighted: bool) -> Recipe:
        assert self.recipe is not None
        return find_recipe(self.recipe)

    @classmethod
    def _of_card(cls, card: ModelCard) -> dict[str, Any]:
        return {"encoder": card.encoder, "image_size": card.image_size}
