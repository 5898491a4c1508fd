"""What ``metrics.json`` holds, as types: a file that may come from someone else is checked once. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from lopsided.errors import RunError, sentence

JUDGED = ("test", "val", "held_out")
"""The splits that a run may be judged on, in the order in which a page prefers them."""
_Count = Annotated[NonNegativeInt, Field(le=2**53)]
_Counts = Annotated[dict[str, _Count], Field(min_length=1)]


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class Figure(_Content):
    """A value with its interval; all None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None

    @model_validator(mode="after")
    def _has_limits(self) -> Figure:
        if self.value is not None and None in (self.low, self.high):
            raise ValueError("a value must have an interval")
        return self


class ClassFigures(_Content):
    """One class against the others."""

    label: str
    support: int
    predicted: int
    recall: Figure
    precision: Figure
    f1: Figure
    auroc: Figure
    average_precision: Figure


class Majority(_Content):
    """What always answering the most frequent class would reach."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]
    label: str
    uwa: float
    accuracy: float


class Figures(_Content):
    """The figures of all classes together."""

    uwa: Figure
    accuracy: Figure
    calibration_error: Figure
    macro_f1: Figure | None = None
    g_mean: Figure | None = None
    mcc: Figure | None = None
    auroc: Figure | None = None
    average_precision: Figure | None = None
    brier: Figure | None = None
    log_loss: Figure | None = None


class Evaluation(_Content):
    """The figures of one split; rows of ``confusion`` are the true classes."""

    num_images: int
    level: float
    figures: Figures
    per_class: list[ClassFigures]
    confusion: list[list[_Count]]
    majority: Majority
    notes: list[str]


class Counts(_Content):
    """The images of each class in a split."""

    train: _Counts
    val: _Counts | None = None
    test: _Counts | None = None


class Leaks(_Content):
    """Groups in more than one split, and pairs of the same image: one and its split, the other and its split."""

    groups: list[str]
    duplicates: list[Annotated[list[str], Field(min_length=4, max_length=4)]]


class Environment(_Content):
    """What the figures may depend on beside the recipe, as far as a page tells it."""

    device: str = ""
    packages: dict[str, str] = {}


class Metrics(_Content):
    """The metrics of a finished run."""

    lopsided: str
    recipe: str
    loss: str
    seed: int
    source: str
    classes: Annotated[list[str], Field(min_length=1)]
    counts: Counts
    val: Evaluation | None
    test: Evaluation | None
    held_out: Evaluation | None = None
    leaks: Leaks
    warnings: list[str]
    unreadable: list[dict[str, str]]
    environment: Environment
    seconds: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _has_a_row_per_class(self) -> Metrics:
        number = len(self.classes)
        for split, part in self.judged().items():
            if len(part.per_class) != number:
                raise ValueError(f"{split}.per_class of {number} classes")
            if {len(part.confusion), *map(len, part.confusion)} != {number}:
                raise ValueError(f"{split}.confusion of {number} classes")
        return self

    def judged(self) -> dict[str, Evaluation]:
        """The figures of each split that has some, in the order in which a page prefers them."""
        parts: dict[str, Evaluation | None] = {split: getattr(self, split) for split in JUDGED}
        return {split: part for split, part in parts.items() if part is not None}


def check_metrics(path: Path, content: Mapping[str, Any]) -> Metrics:
    """Return the content of a ``metrics.json``, or name the first thing that is missing or of another kind."""
    try:
        return Metrics.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or str(first["ctx"]["error"])
        got, do = f"none that can be used in {path}", "Train the run again, or restore the file."
        raise RunError(sentence(f"{path.name} must hold {place}", got, do)) from None
