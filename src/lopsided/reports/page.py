"""A self-contained HTML file with style, script, figures, pictures and data. Nothing is fetched.

The content security policy allows only embedded pictures, and only the scripts and styles of the page, identified by
their hashes. Even if a name from the data escaped the HTML escaping, it could not run as code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from lopsided import __version__
from lopsided.recipe.words import amount
from lopsided.reports import wording

LIMIT = 15_000_000
"""Maximum size of a page in bytes."""


def render(template: str, *, data: Any, pictures: str = "", further: str = "", **context: Any) -> str:
    """Render a template. ``data`` is passed to the script; ``pictures`` are the CSS rules of the thumbnails.

    ``further`` names a style and a script that only this page needs. Its script runs first, because that of all pages
    marks the page as ready.
    """
    style, script = _static("report.css"), _static("report.js")
    if further:
        style, script = style + _static(f"{further}.css"), _static(f"{further}.js") + script
    script = _static("common.js") + script
    policy = "; ".join(
        [
            "default-src 'none'",
            "img-src data:",
            f"style-src {_hash(style)}" + (f" {_hash(pictures)}" if pictures else ""),
            f"script-src {_hash(script)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    page = (
        environment("lopsided.reports")
        .get_template(template)
        .render(
            policy=policy,
            style=Markup(style),
            script=Markup(script),
            pictures=Markup(pictures),
            data=embedded_json(data),
            version=__version__,
            **context,
        )
    )
    return wording.clean(page)  # Clean any remaining invalid text, because the page must be UTF-8.


def embedded_json(data: Any) -> Markup:
    """Return JSON that is safe inside a script element, whatever texts it contains.

    >>> print(embedded_json({"class": "</script>\u2028"}))
    {"class":"\\u003c/script\\u003e\\u2028"}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def packed(array: npt.NDArray[Any]) -> str:
    """Return the little-endian bytes of an array as base64, for a typed array of the script."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()).decode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _static(name: str) -> str:
    return (resources.files("lopsided.reports") / "static" / name).read_text(encoding="utf-8")


@cache
def environment(*rooms: str) -> jinja2.Environment:
    """Return the environment of templates, which are looked for in these rooms."""
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(room, "templates") for room in rooms]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = (
        wording.number,
        wording.interval,
        wording.figure_value,
        wording.percent,
        amount,
        wording.clean,
        wording.signed,
        wording.probability,
        wording.breakable,
        wording.end_of_path,
    )
    made.filters.update({function.__name__: function for function in names})
    return made
