"""The command ``lopsided compare``, which compares arms: losses or recipes on the same data."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopsided.cli import sweeping
from lopsided.cli.look import complete_recipe
from lopsided.cli.options import Json, Quiet, option
from lopsided.cli.output import say, show, show_json
from lopsided.cli.settings import read_arguments, read_changes
from lopsided.cli.sweeping import CHOICE
from lopsided.errors import InputError, sentence

if TYPE_CHECKING:
    from lopsided.data.sources import Source
    from lopsided.recipe import Recipe
    from lopsided.runs.candidates import Arm
    from lopsided.runs.cell import Cell
    from lopsided.runs.comparison import Comparison
    from lopsided.runs.records import Failure, Record

KIND = "compare"
"""The kind of these sweeps in ``sweep.json``."""
SEEDS = 3
"""The default number of runs of each arm without folds."""
BASELINE = "quick"
"""The arm that is the baseline by default, if it is one of the arms."""


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA NAME=VALUE",
            help="DATA: the name of a source, a folder or a table; by default the data of --recipe. NAME=VALUE: fields "
            "of the recipe for all arms, as in `lopsided fit`, such as epochs=10.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="CMP", help="The folder of the comparison. The same command continues it.")
    ] = None,
    arms: Annotated[
        list[str] | None,
        option(
            CHOICE,
            "Arms, separated by commas: losses (cl), losses with parameters (afcl:gamma=7), named recipes, or recipe "
            "files (mine.toml). A recipe keeps the data of --recipe.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        option(CHOICE, "The arm that the others are compared to; by default the arm default, or else the first."),
    ] = None,
    folds: Annotated[
        int | None,
        option(CHOICE, "Test every image: the runs of an arm are these folds, the same for all arms.", min=2),
    ] = None,
    repeats: Annotated[int | None, option(CHOICE, "How often to draw the folds; 1 by default.", min=1)] = None,
    scenario: Annotated[
        list[str] | None,
        option(CHOICE, "Class proportions to draw, such as 90:10. Separate several by commas, or repeat the option."),
    ] = None,
    seeds: Annotated[
        int | None,
        option(CHOICE, "Without --folds: runs of each arm in each scenario, seeds 0, 1, ...; 3 by default.", min=1),
    ] = None,
    recipe: Annotated[
        str,
        option(
            CHOICE,
            "The base recipe, by name or as a TOML file.",
            autocompletion=complete_recipe,
        ),
    ] = "from-scratch",
    engine: sweeping.EngineName = None,
    workers: sweeping.Workers = None,
    threads: sweeping.Threads = None,
    keep_models: sweeping.KeepModels = False,
    track: sweeping.Track = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare losses or recipes on the same images, with intervals.

    All arms are trained on the same images with the same seeds, and compared
    to the baseline run by run. A classification loss is trained end to end,
    for as many epochs as the two stages of the other arms together. Finished
    runs are kept in CMP: the same command continues an interrupted
    comparison, and further seeds, arms or scenarios add to it. Other settings
    need another folder. A failed cell does not stop the others; the exit code
    is then 1.

    With --folds, every image is tested once in each repeat, by a model that
    was trained without it. The answer names the best arm, the arms that
    cannot be told apart from it, the arm to take, and how many more repeats
    or rare images would tell two arms apart.

    \b
    Examples:
      lopsided compare photos --arms quick,ce,cl,afcl --folds 5 --repeats 3 --out CMP
      lopsided compare photos --arms ce,weighted-ce,cl,afcl --out CMP
      lopsided compare photos --arms cl,afcl:gamma=7 --seeds 5 --out CMP
      lopsided compare photos --arms cl,mine.toml --baseline cl --out CMP
      lopsided compare fashion-mnist-tops --arms ce,cl --scenario 90:10,98:2 --out CMP
      lopsided report CMP --open
    """
    from lopsided.runs.candidates import check_arms, parse_arms

    if out is None:
        raise InputError("--out is missing. Name the folder of the comparison, such as --out CMP.")
    data, texts = read_arguments(words or ())
    wanted = ",".join(scenario) if scenario else None
    given = {"data.source": data, "data.scenario": wanted, "track": track or None}
    named = dict(zip(given, ("DATA", "--scenario", "--track"), strict=True))
    sets = read_changes(texts, {path: (named[path], value) for path, value in given.items()}).values
    scenario = [sets.pop("data.scenario")] if "data.scenario" in sets else None
    given = {path: sets.pop(path) for path in ("data.source", "track") if path in sets}
    given |= _fold_fields(folds, repeats, seeds, sets)
    base, late = _read_base(recipe, sets, given, quiet=quiet)
    usual = "ce,weighted-ce,cl,afcl" if folds is None else "quick,ce,weighted-ce,cl,afcl"
    chosen = parse_arms(arms or [usual], sets, late)
    recipes = check_arms(chosen, base)
    check_encoders(recipes)
    _check_baseline(baseline, recipes)
    if not base.data.test and folds is None:
        raise InputError("A comparison needs test images, but data.test is 0. Set it, such as test=0.15.")
    scenarios = _scenarios(scenario or ())
    planned = _plan(chosen, base, scenarios, folds=folds, repeats=repeats, seeds=seeds)
    opened = sweeping.open_data(base)
    _check_classes(recipes, opened)
    source, images = opened.name, None if folds is None else check_images(out, opened, base)
    baseline = baseline or (BASELINE if BASELINE in recipes else next(iter(recipes)))
    about = about_comparison(out, source, base, recipes, planned) | {"baseline": baseline}
    about |= {} if images is None else {"images": images}
    worker = sweeping.make_engine(engine, workers, threads)
    if not quiet:
        say_mixed_groups(base, opened)
    failed = sweeping.train(planned, out, worker, about=about, keep_models=keep_models, quiet=quiet)
    _show(_compare(out, planned, baseline, source), failed, out, as_json=as_json)
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
    """Return the base recipe, and the changes that only the losses of the arms may take."""
    from lopsided.recipe import find_recipe
    from lopsided.runs.candidates import split_changes

    loaded = find_recipe(name)
    if not quiet:
        sweeping.say_trackers(loaded, given.get("track", ()))
    base, late = split_changes(loaded, sets, given)
    if base.data.source is None:
        do = "Write lopsided compare DATA, or set data.source in the recipe."
        raise InputError(f"DATA is missing, and the recipe names no source. {do}")
    return base, late


def _check_baseline(baseline: str | None, recipes: Mapping[str, Recipe]) -> None:
    """Raise an error if the baseline is not an arm."""
    if baseline is not None and baseline not in recipes:
        must = f"--baseline must be one of the arms, {', '.join(recipes)}"
        raise InputError(sentence(must, repr(baseline), "Add it to --arms."))


def _check_classes(recipes: Mapping[str, Recipe], source: Source) -> None:
    """Raise an error if the loss of an arm is not for this number of classes."""
    from lopsided.recipe import check_classes
    from lopsided.recipe.words import shown

    for arm, recipe in recipes.items():
        try:
            check_classes(recipe, len(source.classes))
        except InputError as error:
            raise InputError(f"arm {shown(arm)}: {error}") from None


def _plan(
    arms: Sequence[Arm],
    base: Recipe,
    scenarios: Sequence[str | None],
    *,
    folds: int | None,
    repeats: int | None,
    seeds: int | None,
) -> list[Cell]:
    """Return the cells of the comparison: folds if their number is given, and seeds otherwise."""
    from lopsided.runs.candidates import cells, fold_cells

    if folds is None:
        return cells(arms, base, scenarios, range(base.seed, base.seed + (seeds or SEEDS)))
    return fold_cells(arms, base, scenarios, repeats or 1)


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


def about_comparison(
    out: Path, source: str, base: Recipe, recipes: Mapping[str, Recipe], planned: Sequence[Cell]
) -> dict[str, Any]:
    """Return the contents of ``sweep.json``. Raise an error if the folder has runs on other data or other settings."""
    from lopsided.recipe.words import shown
    from lopsided.runs.candidates import LOSS
    from lopsided.runs.keys import proportion
    from lopsided.runs.record_files import read_records
    from lopsided.runs.sweep import RECORDS, about_sweep

    there = about_sweep(out)
    records = read_records(out / RECORDS)[0] if (out / RECORDS).exists() else []
    others = dict.fromkeys(record.source for record in records if record.source != source)
    if others:
        names = ", ".join(map(shown, others))
        raise InputError(f"{out} has runs on {names}, not on {shown(source)}. Choose another folder.")
    _check_kind_of_runs(out, records, base.data.folds)
    settings = _settings(base)
    changes = {arm: _changed(_without_loss(settings), _settings(recipe)) for arm, recipe in recipes.items()}
    texts = [cell.recipe.data.scenario for cell in planned if cell.recipe.data.scenario is not None]
    scenarios = {str(proportion(text)): text for text in texts}
    if records:  # Only finished runs can stand beside new ones on a page.
        old, old_changes, old_scenarios = (_table(there, name) for name in ("settings", "changes", "scenarios"))
        if old:  # Otherwise the file was written anew after it was damaged.
            same_loss = old.get(f"{LOSS}.name") == settings[f"{LOSS}.name"]
            both = (old, settings) if same_loss else (_without_loss(old), _without_loss(settings))
            _check_same(out, "runs", *both)
        for arm in filter(old_changes.__contains__, changes):
            then = _without_loss(old) | _table(old_changes, arm)
            now = _without_loss(settings) | changes[arm]
            _check_same(out, f"runs of the arm {shown(arm)}", then, now)
        for name in filter(old_scenarios.__contains__, scenarios):
            then, now = ({"data.scenario": each[name]} for each in (old_scenarios, scenarios))
            _check_same(out, f"runs at {name}", then, now)
        changes, scenarios = {**old_changes, **changes}, {**old_scenarios, **scenarios}
    before = there["arms"] if isinstance(there.get("arms"), list) else []
    arms = [*recipes, *(arm for arm in before if isinstance(arm, str) and arm not in recipes)]
    return {"kind": KIND, "arms": arms, "settings": settings, "changes": changes, "scenarios": scenarios}


def check_encoders(recipes: Mapping[str, Recipe]) -> None:
    """Check the encoders of all arms, before every cell of an arm fails on its encoder."""
    from lopsided.models.pretrained import check_encoder
    from lopsided.recipe.words import shown

    for arm, recipe in recipes.items():
        try:
            check_encoder(recipe.encoder.spec)
        except InputError as error:
            raise InputError(f"arm {shown(arm)}: {error}") from None


def check_images(out: Path, source: Source, base: Recipe) -> str:
    """Return a digest of the names, labels and groups of the images. Raise an error if the folder has another one.

    Folds of other images cannot be compared. The number of folds and the rule are checked, too, before any cell fails
    on them.
    """
    from lopsided.data.folds import fold_numbers
    from lopsided.data.prepare import data_seed, split_rule
    from lopsided.recipe.words import shown
    from lopsided.runs.folds import check_rule
    from lopsided.runs.sweep import about_sweep

    check_rule(base, source)
    if base.data.scenario is None:
        how = split_rule(base, source)
        fold_numbers(source, how=how, folds=base.data.folds or 0, seed=data_seed(base))
    groups = [] if source.groups is None else source.groups.tolist()
    content = json.dumps([list(source.names), source.labels.tolist(), groups])
    digest = hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:16]
    there = about_sweep(out).get("images", digest)
    if there != digest:
        what = f"{out} has folds of other images than {shown(source.name)} has now"
        raise InputError(f"{what}: names, labels or groups differ. Choose another folder.")
    return digest


def say_mixed_groups(base: Recipe, source: Source) -> None:
    """Print a note if folds by group have groups with images of several classes."""
    from lopsided.data.prepare import split_rule
    from lopsided.runs.folds import mixed_group_notes

    for fact in mixed_group_notes(source) if split_rule(base, source) == "group" else ():
        say(str(fact))


def _check_kind_of_runs(out: Path, records: Sequence[Record], folds: int | None) -> None:
    """Raise an error if the folder has runs of folds and this comparison has runs of seeds, or the other way round."""
    for record in records:
        if (record.fold is None) != (folds is None):
            then, now = ("seeds", "folds") if record.fold is None else ("folds", "seeds")
            raise InputError(f"{out} has runs of {then}, not of {now}. Choose another folder.")


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that decide a run, except for the fields in which the runs of one arm differ."""
    from lopsided.recipe import RUNTIME_FIELDS
    from lopsided.recipe.words import leaves
    from lopsided.runs.keys import VARIED_FIELDS

    found = {path: value for path, _, value in leaves(recipe) if path not in RUNTIME_FIELDS | VARIED_FIELDS}
    settings: dict[str, Any] = json.loads(json.dumps(found))  # As sweep.json holds them: a tuple becomes a list.
    return settings | {"encoder.weights": recipe.encoder.spec.without_folders()}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in new.items() if path not in old or old[path] != value}


def _table(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _without_loss(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that remain if an arm has another loss than the base recipe."""
    from lopsided.runs.candidates import LOSS

    return {path: value for path, value in settings.items() if not path.startswith(f"{LOSS}.")}


def _check_same(out: Path, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise an error that names the fields with other values."""
    changed = list(_changed(old, new))
    if changed:
        texts = [f"{path} was {_value(old.get(path))} and is now {_value(new[path])}" for path in changed[:3]]
        texts += [f"and {len(changed) - 3} more fields"] if len(changed) > 3 else []
        do = "Use the same settings, or choose another folder."
        raise InputError(f"{out} has {what} with other settings: {', '.join(texts)}. {do}")


def _value(value: object) -> str:
    from lopsided.recipe.words import shown

    return "unset" if value is None else shown(value)


def _compare(out: Path, planned: Sequence[Cell], baseline: str | None, source: str) -> Comparison:
    """Compare all runs of the requested arms and scenarios, including those of earlier commands."""
    from lopsided.runs.comparison import compare as arranged
    from lopsided.runs.keys import proportion, treatment_of
    from lopsided.runs.record_files import read_records
    from lopsided.runs.sweep import RECORDS

    records = read_records(out / RECORDS)[0] if (out / RECORDS).exists() else []
    return arranged(
        [record for record in records if record.source == source],
        arms={treatment_of(cell.recipe): str(cell.arm) for cell in planned},
        baseline=baseline,
        scenarios=list(dict.fromkeys(proportion(cell.recipe.data.scenario) for cell in planned)),
        source=source,
    )


def _show(comparison: Comparison, failed: Sequence[Failure], out: Path, *, as_json: bool) -> None:
    if as_json:
        from lopsided.runs.answer import to_dict

        show_json({"out": str(out), **to_dict(comparison), "failed": sweeping.failed_dict(failed)})
        return
    from lopsided.runs.comparison_tables import print_comparison

    print_comparison(comparison, sweeping.wide_console())
    lines = [f"{failure.name} failed: {failure.error}" for failure in failed]
    show("\n".join([*lines, f"For a page, run: lopsided report {shlex.quote(str(out))}"]))
