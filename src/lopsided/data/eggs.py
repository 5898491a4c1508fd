"""The photographs of the demo: 240 hen's eggs, 24 of them cracked, and four new pictures, one of which is no egg.

``scripts/eggs.py`` rendered them.
"""

from __future__ import annotations

import io
import zipfile
from importlib import resources
from pathlib import Path

from lopsided import files

ASSET = "eggs.zip"


def unpack_eggs(folder: Path) -> tuple[Path, Path]:
    """Write the photographs below a folder, as far as they are not there. Return the labelled and the new ones."""
    packed = resources.files("lopsided.data").joinpath("assets", ASSET).read_bytes()
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        for name in archive.namelist():
            place, content = folder / name, archive.read(name)
            if not place.is_file() or place.read_bytes() != content:
                place.parent.mkdir(parents=True, exist_ok=True)
                files.atomic_write(place, content)
    return folder / "eggs", folder / "new"
