"""The results of a run: its tables, its figures and ``metrics.json``."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from lopsided import __version__, files
from lopsided.data.prepare import training_source
from lopsided.data.sources import Source
from lopsided.data.splits import Leaks
from lopsided.evaluation.calibration import HeldBack
from lopsided.evaluation.decision import PROBABILITY
from lopsided.evaluation.doubt import measured_words
from lopsided.evaluation.folds import decided_unseen, figures_by_rule
from lopsided.evaluation.intervals import UNDEFINED, Estimate
from lopsided.evaluation.labels import check_labels, count_wrong, duplicates_table, labels_table, near_duplicates
from lopsided.evaluation.metrics import evaluate
from lopsided.facts import Fact, notes
from lopsided.recipe import Recipe
from lopsided.recipe.rules import parse_rule
from lopsided.runs.folder import FEATURES, FORMAT, METRICS, PREDICTIONS

if TYPE_CHECKING:
    from lopsided.inference.scorer import Predictions
    from lopsided.models.model import ModelCard
    from lopsided.training.fit import Fitted


DECISION_FIELDS = ("prior", "temperature", "bias", "calibrated_on", "decision")
"""The fields of a model card that say how the model decides. ``metrics.json`` repeats them."""


def environment(recipe: Recipe, num_ranks: int = 1) -> dict[str, Any]:
    """Return the versions and settings that can change figures in addition to the recipe."""
    import torch

    from lopsided.models.machine import pick_device

    packages = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "pillow", "onnxruntime")
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(pick_device(recipe.device)),
        "threads": recipe.threads or torch.get_num_threads(),
        "ranks": num_ranks,
        "packages": {name: metadata.version(name) for name in packages},
    }


def write_results(folder: Path, recipe: Recipe, source: Source, fitted: Fitted, num_ranks: int) -> None:
    """Write the tables, the figures and, last, the metrics of a trained model."""
    card, val, held = fitted.card, fitted.val, None
    if val is not None:
        held = HeldBack(val.probabilities, val.y_true, val.groups)
        if parse_rule(card.decision.rule).fitted:
            val = replace(val, y_pred=decided_unseen(card.decision.rule, card.classes, card.prior, held, recipe.seed))
    parts = {"val": val, "test": fitted.test, "held_out": fitted.held_out}
    write_tables(folder, parts, source.classes)
    joined, _ = training_source(source, fitted.splits)
    write_metrics(
        folder,
        recipe,
        source,
        counts={name: joined.subset(indices).counts() for name, indices in fitted.splits.parts()},
        card=card,
        evaluations={
            name: None if part is None else figures_of(part, card, recipe.seed, held, fitted_to=name == "val")
            for name, part in parts.items()
        },
        leaks=fitted.leaks,
        baseline=fitted.baseline,
        cautions=fitted.cautions,
        num_ranks=num_ranks,
        fingerprint=fitted.fingerprint,
        seconds=fitted.seconds,
    )


def write_tables(
    folder: Path,
    parts: Mapping[str, Predictions | None],
    classes: Sequence[str],
    folds: npt.NDArray[np.int64] | None = None,
) -> None:
    """Write the predictions and the features of each split. ``folds`` numbers the fold of each test image."""
    columns = ["split", "name", "group", "label", "predicted", *(f"{PROBABILITY}{name}" for name in classes)]
    table: list[Sequence[object]] = [columns if folds is None else [*columns, "fold"]]
    features = {}
    for split, part in parts.items():
        if part is None:
            continue
        groups = [""] * len(part.names) if part.groups is None else part.groups.tolist()
        rows = zip(part.names, groups, part.y_true, part.y_pred, part.probabilities, strict=True)
        for row, (name, group, label, predicted, p) in enumerate(rows):
            numbers = (f"{value:.9g}" for value in p)
            fold = [] if folds is None else [folds[row] if split == "test" else ""]
            table.append([split, name, group, classes[label], classes[predicted], *numbers, *fold])
        if part.features is not None:
            # safetensors writes an array as it lies in memory, and one without some of its columns may lie by columns.
            features[split] = np.ascontiguousarray(part.features)
    files.atomic_write(folder / PREDICTIONS, files.csv_text(table).encode(errors="surrogateescape"))
    files.atomic_write(folder / FEATURES, save(features))


def write_metrics(
    folder: Path,
    recipe: Recipe,
    source: Source,
    *,
    counts: Mapping[str, Mapping[str, int]],
    card: ModelCard,
    evaluations: Mapping[str, Mapping[str, Any] | None],
    leaks: Leaks,
    cautions: Sequence[Fact],
    num_ranks: int,
    fingerprint: str,
    seconds: float,
    baseline: Mapping[str, Any] | None = None,
    folds: Mapping[str, Any] | None = None,
) -> None:
    """Write ``metrics.json``, which marks a run as finished."""
    record = {
        "format": FORMAT,
        "lopsided": __version__,
        "recipe": recipe.content_hash(),
        "method": recipe.method,
        "loss": recipe.loss.name,
        "seed": recipe.seed,
        "source": recipe.data.source,
        "source_name": source.name,
        "classes": list(source.classes),
        "counts": {split: dict(numbers) for split, numbers in counts.items()},
        **({} if folds is None else {"folds": dict(folds)}),
        "views": list(card.views),
        "decision": card.model_dump(mode="json", include=set(DECISION_FIELDS)),
        **evaluations,
        "leaks": {"groups": list(leaks.groups), "duplicates": [list(pair) for pair in leaks.duplicates]},
        "baseline": baseline,
        "warnings": [str(fact) for fact in cautions],
        "facts": [fact.to_dict() for fact in cautions],
        "unreadable": [{"name": name, "reason": reason} for name, reason in source.unreadable],
        "environment": environment(recipe, num_ranks),
        "fingerprint": fingerprint,
        "seconds": round(seconds, 3),
    }
    files.atomic_write(folder / METRICS, json.dumps(record, indent=2, allow_nan=False) + "\n")


def figures_of(
    part: Predictions, card: ModelCard, seed: int, held: HeldBack | None = None, *, fitted_to: bool = False
) -> dict[str, Any]:
    """Return the figures of images by the rule of the model, and their UWA by several rules.

    ``held`` are validation images, to which the rule tuned is fitted. ``fitted_to``: the part is these images.
    """
    shown, costs = HeldBack(part.probabilities, part.y_true, part.groups), card.decision.costs or None
    figures = evaluate(
        part.y_true,
        part.probabilities,
        part.y_pred,
        classes=card.classes,
        seed=seed,
        groups=part.groups,
        costs=costs,
    ).to_dict()
    if fitted_to and parse_rule(card.decision.rule).fitted:
        figures["notes"].append(FITTED_NOTE)
    figures["notes"] += measured_words(card.decision, shown, card.classes, fitted_to=fitted_to, seed=seed)
    others = None if fitted_to else held
    rules = figures_by_rule(
        ("plain", "balanced", "tuned"), card.classes, card.prior, part.probabilities, part.y_true, others
    )
    return {**figures, "rules": rules}


FITTED_NOTE = (
    "The decision rule was fitted to these images. By folds, each image was decided by a rule that was fitted without "
    "it."
)


LABELS, NEAR_DUPLICATES = "labels.csv", "near_duplicates.csv"
MOST_COMPARED = 20_000
"""Near-duplicates are searched among at most this many images. The time grows with the square of the number."""


def write_label_check(
    folder: Path, source: Source, p: npt.NDArray[np.float64], features: npt.NDArray[np.float32] | None
) -> tuple[Estimate, list[Fact]]:
    """Write the tables of the label check. Return how many labels are probably wrong, and notes for the log."""
    groups = None if source.groups is None else source.groups.tolist()
    names, classes, labels = source.names, source.classes, source.labels
    check = check_labels(labels, p)
    files.atomic_write(folder / LABELS, labels_table(check, names, classes, groups))
    wrong, facts = UNDEFINED, []
    if len(np.unique(labels)) > 1:  # Images of one class have no other label that they could have.
        wrong = count_wrong(labels, p, groups)
        facts = [notes.wrong_labels(wrong.value, wrong.low, wrong.high, len(source), check.num_suspects, LABELS)]
    if features is None or not np.isfinite(features).all():
        return wrong, facts
    if len(source) > MOST_COMPARED:
        return wrong, [*facts, notes.near_duplicates_not_searched(MOST_COMPARED)]
    pairs = near_duplicates(features, labels, groups)
    files.atomic_write(folder / NEAR_DUPLICATES, duplicates_table(pairs, names, labels.tolist(), classes, groups))
    across = sum(pair.across == "label" for pair in pairs)
    if across:
        facts.append(notes.near_duplicates(across, NEAR_DUPLICATES))
    if len(pairs) > across:
        facts.append(notes.alike_images(len(pairs) - across, NEAR_DUPLICATES))
    return wrong, facts


def read_table(path: Path, limit: int) -> list[dict[str, Any]]:
    """Return the rows of one of the tables; no rows if the file is missing, too large or not a table."""
    try:
        files.check_regular(path, limit)
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as table:
            return [row for row in csv.DictReader(table) if None not in row and None not in row.values()]
    except (OSError, csv.Error, ValueError):
        return []
