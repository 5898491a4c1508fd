"""From a recipe and a source to a fitted model: two stages, or end to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lopsided.data.sources import Source
from lopsided.data.splits import Leaks, Splits
from lopsided.recipe import Recipe
from lopsided.training.model import Model, ModelCard, load_model, save_model
from lopsided.training.prediction import Predictions, predict, predict_batch
from lopsided.training.reporter import Reporter

__all__ = [
    "Fitted",
    "Model",
    "ModelCard",
    "Predictions",
    "Reporter",
    "fit",
    "load_model",
    "predict",
    "predict_batch",
    "save_model",
]


@dataclass(eq=False)
class Fitted:
    """What a run gave. ``history`` holds the facts of each epoch, as they are in the log."""

    model: Model
    card: ModelCard
    splits: Splits
    leaks: Leaks
    history: list[dict[str, Any]]
    val: Predictions | None
    test: Predictions | None
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def fit(
    recipe: Recipe,
    source: Source,
    folder: Path | None = None,
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
) -> Fitted:
    """Train a model on a source that is already drawn by scenario and verified.

    With ``folder``: ``log.jsonl`` gets a line per event, ``checkpoint/`` is written after each epoch, and
    ``model.safetensors`` with ``model.json`` at the end. The caller holds the folder's lock.
    """
    raise NotImplementedError
