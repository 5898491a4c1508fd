"""Contrastive heads on the features of a frozen encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, relu


class AdapterHead(nn.Module):
    """Two linear layers with ReLU between them, dropout in training, and an output of length 1."""

    def __init__(
        self, features: int, hidden: int, out: int, *, input_dropout: float = 0.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.input_dropout, self.dropout = nn.Dropout(input_dropout), nn.Dropout(dropout)
        self.first = nn.Linear(features, hidden)
        self.second = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        """Return projections (n, out) of length 1."""
        hidden = relu(self.first(self.input_dropout(x)))
        return normalize(self.second(self.dropout(hidden)), dim=1)


class Adapter(nn.Module):
    """From features (n, f) to the outputs of all heads side by side: ``[features, head_1, ..., head_m]``.

    The features come first if ``keep`` is set. Each head gets standardised features, ``(features - mean) / scale``. One
    linear layer on the result gives an average of the logits of linear layers on its parts.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        features: int,
        *,
        heads: int,
        hidden: int,
        out: int,
        keep: bool = False,
        input_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.heads = nn.ModuleList(
            AdapterHead(features, hidden, out, input_dropout=input_dropout, dropout=dropout) for _ in range(heads)
        )
        self.width = adapter_width(features, heads=heads, out=out, keep=keep)

    def standardised(self, features: Tensor) -> Tensor:
        """Return the inputs of the heads."""
        return (features - self.mean) / self.scale

    def forward(self, features: Tensor) -> Tensor:
        """Return the features, if they are kept, and the outputs of all heads, (n, width)."""
        x = self.standardised(features)
        parts = [features] if self.keep else []
        return torch.cat([*parts, *(head(x) for head in self.heads)], dim=1)


def adapter_width(features: int, *, heads: int, out: int, keep: bool) -> int:
    """Return the number of columns of the output of an adapter."""
    return (features if keep else 0) + heads * out
