"""Marking by several people at once: who looks at which image, and what becomes of a mark.

An image that is given to a session is lent to it for some minutes and given to nobody else meanwhile. A marked image is
never given again, unless the mark is undone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.errors import RunError
from lopsided.serve.journal import Journal, Mark
from lopsided.serve.limits import RefusedError
from lopsided.serve.model import Served
from lopsided.serve.pool import ORDERS, Candidate, Pool, shown
from lopsided.serve.requests import MarkJson, QueueJson, SessionJson

LENT_SECONDS = 600.0
"""How long an image is lent. Every request of the session begins the time anew."""


class Marking:
    """The queue of images of one model and its journal."""

    def __init__(
        self, served: Served, pool: Pool, journal: Journal, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.served, self.pool, self.journal, self._clock = served, pool, journal, clock
        self.doubtful: list[Candidate] = []
        self._lock = RLock()
        self._lent: dict[tuple[str, str], tuple[str, float]] = {}
        self._ranked: dict[tuple[str, str], tuple[int, npt.NDArray[np.int64]]] = {}

    def queue(self, asked: QueueJson) -> dict[str, Any]:
        """Lend a session the next images of an order."""
        if asked.order not in ORDERS:
            raise RefusedError(422, "invalid", f"order must be one of {', '.join(ORDERS)}.")
        if asked.label not in self.served.classes:
            raise RefusedError(422, "invalid", f"label must be one of {', '.join(self.served.classes)}.")
        with self._lock:
            now, taken = self._clock(), []
            candidates = self._candidates(ORDERS[asked.order].task)
            for row in self._order(asked.order, asked.label, candidates):
                candidate = candidates[row]
                holder, until = self._lent.get(candidate.key, ("", 0.0))
                if candidate.key in self.journal or (holder != asked.session and until > now):
                    continue
                taken.append(candidate)
                if len(taken) == asked.number:
                    break
            for candidate in taken:
                self._lent[candidate.key] = asked.session, now + LENT_SECONDS
            return {"images": [shown(candidate, self.served) for candidate in taken], **self.status()}

    def mark(self, asked: MarkJson) -> dict[str, Any]:
        """Write a mark. Raise if the image is not there, is somebody else's, or is marked already."""
        with self._lock:
            candidate = self._find(asked.task, asked.id)
            earlier = self.journal.get(candidate.key)
            label = self._label(candidate, asked)
            if earlier is not None:
                if (earlier.session, earlier.mark, earlier.label) == (asked.session, asked.mark, label):
                    return {"number": earlier.number, **self.status()}  # The same request came twice.
                raise RefusedError(409, "marked", f"{earlier.who} has marked this image meanwhile.")
            holder, until = self._lent.get(candidate.key, ("", 0.0))
            if holder not in ("", asked.session) and until > self._clock():
                raise RefusedError(409, "lent", "Somebody else is looking at this image.")
            question = candidate.label or asked.asked
            mark = Mark(
                *(candidate.task, candidate.image, candidate.path, asked.mark, label, question),
                *(asked.who, asked.session, candidate.name, candidate.group),
                columns=json.dumps(candidate.columns) if candidate.columns else "",
            )
            written = _saved(lambda: self.journal.add(mark))
            self._lent.pop(candidate.key, None)
            return {"number": written.number, **self.status()}

    def undo(self, asked: SessionJson) -> dict[str, Any]:
        """Undo the last mark of a session, and lend it the image again."""
        with self._lock:
            undone = _saved(lambda: self.journal.undo(asked.session, asked.who))
            if undone is None:
                raise RefusedError(409, "nothing", "There is nothing to undo.")
            self._lent[undone.key] = asked.session, self._clock() + LENT_SECONDS
            found = next((each for each in self._candidates(undone.task) if each.key == undone.key), None)
            return {"image": None if found is None else shown(found, self.served), **self.status()}

    def status(self) -> dict[str, Any]:
        """Return how far the pool and the marks are."""
        tasks = {task: sum(each.key not in self.journal for each in self._candidates(task)) for task in _TASKS}
        return {"pool": self.pool.to_dict(), "left": tasks, "counts": self.journal.counts()}

    def _label(self, candidate: Candidate, asked: MarkJson) -> str:
        """Return the class of an image after a mark; "" if the mark does not tell it."""
        classes, question = self.served.classes, candidate.label or asked.asked
        if question not in classes or (asked.label and asked.label not in classes):
            raise RefusedError(422, "invalid", f"Classes must be among {', '.join(classes)}.")
        if asked.mark == "skip":
            return ""
        if asked.mark == "yes":
            return question
        if asked.label == question:
            raise RefusedError(422, "invalid", "An image that is not of a class cannot have its label.")
        others = [name for name in classes if name != question]
        return asked.label or candidate.suggested or (others[0] if len(others) == 1 else "")

    def _find(self, task: str, name: str) -> Candidate:
        for candidate in self._candidates(task):
            if candidate.image == name:
                return candidate
        raise RefusedError(404, "not_found", "There is no such image.")

    def _candidates(self, task: str) -> list[Candidate]:
        return self.doubtful if task == "labels" else self.pool.candidates

    def _order(self, order: str, label: str, candidates: list[Candidate]) -> list[int]:
        number = len(candidates)  # The pool may grow meanwhile.
        kept = self._ranked.get((order, label))
        if kept is None or kept[0] != number:
            ranks = np.empty(0, dtype=np.int64)
            if number:
                ranks = ORDERS[order].rank(candidates[:number], self.served.classes.index(label), self.served)
            kept = self._ranked[order, label] = number, ranks
        found: list[int] = kept[1].tolist()
        return found


_TASKS = ("pool", "labels")


def _saved(write: Callable[[], Any]) -> Any:
    try:
        return write()
    except RunError as error:
        raise RefusedError(507, "not_saved", f"The mark is not saved: {error}") from None
