"""The section of a run's page on doubtful labels and near-duplicates."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

from lopsided.facts.notes import wrong_label_words
from lopsided.recipe.words import amount
from lopsided.reports.run_data import SHOWN_LABELS
from lopsided.reports.run_words import Facts
from lopsided.reports.thumbnails import Thumbnails
from lopsided.reports.wording import clean
from lopsided.runs.folder import MAX_TABLE
from lopsided.runs.results import LABELS, NEAR_DUPLICATES, read_table

SHOWN_PAIRS = 12
"""Number of pairs of near-duplicates that a page shows."""
_DOUBTFUL = (
    "The probability of another class is as high as it is for images of that class on average. The number is the "
    "probability of the label. Check the labels: an image may be difficult and its label right. {} lists all images, "
    "the lowest probability first; its column suspect marks these."
)
_UNUSUAL = (
    "The number is the probability that the image is normal. If one of them is a rare image, move it out of the folder "
    "and fit again: it counts as normal now. {} lists all images, the most unusual first."
)
ACROSS = {"label": "other label", "group": "other group", "image": "same label"}


def labels_section(folder: Path, pictures: Thumbnails, facts: Facts) -> dict[str, Any] | None:
    """Return the section on doubtful labels and near-duplicates; None if the run has no label check that fits it."""
    rows = read_table(folder / LABELS, MAX_TABLE)
    if not rows or not {"name", "label", "suggested", "suspect", "p_label"} <= set(rows[0]):
        return None
    is_alone = facts.metrics.only_class is not None
    suspects = [row for row in rows if is_alone or row["suspect"] == "yes"]  # The most doubtful label comes first.
    if facts.focus is not None:
        suspects.sort(key=lambda row: facts.classes[facts.minority] not in (row["label"], row["suggested"]))
    tiles = list(islice((tile for row in suspects if (tile := _label_tile(row, pictures))), SHOWN_LABELS))
    pairs = read_table(folder / NEAR_DUPLICATES, MAX_TABLE)
    wanted = {"similarity", "across", "name", "label", "other_name", "other_label"}
    pairs = [pair for pair in pairs if wanted <= set(pair) and pair["across"] in ACROSS]
    pairs.sort(key=lambda pair: list(ACROSS).index(pair["across"]))
    wrong = None if facts.metrics.folds is None else facts.metrics.folds.wrong_labels
    number = ""
    if wrong is not None and wrong.value is not None and wrong.low is not None and wrong.high is not None:
        number = f"{wrong_label_words(wrong.value, wrong.low, wrong.high, len(rows))} "
    words = (
        f"{number}{amount(len(suspects), 'image looks', 'images look')} like another class than the label says. "
        f"Shown: {len(tiles):,} of {len(suspects):,}, the most doubtful first."
        if suspects and not is_alone
        else f"The {len(tiles):,} most unusual of {amount(len(rows), 'image')}, by models that did not see the image."
        if is_alone
        else f"No label of {amount(len(rows), 'image')} is in doubt, by models that did not see the image."
    )
    return {
        "is_alone": is_alone,
        "title": "Most unusual images" if is_alone else "Label check",
        "aside": (_UNUSUAL if is_alone else _DOUBTFUL).format(LABELS),
        "words": words,
        "tiles": tiles,
        "pairs": [_pair(pair, pictures) for pair in pairs[:SHOWN_PAIRS]],
        "pair_words": _pair_words(pairs) if (folder / NEAR_DUPLICATES).is_file() else "",
        "file": LABELS,
        "pair_file": NEAR_DUPLICATES,
    }


def _label_tile(row: dict[str, Any], pictures: Thumbnails) -> dict[str, Any] | None:
    try:
        p = float(row["p_label"])
    except ValueError:
        return None
    if not math.isfinite(p):
        return None
    return {
        "name": clean(row["name"]),
        "group": clean(row.get("group", "")),
        "label": clean(row["label"]),
        "suggested": clean(row["suggested"]),
        "p": p,
        "picture": pictures.of(row["name"]),
    }


def _pair(row: dict[str, Any], pictures: Thumbnails) -> dict[str, Any]:
    def one(prefix: str) -> dict[str, str]:
        name, label = row[f"{prefix}name"], row[f"{prefix}label"]
        return {"name": clean(name), "label": clean(label), "picture": pictures.of(name)}

    return {"similarity": clean(row["similarity"]), "across": ACROSS[row["across"]], "images": [one(""), one("other_")]}


def _pair_words(pairs: list[dict[str, Any]]) -> str:
    if not pairs:
        return "No two images of different labels, groups or names have nearly the same features."
    across = sum(pair["across"] == "label" for pair in pairs)
    some = f"{amount(len(pairs), 'pair')} of images with nearly the same features"
    return f"{some}; {across:,} of them with different labels."
