"""Predict any number of images in constant memory, by the rule of the model or another one. Needs no torch.

Unreadable images are skipped and listed. Groups come from names, from folders, or from a column of a table.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from lopsided import files
from lopsided.data.decoding import UnreadableImageError
from lopsided.data.images import Progress, Vectors
from lopsided.data.listed import Listed, Related
from lopsided.data.sources.names import PARENT, PLACE, groups_of
from lopsided.data.stored import ImagePath, cells_of, is_address
from lopsided.errors import DataError, InputError, sentence
from lopsided.evaluation.calibration import HeldBack, at_prevalence
from lopsided.evaluation.decision import ASK, PLAIN, PROBABILITY, Decision, resolve
from lopsided.evaluation.drift import Drift, compare
from lopsided.evaluation.typicality import LEVEL, Bank
from lopsided.facts import Fact, cautions, notes
from lopsided.inference.pool import is_table, table_images
from lopsided.recipe.rules import parse_rule

if TYPE_CHECKING:
    from lopsided.data.sources.listing import Listing
    from lopsided.inference.pool import Scores
    from lopsided.inference.scorer import Scorer
    from lopsided.models.model import ModelCard

Answer: TypeAlias = tuple[ImagePath, npt.NDArray[np.floating[Any]] | UnreadableImageError, float | None]
"""A path, the probabilities of the classes, or the error if the image is unreadable, and the typicality if known."""

SEPARATOR = "|"
"""Between the classes of a set in a CSV file."""


class Stream(Protocol):
    """An output for text."""

    def write(self, text: str, /) -> int:
        """Write a text."""


SHOWN = 20
"""Largest number of unreadable images in a summary. The file next to the predictions lists all of them."""


@dataclass
class Summary:
    """The outcome of a prediction: images per predicted class, unfamiliar images, and unreadable images."""

    predicted: dict[str, int]
    num_unreadable: int = 0
    unreadable: list[UnreadableImageError] = field(default_factory=list)
    num_dropped: int = 0
    """Unfamiliar images that are not among the predicted ones."""

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


class Familiarity:
    """Marks the images that are unlike those of a bank, by a level, and remembers the typicality of all images."""

    def __init__(
        self, bank: Bank, level: float = LEVEL, *, place: str = "mark", group_of: Grouping | None = None
    ) -> None:
        if place not in PLACES:
            raise InputError(sentence(f"--unfamiliar must be one of {', '.join(PLACES)}", place))
        self.bank, self.asked, self.level, self.place = bank, level, bank.reached(level), place
        self.typicality, self.group_of, self._groups = array("d"), group_of, list[str]()

    def take(self, typicality: float, path: str) -> bool:
        """Remember an image. Return whether it is unfamiliar."""
        self.typicality.append(typicality)
        if self.group_of is not None:
            self._groups.append(self.group_of(path))
        return bool(self.bank.is_unfamiliar(np.array(typicality), self.asked))

    def drift(self, groups: npt.NDArray[np.str_] | None = None) -> Drift:
        """Compare the images so far with the known ones. ``groups`` are those of the images, if they were not taken."""
        groups = np.array(self._groups) if self._groups else groups
        return compare(self.bank, np.array(self.typicality), self.asked, groups)

    def to_dict(self, groups: npt.NDArray[np.str_] | None = None) -> dict[str, Any]:
        """Return what there is to say about the images so far, for JSON. ``groups`` are those of the images."""
        if not self.typicality:
            return {}
        drift = self.drift(groups)
        return {"unfamiliar": {"number": drift.unfamiliar, "level": drift.level, "p_value": drift.p_value}}

    def facts(self, groups: npt.NDArray[np.str_] | None = None) -> Iterator[Fact]:
        """Yield what there is to say about the images so far. ``groups`` are those of the images."""
        if not self.typicality:
            return
        drift = self.drift(groups)
        if self.level > self.asked:
            yield notes.level_not_reached(self.asked, self.level, self.bank.num_units, self.bank.unit)
        known = self.bank.num_units if self.bank.is_guessed else None
        yield notes.unfamiliar_images(drift.unfamiliar, drift.images, drift.level, known, self.bank.unit)
        if drift.is_alarm:
            is_told = groups is not None or bool(self._groups) or self.bank.num_groups is None
            yield cautions.drift(drift.unfamiliar, drift.images, drift.level, drift.p_value, not is_told)


PLACES = ("mark", "drop", "first")
"""What becomes of unfamiliar images: they are marked, left out, or listed before all others."""


def answers_of(scores: Iterable[Scores], use: Use | None = None) -> Iterator[Answer]:
    """Yield an answer for each image that was scored, in order. ``use`` may move probabilities elsewhere."""
    for part in scores:
        typicality = [None] * len(part.reasons) if part.typicality is None else part.typicality.tolist()
        for path, reason, p, typical in zip(part.pack.paths, part.reasons, part.probabilities, typicality, strict=True):
            if reason:
                yield path, UnreadableImageError(path, reason), None
            else:
                yield path, p if use is None else use.probabilities(p), typical


def vector_answers(scorer: Scorer, tables: Sequence[Listing], use: Use | None = None) -> Iterator[Answer]:
    """Yield an answer for each vector of tables, with its name."""
    for table in tables:
        assert isinstance(table.images, Vectors)
        vectors = table.images.fitted(scorer.card.shape, scorer.card.columns, table.where)
        p, _, typicality = scorer.judge(vectors)
        typical = [None] * len(p) if typicality is None else typicality.tolist()
        moved = p if use is None else use.probabilities(p)
        yield from ((Path(name), row, each) for name, row, each in zip(table.names, moved, typical, strict=True))


def unreadable_path(out: Path) -> Path:
    """Return the path of the list of unreadable images, next to the predictions ``out``."""
    return out.with_name(f"{out.stem}.unreadable.csv")


def write_predictions(
    answers: Iterable[Answer],
    classes: Sequence[str],
    out: str | os.PathLike[str],
    *,
    decision: Decision = PLAIN,
    familiarity: Familiarity | None = None,
    total: int = 0,
    progress: Progress | None = None,
) -> Summary:
    """Write answers to a CSV file, atomically. Unreadable images are listed in ``*.unreadable.csv`` next to it.

    The columns are path, predicted (by ``decision``), ``p:`` with the name of each class, and with ``familiarity``
    typicality and unfamiliar. Nothing is written if no image is readable.
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
            with Table(table, classes, decision, familiarity).open() as rows:
                summary = consume(
                    answers,
                    rows,
                    lambda error: reasons.writerow([error.path, error.reason]),
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
    familiarity: Familiarity | None = None,
) -> Summary:
    """Write answers to an open text stream as CSV, or as one JSON object per line."""
    if as_json:
        with Lines(stream, classes, decision, familiarity).open() as rows:
            return consume(answers, rows, rows.refuse)
    with Table(stream, classes, decision, familiarity).open() as table:
        return consume(answers, table, lambda error: None)


class Row(NamedTuple):
    """One answer: an image, the decided class, the probabilities, and its typicality, if known."""

    path: ImagePath
    label: str
    probabilities: npt.NDArray[np.floating[Any]]
    typicality: float | None
    unfamiliar: bool | None = None


class Rows:
    """Writes answers to a stream, a line each. If unfamiliar images come first, the others wait in a temporary file."""

    def __init__(
        self, stream: Stream, classes: Sequence[str], decision: Decision, familiarity: Familiarity | None
    ) -> None:
        self.classes, self.decision, self.familiarity, self._stream = classes, decision, familiarity, stream

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Write what had to wait at the end of the block."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape", newline="") as self._waiting:
            yield self
            self._waiting.seek(0)
            while part := self._waiting.read(1 << 20):
                self._stream.write(part)

    def add(self, row: Row) -> bool:
        """Write an answer, unless unfamiliar images are left out and this is one. Return whether it is written."""
        place = "mark"
        if self.familiarity is not None and row.typicality is not None:
            place = self.familiarity.place
            row = row._replace(unfamiliar=self.familiarity.take(row.typicality, str(row.path)))
        if row.unfamiliar and place == "drop":
            return False
        self.write(self._waiting if place == "first" and not row.unfamiliar else self._stream, row)
        return True

    @abstractmethod
    def write(self, stream: Stream, row: Row) -> None:
        """Write a line."""


class Table(Rows):
    """Writes CSV."""

    def __init__(
        self, stream: Stream, classes: Sequence[str], decision: Decision, familiarity: Familiarity | None
    ) -> None:
        super().__init__(stream, classes, decision, familiarity)
        further = [*(["set"] if decision.sets else []), *(["typicality", "unfamiliar"] if familiarity else [])]
        _write_row(stream, ["path", "predicted", *(f"{PROBABILITY}{name}" for name in classes), *further])

    def write(self, stream: Stream, row: Row) -> None:
        """Write a row."""
        chosen = self.decision.set_of(row.probabilities, self.classes)
        further = [] if chosen is None else [SEPARATOR.join(chosen)]
        if row.typicality is not None:
            further += [f"{row.typicality:.6g}", "true" if row.unfamiliar else "false"]
        _write_row(stream, [row.path, row.label, *(f"{value:.9g}" for value in row.probabilities), *further])


class Lines(Rows):
    """Writes one JSON object per line."""

    def write(self, stream: Stream, row: Row) -> None:
        """Write an object."""
        chosen = self.decision.set_of(row.probabilities, self.classes)
        content: dict[str, Any] = {"path": str(row.path), "predicted": row.label}
        content["probabilities"] = dict(zip(self.classes, row.probabilities.tolist(), strict=True))
        if chosen is not None:
            content["set"] = chosen
        if row.typicality is not None:
            content |= {"typicality": row.typicality, "unfamiliar": row.unfamiliar}
        _line(stream, content)

    def refuse(self, error: UnreadableImageError) -> None:
        """Write why an image is unreadable."""
        _line(self._stream, {"path": str(error.path), "unreadable": error.reason})


def _write_row(stream: Stream, cells: Sequence[object]) -> None:
    csv.writer(stream, lineterminator="\n").writerow(cells)


def consume(
    answers: Iterable[Answer],
    rows: Rows,
    refuse: Callable[[UnreadableImageError], object],
    *,
    total: int = 0,
    progress: Progress | None = None,
) -> Summary:
    """Pass each answer to ``rows`` or ``refuse`` and count them."""
    asks = [] if rows.decision.error is None else [ASK]
    summary = Summary(dict.fromkeys([*rows.classes, *asks], 0))
    for done, (path, answer, typicality) in enumerate(answers, start=1):
        if isinstance(answer, UnreadableImageError):
            refuse(answer)
            summary.num_unreadable += 1
            if len(summary.unreadable) < SHOWN:
                summary.unreadable.append(answer)
        else:
            row = Row(path, rows.decision.answer(answer, rows.classes), answer, typicality)
            if rows.add(row):
                summary.predicted[row.label] += 1
            else:
                summary.num_dropped += 1
        if progress is not None:
            progress(done, total)
    return summary


def check_any(summary: Summary) -> None:
    """Raise if no image was readable."""
    if not summary.num_predicted and not summary.num_dropped and summary.num_unreadable:
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


Grouping: TypeAlias = Callable[[str], str]
"""Gives the group of an image by its path."""


def grouping(images: Sequence[str], vectors: Sequence[Listing], listed: Related) -> Grouping | None:
    """Return what tells the groups of images, or of tables of vectors, as with ``evaluate``; None if nothing does."""
    group, pattern = listed.group, listed.group_from
    if group is not None and pattern is not None:
        raise InputError("--group and --group-from both say what the groups are. Leave out one of the two.")
    if pattern is not None:
        groups_of([], pattern)  # Raises if the pattern has no group.
        return lambda path: _by_pattern(path, pattern)
    if vectors:
        return _in_order(vectors)
    if group == PARENT:
        return lambda path: PurePosixPath(path).parent.name
    return None if group is None else _by_column(images, group, listed.path_column).__getitem__


def _in_order(tables: Sequence[Listing]) -> Grouping | None:
    """Return what tells the groups of vectors one after the other; None if a table has no groups."""
    if any(table.groups is None for table in tables):
        return None
    groups = (group for table in tables for group in table.groups or ())
    return lambda _: next(groups)


def _by_pattern(path: str, pattern: str) -> str:
    name = groups_of([path], pattern)[0]
    if name is None:
        do = "Change the pattern, or leave these images out with --exclude."
        raise DataError(sentence(f"every image must have a group by the pattern {pattern!r}", f"none for {path}", do))
    return name


def _by_column(images: Sequence[str], column: str, path_column: str | None) -> dict[str, str]:
    """Return the cell of a column for each image of tables."""
    other = next((given for given in images if is_address(given) or not is_table(Path(given))), None)
    if other is not None:
        do = f"Or take groups from the names of files, as in --group-from '{PLACE}_*'."
        must = f"--group must be {PARENT}, or a column of a table of images"
        raise InputError(sentence(must, f"{column!r} for {other}", do))
    found = {}
    for table in map(Path, images):
        for path, name in table_images(table, Listed(allow_outside=True, path_column=path_column), [column]):
            (found[str(path)],) = cells_of(path)
            if not found[str(path)]:
                got = f"an empty cell for {name} in {table}"
                raise DataError(sentence(f"the column {column} must be filled for every image", got))
    return found
