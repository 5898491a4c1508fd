"""Parts of a class that look as if another camera took them.

A cue that separates a whole class is found by its AUROC (``cues``). A camera that took a quarter of one class and a
fiftieth of the others moves no AUROC much. So the images of a class are ranked by what depends on the camera, its light
and its processing, by a quadratic form that was fitted to other groups, and the ranking is scanned from its top: is
there a part that holds a ``LEAST_SHARE`` of the class, at most half of it, and, relative to their numbers, ``LIFT``
times as few other images? Of such parts, the one with the highest likelihood ratio is taken (Kulldorff's scan
statistic). Facts of files, such as their size in pixels, are scanned by their values.

Objects of a class may also have other backgrounds, or reach into them. This moves the class as a whole, so the ranking
separates the rest of the class as well. It is no camera if the AUROC of the rest is above ``ALIKE``.

The statistic is compared with that of shuffled labels, in whole groups. So the share of data sets without any such
part in which one is reported is at most ``ALARMS``, for all classes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LIFT, LEAST_SHARE, LEAST = 5.0, 0.1, 10
"""A part holds at least this share of a class, ``LEAST`` images of it, and ``LIFT`` times as few of the others."""
ALARMS = 0.01
"""The share of false alarms."""
ALIKE = 0.6
"""Without the part, the AUROC of the ranking is at most this: the rest of the class looks like the others."""
NAMED = 0.7
"""A cue is named if its AUROC, between the part and all other images, is above this."""
_SHUFFLES, _BLOCK, _ENOUGH = 999, 111, 10
_FOLDS, _RIDGE = 5, 0.03
Codes = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Part:
    """Images of a class, and of others, that differ from all other images.

    ``rows`` begin with the most different image. ``higher`` and ``lower`` are the cues by which they differ, the
    strongest first; ``kind`` is the fact of the files that they share, with its value, if they were found by that.
    """

    label: int
    rows: Codes
    inside: tuple[int, int]
    """Numbers of images of the class and of others in the part."""
    total: tuple[int, int]
    p_value: float
    higher: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    kind: tuple[str, str] | None = None


def odd_parts(
    cues: Mapping[str, Floats],
    kinds: Mapping[str, NDArray[np.str_]],
    labels: Codes,
    num_classes: int,
    groups: NDArray[np.str_] | None = None,
    seed: int = 0,
) -> list[Part]:
    """Return the most striking part of each class, if it has one; that by a fact of the files if there are both."""
    generator = np.random.default_rng(seed)
    units = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    counts = np.bincount(labels, minlength=num_classes)
    classes = [c for c in range(num_classes) if counts[c] >= LEAST and len(labels) - counts[c] >= LEAST]
    several = {name: values for name, values in cues.items() if len(set(np.percentile(values, [1, 99]))) > 1}
    ways: list[_Kinds | _Ranking] = [_Kinds(kinds)] if kinds else []
    if several:
        ways.append(_Ranking(several, generator.permutation(int(units.max()) + 1)[units] % _FOLDS))
    parts = []
    for label in classes:
        own = labels == label
        level = max(ALARMS / max(len(classes) * len(ways), 1), 1 / (_SHUFFLES + 1))
        for way in ways:
            statistic = way.statistics(own[:, None])[0]
            if statistic <= 0:
                continue
            p_value = _p_value(way, own, statistic, units, level, generator)
            part = way.part(label, own, p_value) if p_value <= level else None
            if part is not None:
                parts.append(part)
                break
    return parts


class _Ranking:
    """Parts at the top of a ranking by cues."""

    def __init__(self, cues: Mapping[str, Floats], folds: Codes) -> None:
        self.cues, self.folds = cues, folds
        self.x = _quadratic(np.stack(list(cues.values()), axis=1))

    def statistics(self, own: Flags) -> Floats:
        """Return the statistic of the best part for each column of labels (n, p); 0 without any."""
        return np.asarray(self._scan(own)[0].max(axis=0), dtype=np.float64)

    def part(self, label: int, own: Flags, p_value: float) -> Part | None:
        """Return the best part, or None if the whole class differs."""
        ratios, order = self._scan(own[:, None])
        rows = order[: int(ratios[:, 0].argmax()) + 1, 0]
        inside = np.zeros(len(own), dtype=np.bool_)
        inside[rows] = True
        if auroc(self._scores(own[:, None].astype(np.float64))[~inside, 0], own[~inside]) > ALIKE:
            return None
        areas = {name: auroc(values, inside) for name, values in self.cues.items()}
        strongest = sorted(areas, key=lambda name: -abs(areas[name] - 0.5))
        return Part(
            label, rows, *_numbers(own, inside), p_value,
            tuple(name for name in strongest if areas[name] > NAMED),
            tuple(name for name in strongest if areas[name] < 1 - NAMED),
        )  # fmt: skip

    def _scan(self, own: Flags) -> tuple[Floats, Codes]:
        order = np.argsort(-self._scores(own.astype(np.float64)), axis=0, kind="stable")
        half = len(own) // 2
        number = np.cumsum(np.take_along_axis(own, order, axis=0), axis=0, dtype=np.int64)[:half]
        ratios = _ratios(number, np.arange(1, half + 1)[:, None], own.sum(axis=0), len(own))
        return np.where(2 * number <= own.sum(axis=0), ratios, 0.0), order

    def _scores(self, own: Floats) -> Floats:
        scores = np.empty_like(own)
        for fold in range(_FOLDS):
            train, test = self.folds != fold, self.folds == fold
            x = self.x[train]
            normal = x.T @ x + _RIDGE * len(x) * np.eye(x.shape[1])
            scores[test] = self.x[test] @ np.linalg.solve(normal, x.T @ own[train])
        return scores


class _Kinds:
    """Parts of images whose files have the same value of something."""

    def __init__(self, kinds: Mapping[str, NDArray[np.str_]]) -> None:
        found = []
        for name, values in kinds.items():
            names, codes, sizes = np.unique(values, return_inverse=True, return_counts=True)
            wanted = np.flatnonzero((sizes >= LEAST) & (sizes <= len(values) // 2))
            found += [((name, str(names[code])), codes == code) for code in wanted]
        self.values: Sequence[tuple[str, str]] = [value for value, _ in found]
        shape = (0, len(next(iter(kinds.values()))))
        self.members = np.array([member for _, member in found]) if found else np.empty(shape, dtype=np.bool_)

    def statistics(self, own: Flags) -> Floats:
        """Return the statistic of the best value for each column of labels (n, p); 0 without any."""
        return np.asarray(self._scan(own).max(axis=0, initial=0.0), dtype=np.float64)

    def part(self, label: int, own: Flags, p_value: float) -> Part:
        """Return the images of the best value."""
        best = int(self._scan(own[:, None])[:, 0].argmax())
        inside = self.members[best]
        rows = np.flatnonzero(inside)
        return Part(label, rows, *_numbers(own, inside), p_value, kind=self.values[best])

    def _scan(self, own: Flags) -> Floats:
        number = self.members.astype(np.float64) @ own.astype(np.float64)
        return _ratios(number, self.members.sum(axis=1)[:, None], own.sum(axis=0), own.shape[0])


def _p_value(
    way: _Kinds | _Ranking, own: Flags, statistic: float, units: Codes, level: float, generator: np.random.Generator
) -> float:
    """Return the share of shuffled labels with at least this statistic; early if it is clearly above the level."""
    ordered = own[np.argsort(units, kind="stable")]
    higher = done = 0
    while done < _SHUFFLES and (higher < _ENOUGH or higher / done <= level):
        shuffled = np.empty((len(own), _BLOCK), dtype=np.bool_)
        for column in range(_BLOCK):
            place = generator.permutation(int(units.max()) + 1)[units]
            shuffled[np.argsort(place, kind="stable"), column] = ordered
        higher += int((way.statistics(shuffled) >= statistic).sum())
        done += _BLOCK
    return (1 + higher) / (1 + done)


def _ratios(number: Floats | Codes, sizes: Codes, own: Codes, total: int) -> Floats:
    """Return the log likelihood ratios of parts with ``number`` of ``own`` images; 0 if a part is none.

    >>> _ratios(np.array([[30], [9], [30]]), np.array([[54], [9], [300]]), np.array([115]), 1228).round(1).tolist()
    [[39.7], [0.0], [0.0]]
    """
    share, others = number / own, (sizes - number) / (total - own)
    is_part = (number >= LEAST) & (share >= LEAST_SHARE) & (share >= LIFT * others)
    ratios = _likelihood(number, sizes) + _likelihood(own - number, total - sizes) - _likelihood(own, total)
    return np.where(is_part, ratios, 0.0)


def _likelihood(number: Floats | Codes, total: Codes | int) -> Floats:
    """Return the logarithm of the highest probability of ``number`` in ``total``."""
    share = np.clip(number / total, 1e-12, 1 - 1e-12)
    return np.asarray(number * np.log(share) + (total - number) * np.log1p(-share), dtype=np.float64)


def _quadratic(values: Floats) -> Floats:
    """Return standardized cues, their squares and products, without outliers, and a constant."""
    x = np.clip(values, *np.percentile(values, [1, 99], axis=0))
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    first, second = np.triu_indices(x.shape[1])
    x = np.concatenate([x, x[:, first] * x[:, second]], axis=1)
    x = (x - x.mean(axis=0)) / np.maximum(x.std(axis=0), 1e-9)
    return np.concatenate([np.ones((len(x), 1)), x], axis=1)


def auroc(values: Floats, inside: Flags) -> float:
    """Return the AUROC of values between the images inside and all others. Equal values count half."""
    _, ranks, sizes = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(sizes) - (sizes - 1) / 2
    number = int(inside.sum())
    return float((middle[ranks][inside].sum() - number * (number + 1) / 2) / (number * (len(inside) - number)))


def _numbers(own: Flags, inside: Flags) -> tuple[tuple[int, int], tuple[int, int]]:
    return (int((own & inside).sum()), int((~own & inside).sum())), (int(own.sum()), int((~own).sum()))
