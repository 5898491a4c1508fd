"""Candidates: named changes of a recipe, to be compared on the same data."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lopsided.data.scenarios import parse_scenario
from lopsided.errors import InputError, sentence
from lopsided.losses import catalogue
from lopsided.recipe import RUNTIME_FIELDS, Recipe, find_recipe, is_word, named_recipes, read_words
from lopsided.recipe.words import leaves, shown, suggest

LOSS = "encoder_training.loss"
OWN_DATA = frozenset({"data.image_size", "data.channels"})
"""Fields of the data that a candidate may set: they change how images are presented, not which images are used."""

OWN_IN_FOLDS = frozenset({"data.val"})
"""Fields of the data that a recipe keeps if the runs are folds. The test images do not depend on them."""

SHARED_FIELDS = frozenset({"seed", "description"}) | RUNTIME_FIELDS
"""Fields that every candidate takes from the base recipe, besides the data."""


_COMMA = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)""")
"""A comma between methods, not one in quotes."""


@dataclass(frozen=True)
class Candidate:
    """Changes of a recipe by dotted names, or another recipe, which keeps the data and the seed of the base.

    >>> Candidate("mine", {"encoder_training.loss": "cl"}).applied(Recipe()).encoder_training.loss.label
    'CL'
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None

    def applied(self, base: Recipe) -> Recipe:
        """Return the recipe of this candidate, with the data and the seed of ``base``."""
        if self.recipe is None:
            return base.override(**self.changes)
        kept = OWN_IN_FOLDS if base.data.folds is not None else frozenset()
        shared = {path: value for path, _, value in leaves(base) if is_shared(path) and path not in kept}
        own = {path: value for path, _, value in leaves(self.recipe) if path in OWN_DATA and value is None}
        if self.recipe.augment.normalisation == "weights":  # Size and channels then belong to the encoder's weights.
            own = {}
        return self.recipe.override(**shared, **{path: _get(base, path) for path in own}).override(**self.changes)


def is_shared(path: str) -> bool:
    """Return whether all candidates share a field: the data, the seed, and fields that do not change the result."""
    return path in SHARED_FIELDS or (path.startswith("data.") and path not in OWN_DATA)


def split_changes(start: Recipe, sets: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """Return the base of a comparison, and the ``sets`` that do not fit it but may fit the losses of the candidates.

    Such as ``encoder_training.mixup``, which the loss of the base may not take.
    """
    try:
        return start.override(**{**sets, **given}), {}
    except InputError:
        late = {path: value for path, value in sets.items() if not is_shared(path)}
        return start.override(**{path: sets[path] for path in sets if path not in late}, **given), late


def parse_candidates(
    texts: Iterable[str], sets: Mapping[str, Any] | None = None, late: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Read the methods of a comparison from comma-separated lists.

    ``sets`` are changes that also apply to methods which are recipes. ``late`` are changes that apply to methods which
    are losses, because the base does not have them.

    >>> [method.name for method in parse_candidates(["ce, cl, afcl eta=300 eta_unit=absolute"])]
    ['ce', 'cl', 'afcl eta=300 eta_unit=absolute']
    """
    parts = [part.strip() for text in texts for part in _COMMA.split(text)]
    if not parts or not all(parts):
        must = "--methods must be a comma-separated list without empty entries"
        raise InputError(sentence(must, shown(",".join(parts)), 'Such as "quick, ce, afcl gamma=7".'))
    return [parse_candidate(part, sets, late) for part in parts]


def parse_candidate(
    text: str, sets: Mapping[str, Any] | None = None, late: Mapping[str, Any] | None = None
) -> Candidate:
    """Read one method: a loss, a named recipe or a recipe file, and the words that change it.

    ``sets`` that have no effect on a recipe are left out of it.

    >>> parse_candidate("afcl eta=300 eta_unit=absolute").changes["encoder_training.loss"]
    {'name': 'afcl', 'eta': 300, 'eta_unit': 'absolute'}
    """
    try:
        parts = shlex.split(text)
        what, *texts = shlex.split(parts[0]) if len(parts) == 1 else parts  # A method may be in quotes as a whole.
    except ValueError as error:
        raise InputError(f"The method {shown(text)} cannot be read: {str(error).lower()}.") from None
    odd = next((word for word in texts if not is_word(word)), None)
    if odd is not None:
        do = "Separate methods by commas, and write settings as NAME=VALUE, such as afcl gamma=7."
        raise InputError(f"The method {shown(text)} has a word that cannot be read: {shown(odd)}. {do}")
    is_loss = what in catalogue.names()
    recipe = None if is_loss else _find(what, text)
    try:
        changes = read_words(texts, {LOSS: ("loss", what)} if is_loss else {}, lambda: recipe).values
    except InputError as error:
        raise InputError(f"method {shown(text)}: {error}") from None
    for path in changes:
        if path == "data" or is_shared(path):
            do = "Choose seeds with --seeds." if path == "seed" else "Write it after DATA, for all methods."
            raise InputError(f"The method {shown(text)} sets {path}, but a method cannot change data or seed. {do}")
    name = " ".join([Path(what).stem if what.endswith(".toml") else what, *texts])
    if recipe is None:
        return Candidate(name, {LOSS: changes.pop(LOSS), **(late or {}), **changes})
    common = {path: value for path, value in (sets or {}).items() if recipe.unused(path) is None}
    return Candidate(name, {**common, **changes}, recipe)


def _find(what: str, text: str) -> Recipe:
    """Return the recipe of a method that is no loss."""
    if what.endswith(".toml") or what in (*named_recipes(), "default"):
        return find_recipe(what)
    must = "a method must be a loss, a named recipe or a recipe's TOML file"
    do = suggest(what, [*catalogue.names(), *named_recipes()]) or f"The losses are {', '.join(catalogue.names())}."
    raise InputError(sentence(must, shown(text), do))


def check_candidates(candidates: Sequence[Candidate], base: Recipe) -> dict[str, Recipe]:
    """Return the recipe of each candidate; raise an error if two have the same name or content."""
    found: dict[str, Recipe] = {}
    names: dict[str, str] = {}
    for candidate in candidates:
        if candidate.name in found:
            raise InputError(f"The method {shown(candidate.name)} is listed twice. Remove one of the two.")
        try:
            recipe = found[candidate.name] = candidate.applied(base)
        except InputError as error:
            raise InputError(f"method {shown(candidate.name)}: {error}") from None
        other = names.setdefault(recipe.content_hash(), candidate.name)
        if other != candidate.name:
            both = f"{shown(other)} and {shown(candidate.name)}"
            raise InputError(f"The methods {both} are the same recipe. Remove one of the two.")
    return found


def check_used(sets: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> None:
    """Raise if one of the ``sets`` has no effect on any of the methods that are compared."""
    for path in sets:
        reasons = [recipe.unused(path) for recipe in recipes.values()]
        if not is_shared(path) and reasons and None not in reasons:
            raise InputError(f"{path} has no effect on any of the methods ({', '.join(recipes)}). Remove it.")


def with_scenario(recipe: Recipe, scenario: str | None) -> Recipe:
    """Return a recipe with another scenario; a scenario without a total keeps the total of the old one."""
    if scenario is None:
        return recipe
    total = None if recipe.data.scenario is None else parse_scenario(recipe.data.scenario).total
    if total is not None and parse_scenario(scenario).total is None:
        scenario = f"{scenario},total={total}"
    return recipe.override(**{"data.scenario": scenario})


def _get(recipe: Recipe, path: str) -> Any:
    return next(value for name, _, value in leaves(recipe) if name == path)
