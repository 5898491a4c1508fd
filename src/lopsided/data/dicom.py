"""DICOM files as 8-bit images, as a viewer would show them, and their tags as groups. Needs pydicom.

- Grey values are rescaled (modality LUT), then the first window of the file, or its lookup table, maps them to 0..255.
  Without a window, the smallest value of the image becomes 0 and its largest 255.
- MONOCHROME1, in which small values are bright, is inverted. Colour images become RGB.
- Of several frames, the first is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from lopsided.data.stored import ImagePath, Stored
from lopsided.errors import DataError, InputError, MissingDependencyError, sentence

SUFFIXES = frozenset({".dcm", ".dicom"})
PATIENT = "PatientID"
_PREAMBLE = 128
Floats = npt.NDArray[np.float64]


def is_dicom(file: BinaryIO) -> bool:
    """Return whether an open file, at its begin, is a DICOM file. It is then at its begin again."""
    start = file.read(_PREAMBLE + 4)
    file.seek(0)
    return start[_PREAMBLE:] == b"DICM"


def open_dicom(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Return the image of a DICOM file, of mode L or RGB. Raise a ValueError if it has none, or one that is too large.

    Whatever else pydicom raises on a damaged file is the caller's to catch.
    """
    pydicom = _pydicom()
    content = pydicom.dcmread(file)
    if "PixelData" not in content:
        raise ValueError("a DICOM file without an image")
    if content.Rows * content.Columns > max_pixels:
        raise ValueError(f"{content.Columns} x {content.Rows} pixels, but at most {max_pixels:,} are allowed")
    values = pydicom.pixels.pixel_array(content, index=0)
    if content.PhotometricInterpretation == "PALETTE COLOR":
        values = pydicom.pixels.apply_color_lut(values, content)
        return Image.fromarray((values >> 8 if values.dtype == np.uint16 else values).astype(np.uint8)[..., :3])
    if content.SamplesPerPixel > 1:
        return Image.fromarray((values >> max(content.BitsStored - 8, 0)).astype(np.uint8))
    shares = _shares(pydicom.pixels, values, content)
    if content.PhotometricInterpretation == "MONOCHROME1":
        shares = 1 - shares
    return Image.fromarray(np.rint(shares * 255).astype(np.uint8))


def _shares(pixels: Any, values: npt.NDArray[Any], content: Any) -> Floats:
    """Return grey values as shares of white."""
    scaled: Floats = pixels.apply_modality_lut(values, content).astype(np.float64)
    if content.get("VOILUTSequence"):
        table = content.VOILUTSequence[0]
        looked: Floats = pixels.apply_voi(scaled.astype(np.int64), content).astype(np.float64)
        return looked / float(2 ** table.LUTDescriptor[2] - 1)
    centre, width = (_first(content.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if centre is None or width is None or not width > 0:
        low, high = float(scaled.min()), float(scaled.max())
        return (scaled - low) / (high - low) if high > low else np.zeros_like(scaled)
    return windowed(scaled, centre, width, str(content.get("VOILUTFunction") or "LINEAR"))


def windowed(values: Floats, centre: float, width: float, function: str = "LINEAR") -> Floats:
    """Return values as shares of white by a window (DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3).

    >>> windowed(np.array([-200.0, 40.0, 300.0]), 40, 400).round(2).tolist()
    [0.0, 0.5, 1.0]
    """
    if function == "SIGMOID":
        steps: Floats = np.exp(np.clip(-4 * (values - centre) / width, -700, 700))
        return 1 / (1 + steps)
    if function == "LINEAR" and width > 1:
        centre, width = centre - 0.5, width - 1
    shares: Floats = np.clip((values - centre) / width + 0.5, 0, 1)
    return shares


def _first(value: Any) -> float | None:
    """Return the first of several values of a tag, or None if there is none."""
    if value is None or value == "":
        return None
    return float(value if isinstance(value, int | float | str) else value[0])


def tags_of(paths: Sequence[ImagePath], keyword: str) -> list[str]:
    """Return the value of a tag, such as PatientID, of each file; "" if it has none."""
    pydicom = _pydicom()
    if pydicom.datadict.tag_for_keyword(keyword) is None:
        must = f"--group of a folder of DICOM files must be {PATIENT} or another keyword of DICOM, or parent"
        raise InputError(sentence(must, repr(keyword)))

    def tag(path: ImagePath) -> str:
        try:
            file = BytesIO(path.read()) if isinstance(path, Stored) else path
            return str(pydicom.dcmread(file, stop_before_pixels=True, specific_tags=[keyword]).get(keyword) or "")
        except Exception as error:  # With hostile bytes, pydicom raises almost any exception.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"Cannot read the tags of {path} ({reason:.200}).") from error

    return [tag(path) for path in paths]


def _pydicom() -> Any:
    try:
        import pydicom
        import pydicom.pixels
    except ImportError as error:
        do = "Run pip install 'lopsided[dicom]'."
        raise MissingDependencyError(f"Reading DICOM files needs pydicom, which is not installed. {do}") from error
    # A tag that breaks a rule of the standard does not make an image unreadable.
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    return pydicom
