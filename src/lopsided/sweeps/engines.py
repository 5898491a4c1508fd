"""Engines: they compute the cells of a sweep and return the results."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from lopsided.errors import InputError, LopsidedError, sentence
from lopsided.recipe import Recipe
from lopsided.runs.keys import cell_key, coordinates, proportion
from lopsided.runs.records import Record
from lopsided.runs.run import run_recipe, settle

CELLS = "cells"


@dataclass(frozen=True)
class Cell:
    """A settled recipe of a sweep, the name of its folder, and the name of its arm in a comparison."""

    key: str
    recipe: Recipe
    arm: str | None = None
    place: str = ""
    """The path of the run below the folder of the engine; by default the folder ``key`` among the cells."""

    @classmethod
    def of(cls, recipe: Recipe, arm: str | None = None) -> Cell:
        """Settle a recipe and name its folder."""
        settled = settle(recipe)
        return cls(cell_key(settled), settled, arm)

    @property
    def path(self) -> str:
        """The path of the run below the folder of the engine."""
        return self.place or f"{CELLS}/{self.key}"

    @property
    def name(self) -> str:
        """The cell in words."""
        what = self.arm or self.recipe.loss.label
        return coordinates(proportion(self.recipe.data.scenario), what, self.recipe.seed, self.recipe.data.fold)


@dataclass(frozen=True)
class Ended:
    """The result of a cell: a record, or an error message.

    ``died`` means that the worker died. The cell itself may be fine, so it may be tried again.
    """

    cell: Cell
    record: Record | None = None
    error: str = ""
    died: bool = False


class Engine(Protocol):
    """Computes cells into the folder of a sweep."""

    @property
    def slots(self) -> int:
        """How many cells the engine computes at once. It is read before each submission."""

    def open(self, folder: Path, *, models: bool = False) -> None:
        """Prepare for the cells of this sweep; ``models``: whether their models are kept."""

    def submit(self, cell: Cell) -> None:
        """Start a cell. An interrupted cell continues from its checkpoint."""

    def wait(self, seconds: float) -> list[Ended]:
        """Wait at most this many seconds, and return the cells that ended."""

    def close(self) -> None:
        """End all running cells at once. No process may remain."""


def train_cell(recipe: str, folder: str, threads: int) -> tuple[str, str]:
    """Train a cell from the TOML of its recipe. Return the line of its record and the error message; one is empty.

    Arguments and results are text, so that the other process needs no error classes.
    """
    try:
        run = run_recipe(Recipe.from_toml(recipe).override(threads=threads, compare_quick=False), folder, resume=True)
        return Record.from_run(run).to_json(), ""
    except LopsidedError as error:
        return "", " ".join(str(error).split())
    except Exception as error:  # An unexpected error in one cell must not stop the others.
        reason = " ".join(str(error).split())
        return "", f"an unexpected error occurred ({type(error).__name__}{': ' if reason else ''}{reason})."


LOST = (
    "The worker ended before its cell was finished. It was killed or ran out of memory; fewer workers need less memory."
)


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
        """Prepare for a sweep. Workers start with their first cell."""
        self._folder = folder
        self._lifeline = get_context("spawn").Pipe(duplex=False)

    def submit(self, cell: Cell) -> None:
        """Start a cell on an idle worker, or on a new one."""
        folder = str(self._folder / cell.path)
        toml = cell.recipe.to_toml()
        while True:
            pool = self._idle.pop() if self._idle else self._new_pool()
            try:
                with _as_seen_by_workers(self.threads):
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
