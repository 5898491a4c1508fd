"""Open records: the answer to each image of a study, from which a reader can compute every metric and interval anew.

A file of ``studies/answers/`` is a CSV table, compressed by gzip, with one row for each image that a method was judged
by. ``pandas.read_csv`` and ``zcat`` read it.

data, cell   the data set, and the setting in it
repeat, fold which random split, and which of its folds (0 if there are none)
method       the method
image        the name of the image, and ``group`` the lesion, person or object in it, if several images have one
label        the true class, as a number from 0; ``decided`` is the class that the method decides for
score        two classes: the log-odds of class 1, or what the method ranks images by. More classes: the logarithms of
             the probabilities, separated by spaces. Neither contains the shift of a decision rule.

Each method of a fold is one part of the file, which is written at once, so that a study can be stopped at any time.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lopsided.evaluation.intervals import Estimate
from shared import Floats

FOLDER = Path(__file__).parent / "answers"
COLUMNS = ("data", "cell", "repeat", "fold", "method", "image", "group", "label", "decided", "score")


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of one method to the test images of one fold."""

    data: str
    cell: str
    repeat: int
    fold: int
    method: str
    images: Sequence[str]
    labels: Floats
    decided: Floats
    scores: Floats
    groups: Sequence[str] | None = None

    def rows(self) -> Iterable[tuple[object, ...]]:
        """Yield the rows of the table."""
        key = (self.data, self.cell, self.repeat, self.fold, self.method)
        groups = [""] * len(self.images) if self.groups is None else self.groups
        scores = self.scores if self.scores.ndim > 1 else self.scores[:, None]
        for image, group, label, decided, row in zip(
            self.images, groups, self.labels, self.decided, scores, strict=True
        ):
            yield (*key, image, group, int(label), int(decided), " ".join(f"{value:.3f}" for value in row))


def add(path: Path, answers: Answers) -> None:
    """Append answers to a file."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if not path.exists():
        table.writerow(COLUMNS)
    table.writerows(answers.rows())
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(gzip.compress(text.getvalue().encode(), mtime=0))


def read(path: Path) -> list[Answers]:
    """Return the answers of a file, one item per method and fold, in the order of the file."""
    if not path.exists():
        return []
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(tuple(row[name] for name in COLUMNS[:5]), []).append(row)
    return [_joined(key, rows) for key, rows in found.items()]


def _joined(key: tuple[str, ...], rows: list[dict[str, str]]) -> Answers:
    data, cell, repeat, fold, method = key
    scores = np.array([[float(value) for value in row["score"].split()] for row in rows])
    return Answers(
        data, cell, int(repeat), int(fold), method, [row["image"] for row in rows],
        np.array([int(row["label"]) for row in rows]), np.array([int(row["decided"]) for row in rows]),
        scores[:, 0] if scores.shape[1] == 1 else scores,
        [row["group"] for row in rows] if rows[0]["group"] else None,
    )  # fmt: skip


def balanced_accuracy(answers: Sequence[Answers], weights: dict[str, float] | None = None) -> float:
    """Return the mean over classes of the share of right decisions, in percent, over all images of all answers.

    ``weights`` says how often each cluster counts.
    """
    right: dict[int, float] = {}
    number: dict[int, float] = {}
    for one in answers:
        weight = np.ones(len(one.labels)) if weights is None else np.array([weights.get(x, 0) for x in clusters(one)])
        for label in np.unique(one.labels):
            rows = one.labels == label
            right[label] = right.get(label, 0) + float((weight * (one.decided == label))[rows].sum())
            number[label] = number.get(label, 0) + float(weight[rows].sum())
    return 100 * float(np.mean([right[label] / number[label] if number[label] else 0 for label in number]))


def clusters(answers: Answers) -> Sequence[str]:
    """Return the lesion, person or object of each image, or else the image itself."""
    return answers.images if answers.groups is None else answers.groups


def bootstrap(
    one: Sequence[Answers], other: Sequence[Answers] = (), rounds: int = 1000, level: float = 0.95
) -> Estimate:
    """Return the balanced accuracy of ``one``, or its difference to ``other``, with a cluster bootstrap's interval.

    Clusters are drawn again, apart for each true class: all images of a lesion, in all folds and repeats, come
    together. The interval is about other test images; the trained models stay the same.
    """
    hits = {id(side): _hits(side) for side in (one, other)}
    names = sorted({name for table in hits.values() for name in table})
    classes = sorted({label for table in hits.values() for counts in table.values() for label in counts})
    index = {name: row for row, name in enumerate(names)}
    right = np.zeros((2, len(names), len(classes)))
    number = np.zeros((2, len(names), len(classes)))
    for side, answers in enumerate((one, other)):
        for name, counts in hits[id(answers)].items():
            for label, (good, total) in counts.items():
                right[side, index[name], classes.index(label)] = good
                number[side, index[name], classes.index(label)] = total
    main = np.array([max(range(len(classes)), key=lambda c: number[:, row, c].sum()) for row in range(len(names))])
    generator = np.random.default_rng(0)
    values = []
    for again in range(rounds + 1):
        weight = np.ones(len(names))
        if again:
            weight = np.zeros(len(names))
            for label in range(len(classes)):
                rows = np.flatnonzero(main == label)
                if len(rows):
                    weight += np.bincount(generator.choice(rows, len(rows)), minlength=len(names))
        sums = np.einsum("n,snc->sc", weight, right), np.einsum("n,snc->sc", weight, number)
        shares = np.divide(sums[0], sums[1], out=np.zeros_like(sums[0]), where=sums[1] > 0)
        means = [100 * shares[side][sums[1][side] > 0].mean() if sums[1][side].any() else 0.0 for side in range(2)]
        values.append(means[0] - means[1] if other else means[0])
    low, high = np.quantile(values[1:], [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(values[0]), float(low), float(high))


def _hits(side: Sequence[Answers]) -> dict[str, dict[int, tuple[int, int]]]:
    """Return, for each cluster and true class, the number of right decisions and of decisions."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for one in side:
        for name, label, decided in zip(clusters(one), one.labels, one.decided, strict=True):
            counts = found.setdefault(str(name), {})
            good, total = counts.get(int(label), (0, 0))
            counts[int(label)] = good + int(label == decided), total + 1
    return found
