"""Processes that start at once: forked from one that has imported what takes seconds."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CONTEXT = multiprocessing.get_context("forkserver")
# A process of tests has one server, which the first of its tests to fork starts. The first optimizer of a process
# imports torch._dynamo, which takes seconds.
CONTEXT.set_forkserver_preload(
    [
        *("torch._dynamo", "timm", "PIL.Image", "PIL.PngImagePlugin", "sklearn.metrics", "sklearn.linear_model"),
        *("lopsided.training.fit", "lopsided.evaluation.metrics", "lopsided.runs.results", "lopsided.runs.run"),
        *("lopsided.runs.folds", "lopsided.runs.reopen", "lopsided.inference.predict"),
        "lopsided.runs.sweep",
        *("lopsided.losses.contrastive", "lopsided.losses.classification", "lopsided.cli.train"),
    ]
)


def forked(target: Callable[..., None], *arguments: Any) -> int | None:
    """Call a function in a process of its own, and return its exit code."""
    process = CONTEXT.Process(target=target, args=arguments)
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
