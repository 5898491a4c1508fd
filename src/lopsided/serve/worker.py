"""The threads that own a model: they score the images of concurrent requests in batches, and do long work in between.

Requests put decoded images into a queue. A thread takes all that wait, up to a batch, so that the batches grow with the
number of concurrent requests, and a single request waits for nobody. onnxruntime lets a second thread compute features
at the same time: what the first one does before and after, on one core, leaves none idle. Everything else that needs
the model is done by the first thread, and by one at a time.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lopsided.data.decoding import Pixels
from lopsided.inference.pool import Scores
from lopsided.inference.scorer import Read, Scorer
from lopsided.serve.limits import RefusedError

V = TypeVar("V")


class Judged(NamedTuple):
    """What the model says about one image. ``reason`` tells why the image is unreadable; "" if it is not."""

    reason: str
    probabilities: npt.NDArray[np.float64]
    typicality: float | None
    features: npt.NDArray[np.float32] | None
    pixels: Pixels | None


class WaitingImage(NamedTuple):
    """An image that ``scorer`` has read, and the future of the one who waits for it."""

    scorer: Scorer
    read: Read
    future: asyncio.Future[Judged]


class _Job(NamedTuple):
    function: Callable[[], Any]
    future: Future[Any]


class Worker:
    """Two threads that score images. The first one also does everything else for which a model is needed."""

    def __init__(self, most_waiting: int, batched: Callable[[int], None] = lambda images: None) -> None:
        self._most, self._batched = most_waiting, batched
        self._images: deque[WaitingImage] = deque()
        self._jobs: deque[_Job] = deque()
        self._long: deque[Iterator[object]] = deque()
        self._changed, self._ended, self._model = threading.Condition(), False, threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(is_first,), name="lopsided-worker", daemon=True)
            for is_first in (True, False)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of images and jobs that wait."""
        return len(self._images) + len(self._jobs)

    def score(self, image: WaitingImage) -> None:
        """Score an image."""
        with self._changed:
            self._check_open()
            self._images.append(image)
            self._changed.notify_all()

    def do(self, function: Callable[[], V]) -> Future[V]:
        """Call a function while nobody else uses the model."""
        future: Future[V] = Future()
        with self._changed:
            self._check_open()
            self._jobs.append(_Job(function, future))
            self._changed.notify_all()
        return future

    def begin(self, steps: Iterator[object]) -> None:
        """Do long work step by step, whenever nobody waits."""
        with self._changed:
            self._long.append(steps)
            self._changed.notify_all()

    def drop(self) -> None:
        """Give up all long work."""
        with self._changed:
            self._long.clear()

    def end(self) -> None:
        """Finish what waits, drop long work, and end the threads."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _check_open(self) -> None:
        if self._ended or self.waiting >= self._most:
            raise RefusedError(503, "busy", "Too many images wait. Try again in a few seconds.")

    def _run(self, is_first: bool) -> None:
        while True:
            with self._changed:
                while not (self._ended or self._may_take(is_first) or (is_first and (self._jobs or self._long))):
                    self._changed.wait()
                job = self._jobs.popleft() if is_first and self._jobs else None
                images = self._take() if job is None and self._may_take(is_first) else []
                steps = self._long[0] if is_first and self._long and not self._ended else None
                if job is None and not images and steps is None:
                    return
            if job is not None:
                self._do(job)
            elif images:
                self._answer(images)
            elif steps is not None:
                self._step(steps)

    def _may_take(self, is_first: bool) -> bool:
        return bool(self._images) and (is_first or self._images[0].scorer.engine.is_fast)

    def _take(self) -> list[WaitingImage]:
        """Take images of one scorer that wait next to each other."""
        taken = [self._images.popleft()]
        scorer = taken[0].scorer
        while self._images and len(taken) < scorer.batch_size and self._images[0].scorer is scorer:
            taken.append(self._images.popleft())
        return taken

    def _do(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            with self._model:
                result = job.function()
        except Exception as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _answer(self, images: list[WaitingImage]) -> None:
        """Score a batch. An error goes to all who wait for it."""
        images = [image for image in images if not image.future.cancelled()]
        if not images:
            return
        try:
            answers = _judged(images, self._score(images[0].scorer, [image.read for image in images]))
        except Exception as error:
            deliver([(image.future, error) for image in images])
            return
        deliver([(image.future, judged) for image, judged in zip(images, answers, strict=True)])
        self._batched(len(images))

    def _score(self, scorer: Scorer, batch: Sequence[Read]) -> Scores:
        with nullcontext() if scorer.engine.is_fast else self._model:
            encoded = scorer.encode_read(batch)
        with self._model:
            return scorer.score_encoded(encoded)

    def _step(self, steps: Iterator[object]) -> None:
        try:
            with self._model:
                next(steps)
            return
        except StopIteration:
            pass
        except Exception:  # Long work must not end the thread that answers requests.
            traceback.print_exc()
        with self._changed:
            if steps in self._long:
                self._long.remove(steps)


Answer = tuple[asyncio.Future[Judged], Judged | Exception]


def deliver(answers: Sequence[Answer]) -> None:
    """Give answers to those who wait for them. Each call wakes the thread of the requests, so a batch is one call."""
    for loop, group in groupby(answers, key=lambda answer: answer[0].get_loop()):
        with suppress(RuntimeError):  # The loop is closed, and nobody waits.
            loop.call_soon_threadsafe(_set, list(group))


def _set(answers: Sequence[Answer]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _judged(images: Sequence[WaitingImage], scores: Scores) -> list[Judged]:
    return [
        Judged(
            reason,
            scores.probabilities[row],
            None if scores.typicality is None else float(scores.typicality[row]),
            None if scores.features is None else scores.features[row],
            image.read[2],
        )
        for row, (image, reason) in enumerate(zip(images, scores.reasons, strict=True))
    ]
