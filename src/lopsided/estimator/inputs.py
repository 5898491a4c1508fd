"""The samples of an estimator: images and vectors as users pass them, checked and stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lopsided.errors import InputError, sentence


def checked_groups(groups: Any, num: int) -> npt.NDArray[np.str_] | None:
    """Return the groups as strings. Raise if there is not one for each input."""
    if groups is None:
        return None
    found = np.asarray(on_cpu(groups)).astype(np.str_)
    if found.shape != (num,):
        must = f"groups must have one entry for each of the {num} inputs"
        raise InputError(sentence(must, f"the shape {found.shape}"))
    return found


def are_images(X: Any) -> bool:
    """Return whether an array holds images, by its number of dimensions."""
    return getattr(X, "ndim", 0) in (3, 4)


def stacked(X: Any) -> Any:
    """Return a list of images as one array. Return anything else unchanged. Entries of different sizes are refused."""
    if not isinstance(X, list | tuple) or not X:
        return X
    entries = []
    for i, entry in enumerate(X):
        try:
            entries.append(np.asarray(on_cpu(entry)))
        except ValueError:  # numpy refuses nested lists of different lengths.
            raise InputError(f"Entry {i} of X is ragged: its rows have different lengths. Make them equal.") from None
    other = next((i for i, entry in enumerate(entries) if entry.shape != entries[0].shape), None)
    if other is not None:
        what = "images" if max(entries[0].ndim, entries[other].ndim) > 1 else "rows"
        do = "Resize the images." if what == "images" else "Fill or cut the rows."
        got = f"the shape {entries[0].shape} in entry 0 and {entries[other].shape} in entry {other}"
        raise InputError(sentence(f"all {what} of X must have the same size", got, do))
    array = np.stack(entries)
    return array if are_images(array) else X


def on_cpu(values: Any) -> Any:
    """Return a tensor as an array. Return anything else unchanged."""
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values


def plain_numbers(value: Any) -> Any:
    """Convert numpy numbers, which parameter grids often hold, to Python numbers."""
    if isinstance(value, Mapping):
        return {name: plain_numbers(one) for name, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value
