"""Is a camera found without being told, and what does a model know of a camera that it never saw?

    python studies/cameras.py HAM10000     adds to studies/records/cameras.json
    python studies/cameras.py              prints the tables of the record

``HAM10000`` holds ``ham10000.csv`` with path, label, group (the lesion) and source, of which there are four. Melanomas
(mel) and dermatofibromas (df) are compared; of the latter, one source took 30 of 115, and 24 of 1,113 melanomas. The
sources only judge what was found. The cues were chosen on these two classes with the sources known, and the limit of
``parts.ALIKE`` on all rows, so that only the false alarms are an independent test.

- part: the images that ``fit`` would warn of, and how many of them each source took. Within one source there is no
  other camera to be found, so a part there is a difference of the backgrounds.
- false alarms: the same images with labels shuffled among lesions, ``SHUFFLED`` times.
- left out: AUROC of each source by a model that was trained without it, and by folds (``fit --source source``).
"""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import shared
from lopsided.data.cues import cue_rows, measure_cues
from lopsided.data.images import FileImages
from lopsided.data.parts import odd_parts
from lopsided.recipe import named_recipe
from lopsided.runs.run import run_recipe

RECORD = shared.RECORDS / "cameras.json"
PAIRS = (("mel", "df"), ("mel", "bcc"), ("mel", "akiec"), ("mel", "vasc"), ("bkl", "bcc"), ("bkl", "akiec"))
SHUFFLED, CAMERA, LEAST = 500, "vidir_molemax", 20
Rows = list[dict[str, str]]


def measured(ham: Path, rows: Rows) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Return cues, labels, groups and rows of images; the label 1 is the rarer class."""
    images = FileImages([ham / row["path"] for row in rows])
    rare = Counter(row["label"] for row in rows).most_common()[-1][0]
    labels = np.array([int(row["label"] == rare) for row in rows])
    chosen = cue_rows(labels, 0)
    return measure_cues(images, chosen), labels[chosen], np.array([rows[i]["group"] for i in chosen]), chosen


def parts_of(ham: Path, rows: Rows, name: str) -> dict[str, Any]:
    """Return the parts of some images."""
    cues, labels, groups, chosen = measured(ham, rows)
    found = odd_parts(cues.camera, cues.files, labels, 2, groups)
    return {
        "images": name,
        "counts": np.bincount(labels).tolist(),
        "parts": [
            {"rare": bool(part.label), "inside": part.inside, "total": part.total, "p": part.p_value,
             "higher": part.higher, "lower": part.lower,
             "sources": dict(Counter(rows[chosen[row]]["source"] for row in part.rows))} for part in found
        ],
    }  # fmt: skip


def false_alarms(ham: Path, rows: Rows) -> dict[str, int]:
    """Return how many data sets with shuffled labels have a part."""
    cues, labels, groups, _ = measured(ham, rows)
    units = np.unique(groups, return_inverse=True)[1]
    ordered = labels[np.argsort(units, kind="stable")]
    generator, alarms = np.random.default_rng(0), 0
    for seed in range(SHUFFLED):
        shuffled = np.empty_like(labels)
        shuffled[np.argsort(generator.permutation(int(units.max()) + 1)[units], kind="stable")] = ordered
        alarms += bool(odd_parts(cues.camera, cues.files, shuffled, 2, groups, seed))
    return {"data_sets": SHUFFLED, "alarms": alarms}


def left_out(ham: Path, rows: Rows) -> list[dict[str, Any]]:
    """Train by folds and without each source, and return what the run says of both."""
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch) / "lesions.csv"
        with table.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(["path", "label", "group", "source"])
            lines.writerows([row["path"], row["label"], row["group"], row["source"]] for row in rows)
        (table.parent / "images").symlink_to(ham / "images")
        changes = {"data.folds": 5, "data.origin": "source", "data.allow_outside": True, "compare_quick": False}
        run = Path(scratch) / "run"
        facts = run_recipe(named_recipe("quick").override(**changes), run, data=table).facts()
        wanted = ("left_out_sources", "worse_source", "cheap_cues", "odd_part")
        return [fact.to_dict() for fact in facts if fact.kind in wanted]


def measure(ham: Path) -> dict[str, Any]:
    """Look for cameras in several pairs of classes, as they are and within each source."""
    with (ham / "ham10000.csv").open(newline="", encoding="utf-8") as file:
        lesions = list(csv.DictReader(file))
    table = []
    for pair in PAIRS:
        rows = [row for row in lesions if row["label"] in pair]
        table.append(parts_of(ham, rows, f"{pair[0]}, {pair[1]}"))
        if pair == PAIRS[0]:
            others = [row for row in rows if row["source"] != CAMERA]
            table.append(parts_of(ham, others, f"{pair[0]}, {pair[1]} without {CAMERA}"))
        for source in sorted({row["source"] for row in rows}):
            own = [row for row in rows if row["source"] == source]
            counts = Counter(row["label"] for row in own)
            if min(counts[label] for label in pair) >= LEAST:
                table.append(parts_of(ham, own, f"{pair[0]}, {pair[1]} of {source}"))
    rows = [row for row in lesions if row["label"] in PAIRS[0]]
    return {"parts": table, "false_alarms": false_alarms(ham, rows), "left_out": left_out(ham, rows)}


def show(record: dict[str, Any]) -> None:
    """Print the record as tables."""
    print("| images | rare, others | in the part | of these by source | seen |\n|---|---|---|---|---|")
    for row in record["parts"]:
        counts = f"| {row['images']} | {row['counts'][1]:,}, {row['counts'][0]:,} |"
        for part in row["parts"]:
            inside, total = part["inside"], part["total"]
            shares = ", ".join(f"{n} ({n / of:.1%})" for n, of in zip(inside, total, strict=True))
            sources = ", ".join(f"{name} {number}" for name, number in sorted(part["sources"].items()))
            print(f"{counts} {shares}{'' if part['rare'] else ' (of the others)'} | {sources} |"
                  f" {', '.join(part['higher'])} / {', '.join(part['lower'])} |")  # fmt: skip
        if not row["parts"]:
            print(f"{counts} none | | |")
    alarms = record["false_alarms"]
    print(f"\nShuffled labels: a part in {alarms['alarms']} of {alarms['data_sets']} data sets.\n")
    for fact in record["left_out"]:
        print(fact["text"])


def main() -> None:
    """Measure if a folder is given, and print the record."""
    parser = shared.parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, metavar="HAM10000")
    folder = parser.parse_args().folder
    if folder:
        shared.write_json(RECORD, measure(folder.resolve()))
    show(shared.read_json(RECORD))


if __name__ == "__main__":
    main()
