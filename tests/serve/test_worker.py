from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serve.conftest import wait_for

pytest.importorskip("starlette", reason="the extra serve is not installed")

from lopsided.data.decoding import FileFacts
from lopsided.serve.limits import RefusedError
from lopsided.serve.worker import Judged, WaitingImage, Worker


class Scorer:
    """Answers the number of an image. It notes its batches, and whether two threads used the model at a time."""

    def __init__(self, *, is_fast: bool, batch_size: int = 4, parties: int = 1) -> None:
        self.engine, self.batch_size = SimpleNamespace(is_fast=is_fast), batch_size
        self.batches: list[int] = []
        self.together, self.model = threading.Barrier(parties), threading.Lock()

    def encode_read(self, batch: Sequence[Any]) -> Sequence[Any]:
        self.together.wait(60)
        self.batches.append(len(batch))
        return batch

    def score_encoded(self, batch: Sequence[Any]) -> Any:
        self.use()
        rows = np.array([[float(number)] for number, _, _ in batch])
        reasons = tuple(facts.error for _, facts, _ in batch)
        return SimpleNamespace(reasons=reasons, probabilities=rows, typicality=None, features=None)

    def use(self) -> None:
        assert self.model.acquire(blocking=False), "two threads used the model at a time"
        self.model.release()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(10)
    yield worker
    worker.end()


def asked(scorer: Scorer, number: int) -> WaitingImage:
    read: Any = (number, FileFacts("digest"), None)
    return WaitingImage(scorer, read, asyncio.get_running_loop().create_future())  # type: ignore[arg-type]


async def answers(worker: Worker, scorer: Scorer, number: int) -> list[float]:
    images = [asked(scorer, each) for each in range(number)]
    for image in images:
        worker.score(image)
    return [float(judged.probabilities[0]) for judged in await asyncio.gather(*(image.future for image in images))]


def held(worker: Worker) -> threading.Event:
    """Keep the first thread busy until the event is set."""
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(60)

    worker.do(hold)
    assert begun.wait(60)
    return gate


def test_images_that_wait_are_scored_in_batches_in_order(worker: Worker) -> None:
    scorer, gate = Scorer(is_fast=False), held(worker)

    async def ask() -> list[float]:
        waiting = asyncio.create_task(answers(worker, scorer, 6))
        await asyncio.sleep(0)
        assert worker.waiting == 6
        gate.set()
        return await waiting

    assert asyncio.run(ask()) == [0, 1, 2, 3, 4, 5]
    assert scorer.batches == [4, 2]


def test_two_threads_compute_features_at_a_time(worker: Worker) -> None:
    scorer = Scorer(is_fast=True, batch_size=1, parties=2)  # Neither thread goes on before the other one is there.
    assert asyncio.run(answers(worker, scorer, 6)) == [0, 1, 2, 3, 4, 5]


def test_nobody_else_uses_the_model_during_a_job_or_long_work(worker: Worker) -> None:
    scorer = Scorer(is_fast=True, batch_size=1)

    def use() -> None:
        with scorer.model:
            threading.Event().wait(0.002)

    def steps() -> Iterator[None]:
        for _ in range(20):
            use()
            yield

    worker.begin(steps())
    with ThreadPoolExecutor(1) as pool:
        jobs = pool.submit(lambda: [worker.do(use).result(60) for _ in range(20)])
        for _ in range(10):
            assert asyncio.run(answers(worker, scorer, 4)) == [0, 1, 2, 3]
        jobs.result(60)
    wait_for(lambda: not worker._long)


def test_who_went_away_is_not_answered_and_harms_nobody(worker: Worker) -> None:
    scorer, gate = Scorer(is_fast=False), held(worker)

    async def ask() -> Judged:
        gone, image = asked(scorer, 1), asked(scorer, 2)
        worker.score(gone)
        worker.score(image)
        gone.future.cancel()
        gate.set()
        return await image.future

    assert asyncio.run(ask()).probabilities.tolist() == [2]
    assert scorer.batches == [1]


def test_a_caller_whose_loop_has_ended_harms_nobody(worker: Worker) -> None:
    scorer, gate = Scorer(is_fast=False, batch_size=1), held(worker)

    async def leave() -> None:
        worker.score(asked(scorer, 1))

    asyncio.run(leave())
    gate.set()
    assert asyncio.run(answers(worker, scorer, 1)) == [0]


def test_an_error_reaches_everybody_of_the_batch(worker: Worker) -> None:
    scorer = Scorer(is_fast=False)
    scorer.score_encoded = lambda batch: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(answers(worker, scorer, 2))


def test_too_many_images_are_refused(worker: Worker) -> None:
    gate = held(worker)
    try:
        with pytest.raises(RefusedError, match="Too many images wait"):
            asyncio.run(answers(worker, Scorer(is_fast=False), 11))
    finally:
        gate.set()
