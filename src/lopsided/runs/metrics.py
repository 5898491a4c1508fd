"""The metrics of a run that may come from someone else: what they lack is named before it is used. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from lopsided.errors import RunError, sentence

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


def check_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Refuse metrics without all that the page of a run takes from them."""
    _refuse(path, _missing(metrics))


def check_printed(path: Path, metrics: Mapping[str, Any]) -> None:
    """Refuse metrics without all that is printed of a finished run, which is more than its page needs."""
    check_metrics(path, metrics)
    _refuse(path, _unprintable(metrics))


def _refuse(path: Path, places: Iterator[str]) -> None:
    missing = next(places, None)
    if missing is not None:
        got, do = f"none that can be used in {path}", "Train the run again, or restore the file."
        raise RunError(sentence(f"{path.name} must hold {missing}", got, do))


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, no truth value, that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


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
    if not is_number(metrics["seconds"]) or metrics["seconds"] < 0:
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
    votes = {name: vote for name, vote in part["majority"].items() if name != "label"}
    yield from (f"{split}.majority.{name}" for name, vote in votes.items() if not is_number(vote))
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
    yield from (f"{where}{name}" for name in _FIGURE if figure[name] is not None and not is_number(figure[name]))


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


def _unprintable(metrics: Mapping[str, Any]) -> Iterator[str]:
    parts = dict.fromkeys(("test", "val"), (dict, type(None)))
    yield from _without(metrics, {"loss": str, "source": str, "unreadable": list, **parts}, "")
    for split in ("test", "val"):
        part = metrics[split] or {"figures": {}, "per_class": []}
        rows = ({f"per_class[{i}].{name}": row[name] for name in _ROW} for i, row in enumerate(part["per_class"]))
        for figures in ({f"figures.{name}": figure for name, figure in part["figures"].items()}, *rows):
            for name, figure in figures.items():
                if figure["value"] is not None and None in (figure["low"], figure["high"]):
                    yield f"{split}.{name}.{'low' if figure['low'] is None else 'high'}"
