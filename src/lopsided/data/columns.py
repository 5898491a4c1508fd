"""Columns of a table beside each image, such as age, sex and site. Their cells go with the path of the image."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

from lopsided.data.stored import ImagePath, Stored
from lopsided.errors import DataError, sentence
from lopsided.recipe.columns import Cells, column_name

if sys.platform == "win32":
    _Path = WindowsPath
else:
    _Path = PosixPath


class DescribedPath(_Path):
    """The path of an image in a table, with cells of its row. It is equal to the path without them."""

    cells: Cells = ()

    @classmethod
    def of(cls, path: Path, cells: Sequence[str]) -> DescribedPath:
        """Return a path with its cells."""
        found = cls(path)
        found.cells = tuple(cells)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return DescribedPath.of, (Path(self), self.cells)


def cells_of(path: ImagePath) -> Cells:
    """Return the cells that go with a path; none if it is not that of a table with columns."""
    return path.cells if isinstance(path, DescribedPath | Stored) else ()


def described(path: ImagePath, cells: Sequence[str]) -> ImagePath:
    """Return a path with its cells; unchanged without any."""
    if not cells:
        return path
    if isinstance(path, Stored):
        path.cells = tuple(cells)
        return path
    return DescribedPath.of(path, cells)


def rows_of(where: object, columns: Mapping[str, Sequence[str]], asked: Sequence[str]) -> list[Cells]:
    """Return the cells of the columns that were ``asked`` for, row by row. Raise if a column is missing."""
    names = [column_name(text) for text in asked]
    missing = [name for name in names if name not in columns]
    if missing:
        has = f"{', '.join(columns)} in {where}"
        raise DataError(sentence(f"a table must have the columns {', '.join(names)} beside each image", f"{has:.300}"))
    return list(zip(*(columns[name] for name in names), strict=True))


def no_columns(where: object, asked: Sequence[str]) -> DataError:
    """Return the error that ``where`` is no table with the columns that were ``asked`` for."""
    names = ", ".join(column_name(text) for text in asked)
    must = f"the columns {names} must stand beside each image, in a table (CSV or Parquet) with the column path"
    return DataError(sentence(must, where))
