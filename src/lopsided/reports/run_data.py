"""A run folder as arrays: what the model answered for each image, and how its training went. Needs no torch."""

from __future__ import annotations

import csv
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided import __version__, files
from lopsided.errors import RunError, sentence
from lopsided.inference.predict import PROBABILITY
from lopsided.runs.metrics import Metrics, check_metrics
from lopsided.runs.run import LOG, METRICS, PREDICTIONS, RECIPE, Run

Codes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_SUM = 1e-3
"""How far the probabilities of an image may be from 1 together; those of a cut line are farther."""


@dataclass(frozen=True, eq=False)
class Judged:
    """The images of one split with the model's answers; the columns of ``p`` follow the classes."""

    split: str
    names: tuple[str, ...]
    groups: tuple[str, ...] | None
    y_true: Codes
    y_pred: Codes
    p: Floats
    features: Floats | None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def confidence(self) -> Floats:
        """The probability of the predicted class."""
        return np.asarray(self.p[np.arange(len(self)), self.y_pred])

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """Which answers are mistakes."""
        return np.asarray(self.y_true != self.y_pred)


@dataclass(frozen=True, eq=False)
class Stage:
    """The epochs of one stage, in order; ``taken`` is the epoch whose weights were taken."""

    name: str
    epochs: list[dict[str, Any]]
    taken: int
    picked: bool

    def series(self, name: str) -> list[tuple[float, float]]:
        """The epochs in which something was noted down, with what was."""
        return [(row["epoch"], row[name]) for row in self.epochs if is_number(row.get(name))]


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, no truth value, that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def open_finished(folder: Path) -> tuple[Run, Metrics]:
    """Open a run that came to its end, with its metrics."""
    run = Run.open(folder)
    if run.metrics is None:
        must, got = "a run must be finished before its report is written", f"{folder}, which has no {METRICS}"
        do = f"Continue it with lopsided fit --out {shlex.quote(str(folder))} --resume."
        if _is_running(folder):
            got, do = f"{folder}, which is still running", "Wait for its end."
        raise RunError(sentence(must, got, do))
    metrics = check_metrics(folder / METRICS, run.metrics)
    if run.recipe.content_hash() != metrics.recipe and _is_comparable(metrics):
        got = f"another one in {folder / RECIPE}"
        raise RunError(sentence(f"{RECIPE} must be the recipe of the run's figures", got, "Restore the file."))
    return run, metrics


def _is_comparable(metrics: Metrics) -> bool:
    """Whether the hash of a recipe was taken as this version takes it; another may have hashed other fields."""
    return metrics.lopsided == __version__ and re.fullmatch("[0-9a-f]{64}", metrics.recipe) is not None


def _is_running(folder: Path) -> bool:
    try:
        files.check_free(folder)
    except RunError:
        return True
    return False


def read_judged(run: Run, metrics: Metrics) -> dict[str, Judged]:
    """Read predictions and features of a run by split; each split must have as many images as its figures."""
    path = run.folder / PREDICTIONS
    try:
        rows = run.predictions()
        places = {name: i for i, name in enumerate(metrics.classes)}
        columns = [f"{PROBABILITY}{name}" for name in metrics.classes]
        features = run.features()
        splits = dict.fromkeys(row["split"] for row in rows)
        for split, part in metrics.judged().items():
            there = sum(row["split"] == split for row in rows)
            if there != part.num_images:
                must = f"{PREDICTIONS} must hold the {part.num_images:,} images of {split} that {METRICS} counts"
                raise RunError(sentence(must, f"{there:,} in {path}", "Restore the file, or train the run again."))
        return {
            split: _judged(split, [row for row in rows if row["split"] == split], places, columns, features.get(split))
            for split in splits
        }
    except OSError as error:
        raise RunError(sentence("a report needs the run's predictions", f"{path} ({error.strerror})")) from None
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        got = f"{path} ({type(error).__name__}: {error})"
        raise RunError(sentence(f"{PREDICTIONS} must be a table that a run wrote", got)) from None


def _judged(
    split: str, rows: list[dict[str, str]], places: dict[str, int], columns: list[str], features: Floats | None
) -> Judged:
    groups = tuple(row["group"] for row in rows)
    if features is not None and len(features) != len(rows):
        raise ValueError(f"{len(rows)} rows of {split} for {len(features)} features")
    p = np.array([[float(row[column]) for column in columns] for row in rows], dtype=np.float32)
    # Written so that NaN is found.
    is_share = ((p >= 0) & (p <= 1)).all(axis=1) & (np.abs(p.sum(axis=1, dtype=np.float64) - 1) <= _SUM)
    if not is_share.all():
        raise ValueError(f"no probabilities of {rows[int((~is_share).argmax())]['name']!r}")
    return Judged(
        split=split,
        names=tuple(row["name"] for row in rows),
        groups=groups if any(groups) else None,
        y_true=np.array([places[row["label"]] for row in rows], dtype=np.int64),
        y_pred=np.array([places[row["predicted"]] for row in rows], dtype=np.int64),
        p=p,
        features=features,
    )


def read_stages(run: Run) -> tuple[list[Stage], list[str]]:
    """Read the epochs of each stage from a run's log, and the notes that it took; both empty without a log.

    Of the lines with the same stage and epoch the last one counts, and a note that a resumed run took again is given
    once. The epoch that was taken is found by the rule of the
    training: the highest validation figure, the later of equals, or the last epoch where there was no validation.
    """
    if not (run.folder / LOG).is_file():
        return [], []
    found: dict[str, dict[int, dict[str, Any]]] = {}
    notes: dict[str, None] = {}
    for event in run.events():
        stage, epoch, text = (event.get(name) for name in ("stage", "epoch", "text"))
        if event["event"] == "epoch" and isinstance(stage, str) and isinstance(epoch, int) and is_number(epoch):
            found.setdefault(stage, {})[epoch] = event
        elif event["event"] == "note" and isinstance(text, str):
            notes[text] = None
    figure = f"val_{run.recipe.selection.metric}"
    return [_stage(name, [epochs[i] for i in sorted(epochs)], figure) for name, epochs in found.items()], list(notes)


def _stage(name: str, epochs: list[dict[str, Any]], figure: str) -> Stage:
    judged = [row for row in epochs if is_number(row.get(figure))]
    best = max(judged, key=lambda row: (row[figure], row["epoch"]), default=epochs[-1])
    return Stage(name, epochs, int(best["epoch"]), picked=bool(judged))
