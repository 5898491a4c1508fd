"""The one way from images to features and probabilities: views, cache, ranks, and onnxruntime or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import PIL
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lopsided.data.decoding import MAX_PIXELS, FileFacts, Pixels, UnreadableImageError, decode_image, read_pixels
from lopsided.data.images import Images, ordered_map
from lopsided.data.inputs import Indices, Inputs, Part, inputs_of, row_batches
from lopsided.data.stored import ImagePath, cells_of
from lopsided.errors import DataError, InputError, RunError, sentence
from lopsided.evaluation.typicality import Bank
from lopsided.inference.engine import Engine
from lopsided.inference.feature_cache import Features, Shelf, cache_root
from lopsided.inference.pool import Pack, Scores, joined
from lopsided.models.blocks.columns import encode
from lopsided.models.encoders import weights_hash
from lopsided.models.model import Model, ModelCard, look
from lopsided.ranks import ALONE, Ranks
from lopsided.recipe.blocks import FINAL, Cells

if TYPE_CHECKING:
    from lopsided.inference.neighbours import Known

Floats = npt.NDArray[np.float64]
_Number = TypeVar("_Number", np.float32, np.float64)


Counted = Callable[[int, int], None]
BATCH = 64
BLOCK = 2048
"""Images whose features of all views are in memory at a time."""
Read = tuple[ImagePath, FileFacts, Pixels | None]
"""Where an image is, what reading it told, and its pixels unless its features are cached."""
SIDE = 16
"""Side of the small images in pixels."""
_SMALL_BATCH = 256


class Scored(NamedTuple):
    """Probabilities (n, K), the inputs of the classifier (n, f) without positions, and typicality by a bank."""

    probabilities: Floats
    features: Features
    typicality: Floats | None


class Encoded(NamedTuple):
    """Images that were read, why some of them cannot be scored, and the features of all views, (n, views, f)."""

    batch: Sequence[Read]
    reasons: list[str]
    features: Features


class Scorer:
    """Scores images with one model, whose encoder must not change meanwhile.

    The features of each view of an image are cached on their own, by the SHA-256 of the image, and an image is decoded
    once for all views that are missing. ``cached`` is "all", "begun" to use only what an earlier run began to cache, or
    "none". ``small`` also keeps a small version of each image that is decoded. ``known`` are images to compare with,
    and ``bank`` those by which scores hold the typicality of an image. With ``keep``, scores of files hold the features
    of the encoder.
    """

    def __init__(
        self,
        model: Model,
        card: ModelCard,
        *,
        engine: Engine | None = None,
        ranks: Ranks = ALONE,
        cached: str = "all",
        small: SmallImages | None = None,
        known: Known | None = None,
        bank: Bank | None = None,
        keep: bool = False,
        batch_size: int = BATCH,
        workers: int = 0,
    ) -> None:
        self.card, self.engine, self.ranks = card, engine or Engine(model, card.shape), ranks
        if batch_size < 1:
            raise InputError(sentence("batch_size must be >= 1", batch_size))
        self.small, self.known, self.bank, self.keep, self.batch_size = small, known, bank, keep, batch_size
        self.workers, self.width = workers, card.features
        self._model, self._cached = model, cached if card.kind == "image" and cache_root() is not None else "none"

    @cached_property
    def shelves(self) -> list[Shelf]:
        """The cached features of each view; empty without a cache. Their place depends on the engine, too."""
        if self._cached == "none":
            return []
        columns, engine = _facts(self._model, self.card), {"engine": self.engine.name}
        shelves = [
            Shelf([(width, {**facts, **engine, **of_view}) for width, facts in columns])
            for of_view in ({} if view == "identity" else {"view": view} for view in self.engine.views)
        ]
        return shelves if self._cached == "all" or all(shelf.is_begun for shelf in shelves) else []

    def complete(self) -> bool:
        """Make the engine ready to compute features. Return whether it is another one than it was expected to be."""
        before = self.engine.name
        self.engine.complete()
        if self.engine.name == before:
            return False
        vars(self).pop("shelves", None)
        return True

    @property
    def problem(self) -> str | None:
        """The first disk error, after which features are no longer cached."""
        return next((shelf.problem for shelf in self.shelves if shelf.problem is not None), None)

    @property
    def made_by(self) -> str:
        """The libraries that decode images and compute features, with their versions."""
        return f"{self.engine.name}, pillow {PIL.__version__}"

    def images(self, images: Images, *, progress: Counted | None = None) -> Floats:
        """Return the probabilities (n, K) of images in the order of ``card.classes``, as ``judge`` does."""
        return self.judge(images, progress=progress).probabilities

    def judge(self, images: Images, *, progress: Counted | None = None) -> Scored:
        """Score images. The probabilities are in the order of ``card.classes``.

        Images are loaded batch by batch. An unreadable image raises an error, and so do probabilities that are not
        finite.
        """
        digests = images.digest(np.arange(len(images))) if self.shelves else None
        inputs = inputs_of(images, self.card.image_size, self.card.channels, self.workers)
        scored = self.score(inputs, digests, progress)
        check_finite(scored.probabilities)
        return scored

    def score(self, inputs: Inputs, digests: Sequence[str] | None = None, count: Counted | None = None) -> Scored:
        """Score inputs. Ranks share the work; all get all rows.

        ``digests`` are the SHA-256 of the images. Without digests, the cache is not used.
        """
        if digests is not None:
            return self._judged(self.features(inputs, digests, count), self.beside(inputs.cells()))
        share, sizes = share_rows(len(inputs), self.ranks)
        beside = self.beside(inputs.cells())
        parts = [self._judged(np.empty((0, self.width), dtype=np.float32), None if beside is None else beside[:0])]
        done = 0
        for rows, batch in inputs.batches(share[part] for part in row_batches(len(share), self.batch_size)):
            check_shape(batch, self.card)
            encoded = [self.engine.encode(look(batch, view)) for view in self.engine.views]
            parts.append(self._judged(self.engine.average(encoded), None if beside is None else beside[rows]))
            done += len(rows)
            if count is not None:
                count(done, len(share))
        typicality = [part.typicality for part in parts if part.typicality is not None]
        return Scored(
            gather_rows(np.concatenate([part.probabilities for part in parts]), sizes, self.ranks),
            gather_rows(np.concatenate([part.features for part in parts]), sizes, self.ranks),
            gather_rows(np.concatenate(typicality), sizes, self.ranks) if typicality else None,
        )

    def beside(self, cells: Sequence[Cells]) -> Features | None:
        """Return the features of columns of a table, given the cells beside each image; None: the model has none."""
        return encode(self.card.beside, cells) if self.card.beside else None

    def _judged(self, features: Features, beside: Features | None) -> Scored:
        """Score images, given the features of the encoder, (n, f), and those of columns of a table."""
        # Threads that share so little work mostly wait for each other, and keep the cores from those that decode.
        with _libraries().limit(limits=1) if len(features) <= BATCH else nullcontext():
            scaled = self.engine.scale(features)
            adapted = self.engine.adapted(scaled if beside is None else np.concatenate([scaled, beside], axis=1))
            typicality = None if self.bank is None else self.bank.typicality(self.engine.whole(scaled))
            return Scored(self.engine.probabilities(adapted), self.engine.whole(adapted), typicality)

    def features(self, inputs: Inputs, digests: Sequence[str] | None, count: Counted | None = None) -> Features:
        """Return features of the encoder, (n, f), of inputs in order: the mean over the views of the model."""
        return self.means(inputs, digests, [self.engine.views], count)[0]

    def means(
        self,
        inputs: Inputs,
        digests: Sequence[str] | None,
        sets: Sequence[Sequence[str]],
        count: Counted | None = None,
    ) -> list[Features]:
        """Return the features of ``features``, once for each of several sets of views of the model.

        Each image goes through the encoder once per view, whatever the number of sets.
        """
        share, sizes = share_rows(len(inputs), self.ranks)
        if len(self.engine.views) == 1:
            (alone,) = self._block(inputs, share, digests, count)
            assert all(tuple(views) == self.engine.views for views in sets)
            return [gather_rows(alone, sizes, self.ranks)] * len(sets)
        means, counted = [np.zeros((len(share), self.width), dtype=np.float32) for _ in sets], count
        for rows in row_batches(len(share), BLOCK):
            if count is not None and len(share) > BLOCK:  # Images in the cache count as done.
                counted = partial(_count_rows, count, int(rows[0]), len(rows), len(share))
            parts = dict(zip(self.engine.views, self._block(inputs, share[rows], digests, counted), strict=True))
            for features, views in zip(means, sets, strict=True):
                features[rows] = self.engine.average([parts[view] for view in views])
        return [gather_rows(features, sizes, self.ranks) for features in means]

    def _block(
        self, inputs: Inputs, share: Indices, digests: Sequence[str] | None, count: Counted | None
    ) -> list[Features]:
        """Return the features of the inputs ``share``, once for each view of the model."""
        views, keys = self.engine.views, None if digests is None else [digests[row] for row in share]
        parts = self._fetch(keys, len(share))
        if not all(found.all() for _, found in parts) and self.complete():
            parts = self._fetch(keys, len(share))
        missing = np.flatnonzero(~np.all([found for _, found in parts], axis=0))
        batches = inputs.batches(share[missing[part]] for part in row_batches(len(missing), BATCH))
        for done, (rows, batch) in zip(range(0, len(missing), BATCH), batches, strict=True):
            check_shape(batch, self.card)
            places = missing[done : done + BATCH]
            if self.small is not None and keys is not None:
                self.small.keep([keys[row] for row in places], batch)
            for place, (view, (features, found)) in enumerate(zip(views, parts, strict=True)):
                lacking = np.flatnonzero(~found[places])
                if len(lacking):
                    few = batch if len(lacking) == len(batch) else batch[torch.from_numpy(lacking)]
                    features[places[lacking]] = self.engine.encode(look(few, view))
                    if keys is not None:
                        self._keep(place, [keys[row] for row in places[lacking]], features[places[lacking]])
            if count is not None:
                count(done + len(rows), len(missing))
        self._flush()
        return [features for features, _ in parts]

    def _fetch(self, keys: Sequence[str] | None, num: int) -> list[tuple[Features, npt.NDArray[np.bool_]]]:
        """Return the cached features of each view, and which rows these are."""
        if keys is None or not self.shelves:
            empty = np.zeros(num, dtype=np.bool_)
            return [(np.zeros((num, self.width), dtype=np.float32), empty) for _ in self.engine.views]
        return [shelf.fetch(keys) for shelf in self.shelves]

    def _keep(self, place: int, keys: Sequence[str], features: Features) -> None:
        if self.shelves:
            finite = np.flatnonzero(np.isfinite(features).all(axis=1))
            self.shelves[place].keep([keys[row] for row in finite.tolist()], features[finite])

    def _flush(self) -> None:
        for shelf in [*self.shelves, *([] if self.small is None else [self.small.shelf])]:
            shelf.flush()

    def map(self, parts: Iterable[Pack], count: Counted | None = None) -> Iterator[Scores]:
        """Score packs, one after the other. ``count`` takes the number of a pack and of its images that are done."""
        return (self(pack, count) for pack in parts)

    def __call__(self, pack: Pack, count: Counted | None = None) -> Scores:
        """Score the images of one pack."""
        scores = []
        for part in self.stream(pack.paths):
            scores.append(part)
            if count is not None:
                count(pack.number, sum(len(each.reasons) for each in scores))
        return joined(pack, scores)

    def stream(self, paths: Iterable[ImagePath]) -> Iterator[Scores]:
        """Score files batch by batch. At most a few hundred decoded images are in memory.

        A file is read once: what is hashed is what is decoded. Unreadable files are no error.
        """
        self.complete()
        read = ordered_map(self.read, paths, self.workers)
        while batch := list(islice(read, self.batch_size)):
            yield self.score_read(batch)
        self._flush()

    def read(self, path: ImagePath, most_pixels: int = MAX_PIXELS) -> Read:
        """Read one file, and decode it unless the features of all its views are cached, or it has too many pixels."""
        known = (lambda digest: all(digest in shelf for shelf in self.shelves)) if self.shelves else None
        return path, *read_pixels(path, self.card.image_size, self.card.channels, known, most_pixels=most_pixels)

    def score_read(self, batch: Sequence[Read]) -> Scores:
        """Score images that ``read`` returned. Threads may read while another one scores."""
        return self.score_encoded(self.encode_read(batch))

    def encode_read(self, batch: Sequence[Read]) -> Encoded:
        """Compute the features of images that ``read`` returned.

        Without a cache, and if ``engine.is_fast``, several threads may do so at a time.
        """
        num, views = len(batch), self.engine.views
        reasons = [facts.error or _misfit(pixels, self.card) for _, facts, pixels in batch]
        digests = [facts.digest for _, facts, _ in batch]
        features = np.full((num, len(views), self.width), np.nan, dtype=np.float32)
        found = np.zeros((num, len(views)), dtype=np.bool_)
        readable = [row for row in range(num) if not reasons[row]]
        for place, (rows, there) in enumerate(self._fetch([digests[row] for row in readable], len(readable))):
            features[readable, place], found[readable, place] = rows, there
        decoded: dict[int, Pixels] = {}
        for row in [row for row in readable if not found[row].all()]:
            path, facts, pixels = batch[row]
            try:  # A pack of the cache may have been removed meanwhile.
                size = self.card.image_size
                decoded[row] = decode_image(path, size, self.card.channels, facts) if pixels is None else pixels
                reasons[row] = _misfit(decoded[row], self.card)
            except UnreadableImageError as error:
                reasons[row] = error.reason
        missing = [row for row in decoded if not reasons[row]]
        if missing:
            stacked = torch.from_numpy(np.stack([decoded[row] for row in missing]))
            for place, view in enumerate(views):
                features[missing, place] = self.engine.encode(look(stacked, view))
                self._keep(place, [digests[row] for row in missing], features[missing, place])
        return Encoded(batch, reasons, features)

    def score_encoded(self, encoded: Encoded) -> Scores:
        """Score images whose features are computed."""
        batch, reasons, features = encoded
        num = len(batch)
        done = np.array([row for row in range(num) if not reasons[row]], dtype=np.int64)
        probabilities = np.full((num, len(self.card.classes)), np.nan)
        nearness = None if self.known is None else np.full(num, np.nan)
        typicality = None if self.bank is None else np.full(num, np.nan)
        if len(done):
            mean = self.engine.average(list(features[done].swapaxes(0, 1)))
            scored = self._judged(mean, self.beside([cells_of(batch[row][0]) for row in done]))
            check_finite(scored.probabilities)
            probabilities[done] = scored.probabilities
            if typicality is not None:
                typicality[done] = scored.typicality
            if self.known is not None and nearness is not None:
                nearness[done] = self.known.nearness(self.engine.compared(mean))
        features[[row for row in range(num) if reasons[row]]] = np.nan
        return Scores(
            Pack(0, tuple(path for path, _, _ in batch)),
            tuple(reasons),
            tuple("" if reason else facts.digest for reason, (_, facts, _) in zip(reasons, batch, strict=True)),
            probabilities,
            nearness,
            features.reshape(num, -1) if self.keep else None,
            self.made_by,
            typicality,
        )

    def split_views(self, features: Features) -> list[Features]:
        """Return the features of each view, given those of all views side by side, as in ``Scores``."""
        return list(features.reshape(len(features), len(self.engine.views), -1).swapaxes(0, 1))


@cache
def _libraries() -> ThreadpoolController:
    """Return the libraries that compute with threads."""
    return ThreadpoolController()


def _misfit(pixels: Pixels | None, card: ModelCard) -> str:
    """Return why a decoded image does not fit a model, which is possible only if images are not resized; or ""."""
    if pixels is None or pixels.shape == card.shape:
        return ""
    sizes = [f"{shape[2]} x {shape[1]}" for shape in (pixels.shape, card.shape)]
    return f"{sizes[0]} pixels, but the model takes {sizes[1]}"


def _count_rows(count: Counted, before: int, here: int, total: int, done: int, missing: int) -> None:
    """Count rows of all blocks, given the number of missing rows that are done in this block."""
    count(before + here - missing + done, total)


def _facts(model: Model, card: ModelCard) -> list[tuple[int, dict[str, object]]]:
    """Return all values that features depend on, besides the image, its view and the engine.

    Columns that other models may have, too, are kept on their own: those of each encoder, and of each block. Each comes
    with its width.
    """
    common = {
        "shape": list(card.shape),
        "image_size": card.image_size,
        "interpolation": card.interpolation,
        "pillow": PIL.__version__,
    }
    layout, spec = model.layout, card.spec
    mean, std = (values.flatten().double().cpu() for values in (model.mean, model.std))
    if layout is None or card.members > 1 or not spec.is_joined:
        own = {
            "encoder": card.encoder,
            "weights": weights_hash(model.encoder),
            "mean": mean.tolist(),
            "std": std.tolist(),
        }
        return [(card.features, {**common, **own})]
    own_mean, own_std = (model.encoder.get_buffer(name).double().cpu() for name in ("mean", "std"))
    found: list[tuple[int, dict[str, object]]] = []
    for (place, block), groups in groupby(layout.groups, key=lambda group: (group.member, group.block)):
        # The final layer has the hash that it has without the blocks that read its encoder.
        inner = "encoder." if block.name == FINAL.name and spec.reading("encoder") else ""
        normalised = mean + std * own_mean[place], std * own_std[place]
        own = {
            "encoder": spec.names[place] if place < len(spec.parts) else block.name,
            **({} if block.name == FINAL.name else {"block": block.name, "version": block.version}),
            "weights": weights_hash(model.encoder, f"members.{place}.{inner}"),
            "mean": normalised[0].tolist(),
            "std": normalised[1].tolist(),
        }
        found.append((sum(group.width for group in groups), {**common, **own}))
    return found


class SmallImages:
    """Small versions of images that are loaded in one shape, as rows of numbers from 0 to 255.

    They are kept in the cache of features, so that no image is decoded for them again.
    """

    def __init__(self, shape: tuple[int, ...], image_size: int | None) -> None:
        side = (min(SIDE, shape[1]), min(SIDE, shape[2])) if len(shape) == 3 else (0, 0)
        self.width, self._side = shape[0] * side[0] * side[1], side
        facts = {
            "encoder": f"{side[1]} x {side[0]} pixels",
            "shape": list(shape),
            "image_size": image_size,
            "interpolation": "bilinear",
            "engine": f"torch {torch.__version__} cpu",
            "pillow": PIL.__version__,
        }
        self.shelf = Shelf([(self.width, facts)])

    def of(self, part: Part, rows: Indices) -> Features:
        """Return the small versions of some images of a split, (n, width)."""
        keys = None if part.digests is None else [part.digests[row] for row in rows]
        found, known = np.zeros((len(rows), self.width), dtype=np.float32), np.zeros(len(rows), dtype=np.bool_)
        if keys is not None:
            found, known = self.shelf.fetch(keys)
        missing = np.flatnonzero(~known)
        for start in range(0, len(missing), _SMALL_BATCH):
            places = missing[start : start + _SMALL_BATCH]
            batch = part.inputs.batch(rows[places])
            found[places] = self._shrunk(batch)
            if keys is not None:
                self.keep([keys[place] for place in places], batch)
        self.shelf.flush()
        return found

    def keep(self, digests: Sequence[str], batch: Tensor) -> None:
        """Keep the small versions of a uint8 batch, by the SHA-256 of the images."""
        self.shelf.keep(digests, self._shrunk(batch))

    def _shrunk(self, batch: Tensor) -> Features:
        found: Features = adaptive_avg_pool2d(batch.to(torch.float32), self._side).flatten(1).numpy()
        return found


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities (n, K) of named images, and the labels and the decided classes as indices."""

    names: tuple[str, ...]
    probabilities: Floats
    y_true: npt.NDArray[np.int64]
    y_pred: npt.NDArray[np.int64]
    groups: npt.NDArray[np.str_] | None = None
    features: npt.NDArray[np.float32] | None = None


def share_rows(num: int, ranks: Ranks) -> tuple[Indices, list[int]]:
    """Divide the rows 0 to ``num`` - 1 among the ranks. Return the rows of this rank and the number of each rank."""
    shares = np.array_split(np.arange(num), ranks.size)
    return shares[ranks.rank], [len(share) for share in shares]


def gather_rows(rows: npt.NDArray[_Number], sizes: list[int], ranks: Ranks) -> npt.NDArray[_Number]:
    """Return the rows of all ranks, in the order of ``share_rows``."""
    if ranks.size == 1:
        return rows
    gathered: npt.NDArray[_Number] = ranks.gather(torch.from_numpy(rows), sizes).numpy()
    return gathered


def check_shape(batch: Tensor, card: ModelCard) -> None:
    """Raise unless a batch has the shape of the training inputs of the model."""
    if tuple(batch.shape[1:]) != card.shape:
        must = f"inputs must have the shape {card.shape} that the model was trained on"
        raise DataError(sentence(must, tuple(batch.shape[1:])))


def check_finite(probabilities: Floats) -> None:
    """Raise if probabilities are not finite: the numbers of the model have left the range of float32."""
    if not np.isfinite(probabilities).all():
        do = "Its weights, mean or std are far too large or too small; train the model again."
        raise RunError(f"The model returned NaN instead of probabilities. {do}")
