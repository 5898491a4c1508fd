"""How long the regression on features takes with many rows and classes, on made features.

    python benchmarks/regression.py                 writes benchmarks/records/regression.json (about a minute)
    python benchmarks/regression.py --rows 4000 --classes 300

Rows of 1,280 random columns surround a centre for each class, so that about seven of ten new rows are told apart. The
strength is chosen by five inner folds, as in ``fit``. The record holds the seconds on the clock and of the processor,
and how busy the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from lopsided import files
from lopsided.training.regression import fit_regression

RECORD = Path(__file__).parent / "records" / "regression.json"
WIDTH = 1_280


def measure(rows: int, classes: int) -> dict[str, float | int]:
    """Fit once. The accuracy on new rows shows that the fit is one."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((classes, WIDTH), dtype=np.float32) / 10
    labels = np.arange(rows) % classes
    features = centres[labels] + generator.standard_normal((rows, WIDTH), dtype=np.float32)
    begin, worked = perf_counter(), process_time()
    found = fit_regression(features, labels, classes)
    seconds, processor = perf_counter() - begin, process_time() - worked
    new = centres + generator.standard_normal((40, classes, WIDTH), dtype=np.float32)
    right = (new @ found.weight.T + found.bias).argmax(axis=-1) == np.arange(classes)
    return {
        "rows": rows,
        "classes": classes,
        "columns": WIDTH,
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1),
        "strength": found.strength,
        "accuracy": round(float(right.mean()), 4),
        "cores": os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--classes", type=int, default=50)
    options = parser.parse_args()
    found = measure(options.rows, options.classes)
    print(json.dumps(found, indent=1))
    if (options.rows, options.classes) == (20_000, 50):
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        files.atomic_write(RECORD, json.dumps({"commit": commit, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
