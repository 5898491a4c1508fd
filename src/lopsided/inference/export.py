"""Export a model as one ONNX file, and believe it after onnxruntime has given the same answers."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided import __version__, files
from lopsided.errors import InputError, MissingDependencyError, RunError, sentence

if TYPE_CHECKING:
    from lopsided.models.model import Model, ModelCard

TOLERANCE = 1e-4
"""Largest difference of a probability between torch and onnxruntime with which an export succeeds."""

CHECKED_SIZES = (1, 17)
"""Numbers of images with which an export is checked; 17 is none that was traced or that hardware likes."""

INPUT, OUTPUT = "images", "probabilities"


def export_onnx(model: Model, card: ModelCard, out: str | os.PathLike[str]) -> dict[str, Any]:
    """Write an ONNX file and return what was found on checking it.

    Its input ``images`` is float32 (batch, channels, height, width) with values in [0, 1]; the normalisation is inside.
    Its output ``probabilities`` is float32 (batch, classes), each row adding up to 1. The file's metadata hold the
    classes and the other facts a caller needs.
    """
    _require("onnx", "onnxruntime", "onnxscript")
    network = _network(model)
    content = _to_onnx(network, card)
    difference = _check(network, content, card)
    target = Path(out)
    if not target.parent.is_dir():
        raise InputError(sentence("--out must lie in a folder that exists", f"{target}"))
    files.atomic_write(target, content)
    return {"file": str(target), "bytes": len(content), "checked": list(CHECKED_SIZES), "difference": difference}


def facts(card: ModelCard) -> dict[str, str]:
    """Return what a caller of the ONNX file must know, as its metadata hold it: JSON where a value is not a text."""
    return {
        "producer": f"lopsided {__version__}",
        "encoder": card.encoder,
        "classes": json.dumps(list(card.classes)),
        "kind": card.kind,
        "shape": json.dumps(list(card.shape)),
        "channels": str(card.channels),
        "image_size": json.dumps(card.image_size),
        "range": "[0, 1]",
        "resize": "none" if card.image_size is None else "whole image to a square, antialiased bilinear",
        "mean": json.dumps(list(card.mean)),
        "std": json.dumps(list(card.std)),
        "normalisation": "inside the graph",
    }


def _require(*modules: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        must = f"export --to onnx needs {', '.join(modules)}"
        do = "Run pip install 'lopsided[onnx]'."
        raise MissingDependencyError(sentence(must, f"no {' and no '.join(missing)}", do))


def _network(model: Model) -> Any:
    from torch import nn

    from lopsided.models.fast.small_maps import use_fast_paths

    use_fast_paths(model, enabled=False)  # They are written for torch; a convolution says what is meant.
    return nn.Sequential(model, nn.Softmax(dim=1)).cpu().eval()


def _to_onnx(network: Any, card: ModelCard) -> bytes:
    import torch

    example = torch.rand(2, *card.shape, generator=torch.Generator().manual_seed(0))
    try:
        with _silence(), torch.no_grad():
            program = torch.onnx.export(
                network,
                (example,),
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                verbose=False,
            )
            assert program is not None  # With dynamo=True it never is.
            proto = program.model_proto  # Made here and now, with errors of its own.
    except Exception as error:  # The exporter wraps whatever it stumbles over in classes of its own.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RunError(
            sentence("the encoder must be one that torch can export", f"{card.encoder} ({reason})")
        ) from error
    proto.producer_name, proto.producer_version = "lopsided", __version__
    for node in proto.graph.node:  # Names of classes and lines of code of the machine that exported it.
        del node.metadata_props[:]
    del proto.metadata_props[:]
    for key, value in facts(card).items():
        proto.metadata_props.add(key=key, value=value)
    if proto.ByteSize() >= 2**31 - 1:
        raise RunError(sentence("one ONNX file must stay below 2 GiB", f"{proto.ByteSize():,} bytes"))
    return bytes(proto.SerializeToString())


def _check(network: Any, content: bytes, card: ModelCard) -> float:
    """Return the largest difference to torch; raise if it is above ``TOLERANCE``."""
    import numpy as np
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for number in CHECKED_SIZES:
        images = torch.rand(number, *card.shape, generator=generator)
        with torch.no_grad():
            expected = network(images).numpy()
        (found,) = session.run([OUTPUT], {INPUT: images.numpy()})
        if found.shape != expected.shape:
            raise RunError(sentence(f"onnxruntime must answer {expected.shape}", found.shape))
        difference = float(np.abs(found - expected).max())
        if not difference <= TOLERANCE:  # Written so that NaN fails.
            must = f"onnxruntime must agree with torch within {TOLERANCE:g}"
            raise RunError(sentence(must, f"a difference of {difference:.2g} for {number} images"))
        largest = max(largest, difference)
    return largest


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter's reports of its own progress, its logs and its warnings from the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
