"""Find the images of a pool that are most likely of a class, in constant memory.

A search reads a pool once, pack by pack, and holds only the images that are among the first so far. After each pack it
adds a line to a journal, next to the table that it writes. So a search that was killed continues and ends with the same
table; if an image was replaced meanwhile, it begins again. The first line of a journal holds a hash of everything that
the search depends on; each further line belongs to one pack, in the order of the packs. Only the images that came among
the first are listed, so the journal of a million images has some thousand rows.
"""

from __future__ import annotations

import csv
import hashlib
import heapq
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from lopsided import files
from lopsided.data.decoding import hash_file
from lopsided.data.images import Progress
from lopsided.errors import DataError, InputError, sentence
from lopsided.evaluation.decision import PROBABILITY
from lopsided.inference.neighbours import Features, spread
from lopsided.inference.pool import Mapper, Pack, Scores, hash_digests, packs
from lopsided.inference.predict import SHOWN, Familiarity, Use, unreadable_path

FORMAT = 3


class Row(NamedTuple):
    """An image that came among the first. ``position`` is its place in the pool."""

    position: int
    path: str
    probability: float
    nearness: float | None
    digest: str
    typicality: float | None = None
    unfamiliar: bool | None = None


@dataclass(frozen=True)
class Entry:
    """What one pack added: its images, how many of them are known or unreadable, and those among the first."""

    pack: int
    key: str
    stamp: str
    content: str
    images: int
    known: int
    unreadable: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    unfamiliar: int = 0
    """Images that are left out because they are unlike the training images."""

    def is_of(self, pack: Pack) -> bool:
        """Return whether the images of a pack are those that were scored. They are read only if a file looks changed.

        Times of files change without their content, too, such as by a copy of the pool on another machine.
        """
        if self.key != pack.key:
            return False
        is_same = self.stamp != "" and self.stamp == pack.stamp
        return is_same or self.content == hash_digests(hash_file(path).digest for path in pack.paths)


class Journal:
    """The journal next to the table ``out``, for the search with this ``key``."""

    def __init__(self, out: Path, key: str) -> None:
        self.path, self.key = out.with_name(f"{out.name}.journal"), key

    def open(self) -> bool:
        """Return whether there is a journal of this search. Otherwise start an empty one."""
        head = {"format": FORMAT, "search": self.key}
        if next(self._lines(), None) == head:
            return True
        files.atomic_write(self.path, json.dumps(head) + "\n")
        return False

    def restart(self) -> None:
        """Forget all packs."""
        self.remove()
        self.open()

    def add(self, entry: Entry) -> None:
        """Append one pack."""
        files.append_line(self.path, json.dumps(vars(entry), allow_nan=False))

    def entries(self) -> Iterator[Entry]:
        """Yield the finished packs in order. Lines that a kill left unfinished are skipped."""
        number = 0
        for line in self._lines():
            entry = _entry(line)
            if entry is not None and entry.pack == number:
                number += 1
                yield entry

    def remove(self) -> None:
        """Remove the journal."""
        with files.disk_errors(self.path):
            self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[Any]:
        if not os.path.lexists(self.path):
            return
        with files.disk_errors(self.path):
            yield from files.json_lines(self.path)


def _entry(content: Any) -> Entry | None:
    """Return the entry of a line, or None if it is none. A journal is untrusted like any file."""
    try:
        return _ENTRIES.validate_python(content)
    except ValidationError:
        return None


_ENTRIES = TypeAdapter(Entry)
By = Literal["probability", "neighbours", "both"]
MOST = 100_000
"""The largest number of images that a search lists."""
_FURTHER, _MOST_FURTHER = 3, 3_000
"""Candidates beyond the listed ones, if the order of the whole pool is not the order of one score: this many times the
listed ones, and at most this number."""
_RANK = 60
"""The constant of reciprocal rank fusion (Cormack, Clarke and Buettcher, 2009)."""


@dataclass(frozen=True)
class Question:
    """What to look for: the index of the class, the order, the number of images, and the weight of diversity."""

    label: int
    by: By = "probability"
    top: int = 500
    diverse: float = 0.0

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise InputError(sentence(f"--by must be one of {', '.join(get_args(By))}", self.by))
        if not 1 <= self.top <= MOST:
            raise InputError(sentence(f"--top must be from 1 to {MOST:,}", f"{self.top:,}"))
        if not 0 <= self.diverse < 1:
            raise InputError(sentence("--diverse must be a weight in [0, 1)", self.diverse, "0 is the plain order."))

    @property
    def candidates(self) -> int:
        """The number of images that are held during the search, for each score."""
        if self.by != "both" and self.diverse == 0:
            return self.top
        return self.top + min(_FURTHER * self.top, _MOST_FURTHER)

    def scores(self, row: Row) -> tuple[float, ...]:
        """Return the scores by which images are ordered: one, or two of which the ranks are combined."""
        near = row.nearness or 0.0
        return {"probability": (row.probability,), "neighbours": (near,), "both": (row.probability, near)}[self.by]


@dataclass(eq=False)
class Result:
    """The outcome of a search: the images, the most likely first, and how many images of the pool there were."""

    rows: list[Row]
    images: int
    known: int
    unreadable: int
    first_unreadable: list[tuple[str, str]]
    continued: int
    """Images whose scores came from the journal of an earlier call."""
    journal: Journal
    unfamiliar: int = 0
    """Images that are left out because they are unlike the training images."""


class Shortlist:
    """The images with the highest scores so far. Of equal scores, the image that comes first in the pool is kept.

    Of byte-identical images, only the first is kept. They have equal scores, so one that was dropped before can never
    come back, and it is enough to compare with the images of the list.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._heap: list[tuple[float, int, Row]] = []
        self._digests: set[str] = set()

    def offer(self, score: float, row: Row) -> bool:
        """Add an image if it is among the first, and return whether it is."""
        if row.digest in self._digests:
            return False
        item = (score, -row.position, row)
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, item)
        elif item[:2] > self._heap[0][:2]:
            self._digests.remove(heapq.heapreplace(self._heap, item)[2].digest)
        else:
            return False
        self._digests.add(row.digest)
        return True

    @property
    def least(self) -> float:
        """The score that an image must exceed: of equal scores, the earlier image is kept."""
        return self._heap[0][0] if len(self._heap) == self._most else -np.inf

    def rows(self) -> list[Row]:
        """Return the images, the highest score first."""
        return [row for _, _, row in sorted(self._heap, key=lambda item: item[:2], reverse=True)]


@dataclass(eq=False)
class Search:
    """A search of a pool. Images with digests in ``known`` are left out. ``use`` moves probabilities.

    ``key`` is a hash of everything else that scores depend on, such as the model: a journal with another key is not
    continued. ``familiarity`` says what becomes of unfamiliar images.
    """

    question: Question
    known: Collection[str] = ()
    use: Use | None = None
    key: str = ""
    familiarity: Familiarity | None = None
    _lists: tuple[Shortlist, ...] = field(init=False)

    def __post_init__(self) -> None:
        number = 2 if self.question.by == "both" else 1
        self._lists = tuple(Shortlist(self.question.candidates) for _ in range(number))

    def run(
        self,
        paths: Callable[[], Iterator[Path]],
        total: int,
        out: Path,
        mapper: Mapper,
        *,
        features: Callable[[Sequence[Path]], Features] | None = None,
        progress: Progress | None = None,
    ) -> Result:
        """Search a pool of ``total`` images, which ``paths`` lists whenever it is called.

        ``mapper`` scores packs. ``features`` computes the features of a few thousand images, which diversity needs. The
        journal stays until the caller removes it.
        """
        journal = Journal(out, self._hash(total))
        result = Result([], 0, 0, 0, [], 0, journal)
        rest = packs(paths())
        if journal.open():
            if all(entry.is_of(pack) for entry, pack in zip(journal.entries(), rest, strict=False)):
                for entry in journal.entries():
                    self._take(entry, result)
                result.continued = result.images
            else:  # The pool has changed.
                journal.restart()
                rest = packs(paths())
        for scores in mapper(rest):
            entry = self._judge(scores)
            journal.add(entry)
            self._take(entry, result, offered=True)
            if progress is not None:
                progress(result.images, total)
        if result.images == result.unreadable:
            path, reason = (result.first_unreadable or [("", "no image")])[0]
            journal.remove()
            raise DataError(f"No image is readable: {result.unreadable:,} failed, the first {path} ({reason}).")
        if result.images == result.unreadable + result.known:
            journal.remove()
            raise DataError(f"Each of the {result.known:,} images is labelled already: there is nothing to find.")
        result.rows = self._ordered(features)
        return result

    def _hash(self, total: int) -> str:
        judged = None if self.familiarity is None else [self.familiarity.level, self.familiarity.place]
        digest = hashlib.sha256(json.dumps([self.key, self.question.__dict__, judged, total]).encode())
        digest.update(repr(None if self.use is None else self.use.shares).encode())
        for each in sorted(self.known):
            digest.update(each.encode())
        return digest.hexdigest()

    def _judge(self, scores: Scores) -> Entry:
        """Return what a pack adds, after offering its images to the lists."""
        pack = scores.pack
        p, near = scores.probabilities, scores.nearness
        if self.use is not None:
            readable = np.array([not reason for reason in scores.reasons])
            p[readable] = self.use.probabilities(p[readable])
        rows = []
        unreadable = [(str(path), why) for path, why in zip(pack.paths, scores.reasons, strict=True) if why]
        known = sum(digest in self.known for digest in scores.digests) if self.known else 0
        typical, unfamiliar = scores.typicality, np.zeros(len(pack.paths), dtype=np.bool_)
        if typical is not None and self.familiarity is not None:
            unfamiliar = self.familiarity.bank.is_unfamiliar(typical, self.familiarity.asked)
        dropped = unfamiliar & (self.familiarity is not None and self.familiarity.place == "drop")
        for place in self._promising(p[:, self.question.label], near):
            path = pack.paths[place]
            if scores.reasons[place] or scores.digests[place] in self.known or dropped[place]:
                continue
            row = Row(
                (pack.number << 32) + int(place),  # In the order of the pool, whatever the size of a pack is.
                str(path),
                float(p[place, self.question.label]),
                None if near is None else float(near[place]),
                scores.digests[place],
                None if typical is None else float(typical[place]),
                None if typical is None else bool(unfamiliar[place]),
            )
            if self._offer(row):
                rows.append(row)
        left = sum(digest not in self.known for digest, out in zip(scores.digests, dropped, strict=True) if out)
        content, about = hash_digests(scores.digests), (tuple(unreadable), tuple(rows), left)
        return Entry(pack.number, pack.key, pack.stamp, content, len(pack.paths), known, *about)

    def _promising(self, p: npt.NDArray[np.float64], near: npt.NDArray[np.float64] | None) -> list[int]:
        """Return the images of a pack that may come among the first: few, once the lists are full."""
        near = np.zeros(len(p)) if near is None else near
        columns = {"probability": (p,), "neighbours": (near,), "both": (p, near)}[self.question.by]
        above = [column > each.least for each, column in zip(self._lists, columns, strict=True)]
        return np.flatnonzero(np.logical_or.reduce(above)).tolist()

    def _offer(self, row: Row) -> bool:
        scores = self.question.scores(row)
        taken = [each.offer(score, row) for each, score in zip(self._lists, scores, strict=True)]
        return any(taken)

    def _take(self, entry: Entry, result: Result, *, offered: bool = False) -> None:
        if not offered:
            for row in entry.rows:
                self._offer(row)
        result.images += entry.images
        result.known += entry.known
        result.unfamiliar += entry.unfamiliar
        result.unreadable += len(entry.unreadable)
        result.first_unreadable += entry.unreadable[: SHOWN - len(result.first_unreadable)]

    def _ordered(self, features: Callable[[Sequence[Path]], Features] | None) -> list[Row]:
        """Return the listed images in their final order."""
        question, rows = self.question, fused([each.rows() for each in self._lists], self.question.candidates)
        if question.diverse == 0 or len(rows) < 2 or features is None:
            return rows[: question.top]
        found = np.nan_to_num(features([Path(row.path) for row in rows]))
        relevance = 1 - np.arange(len(rows)) / len(rows)
        return [rows[place] for place in spread(found, relevance, question.top, question.diverse)]


def fused(lists: Sequence[Sequence[Row]], most: int) -> list[Row]:
    """Return the rows of one list, or of several lists ordered by the sum of 1 / (60 + rank).

    A row that is missing in a list counts as if it followed the ``most`` rows of that list.
    """
    if len(lists) == 1:
        return list(lists[0])
    ranks = [{row.position: rank for rank, row in enumerate(each, start=1)} for each in lists]
    rows = {row.position: row for each in lists for row in each}

    def score(position: int) -> float:
        return sum(1 / (_RANK + found.get(position, most + 1)) for found in ranks)

    return [rows[position] for position in sorted(rows, key=lambda position: (-score(position), position))]


def write_found(result: Result, label: str, out: Path) -> None:
    """Write the table of a search, atomically, and the list of unreadable images next to it.

    The columns are rank, path, ``p:`` with the name of the class, nearness if it was computed, and typicality and
    unfamiliar if the model recognises unfamiliar images.
    """
    near = any(row.nearness is not None for row in result.rows)
    judged = any(row.typicality is not None for row in result.rows)
    columns = [*(["nearness"] if near else []), *(["typicality", "unfamiliar"] if judged else [])]
    table: list[Sequence[object]] = [["rank", "path", f"{PROBABILITY}{label}", *columns]]
    for rank, row in enumerate(result.rows, start=1):
        more = [f"{row.nearness:.6g}"] if near else []
        seen = [f"{row.typicality:.6g}", "true" if row.unfamiliar else "false"] if row.typicality is not None else []
        table.append([rank, row.path, f"{row.probability:.9g}", *more, *seen])
    with (
        files.replacing(unreadable_path(out), wanted=lambda: result.unreadable > 0) as temporary,
        temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        reasons = csv.writer(file, lineterminator="\n")
        reasons.writerow(["path", "reason"])
        reasons.writerows(image for entry in result.journal.entries() for image in entry.unreadable)
    files.atomic_write(out, files.csv_text(table).encode(errors="surrogateescape"))


def page_path(out: Path) -> Path:
    """Return the path of the page, next to the table ``out``."""
    return out.with_suffix(".html")
