"""Batches of indices for an epoch. A batch is that of all ranks together; every rank computes the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from lopsided.data.scenarios import apportion
from lopsided.errors import InputError, sentence
from lopsided.seeds import derive_seed

Indices: TypeAlias = npt.NDArray[np.int64]
Kind: TypeAlias = Literal["plain", "balanced", "sqrt", "m-per-class"]
Last: TypeAlias = Literal["keep", "drop"]


class BatchSampler:
    """Yield the batches of one epoch as int64 indices. ``batch_size`` counts the images of all ranks together.

    - ``plain``: each image once, in random order.
    - ``balanced``: as many draws as images, divided equally among the classes.
    - ``sqrt``: the same, divided in proportion to the square root of the class sizes.
    - ``m-per-class``: every batch holds ``m_per_class`` images of every class. If not all classes fit into
      ``batch_size``, the classes take turns. The default is ``batch_size // num_classes``. A batch holds at most
      ``batch_size`` images, and all batches have the same size.

    From the epoch ``balanced_from`` on, if it is set, ``plain`` and ``sqrt`` draw as ``balanced`` does.

    If a class has fewer images than draws, it is repeated in a new random order each time, so all its
    images are drawn about equally often. ``last`` selects whether a last, smaller batch is kept or dropped.

    The order depends only on ``seed``, the seed of the run, and on the epoch.
    """

    balanced_from: int | None = None

    def __init__(
        self,
        labels: npt.ArrayLike,
        batch_size: int,
        *,
        kind: Kind = "plain",
        m_per_class: int | None = None,
        last: Last = "keep",
        seed: int,
    ) -> None:
        self.labels: Indices = np.asarray(labels, dtype=np.int64)
        self.batch_size, self.kind, self.last, self.seed = batch_size, kind, last, seed
        self.epoch = 0
        self._check()
        present = np.unique(self.labels)
        self._members = [np.flatnonzero(self.labels == label) for label in present]
        self.m_per_class = m_per_class
        self._classes_per_batch = len(present)
        if kind == "m-per-class":
            self.m_per_class = max(batch_size // len(present), 1) if m_per_class is None else m_per_class
            if not 1 <= self.m_per_class <= batch_size:
                raise InputError(sentence(f"m_per_class must be in [1, {batch_size}] (the batch size)", m_per_class))
            self._classes_per_batch = min(len(present), batch_size // self.m_per_class)
            self.batch_size = self.m_per_class * self._classes_per_batch
        if not len(self):
            got = f"{len(self.labels)} images at batch size {self.batch_size}"
            raise InputError(f"Dropping the last batch leaves no batch: {got}. Keep it, or use a smaller batch size.")

    def _check(self) -> None:
        if self.labels.ndim != 1 or not len(self.labels):
            raise InputError(sentence("labels must be one number per image", f"shape {self.labels.shape}"))
        if self.batch_size < 1:
            raise InputError(sentence("batch_size must be >= 1", self.batch_size))
        if self.kind not in get_args(Kind):
            raise InputError(sentence(f"sampler must be one of {', '.join(get_args(Kind))}", repr(self.kind)))
        if self.last not in get_args(Last):
            raise InputError(sentence("last must be keep or drop", repr(self.last)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        n = len(self.labels)
        return n // self.batch_size if self.last == "drop" else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[Indices]:
        generator = np.random.default_rng(derive_seed(self.seed, "order", self.epoch))
        order = self._order(generator)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size]

    def _order(self, generator: np.random.Generator) -> Indices:
        n, kind = len(self.labels), self.kind
        if kind == "m-per-class":
            return self._classes_in_turn(generator)
        if self.balanced_from is not None and self.epoch >= self.balanced_from:
            kind = "balanced"
        if kind == "plain":
            return generator.permutation(n)
        sizes = np.array([len(members) for members in self._members], dtype=np.float64)
        quota = apportion(np.sqrt(sizes) if kind == "sqrt" else np.ones_like(sizes), n)
        drawn = [_cycle(members, int(number), generator) for members, number in zip(self._members, quota, strict=True)]
        return generator.permutation(np.concatenate(drawn))

    def _classes_in_turn(self, generator: np.random.Generator) -> Indices:
        m = self.m_per_class or 1
        k, num_batches = self._classes_per_batch, len(self)
        turns = _turns(len(self._members), k, num_batches, generator)
        uses = np.bincount(turns.ravel(), minlength=len(self._members))
        pools = [
            iter(_cycle(members, m * int(use), generator).reshape(-1, m))
            for members, use in zip(self._members, uses, strict=True)
        ]
        batches = [np.concatenate([next(pools[c]) for c in turn]) for turn in turns]
        return np.concatenate([generator.permutation(batch) for batch in batches])


def _cycle(members: Indices, number: int, generator: np.random.Generator) -> Indices:
    """Draw ``number`` times from ``members``: whole passes, each in a new order, then a part of a pass."""
    passes = [generator.permutation(members) for _ in range(-(-number // len(members)))]
    return np.concatenate(passes)[:number] if passes else members[:0]


def _turns(num_classes: int, k: int, num_batches: int, generator: np.random.Generator) -> Indices:
    """Choose ``k`` different classes for each batch, so that all classes are used about equally often."""
    uses = np.zeros(num_classes, dtype=np.int64)
    turns = np.empty((num_batches, k), dtype=np.int64)
    for row in range(num_batches):
        shuffled = generator.permutation(num_classes)
        turns[row] = shuffled[np.argsort(uses[shuffled], kind="stable")[:k]]
        uses[turns[row]] += 1
    return turns
