"""Arms: named changes of a recipe, to be compared on the same data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lopsided.data.scenarios import parse_scenario
from lopsided.errors import InputError, sentence
from lopsided.losses import catalogue
from lopsided.recipe import RUNTIME_FIELDS, Recipe, named_recipe, named_recipes, parse_change
from lopsided.recipe.words import leaves, shown, suggest

LOSS = "encoder_training.loss"
OWN_DATA = frozenset({"data.image_size", "data.channels"})
"""Fields of the data that an arm may set: they change how images are presented, not which images are used."""

OWN_IN_FOLDS = frozenset({"data.val"})
"""Fields of the data that a recipe keeps as an arm if the runs are folds. The test images do not depend on them."""

SHARED_FIELDS = frozenset({"seed", "description"}) | RUNTIME_FIELDS
"""Fields that every arm takes from the base recipe, besides the data."""


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
        """Return the recipe of this arm, with the data and the seed of ``base``."""
        if self.recipe is None:
            return base.override(**self.changes)
        kept = OWN_IN_FOLDS if base.data.folds is not None else frozenset()
        shared = {path: value for path, _, value in leaves(base) if is_shared(path) and path not in kept}
        own = {path: value for path, _, value in leaves(self.recipe) if path in OWN_DATA and value is None}
        if self.recipe.augment.normalisation == "weights":  # Size and channels then belong to the encoder's weights.
            own = {}
        return self.recipe.override(**shared, **{path: _get(base, path) for path in own}).override(**self.changes)


def is_shared(path: str) -> bool:
    """Return whether all arms share a field: the data, the seed, and fields that do not change the result."""
    return path in SHARED_FIELDS or (path.startswith("data.") and path not in OWN_DATA)


def split_changes(start: Recipe, sets: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """Return the base of a comparison, and the ``sets`` that do not fit it but may fit the losses of the arms.

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
    """Read arms from comma-separated lists; ``sets`` are changes that also apply to arms which are recipes.

    ``late`` are changes that apply to arms which are losses, because the base does not have them.

    >>> [arm.name for arm in parse_candidates(["ce,cl,afcl:eta=300,eta_unit=absolute"])]
    ['ce', 'cl', 'afcl:eta=300,eta_unit=absolute']
    """
    parts: list[str] = []
    for text in texts:
        own: list[str] = []
        for part in map(str.strip, text.split(",")):
            if own and "=" in part and ":" not in part.partition("=")[0] and ":" in own[-1]:
                own[-1] += f",{part}"
            else:
                own.append(part)
        parts += own
    if not parts or not all(parts):
        must = "--arms must be a comma-separated list without empty entries"
        raise InputError(sentence(must, shown(",".join(parts)), "Such as ce,weighted-ce,cl,afcl."))
    return [parse_candidate(part, sets, late) for part in parts]


def parse_candidate(
    text: str, sets: Mapping[str, Any] | None = None, late: Mapping[str, Any] | None = None
) -> Candidate:
    """Read one arm: a loss, a named recipe or a recipe file, optionally followed by a colon and changes.

    ``sets`` that have no effect on a recipe with a frozen encoder are left out of it.

    A change without a dot sets a parameter of the loss; a change with a dot sets a field of the recipe.

    >>> parse_candidate("afcl:eta=300,eta_unit=absolute").changes["encoder_training.loss"]
    {'name': 'afcl', 'eta': 300, 'eta_unit': 'absolute'}
    """
    what, colon, rest = text.partition(":")
    changes: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        name, equals, _ = part.partition("=")
        if not equals or name.strip() in ("", "name", *changes):
            do = "Write changes once each, such as afcl:eta=300,gamma=7."
            raise InputError(f"The arm {shown(text)} has a change that cannot be read: {shown(part)}. {do}")
        changes |= [parse_change(part)]
    for path in changes:
        if path == "data" or is_shared(path):
            do = "Choose seeds with --seeds." if path == "seed" else "Change it for all arms with --set."
            raise InputError(f"The arm {shown(text)} sets {path}, but an arm cannot change data or seed. {do}")
    fields = {path: value for path, value in changes.items() if "." in path or path in Recipe.model_fields}
    parameters = {path: value for path, value in changes.items() if path not in fields}
    if what in catalogue.names():
        return Candidate(text, {LOSS: {"name": what, **parameters} if parameters else what, **(late or {}), **fields})
    own = {f"{LOSS}.{name}": value for name, value in parameters.items()}
    if what.endswith(".toml"):
        recipe, name = Recipe.load(what), f"{Path(what).stem}{text[len(what) :]}"
    elif what in named_recipes():
        recipe, name = named_recipe(what), text
    else:
        known = [*catalogue.names(), *named_recipes()]
        must = "an arm must be a loss, a named recipe or a recipe's TOML file"
        do = suggest(what, known) or f"The losses are {', '.join(catalogue.names())}."
        raise InputError(sentence(must, shown(text), do))
    common = {path: value for path, value in (sets or {}).items() if recipe.unused(path) is None}
    return Candidate(name, {**common, **own, **fields}, recipe)


def check_candidates(arms: Sequence[Candidate], base: Recipe) -> dict[str, Recipe]:
    """Return the recipe of each arm; raise an error if two have the same name or content."""
    found: dict[str, Recipe] = {}
    names: dict[str, str] = {}
    for arm in arms:
        if arm.name in found:
            raise InputError(f"The arm {shown(arm.name)} is listed twice. Remove one of the two arms.")
        try:
            recipe = found[arm.name] = arm.applied(base)
        except InputError as error:
            raise InputError(f"arm {shown(arm.name)}: {error}") from None
        other = names.setdefault(recipe.content_hash(), arm.name)
        if other != arm.name:
            both = f"{shown(other)} and {shown(arm.name)}"
            raise InputError(f"The arms {both} are the same recipe. Remove one of the two arms.")
    return found


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
