"""Graphs of encoders on disk, so that a later process computes features without the layers of the encoder.

To make the layers, timm is imported, which takes longer than a few images need. A graph is found by the name, the
weights and the normalisation of the encoder and the shape of its inputs. Beside it are the features of one image by
torch, so that every process can check the graph on its own machine. The graphs lie in the cache of features, count
towards its limit, and are removed with it. A disk error only means that the layers are made.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lopsided import __version__
from lopsided.errors import RunError
from lopsided.files import atomic_write, check_regular, reading_tensors, remove_leftovers
from lopsided.inference.feature_cache import GRAPHS, cache_limit, cache_root, make_cache_folder, trim
from lopsided.models.encoders import LateEncoder
from lopsided.models.model import Model, weights_hash

Features = npt.NDArray[np.float32]


def graph_path(model: Model, shape: tuple[int, ...]) -> Path | None:
    """Return the file of a graph, or None if there is no cache or the encoder already has its layers."""
    root, encoder = cache_root(), model.encoder
    if root is None or not isinstance(encoder, LateEncoder):
        return None
    normalised = [values.flatten().tolist() for values in (model.mean, model.std)]
    facts = [__version__, encoder.name, weights_hash(encoder.state_dict()), *normalised, list(shape)]
    return root / GRAPHS / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.safetensors"


def load_graph(path: Path) -> tuple[bytes, Features] | None:
    """Return a graph and the features of one image, or None if the file is missing or damaged."""
    from safetensors.numpy import load

    try:
        check_regular(path)
        with reading_tensors():
            content = load(path.read_bytes())
        graph, expected, checksum = (content[name] for name in ("graph", "expected", "checksum"))
        if expected.dtype == np.float32 and checksum.tobytes() == _checksum(graph, expected):
            with suppress(OSError):
                os.utime(path)  # The time of the last use.
            return graph.tobytes(), expected
    except OSError:
        return None
    except (ValueError, KeyError):
        pass
    with suppress(OSError):
        path.unlink()
    return None


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
