"""Heads on top of an encoder: projections, contrastive heads on frozen features, classifiers and decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, relu

from lopsided.errors import InputError, sentence
from lopsided.evaluation.decision import Decision

if TYPE_CHECKING:
    from lopsided.models.graph import Graph

LEAST_DISTANCE = 1e-6
"""A squared distance is at least this, so that it has a logarithm. Images of the class have one of about the number of
columns; below this is the rounding of equal images."""


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

    def maps(self, x: Tensor, labels: Tensor) -> Iterator[Tensor]:
        """Yield what single positions say beside the linear layer, (n, positions), for a class (n,): nothing."""
        yield from ()

    def write(self, graph: Graph, inputs: str) -> str:
        """Add nodes that compute ``forward``. Return the name of their value."""
        weight, bias = (graph.constant(each.detach().numpy()) for each in (self.weight, self.bias))
        return graph.add("Gemm", [inputs, weight, bias], transB=1)


class CosineHead(ClassifierHead):
    """A classifier whose logits are ``scale`` times the cosines of features and class weights, plus a bias.

    Training changes the weights only: the bias starts at 0, and the scale is the loss's. Calibration divides both by
    its temperature and adds to the bias, so that a calibrated head is a head of the same form.
    """

    def __init__(self, features: int, num_classes: int, scale: float = 1.0) -> None:
        super().__init__(features, num_classes)
        self.scale = nn.Parameter(torch.tensor(float(scale)), requires_grad=False)
        self.bias.requires_grad_(False).zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, K) of features (n, f)."""
        cosines = linear(normalize(x, dim=-1), normalize(self.weight, dim=-1))
        return self.scale * cosines + self.bias

    def write(self, graph: Graph, inputs: str) -> str:
        """Raise: torch's exporter writes this classifier."""
        from lopsided.models.graph import UntranslatableError

        raise UntranslatableError("a classifier of cosines")


class DistanceShape(BaseModel):
    """The shape of a distance: of how many positions, how many columns each has, and how many axes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    positions: int = Field(ge=1, le=2**12)
    columns: int = Field(ge=1, le=2**20)
    axes: int = Field(ge=0, le=2**12)


class Distance(nn.Module):
    """How far images are from those of the frequent class, by some columns; of several positions, the farthest counts.

    The distance at a position is that of Mahalanobis with a shrunk covariance: with z = ``scale`` (x - ``centre``), it
    is |z|^2 + sum over axes of ``gains`` (axis . z)^2. What comes out is the logarithm of the distance, minus its mean
    and divided by its deviation among images of the frequent class (``level``). ``columns`` are those of the features
    that belong to each position.
    """

    columns: Tensor
    centre: Tensor
    scale: Tensor
    axes: Tensor
    gains: Tensor
    level: Tensor

    def __init__(self, shape: DistanceShape) -> None:
        super().__init__()
        places = shape.positions, shape.columns
        self.register_buffer("columns", torch.zeros(places, dtype=torch.int64))
        self.register_buffer("centre", torch.zeros(places))
        self.register_buffer("scale", torch.ones(places))
        self.register_buffer("axes", torch.zeros(shape.positions, shape.axes, shape.columns))
        self.register_buffer("gains", torch.zeros(shape.positions, shape.axes))
        self.register_buffer("level", torch.tensor([0.0, 1.0]))

    def at_positions(self, x: Tensor) -> Tensor:
        """Return the standardised log distance at each position, (n, positions), of features (n, f)."""
        z = ((x[:, self.columns] - self.centre) * self.scale).transpose(0, 1)
        along = z @ self.axes.transpose(1, 2)
        distance = z.square().sum(dim=2, keepdim=True) + along.square() @ self.gains[:, :, None]
        return (distance.squeeze(2).T.clamp(min=LEAST_DISTANCE).log() - self.level[0]) / self.level[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardised log distance (n, 1) of features (n, f)."""
        return self.at_positions(x).amax(dim=1, keepdim=True)

    def write(self, graph: Graph, inputs: str) -> str:
        """Add nodes that compute ``forward``. Return the name of their value."""

        def constant(values: Tensor) -> str:
            return graph.constant(np.ascontiguousarray(values.numpy()))

        x = graph.add("Gather", [inputs, constant(self.columns)], axis=1)
        z = graph.add("Mul", [graph.add("Sub", [x, constant(self.centre)]), constant(self.scale)])
        z = graph.add("Transpose", [z], perm=[1, 0, 2])
        along = graph.add("MatMul", [z, constant(self.axes.transpose(1, 2))])
        gained = graph.add("MatMul", [graph.add("Mul", [along, along]), constant(self.gains[:, :, None])])
        distance = graph.add("Add", [graph.add("ReduceSumSquare", [z], axes=[2], keepdims=1), gained])
        # The logarithm is monotonic: the farthest position has the largest one.
        farthest = graph.add("ReduceMax", [distance], axes=[0], keepdims=0)
        log = graph.add("Log", [graph.add("Max", [farthest, constant(torch.tensor(LEAST_DISTANCE))])])
        return graph.add("Div", [graph.add("Sub", [log, constant(self.level[0])]), constant(self.level[1])])


class DistanceHead(ClassifierHead):
    """A linear classifier with one more column: how far an image is from those of the frequent class.

    The column is the sum of one or several distances, each times its share (``shares``). Its weight for each class is
    ``pull``.
    """

    shares: Tensor

    def __init__(self, features: int, num_classes: int, shapes: Sequence[DistanceShape]) -> None:
        super().__init__(features, num_classes)
        self.pull = nn.Parameter(torch.zeros(num_classes))
        self.distances = nn.ModuleList(Distance(shape) for shape in shapes)
        self.register_buffer("shares", torch.ones(len(shapes)))

    @property
    def parts(self) -> list[Distance]:
        """The distances."""
        return [distance for distance in self.distances if isinstance(distance, Distance)]

    def column(self, x: Tensor) -> Tensor:
        """Return the column (n, 1) of features (n, f)."""
        return torch.cat([distance(x) for distance in self.parts], dim=1) @ self.shares[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, K) of features (n, f)."""
        return super().forward(x) + self.column(x) * self.pull

    def maps(self, x: Tensor, labels: Tensor) -> Iterator[Tensor]:
        """Yield how much each position of each distance of positions speaks for a class.

        What counts is how much farther it is than the farthest position of the usual image.
        """
        others = (self.pull.sum() - self.pull) / (len(self.pull) - 1)
        pull = (self.pull - others)[labels, None]
        for distance, share in zip(self.parts, self.shares, strict=True):
            if len(distance.columns) > 1:
                yield share * pull * distance.at_positions(x).clamp(min=0)

    def write(self, graph: Graph, inputs: str) -> str:
        """Add nodes that compute ``forward``. Return the name of their value."""
        columns = [distance.write(graph, inputs) for distance in self.parts]
        weights = torch.outer(self.shares, self.pull.detach()).numpy()
        pulled = graph.add("MatMul", [graph.add("Concat", columns, axis=1), graph.constant(weights)])
        return graph.add("Add", [super().write(graph, inputs), pulled])


def build_head(
    kind: str, features: int, num_classes: int, scale: float = 1.0, shapes: Sequence[DistanceShape] = ()
) -> ClassifierHead:
    """Return a classifier: "linear", "cosine" with this scale, or "distance" with distances of these shapes."""
    if kind == "distance":
        return DistanceHead(features, num_classes, shapes)
    return CosineHead(features, num_classes, scale) if kind == "cosine" else ClassifierHead(features, num_classes)


class DecisionHead(nn.Module):
    """From logits to the outputs of an exported model: logits, probabilities, decision scores and label.

    It computes ``Decision.scores`` in float32 from log-probabilities.
    """

    offsets: Tensor
    costs: Tensor

    def __init__(self, decision: Decision, num_classes: int) -> None:
        super().__init__()
        self.scale, self.target = decision.scale, decision.target
        self.by_cost = bool(decision.costs)
        self.odds = 0.0
        if decision.threshold is not None:
            self.odds = math.log(decision.threshold) - math.log1p(-decision.threshold)
        self.register_buffer("offsets", torch.tensor(decision.offsets or (0.0,) * num_classes))
        costs = torch.tensor(decision.costs, dtype=torch.float64) if self.by_cost else torch.ones(1, 1)
        self.register_buffer("costs", (costs / costs.max()).float())

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits, probabilities and scores, (n, K), and the index of the decided class, (n,)."""
        logs = logits.log_softmax(dim=1)
        probabilities = logs.exp()
        scores = -(probabilities @ self.costs) if self.by_cost else self.scale * logs + self.offsets
        if self.target is not None:
            others = [c for c in range(logits.shape[1]) if c != self.target]
            rest = scores[:, others] - scores[:, others].amax(dim=1, keepdim=True)
            own = logits[:, [self.target]] - logits[:, others].logsumexp(dim=1, keepdim=True) - self.odds
            scores = torch.cat([rest[:, : self.target], own, rest[:, self.target :]], dim=1)
        return logits, probabilities, scores, scores.argmax(dim=1)


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
