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
import PIL
import torch

from lopsided.data.decoding import FileFacts, Pixels, UnreadableImageError, decode_image, hash_file
from lopsided.data.images import ordered_map
from lopsided.errors import RunError
from lopsided.inference.engine import Engine, Features
from lopsided.inference.feature_cache import JoinedSpace
from lopsided.inference.neighbours import Known
from lopsided.inference.probabilities import check_finite
from lopsided.models.model import Model, ModelCard
from lopsided.models.views import look

PACK = 512
"""Images of a pack. A killed search loses the work of at most one pack per machine."""
_BATCH = 64

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


class Scorer:
    """Scores the images of a pack with one model: probabilities, and nearness to known images if there are any.

    ``spaces`` cache the features of each view. ``keep`` returns the features of the encoder as well.
    """

    def __init__(
        self,
        model: Model,
        card: ModelCard,
        *,
        engine: Engine | None = None,
        known: Known | None = None,
        spaces: Sequence[JoinedSpace] = (),
        keep: bool = False,
        workers: int = 0,
    ) -> None:
        self.card, self.engine = card, engine or Engine(model, card.shape)
        self.known, self.spaces, self.keep = known, list(spaces), keep
        self.workers = workers or (os.cpu_count() or 1)

    def __call__(self, pack: Pack) -> Scores:
        """Score one pack."""
        num = len(pack.paths)
        facts = list(ordered_map(hash_file, pack.paths, self.workers))
        reasons, digests = [each.error for each in facts], [each.digest for each in facts]
        features = np.full((num, len(self.engine.views), self.card.features), np.nan, dtype=np.float32)
        readable = [row for row in range(num) if not reasons[row]]
        found = np.full((num, len(self.engine.views)), bool(self.spaces))
        for place, space in enumerate(self.spaces if readable else []):
            keys = [digests[row] for row in readable]
            features[readable, place], found[readable, place] = space.fetch(keys, self.card.features)
        missing = [row for row in readable if not found[row].all()]
        for row, error in self._encode(pack.paths, facts, missing, features):
            reasons[row], digests[row] = error.reason, ""
            features[row] = np.nan
        done = np.array([row for row in range(num) if not reasons[row]], dtype=np.int64)
        self._store([row for row in missing if not reasons[row]], digests, features)
        probabilities = np.full((num, len(self.card.classes)), np.nan)
        nearness = None if self.known is None else np.full(num, np.nan)
        if len(done):
            mean = self.mean(features[done])
            probabilities[done] = self.engine.probabilities(self.engine.adapt(mean))
            check_finite(probabilities[done])
            if self.known is not None and nearness is not None:
                nearness[done] = self.known.nearness(mean)
        kept = features.reshape(num, -1) if self.keep else None
        return Scores(pack, tuple(reasons), tuple(digests), probabilities, nearness, kept, self.made_by)

    def mean(self, features: Features) -> Features:
        """Return the mean over the views, (n, f), given the features of all views, (n, v, f) or side by side."""
        num = len(self.engine.views)
        return self.engine.average(list(features.reshape(len(features), num, -1).swapaxes(0, 1)))

    def means(self, parts: Iterable[Pack]) -> Features:
        """Return the features of packs, (n, f). The features of all views are held for one pack at a time.

        The scorer must ``keep`` features.
        """
        return np.concatenate([self.mean(each.features) for each in self.map(parts) if each.features is not None])

    @property
    def made_by(self) -> str:
        """The libraries that decode images and compute features, with their versions."""
        return f"{self.engine.name}, pillow {PIL.__version__}"

    def map(self, parts: Iterable[Pack]) -> Iterator[Scores]:
        """Score packs, one after the other."""
        return map(self, parts)

    def _encode(
        self, paths: Sequence[Path], facts: Sequence[FileFacts], rows: Sequence[int], features: Features
    ) -> Iterator[tuple[int, UnreadableImageError]]:
        """Write the features of the images at ``rows``. Yield those that cannot be decoded."""
        card = self.card

        def decode(row: int) -> tuple[int, Pixels | UnreadableImageError]:
            return row, decode_for(paths[row], card, facts[row])

        decoded = ordered_map(decode, rows, self.workers)
        while batch := list(islice(decoded, _BATCH)):
            good = [(row, pixels) for row, pixels in batch if not isinstance(pixels, UnreadableImageError)]
            if good:
                stacked = torch.from_numpy(np.stack([pixels for _, pixels in good]))
                rows_here = [row for row, _ in good]
                for place, view in enumerate(self.engine.views):
                    features[rows_here, place] = self.engine.encode(look(stacked, view))
            yield from ((row, pixels) for row, pixels in batch if isinstance(pixels, UnreadableImageError))

    def _store(self, rows: Sequence[int], digests: Sequence[str], features: Features) -> None:
        kept = [row for row in rows if np.isfinite(features[row]).all()]
        try:
            for place, space in enumerate(self.spaces if kept else []):
                space.store([digests[row] for row in kept], features[kept, place])
        except RunError:  # A full disk must not stop the search; the features are computed again next time.
            self.spaces = []


def decode_for(path: Path, card: ModelCard, facts: FileFacts | None = None) -> Pixels | UnreadableImageError:
    """Return the pixels of a file as a model takes them, or the error if it cannot be read."""
    try:
        pixels = decode_image(path, card.image_size, card.channels, facts)
    except UnreadableImageError as error:
        return error
    if pixels.shape != card.shape:  # Possible only if images are not resized.
        sizes = [f"{shape[2]} x {shape[1]}" for shape in (pixels.shape, card.shape)]
        return UnreadableImageError(path, f"{sizes[0]} pixels, but the model takes {sizes[1]}")
    return pixels
