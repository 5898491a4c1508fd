"""What both estimators share: from samples to a trained recipe, predictions, and saved folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from lopsided.data.images import Images
from lopsided.data.sources.source import UNUSUAL
from lopsided.errors import InputError, RunError, sentence
from lopsided.estimator.fitting import (
    PREDICT_BATCH,
    Samples,
    checked_groups,
    checked_weights,
    images_or_vectors,
    inputs_for,
    on_cpu,
    out_of_fold,
    plain_numbers,
    train,
)
from lopsided.evaluation.calibration import HeldBack, settled_prior
from lopsided.evaluation.folds import settle_crossed, settle_scores
from lopsided.evaluation.metrics import balanced_accuracy, confusion_figures, evaluate
from lopsided.files import atomic_write, make_folder
from lopsided.inference.engine import Engine
from lopsided.inference.familiar import load_bank, save_bank
from lopsided.inference.scorer import Scored, Scorer, check_finite
from lopsided.models.encoders import IDENTITY
from lopsided.models.machine import flushed_denormals, pick_device, threads
from lopsided.models.model import ModelCard, load_model, save_model
from lopsided.recipe import Recipe
from lopsided.runs.folds import whole_recipe
from lopsided.training.decide import familiar_images, recalibrate
from lopsided.training.methods import Trainer

Kind: TypeAlias = Literal["image", "vector"]
_FEW = 16


class Classifier(ClassifierMixin, TransformerMixin, ClassNamePrefixFeaturesOutMixin, BaseEstimator):  # type: ignore[misc]
    """What both estimators share. Their parameters are fields of a recipe."""

    recipe: str | os.PathLike[str] | None
    decide: str | None
    tta: str | None
    folds: int | None
    image_size: int | None
    settings: Mapping[str, Any] | None
    random_state: int | np.random.RandomState | None
    device: str
    num_threads: int | None
    verbose: int
    columns: Sequence[str] | None = None

    def _changes(self, kind: Kind) -> dict[str, Any]:
        """Return the fields that the parameters of a subclass set; None: the recipe's value."""
        raise NotImplementedError

    def _base(self, images: Images | None, counts: Sequence[int], weighted: bool) -> Recipe:
        """Return the recipe that the parameters change, for these images, or vectors, and numbers of the classes."""
        raise NotImplementedError

    @classmethod
    def _of_card(cls, card: ModelCard) -> dict[str, Any]:
        """Return the parameters of an estimator with the model of a run, which resizes images as the run does."""
        raise NotImplementedError

    def _keep(self, arguments: Mapping[str, Any]) -> None:
        """Keep the arguments of ``__init__`` as they are, each as the attribute of its name, as scikit-learn asks."""
        for name in self._get_param_names():
            setattr(self, name, arguments[name])

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters; with ``deep`` also the fields in ``settings``, such as ``regression__strength``."""
        parameters = dict(super().get_params(deep))
        if deep and isinstance(self.settings, Mapping):  # ``fit`` refuses anything else.
            parameters |= {name.replace(".", "__"): value for name, value in self.settings.items()}
        return parameters

    def set_params(self, **parameters: Any) -> Self:
        """Set parameters. Any field of the recipe is one, with ``__`` for its dots: ``regression__strength=0.01``."""
        fields = {name.replace("__", "."): value for name, value in parameters.items() if "__" in name}
        super().set_params(**{name: value for name, value in parameters.items() if "__" not in name})
        if fields:
            self.settings = {**(self.settings or {}), **fields}
        return self

    def _fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        X = images_or_vectors(X, self.columns or ())
        is_image = isinstance(X, Images)
        if is_image:
            y = column_or_1d(on_cpu(y), warn=True)
            if y.dtype.kind == "f" and np.isnan(y).any():
                raise InputError(sentence("y must hold one label per image", f"{int(np.isnan(y).sum()):,} times NaN"))
            if len(y) != len(X):
                raise InputError(sentence(f"labels must have the shape ({len(X)},), one per image", y.shape))
        else:
            X, y = validate_data(self, on_cpu(X), on_cpu(y), dtype=np.float64, ensure_min_samples=2)
            y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        weights, groups = checked_weights(sample_weight, len(y)), checked_groups(groups, len(y))
        counts = np.unique(y, return_counts=True)[1].tolist()
        recipe = self._recipe(X if is_image else None, counts, weighted=weights is not None)
        if weights is not None and not recipe.spec.takes_weights:
            do = "Leave it out, or use a recipe of a frozen encoder, such as quick."
            raise InputError(f"The recipe {recipe.method} cannot use sample_weight. {do}")
        used = np.arange(len(y)) if weights is None else np.flatnonzero(weights)  # No weight is as if left out.
        classes, codes = np.unique(y[used], return_inverse=True)
        if len(classes) < 2:
            if recipe.spec.needs_rare or classes.dtype.kind not in "UO":
                do = 'Use recipe="few" with labels that are strings.'
                raise InputError(sentence("y must hold at least 2 classes", "1 class", do))
            classes = np.array([*classes.tolist(), UNUSUAL])
        names, codes = tuple(str(label) for label in classes), codes.astype(np.int64)
        rows = X.take(used) if is_image else X[used]
        if weights is not None:
            weights = weights[used]
        groups = None if groups is None else groups[used]
        samples = Samples(rows, codes, names, groups, weights).with_side(recipe)
        folds = self.folds if self.folds is not None else recipe.data.folds
        with threads(recipe.threads), flushed_denormals(recipe.fast):
            whole = recipe if folds is None else whole_recipe(recipe)
            if folds is not None:
                scores = out_of_fold(samples, whole, folds, verbose=self.verbose)
            trainer, state = train(samples, whole, verbose=self.verbose)
            if folds is not None:
                self._settle(trainer, recipe, scores, samples, classes)
        self.classes_ = classes
        set_size = recipe.data.image_size is not None or samples.side is not None
        self.resizes_ = set_size or recipe.augment.normalisation == "weights"
        self.model_, self.card_, self.history_ = trainer.model, trainer.card, state.history
        self.bank_ = familiar_images(trainer)
        return self

    def _settle(
        self,
        trainer: Trainer,
        recipe: Recipe,
        scores: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]],
        samples: Samples,
        classes: npt.NDArray[Any],
    ) -> None:
        """Calibrate the model and fit its rule on out-of-fold scores, and keep these scores as attributes."""
        (p, numbers), names, codes, groups = scores, trainer.card.classes, samples.codes, samples.groups
        rule, kind, prior = recipe.decision.rule, recipe.decision.calibration, settled_prior(recipe, samples.counts())
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
            "test_score": np.array([balanced_accuracy(codes[numbers == k], decided[numbers == k]) for k in folds]),
        }

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """Return probabilities (n, K), with columns in the order of ``classes_``. Raise ``RunError`` if not finite."""
        return self._probabilities(X).astype(np.float32)

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the class that the rule ``decide`` decides for."""
        probabilities = self._probabilities(X)
        labels: npt.NDArray[Any] = self.classes_[self.card_.decision.decide(probabilities)]
        return labels

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:
        """Return a score per class, (n, K); the highest is decided. With two classes, (n,): positive for the second."""
        probabilities = self._probabilities(X)
        scores = self.card_.decision.scores(probabilities)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_set(self, X: Any) -> list[npt.NDArray[Any]]:
        """Return the classes that each sample may be of, by the rule ``decide="sets:0.95"``.

        Each class is in the set of at least 95 % of its samples. With another rule, a set holds the predicted class.
        """
        probabilities = self._probabilities(X)
        return [self.classes_[held] for held in self.card_.decision.members(probabilities)]

    def typicality(self, X: Any) -> npt.NDArray[np.float64]:
        """Return the share of known samples that are less typical than each sample, (n,).

        It is a p-value: at most 1 % of samples like those of ``fit`` have a typicality of 0.01 or less. Raise
        ``RunError`` if the encoder was trained without held-out samples (``val``), which a comparison needs.
        """
        found = self._predict(X).typicality
        if found is None:
            do = "Fit with val=0.2, or use LopsidedClassifier."
            raise RunError(f"The estimator knows no samples to compare with. {do}")
        return found

    def transform(self, X: Any) -> npt.NDArray[np.float32]:
        """Return the encoder's features (n, f)."""
        return self._predict(X)[1]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the balanced accuracy: the mean recall over the classes in ``y``."""
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
        make_folder(folder)
        self.card_ = save_model(Path(folder), self.model_, save_bank(Path(folder), self.bank_, self.card_))
        atomic_write(Path(folder) / FILE_NAME, json.dumps(content, indent=2, default=plain) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str], device: str = "auto") -> Self:
        """Load a folder that ``save`` wrote, or a run folder. The classes of a run folder are strings."""
        model, card = load_model(Path(folder), pick_device(device))
        content = read_saved(Path(folder) / FILE_NAME)
        try:
            estimator = cls(**content.get("parameters", cls._of_card(card)))
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
        estimator.bank_ = load_bank(Path(folder), card)
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

    def _recipe(self, images: Images | None, counts: Sequence[int], *, weighted: bool = False) -> Recipe:
        """Return the recipe with the parameters of the estimator. Invalid parameters raise an error of the recipe.

        ``counts`` are the numbers of the classes, and ``weighted`` says whether samples have weights.
        """
        kind: Kind = "vector" if images is None else "image"
        own = {"decision.rule": self.decide, "encoder.views": self.tta, **self._changes(kind)}
        changes: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        changes |= {
            "seed": int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max)),
            "device": self.device,
            "threads": self.num_threads,
            "data.image_size": self.image_size,
            "data.columns": list(self.columns) if self.columns else None,
            # ``fit`` gets its samples as arguments.
            **{"data.test": 0.0, "data.source": None, "data.scenario": None, "data.held_out": False},
            **(self.settings or {}),
        }
        base = self._base(images, counts, weighted)
        if kind == "vector" and not base.spec.trains_encoder:  # Vectors are features already.
            changes |= {"encoder.name": IDENTITY, "encoder.weights": "none", "augment.normalisation": "source"}
            changes.setdefault("encoder.views", "none")  # Those of the recipe are meant for images.
        return base.override(**plain_numbers(changes))

    def _probabilities(self, X: Any) -> npt.NDArray[np.float64]:
        probabilities = self._predict(X).probabilities
        check_finite(probabilities)
        return probabilities

    def _predict(self, X: Any) -> Scored:
        check_is_fitted(self)
        X = images_or_vectors(X, [column.name for column in self.card_.beside])
        if isinstance(X, Images) != (self.card_.kind == "image"):
            got = "images" if isinstance(X, Images) else "vectors"
            raise InputError(sentence(f"X must hold {self.card_.kind}s, as in fit", got))
        if isinstance(X, Images):
            self._check_size(X)
        else:
            X = validate_data(self, on_cpu(X), dtype=np.float64, reset=False)
        inputs = inputs_for(self.card_, X)
        with threads(self.num_threads):
            # An engine of onnxruntime takes a moment to build, which a few images are not worth.
            engine = Engine(self.model_, self.card_.shape, fast=len(inputs) > _FEW)
            scorer = Scorer(
                self.model_, self.card_, engine=engine, cached="none", bank=self.bank_, batch_size=PREDICT_BATCH
            )
            return scorer.score(inputs)

    def _check_size(self, images: Images) -> None:
        """Raise if images have another size than in ``fit`` and the estimator does not resize images."""
        if self.resizes_:
            return
        fitted = self.card_.shape[1:]
        size = next((size for size in map(tuple, images.sizes().tolist()) if size != fitted), fitted)
        if size != fitted:
            must = f"X must hold images of {fitted[1]} x {fitted[0]} pixels, as in fit"
            do = "Resize the images, or fit with image_size, which resizes all images."
            raise InputError(sentence(must, f"{size[1]} x {size[0]}", do))


FILE_NAME = "estimator.json"
FORMAT = 3
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
