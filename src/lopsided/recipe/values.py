"""The types of the values of a recipe: texts, numbers with bounds, words that are checked, and tables of them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from lopsided.errors import InputError
from lopsided.recipe import words
from lopsided.recipe.encoder_spec import ends_with_weights
from lopsided.recipe.rules import parse_rule
from lopsided.recipe.views import AUTO, UnknownViewError, name_views, parse_views

MAX_SIDE = 8192
"""The largest image side that a model may need. The decoder does not read larger images either."""
_TRACKER = re.compile(r"[\w.-]+(:[^\x00-\x1f]+)?")
_DEVICE = re.compile(r"auto|(cpu|cuda|mps)(:\d{1,4})?")
MOST = 2**31 - 1
"""The largest integer of a field."""


def _utf8(text: str) -> str:
    text.encode()  # A lone surrogate raises UnicodeEncodeError, a ValueError, because no file can hold it.
    return text


def _filled(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("empty, or with a NUL")
    return text


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _weights(text: str) -> str:
    if ends_with_weights(text):
        return text
    raise ValueError("neither a word nor a file of weights")


def _tracker(text: str) -> str:
    if not _TRACKER.fullmatch(text):
        raise ValueError("no name, or nothing after the colon")
    return text


def _device(text: str) -> str:
    if not _DEVICE.fullmatch(text):
        raise ValueError("no device")
    return text


def _rule(text: str) -> str:
    try:
        return str(parse_rule(text))
    except InputError as error:
        raise words.RefusedError("", f"cannot be used. {error}") from None


def _views(text: str) -> str:
    if text.strip() == AUTO:
        return AUTO
    try:
        return name_views(parse_views(text))
    except UnknownViewError as error:
        choice = "With a frozen encoder, auto lets inner folds choose."
        raise words.RefusedError("", f"cannot be used. {error} {choice}") from None
    except InputError as error:
        raise words.RefusedError("", f"cannot be used. {error}") from None


AnyText = Annotated[str, AfterValidator(_utf8)]
Text = Annotated[AnyText, AfterValidator(_filled), words.Phrase("a string that is not empty")]
Rule = Annotated[AnyText, AfterValidator(_rule), words.Phrase("a decision rule")]
Views = Annotated[AnyText, AfterValidator(_views), words.Phrase("views of an image, such as flip")]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_tuple)]
Device = Annotated[AnyText, AfterValidator(_device), words.Phrase('"auto", "cpu", "cuda", "cuda:1" or "mps"')]
TrackerText = Annotated[Text, AfterValidator(_tracker)]
TrackerTexts = Annotated[
    tuple[TrackerText, ...],
    BeforeValidator(_tuple),
    words.Phrase('a list of trackers, such as ["tensorboard", "mlflow:FOLDER"]'),
]
Weights = Annotated[
    AnyText,
    AfterValidator(_weights),
    words.Phrase('"none", "embedded", "timm", hf-hub:OWNER/NAME@COMMIT or a path that ends in .safetensors'),
]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Count = Annotated[int, Ge(1), Le(MOST)]
Side = Annotated[int, Ge(1), Le(MAX_SIDE)]
Width = Annotated[int, Ge(1), Le(2**16)]
Threads = Annotated[int, Ge(1), Le(1024)]
Number = Annotated[float, Ge(0), AfterValidator(lambda x: x + 0.0)]  # -0.0 and 0.0 are the same recipe
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1), AfterValidator(lambda x: x + 0.0)]
PartialShare = Annotated[float, Gt(0), Le(1)]
Alpha = Annotated[float, Ge(0), Le(100), AfterValidator(lambda x: x + 0.0)]
CHUNK = words.Phrase(f"an integer >= 2 and <= {MOST} (one image has no batch statistics)")
Optimizer = Literal["adam", "adamw", "sgd"]
Schedule = Literal["constant", "cosine"]


class Section(BaseModel):
    """A table of a recipe. It is frozen, rejects unknown fields, and does not convert between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
