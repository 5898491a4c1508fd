"""The subcommands that only print information: recipes, losses, data, doctor."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lopsided.cli.options import Json, Quiet, argument, grouped, option
from lopsided.cli.output import LONGEST, say, shortened, show, show_json, table
from lopsided.data.listed import Labelled
from lopsided.errors import InputError
from lopsided.runs.progress import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lopsided.losses.catalogue import Loss


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipe names that start with ``incomplete``, for shell completion."""
    from lopsided.recipe import named_recipes

    return [name for name in named_recipes() if name.startswith(incomplete)]


def recipes(
    name: Annotated[
        str | None, argument("Recipe to print: a name or a TOML file.", autocompletion=complete_recipe)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, or print one with the fields that have an effect on it.

    \b
    Examples:
      lopsided recipes
      lopsided recipes paper-fmnist
      lopsided recipes quick > mine.toml
    """
    from lopsided.recipe import find_recipe, named_recipes

    if name is None:
        known = named_recipes()
        if as_json:
            show_json(known)
        else:
            show(table(["recipe", "purpose"], known.items()))
        return
    recipe = find_recipe(name)
    if as_json:
        show_json(recipe.model_dump(mode="json"))
    else:
        show(recipe.acting_toml().rstrip("\n"))


def losses(as_json: Json = False) -> None:
    """List the losses, including losses that other packages add.

    Use the name of a loss and its parameters in a recipe or in `fit`.

    \b
    Examples:
      lopsided losses
      lopsided fit photos --out run --loss acl eta=0.1
    """
    from lopsided.losses import catalogue

    if as_json:
        show_json({loss.name: _loss_facts(loss) for loss in catalogue.losses()})
        return
    rows = [
        [loss.name, loss.kind, loss.title, ", ".join(f"{name}={value}" for name, value in loss.defaults().items())]
        for loss in catalogue.losses()
    ]
    show(table(["loss", "kind", "title", "parameters"], rows))
    for problem in catalogue.problems():
        say(problem)


def _loss_facts(loss: Loss) -> dict[str, Any]:
    parameters = {
        p.name: {
            "default": p.default,
            "description": p.description,
            "least": p.least,
            "above": p.above,
            "most": p.most,
            "choices": list(p.choices) or None,
        }
        for p in loss.parameters
    }
    needs = {"head": loss.head, "views": loss.views, "classes": loss.classes}
    return {"kind": loss.kind, "title": loss.title, **needs, "parameters": parameters}


@grouped
def data(
    *,
    data: Annotated[
        str | None, argument("Data to describe: the name of a source, a folder or a table.", metavar="DATA")
    ] = None,
    listed: Labelled,
    sample: Annotated[
        Path | None,
        option(
            None,
            "Write 324 pictures that are part of the package into this folder, and 72 others into FOLDER-more.",
            metavar="FOLDER",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """List the sources, or describe a folder, a table or a source.

    Every image is decoded once. The result lists problems before training:
    unreadable files, byte-identical images, classes with too few images or
    with similar names, and pairs such as x.jpg and x.png.

    \b
    Examples:
      lopsided data
      lopsided data --sample photos
      lopsided data photos
      lopsided data photos --exclude "*.png"
      lopsided data lesions.csv --group patient --json
    """
    if sample is not None:
        _write_sample(sample, data, as_json=as_json)
        return
    from lopsided.data.describe import describe, list_sources

    if data is None:
        sources = list_sources()
        if as_json:
            show_json(sources)
        else:
            rows = [[each["name"], "yes" if each["found"] else "no", each["where"]] for each in sources]
            show(table(["source", "found", "where"], rows))
        return
    from lopsided.inference.feature_cache import ReadableImages
    from lopsided.runs.progress import counter

    with counter("reading images", quiet=quiet) as progress:
        facts = describe(data, listed, progress=progress, known=ReadableImages())
    if as_json:
        show_json(facts)
    else:
        show(_in_words(facts))


def doctor(as_json: Json = False) -> None:
    """Check this machine and print what the results mean for training.

    \b
    Examples:
      lopsided doctor
      lopsided doctor --json
    """
    from lopsided.cli.doctor import examine

    findings = examine()
    if as_json:
        show_json([finding.to_dict() for finding in findings])
    else:
        show(table(["check", "result", "meaning"], ([f.name, f.value, f.meaning] for f in findings)))


def _write_sample(folder: Path, data: str | None, *, as_json: bool) -> None:
    from lopsided.data.sample import write_sample

    if data is not None:
        raise InputError(f"--sample writes pictures, and {data} is to be described. Leave out one of the two.")
    written = write_sample(folder)
    if as_json:
        show_json(written)
        return
    for path, counts in written.items():
        show(f"{path}: {', '.join(f'{number} {name}' for name, number in counts.items())}")
    show(f"Train on them: lopsided fit {shlex.quote(str(folder))}")


def _in_words(facts: Mapping[str, Any]) -> str:
    from lopsided.recipe.words import amount

    total = facts["images"]
    what = "vector" if facts["channels"] is None else "image"
    colour = {None: "", 1: "grey, "}.get(facts["channels"], "colour, ")
    parts = [
        f"{printable(facts['name'])}: {amount(total, what)}, {amount(len(facts['classes']), 'class', 'classes')}, "
        f"{colour}{facts['sizes']['words']}"
    ]
    splits = list(facts["splits"] or ())
    rows = [
        [shortened(name), count, f"{100 * count / total:.1f} %", *(facts["splits"][split][name] for split in splits)]
        for name, count in facts["classes"].items()
    ]
    parts.append(table(["class", "images", "share", *splits], rows))
    if facts["left_out"]:
        parts.append(f"{facts['left_out']:,} images are left out by --include and --exclude.")
    if facts["groups"] is not None:
        groups = facts["groups"]
        parts.append(f"{groups['number']:,} groups; the largest has {groups['largest']:,} images.")
    same, broken = facts["duplicates"], facts["unreadable"]
    sets = "one set" if len(same) == 1 else f"{len(same):,} sets"
    titles = (
        f"{sum(len(item['names']) for item in same):,} byte-identical images in {sets}:",
        "One unreadable image:" if len(broken) == 1 else f"{len(broken):,} unreadable images:",
    )
    for title, listed in zip(titles, (same, broken), strict=True):
        if listed:
            lines = [title, *(f"  {_line(item)}" for item in listed[:10])]
            parts.append("\n".join(lines + (["  ..."] if len(listed) > 10 else [])))
    return "\n\n".join([*parts, *(shortened(note, LONGEST) for note in facts["notes"])])


def _line(item: Mapping[str, Any]) -> str:
    return printable(f"{item['name']} ({item['reason']})" if "reason" in item else " = ".join(item["names"]))
