"""Start several ranks in tests: processes that connect through a file, or threads that act as ranks."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forked import CONTEXT
from lopsided.distributed import joined
from lopsided.ranks import Ranks

LONGEST = 120.0


class Gone:
    """Replaces a result: the rank ended without a result and with this exit code."""

    def __init__(self, code: int | None) -> None:
        self.code = code


def each(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(ranks, *arguments)`` on each of ``size`` ranks. Return the result or the error of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = [
        CONTEXT.Process(target=_call, args=(pipes[rank][1], folder / "store", rank, size, function, *arguments))
        for rank in range(size)
    ]
    for process, (_, end) in zip(processes, pipes, strict=True):
        process.start()
        end.close()
    found = [_receive(pipe, process) for process, (pipe, _) in zip(processes, pipes, strict=True)]
    for process in processes:
        process.join()
        process.close()
    return found


def together(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Like ``each``, but every rank must succeed."""
    found = each(size, folder, function, *arguments)
    for result in found:
        if isinstance(result, BaseException):
            raise result
        assert not isinstance(result, Gone), result.code
    return found


def _call(pipe: Connection, store: Path, rank: int, size: int, function: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        with joined(f"file://{store}", rank=rank, size=size) as ranks:
            result = function(ranks, *arguments)
    except Exception as error:
        error.__cause__ = None  # Not every cause can be pickled.
        result = error
    pipe.send_bytes(pickle.dumps(result))  # As bytes: shared tensors are lost when their process ends.


def _receive(pipe: Connection, process: Any) -> Any:
    try:
        if not pipe.poll(LONGEST):
            process.kill()
            return Gone(None)
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        return Gone(process.exitcode)


class Threads(Ranks):
    """One of several ranks that are threads of this process, for tests with many examples."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def _exchange(self, thing: Any) -> list[Any]:
        self._board[self.rank] = thing
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        everyone = self._exchange([tensor.detach().clone() for tensor in tensors])
        for tensor, values in zip(tensors, zip(*everyone, strict=True), strict=True):
            tensor.detach().copy_(sum(values[1:], values[0]))

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = self._exchange(rows.detach().clone())
        assert [len(part) for part in parts] == list(sizes)
        return torch.cat(parts)

    def told(self, make: Callable[[], Any]) -> Any:
        return self._exchange(make() if self.first else None)[0]


def in_threads(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(ranks, *arguments)`` in ``size`` threads."""
    barrier, board = threading.Barrier(size, timeout=LONGEST), [None] * size

    def call(rank: int) -> Any:
        try:
            return function(Threads(rank, size, board, barrier), *arguments)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [one.result() for one in [pool.submit(call, rank) for rank in range(size)]]
