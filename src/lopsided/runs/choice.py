"""Which recipe ``lopsided fit`` takes if none is named: ``thorough`` for photographs, ``default`` for other images."""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np

from lopsided.data.prepare import list_drawn
from lopsided.data.sources import Source
from lopsided.errors import LopsidedError
from lopsided.recipe import Recipe
from lopsided.runs.run import settle

DEFAULT, THOROUGH = "default", "thorough"
SMALL, MANY = 112, 3000
"""Images of at most ``SMALL`` pixels have no detail that more encoders could see. With more than ``MANY`` photographs,
``thorough`` takes too long to be started without a question."""
FEW = 32
"""Images whose size is looked at."""
SECONDS = 0.27
"""Seconds of one core for the features of a photograph by ``thorough``, as a rough guide."""


def choose_recipe(base: Recipe, data: str | None = None) -> tuple[str, str]:
    """Return the name of the recipe for these data, and the sentence that gives the reason. Images are not decoded.

    ``base`` holds the fields of the data.
    """
    source = list_drawn(settle(base, data))
    side = _usual_side(source)
    plain = f"the images have only {side} pixels" if side <= SMALL else ""
    if base.data.channels == 1:  # Joined encoders take three channels.
        plain = "data.channels is 1"
    minutes = SECONDS * len(source) / (os.cpu_count() or 1) / 60
    about = "less than a minute" if minutes < 1 else f"about {minutes:.0f} min"
    other = "Use --recipe fine-tune or from-scratch to train an encoder."
    if plain or len(source) > MANY:
        reason = plain or f"thorough would take {about} for {len(source):,} images"
        why = f"Recipe: default, because no recipe was named and {reason}: a pretrained encoder that is not trained."
        return DEFAULT, f"{why} {other}"
    why = (
        f"Recipe: thorough, because no recipe was named: {len(source):,} photographs through three pretrained encoders"
    )
    return THOROUGH, f"{why}, which takes {about}. Use --recipe default for one encoder. {other}"


def _usual_side(source: Source) -> int:
    """Return the median of the longer sides of a few images. An image that cannot be read is reported later."""
    sides = []
    for row in np.linspace(0, len(source) - 1, min(len(source), FEW)).astype(np.int64).tolist():
        with suppress(LopsidedError):
            sides.append(max(source.images.size(row)))
    return int(np.median(sides)) if sides else 0
