"""Tables of the docs that come from one record of a study, as the pages show them.

    python studies/page_tables.py            # print all of them
    python studies/page_tables.py NAME       # print one

The studies print their records in full; a page leaves out rows and columns. studies/rebuild.py takes its tables from
here, so that no digit of them is typed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import shared

FOLDED = ("frequent recall", "rare recall", "rare precision", "accuracy", "uwa")
KINDS = {
    "known: mel": "held-back melanomas", "known: df": "held-back dermatofibromas", "charts": "charts",
    "screenshots": "screenshots", "noise": "noise", "solar cells": "solar cells", "vasc": "vascular lesions",
    "bcc": "basal cell carcinomas", "akiec": "actinic keratoses", "bkl": "benign keratoses", "nv": "naevi",
}  # fmt: skip


def record(name: str) -> Any:
    """Return a record that is one JSON file."""
    return json.loads((shared.RECORDS / name).read_text(encoding="utf-8"))


def percent(value: float) -> str:
    """Return a share in per cent without its sign."""
    return f"{100 * value:.1f}"


def between(values: Sequence[float], scale: float = 100.0) -> str:
    """Return a value and its limits."""
    value, low, high = (scale * one for one in values)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def folds_coverage() -> str:
    """Return how often intervals with folds contain the truth (docs/folds.md)."""
    kinds = ("ours", "cluster bootstrap", "without groups")
    rows = [
        (name, *(percent(found[what][f"{kind}, coverage"]) for what in ("uwa", "auroc") for kind in kinds))
        for name, found in record("coverage_folds.json")["settings"].items()
    ]
    names = [f"{what}{kind}" for what in ("balanced accuracy", "AUROC")
             for kind in ("", ", cluster bootstrap", ", groups ignored")]  # fmt: skip
    return shared.table(f"data | {' | '.join(names)}", rows)


def decided_coverage() -> str:
    """Return the same of decisions, with and without the component between folds (docs/folds.md)."""
    kinds = ("ours, coverage", "images alone, coverage")
    rows = []
    for name, found in record("threshold_coverage.json")["settings"].items():
        pairs = ([percent(found[what][kind]) for kind in kinds] for what in FOLDED)
        rows.append((name, *(f"{ours} ({alone})" for ours, alone in pairs)))
    head = "recall of the frequent class | recall of the rare class | precision of the rare class"
    return shared.table(f"data | {head} | accuracy | balanced accuracy", rows)


def folds_gain() -> str:
    """Return the intervals of a test split and of folds (docs/folds.md)."""
    words = {"split": "test split of 15 %", "folds": "five folds"}
    rows = [
        (words[run["what"]], run["rare"], *(between(run[name], 1) for name in ("uwa", "auroc", "recall")))
        for run in record("folds.json")["runs"]
    ]
    return shared.table("images | rare test images | balanced accuracy | AUROC | recall of dermatofibroma", rows)


def compared_coverage() -> str:
    """Return how often intervals of a difference contain the truth (docs/compare.md)."""
    kinds = ("naive", "corrected", "images", "bootstrap", "corrected_width", "images_width")
    settings = record("fold_coverage.json")["settings"]
    rows = [(name, *(percent(found["uwa"][kind]) for kind in kinds)) for name, found in settings.items()]
    head = "setting | naive | corrected | images | bootstrap | width, corrected | width, images"
    return shared.table(head, rows)


def thresholds() -> str:
    """Return what fitted rules lose to the best one (docs/decisions.md)."""
    words = {"plain": "`plain`", "best threshold": "highest validation balanced accuracy", "balanced": "`balanced`",
             "balanced, calibrated": "`balanced`, calibrated", "tuned 0.25 1": "`tuned`"}  # fmt: skip
    lines, numbers = record("thresholds.json")["rows"], (5, 10, 20, 30, 100)
    rows = []
    for rule, told in words.items():
        losses = ([line["loses"] for line in lines if (line["rule"], line["rare"]) == (rule, n)] for n in numbers)
        rows.append((told, *(f"{np.mean(values):.1f}" for values in losses)))
    return shared.table(f"rare validation images | {' | '.join(map(str, numbers))}", rows)


def ceiling() -> str:
    """Return how far rules are below the best threshold in hindsight (docs/decisions.md)."""
    words = {"plain": "`plain`", "balanced": "`balanced`", "balanced, temperature": "`balanced`, temperature",
             "balanced, calibrated": "`balanced`, calibrated", "tuned": "`tuned`",
             "highest test UWA": "highest test balanced accuracy"}  # fmt: skip
    return shared.table(
        "rule | 90:10 | 95:5 | 98:2",
        [
            (told, *(f"{mean:.1f} ({low:.1f} to {high:.1f})" for mean, low, high in _gaps(rule)))
            for rule, told in words.items()
        ],
    )


def ceiling_means() -> str:
    """Return the means of four of these rules (docs/understand/calibration.md)."""
    words = {"plain": "most probable class", "balanced": "divided by the prior, not calibrated",
             "balanced, temperature": "the same with a temperature",
             "balanced, calibrated": "the same with temperature and biases"}  # fmt: skip
    rows = [(told, *(f"{mean:.1f}" for mean, _, _ in _gaps(rule))) for rule, told in words.items()]
    return shared.table("rule | 90:10 | 95:5 | 98:2", rows)


def _gaps(rule: str) -> list[tuple[float, float, float]]:
    """Return mean, lowest and highest of the means over the losses, for each scenario."""
    lines = [line for line in shared.read(shared.RECORDS / "decisions.jsonl") if line["study"] == "rules"]
    found = []
    for scenario in ("90:10", "95:5", "98:2"):
        methods: dict[str, list[float]] = {}
        for line in (line for line in lines if line["scenario"] == scenario):
            methods.setdefault(line["method"], []).append(line["uwa"]["ceiling"] - line["uwa"][rule])
        means = [float(np.mean(values)) for values in methods.values()]
        found.append((float(np.mean(means)), min(means), max(means)))
    return found


def looks() -> str:
    """Return how many images must be looked at (docs/find.md)."""
    cases = [record("find.json")[name] for name in ("isic", "fashion")]
    rows = []
    for name in cases[0]["looks"]:
        found = [case["looks"][name] for case in cases]
        told = f"`{name}`" if name.startswith("find") else "plain: logistic regression on 16 x 16 pixels"
        rows.append((told, *(f"{one['mean']:.0f} ({min(one['each'])} to {max(one['each'])})" for one in found)))
    rows.append(("random, expected", *(f"{case['random']:,.0f}" for case in cases)))
    sizes = [f"{case['pool']['all']:,.0f}" for case in cases]
    return shared.table(f"order | ISIC 2018, pool of {sizes[0]} | Fashion-MNIST, pool of {sizes[1]}", rows)


def familiar() -> str:
    """Return which images are marked as unlike the training images (docs/trust.md)."""
    kinds, rows = record("familiar.json")["kinds"], []
    for kind, told in KINDS.items():
        row = kinds[kind]
        area = "" if kind.startswith("known") else percent(row["auroc"])
        shares = [f"{percent(row[level])} %" for level in ("at 0.01", "at 0.05")]
        rows.append((told, row["images"], *shares, area, row["called_rare"], row["called_rare_unmarked"]))
    head = "images | number | marked at 1 % | at 5 % | AUROC | called dermatofibroma | of these unmarked"
    return shared.table(head, rows)


def sets() -> str:
    """Return how often each class is in its prediction set (docs/trust.md)."""
    found, rows = record("sets.json"), []
    shown = [
        *((row, f"simulated, {n} images per group" if n > 1 else "simulated, single images")
          for n in (1, 4) for row in found["simulated"]
          if row["per_group"] == n and row["level"] == 0.95 and row["images"] in (10, 20, 50, 200)),
        *((row, "lesions of ISIC 2018") for row in found["real"]
          if (row["images"], row["level"]) in ((20, 0.9), (50, 0.9), (50, 0.95))),
    ]  # fmt: skip
    for row, told in shown:
        rare = between(row["rare"]) + (" (in every set)" if row["enough"] == 0 else "")
        share = f"{100 * row['one']:.0f} %"
        rows.append((row["images"], told, f"{100 * row['level']:.0f} %", rare, between(row["common"]), share))
    return shared.table(
        "rare images | calibration | level | rare class in its set | common class | sets of one class", rows
    )


def cameras() -> str:
    """Return the metrics on each source that a model was trained without (docs/trust.md)."""
    facts = record("cameras.json")["left_out"]
    found = next(fact["values"] for fact in facts if fact["kind"] == "left_out_sources")
    rows = [
        (one["source"], ", ".join(map(str, one["counts"])), f"{one['auroc']:.3f}", f"{one['uwa']:.3f}")
        for one in found["sources"]
    ]
    totals = np.sum([one["counts"] for one in found["sources"]], axis=0)
    whole = (f"{found['by_folds']:.3f}", f"{found['uwa_by_folds']:.3f}")
    rows.append(("none: folds", ", ".join(f"{number:,}" for number in totals), *whole))
    return shared.table("source left out | df, mel | AUROC | balanced accuracy", rows)


def released() -> str:
    """Return what the normalisation of the released code changes (docs/losses.md)."""
    wanted = ((64, "ACL(300)"), (13, "CL"), (13, "ACL(300)"), (3, "CL"), (3, "ACL(300)"))
    found = {(row["minority"], row["loss"]): row for row in record("released_normalization.json")}
    rows = []
    for key in wanted:
        row = found[key]
        shares = [f"{row[name]:#.2g}" if row[name] < 0.1 else f"{row[name]:.2f}" for name in ("paper", "released")]
        rows.append((f"{key[0]} of {row['batch']}", key[1], *shares, f"{row['cosine of the gradients']:.2f}"))
    head = "minority in the batch | loss | its share of the loss, paper | released | cosine of the two gradients"
    return shared.table(head, rows)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "folds.md": {
        "folds-coverage": folds_coverage, "folds-decided": decided_coverage, "folds-gain": folds_gain
    },
    "compare.md": {"compared-coverage": compared_coverage},
    "decisions.md": {"thresholds": thresholds, "ceiling": ceiling},
    "understand/calibration.md": {"ceiling-means": ceiling_means},
    "find.md": {"looks": looks},
    "trust.md": {"familiar": familiar, "sets": sets, "cameras": cameras},
    "losses.md": {"released": released},
}  # fmt: skip
"""The tables of each page, by the names of their marks."""


def main() -> None:
    """Print one table, or all."""
    parser = shared.parser(__doc__)
    names = {name: make for tables in PAGES.values() for name, make in tables.items()}
    parser.add_argument("name", choices=names, nargs="?")
    chosen = parser.parse_args().name
    for name, make in names.items():
        if chosen in (None, name):
            print(make() if chosen else f"{name}\n{make()}\n")


if __name__ == "__main__":
    main()
