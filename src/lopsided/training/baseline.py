"""Comparison of a model with a baseline on the same images, and the baseline of the recipe ``quick``.

The baseline of most recipes is the recipe ``quick``. It trains on the training images of the run and classifies the
run's validation and test images. Its features are cached, so only the first run on these images computes them. The
recipe ``quick`` itself is compared with linear discriminant analysis of very small images, which takes about a second.
The number of images is bounded, and the random numbers are those of the baseline, so it does not change the run. The
same run always gets the same baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lopsided.data.images import Vectors
from lopsided.data.inputs import Indices, Part, Prepared, prepare
from lopsided.data.sources import Source
from lopsided.data.splits import Splits
from lopsided.errors import LopsidedError
from lopsided.evaluation.calibration import HeldBack, prior_of
from lopsided.evaluation.decision import resolve
from lopsided.evaluation.intervals import Estimate, paired_shares_interval
from lopsided.evaluation.metrics import confusion_figures, evaluate, independent_sizes
from lopsided.facts import Fact, cautions, notes
from lopsided.facts.log import Log, Reporter
from lopsided.inference.scorer import SmallImages
from lopsided.models.pretrained import preprocessing_of
from lopsided.recipe import Recipe, named_recipe
from lopsided.recipe.rules import parse_rule
from lopsided.seeds import derive_seed
from lopsided.training.checkpoint import Checkpoint, State
from lopsided.training.methods import make_trainer

MOST_TRAIN, MOST_EVALUATED, LEAST_EVALUATED = 10_000, 2_000, 30
"""Numbers of training images and of evaluated images of the recipe ``quick``. Larger splits are sampled by class."""
MOST_SMALL = 2_000
"""Maximum number of training images, and of evaluated images, of the baseline of small images."""
MOST_CLASSES = 50
LEAST_TRAIN, LEAST_JUDGED, LEAST_PER_CLASS = 100, 60, 5
"""With fewer training images, evaluated images, or evaluated images of a class, the comparison would be noise."""
LEVEL = 0.95
"""Level of the interval of the difference. A difference that chance can explain is no reason for a warning."""
_TAKE_QUICK = "Use the recipe quick (--recipe quick), or change this recipe."
_SHRINKAGE = 0.1
"""Weight of a round covariance beside the covariance of the pixels, which few images determine badly."""


@dataclass(frozen=True)
class Compared:
    """The balanced accuracy of the model and of the baseline on the same ``number`` images.

    ``difference`` is model - baseline with a paired interval. ``enough`` is False if there are too few images for a
    warning.
    """

    model: float
    baseline: float
    number: int
    difference: Estimate
    enough: bool = True

    def cautions(self, split: str, baseline: str, advice: str = _TAKE_QUICK) -> list[Fact]:
        """Return a caution if the interval of the difference is below 0. See ``cautions.below_baseline``."""
        if not (self.enough and self.difference.high < 0):
            return []
        low, high = self.difference.low, self.difference.high
        return [cautions.below_baseline(split, baseline, self.model, self.baseline, low, high, LEVEL, advice)]


def compare_answers(
    labels: Indices, model: Indices, other: Indices, num_classes: int, groups: npt.NDArray[np.str_] | None = None
) -> Compared:
    """Compare the classifications of a model and of a baseline of the same images.

    Images of one group count as copies of each other, as in the intervals of metrics.
    """
    right, also = model == labels, other == labels
    won, lost, sizes = (
        np.bincount(labels[chosen], minlength=num_classes).astype(np.float64)
        for chosen in (right & ~also, also & ~right, np.ones_like(right))
    )
    held = sizes > 0
    alone = independent_sizes(labels, groups, num_classes)[held] / sizes[held]
    return Compared(
        _uwa(labels, model, num_classes),
        _uwa(labels, other, num_classes),
        len(labels),
        paired_shares_interval(won[held] * alone, lost[held] * alone, sizes[held] * alone, LEVEL),
        enough=len(labels) >= LEAST_JUDGED and bool(sizes.min() >= LEAST_PER_CLASS),
    )


def compare(
    prepared: Prepared,
    judged: Part,
    predicted: npt.NDArray[np.int64],
    seed: int,
    small: SmallImages | None = None,
) -> Compared | None:
    """Compare the predictions of a model with the baseline. Return None if there are too few or unsuitable images.

    ``predicted`` holds one class per image of ``judged``. Large splits are sampled. ``small`` holds the small versions
    of images that are known already.
    """
    num_classes = len(prepared.classes)
    counts = np.bincount(judged.labels, minlength=num_classes)
    enough = len(prepared.train) >= LEAST_TRAIN and len(judged) >= LEAST_JUDGED and counts.min() >= LEAST_PER_CLASS
    if prepared.kind != "image" or num_classes > MOST_CLASSES or not enough:
        return None
    train = sample(prepared.train.labels, MOST_SMALL, derive_seed(seed, "baseline", "train"))
    rows = sample(judged.labels, MOST_SMALL, derive_seed(seed, "baseline", "judged"))
    small = small or SmallImages(prepared.shape, prepared.image_size)
    known, new = (small.of(*images).astype(np.float64) / 255 for images in ((prepared.train, train), (judged, rows)))
    answers = _linear(known, prepared.train.labels[train], new)
    groups = None if judged.groups is None else judged.groups[rows]
    return compare_answers(judged.labels[rows], predicted[rows], answers, num_classes, groups)


def sample(labels: npt.NDArray[np.int64], most: int, seed: int) -> Indices:
    """Return all rows, or at most about ``most`` rows with the same share of each class and at least five of each."""
    if len(labels) <= most:
        return np.arange(len(labels))
    generator = np.random.default_rng(seed)
    share = most / len(labels)
    drawn = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        drawn.append(generator.permutation(rows)[: max(round(share * len(rows)), LEAST_PER_CLASS)])
    return np.sort(np.concatenate(drawn))


def _linear(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.int64], queries: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Classify queries by linear discriminant analysis with equal priors and a shrunken covariance.

    It solves one linear system, however many classes there are. Logistic regression takes several times as long.
    """
    classes, codes = np.unique(y, return_inverse=True)
    means = np.stack([x[codes == code].mean(axis=0) for code in range(len(classes))])
    inner = x - means[codes]
    covariance = inner.T @ inner / len(x)
    scale = float(np.trace(covariance)) / len(covariance) or 1.0
    covariance = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * scale * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, means.T)
    scores = queries @ weights - 0.5 * (means.T * weights).sum(axis=0)
    answers: npt.NDArray[np.int64] = classes[scores.argmax(axis=1)]
    return answers


def _uwa(truth: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], num_classes: int) -> float:
    codes = truth * num_classes + predicted
    confusion = np.bincount(codes, minlength=num_classes**2).reshape(num_classes, num_classes)
    return confusion_figures(confusion)["uwa"]


@dataclass(frozen=True, eq=False)
class Answers:
    """The classifications of one split. ``rows`` are the places of the classified images in the split."""

    rows: Indices
    labels: Indices
    probabilities: npt.NDArray[np.float64]
    predicted: Indices


def is_quick(recipe: Recipe) -> bool:
    """Return whether a recipe computes the same as ``quick`` on the same training images."""
    base = named_recipe("quick")
    return (
        recipe.method == base.method
        and recipe.encoder == base.encoder
        and recipe.regression == base.regression
        and recipe.classifier.loss == base.classifier.loss
        and recipe.data.image_size is None
    )


def figures_of(
    answers: Answers, compared: Compared, classes: Sequence[str], groups: npt.NDArray[np.str_] | None, seed: int
) -> dict[str, Any]:
    """Return the figures of the recipe ``quick`` on one split, as in ``metrics.json``."""
    figures = evaluate(
        answers.labels, answers.probabilities, answers.predicted, classes=classes, seed=seed, groups=groups
    ).to_dict()["figures"]
    difference = compared.difference
    return {
        "num_images": compared.number,
        "uwa": figures["uwa"],
        "auroc": figures.get("auroc"),
        "model_uwa": compared.model,
        "difference": {"value": difference.value, "low": difference.low, "high": difference.high},
    }


def classify_by_quick(
    recipe: Recipe,
    source: Source,
    splits: Splits,
    digests: Sequence[str],
    device: torch.device,
    log: Log,
    *,
    told: bool = True,
) -> dict[str, Answers]:
    """Fit the recipe ``quick`` on the training images. Return its classifications of the other splits.

    It decides by the rule of ``recipe``, so that the two models differ in nothing else. A rule that is fitted is fitted
    to its own scores of the validation images; without such images it decides by ``balanced``. The result is empty if
    there are too few images, or if the recipe cannot be used on these images. A note gives the time, unless ``told`` is
    false.
    """
    most = {"train": MOST_TRAIN, "val": MOST_EVALUATED, "test": MOST_EVALUATED}
    few = {
        name: sample(source.labels[rows], most[name], derive_seed(recipe.seed, "default", name))
        for name, rows in splits.parts()
    }
    names = [name for name in ("val", "test") if len(few[name]) >= LEAST_EVALUATED]
    if len(few["train"]) < LEAST_TRAIN or not names or isinstance(source.images, Vectors):
        return {}
    begin = perf_counter()
    base = named_recipe("quick").override(seed=recipe.seed, threads=recipe.threads, fast=recipe.fast)
    none = np.empty(0, dtype=np.int64)
    parts = {name: rows[few[name]] if name in ("train", *names) else none for name, rows in splits.parts()}
    try:
        pixels = preprocessing_of(base.encoder.name, base.encoder.weights)
        prepared, _ = prepare(base, source, Splits(**parts), pixels=pixels, digests=digests)
        trainer = make_trainer(base, prepared, device, Log(None, _Counts(log)), Checkpoint(None))
        trainer.build()
        trainer.run(State("", "", base.method), {})
        prior, parsed = prior_of(prepared.counts()), parse_rule(recipe.decision.rule)
        held, found = None, {}
        for name in names:  # The validation images come first.
            part = prepared.val if name == "val" else prepared.test
            assert part is not None
            p = trainer.score(part)[0]
            if name == "val":
                held = HeldBack(p, part.labels, part.groups)
            rule = "balanced" if parsed.fitted and held is None else parsed
            decision = resolve(rule, prepared.classes, prior, held)
            found[name] = Answers(few[name], part.labels, p, decision.decide(p))
    except LopsidedError as error:  # A comparison must not end a run that is otherwise finished.
        log.fact(notes.quick_not_compared(str(error)))
        return {}
    if told:
        log.fact(notes.quick_compared(perf_counter() - begin, "split"))
    return found


_LABEL = "features for the recipe quick, for comparison"


class _Counts(Reporter):
    """Passes on the counts of images only: the notes of the comparison are not notes of the run."""

    def __init__(self, inner: Reporter) -> None:
        self._inner = inner

    def count(self, label: str, done: int, total: int) -> None:
        """Call the other reporter."""
        self._inner.count(_LABEL, done, total)
