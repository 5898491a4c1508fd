"""Packs: a pool of images in parts of fixed size, each of which is scored by itself, here or on another machine.

The images of a pack do not depend on what was done before, and an image is always in the same batch. So a search that
was killed and continued, or shared among machines, gives the scores of one that was not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lopsided.inference.feature_cache import Features

PACK = 512
"""Images of a pack. A killed search loses the work of at most one pack per machine."""

Mapper: TypeAlias = Callable[[Iterable["Pack"]], Iterator["Scores"]]
"""Scores packs and yields the scores in the order of the packs."""


@dataclass(frozen=True)
class Pack:
    """Consecutive images of a pool. ``number`` counts the packs from 0."""

    number: int
    paths: tuple[Path, ...]

    @property
    def key(self) -> str:
        """A hash of the paths."""
        return hashlib.sha256(b"\0".join(map(os.fsencode, self.paths))).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of the images of a pack. Arrays hold one row per image; those of an unreadable image are NaN."""

    pack: Pack
    reasons: tuple[str, ...]
    """Why an image is unreadable; an empty text if it is not."""
    digests: tuple[str, ...]
    """The SHA-256 of each readable file."""
    probabilities: npt.NDArray[np.float64]
    nearness: npt.NDArray[np.float64] | None = None
    features: Features | None = None
    """Features of the encoder, if they were asked for: those of all views of an image side by side."""
    made_by: str = ""
    """The libraries that computed the features; see ``Scorer.made_by``."""


def packs(paths: Iterable[Path], size: int = PACK) -> Iterator[Pack]:
    """Yield the images of a pool in packs."""
    rest, number = iter(paths), 0
    while part := tuple(islice(rest, size)):
        yield Pack(number, part)
        number += 1


def joined(pack: Pack, parts: Sequence[Scores]) -> Scores:
    """Return the scores of a pack, given those of its parts in order."""
    near = [part.nearness for part in parts if part.nearness is not None]
    features = [part.features for part in parts if part.features is not None]
    return Scores(
        pack,
        tuple(reason for part in parts for reason in part.reasons),
        tuple(digest for part in parts for digest in part.digests),
        np.concatenate([part.probabilities for part in parts]),
        np.concatenate(near) if near else None,
        np.concatenate(features) if features else None,
        parts[0].made_by,
    )
