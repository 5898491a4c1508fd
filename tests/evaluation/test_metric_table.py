from __future__ import annotations

import numpy as np

from lopsided.evaluation.metric_table import METRICS, is_share
from lopsided.evaluation.metrics import evaluate
from lopsided.runs.metrics import Figures


def test_the_table_has_the_metrics_of_an_evaluation_and_of_a_file() -> None:
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    found = evaluate([0, 1, 1], p, classes=["a", "b"], bootstrap=100)
    assert set(found.figures) == set(METRICS) == set(Figures.model_fields)
    assert [name for name, metric in METRICS.items() if "lower is better" in metric.meaning] == [
        name for name, metric in METRICS.items() if not metric.higher_is_better
    ]
    assert [name for name in (*METRICS, "uwa_tuned", "recall:0") if not is_share(name)] == ["log_loss"]
