"""All losses in one linear model, and the effects that few runs can detect. Needs no torch.

Each pair of losses has its own interval elsewhere, from the few differences of that pair. Here all losses share one
estimate of the noise. The model of a value is loss + seed + noise: each loss has a level, each seed moves all losses
alike, and the noise has the same variance everywhere. With L losses and S seeds, the noise has (L - 1)(S - 1) degrees
of freedom, instead of the S - 1 of a single pair.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.stats import nct, t

from lopsided.errors import InputError
from lopsided.evaluation.intervals import Figure

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Additive(Generic[Name]):
    """The fitted model: the mean of each loss, the standard deviation of the noise, and its degrees of freedom."""

    means: Mapping[Name, float]
    seeds: int
    deviation: float
    freedom: int

    def contrast(self, weights: Mapping[Name, float], level: float = 0.95) -> Figure:
        """Return a weighted sum of the means with its interval. The weights must sum to 0, so that seeds cancel."""
        if abs(math.fsum(weights.values())) > 1e-9:
            raise InputError(f"The weights of a contrast must sum to 0, got {math.fsum(weights.values()):g}.")
        value = math.fsum(weight * self.means[name] for name, weight in weights.items())
        error = self.deviation * math.sqrt(math.fsum(weight**2 for weight in weights.values()) / self.seeds)
        half = float(t.ppf((1 + level) / 2, self.freedom)) * error
        return Figure(value, value - half, value + half)


def fit_additive(values: Mapping[Name, Mapping[int, float]]) -> Additive[Name]:
    """Fit loss + seed to the values of each loss by seed. Seeds that not all losses have are left out."""
    seeds = sorted(set.intersection(*(set(row) for row in values.values()))) if values else []
    if len(values) < 2 or len(seeds) < 2:
        raise InputError(f"A model needs two losses and two seeds at least, got {len(values)} and {len(seeds)}.")
    table = np.array([[row[seed] for seed in seeds] for row in values.values()])
    means = table.mean(axis=1)
    residuals = table - means[:, None] - table.mean(axis=0) + table.mean()
    freedom = (len(values) - 1) * (len(seeds) - 1)
    deviation = math.sqrt(float((residuals**2).sum()) / freedom)
    return Additive(dict(zip(values, means.tolist(), strict=True)), len(seeds), deviation, freedom)


def detectable(runs: int, *, comparisons: int = 1, power: float = 0.8, level: float = 0.95) -> float:
    """Return the smallest effect that paired runs detect with this power, in standard deviations of a difference.

    An effect is detected if Student's interval of the paired differences lies on its side of 0. ``comparisons`` is the
    number for which Bonferroni's correction widens the interval.

    >>> round(detectable(4), 2), round(detectable(100), 2)
    (2.13, 0.28)
    """
    freedom = runs - 1
    limit = float(t.ppf(1 - (1 - level) / 2 / comparisons, freedom))

    def missed(effect: float) -> float:
        return float(nct.cdf(limit, freedom, effect * math.sqrt(runs))) - (1 - power)

    return float(brentq(missed, 0.0, 100.0))
