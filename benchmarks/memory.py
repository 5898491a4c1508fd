"""The memory of this process, as Linux keeps it: what the benchmarks of speed and memory share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


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
