"""The description of the web interface in the words of OpenAPI."""

from __future__ import annotations

from typing import Any

from lopsided import __version__
from lopsided.serve.limits import Limits
from lopsided.serve.requests import DecideJson, PredictJson, PredictOptions

_ERRORS = {
    "400": "The body cannot be read.",
    "401": "The token is missing or wrong.",
    "403": "The request comes from a page of another site.",
    "413": "Too many bytes, images or pixels.",
    "415": "The body is neither a form nor JSON.",
    "421": "The server has another name.",
    "422": "A value does not fit.",
    "503": "The server is busy; Retry-After says when to try again.",
    "504": "The answer took too long.",
}


def describe(limits: Limits) -> dict[str, Any]:
    """Return the description as an object of JSON."""
    options = PredictOptions.model_json_schema()["properties"]
    form = {
        "type": "object",
        "required": ["image"],
        "properties": {
            "image": {"type": "array", "items": {"type": "string", "format": "binary"}, "maxItems": limits.images},
            **options,
        },
    }
    bodies = {
        "multipart/form-data": {"schema": form},
        "application/json": {"schema": PredictJson.model_json_schema()},
    }
    paths: dict[str, Any] = {
        "/v1/predict": {"post": _verb("Predict the classes of images.", bodies, "#/components/schemas/Predictions")},
        "/v1/decide": {
            "post": _verb(
                "Decide again about probabilities, and count what the rule means for held-back images of the run.",
                {"application/json": {"schema": DecideJson.model_json_schema()}},
            )
        },
        "/v1/model": {"get": _verb("Describe the model.")},
        "/healthz": {"get": _verb("Tell that the server answers.")},
        "/metrics": {"get": _verb("Return counters as text for Prometheus.")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "lopsided", "version": __version__, "description": "The model of a run."},
        "paths": paths,
        "components": {
            "schemas": {"Predictions": _predictions(), "Error": _error()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _verb(words: str, bodies: dict[str, Any] | None = None, answer: str = "") -> dict[str, Any]:
    good: dict[str, Any] = {"description": "The answer."}
    if answer:
        good["content"] = {"application/json": {"schema": {"$ref": answer}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {
        "summary": words,
        "responses": {
            "200": good,
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
        "security": [{}, {"token": []}],
    }
    return found if bodies is None else found | {"requestBody": {"required": True, "content": bodies}}


def _predictions() -> dict[str, Any]:
    number, text = {"type": "number"}, {"type": "string"}
    image = {
        "type": "object",
        "properties": {
            "predicted": text | {"description": 'The decided class, or "ask" where a person should decide.'},
            "probabilities": {"type": "object", "additionalProperties": number},
            "set": {"type": "array", "items": text},
            "typicality": number,
            "unfamiliar": {"type": "boolean"},
            "unreadable": text | {"description": "Why the image cannot be read; then nothing else is there."},
            "map": text | {"description": "A data address."},
            "picture": text | {"description": "A data address."},
            "nearest": {
                "type": "array",
                "items": {"type": "object", "properties": {"id": text, "label": text, "similarity": number}},
            },
        },
    }
    return {
        "type": "object",
        "properties": {"run": text, "decide": text, "images": {"type": "array", "items": image}},
    }


def _error() -> dict[str, Any]:
    text = {"type": "string"}
    inner = {"type": "object", "required": ["code", "message"], "properties": {"code": text, "message": text}}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}
