"""The images that can be marked: those of a pool, scored by the model, and those of the run with doubtful labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.data.listed import Listed
from lopsided.data.sources.listing import Inside, read_columns
from lopsided.data.stored import ImagePath, cells_of, is_address
from lopsided.errors import InputError
from lopsided.inference.pool import find_images, is_table
from lopsided.runs.find import Labelled
from lopsided.runs.folder import MAX_TABLE
from lopsided.runs.results import LABELS, read_table
from lopsided.serve.gallery import Gallery
from lopsided.serve.journal import GROUP
from lopsided.serve.model import Served

MOST = 200_000
"""The largest number of images of a pool."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """An image that can be marked. ``label`` is what it is labelled as, and ``suggested`` what it looks like."""

    task: str
    image: str
    path: str
    probabilities: npt.NDArray[np.float64]
    typicality: float | None = None
    name: str = ""
    label: str = ""
    suggested: str = ""
    group: str = ""
    """Such as the patient; empty: not known."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """What the columns of the model say beside the image."""

    @property
    def key(self) -> tuple[str, str]:
        """What a mark of the image is about."""
        return self.task, self.image


class Pool:
    """Images of files, folders and tables, as far as they are scored. Images that the run knows are left out."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        allow_outside: bool = False,
        group: str | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        if any(map(is_address, paths)):
            raise InputError(
                "The page shows the images of a pool, so they must be files of this machine. Copy them here."
            )
        found = partial(find_images, paths, Listed(allow_outside=allow_outside), columns=columns)
        self.total, listed = found() if paths else (0, iter(()))
        if self.total > MOST:
            do = "Choose the likeliest with `lopsided find RUN POOL --class NAME --out found.csv`, and serve found.csv."
            raise InputError(f"A pool of {self.total:,} images is too large to mark, the most is {MOST:,}. {do}")
        self._paths: list[ImagePath] = list(listed)
        self.group, self._columns = group or GROUP, tuple(columns)
        tables = [path for path in map(Path, paths) if is_table(path)]
        self._groups = dict(pair for path in tables for pair in _groups(path, self.group, allow_outside))
        self.candidates: list[Candidate] = []
        self.done = self.known = self.unreadable = self.same = 0

    def score(self, served: Served, labelled: Labelled, gallery: Gallery) -> Iterator[None]:
        """Score the images, step by step. Of images with the same content one is left."""
        seen, known = set[str](), set(labelled.digests)
        for scores in served.stored.stream(self._paths):
            for place, (path, reason, digest) in enumerate(
                zip(scores.pack.paths, scores.reasons, scores.digests, strict=True)
            ):
                self.done += 1
                self.unreadable += bool(reason)
                self.known += digest in known
                self.same += digest in seen
                if reason or digest in known or digest in seen:
                    continue
                seen.add(digest)
                typical = None if scores.typicality is None else float(scores.typicality[place])
                name = gallery.add(digest, path)
                full = str(Path(path).absolute())
                group, columns = self._groups.get(full, ""), dict(zip(self._columns, cells_of(path), strict=True))
                self.candidates.append(
                    Candidate("pool", name, full, scores.probabilities[place], typical, group=group, columns=columns)
                )
            yield

    def to_dict(self) -> dict[str, int]:
        """Return how far the pool is read, for JSON."""
        counts = {"total": self.total, "done": self.done, "candidates": len(self.candidates)}
        return counts | {"known": self.known, "unreadable": self.unreadable, "same": self.same}


def _groups(table: Path, column: str, allow_outside: bool) -> Iterator[tuple[str, str]]:
    """Yield the images of a table with their groups; nothing if it has no such column."""
    columns, inside = read_columns(table, {"path", column}), Inside(table, allow_outside)
    for line, (path, group) in enumerate(zip(columns["path"], columns.get(column, ()), strict=False), start=2):
        yield str((table.parent / inside.check(line, path)).absolute()), group


def doubtful(served: Served, labelled: Labelled, gallery: Gallery) -> list[Candidate]:
    """Return the images of a run in the order of its label check; none if the run has no folds."""
    places = {name: row for row, name in enumerate(labelled.names)}
    found, num = [], len(served.classes)
    for row in read_table(served.folder / LABELS, MAX_TABLE):
        place = places.get(row.get("name", ""))
        try:
            p = float(row["p_label"]), float(row["p_suggested"])
            label, suggested = served.classes.index(row["label"]), served.classes.index(row["suggested"])
        except (KeyError, ValueError):
            continue
        if place is None or labelled.labels[place] != row["label"]:
            continue
        # The table has the probabilities of two classes; the others share the rest.
        probabilities = np.full(num, max(0.0, 1 - sum(p)) / max(num - 2, 1))
        probabilities[[label, suggested]] = p
        path = labelled.images.paths[place]
        name = gallery.add(labelled.digests[place], path)
        found.append(
            Candidate("labels", name, str(path), probabilities, None, row["name"], row["label"], row["suggested"])
        )
    return found


def _certainty(candidates: Sequence[Candidate], served: Served) -> Sequence[float]:
    """Return the distances between the scores of the two best classes, by the rule of the model."""
    use = served.use_of(None, None)
    scores = np.sort(use.decision.scores(np.array([each.probabilities for each in candidates])), axis=1)
    return list(scores[:, -1] - scores[:, -2])


@dataclass(frozen=True)
class Order:
    """A way to choose the most useful images: its words, the images that it is about, and their keys, the lowest first.

    ``keys`` is called with the images, the class that is looked for, and the model.
    """

    words: str
    task: str
    keys: Callable[[Sequence[Candidate], int, Served], Sequence[float]]

    def rank(self, candidates: Sequence[Candidate], label: int, served: Served) -> npt.NDArray[np.int64]:
        """Return the places of the images, the most useful first."""
        return np.argsort(self.keys(candidates, label, served), kind="stable")


ORDERS: Mapping[str, Order] = {
    "likeliest": Order(
        "the likeliest of the class", "pool", lambda images, label, _: [-each.probabilities[label] for each in images]
    ),
    "unsure": Order("the least certain", "pool", lambda images, _, served: _certainty(images, served)),
    "unusual": Order(
        "the most unusual",
        "pool",
        lambda images, *_: [1.0 if each.typicality is None else each.typicality for each in images],
    ),
    "doubtful": Order("doubtful labels of the run", "labels", lambda images, *_: [0.0] * len(images)),
}
"""The orders of images by name. The page offers those for which there are images."""


def shown(candidate: Candidate, served: Served) -> dict[str, Any]:
    """Return what the page shows of an image. Its path stays here."""
    use = served.use_of(None, None)
    content: dict[str, Any] = {
        "id": candidate.image,
        "task": candidate.task,
        "probabilities": dict(zip(served.classes, candidate.probabilities.tolist(), strict=True)),
    }
    if candidate.task == "labels":
        return content | {"name": candidate.name, "label": candidate.label, "suggested": candidate.suggested}
    name = Path(candidate.path).name
    content |= {"name": name, "predicted": use.decision.answer(candidate.probabilities, served.classes)}
    return content if candidate.typicality is None else content | {"typicality": candidate.typicality}
