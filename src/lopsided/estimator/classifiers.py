"""Recipes as scikit-learn estimators, for images and for plain vectors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from lopsided.data.inputs import Inputs, MemoryInputs, StreamedInputs
from lopsided.data.sources import source_from_arrays
from lopsided.data.splits import whole_recipe
from lopsided.errors import InputError, RunError, sentence
from lopsided.estimator.fitting import (
    PREDICT_BATCH,
    Samples,
    are_images,
    checked_groups,
    on_cpu,
    out_of_fold,
    plain_numbers,
    stacked,
    train,
)
from lopsided.evaluation.calibration import HeldBack
from lopsided.evaluation.folds import settle_crossed, settle_scores
from lopsided.evaluation.metrics import confusion_figures, evaluate, unweighted_accuracy
from lopsided.files import atomic_write
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import Scorer, check_finite
from lopsided.models.encoders import IDENTITY
from lopsided.models.machine import flushed_denormals, pick_device, threads
from lopsided.models.model import load_model, save_model
from lopsided.recipe import Recipe, find_recipe
from lopsided.training.decide import recalibrate
from lopsided.training.methods import Trainer
from lopsided.training.prior import settled_prior

_FEW = 16


class TwoStageClassifier(ClassifierMixin, TransformerMixin, ClassNamePrefixFeaturesOutMixin, BaseEstimator):  # type: ignore[misc]
    """Classifier for class-imbalanced images or vectors: a contrastive first stage, then a linear layer.

    ``X`` is an array or tensor of images, (n, h, w), (n, h, w, c) or (n, c, h, w), uint8 or floats in [0, 1], or a
    matrix of vectors, (n, d). The estimator standardises the columns of vectors. ``score`` is the unweighted accuracy
    (balanced accuracy). ``transform`` returns the encoder's features. Probabilities and features are float32.

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
        image_size: Side to which images are resized; None: no resizing, so all images must have the size of ``fit``.
        val: Share of the samples held out to select the epoch; 0: train on all samples and keep the last epoch.
        decide: Decision rule of ``predict``: "balanced", "plain", "cost:a=10,b=1", "recall:a=0.95" or another rule of
            a recipe; None: the recipe's rule, by default "balanced". The rules "recall" and "tuned" need ``val`` or
            ``folds``.
        views: Views of an image whose features are averaged where images are not augmented: "none", "flip", "flips",
            "dihedral", names such as "identity,rot180", or "auto" for a frozen encoder; None: those of the recipe, by
            default "none".
        folds: Number of folds that test every sample, before the model is trained on all samples; None: no folds. The
            scores of the folds calibrate the model and fit its rule.
        settings: Any other fields of the recipe by their dotted names, such as {"encoder_training.views": 2}.
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
        cv_results_: One entry per fold: ``fold``, ``num_samples`` and ``test_score``, the unweighted accuracy.

    >>> from sklearn.datasets import make_classification
    >>> X, y = make_classification(200, weights=[0.9], class_sep=3.0, random_state=0)
    >>> TwoStageClassifier(random_state=0).fit(X, y).predict(X[:3]).shape
    (3,)
    """

    def __init__(
        self,
        loss: str | Mapping[str, Any] | None = None,
        *,
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
        views: str | None = None,
        folds: int | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        num_threads: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.loss = loss
        self.recipe = recipe
        self.eta = eta
        self.gamma = gamma
        self.encoder = encoder
        self.epochs = epochs
        self.classifier_epochs = classifier_epochs
        self.batch_size = batch_size
        self.lr = lr
        self.image_size = image_size
        self.val = val
        self.decide = decide
        self.views = views
        self.folds = folds
        self.settings = settings
        self.random_state = random_state
        self.device = device
        self.num_threads = num_threads
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> Self:
        """Train both stages on inputs ``X`` with one label each in ``y``."""
        return self._fit(X, y, None)

    def _fit(self, X: Any, y: Any, groups: Any) -> Self:
        X = stacked(X)
        images = are_images(X)
        if images:
            y = column_or_1d(on_cpu(y), warn=True)
            if y.dtype.kind == "f" and np.isnan(y).any():
                raise InputError(sentence("y must hold one label per image", f"{int(np.isnan(y).sum()):,} times NaN"))
        else:
            X, y = validate_data(self, on_cpu(X), on_cpu(y), dtype=np.float64, ensure_min_samples=2)
            y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise InputError(sentence("y must hold at least 2 classes", "1 class"))
        recipe = self._recipe("image" if images else "vector")
        names, codes = tuple(str(label) for label in classes), codes.astype(np.int64)
        groups = checked_groups(groups, len(codes))
        samples = Samples(X, codes, names, groups, images)
        folds = self.folds if self.folds is not None else recipe.data.folds
        with threads(recipe.threads), flushed_denormals(recipe.fast):
            whole = recipe if folds is None else whole_recipe(recipe)
            if folds is not None:
                scores = out_of_fold(samples, whole, folds, verbose=self.verbose)
            trainer, state = train(samples, whole, verbose=self.verbose)
            if folds is not None:
                self._settle(trainer, recipe, scores, codes, classes, groups)
        self.classes_ = classes
        self.resizes_ = recipe.data.image_size is not None or recipe.augment.normalisation == "weights"
        self.model_, self.card_, self.history_ = trainer.model, trainer.card, state.history
        return self

    def _settle(
        self,
        trainer: Trainer,
        recipe: Recipe,
        scores: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]],
        codes: npt.NDArray[np.int64],
        classes: npt.NDArray[Any],
        groups: npt.NDArray[np.str_] | None,
    ) -> None:
        """Calibrate the model and fit its rule on out-of-fold scores, and keep these scores as attributes."""
        (p, numbers), names = scores, trainer.card.classes
        rule, kind, prior = (
            recipe.decision.rule,
            recipe.decision.calibration,
            settled_prior(recipe, np.bincount(codes, minlength=len(names))),
        )
        held = HeldBack(p, codes, groups, "out-of-fold")
        calibrated, decided = settle_crossed(rule, kind, names, prior, held, numbers)
        change, decision = settle_scores(rule, kind, names, prior, held)
        num = 0 if kind == "none" else len(codes)
        trainer.card = recalibrate(trainer.model, trainer.card, prior, change, decision, num)
        self.oof_proba_, self.oof_fold_ = calibrated.astype(np.float32), numbers
        self.oof_pred_ = classes[decided]
        found = evaluate(codes, calibrated, decided, classes=names, seed=recipe.seed, groups=groups, folds=numbers)
        self.oof_figures_ = found.to_dict()
        folds = np.unique(numbers)
        self.cv_results_ = {
            "fold": folds,
            "num_samples": np.bincount(numbers),
            "test_score": np.array([unweighted_accuracy(codes[numbers == k], decided[numbers == k]) for k in folds]),
        }

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """Return probabilities (n, K), with columns in the order of ``classes_``. Raise ``RunError`` if not finite."""
        probabilities = self._predict(X)[0]
        check_finite(probabilities)
        return probabilities.astype(np.float32)

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the class that the rule ``decide`` decides for."""
        check_is_fitted(self)
        probabilities = self._predict(X)[0]
        check_finite(probabilities)
        labels: npt.NDArray[Any] = self.classes_[self.card_.decision.decide(probabilities)]
        return labels

    def transform(self, X: Any) -> npt.NDArray[np.float32]:
        """Return the encoder's features (n, f)."""
        return self._predict(X)[1]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the unweighted accuracy: the mean recall over the classes in ``y``."""
        predicted = self.predict(X)
        y = column_or_1d(on_cpu(y))
        labels, codes = np.unique(np.concatenate([y, predicted]), return_inverse=True)
        confusion = np.zeros((len(labels), len(labels)))
        weight = 1.0 if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        np.add.at(confusion, (codes[: len(y)], codes[len(y) :]), weight)
        return confusion_figures(confusion)["uwa"]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model and the estimator's parameters into a folder, without pickle."""
        check_is_fitted(self)
        parameters = self.get_params(deep=False)
        if not isinstance(self.random_state, int | None):
            parameters["random_state"] = None
        content = {
            "format": FORMAT,
            "parameters": parameters,
            "classes": self.classes_.tolist(),
            "dtype": self.classes_.dtype.kind,
            "resizes": self.resizes_,
            "columns": self.feature_names_in_.tolist() if hasattr(self, "feature_names_in_") else None,
        }
        self.card_ = save_model(Path(folder), self.model_, self.card_)
        atomic_write(Path(folder) / FILE_NAME, json.dumps(content, indent=2, default=plain) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str], device: str = "auto") -> TwoStageClassifier:
        """Load a folder that ``save`` wrote, or a run folder. The classes of a run folder are strings."""
        model, card = load_model(Path(folder), pick_device(device))
        content = read_saved(Path(folder) / FILE_NAME)
        try:
            # A run resizes the images that it predicts, and so does its estimator.
            own = {"encoder": card.encoder, "image_size": card.image_size}
            own = {"image_size": card.image_size} if issubclass(cls, LopsidedClassifier) else own
            estimator = cls(**content.get("parameters", own))
            kind = content.get("dtype", "U")
            classes = np.array(content.get("classes", card.classes), dtype=DTYPES[kind])
            if len(classes) != len(card.classes):
                raise ValueError("classes")
        except (TypeError, ValueError, KeyError) as error:
            path = Path(folder) / FILE_NAME
            raise RunError(f"{path} does not fit model.json. Save the estimator again.") from error
        set_size = {"data.image_size": estimator.image_size, **(estimator.settings or {})}["data.image_size"]
        estimator.resizes_ = bool(content.get("resizes", set_size is not None))
        estimator.set_params(device=device)
        estimator.classes_, estimator.model_, estimator.card_, estimator.history_ = classes, model, card, []
        if card.kind == "vector":
            estimator.n_features_in_ = card.shape[0]
        if content.get("columns") is not None:
            estimator.feature_names_in_ = np.array(content["columns"], dtype=object)
        return estimator

    @property
    def _n_features_out(self) -> int:
        return int(self.card_.width)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def _recipe(self, kind: Literal["image", "vector"]) -> Recipe:
        """Return the recipe with the parameters of the estimator. Invalid parameters raise an error of the recipe."""
        changes = {
            "encoder_training.loss": self.loss,
            "encoder_training.loss.eta": self.eta,
            "encoder_training.loss.gamma": self.gamma,
            "encoder_training.epochs": self.epochs,
            "encoder_training.batch_size": self.batch_size,
            "encoder_training.lr": self.lr,
            "classifier.epochs": self.classifier_epochs,
            "classifier.batch_size": self.batch_size,
            "decision.rule": self.decide,
            "encoder.views": self.views,
            "encoder.name": {"vector": "mlp"}.get(kind) if self.encoder == "auto" else self.encoder,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        changes |= {
            "seed": int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max)),
            "device": self.device,
            "threads": self.num_threads,
            "data.val": self.val,
            "data.image_size": self.image_size,
            # ``fit`` gets its samples as arguments.
            **{"data.test": 0.0, "data.source": None, "data.scenario": None, "data.held_out": False},
            **(self.settings or {}),
        }
        base = find_recipe(self.recipe)
        if kind == "vector" and not base.spec.trains_encoder:  # Vectors are features already.
            changes |= {"encoder.name": IDENTITY, "encoder.weights": "none", "augment.normalisation": "source"}
            changes.setdefault("encoder.views", "none")  # Those of the recipe are meant for images.
        return base.override(**plain_numbers(changes))

    def _predict(self, X: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
        check_is_fitted(self)
        X = stacked(X)
        if are_images(X) != (self.card_.kind == "image"):
            got = "images" if are_images(X) else "vectors"
            raise InputError(sentence(f"X must hold {self.card_.kind}s, as in fit", got))
        inputs: Inputs
        if are_images(X):
            source = source_from_arrays(X)
            self._check_size(source.images.size(0))
            inputs = StreamedInputs(source.images, self.card_.image_size, self.card_.channels)
        else:
            inputs = MemoryInputs(
                torch.from_numpy(np.array(validate_data(self, on_cpu(X), dtype=np.float64, reset=False)))
            )
        with threads(self.num_threads):
            # An engine of onnxruntime takes a moment to build, which a few images are not worth.
            engine = Engine(self.model_, self.card_.shape, fast=len(inputs) > _FEW)
            scorer = Scorer(self.model_, self.card_, engine=engine, cached="none", batch_size=PREDICT_BATCH)
            return scorer.score(inputs)

    def _check_size(self, size: tuple[int, ...]) -> None:
        """Raise if images have another size than in ``fit`` and the estimator does not resize images."""
        fitted = self.card_.shape[1:]
        if size != fitted and not self.resizes_:
            must = f"X must hold images of {fitted[1]} x {fitted[0]} pixels, as in fit"
            do = "Resize the images, or fit with image_size, which resizes all images."
            raise InputError(sentence(must, f"{size[1]} x {size[0]}", do))


class LopsidedClassifier(TwoStageClassifier):
    """Classifier for class-imbalanced images or vectors: a logistic regression on features of a pretrained encoder.

    ``X`` is as in ``TwoStageClassifier``, and so are all methods. Images go through the embedded encoder. ``settings``
    select another one, such as {"encoder.name": "resnet50", "encoder.weights": "resnet50.safetensors"}. Vectors are
    only standardised. Inner folds choose the strength of the regression. Features of images are cached on disk.

    Args:
        recipe: Name of a recipe, or a TOML file.
        decide: Decision rule of ``predict``, as in ``TwoStageClassifier``.
        views: Views of an image whose features are averaged, as in ``TwoStageClassifier``.
        folds: Number of folds that test every sample, as in ``TwoStageClassifier``, by group if ``fit`` gets groups.
        image_size: Side to which images are resized; None: the size that belongs to the encoder's weights.
        settings: Any fields of the recipe by their dotted names, such as {"regression.strength": 0.01}.
        random_state: Seed of all random choices.
        device: "auto", "cpu", "cuda", "mps".
        num_threads: Number of CPU threads; None: torch's setting.
        verbose: 1 prints a line per epoch of recipes that have epochs.

    >>> from sklearn.datasets import make_classification
    >>> X, y = make_classification(200, weights=[0.9], class_sep=3.0, random_state=0)
    >>> LopsidedClassifier(random_state=0).fit(X, y).predict(X[:3]).shape
    (3,)
    """

    loss, eta, gamma, encoder = None, None, None, "auto"
    epochs, classifier_epochs, batch_size, lr, val = None, None, None, None, 0.0

    def __init__(
        self,
        recipe: str | os.PathLike[str] = "quick",
        *,
        decide: str | None = None,
        views: str | None = None,
        folds: int | None = None,
        image_size: int | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        num_threads: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.recipe = recipe
        self.decide = decide
        self.views = views
        self.folds = folds
        self.image_size = image_size
        self.settings = settings
        self.random_state = random_state
        self.device = device
        self.num_threads = num_threads
        self.verbose = verbose

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Fit the recipe to inputs ``X`` with one label each in ``y``.

        Inputs of one group, such as photographs of one patient, stay together in the inner folds.
        """
        return self._fit(X, y, groups)


FILE_NAME = "estimator.json"
FORMAT = 2
DTYPES: dict[str, Any] = {
    "i": np.int64, "u": np.uint64, "f": np.float64, "b": np.bool_, "U": np.str_, "O": object
}  # fmt: skip


def plain(value: object) -> object:
    """Return a numpy number or a path as a JSON value."""
    return value.item() if isinstance(value, np.generic) else str(value)


def read_saved(path: Path) -> dict[str, Any]:
    """Read the file of a saved estimator, which may be missing."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON. Save the estimator again.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunError(f"{path} does not have format {FORMAT}. Save the estimator again.")
    return content
