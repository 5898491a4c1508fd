"""The metrics of an evaluation: what they are called everywhere, what they mean, and how their intervals are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMOOTH_EPOCHS = 5
"""The number of epochs over which ``smooth_log_loss`` is a mean."""


@dataclass(frozen=True)
class Metric:
    """A metric by its name in files. ``hub`` is its type in the metadata of a model card."""

    name: str
    title: str
    meaning: str
    interval: str
    hub: str
    short: str = ""
    """Its name where there is little room, if that is another one."""
    is_share: bool = True
    """Whether it is shown in per cent. A log loss is in nats."""
    higher_is_better: bool = True

    @property
    def label(self) -> str:
        """The short name."""
        return self.short or self.title


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "uwa", "balanced accuracy", "mean of the recalls of all classes; the paper's unweighted accuracy (UWA)",
            "Price and Bonett", "balanced_accuracy",
        ),
        Metric("accuracy", "accuracy", "share of correct predictions", "Wilson", "accuracy"),
        Metric(
            "macro_f1", "macro F1", "mean of the F1 scores of all classes", "posterior draws of the confusion", "f1",
        ),
        Metric(
            "g_mean", "G-mean", "geometric mean of the recalls; 0 if the recall of a class is 0", "posterior draws",
            "g_mean",
        ),
        Metric(
            "mcc", "Matthews correlation", "0 is chance, 1 is perfect; 0 where its denominator is 0", "posterior draws",
            "matthews_correlation", "MCC",
        ),
        Metric(
            "cost", "cost per image", "mean cost of a decision, in the units of the rule; lower is better",
            "posterior draws of the confusion", "cost", is_share=False, higher_is_better=False,
        ),
        Metric(
            "auroc", "AUROC", "quality of the ranking of images, independent of a threshold; mean over classes",
            "Newcombe, combined over classes", "roc_auc",
        ),
        Metric(
            "average_precision", "mean average precision",
            "mean over classes of the area under the precision-recall curve; the table of classes has that of each",
            "Wilson on the positives, combined", "average_precision",
        ),
        Metric(
            "brier", "Brier score", "half the squared distance between probabilities and true class; lower is better",
            "bootstrap", "brier_score", higher_is_better=False,
        ),
        Metric(
            "log_loss", "log loss", "mean of -log(probability of the true class); lower is better", "bootstrap",
            "log_loss", is_share=False, higher_is_better=False,
        ),
        Metric(
            "calibration_error", "calibration error",
            "mean difference between confidence and accuracy in 15 bins; lower is better",
            "basic bootstrap; low = 0 if due to chance", "expected_calibration_error", higher_is_better=False,
        ),
    )
}  # fmt: skip
"""The metrics in display order."""


def is_share(name: str) -> bool:
    """Return whether a metric, or a metric by another rule or of one class, is shown in per cent."""
    return name not in METRICS or METRICS[name].is_share


def decimals(value: float, low: float, high: float) -> int:
    """Return the digits after the point for a value and its interval: three, and more where all would be nearly 0.

    >>> decimals(0.5, 0.4, 0.6), decimals(0.00012, 0.00003, 0.00021), decimals(0.0, 0.0, 0.0)
    (3, 5, 3)
    """
    largest = max(abs(value), abs(low), abs(high))
    if abs(value) >= 0.0005 or not 1e-9 <= largest < 0.0095:  # Below 1e-9 is rounding.
        return 3
    return 1 - math.floor(math.log10(largest))


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
