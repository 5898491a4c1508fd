"""Run folders that were never trained: files as a run writes them, with answers that are known by construction."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from lopsided.evaluation.metrics import evaluate
from lopsided.facts import cautions, notes
from lopsided.recipe import Recipe

SIDE = 24
Open = Callable[..., Any]
"""The fixture ``show``: open a page's file in a browser, with options of playwright's contexts."""


@dataclass(frozen=True)
class Row:
    """One image of ``predictions.csv``, read by this file's own few lines."""

    split: str
    name: str
    group: str
    label: str
    predicted: str
    p: dict[str, float]


def read_rows(folder: Path, split: str = "test") -> list[Row]:
    """Read the predictions of a run, apart from the code under test."""
    with (folder / "predictions.csv").open(encoding="utf-8", newline="") as table:
        return [
            Row(
                row["split"], row["name"], row["group"], row["label"], row["predicted"],
                {key[2:]: float(value) for key, value in row.items() if key.startswith("p:")},
            )
            for row in csv.DictReader(table)
            if row["split"] == split
        ]  # fmt: skip


def colour_of(number: int) -> tuple[int, int, int]:
    """The colour of the image of this number: no two of the first thousands are alike."""
    return 40 + 20 * (number % 10), 40 + 20 * (number // 10 % 10), 40 + 20 * (number // 100 % 10)


def decided_plainly(num_classes: int) -> dict[str, Any]:
    """How a model decides for the most probable class, with probabilities that carry equal shares."""
    decision = {"rule": "plain"}
    return {"prior": [1 / num_classes] * num_classes, "temperature": 1.0, "calibrated_on": 0, "decision": decision}


def make_run(
    folder: Path,
    classes: Sequence[str] = ("common", "rare"),
    test: Sequence[int] = (40, 12),
    val: Sequence[int] | None = (20, 8),
    *,
    train: Sequence[int] | None = None,
    names: Sequence[str] = (),
    groups: bool = False,
    pictures: bool = True,
    features: bool = True,
    signal: float = 1.5,
    seed: int = 0,
    recipe: Mapping[str, Any] | None = None,
    **metrics: Any,
) -> Path:
    """Write a finished run with so many images of each class; ``names`` replace the first test images' names.

    The source is a table of small pictures beside the run, each of one colour. ``metrics`` replace entries of
    ``metrics.json``.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    splits = {"val": val, "test": test} if val is not None else {"test": test}
    labels = {split: np.repeat(np.arange(len(classes)), counts) for split, counts in splits.items()}
    listed = [f"images/{i:05d}.png" for i in range(sum(map(len, labels.values())))]
    first_test = sum(len(part) for split, part in labels.items() if split != "test")
    listed[first_test : first_test + len(names)] = names
    source = folder.parent / f"{folder.name}-source"
    where = iter(enumerate(listed))
    counts = {"train": dict(zip(classes, train or [5 * n + 5 for n in test], strict=True))}
    counts |= {split: dict(zip(classes, part, strict=True)) for split, part in splits.items()}
    figures: dict[str, Any] = {"val": None, "test": None, "held_out": None}
    tensors = {}
    sources, rows = [], []
    for split, truth in labels.items():
        logits = rng.normal(0, 1, (len(truth), len(classes))) + signal * np.eye(len(classes))[truth]
        p = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32)
        owners = [f"patient-{i // 2}" for i in range(len(truth))] if groups else [""] * len(truth)
        for i, label in enumerate(truth.tolist()):
            number, name = next(where)
            predicted = int(p[i].argmax())
            numbers = [f"{value:.9g}" for value in p[i]]
            rows.append([split, name, owners[i], classes[label], classes[predicted], *numbers])
            sources.append([name, classes[label]])
            if pictures:
                path = source / name
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (SIDE, SIDE), colour_of(number)).save(path)
        evaluation = evaluate(truth, p, classes=list(classes), groups=owners if groups else None, bootstrap=100)
        figures[split] = evaluation.to_dict()
        tensors[split] = (rng.normal(0, 1, (len(truth), 16)) + 2 * np.eye(len(classes), 16)[truth]).astype(np.float32)
    if pictures:
        _write_csv(source / "table.csv", [["path", "label"], *sources])
    header = ["split", "name", "group", "label", "predicted", *(f"p:{name}" for name in classes)]
    _write_csv(folder / "predictions.csv", [header, *rows])
    if features:
        save_file(tensors, folder / "features.safetensors")
    settled = Recipe().override(
        **{"data.source": str(source / "table.csv"), "selection.metric": "uwa", **(recipe or {})}
    )
    (folder / "recipe.toml").write_text(settled.to_toml(), encoding="utf-8")
    _write_log(folder, has_val=val is not None)
    record = {
        "format": 1, "lopsided": "0.1.0", "recipe": settled.content_hash(), "method": settled.method,
        "loss": settled.encoder_training.loss.name, "seed": 0, "source": settled.data.source, "classes": list(classes),
        "views": ["identity"], "decision": decided_plainly(len(classes)),
        "counts": counts, **figures, "leaks": {"groups": [], "duplicates": []}, "warnings": [],
        "facts": [cautions.no_validation_split().to_dict()] if val is None else [], "unreadable": [],
        "environment": {"device": "cpu", "threads": 1, "packages": {"torch": "2.0"}}, "seconds": 31.5,
    }  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps({**record, **metrics}), encoding="utf-8")
    return folder


def _write_csv(path: Path, rows: Sequence[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as table:
        csv.writer(table, lineterminator="\n").writerows(rows)


def _write_log(folder: Path, *, has_val: bool) -> None:
    events: list[dict[str, Any]] = [{"event": "start"}, {"event": "note", "text": "A note of the run."}]
    for stage, epochs in (("encoder", 4), ("classifier", 3)):
        for epoch in range(1, epochs + 1):
            facts: dict[str, Any] = {"event": "epoch", "stage": stage, "epoch": epoch, "loss": 6.0 / epoch}
            facts["minority_loss_share"] = 0.2 + 0.01 * epoch
            if stage == "encoder":
                facts["anchors_without_positives"] = 0.05 / epoch
            if has_val:  # The third epoch is the best of the first stage, the last of the second.
                facts |= {"val_uwa": 0.9 if epoch == 3 else 0.6 + 0.01 * epoch, "val_accuracy": 0.8}
            events.append(facts)
        if has_val:
            events.append({"event": "note", **notes.kept_epoch(stage, 3, epochs, "uwa", 0.9).to_dict()})
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
