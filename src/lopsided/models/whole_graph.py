"""Write a whole model as an ONNX graph without torch's exporter: views, encoders, classifier and decision.

Models of frozen encoders are such graphs: ``graph`` translates the encoders, and what follows them are a few nodes. Any
other layer raises ``UntranslatableError``, and torch's exporter, which needs another package, can write the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lopsided.evaluation.decision import Decision
from lopsided.evaluation.typicality import GUARDED, NEAREST, TINY, Bank
from lopsided.models.blocks.block import POWERS, Layout
from lopsided.models.graph import Graph, UntranslatableError, write_encoder
from lopsided.models.heads import DecisionHead
from lopsided.models.machine import evaluating
from lopsided.models.model import Model

_FLOAT, _INT64, _BOOL = 1, 7, 9
TYPICALITY = "typicality"
_SHORTEST = 1e-12
"""The smallest length that features are divided by, as in torch."""
_FLIPS = {"identity": (), "hflip": (3,), "vflip": (2,), "rot180": (2, 3), "rot90": (3,), "rot270": (2,)}
_FLIPS |= {"transpose": (), "transverse": (2, 3)}
"""The axes along which a view turns the order of pixels round. Views of ``_SWAPPED`` then swap height and width."""
_SWAPPED = {"rot90", "rot270", "transpose", "transverse"}


def model_to_onnx(
    model: Model,
    head: DecisionHead,
    shape: tuple[int, ...],
    image: str,
    outputs: Sequence[str],
    decision: Decision,
    bank: Bank | None = None,
    beside: tuple[str, int] | None = None,
) -> Any:
    """Return the ONNX model. ``outputs`` names the logits, probabilities, decision scores and label.

    A decision with sets adds the output ``set``, one that asks a person ``ask``, and a bank ``typicality``. ``beside``
    is the name of a second input and its number of features, those of columns of a table.
    """
    if model.adapter is not None:
        raise UntranslatableError("heads between the encoder and the classifier")
    graph = Graph((shape[1], shape[2]))
    with evaluating(model):
        mean, std = model.mean.flatten().tolist(), model.std.flatten().tolist()
        views = [_view(graph, image, view) for view in model.views]
        pixels = views[0] if len(views) == 1 else graph.add("Concat", views, axis=0)
        features = write_encoder(graph, model.encoder, shape[0], mean, std, pixels, 1.0)
        width = model.classifier.in_features - (0 if beside is None else beside[1])
        width = width if model.layout is None else model.layout.width * model.members
        if len(views) > 1:
            rows = graph.add("Reshape", [features, graph.constant(np.array([len(views), -1, width]))])
            features = graph.add("ReduceMean", [rows], axes=[0], keepdims=0)
        features = _scaled(graph, features, model, width)
        inputs = features if beside is None else graph.add("Concat", [features, beside[0]], axis=1)
        logits, num_classes = model.classifier.write(graph, inputs), model.classifier.out_features
        values = dict(zip(outputs, _decision(graph, logits, head, num_classes), strict=True))
        doubts = _doubts(graph, values[outputs[1]], decision)
        known = {} if bank is None else {TYPICALITY: _typicality(graph, _whole(graph, features, model, width), bank)}
    info = graph.value_info
    infos = [info(name, _FLOAT, ["batch", num_classes]) for name in outputs[:3]] + [info(outputs[3], _INT64, ["batch"])]
    infos += [info(name, _BOOL, ["batch", num_classes] if name == "set" else ["batch"]) for name in doubts]
    infos += [info(name, _FLOAT, ["batch"]) for name in known]
    given = [info(image, _FLOAT, ["batch", *shape])]
    given += [] if beside is None else [info(beside[0], _FLOAT, ["batch", beside[1]])]
    return graph.model(given, infos, {**values, **doubts, **known})


def _number(graph: Graph, value: float) -> str:
    return graph.constant(np.array(value, dtype=np.float32))


def _doubts(graph: Graph, probabilities: str, decision: Decision) -> dict[str, str]:
    """Add the nodes of ``Decision.members`` and ``Decision.asks``, if the rule has them."""
    if decision.sets:
        limits = graph.constant(np.array(decision.sets, dtype=np.float32))
        return {"set": graph.add("GreaterOrEqual", [probabilities, limits])}
    if decision.error is None:
        return {}
    highest = graph.add("ReduceMax", [probabilities], axes=[1], keepdims=0)
    return {"ask": graph.add("Less", [highest, _number(graph, 1 - decision.error)])}


def _typicality(graph: Graph, features: str, bank: Bank) -> str:
    """Add the nodes of ``Bank.typicality``."""
    x = graph.add("Div", [graph.add("Sub", [features, graph.constant(bank.centre)]), graph.constant(bank.spread)])
    known = bank.known.astype(np.float32)
    product = graph.add("MatMul", [x, graph.constant(np.ascontiguousarray(-2 * known.T))])
    own = graph.add("ReduceSumSquare", [x], axes=[1], keepdims=1)
    squares = graph.add("Add", [graph.add("Add", [product, own]), graph.constant(np.square(known).sum(axis=1))])
    lengths = graph.add("Sqrt", [graph.add("Max", [squares, _number(graph, 0.0)])])
    number = min(NEAREST, len(known))
    nearest = graph.add("TopK", [lengths, graph.constant(np.array([number]))], axis=1, largest=0)
    score = graph.add("ReduceMean", [nearest], axes=[1], keepdims=1)
    is_above = graph.add("Cast", [graph.add("GreaterOrEqual", [graph.constant(bank.scores), score])], to=_FLOAT)
    above = graph.add("MatMul", [is_above, graph.constant(bank.weights.astype(np.float32)[:, None])])
    share = graph.add("Mul", [graph.add("Add", [above, _number(graph, 1.0)]), _number(graph, 1 / (bank.num_units + 1))])
    if len(bank.limits):
        share = _guarded(graph, share, score, above, bank)
    return graph.add("Reshape", [share, graph.constant(np.array([-1]))])


def _guarded(graph: Graph, share: str, score: str, above: str, bank: Bank) -> str:
    """Add the nodes by which ``Bank.typicality`` changes low values."""
    logs = graph.add("Log", [graph.add("Max", [score, _number(graph, TINY)])])
    odds = graph.add("Div", [graph.add("Sub", [logs, graph.constant(bank.limits[:, 0].copy())]),
                             graph.constant((np.sqrt(2) * bank.limits[:, 1]).astype(np.float32))])  # fmt: skip
    chance = graph.add("Mul", [graph.add("Sub", [_number(graph, 1.0), graph.add("Erf", [odds])]), _number(graph, 0.5)])
    highest = graph.add("ReduceMax", [chance], axes=[1], keepdims=1)
    bounded = graph.add("Min", [highest, _number(graph, GUARDED)])
    is_low = graph.add("LessOrEqual", [share, _number(graph, GUARDED)])
    raised = graph.add("Where", [is_low, graph.add("Max", [share, bounded]), share])
    if not bank.is_guessed:
        return raised
    beyond = graph.add("Less", [above, _number(graph, 0.5 * float(bank.weights.min()))])
    guessed = graph.add("Max", [graph.add("Min", [bounded, share]), _number(graph, TINY)])
    return graph.add("Where", [beyond, guessed, raised])


def _view(graph: Graph, image: str, view: str) -> str:
    for axis in _FLIPS[view]:
        ends = graph.constant(np.array([np.iinfo(np.int64).min]))
        minus, axes = graph.constant(np.array([-1])), graph.constant(np.array([axis]))
        image = graph.add("Slice", [image, minus, ends, axes, minus])
    return graph.add("Transpose", [image], perm=[0, 1, 3, 2]) if view in _SWAPPED else image


def _scaled(graph: Graph, features: str, model: Model, width: int) -> str:
    """Scale the columns as ``Layout.scaled`` does: joint groups together, others each by itself, or not at all."""
    if model.scaling == "none":
        return features
    layout = model.layout or Layout.final(width // model.members)
    sets: list[tuple[list[int], bool]] = []
    for member in range(model.members):
        start, joint = member * layout.width, list[int]()
        for group in layout.groups:
            columns = list(range(start, start + group.width))
            start += group.width
            if group.block.scaling == "joint":
                joint += columns
            else:
                sets.append((columns, group.block.scaling == "apart"))
        sets.append((joint, True))
    sets = [each for each in sets if each[0]]
    parts = []
    for columns, is_scaled in sets:
        part = _columns(graph, features, columns)
        parts.append(_root(graph, part, POWERS[model.scaling]) if is_scaled else part)
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([columns for columns, _ in sets])).tolist()
    return _columns(graph, graph.add("Concat", parts, axis=1), order)


def _whole(graph: Graph, features: str, model: Model, width: int) -> str:
    """Leave out the columns of positions, as ``Model.whole`` does."""
    places = model.local
    if not len(places):
        return features
    return _columns(graph, features, np.setdiff1d(np.arange(width), places).tolist())


def _columns(graph: Graph, value: str, columns: Sequence[int]) -> str:
    return graph.add("Gather", [value, graph.constant(np.array(columns, dtype=np.int64))], axis=1)


def _root(graph: Graph, value: str, power: float) -> str:
    exponent = graph.constant(np.array(power, dtype=np.float32))
    size = graph.add("Pow", [graph.add("Abs", [value]), exponent])
    root = graph.add("Mul", [graph.add("Sign", [value]), size])
    length = graph.add("ReduceL2", [root], axes=[1], keepdims=1)
    return graph.add("Div", [root, graph.add("Max", [length, graph.constant(np.array(_SHORTEST, dtype=np.float32))])])


def _decision(graph: Graph, logits: str, head: DecisionHead, num_classes: int) -> list[str]:
    """Add the nodes of ``DecisionHead``. Return the names of its outputs."""

    def number(value: float) -> str:
        return graph.constant(np.array(value, dtype=np.float32))

    logs = graph.add("LogSoftmax", [logits], axis=1)
    probabilities = graph.add("Exp", [logs])
    if head.by_cost:
        scores = graph.add("Neg", [graph.add("MatMul", [probabilities, graph.constant(head.costs.numpy())])])
    else:
        scores = graph.add("Mul", [logs, number(head.scale)])
        scores = graph.add("Add", [scores, graph.constant(head.offsets.numpy().astype(np.float32))])
    if head.target is not None:
        others = [place for place in range(num_classes) if place != head.target]
        rest = _columns(graph, scores, others)
        rest = graph.add("Sub", [rest, graph.add("ReduceMax", [rest], axes=[1], keepdims=1)])
        total = graph.add("ReduceLogSumExp", [_columns(graph, logits, others)], axes=[1], keepdims=1)
        own = graph.add("Sub", [graph.add("Sub", [_columns(graph, logits, [head.target]), total]), number(head.odds)])
        order = np.argsort([*others, head.target]).tolist()
        scores = _columns(graph, graph.add("Concat", [rest, own], axis=1), order)
    return [logits, probabilities, scores, graph.add("ArgMax", [scores], axis=1, keepdims=0)]
