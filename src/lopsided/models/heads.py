"""Heads on top of an encoder: a projection head for the first stage, a linear classifier for the second."""

from __future__ import annotations

from torch import nn

from lopsided.errors import InputError, sentence


class ProjectionHead(nn.Sequential):
    """Two linear layers with ReLU between them: features to hidden to out, 512-512-128 in the paper.

    The loss normalises the output to length 1. ``hidden="auto"`` means the width of the features.
    """

    def __init__(self, features: int, hidden: int | str = "auto", out: int = 128) -> None:
        if isinstance(hidden, str):
            if hidden != "auto":
                raise InputError(sentence('head.hidden must be an integer >= 1 or "auto"', repr(hidden)))
            hidden = features
        super().__init__(nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, out))


class ClassifierHead(nn.Linear):
    """One linear layer from features to one logit per class."""

    def __init__(self, features: int, num_classes: int) -> None:
        if num_classes < 2:
            raise InputError(sentence("a classifier must have at least 2 classes", num_classes))
        super().__init__(features, num_classes)
