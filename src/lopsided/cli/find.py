"""The subcommand that finds more images of a class: find."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lopsided.cli.options import Device, Json, Level, Prevalence, Quiet, Unfamiliar, argument, grouped, option
from lopsided.cli.options import words as choices
from lopsided.cli.output import (
    StoppedError,
    check_out,
    say_replaced,
    shortened,
    show,
    show_json,
    tell_facts,
    tell_unreadable,
)
from lopsided.cli.sweeping import Cluster, cluster_mapper
from lopsided.data.listed import Listed
from lopsided.errors import InputError, sentence

if TYPE_CHECKING:
    from lopsided.inference.find import By
    from lopsided.runs.find import Found


@grouped
def find(
    *,
    words: Annotated[
        list[str],
        argument(
            "RUN: folder of a finished run; default: the newest in runs/. POOL: unlabelled images: files, "
            "folders, and tables with a column path.",
            metavar="[RUN] POOL...",
        ),
    ],
    out: Annotated[Path, typer.Option(help="CSV file to write. The page is written next to it.")] = Path("found.csv"),
    wanted: Annotated[
        str | None,
        option(
            None,
            "The class to look for. Default: the class that the rule of the model names, or the rarest one.",
            "--class",
            "--focus",
            metavar="CLASS",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of images to list.")] = 500,
    by: Annotated[
        str,
        typer.Option(
            help="Order: by the probability of the class, by neighbours (nearness to known images of the class), or "
            "by the ranks of both.",
            autocompletion=choices("probability", "neighbours", "both"),
        ),
    ] = "probability",
    like: Annotated[
        list[str] | None,
        option(
            None,
            "Known images of the class for --by neighbours or both: a file, folder or table. Can be repeated. "
            "Default: those of the run.",
        ),
    ] = None,
    diverse: Annotated[
        float, typer.Option(help="Weight of diversity among the first, from 0 (none) to below 1; 0.3 is a start.")
    ] = 0.0,
    prevalence: Prevalence = None,
    unfamiliar: Unfamiliar = None,
    level: Level = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the page to look through and mark.")] = True,
    listed: Listed,
    device: Device = "auto",
    engine: Cluster = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find more images of a rare class among unlabelled images.

    The CSV lists the images that are most likely of the class, the first one
    first, with the calibrated probability p:CLASS. Images of the run's own
    data are left out. The page next to it shows them, to be marked by
    keyboard: y, n or s. It saves the marks as a CSV file, which `lopsided fit
    DATA --more marks.csv` adds to the training images.

    Images unlike the training images, such as charts in an archive of
    photographs, are left out; --unfamiliar mark keeps and marks them.

    The pool is read once, in constant memory. After an interruption, the same
    command continues. --engine ray shares the work among the machines of a
    cluster, which must see the images at the same paths.

    \b
    Examples:
      lopsided find archive
      lopsided find archive --class melanoma --out found.csv
      lopsided find run archive --class DF --out found.csv --top 200 --by both
      lopsided find run archive --class DF --out found.csv --by neighbours --like examples
      lopsided find run pool.csv --class DF --out found.csv --diverse 0.3
    """
    from lopsided import files
    from lopsided.inference.find import page_path
    from lopsided.reports.find_page import write_search
    from lopsided.runs.find import find_in_pool
    from lopsided.runs.folder import run_and_words
    from lopsided.runs.progress import counter

    run, pool = run_and_words(words, quiet=quiet)
    if not pool:
        raise InputError(f"Images are missing. Write lopsided find {shlex.quote(str(run))} POOL.")
    _check_targets(out, [*pool, *(like or ())], page=page)
    elsewhere = cluster_mapper(engine, run)

    counting = partial(counter, quiet=quiet)
    try:
        with files.lock_output(out):
            found = find_in_pool(
                run,
                pool,
                wanted,
                out,
                by=cast("By", by),
                top=top,
                diverse=diverse,
                like=like or (),
                prevalence=prevalence,
                unfamiliar=unfamiliar,
                level=level,
                listed=listed,
                device=device,
                elsewhere=elsewhere,
                counting=counting,
            )
            if not quiet:
                say_replaced(out, *([page_path(out)] if page else []))
            write_search(found, out, counting, page=page)
    except KeyboardInterrupt:
        raise StoppedError("interrupted. Run the same command again to continue.") from None
    _tell(found, out, page=page, quiet=quiet, as_json=as_json)


def _check_targets(out: Path, inputs: Sequence[str], *, page: bool) -> None:
    """Raise an error if a file of the search cannot be written or would overwrite input."""
    from lopsided.inference.find import page_path
    from lopsided.inference.predict import unreadable_path

    if page and page_path(out) == out:
        raise InputError(sentence("--out must be a CSV file", out, "The page is written next to it."))
    for path in (out, unreadable_path(out), *([page_path(out)] if page else [])):
        check_out(path, *inputs)


def _tell(found: Found, out: Path, *, page: bool, quiet: bool, as_json: bool) -> None:
    from lopsided.inference.find import page_path

    result = found.result
    tell_facts(found.facts, quiet=quiet)
    tell_unreadable(result.first_unreadable, result.unreadable, out)
    if as_json:
        facts: dict[str, Any] = {
            "out": str(out),
            "page": str(page_path(out)) if page else None,
            "class": found.label,
            "listed": len(result.rows),
            "images": result.images,
            "known": result.known,
            "unfamiliar": result.unfamiliar,
            "unreadable": result.unreadable,
        }
        show_json(facts)
        return
    p = [row.probability for row in result.rows]
    span = f" (probability {max(p):.3f} to {min(p):.3f})" if p else ""
    words = f"{len(p):,} of {result.images:,} images listed for {shortened(found.label)}{span}"
    show(f"{words}, {result.unreadable:,} unreadable: {out}")
    if page:
        show(f"Look through them in {page_path(out)}.")
