"""How long a run on frozen features will take: told before it begins, and again when its pace is known.

Features are timed on some of the images (``features``). The other seconds are those of an idle machine with two cores
(benchmarks/times.py), times what this machine takes for a small regression now, relative to that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from lopsided.data.images import Vectors
from lopsided.data.sources import Source
from lopsided.errors import LopsidedError
from lopsided.recipe import Recipe, named_recipe
from lopsided.recipe.methods.frozen import averages
from lopsided.recipe.views import AUTO, CANDIDATES

TIMED = 100
"""With fewer images, nobody waits long enough to ask for the time."""
START_SECONDS, FOLD_SECONDS = 3.0, 0.3
"""Seconds of a run beside its trainings: start, results, labels, speed; and of one training beside its regressions."""
IMAGE_SECONDS, CLASS_SECONDS = 8e-4, 1e-4
"""Seconds of a classifier, or of a choice of views, for each image, and for each image and class."""
FEW_IMAGES, GROWTH = 300, 0.35
"""From so many images on, the seconds of each grow with this power of their number: no cache holds them all."""
FEW_SECONDS = 8e-7
"""Seconds that a class of few images adds to a training, for each class and times the square of the number of images:
its classifier has regressions on each kind of features, and its inner folds are drawn several times."""
DISTANCE_SECONDS, MOST_DISTANCE_SECONDS = 1.5e-6, 1.6e-3
"""Seconds of the distances of the training images from each other, times the square of their number; and the most of
them for each image, because the principal axes are no more than the columns."""
PLACES_SECONDS, PLACE_SECONDS, FEW_PLACED = 0.07, 2.2e-4, 256
"""Seconds of the distances by positions, for each of five fits without some images, and for each fit and image; below
so many images there are ten fits."""
FEATURE_SECONDS = 0.02
"""Seconds of one pass of an image through an encoder: a rough guide."""
TRIAL = (200, 1000)
"""Rows and columns of the regression that is timed."""
TRIAL_SECONDS = 0.04


@dataclass(frozen=True)
class Expected:
    """The seconds of the parts of a run: features of its recipe and of quick, one training, all of quick, the rest."""

    features: float
    compared_features: float
    trainings: int
    training: float
    comparison: float
    rest: float

    @property
    def all_features(self) -> float:
        """The seconds for all features."""
        return self.features + self.compared_features

    @property
    def seconds(self) -> float:
        """The seconds of the run."""
        return self.all_features + self.trainings * self.training + self.comparison + self.rest

    def left(self, done: int, seconds: float) -> float:
        """Return the seconds that are left after some trainings with cached features, of which the last took these."""
        pace = seconds / self.training
        return (self.trainings - done) * seconds + self.compared_features + pace * (self.comparison + self.rest)


def fold_seconds(images: int, classes: int, regressions: int = 1, *, few: bool = False) -> float:
    """Return about how long one training takes on an idle machine if its features are cached.

    ``few`` says that it has few images of a class (``has_few``).
    """
    growth: float = max(images / FEW_IMAGES, 1.0) ** GROWTH
    more = FEW_SECONDS * classes * images**2 if few else 0.0
    return FOLD_SECONDS + regressions * (IMAGE_SECONDS + CLASS_SECONDS * classes) * images * growth + more


def distance_seconds(images: int) -> float:
    """Return about how long the distances of training images take, which several fits without some of them measure."""
    fits = 10 if images < FEW_PLACED else 5
    whole = min(DISTANCE_SECONDS * images, MOST_DISTANCE_SECONDS) * images
    return whole + fits * (PLACES_SECONDS + PLACE_SECONDS * images)


def has_few(recipe: Recipe, source: Source) -> bool:
    """Return whether trainings have so few images or groups of a class that the mean of regressions is over more."""
    from lopsided.training.regression import FEW, rarest

    return _trained(recipe) * rarest(source.labels, source.groups) < FEW


def _trained(recipe: Recipe) -> float:
    """Return the share of the images that trainings have."""
    folds = recipe.data.folds
    return 1 - recipe.data.test - recipe.data.val if folds is None else 1 - 1 / folds


def slowness() -> float:
    """Return how many times as long as on an idle machine with two cores a small regression takes here and now."""
    from lopsided.training.regression import fit_regression

    rng = np.random.default_rng(0)
    labels = np.arange(TRIAL[0]) % 2
    features = rng.normal(size=TRIAL) + labels[:, None] * 0.1
    fit_regression(features[:50], labels[:50], 2)  # Loads what it needs.
    begin = perf_counter()
    for _ in range(4):
        fit_regression(features, labels, 2)
    return (perf_counter() - begin) / 4 / TRIAL_SECONDS


def expect(recipe: Recipe, opened: tuple[Source, Source | None]) -> Expected | None:
    """Return how long a run will take, or None if that cannot be told or nobody asks."""
    from lopsided.runs.features import feature_seconds
    from lopsided.training.baseline import is_quick

    source = opened[0]
    if not recipe.spec.shares_features or isinstance(source.images, Vectors) or len(source) < TIMED:
        return None
    quick, lacks_class = named_recipe("quick"), not min(source.counts().values())
    is_compared = recipe.compare_quick and not is_quick(recipe) and not lacks_class
    # Those of quick are among the features of few, in one cache.
    is_same = recipe.encoder.spec.has_features_of(quick.encoder.spec) and recipe.data.image_size is None
    try:
        own = sum(feature_seconds(recipe, images) for images in opened if images)
        others = sum(feature_seconds(quick, images) for images in opened if images and is_compared and not is_same)
    except LopsidedError:  # The run itself will say what is wrong.
        return None
    folds = 0 if recipe.data.folds is None else recipe.data.folds * recipe.data.repeats
    size, slow = (len(source), len(source.classes)), slowness()
    regressions = len(CANDIDATES) if recipe.encoder.views == AUTO else 1
    few, method = has_few(recipe, source) and not lacks_class, named_recipe("few").method
    is_mean, distance = recipe.method in (quick.method, method) and averages(recipe), 0.0
    if recipe.method == method:  # It also has a regression with the distance, and none without rare images.
        distance, regressions = distance_seconds(round(_trained(recipe) * len(source))), 0 if lacks_class else 2
    return Expected(
        own,
        others,
        folds + 1,
        slow * (distance + fold_seconds(*size, regressions, few=few and is_mean)),
        slow * max(folds, 1) * fold_seconds(*size, few=few) if is_compared else 0.0,
        slow * START_SECONDS,
    )
