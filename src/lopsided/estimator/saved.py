"""The file ``estimator.json`` of a saved estimator."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def read_saved(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """Read the file of a saved estimator, which may be missing. ``known`` are the parameters of an estimator."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON. Save the estimator again.") from error
    if not isinstance(content, dict) or content.get("format") not in (1, FORMAT):
        raise RunError(f"{path} does not have format {FORMAT}. Save the estimator again.")
    if content["format"] == 1 and isinstance(content.get("parameters"), dict):
        # Some parameters of format 1 are now fields of the recipe. Only another fit would need them.
        content["parameters"] = {name: value for name, value in content["parameters"].items() if name in known}
    return content
