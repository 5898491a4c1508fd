"""Names of encoders and of their weights: one encoder, or several that are joined by ``+``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from lopsided.errors import InputError, sentence

if TYPE_CHECKING:
    from lopsided.recipe.schema import Recipe

JOINT = "+"
"""Stands between the names of joined encoders, and between their weights."""
PIXELS = "pixels"
"""Stands for the colours and contrast of regions (``lopsided.models.pixels``), as the last of joined encoders."""
MAX_JOINED = 16
"""The largest number of joined encoders."""
WEIGHT_NAMES = ("none", "embedded", "timm")
"""Values of ``encoder.weights`` that are not paths."""
FILE_END = ".safetensors"


def is_weights(text: str) -> bool:
    """Return whether a text is a word for weights, or ends like a file of weights."""
    return text in WEIGHT_NAMES or text.endswith(FILE_END)


def has_pixels(encoder: str) -> bool:
    """Return whether the colours of regions are joined to an encoder.

    >>> has_pixels("tf_efficientnet_lite0+pixels"), has_pixels("pixels")
    (True, False)
    """
    return encoder.endswith(f"{JOINT}{PIXELS}")


def misplaces_pixels(encoder: str) -> bool:
    """Return whether ``pixels`` is alone, in front of an encoder, or there twice."""
    return PIXELS in encoder.removesuffix(f"{JOINT}{PIXELS}").split(JOINT)


def trained_names(encoder: str) -> list[str]:
    """Return the names of joined encoders, or of one, that have weights.

    >>> trained_names("tf_efficientnet_lite0+resnet50+pixels")
    ['tf_efficientnet_lite0', 'resnet50']
    """
    return [name for name in encoder.split(JOINT) if name != PIXELS]


def split_weights(weights: str, names: Sequence[str]) -> list[str]:
    """Return the weights of each of these encoders. One word, such as "embedded", counts for all of them.

    A path may contain the sign between weights: only a word or the end of a file name ends a part.

    >>> split_weights("embedded+resnet50.safetensors", ["tf_efficientnet_lite0", "resnet50"])
    ['embedded', 'resnet50.safetensors']
    """
    if weights in WEIGHT_NAMES or len(names) == 1:
        return [weights] * len(names)
    parts, open_part = [], ""
    for piece in weights.split(JOINT):
        text = f"{open_part}{piece}"
        done = is_weights(text)
        parts += [text] if done else []
        open_part = "" if done else f"{text}{JOINT}"
    if len(parts) == len(names) and not open_part:
        return parts
    must = f"encoder.weights must name weights for each of the {len(names)} encoders {', '.join(names):.200}"
    raise InputError(sentence(must, f"{weights!r:.200}", f"Put {JOINT} between them, as in encoder.name."))


def change_files(encoder: str, weights: str, change: Callable[[str], str]) -> str:
    """Return ``encoder.weights`` with a change of each path in it. Words stay as they are."""
    parts = split_weights(weights, trained_names(encoder))
    if weights in WEIGHT_NAMES:
        return weights
    return JOINT.join(part if part in WEIGHT_NAMES else change(part) for part in parts)


def weight_files(encoder: str, weights: str) -> list[str]:
    """Return the paths in ``encoder.weights``."""
    return [part for part in split_weights(weights, trained_names(encoder)) if part not in WEIGHT_NAMES]


def joined_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every conflict of scaled features or of joined encoders with other fields."""
    section, method = recipe.encoder, recipe.method
    if section.scaling != "none" and not recipe.is_frozen and method != "fine-tune":
        do = "Only the features of a pretrained encoder are scaled."
        yield sentence(f'encoder.scaling must be "none" with method "{method}"', f'"{section.scaling}"', do)
    names = section.name.split(JOINT)
    if misplaces_pixels(section.name):
        do = f"Write it once, as in tf_efficientnet_lite0{JOINT}{PIXELS}."
        yield sentence(f"encoder.name must have {PIXELS} after the encoders that it is joined to", section.name, do)
        return
    if len(trained_names(section.name)) == 1 and not is_weights(section.weights):
        yield sentence("encoder.weights must be those of one encoder", repr(section.weights))
        return
    if len(names) == 1:
        return
    if not recipe.is_frozen:
        do = "Only frozen encoders can be joined."
        yield sentence(f'encoder.name must be one encoder with method "{method}"', section.name, do)
    if len(names) > MAX_JOINED or not all(names):
        got = f"{len(names)}" if all(names) else repr(section.name)
        yield sentence(f"encoder.name must join at most {MAX_JOINED} encoders, none of them empty", got)
        return
    if recipe.data.channels == 1:
        do = "Leave out data.channels: grey images are repeated to three channels. Or name one encoder, without +."
        yield sentence(f"data.channels must be unset or 3 with the encoder {section.name}", 1, do)
    try:
        parts = split_weights(section.weights, trained_names(section.name))
    except InputError as error:
        yield str(error)
        return
    if section.weights != "none" and "none" in parts:
        yield sentence('encoder.weights cannot hold "none" for one of several encoders', repr(section.weights))
