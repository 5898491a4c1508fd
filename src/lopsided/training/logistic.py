"""Multinomial logistic regressions, or ridge regressions, on the same rows, solved together.

A regression with row weights c_i and strength C minimises

    sum_i c_i CE(W x_i + b, y_i) / sum_i c_i  +  |W|^2 / (2 C sum_i c_i).

The inner folds of a choice are such regressions, with a weight of zero for the rows that a fold leaves out. L-BFGS
solves all of them at once: a step is then two large matrix products instead of two small ones for each fold.

The columns of the rows are their principal axes, so the diagonal of the Hessian is a good approximation of it. L-BFGS
begins with this diagonal, and needs far fewer steps than from the identity, above all if there are many classes with
very different shares. Logits are linear along a step, so that trying another length costs no product.

A ridge regression has half the squared difference to the indicator of the class in place of CE.

Many rows and classes are worked on in parts of fixed size, by several threads. The result does not depend on their
number: the sums over the parts are added in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Indices = npt.NDArray[np.int64]

_NOTHING = 1e-12
"""An axis along which the sum of squares is below this share of the largest one is left out: it is rounding."""
_MEMORY = 10
"""Steps that L-BFGS remembers."""
_STEPS = 1000
_HALVINGS = 30
_MANY, _PART = 2**20, 2**18
"""More logits than ``_MANY`` are worked on in parts of about ``_PART`` logits."""
_T = TypeVar("_T")
_SLOPE = 1e-4
"""A step must lower the objective by this share of what its slope promises."""


class Principal:
    """Rows in the coordinates of their principal axes: the same rows, turned, with at most as many columns as rows.

    The weights of a regression with an L2 penalty are in the span of the rows, so nothing is lost. ``x`` holds the
    turned rows, and ``back`` turns weights back.
    """

    def __init__(self, x: npt.NDArray[np.float64]) -> None:
        wide = len(x) < x.shape[1]
        squares, axes = np.linalg.eigh(x @ x.T if wide else x.T @ x)
        kept = squares > _NOTHING * max(squares[-1], np.finfo(np.float64).tiny)
        self._axes, self._lengths = axes[:, kept], np.sqrt(squares[kept])
        self._rows = x if wide else None
        self.x = self._axes * self._lengths if wide else x @ self._axes

    def back(self, weight: Floats) -> Floats:
        """Return weights (K, columns of ``x``) as weights for the rows before they were turned."""
        if self._rows is not None:
            weight = weight / self._lengths
        found: Floats = weight @ self._axes.T
        return found if self._rows is None else found @ self._rows


class Regressions:
    """B regressions on rows ``x`` (n, p), each with its own row weights ``c`` (n, B), in the precision of ``dtype``.

    ``labels`` are 0 to K - 1, and each regression must give weight to every class. ``offset`` (n, K) is a known part of
    the logits. ``weights`` (B, K, p + 1) holds the solution, with the bias as the last column, and ``logits`` (n, B, K)
    its logits for all rows. ``start`` are weights to begin with, and ``threads`` is the number of threads for large
    problems.
    """

    def __init__(
        self,
        x: Floats,
        labels: Indices,
        c: Floats,
        dtype: type[np.floating[Any]] = np.float64,
        *,
        start: Floats | None = None,
        threads: int = 1,
        offset: Floats | None = None,
    ) -> None:
        self._x = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(dtype)
        self._labels = labels
        shares = np.stack([c[labels == label].sum(axis=0) for label in range(int(labels.max()) + 1)], axis=1)
        self._total = shares.sum(axis=1)
        self._c = (c / self._total).astype(dtype)
        self._squares = np.einsum("ij,ij->j", self._x, self._x) / len(x)
        self.weights = np.zeros((*shares.shape, self._x.shape[1]), dtype=dtype)
        self.weights[..., -1] = self._first_biases(shares)
        if start is not None:
            self.weights[:] = start
        size = shares.size
        rows = len(x) if len(x) * size <= _MANY else max(_PART // size, 1)
        self._parts = [slice(begin, begin + rows) for begin in range(0, len(x), rows)]
        self._threads = min(threads, len(self._parts))
        self._pool: ThreadPoolExecutor | None = None
        self.logits = self._products(self.weights)
        if offset is not None:
            self.logits = self.logits + offset[:, None].astype(dtype)

    def solve(self, strength: float, tolerance: float) -> None:
        """Solve all regressions with this strength, from the present weights on.

        A regression is solved if a step is expected to lower its objective by less than ``tolerance`` times its value.
        """
        with self._working():
            self._solve(strength, tolerance)

    def _solve(self, strength: float, tolerance: float) -> None:
        dtype = self.weights.dtype
        penalty = np.zeros((len(self.weights), 1, self._x.shape[1]), dtype=dtype)
        penalty[..., :-1] = (1 / (strength * self._total))[:, None, None]
        p, loss = self._probabilities(self.logits)
        value = loss + 0.5 * _dot(penalty * self.weights, self.weights)
        gradient = self._gradient(p) + penalty * self.weights
        spread = self._curvature(p)[..., None] * self._squares
        start = 1 / (penalty + np.maximum(spread, np.finfo(dtype).eps))
        memory: deque[tuple[Floats, Floats, Floats]] = deque(maxlen=_MEMORY)
        active, idle = np.ones(len(value), dtype=bool), np.zeros(len(value), dtype=np.int64)
        for _ in range(_STEPS):
            step = _direction(gradient, memory, start)
            slope = _dot(gradient, step)
            active &= -slope > 2 * tolerance * value
            if not active.any():
                break
            step[~active] = 0.0
            along = self._products(step)
            bend, tilt = 0.5 * _dot(penalty * step, step), _dot(penalty * self.weights, step)
            flat = value - loss
            length = np.ones_like(value)
            for _ in range(_HALVINGS):
                p, trial = self._probabilities(self.logits + length[:, None] * along)
                reached = trial + flat + length * (tilt + length * bend)
                short = reached <= value + _SLOPE * length * slope + 10 * np.finfo(dtype).eps * value
                if (short | ~active).all():
                    break
                length = np.where(short, length, 0.5 * length)
            else:  # Rounding hides what is left to gain: these regressions stay where they are.
                length = np.where(short, length, 0.0)
                active &= short
                p, trial = self._probabilities(self.logits + length[:, None] * along)
                reached = trial + flat + length * (tilt + length * bend)
            moved = length[:, None, None] * step
            self.weights = self.weights + moved
            self.logits = self.logits + length[:, None] * along
            # Two steps that gain next to nothing: what their slopes promise is rounding.
            idle = np.where(value - reached < 0.1 * tolerance * value, idle + 1, 0)
            active &= idle < 2
            value, loss = reached, trial
            before, gradient = gradient, self._gradient(p) + penalty * self.weights
            change = gradient - before
            curvature = _dot(moved, change)
            known = curvature > 0
            memory.append((moved, change, np.where(known, 1 / np.where(known, curvature, 1), 0)))

    def _first_biases(self, shares: Floats) -> Floats:
        """Return the biases (B, K) of the solution without weights, given the weight of each class."""
        logs = np.log(shares)
        biases: Floats = logs - logs.mean(axis=1, keepdims=True)
        return biases

    def _curvature(self, p: Floats) -> Floats:
        """Return the mean second derivative of the loss by each logit, (B, K)."""
        work = self._over_parts(lambda rows: np.einsum("nbk,nb->bk", p[rows] * (1 - p[rows]), self._c[rows]))
        total: Floats = sum(work)
        return total

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Keep threads for the parts inside the block, if there are several."""
        if self._threads < 2:
            yield
            return
        with ThreadPoolExecutor(self._threads) as self._pool:
            yield
        self._pool = None

    def _over_parts(self, work: Callable[[slice], _T]) -> list[_T]:
        """Return the results for all parts of the rows, in order."""
        return list((map if self._pool is None else self._pool.map)(work, self._parts))

    def _products(self, weights: Floats) -> Floats:
        turned = weights.reshape(-1, weights.shape[2]).T
        found: Floats = np.empty((len(self._x), turned.shape[1]), dtype=self._x.dtype)
        self._over_parts(lambda rows: np.matmul(self._x[rows], turned, out=found[rows]))
        return found.reshape(len(found), *weights.shape[:2])

    def _probabilities(self, logits: Floats) -> tuple[Floats, Floats]:
        """Return the probabilities (n, B, K), whose excess over the indicator is the slope, and the mean loss (B,)."""
        p = np.empty_like(logits)

        def work(rows: slice) -> Floats:
            own, labels = logits[rows], self._labels[rows]
            top = own.max(axis=2, keepdims=True)
            np.exp(own - top, out=p[rows])
            sums = p[rows].sum(axis=2, keepdims=True)
            p[rows] /= sums
            # The difference of two large logits is exact, and the logarithm is not lost beside them.
            losses = (top[..., 0] - own[np.arange(len(own)), :, labels]) + np.log(sums[..., 0])
            total: Floats = np.einsum("nb,nb->b", losses, self._c[rows])
            return total

        return p, sum(self._over_parts(work))  # type: ignore[return-value]

    def _gradient(self, p: Floats) -> Floats:
        """Return the gradient (B, K, p + 1) of the mean loss."""

        def work(rows: slice) -> Floats:
            errors, weights = p[rows] * self._c[rows, :, None], self._c[rows]
            errors[np.arange(len(errors)), :, self._labels[rows]] -= weights
            total: Floats = errors.reshape(len(errors), -1).T @ self._x[rows]
            return total

        found: Floats = sum(self._over_parts(work))  # type: ignore[assignment]
        return found.reshape(*p.shape[1:], -1)


class Ridges(Regressions):
    """B ridge regressions on the indicators of the classes. ``logits`` are the scores, which are about 0 to 1."""

    def _first_biases(self, shares: Floats) -> Floats:
        biases: Floats = shares / shares.sum(axis=1, keepdims=True)
        return biases

    def _curvature(self, p: Floats) -> Floats:
        return np.ones(p.shape[1:], dtype=p.dtype)

    def _probabilities(self, logits: Floats) -> tuple[Floats, Floats]:
        def work(rows: slice) -> Floats:
            errors, labels = logits[rows].copy(), self._labels[rows]
            errors[np.arange(len(errors)), :, labels] -= 1
            total: Floats = 0.5 * np.einsum("nbk,nbk,nb->b", errors, errors, self._c[rows], optimize=True)
            return total

        return logits, sum(self._over_parts(work))  # type: ignore[return-value]


def _direction(gradient: Floats, memory: deque[tuple[Floats, Floats, Floats]], start: Floats) -> Floats:
    """Return the step of L-BFGS for each regression (Nocedal and Wright, algorithm 7.4), with ``start`` as first guess.

    A remembered step of curvature 0, of a regression that is solved, has no effect.
    """
    step = -gradient
    shares = []
    for moved, change, inverse in reversed(memory):
        shares.append(inverse * _dot(moved, step))
        step = step - shares[-1][:, None, None] * change
    if memory:
        moved, change, inverse = memory[-1]
        size = _dot(start * change, change)
        scale = np.where((inverse > 0) & (size > 0), _dot(moved, change) / np.where(size > 0, size, 1), 1)
        start = start * scale[:, None, None]
    step = start * step
    for (moved, change, inverse), share in zip(memory, reversed(shares), strict=True):
        step = step + (share - inverse * _dot(change, step))[:, None, None] * moved
    return step


def _dot(one: Floats, other: Floats) -> Floats:
    found: Floats = np.einsum("bkp,bkp->b", one, other)
    return found
