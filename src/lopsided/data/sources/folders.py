"""A folder with one sub-folder per class, or with the class folders under train/, val/ and test/."""

from __future__ import annotations

from pathlib import Path

from lopsided.data.decoding import SUFFIXES, is_image_name, walk_images
from lopsided.data.images import FileImages
from lopsided.data.sources.listing import SPLIT_NAMES, Listing
from lopsided.errors import DataError, sentence


def list_folder(folder: Path) -> Listing:
    """List the images of a folder. Hidden files and files without an image suffix are ignored.

    ``train``, ``val`` and ``test`` (or their longer names) are split folders in two cases: the folder holds ``train``
    and another split folder, or only ``train``; or it holds split folders only, and these hold folders and no images.
    Otherwise they are classes.
    """
    below = _folders(folder)
    splits = {child: SPLIT_NAMES[child.name.lower()] for child in below if child.name.lower() in SPLIT_NAMES}
    trains = "train" in splits.values() and (len(splits) > 1 or len(below) == 1)
    if not trains and not (splits and len(splits) == len(below) and all(_holds_folders(child) for child in splits)):
        rows = _class_rows(folder, (folder,))
        return _listing(folder, rows, None)
    others = [child.name for child in below if child not in splits]
    if others:
        names = ", ".join(sorted(child.name for child in splits))
        raise DataError(
            f"{folder} holds both splits ({names}) and a class ({others[0]!r}). Move one of them elsewhere."
        )
    if len(set(splits.values())) < len(splits):
        got = f"{', '.join(sorted(child.name for child in splits))} in {folder}"
        raise DataError(sentence("each split must have only one folder", got))
    rows, marks = [], []
    for child, split in splits.items():
        found = _class_rows(child, (folder, child))
        rows += found
        marks += [split] * len(found)
    return _listing(folder, rows, marks)


def _listing(folder: Path, rows: list[tuple[Path, str]], splits: list[str] | None) -> Listing:
    return Listing(
        name=folder.resolve().name,
        where=str(folder),
        images=FileImages([path for path, _ in rows]),
        labels=[label for _, label in rows],
        names=[path.relative_to(folder).as_posix() for path, _ in rows],
        splits=splits,
    )


def _folders(folder: Path) -> list[Path]:
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"Cannot read the folder {folder} ({error.strerror}).") from error
    return [child for child in children if child.is_dir() and not child.name.startswith(".")]


def _loose(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir() if is_image_name(child.name) and child.is_file())


def _holds_folders(folder: Path) -> bool:
    return bool(_folders(folder)) and not _loose(folder)


def _class_rows(folder: Path, above: tuple[Path, ...]) -> list[tuple[Path, str]]:
    loose = _loose(folder)
    if loose:
        got = f"{len(loose)} directly in {folder}, the first {loose[0]}"
        repair = "Put each image in the folder of its class."
        raise DataError(sentence("images must be in one sub-folder per class", got, repair))
    rows = []
    for child in _folders(folder):
        images = list(walk_images(child, above))
        if not images:
            repair = f"Add images or remove the folder (known suffixes: {' '.join(sorted(SUFFIXES))})."
            raise DataError(sentence("every class folder must hold at least one image", f"none in {child}", repair))
        rows += [(path, child.name) for path in images]
    if not rows:
        repair = "Put the images of each class in a separate sub-folder."
        raise DataError(sentence("a folder of images must hold one sub-folder per class", f"none in {folder}", repair))
    return rows
