"""How long the slowest allowed images take to decode, and how long an interrupt waits for them.

    python benchmarks/slow_images.py        writes benchmarks/records/slow_images.json

The pixels are noise, which every format finds hard. A decoder can be stopped when it asks for more of its file, so that
the longest time between two readings is what an interrupt in the same thread waits for. Times are those of the
processor. The progressive JPEG has as many scans as are allowed for its size.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import tempfile
from pathlib import Path
from time import process_time

import numpy as np
from PIL import Image

from lopsided import files
from lopsided.data import decoding

RECORD = Path(__file__).parent / "records" / "slow_images.json"
SIDE = 3000
FORMATS = {
    "PNG": {},
    "GIF": {},
    "TIFF": {"compression": "tiff_adobe_deflate"},
    "WEBP": {"lossless": True, "method": 0},
    "JPEG2000": {},
    "AVIF": {"speed": 9},
    "JPEG": {"progressive": True},
}


def scanned(side: int) -> bytes:
    """Return a progressive JPEG with as many scans as its size allows; the last scan is repeated."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), 90).save(buffer, "JPEG", progressive=True)
    content = buffer.getvalue()
    last = content[content.rindex(b"\xff\xda") : -2]
    most = min(decoding.MAX_SCANS, decoding.MAX_SCANNED // side**2)
    return content[:-2] + last * (most - content.count(b"\xff\xda")) + content[-2:]


def measured(path: Path) -> dict[str, float | int | str]:
    """Decode a file and return its time, and the longest time between two readings."""
    times = [process_time()]
    read = decoding._Watched.read

    def timed(file: decoding._Watched, size: int = -1) -> bytes:
        times.append(process_time())
        return read(file, size)

    decoding._Watched.read = timed  # type: ignore[method-assign]
    error = decoding.examine(path).error
    decoding._Watched.read = read  # type: ignore[method-assign]
    times.append(process_time())
    longest = max(after - before for before, after in itertools.pairwise(times))
    return {
        "megabytes": round(path.stat().st_size / 1e6, 2),
        "seconds": round(times[-1] - times[0], 2),
        "longest_wait": round(longest, 2),
        "readings": len(times) - 2,
        "error": error,
    }


def main() -> None:
    """Measure all files and write the record."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    found: dict[str, dict[str, float | int | str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.png"  # The content, not the name, decides on the format.
        for name, options in FORMATS.items():
            (noise.quantize(256) if name == "GIF" else noise).save(path, name, **options)
            found[f"{name}, {SIDE} x {SIDE}"] = measured(path)
        side = int((decoding.MAX_SCANNED / decoding.MAX_SCANS) ** 0.5)
        path.write_bytes(scanned(side))
        found[f"JPEG with {decoding.MAX_SCANS} scans, {side} x {side}"] = measured(path)
    for name, row in found.items():
        print(f"{name:40} {row}")
    record = {"load_before": round(os.getloadavg()[0], 1), "largest_pixels": decoding.MAX_PIXELS, "files": found}
    files.atomic_write(RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
