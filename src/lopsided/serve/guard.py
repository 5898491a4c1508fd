"""The door of a server: who may ask, from which page, how much and for how long; and the headers of all answers.

A page of another site that a user has open can send requests to this machine, too. Such a request has the Origin of
that site, or, if the site lets its own name lead to this machine (DNS rebinding), the name of the site as its Host.
Both are compared with the names that the server has. Off this machine, a token is needed as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import time
import traceback
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lopsided.serve.counters import Counters
from lopsided.serve.limits import Budget, Limits, RefusedError

POLICY = (
    "default-src 'none'; img-src 'self' data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # With no-referrer, browsers send the form of the token with the Origin null.
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
INTERNAL = RefusedError(500, "internal", "The server has made a mistake. Its log says more.")
_OPEN = ("/healthz", "/login")
"""What needs no token, besides the files of the page."""
_COOKIE = "lopsided-"
"""How the names of cookies begin."""


def is_loopback(host: str) -> bool:
    """Return whether an address is that of this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("192.168.1.5")
    (True, True, False, False)
    """
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Return whether a text is the address of a machine, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_everywhere(host: str) -> bool:
    """Return whether an address means all addresses of this machine.

    >>> is_everywhere("0.0.0.0"), is_everywhere("::"), is_everywhere("127.0.0.1"), is_everywhere("lab")
    (True, True, False, False)
    """
    return is_address(host) and ipaddress.ip_address(host).is_unspecified


@dataclass(frozen=True)
class Access:
    """Who may ask: the names of the server, and a token; without one, everybody on this machine."""

    names: Collection[str]
    token: str = ""
    any_address: bool = False
    """Whether every address counts as a name, for a server on all addresses. A site that lets its own name lead to this
    machine has a name, not an address."""

    @property
    def cookie(self) -> str:
        """What the cookie holds: a hash, so that the token itself is not kept in the browser."""
        return hashlib.sha256(f"lopsided cookie {self.token}".encode()).hexdigest()

    @property
    def cookie_name(self) -> str:
        """The name of the cookie. Servers on other ports have other tokens, but the same cookies."""
        return f"{_COOKIE}{self.cookie[:8]}"

    def is_token(self, given: str) -> bool:
        """Return whether a text is the token. The time that it takes tells nothing."""
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self.token.encode())

    def admits(self, headers: Headers) -> bool:
        """Return whether a request has the token, in a header or as a cookie."""
        if not self.token:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(given.strip()):
            return True
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return False
        found = cookies.get(self.cookie_name)
        return found is not None and hmac.compare_digest(found.value.encode(), self.cookie.encode())

    def is_tried(self, path: str, query: bytes, headers: Headers) -> bool:
        """Return whether a request brings a token, right or wrong."""
        asks = path == "/login" or (path == "/" and b"token=" in query)
        return bool(self.token) and (asks or "authorization" in headers or _COOKIE in headers.get("cookie", ""))

    def check(self, method: str, headers: Headers) -> None:
        """Raise if a request has another Host than this server, or comes from a page of another server."""
        hosts = headers.getlist("host")
        name = _name(hosts[0]) if len(hosts) == 1 else None
        if name not in self.names and not (self.any_address and name is not None and is_address(name)):
            raise RefusedError(421, "wrong_host", "This server has another name. Open the address that it printed.")
        fetched = headers.get("sec-fetch-site", "none")
        origins = headers.getlist("origin")
        is_own = all(_is_same(origin, hosts[0]) for origin in origins)
        changes = method not in ("GET", "HEAD")
        navigates = not changes and headers.get("sec-fetch-mode") == "navigate"
        if not is_own or (fetched not in ("none", "same-origin") and not navigates):
            raise RefusedError(403, "wrong_origin", "Requests from pages of other sites are refused.")


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_same(origin: str, host: str) -> bool:
    """Return whether an Origin is the page of a Host. A proxy may speak https for a server that does not."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
    except ValueError:
        return False


class Guard:
    """Checks every request before the app gets it."""

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, counters: Counters) -> None:
        self._app, self._access, self._limits, self._counters = app, access, limits, counters
        self._budget = Budget(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        is_tried = self._access.is_tried(scope["path"], scope["query_string"], Headers(scope=scope))
        answer = _Answer(send, self._limits.wrong_token_seconds if is_tried else 0)
        start = time.monotonic()
        try:
            self._check(scope)
            with self._budget.share() as take:

                async def receive_some() -> Message:
                    message = await receive()
                    take(len(message.get("body", b"")))
                    return message

                async with asyncio.timeout(self._limits.seconds):
                    await self._app(scope, receive_some, answer)
        except Exception as error:
            if not isinstance(error, RefusedError | TimeoutError):
                traceback.print_exc()
            if not answer.status:
                await refused(self._reason(error))(scope, receive, answer)
        finally:
            endpoint = scope.get("endpoint")
            self._counters.requests.add(getattr(endpoint, "__name__", "none"), str(answer.status or 0))
            self._counters.seconds.add(time.monotonic() - start)

    def _reason(self, error: Exception) -> RefusedError:
        if isinstance(error, RefusedError):
            return error
        if isinstance(error, TimeoutError):
            return RefusedError(504, "timeout", f"The answer took longer than {self._limits.seconds:g} s. Try again.")
        return INTERNAL

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        headers = Headers(scope=scope)
        self._access.check(scope["method"], headers)
        try:
            declared = int(headers.get("content-length", "0"))
        except ValueError:
            declared = 0  # The parser of HTTP has refused what is no number.
        if declared > self._limits.request_bytes:
            most = f"{self._limits.request_bytes / (1 << 20):,.0f} MB"
            raise RefusedError(413, "too_large", f"A request must have at most {most}. Send fewer or smaller images.")
        path = scope["path"]
        if path in _OPEN or path.startswith("/static/") or self._access.admits(headers):
            return
        if path == "/" and scope["method"] in ("GET", "HEAD"):
            return  # The page asks for the token itself.
        raise RefusedError(401, "no_token", "A token is needed: Authorization: Bearer TOKEN. The server printed it.")


class _Answer:
    """Sends an answer with the headers of all answers, and knows whether it has begun."""

    def __init__(self, send: Send, wrong_token_seconds: float) -> None:
        self._send, self._wait, self.status = send, wrong_token_seconds, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status == 401 and self._wait:
                await asyncio.sleep(self._wait)
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)


def refused(error: RefusedError) -> Response:
    """Return the answer to a request that is refused, in the one shape that all errors have."""
    further = {
        401: {"WWW-Authenticate": "Bearer"},
        503: {"Retry-After": "2"},
    }
    return JsonResponse({"error": {"code": error.code, "message": str(error)}}, error.status, further.get(error.status))


class JsonResponse(JSONResponse):
    """An answer in JSON. Names that are not valid text, such as those of odd folders, are escaped."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
