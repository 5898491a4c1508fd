"""The file ``estimator.json`` of a saved estimator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lopsided.errors import RunError

FILE_NAME = "estimator.json"
FORMAT = 2
DTYPES: dict[str, Any] = {
    "i": np.int64, "u": np.uint64, "f": np.float64, "b": np.bool_, "U": np.str_, "O": object
}  # fmt: skip


def plain(value: object) -> object:
    """Return a numpy number or a path as a JSON value."""
    return value.item() if isinstance(value, np.generic) else str(value)


def read_saved(path: Path) -> dict[str, Any]:
    """Read the file of a saved estimator, which may be missing."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON. Save the estimator again.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunError(f"{path} does not have format {FORMAT}. Save the estimator again.")
    return content
