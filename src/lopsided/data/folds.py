"""Folds: every image is a test image of one fold, so that no rare image stays untested."""

from __future__ import annotations

import numpy as np

from lopsided.data.sources import Source
from lopsided.data.splits import How, Indices, Splits, split
from lopsided.errors import DataError, InputError, sentence
from lopsided.recipe import Recipe
from lopsided.recipe.rules import parse_rule
from lopsided.seeds import derive_seed

ATTEMPTS = 20
"""How often folds by group are drawn if a class is missing in a fold, which groups with several classes can cause."""


def fold_recipes(recipe: Recipe) -> list[Recipe]:
    """Return the recipe of each fold, over all repeats. A recipe does not depend on the number of repeats.

    A fold decides by ``balanced`` if the rule is fitted, because such a rule is fitted to the scores of all folds.

    >>> [each.data.fold for each in fold_recipes(Recipe().override(**{"data.folds": 2, "data.repeats": 2}))]
    [1, 2, 3, 4]
    """
    number = (recipe.data.folds or 0) * recipe.data.repeats
    same = {"data.repeats": 1, "final": "auto", "compare_quick": False, "decision.rule": plain_rule(recipe)}
    return [recipe.vouched({"data.fold": fold, **same}) for fold in range(1, number + 1)]


def whole_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the model that is trained on all images, without a test split."""
    changes = {"data.folds": None, "data.repeats": 1, "data.test": 0.0, "final": "auto", "compare_quick": False}
    return recipe.vouched({**changes, "decision.rule": plain_rule(recipe)})


def plain_rule(recipe: Recipe) -> str:
    """Return the rule of a recipe, or ``balanced`` if the rule needs held-back images."""
    return "balanced" if parse_rule(recipe.decision.rule).fitted else recipe.decision.rule


def most_folds(source: Source, how: How) -> int:
    """Return the largest possible number of folds: each fold needs an image of every class, or a group of every class.

    >>> from lopsided.data.sources import source_from_arrays
    >>> most_folds(source_from_arrays(np.zeros((5, 2, 2), np.uint8), [0, 0, 0, 1, 1]), "stratified")
    2
    """
    return min(_units(source, how).values())


def fold_numbers(source: Source, *, how: How, folds: int, seed: int, repeat: int = 0) -> Indices:
    """Return the fold of each image, from 0 to ``folds`` - 1.

    - ``stratified``: the folds differ by at most one image, in total and in each class.
    - ``group``: all images of a group are in one fold. Groups are assigned one by one, starting with the groups that
      hold the largest shares of their classes. Each group goes to the fold that is then least full in the classes of
      the group.
    - ``random``: the folds differ by at most one image in total; class proportions are random.

    The folds depend on the images, ``folds``, ``seed`` and ``repeat`` alone, so that two recipes with the same data and
    seed have the same folds. ``repeat`` numbers the independent draws of one seed. Every fold holds every class, except
    with ``random``; an error is raised if that is not possible.
    """
    if how == "given":
        raise DataError(
            f"{source.name} defines its own splits, so folds cannot be drawn. Leave out folds to use its splits, or "
            "ignore them with split=stratified or split=group."
        )
    if how == "group" and source.groups is None:
        do = "Name the group column with --group, or use stratified folds."
        raise DataError(f"Folds by group need groups, but {source.name} has none. {do}")
    _check_number(source, how, folds)
    generator = np.random.default_rng(derive_seed(seed, "folds", repeat))
    if how == "group":
        for _ in range(ATTEMPTS):
            found = _by_group(source, folds, generator)
            if not _lacking(source, found, folds):
                return found
        fold, name = _lacking(source, found, folds)[0]
        do = "Use fewer folds (--folds)."
        raise DataError(f"Fold {fold + 1} of {folds} has no image of {name!r} of {source.name}. {do}")
    order = generator.permutation(len(source))
    if how == "stratified":
        order = order[np.argsort(source.labels[order], kind="stable")]
    numbers = np.empty(len(source), dtype=np.int64)
    numbers[order] = np.arange(len(source)) % folds
    return numbers


def fold_splits(source: Source, *, how: How, folds: int, fold: int, val: float, seed: int) -> Splits:
    """Split a source for one fold: its images are the test split, and ``val`` of all images are taken from the others.

    ``fold`` counts from 1 over all repeats: with five folds, fold 6 is the first fold of the second repeat.
    """
    if fold < 1:
        raise InputError(sentence("data.fold must be >= 1", fold))
    if val + 1 / folds >= 1:
        must = f"data.val must be below {1 - 1 / folds:.3g} with {folds} folds, to leave images for training"
        raise InputError(sentence(must, val))
    repeat, number = divmod(fold - 1, folds)
    numbers = fold_numbers(source, how=how, folds=folds, seed=seed, repeat=repeat)
    test, rest = np.flatnonzero(numbers == number), np.flatnonzero(numbers != number)
    remaining = source.subset(rest)
    short = [name for name, units in _units(remaining, how).items() if units < (2 if val else 1)]
    if short:
        what = "groups" if how == "group" else "images"
        need = "training and validation" if val else "training"
        do = "Set data.val to 0 (val=0)" if val else "Use more folds"
        raise DataError(
            f"{source.name} has too few {what} of {short[0]!r} for {folds} folds: too few remain for {need} beside "
            f"fold {number + 1}. {do}, or add images."
        )
    inner = split(remaining, how=how, val=val * len(source) / len(rest), test=0.0, seed=derive_seed(seed, "fold", fold))
    return Splits(rest[inner.train], rest[inner.val], test)


def _units(source: Source, how: How) -> dict[str, int]:
    """Return the number of images of each class, or of groups that hold an image of the class."""
    if how != "group" or source.groups is None:
        return source.counts()
    rows = {name: source.labels == label for label, name in enumerate(source.classes)}
    return {name: len(np.unique(source.groups[own])) for name, own in rows.items()}


def _check_number(source: Source, how: How, folds: int) -> None:
    units = _units(source, how)
    fewest = min(units, key=lambda name: units[name])
    what = "groups" if how == "group" else "images"
    if how == "random":
        units, fewest, what = {"": len(source)}, "", "images"
    most = units[fewest]
    if not 2 <= folds <= most:
        of = f" of {fewest!r}" if fewest else ""
        got = f"{folds} for {most:,} {what.removesuffix('s') if most == 1 else what}{of} in {source.name}"
        do = f"Use at most {most:,}, or add images." if most >= 2 else "Add images, or drop the class."
        raise DataError(sentence(f"the number of folds must be from 2 to the number of {what} of every class", got, do))


def _by_group(source: Source, folds: int, generator: np.random.Generator) -> Indices:
    assert source.groups is not None
    groups, member = np.unique(source.groups, return_inverse=True)
    tally = np.zeros((len(groups), len(source.classes)))
    np.add.at(tally, (member, source.labels), 1)
    weight = tally / np.maximum(tally.sum(axis=0), 1)
    fill, size = np.zeros((folds, len(source.classes))), np.zeros(folds)
    assigned = np.zeros(len(groups), dtype=np.int64)
    shuffled = generator.permutation(len(groups))
    for group in shuffled[np.argsort(-weight[shuffled].sum(axis=1).round(12), kind="stable")]:
        # If several folds are equally full in the classes of the group, the smallest of them takes it.
        fold = np.lexsort((size, (fill @ weight[group]).round(12)))[0]
        fill[fold] += weight[group]
        size[fold] += tally[group].sum()
        assigned[group] = fold
    return assigned[member]


def _lacking(source: Source, numbers: Indices, folds: int) -> list[tuple[int, str]]:
    """Return each fold and class without an image of that class in that fold."""
    held = np.zeros((folds, len(source.classes)), dtype=np.int64)
    np.add.at(held, (numbers, source.labels), 1)
    return [(int(fold), source.classes[label]) for fold, label in np.argwhere(held == 0)]
