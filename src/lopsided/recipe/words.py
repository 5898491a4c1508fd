"""Text about recipes: the values a field takes, the errors for invalid values, and the recipe as commented TOML."""

from __future__ import annotations

import difflib
import functools
import json
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lopsided.errors import sentence

_SIGNS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}
_WORDS = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    tuple: "a list of strings",
}


class Phrase(str):
    """Describes the values of a field in ``Annotated[str, Phrase("...")]``, if the type alone does not."""


class RefusedError(ValueError):
    """Raised by a validator with its own message: the field's name, then ``where``, then ``text``."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(text)
        self.where, self.text = where, text


def leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield dotted name, field and value of each field. Plain fields come before sections, as TOML requires."""
    sections = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            sections.append((name, value))
        else:
            yield f"{prefix}{name}", field, value
    for name, section in sections:
        yield from leaves(section, f"{prefix}{name}.")


def to_toml(model: BaseModel, *, is_left_out: Callable[[str], bool] = lambda path: False) -> str:
    """Return TOML with every field below its description. A field without a value becomes a comment."""
    lines: list[str] = []
    for path, field, value in leaves(model):
        if is_left_out(path):
            continue
        section, _, name = path.rpartition(".")
        if section and f"[{section}]" not in lines:
            about = type(functools.reduce(getattr, section.split("."), model)).__doc__
            lines += ["", *_comment(about or ""), f"[{section}]"]
        choices = phrase(_annotation(field))
        lines += _comment(f"{field.description} ({choices})" if "one of" in choices else str(field.description))
        lines.append(f"# {name} is unset" if value is None else f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def problems(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """Yield a sentence for the first invalid field, and then the names of the other invalid fields.

    pydantic reports a union once per member, so each field is counted once.
    """
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        annotation: Any = model
        path: list[str] = []
        for part in item["loc"]:
            if not _is_model(annotation):
                break
            path.append(str(part))
            field = annotation.model_fields.get(str(part))
            annotation = None if field is None else _annotation(field)
        dotted = ".".join(path)
        if dotted in seen:
            continue
        seen.add(dotted)
        own = item.get("ctx", {}).get("error")
        if len(seen) > 1:
            yield dotted
        elif isinstance(own, RefusedError):
            yield f"{dotted}{own.where} {own.text}"
        elif annotation is None:
            yield unknown(dotted, model, item["input"])
        else:
            got = shown(item["input"]) + (" as an entry" if any(isinstance(part, int) for part in item["loc"]) else "")
            yield sentence(f"{dotted} must be {phrase(annotation)}", got)


def phrase_of(model: type[BaseModel], name: str) -> str:
    """Describe the values that a field of a section takes."""
    return phrase(_annotation(model.model_fields[name]))


def unknown(path: str, model: type[BaseModel], value: object = None) -> str:
    """Return a sentence that a field does not exist, with the most similar field, or section if ``value`` is a dict."""
    fields = [name.removesuffix(".name") if name.endswith(".loss.name") else name for name, _, _ in leaves(model())]
    sections = list(dict.fromkeys(name.rpartition(".")[0] for name in fields if "." in name))
    section = next(iter(difflib.get_close_matches(path[:200], sections, n=1)), "")
    close = section if section and isinstance(value, dict) else _similar(path[:200], fields)
    do = f"Did you mean {close}?" if close else "`lopsided recipes NAME` shows the fields of a recipe."
    if section and not close:
        first = next(name for name in fields if name.rpartition(".")[0] == section)
        do = f"{section} is a section with fields such as {first}."
    return f"A recipe has no field {shown(path)}. {do}"


def _similar(path: str, fields: Sequence[str]) -> str:
    """Return the field that was probably meant, or "".

    A field of the same section comes first. Otherwise the last part of the name says most:
    ``classifier_training.epochs`` means the epochs of a section with a similar name, which is ``classifier``.
    """
    section, _, last = path.rpartition(".")
    beside = [name for name in fields if section and name.rpartition(".")[0] == section]
    for names, cutoff in ((beside, 0.7), (fields, 1.0), (fields, 0.7)):
        near = difflib.get_close_matches(last, {name.rpartition(".")[2]: None for name in names}, n=1, cutoff=cutoff)
        found = [name for name in names if near and name.rpartition(".")[2] == near[0]]
        if found:
            return max(found, key=lambda name: _likeness(section, name.rpartition(".")[0]))
    return next(iter(difflib.get_close_matches(path, fields, n=1, cutoff=0.8)), "")


def _likeness(one: str, other: str) -> float:
    if one and other and (one.startswith(other) or other.startswith(one)):
        return 1.0
    return difflib.SequenceMatcher(None, one, other).ratio()


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return "Did you mean ...?" with the most similar choice, or "" if no choice is similar."""
    close = difflib.get_close_matches(word[:100], choices, n=1)
    return f"Did you mean {close[0]}?" if close else ""


def shown(value: object) -> str:
    """Return a value from an untrusted file as one short line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def listed(names: Sequence[str]) -> str:
    """Join names with commas and "and".

    >>> listed(["eta", "gamma", "temperature"])
    'eta, gamma and temperature'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def amount(number: int, thing: str, things: str = "") -> str:
    """Return a number with its noun.

    >>> amount(1, "image"), amount(1200, "image")
    ('1 image', '1,200 images')
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def phrase(annotation: Any) -> str:
    """Describe the values that a type takes.

    >>> phrase(Annotated[int, Ge(1)] | Literal["auto"] | None)
    'an integer >= 1 or "auto"'
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(phrase(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(json.dumps, args))
    if origin is Annotated:
        own = [str(extra) for extra in args[1:] if isinstance(extra, Phrase)]
        bounds = [f"{_SIGNS[type(m)][1]} {getattr(m, _SIGNS[type(m)][0])}" for m in args[1:] if type(m) in _SIGNS]
        return own[0] if own else f"{phrase(args[0])} {' and '.join(bounds)}".rstrip()
    return "a table" if _is_model(annotation) else _WORDS[origin or annotation]


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _annotation(field: FieldInfo) -> Any:
    """Return a field's type with its bounds, which pydantic stores separately."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), 118, initial_indent="# ", subsequent_indent="# ", break_long_words=False
    )


def toml_value(value: object) -> str:
    """Return a value as TOML. JSON strings, numbers and booleans are valid TOML, except for U+007F."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
