"""Words such as ``eta=300`` on the command line: settings of a recipe, between DATA and options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lopsided.errors import InputError, sentence

if TYPE_CHECKING:
    from lopsided.recipe import Changes, Recipe


def read_arguments(texts: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return DATA, if it is given, and the words."""
    from lopsided.recipe import is_word

    data = [text for text in texts if not is_word(text)]
    if len(data) > 1:
        do = "Name one source. A setting is written NAME=VALUE, without spaces."
        raise InputError(f"DATA is given twice: {data[0]} and {data[1]}. {do}")
    return (data[0] if data else None), [text for text in texts if is_word(text)]


def read_minutes(texts: Sequence[str]) -> tuple[float | None, list[str]]:
    """Return the time of a comparison (``minutes=30``), if it is given, and the other words."""
    given = [text.partition("=")[2] for text in texts if text.startswith("minutes=")]
    others = [text for text in texts if not text.startswith("minutes=")]
    try:
        minutes = float(given[-1]) if given else None
    except ValueError:
        minutes = -1.0
    if minutes is not None and not 0 <= minutes < math.inf:
        raise InputError(sentence("minutes must be a number >= 0", given[-1]))
    return minutes, others


def read_changes(
    texts: Sequence[str], options: Mapping[str, tuple[str, Any]], recipe: Callable[[], Recipe | None] = lambda: None
) -> Changes:
    """Return the changes of words and options. A matrix of costs is read, and one fold means one split."""
    from lopsided.recipe import read_words

    changes = read_words(texts, options, recipe)
    changes.resolve()
    return changes


def with_word(option: str, arguments: Sequence[str]) -> list[str] | None:
    """Return the arguments with a word instead of an option that does not exist, if it is the name of a setting."""
    from lopsided.recipe import read_words

    place = next((i for i, text in enumerate(arguments) if text.partition("=")[0] == option), len(arguments))
    name, is_joined, value = arguments[place].lstrip("-").partition("=") if place < len(arguments) else ("", "", "")
    name, rest = _OTHER_NAMES.get(name, name.replace("-", "_")), list(arguments[place + 1 :])
    try:
        (path, *_) = read_words([f"{name}=0"]).values
    except InputError:
        return None
    if not is_joined:
        if path in _SWITCHES:
            value = "true"
        elif rest and (not rest[0].startswith("-") or _is_number(rest[0])):
            value = rest.pop(0)
        else:
            raise InputError(f"{option} needs a value.")
    return [*arguments[:place], f"{name}={value}", *rest]


def other_option(option: str, arguments: Sequence[str]) -> str | None:
    """Return what to write instead of an option that another command has."""
    place = next((i for i, text in enumerate(arguments) if text.partition("=")[0] == option), len(arguments))
    value = option.partition("=")[2] or next(iter(arguments[place + 1 :]), "")
    if option == "--minutes" and arguments[0] != "compare" and "--auto" not in arguments:
        return f"--auto minutes={value or 'VALUE'}"
    return f"--methods {value or 'NAME'}" if option == "--loss" and arguments[0] == "compare" else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_OTHER_NAMES = {"views": "tta", "source": "origin", "normal": "classes"}
"""Options that are not called like their fields."""
_SWITCHES = ("data.skip_unreadable", "data.allow_outside")
