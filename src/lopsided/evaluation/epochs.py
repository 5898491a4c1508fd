"""The figure by which an epoch is selected. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lopsided.evaluation.metric_table import METRICS

SMOOTH_EPOCHS = 5
"""The number of epochs over which ``smooth_log_loss`` is a mean."""


def figure_of(metric: str, epochs: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the figure to maximise after these epochs of a stage; None to keep the last epoch.

    >>> figure_of("smooth_log_loss", [{"val_log_loss": 0.3}, {"val_log_loss": 0.5}])
    -0.4
    """
    if metric == "last":
        return None
    width = SMOOTH_EPOCHS if metric == "smooth_log_loss" else 1
    name = f"val_{metric.removeprefix('smooth_')}"
    values = [epoch[name] for epoch in epochs[-width:] if epoch.get(name) is not None]
    if not values:
        return None
    mean = float(sum(values) / len(values))
    return mean if METRICS[name.removeprefix("val_")].higher_is_better else -mean
