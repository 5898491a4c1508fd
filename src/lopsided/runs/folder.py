"""Run folders: the names of their files, an opened folder, and the folders of runs that nobody named.

A run folder holds ``recipe.toml``, ``log.jsonl``, ``predictions.csv``, ``model.safetensors`` with ``model.json``,
``familiar.safetensors``, ``features.safetensors``, ``checkpoint/`` and ``metrics.json``. A run is finished when it has
``metrics.json``, which is written last. A run with folds has ``folds/`` instead of ``checkpoint/`` (see ``folds``).
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from lopsided import __version__, files
from lopsided.errors import InputError, RunError, sentence
from lopsided.facts import Fact
from lopsided.recipe import Recipe, words
from lopsided.runs.metrics import Headline, focus_of, headlines, judged_split
from lopsided.runs.progress import Voice

FORMAT = 1
"""The format version of a run folder. It increases when an older version could misread a newer folder."""
RECIPE, METRICS, PREDICTIONS, LOG, CARD = "recipe.toml", "metrics.json", "predictions.csv", "log.jsonl", "model.json"
FEATURES, BANK, CHECKPOINT = "features.safetensors", "familiar.safetensors", "checkpoint"
TRACKERS = "trackers.json"
FOLDS, WHOLE = "folds", "all"
"""The folder of the folds of a run, and in it the folder of the model of all images."""
COMPARISON = "comparison"
"""The folder of the comparison that chose the recipe of a run. Its cells are folds of the run, too."""
RUNS = Path("runs")
"""Runs without a name are ``runs/1``, ``runs/2`` and so on."""
MAX_TABLE = 1 << 30
"""Maximum bytes of ``predictions.csv``, which is read at once. A million images need only a fraction of this."""


def place(fold: int | str) -> str:
    """Return the path of the run of a fold below the folder of its run."""
    return f"{FOLDS}/{fold}"


@dataclass(frozen=True)
class Run:
    """An opened run folder. ``metrics`` is None until the run is finished."""

    folder: Path
    recipe: Recipe
    metrics: dict[str, Any] | None

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Open a run folder, finished or not."""
        path = Path(folder)
        if not (path / RECIPE).is_file():
            missing = f"which has no {RECIPE}" if path.is_dir() else "which does not exist"
            raise RunError(sentence("RUN must be the folder of a run", f"{path}, {missing}"))
        try:
            recipe = Recipe.load(path / RECIPE)
        except InputError as error:
            do = f"This is lopsided {__version__}; if another version wrote the run, use that version."
            raise RunError(f"{error} {do}") from None
        return cls(path, recipe, read_metrics(path))

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.metrics is not None

    def headlines(self) -> list[Headline]:
        """Return what the run found of the rare classes, on test images or else on validation images, if there are."""
        split = None if self.metrics is None else judged_split(self.metrics)
        if self.metrics is None or split is None:
            return []
        return headlines(self.metrics[split], focus_of(self.recipe, self.metrics))

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the log, oldest first. Unfinished lines of a killed process are skipped."""
        path = self.folder / LOG
        try:
            for event in files.json_lines(path, files.MAX_BYTES):
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event
        except OSError as error:
            raise RunError(sentence(f"{LOG} must be a readable log", f"{path} ({error.strerror})")) from None

    def facts(self) -> list[Fact]:
        """Return the notes in the log, and the cautions about the metrics. A log that is gone has no notes."""
        lines = self.events() if (self.folder / LOG).is_file() else ()
        content = [line for line in lines if line["event"] == "note"] + (self.metrics or {}).get("facts", [])
        return [fact for each in content if (fact := Fact.from_dict(each)) is not None]

    def predictions(self) -> list[dict[str, str]]:
        """Return the rows of ``predictions.csv``."""
        files.check_regular(self.folder / PREDICTIONS, MAX_TABLE)
        with (self.folder / PREDICTIONS).open(encoding="utf-8", errors="surrogateescape", newline="") as table:
            return list(csv.DictReader(table))

    def features(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the encoder features of each split, in the order of its predictions. Empty if the file is missing."""
        path = self.folder / FEATURES
        if not path.is_file():
            return {}
        try:
            with files.reading_tensors():
                found = dict(load_file(path))
            odd = [name for name, part in found.items() if part.ndim != 2 or part.dtype != np.float32]
        except (OSError, ValueError) as error:
            got = f"{path} ({files.reason(error)})"
            raise RunError(sentence(f"{FEATURES} must be a readable safetensors file", got)) from None
        if odd:
            got = f"{found[odd[0]].dtype} of shape {found[odd[0]].shape} for {odd[0]!r:.40} in {path}"
            raise RunError(sentence(f"{FEATURES} must hold a float32 vector for each image", got))
        return found


def read_metrics(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``metrics.json``, or None if the run is not finished."""
    path = folder / METRICS
    try:
        content = json.loads(files.read_whole(path))
        written = content["format"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"{path} ({files.reason(error)})"
        raise RunError(sentence(f"{METRICS} must be a readable record of a run", got)) from None
    if written != FORMAT:
        do = f"Open it with lopsided {content.get('lopsided', 'of that version')!s:.40}, which wrote it."
        got = f"format {words.shown(written)} in {path}"
        raise RunError(sentence(f"a run must have format {FORMAT}", got, do))
    return dict(content)


def named_focus(folder: Path) -> str | None:
    """Return the class that the recipe of a run names as the one that matters; None if there is no recipe, or none."""
    return Run.open(folder).recipe.decision.focus if (folder / RECIPE).is_file() else None


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
        files.remove_empty(folder, RUNS)


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


def run_and_words(texts: Sequence[str], *, quiet: bool) -> tuple[Path, list[str]]:
    """Return the run, which is the first word or else the newest run, and the other words.

    Without any run that could be meant, the first of several words is returned as the run, so that the error names it.
    """
    if texts and (is_run(texts[0]) or (len(texts) > 1 and not any(RUNS.glob(f"*/{METRICS}")))):
        return Path(texts[0]), list(texts[1:])
    return named_or_newest(None, quiet=quiet), list(texts)
