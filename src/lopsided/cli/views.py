"""Views on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lopsided.cli.output import say

if TYPE_CHECKING:
    from lopsided.models.model import Model, ModelCard

Views = Annotated[
    str | None,
    typer.Option(
        "--tta",
        help="Test-time augmentation: average the features of views of each image: none, flip, flips, "
        "dihedral, or names such as identity,rot180. Default: the views of the model.",
        show_default=False,
    ),
]


def read_views(text: str | None) -> tuple[str, ...] | None:
    """Parse --tta, before torch is imported."""
    from lopsided.errors import InputError
    from lopsided.recipe.views import AUTO, parse_views

    if text is not None and text.strip() == AUTO:
        do = "Leave out --tta, or name views, such as flip."
        raise InputError(f"--tta auto chooses views in fit, and a finished model has its own. {do}")
    return None if text is None else parse_views(text)


def use_views(model: Model, card: ModelCard, views: tuple[str, ...] | None, *, quiet: bool) -> ModelCard:
    """Let a model use other views, and say what they do to its probabilities. Return its card."""
    from lopsided.models.model import with_views
    from lopsided.recipe.views import name_views

    if views is None or views == card.views:
        return card
    if not quiet and card.calibrated_on:
        say(
            f"The model was calibrated with the views {name_views(card.views)}, so its probabilities with --tta "
            f"{name_views(views)} may be less well calibrated. fit tta={name_views(views)} calibrates with them."
        )
    return with_views(model, card, views)
