"""Seeds by name. Every random choice of a run has its own seed, so changing one choice does not change the others."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Derive a 63-bit seed for one named purpose from the seed of a run.

    >>> derive_seed(0, "split") == derive_seed(0, "split")
    True
    >>> derive_seed(0, "split") != derive_seed(0, "augment", 3)
    True
    """
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
