"""Names of images and classes: glob patterns, pairs of files with one name, and class names that look like typos.

Groups also come from names: from the folder that holds an image, or a pattern such as ``{group}_*``; or from tags.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath, PurePosixPath
from typing import TYPE_CHECKING

from lopsided.data.dicom import PATIENT, SUFFIXES, tags_of
from lopsided.data.images import FileImages, Images
from lopsided.data.sources.listing import Listing
from lopsided.data.stored import Stored
from lopsided.errors import DataError, InputError, sentence
from lopsided.facts import Fact, cautions

if TYPE_CHECKING:
    from lopsided.data.sources.source import Source


_FEW_TYPOS = 10
_TYPO_SHARE = 0.1
"""A class with a similar name is reported as a typo if it has fewer images than this, and at most this share of the
images of the other class. Real classes often have similar names, such as grade-a and grade-b.
"""
_LONG_NAME = 5
"""Letters of a name that is noticed if it lacks one letter of another name."""


@dataclass(frozen=True)
class Patterns:
    """Glob patterns that select images by name: the path below the folder of the data, with forward slashes.

    An image is kept if a pattern of ``include`` matches, or there is none, and no pattern of ``exclude`` matches. ``*``
    matches any text, also with slashes. A pattern may match the whole name or the end of the name after a slash. Upper
    and lower case differ.

    >>> patterns = Patterns(exclude=("*.png", "masks/*"))
    >>> [patterns.keep(name) for name in ("Crack/1.jpg", "Crack/1.png", "Crack/masks/1.jpg")]
    [True, False, False]
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def __str__(self) -> str:
        return " ".join(f"{word}={pattern!r}" for word in ("include", "exclude") for pattern in getattr(self, word))

    def keep(self, name: str) -> bool:
        """Return whether the patterns keep an image with this name."""
        included, excluded = self._compiled
        if included and not any(pattern.match(name) for pattern in included):
            return False
        return not any(pattern.match(name) for pattern in excluded)

    @cached_property
    def _compiled(self) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
        def compiled(patterns: Sequence[str]) -> list[re.Pattern[str]]:
            return [re.compile(f"(?s:.*/)?{fnmatch.translate(pattern)}") for pattern in patterns]

        return compiled(self.include), compiled(self.exclude)


@dataclass
class Twins:
    """Counts images with the name of another image of the same folder, except for the suffix: x.jpg and x.png.

    Such a pair is often a photograph and its mask. ``number`` counts the pairs, ``first`` is the first one. Only the
    names of folders that are still open are held: the folder of the last image and the folders around it.
    """

    number: int = 0
    first: tuple[str, str] | None = None
    _suffixes: Counter[str] = field(default_factory=Counter)
    _seen: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Count one image. The images of a folder must not be interrupted by another folder outside of it."""
        folder, file = os.path.split(name)
        if folder not in self._seen:
            self._seen = {key: seen for key, seen in self._seen.items() if folder.startswith(key)}
            self._seen[folder] = {}
        stem, suffix = os.path.splitext(file)
        other = self._seen[folder].setdefault(stem, name)
        if other != name:
            self.number += 1
            self.first = self.first or (other, name)
            self._suffixes.update({suffix, os.path.splitext(other)[1]})

    def cautions(self) -> list[Fact]:
        """Return a caution if there are pairs."""
        if self.first is None:
            return []
        # Masks are PNG files more often than not: a JPEG changes the values of a mask.
        likely = max(sorted(self._suffixes), key=lambda suffix: (suffix.lower() == ".png", self._suffixes[suffix]))
        return [cautions.same_stems(self.number, list(self.first), likely)]


def twins(names: Iterable[str]) -> Twins:
    """Return the pairs among the names of images, in any order."""
    found = Twins()
    for name in sorted(names, key=lambda name: PurePath(name).parts):
        found.add(name)
    return found


def suggest_names(wrong: Iterable[str], known: Sequence[str]) -> str:
    """Return "Did you mean ...?" with the class name closest to each wrong name, or "" if none is close.

    >>> suggest_names(["Brake", "crack", "zebra"], ["Break", "Crack"])
    'Did you mean Break, Crack?'
    """
    close = [near for name in wrong if (near := nearest_name(name, known))]
    return f"Did you mean {', '.join(dict.fromkeys(close))}?" if close else ""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar name, or None if no name is similar. Names that differ only in digits are not similar."""
    plain = _plain(name)
    others = {other: _plain(other) for other in known if _without_digits(other) != _without_digits(name)}
    others |= {other: _plain(other) for other in known if _plain(other) == plain}
    same = [other for other, text in others.items() if text == plain]
    if same:
        return same[0]
    scores = {
        other: difflib.SequenceMatcher(None, plain[:100], text[:100], autojunk=False).ratio()
        for other, text in others.items()
    }
    best = max(scores, key=scores.__getitem__, default=None)
    return best if best is not None and scores[best] >= 0.75 else None


def typos(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return pairs of class names of which the first one looks like a typo of the second one, which has more images.

    >>> typos({"Break": 70, "Brake": 1, "Crack": 50, "crack": 40, "Fray": 60})
    [('Brake', 'Break'), ('crack', 'Crack')]
    """
    found = []
    for name, number in counts.items():
        if not number:
            continue
        larger = {other: n for other, n in counts.items() if other != name and (n, other) > (number, name)}
        larger = {other: n for other, n in larger.items() if n > number or _plain(other) == _plain(name)}
        near = nearest_name(name, larger)
        if near is None:
            continue
        few = number < _FEW_TYPOS and number <= _TYPO_SHARE * larger[near]
        if few or _plain(near) == _plain(name) or _lacks_letter(name, near) or _lacks_letter(near, name):
            found.append((name, near))
    return found


def _lacks_letter(name: str, other: str) -> bool:
    """Return whether a long name is another one without a letter inside or at its end, whatever their numbers.

    A first letter may change the meaning, and so may the last digit of a Roman number.

    >>> _lacks_letter("melanom", "melanoma"), _lacks_letter("typical", "atypical"), _lacks_letter("stage I", "stage II")
    (True, False, False)
    """
    short, long = _plain(name), _plain(other)
    if len(short) < _LONG_NAME or len(long) != len(short) + 1:
        return False
    same = next((i for i, (one, other) in enumerate(zip(short, long, strict=False)) if one != other), len(short))
    return same > 0 and short[same:] == long[same + 1 :] and long[same] not in "ivx0123456789"


def name_cautions(counts: Mapping[str, int], names: Iterable[str]) -> list[Fact]:
    """Return cautions about the names of classes, which have these numbers of images, and of images."""
    pairs = typos(counts)
    named = {name: counts[name] for pair in pairs for name in pair}
    similar = [cautions.similar_names([list(pair) for pair in pairs], named)] if pairs else []
    return [*similar, *twins(names).cautions()]


def _plain(name: str) -> str:
    """Return a name without case, spaces and punctuation."""
    return "".join(c for c in name.casefold() if c.isalnum()) or name


def _without_digits(name: str) -> str:
    return "".join(c for c in name.casefold() if not c.isdigit())


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
