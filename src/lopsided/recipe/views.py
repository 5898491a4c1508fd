"""Views of an image as text: how a recipe, the command, the estimator and a model card name them.

    none                 the image alone
    flip                 the image and its mirror image, left to right
    flips                the image and its mirror images: left to right, top to bottom, and both (a half turn)
    dihedral             all eight: the image and its mirror image, each turned by 0, 90, 180 and 270 degrees
    identity,rot180      any views by their names
    auto                 flips, flip or none, as inner folds of the training images say (recipes of a frozen encoder)

A view only moves pixels, so nothing is interpolated. Turns are counterclockwise. ``transpose`` mirrors the image at its
main diagonal, from the top left to the bottom right, and ``transverse`` at the other diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence

from lopsided.errors import InputError

VIEWS = ("identity", "hflip", "vflip", "rot180", "rot90", "rot270", "transpose", "transverse")
"""The symmetries of a square."""
TURNED = frozenset(VIEWS[4:])
"""Views that swap height and width, so that they need square images."""
PLAIN = ("identity",)
SETS = {"none": PLAIN, "flip": VIEWS[:2], "flips": VIEWS[:4], "dihedral": VIEWS}
"""Named sets of views."""
AUTO = "auto"
CANDIDATES = (SETS["flips"], SETS["flip"], SETS["none"])
"""The sets that ``auto`` chooses from, each inside the one before."""


class UnknownViewError(InputError):
    """A name that is no view."""


def parse_views(text: str) -> tuple[str, ...]:
    """Return the views that a text names, without repetitions, in the order of ``VIEWS``.

    >>> parse_views("flip"), parse_views("rot180, identity")
    (('identity', 'hflip'), ('identity', 'rot180'))
    """
    names = [name.strip() for name in text.split(",")]
    if len(names) == 1 and names[0] in SETS:
        return SETS[names[0]]
    known = f"Use {', '.join(SETS)}, or names of views: {', '.join(VIEWS)}."
    odd = next((name for name in names if name not in VIEWS), None)
    if odd is not None:
        raise UnknownViewError(f"There is no view {odd[:40]!r}. {known}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"Each view may be named once, got {twice} {names.count(twice)} times.")
    return tuple(name for name in VIEWS if name in names)


def parse_tta(text: str | None) -> tuple[str, ...] | None:
    """Return the views of ``--tta``, with which a finished model is used instead of its own; None: its own."""
    if text is not None and text.strip() == AUTO:
        do = "Leave out --tta, or name views, such as flip."
        raise InputError(f"--tta auto chooses views in fit, and a finished model has its own. {do}")
    return None if text is None else parse_views(text)


def computed_views(text: str) -> tuple[str, ...]:
    """Return the views that a recipe computes: those that a text names, or all that ``auto`` chooses from."""
    return CANDIDATES[0] if text == AUTO else parse_views(text)


def name_views(views: Sequence[str]) -> str:
    """Return the shortest text that ``parse_views`` reads as these views.

    >>> name_views(("identity", "hflip")), name_views(("identity", "rot180"))
    ('flip', 'identity,rot180')
    """
    return next((name for name, held in SETS.items() if held == tuple(views)), ",".join(views))


def check_views(views: Sequence[str], kind: str, shape: Sequence[int]) -> None:
    """Raise unless inputs of this kind and shape, (c, h, w) for images, have these views."""
    if tuple(views) == PLAIN:
        return
    named = name_views(views)
    if kind != "image":
        raise InputError(f"views must be none for vectors, got {named}. Only images have views.")
    turned = next((name for name in views if name in TURNED), None)
    if turned is not None and shape[1] != shape[2]:
        got = f"images of {shape[2]} x {shape[1]} pixels have no view {turned}, which {named} contains"
        raise InputError(f"{got[0].upper()}{got[1:]}. Use views = flips, or resize the images to squares (image_size).")
