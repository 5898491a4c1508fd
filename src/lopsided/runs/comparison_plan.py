"""The plan of a comparison: candidates times folds or seeds, in one folder, and the comparison of their records."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lopsided.data.images import FileImages
from lopsided.data.prepare import data_seed, split_rule
from lopsided.data.scenarios import parse_scenario
from lopsided.data.splits import fold_numbers
from lopsided.errors import InputError, sentence
from lopsided.losses import catalogue
from lopsided.models.pretrained import check_encoder
from lopsided.recipe import RUNTIME_FIELDS, Recipe, check_classes, find_recipe, is_word, named_recipes, read_words
from lopsided.recipe.words import leaves, shown, suggest
from lopsided.runs.comparison import Comparison, compare
from lopsided.runs.folds import check_rule
from lopsided.runs.keys import VARIED_FIELDS, proportion, treatment_of
from lopsided.runs.plan import Cell
from lopsided.runs.records import Record, read_records
from lopsided.runs.sweep import RECORDS, about_sweep

if TYPE_CHECKING:
    from lopsided.data.sources import Source


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
        own = {path for path, _, value in leaves(self.recipe) if path in OWN_DATA and value is None}
        if self.recipe.augment.normalisation == "weights":  # Size and channels then belong to the encoder's weights.
            own = set()
        lacking = {path: value for path, _, value in leaves(base) if path in own}
        return self.recipe.override(**shared, **lacking).override(**self.changes)


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


KIND = "compare"
"""The kind of these sweeps in ``sweep.json``."""
BASELINE = "quick"
"""The candidate that is the baseline by default, if it is one of them."""


class ComparisonPlan:
    """Candidates on the same data: with ``runs`` seeds each, or on the folds of ``base``, drawn ``runs`` times.

    Cells come seed by seed or fold by fold, so that an interrupted comparison has complete tables of fewer runs. A cell
    does not depend on the number of runs, so that further runs add to a comparison.
    """

    def __init__(
        self,
        folder: Path,
        candidates: Sequence[Candidate],
        base: Recipe,
        *,
        scenarios: Sequence[str | None] = (None,),
        runs: int = 1,
        baseline: str | None = None,
    ) -> None:
        self.folder, self.base = folder, base
        self.recipes = check_candidates(candidates, base)
        if baseline is not None and baseline not in self.recipes:
            must = f"--baseline must be one of the methods, {', '.join(self.recipes)}"
            raise InputError(sentence(must, repr(baseline), "Add it to --methods."))
        self.baseline = baseline or (BASELINE if BASELINE in self.recipes else next(iter(self.recipes)))
        changes = [{"seed": seed} for seed in range(base.seed, base.seed + runs)]
        if base.data.folds is not None:
            changes = [{"data.fold": fold} for fold in range(1, base.data.folds * runs + 1)]
        self.cells = [
            Cell.of(with_scenario(recipe, scenario).override(**change), name)
            for change in changes
            for scenario in scenarios
            for name, recipe in self.recipes.items()
        ]

    def cells_of(self, name: str) -> list[Cell]:
        """Return the cells of one candidate."""
        return [cell for cell in self.cells if cell.compared_as == name]

    def check_recipes(self, num_classes: int | None = None) -> None:
        """Check the encoder of each candidate, or its loss for a number of classes, before all of its cells fail."""
        for name, recipe in self.recipes.items():
            try:
                if num_classes is None:
                    check_encoder(recipe.encoder.spec)
                else:
                    check_classes(recipe, num_classes)
            except InputError as error:
                raise InputError(f"method {shown(name)}: {error}") from None

    def about(self, source: Source) -> dict[str, Any]:
        """Return the contents of ``sweep.json``. Raise an error if the folder has runs on other data or settings."""
        there = about_sweep(self.folder)
        records = self._records()
        self._check_records(records, source.name)
        images = self._check_images(source, there if records else {})
        settings = _settings(self.base)
        changes = {name: _changed(_without_loss(settings), _settings(recipe)) for name, recipe in self.recipes.items()}
        texts = [cell.recipe.data.scenario for cell in self.cells if cell.recipe.data.scenario is not None]
        scenarios = {str(proportion(text)): text for text in texts}
        if records:  # Only finished runs can stand beside new ones on a page.
            old, old_changes, old_scenarios = (_table(there, name) for name in ("settings", "changes", "scenarios"))
            if old:  # Otherwise the file was written anew after it was damaged.
                same_loss = old.get(f"{LOSS}.name") == settings[f"{LOSS}.name"]
                both = (old, settings) if same_loss else (_without_loss(old), _without_loss(settings))
                self._check_same("runs", *both)
            for name in filter(old_changes.__contains__, changes):
                then = _without_loss(old) | _table(old_changes, name)
                self._check_same(f"runs of the method {shown(name)}", then, _without_loss(settings) | changes[name])
            for name in filter(old_scenarios.__contains__, scenarios):
                then, now = ({"data.scenario": each[name]} for each in (old_scenarios, scenarios))
                self._check_same(f"runs at {name}", then, now)
            changes, scenarios = {**old_changes, **changes}, {**old_scenarios, **scenarios}
        before = there["methods"] if isinstance(there.get("methods"), list) else []
        names = [*self.recipes, *(name for name in before if isinstance(name, str) and name not in self.recipes)]
        sections = {"settings": settings, "changes": changes, "scenarios": scenarios}
        return {"kind": KIND, "methods": names, **sections, "baseline": self.baseline, "images": images}

    def compare(self, source: str) -> Comparison:
        """Compare all runs of these candidates and scenarios, including those of earlier commands."""
        return compare(
            [record for record in self._records() if record.source == source],
            methods={treatment_of(cell.recipe): str(cell.compared_as) for cell in self.cells},
            baseline=self.baseline,
            scenarios=list(dict.fromkeys(proportion(cell.recipe.data.scenario) for cell in self.cells)),
            source=source,
        )

    def _records(self) -> list[Record]:
        path = self.folder / RECORDS
        return read_records(path)[0] if path.exists() else []

    def _check_images(self, source: Source, there: Mapping[str, Any]) -> str:
        """Return a digest of the images, labels and groups, because runs on others cannot be compared.

        The number of classes and folds and the rule are checked, too, before any cell fails on them.
        """
        only = [name for name, number in source.counts().items() if number]
        if len(only) < 2:
            do = "Add images of another class to compare methods, or fit the recipe few without a comparison."
            raise InputError(f"All images of {shown(source.name)} are of one class, {', '.join(only)}. {do}")
        if self.base.data.folds is not None:
            check_rule(self.base, source)
            if self.base.data.scenario is None:
                how = split_rule(self.base, source)
                fold_numbers(source, how=how, folds=self.base.data.folds, seed=data_seed(self.base))
        parts = [_content(part) for part in (source, source.more) if part is not None]
        digest = hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()[:16]
        if there.get("images", digest) != digest:
            what = f"{self.folder} has runs on other images than {shown(source.name)} has now"
            raise InputError(f"{what}: names, labels, groups or the content of files differ. Choose another folder.")
        return digest

    def _check_records(self, records: Sequence[Record], source: str) -> None:
        """Raise an error if the folder has runs on other data, or runs of folds and not of seeds or vice versa."""
        others = dict.fromkeys(record.source for record in records if record.source != source)
        if others:
            names = ", ".join(map(shown, others))
            raise InputError(f"{self.folder} has runs on {names}, not on {shown(source)}. Choose another folder.")
        if any((record.fold is None) != (self.base.data.folds is None) for record in records):
            then, now = ("seeds", "folds") if self.base.data.folds is not None else ("folds", "seeds")
            raise InputError(f"{self.folder} has runs of {then}, not of {now}. Choose another folder.")

    def _check_same(self, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Raise an error that names the fields with other values."""
        changed = list(_changed(old, new))
        if changed:
            texts = [f"{path} was {_value(old.get(path))} and is now {_value(new[path])}" for path in changed[:3]]
            texts += [f"and {len(changed) - 3} more fields"] if len(changed) > 3 else []
            do = "Use the same settings, or choose another folder."
            raise InputError(f"{self.folder} has {what} with other settings: {', '.join(texts)}. {do}")


def _content(source: Source) -> list[object]:
    """Return what tells the images of a source from others. A file that cannot be read has no digest."""
    images = source.images.hashed() if isinstance(source.images, FileImages) else source.images
    groups = [] if source.groups is None else source.groups.tolist()
    return [list(source.names), source.labels.tolist(), groups, images.digest(np.arange(len(images)))]


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that decide a run, except for the fields in which the runs of one candidate differ."""
    chosen = {path: value for path, _, value in leaves(recipe) if path not in RUNTIME_FIELDS | VARIED_FIELDS}
    settings: dict[str, Any] = json.loads(json.dumps(chosen))  # As sweep.json holds them: a tuple becomes a list.
    return settings | {"encoder.weights": recipe.encoder.spec.without_folders()}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in new.items() if path not in old or old[path] != value}


def _table(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name)
    return table if isinstance(table, dict) else {}


def _without_loss(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that remain if a candidate has another loss than the base recipe."""
    return {path: value for path, value in settings.items() if not path.startswith(f"{LOSS}.")}


def _value(value: object) -> str:
    return "unset" if value is None else shown(value)
