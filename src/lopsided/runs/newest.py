"""Runs that nobody named: the folder in which ``fit`` writes without ``--out``, and the newest run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from lopsided.errors import RunError
from lopsided.runs.folder import CARD, METRICS, RECIPE
from lopsided.runs.progress import Voice

RUNS = Path("runs")
"""Runs without a name are ``runs/1``, ``runs/2`` and so on."""


@contextmanager
def folder_of(out: Path | None) -> Iterator[Path]:
    """Yield the folder ``out``, or a new folder below ``runs``, which is removed again if it stays empty."""
    if out is not None:
        yield out
        return
    folder = _make_folder()
    try:
        yield folder
    finally:
        for path in (folder, RUNS):
            with suppress(OSError):
                path.rmdir()  # Removes empty folders only.


def _make_folder() -> Path:
    """Make the folder of the next number. Two processes that do so at once get different folders."""
    try:
        RUNS.mkdir(exist_ok=True)
        used = [int(path.name) for path in RUNS.iterdir() if path.name.isdecimal()]
        for number in count(max(used, default=0) + 1):
            with suppress(FileExistsError):
                (RUNS / str(number)).mkdir()
                return RUNS / str(number)
    except OSError as error:
        raise RunError(f"cannot create a folder below {RUNS} ({error.strerror}). Name one with --out.") from None
    raise AssertionError


def check_outside(out: Path, data: str | None) -> None:
    """Raise an error if a new run would be below a folder of images, where the next command would call it a class."""
    if data is not None and os.path.isdir(data) and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(data)):
        do = "there it would be taken for a class. Name another folder, for example --out ../run"
        raise RunError(f"The run {out} would be inside the folder of the images: {do}.")


def newest_run(*, finished: bool = True) -> Path:
    """Return the run below ``runs`` that was finished last, or that was started last, finished or not."""
    mark = METRICS if finished else RECIPE
    with suppress(OSError):
        marks = [path for path in RUNS.glob(f"*/{mark}") if path.is_file()]
        if marks:
            return max(marks, key=lambda path: (path.stat().st_mtime_ns, path.parent.name)).parent
    what = "finished run" if finished else "run"
    raise RunError(f"There is no {what} in the folder {RUNS}. Name the folder of a run.")


def is_run(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder with a run, finished or not, or with a model."""
    return any((Path(path) / name).is_file() for name in (RECIPE, CARD))


def named_or_newest(run: Path | None, *, quiet: bool) -> Path:
    """Return the run that the user named, or the newest run, and say which one it is."""
    if run is not None:
        return run
    newest = newest_run()
    if not quiet:
        Voice().say(f"{newest} is the newest run.")
    return newest


def run_and_words(words: Sequence[str], *, quiet: bool) -> tuple[Path, list[str]]:
    """Return the run, which is the first word or else the newest run, and the other words.

    Without any run that could be meant, the first of several words is returned as the run, so that the error names it.
    """
    if words and (is_run(words[0]) or (len(words) > 1 and not any(RUNS.glob(f"*/{METRICS}")))):
        return Path(words[0]), list(words[1:])
    return named_or_newest(None, quiet=quiet), list(words)
