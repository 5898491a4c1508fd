"""Frozen: regressions on the features of an encoder as it is."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from lopsided.facts import cautions, notes
from lopsided.recipe import named_recipe
from lopsided.recipe.methods.frozen import averages
from lopsided.recipe.views import AUTO, CANDIDATES, PLAIN, name_views
from lopsided.training.averaged import fit_averaged
from lopsided.training.checkpoint import State
from lopsided.training.methods.trainer import Features, FeatureTrainer, Trainer
from lopsided.training.regression import Regression, fit_regression

UPRIGHT = 0.8
"""If inner folds give less than this share of the log loss with fewer views, the classes depend on these views."""


class FrozenTrainer(FeatureTrainer):
    """Fits the mean of regressions, or one logistic regression if the recipe says how."""

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the classifier, and choose the views if the recipe asks for that."""
        regress(self, averaged=True)
        state.seconds = perf_counter() - self.begin


def regress(
    trainer: Trainer, *, cached: bool = True, strength: float | None = None, told: bool = True, averaged: bool = False
) -> float:
    """Fit the classifier on the features of the encoder as it is. The first rank fits it for all ranks.

    ``cached`` is false for an encoder that no other run has. ``strength`` replaces that of the recipe. ``told`` is
    false if the same regression is fitted again later. With ``averaged``, the classifier is the mean of several
    regressions, unless the recipe has a strength or weighs classes. Return the strength of the regression.
    """
    views = trainer.model.views
    auto = trainer.recipe.encoder.views == AUTO and views != PLAIN
    scored = strength is None and trainer.recipe.regression.strength is None and told
    checked = scored and not auto and len(views) > 1 and PLAIN[0] in views
    sets: Sequence[Sequence[str]] = CANDIDATES if auto else (views, PLAIN) if checked else (views,)
    features = trainer.training_features(sets, cached=cached)
    found: list[tuple[int, Regression]] = []

    def fit() -> dict[str, Tensor]:
        place, fitted = _choose(trainer, features) if auto else (0, _fit(trainer, features[0], strength))
        if checked:
            _check_views(trainer, fitted, features[1])
        if averaged and averages(trainer.recipe):
            fitted = _average(trainer, features[place])
        found.append((place, fitted))
        return {"weight": torch.from_numpy(fitted.weight).float(), "bias": torch.from_numpy(fitted.bias).float()}

    state = trainer.ranks.spread(fit)
    trainer.model.classifier.load_state_dict(state)
    place, used = trainer.ranks.told(lambda: (found[0][0], found[0][1].strength))
    if auto:
        trainer.take_views(sets[place])
    for _, fitted in found:
        if strength is None and told:
            tell_choice(trainer, fitted)
    chosen: float = used
    return chosen


def choose_views(losses: Sequence[float], least: float = UPRIGHT) -> int:
    """Return the place of the first log loss that no later one is below ``least`` times of.

    >>> choose_views([0.31, 0.30, 0.30]), choose_views([0.69, 0.10, 0.11]), choose_views([0.69, 0.69, 0.10])
    (0, 1, 2)
    """
    return next(i for i, loss in enumerate(losses) if all(other >= least * loss for other in losses[i + 1 :]))


def _choose(trainer: Trainer, sets: Sequence[Features]) -> tuple[int, Regression]:
    """Fit a regression on the features of the first set of views that no later set is much better than.

    The sets are in the order of ``CANDIDATES``. A mean over views loses what tells an image from its mirror image, and
    gains by less noise. The gain is small, so that only a large loss speaks against the views.
    """
    names = [name_views(views) for views in CANDIDATES]
    first = _fit(trainer, sets[0], scored=True)
    if not first.losses:
        trainer.log.fact(notes.unchosen_views(names[0]))
        return 0, first
    found = [first, *(_fit(trainer, features, scored=True) for features in sets[1:])]
    losses = [_best(fitted) for fitted in found]
    chosen = choose_views(losses)
    trainer.log.event("views", chosen=names[chosen], losses=dict(zip(names, losses, strict=True)))
    trainer.log.fact(notes.chosen_views(names[chosen], dict(zip(names, losses, strict=True))))
    return chosen, found[chosen]


def _best(fitted: Regression) -> float:
    return min(loss for _, loss in fitted.losses)


def _fit(trainer: Trainer, features: Features, strength: float | None = None, *, scored: bool = False) -> Regression:
    """Fit a regression on features of the training images, as the recipe says."""
    settings, train = trainer.recipe.regression, trainer.prepared.train
    return fit_regression(
        features,
        train.labels,
        trainer.num_classes,
        groups=train.groups,
        weighted=trainer.recipe.classifier.loss.name == "weighted-ce",
        strength=settings.strength if strength is None else strength,
        scored=scored,
        folds=settings.folds,
        seed=trainer.recipe.seed,
        importance=trainer.importance,
        weights=train.weights,
    )


def _average(trainer: Trainer, features: Features) -> Regression:
    """Fit the mean of regressions on all features and on each kind of them."""
    train, layout = trainer.prepared.train, trainer.model.layout
    return fit_averaged(
        features,
        train.labels,
        trainer.num_classes,
        groups=train.groups,
        folds=trainer.recipe.regression.folds,
        seed=trainer.recipe.seed,
        importance=trainer.importance,
        weights=train.weights,
        parts=[] if layout is None else layout.kinds(trainer.card.num_beside),
    )


def _check_views(trainer: Trainer, fitted: Regression, alone: Features) -> None:
    """Warn if the images ``alone`` tell the classes apart much better than the mean over their views.

    Then the classes depend on left and right or up and down, which the mean does not know: arrows, digits, texts.
    """
    if not fitted.losses:
        return
    losses = [_best(fitted), _best(_fit(trainer, alone))]
    if choose_views(losses):
        # With encoder.views alone, fit takes quick, which has another size.
        large = trainer.recipe.data.image_size == named_recipe("thorough").data.image_size
        recipe = "--recipe thorough " if large else ""
        advice = f"{recipe}tta={AUTO if trainer.recipe.spec.chooses_views else 'none'}"
        trainer.log.fact(cautions.directed_classes(losses[1], losses[0], advice))


def tell_choice(trainer: Trainer, fitted: Regression) -> None:
    """Log the strength of a regression, and how it was chosen."""
    trainer.log.event("regression", strength=fitted.strength, folds=fitted.folds, losses=fitted.losses)
    if trainer.recipe.regression.strength is not None:
        trainer.log.fact(notes.given_strength(fitted.strength))
    elif fitted.losses:
        trainer.log.fact(notes.chosen_strength(fitted.strength, len(fitted.losses), fitted.folds))
    else:
        trainer.log.fact(notes.usual_strength(fitted.strength))
