"""The thread that owns a model: it scores the images of concurrent requests in batches, and does long work in between.

Requests put decoded images into a queue. The thread takes all that wait, up to a batch, so that the batches grow with
the number of concurrent requests, and a single request waits for nobody.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lopsided.inference.scorer import Read, Scorer
from lopsided.serve.limits import RefusedError

V = TypeVar("V")
MOST = 8
"""Images of a batch. While one batch is scored, the images of the next are sent and decoded."""


class Judged(NamedTuple):
    """What the model says about one image. ``reason`` tells why the image is unreadable; "" if it is not."""

    reason: str
    probabilities: npt.NDArray[np.float64]
    typicality: float | None
    features: npt.NDArray[np.float32] | None


@dataclass(frozen=True, eq=False)
class _Image:
    scorer: Scorer
    read: Read
    future: Future[Judged] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class _Job:
    function: Callable[[], Any]
    future: Future[Any]


class Worker:
    """One thread that scores images and does everything else for which a model is needed."""

    def __init__(self, most_waiting: int, batched: Callable[[int], None] = lambda images: None) -> None:
        self._most, self._batched = most_waiting, batched
        self._waiting: deque[_Image | _Job] = deque()
        self._long: deque[Iterator[object]] = deque()
        self._changed, self._ended = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="lopsided-worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of images and jobs that wait."""
        return len(self._waiting)

    def score(self, scorer: Scorer, read: Read) -> Future[Judged]:
        """Score an image that ``scorer`` has read."""
        image = _Image(scorer, read)
        self._put(image)
        return image.future

    def do(self, function: Callable[[], V]) -> Future[V]:
        """Call a function in the thread of the model."""
        future: Future[V] = Future()
        self._put(_Job(function, future))
        return future

    def begin(self, steps: Iterator[object]) -> None:
        """Do long work step by step, whenever nobody waits."""
        with self._changed:
            self._long.append(steps)
            self._changed.notify()

    def drop(self) -> None:
        """Give up all long work."""
        with self._changed:
            self._long.clear()

    def end(self) -> None:
        """Finish what waits, drop long work, and end the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _put(self, asked: _Image | _Job) -> None:
        with self._changed:
            if self._ended or len(self._waiting) >= self._most:
                raise RefusedError(503, "busy", "Too many images wait. Try again in a few seconds.")
            self._waiting.append(asked)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._long or self._ended):
                    self._changed.wait()
                asked = self._take()
                steps = self._long[0] if not asked and self._long and not self._ended else None
                if not asked and steps is None:
                    return
            if asked:
                _answer(asked, self._batched)
            elif steps is not None:
                self._step(steps)

    def _take(self) -> list[_Image | _Job]:
        """Take a job, or images of one scorer that wait next to each other."""
        taken: list[_Image | _Job] = []
        while self._waiting and len(taken) < MOST:
            first, asked = taken[0] if taken else None, self._waiting[0]
            if first is not None and not (
                isinstance(first, _Image) and isinstance(asked, _Image) and asked.scorer is first.scorer
            ):
                break
            taken.append(self._waiting.popleft())
            if isinstance(asked, _Job):
                break
        return taken

    def _step(self, steps: Iterator[object]) -> None:
        try:
            next(steps)
            return
        except StopIteration:
            pass
        except Exception:  # Long work must not end the thread that answers requests.
            traceback.print_exc()
        with self._changed:
            if steps in self._long:
                self._long.remove(steps)


def _answer(asked: list[_Image | _Job], batched: Callable[[int], None]) -> None:
    """Do a job, or score a batch. An error goes to all who wait for it."""
    asked = [each for each in asked if each.future.set_running_or_notify_cancel()]
    if not asked:
        return
    try:
        if isinstance(asked[0], _Job):
            asked[0].future.set_result(asked[0].function())
            return
        images = [each for each in asked if isinstance(each, _Image)]
        for image, judged in zip(images, _scored(images), strict=True):
            image.future.set_result(judged)
        batched(len(images))
    except Exception as error:
        for each in asked:
            if not each.future.done():
                each.future.set_exception(error)


def _scored(images: list[_Image]) -> list[Judged]:
    scores = images[0].scorer.score_read([image.read for image in images])
    return [
        Judged(
            reason,
            scores.probabilities[row],
            None if scores.typicality is None else float(scores.typicality[row]),
            None if scores.features is None else scores.features[row],
        )
        for row, reason in enumerate(scores.reasons)
    ]
