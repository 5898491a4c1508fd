"""What ``fit`` trains, from the command and from Python: the recipe by the fields that are set, and its folds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lopsided.data.images import Images, Vectors, longest_side
from lopsided.data.prepare import Sources
from lopsided.data.sources.names import suggest_names
from lopsided.data.sources.source import UNUSUAL
from lopsided.data.sources.vectors import check_vector_fields
from lopsided.errors import DataError, InputError, sentence
from lopsided.facts import Fact, notes
from lopsided.ranks import ALONE, Ranks
from lopsided.recipe import Recipe, find_recipe, methods, named_recipe
from lopsided.recipe.encoder_spec import EncoderSpec, with_full_names
from lopsided.recipe.rules import parse_rule
from lopsided.runs import run as runs
from lopsided.runs.folder import METRICS, RECIPE, Run, check_outside
from lopsided.runs.folds import default_folds
from lopsided.runs.progress import reporter
from lopsided.runs.run import run_recipe
from lopsided.runs.view import FoldLines, View

if TYPE_CHECKING:
    from lopsided.runs.engines import Engine


QUICK, THOROUGH, FEW = "quick", "thorough", "few"
FEW_RARE, TIMES = 10, 10
"""With two classes and fewer images of one of them than ``FEW_RARE``, or than ``ENOUGH`` and so many times as many of
the other, the distance from the other one helps (docs/few.md)."""
USUAL_ALARMS = 0.05
"""The share of false alarms of a model of one class."""
MANY, ENOUGH = 3000, 50
"""With more images, ``thorough`` takes too long to be started without a question. With fewer images of a class, it was
not reliably better than ``quick`` (docs/which-recipe.md)."""
SMALL_SIDE = 32
"""Nor was it with images of 28 pixels per side, at any proportion of their classes. Images up to this side are taken
for such, by the median of their longer sides."""


def choose_recipe(base: Recipe, data: str | None = None, sources: Sources | None = None) -> tuple[str, list[Fact]]:
    """Return the name of the recipe for these data, and the reason. Images are not decoded.

    ``base`` holds the fields of the data.
    """
    source = (sources or Sources()).drawn(runs.settle(base, data))
    if isinstance(source.images, Vectors):
        return QUICK, [notes.quick_for_vectors(source.images.width)]
    counts = list(source.counts().values())
    # An average of distances is no distance.
    name, why = usual_recipe(counts, source.images, distance=base.final != "ensemble" or not min(counts))
    return name, [why]


def has_normal(counts: Sequence[int]) -> bool:
    """Return whether one of two classes, the smaller first, is so rare that the other one is what is normal.

    >>> [has_normal(counts) for counts in ([0, 9], [9, 10], [10, 99], [10, 100], [49, 490], [50, 900], [1, 9, 900])]
    [True, True, False, True, True, False, False]
    """
    if len(counts) != 2:
        return False
    rare, others = counts
    return rare < min(FEW_RARE, others) or (rare < ENOUGH and others >= TIMES * rare)


def usual_recipe(counts: Sequence[int], images: Images, *, distance: bool = True) -> tuple[str, Fact]:
    """Return the name of the recipe for images with these numbers of the classes, and the reason.

    ``distance`` says whether a recipe with the distance from normal is possible.
    """
    if distance and has_normal(sorted(counts)):
        return FEW, notes.few_by_counts(min(counts))
    if sum(counts) > MANY:
        return QUICK, notes.quick_by_size(sum(counts))
    if min(counts) < ENOUGH:
        return QUICK, notes.quick_by_rarest(min(counts))
    try:
        side = longest_side(images, np.arange(len(images)))
    except DataError:  # The run itself will say which image cannot be read.
        side = SMALL_SIDE + 1
    return (QUICK, notes.quick_by_side(side)) if side <= SMALL_SIDE else (THOROUGH, notes.thorough_by_size(sum(counts)))


V = TypeVar("V")


def named(recipe: str | None, ranks: Ranks) -> Recipe | None:
    """Return the recipe that the user named, if any, on all ranks."""
    return None if recipe is None else Recipe.from_toml(ranks.told(lambda: find_recipe(recipe).to_toml()))


def _check_split(recipe: Recipe, changes: Mapping[str, Any]) -> None:
    """Raise if the split would ignore the groups that the recipe names, or if folds would ignore the test share."""
    how, data = recipe.data.split, recipe.data
    group = f"--group {data.group}" if data.group_from is None else f"--group-from {data.group_from!r}"
    if recipe.data.folds is not None and changes.get("data.test"):
        raise InputError(
            f"folds={recipe.data.folds} and test={changes['data.test']:g} contradict each other: with folds, every "
            "image is a test image. Leave out one of the two."
        )
    if (data.group or data.group_from) is not None and how in ("random", "stratified"):
        raise InputError(
            f"split={how} and {group} contradict each other: the split would ignore the groups, so images of "
            "one group could be in two splits. Use split=group, or leave out one of the two."
        )


def train_recipe(
    data: str | None,
    out: Path,
    recipe: str | None,
    changes: Mapping[str, Any],
    *,
    resume: bool,
    quiet: bool,
    verbose: bool = False,
    ranks: Ranks = ALONE,
    engine: Engine | None = None,
    sources: Sources,
) -> tuple[Run, bool]:
    """Train what the changes of a recipe ask for. Return the finished run, and whether it was finished before.

    ``sources`` keeps the images that were listed. Without the name of a ``recipe``, the changes and the number of
    images decide which one it is.
    """
    changes = with_full_names(changes)
    text, why = _with_reasons(ranks, lambda: _choose(recipe, out, resume, changes, quiet=quiet))
    chosen = Recipe.from_toml(text).override(**changes)
    check_vector_fields(data or chosen.data.source, changes)

    def counts() -> dict[str, int]:
        """Return the images of each class. They are listed, not read."""
        found: dict[str, int] = ranks.told(lambda: sources.drawn(runs.settle(chosen, data)).counts())
        return found

    if not resume:
        check_outside(out, data or chosen.data.source)
        _check_split(chosen, changes)
        chosen = _with_focus(chosen, counts)
    continues = ranks.told(lambda: resume and (out / RECIPE).is_file())
    if recipe is None and not continues and chosen.spec.folds_by_default and not any(map(_names_encoder, changes)):
        name, why = _with_reasons(ranks, lambda: choose_recipe(chosen, data, sources))
        chosen = _with_rule(named_recipe(name).override(**changes))
    if recipe in (None, "quick", "thorough", "few") and not continues:
        if not chosen.spec.needs_rare and "decision.rule" not in changes and counts().get(UNUSUAL) == 0:
            # With one class, no other rule can be used.
            chosen = chosen.override(**{"decision.rule": f"false-alarms:{UNUSUAL}={USUAL_ALARMS:g}"})
        if chosen.spec.folds_by_default and not any(name in changes for name in _SPLIT_FIELDS):
            folds, reason = _with_reasons(ranks, lambda: default_folds(chosen, data, sources))
            chosen = chosen if folds is None else chosen.override(**{"data.folds": folds})
            why = [*why, *reason]
    if engine is not None and chosen.data.folds is None:
        raise InputError("--workers and --engine train several folds at once, but there are no folds. Use --folds 5.")
    already = ranks.told(lambda: resume and (out / METRICS).exists() and Run.open(out).finished)
    with reporter(quiet=quiet, verbose=verbose) as watcher:
        run = run_recipe(
            chosen,
            out,
            data=data,
            resume=resume,
            reporter=watcher,
            progress=watcher.counting("checking images"),
            ranks=ranks,
            why=why,
            sources=sources,
            engine=engine,
            view=View() if quiet else FoldLines(),
        )
    return run, already


def _names_encoder(path: str) -> bool:
    """Return whether a field says which features to compute, so that there is nothing to choose."""
    return path.startswith("encoder.") or path in ("data.image_size", "method")


_SPLIT_FIELDS = ("data.folds", "data.fold", "data.test", "data.val", "data.split")
"""Fields that state how to split the images. If one of them is set, there are no folds by default."""


def _with_focus(recipe: Recipe, counts: Callable[[], Mapping[str, int]]) -> Recipe:
    """Return a recipe whose rule is about the class in focus, which must be a class of the images."""
    focus = recipe.decision.focus
    if focus is None:
        return recipe
    classes = sorted(counts())
    if focus not in classes:
        must = f"--focus must be a class of the images: {', '.join(classes)}"
        raise InputError(sentence(must, repr(focus), suggest_names([focus], classes)))
    return _with_rule(recipe)


def _with_rule(recipe: Recipe) -> Recipe:
    """Return a recipe whose rule means the class in focus, if it names none: ``alarms:100`` would mean the rarest."""
    focus, rule = recipe.decision.focus, parse_rule(recipe.decision.rule)
    if focus is None or not rule.has_threshold or rule.target:
        return recipe
    return recipe.override(**{"decision.rule": str(replace(rule, target=focus))})


def _with_reasons(ranks: Ranks, make: Callable[[], tuple[V, list[Fact]]]) -> tuple[V, list[Fact]]:
    """Return on all ranks the choice of the first rank, and its reasons, which only the first rank logs."""
    reasons: list[Fact] = []

    def choose() -> V:
        choice, facts = make()
        reasons.extend(facts)
        return choice

    return ranks.told(choose), reasons


def _choose(
    recipe: str | None, out: Path, resume: bool, changes: Mapping[str, Any], *, quiet: bool = True
) -> tuple[str, list[Fact]]:
    """Return a recipe as TOML, and the reason for it; none if the user named the recipe.

    This is the named recipe, the recipe of the run to resume, or ``quick``. If an option has an effect only on the
    training of an encoder, it is ``from-scratch``.
    """
    continues = resume and (out / RECIPE).is_file()
    if recipe is not None or continues:
        loaded = find_recipe(recipe) if recipe is not None else Run.open(out).recipe
        if not quiet:
            from lopsided.runs.tracking import say_trackers

            say_trackers(loaded, changes.get("track", ()))
        return loaded.to_toml(), []
    chosen = ((methods.find(name), path) for path in changes for name in methods.names())
    method, by = next(((each, path) for each, path in chosen if each.chosen_by(path)), (None, "method"))
    method = method or methods.find(str(changes.get("method", find_recipe("quick").method)))
    if method.trains_encoder and method.pretrained:
        return find_recipe(method.example).to_toml(), [notes.recipe_by_field(method.example, by)]
    training = next((path for path in changes if method.is_idle(path)), None)
    if training is None and changes.get("encoder.weights", "none" if "encoder.name" in changes else "") == "none":
        training = "encoder.name"
        spec = EncoderSpec.parse(str(changes.get("encoder.name", "")))
        if spec.is_joined:
            one = len(spec.parts) == 1
            words = "Give its weights" if one else "Give the weights of each with + between them"
            do = f"{words}, such as weights={'embedded' if one else 'embedded+timm'}."
            got = f"{spec.name[:80]} without weights"
            raise InputError(sentence("joined encoders must have pretrained weights", got, do))
    if method.trains_encoder:
        training = "method"
    if training is not None:
        return find_recipe("from-scratch").to_toml(), [notes.from_scratch_by_field(training)]
    return find_recipe("quick").to_toml(), [notes.quick_by_encoder()]
