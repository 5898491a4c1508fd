"""Number the blocks of an encoder, and cut an encoder into a front and a rest.

timm groups the parameters of its models into layers: 0 for the stem, then one number per block. Parameters after the
last block, such as those of a last convolution, belong to the last block. For an encoder without such groups, each
child with parameters is a block.

The cut records the calls of the blocks. It is possible if a single tensor goes from the front to the rest, as in
ResNet, EfficientNet, MobileNet, ConvNeXt and vision transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lopsided.errors import InputError, sentence
from lopsided.models.machine import evaluating

_WHOLE = 'Set fine_tune.blocks = "all" to train the whole encoder.'


@dataclass(frozen=True, eq=False)
class Cut:
    """Two parts of an encoder, which share its layers: ``rest(front(x))`` equals ``encoder(x)``.

    ``shape`` is the shape of one image's activations between the two parts.
    """

    front: nn.Module
    rest: nn.Module
    shape: tuple[int, ...]
    frozen: tuple[nn.Parameter, ...]
    """The parameters of the front."""

    @property
    def flat_front(self) -> nn.Module:
        """The front with its output as one row per image."""
        return nn.Sequential(self.front, nn.Flatten())


def block_numbers(encoder: nn.Module) -> dict[str, int]:
    """Return the number of the block of each parameter, by the parameter's name. Numbers rise towards the output."""
    matcher = getattr(encoder, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        found: dict[str, int] = group_parameters(encoder, matcher(coarse=False), reverse=True)
        return found
    children = [name for name, child in encoder.named_children() if any(True for _ in child.parameters())]
    return {
        name: children.index(name.partition(".")[0]) if "." in name else 0 for name, _ in encoder.named_parameters()
    }


def cut_encoder(encoder: nn.Module, blocks: int, shape: tuple[int, ...], name: str = "the encoder") -> Cut:
    """Cut an encoder before its last ``blocks`` blocks. ``shape`` is the shape of one input."""
    numbers = block_numbers(encoder)
    most = max(numbers.values(), default=0)
    if blocks > most:
        raise InputError(sentence(f"fine_tune.blocks must be <= {most} for {name}", blocks, _WHOLE))
    first = most + 1 - blocks
    try:
        root = _Whole(encoder)
        front, rest = _split(root, _Tracer(numbers).trace(root), numbers, first)
        found = _activation(encoder, front, shape)
    except Exception as error:  # Tracing runs the forward method of any encoder on symbols, and may fail in any way.
        raise InputError(f"{name} cannot be cut for fine_tune.blocks = {blocks}. {_WHOLE}") from error
    frozen = tuple(parameter for key, parameter in encoder.named_parameters() if numbers[key] < first)
    return Cut(front, rest, tuple(found.shape[1:]), frozen)


class _Whole(nn.Module):
    """Calls the encoder with one argument. So optional arguments of its forward method are not recorded."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        features: Tensor = self.encoder(x)
        return features


class _Tracer(fx.Tracer):
    """Records calls of modules whose parameters belong to one block, without looking into the modules."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        super().__init__()
        self._numbers = numbers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether all parameters of a module belong to one block."""
        return len(_blocks_of(module_qualified_name, self._numbers)) < 2


def _blocks_of(target: str, numbers: Mapping[str, int]) -> set[int]:
    """Return the blocks of the parameters of a module, or of one parameter, by its name in ``_Whole``."""
    name = target.removeprefix("encoder").removeprefix(".")
    return {number for key, number in numbers.items() if not name or key == name or key.startswith(f"{name}.")}


def _split(root: nn.Module, graph: fx.Graph, numbers: Mapping[str, int], first: int) -> tuple[nn.Module, nn.Module]:
    """Split recorded calls before the first call of block ``first``."""
    nodes = list(graph.nodes)
    used = {node: _blocks_of(str(node.target), numbers) for node in nodes if node.op in ("call_module", "get_attr")}
    blocks = {node: max(found) for node, found in used.items() if found}
    start = next(i for i, node in enumerate(nodes) if blocks.get(node, 0) >= first)
    before, after = nodes[:start], nodes[start:]
    crossing = {node for user in after for node in user.all_input_nodes if node in before and node.op != "get_attr"}
    early = [node for node in after if blocks.get(node, first) < first]
    if len(crossing) != 1 or early:
        raise ValueError("several tensors cross the cut")
    (bridge,) = crossing
    front, rest = fx.Graph(), fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in _needed(before, bridge):
        values[node] = front.node_copy(node, lambda old: values[old])
    front.output(values[bridge])
    values = {bridge: rest.placeholder("x")}
    (features,) = next(node for node in after if node.op == "output").all_input_nodes
    constants = [node for node in before if node.op == "get_attr"]
    for node in _needed([*constants, *after], features, bridge):
        values[node] = rest.node_copy(node, lambda old: values[old])
    rest.output(values[features])
    return fx.GraphModule(root, front), fx.GraphModule(root, rest)


def _needed(nodes: list[fx.Node], result: fx.Node, known: fx.Node | None = None) -> list[fx.Node]:
    """Return the nodes that a result depends on, in their order, without assertions. ``known`` is already computed."""
    found, waiting = {result}, [result]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in found and node is not known:
                found.add(node)
                waiting.append(node)
    return [node for node in nodes if node in found]


def _activation(encoder: nn.Module, front: nn.Module, shape: tuple[int, ...]) -> Tensor:
    with evaluating(encoder):
        found: Any = front(torch.zeros(1, *shape, device=next(encoder.parameters()).device))
    if not isinstance(found, Tensor) or found.ndim < 2:
        raise ValueError("the front has no tensor of activations")
    return found
