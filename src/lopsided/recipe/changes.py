"""Changes of a recipe as words, such as ``eta=300``: in commands and in the methods of a comparison.

The name of a word is the full name of a field (``encoder_training.loss.eta``), its last part if only one field ends in
it, or one of ``SHORT``. Its value is TOML, or a string if it is not valid TOML; ``unset`` removes a value.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lopsided.errors import InputError, RunError
from lopsided.losses import catalogue
from lopsided.recipe import words
from lopsided.recipe.rules import read_rule
from lopsided.recipe.schema import Recipe

LOSS = "encoder_training.loss"
SHORT = {
    "loss": (LOSS,),
    "encoder": ("encoder.name",),
    "decide": ("decision.rule",),
    "tta": ("encoder.views",),
    "folds": ("data.folds",),
    "epochs": ("encoder_training.epochs",),
    "lr": ("encoder_training.lr",),
    "batch_size": ("encoder_training.batch_size", "classifier.batch_size"),
    "classifier_epochs": ("classifier.epochs",),
}
"""Names that are not the last part of their field, or of several fields. ``tta`` is test-time augmentation."""
_WORD = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z0-9_]+)* *=", re.ASCII | re.IGNORECASE)


def is_word(text: str) -> bool:
    """Return whether a text of a command line is a change, and not a path.

    >>> [is_word(text) for text in ("eta=300", "encoder_training.views=2", "photos", "./a=b")]
    [True, True, False, False]
    """
    return _WORD.match(text) is not None


@dataclass(frozen=True)
class Changes:
    """New values of fields by their full names, and how the user wrote each of these names."""

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    def set(self, written: str, path: str, value: Any) -> None:
        """Add a change. Raise if the field was set to another value before."""
        path = path.removesuffix(".name") if path.endswith(".loss.name") else path
        if isinstance(value, list) and isinstance(self.values.get(path), list):
            value = [*self.values[path], *value]
        elif path in self.written and self.values[path] != value:
            both = f"{_shown(self.written[path], self.values[path])} and {_shown(written, value)}"
            raise InputError(f"{both} set the same field to different values. Remove one of the two.")
        self.values[path], self.written[path] = value, written

    def resolve(self) -> None:
        """Read the file of a matrix of costs, and let one fold mean one split."""
        if isinstance(rule := self.values.get("decision.rule"), str):
            self.values["decision.rule"] = read_rule(rule)
        if self.values.get("data.folds") == 1:
            self.values["data.folds"] = None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let errors about one of these fields start with what the user wrote."""
        try:
            yield
        except (InputError, RunError) as error:
            path, space, rest = str(error).partition(" ")
            if path not in self.written:
                raise
            raise type(error)(f"{self.written[path]}{space}{rest}") from error


def read_words(
    texts: Iterable[str],
    options: Mapping[str, tuple[str, Any]] | None = None,
    recipe: Callable[[], Recipe | None] = lambda: None,
) -> Changes:
    """Read words. ``options`` are fields that options set: option by full name, with the value or None.

    ``recipe`` returns the recipe to change, if it is known: a name may then be the last part of several fields, if one
    of them has an effect on it.

    >>> read_words(["eta=300", "scenario=90:10", "include=*.jpg"]).values
    {'encoder_training.loss.eta': 300, 'data.scenario': '90:10', 'data.include': ['*.jpg']}
    """
    changes = Changes()
    for path, (option, value) in (options or {}).items():
        if value is not None:
            changes.set(option, path, value)
    parts = [(name.strip(), value) for name, _, value in (text.partition("=") for text in texts)]
    _set_all(changes, parts, lambda path, value: _value(path, value.strip()), recipe)
    return changes


def read_values(values: Mapping[str, Any], recipe: Callable[[], Recipe | None] = lambda: None) -> Changes:
    """Return the changes of values in Python, by the names of ``read_words``; ``__`` stands for a dot.

    >>> read_values({"eta": 300, "encoder_training__views": 2}).values
    {'encoder_training.loss.eta': 300, 'encoder_training.views': 2}
    """
    changes = Changes()

    def convert(path: str, value: Any) -> Any:
        return [value] if tuple in _kinds(_known().get(path)) and isinstance(value, str) else value

    _set_all(changes, [(name.replace("__", "."), value) for name, value in values.items()], convert, recipe)
    return changes


def _set_all(
    changes: Changes,
    parts: Sequence[tuple[str, Any]],
    convert: Callable[[str, Any], Any],
    recipe: Callable[[], Recipe | None],
) -> None:
    losses = [changes.values.get(LOSS), *(value for name, value in parts if name in ("loss", LOSS, f"{LOSS}.name"))]
    for name, value in parts:
        for path in _fields(name, value, next((loss for loss in losses if loss), None), recipe):
            changes.set(name, path, convert(path, value))
    values = changes.values
    if isinstance(values.get(LOSS), str):  # Parameters are part of the loss, so that they can complete each other.
        own = {path: values.pop(path) for path in list(values) if path.startswith(f"{LOSS}.")}
        if own:
            values[LOSS] = {"name": values[LOSS], **{path.removeprefix(f"{LOSS}."): own[path] for path in own}}


def _fields(name: str, value: object, loss: object, recipe: Callable[[], Recipe | None]) -> tuple[str, ...]:
    """Return the full names of the fields that a word sets."""
    if isinstance(loss, str) and loss in catalogue.names() and name in catalogue.find(loss).defaults():
        return (f"{LOSS}.{name}",)
    if name in SHORT or "." in name or name in Recipe.model_fields:
        return SHORT.get(name, (name,))
    found = [path for path in _known() if path.rpartition(".")[2] == name]
    if len(found) > 1 and (base := recipe()) is not None:
        found = [path for path in found if base.unused(path) is None] or found
    if len(found) > 1:
        others = [next((short for short in SHORT if SHORT[short] == (path,)), path) for path in found]
        raise InputError(f"{name}={value} may mean {' or '.join(others)}. Write one of these names.")
    if not found:
        near = near_fields(name)
        do = f"Did you mean {' or '.join(near)}?" if near else "`lopsided recipes NAME` shows the fields of a recipe."
        if os.path.exists(f"{name}={value}"):
            do = f"If you mean the file or folder, write ./{name}={value}."
        raise InputError(f"A recipe has no field {words.shown(name)}. {do}")
    return tuple(found)


def near_fields(name: str) -> list[str]:
    """Return at most two short names of fields that are close to a name."""
    names = [*SHORT, *(path.rpartition(".")[2] for path in _known())]
    return difflib.get_close_matches(name[:100], list(dict.fromkeys(names)), n=2)


@functools.cache
def _known() -> dict[str, Any]:
    """Return all fields by their full names, with their types; parameters of a loss have none."""
    fields = {path: item.annotation for path, item, _ in words.leaves(Recipe()) if ".loss." not in path}
    return fields | {f"{LOSS}.{item.name}": None for loss in catalogue.losses() for item in loss.parameters}


def _value(path: str, text: str) -> Any:
    """Read a value, as a list if the field is one."""
    if text == "unset":
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # tomllib passes on Python's limits on digits and depth
        value = text
    kinds = _kinds(_known().get(path))
    if isinstance(value, datetime.date | datetime.time) or (kinds == {str} and not isinstance(value, str)):
        value = text  # 10:30:60 is a time in TOML, and the name of a column may be a number.
    if path == "data.columns" and isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return [value] if tuple in kinds and isinstance(value, str) else value


def _kinds(annotation: Any) -> set[type]:
    """Return the plain types of a field."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(args[0])
    if origin in (Union, types.UnionType):
        return set().union(*map(_kinds, args)) - {type(None)}
    if origin is Literal:
        return {type(arg) for arg in args}
    return {origin or annotation}


def _shown(written: str, value: Any) -> str:
    if value is True and written.startswith("-"):
        return written
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    plain = one if isinstance(one, str) else "unset" if one is None else words.toml_value(one)
    return f"{written}{' ' if written[:1] == '-' or written.isupper() else '='}{plain}"
