"""Predict a stream of images of any length, in constant memory, past those that cannot be read."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lopsided import files
from lopsided.data.decoding import FolderId, Pixels, UnreadableImageError, decode_image, walk_images
from lopsided.data.images import ArrayImages, Progress, ordered_map
from lopsided.errors import DataError, sentence
from lopsided.evaluation.decision import decide

if TYPE_CHECKING:
    from lopsided.models.model import Model, ModelCard

Answer: TypeAlias = tuple[Path, npt.NDArray[np.floating[Any]] | UnreadableImageError]
"""A path with the probabilities of its classes, or with the reason why it cannot be read."""

PROBABILITY = "p:"
"""What the column of a class's probability starts with, so that a class called "name" does not hide another column."""


class Stream(Protocol):
    """What text can be written to."""

    def write(self, text: str, /) -> int:
        """Write a text."""


SHOWN = 20
"""Unreadable images that are named one by one; the file beside the predictions has all of them."""


@dataclass
class Summary:
    """What became of a stream of images."""

    predicted: dict[str, int]
    num_unreadable: int = 0
    unreadable: list[UnreadableImageError] = field(default_factory=list)

    @property
    def num_predicted(self) -> int:
        """The number of images that were predicted."""
        return sum(self.predicted.values())

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        shown = [{"path": str(error.path), "reason": error.reason} for error in self.unreadable]
        return {
            "images": self.num_predicted,
            "predicted": self.predicted,
            "unreadable": {"number": self.num_unreadable, "first": shown},
        }


def find_images(paths: Sequence[str | os.PathLike[str]]) -> tuple[int, Iterator[Path]]:
    """Count the images that files and folders stand for, and return them one by one without holding them all.

    A file that is named itself is taken whatever its suffix. What lies below a folder that is named too is taken once,
    and so is each folder to which several paths lead.
    """
    given = _distinct(paths)
    number = sum(1 for _ in _images(given))
    for path in given:
        if path.is_dir() and next(walk_images(path), None) is None:
            raise DataError(sentence("a folder to predict on must hold images", f"none below {path}"))
    return number, _images(given)


def _images(paths: Iterable[Path]) -> Iterator[Path]:
    seen: set[FolderId] = set()
    for path in paths:
        yield from walk_images(path, seen=seen) if path.is_dir() else (path,)


def predict_images(
    model: Model,
    card: ModelCard,
    images: Iterable[Path],
    *,
    batch_size: int = 64,
    workers: int = 0,
) -> Iterator[Answer]:
    """Yield an answer for each image, in order; at most a few hundred decoded images are held at any time."""
    from lopsided.inference.probabilities import predict

    def decode(path: Path) -> tuple[Path, Pixels | UnreadableImageError]:
        try:
            pixels = decode_image(path, card.image_size, card.channels)
        except UnreadableImageError as error:
            return path, error
        if pixels.shape != card.shape:  # Only where images are not resized.
            sizes = [f"{shape[2]} x {shape[1]}" for shape in (pixels.shape, card.shape)]
            return path, UnreadableImageError(path, f"{sizes[0]} pixels, where the model takes {sizes[1]}")
        return path, pixels

    decoded = ordered_map(decode, images, workers or (os.cpu_count() or 1))
    while batch := list(islice(decoded, batch_size)):
        readable = [pixels for _, pixels in batch if not isinstance(pixels, UnreadableImageError)]
        p = iter(predict(model, card, ArrayImages(np.stack(readable)), batch_size=batch_size) if readable else ())
        for path, pixels in batch:
            yield path, pixels if isinstance(pixels, UnreadableImageError) else next(p)


def unreadable_path(out: Path) -> Path:
    """The file beside the predictions ``out`` that lists the images which could not be read."""
    return out.with_name(f"{out.stem}.unreadable.csv")


def write_predictions(
    answers: Iterable[Answer],
    classes: Sequence[str],
    out: str | os.PathLike[str],
    *,
    total: int = 0,
    progress: Progress | None = None,
) -> Summary:
    """Write answers to a CSV file, whole or not at all; the unreadable ones go to ``*.unreadable.csv`` beside it.

    The columns are path, predicted, and ``p:`` with each class's name. Nothing is written when no image is readable.
    """
    target = Path(out)
    beside = unreadable_path(target)
    summary = Summary({})
    # The answers last: with new ones, the list beside them is never an old one.
    with (
        files.replacing(target) as temporary,
        files.replacing(beside, wanted=lambda: summary.num_unreadable > 0) as other,
    ):
        with files.disk_errors(target), _open(temporary) as table, _open(other) as broken:
            rows, reasons = csv.writer(table, lineterminator="\n"), csv.writer(broken, lineterminator="\n")
            rows.writerow(["path", "predicted", *(f"{PROBABILITY}{name}" for name in classes)])
            reasons.writerow(["path", "reason"])
            summary = consume(
                answers,
                classes,
                lambda path, label, p: rows.writerow([path, label, *(f"{value:.9g}" for value in p)]),
                lambda error: reasons.writerow([error.path, error.reason]),
                total=total,
                progress=progress,
            )
        check_any(summary)
    return summary


def stream_predictions(
    answers: Iterable[Answer], classes: Sequence[str], stream: Stream, *, as_json: bool = False
) -> Summary:
    """Write answers to an open text stream as CSV, or as one JSON object a line."""
    if as_json:
        return consume(
            answers,
            classes,
            lambda path, label, p: _line(
                stream,
                {"path": str(path), "predicted": label, "probabilities": dict(zip(classes, p.tolist(), strict=True))},
            ),
            lambda error: _line(stream, {"path": str(error.path), "unreadable": error.reason}),
        )
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(["path", "predicted", *(f"{PROBABILITY}{name}" for name in classes)])
    return consume(
        answers,
        classes,
        lambda path, label, p: rows.writerow([path, label, *(f"{value:.9g}" for value in p)]),
        lambda error: None,
    )


def consume(
    answers: Iterable[Answer],
    classes: Sequence[str],
    write: Callable[[Path, str, npt.NDArray[np.floating[Any]]], object],
    refuse: Callable[[UnreadableImageError], object],
    *,
    total: int = 0,
    progress: Progress | None = None,
) -> Summary:
    """Hand each answer to ``write`` or ``refuse`` and count."""
    summary = Summary(dict.fromkeys(classes, 0))
    for done, (path, answer) in enumerate(answers, start=1):
        if isinstance(answer, UnreadableImageError):
            refuse(answer)
            summary.num_unreadable += 1
            if len(summary.unreadable) < SHOWN:
                summary.unreadable.append(answer)
        else:
            label = classes[int(decide(answer))]
            write(path, label, answer)
            summary.predicted[label] += 1
        if progress is not None:
            progress(done, total)
    return summary


def check_any(summary: Summary) -> None:
    """Raise when not one image was readable."""
    if not summary.num_predicted and summary.num_unreadable:
        first = summary.unreadable[0]
        got = f"none of {summary.num_unreadable:,}, the first {first.path} ({first.reason})"
        raise DataError(sentence("at least one image must be readable", got))


def _distinct(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    kept: list[Path] = []
    folders = {os.path.abspath(path) for path in paths if os.path.isdir(path)}
    seen: set[str] = set()
    for given in paths:
        path, absolute = Path(given), os.path.abspath(given)
        if not path.exists():
            raise DataError(sentence("each path must be an image or a folder", f"{path}, which does not exist"))
        if not path.is_file() and not path.is_dir():  # To open a pipe would be to wait for whoever writes into it.
            raise DataError(sentence("each path must be an image or a folder", f"{path}, which is neither"))
        above = {str(parent) for parent in Path(absolute).parents}
        if absolute not in seen and not (above & folders):
            seen.add(absolute)
            kept.append(path)
    return kept


def _open(path: Path) -> IO[str]:
    # A name that is not UTF-8 is written back byte by byte.
    return path.open("w", encoding="utf-8", errors="surrogateescape", newline="")


def _line(stream: Stream, content: object) -> None:
    stream.write(json.dumps(content, allow_nan=False) + "\n")
