"""How long does a look-up in the cache of features take when it holds a million images?

    python benchmarks/cache_lookup.py       writes benchmarks/records/cache_lookup.json

The rows are short, because the time of a look-up is that of its digests. ``first`` is the first look-up of a process,
which reads the digests of all packs. ``found`` and ``missing`` are later ones of 512 images that are there or not, and
``after_a_pack`` is one after a new pack was written, as ``predict`` does for a pool. Milliseconds, medians of 21 calls.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lopsided import files
from lopsided.inference.feature_cache import PACK, Space

RECORD = Path(__file__).parent / "records" / "cache_lookup.json"
IMAGES, WIDTH, CALLS = 1_000_000, 4, 21


def digests(first: int, number: int) -> list[str]:
    """Return the digests of some images."""
    return [hashlib.sha256(b"%d" % i).hexdigest() for i in range(first, first + number)]


def milliseconds(call: Callable[[], object]) -> float:
    """Return the time of a call."""
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    """Fill a cache, look up in it, and write the record."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cache"
        root.mkdir(mode=0o700)
        for first in range(0, IMAGES, PACK):
            number = min(PACK, IMAGES - first)
            Space(root, {}).store(digests(first, number), np.zeros((number, WIDTH), dtype=np.float32))
        space, rows = Space(root, {}), {}
        found, missing = digests(0, PACK), digests(2 * IMAGES, PACK)
        rows["first"] = milliseconds(lambda: space.fetch(found, WIDTH))
        rows["found"] = statistics.median(milliseconds(lambda: space.fetch(found, WIDTH)) for _ in range(CALLS))
        rows["missing"] = statistics.median(milliseconds(lambda: space.fetch(missing, WIDTH)) for _ in range(CALLS))
        later = []
        for call in range(CALLS):
            space.store(digests((3 + call) * IMAGES, PACK), np.zeros((PACK, WIDTH), dtype=np.float32))
            later.append(milliseconds(lambda: space.fetch(missing, WIDTH)))
        rows["after_a_pack"] = statistics.median(later)
    record = {"images": IMAGES, "milliseconds": {name: round(value, 2) for name, value in rows.items()}}
    record |= {"command": "python benchmarks/cache_lookup.py", "load": round(os.getloadavg()[0], 1)}
    print(record)
    files.atomic_write(RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
