"""Ensembles: several trained models as one model, whose logits are the mean of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lopsided.evaluation.decision import PLAIN
from lopsided.models.heads import ClassifierHead

if TYPE_CHECKING:
    from lopsided.models.layout import Layout
    from lopsided.models.model import Model, ModelCard


_UNSET = {"temperature": 1.0, "bias": None, "calibrated_on": 0, "decision": PLAIN, "sha256": ""}
"""Facts of a card that an average of models does not have."""


class Ensemble(nn.Module):
    """Encoders side by side, each with its own normalisation of the pixels. The output joins their features.

    ``layout`` says what the columns of joined encoders are. An ensemble of models has none of its own.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, members: Sequence[nn.Module], channels: int, layout: Layout | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.members = nn.ModuleList(members)
        self.register_buffer("mean", torch.zeros(len(members), channels))
        self.register_buffer("std", torch.ones(len(members), channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return features (n, f_1 + f_2 + ...) of images (n, c, h, w)."""
        shape = (len(self.members), 1, -1, 1, 1)
        scaled = zip(self.members, self.mean.view(shape), self.std.view(shape), strict=True)
        return torch.cat([member((x - mean) / std) for member, mean, std in scaled], dim=1)


def average_classifiers(
    models: Sequence[tuple[Model, ModelCard]], biases: Sequence[Sequence[float]]
) -> tuple[Model, ModelCard]:
    """Return ``average`` of models that share a frozen encoder: one of them, with the mean of their linear layers."""
    model, card = models[0]
    with torch.no_grad():
        layers = [each.classifier for each, _ in models]
        weight = torch.stack([layer.weight for layer in layers]).mean(dim=0)
        bias = torch.stack([layer.bias + layer.bias.new_tensor(own) for layer, own in zip(layers, biases, strict=True)])
        model.classifier.weight.copy_(weight)
        model.classifier.bias.copy_(bias.mean(dim=0))
    return model, card.model_copy(update=_UNSET)


def average(
    models: Sequence[tuple[Model, ModelCard]],
    biases: Sequence[Sequence[float]] | None = None,
    shares: Sequence[float] | None = None,
) -> tuple[Model, ModelCard]:
    """Return one image model with the mean logits of several, after adding the ``biases`` of each model to its logits.

    The features of the members are joined, and the linear layer holds the layers of the members, times their
    ``shares``, which are equal by default. The card has the prior of the first
    model, and no decision.
    """
    from lopsided.models.model import Model

    first, card = models[0]
    for model, _ in models:
        model.complete()
    num, num_classes = len(models), len(card.classes)
    encoder = Ensemble([model.encoder for model, _ in models], card.channels)
    classifier = ClassifierHead(sum(model.classifier.in_features for model, _ in models), num_classes)
    offsets = torch.zeros(num, num_classes) if biases is None else torch.tensor(biases, dtype=torch.float32)
    with torch.no_grad():
        encoder.mean.copy_(torch.stack([model.mean.flatten().cpu() for model, _ in models]))
        encoder.std.copy_(torch.stack([model.std.flatten().cpu() for model, _ in models]))
        each = [1 / num] * num if shares is None else shares
        pairs = list(zip(each, (model.classifier for model, _ in models), strict=True))
        classifier.weight.copy_(torch.cat([share * layer.weight.cpu() for share, layer in pairs], dim=1))
        own = [share * (layer.bias.cpu() + bias) for (share, layer), bias in zip(pairs, offsets, strict=True)]
        classifier.bias.copy_(torch.stack(own).sum(dim=0))
    plain = {"mean": (0.0,) * card.channels, "std": (1.0,) * card.channels, "members": num}
    card = card.model_copy(update={**plain, **_UNSET, "features": classifier.in_features})
    joined = Model(
        encoder, classifier, card.mean, card.std, card.kind, views=card.views, scaling=card.scaling, members=num
    )  # fmt: skip
    return joined.to(first.classifier.weight.device).eval(), card
