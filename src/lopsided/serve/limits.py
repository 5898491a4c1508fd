"""What a server accepts, and the one shape of its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lopsided.errors import LopsidedError

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The largest things that a server accepts."""

    image_bytes: int = 32 * MEGABYTE
    request_bytes: int = 64 * MEGABYTE
    bytes_at_once: int = 512 * MEGABYTE
    """Bytes of all requests that are being read or answered."""
    images: int = 64
    """Images of one request."""
    pixels: int = 50_000_000
    """Pixels that the header of an image may declare."""
    waiting: int = 512
    """Images of all requests that wait for the model."""
    seconds: float = 60.0
    """The time in which a request must have come and be answered."""
    connections: int = 256
    idle_seconds: int = 15
    """The time after which a connection is ended whose client sends no whole request."""
    wrong_token_seconds: float = 1.0
    """How long the answer to a wrong token is kept back, so that guessing is slow. Who has the token never waits."""


class RefusedError(LopsidedError):
    """A request that is refused: the ``status`` of HTTP, a ``code`` for programs, and a sentence for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Budget:
    """Counts the bytes of all requests at once. It is used in one thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._used = limits, 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Give a request the function that adds bytes to its share, which is returned at the end of the block.

        The function raises if the request or all of them together become too large.
        """
        limits, own = self._limits, 0

        def take(number: int) -> None:
            nonlocal own
            if own + number > limits.request_bytes:
                text = f"A request must have at most {limits.request_bytes / MEGABYTE:,.0f} MB."
                raise RefusedError(413, "too_large", f"{text} Send fewer or smaller images.")
            if self._used + number > limits.bytes_at_once:
                raise RefusedError(503, "busy", "The server is busy with other requests. Try again in a few seconds.")
            own += number
            self._used += number

        try:
            yield take
        finally:
            self._used -= own
