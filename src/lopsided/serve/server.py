"""Run a server until it is asked to stop: what has begun is finished."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lopsided.errors import InputError
from lopsided.serve.limits import Limits


class Server(uvicorn.Server):
    """A server that ends on SIGTERM or SIGINT when all requests that have begun are answered."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; at once if somebody interrupts twice."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


class _Gathering:
    """A transport that sends what is written in one turn of the loop at once.

    uvicorn writes the head and the body of an answer apart. Each would be a packet, wake up the client, and let another
    thread of this process go on first: with 16 clients, a fifth fewer answers a second.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data at the end of the turn."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Send what was written, and close."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Return anything else of the transport."""
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """A connection that ends if its client sends no whole request for some time.

    That of uvicorn ends after an answer only, and only if the client sends nothing at all. So a few hundred clients
    that send half a header, for which no token is needed, would keep everybody else out.
    """

    _idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(_Gathering(transport, self.loop))  # type: ignore[arg-type]
        self._wait()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop()
        self._idle = self.loop.call_later(self.timeout_keep_alive, self._end)

    def _stop(self) -> None:
        if self._idle is not None:
            self._idle.cancel()

    def _end(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        do = "Choose another --port." if port else "Choose another --host."
        raise InputError(f"Cannot listen on {host}, port {port} ({reason}). {do}") from None
    return listener


def made(app: ASGIApp, limits: Limits) -> Server:
    """Return a server of an app."""
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        lifespan="off",
        server_header=False,
        date_header=True,
        proxy_headers=False,
        ws="none",
        http=Connection,
        limit_concurrency=limits.connections,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=int(limits.seconds) + 5,
    )
    return Server(config)


def run(app: ASGIApp, listener: socket.socket, limits: Limits, started: Callable[[], None]) -> None:
    """Serve an app until the process is asked to stop."""
    server = made(app, limits)
    started()
    server.run(sockets=[listener])
