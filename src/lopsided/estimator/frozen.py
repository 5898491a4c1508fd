"""A regression on features of pretrained encoders, as an estimator."""

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
