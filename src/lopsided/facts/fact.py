"""A fact about a run, and its kind: the words, whether it is a caution, and what becomes of it in a run with folds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, ParamSpec

P = ParamSpec("P")

Level = Literal["note", "caution"]
"""A caution is a reason to trust the metrics less."""
Folds = Literal["run", "once", "counted", "model"]
"""What a run with folds does with a fact of its folds.

- ``run``: nothing, because it is about one fold. The run has a fact of its own.
- ``once``: the fact is the same in all folds, and the run repeats it once.
- ``counted``: the run repeats it with the number of folds that have it.
- ``model``: the run repeats the fact of the model of all images. Folds may have other values.
"""

KINDS: dict[str, Kind[Any]] = {}
"""Every kind of fact by its name."""


@dataclass(frozen=True)
class Fact:
    """A kind and its values, which are JSON. ``folds`` are the number of folds that have it and of all folds."""

    kind: str
    values: Mapping[str, Any]
    folds: tuple[int, int] | None = None

    @property
    def is_caution(self) -> bool:
        """Whether it is a reason to trust the metrics less."""
        return KINDS[self.kind].level == "caution"

    @property
    def is_detail(self) -> bool:
        """Whether it is for those who ask how the run works, and not for everybody."""
        return KINDS[self.kind].is_detail

    @property
    def in_folds(self) -> Folds:
        """What a run with folds does with this fact of a fold."""
        return KINDS[self.kind].folds

    def __str__(self) -> str:
        words = KINDS[self.kind].words(**self.values)
        if self.folds is None or self.folds[0] == self.folds[1]:
            return words
        return f"In {self.folds[0]} of {self.folds[1]} folds: {words}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fact as JSON, with its words for readers."""
        folds = {} if self.folds is None else {"folds": list(self.folds)}
        return {"kind": self.kind, "values": dict(self.values), **folds, "text": str(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Fact | None:
        """Read the result of ``to_dict``. Return None for an unknown kind or values that do not fit it."""
        try:
            kind, folds = content["kind"], content.get("folds")
            fact = cls(kind, dict(content["values"]), None if folds is None else tuple(folds))
            str(fact)
        except (TypeError, ValueError, LookupError, AttributeError):  # The file may be damaged.
            return None
        return fact


class Kind(Generic[P]):
    """A kind of fact. Called with values, it returns a fact; ``words`` returns the sentence for the same values."""

    def __init__(
        self, function: Callable[P, str], level: Level, folds: Folds, apart: str | None, is_detail: bool = False
    ) -> None:
        self.level, self.folds, self.apart, self.is_detail = level, folds, apart, is_detail
        self.name, self.__doc__ = function.__name__, function.__doc__
        self._function, self._signature = function, inspect.signature(function)
        if self.name in KINDS:
            raise ValueError(f"There are two kinds of facts with the name {self.name}.")
        KINDS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Fact:
        """Return a fact of this kind with these values."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in bound.arguments.items()}
        return Fact(self.name, values)

    def words(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the sentence for these values."""
        return self._function(*args, **kwargs)

    def key(self, fact: Fact) -> tuple[str, Any]:
        """Return what tells facts of this kind apart: a run may have one for each stage."""
        return self.name, fact.values.get(self.apart) if self.apart else None


def note(folds: Folds, apart: str | None = None, *, detail: bool = False) -> Callable[[Callable[P, str]], Kind[P]]:
    """Make a function, which returns the words, into a kind of note.

    Facts with another value of ``apart`` are not merged. A ``detail`` is in the log, and printed by ``fit --verbose``.
    """
    return lambda words: Kind(words, "note", folds, apart, detail)


def caution(folds: Folds, apart: str | None = None) -> Callable[[Callable[P, str]], Kind[P]]:
    """Make a function into a kind of caution, as ``note`` does."""
    return lambda words: Kind(words, "caution", folds, apart)


def merge_folds(folds: Sequence[Sequence[Fact]], model: Sequence[Fact] = ()) -> list[Fact]:
    """Return what the facts of folds, and of the model of all images, say about their run.

    What becomes of a fact, its kind says. If a fold has a fact several times because it was resumed, the last counts.
    """
    last = [{KINDS[fact.kind].key(fact): fact for fact in facts} for facts in folds]
    merged: dict[tuple[str, Any], Fact] = {}
    for facts in last:
        for key, fact in facts.items():
            if fact.in_folds in ("once", "counted"):
                merged.setdefault(key, fact)
    for key, fact in merged.items():
        if fact.in_folds == "counted":
            merged[key] = replace(fact, folds=(sum(key in facts for facts in last), len(last)))
    of_model = {KINDS[fact.kind].key(fact): fact for fact in model if fact.in_folds == "model"}
    return [*merged.values(), *of_model.values()]
