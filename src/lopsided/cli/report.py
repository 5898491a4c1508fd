"""The command ``lopsided report``, which writes an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lopsided.cli.options import AllowOutside, Focus, Json, Quiet, argument, option, words
from lopsided.cli.output import check_out, say, show, show_json

if TYPE_CHECKING:
    from lopsided.reports.report import Report, RunReports


def report(
    folder: Annotated[
        Path | None,
        argument("The folder of a finished run or of a sweep. Default: the newest run in runs/.", metavar="FOLDER"),
    ] = None,
    out: Annotated[Path | None, option(None, "The HTML file to write; by default report.html in the folder.")] = None,
    map_kind: Annotated[
        str,
        typer.Option(
            "--map",
            help="A second map of the features besides PCA: tsne or umap.",
            autocompletion=words("pca", "tsne", "umap"),
        ),
    ] = "pca",
    maps: Annotated[
        bool | None,
        option(
            None,
            "For a run: show where the model looked, for mistakes and doubtful labels. Default: where it can.",
            "--maps/--no-maps",
        ),
    ] = None,
    focus: Focus = None,
    prevalence: Annotated[
        str | None,
        option(
            None,
            "For a run: class shares where the model is used, for example A=0.02,B=0.98. The page shows how many "
            "images a person must see there.",
        ),
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="For a sweep: also write a page for each run.")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    allow_outside: AllowOutside = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write an HTML page about a run or a sweep. The page works offline.

    The page of a run shows the results on the rare class, misclassified
    images, an adjustable threshold, a map of the features, learning curves
    and the recipe. The page of a comparison shows its methods side by side with
    intervals, and the differences between paired runs. If the sweep repeats
    a table of the paper, the page shows figures over eta and gamma, and
    verdicts. The page is a single file and loads nothing.

    With --runs, the command names and skips each run that cannot be read. It
    writes all other pages and ends with exit code 1.

    \b
    Examples:
      lopsided report --open
      lopsided report run
      lopsided report run --focus melanoma
      lopsided report run --prevalence melanoma=0.02,naevus=0.98
      lopsided report run --map tsne --out for-a-friend.html --open
      lopsided report run --no-maps
      lopsided report sweep --runs
    """
    from lopsided.paper.page import is_of_paper, sweep_page
    from lopsided.reports.report import RunReports, write_report, write_run_reports
    from lopsided.runs.folder import named_or_newest
    from lopsided.runs.progress import counter
    from lopsided.runs.sweep import SWEEP

    check_out(out)
    folder = named_or_newest(folder, quiet=quiet)
    of_paper = (folder / SWEEP).is_file() and is_of_paper(folder)
    pages = RunReports(0, ())
    if runs:
        with counter("writing pages", quiet=quiet) as progress:
            pages = write_run_reports(
                folder, kind=map_kind, allow_outside=allow_outside, maps=maps is not False, progress=progress
            )
    if maps is not False:
        _make_maps(folder, allow_outside=allow_outside, asked=maps is True, quiet=quiet)
    page = sweep_page if of_paper else None
    with counter("making the page", quiet=quiet) as progress:
        written = write_report(
            folder,
            out,
            kind=map_kind,
            allow_outside=allow_outside,
            focus=focus,
            prevalence=prevalence,
            sweep_page=page,
            progress=progress,
        )
    _tell(written, pages, runs=runs, as_json=as_json)
    if open_it:
        import webbrowser

        webbrowser.open(written.path.resolve().as_uri())
    if pages.failed:
        for run, error in pages.failed:
            say(f"No page of {run}: {error}")
        say(f"{len(pages.failed):,} of {pages.written + len(pages.failed):,} runs have no page.")
        raise typer.Exit(1)


def _tell(written: Report, pages: RunReports, *, runs: bool, as_json: bool) -> None:
    """Say what was written."""
    if as_json:
        result = {"file": str(written.path), "about": written.about, "bytes": written.num_bytes, "runs": pages.written}
        if runs:
            result["failed"] = [{"run": str(run), "error": error} for run, error in pages.failed]
        show_json(result)
    else:
        more = f", and {pages.written:,} pages of runs" if pages.written else ""
        show(f"Written to {written.path} ({written.num_bytes / 1e6:.1f} MB){more}.")
    for note in written.notes:
        say(note)


def _make_maps(folder: Path, *, allow_outside: bool, asked: bool, quiet: bool) -> None:
    """Write maps and pictures of the mistakes on the page of a run into its folder; what cannot be made only if asked.

    A finished run that cannot be read is left to the page, which says why.
    """
    from lopsided.errors import LopsidedError
    from lopsided.reports.report import make_shown_maps
    from lopsided.runs.folder import METRICS
    from lopsided.runs.progress import counter

    if not (folder / METRICS).is_file() and not asked:
        return
    try:
        with counter("looking where the model looked", quiet=quiet) as progress:
            number, wanted = make_shown_maps(folder, allow_outside=allow_outside, progress=progress)
    except LopsidedError:
        if asked:
            raise
        return
    if asked and not quiet and number < wanted:
        say(f"{wanted - number:,} of {wanted:,} images are gone, so that they have no map.")
