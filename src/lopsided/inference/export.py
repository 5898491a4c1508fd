"""Export a model as one ONNX file, and check that onnxruntime gives the same probabilities and decisions."""

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
from lopsided.data.decoding import REDUCTIONS
from lopsided.errors import InputError, MissingDependencyError, RunError, is_out_of_memory, sentence
from lopsided.evaluation.decision import explain

if TYPE_CHECKING:
    from lopsided.data.images import Progress
    from lopsided.evaluation.typicality import Bank
    from lopsided.models.model import Model, ModelCard

TOLERANCE = 1e-4
"""Largest allowed difference of a probability between torch and onnxruntime."""

CHECKED_SIZES = (1, 3)
"""Batch sizes with which an export is checked. 3 differs from the traced size and is no multiple of a vector width.
With all views of three encoders, a batch of 17 needed gigabytes."""

STEPS = 3
INPUTS = {"image": "images", "vector": "vectors"}
"""The name of the input, by the kind of the model."""
BESIDE = "columns"
"""The name of the second input, of a model that takes columns of a table beside each image."""
OUTPUTS = ("logits", "probabilities", "decision_scores", "label")


MOST_BANK = 16_000_000
"""Largest number of bytes of the known images in an exported file. A larger bank is left out."""


def export_onnx(
    model: Model,
    card: ModelCard,
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    bank: Bank | None = None,
) -> dict[str, Any]:
    """Write an ONNX file and return the result of its check.

    The input ``images`` is float32 (batch, channels, height, width) with values in [0, 1]; that of a model of vectors
    is ``vectors``, float32 (batch, columns). The model normalises them.
    The outputs ``logits``, ``probabilities`` and ``decision_scores`` are float32 (batch, classes). The rows of
    ``probabilities`` sum to 1. ``label`` is int64 (batch,): the index of the highest decision score, which is the class
    that the rule of the model decides for. The metadata of the file hold the classes, the rule and all steps from an
    image file to the input (docs/onnx.md). A model with columns of a table beside each image has a second input,
    ``columns``, float32 (batch, features); the metadata say how its features are made.

    If the package writes the graph itself, a rule with sets or abstention adds ``set``, bool (batch, classes), or
    ``ask``, bool (batch,), and a ``bank`` of known images ``typicality``, float32 (batch,), unless it is large.
    """
    content, difference, has_typicality = make_onnx(model, card, progress=progress, bank=bank)
    target = Path(out)
    if not target.parent.is_dir():
        raise InputError(sentence("--out must be in an existing folder", f"{target}"))
    files.atomic_write(target, content)
    checked = {"checked": list(CHECKED_SIZES), "difference": difference, "typicality": has_typicality}
    return {"file": str(target), "bytes": len(content), **checked}


def make_onnx(
    model: Model, card: ModelCard, to: str = "onnx", progress: Progress | None = None, bank: Bank | None = None
) -> tuple[bytes, float, bool]:
    """Return the bytes of an ONNX file, the largest difference of a probability, and whether it has typicality.

    Models of frozen encoders are written by the package itself, others by torch's exporter. ``progress`` receives the
    number of finished steps: the network is made ready, written and checked.
    """
    done = progress or (lambda number, total: None)
    network = _network(model, card)
    done(1, STEPS)
    small = bank if bank is not None and bank.known.nbytes <= MOST_BANK else None
    written, has_typicality = _written(network, card, small), small is not None
    if written is None:
        _require(to, "onnxscript")
        content = _to_onnx(network, card)
        done(2, STEPS)
        written, has_typicality = (content, _check(network, content, card)), False
    done(3, STEPS)
    return *written, has_typicality


def _written(network: Any, card: ModelCard, bank: Bank | None) -> tuple[bytes, float] | None:
    """Return the file that the package writes itself, and the result of its check; None if it cannot write it."""
    from lopsided.models.graph import UntranslatableError
    from lopsided.models.whole_graph import model_to_onnx

    model, head = network.model, network.decide
    if card.kind != "image":
        return None
    try:
        names = card.shape, INPUTS["image"], OUTPUTS
        beside = (BESIDE, card.num_beside) if card.beside else None
        content = _sealed(model_to_onnx(model, head, *names, card.decision, bank, beside), card)
        return content, _check(network, content, card)
    except UntranslatableError:
        return None


def facts(card: ModelCard) -> dict[str, str]:
    """Return the metadata of the ONNX file for its callers. Values that are not strings are JSON."""
    common = {
        "producer": f"lopsided {__version__}",
        "encoder": card.encoder,
        "classes": json.dumps(list(card.classes)),
        "kind": card.kind,
        "shape": json.dumps(list(card.shape)),
        "mean": json.dumps(list(card.mean)),
        "std": json.dumps(list(card.std)),
        "normalisation": "inside the graph",
        "decision": card.decision.rule,
        "decision_text": explain(card.decision, card.classes),
        "prior": json.dumps(card.prior),
        "calibration": "inside the graph" if card.calibrated_on else "none",
    }
    if card.kind == "vector":
        return common | {"columns": json.dumps(list(card.columns))}
    return common | {
        "channels": str(card.channels),
        "image_size": json.dumps(card.image_size),
        "orientation": "upright by the EXIF orientation",
        "transparency": "white behind transparent parts",
        "depth": "16-bit values scaled to 8 bits, 65535 to 255, or 4095 to 255 if no value is above 4095",
        "mode": "L" if card.channels == 1 else "RGB",
        "jpeg_reduction": json.dumps([] if card.image_size is None else REDUCTIONS),
        "jpeg_reduction_rule": "decode a JPEG at 1/factor of its size, with the first [factor, ratio] for which "
        "min(width, height) // factor >= ratio * image_size; at full size if there is none",
        "resize": "none"
        if card.image_size is None
        else f"whole image to a square, antialiased {card.interpolation} (Pillow)",
        "range": "[0, 1]",
        "scale": "divide by 255",
        "interpolation": card.interpolation,
        "views": json.dumps(list(card.views)),
        **({"columns": json.dumps([each.model_dump() for each in card.beside])} if card.beside else {}),
    }


def _require(to: str, *modules: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        do = "Run pip install 'lopsided[onnx]'."
        raise MissingDependencyError(
            f"export --to {to} needs {', '.join(modules)}. Not installed: {', '.join(missing)}. {do}"
        )


def _network(model: Model, card: ModelCard) -> Any:
    from torch import Tensor, nn

    from lopsided.models.heads import DecisionHead
    from lopsided.models.small_maps import use_fast_paths

    class Network(nn.Module):
        """The model and its decision."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.decide = model, DecisionHead(card.decision, len(card.classes))

        def forward(self, *inputs: Tensor) -> Any:
            return self.decide(self.model(*inputs))

    model.complete()
    use_fast_paths(model, enabled=False)  # The fast paths are for torch only; the exporter needs plain convolutions.
    return Network().cpu().eval()


def _inputs(card: ModelCard, number: int, generator: Any) -> dict[str, Any]:
    """Return random inputs of a model, by their names."""
    import torch

    inputs = {INPUTS[card.kind]: torch.rand(number, *card.shape, generator=generator)}
    if card.beside:
        inputs[BESIDE] = torch.rand(number, card.num_beside, generator=generator)
    return inputs


def _to_onnx(network: Any, card: ModelCard) -> bytes:
    import torch

    examples = _inputs(card, 2, torch.Generator().manual_seed(0))
    batch = torch.export.Dim("batch", min=1)
    try:
        with _silence(), torch.no_grad():
            program = torch.onnx.export(
                network,
                tuple(examples.values()),
                dynamo=True,
                input_names=list(examples),
                output_names=list(OUTPUTS),
                dynamic_shapes=(tuple({0: batch} for _ in examples),),
                verbose=False,
            )
            assert program is not None  # With dynamo=True it is never None.
            proto = program.model_proto  # This builds the file and can fail, too.
    except Exception as error:  # The exporter wraps any failure in its own exceptions.
        if is_out_of_memory(error) or is_out_of_memory(error.__cause__ or error):
            raise MemoryError("the export of a model needs several times its memory") from error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RunError(f"torch cannot export the encoder {card.encoder} ({reason}).") from error
    return _sealed(proto, card)


def _sealed(proto: Any, card: ModelCard) -> bytes:
    """Return the bytes of a file with the facts of its model."""
    proto.producer_name, proto.producer_version = "lopsided", __version__
    for node in proto.graph.node:  # They hold class names and code lines of the exporting machine.
        del node.metadata_props[:]
    del proto.metadata_props[:]
    for key, value in facts(card).items():
        proto.metadata_props.add(key=key, value=value)
    if proto.ByteSize() >= 2**31 - 1:
        raise RunError(sentence("an ONNX file must be smaller than 2 GiB", f"{proto.ByteSize():,} bytes"))
    return bytes(proto.SerializeToString())


def _check(network: Any, content: bytes, card: ModelCard) -> float:
    """Return the largest difference of a probability between onnxruntime and torch. Raise if it is above ``TOLERANCE``.

    Raise also if the file decides otherwise than the rule of the model, except where two scores are almost equal.
    """
    import numpy as np
    import torch

    from lopsided.inference.engine import load_onnxruntime

    session = load_onnxruntime().InferenceSession(content, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for number in CHECKED_SIZES:
        inputs = _inputs(card, number, generator)
        with torch.no_grad():
            expected = network(*inputs.values())[1].numpy()
        arrays = {name: values.numpy() for name, values in inputs.items()}
        _, found, scores, label = session.run(list(OUTPUTS), arrays)
        if found.shape != expected.shape or label.shape != (number,):
            raise RunError(sentence(f"onnxruntime must return the shape {expected.shape}", found.shape))
        difference = float(np.abs(found - expected).max())
        if not difference <= TOLERANCE:  # Written so that NaN fails.
            must = f"onnxruntime must agree with torch within {TOLERANCE:g}"
            raise RunError(sentence(must, f"a difference of {difference:.2g} for {number} images"))
        largest = max(largest, difference)
        decided = card.decision.decide(expected)
        highest = np.sort(scores, axis=1)
        if np.any((decided != label) & (highest[:, -1] - highest[:, -2] > TOLERANCE)):
            raise RunError("The exported file decides otherwise than the model. Report this as an error of lopsided.")
    return largest


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the progress, logs and warnings of the exporter."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
