"""The workbench behind the pages: a model that answers, the images that may be shown, and what is counted."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lopsided import files
from lopsided.data.stored import Sent
from lopsided.errors import InputError
from lopsided.inference.predict import Use
from lopsided.reports.find_page import Picture, picture
from lopsided.runs.find import labelled_images
from lopsided.runs.folder import Run
from lopsided.runs.reopen import columns_of
from lopsided.serve.counters import Counters
from lopsided.serve.gallery import Gallery
from lopsided.serve.journal import Journal
from lopsided.serve.limits import Limits, RefusedError
from lopsided.serve.marking import Marking
from lopsided.serve.model import Served, data_address
from lopsided.serve.pool import Pool, doubtful
from lopsided.serve.refit import Refits
from lopsided.serve.requests import DecideJson, PredictOptions
from lopsided.serve.worker import Judged, WaitingImage, Worker, deliver

V = TypeVar("V")
_PICTURE = (320, 80)
"""Side in pixels and quality of the pictures of images that were sent."""


class Bench:
    """Everything that a server has in memory. ``close`` ends its threads."""

    def __init__(
        self,
        run: Path,
        pool: Sequence[str] = (),
        *,
        work: Path | None = None,
        device: str = "auto",
        allow_outside: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.work = work_folder(run) if work is None else work
        group = Run.open(run).recipe.data.group
        columns = columns_of(run)
        self._listed = partial(Pool, list(pool), allow_outside=allow_outside, group=group, columns=columns)
        listed = self._listed()
        self._open = ExitStack()
        self._open.enter_context(files.lock(self.work))
        self.refits = Refits(self.work, run)
        self.counters, self.gallery = Counters(), Gallery()
        self.served, self._device = Served(self.refits.folder(self.refits.current), device), device
        self.worker = Worker(2 * self.limits.waiting, self.counters.batches.add)
        self._readers = ThreadPoolExecutor(os.cpu_count() or 1, "lopsided-read")
        self._reading, self._changing = 0, threading.Lock()
        self.marking = Marking(self.served, listed, Journal(self.work))

    def prepare(self) -> None:
        """Make the model ready, and look for the known images meanwhile."""
        self._ready(self.served)
        self._begin()

    def change(self, name: str) -> dict[str, Any]:
        """Let another run answer. Requests that have begun get the answer of the earlier one."""
        with self._changing:
            served = Served(self.refits.finished(name), self._device)
            self._ready(served)
            self.refits.choose(name)  # Not before, since a run that cannot answer would keep the next start from it.
            self.worker.drop()
            self.served, self.marking = served, Marking(served, self._listed(), self.marking.journal)
            self._begin()
            return self.refits.status()

    def _ready(self, served: Served) -> None:
        served.use_of(None, None)
        self.worker.do(served.complete).result()

    def _begin(self) -> None:
        threading.Thread(target=self._look, name="lopsided-known", daemon=True).start()

    def _look(self) -> None:
        served, marking = self.served, self.marking
        labelled = labelled_images(served.folder)
        self.worker.begin(served.learn(labelled, self.gallery))
        marking.doubtful = doubtful(served, labelled, self.gallery)
        self.worker.begin(marking.pool.score(served, labelled, self.gallery))

    def close(self) -> None:
        """Finish what waits, interrupt a training, and end all threads."""
        self.refits.stop()
        self.worker.end()
        self._readers.shutdown(cancel_futures=True)
        self._open.close()

    @property
    def reading(self) -> int:
        """The number of images of requests that are not answered yet."""
        return self._reading

    async def predict(self, images: Sequence[bytes], options: PredictOptions) -> dict[str, Any]:
        """Answer the images of a request."""
        served = self.served
        use = await self.use(served, options.decide, options.prevalence)
        cells = served.cells(options.columns, len(images))
        if self._reading + len(images) > self.limits.waiting:
            raise RefusedError(503, "busy", "Too many images wait. Try again in a few seconds.")
        self._reading += len(images)
        try:
            answers = await asyncio.gather(
                *(
                    self._one(served, Sent(f"image {place}", image, beside), use, options)
                    for place, (image, beside) in enumerate(zip(images, cells, strict=True), start=1)
                )
            )
        finally:
            self._reading -= len(images)
        for answer in answers:
            self._count(answer)
        return {"run": served.folder.name, "decide": use.decision.rule, "images": answers}

    async def _one(self, served: Served, image: Sent, use: Use, options: PredictOptions) -> dict[str, Any]:
        future: asyncio.Future[Judged] = asyncio.get_running_loop().create_future()
        self._readers.submit(self._read, served, image, future)
        judged = await future
        answer = served.answer(judged, use)
        if judged.reason:
            return answer
        if options.picture:
            small = await self.call(picture, image, *_PICTURE)
            answer["picture"] = "" if small is None else data_address(small.content)
        if options.map and (pixels := judged.pixels) is not None:
            label = int(use.decision.decide(use.probabilities(judged.probabilities)))
            answer["map"] = await asyncio.wrap_future(self.worker.do(lambda: served.map_of(pixels, label, image.cells)))
        if options.nearest:
            answer["nearest"] = await self.call(served.nearest, judged, options.nearest)
        return answer

    def _read(self, served: Served, image: Sent, future: asyncio.Future[Judged]) -> None:
        """Read an image in this thread, and let the worker score it."""
        if future.cancelled():  # Nobody waits for it any more.
            return
        try:
            read = served.sent.read(image, self.limits.pixels)
            if read[1].error:
                deliver([(future, Judged(read[1].error, np.empty(0), None, None, None))])
            else:
                self.worker.score(WaitingImage(served.sent, read, future))
        except Exception as error:
            deliver([(future, error)])

    async def decide(self, asked: DecideJson) -> dict[str, Any]:
        """Decide again about probabilities that carry the shares of the model, and count what that means."""
        served = self.served
        if any(len(row) != len(served.classes) for row in asked.probabilities):
            must = f"Each row of probabilities must have {len(served.classes)} numbers, one per class."
            raise RefusedError(422, "invalid", must)
        use = await self.use(served, asked.decide, asked.prevalence)
        p = use.probabilities(np.array(asked.probabilities).reshape(-1, len(served.classes)))
        answers = [served.decided(row, use) for row in p]
        decision, counts = use.decision.model_dump(mode="json"), await self.call(served.counts, use)
        return {"decide": use.decision.rule, "decision": decision, "images": answers, "counts": counts}

    async def call(self, function: Callable[..., V], *arguments: Any) -> V:
        """Call a function that may wait for the disk, in another thread than that of the requests."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    async def use(self, served: Served, decide: str | None, prevalence: str | None) -> Use:
        """Return the decision of a rule that a request names."""
        if not decide and not prevalence:
            return served.usual
        try:
            return await self.call(served.use_of, decide or None, prevalence or None)
        except InputError as error:
            raise RefusedError(422, "invalid", str(error)) from None

    async def picture(self, name: str) -> Picture | None:
        """Return the picture of an image that may be shown, by its id."""
        return await self.call(self.gallery.picture, name)

    def metrics(self) -> str:
        """Return the text for Prometheus."""
        gauges = {
            "lopsided_waiting_images": ("Images of requests that are not answered yet.", float(self.reading)),
            "lopsided_known_images": (
                "Known images that new ones are compared with.",
                float(0 if self.served.neighbours is None else len(self.served.neighbours.ids)),
            ),
        }
        return self.counters.text(
            gauges,
            {"run": self.served.folder.name, "sha256": self.served.card.sha256, "encoder": self.served.card.encoder},
        )

    def _count(self, answer: dict[str, Any]) -> None:
        if "unreadable" in answer:
            self.counters.unreadable.add()
            return
        self.counters.images.add(answer["predicted"])
        if answer.get("unfamiliar"):
            self.counters.unfamiliar.add()


def work_folder(run: Path) -> Path:
    """Return the folder of the marks and the further runs of a run, beside it."""
    return run.absolute().parent / f"{run.absolute().name}-work"
