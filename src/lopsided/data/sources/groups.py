"""Groups of images from their names: the folder that holds them, or a pattern such as ``{group}_*``; and from tags."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from lopsided.data.dicom import PATIENT, SUFFIXES, tags_of
from lopsided.data.images import FileImages, Images
from lopsided.data.sources.listing import Listing
from lopsided.data.stored import Stored
from lopsided.errors import DataError, InputError, sentence
from lopsided.facts import Fact, cautions

if TYPE_CHECKING:
    from lopsided.data.sources.source import Source

PARENT = "parent"
"""The value of ``--group`` that means the folder of an image, inside the folder of its class."""
PLACE = "{group}"
"""Where the group stands in a pattern of ``--group-from``."""
_MARK = "\ue000"
"""Stands for the place while the pattern is translated: a character for private use, which no name has."""


def no_groups(listing: Listing, group: str) -> Listing:
    """Raise, because the images of a known data set have no groups."""
    do = "Only a folder, a table or isic2018 can have groups. Leave out --group."
    raise InputError(f"{listing.name} has no group {group!r}. {do}")


def of_folder(listing: Listing, group: str) -> Listing:
    """Return a listed folder with groups: by the folder of each image, or by a tag of DICOM files."""
    if group == PARENT:
        return by_parent(listing)
    if is_dicom_folder(listing.images):
        return by_tag(listing, group)
    must = f"--group of a folder must be {PARENT}, for images in one sub-folder per group"
    do = f"Or take groups from the names of files, as in --group-from '{PLACE}_*', or from a column of a table."
    raise InputError(sentence(must, repr(group), do))


def is_dicom_folder(images: Images) -> bool:
    """Return whether all images are DICOM files, by their names."""
    return isinstance(images, FileImages) and all(path.suffix.lower() in SUFFIXES for path in images.paths)


def by_tag(listing: Listing, keyword: str) -> Listing:
    """Return a listing of DICOM files with a tag, such as PatientID, as the group of each."""
    assert isinstance(listing.images, FileImages)
    groups = tags_of(listing.images.paths, keyword)
    without = [name for name, group in zip(listing.names, groups, strict=True) if not group]
    if without:
        got = f"{len(without):,} of {len(groups):,} without in {listing.where}, the first {without[0]}"
        raise DataError(sentence(f"every DICOM file must have a {keyword}", got))
    return replace(listing, groups=groups)


def by_parent(listing: Listing) -> Listing:
    """Return a listed folder with the folder of each image as its group: cat/p17/1.png is of the group p17.

    Folders of the same name in two classes are one group, such as a patient with both findings.
    """
    above = 1 if listing.splits is None else 2
    parts = [PurePosixPath(name).parts for name in listing.names]
    loose = [name for name, path in zip(listing.names, parts, strict=True) if len(path) < above + 2]
    if loose:
        got = f"{len(loose):,} of {len(parts):,} directly in the folder of their class, the first {loose[0]}"
        do = f"Or take groups from the names of files, as in --group-from '{PLACE}_*'."
        raise DataError(sentence("--group parent needs images in one sub-folder per group", got, do))
    return replace(listing, groups=[path[-2] for path in parts])


def by_pattern(listing: Listing, pattern: str) -> Listing:
    """Return a listing with the part of each name that stands at ``{group}`` in a pattern as its group."""
    groups = groups_of(listing.names, pattern)
    missed = [name for name, group in zip(listing.names, groups, strict=True) if group is None]
    if missed:
        got = f"{len(missed):,} of {len(groups):,} without in {listing.where}, the first {missed[0]}"
        do = "Change the pattern, or leave these images out with --exclude."
        raise DataError(sentence(f"every image must have a group by the pattern {pattern!r}", got, do))
    return replace(listing, groups=[group for group in groups if group is not None])


def groups_of(names: Sequence[str], pattern: str) -> list[str | None]:
    """Return the group of each name; None if the pattern does not match.

    ``{group}`` matches a shortest text without a slash, ``*`` any text, also with slashes. As with ``--include``, a
    pattern may match the whole name or its end after a slash.

    >>> groups_of(["shirt/p17_left.png", "shirt/p17/left.png"], "{group}_*")
    ['p17', None]
    >>> groups_of(["shirt/p17/left.png", "shirt/left.png"], "shirt/{group}/*")
    ['p17', None]
    """
    if pattern.count(PLACE) != 1:
        do = f"For example --group-from '{PLACE}_*' for p17_left.png."
        raise InputError(sentence(f"--group-from must hold {PLACE} once", repr(pattern), do))
    shape = fnmatch.translate(pattern.replace(PLACE, _MARK)).replace(_MARK, "([^/]+?)")
    compiled = re.compile(f"(?s:.*/)?{shape}")
    matches = (compiled.match(name) for name in names)
    return [None if match is None else match[1] for match in matches]


def patient_cautions(source: Source) -> list[Fact]:
    """Return a caution if DICOM files of one patient may be in two splits, because the source has no groups."""
    if source.groups is not None or not isinstance(source.images, FileImages) or not is_dicom_folder(source.images):
        return []
    if any(isinstance(path, Stored) for path in source.images.paths):  # To fetch all files again takes too long.
        return []
    patients = Counter(filter(None, tags_of(source.images.paths, PATIENT)))
    several = [patient for patient, number in patients.items() if number > 1]
    return [cautions.same_patients(len(several), sum(map(patients.__getitem__, several)))] if several else []
