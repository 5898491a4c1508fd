"""The label check of a run whose images all have out-of-fold probabilities: two tables in the run folder.

``labels.csv`` lists all images, the most doubtful label first. ``near_duplicates.csv`` lists pairs of images with
nearly the same features, if the encoder is frozen: only then have all images the features of one encoder.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided import files
from lopsided.data.sources import Source
from lopsided.evaluation.intervals import UNDEFINED, Estimate
from lopsided.evaluation.labels import check_labels, count_wrong, duplicates_table, labels_table, near_duplicates
from lopsided.facts import Fact, notes

LABELS, NEAR_DUPLICATES = "labels.csv", "near_duplicates.csv"
MOST_COMPARED = 20_000
"""Near-duplicates are searched among at most this many images. The time grows with the square of the number."""


def write_label_check(
    folder: Path, source: Source, p: npt.NDArray[np.float64], features: npt.NDArray[np.float32] | None
) -> tuple[Estimate, list[Fact]]:
    """Write the tables of the label check. Return how many labels are probably wrong, and notes for the log."""
    groups = None if source.groups is None else source.groups.tolist()
    names, classes, labels = source.names, source.classes, source.labels
    check = check_labels(labels, p)
    files.atomic_write(folder / LABELS, labels_table(check, names, classes, groups))
    wrong, facts = UNDEFINED, []
    if len(np.unique(labels)) > 1:  # Images of one class have no other label that they could have.
        wrong = count_wrong(labels, p, groups)
        facts = [notes.wrong_labels(wrong.value, wrong.low, wrong.high, len(source), check.num_suspects, LABELS)]
    if features is None or not np.isfinite(features).all():
        return wrong, facts
    if len(source) > MOST_COMPARED:
        return wrong, [*facts, notes.near_duplicates_not_searched(MOST_COMPARED)]
    pairs = near_duplicates(features, labels, groups)
    files.atomic_write(folder / NEAR_DUPLICATES, duplicates_table(pairs, names, labels.tolist(), classes, groups))
    across = sum(pair.across == "label" for pair in pairs)
    if across:
        facts.append(notes.near_duplicates(across, NEAR_DUPLICATES))
    if len(pairs) > across:
        facts.append(notes.alike_images(len(pairs) - across, NEAR_DUPLICATES))
    return wrong, facts


def read_table(path: Path, limit: int) -> list[dict[str, Any]]:
    """Return the rows of one of the tables; no rows if the file is missing, too large or not a table."""
    try:
        files.check_regular(path, limit)
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as table:
            return [row for row in csv.DictReader(table) if None not in row and None not in row.values()]
    except (OSError, csv.Error, ValueError):
        return []
