"""The content of ``metrics.json`` as types, and its headline: one line per rare class. Does not import torch.

An untrusted file is checked once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from lopsided.errors import RunError
from lopsided.evaluation.decision import Decision
from lopsided.evaluation.intervals import share_interval
from lopsided.recipe.words import amount

if TYPE_CHECKING:
    from lopsided.recipe import Recipe

JUDGED = ("test", "val", "held_out")
"""The splits with metrics. A page shows the first one that exists."""
_Count = Annotated[NonNegativeInt, Field(le=2**53)]
_Counts = Annotated[dict[str, _Count], Field(min_length=1)]


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class Estimate(_Content):
    """A value with its interval. All three are None if the value is undefined."""

    value: float | None
    low: float | None
    high: float | None

    @model_validator(mode="after")
    def _has_limits(self) -> Estimate:
        if self.value is not None and None in (self.low, self.high):
            raise ValueError("a value must have an interval")
        return self


class ClassMetrics(_Content):
    """The metrics of one class against all others."""

    label: str
    support: int
    predicted: int
    recall: Estimate
    precision: Estimate
    f1: Estimate
    auroc: Estimate
    average_precision: Estimate


class Majority(_Content):
    """The metrics of always predicting the most frequent class."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]
    label: str
    uwa: float
    accuracy: float


class SplitMetrics(_Content):
    """The metrics of all classes together, by the names of ``metric_table``. A run may lack some of them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Estimate | None]

    uwa: Estimate
    accuracy: Estimate
    calibration_error: Estimate

    def get(self, name: str) -> Estimate | None:
        """Return a metric, or None if the run has none of this name."""
        found: Estimate | None = getattr(self, name, None)
        return found


class RuleMetrics(_Content):
    """Balanced accuracy by one decision rule, and the recall of each class; None for a class without images."""

    uwa: float
    recall: list[float | None]


class DecisionFacts(_Content):
    """How the model decides, as on its card."""

    model_config = ConfigDict(frozen=True, strict=False, allow_inf_nan=False)
    prior: tuple[float, ...]
    temperature: float
    bias: tuple[float, ...] | None = None
    calibrated_on: int
    decision: Decision


class Evaluation(_Content):
    """The metrics of one split; rows of ``confusion`` are the true classes."""

    num_images: int
    level: float
    figures: SplitMetrics
    per_class: list[ClassMetrics]
    confusion: list[list[_Count]]
    majority: Majority
    notes: list[str]
    rules: dict[str, RuleMetrics] = {}


class Counts(_Content):
    """The number of images of each class in each split."""

    train: _Counts
    val: _Counts | None = None
    test: _Counts | None = None


class Leaks(_Content):
    """Groups in more than one split, and pairs of identical images: (image, split, other image, other split)."""

    groups: list[str]
    duplicates: list[Annotated[list[str], Field(min_length=4, max_length=4)]]


class BaselineMetrics(_Content):
    """The metrics of the recipe ``quick`` on images of one split, and those of the model on the same images."""

    num_images: int
    uwa: Estimate
    auroc: Estimate | None = None
    model_uwa: float
    difference: Estimate


class Baseline(_Content):
    """The recipe to which the run is compared."""

    recipe: str
    splits: dict[str, BaselineMetrics]


class FoldMetrics(_Content):
    """The metrics of the images of one fold."""

    fold: int
    repeat: int
    images: _Count
    uwa: Annotated[float, Field(ge=0, le=1)]


class FoldFacts(_Content):
    """The folds of a run, and its final model."""

    folds: Annotated[int, Field(ge=2)]
    repeats: Annotated[int, Field(ge=1)]
    by: str
    final: Literal["refit", "ensemble"]
    members: Annotated[int, Field(ge=1)]
    parameters: _Count
    per_fold: Annotated[list[FoldMetrics], Field(min_length=1)]
    wrong_labels: Estimate | None = None
    """How many labels are probably wrong."""


class RunFact(_Content):
    """A caution of a run: its kind, its values and its words."""

    kind: str
    values: dict[str, Any]
    text: str


class Environment(_Content):
    """The environment of a run, as far as a page shows it."""

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
    folds: FoldFacts | None = None
    """None in a run with one split."""
    views: Annotated[tuple[str, ...], Field(strict=False)]
    """The views of an image that the model averages over."""
    decision: DecisionFacts
    val: Evaluation | None
    test: Evaluation | None
    held_out: Evaluation | None = None
    leaks: Leaks
    baseline: Baseline | None = None
    facts: list[RunFact]
    """The cautions about the metrics. ``warnings`` of the file has their words alone."""
    unreadable: list[dict[str, str]]
    environment: Environment
    seconds: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _has_a_row_per_class(self) -> Metrics:
        number = len(self.classes)
        for split, part in self.judged().items():
            if len(part.per_class) != number:
                raise ValueError(f"{split}.per_class must have {number} classes")
            if {len(part.confusion), *map(len, part.confusion)} != {number}:
                raise ValueError(f"{split}.confusion must have {number} classes")
        return self

    @property
    def only_class(self) -> str | None:
        """The class of all training images; None if there are several."""
        present = [label for label, number in self.counts.train.items() if number]
        return present[0] if len(present) == 1 else None

    def judged(self) -> dict[str, Evaluation]:
        """Return the figures of each evaluated split, in the order of ``JUDGED``."""
        parts: dict[str, Evaluation | None] = {split: getattr(self, split) for split in JUDGED}
        return {split: part for split, part in parts.items() if part is not None}


def check_metrics(path: Path, content: Mapping[str, Any]) -> Metrics:
    """Return the checked content of a ``metrics.json``. The error names the first missing or invalid value."""
    try:
        return Metrics.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or str(first["ctx"]["error"])
        do = "Restore the file, or train the run again."
        raise RunError(f"{path} has a missing or invalid value: {place}. {do}") from None


MOST_CLASSES = 3
"""The largest number of classes with a line. All classes are in the table of the command and on the page."""
LEVEL = 0.95
"""The level of the interval of false alarms, if these are all that a run can say."""


@dataclass(frozen=True)
class Headline:
    """How many images of a class the model finds, and how many others it takes for that class."""

    label: str
    found: int
    images: int
    low: float | None
    high: float | None
    false_alarms: int
    others: int

    def words(self, label: str | None = None) -> str:
        """Return the counts as text. ``label`` replaces the name of the class.

        >>> Headline("shirt", 20, 24, 0.64, 0.93, 46, 300).words()
        'shirt: finds 20 of 24 (83 %, 64 to 93 %); 46 false alarms among 300 other images'
        >>> Headline("unusual", 0, 0, None, None, 10, 200).words()
        'unusual: no image was tested; 10 false alarms among 200 other images (5.0 %, 2.7 to 9.0 %)'
        """
        name = self.label if label is None else label
        if not self.images:
            return f"{name}: no image was tested; {self._alarms()}{self._share_of_alarms()}"
        return f"{name}: finds {self.found:,} of {self.images:,} ({self._share()}); {self._alarms()}"

    def title(self, label: str) -> str:
        """Return the counts as the title of a page.

        >>> Headline("shirt", 20, 24, 0.64, 0.93, 46, 300).title("shirts")
        'Finds 20 of 24 shirts (83 %, 64 to 93 %) with 46 false alarms'
        >>> Headline("unusual", 0, 0, None, None, 10, 200).title("“unusual”")
        '10 false alarms among 200 images (5.0 %, 2.7 to 9.0 %); no image of “unusual” was tested'
        """
        if not self.images:
            alarms = self._alarms().replace(" other image", " image") + self._share_of_alarms()
            return f"{alarms}; no image of {label} was tested"
        found = f"Finds {self.found:,} of {self.images:,} {label} ({self._share()})"
        return f"{found} with {amount(self.false_alarms, 'false alarm')}"

    def _share(self) -> str:
        share = f"{100 * self.found / self.images:.0f} %"
        if self.low is not None and self.high is not None:
            share += f", {100 * self.low:.0f} to {100 * self.high:.0f} %"
        return share

    def _share_of_alarms(self) -> str:
        """The share of false alarms with its interval, which is all that can be said without images of the class."""
        if not self.others:
            return ""
        alarms = share_interval(self.false_alarms / self.others, self.others, LEVEL)
        value, low, high = (100 * part for part in (alarms.value, alarms.low, alarms.high))
        return f" ({value:.1f} %, {low:.1f} to {high:.1f} %)"

    def _alarms(self) -> str:
        return f"{amount(self.false_alarms, 'false alarm')} among {amount(self.others, 'other image')}"


def focus_of(recipe: Recipe, metrics: Mapping[str, Any]) -> str | None:
    """Return the class that a run follows: that of its recipe, or that of the model's rule; None: the rarest one."""
    target = metrics["decision"]["decision"].get("target")
    return recipe.decision.focus or (None if target is None else metrics["classes"][target])


def headlines(evaluation: Mapping[str, Any], focus: str | None = None) -> list[Headline]:
    """Return the headlines of an evaluation in ``metrics.json``: the class in ``focus``, and the rarest classes.

    The most frequent class has none, unless it is in focus.
    """
    rows, confusion = evaluation["per_class"], evaluation["confusion"]
    by_size = sorted(range(len(rows)), key=lambda place: rows[place]["support"])
    total = sum(row["support"] for row in rows)
    first = [place for place in by_size if rows[place]["label"] == focus]
    lines = []
    for place in [*first, *(place for place in by_size[:-1] if place not in first)][:MOST_CLASSES]:
        row, decided = rows[place], sum(line[place] for line in confusion)
        hits, recall = confusion[place][place], row["recall"]
        alarms, others = decided - hits, total - row["support"]
        lines.append(Headline(row["label"], hits, row["support"], recall["low"], recall["high"], alarms, others))
    return lines


def judged_split(metrics: Mapping[str, Any]) -> str | None:
    """Return the split whose metrics say most about new images: test, or else val; None if there is neither."""
    return next((split for split in ("test", "val") if metrics.get(split) is not None), None)
