"""A comparison over folds that was never trained: run folders with predictions that are known by construction."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from lopsided.evaluation.metrics import evaluate
from lopsided.recipe import Recipe
from lopsided.runs.folder import Run
from lopsided.runs.keys import cell_key
from lopsided.runs.records import Record
from lopsided.runs.run import settle
from made_runs import colour_of, decided_plainly

CLASSES = ("common", "rare")


def fold_of(image: int, repeat: int, folds: int) -> int:
    """The fold of an image in a repeat, from 0."""
    return (image * (1 + 2 * repeat) + image // folds) % folds


def make_comparison(
    folder: Path,
    misses: Mapping[str, set[int]],
    *,
    counts: tuple[int, int] = (24, 8),
    folds: int = 4,
    repeats: int = 1,
    seconds: Mapping[str, float] | None = None,
) -> Path:
    """Write the folder of a comparison. Each method recognises every image but its ``misses``, in every repeat.

    The methods are classification losses. Images are numbered, the common ones first; image i is a picture of its own
    colour, and a method gives its label a probability of 0.9 less a hundredth of i, or 0.2 if it misses it.
    """
    photos = folder.parent / "photos"
    names, labels = [], []
    for label, number in enumerate(counts):
        for _ in range(number):
            name = f"{CLASSES[label]}/{len(names):03d}.png"
            (photos / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (24, 24), colour_of(len(names))).save(photos / name)
            names.append(name)
            labels.append(label)
    y = np.array(labels)
    lines = []
    for method, missed in misses.items():
        truth = np.array([0.2 if i in missed else 0.9 - i / 100 for i in range(len(y))])
        for run in range(folds * repeats):
            repeat, fold = divmod(run, folds)
            test = np.array([i for i in range(len(y)) if fold_of(i, repeat, folds) == fold])
            changes = {"data.source": str(photos), "encoder_training.loss": method, "encoder.name": "mlp"}
            recipe = settle(Recipe().override(**changes, **{"data.folds": folds, "data.fold": run + 1}))
            p = np.where(np.eye(2, dtype=bool)[y[test]], truth[test, None], 1 - truth[test, None])
            cell = folder / "cells" / cell_key(recipe)
            _write(cell, recipe, y, test, p, names, (seconds or {}).get(method, 30.0))
            lines.append(replace(Record.from_run(Run.open(cell)), compared_as=method).to_json() + "\n")
    (folder / "records.jsonl").write_text("".join(lines))
    about = {"format": 1, "lopsided": "0", "kind": "compare", "methods": list(misses), "baseline": next(iter(misses))}
    (folder / "sweep.json").write_text(json.dumps(about))
    return folder


def _write(
    cell: Path, recipe: Recipe, y: np.ndarray, test: np.ndarray, p: np.ndarray, names: list[str], seconds: float
) -> None:
    cell.mkdir(parents=True)
    (cell / "recipe.toml").write_text(recipe.to_toml())
    with (cell / "predictions.csv").open("w", newline="") as table:
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["split", "name", "group", "label", "predicted", *(f"p:{name}" for name in CLASSES)])
        for i, row in zip(test.tolist(), p.tolist(), strict=True):
            predicted = CLASSES[int(np.argmax(row))]
            writer.writerow(["test", names[i], "", CLASSES[y[i]], predicted, *(f"{value:.9g}" for value in row)])
    rest = np.setdiff1d(np.arange(len(y)), test)
    counts = {
        part: {name: int((y[rows] == c).sum()) for c, name in enumerate(CLASSES)}
        for part, rows in (("train", rest), ("val", rest[:0]), ("test", test))
    }
    evaluation = evaluate(y[test], p, classes=list(CLASSES), bootstrap=100).to_dict()
    metrics = {
        "format": 1, "lopsided": "0.1.0", "recipe": recipe.content_hash(), "method": recipe.method,
        "loss": recipe.loss.name, "seed": 0, "source": recipe.data.source, "source_name": "photos",
        "classes": list(CLASSES), "counts": counts, "val": None, "test": evaluation, "held_out": None,
        "views": ["identity"], "decision": decided_plainly(len(CLASSES)),
        "leaks": {"groups": [], "duplicates": []}, "warnings": [], "facts": [], "unreadable": [],
        "environment": {"device": "cpu", "threads": 1, "packages": {"torch": "2.0"}}, "seconds": seconds,
    }  # fmt: skip
    (cell / "metrics.json").write_text(json.dumps(metrics))
