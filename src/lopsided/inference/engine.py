"""Compute the features of images: through onnxruntime on a CPU, through torch elsewhere.

onnxruntime computes an encoder that ``lopsided.models.graph`` can translate, or that torch can export, such as a
transformer. Each new engine compares one image with torch, and uses torch if the results differ. Vectors, MLPs and
other encoders use torch.

Graphs are kept on disk, so that a later process computes features without the layers of the encoder: to make them, timm
is imported, which takes longer than a few images need. A graph is found by the name, the weights and the normalisation
of the encoder and the shape of its inputs. Beside it are the features of one image by torch, so that every process can
check the graph on its own machine. Graphs lie in the cache of features, count towards its limit, and are removed with
it. A disk error only means that the layers are made.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lopsided import __version__
from lopsided.data.augment import to_float
from lopsided.errors import RunError
from lopsided.files import atomic_write, check_regular, remove_leftovers
from lopsided.inference.feature_cache import (
    GRAPHS,
    Features,
    cache_limit,
    cache_root,
    make_cache_folder,
    read_or_remove,
    trim,
)
from lopsided.models.encoders import LateEncoder, weights_hash
from lopsided.models.graph import INPUT, OUTPUT, to_onnx
from lopsided.models.machine import evaluating
from lopsided.models.model import Model, look
from lopsided.recipe.blocks import REGIONS, STAGES

TOLERANCE = 1e-4
"""Largest allowed difference between onnxruntime and torch, relative to the largest feature of the same block."""

_BATCH, _PIXELS = 32, 2**17
"""Most images per call of onnxruntime, and most pixels if each thread has an image. The maps of more pixels leave the
cache of the processor: 32 images of 260 pixels per side take 1.4 times as long as in calls of two."""


_LARGE = 1_000_000
"""From this number of weights on, torch's exporter writes an encoder that ``graph`` cannot translate."""


class Engine:
    """Computes the features of one model, whose weights must not change while the engine is in use.

    A model whose encoder has no layers yet gets them when the engine has to compute features for the first time. Until
    then the engine has the name that it will have if onnxruntime agrees with torch.
    """

    def __init__(self, model: Model, shape: tuple[int, ...], *, fast: bool = True) -> None:
        self._model, self._shape = model, shape
        self._waits = fast and not model.is_complete and len(shape) == 3 and self._device.type == "cpu"
        self._session = _session(model, shape) if fast and not self._waits else None

    def complete(self) -> None:
        """Make the session of onnxruntime, if it is not made yet, and the layers of the encoder, if it needs them."""
        if self._waits:
            self._waits, self._session = False, _late_session(self._model, self._shape)
        if self._session is None:
            self._model.complete()

    @property
    def name(self) -> str:
        """The library and the device, with the version. Two engines of one name give the same bits on one machine."""
        if self._session is not None or self._waits:
            return f"onnxruntime {load_onnxruntime().__version__} cpu"
        return f"torch {torch.__version__} {self._device.type}"

    @property
    def is_fast(self) -> bool:
        """Whether onnxruntime computes the features."""
        self.complete()
        return self._session is not None

    def features(self, batch: Tensor) -> Features:
        """Return the inputs of the classifier for a batch: uint8 images, float images in [0, 1], or vectors."""
        return self.adapt(self.average([self.encode(look(batch, view)) for view in self.views]))

    def adapt(self, features: Features, beside: Features | None = None) -> Features:
        """Return the inputs of the classifier, given the features of the encoder, and those of columns of a table."""
        return self.adapted(self.scale(features, beside))

    def adapted(self, inputs: Features) -> Features:
        """Return the inputs of the classifier, given what ``scale`` returns."""
        if self._model.adapter is None:
            return inputs
        with evaluating(self._model):
            found: Features = self._model.adapter(torch.from_numpy(inputs).to(self._device)).cpu().numpy()
        return found

    def scale(self, features: Features, beside: Features | None = None) -> Features:
        """Return the inputs of the heads, or of the classifier if there are no heads, given the encoder's features.

        ``beside`` are features of columns of a table, which follow as they are.
        """
        inputs = features
        if self._model.scaling != "none":
            with torch.no_grad():
                inputs = self._model.scale(torch.from_numpy(features).to(self._device)).cpu().numpy()
        return inputs if beside is None else np.concatenate([inputs, beside], axis=1)

    def compared(self, features: Features) -> Features:
        """Return the columns by which images are compared with each other, given the features of the encoder.

        They are all but those of stages: many large numbers of early stages would outweigh what the image shows.
        """
        layout = self._model.layout
        if layout is None or not len(left_out := layout.columns(STAGES.name, REGIONS.name)):
            return self.whole(features)
        left_out = np.concatenate([left_out, layout.local])
        members = np.split(features, self._model.members, axis=1)
        return np.concatenate([np.delete(member, left_out, axis=1) for member in members], axis=1)

    def whole(self, inputs: Features) -> Features:
        """Return the inputs of the classifier that are about whole images, without the columns of positions."""
        places = self._model.local
        return np.delete(inputs, places, axis=1) if len(places) else inputs

    @property
    def views(self) -> tuple[str, ...]:
        """The views whose features are averaged."""
        return self._model.views

    @staticmethod
    def average(parts: Sequence[Features]) -> Features:
        """Return the mean of the features of the views, added up in their order."""
        return parts[0] if len(parts) == 1 else np.divide(sum(parts[1:], parts[0]), np.float32(len(parts)))

    def encode(self, batch: Tensor) -> Features:
        """Return the features of the encoder, (n, f), of a batch as it is."""
        self.complete()
        if self._session is None or batch.dtype != torch.uint8:
            return self._by_torch(batch)
        pixels = batch.contiguous().numpy()  # A view may be another order of the same memory.
        number = images_per_call(pixels.shape[2] * pixels.shape[3], torch.get_num_threads())
        parts = [self._run(pixels[start : start + number]) for start in range(0, len(pixels), number)]
        return np.concatenate(parts) if parts else self._by_torch(batch)

    def probabilities(self, features: Features) -> npt.NDArray[np.float64]:
        """Return the probabilities (n, K) by the classifier of the model, given its inputs."""
        with torch.no_grad():
            logits: Tensor = self._model.classifier(torch.from_numpy(features).to(self._device))
        found: npt.NDArray[np.float64] = logits.double().softmax(dim=1).cpu().numpy()
        return found

    def _run(self, pixels: npt.NDArray[np.uint8]) -> Features:
        assert self._session is not None
        found: Features = self._session.run([OUTPUT], {INPUT: pixels})[0]
        return found

    def _by_torch(self, batch: Tensor) -> Features:
        with evaluating(self._model):
            x = batch.to(self._device)
            features: Features = self._model.encode(to_float(x) if x.ndim == 4 else x).float().cpu().numpy()
        return features

    @property
    def _device(self) -> torch.device:
        return self._model.classifier.weight.device


def images_per_call(pixels: int, threads: int) -> int:
    """Return how many images of this number of pixels go through onnxruntime at a time.

    >>> images_per_call(224 * 224, 2), images_per_call(64 * 64, 2), images_per_call(512 * 512, 8)
    (2, 32, 8)
    """
    return min(max(_PIXELS // pixels, threads, 1), _BATCH)


def _late_session(model: Model, shape: tuple[int, ...]) -> Any:
    """Return the session of a model whose encoder has no layers. They are made if the graph is not in the cache."""
    path = graph_path(model, shape)
    known = None if path is None else load_graph(path)
    session = None if known is None else _checked(known[0], model, shape, known[1])
    if session is not None:
        return session
    model.complete()
    return _session(model, shape, path)


def _session(model: Model, shape: tuple[int, ...], path: Path | None = None) -> Any:
    """Return a session of onnxruntime that agrees with torch, or None. The graph is also written to ``path``."""
    convolves = any(isinstance(child, nn.Conv2d) for child in model.encoder.modules())
    if len(shape) != 3 or not convolves or model.classifier.weight.device.type != "cpu":
        return None
    mean, std = model.mean.flatten().tolist(), model.std.flatten().tolist()
    try:
        graph = to_onnx(model.encoder, shape[0], mean, std, (shape[1], shape[2]))
    except Exception:  # Any layer may fail in its own way, and torch can compute any encoder.
        if sum(weight.numel() for weight in model.encoder.parameters()) < _LARGE:
            return None
        path = _place(model, [repr(model.encoder), weights_hash(model.encoder), mean, std, list(shape)])
        known = None if path is None else load_graph(path)
        session = None if known is None else _checked(known[0], model, shape, known[1])
        if session is not None:
            return session
        exported = _export(model, shape)
        if exported is None:
            return None
        graph = exported
    with evaluating(model):
        expected = model.encode(to_float(torch.from_numpy(_example(shape)))).numpy()
    session = _checked(graph, model, shape, expected)
    if session is not None and path is not None:
        store_graph(path, graph, expected)
    return session


class _Encoding(nn.Module):
    """The encoder of a model with its normalisation, from uint8 images to features."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return features (n, f)."""
        return self.model.encode(to_float(images))


def _export(model: Model, shape: tuple[int, ...]) -> bytes | None:
    """Return the graph of an encoder by torch's exporter, or None if it cannot write it.

    It needs seconds. The graph of a transformer then takes half the time of torch.
    """
    written, example = io.BytesIO(), torch.from_numpy(_example(shape)).repeat(2, 1, 1, 1)
    # A failure may be of any kind, and the exporter prints the whole graph.
    with warnings.catch_warnings(), evaluating(model), redirect_stdout(io.StringIO()), suppress(Exception):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Encoding(model), (example,), written, dynamo=False,  # type: ignore[arg-type]
            opset_version=17, input_names=[INPUT],
            output_names=[OUTPUT], dynamic_axes={INPUT: {0: "n"}, OUTPUT: {0: "n"}},
        )  # fmt: skip
    return written.getvalue() or None


def _checked(graph: bytes, model: Model, shape: tuple[int, ...], expected: Features) -> Any:
    """Return a session of onnxruntime for a graph, or None if its features of one image are not those of torch."""
    onnxruntime = load_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # A thread that waits must not keep a core from the threads that decode the next batch.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # Only fatal errors. The caller sees every other error as an exception.
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        (found,) = session.run([OUTPUT], {INPUT: _example(shape)})
    except Exception:  # The exceptions of onnxruntime have no common public class, and torch can compute any encoder.
        return None
    widths = [] if model.layout is None else [group.width for group in model.layout.groups] * model.members
    return session if found.shape == expected.shape and _agrees(found, expected, widths) else None


def _example(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (1, *shape), dtype=np.uint8)


def _agrees(found: Features, expected: Features, widths: Sequence[int]) -> bool:
    """Return whether two libraries agree on each group of columns, which have these widths."""
    # Not finite numbers are the same error in both libraries, and the caller reports them.
    if not np.isfinite(expected).all():
        return False
    groups = (np.split(each, np.cumsum(widths)[:-1], axis=1) for each in (np.abs(found - expected), np.abs(expected)))
    return all(gap.max() <= TOLERANCE * max(float(size.max()), 1e-3) for gap, size in zip(*groups, strict=True))


def graph_path(model: Model, shape: tuple[int, ...]) -> Path | None:
    """Return the file of a graph, or None if there is no cache or the encoder already has its layers."""
    encoder = model.encoder
    if not isinstance(encoder, LateEncoder):
        return None
    normalised = [values.flatten().tolist() for values in (model.mean, model.std)]
    return _place(model, [encoder.name, weights_hash(encoder), *normalised, list(shape)])


def _place(model: Model, facts: list[Any]) -> Path | None:
    """Return the file of a graph that depends on these facts and its blocks, or None if there is no cache."""
    blocks = [] if model.layout is None else [[group.block.name, group.block.version] for group in model.layout.groups]
    root, text = cache_root(), json.dumps([__version__, blocks, *facts])
    return None if root is None else root / GRAPHS / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"


def load_graph(path: Path) -> tuple[bytes, Features] | None:
    """Return a graph and the features of one image, or None if the file is missing or damaged."""
    from safetensors.numpy import load

    def read() -> tuple[bytes, Features] | None:
        check_regular(path)
        content = load(path.read_bytes())
        graph, expected, checksum = (content[name] for name in ("graph", "expected", "checksum"))
        is_right = expected.dtype == np.float32 and checksum.tobytes() == _checksum(graph, expected)
        return (graph.tobytes(), expected) if is_right else None

    return read_or_remove(path, read, used=True)


def store_graph(path: Path, graph: bytes, expected: Features) -> None:
    """Write a graph and the features of one image, unless the disk does not allow it."""
    from safetensors.numpy import save

    bytes_of = np.frombuffer(graph, dtype=np.uint8)
    checksum = np.frombuffer(_checksum(bytes_of, expected), dtype=np.uint8)
    with suppress(RunError):
        make_cache_folder(path.parent)
        remove_leftovers(path.parent)
        atomic_write(path, save({"graph": bytes_of, "expected": expected, "checksum": checksum}))
        trim(path.parents[1], cache_limit())


def _checksum(graph: npt.NDArray[np.uint8], expected: Features) -> bytes:
    digest = hashlib.sha256(graph.tobytes())
    digest.update(expected.tobytes())
    return digest.digest()


def load_onnxruntime() -> ModuleType:
    """Import onnxruntime with its telemetry switched off.

    Its builds since 1.31 keep a device id in the user's cache folder and send events unless this variable is set before
    the import; its function that disables events comes too late for the device id. It helps where a program has already
    imported onnxruntime.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime  # type: ignore[no-any-return]
