"""Scenarios: how imbalanced the images drawn from a source are.

The grammar, with classes in the order of the source::

    90:10                         shares in per cent, one per class; as many images as possible
    90:10,total=1000              the same, with exactly 1000 images
    long-tail:100                 class sizes fall by a constant factor; the first class is 100 times the last
    long-tail:100,step            two sizes: the classes of the first half are 100 times as large as the others
    long-tail:100,total=1000      either shape, with exactly 1000 images

The exponential shape follows Cui et al. 2019 (class-balanced loss), the step shape Buda et al. 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lopsided.errors import DataError, InputError, sentence
from lopsided.seeds import derive_seed

Indices: TypeAlias = npt.NDArray[np.int64]
Shape: TypeAlias = Literal["exponential", "step"]

MOST = 10**9
"""Largest total and largest factor. No source has more images, and floats up to this number are exact."""

_GRAMMAR = "Write 90:10 or 90:10,total=1000, or long-tail:100, long-tail:100,step or long-tail:100,total=1000."


@dataclass(frozen=True)
class Scenario:
    """Either ``proportion``, the per cent of each class, or ``long_tail``, the ratio of the first to the last class."""

    proportion: tuple[float, ...] | None = None
    total: int | None = None
    long_tail: float | None = None
    shape: Shape = "exponential"

    def __post_init__(self) -> None:
        if (self.proportion is None) == (self.long_tail is None):
            raise InputError(sentence("a scenario must have either a proportion or a long tail", self, _GRAMMAR))
        if self.proportion is not None:
            text = ":".join(f"{share:g}" for share in self.proportion)
            if len(self.proportion) < 2 or not all(0 < share < 100 for share in self.proportion):
                raise InputError(sentence("a proportion must have two or more shares above 0", text, _GRAMMAR))
            if not math.isclose(sum(self.proportion), 100.0, abs_tol=1e-6):
                got = f"{text}, which adds up to {sum(self.proportion):g}"
                raise InputError(sentence("shares must add up to 100", got, _GRAMMAR))
        if self.long_tail is not None and not 1 <= self.long_tail <= MOST:
            must = f"the factor of a long tail must be >= 1 and <= {MOST:,}"
            raise InputError(sentence(must, self.long_tail, _GRAMMAR))
        if self.shape not in ("exponential", "step"):
            raise InputError(sentence("the shape of a long tail must be exponential or step", self.shape, _GRAMMAR))
        if self.total is not None and not 1 <= self.total <= MOST:
            raise InputError(sentence(f"total must be >= 1 and <= {MOST:,}", f"{self.total!s:.30}", _GRAMMAR))

    def __str__(self) -> str:
        """Return the text that ``parse_scenario`` parses to this scenario."""
        if self.proportion is not None:
            text = ":".join(_number(share) for share in self.proportion)
        else:
            text = f"long-tail:{_number(self.long_tail or 1.0)}" + (",step" if self.shape == "step" else "")
        return text if self.total is None else f"{text},total={self.total}"

    def weights(self, num_classes: int) -> npt.NDArray[np.float64]:
        """Return the size of each class relative to the first class."""
        if self.proportion is not None:
            return np.array(self.proportion) / self.proportion[0]
        factor = self.long_tail or 1.0
        if self.shape == "step":
            return np.where(np.arange(num_classes) < num_classes - num_classes // 2, 1.0, 1.0 / factor)
        return np.asarray(factor ** (-np.arange(num_classes) / max(num_classes - 1, 1)))


def parse_scenario(text: str) -> Scenario:
    """Parse a scenario.

    >>> parse_scenario("90:10,total=1000")
    Scenario(proportion=(90.0, 10.0), total=1000, long_tail=None, shape='exponential')
    >>> str(parse_scenario("long-tail:100, step"))
    'long-tail:100,step'
    """
    head, *options = (part.strip() for part in text.split(","))
    kind, _, factor = head.partition(":")
    total: int | None = None
    shape: Shape | None = None
    try:
        for option in options:
            key, _, value = option.partition("=")
            if key == "total" and total is None:
                total = int(value)
            elif option in ("exponential", "step") and kind == "long-tail" and shape is None:
                shape = "step" if option == "step" else "exponential"
            else:
                raise ValueError(option)
        if kind == "long-tail":
            return Scenario(long_tail=float(factor), shape=shape or "exponential", total=total)
        proportion = tuple(float(share) for share in head.split(":"))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(sentence("a scenario must be a proportion or a long tail", repr(text), _GRAMMAR)) from error
    return Scenario(proportion=proportion, total=total)


def draw(labels: npt.ArrayLike, classes: Sequence[str], scenario: Scenario, seed: int) -> Indices:
    """Draw images so that the class sizes follow the scenario. Return sorted indices.

    ``seed`` is the seed of the run. Each class is shuffled by itself and drawn from the front. With the same seed, a
    smaller draw of a class is therefore part of a larger draw.
    """
    y = np.asarray(labels, dtype=np.int64)
    available = np.bincount(y, minlength=len(classes))[: len(classes)]
    numbers = _numbers(available, classes, scenario)
    drawn = []
    for index, (name, number) in enumerate(zip(classes, numbers, strict=True)):
        generator = np.random.default_rng(derive_seed(seed, "scenario", name))
        drawn.append(generator.permutation(np.flatnonzero(y == index))[:number])
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def draw_held_out(
    labels: npt.ArrayLike,
    classes: Sequence[str],
    drawn: npt.ArrayLike,
    seed: int,
    groups: npt.NDArray[np.str_] | None = None,
) -> Indices:
    """Draw a balanced test set from the images that a scenario did not draw. Return sorted indices.

    Every class gets as many images as the class with the fewest remaining images has. With ``groups``, images whose
    group was drawn are excluded, because the group would be in training and in test.
    """
    y, taken = np.asarray(labels, dtype=np.int64), np.asarray(drawn, dtype=np.int64)
    left = np.setdiff1d(np.arange(len(y)), taken)
    if groups is not None:
        left = left[~np.isin(groups[left], groups[taken])]
    available = np.bincount(y[left], minlength=len(classes))[: len(classes)]
    if not available.min():
        do = "Draw fewer images, or set data.held_out = false."
        left_over = _counts(classes, available)
        raise DataError(f"data.held_out needs undrawn images of every class, but the scenario leaves {left_over}. {do}")
    chosen = []
    for index, name in enumerate(classes):
        generator = np.random.default_rng(derive_seed(seed, "held-out", name))
        chosen.append(generator.permutation(left[y[left] == index])[: available.min()])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def apportion(weights: npt.ArrayLike, total: int) -> npt.NDArray[np.int64]:
    """Divide ``total`` into whole numbers in proportion to ``weights``, by the largest remainders.

    >>> apportion([2, 1, 1], 10)
    array([5, 3, 2])
    """
    shares = np.asarray(weights, dtype=np.float64)
    exact = shares / shares.sum() * total
    # Binary fractions would break ties at random. Rounding keeps the ties, and the first class wins.
    floors = np.floor(np.round(exact, 9))
    remainders = np.round(exact - floors, 9)
    extra = np.argsort(-remainders, kind="stable")[: total - int(floors.sum())]
    floors[extra] += 1
    return np.asarray(floors, dtype=np.int64)


def _numbers(available: npt.NDArray[np.int64], classes: Sequence[str], scenario: Scenario) -> npt.NDArray[np.int64]:
    if scenario.proportion is not None and len(scenario.proportion) != len(classes):
        must = f"a proportion must have one share for each of the {len(classes)} classes ({', '.join(classes)})"
        raise InputError(sentence(must, f"{len(scenario.proportion)} in {scenario}"))
    weights = scenario.weights(len(classes))
    if scenario.total is not None:
        numbers = apportion(weights, scenario.total)
    else:
        numbers = np.floor(weights * (available / weights).min() + 1e-9).astype(np.int64)
    there = _counts(classes, available)
    if (numbers > available).any():
        need = _counts(classes, numbers)
        raise DataError(
            f"{scenario} needs {need}, but the source has {there}. Use a smaller total or another proportion."
        )
    if (numbers < 1).any():
        drawn = _counts(classes, numbers)
        raise DataError(f"{scenario} must draw an image of every class, but it draws {drawn} of {there}.")
    return numbers


def _counts(classes: Sequence[str], numbers: npt.NDArray[np.int64]) -> str:
    return ", ".join(f"{name} {number}" for name, number in zip(classes, numbers.tolist(), strict=True))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
