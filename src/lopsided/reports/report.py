"""From a run folder or a sweep folder to the one HTML file about it. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lopsided import files
from lopsided.errors import LopsidedError, RunError, sentence
from lopsided.reports.comparison_page import comparison_page
from lopsided.reports.feature_map import check_kind
from lopsided.reports.run_data import shown_images
from lopsided.reports.run_page import run_page
from lopsided.reports.sweep_data import PAGE
from lopsided.reports.thumbnails import keep_shown_pictures
from lopsided.runs.folder import METRICS, RECIPE
from lopsided.runs.plan import CELLS
from lopsided.runs.sweep import SWEEP

if TYPE_CHECKING:
    from lopsided.data.images import Progress


@dataclass(frozen=True)
class Report:
    """A page that was written."""

    path: Path
    about: str
    num_bytes: int
    notes: tuple[str, ...] = ()
    """Why pictures are missing."""


@dataclass(frozen=True)
class RunReports:
    """How many pages of a sweep's runs were written, and the folders and errors of those that could not be."""

    written: int
    failed: tuple[tuple[Path, str], ...]


def write_report(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    kind: str = "pca",
    allow_outside: bool = False,
    focus: str | None = None,
    prevalence: str | None = None,
    sweep_page: Callable[[Path, Path], str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the page of a run or of a sweep, by default into its folder; ``kind`` is a run's map beside PCA.

    ``focus`` is the class that the page of a run follows, and ``prevalence`` are the class shares where its model is
    used. ``allow_outside`` lets pictures be made of files that a run's
    table names outside its folder. ``sweep_page`` writes the page of a sweep from its folder and the folder that the
    page will lie in; by default it is ``comparison_page``. ``progress`` receives the number of pictures of a run.
    """
    check_kind(kind)
    path = Path(folder)
    target = path / PAGE if out is None else Path(out)
    notes: list[str] = []
    if (path / SWEEP).is_file():
        make = sweep_page or partial(comparison_page, allow_outside=allow_outside, tell=notes.append)
        about, page = "sweep", make(path, target.parent)
    elif (path / RECIPE).is_file():
        about = "run"
        page = run_page(
            path,
            kind,
            allow_outside=allow_outside,
            focus=focus,
            prevalence=prevalence,
            progress=progress,
            tell=notes.append,
        )
    else:
        got = f"{path}, which {'is neither' if path.exists() else 'does not exist'}"
        raise RunError(sentence("FOLDER must be the folder of a run or of a sweep", got))
    content = page.encode()
    files.atomic_write(target, content)
    return Report(target, about, len(content), tuple(filter(None, notes)))


def make_shown_maps(folder: Path, *, allow_outside: bool = False, progress: Progress | None = None) -> tuple[int, int]:
    """Write maps and pictures of the images that the page of a run shows. Return the numbers of maps and of images."""
    from lopsided.runs.maps import make_maps

    wanted = shown_images(folder)
    keep_shown_pictures(folder, allow_outside=allow_outside)
    return make_maps(folder, wanted, progress, allow_outside=allow_outside) if wanted else 0, len(wanted)


def write_run_reports(
    folder: str | os.PathLike[str],
    *,
    kind: str = "pca",
    allow_outside: bool = False,
    maps: bool = True,
    progress: Progress | None = None,
) -> RunReports:
    """Write the page of every finished run of a sweep into its folder; one that cannot be read stops no other.

    With ``maps``, they show where the model of each run looked, if it has positions and its images are there.

    Nothing is written into a folder that a link leads to: it may come from someone else and lie anywhere.
    """
    check_kind(kind)
    path = Path(folder)
    if not (path / SWEEP).is_file():
        raise RunError(sentence("--runs is for the folder of a sweep", f"{path}, which has no {SWEEP}"))
    cells = sorted(cell.parent for cell in (path / CELLS).glob(f"*/{METRICS}"))
    failed: list[tuple[Path, str]] = []
    for number, cell in enumerate(cells, start=1):
        try:
            _check_inside(cell)
            with suppress(LopsidedError):  # A page without maps is better than none, and says what is missing.
                if maps:
                    make_shown_maps(cell, allow_outside=allow_outside)
            write_report(cell, kind=kind, allow_outside=allow_outside)
        except LopsidedError as error:
            failed.append((cell, str(error)))
        if progress is not None:
            progress(number, len(cells))
    return RunReports(len(cells) - len(failed), tuple(failed))


def _check_inside(cell: Path) -> None:
    link = next((path for path in (cell.parent, cell) if path.is_symlink()), None)
    if link is not None:
        must, do = "the runs of a sweep must lie in its folder", "Put a copy in its place."
        raise RunError(sentence(must, f"{link}, which is a link", do))
