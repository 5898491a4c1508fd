"""Predict any number of images in constant memory, by the rule of the model or another one. Needs no torch.

Unreadable images are skipped and listed.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lopsided import files
from lopsided.data.decoding import UnreadableImageError
from lopsided.data.images import Progress
from lopsided.data.stored import ImagePath
from lopsided.data.vectors import Vectors
from lopsided.errors import DataError, InputError
from lopsided.evaluation.calibration import HeldBack, at_prevalence
from lopsided.evaluation.decision import PLAIN, Decision, resolve
from lopsided.recipe.rules import parse_rule

if TYPE_CHECKING:
    from lopsided.data.sources.listing import Listing
    from lopsided.inference.pool import Scores
    from lopsided.inference.scorer import Scorer
    from lopsided.models.model import ModelCard

Answer: TypeAlias = tuple[ImagePath, npt.NDArray[np.floating[Any]] | UnreadableImageError]
"""A path with the probabilities of the classes, or with the error if the image is unreadable."""

Write: TypeAlias = Callable[[ImagePath, str, npt.NDArray[np.floating[Any]]], object]
"""Takes a path, the predicted class and the probabilities."""

PROBABILITY = "p:"
"""Prefix of the probability columns, so that a class called "path" does not hide another column."""


class Stream(Protocol):
    """An output for text."""

    def write(self, text: str, /) -> int:
        """Write a text."""


SHOWN = 20
"""Largest number of unreadable images in a summary. The file next to the predictions lists all of them."""


@dataclass
class Summary:
    """The outcome of a prediction: images per predicted class, and unreadable images."""

    predicted: dict[str, int]
    num_unreadable: int = 0
    unreadable: list[UnreadableImageError] = field(default_factory=list)

    @property
    def num_predicted(self) -> int:
        """The number of predicted images."""
        return sum(self.predicted.values())

    def to_dict(self) -> dict[str, Any]:
        """Return all fields for JSON."""
        shown = [{"path": str(error.path), "reason": error.reason} for error in self.unreadable]
        return {
            "images": self.num_predicted,
            "predicted": self.predicted,
            "unreadable": {"number": self.num_unreadable, "first": shown},
        }


def answers_of(scores: Iterable[Scores], use: Use | None = None) -> Iterator[Answer]:
    """Yield an answer for each image that was scored, in order. ``use`` may move probabilities elsewhere."""
    for part in scores:
        for path, reason, p in zip(part.pack.paths, part.reasons, part.probabilities, strict=True):
            yield path, UnreadableImageError(path, reason) if reason else p if use is None else use.probabilities(p)


def vector_answers(scorer: Scorer, tables: Sequence[Listing], use: Use | None = None) -> Iterator[Answer]:
    """Yield an answer for each vector of tables, with its name."""
    for table in tables:
        assert isinstance(table.images, Vectors)
        vectors = table.images.fitted(scorer.card.shape, scorer.card.columns, table.where)
        p = scorer.images(vectors)
        for name, row in zip(table.names, p if use is None else use.probabilities(p), strict=True):
            yield Path(name), row


def unreadable_path(out: Path) -> Path:
    """Return the path of the list of unreadable images, next to the predictions ``out``."""
    return out.with_name(f"{out.stem}.unreadable.csv")


def write_predictions(
    answers: Iterable[Answer],
    classes: Sequence[str],
    out: str | os.PathLike[str],
    *,
    decision: Decision = PLAIN,
    total: int = 0,
    progress: Progress | None = None,
) -> Summary:
    """Write answers to a CSV file, atomically. Unreadable images are listed in ``*.unreadable.csv`` next to it.

    The columns are path, predicted (by ``decision``), and ``p:`` with the name of each class. Nothing is written if no
    image is readable.
    """
    target = Path(out)
    beside = unreadable_path(target)
    summary = Summary({})
    # The answers are replaced last, so that new answers are never next to an old list.
    with (
        files.replacing(target) as temporary,
        files.replacing(beside, wanted=lambda: summary.num_unreadable > 0) as other,
    ):
        with files.disk_errors(target), _open(temporary) as table, _open(other) as broken:
            reasons = csv.writer(broken, lineterminator="\n")
            reasons.writerow(["path", "reason"])
            summary = consume(
                answers,
                classes,
                _table(table, classes),
                lambda error: reasons.writerow([error.path, error.reason]),
                decision=decision,
                total=total,
                progress=progress,
            )
        check_any(summary)
    return summary


def stream_predictions(
    answers: Iterable[Answer],
    classes: Sequence[str],
    stream: Stream,
    *,
    as_json: bool = False,
    decision: Decision = PLAIN,
) -> Summary:
    """Write answers to an open text stream as CSV, or as one JSON object per line."""
    if as_json:
        return consume(
            answers,
            classes,
            lambda path, label, p: _line(
                stream,
                {"path": str(path), "predicted": label, "probabilities": dict(zip(classes, p.tolist(), strict=True))},
            ),
            lambda error: _line(stream, {"path": str(error.path), "unreadable": error.reason}),
            decision=decision,
        )
    return consume(answers, classes, _table(stream, classes), lambda error: None, decision=decision)


def _table(stream: Stream, classes: Sequence[str]) -> Write:
    """Write the names of the columns, and return what writes a row."""
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(["path", "predicted", *(f"{PROBABILITY}{name}" for name in classes)])
    return lambda path, label, p: rows.writerow([path, label, *(f"{value:.9g}" for value in p)])


def consume(
    answers: Iterable[Answer],
    classes: Sequence[str],
    write: Write,
    refuse: Callable[[UnreadableImageError], object],
    *,
    decision: Decision = PLAIN,
    total: int = 0,
    progress: Progress | None = None,
) -> Summary:
    """Pass each answer to ``write`` or ``refuse`` and count them."""
    summary = Summary(dict.fromkeys(classes, 0))
    for done, (path, answer) in enumerate(answers, start=1):
        if isinstance(answer, UnreadableImageError):
            refuse(answer)
            summary.num_unreadable += 1
            if len(summary.unreadable) < SHOWN:
                summary.unreadable.append(answer)
        else:
            label = classes[int(decision.decide(answer))]
            write(path, label, answer)
            summary.predicted[label] += 1
        if progress is not None:
            progress(done, total)
    return summary


def check_any(summary: Summary) -> None:
    """Raise if no image was readable."""
    if not summary.num_predicted and summary.num_unreadable:
        first = summary.unreadable[0]
        number = f"{summary.num_unreadable:,}"
        raise DataError(f"No image is readable: {number} failed, the first {first.path} ({first.reason}).")


def _open(path: Path) -> IO[str]:
    # A name that is not UTF-8 is written with its original bytes.
    return path.open("w", encoding="utf-8", errors="surrogateescape", newline="")


def _line(stream: Stream, content: object) -> None:
    stream.write(json.dumps(content, allow_nan=False) + "\n")


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Use:
    """A decision rule, and the prior that the reported probabilities carry."""

    decision: Decision
    prior: tuple[float, ...]
    shares: tuple[float, ...] | None = None
    """The expected class shares to which probabilities are moved; None: the prior of the model."""

    def probabilities(self, p: npt.ArrayLike) -> Floats:
        """Return the probabilities of the model, moved to the expected shares if there are any."""
        if self.shares is None:
            return np.asarray(p, dtype=np.float64)
        return at_prevalence(p, self.prior, self.shares)


def choose_use(
    card: ModelCard, rule: str | None = None, prevalence: str | None = None, held: HeldBack | None = None
) -> Use:
    """Return how to use a model: its own rule, or another ``rule``, at its own prior or at a ``prevalence``.

    ``prevalence`` is a text such as ``rare=0.02,other=0.98``. ``held`` are validation images for rules that are fitted.
    """
    if prevalence is None:
        decision = card.decision if rule is None else resolve(rule, card.classes, card.prior, held)
        return Use(decision, card.prior)
    parsed = parse_rule(prevalence if prevalence.startswith("prevalence:") else f"prevalence:{prevalence}")
    if rule is not None and parse_rule(rule).kind == "prevalence":
        raise InputError("--decide prevalence:... and --prevalence both state class shares. Remove one of the two.")
    resolve(parsed, card.classes, card.prior)  # Checks the names of the classes.
    shares = tuple(parsed.values[name] for name in card.classes)
    if held is not None:
        held = held.moved(at_prevalence(held.probabilities, card.prior, shares))
    wanted = rule or card.decision.rule
    if parse_rule(wanted).kind == "prevalence":  # The shares of the option replace those of the model's rule.
        return Use(resolve("plain", card.classes, shares).model_copy(update={"rule": str(parsed)}), card.prior, shares)
    return Use(resolve(wanted, card.classes, shares, held), card.prior, shares)
