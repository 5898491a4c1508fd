from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from lopsided.evaluation.metric_table import METRICS, is_share
from lopsided.evaluation.metrics import evaluate
from lopsided.runs.metrics import Estimate, SplitMetrics


def test_the_table_has_the_metrics_of_an_evaluation() -> None:
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    found = evaluate([0, 1, 1], p, classes=["a", "b"], bootstrap=100, costs=[[0, 1], [1, 0]])
    assert set(found.figures) == set(METRICS)
    assert [name for name, metric in METRICS.items() if "lower is better" in metric.meaning] == [
        name for name, metric in METRICS.items() if not metric.higher_is_better
    ]
    assert [name for name in (*METRICS, "uwa_tuned", "recall:0") if not is_share(name)] == ["cost", "log_loss"]


def test_a_file_may_hold_a_metric_that_no_type_names_and_lack_one_of_the_table() -> None:
    figure = {"value": 0.5, "low": 0.4, "high": 0.6}
    needed = dict.fromkeys(("uwa", "accuracy", "calibration_error"), figure)
    figures = SplitMetrics.model_validate({**needed, "f2": figure})
    assert figures.get("f2") == figures.uwa == Estimate(value=0.5, low=0.4, high=0.6)
    assert figures.get("log_loss") is None
    with pytest.raises(ValidationError):
        SplitMetrics.model_validate({**needed, "f2": {"value": 0.5, "low": None, "high": None}})
