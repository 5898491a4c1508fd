"""Splits into train, val and test, leaks between the splits, and folds: every image is a test image of one fold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from lopsided.data.images import FileImages
from lopsided.data.scenarios import apportion
from lopsided.data.sources import Source
from lopsided.data.sources.listing import SPLITS
from lopsided.data.sources.names import suggest_names
from lopsided.errors import DataError, InputError, sentence
from lopsided.seeds import derive_seed

Indices: TypeAlias = npt.NDArray[np.int64]
How: TypeAlias = Literal["random", "stratified", "group", "given"]


@dataclass(frozen=True, eq=False)
class Splits:
    """Sorted indices of the three splits. Every image is in one split, except those of an unused given val split."""

    train: Indices
    val: Indices
    test: Indices

    @classmethod
    def of_all(cls, num: int) -> Splits:
        """Return the splits of images that are all trained on."""
        none = np.empty(0, dtype=np.int64)
        return cls(np.arange(num), none, none)

    def parts(self) -> tuple[tuple[str, Indices], ...]:
        """Return the splits with their names, in the order train, val, test."""
        return (("train", self.train), ("val", self.val), ("test", self.test))


@dataclass(frozen=True)
class Leaks:
    """Groups that occur in more than one split, and pairs of byte-identical images in different splits."""

    groups: tuple[str, ...]
    duplicates: tuple[tuple[str, str, str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.groups or self.duplicates)


def split(source: Source, *, how: How, val: float, test: float, seed: int) -> Splits:
    """Split a source. ``val`` and ``test`` are shares of all images; ``seed`` is the seed of the run.

    - ``random``: a plain random split, as in the paper. Sizes are exact; class proportions are random.
    - ``stratified``: sizes are exact and every class keeps its proportion. A class of two or more images gets one image
      in train, then one in test, then one in val, as long as these splits have room for every class.
    - ``group``: all images of a group are in one split. Groups are assigned one by one, starting with the groups that
      hold the largest shares of their classes. Each group goes to the split that is then least full in the classes of
      the group. The shares are met as closely as the groups allow.
    - ``given``: the splits of the source. A requested split that the source lacks is taken out of its train split, as a
      share of the train split: by group if the source has groups, otherwise stratified. With ``val`` 0, a val split of
      the source is ignored; a test split of the source is always used.

    The same seed gives the same test split for every ``val``, except with ``group``. Every class must be in train;
    otherwise an error is raised.
    """
    if how not in get_args(How):
        raise InputError(sentence(f"split must be one of {', '.join(get_args(How))}", repr(how)))
    for name, share in (("val", val), ("test", test)):
        if not 0 <= share < 1:
            raise InputError(sentence(f"{name} must be a share in [0, 1)", share))
    if val + test >= 1:
        raise InputError(sentence("val + test must be below 1, to leave images for train", f"{val} + {test}"))
    parts = _given(source, val, test, seed) if how == "given" else _deal(source, how, val, test, seed)
    splits = Splits(**{name: np.flatnonzero(parts == i) for i, name in enumerate(SPLITS)})
    _check_train(source, splits, how)
    return splits


def find_leaks(source: Source, splits: Splits, digests: Sequence[str] | None = None) -> Leaks:
    """Find groups that cross splits and byte-identical images in different splits.

    If several images are identical, the first image is paired with each copy in another split. ``digests`` are the
    digests of all images, if they are known.
    """
    if digests is None:
        digests = source.images.digest(np.arange(len(source)))
    crossing: dict[str, set[str]] = defaultdict(set)
    seen: dict[str, tuple[int, str]] = {}
    duplicates = []
    for name, indices in splits.parts():
        if source.groups is not None:
            for group in np.unique(source.groups[indices]).tolist():
                crossing[group].add(name)
        for index in indices.tolist():
            first, where = seen.setdefault(digests[index], (index, name))
            if where != name:
                duplicates.append((source.names[first], where, source.names[index], name))
    groups = sorted(group for group, where in crossing.items() if len(where) > 1)
    return Leaks(tuple(groups), tuple(duplicates))


def _deal(source: Source, how: str, val: float, test: float, seed: int) -> npt.NDArray[np.int8]:
    """Return 0, 1 or 2 (train, val, test) for each image."""
    alone = [name for name, number in source.counts().items() if number == 1]
    if alone and val + test > 0:
        others = [name for name, number in source.counts().items() if number > 1]
        do, add = suggest_names(alone, others), "add images or drop the class." if others else "add images."
        do = f"{do} Otherwise {add}" if do else add.capitalize()
        raise DataError(sentence("a class must hold at least 2 images to be split", _one_in(alone, source), do))
    generator = np.random.default_rng(derive_seed(seed, "split"))
    if how == "group":
        return _by_group(source, val, test, generator)
    order = generator.permutation(len(source))
    sizes = (_size(len(source), val), _size(len(source), test))
    if how == "random":
        parts = np.zeros(len(source), dtype=np.int8)
        parts[order[: sizes[1]]] = 2
        parts[order[sizes[1] : sum(sizes)]] = 1
        return parts
    return _stratified(source.labels, order, sizes)


def _one_in(names: Sequence[str], source: Source) -> str:
    return f"1 in {' and in '.join(map(repr, names))} of {source.name}"


def _size(n: int, share: float) -> int:
    # 1228 images at 0.3 give 368, the test set of the paper; scikit-learn rounds up, to 369.
    return int(np.floor(n * share + 0.5))


def _stratified(labels: Indices, order: Indices, sizes: tuple[int, int]) -> npt.NDArray[np.int8]:
    parts = np.zeros(len(labels), dtype=np.int8)
    present, counts = np.unique(labels, return_counts=True)
    left = counts - 1  # One image of each class stays in train.
    taken = np.zeros_like(counts)
    for part, size in ((2, sizes[1]), (1, sizes[0])):
        numbers = _quota(counts, left, size)
        for label, start, number in zip(present, taken, numbers, strict=True):
            members = order[labels[order] == label]
            parts[members[start : start + number]] = part
        left, taken = left - numbers, taken + numbers
    return parts


def _quota(counts: Indices, left: Indices, size: int) -> Indices:
    """Return numbers in proportion to ``counts`` with the sum ``size``, each at most ``left`` and >= 1 if possible."""
    least = np.minimum(left, 1) if size >= len(counts) else np.zeros_like(left)
    numbers = np.clip(apportion(counts, size), least, left)
    while numbers.sum() != size:
        step = 1 if numbers.sum() < size else -1
        movable = numbers < left if step == 1 else numbers > least
        if not movable.any():
            break
        surplus = np.where(movable, step * (numbers - counts / counts.sum() * size), np.inf)
        numbers[np.argmin(surplus)] += step
    return numbers


def _by_group(source: Source, val: float, test: float, generator: np.random.Generator) -> npt.NDArray[np.int8]:
    if source.groups is None:
        repair = "Name the group column with --group, or use a random or stratified split."
        raise DataError(f"A split by group needs groups, but {source.name} has none. {repair}")
    member, tally, weight = _tally(source)
    few = [name for name, number in zip(source.classes, (tally > 0).sum(axis=0), strict=True) if number == 1]
    if few and val + test > 0:
        do = suggest_names(few, [name for name in source.classes if name not in few])
        raise DataError(sentence("a class must hold at least 2 groups to be split by group", _one_in(few, source), do))
    shares = np.array([1 - val - test, val, test])
    open_parts = np.flatnonzero(shares > 0)
    fill = np.zeros((len(shares), len(source.classes)))
    assigned = np.zeros(len(tally), dtype=np.int8)
    shuffled = generator.permutation(len(tally))
    for group in shuffled[np.argsort(-weight[shuffled].sum(axis=1), kind="stable")]:
        # How full each split would be with this group, in the classes of the group (longest job first).
        after = ((fill[open_parts] + weight[group]) / shares[open_parts, None]) @ weight[group]
        part = open_parts[np.argmin(after)]
        fill[part] += weight[group]
        assigned[group] = part
    return assigned[member]


def _tally(source: Source) -> tuple[Indices, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the group of each image, the images of each group by class, and their shares of all images of a class."""
    assert source.groups is not None
    groups, member = np.unique(source.groups, return_inverse=True)
    tally = np.zeros((len(groups), len(source.classes)))
    np.add.at(tally, (member, source.labels), 1)
    return member, tally, tally / np.maximum(tally.sum(axis=0), 1)


def _given(source: Source, val: float, test: float, seed: int) -> npt.NDArray[np.int8]:
    if source.splits is None:
        repair = "Add split folders or a column split, or use a random, stratified or group split."
        raise DataError(f"{source.name} does not define splits, so a given split cannot be used. {repair}")
    parts = np.array([SPLITS.index(name) for name in source.splits.tolist()], dtype=np.int8)
    missing_val = val if not (parts == 1).any() else 0.0
    missing_test = test if not (parts == 2).any() else 0.0
    if not val:
        parts[parts == 1] = -1
    if missing_val or missing_test:
        rows = np.flatnonzero(parts == 0)
        how = "stratified" if source.groups is None else "group"
        parts[rows] = _deal(source.subset(rows), how, missing_val, missing_test, seed)
    return parts


def _check_train(source: Source, splits: Splits, how: str) -> None:
    held = np.bincount(source.labels[splits.train], minlength=len(source.classes))
    absent = [name for name, number in source.counts().items() if number and not held[source.classes.index(name)]]
    if absent or not len(splits.train):
        repair = {
            "random": "Use a stratified split or another seed.",
            "given": "Put images of every class into train, or use another split.",
        }.get(how, "Use smaller val and test shares.")
        names = ", ".join(absent) or "any class"
        raise DataError(f"train must hold every class, but it has no image of {names} of {source.name}. {repair}")


ATTEMPTS = 20
"""How often folds by group are drawn if a class is missing in a fold, which groups with several classes can cause."""


def most_folds(source: Source, how: How) -> int:
    """Return the largest possible number of folds: each fold needs an image of every class, or a group of every class.

    >>> from lopsided.data.sources import source_from_arrays
    >>> most_folds(source_from_arrays(np.zeros((5, 2, 2), np.uint8), [0, 0, 0, 1, 1]), "stratified")
    2
    """
    return min(_splittable(_units(source, how)).values())


def _splittable(units: dict[str, int]) -> dict[str, int]:
    """Return the numbers of the classes that folds can divide, or of all classes if there are none.

    A class of one image is tested by a model that knows no image of the class, and is trained on by all others.
    """
    return {name: number for name, number in units.items() if number > 1} or units


def fold_numbers(source: Source, *, how: How, folds: int, seed: int, repeat: int = 0) -> Indices:
    """Return the fold of each image, from 0 to ``folds`` - 1.

    - ``stratified``: the folds differ by at most one image, in total and in each class. Copies of one file come to
      its fold, so that folds with copies may differ by more.
    - ``group``: all images of a group are in one fold. Groups are assigned one by one, starting with the groups that
      hold the largest shares of their classes. Each group goes to the fold that is then least full in the classes of
      the group.
    - ``random``: the folds differ by at most one image in total; class proportions are random.

    Without groups, byte-identical images are in the fold of the first of them. The folds depend on the images,
    ``folds``, ``seed`` and ``repeat`` alone, so that two recipes with the same data and seed have the same folds.
    ``repeat`` numbers the independent draws of one seed. Every fold holds every class, except with ``random``; an
    error is raised if that is not possible.
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
            found = _folds_by_group(source, folds, generator)
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
    return _with_copies(source, numbers)


def _with_copies(source: Source, numbers: Indices) -> Indices:
    """Return folds in which byte-identical files are in the fold of the first one, unless a fold would lack a class."""
    if not isinstance(source.images, FileImages):
        return numbers
    for rows in source.images.copies():
        moved = numbers.copy()
        moved[rows] = numbers[rows[0]]
        labels = np.unique(source.labels[rows])
        before, after = (len(np.unique(each[np.isin(source.labels, labels)])) for each in (numbers, moved))
        if after == before:
            numbers = moved
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
    least, whole = (2 if val else 1), _units(source, how)
    short = [name for name, units in _units(remaining, how).items() if units < least and whole[name] > 1]
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
    units = _splittable(_units(source, how))
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


def _folds_by_group(source: Source, folds: int, generator: np.random.Generator) -> Indices:
    member, tally, weight = _tally(source)
    fill, size = np.zeros((folds, len(source.classes))), np.zeros(folds)
    assigned = np.zeros(len(tally), dtype=np.int64)
    shuffled = generator.permutation(len(tally))
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
    divided = np.bincount(source.labels, minlength=len(source.classes)) > 1
    return [(int(fold), source.classes[label]) for fold, label in np.argwhere((held == 0) & divided)]
