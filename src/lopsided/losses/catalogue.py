"""The catalogue of losses: the one list that recipes, the command, the estimator, records, reports and tests read.

An entry says what a loss is called, what it needs, which parameters it has, and where its code is. Reading the
catalogue needs no torch; ``Loss.load`` imports the code. An installed package adds an entry through an entry point of
the group ``lopsided.losses`` whose name is the loss's name and whose object is a ``Loss``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lopsided.losses.objective import Objective

Kind = Literal["contrastive", "classification", "joint"]
Value = float | int | bool | str

GROUP = "lopsided.losses"
"""The group of entry points by which other packages add losses."""

MAX_PARITY_ETA = 20.0
"""A larger eta in units of parity is a mistaken absolute one: the paper's 60 to 300 are 0.1 to 0.5 at batch 128."""

_NEEDS: dict[str, frozenset[str]] = {
    "contrastive": frozenset({"projections"}),
    "classification": frozenset({"logits"}),
    "joint": frozenset({"projections", "logits"}),
}


class CatalogueError(ValueError):
    """A loss that is not in the catalogue, or an entry of another package that cannot be used."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a loss; its type is that of ``default``: float, int, bool or str.

    A number is at least ``least``, greater than ``above`` and at most ``most``; a text is one of ``choices``.
    """

    name: str
    default: Value
    description: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loss:
    """An entry of the catalogue.

    ``objective`` is the loss's :class:`~lopsided.losses.objective.Objective`, as a class or as "module:Class".
    ``complete`` may fill in parameters that were left out, from those that were given. ``check`` may say what is wrong
    with parameters that are each allowed but contradict each other. ``pushes`` names the parameter that, above 0, lets
    an anchor learn that has no positive in its batch.
    """

    name: str
    kind: Kind
    title: str
    objective: str | type[Objective]
    parameters: tuple[Parameter, ...] = ()
    short: str = ""
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    check: Callable[[Mapping[str, Any]], str | None] | None = None
    pushes: str | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What the loss is computed from: "projections", "logits", or both."""
        return _NEEDS[self.kind]

    @property
    def label(self) -> str:
        """The short name for tables and figures."""
        return self.short or self.name.upper()

    def defaults(self) -> dict[str, Value]:
        """Every parameter with its default."""
        return {parameter.name: parameter.default for parameter in self.parameters}

    def load(self) -> type[Objective]:
        """Import and return the class of the loss."""
        if not isinstance(self.objective, str):
            return self.objective
        module, _, name = self.objective.partition(":")
        found: type[Objective] = getattr(importlib.import_module(module), name)
        return found

    def describe(self, values: Mapping[str, Any]) -> str:
        """Name the loss with the parameters that differ from their defaults.

        >>> find("afcl").describe({"eta": 300.0, "eta_unit": "absolute", "gamma": 2.0})
        'AFCL(eta=300, eta_unit=absolute)'
        """
        changed = [
            f"{name}={values[name]:g}" if isinstance(default, float) else f"{name}={values[name]}"
            for name, default in self.defaults().items()
            if values.get(name, default) != default
        ]
        return f"{self.label}({', '.join(changed)})" if changed else self.label


_TEMPERATURE = Parameter("temperature", 0.07, "Divides the similarities.", least=1e-6, most=1e6)
_NORMALIZATION = Parameter(
    "normalization",
    "paper",
    "What the sums are divided by: as in the printed formula, or as in the code that the authors released.",
    choices=("paper", "released"),
)
_ETA = Parameter("eta", 0.5, "Weight of the negatives' term. Left out, it is 0.5 parity or 300 absolute.", least=0)
_ETA_UNIT = Parameter(
    "eta_unit",
    "parity",
    "absolute: the paper's eta. parity: times (n-1) log(n-1), where both terms weigh the same in a batch of n.",
    choices=("absolute", "parity"),
)


def _gamma(default: float, text: str) -> Parameter:
    return Parameter("gamma", default, text, least=0)


def _paper_eta(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"eta": 300.0, **values} if values.get("eta_unit") == "absolute" else values


def _check_eta(values: Mapping[str, Any]) -> str | None:
    if values["eta_unit"] == "parity" and values["eta"] > MAX_PARITY_ETA:
        return (
            f"eta is {values['eta']:g} in units of parity, where at most {MAX_PARITY_ETA:g} makes sense. "
            'For the paper\'s scale, set eta_unit = "absolute".'
        )
    return None


_CONTRASTIVE = "lopsided.losses.contrastive:ContrastiveObjective"
_FOCUS = "Focusing exponent of the positives' term."

_BUILT_IN = (
    Loss("cl", "contrastive", "Supervised contrastive loss", _CONTRASTIVE, (_TEMPERATURE, _NORMALIZATION)),
    Loss(
        "fcl",
        "contrastive",
        "Focal contrastive loss",
        _CONTRASTIVE,
        (_gamma(1.0, _FOCUS), _TEMPERATURE, _NORMALIZATION),
    ),
    Loss(
        "acl",
        "contrastive",
        "Asymmetric contrastive loss",
        _CONTRASTIVE,
        (_ETA, _ETA_UNIT, _TEMPERATURE, _NORMALIZATION),
        complete=_paper_eta,
        check=_check_eta,
        pushes="eta",
    ),
    Loss(
        "afcl",
        "contrastive",
        "Asymmetric focal contrastive loss",
        _CONTRASTIVE,
        (_ETA, _ETA_UNIT, _gamma(2.0, _FOCUS), _TEMPERATURE, _NORMALIZATION),
        complete=_paper_eta,
        check=_check_eta,
        pushes="eta",
    ),
    Loss("ce", "classification", "Cross-entropy", "lopsided.losses.classification:CrossEntropyObjective"),
    Loss(
        "weighted-ce",
        "classification",
        "Class-weighted cross-entropy",
        "lopsided.losses.classification:WeightedCrossEntropyObjective",
        short="weighted CE",
    ),
    Loss(
        "focal",
        "classification",
        "Focal loss",
        "lopsided.losses.classification:FocalObjective",
        (_gamma(2.0, "Focusing exponent."),),
        short="focal",
    ),
)
BUILT_IN = {loss.name: loss for loss in _BUILT_IN}


@cache
def _added() -> dict[str, EntryPoint]:
    """The entry points of other packages by name; nothing of them is imported."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def names() -> list[str]:
    """The names of all losses: those of this package, then those that other packages add."""
    return [*BUILT_IN, *sorted(_added())]


@cache
def find(name: str) -> Loss:
    """Return the entry of a loss; only the package that adds it is imported for that."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name not in _added():
        near = difflib.get_close_matches(name[:100], names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        shown = repr(name) if len(name) <= 80 else f"{name[:60]!r}..."
        raise CatalogueError(f"There is no loss {shown}; the losses are {', '.join(names())}.{hint}")
    point = _added()[name]
    where = f"The loss {name!r}, which {point.value} adds,"
    try:
        loss = point.load()
    except Exception as error:  # Whatever another package's code raises ends in a sentence.
        raise CatalogueError(f"{where} cannot be imported ({type(error).__name__}: {error}).") from error
    problem = _problem(loss, name)
    if problem:
        raise CatalogueError(f"{where} {problem}.")
    assert isinstance(loss, Loss)
    return loss


def _problem(loss: object, name: str) -> str:
    """Say why an object of another package cannot be an entry."""
    if not isinstance(loss, Loss):
        return f"is a {type(loss).__name__} and not a lopsided.losses.catalogue.Loss"
    if loss.name != name:
        return f"calls itself {loss.name!r}"
    if loss.kind not in _NEEDS:
        return f"has the kind {loss.kind!r}; the kinds are {', '.join(_NEEDS)}"
    for parameter in loss.parameters:
        if parameter.name == "name" or not parameter.name.isidentifier():
            return f"has a parameter that cannot be called {parameter.name!r}"
        if not isinstance(parameter.default, float | int | bool | str):
            return f"has a parameter {parameter.name} whose default is neither a number, a text nor a truth value"
    return ""


def losses(kinds: Iterable[str] = tuple(_NEEDS)) -> list[Loss]:
    """Return the entries of these kinds; an entry of another package that cannot be used is left out."""
    found = []
    for name in names():
        try:
            found.append(find(name))
        except CatalogueError:
            continue
    return [loss for loss in found if loss.kind in set(kinds)]
