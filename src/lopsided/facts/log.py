"""The events of a run: the interface that receives them, and the log file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lopsided.facts import Fact
from lopsided.files import append_line

LOG_NAME = "log.jsonl"


class Reporter:
    """Receives the events of a run, and passes them on to an ``inner`` reporter, if it has one.

    Progress bars and the log override its methods.
    """

    inner: Reporter | None = None

    def begin(self, classes: Sequence[str], history: Sequence[Mapping[str, Any]]) -> None:
        """Called once, before training. ``history`` holds the facts of the epochs that a resumed run has done."""
        if self.inner is not None:
            self.inner.begin(classes, history)

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Called when a stage starts: "encoder" and then "classifier", "end-to-end", or "adapter"."""
        if self.inner is not None:
            self.inner.stage(name, epochs, steps_per_epoch)

    def step(self, loss: float, images: int) -> None:
        """Called during an epoch with the loss of the last batch and the number of images since the last call."""
        if self.inner is not None:
            self.inner.step(loss, images)

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Called after an epoch. ``index`` counts from 1; ``facts`` are the values of its line in the log."""
        if self.inner is not None:
            self.inner.epoch(index, facts)

    def count(self, label: str, done: int, total: int) -> None:
        """Called while images are processed that belong to no epoch, such as those whose features are computed."""
        if self.inner is not None:
            self.inner.count(label, done, total)

    def fact(self, fact: Fact) -> None:
        """Called with a note on what the run does, or with a caution about its metrics."""
        if self.inner is not None:
            self.inner.fact(fact)


class Log(Reporter):
    """Writes a line of JSON for most events into a run's log, calls another reporter, and keeps the facts.

    Each line has ``event`` and ``time``. After a resume, an epoch may be trained again and appear twice. Among lines
    with the same ``stage`` and ``epoch``, the last one is valid.
    """

    def __init__(self, folder: Path | None, reporter: Reporter | None) -> None:
        self.inner = reporter
        self._path = None if folder is None else folder / LOG_NAME
        self.facts: list[Fact] = []
        self._kept: list[dict[str, Any]] = []

    @property
    def cautions(self) -> list[Fact]:
        """The cautions so far, each once."""
        found: list[Fact] = []
        for fact in self.facts:
            if fact.is_caution and fact not in found:
                found.append(fact)
        return found

    def keep(self, cautions: list[dict[str, Any]]) -> None:
        """Take over the cautions of a state, and add to this list those that follow."""
        self.facts += filter(None, map(Fact.from_dict, cautions))
        self._kept = cautions

    def event(self, name: str, **facts: Any) -> None:
        """Write one line to the log."""
        if self._path is not None:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            append_line(self._path, json.dumps({"event": name, "time": time, **facts}))

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        """Write a line and call the other reporter."""
        self.event("stage", stage=name, epochs=epochs, steps_per_epoch=steps_per_epoch)
        super().stage(name, epochs, steps_per_epoch)

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Write a line and call the other reporter."""
        self.event("epoch", **facts)
        super().epoch(index, facts)

    def fact(self, fact: Fact) -> None:
        """Write a line, keep the fact and call the other reporter."""
        self.facts.append(fact)
        if fact.is_caution:
            self._kept.append(fact.to_dict())
        self.event("warning" if fact.is_caution else "note", **fact.to_dict())
        super().fact(fact)
