"""How the benchmarks measure: calls that take turns, and the memory of this process as Linux keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path


def in_turns(
    runs: Mapping[str, Callable[[], object]], seconds: float, least: int = 3, most: int = 2000
) -> dict[str, list[float]]:
    """Return the seconds of each run, round after round; the one that comes first changes.

    After a round that does not count, there are at least ``least`` rounds, then as many as fit into ``seconds``.
    """
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    order, rounds, start = list(runs), 0, time.perf_counter()
    while rounds < least or (time.perf_counter() - start < seconds and rounds < most):
        order.reverse()
        rounds += 1
        for name in order:
            begin = time.perf_counter()
            runs[name]()
            found[name].append(time.perf_counter() - begin)
    return found


def status(key: str) -> int:
    """A figure of this process, in KiB, as Linux keeps it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def start_peak() -> int:
    """Let the peak start again from what stands now, which is returned in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak_of(run: Callable[[], object]) -> float:
    """The peak memory of a call above what stood before it, in MiB."""
    before = start_peak()
    run()
    return (status("VmHWM") - before) / 1024
