"""Reading of Parquet tables, through pyarrow, which is an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lopsided.errors import DataError, MissingDependencyError
from lopsided.files import check_regular

SUFFIXES = frozenset({".parquet", ".pq"})


def load_pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        repair = "Run pip install pyarrow, or write the table as CSV."
        raise MissingDependencyError(f"Reading Parquet needs pyarrow, which is not installed. {repair}") from error
    return pyarrow, pyarrow.parquet


@contextmanager
def reading_parquet(table: object) -> Iterator[None]:
    """Turn errors of reading a Parquet table into errors of one sentence."""
    pyarrow, _ = load_pyarrow()
    try:
        yield
    except DataError:
        raise
    # Invalid UTF-8, dates outside the range of Python and unknown time zones raise built-in exceptions.
    except (OSError, ValueError, LookupError, OverflowError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"Cannot read the Parquet table {table} ({reason:.200}).") from error


def read_parquet(table: Path) -> Any:
    """Return a table of pyarrow."""
    _, parquet = load_pyarrow()
    with reading_parquet(table):
        check_regular(table)
        return parquet.read_table(table, memory_map=False)


def texts_of(values: list[Any]) -> list[str]:
    """Return the values of a column as texts. Empty cells are empty texts; a list of one value is this value."""
    alone = (value[0] if isinstance(value, list) and len(value) == 1 else value for value in values)
    return ["" if value is None else str(value) for value in alone]


def image_column(schema: Any) -> str | None:
    """Return the column that holds images: bytes, or bytes beside a path as in data sets of the Hugging Face hub."""
    types = load_pyarrow()[0].types
    for field in schema:
        kind = field.type
        if types.is_struct(kind):
            kind = next((kind.field(i).type for i in range(kind.num_fields) if kind.field(i).name == "bytes"), kind)
        if types.is_binary(kind) or types.is_large_binary(kind):
            return str(field.name)
    return None
