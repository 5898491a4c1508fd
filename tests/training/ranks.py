"""Start several ranks in tests: processes of this machine that find each other by a file."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from lopsided.training.distributed import Ranks, joined

CONTEXT = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes seconds.
CONTEXT.set_forkserver_preload(["lopsided.training.stages", "torch._dynamo", "timm", "torch.testing"])


def together(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(ranks, *arguments)`` on each of ``size`` ranks; returns what each of them returned."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(size, mp_context=CONTEXT) as pool:
        calls = [pool.submit(call, folder / "store", rank, size, function, *arguments) for rank in range(size)]
        return [one.result(timeout=200) for one in calls]


def call(store: Path, rank: int, size: int, function: Callable[[Ranks], Any], *arguments: Any) -> Any:
    """In a process of its own: join the others and call."""
    import torch

    torch.set_num_threads(1)
    with joined(f"file://{store}", rank=rank, size=size) as ranks:
        return function(ranks, *arguments)
