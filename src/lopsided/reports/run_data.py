"""A run folder as arrays: what the model answered for each image, and how its training went. Needs no torch."""

from __future__ import annotations

import csv
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from lopsided import __version__, files
from lopsided.errors import RunError, sentence
from lopsided.experiments.runs import LOG, METRICS, PREDICTIONS, PROBABILITY, RECIPE, Run

Codes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
JUDGED = ("test", "val", "held_out")
"""The splits that a run may be judged on, in the order in which a page prefers them."""
_FIGURE = ("value", "low", "high")
_ROW = ("recall", "precision", "f1", "auroc", "average_precision")
_Count = Annotated[NonNegativeInt, Field(le=2**53)]
_KINDS: dict[str, Any] = {
    "counts": dict[str, Annotated[dict[str, _Count], Field(min_length=1)]],
    "leaks.groups": list[str],
    "leaks.duplicates": list[Annotated[list[str], Field(min_length=4, max_length=4)]],
    "warnings": list[str],
    "unreadable": list[dict[str, str]],
    "environment.packages": dict[str, str],
}
"""What metrics hold inside their lists and tables, as far as a page looks there."""
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
        return [(row["epoch"], row[name]) for row in self.epochs if _is_number(row.get(name))]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def open_finished(folder: Path) -> tuple[Run, dict[str, Any]]:
    """Open a run that came to its end, with its metrics, which hold all that a page takes from them."""
    run = Run.open(folder)
    if run.metrics is None:
        must, got = "a run must be finished before its report is written", f"{folder}, which has no {METRICS}"
        do = f"Continue it with lopsided fit --out {shlex.quote(str(folder))} --resume."
        if _is_running(folder):
            got, do = f"{folder}, which is still running", "Wait for its end."
        raise RunError(sentence(must, got, do))
    missing = next(_missing(run.metrics), None)
    if missing is not None:
        got = f"none that can be used in {folder / METRICS}"
        raise RunError(sentence(f"{METRICS} must hold {missing}", got, "Train the run again, or restore the file."))
    if not has_own_recipe(run) and _is_comparable(run.metrics):
        got = f"another one in {folder / RECIPE}"
        raise RunError(sentence(f"{RECIPE} must be the recipe of the run's figures", got, "Restore the file."))
    return run, run.metrics


def has_own_recipe(run: Run) -> bool:
    """Whether the recipe in the folder is, by its hash, the one that the run's figures were made by."""
    return run.metrics is not None and run.recipe.content_hash() == run.metrics["recipe"]


def _is_comparable(metrics: Mapping[str, Any]) -> bool:
    """Whether the hash of a recipe was taken as this version takes it; another may have hashed other fields."""
    return metrics["lopsided"] == __version__ and re.fullmatch("[0-9a-f]{64}", metrics["recipe"]) is not None


def _is_running(folder: Path) -> bool:
    try:
        files.check_free(folder)
    except RunError:
        return True
    return False


def _missing(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the places of what a page needs and the metrics do not have, or have as another kind of thing."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "lopsided": str, "recipe": str, "seed": int, "classes": list, "counts": dict, "leaks": dict, "warnings": list,
        "environment": dict, "seconds": (int, float),
    }  # fmt: skip
    yield from _without(metrics, kinds, "")
    if not metrics["classes"] or not all(isinstance(name, str) for name in metrics["classes"]):
        yield "classes"
    yield from _without(metrics["counts"], {"train": dict}, "counts.")
    yield from _without(metrics["leaks"], {"groups": list, "duplicates": list}, "leaks.")
    yield from _otherwise(metrics, _KINDS, "")
    if not _is_number(metrics["seconds"]) or metrics["seconds"] < 0:
        yield "seconds"
    for split in JUDGED:
        if metrics.get(split) is not None:
            yield from _missing_figures(metrics, split)


def _missing_figures(metrics: Mapping[str, Any], split: str) -> Iterator[str]:
    yield from _without(metrics, {split: dict}, "")
    part = metrics[split]
    kinds = {"num_images": int, "level": float, "figures": dict, "per_class": list, "confusion": list}
    yield from _without(part, {**kinds, "majority": dict, "notes": list}, f"{split}.")
    yield from _otherwise(part, {"notes": list[str], "confusion": list[list[_Count]]}, f"{split}.")
    if any(len(row) != len(metrics["classes"]) for row in part["confusion"]):
        yield f"{split}.confusion of {len(metrics['classes'])} classes"
    shares: dict[str, type | tuple[type, ...]] = {"label": str, "uwa": (int, float), "accuracy": (int, float)}
    yield from _without(part["majority"], shares, f"{split}.majority.")
    needed = dict.fromkeys(("uwa", "accuracy", "calibration_error"), dict)
    yield from _without(part["figures"], needed, f"{split}.figures.")
    for name, figure in part["figures"].items():
        yield from _without_numbers(figure, f"{split}.figures.{name}.")
    for name in ("per_class", "confusion"):
        if len(part[name]) != len(metrics["classes"]):
            yield f"{split}.{name} of {len(metrics['classes'])} classes"
    for number, row in enumerate(part["per_class"]):
        where = f"{split}.per_class[{number}]."
        yield from _without(row, {"label": str, "support": int, "predicted": int, **dict.fromkeys(_ROW, dict)}, where)
        for name in _ROW:
            yield from _without_numbers(row[name], f"{where}{name}.")


def _without_numbers(figure: Any, where: str) -> Iterator[str]:
    yield from _without(figure, dict.fromkeys(_FIGURE, (int, float, type(None))), where)
    yield from (f"{where}{name}" for name in _FIGURE if figure[name] is not None and not _is_number(figure[name]))


def _otherwise(values: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the places of what is there and holds other things than it should."""
    for path, kind in kinds.items():
        value: Any = values
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            continue
        try:
            TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            yield f"{where}{path}"


def _without(values: Any, kinds: Mapping[str, type | tuple[type, ...]], where: str) -> Iterator[str]:
    for name, kind in kinds.items():
        if not isinstance(values, dict) or name not in values or not isinstance(values[name], kind):
            yield f"{where}{name}"


def read_judged(run: Run, classes: Sequence[str]) -> dict[str, Judged]:
    """Read predictions and features of a run by split; each split must have as many images as its figures."""
    path = run.folder / PREDICTIONS
    metrics = run.metrics or {}
    try:
        rows = run.predictions()
        places = {name: i for i, name in enumerate(classes)}
        columns = [f"{PROBABILITY}{name}" for name in classes]
        features = run.features()
        splits = dict.fromkeys(row["split"] for row in rows)
        for split in JUDGED:
            expected = metrics[split]["num_images"] if metrics.get(split) else None
            there = sum(row["split"] == split for row in rows)
            if expected is not None and there != expected:
                must = f"{PREDICTIONS} must hold the {expected:,} images of {split} that {METRICS} counts"
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
        if event["event"] == "epoch" and isinstance(stage, str) and isinstance(epoch, int):
            found.setdefault(stage, {})[epoch] = event
        elif event["event"] == "note" and isinstance(text, str):
            notes[text] = None
    figure = f"val_{run.recipe.selection.metric}"
    return [_stage(name, [epochs[i] for i in sorted(epochs)], figure) for name, epochs in found.items()], list(notes)


def _stage(name: str, epochs: list[dict[str, Any]], figure: str) -> Stage:
    judged = [row for row in epochs if _is_number(row.get(figure))]
    best = max(judged, key=lambda row: (row[figure], row["epoch"]), default=epochs[-1])
    return Stage(name, epochs, int(best["epoch"]), picked=bool(judged))
