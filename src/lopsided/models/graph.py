"""Translate a convolutional encoder into an ONNX graph that onnxruntime computes several times as fast as torch.

The graph is built from the modules of the encoder in eval mode, in a fraction of a second. torch's own exporter needs
many seconds. Batch norm is folded into the convolutions. The input is a uint8 batch (n, channels, h, w), and the
normalisation is the first step of the graph. The output is float32 (n, features). An ensemble joins the features of its
encoders.

Only the layers of common convolutional networks are translated, such as those of ResNet, EfficientNet and MobileNet.
Any other layer raises ``UntranslatableError``; torch then computes such an encoder.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.nn import functional

from lopsided.models.blocks.block import FeatureBlock, Tapped
from lopsided.models.encoders import members_of
from lopsided.models.machine import evaluating

Floats = npt.NDArray[np.float32]

INPUT, OUTPUT = "images", "features"
_FLOAT, _UINT8 = 1, 2
"""The numbers of these types in ONNX."""
_OPSET, _IR = 17, 8
"""Old versions, which every onnxruntime since 1.12 can read."""


class UntranslatableError(Exception):
    """An encoder with a layer that has no translation. The message names the layer."""


def to_onnx(
    encoder: nn.Module,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    size: tuple[int, int] | None = None,
) -> bytes:
    """Return the ONNX file of an encoder with the normalisation by ``mean`` and ``std`` as its first step.

    ``size`` is the height and width of the images, which some blocks need.
    """
    graph = Graph(size)
    pixels = graph.add("Cast", [INPUT], to=1)
    return graph.content(channels, {OUTPUT: write_encoder(graph, encoder, channels, mean, std, pixels, 255.0)})


def write_encoder(
    graph: Graph,
    encoder: nn.Module,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    pixels: str,
    white: float,
) -> str:
    """Add the nodes of an encoder, for pixels from 0 to ``white``. Return the name of the features."""
    parts = []
    for member, shift, scale in members_of(encoder, mean, std):
        graph.normalise(channels, shift.numpy(), scale.numpy(), pixels, white)
        parts.append(_write(member, graph))
    return parts[0] if len(parts) == 1 else graph.add("Concat", parts, axis=1)


def _write(member: nn.Module, graph: Graph) -> str:
    """Add the nodes of an encoder, of an encoder with blocks, or of a block. Return the name of the features."""
    if isinstance(member, FeatureBlock):
        return member.write(graph, [graph.first])
    if not isinstance(member, Tapped):
        return _Translation(member, graph).run(*_traced(member))[0]
    traced, taps = _traced(member.encoder, {name for block in member.blocks for name in block.taps})
    final, outputs = _Translation(member.encoder, graph).run(traced, taps)
    columns = [block.write(graph, [outputs[name] for name in block.taps]) for block in member.blocks]
    return graph.add("Concat", [final, *columns], axis=1)


def _traced(encoder: nn.Module, taps: Collection[str] = ()) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Return the recorded calls of an encoder, and the outputs of the layers of these names."""
    tracer = _Tracer(taps)
    try:
        with evaluating(encoder):
            return tracer.trace(encoder), tracer.outputs
    except Exception as error:  # Tracing runs the forward method of any encoder on symbols, and may fail in any way.
        raise UntranslatableError(str(error).partition("\n")[0]) from error


class _Tracer(fx.Tracer):
    """Records the calls of layers that have a translation, without looking into the layers."""

    def __init__(self, taps: Collection[str]) -> None:
        super().__init__()
        self._taps = taps
        self.outputs: dict[str, fx.Node] = {}

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call, and its output if a block reads it."""
        output = super().call_module(m, forward, args, kwargs)
        name = self.path_of_module(m)
        if name in self._taps:
            self.outputs[name] = output.node
        return output

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is a layer with a translation."""
        return isinstance(m, _leaves())


class Graph:
    """The nodes and constants of an ONNX graph. Values are known by their names. ``first`` is the normalised image."""

    first: str

    def __init__(self, size: tuple[int, int] | None) -> None:
        from onnx import helper, numpy_helper

        self._size = size
        self.nodes: list[tuple[str, list[str], str, dict[str, Any]]] = []
        self.constants: dict[str, npt.NDArray[Any]] = {}
        self._helper, self._arrays = helper, numpy_helper
        self._number = 0
        self.convolutions: dict[str, tuple[str, str]] = {}
        """Names of weight and bias of the convolution that makes a value."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        if self._size is None:
            raise UntranslatableError("a block without the size of the images")
        return self._size

    def flatten(self, value: str) -> str:
        """Add a node that makes one row of each image, and return the name of its value."""
        return self.add("Flatten", [value], axis=1)

    def constant(self, array: npt.NDArray[Any]) -> str:
        """Add a constant and return its name."""
        name = self._name("c")
        self.constants[name] = array
        return name

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node and return the name of its value."""
        name = self._name("v")
        self.nodes.append((kind, list(inputs), name, attributes))
        return name

    def normalise(
        self,
        channels: int,
        shift: npt.NDArray[np.float64],
        scale: npt.NDArray[np.float64],
        pixels: str,
        white: float,
    ) -> None:
        """Set ``first``: pixels from 0 to ``white``, as numbers in [0, 1], minus ``shift``, divided by ``scale``."""
        shape = (1, channels, 1, 1)
        factor = self.constant((1 / (white * scale)).astype(np.float32).reshape(shape))
        offset = self.constant((shift / scale).astype(np.float32).reshape(shape))
        self.first = self.add("Sub", [self.add("Mul", [pixels, factor]), offset])

    def content(self, channels: int, outputs: Mapping[str, str]) -> bytes:
        """Return the bytes of the file of an encoder. ``outputs`` gives the value of each output."""
        images = self.value_info(INPUT, _UINT8, ["n", channels, "h", "w"])
        features = self.value_info(OUTPUT, _FLOAT, ["n", "f"])
        return bytes(self.model([images], [features], outputs).SerializeToString())

    def value_info(self, name: str, kind: int, shape: Sequence[str | int]) -> Any:
        """Return the description of an input or an output."""
        return self._helper.make_tensor_value_info(name, kind, shape)

    def model(self, inputs: Sequence[Any], infos: Sequence[Any], outputs: Mapping[str, str]) -> Any:
        """Return the model with the given inputs and outputs."""
        make, names = self._helper, {value: name for name, value in outputs.items()}
        nodes = [
            make.make_node(
                kind, [names.get(each, each) for each in values], _values(kind, names.get(output, output)), **more
            )
            for kind, values, output, more in self.nodes
        ]
        constants = [self._arrays.from_array(array, name) for name, array in self.constants.items()]
        graph = make.make_graph(nodes, "lopsided", inputs, infos, constants)
        return make.make_model(graph, opset_imports=[make.make_opsetid("", _OPSET)], ir_version=_IR)

    def _name(self, letter: str) -> str:
        self._number += 1
        return f"{letter}{self._number}"


def _values(kind: str, name: str) -> list[str]:
    """Return the names of the values of a node. Only the first is used; TopK also gives places."""
    return [name, f"{name}_places"] if kind == "TopK" else [name]


class _Translation:
    """Translates the recorded calls of an encoder one after the other."""

    def __init__(self, encoder: nn.Module, graph: Graph) -> None:
        self.graph = graph
        self.layers = dict(encoder.named_modules())
        self.shared: set[str] = set()
        """Values that several layers read."""

    def run(self, traced: fx.Graph, taps: Mapping[str, fx.Node]) -> tuple[str, dict[str, str]]:
        """Translate all calls. Return the names of the output, which is the last value, and of those of ``taps``."""
        values: dict[fx.Node, str] = {}
        for node in traced.nodes:
            if node.op == "placeholder" and not values:
                values[node] = self.graph.first
            elif node.op == "output":
                self._end(values.get(node.args[0]))
            elif node.op != "placeholder":
                values[node] = self._call(node, values)
                if len(node.users) > 1 or node in taps.values():
                    self.shared.add(values[node])
        return self.graph.nodes[-1][2], {name: values[node] for name, node in taps.items()}

    def _end(self, value: str | None) -> None:
        if value is None:
            raise UntranslatableError("several outputs")
        if not self.graph.nodes or self.graph.nodes[-1][2] != value:
            self.graph.add("Identity", [value])

    def _call(self, node: fx.Node, values: dict[fx.Node, str]) -> str:
        def value(argument: object) -> str:
            if isinstance(argument, fx.Node) and argument in values:
                return values[argument]
            raise UntranslatableError(f"the argument {argument} of {node.target}")

        if node.op == "call_module":
            return self._layer(self.layers[str(node.target)], value(node.args[0]))
        if node.op == "call_function" and node.target in _BINARY:
            return self.graph.add(_BINARY[node.target], [value(argument) for argument in node.args[:2]])
        simple = _FUNCTIONS.get(node.target) if node.op == "call_function" else _METHODS.get(str(node.target))
        if node.op in ("call_function", "call_method") and simple is not None:
            return simple(self.graph, value(node.args[0]), node.args[1:], node.kwargs)
        raise UntranslatableError(f"{node.op} {node.target}")

    def _layer(self, layer: nn.Module, x: str) -> str:
        if isinstance(layer, nn.Conv2d):
            return self._convolution(layer, x)
        if isinstance(layer, nn.BatchNorm2d):
            y = self._batch_norm(layer, x)
            for name in ("drop", "act"):  # timm's layer applies them after the norm.
                after = getattr(layer, name, None)
                y = y if after is None else self._layer(after, y)
            return y
        if isinstance(layer, nn.Linear):
            return self._linear(layer, x)
        if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            return self._pool(layer, x)
        for kinds, translate in _layers():
            if isinstance(layer, kinds):
                return translate(self.graph, x, layer)
        raise UntranslatableError(type(layer).__name__)

    def _convolution(self, layer: nn.Conv2d, x: str) -> str:
        from timm.layers.conv2d_same import Conv2dSame

        from lopsided.models.small_maps import SmallMapConv2d

        known = type(layer).forward in (nn.Conv2d.forward, Conv2dSame.forward) or type(layer) is SmallMapConv2d
        if not known or layer.padding_mode != "zeros" or layer.padding == "same":
            raise UntranslatableError(type(layer).__name__)
        bias = np.zeros(layer.out_channels, np.float32) if layer.bias is None else _array(layer.bias)
        weight = self.graph.constant(_array(layer.weight)), self.graph.constant(bias)
        options: dict[str, Any] = {
            "kernel_shape": list(layer.kernel_size),
            "strides": list(layer.stride),
            "dilations": list(layer.dilation),
            "group": layer.groups,
        }
        if isinstance(layer, Conv2dSame):
            options["auto_pad"] = "SAME_UPPER"
        elif layer.padding != "valid":
            options["pads"] = [*layer.padding, *layer.padding]
        y = self.graph.add("Conv", [x, *weight], **options)
        self.graph.convolutions[y] = weight
        return y

    def _batch_norm(self, layer: nn.BatchNorm2d, x: str) -> str:
        """Fold the norm into the convolution before it, or add it as a node if other layers also read its input."""
        if layer.running_mean is None or layer.running_var is None:
            raise UntranslatableError("a batch norm without running statistics")
        mean, variance = (_array(t).astype(np.float64) for t in (layer.running_mean, layer.running_var))
        gamma = np.ones_like(mean) if layer.weight is None else _array(layer.weight).astype(np.float64)
        beta = np.zeros_like(mean) if layer.bias is None else _array(layer.bias).astype(np.float64)
        factor = gamma / np.sqrt(variance + layer.eps)
        shift = beta - mean * factor
        constants = self.graph.constants
        if x in self.graph.convolutions and x not in self.shared:
            weight, bias = self.graph.convolutions.pop(x)
            constants[weight] = (constants[weight] * factor[:, None, None, None]).astype(np.float32)
            constants[bias] = (constants[bias] * factor + shift).astype(np.float32)
            return x
        shape = (1, -1, 1, 1)
        scaled = self.graph.add("Mul", [x, self.graph.constant(factor.astype(np.float32).reshape(shape))])
        return self.graph.add("Add", [scaled, self.graph.constant(shift.astype(np.float32).reshape(shape))])

    def _linear(self, layer: nn.Linear, x: str) -> str:
        weight = self.graph.constant(_array(layer.weight))
        bias = np.zeros(layer.out_features, np.float32) if layer.bias is None else _array(layer.bias)
        return self.graph.add("Gemm", [x, weight, self.graph.constant(bias)], transB=1)

    def _pool(self, layer: nn.MaxPool2d | nn.AvgPool2d, x: str) -> str:
        if type(layer) not in (nn.MaxPool2d, nn.AvgPool2d):  # A subclass may pad differently.
            raise UntranslatableError(type(layer).__name__)
        kernel, stride, padding = (_pair(value) for value in (layer.kernel_size, layer.stride, layer.padding))
        options: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "pads": [*padding, *padding]}
        options["ceil_mode"] = int(layer.ceil_mode)
        if isinstance(layer, nn.MaxPool2d):
            if _pair(layer.dilation) != [1, 1] or layer.return_indices or layer.ceil_mode:
                raise UntranslatableError("a pooling layer with a dilation, indices or ceil_mode")
            return self.graph.add("MaxPool", [x], **options)
        # With padding, torch and onnxruntime differ in the last window of ceil_mode.
        if layer.divisor_override is not None or (layer.ceil_mode and padding != [0, 0]):
            raise UntranslatableError("an average pooling layer with a divisor, or with ceil_mode and padding")
        return self.graph.add("AveragePool", [x], count_include_pad=int(layer.count_include_pad), **options)


def _array(tensor: torch.Tensor) -> Floats:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def _pair(value: Any) -> list[int]:
    return [int(value), int(value)] if isinstance(value, int) else [int(one) for one in value]


def _node(kind: str, **attributes: Any) -> Callable[..., str]:
    def translate(graph: Graph, x: str, *_: Any) -> str:
        return graph.add(kind, [x], **attributes)

    return translate


def _relu6(graph: Graph, x: str, *_: Any) -> str:
    limits = [graph.constant(np.array(value, dtype=np.float32)) for value in (0, 6)]
    return graph.add("Clip", [x, *limits])


def _silu(graph: Graph, x: str, *_: Any) -> str:
    return graph.add("Mul", [x, graph.add("Sigmoid", [x])])


def _hardsigmoid(graph: Graph, x: str, *_: Any) -> str:
    return graph.add("HardSigmoid", [x], alpha=1 / 6, beta=0.5)


def _flatten_layer(graph: Graph, x: str, layer: nn.Flatten) -> str:
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise UntranslatableError("a flatten layer of other axes")
    return graph.flatten(x)


def _flatten_call(graph: Graph, x: str, arguments: Sequence[Any], named: dict[str, Any]) -> str:
    if (*arguments, *named.values()) != (1,):
        raise UntranslatableError("flatten of other axes")
    return graph.flatten(x)


def _mean_call(graph: Graph, x: str, arguments: Sequence[Any], named: dict[str, Any]) -> str:
    """Translate a mean over the two axes of the map, as in squeeze-and-excitation."""
    axes = list(arguments[0] if arguments else named.get("dim", ()))
    keep = arguments[1] if len(arguments) > 1 else named.get("keepdim", False)
    if axes not in ([2, 3], [-2, -1], [-1, -2], [3, 2]):
        raise UntranslatableError("a mean over other axes")
    y = graph.add("GlobalAveragePool", [x])
    return y if keep else graph.flatten(y)


def _pool_call(graph: Graph, x: str, arguments: Sequence[Any], named: dict[str, Any]) -> str:
    sizes = (*arguments, *named.values())
    if len(sizes) != 1 or _pair(sizes[0]) != [1, 1]:
        raise UntranslatableError("a pooling to another size than 1")
    return graph.add("GlobalAveragePool", [x])


def _select_pool(graph: Graph, x: str, layer: Any) -> str:
    """Translate timm's global pooling, if it is an average over the map."""
    if layer.pool_type not in ("avg", "fast", "fastavg"):
        raise UntranslatableError(f"a pooling of type {layer.pool_type}")
    flat = layer.pool_type != "avg" and layer.pool.flatten
    y = graph.add("GlobalAveragePool", [x])
    return graph.flatten(y) if flat or isinstance(layer.flatten, nn.Flatten) else y


def _dropped(graph: Graph, x: str, arguments: Sequence[Any], named: dict[str, Any]) -> str:
    if named.get("training", arguments[1] if len(arguments) > 1 else True):
        raise UntranslatableError("dropout outside eval mode")
    return x


@functools.cache
def _layers() -> tuple[tuple[tuple[type, ...], Callable[..., str]], ...]:
    """Return the kinds of simple layers, each with its translation. timm is imported only if a graph is made."""
    from timm.layers.adaptive_avgmax_pool import SelectAdaptivePool2d
    from timm.layers.drop import DropPath

    return (
        ((nn.Identity, nn.Dropout, nn.Dropout2d, DropPath), lambda graph, x, *_: x),
        ((nn.ReLU6,), _relu6),
        ((nn.ReLU,), _node("Relu")),
        ((nn.SiLU,), _silu),
        ((nn.Sigmoid,), _node("Sigmoid")),
        ((nn.Hardswish,), _node("HardSwish")),
        ((nn.Hardsigmoid,), _hardsigmoid),
        ((nn.Flatten,), _flatten_layer),
        ((nn.AdaptiveAvgPool2d,), lambda graph, x, layer: _pool_call(graph, x, (layer.output_size,), {})),
        ((SelectAdaptivePool2d,), _select_pool),
    )


@functools.cache
def _leaves() -> tuple[type, ...]:
    """Return the kinds of all layers that have a translation."""
    simple = (kind for kinds, _ in _layers() for kind in kinds)
    return (*simple, nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d)


_BINARY: dict[Any, str] = {
    operator.add: "Add", operator.iadd: "Add", torch.add: "Add",
    operator.mul: "Mul", operator.imul: "Mul", torch.mul: "Mul",
}  # fmt: skip
_FUNCTIONS: dict[Any, Callable[..., str]] = {
    functional.relu: _node("Relu"),
    torch.relu: _node("Relu"),
    functional.relu6: _relu6,
    functional.silu: _silu,
    torch.sigmoid: _node("Sigmoid"),
    functional.hardsigmoid: _hardsigmoid,
    functional.adaptive_avg_pool2d: _pool_call,
    functional.dropout: _dropped,
    torch.flatten: _flatten_call,
}
_METHODS: dict[str, Callable[..., str]] = {
    "mean": _mean_call,
    "flatten": _flatten_call,
    "sigmoid": _node("Sigmoid"),
    "relu": _node("Relu"),
}
