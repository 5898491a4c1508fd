"""Two runs on the same held-out images: what one finds that the other does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lopsided.errors import RunError
from lopsided.evaluation.decision import PROBABILITY
from lopsided.evaluation.intervals import paired_shares_interval
from lopsided.evaluation.metrics import evaluate
from lopsided.runs.folder import Run

LEVEL = 0.95


def compare_runs(old: Path, new: Path) -> dict[str, Any]:
    """Compare two finished runs on the images that both have tested with a model that was not trained on them.

    The labels are those of the new run, so that corrected labels count for both.
    """
    before, after = Run.open(old), Run.open(new)
    if before.metrics is None or after.metrics is None:
        raise RunError(f"{old if before.metrics is None else new} is not finished, so there is nothing to compare.")
    classes = list(after.metrics["classes"])
    first, second = _tested(before), _tested(after)
    names = [name for name in second if name in first and second[name]["label"] in classes]
    if not names or classes != list(before.metrics["classes"]):
        raise RunError("The two runs have tested no image in common, so there is nothing to compare.")
    true = np.array([classes.index(second[name]["label"]) for name in names])
    decided = [np.array([_decided(rows[name], classes) for name in names]) for rows in (first, second)]
    groups = np.array([second[name].get("group", "") for name in names])
    folds = [np.array([rows[name].get("fold") or "1" for name in names]) for rows in (first, second)]
    found = [
        evaluate(
            true,
            y_pred=each,
            classes=classes,
            groups=groups if (groups != "").any() else None,
            folds=np.unique(models, return_inverse=True)[1],
        )
        for each, models in zip(decided, folds, strict=True)
    ]
    right = [each == true for each in decided]
    trained = [run.metrics["counts"]["train"] for run in (before, after) if run.metrics is not None]
    rows = []
    for place, label in enumerate(classes):
        own = true == place
        gained, lost = int((own & right[1] & ~right[0]).sum()), int((own & right[0] & ~right[1]).sum())
        size = float(own.sum())
        change = None
        if size > 1:
            change = paired_shares_interval(np.array([gained * 1.0]), np.array([lost * 1.0]), np.array([size]), LEVEL)
        rows.append(
            {
                "label": label,
                "images": int(own.sum()),
                "trained": [int(counts.get(label, 0)) for counts in trained],
                "found": [int((own & each).sum()) for each in right],
                "recall": [each.per_class[place].recall.to_dict() for each in found],
                "false_alarms": [int((~own & (each == place)).sum()) for each in decided],
                "gained": gained,
                "lost": lost,
                "change": None if change is None else change.to_dict(),
            }
        )
    corrected = sum(first[name]["label"] != second[name]["label"] for name in names)
    result = {
        "images": len(names),
        "corrected": corrected,
        "per_class": rows,
        "balanced_accuracy": [each.figures["uwa"].to_dict() for each in found],
    }
    return result | {"words": _words(rows)}


def _words(rows: list[dict[str, Any]]) -> str:
    """Return what became of the rarest class, in one line."""
    row = min((row for row in rows if row["images"]), key=lambda row: row["images"])
    trained, recall = row["trained"], [_figure(figure) for figure in row["recall"]]
    return f"{row['label']}: {trained[0]:,} -> {trained[1]:,} training images; recall {recall[0]} -> {recall[1]}"


def _figure(figure: dict[str, float | None]) -> str:
    value, low, high = (figure[name] for name in ("value", "low", "high"))
    if value is None:
        return "not defined"
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _tested(run: Run) -> dict[str, dict[str, str]]:
    """Return the rows of the images that a run has tested, by their names."""
    try:
        return {row["name"]: row for row in run.predictions() if row["split"] == "test"}
    except (OSError, KeyError, ValueError) as error:
        raise RunError(f"The predictions of {run.folder} cannot be read ({error}).") from None


def _decided(row: dict[str, str], classes: list[str]) -> int:
    """Return the decided class of an image; where a person would be asked, the most probable one."""
    if row["predicted"] in classes:
        return classes.index(row["predicted"])
    return int(np.argmax([float(row[f"{PROBABILITY}{name}"]) for name in classes]))
