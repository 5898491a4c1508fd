"""Read a run folder into arrays: the predictions for each image and the course of training. No torch import."""

from __future__ import annotations

import csv
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided import __version__, files
from lopsided.errors import RunError, sentence
from lopsided.evaluation.decision import PROBABILITY
from lopsided.facts import Fact
from lopsided.runs.folder import LOG, MAX_TABLE, METRICS, PREDICTIONS, RECIPE, Run
from lopsided.runs.metrics import Metrics, check_metrics
from lopsided.runs.results import LABELS, read_table
from lopsided.seeds import derive_seed

Codes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
MOST_IMAGES = 10_000
"""Maximum number of images that a page lists. The figures always use all images."""
WORST, SHOWN_LABELS = 24, 24
"""Numbers of mistakes shown without JavaScript, and of doubtful labels."""
_SUM = 1e-3
"""Maximum deviation of the sum of probabilities from 1. A truncated line exceeds it."""


@dataclass(frozen=True, eq=False)
class Judged:
    """The images of one split with their predictions. The columns of ``p`` are in class order."""

    split: str
    names: tuple[str, ...]
    groups: tuple[str, ...] | None
    y_true: Codes
    y_pred: Codes
    p: Floats
    features: Floats | None
    folds: Codes | None = None
    """The fold of each image, whose model predicted it; None in a run with one split."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def confidence(self) -> Floats:
        """The probability of the predicted class."""
        return np.asarray(self.p[np.arange(len(self)), self.y_pred])

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """Whether each prediction is a mistake."""
        return np.asarray(self.y_true != self.y_pred)

    def take(self, rows: Codes) -> Judged:
        """Return some of the images."""
        return replace(
            self,
            names=tuple(self.names[i] for i in rows),
            groups=None if self.groups is None else tuple(self.groups[i] for i in rows),
            y_true=self.y_true[rows],
            y_pred=self.y_pred[rows],
            p=self.p[rows],
            features=None if self.features is None else self.features[rows],
            folds=None if self.folds is None else self.folds[rows],
        )


@dataclass(frozen=True, eq=False)
class Stage:
    """The epochs of one stage, in order. ``taken`` is the epoch whose weights were kept."""

    name: str
    epochs: list[dict[str, Any]]
    taken: int
    picked: bool

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return (epoch, value) for each epoch that logged ``name``."""
        return [(row["epoch"], row[name]) for row in self.epochs if is_number(row.get(name))]


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number (not a bool) within the range of float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def open_finished(folder: Path) -> tuple[Run, Metrics]:
    """Open a finished run. Return the run and its metrics."""
    run = Run.open(folder)
    if run.metrics is None:
        if _is_running(folder):
            raise RunError(f"The run in {folder} is still running. Wait until it ends.")
        do = f"Continue it with lopsided fit --out {shlex.quote(str(folder))} --resume."
        raise RunError(f"The run in {folder} is not finished: it has no {METRICS}. {do}")
    metrics = check_metrics(folder / METRICS, run.metrics)
    if run.recipe.content_hash() != metrics.recipe and _is_comparable(metrics):
        raise RunError(f"{folder / RECIPE} is not the recipe of the figures in {METRICS}. Restore the file.")
    return run, metrics


def _is_comparable(metrics: Metrics) -> bool:
    """Return whether this version computes the hash of a recipe in the same way. Versions may hash other fields."""
    return metrics.lopsided == __version__ and re.fullmatch("[0-9a-f]{64}", metrics.recipe) is not None


def _is_running(folder: Path) -> bool:
    try:
        files.check_free(folder)
    except RunError:
        return True
    return False


def read_judged(run: Run, metrics: Metrics) -> dict[str, Judged]:
    """Read the predictions and features of each split. Check the number of images against the figures."""
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
        do = "Restore the file, or train the run again."
        raise RunError(f"cannot read the predictions {path} ({error.strerror}). {do}") from None
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        do = "Restore the file, or train the run again."
        raise RunError(f"{path} is not a valid table of predictions ({type(error).__name__}: {error}). {do}") from None


def _judged(
    split: str, rows: list[dict[str, str]], places: dict[str, int], columns: list[str], features: Floats | None
) -> Judged:
    groups = tuple(row["group"] for row in rows)
    if features is not None and len(features) != len(rows):
        raise ValueError(f"{len(rows)} rows but {len(features)} features of {split}")
    p = np.array([[float(row[column]) for column in columns] for row in rows], dtype=np.float32)
    # This form of the comparison rejects NaN.
    is_share = ((p >= 0) & (p <= 1)).all(axis=1) & (np.abs(p.sum(axis=1, dtype=np.float64) - 1) <= _SUM)
    if not is_share.all():
        raise ValueError(f"invalid probabilities of {rows[int((~is_share).argmax())]['name']!r}")
    return Judged(
        split=split,
        names=tuple(row["name"] for row in rows),
        groups=groups if any(groups) else None,
        y_true=np.array([places[row["label"]] for row in rows], dtype=np.int64),
        y_pred=np.array([places[row["predicted"]] for row in rows], dtype=np.int64),
        p=p,
        features=features,
        folds=np.array([int(row["fold"]) for row in rows]) if all(row.get("fold") for row in rows) else None,
    )


def read_stages(run: Run) -> tuple[list[Stage], list[str]]:
    """Read the epochs of each stage and the notes from the log of a run. Both are empty if there is no log.

    If several lines have the same stage and epoch, the last one counts. A note that a resumed run repeats is returned
    once.
    """
    if not (run.folder / LOG).is_file():
        return [], []
    found: dict[str, dict[int, dict[str, Any]]] = {}
    notes: dict[str, None] = {}
    kept: dict[str, int] = {}
    for event in run.events():
        stage, epoch, text = (event.get(name) for name in ("stage", "epoch", "text"))
        if event["event"] == "epoch" and isinstance(stage, str) and isinstance(epoch, int) and is_number(epoch):
            found.setdefault(stage, {})[epoch] = event
        elif event["event"] == "note" and isinstance(text, str):
            notes[text] = None
            fact = Fact.from_dict(event)
            if fact is not None and fact.kind == "kept_epoch":
                kept |= {str(fact.values["stage"]): fact.values["epoch"]}
    stages = []
    for name, epochs in found.items():
        picked = kept.get(name) in list(epochs)
        stages.append(Stage(name, [epochs[i] for i in sorted(epochs)], kept[name] if picked else max(epochs), picked))
    return stages, list(notes)


@dataclass(frozen=True, eq=False)
class Listed:
    """The evaluated images in the order of the page, mistakes first. The page lists the first ``number`` images."""

    judged: Judged
    number: int
    note: str

    def first(self) -> Judged:
        """Return the listed images."""
        return self.judged.take(np.arange(self.number))


def in_order(judged: Judged, seed: int, most: int) -> Listed:
    """Sort images for the page: mistakes, most confident first; then correct ones, least confident first.

    If there are more than ``most`` images, a sample comes first. It holds all mistakes, or the most confident ones if
    there are very many, and a random draw of the correct images.
    """
    sure = judged.confidence
    wrong, right = np.flatnonzero(judged.wrong), np.flatnonzero(~judged.wrong)
    wrong, right = wrong[np.argsort(-sure[wrong], kind="stable")], right[np.argsort(sure[right], kind="stable")]
    if len(judged) <= most:
        return Listed(judged.take(np.concatenate([wrong, right])), len(judged), "")
    num_wrong = min(len(wrong), most - min(len(right), most // 5))
    generator = np.random.default_rng(derive_seed(seed, "report", "sample"))
    drawn = np.zeros(len(right), dtype=bool)
    drawn[generator.permutation(len(right))[: most - num_wrong]] = True
    order = np.concatenate([wrong[:num_wrong], right[drawn], wrong[num_wrong:], right[~drawn]])
    which = "every mistake" if num_wrong == len(wrong) else f"the {num_wrong:,} most confident mistakes"
    note = (
        f"This page lists {most:,} of {len(judged):,} images: {which} and a random sample of the correct images. "
        "All counts and metrics use all images."
    )
    return Listed(judged.take(order), most, note)


def shown_images(folder: Path) -> list[tuple[str, str]]:
    """Return the mistakes and doubtful labels that the page of a run shows, each with the predicted class.

    A run of one class shows its most unusual images instead, with the class of what is unusual.
    """
    run, metrics = open_finished(folder)
    judged = read_judged(run, metrics)
    split = next((name for name in metrics.judged() if name in judged), None)
    if split is None:
        return []
    listed = read_table(folder / LABELS, MAX_TABLE)
    normal = metrics.only_class
    if normal is not None:
        other = next(name for name in metrics.classes if name != normal)
        return [(row["name"], other) for row in listed[:SHOWN_LABELS] if "name" in row]
    first = in_order(judged[split], run.recipe.seed, MOST_IMAGES).first()
    predicted = {name: metrics.classes[code] for name, code in zip(first.names, first.y_pred, strict=True)}
    wrong = [name for name, is_wrong in zip(first.names, first.wrong, strict=True) if is_wrong][:WORST]
    doubtful = [row["name"] for row in listed if row.get("suspect") == "yes"]
    names = dict.fromkeys([*wrong, *doubtful[:SHOWN_LABELS]])
    return [(name, predicted[name]) for name in names if name in predicted]
