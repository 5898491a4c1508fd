"""Ask a server for the classes of images: ``lopsided predict --url``. Needs only the standard library.

A connection is made to the address that the user names, and to no other; proxies and redirects are not followed.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import secrets
import ssl
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from threading import local
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
from pydantic import ValidationError

from lopsided.data.decoding import UnreadableImageError
from lopsided.data.images import ordered_map
from lopsided.data.stored import ImagePath, Stored, cells_of
from lopsided.errors import InputError, RunError, sentence
from lopsided.evaluation.decision import Decision
from lopsided.facts import Fact, notes
from lopsided.inference.predict import Answer, Familiarity
from lopsided.recipe.blocks import Cells

TOKEN = "LOPSIDED_TOKEN"
"""The variable of the environment with the token of a server."""
_TOGETHER, _AT_ONCE = 8, 3
"""Images of a request, and requests at a time."""
_TRIES, _SECONDS = 30, 120.0
_MOST_ANSWER = 1 << 26


class Far(Familiarity):
    """What a server says about unfamiliar images. Its bank stays there."""

    def __init__(self, level: float) -> None:
        self.place, self.asked, self.level = "mark", level, level
        self.typicality, self._number = array("d"), 0

    def take(self, typicality: float, path: str) -> bool:
        """Remember an image. Return whether it is unfamiliar."""
        self.typicality.append(typicality)
        is_unfamiliar = typicality <= self.level * (1 + 1e-12)
        self._number += is_unfamiliar
        return is_unfamiliar

    def to_dict(self, groups: Any = None) -> dict[str, Any]:
        """Return what there is to say about the images so far, for JSON."""
        return {"unfamiliar": {"number": self._number, "level": self.level}} if self.typicality else {}

    def facts(self, groups: Any = None) -> Iterator[Fact]:
        """Yield what there is to say about the images so far."""
        if self.typicality:
            yield notes.unfamiliar_images(self._number, len(self.typicality), self.level)


class Client:
    """A server at an address, its classes, and the decision of a rule there."""

    def __init__(self, url: str, decide: str | None = None, prevalence: str | None = None) -> None:
        self._place, self._threads = _parse(url), local()
        self._connections: list[http.client.HTTPConnection] = []
        self._headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}
        self._options = {key: text for key, text in (("decide", decide), ("prevalence", prevalence)) if text}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        model = self._ask("GET", "/v1/model")
        chosen = self._ask("POST", "/v1/decide", json.dumps(self._options).encode(), "application/json")
        try:
            self.classes = tuple(str(name) for name in model["classes"])
            self.decision = Decision.model_validate(chosen["decision"])
            self._most = int(model["limits"]["image_bytes"])
            self.columns = tuple(str(column["name"]) for column in model.get("columns", ()))
            level = model["unfamiliar_level"]
            self.familiarity = None if level is None else Far(float(level))
            if not self.decision.fits(len(self.classes)):
                raise ValueError("the decision does not fit the classes")
        except (KeyError, TypeError, ValueError, ValidationError):
            raise self._odd() from None

    def answers(self, paths: Iterable[ImagePath]) -> Iterator[Answer]:
        """Yield an answer for each image, in order."""
        rest = iter(paths)
        chunks = iter(lambda: list(islice(rest, _TOGETHER)), [])
        try:
            for part in ordered_map(self._predict, chunks, _AT_ONCE):
                yield from part
        finally:
            self.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()

    def _predict(self, paths: Sequence[ImagePath]) -> list[Answer]:
        contents = [self._read(path) for path in paths]
        sent = [content for content in contents if isinstance(content, bytes)]
        cells = [cells_of(path) for path, content in zip(paths, contents, strict=True) if isinstance(content, bytes)]
        answers = iter(self._images(sent, cells) if sent else [])
        return [
            (path, content, None) if isinstance(content, UnreadableImageError) else self._answer(path, next(answers))
            for path, content in zip(paths, contents, strict=True)
        ]

    def _images(self, contents: Sequence[bytes], cells: Sequence[Cells]) -> list[Any]:
        boundary, options = secrets.token_hex(16), dict(self._options)
        if self.columns:
            options["columns"] = json.dumps([dict(zip(self.columns, row, strict=True)) for row in cells])
        form = [_part(boundary, f'name="{key}"', text.encode()) for key, text in options.items()]
        form += [_part(boundary, 'name="image"; filename="image"', content) for content in contents]
        body = b"".join([*form, f"--{boundary}--\r\n".encode()])
        kind = f"multipart/form-data; boundary={boundary}"
        images = self._ask("POST", "/v1/predict", body, kind).get("images")
        if not isinstance(images, list) or len(images) != len(contents):
            raise self._odd()
        return images

    def _read(self, path: ImagePath) -> bytes | UnreadableImageError:
        try:
            content = path.read() if isinstance(path, Stored) else Path(path).read_bytes()
        except OSError as error:
            return UnreadableImageError(path, (error.strerror or str(error)).lower())
        if len(content) > self._most:
            return UnreadableImageError(path, f"more than the {self._most:,} bytes that the server accepts")
        return content

    def _answer(self, path: ImagePath, found: Any) -> Answer:
        try:
            if "unreadable" in found:
                return path, UnreadableImageError(path, str(found["unreadable"])[:300]), None
            p = np.array([float(found["probabilities"][name]) for name in self.classes])
            typical = None if self.familiarity is None else float(found["typicality"])
        except (KeyError, TypeError, ValueError):
            raise self._odd() from None
        if not np.isfinite(p).all() or (typical is not None and not math.isfinite(typical)):
            raise self._odd()
        return path, p, typical

    def _ask(self, method: str, path: str, body: bytes | None = None, kind: str = "") -> dict[str, Any]:
        headers = self._headers | ({"Content-Type": kind} if kind else {})
        for again in range(_TRIES):
            status, content = self._exchange(method, self._place.path + path, body, headers)
            if status != 503:
                break
            time.sleep(min(5.0, 0.2 * 2**again))  # The server is busy.
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            raise self._odd() from None
        if status == 200 and isinstance(found, dict):
            return found
        error = found.get("error") if isinstance(found, dict) else None
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            raise self._odd()
        do = f" Set {TOKEN} to it." if status == 401 else ""
        raise (InputError if status == 422 else RunError)(f"{error['message'][:1000]}{do}")

    def _exchange(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        for fresh in (False, True):  # A server may have closed a connection that was idle.
            try:
                connection = self._connection(fresh)
                connection.request(method, path, body, dict(headers))
                answer = connection.getresponse()
                content = answer.read(_MOST_ANSWER)
                return answer.status, content
            except (OSError, http.client.HTTPException) as error:
                if fresh:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    do = "Is `lopsided serve` running there?"
                    raise RunError(f"The server at {self._place.netloc} does not answer ({reason}). {do}") from None
        raise AssertionError

    def _connection(self, fresh: bool) -> http.client.HTTPConnection:
        if fresh and hasattr(self._threads, "connection"):
            self._threads.connection.close()
        if fresh or not hasattr(self._threads, "connection"):
            host, port = self._place.hostname or "", self._place.port
            if self._place.scheme == "https":
                context = ssl.create_default_context()
                self._threads.connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=context)
            else:
                self._threads.connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
            self._connections.append(self._threads.connection)
        connection: http.client.HTTPConnection = self._threads.connection
        return connection

    def _odd(self) -> RunError:
        do = "Is it a server of this version of lopsided?"
        return RunError(f"The server at {self._place.netloc} answers something else than predictions. {do}")


def _parse(url: str) -> SplitResult:
    try:
        place = urlsplit(url.rstrip("/"))
        good = place.scheme in ("http", "https") and bool(place.hostname) and not (place.query or place.fragment)
        good = good and (place.port is None or place.port > 0) and "@" not in place.netloc
    except ValueError:
        good = False
    if not good:
        raise InputError(
            sentence("--url must be the address of a server", repr(url), "Example: http://127.0.0.1:8765.")
        )
    return place


def _part(boundary: str, name: str, content: bytes) -> bytes:
    return f"--{boundary}\r\nContent-Disposition: form-data; {name}\r\n\r\n".encode() + content + b"\r\n"
