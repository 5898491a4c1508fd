"""A run folder as arrays: what the model answered for each image, and how its training went. Needs no torch."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.errors import RunError, sentence
from lopsided.experiments.runs import LOG, METRICS, PREDICTIONS, PROBABILITY, Run

Codes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


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
        return [(row["epoch"], row[name]) for row in self.epochs if row.get(name) is not None]


def open_finished(folder: Path) -> tuple[Run, dict[str, Any]]:
    """Open a run that came to its end, with its metrics."""
    run = Run.open(folder)
    if run.metrics is None:
        do = f"Continue it with lopsided fit --out {shlex.quote(str(folder))} --resume."
        raise RunError(
            sentence("a run must be finished before its report is written", f"{folder}, which has no {METRICS}", do)
        )
    return run, run.metrics


def read_judged(run: Run, classes: Sequence[str]) -> dict[str, Judged]:
    """Read predictions and features of a run by split."""
    path = run.folder / PREDICTIONS
    try:
        rows = run.predictions()
        places = {name: i for i, name in enumerate(classes)}
        columns = [f"{PROBABILITY}{name}" for name in classes]
        features = run.features()
        splits = dict.fromkeys(row["split"] for row in rows)
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
    return Judged(
        split=split,
        names=tuple(row["name"] for row in rows),
        groups=groups if any(groups) else None,
        y_true=np.array([places[row["label"]] for row in rows], dtype=np.int64),
        y_pred=np.array([places[row["predicted"]] for row in rows], dtype=np.int64),
        p=np.array([[float(row[column]) for column in columns] for row in rows], dtype=np.float32),
        features=features,
    )


def read_stages(run: Run) -> tuple[list[Stage], list[str]]:
    """Read the epochs of each stage from a run's log, and the notes that it took; both empty without a log.

    Of the lines with the same stage and epoch the last one counts. The epoch that was taken is found by the rule of the
    training: the highest validation figure, the later of equals, or the last epoch where there was no validation.
    """
    if not (run.folder / LOG).is_file():
        return [], []
    found: dict[str, dict[int, dict[str, Any]]] = {}
    notes: list[str] = []
    for event in run.events():
        if event.get("event") == "epoch":
            found.setdefault(event["stage"], {})[event["epoch"]] = event
        elif event.get("event") == "note":
            notes.append(event["text"])
    figure = f"val_{run.recipe.selection.metric}"
    return [_stage(name, [epochs[i] for i in sorted(epochs)], figure) for name, epochs in found.items()], notes


def _stage(name: str, epochs: list[dict[str, Any]], figure: str) -> Stage:
    judged = [row for row in epochs if row.get(figure) is not None]
    best = max(judged, key=lambda row: (row[figure], row["epoch"]), default=epochs[-1])
    return Stage(name, epochs, int(best["epoch"]), picked=bool(judged))
