"""The results of a run: its tables, its figures and ``metrics.json``."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
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
from lopsided.evaluation.metrics import evaluate
from lopsided.facts import Fact
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
    parts = {"val": fitted.val, "test": fitted.test, "held_out": fitted.held_out}
    decided = {name: part.y_pred for name, part in parts.items() if part is not None}
    val, card = fitted.val, fitted.card
    if val is not None and val.y_true is not None and parse_rule(card.decision.rule).fitted:
        held = HeldBack(val.probabilities, val.y_true, val.groups)
        decided["val"] = decided_unseen(card.decision.rule, card.classes, card.prior, held, recipe.seed)
    write_tables(folder, parts, decided, source.classes)
    joined, _ = training_source(source, fitted.splits)
    write_metrics(
        folder,
        recipe,
        source,
        counts={name: joined.subset(indices).counts() for name, indices in fitted.splits.parts()},
        card=card,
        evaluations={name: _figures(name, parts, decided, recipe.seed, fitted.card) for name in parts},
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
    decided: Mapping[str, npt.NDArray[np.int64]],
    classes: Sequence[str],
    folds: npt.NDArray[np.int64] | None = None,
) -> None:
    """Write the predictions and the features of each split. ``folds`` numbers the fold of each test image."""
    files.atomic_write(folder / PREDICTIONS, _table(parts, decided, classes, folds))
    features = {name: part.features for name, part in parts.items() if part is not None and part.features is not None}
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


def figures_of(part: Predictions, card: ModelCard, seed: int) -> dict[str, Any] | None:
    """Return the figures of images that neither training nor a fitted rule has used."""
    return _figures("held_out", {"held_out": part, "val": None}, {"held_out": part.y_pred}, seed, card)


def _figures(
    split: str,
    parts: Mapping[str, Predictions | None],
    decided: Mapping[str, npt.NDArray[np.int64]],
    seed: int,
    card: ModelCard,
) -> dict[str, Any] | None:
    """Return the figures of a split by the rule of the model, and its UWA by several rules."""
    part = parts[split]
    if part is None or part.y_true is None:
        return None
    p, labels = part.probabilities, part.y_true
    val = parts["val"]
    held = None
    if val is not None and val.y_true is not None and split != "val":
        held = HeldBack(val.probabilities, val.y_true, val.groups)
    costs = card.decision.costs or None
    figures = evaluate(
        labels, p, decided[split], classes=part.classes, seed=seed, groups=part.groups, costs=costs
    ).to_dict()
    if split == "val" and parse_rule(card.decision.rule).fitted:
        figures["notes"].append(FITTED_NOTE)
    shown, fitted = HeldBack(p, labels, part.groups), split == "val"
    figures["notes"] += measured_words(card.decision, shown, part.classes, fitted_to=fitted, seed=seed)
    rules = ("plain", "balanced", "tuned")
    return {**figures, "rules": figures_by_rule(rules, card.classes, card.prior, p, labels, held)}


FITTED_NOTE = (
    "The decision rule was fitted to these images. By folds, each image was decided by a rule that was fitted without "
    "it."
)


def _table(
    parts: Mapping[str, Predictions | None],
    decided: Mapping[str, npt.NDArray[np.int64]],
    classes: Sequence[str],
    folds: npt.NDArray[np.int64] | None,
) -> bytes:
    known = [] if folds is None else ["fold"]
    columns = ["split", "name", "group", "label", "predicted", *(f"{PROBABILITY}{name}" for name in classes)]
    table: list[Sequence[object]] = [[*columns, *known]]
    for split, part in parts.items():
        if part is None or part.y_true is None:
            continue
        groups = [""] * len(part.names) if part.groups is None else part.groups.tolist()
        rows = zip(part.names, groups, part.y_true, decided[split], part.probabilities, strict=True)
        for row, (name, group, label, predicted, p) in enumerate(rows):
            numbers = (f"{value:.9g}" for value in p)
            fold = [] if folds is None else [folds[row] if split == "test" else ""]
            table.append([split, name, group, classes[label], classes[predicted], *numbers, *fold])
    return files.csv_text(table).encode(errors="surrogateescape")
