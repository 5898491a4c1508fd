"""Pictures of mistakes and doubtful labels that a run keeps, so that its page shows them when the images have moved.

A page never reads files outside the folder of a table unless its reader allows it, because the run folder may be a
stranger's. These pictures were made when the run was fitted, or by a report of someone who allowed it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lopsided import files
from lopsided.data.images import FileImages
from lopsided.data.sources import Source
from lopsided.errors import LopsidedError, RunError
from lopsided.reports.thumbnails import BEST, picture_of
from lopsided.runs.folder import Run

PICTURES = "pictures.safetensors"
SIDE = 96
_MOST_BYTES = 10_000_000


def keep_pictures(folder: Path, names: Sequence[str], *, allow_outside: bool) -> int:
    """Write the pictures of these images into the run folder, and return their number.

    If the run has pictures already, or its images cannot be read, nothing is written.
    """
    from safetensors.numpy import save

    if not names or (folder / PICTURES).is_file():
        return 0
    try:
        recipe = Run.open(folder).recipe.override(**{"data.allow_outside": allow_outside})
        source = Source.open(recipe.data, download=False)
    except LopsidedError:
        return 0
    if not isinstance(source.images, FileImages):
        return 0
    places = {name: row for row, name in enumerate(source.names)}
    kept: dict[str, bytes] = {}
    for name in names:
        picture = picture_of(source, places.get(name), SIDE)
        if picture is not None:
            content = io.BytesIO()
            picture.save(content, "WEBP", quality=BEST, method=2)
            kept[name] = content.getvalue()
    if kept:
        tensors: dict[str, np.ndarray] = {
            "ends": np.cumsum([len(content) for content in kept.values()]).astype(np.int64),
            "content": np.frombuffer(b"".join(kept.values()), dtype=np.uint8),
        }
        files.atomic_write(folder / PICTURES, save(tensors, metadata={"names": json.dumps(list(kept))}))
    return len(kept)


def kept_pictures(folder: Path) -> Mapping[str, Image.Image]:
    """Return the pictures that a run kept, by the names of the images."""
    from safetensors import safe_open

    path = folder / PICTURES
    if not path.is_file():
        return {}
    try:
        files.check_regular(path, _MOST_BYTES)
        with files.reading_tensors(), safe_open(path, framework="numpy") as content:
            names = json.loads((content.metadata() or {})["names"])
            ends, data = content.get_tensor("ends").tolist(), content.get_tensor("content").tobytes()
        if len(names) != len(ends) or ends != sorted(ends):
            raise ValueError("its parts do not fit")
        starts = [0, *ends[:-1]]
        return {str(name): _opened(data[a:b]) for name, a, b in zip(names, starts, ends, strict=True)}
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise RunError(f"{path} is no file of pictures ({files.reason(error)}). Remove it.") from None


def _opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content), formats=["WEBP"])
    if image.width != image.height or image.width > SIDE:
        raise ValueError("a picture has another size")
    return image.convert("RGBA")
