"""Keys of runs: which runs are the same cell, had the same treatment, or saw the same images. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided.losses import catalogue
from lopsided.recipe import RUNTIME_FIELDS, UNHASHED_FIELDS

if TYPE_CHECKING:
    from lopsided.recipe import LossSettings, Recipe

KEY_LENGTH = 16
WITH_WEIGHTS = "+"
"""Separates the hash of a recipe without weights from the hash of its initial weights."""
VARIED_FIELDS = frozenset({"seed", "data.source", "data.scenario", "data.fold", "encoder.weights"})
VARIED_LOSS = "encoder_training.loss."
"""Fields in which recipes of one family may differ, besides the fields that do not change what is trained."""
BLIND_FIELDS = frozenset(
    {f"data.{name}" for name in ("source", "held_out", "redraw", "image_size", "channels", "skip_unreadable")}
)
"""Fields of the data that do not decide which images are used, or whose effect ``data_key`` includes otherwise."""


@dataclass(frozen=True)
class LossTable:
    """A loss with its own parameters, sorted by name. The loss need not be installed."""

    name: str
    parameters: tuple[tuple[str, catalogue.Value], ...] = ()

    @classmethod
    def of(cls, loss: LossSettings) -> LossTable:
        """Return the loss of a recipe."""
        return cls(loss.name, tuple(sorted(loss.parameters.items())))

    @classmethod
    def read(cls, value: object) -> LossTable:
        """Read a table that ``to_dict`` returned."""
        if isinstance(value, LossTable):
            return value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("not the table of a loss")
        parameters = {name: each for name, each in value.items() if name != "name"}
        for each in parameters.values():
            if not isinstance(each, str | int) and not (isinstance(each, float) and math.isfinite(each)):
                raise ValueError("a parameter is not a number, a string or a boolean")
        return cls(value["name"], tuple(sorted(parameters.items())))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, or ``default`` if the loss does not have it."""
        return dict(self.parameters).get(name, default)

    def to_dict(self) -> dict[str, catalogue.Value]:
        """Return the name and the parameters for JSON."""
        return {"name": self.name, **dict(self.parameters)}

    @property
    def label(self) -> str:
        """The loss with the parameters that differ from their defaults."""
        try:
            return catalogue.find(self.name).describe(dict(self.parameters))
        except (catalogue.CatalogueError, ValueError, TypeError):  # Its package is missing or has changed.
            return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.parameters)})"


Treatment = tuple[str, LossTable, LossTable, str]
"""Method, both losses and family: all that decides a run except data, seed and proportions."""


def cell_key(recipe: Recipe) -> str:
    """Return the name of a settled recipe's folder in a sweep: the start of its content's hash."""
    return recipe.content_hash()[:KEY_LENGTH]


def family_of(recipe: Recipe) -> str:
    """Return a hash that is equal for recipes that differ only in the encoder's loss, the proportions and the seed.

    The location of the images does not matter, nor the folder of a file of weights or of further labels. With weights,
    a second hash follows that of the recipe without weights.
    """
    kept = {
        path: _without_folders(path, value)
        for path, value in recipe.chosen()
        if path not in UNHASHED_FIELDS | VARIED_FIELDS and not path.startswith(VARIED_LOSS)
    }
    parts = [part.strip() for part in (recipe.data.scenario or "").split(",")]
    kept["total"] = next((part for part in parts if part.startswith("total=")), None)
    name = recipe.encoder.spec.without_folders()
    family = digest({**kept, "weights": "none"})
    return family if name == "none" else f"{family}{WITH_WEIGHTS}{digest(name)}"


def treatment_of(recipe: Recipe) -> Treatment:
    """Return the treatment of a recipe: runs of one treatment differ only in data, seed and proportions."""
    losses = LossTable.of(recipe.loss), LossTable.of(recipe.classifier.loss)
    return recipe.method, *losses, family_of(recipe)


def data_key(recipe: Recipe, metrics: Mapping[str, Any]) -> str:
    """Return a hash that is equal for two runs that were trained and tested on the same images.

    It covers the name of the source, the fields that draw and split, the seed if it decides the draw, and the number of
    images of each class in each split, which changes when images are added to a folder. A fold has the same test images
    whatever part of the other images is used for validation, so the key of a fold does not cover that part.
    """
    kept: dict[str, Any] = {
        path: _without_folders(path, value)
        for path, value in recipe.chosen()
        if path.startswith("data.") and path not in RUNTIME_FIELDS | BLIND_FIELDS
    }
    kept["seed"] = recipe.seed if recipe.data.redraw else 0
    counts = metrics["counts"]
    if recipe.data.fold is not None:
        kept.pop("data.val", None)
        counts = {"rest": added(counts["train"], counts.get("val")), "test": counts["test"]}
    return digest([source_name(recipe, metrics), kept, metrics["classes"], counts])


_TABLES = ("data.more", "data.corrections")


def _without_folders(path: str, value: Any) -> Any:
    """Return the value of a field; of tables of labels, the file names, which are the same on every machine."""
    return [Path(table).name for table in value] if path in _TABLES and value else value


def added(first: Mapping[str, int], second: Mapping[str, int] | None) -> dict[str, int]:
    """Return the sum of two counts per class. The second may be missing."""
    return {name: number + (second or {}).get(name, 0) for name, number in first.items()}


def source_name(recipe: Recipe, metrics: Mapping[str, Any]) -> str:
    """Return the name of a run's source, or the last part of its path."""
    return writable(metrics.get("source_name", Path(recipe.data.source or "").name))


def digest(content: Any) -> str:
    """Return the start of the hash of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]


def coordinates(scenario: str | None, what: str, seed: int, fold: int | None = None) -> str:
    """Name a cell by its scenario, its method or loss, and its seed or fold.

    >>> coordinates("90:10", "AFCL(eta=300)", 2), coordinates(None, "CL", 0, 6)
    ('90:10 AFCL(eta=300) seed 2', 'all images CL fold 6')
    """
    return f"{scenario or 'all images'} {what} {f'seed {seed}' if fold is None else f'fold {fold}'}"


def proportion(scenario: str | None) -> str | None:
    """Return a scenario without its total.

    >>> proportion("90:10,total=1000")
    '90:10'
    """
    if scenario is None:
        return None
    return ",".join(part.strip() for part in scenario.split(",") if not part.strip().startswith("total="))


def writable(text: str) -> str:
    """Replace lone surrogates, which represent bytes of a file name that are not UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
