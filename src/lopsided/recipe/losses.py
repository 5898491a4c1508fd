"""Losses in a recipe: a table with the name of the loss and its parameters from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, ValidationError, create_model

from lopsided.losses import catalogue
from lopsided.losses.catalogue import CatalogueError, Loss, Parameter
from lopsided.recipe.values import Section
from lopsided.recipe.words import RefusedError, listed, phrase_of, shown

_GREEK = {"eta": "\N{GREEK SMALL LETTER ETA}", "gamma": "\N{GREEK SMALL LETTER GAMMA}"}


class LossSettings(Section):
    """A loss and its parameters. All fields except ``name`` come from the entry in the catalogue."""

    name: str = Field(description="Name of the loss; `lopsided losses` lists all losses.")

    def __eq__(self, other: object) -> bool:
        """Compare name and parameters. The class does not count: a loss that is found again gets another class."""
        return isinstance(other, LossSettings) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.model_dump().items())))

    @property
    def entry(self) -> Loss:
        """The loss's entry in the catalogue."""
        return catalogue.find(self.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of the parameters, by name."""
        return {name: value for name, value in self if name != "name"}

    @property
    def label(self) -> str:
        """A readable name: the loss with the parameters that differ from their defaults."""
        return self.entry.describe(self.parameters)

    @property
    def words(self) -> str:
        """The title and the parameters, for a sentence. Default temperatures and default texts are left out."""
        entry, usual = self.entry, self.entry.defaults()
        text = f"{entry.title[0].lower()}{entry.title[1:]}"
        if entry.kind != "classification":
            text += f" ({entry.label})"
        shown = []
        for name, value in self.parameters.items():
            if name == "eta_unit" or (value == usual[name] and (isinstance(value, str) or name == "temperature")):
                continue
            by_parity = name == "eta" and self.parameters.get("eta_unit") == "parity"
            unit = " \N{MULTIPLICATION SIGN} parity" if by_parity else ""
            shown.append(f"{_GREEK.get(name, name)} = {f'{value:g}' if isinstance(value, float) else value}{unit}")
        return f"{text} with {', '.join(shown)}" if shown else text

    def switched(self, to: object) -> dict[str, Any]:
        """Return the table of another loss. It keeps the parameters set here that the other loss also has.

        A contrastive and a classification loss share no parameters, because gamma has different meanings in them.
        """
        table = _table(to)
        if table["name"] == self.name:
            return {**self.model_dump(), **table}
        other = _entry(table["name"])
        akin = other.defaults() if other.needs & self.entry.needs else {}
        chosen = {
            name: value
            for name, value in self.parameters.items()
            if name in akin and value != self.entry.defaults()[name]
        }
        return {**table, **chosen, **table}


@cache
def settings_model(name: str) -> type[LossSettings]:
    """Return the section class of a loss: its name and its parameters with ranges and descriptions."""
    fields: dict[str, Any] = {
        parameter.name: (_annotation(parameter), Field(parameter.default, description=parameter.description))
        for parameter in catalogue.find(name).parameters
    }
    description = LossSettings.model_fields["name"].description
    fields = {"name": (Literal[name], Field(name, description=description)), **fields}
    about = f"{catalogue.find(name).title}."
    made: type[LossSettings] = create_model("LossSettings", __base__=LossSettings, __doc__=about, **fields)
    return made


def read_loss(value: object) -> LossSettings:
    """Build the section of a loss from its name, or from a table with its name and parameters."""
    if isinstance(value, LossSettings):
        return value
    table = _table(value)
    entry = _entry(table["name"])
    known = entry.defaults()
    unknown = [name for name in table if name != "name" and name not in known]
    if unknown:
        has = f"it has {listed(list(known))}" if known else "it has none"
        raise RefusedError("", f'"{entry.name}" has no parameter {shown(unknown[0])}; {has}.')
    table = _completed(entry, table)
    model = settings_model(entry.name)
    try:
        settings = model(**table)
    except ValidationError as error:
        item = error.errors(include_url=False, include_context=False)[0]
        name = str(item["loc"][0])
        raise RefusedError(f".{name}", f"must be {phrase_of(model, name)}, got {shown(item['input'])}.") from None
    problem = _contradiction(entry, settings.parameters)
    if problem is not None:
        raise RefusedError("", f"is inconsistent: {problem}")
    return settings


@contextmanager
def _running(entry: Loss, what: str) -> Iterator[None]:
    try:
        with catalogue.running(entry, what):
            yield
    except CatalogueError as error:
        raise RefusedError("", f"is not valid. {error}") from error


def _completed(entry: Loss, table: dict[str, Any]) -> dict[str, Any]:
    if entry.complete is None:
        return table
    with _running(entry, "its function complete"):
        found = dict(entry.complete(table))
        unknown = [name for name in found if name != "name" and name not in entry.defaults()]
        if unknown:
            raise ValueError(f"it returned {shown(unknown[0])}, which is not one of the loss's parameters")
    return {**found, "name": entry.name}


def _contradiction(entry: Loss, values: Mapping[str, Any]) -> str | None:
    if entry.check is None:
        return None
    with _running(entry, "its function check"):
        problem = entry.check(values)
        if not isinstance(problem, str | None):
            raise TypeError(f"it returned {shown(problem)}, which is neither a sentence nor None")
    return problem


def _table(value: object) -> dict[str, Any]:
    if isinstance(value, LossSettings):
        return value.model_dump()
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise RefusedError("", f"must be a loss's name, or a table with name and parameters, got {shown(value)}.")
    return dict(table)


def _entry(name: str) -> Loss:
    try:
        return catalogue.find(name)
    except CatalogueError as error:
        raise RefusedError("", f"is not valid. {error}") from None


def _annotation(parameter: Parameter) -> Any:
    if parameter.choices:
        return Literal[parameter.choices]
    kind: Any = type(parameter.default)
    bounds: list[Any] = [
        bound(limit)
        for bound, limit in ((Ge, parameter.least), (Gt, parameter.above), (Le, parameter.most))
        if limit is not None
    ]
    if kind is float:
        bounds.append(AfterValidator(lambda x: x + 0.0))  # -0.0 and 0.0 must give the same recipe.
    return Annotated[(kind, *bounds)] if bounds else kind


LossField = Annotated[SerializeAsAny[LossSettings], BeforeValidator(read_loss)]
