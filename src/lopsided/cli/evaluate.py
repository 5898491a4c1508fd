"""The subcommand that evaluates a trained model: evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

import typer

from lopsided.cli.options import (
    AllowOutside,
    BatchSize,
    Decide,
    Device,
    Exclude,
    GroupFrom,
    Include,
    Json,
    Prevalence,
    Quiet,
    RunFolder,
)
from lopsided.cli.output import check_out, figures_table, say, say_replaced, show, show_json, warn_of_twins
from lopsided.cli.rules import read_rule, rule_words
from lopsided.cli.views import Views, read_views, use_views
from lopsided.errors import InputError

if TYPE_CHECKING:
    from lopsided.data.sources import Source
    from lopsided.models.model import Model, ModelCard


class Listing(TypedDict):
    """The options that say how DATA are listed, by the names of ``list_labelled``."""

    group: str | None
    group_from: str | None
    include: list[str] | None
    exclude: list[str] | None
    skip_unreadable: bool
    allow_outside: bool


class Opened(NamedTuple):
    """A model, and the images to evaluate it on. ``seed`` is that of the intervals."""

    source: Source
    model: Model
    card: ModelCard
    seed: int = 0


def evaluate(
    run: RunFolder,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="Labelled images: a folder, a table or the name of a source. Default: the test split of the run.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the figures to this JSON file.", show_default=False)
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Related images: a table column, such as patient, or parent for folders. Widens the intervals.",
            show_default=False,
        ),
    ] = None,
    group_from: GroupFrom = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Use only this split of the data, or of the run if DATA is missing: train, val or test.",
            show_default=False,
        ),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip images that cannot be read, and list them.")
    ] = False,
    allow_outside: AllowOutside = False,
    decide: Decide = None,
    prevalence: Prevalence = None,
    views: Views = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on labelled images, with intervals.

    Every label must be a class of the model. Do not evaluate on the training
    images. Without DATA, the test split of the run is evaluated again: its
    images are opened from where `fit` found them, and the command stops if
    they have changed.

    \b
    Examples:
      lopsided evaluate run other-hospital
      lopsided evaluate run
      lopsided evaluate run lesions.csv --group patient --out figures.json
    """
    from lopsided.inference.evaluate import evaluate_model
    from lopsided.progress import counter
    from lopsided.runs.reopen import open_use

    check_out(out, *([] if data is None else [data]))
    wanted = read_views(views)
    listing = Listing(
        group=group,
        group_from=group_from,
        include=include or None,
        exclude=exclude or None,
        skip_unreadable=skip_unreadable,
        allow_outside=allow_outside,
    )
    if data is None:
        _refuse_without_data(listing)
        split = split or "test"
        source, model, card, seed = _open_own(run, split, device, quiet=quiet)
    else:
        source, model, card, seed = _open_data(run, data, split, listing, device, quiet=quiet)
    card = use_views(model, card, wanted, quiet=quiet)
    use = open_use(run, card, read_rule(decide), prevalence)
    _warn_of_seen_images(run, data, split)
    own_val = data is None and split == "val"
    with counter("evaluating", quiet=quiet) as progress:
        result = evaluate_model(
            model, card, source, batch_size=batch_size, seed=seed, use=use, fitted_to=own_val, progress=progress
        )
    result = {"run": str(run), **result}
    _write(result, out, quiet=quiet)
    if as_json:
        show_json(result)
        return
    what = f"{split} split of {run}" if data is None else result["data"]
    _show(result, what, rule_words(use.decision, card.classes), out)


def _refuse_without_data(listing: Listing) -> None:
    """Raise if an option is given that needs DATA."""
    given = next((name for name, value in listing.items() if value not in (None, False)), None)
    if given is not None:
        do = "Name the data, or leave the option out: the run's own data are opened as in its recipe."
        raise InputError(f"--{given.replace('_', '-')} needs DATA. {do}")


def _open_own(run: Path, split: str, device: str, *, quiet: bool) -> Opened:
    """Open a model and a split of its run."""
    from lopsided.progress import counter
    from lopsided.runs.reopen import open_model, open_own_split

    with counter("checking images", quiet=quiet) as progress:
        source, recipe = open_own_split(run, split, progress)
    model, card = open_model(run, device, kinds=("image", "vector"))
    return Opened(source.relabel(card.classes), model, card, recipe.seed)


def _open_data(run: Path, data: str, split: str | None, listing: Listing, device: str, *, quiet: bool) -> Opened:
    """Open a model and other data."""
    from lopsided.data.sources.names import twins
    from lopsided.inference.evaluate import check_labelled, list_labelled
    from lopsided.progress import counter
    from lopsided.runs.reopen import open_model

    source = list_labelled(data, split=split, **listing)  # Before the model, whose import of torch takes seconds.
    model, card = open_model(run, device, kinds=("image", "vector"))
    with counter("checking images", quiet=quiet) as progress:
        source = check_labelled(source, card, skip_unreadable=listing["skip_unreadable"], progress=progress)
    warn_of_twins(twins(source.names))
    return Opened(source, model, card)


def _warn_of_seen_images(run: Path, data: str | None, split: str | None) -> None:
    """Warn about images that the model was selected by or trained on."""
    from lopsided.runs.reopen import trained_on

    if data is None and split == "val":
        say("warning: the validation split selected the model, so the figures are too high.")
    elif split != "test" and (data is None or trained_on(run, data)):
        say(
            "warning: the model was trained on images of these data, so the figures are too high. "
            "Use the test figures of the run instead."
        )


def _write(result: Mapping[str, Any], out: Path | None, *, quiet: bool) -> None:
    import json

    from lopsided import files

    if not quiet:
        say_replaced(out)
    if out is not None:
        files.atomic_write(out, json.dumps(result, indent=2, allow_nan=False) + "\n")


def _show(result: Mapping[str, Any], what: str, rule: str, out: Path | None) -> None:
    for item in result["unreadable"]:
        say(f"skipped unreadable image: {item['name']} ({item['reason']})")
    show(f"{what}: {result['num_images']:,} images\n\n{figures_table(result)}\n\n{rule}")
    if out is not None:
        show(f"\nWritten to {out}.")
