"""The names of ``data.columns``: columns of a table that stand beside each image."""

from __future__ import annotations

CATEGORY = ":category"
"""The end of the name of a column whose numbers are codes of categories."""
Cells = tuple[str, ...]
"""The texts of these columns in one row."""


def column_name(asked: str) -> str:
    """Return the name of a column in a table.

    >>> column_name("age"), column_name("site:category")
    ('age', 'site')
    """
    return asked.removesuffix(CATEGORY)
