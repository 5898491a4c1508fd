"""Which images of a folder or table to take: the options that commands and Python share. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lopsided.errors import InputError

if TYPE_CHECKING:
    from lopsided.data.sources.names import Patterns


@dataclass(frozen=True)
class Listed:
    """How images are listed: patterns of their names, and how a table names them."""

    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    path_column: str | None = None
    allow_outside: bool = False

    @property
    def patterns(self) -> Patterns:
        """What selects images by their names."""
        from lopsided.data.sources.names import Patterns

        return Patterns(self.include or (), self.exclude or ())


@dataclass(frozen=True)
class Related(Listed):
    """How images are listed that may belong to groups."""

    group: str | None = None
    group_from: str | None = None


@dataclass(frozen=True)
class Labelled(Related):
    """How labelled images are listed."""

    label_column: str | None = None


@dataclass(frozen=True)
class Tested(Labelled):
    """How images are listed to evaluate a model.

    With ``known_classes``, images of classes that the model does not have are left out.
    """

    skip_unreadable: bool = False
    known_classes: bool = False

    def check_unused(self) -> None:
        """Raise if a field is set. It has no effect on the data of the run, which are opened as in its recipe."""
        given = next((name for name, value in vars(self).items() if value), None)
        if given is not None:
            do = "Name the data, or leave the option out: the run's own data are opened as in its recipe."
            raise InputError(f"--{given.replace('_', '-')} needs DATA. {do}")
