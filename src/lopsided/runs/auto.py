"""Choose a method within a time budget: compare methods over folds, the cheapest first, and take one of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lopsided.errors import InputError, RunError
from lopsided.models.pretrained import check_encoder
from lopsided.recipe import Recipe, named_recipe, named_recipes
from lopsided.runs.answer import Answer, answer
from lopsided.runs.comparison import compare
from lopsided.runs.comparison_plan import ComparisonPlan
from lopsided.runs.engines import Engine
from lopsided.runs.keys import proportion, treatment_of
from lopsided.runs.plan import Cell
from lopsided.runs.records import Record
from lopsided.runs.sweep import run_sweep
from lopsided.runs.view import View

MINUTES = 60.0
"""The default budget."""
USUAL_SIZE = 224
"""Side of the images for which the costs of methods are estimated."""
_RECIPES = ("quick", "thorough", "adapter", "fine-tune")
_METHODS = (*_RECIPES, "ce", "weighted-ce", "cl", "afcl")


def usual_candidates(*, vectors: bool = False, columns: bool = False) -> list[str]:
    """Return the methods that are compared: the recipes that exist, and the losses from scratch.

    Vectors have no pretrained encoders, so there is nothing to fine-tune and one way to use them as they are. With
    ``columns`` beside the images, no encoder is trained.
    """
    there = named_recipes()
    methods = [method for method in _METHODS if not (vectors and method in ("thorough", "fine-tune"))]
    if columns:
        methods = [method for method in methods if method in there and not named_recipe(method).spec.trains_encoder]
    return [method for method in methods if method in there or method not in _RECIPES]


def work_of(recipe: Recipe) -> float:
    """Return a rough measure of the cost of a training run, to order methods by: images that pass through the encoder.

    An image of another size counts by its area. A frozen encoder sees each view of an image once, and so does each of
    several joined encoders; heads on them add little.
    """
    size = recipe.data.image_size or USUAL_SIZE
    seen = recipe.encoder.spec.passes  # Training itself sees one view at a time.
    return (seen + 3 * recipe.spec.passes(recipe) * recipe.encoder_training.views) * (size / USUAL_SIZE) ** 2


def cheapest_first(recipes: Mapping[str, Recipe]) -> list[str]:
    """Return the names of candidates in the order of their estimated cost.

    Candidates with a frozen encoder come first: their features are computed once for all folds.
    """
    return sorted(recipes, key=lambda name: (not recipes[name].spec.folds_by_default, work_of(recipes[name])))


@dataclass(frozen=True)
class Choice:
    """The outcome: the answer of the comparison, the recipe of the chosen method, and why methods were left out.

    ``judged`` is the balanced accuracy of each compared method as its run would have it, in per cent.
    """

    answer: Answer
    recipe: Recipe
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    judged: Mapping[str, float] = field(default_factory=dict)

    @property
    def compared(self) -> list[str]:
        """The methods with all folds, the best first."""
        return [self.answer.best, *(each.method for each in self.answer.close), *self.answer.lower]

    def sentences(self) -> list[str]:
        """Return the answer in words, and the methods that were left out."""
        found = self.answer.sentences()
        if not (self.answer.close or self.answer.lower):
            found.append(f"Use {self.answer.chosen}: no other method has all folds.")
        if self.judged:
            figures = ", ".join(f"{method} {value:.1f}" for method, value in self.judged.items())
            found.append(
                f"Judged like the run, by the images of all folds together: {figures} per cent. The numbers above are "
                "means over the folds, each with the threshold of its own training images."
            )
        found += [f"{method} was left out: {why}." for method, why in self.left_out.items()]
        return found + [f"{method} failed: {error}" for method, error in self.failed.items()]


def choose(
    plan: ComparisonPlan,
    *,
    engine: Callable[[], Engine],
    slots: int = 1,
    minutes: float = MINUTES,
    view: Callable[[], AbstractContextManager[View]] = lambda: nullcontext(View()),
    about: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    begin: float | None = None,
    afterwards: float = 0.0,
) -> Choice:
    """Train the candidates of a plan over folds, the cheapest first, within a budget, and choose one of them.

    The first fold of a candidate shows how long its other folds will take. If they do not fit into the budget, the
    candidate is left out, and the next one is tried. A fold that is not finished when the budget is over is stopped.
    The cheapest that does not fail is always completed. ``engine`` and ``view`` make an engine and a view for each
    part, and ``slots`` is the number of folds that an engine trains at once. A second call continues, and counts the
    time of finished folds. ``begin`` is the time of the clock from which the budget counts, by default now.
    ``afterwards`` are minutes of the budget that the run will need for its results, beside the training of its model.
    """
    order = cheapest_first(plan.recipes)
    begin = clock() if begin is None else begin
    done: dict[str, Record] = {}
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}

    def train(cells: Sequence[Cell]) -> None:
        if not cells:
            return
        until = time.monotonic() + 60 * (minutes - spent() - kept_free) if is_complete else math.inf
        with view() as shown:
            outcome = run_sweep(
                cells, plan.folder, engine=engine(), view=shown, keep_models=True, about=about, until=until
            )
        done.update({record.cell: record for record in outcome.done})
        for failure in outcome.failed:
            failed.setdefault(str(failure.compared_as), failure.error)

    def spent() -> float:
        """Return the minutes of this call, or those of all finished folds if an earlier call made some of them."""
        return max(clock() - begin, sum(record.seconds for record in done.values()) / slots) / 60

    is_complete, kept_free = False, afterwards
    for number, name in enumerate(order):
        try:
            check_encoder(plan.recipes[name].encoder.spec)
        except InputError as error:  # A setting for all candidates, such as another encoder, need not fit this one.
            failed[name] = str(error)
            continue
        cells = plan.cells_of(name)
        if is_complete and spent() + kept_free >= minutes:
            left_out |= dict.fromkeys(order[number:], f"the {minutes:g} minutes were over")
            break
        train(cells[:1])
        if name in failed:
            continue
        if plan.recipes[name].spec.folds_by_default and is_complete:
            train(cells[1:2])  # The first fold computed the features of all images.
        took = [done[cell.key].seconds / 60 for cell in cells[:2] if cell.key in done]
        others = (math.ceil(sum(cell.key not in done for cell in cells) / slots) + 1) * min(took, default=math.inf)
        if is_complete and spent() + others + afterwards > minutes:
            left_out[name] = (
                f"{_too_long(others)}, and {max(minutes - spent(), 0.0):.1f} of the {minutes:g} minutes were left"
            )
            continue
        train(cells[1:])
        if name not in failed and not all(cell.key in done for cell in cells):
            left_out[name] = f"the {minutes:g} minutes were over"
            continue
        if name not in failed:
            # The model of all images takes as long as a fold whose features are cached.
            seconds = statistics.median(done[cell.key].seconds for cell in cells)
            is_complete, kept_free = True, max(kept_free, seconds / 60 + afterwards)
    names = {treatment_of(cell.recipe): name for name in order for cell in plan.cells_of(name)[:1]}
    complete = {treatment: name for treatment, name in names.items() if name not in left_out and name not in failed}
    scenario = proportion(plan.base.data.scenario)
    comparison = compare(done.values(), methods=complete, scenarios=[scenario])
    found = answer(comparison, scenario) if done and complete else Answer()
    if not found.chosen:
        first = next(iter(failed.values()), "no method has a finished fold.")
        raise RunError(f"No method could be compared: {first}")
    return Choice(found, plan.recipes[found.chosen], left_out, failed)


def _too_long(minutes: float) -> str:
    if minutes == math.inf:
        return "its first fold was not finished"
    return f"its other folds and the model would take about {minutes:.1f} minutes"
