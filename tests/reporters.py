"""Reporters for tests: one keeps the events of a run, one ends the run at an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopsided.facts import Fact
from lopsided.facts.log import Reporter


class Listening(Reporter):
    """Keeps the events of a run in their order, each with its kind and what it says."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def hear(self, kind: str, value: Any) -> None:
        self.events.append((kind, value))

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        self.hear("stage", name)

    def step(self, loss: float, images: int) -> None:
        self.hear("step", images)

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        self.hear("epoch", (facts["stage"], index))

    def count(self, label: str, done: int, total: int) -> None:
        self.hear("count", total if done == total else 0)

    def fact(self, fact: Fact) -> None:
        self.hear("fact", fact)

    def of(self, kind: str) -> list[Any]:
        """What the events of a kind say."""
        return [value for name, value in self.events if name == kind]

    @property
    def facts(self) -> list[Fact]:
        return self.of("fact")

    @property
    def images(self) -> int:
        """How many images went through the encoder outside of epochs."""
        return sum(self.of("count"))


class Ending(Listening):
    """Ends a run at the n-th event, before anything about it is written: of a kind, with a value, or of any kind."""

    def __init__(
        self, kind: str | None = None, value: Any = None, *, nth: int = 1, error: BaseException | None = None
    ) -> None:
        super().__init__()
        self.kind, self.value, self.left = kind, value, nth
        self.error = error or KeyboardInterrupt()

    def hear(self, kind: str, value: Any) -> None:
        super().hear(kind, value)
        if self.kind in (None, kind) and self.value in (None, value):
            self.left -= 1
            if self.left == 0:
                self.end()

    def end(self) -> None:
        raise self.error
