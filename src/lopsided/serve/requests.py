"""What requests ask for: images in a form or in JSON, and the options beside them. Nothing that is sent is trusted."""

from __future__ import annotations

import base64
import binascii
import json
import logging
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from lopsided.serve.limits import MEGABYTE, Limits, RefusedError

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # Forms that cannot be read are answered, not logged.
_MOST_TEXT = 64 * 1024
"""Bytes of an option in a form."""
Content = TypeVar("Content", bound=BaseModel)
Rule = Annotated[str, Field(max_length=10_000)]


class Asked(BaseModel):
    """What a caller may ask for, an object for each request with a body."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _parsed(given: Any) -> Any:
    """Return what a field of a form holds as JSON; in JSON itself it is no text."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise ValueError('must be JSON, such as {"age": 52, "sex": null}') from None


Row = dict[str, Annotated[StrictStr, Field(max_length=1000)] | StrictInt | StrictFloat | None]
"""The columns beside an image, by name. None: not known."""


class PredictOptions(Asked):
    """The options of a prediction."""

    decide: Rule | None = Field(None, description="Decision rule, such as balanced or threshold:shirt=0.2.")
    prevalence: Rule | None = Field(None, description="Expected class shares, such as shirt=0.02,other=0.98.")
    map: bool = Field(False, description="Also return where the model looked, as a transparent picture.")
    nearest: int = Field(0, ge=0, le=20, description="Also return this many nearest known images.")
    picture: bool = Field(False, description="Also return a small picture of the image.")
    columns: Annotated[Row | list[Row] | None, BeforeValidator(_parsed)] = Field(
        None,
        description='What the columns of the model say beside each image, such as {"age": 52, "sex": null}: '
        "an object for each image, or one for all. GET /v1/model lists the columns.",
    )


class PredictJson(PredictOptions):
    """A prediction of images in JSON."""

    images: list[str] = Field(min_length=1, description="Images as base64.")


class DecideJson(Asked):
    """A decision about known probabilities, and what it means for the held-back images of the run."""

    decide: Rule | None = None
    prevalence: Rule | None = None
    probabilities: list[list[Annotated[float, Field(ge=0, le=1)]]] = Field(default=[], max_length=10_000)


def _is_no_formula(name: str) -> str:
    """Return a name that a spreadsheet, which opens a table of marks, shows as it is."""
    if name[:1] in "=+-@":
        raise ValueError("a name must not begin with =, +, - or @")
    return name


Name = Annotated[
    str, Field(min_length=1, max_length=60, pattern=r"^[^\x00-\x1f\x7f]+$"), AfterValidator(_is_no_formula)
]
Session = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{8,64}$")]


class SessionJson(Asked):
    """Who asks: a name, and the session of a page."""

    who: Name
    session: Session


class QueueJson(SessionJson):
    """A request for the next images to mark."""

    order: str
    label: str
    number: int = Field(5, ge=1, le=50)


class MarkJson(SessionJson):
    """A mark: whether an image is of the class that was ``asked``, or of which other one."""

    id: str
    task: Literal["pool", "labels"]
    mark: Literal["yes", "no", "skip"]
    asked: str
    label: str = ""


RunId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})$")]


class RunJson(Asked):
    """The id of a run."""

    run: RunId


class CompareJson(Asked):
    """The ids of two runs."""

    old: RunId
    new: RunId


async def read_images(request: Request, limits: Limits) -> tuple[list[bytes], PredictOptions]:
    """Return the images of a request in memory, and its options. Names that the client gives are not read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        images, options = await _read_form(request, limits)
    elif kind == "application/json":
        asked = await read_json(request, PredictJson)
        images, options = _decoded(asked.images, limits), asked
    else:
        text = "Send images as multipart/form-data in fields called image, or as JSON with a list images of base64."
        raise RefusedError(415, "wrong_type", text)
    if len(images) > limits.images:
        raise _too_many(limits)
    if any(len(image) > limits.image_bytes for image in images):
        most = f"{limits.image_bytes / MEGABYTE:,.0f} MB"
        raise RefusedError(413, "too_large", f"An image must have at most {most}.")
    return images, options


async def read_json(request: Request, form: type[Content]) -> Content:
    """Return the JSON of a request, checked by its form."""
    try:
        return checked(form, json.loads(await request.body()))
    except ClientDisconnect:
        raise RefusedError(400, "disconnected", "The request ended too early.") from None
    except (ValueError, RecursionError):
        raise RefusedError(400, "no_json", "The body must be valid JSON.") from None


def checked(form: type[Content], content: Any) -> Content:
    """Return content in a form. Raise if it does not fit."""
    try:
        return form.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])[:100]
        message = first["msg"].removeprefix("Value error, ")
        text = f"{where}: {message}" if where else message
        raise RefusedError(422, "invalid", f"{text}.") from None


class _InMemory(MultiPartParser):
    spool_max_size = 1 << 40  # Nothing is written to disk; the size of a request is limited before.

    def close(self) -> None:
        """Forget all files, also one that has no end."""
        for file in self._files_to_close_on_error:
            file.close()


async def _read_form(request: Request, limits: Limits) -> tuple[list[bytes], PredictOptions]:
    fields = len(PredictOptions.model_fields)
    parser = _InMemory(
        request.headers, request.stream(), max_files=limits.images, max_fields=fields, max_part_size=_MOST_TEXT
    )
    try:
        images, options = [], {}
        for name, value in (await parser.parse()).multi_items():
            if isinstance(value, UploadFile):
                images.append(await value.read())
            else:
                options[name] = value
    except (MultiPartException, FormParserError) as error:  # Older versions of starlette pass the second on.
        reason = str(getattr(error, "message", error)).rstrip(".")
        if "Too many files" in reason:
            raise _too_many(limits) from None
        raise RefusedError(400, "no_form", f"The form cannot be read: {reason}.") from None
    except ClientDisconnect:
        raise RefusedError(400, "disconnected", "The request ended too early.") from None
    finally:
        parser.close()
    if not images:
        raise RefusedError(422, "no_image", "The form holds no image. Send files in fields called image.")
    return images, checked(PredictOptions, options)


def _decoded(texts: list[str], limits: Limits) -> list[bytes]:
    if len(texts) > limits.images:
        raise _too_many(limits)
    try:
        return [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, ValueError):
        raise RefusedError(
            422, "no_base64", "Each image must be base64, without the start of a data address."
        ) from None


def _too_many(limits: Limits) -> RefusedError:
    return RefusedError(413, "too_many", f"A request must have at most {limits.images} images.")
