"""Columns of a table as features beside those of an encoder: numbers standardised, categories one-hot.

The cells of the training images decide what a column is. If all of them are numbers, it is one of numbers: each cell
becomes its distance from their mean, in deviations, and a mark whether it is missing. Otherwise each category has a
mark, and so has a cell that is missing or holds a category that no training image has. No label is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from lopsided.errors import DataError, sentence
from lopsided.recipe.blocks import CATEGORY, Cells, column_name

Features = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Finite = Annotated[float, Field(ge=-1e30, le=1e30)]

MISSING = frozenset({"", "na", "n/a", "nan", "nat", "<na>", "null", "none", "?"})
"""What a cell without a value may hold, in upper or lower case."""
MOST_CATEGORIES = 100
SHARE = 1.0
"""Weight of all columns of a table in a regression, as a share of that of the final layers (``Block.share``)."""
GIVEN_AWAY = 0.95
"""A column by which this balanced accuracy is reached alone gives the label away."""
_FEW_VALUES, _NEAREST = 10, 5
"""So few different numbers are like categories; of more, each image is judged by so many others."""


class NumberColumn(BaseModel):
    """A column of numbers, with mean and deviation of those of the training images."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["number"] = "number"
    name: str
    mean: Finite
    std: Annotated[float, Field(gt=1e-30, le=1e30)]

    @property
    def width(self) -> int:
        """Two features: the number, and the mark that it is missing."""
        return 2

    def about(self, cells: Sequence[str]) -> dict[str, Any]:
        """Return what a note says of the column, given its cells."""
        return {"name": self.name, "categories": None, "missing": sum(map(is_missing, cells))}

    def encode(self, cells: Sequence[str]) -> Features:
        """Return the features of cells, (n, width)."""
        odd = next((cell for cell in cells if not is_missing(cell) and _number(cell) is None), None)
        if odd is not None:
            raise DataError(sentence(f"the column {self.name} must hold numbers, or be empty", f"{odd!r:.60}"))
        values = np.array([self.mean if is_missing(cell) else float(cell) for cell in cells])
        marks = np.array([is_missing(cell) for cell in cells], dtype=np.float64)
        return np.stack([(values - self.mean) / self.std, marks], axis=1).astype(np.float32)


class CategoryColumn(BaseModel):
    """A column of categories, sorted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["category"] = "category"
    name: str
    values: tuple[str, ...] = Field(max_length=MOST_CATEGORIES)

    @property
    def width(self) -> int:
        """A feature for each category, and one for what is missing or unknown."""
        return len(self.values) + 1

    def about(self, cells: Sequence[str]) -> dict[str, Any]:
        """Return what a note says of the column, given its cells."""
        return {"name": self.name, "categories": len(self.values), "missing": sum(map(is_missing, cells))}

    def encode(self, cells: Sequence[str]) -> Features:
        """Return the features of cells, (n, width)."""
        places = {value: place for place, value in enumerate(self.values)}
        features = np.zeros((len(cells), self.width), dtype=np.float32)
        features[np.arange(len(cells)), [places.get(cell, len(places)) for cell in cells]] = 1.0
        return features


TableColumn = Annotated[NumberColumn | CategoryColumn, Field(discriminator="kind")]


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value.

    >>> is_missing(" NA"), is_missing("0")
    (True, False)
    """
    return cell.strip().lower() in MISSING


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) < 1e30 else None


def fit_column(asked: str, cells: Sequence[str]) -> NumberColumn | CategoryColumn:
    """Return the column of a name that was asked for, such as age or site:category, given the training images' cells.

    >>> fit_column("age", ["50", "", "70"])
    NumberColumn(kind='number', name='age', mean=60.0, std=10.0)
    >>> fit_column("sex", ["f", "m", "NA", "f"]).encode(["m", "?"]).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    name = column_name(asked)
    known = [cell for cell in cells if not is_missing(cell)]
    if not known:
        raise DataError(
            f"The column {name} is empty in all {len(cells):,} training images. Leave it out of the columns."
        )
    numbers = [_number(cell) for cell in known]
    if not asked.endswith(CATEGORY) and None not in numbers:
        values = np.array(numbers, dtype=np.float64)
        return NumberColumn(name=name, mean=float(values.mean()), std=float(values.std()) or 1.0)
    values_of = tuple(sorted(set(known)))
    if len(values_of) > MOST_CATEGORIES:
        do = "Leave the column out, or join its categories."
        got = f"{len(values_of):,} in {len(cells):,} training images"
        raise DataError(sentence(f"the column {name} must have at most {MOST_CATEGORIES} categories", got, do))
    return CategoryColumn(name=name, values=values_of)


def encode(columns: Sequence[NumberColumn | CategoryColumn], rows: Sequence[Cells]) -> Features:
    """Return the features of images, (n, f), given the cells beside each of them."""
    lacking = sum(len(row) != len(columns) for row in rows)
    if lacking:
        names = ", ".join(column.name for column in columns)
        do = f"Give a table (CSV or Parquet) with the columns path, {names}."
        must = f"the model takes the columns {names} beside each image"
        raise DataError(sentence(must, f"none for {lacking:,} of {len(rows):,} images", do))
    parts = [column.encode([row[place] for row in rows]) for place, column in enumerate(columns)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((len(rows), 0), dtype=np.float32)


def width_of(columns: Sequence[NumberColumn | CategoryColumn]) -> int:
    """Return the number of features of columns."""
    return sum(column.width for column in columns)


def telling(cells: Sequence[str], labels: Indices, column: NumberColumn | CategoryColumn) -> float:
    """Return the balanced accuracy that a column reaches alone, each image judged by others.

    These are the images of the same category or, if numbers differ, those with the nearest numbers. An image gets the
    class that is most over-represented among them. A category that only one image has says nothing.
    """
    counts = np.bincount(labels).astype(np.float64)
    seen, own = counts > 0, np.eye(len(counts))[labels]
    values = np.array(
        [np.nan if is_missing(cell) else float(cell) for cell in cells] if isinstance(column, NumberColumn) else []
    )
    known = ~np.isnan(values)
    if len(np.unique(values[known])) > _FEW_VALUES:
        others = np.zeros_like(own)
        others[known] = _nearest(values[known], own[known])
        others[~known] = own[~known].sum(axis=0) - own[~known]
    else:
        _, codes = np.unique([cell.strip() for cell in cells], return_inverse=True)
        sums = np.zeros((codes.max() + 1, len(counts)))
        np.add.at(sums, codes, own)
        others = sums[codes] - own
    shares = others / np.maximum(counts - own, 1.0)
    right = (shares.argmax(axis=1) == labels) & (shares.max(axis=1) > 0)
    return float((np.bincount(labels, weights=right, minlength=len(counts))[seen] / counts[seen]).mean())


def _nearest(values: npt.NDArray[np.float64], own: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how many of the nearest others of each number are of each class. Equal numbers are in random order."""
    mixed = np.random.default_rng(0).permutation(len(values))
    order = mixed[np.argsort(values[mixed], kind="stable")]
    steps = np.array([step for step in range(-_NEAREST, _NEAREST + 1) if step])
    places = np.arange(len(order))[:, None] + steps
    inside = (places >= 0) & (places < len(order))
    rows = order[np.clip(places, 0, len(order) - 1)]
    distances = np.where(inside, np.abs(values[rows] - values[order][:, None]), np.inf)
    chosen = np.take_along_axis(rows, np.argsort(distances, axis=1, kind="stable")[:, :_NEAREST], axis=1)
    found = np.empty_like(own)
    found[order] = own[chosen].sum(axis=1)
    return found
