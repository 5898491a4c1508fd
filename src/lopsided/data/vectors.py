"""Vectors instead of images: rows of numbers, such as features of an encoder from elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.data.decoding import Pixels
from lopsided.data.images import Images, Indices
from lopsided.errors import DataError, sentence

Numbers = npt.NDArray[np.floating[Any]]


class Vectors(Images):
    """Rows of finite numbers, (n, d). ``columns`` are the names of the d columns, if they have names."""

    def __init__(self, values: Numbers, columns: Sequence[str] = ()) -> None:
        self.values, self.columns = values, tuple(columns)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def width(self) -> int:
        """The number of columns."""
        return int(self.values.shape[1])

    @property
    def channels(self) -> int:
        """1: a vector has no colours."""
        return 1

    def take(self, indices: Indices) -> Vectors:
        """Return the rows at ``indices``, in that order."""
        return Vectors(self.values[indices], self.columns)

    def digest(self, indices: Indices) -> list[str]:
        """Return the SHA-256 of each row."""
        return [hashlib.sha256(row.astype(np.float64).tobytes()).hexdigest() for row in self.values[indices]]

    def size(self, index: int) -> tuple[int, int]:
        """Return 1 and the number of columns."""
        return 1, self.width

    def fitted(self, shape: Sequence[int], columns: Sequence[str], where: str) -> Vectors:
        """Return the columns that a model takes, in its order, or raise if they are not there."""
        if columns and self.columns:
            missing = [name for name in columns if name not in self.columns]
            if missing:
                got = f"no column {missing[0]!r} in {where}" + (f", and {len(missing) - 1} more" * (len(missing) > 1))
                raise DataError(sentence(f"vectors must have the {len(columns):,} columns of the model", got))
            return Vectors(self.values[:, [self.columns.index(name) for name in columns]], columns)
        if len(shape) != 1 or self.width != shape[0]:
            must = f"the model takes {f'vectors of {shape[0]:,} numbers' if len(shape) == 1 else 'images'}"
            raise DataError(sentence(must, f"vectors of {self.width:,} numbers in {where}"))
        return self

    def _describe(self, index: int) -> str:
        return f"row {index}"

    def _decode(self, index: int, image_size: int | None, channels: int) -> Pixels:
        raise DataError("Vectors are no images and have no pixels.")
