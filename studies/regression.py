"""How long does the regression of frozen recipes take, and is its choice the one that scikit-learn would make?

    python studies/regression.py run --features FOLDER [--rounds 3]  # FOLDER: `studies/study.py features DATA`
    python studies/regression.py summary                             # print the table of the record

Each row of the record is one fit: features of ``thorough`` or ``quick``, without pixels, on the first draw of ISIC
(four of five folds by lesion, two classes) or of the long tail of Fashion-MNIST (2,000 images, ten classes). The peer
makes the same choice with scikit-learn's LogisticRegression: the same inner folds and strengths from strong to weak,
each fit starting from the previous one, the same end of the path, its usual tolerance, and a last fit on all rows. Both
run in turns, with one thread, and the seconds are those of the processor; the figure is the median of the rounds.
``uwa`` is that of the test images by the rule ``balanced``.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from threadpoolctl import threadpool_limits

import shared
from lopsided.seeds import derive_seed
from lopsided.training.regression import (
    FEW,
    PATIENCE,
    REPEATS,
    STRENGTHS,
    balanced_log_loss,
    fit_regression,
    inner_folds,
    rarest,
    standardisation,
)
from shared import Floats
from study import Features, pairs

RECORD = shared.RECORDS / "regression_speed.json"
CASES = tuple((data, f"{method} without pixels") for data in ("isic", "fashion") for method in ("quick", "thorough"))
CELLS = {"isic": "all", "fashion": "long tail 100"}


def by_hand(x: Floats, labels: Floats, groups: Floats | None) -> tuple[float, Floats, Floats]:
    """Return the strength, weight and bias that the same choice gives with scikit-learn."""
    mean, scale = standardisation(x)
    x = (x - mean) / scale
    fewest = rarest(labels, groups)
    seeds = [derive_seed(0, "folds", draw) for draw in range(REPEATS if fewest < FEW else 1)]
    folds = [pair for seed in seeds for pair in inner_folds(labels, groups, min(5, fewest), seed)]
    strengths = list(STRENGTHS)
    logits: list[list[Floats]] = [[] for _ in strengths]
    for train, rest in folds:
        model = LogisticRegression(max_iter=1000, warm_start=True)
        prior = np.bincount(labels[train]) / len(train)
        best, worse = np.inf, 0
        for place, strength in enumerate(strengths):
            model.set_params(C=strength).fit(x[train], labels[train])
            found = np.log(np.maximum(model.predict_proba(x[rest]), 1e-300)) - np.log(prior)
            logits[place].append(found)
            loss = balanced_log_loss(found, labels[rest])
            best, worse = (loss, 0) if loss < best else (best, worse + 1)
            if worse >= PATIENCE:
                del strengths[place + 1 :]
                break
    tested = labels[np.concatenate([rest for _, rest in folds])]
    losses = [balanced_log_loss(np.concatenate(logits[place]), tested) for place in range(len(strengths))]
    strength = strengths[int(np.argmin(losses))]
    last = LogisticRegression(C=strength, max_iter=1000).fit(x, labels)
    weight, bias = last.coef_, last.intercept_
    if len(weight) == 1:
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return strength, weight / scale, bias - (weight / scale) @ mean


def measure(data: str, method: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the median seconds of both, in turns, with what they chose and reached."""
    found = Features(data, folder)
    x = found.of(method)
    assert x is not None
    folds, grouped = pairs(data, CELLS[data], 0, found)
    train, test = folds[0]
    own, labels = np.asarray(x[train], dtype=np.float64), found.labels[train].astype(np.int64)
    groups = found.groups[train] if grouped else None
    classes = int(labels.max()) + 1
    prior = np.log(np.bincount(labels) / len(labels))
    seconds: dict[str, list[float]] = {"lopsided": [], "scikit-learn": []}
    figures = {}
    for _ in range(rounds):
        for name, times in seconds.items():
            begin = time.process_time()
            if name == "lopsided":
                fitted = fit_regression(own, labels, classes, groups=groups)
                strength, weight, bias = fitted.strength, fitted.weight, fitted.bias
            else:
                strength, weight, bias = by_hand(own, labels, groups)
            times.append(time.process_time() - begin)
            answers = (x[test] @ weight.T + bias - prior).argmax(axis=1)
            uwa = 100 * balanced_accuracy_score(found.labels[test], answers)
            figures[name] = {"strength": strength, "uwa": round(uwa, 2)}
    shape = {
        "data": data,
        "features": method.removesuffix(" without pixels"),
        "rows": len(own),
        "columns": own.shape[1],
        "classes": classes,
    }
    medians = {name: {"seconds": round(statistics.median(own), 2), **figures[name]} for name, own in seconds.items()}
    return {**shape, "rounds": rounds, **medians}


def table(lines: list[dict[str, Any]]) -> str:
    """Return the record as a table."""
    rows = []
    for line in lines:
        own, peer = line["lopsided"], line["scikit-learn"]
        shape = [line["data"], line["features"], *(f"{line[name]:,}" for name in ("rows", "columns", "classes"))]
        seconds = [f"{one['seconds']:.1f}" for one in (own, peer)]
        accuracies = [f"{one['uwa']:.1f}" for one in (own, peer)]
        rows.append((*shape, *seconds, f"{peer['seconds'] / own['seconds']:.1f}", *accuracies))
    head = "data | features of | rows | columns | classes | seconds | scikit-learn | ratio | balanced accuracy | scikit-learn"  # noqa: E501
    return shared.table(head, rows)


def main() -> None:
    """Measure all cases if features are given, and print the table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["run", "summary"])
    parser.add_argument("--features", type=Path, default=Path(), help="the folder with the features")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "run":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            lines = [measure(data, method, given.features, given.rounds) for data, method in CASES]
        shared.write_json(RECORD, lines)
    print(table(shared.read_json(RECORD)))


if __name__ == "__main__":
    main()
