"""Maps of where the model of a run looked, for the images that its page shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lopsided import files
from lopsided.data.decoding import UnreadableImageError
from lopsided.data.images import FileImages, Progress
from lopsided.data.sources import Source
from lopsided.errors import InputError, RunError
from lopsided.runs.folder import Run

MAPS = "maps.safetensors"
_MOST_BYTES = 100_000_000


@dataclass(frozen=True, eq=False)
class RunMaps:
    """The maps of named images, (n, side, side), and their sizes, (n, 2): width and height."""

    names: tuple[str, ...]
    maps: npt.NDArray[np.float16]
    sizes: npt.NDArray[np.int32]


def make_maps(
    folder: Path, wanted: Sequence[tuple[str, str]], progress: Progress | None = None, *, allow_outside: bool = False
) -> int:
    """Compute the maps of images for a class each, and write them into the run folder. Return their number.

    ``wanted`` are names of images and of classes. Images that are gone are left out. Files outside the folder of a
    table are read only with ``allow_outside``: the recipe may be a stranger's. Maps that exist are not made again.
    """
    from safetensors.numpy import save

    present = read_maps(folder)
    if present is not None and {name for name, _ in wanted} <= set(present.names):
        return len(wanted)
    recipe = Run.open(folder).recipe.override(**{"data.allow_outside": allow_outside})
    source = Source.open(recipe.data, download=False)
    images = source.images
    if not isinstance(images, FileImages):
        raise InputError(f"The images of {source.name} are not files, so there are no maps of them.")
    from lopsided.inference.maps import Maps  # torch is loaded where there is something to look at.
    from lopsided.runs.reopen import open_model

    model, card = open_model(folder)
    maps = Maps(model, card)
    places = {name: row for row, name in enumerate(source.names)}
    names, found, sizes = [], [], []
    for done, (name, label) in enumerate(wanted, start=1):
        try:
            if name in places and label in card.classes:
                height, width = images.size(places[name])
                found.append(maps.of(images.paths[places[name]], card.classes.index(label)))
                names.append(name)
                sizes.append([width, height])
        except UnreadableImageError:
            continue
        finally:
            if progress is not None:
                progress(done, len(wanted))
    if found:
        strongest = np.abs(np.stack(found)).max(axis=(1, 2), keepdims=True)
        content = {"maps": (np.stack(found) / np.maximum(strongest, 1e-12)).astype(np.float16)}
        content["sizes"] = np.array(sizes, dtype=np.int32)
        files.atomic_write(folder / MAPS, save(content, metadata={"names": json.dumps(names)}))
    return len(found)


def read_maps(folder: Path) -> RunMaps | None:
    """Read the maps of a run; None if there are none."""
    from safetensors import safe_open

    path = folder / MAPS
    if not path.is_file():
        return None
    try:
        files.check_regular(path, _MOST_BYTES)
        with files.reading_tensors(), safe_open(path, framework="numpy") as content:
            names = json.loads((content.metadata() or {})["names"])
            maps, sizes = content.get_tensor("maps"), content.get_tensor("sizes")
        is_fit = maps.ndim == 3 and sizes.shape == (len(maps), 2) and len(names) == len(maps)
        if not is_fit or maps.dtype != np.float16 or not np.isfinite(maps).all() or sizes.min(initial=1) < 1:
            raise ValueError("its parts do not fit")
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is no file of maps ({files.reason(error)}). Remove it, or make it again.") from None
    return RunMaps(tuple(map(str, names)), maps, sizes)
