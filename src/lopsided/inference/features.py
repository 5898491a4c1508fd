"""Features of many images through a frozen encoder, with the cache on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import PIL

from lopsided.data.inputs import Indices, Inputs, row_batches
from lopsided.distributed import Ranks
from lopsided.errors import RunError
from lopsided.inference.engine import Engine, Features
from lopsided.inference.feature_cache import PACK, Space, cache_limit, cache_root, tidy, trim
from lopsided.inference.probabilities import gather_rows, share_rows
from lopsided.models.model import Model, ModelCard

Counted = Callable[[int, int], None]
_BATCH = 64


class Extractor:
    """Returns the features of images, from the cache or from the encoder.

    ``problem`` is a sentence about the first disk error, after which features are no longer cached.
    """

    def __init__(self, model: Model, card: ModelCard, engine: Engine | None = None, ranks: Ranks | None = None) -> None:
        self.engine = engine or Engine(model, card.shape)
        self.ranks = ranks or Ranks()
        self.width = card.features
        self.problem: str | None = None
        root = cache_root() if card.kind == "image" else None
        self.space = None if root is None else Space(root, _facts(model, card, self.engine))
        if self.space is not None:
            tidy(self.space)

    def features(self, inputs: Inputs, digests: Sequence[str] | None, count: Counted | None = None) -> Features:
        """Return features of the encoder, (n, f), of inputs in order. Ranks share the work, and all get all rows.

        ``digests`` are the SHA-256 of the images. Without digests, the cache is not used.
        """
        own, sizes = share_rows(len(inputs), self.ranks)
        if self.space is None or digests is None:
            features, missing = np.zeros((len(own), self.width), dtype=np.float32), np.arange(len(own))
        else:
            features, found = self.space.fetch([digests[row] for row in own], self.width)
            missing = np.flatnonzero(~found)
        pending = 0
        batches = inputs.batches(own[missing[part]] for part in row_batches(len(missing), _BATCH))
        for done, (rows, batch) in zip(range(0, len(missing), _BATCH), batches, strict=True):
            features[missing[done : done + _BATCH]] = self.engine.encode(batch)
            end = done + len(rows)
            if digests is not None and (end - pending >= PACK or end == len(missing)):
                self._store(own, missing[pending:end], digests, features)
                pending = end
            if count is not None:
                count(end, len(missing))
        return gather_rows(features, sizes, self.ranks)

    def _store(self, own: Indices, rows: Indices, digests: Sequence[str], features: Features) -> None:
        if self.space is None or self.problem is not None:
            return
        kept = rows[np.isfinite(features[rows]).all(axis=1)]
        try:
            if len(kept):
                self.space.store([digests[row] for row in own[kept]], features[kept])
            trim(self.space.root, cache_limit())
        except RunError as error:
            self.problem = f"Features are not cached: {error}"


def _facts(model: Model, card: ModelCard, engine: Engine) -> dict[str, object]:
    """Return all values that a feature depends on, besides the image."""
    return {
        "encoder": card.encoder,
        "weights": weights_hash(model),
        "shape": list(card.shape),
        "image_size": card.image_size,
        "mean": list(card.mean),
        "std": list(card.std),
        "interpolation": card.interpolation,
        "engine": engine.name,
        "pillow": PIL.__version__,
    }


def weights_hash(model: Model) -> str:
    """Return the SHA-256 of the encoder's weights."""
    digest = hashlib.sha256()
    for key, value in sorted(model.encoder.state_dict().items()):
        if key.endswith("num_batches_tracked"):  # A count of training steps does not change the features.
            continue
        array = value.detach().cpu().numpy()
        digest.update(f"{key} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())  # In the order of the indices, whatever the memory layout is.
    return digest.hexdigest()
