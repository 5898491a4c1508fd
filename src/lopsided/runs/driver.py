"""The driver: trains the cells of a plan on an engine, across lost workers and beside other processes."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass

from lopsided.errors import RunError
from lopsided.runs.engines import Ended, Engine
from lopsided.runs.plan import Cell, Plan
from lopsided.runs.records import Failure, Record
from lopsided.runs.view import View
from lopsided.stopping import handling

_POLL_SECONDS = 1.0
_NO_TEST = "The run has no test images. Set data.test in its recipe."


@dataclass(frozen=True)
class Outcome:
    """The result of a plan: records of finished cells, failed cells, and how many cells were finished before."""

    done: list[Record]
    failed: list[Failure]
    skipped: int


def drive(plan: Plan, engine: Engine, view: View | None = None, retries: int = 1, until: float = math.inf) -> Outcome:
    """Train the cells of a plan that are not finished.

    A cell whose worker dies is retried from its checkpoint, at most ``retries`` times. However the driver ends, it
    closes the engine first, whose workers may still use the cells. Cells that are not finished at the time ``until`` of
    the monotonic clock are stopped; a later call continues them.
    """
    return _Driver(plan, engine, view or View(), retries, until).run()


class _Driver:
    def __init__(self, plan: Plan, engine: Engine, view: View, retries: int, until: float) -> None:
        self.plan, self.engine, self.view, self.retries, self.until = plan, engine, view, retries, until
        self.done: dict[str, Record | None] = {}
        self.failed: dict[str, Failure] = {}
        self.todo: deque[Cell] = deque()
        self.elsewhere: deque[Cell] = deque()
        self.lost: deque[Cell] = deque()
        self.claims: dict[str, ExitStack] = {}
        self.deaths: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.next_look = 0.0

    def run(self) -> Outcome:
        plan = self.plan
        self.done = plan.finished()
        self.todo += [cell for cell in plan.cells if cell.key not in self.done]
        skipped = len(self.done)
        try:
            with plan.signals():
                with plan.opened():
                    if self.todo:
                        self.engine.open(plan.folder, models=plan.keeps_models)
                self.view.begin(len(plan.cells), skipped)
                with plan.tracked(self.done, lambda fact: self.view.note(str(fact))):
                    self.loop()
        finally:
            with handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):  # The plan is ending.
                self.engine.close()
                for claim in self.claims.values():
                    claim.close()
                plan.close()
        records = [self.done.get(cell.key) for cell in plan.cells]
        return Outcome([record for record in records if record is not None], list(self.failed.values()), skipped)

    def loop(self) -> None:
        while (self.todo or self.elsewhere or self.claims) and time.monotonic() < self.until:
            for _ in range(len(self.lost)):
                self.start_again(self.lost.popleft())
            while self.todo and self.has_room():
                self.start(self.todo.popleft())
            if not self.todo and self.elsewhere and time.monotonic() >= self.next_look:
                self.look_elsewhere()
            for ended in self.engine.wait(max(min(_POLL_SECONDS, self.until - time.monotonic()), 0.0)):
                self.settle(ended)
            self.view.tick()

    def has_room(self) -> bool:
        return len(self.claims) - len(self.lost) < self.engine.slots

    def look_elsewhere(self) -> None:
        """Check whether cells of other processes are now finished or free."""
        for _ in range(len(self.elsewhere)):
            if self.has_room():
                self.start(self.elsewhere.popleft())
        if self.elsewhere and not self.claims:
            self.view.waiting(len(self.elsewhere), self.reasons[self.elsewhere[0].key])
        self.next_look = time.monotonic() + _POLL_SECONDS

    def start(self, cell: Cell) -> None:
        """Start a cell, unless another process computes it or has computed it."""
        claim = self.plan.claim(cell)
        if isinstance(claim, str):
            self.reasons[cell.key] = claim
            self.elsewhere.append(cell)
            return
        self.claims[cell.key] = claim
        known = self.plan.known(cell)
        if isinstance(known, Record):
            self.finish(cell, known)
        elif known is not None:
            self.give_up(cell, known)
        else:
            self.view.started(cell)
            self.engine.submit(cell)

    def start_again(self, cell: Cell) -> None:
        """Restart a cell whose worker died, once its folder is free. A cluster may report a death before it is over."""
        try:
            self.plan.check_free(cell)
        except RunError as error:
            if error.__cause__ is not None:
                raise
            self.lost.append(cell)
        else:
            self.engine.submit(cell)

    def settle(self, ended: Ended) -> None:
        cell, error = ended.cell, ended.error
        if not error and self.plan.needs_records and ended.record is None:
            error = _NO_TEST
        if not error:
            self.finish(cell, self.plan.put_away(cell, ended.record))
            return
        failure = Failure.of(cell.recipe, error, cell.compared_as)
        self.plan.note_failure(failure)
        self.deaths[cell.key] += ended.died
        if ended.died and self.deaths[cell.key] <= self.retries:
            self.view.failed(failure, again=True)
            self.lost.append(cell)
        else:
            self.give_up(cell, failure)

    def finish(self, cell: Cell, record: Record | None) -> None:
        self.done[cell.key] = record
        self.claims.pop(cell.key).close()
        if record is not None:
            self.view.finished(record)

    def give_up(self, cell: Cell, failure: Failure) -> None:
        self.plan.give_up(cell, failure)
        self.failed[cell.key] = failure
        self.claims.pop(cell.key).close()
        self.view.failed(failure, again=False)
