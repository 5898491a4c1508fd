"""Unfamiliar images on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from lopsided.cli.options import words
from lopsided.cli.output import say

if TYPE_CHECKING:
    from lopsided.facts import Fact

Unfamiliar = Annotated[
    str | None,
    typer.Option(
        help="What becomes of images unlike the training images: mark (a column), drop (left out) or first (listed "
        "before the others).",
        show_default=False,
        autocompletion=words("mark", "drop", "first"),
    ),
]
Level = Annotated[
    float | None,
    typer.Option(
        help="The share of images like the training images that may be marked as unfamiliar. Default: 0.01, one in "
        "100.",
        show_default=False,
    ),
]


def tell_facts(facts: Iterable[Fact], *, quiet: bool) -> None:
    """Say how many images are unfamiliar, and whether they all differ from the training images."""
    for fact in facts:
        if not quiet or fact.is_caution:
            say(f"warning: {fact}" if fact.is_caution else str(fact))
