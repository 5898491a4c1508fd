"""Features of many images through a frozen encoder, with the cache on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import PIL
import torch
from torch import Tensor

from lopsided.data.inputs import Indices, Inputs, row_batches
from lopsided.distributed import Ranks
from lopsided.errors import RunError
from lopsided.inference.engine import Engine, Features
from lopsided.inference.feature_cache import PACK, JoinedSpace, Space, cache_limit, cache_root, tidy, trim
from lopsided.inference.probabilities import gather_rows, share_rows
from lopsided.inference.small import SmallImages
from lopsided.models.model import Model, ModelCard, weights_hash
from lopsided.models.views import look
from lopsided.recipe.blocks import FINAL

Counted = Callable[[int, int], None]
_BATCH = 64
BLOCK = 2048
"""Images whose features of all views are in memory at a time."""


class Extractor:
    """Returns the features of images, from the cache or from the encoder: the mean over the views of the model.

    The features of each view are cached on their own. An image is decoded once for all views that are missing.
    ``small`` also keeps a small version of each image that is decoded. ``problem`` is the first error of the disk
    error, after which features are no longer cached.
    """

    def __init__(
        self,
        model: Model,
        card: ModelCard,
        engine: Engine | None = None,
        ranks: Ranks | None = None,
        small: SmallImages | None = None,
    ) -> None:
        self.engine = engine or Engine(model, card.shape)
        self.ranks = ranks or Ranks()
        self.small = small
        self.width = card.features
        self.problem: str | None = None
        self.root = cache_root() if card.kind == "image" else None
        self._facts = [] if self.root is None else _facts(model, card)
        self.spaces: list[JoinedSpace] = []
        self._open()

    def _open(self) -> None:
        """Find the place of the features in the cache, which depends on the engine."""
        self.spaces = []
        if self.root is not None:
            widths = [width for width, _ in self._facts]
            for view in self.engine.views:
                own = {"engine": self.engine.name, **_fact_of(view)}
                spaces = [Space(self.root, {**facts, **own}) for _, facts in self._facts]
                self.spaces.append(JoinedSpace(spaces, widths))
                for space in spaces:
                    tidy(space)

    def features(self, inputs: Inputs, digests: Sequence[str] | None, count: Counted | None = None) -> Features:
        """Return features of the encoder, (n, f), of inputs in order. Ranks share the work, and all get all rows.

        ``digests`` are the SHA-256 of the images. Without digests, the cache is not used.
        """
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
        own, sizes = share_rows(len(inputs), self.ranks)
        if len(self.engine.views) == 1:
            (alone,) = self._block(inputs, own, digests, count)
            assert all(tuple(views) == self.engine.views for views in sets)
            return [gather_rows(alone, sizes, self.ranks)] * len(sets)
        found, told = [np.zeros((len(own), self.width), dtype=np.float32) for _ in sets], count
        for rows in row_batches(len(own), BLOCK):
            if count is not None and len(own) > BLOCK:  # Images in the cache count as done.
                told = partial(_count_rows, count, int(rows[0]), len(rows), len(own))
            parts = dict(zip(self.engine.views, self._block(inputs, own[rows], digests, told), strict=True))
            for features, views in zip(found, sets, strict=True):
                features[rows] = self.engine.average([parts[view] for view in views])
        return [gather_rows(features, sizes, self.ranks) for features in found]

    def _block(
        self, inputs: Inputs, own: Indices, digests: Sequence[str] | None, count: Counted | None
    ) -> list[Features]:
        """Return the features of the inputs ``own``, once for each view of the model."""
        views, keys = self.engine.views, None if digests is None else [digests[row] for row in own]
        parts = [self._fetch(keys, place, len(own)) for place in range(len(views))]
        if not all(found.all() for _, found in parts) and self.complete():
            parts = [self._fetch(keys, place, len(own)) for place in range(len(views))]
        missing = np.flatnonzero(~np.all([found for _, found in parts], axis=0))
        pending = 0
        batches = inputs.batches(own[missing[part]] for part in row_batches(len(missing), _BATCH))
        for done, (rows, batch) in zip(range(0, len(missing), _BATCH), batches, strict=True):
            places = missing[done : done + _BATCH]
            if self.small is not None and keys is not None:
                self.small.keep([keys[row] for row in places], batch)
            for view, (features, found) in zip(views, parts, strict=True):
                lacking = np.flatnonzero(~found[places])
                if len(lacking):
                    few = batch if len(lacking) == len(batch) else batch[torch.from_numpy(lacking)]
                    features[places[lacking]] = self.engine.encode(look(few, view))
            end = done + len(rows)
            if keys is not None and (end - pending >= PACK or end == len(missing)):
                for place, (features, found) in enumerate(parts):
                    wanted = missing[pending:end]
                    self._store(place, wanted[~found[wanted]], keys, features)
                pending = end
            if count is not None:
                count(end, len(missing))
        if self.small is not None:
            self.small.flush()
        return [features for features, _ in parts]

    def complete(self) -> bool:
        """Make the engine ready to compute features. Return whether it is another one than it was expected to be."""
        before = self.engine.name
        self.engine.complete()
        if self.engine.name == before:
            return False
        self._open()
        return True

    def _fetch(self, keys: Sequence[str] | None, place: int, num: int) -> tuple[Features, npt.NDArray[np.bool_]]:
        """Return the cached features of one view, and which rows these are."""
        if keys is None or not self.spaces:
            return np.zeros((num, self.width), dtype=np.float32), np.zeros(num, dtype=np.bool_)
        return self.spaces[place].fetch(keys, self.width)

    def _store(self, place: int, rows: Indices, keys: Sequence[str], features: Features) -> None:
        if self.root is None or self.problem is not None:
            return
        kept = rows[np.isfinite(features[rows]).all(axis=1)]
        try:
            if len(kept):
                self.spaces[place].store([keys[row] for row in kept], features[kept])
            trim(self.root, cache_limit())
        except RunError as error:
            self.problem = str(error)


def _count_rows(count: Counted, before: int, here: int, total: int, done: int, missing: int) -> None:
    """Count rows of all blocks, given the number of missing rows that are done in this block."""
    count(before + here - missing + done, total)


def _fact_of(view: str) -> dict[str, object]:
    """Return the fact of a view. The image as it is has none, so that older features stay valid."""
    return {} if view == "identity" else {"view": view}


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
    state, layout, spec = model.encoder.state_dict(), model.layout, card.spec
    mean, std = (values.flatten().double().cpu() for values in (model.mean, model.std))
    if layout is None or card.members > 1 or not spec.is_joined:
        own = {"encoder": card.encoder, "weights": weights_hash(state), "mean": mean.tolist(), "std": std.tolist()}
        return [(card.features, {**common, **own})]
    found: list[tuple[int, dict[str, object]]] = []
    for (place, block), groups in groupby(layout.groups, key=lambda group: (group.member, group.block)):
        weights = _below(state, f"members.{place}.")
        if block.name == FINAL.name and spec.reading("encoder"):
            weights = _below(weights, "encoder.")  # As without the blocks that read it.
        normalised = mean + std * state["mean"][place].double().cpu(), std * state["std"][place].double().cpu()
        own = {
            "encoder": spec.names[place] if place < len(spec.parts) else block.name,
            **({} if block.name == FINAL.name else {"block": block.name}),
            "weights": weights_hash(weights),
            "mean": normalised[0].tolist(),
            "std": normalised[1].tolist(),
        }
        found.append((sum(group.width for group in groups), {**common, **own}))
    return found


def _below(state: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    return {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
