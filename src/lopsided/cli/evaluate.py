"""The subcommand that evaluates a trained model: evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from lopsided.cli.options import (
    AllowOutside,
    BatchSize,
    Decide,
    Device,
    Exclude,
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
        typer.Option(help="Table column of related images, such as patient. Widens the intervals.", show_default=False),
    ] = None,
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
    import json

    from lopsided import files
    from lopsided.data.sources.names import twins
    from lopsided.inference.evaluate import check_labelled, evaluate_model, list_labelled
    from lopsided.progress import counter
    from lopsided.runs.reopen import open_model, open_own_split, open_use, trained_on

    check_out(out, *([] if data is None else [data]))
    wanted = read_views(views)
    seed = 0
    if data is None:
        _refuse_without_data(
            {
                "--group": group,
                "--include": include or None,
                "--exclude": exclude or None,
                "--skip-unreadable": skip_unreadable,
                "--allow-outside": allow_outside,
            }
        )
        split = split or "test"
        with counter("checking images", quiet=quiet) as progress:
            source, recipe = open_own_split(run, split, progress)
        model, card = open_model(run, device)
        source, seed = source.relabel(card.classes), recipe.seed
    else:
        source = list_labelled(  # Before the model, whose import of torch takes seconds.
            data,
            group=group,
            split=split,
            skip_unreadable=skip_unreadable,
            allow_outside=allow_outside,
            include=include,
            exclude=exclude,
        )
        model, card = open_model(run, device)
        with counter("checking images", quiet=quiet) as progress:
            source = check_labelled(source, card, skip_unreadable=skip_unreadable, progress=progress)
        warn_of_twins(twins(source.names))
    card = use_views(model, card, wanted, quiet=quiet)
    use = open_use(run, card, read_rule(decide), prevalence)
    own_val = data is None and split == "val"
    if own_val:
        say("warning: the validation split selected the model, so the figures are too high.")
    elif split != "test" and (data is None or trained_on(run, data)):
        say(
            "warning: the model was trained on images of these data, so the figures are too high. "
            "Use the test figures of the run instead."
        )
    with counter("evaluating", quiet=quiet) as progress:
        result = evaluate_model(
            model, card, source, batch_size=batch_size, seed=seed, use=use, fitted_to=own_val, progress=progress
        )
    result = {"run": str(run), **result}
    if not quiet:
        say_replaced(out)
    if out is not None:
        files.atomic_write(out, json.dumps(result, indent=2, allow_nan=False) + "\n")
    if as_json:
        show_json(result)
        return
    for item in result["unreadable"]:
        say(f"skipped unreadable image: {item['name']} ({item['reason']})")
    what = f"{split} split of {run}" if data is None else result["data"]
    rule = rule_words(use.decision, card.classes)
    show(f"{what}: {result['num_images']:,} images\n\n{figures_table(result)}\n\n{rule}")
    if out is not None:
        show(f"\nWritten to {out}.")


def _refuse_without_data(options: Mapping[str, object]) -> None:
    """Raise if an option is given that needs DATA."""
    given = next((name for name, value in options.items() if value not in (None, False)), None)
    if given is not None:
        do = "Name the data, or leave the option out: the run's own data are opened as in its recipe."
        raise InputError(f"{given} needs DATA. {do}")
