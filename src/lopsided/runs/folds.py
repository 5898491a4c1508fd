"""Runs with folds: every image is tested by a model that was not trained on it.

The folder of such a run is that of any run. Its ``folds/`` also holds the run of each fold: ``folds/1/``, ``folds/2/``
and so on over all repeats, and ``folds/all/`` for a model of all images. Each of them is an ordinary run, so a killed
run continues inside the fold where it was. The results are computed from the finished folds alone (see
``fold_results``). At the end, the models and checkpoints of the folds are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from lopsided import files
from lopsided.data.prepare import Sources, data_seed, split_rule
from lopsided.data.sources import Source
from lopsided.data.splits import fold_numbers, most_folds
from lopsided.evaluation.calibration import HeldBack, settled_prior
from lopsided.evaluation.folds import settle_scores
from lopsided.facts import Fact, notes
from lopsided.facts.log import Log, Reporter
from lopsided.inference.feature_cache import cache_root
from lopsided.recipe import Recipe
from lopsided.recipe.rules import parse_rule
from lopsided.runs.duration import FEATURE_SECONDS, Expected, fold_seconds
from lopsided.runs.fold_results import Codes, FoldResults
from lopsided.runs.folder import COMPARISON, FEATURES, FOLDS, METRICS, WHOLE, place
from lopsided.runs.keys import cell_key
from lopsided.runs.plan import CELLS, Cell, Plan, drop_model
from lopsided.runs.run import Task, run_recipe, settle

if TYPE_CHECKING:
    from lopsided.runs.engines import Engine
    from lopsided.runs.view import View

USUAL_FOLDS, RARE, CHEAP_SECONDS = 5, 200, 600.0
"""Folds are the default with fewer than ``RARE`` images of a class, if they take at most ``CHEAP_SECONDS`` longer."""


def has_folds(recipe: Recipe) -> bool:
    """Return whether a recipe describes a run with folds. The recipe of one fold describes an ordinary run."""
    return recipe.data.folds is not None and recipe.data.fold is None


def default_folds(
    recipe: Recipe, data: str | None = None, sources: Sources | None = None
) -> tuple[int | None, list[Fact]]:
    """Return the default number of folds for a recipe, None for one split, and the reason.

    Folds are the default if the encoder is frozen, a class has fewer than ``RARE`` images or there is only one class,
    and the data define no splits. The images are listed, not read.
    """
    if not recipe.spec.folds_by_default or has_folds(recipe):
        return None, []
    recipe = settle(recipe, data)
    source = (sources or Sources()).drawn(recipe)
    how, counts = split_rule(recipe, source), {name: number for name, number in source.counts().items() if number}
    rarest, is_alone = min(counts, key=lambda name: counts[name]), len(counts) == 1
    folds = 0 if how in ("given", "random") else min(USUAL_FOLDS, most_folds(source, how))
    if (counts[rarest] >= RARE and not is_alone) or folds < 2:
        return None, []
    seconds = folds * fold_seconds(len(source), len(counts))
    if cache_root() is None:  # Each fold computes all features again.
        seconds += folds * FEATURE_SECONDS * recipe.encoder.spec.passes * len(source)
    if is_alone:  # The threshold of false alarms needs images that the model was not trained on.
        return folds, [notes.folds_for_alarms(folds)]
    if seconds > CHEAP_SECONDS:
        return None, [notes.split_by_default(rarest, counts[rarest], seconds)]
    return folds, [notes.folds_by_default(folds, rarest, counts[rarest], recipe.data.test, seconds)]


def fold_recipes(recipe: Recipe) -> list[Recipe]:
    """Return the recipe of each fold, over all repeats. A recipe does not depend on the number of repeats.

    A fold decides by ``balanced`` if the rule is fitted, because such a rule is fitted to the scores of all folds.

    >>> [each.data.fold for each in fold_recipes(Recipe().override(**{"data.folds": 2, "data.repeats": 2}))]
    [1, 2, 3, 4]
    """
    number = (recipe.data.folds or 0) * recipe.data.repeats
    same = {"data.repeats": 1, "final": "auto", "compare_quick": False, "decision.rule": _plain_rule(recipe)}
    return [recipe.vouched({"data.fold": fold, **same}) for fold in range(1, number + 1)]


def whole_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the model that is trained on all images, without a test split."""
    changes = {
        "data.folds": None,
        "data.repeats": 1,
        "data.origin": None,
        "data.test": 0.0,
        "final": "auto",
        "compare_quick": False,
    }
    return recipe.vouched({**changes, "decision.rule": _plain_rule(recipe)})


def _plain_rule(recipe: Recipe) -> str:
    """Return the rule of a recipe, or ``balanced`` if the rule needs held-back images."""
    return "balanced" if parse_rule(recipe.decision.rule).fitted else recipe.decision.rule


class FoldPlan(Plan):
    """The folds of a run, and the model of all images unless the run is an ensemble of its folds.

    Folds that the comparison inside the run folder has trained are read where they are.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.recipe = recipe
        self.folds = [_fold_cell(folder, fold, part) for fold, part in enumerate(fold_recipes(recipe), start=1)]
        self.whole = None if recipe.final_model == "ensemble" else _cell(whole_recipe(recipe), place(WHOLE))
        super().__init__(folder, [*self.folds, *([] if self.whole is None else [self.whole])])

    def unfinished(self) -> Plan:
        """Return the plan of the cells that are not trained."""
        return Plan(self.folder, [cell for cell in self.cells if not (self.folder / cell.path / METRICS).exists()])

    def label(self, cell: Cell) -> str:
        """Name a cell in a line of progress."""
        return "all images" if cell is self.whole else f"fold {cell.recipe.data.fold}/{len(self.folds)}"


def _cell(recipe: Recipe, where: str) -> Cell:
    return Cell(cell_key(recipe), recipe, place=where)


def _fold_cell(folder: Path, fold: int, recipe: Recipe) -> Cell:
    compared = _cell(recipe, f"{COMPARISON}/{CELLS}/{cell_key(recipe)}")
    return compared if (folder / compared.path / METRICS).exists() else _cell(recipe, place(fold))


def train_folds(task: Task, engine: Engine | None, view: View | None, expected: Expected | None) -> None:
    """Train the folds of a recipe that are not finished, and the model, and write the results of the run.

    ``engine`` trains several cells at once, and ``view`` receives their events. Without it, they are trained one after
    the other in this process. ``expected`` is how long the run will take.
    """
    folder, recipe, source, ranks = task.folder, task.recipe, task.source, task.ranks
    _check_no_links(folder)
    numbers = _numbers(recipe, source)
    prior = _prior(recipe, source)
    check_rule(recipe, source)
    if recipe.data.origin is not None:
        from lopsided.runs.origins import read_origins

        read_origins(recipe, source)
    log = Log(folder, task.reporter) if ranks.first else Log(None, None)
    plan = FoldPlan(folder, recipe)
    with task.begun((folder / FOLDS).exists) as watcher:
        for fact in [*task.why, *_fold_notes(recipe, source)] if ranks.first else ():
            log.fact(fact)
        if watcher is not None and ranks.first:
            watcher.begin(source.classes, [])  # The folds have trackers of their own.
        if engine is not None and ranks.first:
            from lopsided.runs.driver import drive

            drive(plan.unfinished(), engine, view)
        for done, cell in enumerate(plan.cells, start=1):
            below = _Part(log, plan.label(cell), first=cell is plan.folds[0])
            begin, is_new = perf_counter(), not (folder / cell.path / METRICS).exists()
            opened = source, task.held_out
            run_recipe(cell.recipe, folder / cell.path, resume=True, reporter=below, ranks=ranks, opened=opened)
            log.count("trainings", done, len(plan.cells))
            if expected is not None and is_new and done == 2 < len(plan.cells):  # The first one computes the features.
                log.fact(notes.time_left(round(expected.left(done, perf_counter() - begin), 1)))
        if ranks.first:
            FoldResults(plan, source, task.held_out, numbers, prior, log, ranks.size).write()
    if ranks.first:
        tidy(folder)


def judged_accuracy(folder: Path, recipe: Recipe, source: Source) -> float:
    """Return the balanced accuracy that a run in this folder will have if its folds are finished."""
    plan, log = FoldPlan(folder, recipe), Log(None, None)
    results = FoldResults(plan, source, None, _numbers(recipe, source), _prior(recipe, source), log, 1)
    return results.balanced_accuracy()


def _prior(recipe: Recipe, source: Source) -> tuple[float, ...]:
    further = 0 if source.more is None else list(source.more.counts().values())
    return settled_prior(recipe, list(source.counts().values()), further)


def tidy(folder: Path) -> None:
    """Remove models, features and checkpoints of the folds of a finished run. Their figures stay."""
    _check_no_links(folder)
    for path in (folder / FOLDS).glob("*"):
        drop_model(path, FEATURES)
    for path in (folder / COMPARISON / CELLS).glob("*"):
        drop_model(path)


def _check_no_links(folder: Path) -> None:
    for path in (folder / FOLDS, folder / COMPARISON, folder / COMPARISON / CELLS):
        files.check_no_links(path)


class _Part(Reporter):
    """Passes the progress of a fold on, with its label, and the notes of the first fold that hold for all folds."""

    def __init__(self, log: Log, label: str, *, first: bool) -> None:
        self.inner, self._log, self._label, self._first = log.inner, log, label, first

    def begin(self, classes: Sequence[str], history: Sequence[Mapping[str, Any]]) -> None:
        """The run has begun before its folds."""

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Pass on the start of a stage."""
        super().stage(f"{self._label} {name}", epochs, steps_per_epoch)

    def fact(self, fact: Fact) -> None:
        """Pass on a note that is the same in all folds. Other facts are merged when all folds are finished."""
        if self._first and not fact.is_caution and fact.in_folds == "once":
            self._log.fact(fact)


def _numbers(recipe: Recipe, source: Source) -> list[Codes]:
    """Return the fold of each image in each repeat, from 0."""
    data, how = recipe.data, split_rule(recipe, source)
    assert data.folds is not None
    return [
        fold_numbers(source, how=how, folds=data.folds, seed=data_seed(recipe), repeat=repeat)
        for repeat in range(data.repeats)
    ]


def check_rule(recipe: Recipe, source: Source) -> None:
    """Raise if the rule of a recipe cannot be used with these classes. It is called before training."""
    num = len(source.classes)
    prior = settled_prior(recipe, list(source.counts().values()))
    held = HeldBack(np.full((len(source), num), 1 / num), source.labels, source.groups)
    settle_scores(recipe.decision.rule, "none", source.classes, prior, held)


def _fold_notes(recipe: Recipe, source: Source) -> Iterator[Fact]:
    data, how = recipe.data, split_rule(recipe, source)
    yield notes.folds(len(source), data.folds or 0, how, data.repeats)
    if how == "group":
        yield from mixed_group_notes(source)


def mixed_group_notes(source: Source) -> Iterator[Fact]:
    """Yield a note if groups hold images of several classes: these may be real, or wrong labels."""
    if source.groups is None:
        return
    pairs = np.unique(np.stack([source.groups, source.labels.astype(np.str_)]), axis=1)
    groups, counts = np.unique(pairs[0], return_counts=True)
    mixed = groups[counts > 1].tolist()
    if mixed:
        yield notes.mixed_groups(len(mixed), mixed[0])
