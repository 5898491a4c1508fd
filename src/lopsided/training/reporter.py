"""What a run tells whoever watches it, and the log that it writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lopsided.files import append_line

LOG_NAME = "log.jsonl"


class Reporter:
    """Told what happens in a run; this one keeps silent. Progress bars derive from it."""

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """A stage begins: "encoder" and then "classifier", or "end-to-end"."""

    def step(self, loss: float, images: int) -> None:
        """So many images went by since the last call; ``loss`` is that of the last batch."""

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """An epoch, counted from 1, is over; ``facts`` are those of its line in the log."""

    def note(self, text: str) -> None:
        """A decision that the run took, in one sentence."""

    def warn(self, text: str) -> None:
        """Something that makes the figures worth less, in one sentence."""


class Log(Reporter):
    """Writes a line of JSON per event into a run's log, passes everything on, and keeps the warnings.

    Each line has ``event`` and ``time``. An epoch that was cut off and trained again after a resume is there twice: of
    the lines with the same ``stage`` and ``epoch`` the last one counts.
    """

    def __init__(self, folder: Path | None, reporter: Reporter | None) -> None:
        self._path = None if folder is None else folder / LOG_NAME
        self._inner = reporter or Reporter()
        self.warnings: list[str] = []

    def event(self, name: str, **facts: Any) -> None:
        """Write one line."""
        if self._path is not None:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            append_line(self._path, json.dumps({"event": name, "time": time, **facts}))

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Write and pass on."""
        self.event("stage", stage=name, epochs=epochs, steps_per_epoch=steps_per_epoch)
        self._inner.stage(name, epochs, steps_per_epoch)

    def step(self, loss: float, images: int) -> None:
        """Pass on; steps are not logged."""
        self._inner.step(loss, images)

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Write and pass on."""
        self.event("epoch", **facts)
        self._inner.epoch(index, facts)

    def note(self, text: str) -> None:
        """Write and pass on."""
        self.event("note", text=text)
        self._inner.note(text)

    def warn(self, text: str) -> None:
        """Write, keep and pass on."""
        self.warnings.append(text)
        self.event("warning", text=text)
        self._inner.warn(text)
