"""How many images like the known ones are marked as unfamiliar, and how often is there a false alarm of drift?

    python studies/false_alarms.py simulated         adds to studies/records/false_alarms.jsonl what it lacks
    python studies/false_alarms.py real --features F the same for lesions and solar cells; F is that of few.py
    python studies/false_alarms.py summary           prints the table of the record

A row has so many known groups with so many images each, 200 times. Simulated features have 20 columns with Student's t
of 4 degrees; images of one group differ by a tenth of that. Real ones are features of the recipe few of melanomas or of
intact solar cells, which have no groups. ``groups`` is the share of new images, each of a new group, with a typicality
of at most the level. ``images`` is the same if images were counted instead of groups. ``drift`` is the share of 20 new
groups with as many images for which the test of drift has a p-value below 0.01, and ``single`` the same if the test
does not know the groups of the new images. All are in per cent, with the 95 % interval of the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import shared
from lopsided.evaluation.drift import compare
from lopsided.evaluation.intervals import mean_interval, share_interval
from lopsided.evaluation.typicality import codes_of, make_bank
from shared import Floats, Line

RECORD = shared.RECORDS / "false_alarms.jsonl"
REPEATS, NEW, LEVELS = 200, 20, (0.01, 0.05, 0.1)
ROWS = ((10, 1), (20, 1), (50, 1), (100, 1), (400, 1), (20, 10), (60, 5), (120, 5), (400, 5))
WIDTH, ALIKE = 20, 0.1
Draw = Callable[[np.random.Generator, int, int], Floats]


def simulated(generator: np.random.Generator, groups: int, size: int) -> Floats:
    """Return the features of groups of images that are alike."""
    alike = np.repeat(generator.standard_t(4, size=(groups, WIDTH)), size, axis=0)
    return (alike + ALIKE * generator.standard_t(4, size=alike.shape) * (size > 1)).astype(np.float32)


def measured(draw: Draw, groups: int, size: int) -> Line:
    """Return the shares of false alarms in 200 repeats."""
    generator, found = np.random.default_rng(0), []
    for _ in range(REPEATS):
        x = draw(generator, groups + 2 * NEW, size)
        names = np.repeat(np.arange(groups + 2 * NEW), size).astype(str)
        known = x[: groups * size]
        codes = codes_of(names[: len(known)], known)
        bank = make_bank(known, codes, known, codes, np.zeros(len(known), dtype=np.int64))
        assert bank is not None
        by_image = replace(bank, units=np.arange(len(bank.scores), dtype=np.int32))
        new, group = x[len(known) :], names[len(known) :]
        row = {}
        for name, other in (("groups", bank), ("images", by_image)):
            typicality = other.typicality(new[::size])
            row |= {f"{name} {level:g}": float(np.mean(other.is_unfamiliar(typicality, level))) for level in LEVELS}
        half = slice(0, NEW * size)
        typicality = bank.typicality(new[half])
        row["drift"] = float(compare(bank, typicality, 0.01, group[half]).is_alarm)
        row["single"] = float(compare(bank, typicality, 0.01).is_alarm)
        found.append(row)
    return {name: _interval([row[name] for row in found]) for name in found[0]}


def _interval(values: list[float]) -> list[float]:
    is_share = set(values) <= {0.0, 1.0}
    figure = share_interval(float(np.mean(values)), len(values), 0.95) if is_share else mean_interval(values)
    return [round(100 * value, 2) for value in (figure.value, figure.low, figure.high)]


def drawn_from(features: Floats) -> Draw:
    """Return a function that draws images without replacement, each its own group."""

    def draw(generator: np.random.Generator, groups: int, size: int) -> Floats:
        return features[generator.permutation(len(features))[: groups * size]]

    return draw


def table(lines: list[Line]) -> str:
    """Return the record as a table."""
    head = "images | known | marked at 1 % | at 5 % | at 1 % by images | drift | drift, groups not told"
    rows = []
    for line in lines:
        names = ("groups 0.01", "groups 0.05", "images 0.01", "drift", "single")
        shown = ["{:.1f} [{:.1f}, {:.1f}]".format(*line[name]) for name in names]
        known = f"{line['groups']} images" if line["size"] == 1 else f"{line['groups']} groups of {line['size']}"
        rows.append([line["data"], known, *shown])
    return shared.table(head, rows)


def main() -> None:
    """Measure what the record lacks, or print it."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["simulated", "real", "summary"])
    parser.add_argument("--features", type=Path, help="the folder of the features of studies/few.py")
    given = parser.parse_args()
    draws: dict[str, Any] = {}
    if given.what == "simulated":
        draws = {"simulated": simulated}
    elif given.what == "real":
        for data, name in (("isic", "melanomas"), ("cells", "solar cells")):
            content = np.load(given.features / f"{data}.npz")
            draws[name] = drawn_from(content["x"][content["rare"] == 0])
    for name, draw in draws.items():
        rows = ({"data": name, "groups": groups, "size": size} for groups, size in ROWS
                if size == 1 or name == "simulated")  # fmt: skip
        shared.compute_missing(RECORD, rows, lambda row, of=draw: measured(of, row["groups"], row["size"]))
    print(table(shared.read(RECORD)))


if __name__ == "__main__":
    main()
