"""Names that this package gives to objects, and to which other packages add through entry points."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from lopsided.errors import InputError, sentence

Entry = TypeVar("Entry")


class Entries(Generic[Entry]):
    """The objects of one kind by name. Looking at the names imports no other package.

    ``group`` is the group of entry points: the name of an entry point is the name of the object, and its value the
    place of the object. ``what`` names the kind in errors, and ``built_in`` holds the places of the objects of this
    package, as "module:object". An object must be an instance of ``kind``, or with ``classes`` a class derived from it.
    """

    def __init__(
        self, group: str, what: str, kind: type, built_in: Mapping[str, str], *, classes: bool = False
    ) -> None:
        self.group, self.what, self.kind, self.built_in, self.classes = group, what, kind, built_in, classes
        self._loaded: dict[str, Entry] = {}

    def names(self) -> list[str]:
        """Return the names of all objects: first those of this package, then those of other packages."""
        return [*self.built_in, *sorted({point.name for point in _points(self.group)} - self.built_in.keys())]

    def find(self, name: str) -> Entry:
        """Return the object of this name. Raise an error of one sentence if there is none, or if it cannot be used."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> Entry:
        if name in self.built_in:
            found: Entry = load(self.built_in[name])
            return found
        points = [point for point in _points(self.group) if point.name == name]
        if not points:
            near = difflib.get_close_matches(name[:100], self.names(), n=1)
            names = ", ".join(f'"{each}"' for each in self.names())
            do = f"Did you mean {near[0]}?" if near else ""
            raise InputError(sentence(f"{self.what} must be one of {names}", repr(name[:80]), do))
        if len(points) > 1:
            packages = " and ".join(map(_package, points))
            raise InputError(f"{packages} both add the {self.what} {name!r}. Uninstall one of them.")
        where = f"The {self.what} {name!r} of {_package(points[0])}"
        try:
            added = points[0].load()
        except Exception as error:  # Other packages may raise anything; the user gets one sentence.
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InputError(f"{where} cannot be imported ({text}).") from error
        of = f"{self.kind.__module__}.{self.kind.__name__}"
        if self.classes and not (isinstance(added, type) and issubclass(added, self.kind)):
            raise InputError(sentence(f"{where} must be a class derived from {of}", repr(added)[:80]))
        if not self.classes and not isinstance(added, self.kind):
            raise InputError(sentence(f"{where} must be an object of the class {of}", repr(added)[:80]))
        if getattr(added, "name", name) != name:
            raise InputError(f"{where} calls itself {added.name!r}. Use one name.")
        entry: Entry = added
        return entry


def load(place: str) -> Any:
    """Import an object from its place, "module:object"."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _points(group: str) -> list[EntryPoint]:
    return list(entry_points(group=group))


def _package(point: EntryPoint) -> str:
    return f"the module {point.module}" if point.dist is None else f"the package {point.dist.name}"
