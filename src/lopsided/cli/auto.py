"""``lopsided fit --auto``: compare methods over folds within a time budget, and train the chosen one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided.cli import sweeping
from lopsided.cli.output import StoppedError, say
from lopsided.errors import InputError
from lopsided.facts import Fact, notes

if TYPE_CHECKING:
    from lopsided.data.sources import Source
    from lopsided.ranks import Ranks
    from lopsided.recipe import Changes, Recipe
    from lopsided.runs.auto import Choice
    from lopsided.runs.comparison_plan import ComparisonPlan
    from lopsided.runs.folder import Run


def check_auto(recipe: str | None, changes: Changes, ranks: Ranks) -> None:
    """Raise an error for settings that --auto decides itself."""
    sweeping.refuse({"--recipe": recipe}, "chooses what to train", "--auto")
    for path, what in _NOT_WITH_AUTO.items():
        sweeping.refuse({changes.written.get(path, ""): changes.values.get(path) or None}, what, "--auto")
    loss = next((path for path in changes.values if path.startswith("encoder_training.loss.")), None)
    if loss is not None:
        do = 'Remove it, or compare losses by hand: lopsided compare DATA --methods "quick, afcl eta=0.5 gamma=7".'
        raise InputError(f"--auto compares several losses, but {changes.written[loss]} is a parameter of some. {do}")
    if "data.folds" in changes.values and changes.values["data.folds"] is None:
        raise InputError("--auto compares over folds, so there cannot be one split. Remove folds=1 or --auto.")
    if ranks.size > 1:
        raise InputError("--auto cannot be used with torchrun. Use --workers or --engine ray.")


_NOT_WITH_AUTO = {
    "encoder_training.loss": "chooses what to train",
    "data.test": "is a share of one split",
    "data.repeats": "repeats the folds of one recipe",
}


def fit_auto(
    data: str | None,
    out: Path,
    fields: Mapping[str, Any],
    work: sweeping.Workplace,
    *,
    minutes: float | None,
    resume: bool,
    quiet: bool,
) -> tuple[Run, bool]:
    """Return the finished run of the chosen method, and whether it was already finished."""
    from lopsided import files
    from lopsided.runs.folder import COMPARISON, RECIPE, Run
    from lopsided.runs.progress import reporter
    from lopsided.runs.run import run_recipe, settle

    begin, opened = time.monotonic(), None
    if not resume and out.is_dir() and any(out.iterdir()):
        raise InputError(f"The folder {out} is not empty. Choose another folder, or continue its run with --resume.")
    why: list[Fact] = []
    try:
        if not (resume and (out / RECIPE).is_file()):
            choice, opened = _choose(data, out, fields, work, minutes=minutes, begin=begin, quiet=quiet)
            why = [notes.chosen_by_comparison(choice.answer.chosen, choice.sentences())]
            for text in () if quiet else choice.sentences():
                say(text)
            files.atomic_write(out / RECIPE, settle(choice.recipe).to_toml())
        already = Run.open(out).finished
        with reporter(quiet=quiet) as watcher:
            tracked = settle(Run.open(out).recipe.override(track=fields.get("track", ())))
            run = run_recipe(tracked, out, resume=True, reporter=watcher, why=why, opened=opened)
    except KeyboardInterrupt:
        raise StoppedError("interrupted. Continue with the same command and --resume.") from None
    _write_page(out / COMPARISON, quiet=quiet)
    return run, already


def _choose(
    data: str | None,
    out: Path,
    fields: Mapping[str, Any],
    work: sweeping.Workplace,
    *,
    minutes: float | None,
    begin: float,
    quiet: bool,
) -> tuple[Choice, tuple[Source, Source | None]]:
    """Compare the methods that fit the data, and return the choice and the images of its run."""
    from lopsided.data.prepare import Sources
    from lopsided.inference.feature_cache import ReadableImages
    from lopsided.runs.auto import MINUTES, choose
    from lopsided.runs.duration import START_SECONDS, slowness
    from lopsided.runs.folds import judged_accuracy
    from lopsided.runs.run import settle
    from lopsided.runs.view import sweep_view

    plan = _plan(data, out, fields)
    about = plan.about(sweeping.open_data(plan.base))
    work.make()  # Wrong options are reported before a cluster is asked.
    with work.connected():
        choice = choose(
            plan,
            engine=work.make,
            slots=work.make().slots,
            minutes=MINUTES if minutes is None else minutes,
            view=lambda: sweep_view(quiet=quiet),
            about=about,
            begin=begin,
            afterwards=START_SECONDS * slowness() / 60,
        )
    opened = Sources().open(settle(choice.recipe), known=ReadableImages(), cues=True)
    recipes = {method: settle(plan.recipes[method]) for method in choice.compared}
    judged = {method: 100 * judged_accuracy(out, recipe, opened[0]) for method, recipe in recipes.items()}
    return replace(choice, judged=judged), opened


def _plan(data: str | None, out: Path, fields: Mapping[str, Any]) -> ComparisonPlan:
    """Return the comparison of the methods that fit the data and the fields."""
    from lopsided.data.sources.vectors import check_vector_fields, is_vectors
    from lopsided.recipe import named_recipe
    from lopsided.runs.auto import usual_candidates
    from lopsided.runs.comparison_plan import ComparisonPlan, parse_candidates
    from lopsided.runs.folder import COMPARISON, check_outside
    from lopsided.runs.folds import USUAL_FOLDS

    changes: dict[str, Any] = {"data.folds": USUAL_FOLDS, **fields}
    changes |= {} if data is None else {"data.source": os.fspath(data)}
    columns = fields.get("data.columns") is not None
    base = named_recipe("quick" if columns else "from-scratch").override(**changes)
    if base.data.source is None:
        raise InputError("DATA is missing. Write lopsided fit DATA --auto --out RUN.")
    check_outside(out, base.data.source)
    base = _with_possible_folds(base, fields)
    check_vector_fields(base.data.source, fields)
    names = usual_candidates(vectors=is_vectors(base.data.source or ""), columns=columns)
    return ComparisonPlan(out / COMPARISON, parse_candidates([",".join(names)], fields), base)


def _with_possible_folds(base: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """Return the recipe with fewer folds if the rarest class is too small for five and no number was given."""
    if "data.folds" in fields:
        return base
    from lopsided.data.prepare import Sources, split_rule
    from lopsided.data.splits import most_folds
    from lopsided.runs.folds import USUAL_FOLDS
    from lopsided.runs.run import settle

    source = Sources().drawn(settle(base))
    how = split_rule(base, source)
    most = USUAL_FOLDS if how == "given" else most_folds(source, how)
    return base.override(**{"data.folds": max(2, min(USUAL_FOLDS, most))})


def _write_page(folder: Path, *, quiet: bool) -> None:
    from lopsided.reports.report import write_report
    from lopsided.runs.sweep import SWEEP

    if not (folder / SWEEP).is_file():  # The comparison of a finished run was removed.
        return
    page = write_report(folder)
    if not quiet:
        say(f"The page {page.path} shows the comparison.")
