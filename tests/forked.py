"""Processes that start at once: forked from one that has imported what takes seconds."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# The first optimizer of a process imports torch._dynamo, which takes seconds.
PRELOAD = ["lopsided.training.fit", "lopsided.runs.run", "lopsided.evaluation.metrics", "sklearn.metrics"]
PRELOAD += ["torch._dynamo", "timm", "PIL.PngImagePlugin", "lopsided.sweeps.sweep", "lopsided.inference.predict"]


def forked(target: Callable[..., None], *arguments: Any) -> int | None:
    """Call a function in a process of its own, and return its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join()
    code = process.exitcode
    process.close()
    return code


def die_at_write(fatal: int, below: Path) -> None:
    """Kill this process before its ``fatal``-th change of a file or a folder below ``below``."""
    sys.path.insert(0, str(BENCHMARKS))
    from kill import die_at_write

    die_at_write(fatal, str(below))
