"""Drift: whether images are as typical as the known images of a model. It needs no labels.

Two statistics are compared with their values if known and new images were mixed at random: the share of unfamiliar
images, and how far the distribution of typicality lies below that of known images (Kolmogorov and Smirnov, one-sided:
images that are more typical are no reason to worry). Mixing moves whole groups, because images of one group resemble
each other. Both tests are exact for any distribution of features; with two tests, the smaller p-value counts twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.evaluation.typicality import Bank, Floats

Counts = npt.NDArray[np.int64]

MIXES, GROUPED_MIXES = 9_999, 999
MOST_GROUPS = 5_000
"""Groups of new images that are compared; of more, a random sample."""
_BINS = 20
ALARM = 0.01
"""A p-value below this is reported as drift."""


@dataclass(frozen=True)
class Drift:
    """The comparison of new images with the known ones: their number, the unfamiliar ones, and the p-value."""

    images: int
    unfamiliar: int
    level: float
    """The share of unfamiliar images among images like the known ones."""
    p_value: float

    @property
    def is_alarm(self) -> bool:
        """Whether the images differ from the known ones by more than chance."""
        return self.p_value < ALARM


def compare(
    bank: Bank, typicality: Floats, level: float, groups: npt.NDArray[np.str_] | None = None, seed: int = 0
) -> Drift:
    """Compare the typicality of new images with that of the known images. ``groups`` are those of the new images."""
    reached, num = bank.reached(level), len(bank.scores)
    edges = np.unique(np.append(np.linspace(0, 1, _BINS + 1)[1:-1], reached * (1 + 1e-12)))
    first = int(np.searchsorted(edges, reached * (1 + 1e-12)))
    known = np.searchsorted(edges, bank.usual())
    new = np.searchsorted(edges, typicality)
    generator = np.random.default_rng(seed)
    if groups is None and len(np.unique(bank.units)) == num:
        old, counts = (np.bincount(codes, minlength=len(edges) + 1) for codes in (known, new))
        mixed = generator.multivariate_hypergeometric(old + counts, len(new), size=MIXES, method="marginals")
    else:
        units = np.arange(len(new)) if groups is None else np.unique(groups, return_inverse=True)[1]
        tables = [_table(codes, of, len(edges) + 1) for codes, of in ((known, bank.units), (new, units))]
        if len(tables[1]) > MOST_GROUPS:
            tables[1] = tables[1][generator.permutation(len(tables[1]))[:MOST_GROUPS]]
        old, counts = (table.sum(axis=0) for table in tables)
        pooled, picked = np.concatenate(tables), len(tables[1])
        orders = (generator.permutation(len(pooled))[:picked] for _ in range(GROUPED_MIXES))
        mixed = np.array([pooled[order].sum(axis=0) for order in orders])
    total = old + counts
    tests = [_p_value(*_statistics(counts, mixed, total, first, by_share=by_share)) for by_share in (True, False)]
    unfamiliar = int(bank.is_unfamiliar(typicality, level).sum())
    return Drift(len(typicality), unfamiliar, reached, min(1.0, 2 * min(tests)))


def _table(codes: Counts, units: npt.NDArray[np.integer[Any]], bins: int) -> Counts:
    """Return how many images of each unit are in each bin."""
    table = np.zeros((int(units.max()) + 1, bins), dtype=np.int64)
    np.add.at(table, (units, codes), 1)
    return table


def _statistics(counts: Counts, mixed: Counts, total: Counts, first: int, *, by_share: bool) -> tuple[float, Floats]:
    """Return a statistic of the new images, and of as many images mixed at random."""
    every = np.vstack([counts, mixed])
    shares = every.cumsum(axis=1) / every.sum(axis=1, keepdims=True)
    if by_share:
        found = shares[:, first]
    else:
        others = total - every
        found = (shares - others.cumsum(axis=1) / np.maximum(others.sum(axis=1, keepdims=True), 1)).max(axis=1)
    return float(found[0]), found[1:]


def _p_value(value: float, mixed: Floats) -> float:
    return float((1 + (mixed >= value - 1e-12).sum()) / (1 + len(mixed)))
