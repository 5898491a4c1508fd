"""The section of a run page about doubtful labels and near-duplicates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lopsided.recipe.words import amount
from lopsided.reports.run_data import Judged
from lopsided.reports.thumbnails import Thumbnails
from lopsided.reports.wording import clean
from lopsided.runs.folder import MAX_TABLE
from lopsided.runs.labels import LABELS, NEAR_DUPLICATES, read_table

SHOWN = 24
"""Number of doubtful labels that a page shows."""
SHOWN_PAIRS = 12
"""Number of pairs of near-duplicates that a page shows."""
ACROSS = {"label": "other label", "group": "other group", "image": "same label"}


def labels_section(folder: Path, listed: Judged, pictures: Thumbnails) -> dict[str, Any] | None:
    """Return the context of the section, or None if the run has no label check or it does not fit the predictions.

    ``listed`` are the images of the page, which have the pictures.
    """
    rows = read_table(folder / LABELS, MAX_TABLE)
    places = {name: i for i, name in enumerate(listed.names)}
    if not rows or not {"name", "label", "suggested", "suspect", "p_label"} <= set(rows[0]):
        return None
    number = sum(row["suspect"] == "yes" for row in rows)
    shown = [tile for row in rows[: min(SHOWN, number)] if (tile := _tile(row, places, pictures)) is not None]
    pairs = read_table(folder / NEAR_DUPLICATES, MAX_TABLE)
    wanted = {"similarity", "across", "name", "label", "other_name", "other_label"}
    pairs = [pair for pair in pairs if wanted <= set(pair) and pair["across"] in ACROSS]
    pairs.sort(key=lambda pair: list(ACROSS).index(pair["across"]))
    words = (
        f"About {amount(number, 'label')} of {amount(len(rows), 'image')} may be wrong, by models that did not see the "
        "image."
        if number
        else f"No label of {amount(len(rows), 'image')} is in doubt, by models that did not see the image."
    )
    return {
        "words": words,
        "tiles": shown,
        "pairs": [_pair(pair, places, pictures) for pair in pairs[:SHOWN_PAIRS]],
        "pair_words": _pair_words(pairs) if (folder / NEAR_DUPLICATES).is_file() else "",
        "file": LABELS,
        "pair_file": NEAR_DUPLICATES,
    }


def _tile(row: dict[str, Any], places: dict[str, int], pictures: Thumbnails) -> dict[str, Any] | None:
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
        "picture": pictures.classes(places[row["name"]]) if row["name"] in places else "",
    }


def _pair(row: dict[str, Any], places: dict[str, int], pictures: Thumbnails) -> dict[str, Any]:
    def one(prefix: str) -> dict[str, str]:
        name = row[f"{prefix}name"]
        return {
            "name": clean(name),
            "label": clean(row[f"{prefix}label"]),
            "picture": pictures.classes(places[name]) if name in places else "",
        }

    return {"similarity": clean(row["similarity"]), "across": ACROSS[row["across"]], "images": [one(""), one("other_")]}


def _pair_words(pairs: list[dict[str, Any]]) -> str:
    if not pairs:
        return "No two images of different labels, groups or names have nearly the same features."
    across = sum(pair["across"] == "label" for pair in pairs)
    some = f"{amount(len(pairs), 'pair')} of images with nearly the same features"
    return f"{some}; {across:,} of them with different labels."
