"""An engine of worker processes on this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from lopsided.errors import InputError, sentence
from lopsided.runs.engines import LOST, Ended
from lopsided.runs.plan import Cell, train_cell
from lopsided.runs.records import Record
from lopsided.stopping import undisturbed


class LocalEngine:
    """Worker processes on this machine; by default one per ``threads`` cores.

    Each worker has its own pool, so that a killed worker does not end the others. Each worker watches a pipe to the
    engine's process, and ends at once when the engine is closed or its process dies.
    """

    def __init__(self, workers: int | None = None, threads: int = 1) -> None:
        for name, value in (("workers", workers), ("threads", threads)):
            if value is not None and value < 1:
                raise InputError(sentence(f"{name} must be >= 1", value))
        self.slots = max(1, available_cores() // threads) if workers is None else workers
        self.threads = threads
        self._folder = Path()
        self._lifeline: tuple[Connection, Connection] | None = None
        self._idle: list[futures.ProcessPoolExecutor] = []
        self._running: dict[futures.Future[tuple[str, str]], tuple[Cell, futures.ProcessPoolExecutor]] = {}

    def open(self, folder: Path, *, models: bool = False) -> None:
        """Prepare for a plan. Workers start with their first cell."""
        self._folder = folder
        self._lifeline = get_context("spawn").Pipe(duplex=False)

    def submit(self, cell: Cell) -> None:
        """Start a cell on an idle worker, or on a new one."""
        folder = str(self._folder / cell.path)
        toml = cell.recipe.to_toml()
        while True:
            pool = self._idle.pop() if self._idle else self._new_pool()
            try:
                with undisturbed(), _as_seen_by_workers(self.threads):  # A pool that half began could not be closed.
                    self._running[pool.submit(train_cell, toml, folder, self.threads)] = cell, pool
                return
            except BrokenProcessPool:  # The worker died while it was idle.
                pool.shutdown(wait=False)

    def wait(self, seconds: float) -> list[Ended]:
        """Return the cells that ended."""
        if not self._running:
            time.sleep(seconds)
        done, _ = futures.wait(self._running, timeout=seconds, return_when=futures.FIRST_COMPLETED)
        ended = []
        for future in done:
            cell, pool = self._running.pop(future)
            try:
                line, error = future.result()
            except BrokenProcessPool:
                pool.shutdown(wait=False)
                ended.append(Ended(cell, error=LOST, died=True))
            else:
                self._idle.append(pool)
                ended.append(Ended(cell, Record.from_json(line) if line else None, error))
        return ended

    def close(self) -> None:
        """End all workers at once."""
        if self._lifeline is not None:
            for end in self._lifeline:
                end.close()
        for pool in [*self._idle, *(pool for _, pool in self._running.values())]:
            pool.shutdown(wait=True, cancel_futures=True)
        self._idle, self._running, self._lifeline = [], {}, None

    def _new_pool(self) -> futures.ProcessPoolExecutor:
        assert self._lifeline is not None, "the engine is not open"
        reading = self._lifeline[0]
        return futures.ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=_begin_worker, initargs=(reading,)
        )


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _as_seen_by_workers(threads: int) -> Iterator[None]:
    """Limit the threads of processes that start inside the block, and block interrupts in them.

    Both must hold before a worker's first import. Torch reads its environment only once. An interrupt from the keyboard
    reaches all processes, and each worker would print a traceback.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    blocks = hasattr(signal, "pthread_sigmask")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else set()
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_worker(lifeline: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: Connection) -> None:
    """End this process when the other end of the pipe is closed."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
