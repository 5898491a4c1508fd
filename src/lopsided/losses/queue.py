"""Features of past batches, used as contrast samples in addition to the current batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_FEATURES, _LABELS = "queue.features", "queue.labels"


class FeatureQueue:
    """The last ``size`` features with their labels, oldest first. Every rank holds the same queue.

    With ``balanced``, a full queue drops the oldest feature of its largest class, so that the majority does not fill
    the queue. Features of a rare class then stay longer, although the encoder has changed since it computed them.
    """

    def __init__(self, size: int, *, balanced: bool = False) -> None:
        self.size, self.balanced = size, balanced
        self.features: Tensor | None = None
        self.labels: Tensor | None = None

    def reference(self) -> tuple[Tensor, Tensor] | None:
        """Return the features (m, d) and labels (m,), or None if the queue is empty."""
        return None if self.features is None or self.labels is None else (self.features, self.labels)

    def classes(self) -> set[int]:
        """Return the set of labels in the queue."""
        return set() if self.labels is None else set(self.labels.tolist())

    def push(self, features: Tensor, labels: Tensor) -> None:
        """Add features (n, d) or (n, views, d) with one label per sample. The features are detached."""
        views = features.shape[1] if features.ndim == 3 else 1
        features, labels = features.detach().reshape(-1, features.shape[-1]), labels.repeat_interleave(views)
        if self.features is not None and self.labels is not None:
            features, labels = torch.cat([self.features, features]), torch.cat([self.labels, labels])
        kept = self._kept(labels)
        self.features, self.labels = features[kept], labels[kept]

    def _kept(self, labels: Tensor) -> Tensor:
        num = len(labels)
        if not self.balanced:
            return torch.arange(max(num - self.size, 0), num, device=labels.device)
        newest_first = torch.arange(num - 1, -1, -1, device=labels.device)
        # For each feature, count the newer features of its class: its position in the class, newest first.
        by_class = torch.argsort(labels[newest_first], stable=True)
        _, counts = torch.unique_consecutive(labels[newest_first][by_class], return_counts=True)
        starts = counts.cumsum(0) - counts
        newer = torch.empty_like(by_class)
        newer[by_class] = torch.arange(num, device=labels.device) - starts.repeat_interleave(counts)
        taken = torch.argsort(newer, stable=True)[: self.size]
        return newest_first[taken].sort().values

    def tensors(self) -> dict[str, Tensor]:
        """Return the queue's content for a checkpoint."""
        found = self.reference()
        return {} if found is None else {_FEATURES: found[0], _LABELS: found[1]}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Load the result of ``tensors`` onto a device."""
        if (_FEATURES in tensors) != (_LABELS in tensors):
            raise ValueError("tensors must hold both the features and the labels of the queue, got only one.")
        if _FEATURES in tensors:
            features, labels = tensors[_FEATURES], tensors[_LABELS]
            if features.ndim != 2 or labels.shape != features.shape[:1] or labels.dtype != torch.int64:
                got = f"shapes {tuple(features.shape)} and {tuple(labels.shape)} of {labels.dtype}"
                raise ValueError(f"tensors must hold one label for each feature of the queue, got {got}.")
            self.features, self.labels = features.to(device), labels.to(device)
