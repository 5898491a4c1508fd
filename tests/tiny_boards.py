"""What TensorBoard shows of a folder."""

from __future__ import annotations

import logging
from pathlib import Path


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of each tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # It warns of points that it hides.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
