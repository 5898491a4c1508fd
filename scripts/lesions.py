"""Write results/isic-lesions.csv: how each run on ISIC 2018 did on the images of lesions that it knew and of others.

    lopsided reproduce isic --preset small --out SWEEP
    lopsided reproduce isic --preset small --split-by lesion --out SWEEP
    python scripts/lesions.py SWEEP

A line counts the test images of one run whose lesion is ``known``, because training has photographs of it too,
``several``, with further photographs among the test images alone, or ``single``: by class how many there are and how
many were answered rightly, and the AUROC between the classes. ``scripts/results.py`` makes a table of it.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from sklearn.metrics import roc_auc_score

from lopsided.runs.folder import Run
from lopsided.runs.records import read_records

TABLE = Path(__file__).parents[1] / "results" / "isic-lesions.csv"
CLASSES = ("MEL", "DF")
KINDS = ("known", "several", "single")
HEADER = ("cell", "lesion", *(f"{name}{what}" for name in CLASSES for what in ("", " right")), "AUROC")


def kinds(lesions: Sequence[str], crossing: Iterable[str]) -> list[str]:
    """Say for each test image what its lesion is; ``crossing`` are the lesions with photographs in training too."""
    known, photographs = set(crossing), Counter(lesions)
    return ["known" if name in known else "several" if photographs[name] > 1 else "single" for name in lesions]


def counted(cell: str, rows: Sequence[Mapping[str, str]], crossing: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lines of one run, from the predictions of its test images."""
    found = kinds([row["group"] for row in rows], crossing)
    for kind in KINDS:
        own = [row for row, other in zip(rows, found, strict=True) if other == kind]
        if not own:
            continue
        line = [cell, kind]
        for name in CLASSES:
            of_class = [row for row in own if row["label"] == name]
            line += [str(len(of_class)), str(sum(row["predicted"] == name for row in of_class))]
        rare = [row["label"] == CLASSES[1] for row in own]
        scores = [float(row[f"p:{CLASSES[1]}"]) for row in own]
        yield [*line, f"{roc_auc_score(rare, scores):.5f}" if len(set(rare)) > 1 else ""]


def main() -> None:
    """Read the runs of a sweep and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    sweep = parser.parse_args().sweep
    lines: list[list[str]] = []
    for record in read_records(sweep / "records.jsonl")[0]:
        run = Run.open(sweep / "cells" / record.cell)
        assert run.metrics is not None, "a record is that of a finished run"
        rows = [row for row in run.predictions() if row["split"] == "test"]
        lines += counted(record.cell, rows, run.metrics["leaks"]["groups"])
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *lines])


if __name__ == "__main__":
    main()
