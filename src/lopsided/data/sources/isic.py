"""ISIC 2018 task 3 (HAM10000) in its official folders, with the lesion of each image as its group.

Only the 10,015 training images are read, which the literature splits. The images are not part of this package:
CC BY-NC 4.0, Tschandl et al. 2018 (doi 10.1038/sdata.2018.161), Codella et al. 2019 (arXiv 1902.03368).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lopsided.data.images import FileImages
from lopsided.data.sources.listing import Listing, read_columns
from lopsided.errors import DataError, sentence

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
ALIASES = {
    "melanoma": "MEL",
    "melanocytic nevus": "NV",
    "nevus": "NV",
    "basal cell carcinoma": "BCC",
    "actinic keratosis": "AKIEC",
    "benign keratosis": "BKL",
    "dermatofibroma": "DF",
    "vascular lesion": "VASC",
}
INPUT = "ISIC2018_Task3_Training_Input"
TRUTH = "ISIC2018_Task3_Training_GroundTruth"
GROUPINGS = "ISIC2018_Task3_Training_LesionGroupings.csv"


def find_isic() -> Path:
    """Return the folder that holds the official folders, at or below ``$LOPSIDED_DATA``."""
    root = os.environ.get("LOPSIDED_DATA")
    repair = f"Unpack the official archives and set LOPSIDED_DATA to the folder that holds {INPUT}."
    if not root:
        raise DataError(f"isic2018 needs the environment variable LOPSIDED_DATA, which is not set. {repair}")
    for below in ("", "ISIC2018", "isic2018"):
        folder = isic_root(Path(root) / below)
        if folder is not None:
            return folder
    raise DataError(f"isic2018 is missing: LOPSIDED_DATA is {root}, which does not hold {INPUT}. {repair}")


def isic_root(folder: Path) -> Path | None:
    """Return the folder or its sub-folder ISIC2018, whichever has the official layout; None if neither has."""
    return next((place for place in (folder, folder / "ISIC2018") if (place / INPUT).is_dir()), None)


def list_isic(folder: Path, *, classes: Sequence[str] | None, group: str | None) -> Listing:
    """List the training images. With ``classes``, the images of other classes may be missing."""
    truth = _first(folder, (f"{TRUTH}/{TRUTH}.csv", f"{TRUTH}.csv"), "ground truth")
    ids, labels = _read_truth(truth)
    if classes is not None:
        asked = {ALIASES.get(name.lower(), name.upper()) for name in classes}
        # If a class is unknown, all classes are kept, so that the error of the caller can list them.
        if asked <= set(labels):
            kept = [i for i, label in enumerate(labels) if label in asked]
            ids, labels = [ids[i] for i in kept], [labels[i] for i in kept]
    paths = [folder / INPUT / f"{name}.jpg" for name in ids]
    return Listing(
        name="isic2018",
        where=str(folder),
        table=truth,
        images=FileImages(paths),
        labels=labels,
        names=ids,
        order=CLASSES,
        groups=_read_groups(folder, ids, group or "lesion_id", required=group is not None),
        aliases=ALIASES,
    )


def _first(folder: Path, names: Sequence[str], what: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"isic2018 needs its {what}: {names[0]} is missing in {folder}.")


def _read_truth(truth: Path) -> tuple[list[str], list[str]]:
    columns = read_columns(truth)
    missing = [name for name in ("image", *CLASSES) if name not in columns]
    if missing:
        must = f"The ground truth must have the columns image, {', '.join(CLASSES)}"
        raise DataError(f"{must}, but {missing[0]} is missing in {truth}.")
    labels = []
    for row, cells in enumerate(zip(*(columns[name] for name in CLASSES), strict=True)):
        hot = [name for name, cell in zip(CLASSES, cells, strict=True) if cell in ("1", "1.0")]
        name = columns["image"][row]
        if len(hot) != 1:
            got = f"{' and '.join(hot) or 'none'} for {name} in {truth}"
            raise DataError(sentence("every image must have exactly one diagnosis", got))
        if not name.replace("_", "").replace("-", "").isalnum():
            raise DataError(sentence("an image id must consist of letters, digits, _ and -", f"{name!r} in {truth}"))
        labels.append(hot[0])
    if not labels:
        raise DataError(sentence("a table must name at least one image", f"no rows in {truth}"))
    return columns["image"], labels


def _read_groups(folder: Path, ids: Sequence[str], column: str, *, required: bool) -> list[str] | None:
    places = (GROUPINGS, f"{TRUTH}/{GROUPINGS}")
    if not required and not any((folder / name).is_file() for name in places):
        return None
    table = _first(folder, places, "lesion groupings")
    columns = read_columns(table)
    if "image" not in columns or column not in columns:
        got = f"{', '.join(columns)} in {table}"
        raise DataError(sentence(f"the lesion groupings must have the columns image and {column}", got))
    lesion = dict(zip(columns["image"], columns[column], strict=True))
    without = [name for name in ids if not lesion.get(name)]
    if without:
        got = f"{len(without)} without {column} in {table}, the first {without[0]}"
        raise DataError(sentence(f"every image must have a {column}", got))
    return [lesion[name] for name in ids]
