"""Tables in which images have several labels, which cannot be trained on: found, counted and refused in one sentence.

Such tables come in four forms: a row per label, labels joined in one cell, a list in a cell of Parquet, and a column of
0 and 1 per class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lopsided.errors import DataError

_JOINTS = re.compile(r"\s*[|;,+&]\s*")
_FLAGS = {"0", "1", "0.0", "1.0", "", "true", "false", "True", "False"}
_SET = {"1", "1.0", "true", "True"}


def check_rows(table: Path, names: Sequence[str], labels: Sequence[str]) -> None:
    """Raise if rows give an image several labels."""
    of: dict[str, set[str]] = {}
    for name, label in zip(names, labels, strict=True):
        of.setdefault(name, set()).add(label)
    _refuse(table, [f"{name} ({' and '.join(sorted(own))})" for name, own in of.items() if len(own) > 1], len(of))


def check_cells(table: Path, names: Sequence[str], labels: Sequence[str]) -> None:
    """Raise if cells join labels, as in cat|dog, all of which other images have alone."""
    alone = set(labels)
    joined = {label for label in alone if len(parts := _JOINTS.split(label)) > 1 and alone.issuperset(parts)}
    _refuse(
        table,
        [f"{name} ({label})" for name, label in zip(names, labels, strict=True) if label in joined],
        len(names),
    )


def check_lists(table: Path, names: Sequence[str], lists: Sequence[object]) -> None:
    """Raise if cells hold lists of several labels."""
    several = [
        f"{name} ({' and '.join(map(str, own))})"
        for name, own in zip(names, lists, strict=True)
        if isinstance(own, list) and len(own) > 1
    ]
    _refuse(table, several, len(names))


def check_flags(table: Path, columns: Mapping[str, Sequence[str]]) -> None:
    """Raise if a table without labels has columns of 0 and 1, of which an image has several."""
    flags = {name: values for name, values in columns.items() if values and _FLAGS.issuperset(values)}
    if len(flags) < 2:
        return
    rows = range(len(columns["path"]))
    labels = [[name for name, values in flags.items() if values[row] in _SET] for row in rows]
    check_lists(table, columns["path"], labels)


def _refuse(table: Path, several: Sequence[str], total: int) -> None:
    if several:
        raise DataError(
            f"{len(several):,} of {total:,} images in {table} have several labels, the first {several[0]:.200}: "
            "lopsided gives each image one label. Keep the label that matters, or train one model per label."
        )
