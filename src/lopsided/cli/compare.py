"""The command ``lopsided compare``, which compares methods: losses or recipes on the same data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopsided.cli import sweeping
from lopsided.cli.look import complete_recipe
from lopsided.cli.options import Json, Quiet, argument, grouped, option
from lopsided.cli.output import say, show, show_json
from lopsided.cli.settings import read_arguments, read_changes
from lopsided.cli.sweeping import CHOICE
from lopsided.errors import InputError

if TYPE_CHECKING:
    from lopsided.recipe import Recipe
    from lopsided.runs.comparison import Comparison
    from lopsided.runs.records import Failure

SEEDS = 3
"""The default number of runs of each method without folds."""


@grouped
def compare(
    *,
    words: Annotated[
        list[str] | None,
        argument(
            "DATA: the name of a source, a folder or a table; by default the data of --recipe. NAME=VALUE: fields "
            "of the recipe for all methods, as in `lopsided fit`, such as epochs=10.",
            metavar="DATA NAME=VALUE",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="CMP", help="The folder of the comparison. The same command continues it.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        option(
            CHOICE,
            "Methods, separated by commas: losses (cl), named recipes (quick) or recipe files (mine.toml), each with "
            "fields if need be (afcl gamma=7). A recipe keeps the data of --recipe.",
        ),
    ] = None,
    baseline: Annotated[
        str | None, option(CHOICE, "The method that the others are compared to; by default quick, or else the first.")
    ] = None,
    folds: Annotated[
        int | None,
        option(CHOICE, "Test every image: the runs of a method are these folds, the same for all methods.", min=2),
    ] = None,
    repeats: Annotated[int | None, option(CHOICE, "How often to draw the folds; 1 by default.", min=1)] = None,
    scenario: Annotated[
        list[str] | None,
        option(CHOICE, "Class proportions to draw, such as 90:10. Separate several by commas, or repeat the option."),
    ] = None,
    group: Annotated[
        str | None, option(CHOICE, "Table column of groups, such as patient. A group stays in one split or fold.")
    ] = None,
    seeds: Annotated[
        int | None,
        option(CHOICE, "Without --folds: runs of each method in each scenario, seeds 0, 1, ...; 3 by default.", min=1),
    ] = None,
    recipe: Annotated[
        str,
        option(
            CHOICE,
            "The base recipe, by name or as a TOML file.",
            autocompletion=complete_recipe,
        ),
    ] = "from-scratch",
    work: sweeping.Work,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare losses or recipes on the same images, with intervals.

    All methods are trained on the same images with the same seeds, and
    compared to the baseline run by run. A classification loss is trained end
    to end, for as many epochs as the two stages of the others together.
    Finished runs are kept in CMP: the same command continues an interrupted
    comparison, and further seeds, methods or scenarios add to it. Other
    settings need another folder. A failed run does not stop the others; the
    exit code is then 1.

    With --folds, every image is tested once in each repeat, by a model that
    was trained without it. The answer names the best method, those without a
    reliable difference to it, the one to use, and how many more repeats or
    rare images would show a difference.

    \b
    Examples:
      lopsided compare photos --methods "quick, ce, cl, afcl" --folds 5 --out CMP
      lopsided compare photos --methods "cl, afcl gamma=7" --seeds 5 --out CMP
      lopsided compare photos --methods "cl, mine.toml" --baseline cl --out CMP
      lopsided compare photos epochs=10 image_size=64 --methods "ce, cl" --out CMP
      lopsided compare fashion-mnist-tops --scenario 90:10,98:2 --out CMP
      lopsided report CMP --open
    """
    from lopsided.data.prepare import split_rule
    from lopsided.data.sources.vectors import check_vector_fields
    from lopsided.runs.comparison_plan import ComparisonPlan, check_used, parse_candidates
    from lopsided.runs.folder import check_outside
    from lopsided.runs.folds import mixed_group_notes
    from lopsided.runs.sweep import SWEEP

    if out is None:
        raise InputError("--out is missing. Name the folder of the comparison, such as --out CMP.")
    data, texts = read_arguments(words or ())
    wanted = ",".join(scenario) if scenario else None
    given = {
        "data.source": data,
        "data.scenario": wanted,
        "track": work.track or None,
        "data.group": group,
    }
    named = dict(zip(given, ("DATA", "--scenario", "--track", "--group"), strict=True))
    sets = read_changes(texts, {path: (named[path], value) for path, value in given.items()}).values
    scenario = [sets.pop("data.scenario")] if "data.scenario" in sets else None
    given = {path: sets.pop(path) for path in ("data.source", "track") if path in sets}
    given |= _fold_fields(folds, repeats, seeds, sets)
    check_vector_fields(given.get("data.source"), sets)
    base, late = _read_base(recipe, sets, given, quiet=quiet)
    check_outside(out, base.data.source)
    usual = "ce,weighted-ce,cl,afcl" if folds is None else "quick,ce,weighted-ce,cl,afcl"
    chosen = parse_candidates(methods or [usual], sets, late)
    if not base.data.test and folds is None:
        raise InputError("A comparison needs test images, but data.test is 0. Set it, such as test=0.15.")
    runs = (seeds or SEEDS) if folds is None else (repeats or 1)
    plan = ComparisonPlan(out, chosen, base, scenarios=_scenarios(scenario or ()), runs=runs, baseline=baseline)
    plan.check_recipes()
    if not (out / SWEEP).is_file():  # One that is continued keeps its words, whichever methods go on.
        check_used(sets, plan.recipes)
    source = sweeping.open_data(base)
    plan.check_recipes(len(source.classes))
    about = plan.about(source)
    for fact in mixed_group_notes(source) if not quiet and split_rule(base, source) == "group" else ():
        say(str(fact))
    failed = sweeping.train(plan.cells, out, work, about=about, quiet=quiet)
    _show(plan.compare(source.name), failed, out, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _fold_fields(folds: int | None, repeats: int | None, seeds: int | None, sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the recipe for folds. Raise an error for options that contradict each other."""
    own = [path for path in ("data.folds", "data.repeats", "data.fold", "final") if path in sets]
    if own:
        raise InputError(f"A comparison cannot set {own[0]}. Use --folds and --repeats.")
    if folds is None:
        if repeats is not None:
            raise InputError("--repeats repeats folds, but --folds is missing. Add it, such as --folds 5.")
        return {}
    sweeping.refuse({"--seeds": seeds}, "is the number of runs without folds", "--folds")
    return {"data.folds": folds}


def _read_base(
    name: str, sets: Mapping[str, Any], given: Mapping[str, Any], *, quiet: bool
) -> tuple[Recipe, dict[str, Any]]:
    """Return the base recipe, and the changes that only the losses of the methods may take."""
    from lopsided.recipe import find_recipe
    from lopsided.runs.comparison_plan import split_changes
    from lopsided.runs.tracking import say_trackers

    loaded = find_recipe(name)
    if not quiet:
        say_trackers(loaded, given.get("track", ()))
    base, late = split_changes(loaded, sets, given)
    if base.data.source is None:
        do = "Write lopsided compare DATA, or set data.source in the recipe."
        raise InputError(f"DATA is missing, and the recipe names no source. {do}")
    return base, late


def _scenarios(texts: Sequence[str]) -> list[str | None]:
    """Read scenarios from comma-separated lists; a total or a shape belongs to the preceding scenario."""
    from lopsided.data.scenarios import parse_scenario
    from lopsided.runs.keys import proportion

    found: list[str] = []
    for text in texts:
        own: list[str] = []
        for part in map(str.strip, text.split(",")):
            if own and not part[:1].isdigit() and not part.startswith("long-tail"):
                own[-1] += f",{part}"
            else:
                own.append(part)
        found += own
    for text in found:
        parse_scenario(text)
    twice = [text for i, text in enumerate(found) if proportion(text) in map(proportion, found[:i])]
    if twice:
        raise InputError(f"--scenario names the proportions of {twice[0]} twice. Remove one of the two.")
    return [*found] or [None]


def _show(comparison: Comparison, failed: Sequence[Failure], out: Path, *, as_json: bool) -> None:
    if as_json:
        from lopsided.runs.answer import to_dict

        show_json({"out": str(out), **to_dict(comparison), "failed": sweeping.failed_dict(failed)})
        return
    from lopsided.runs.answer import print_comparison

    print_comparison(comparison, sweeping.wide_console())
    lines = [f"{failure.name} failed: {failure.error}" for failure in failed]
    show("\n".join([*lines, f"For a page, run: lopsided report {shlex.quote(str(out))}"]))
