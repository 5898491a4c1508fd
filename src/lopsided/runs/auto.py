"""Choose an arm within a time budget: compare arms over folds, the cheapest first, and take one by the usual rule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lopsided.errors import InputError, RunError
from lopsided.models.pretrained import check_encoder
from lopsided.recipe import Recipe, named_recipes
from lopsided.runs.answer import Answer, answer
from lopsided.runs.candidates import Arm, check_arms, fold_cells
from lopsided.runs.cell import Cell
from lopsided.runs.comparison import compare
from lopsided.runs.engines import Engine
from lopsided.runs.keys import proportion, treatment_of
from lopsided.runs.records import Record
from lopsided.runs.sweep import run_sweep
from lopsided.runs.view import View

MINUTES = 60.0
"""The default budget."""
USUAL_SIZE = 224
"""Side of the images for which the costs of arms are estimated."""
_RECIPES = ("quick", "thorough", "adapter", "fine-tune")
_ARMS = (*_RECIPES, "ce", "weighted-ce", "cl", "afcl")


def usual_arms() -> list[str]:
    """Return the arms that are compared: the recipes that exist, and the losses from scratch."""
    there = named_recipes()
    return [arm for arm in _ARMS if arm in there or arm not in _RECIPES]


def work_of(recipe: Recipe) -> float:
    """Return a rough measure of the cost of a training run, to order arms by: images that pass through the encoder.

    An image of another size counts by its area. A frozen encoder sees each view of an image once, and so does each of
    several joined encoders; heads on them add little.
    """
    size = recipe.data.image_size or USUAL_SIZE
    seen = recipe.encoder.spec.passes  # Training itself sees one view at a time.
    return (seen + 3 * recipe.spec.passes(recipe) * recipe.encoder_training.views) * (size / USUAL_SIZE) ** 2


def cheapest_first(arms: Sequence[Arm], base: Recipe) -> list[Arm]:
    """Return the arms in the order of their estimated cost."""
    recipes = check_arms(arms, base)
    return sorted(arms, key=lambda arm: work_of(recipes[arm.name]))


@dataclass(frozen=True)
class Choice:
    """The outcome: the answer of the comparison, the recipe of the chosen arm, and why arms were left out."""

    answer: Answer
    recipe: Recipe
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def sentences(self) -> list[str]:
        """Return the answer in words, and the arms that were left out."""
        found = self.answer.sentences()
        if not (self.answer.close or self.answer.lower):
            found.append(f"Take {self.answer.chosen}: no other arm has all folds.")
        found += [f"{arm} was left out: {why}." for arm, why in self.left_out.items()]
        return found + [f"{arm} failed: {error}" for arm, error in self.failed.items()]


def choose(
    arms: Sequence[Arm],
    base: Recipe,
    folder: Path,
    *,
    engine: Callable[[], Engine],
    slots: int = 1,
    minutes: float = MINUTES,
    view: Callable[[], AbstractContextManager[View]] = lambda: nullcontext(View()),
    about: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """Compare arms over the folds of ``base`` in the folder of a comparison, and choose one of them.

    The first fold of an arm shows how long its other folds will take. If they do not fit into the budget, this arm and
    the costlier ones are left out. The cheapest arm that does not fail is always completed. ``engine`` and ``view``
    make an engine and a view for each part, and ``slots`` is the number of folds that an engine trains at once. A
    second call continues, and counts the time of finished folds.
    """
    order = cheapest_first(arms, base)
    recipes = check_arms(arms, base)
    begin = clock()
    done: dict[str, Record] = {}
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}

    def train(cells: Sequence[Cell]) -> None:
        if not cells:
            return
        with view() as shown:
            outcome = run_sweep(cells, folder, engine=engine(), view=shown, keep_models=True, about=about)
        done.update({record.cell: record for record in outcome.done})
        for failure in outcome.failed:
            failed.setdefault(str(failure.arm), failure.error)

    def spent() -> float:
        """Return the minutes of this call, or those of all finished folds if an earlier call made some of them."""
        return max(clock() - begin, sum(record.seconds for record in done.values()) / slots) / 60

    complete = False
    for number, arm in enumerate(order):
        try:
            check_encoder(recipes[arm.name].encoder.spec)
        except InputError as error:  # A setting for all arms, such as another encoder, need not fit this one.
            failed[arm.name] = str(error)
            continue
        cells = fold_cells([arm], base, [None], 1)
        if complete and spent() >= minutes:
            left_out |= dict.fromkeys((each.name for each in order[number:]), f"the {minutes:g} minutes were over")
            break
        train(cells[:1])
        if arm.name in failed:
            continue
        rest = math.ceil((len(cells) - 1) / slots) * done[cells[0].key].seconds / 60
        if complete and spent() + rest > minutes:
            why = f"its other folds would take about {rest:.1f} minutes, and {minutes:g} minutes are allowed"
            left_out[arm.name] = why
            left_out |= dict.fromkeys((each.name for each in order[number + 1 :]), "it costs more than an arm left out")
            break
        train(cells[1:])
        complete = complete or arm.name not in failed
    wanted = {treatment_of(fold_cells([arm], base, [None], 1)[0].recipe): arm.name for arm in order}
    kept = {treatment: name for treatment, name in wanted.items() if name not in left_out and name not in failed}
    scenario = proportion(base.data.scenario)
    found = answer(compare(done.values(), arms=kept, scenarios=[scenario]), scenario) if done and kept else Answer()
    if not found.chosen:
        first = next(iter(failed.values()), "no arm has a finished fold.")
        raise RunError(f"No arm could be compared: {first}")
    return Choice(found, recipes[found.chosen], left_out, failed)
