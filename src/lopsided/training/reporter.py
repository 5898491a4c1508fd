"""What a run tells whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Reporter:
    """Told what happens in a run; this one keeps silent. Progress bars and logs derive from it."""

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
