"""Trackers of a sweep. Its cells have trackers of their own, and are child runs of the sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lopsided.facts import Fact, cautions
from lopsided.runs.keys import proportion
from lopsided.runs.records import Record
from lopsided.runs.tracking import Trackers, read_keys
from lopsided.sweeps.engines import Cell
from lopsided.trackers import TrackedRun

RECORDS = "records.jsonl"


@contextmanager
def tracked_sweep(
    folder: Path,
    cells: Sequence[Cell],
    done: Mapping[str, Record],
    about: Mapping[str, Any],
    warn: Callable[[Fact], None],
) -> Iterator[None]:
    """Track a sweep while the block runs. At its end, ``done`` holds the records of the finished cells."""
    texts = list(dict.fromkeys(text for cell in cells for text in cell.recipe.track))
    if not texts:
        yield
        return
    new = [text for text in texts if text not in read_keys(folder)[0]]
    if done and new:
        warn(cautions.cells_not_sent(len(done), new))
    if len(done) == len(cells):
        yield
        return
    trackers = Trackers(texts, folder, warn)
    facts = {name: ", ".join(map(str, value)) for name, value in about.items() if isinstance(value, list)}
    facts |= {name: value for name, value in about.items() if isinstance(value, str)}
    name = folder.absolute().name
    trackers.start(TrackedRun(name, folder, parameters={**facts, "cells": len(cells)}))
    try:
        yield
    except BaseException as error:
        trackers.end(0, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    trackers.end(0, "finished", _means(cells, done), paths=[folder / RECORDS])


def _means(cells: Sequence[Cell], done: Mapping[str, Record]) -> dict[str, float]:
    """Return the mean UWA of the test images of each arm or loss, in each scenario."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        if cell.key in done:
            own = [proportion(cell.recipe.data.scenario), cell.arm or cell.recipe.loss.label]
            found.setdefault(f"uwa/{' '.join(filter(None, own))}", []).append(done[cell.key].test.uwa)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return {name: value for name, value in means.items() if math.isfinite(value)}
