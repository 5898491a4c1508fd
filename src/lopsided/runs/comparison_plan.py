"""The plan of a comparison: candidates times folds or seeds, in one folder, and the comparison of their records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lopsided.data.images import FileImages
from lopsided.data.prepare import data_seed, split_rule
from lopsided.data.splits import fold_numbers
from lopsided.errors import InputError, sentence
from lopsided.models.pretrained import check_encoder
from lopsided.recipe import RUNTIME_FIELDS, Recipe, check_classes
from lopsided.recipe.words import leaves, shown
from lopsided.runs.candidates import LOSS, Candidate, check_candidates, with_scenario
from lopsided.runs.cell import Cell
from lopsided.runs.comparison import Comparison, compare
from lopsided.runs.folds import check_rule
from lopsided.runs.keys import VARIED_FIELDS, proportion, treatment_of
from lopsided.runs.record_files import read_records
from lopsided.runs.records import Record
from lopsided.runs.sweep import RECORDS, about_sweep

if TYPE_CHECKING:
    from lopsided.data.sources import Source

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
        return [cell for cell in self.cells if cell.arm == name]

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
        before = there["arms"] if isinstance(there.get("arms"), list) else []
        names = [*self.recipes, *(name for name in before if isinstance(name, str) and name not in self.recipes)]
        sections = {"settings": settings, "changes": changes, "scenarios": scenarios}
        return {"kind": KIND, "arms": names, **sections, "baseline": self.baseline, "images": images}

    def compare(self, source: str) -> Comparison:
        """Compare all runs of these candidates and scenarios, including those of earlier commands."""
        return compare(
            [record for record in self._records() if record.source == source],
            arms={treatment_of(cell.recipe): str(cell.arm) for cell in self.cells},
            baseline=self.baseline,
            scenarios=list(dict.fromkeys(proportion(cell.recipe.data.scenario) for cell in self.cells)),
            source=source,
        )

    def _records(self) -> list[Record]:
        path = self.folder / RECORDS
        return read_records(path)[0] if path.exists() else []

    def _check_images(self, source: Source, there: Mapping[str, Any]) -> str:
        """Return a digest of the images, labels and groups, because runs on others cannot be compared.

        The number of folds and the rule are checked, too, before any cell fails on them.
        """
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
