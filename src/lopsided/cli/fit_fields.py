"""The fields of a recipe that options set: ``--set``, and errors that name the option instead of the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lopsided.errors import InputError, RunError

_OPTIONS = {"encoder.name": "--encoder", "classifier.epochs": "--classifier-epochs", "decision.rule": "--decide"}
"""The options whose name is not the last part of their field's name."""


def flag_of(field: str) -> str:
    """Return the option that sets a field of the recipe."""
    return _OPTIONS.get(field, f"--{field.rpartition('.')[2].replace('_', '-')}")


@contextmanager
def naming_flags(fields: Mapping[str, Any]) -> Iterator[None]:
    """Name the flag instead of the field in an error about a field that was set by a flag."""
    try:
        yield
    except (InputError, RunError) as error:
        text = str(error)
        for name in fields:
            flag = flag_of(name)
            start = r"(?<![\w.-])" if "." in name else "^"  # A plain word such as seed may have its usual meaning.
            text = re.sub(rf"{start}{re.escape(name)}(?!\w|\.\w)", flag, text)
        if text == str(error):
            raise
        raise type(error)(text) from error


def read_changes(texts: Iterable[str], options: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Read the values of --set. Raise an error if another option sets the same field to another value.

    ``options`` holds the name, the field and the value of each other option. A value is None if it is not given.
    """
    from lopsided.recipe import parse_change

    sets = dict(map(parse_change, texts))
    for name, field, value in options:
        for path in (field, f"{field}.name"):
            if value is not None and path in sets and sets[path] != value:
                given = name if value is True else f"{name} {value}"
                other = "unset" if sets[path] is None else json.dumps(sets[path], default=str)
                both = f"{given} and --set {path}={other}"
                raise InputError(f"{both} set the same field to different values. Remove one of the two.")
    return sets
