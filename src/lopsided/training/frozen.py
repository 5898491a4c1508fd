"""Classifiers and heads on the features of an encoder as it is, which are fitted and not trained in stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lopsided.errors import RunError
from lopsided.facts import cautions, notes
from lopsided.inference.feature_cache import cache_root
from lopsided.models.ensemble import average
from lopsided.models.machine import arrange
from lopsided.models.model import Model
from lopsided.recipe.views import AUTO, CANDIDATES, PLAIN, name_views
from lopsided.training.adapter import Joined, Rows, fit_adapter
from lopsided.training.built import Built
from lopsided.training.checkpoint import Facts
from lopsided.training.regression import Regression, fit_regression
from lopsided.training.stage_kinds import objective_of

UPRIGHT = 0.8
"""If inner folds give less than this share of the log loss with fewer views, the classes depend on these views."""
Features = npt.NDArray[np.float32]


def regress(built: Built, *, cached: bool = True, strength: float | None = None, told: bool = True) -> float:
    """Fit the classifier on the features of the encoder as it is. The first rank fits it for all ranks.

    ``cached`` is false for an encoder that no other run has. ``strength`` replaces that of the recipe. ``told`` is
    false if the same regression is fitted again later. Return the strength of the regression.
    """
    views = built.model.views
    auto = built.recipe.encoder.views == AUTO and views != PLAIN
    scored = strength is None and built.recipe.regression.strength is None and told
    checked = scored and not auto and len(views) > 1 and PLAIN[0] in views
    sets: Sequence[Sequence[str]] = CANDIDATES if auto else (views, PLAIN) if checked else (views,)
    features = _training_features(built, sets, cached=cached)
    found: list[tuple[int, Regression]] = []

    def fit() -> dict[str, Tensor]:
        place, fitted = _choose(built, features) if auto else (0, _fit(built, features[0], strength))
        if checked:
            _check_views(built, fitted, features[1])
        found.append((place, fitted))
        return {"weight": torch.from_numpy(fitted.weight).float(), "bias": torch.from_numpy(fitted.bias).float()}

    state = built.ranks.spread(fit)
    built.model.classifier.load_state_dict(state)
    place, used = built.ranks.told(lambda: (found[0][0], found[0][1].strength))
    if auto:
        built.take_views(sets[place])
    for _, fitted in found:
        if strength is None and told:
            _tell_choice(built, fitted)
    chosen: float = used
    return chosen


def choose_views(losses: Sequence[float], least: float = UPRIGHT) -> int:
    """Return the place of the first log loss that no later one is below ``least`` times of.

    >>> choose_views([0.31, 0.30, 0.30]), choose_views([0.69, 0.10, 0.11]), choose_views([0.69, 0.69, 0.10])
    (0, 1, 2)
    """
    return next(i for i, loss in enumerate(losses) if all(other >= least * loss for other in losses[i + 1 :]))


def _choose(built: Built, sets: Sequence[Features]) -> tuple[int, Regression]:
    """Fit a regression on the features of the first set of views that no later set is much better than.

    The sets are in the order of ``CANDIDATES``. A mean over views loses what tells an image from its mirror image, and
    gains by less noise. The gain is small, so that only a large loss speaks against the views.
    """
    names = [name_views(views) for views in CANDIDATES]
    first = _fit(built, sets[0], scored=True)
    if not first.losses:
        built.log.fact(notes.unchosen_views(names[0]))
        return 0, first
    found = [first, *(_fit(built, features, scored=True) for features in sets[1:])]
    losses = [_best(fitted) for fitted in found]
    chosen = choose_views(losses)
    built.log.event("views", chosen=names[chosen], losses=dict(zip(names, losses, strict=True)))
    built.log.fact(notes.chosen_views(names[chosen], dict(zip(names, losses, strict=True))))
    return chosen, found[chosen]


def _best(fitted: Regression) -> float:
    return min(loss for _, loss in fitted.losses)


def _fit(built: Built, features: Features, strength: float | None = None, *, scored: bool = False) -> Regression:
    """Fit a regression on features of the training images, as the recipe says."""
    settings, train = built.recipe.regression, built.prepared.train
    return fit_regression(
        features,
        train.labels,
        built.num_classes,
        groups=train.groups,
        weighted=built.recipe.classifier.loss.name == "weighted-ce",
        strength=settings.strength if strength is None else strength,
        scored=scored,
        folds=settings.folds,
        seed=built.recipe.seed,
        importance=built.importance,
    )


def _check_views(built: Built, fitted: Regression, alone: Features) -> None:
    """Warn if the images ``alone`` tell the classes apart much better than the mean over their views.

    Then the classes depend on left and right or up and down, which the mean does not know: arrows, digits, texts.
    """
    if not fitted.losses:
        return
    losses = [_best(fitted), _best(_fit(built, alone))]
    if choose_views(losses):
        # With encoder.views alone, fit takes quick.
        recipe = "--recipe thorough " if len(built.recipe.encoder.spec.parts) > 1 else ""
        advice = f"{recipe}--views {AUTO if built.recipe.method == 'frozen' else 'none'}"
        built.log.fact(cautions.directed_classes(losses[1], losses[0], advice))


def blend(built: Built) -> None:
    """Average the logits of a regression on the features of the trained encoder and of the pretrained encoder.

    The features of the trained encoder separate the images that it was trained on, so inner folds cannot choose the
    strength of their regression. It is that of the other regression.
    """
    tuned, prepared, share = built.model, built.prepared, built.recipe.fine_tune.blend
    encoder, features = built.untrained()
    head = built.head(built.recipe.classifier.loss, features)
    frozen = Model(encoder, head, prepared.mean, prepared.std, views=tuned.views, scaling=tuned.scaling)
    frozen.to(built.device)
    if built.recipe.fast:
        arrange(frozen.encoder, built.device, prepared.shape)
    built.replace_model(frozen)
    strength = regress(built)
    built.replace_model(tuned)
    regress(built, cached=False, strength=strength)
    both, built.card = average([(frozen, built.card), (tuned, built.card)], shares=(share, 1 - share))
    built.replace_model(both)
    built.log.fact(notes.blend(share))


def adapt(built: Built) -> list[Facts]:
    """Train the heads and fit the classifier. The first rank does it for all ranks. Return the facts of epochs."""
    recipe, train = built.recipe, built.prepared.train
    (features,) = _training_features(built, [built.model.views])
    adapter, steps = built.model.adapter, -(-len(train) // recipe.encoder_training.batch_size)
    assert adapter is not None
    found: list[Joined] = []

    def fit() -> dict[str, Tensor]:
        built.log.stage("adapter", recipe.encoder_training.epochs, steps)
        joined = fit_adapter(
            adapter,
            Rows(features, train.labels, train.groups, built.num_classes, built.importance),
            recipe,
            lambda labels: objective_of(built, recipe.encoder_training.loss, labels, recipe.adapter.out),
            device=built.device,
            count=lambda done, total: built.log.count("heads", done, total),
        )
        found.append(joined)
        linear = {"weight": joined.linear.weight, "bias": joined.linear.bias}
        state = {f"classifier.{name}": torch.from_numpy(value).float() for name, value in linear.items()}
        return state | {f"adapter.{name}": value for name, value in adapter.state_dict().items()}

    state = built.ranks.spread(fit)
    for name in ("adapter", "classifier"):
        own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        built.model.get_submodule(name).load_state_dict(own)
    history: list[Facts] = built.ranks.told(lambda: found[0].history)
    for index, facts in enumerate(history, start=1):
        built.log.epoch(index, facts)
    for joined in found:
        if joined.regression is not None:
            _tell_choice(built, joined.regression)
        built.log.fact(notes.heads(recipe.adapter.heads, joined.num_folds, recipe.adapter.blend))
    return history


def _training_features(built: Built, sets: Sequence[Sequence[str]], *, cached: bool = True) -> list[Features]:
    """Return the features of the training images by the encoder as it is, for each set of views."""
    train = built.prepared.train
    built.model.eval()
    if not cached:
        train = replace(train, digests=None)
    elif built.prepared.kind == "image":
        root, views, encoder = cache_root(), built.model.views, built.recipe.encoder
        engine = built.engine.name.split()[0]
        averaged = [] if views == PLAIN else list(views)
        cache = None if root is None else str(root)
        built.log.fact(notes.features(engine, encoder.name, averaged, encoder.views == AUTO, cache))
    found = built.frozen_means(train, "features of training images", sets)
    if not all(np.isfinite(features).all() for features in found):
        raise RunError("The encoder returned NaN or infinite features. Use other weights (encoder.weights).")
    for place, features in enumerate(found):  # One at a time, because many images need much memory.
        found[place] = built.engine.scale(features)
    return found


def _tell_choice(built: Built, fitted: Regression) -> None:
    built.log.event("regression", strength=fitted.strength, folds=fitted.folds, losses=fitted.losses)
    if built.recipe.regression.strength is not None:
        built.log.fact(notes.given_strength(fitted.strength))
    elif fitted.losses:
        built.log.fact(notes.chosen_strength(fitted.strength, len(fitted.losses), fitted.folds))
    else:
        built.log.fact(notes.usual_strength(fitted.strength))
