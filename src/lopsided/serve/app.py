"""The routes of a server: the page, its files, and the web interface."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lopsided import __version__
from lopsided.errors import LopsidedError
from lopsided.reports.page import embedded_json, environment
from lopsided.serve.bench import Bench
from lopsided.serve.guard import INTERNAL, Access, Guard, JsonResponse, refused
from lopsided.serve.limits import RefusedError
from lopsided.serve.openapi import describe
from lopsided.serve.pool import ORDERS
from lopsided.serve.requests import (
    Asked,
    CompareJson,
    DecideJson,
    MarkJson,
    QueueJson,
    RunJson,
    SessionJson,
    read_images,
    read_json,
)

_FILES = {
    "report.css": ("lopsided.reports", "text/css"),
    "find.css": ("lopsided.reports", "text/css"),
    "common.js": ("lopsided.reports", "text/javascript"),
    "serve.css": ("lopsided.serve", "text/css"),
    "serve.js": ("lopsided.serve", "text/javascript"),
    "try.js": ("lopsided.serve", "text/javascript"),
    "mark.js": ("lopsided.serve", "text/javascript"),
    "refit.js": ("lopsided.serve", "text/javascript"),
}
"""The files of the page. Those of reports are shared with pages that need no server."""
_COOKIE_SECONDS = 30 * 24 * 3600
_MOST_LOGIN = 4096


def make_app(bench: Bench, access: Access) -> ASGIApp:
    """Return the app of a workbench."""
    routes = Routes(bench, access)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/login", routes.login, methods=["POST"]),
            Route("/static/{name}", routes.static),
            Route("/images/{name}", routes.image),
            Route("/v1/predict", routes.predict, methods=["POST"]),
            Route("/v1/decide", routes.decide, methods=["POST"]),
            Route("/v1/model", routes.model),
            Route("/v1/queue", routes.queue, methods=["POST"]),
            Route("/v1/marks", routes.mark, methods=["POST"]),
            Route("/v1/marks", routes.marks),
            Route("/v1/undo", routes.undo, methods=["POST"]),
            Route("/v1/refit", routes.refit, methods=["POST"]),
            Route("/v1/runs", routes.runs),
            Route("/v1/use", routes.use, methods=["POST"]),
            Route("/v1/compare", routes.compare, methods=["POST"]),
            Route("/v1/marks.csv", routes.marks_table),
            Route("/v1/corrections.csv", routes.corrections_table),
            Route("/healthz", routes.health),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
        ],
        exception_handlers=dict.fromkeys((LopsidedError, HTTPException, Exception), _refuse),
    )
    return Guard(app, access, bench.limits, bench.counters)


class Routes:
    """One method per route."""

    def __init__(self, bench: Bench, access: Access) -> None:
        self._bench, self._access = bench, access

    async def page(self, request: Request) -> Response:
        """Return the page, or the question for the token. An address with the token sets the cookie."""
        given = request.query_params.get("token")
        if given is not None:
            return self._admit(request, given)
        if not self._access.admits(request.headers):
            return _html("login.html.j2", 401, wrong=False)
        orders = [{"name": name, "words": order.words, "task": order.task} for name, order in ORDERS.items()]
        data = {"model": self._bench.served.facts(), "orders": orders, "pool": self._bench.marking.pool.total}
        return _html("serve.html.j2", data=data, work=self._bench.work.name)

    async def login(self, request: Request) -> Response:
        """Set the cookie if the token is right."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_LOGIN:
                raise RefusedError(413, "too_large", "A token is shorter.")
        given = parse_qs(body.decode(errors="replace")).get("token", [""])[0]
        return self._admit(request, given.strip())

    def _admit(self, request: Request, given: str) -> Response:
        if not self._access.token:
            return RedirectResponse("/", 303)
        if not self._access.is_token(given):
            return _html("login.html.j2", 401, wrong=True)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            self._access.cookie_name,
            self._access.cookie,
            max_age=_COOKIE_SECONDS,
            secure=_is_https(request),
            httponly=True,
            samesite="strict",
        )
        return answer

    async def static(self, request: Request) -> Response:
        """Return a file of the page."""
        name = request.path_params["name"]
        if name not in _FILES:
            raise HTTPException(404)
        room, kind = _FILES[name]
        return Response(_file(room, name), media_type=kind, headers={"Cache-Control": "no-cache"})

    async def image(self, request: Request) -> Response:
        """Return the picture of a known image or one of the pool, by its id."""
        found = await self._bench.picture(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        headers = {"Cache-Control": "private, max-age=3600", "X-Small": "1" if found.small else "0"}
        return Response(found.content, media_type="image/webp", headers=headers)

    async def predict(self, request: Request) -> Response:
        """Predict the classes of images."""
        images, options = await read_images(request, self._bench.limits)
        return JsonResponse(await self._bench.predict(images, options))

    async def decide(self, request: Request) -> Response:
        """Decide again, and count."""
        return JsonResponse(await self._bench.decide(await read_json(request, DecideJson)))

    async def queue(self, request: Request) -> Response:
        """Return the next images to mark."""
        asked = await read_json(request, QueueJson)
        return JsonResponse(await self._bench.call(self._bench.marking.queue, asked))

    async def mark(self, request: Request) -> Response:
        """Save a mark."""
        asked = await read_json(request, MarkJson)
        found = await self._bench.call(self._bench.marking.mark, asked)
        self._bench.counters.marks.add(asked.mark)
        return JsonResponse(found)

    async def undo(self, request: Request) -> Response:
        """Undo the last mark of a session."""
        asked = await read_json(request, SessionJson)
        return JsonResponse(await self._bench.call(self._bench.marking.undo, asked))

    async def marks(self, request: Request) -> Response:
        """Tell how far marking is."""
        return JsonResponse(await self._bench.call(self._bench.marking.status))

    async def refit(self, request: Request) -> Response:
        """Start to train with the marks."""
        await read_json(request, Asked)
        bench = self._bench
        return JsonResponse(await bench.call(bench.refits.start, bench.marking.journal))

    async def runs(self, request: Request) -> Response:
        """List the runs, and tell how far a training is."""
        return JsonResponse(await self._bench.call(self._bench.refits.status))

    async def use(self, request: Request) -> Response:
        """Let another run answer."""
        asked = await read_json(request, RunJson)
        return JsonResponse(await self._bench.call(self._bench.change, asked.run))

    async def compare(self, request: Request) -> Response:
        """Compare two runs on the same images."""
        asked = await read_json(request, CompareJson)
        return JsonResponse(await self._bench.call(self._bench.refits.compare, asked.old, asked.new))

    async def marks_table(self, request: Request) -> Response:
        """Return the marks of the pool as a table."""
        marking = self._bench.marking
        return _csv("marks.csv", await self._bench.call(marking.journal.marks_table, marking.pool.group))

    async def corrections_table(self, request: Request) -> Response:
        """Return the corrected labels as a table."""
        return _csv("corrections.csv", await self._bench.call(self._bench.marking.journal.corrections_table))

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        limits = self._bench.limits
        most = {"images": limits.images, "image_bytes": limits.image_bytes, "pixels": limits.pixels}
        return JsonResponse({"lopsided": __version__, **self._bench.served.facts(), "limits": most})

    async def health(self, request: Request) -> Response:
        """Tell that the server answers."""
        return JsonResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Return the counters."""
        return Response(self._bench.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """Return the description of the interface."""
        return JsonResponse(describe(self._bench.limits))


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an error: one that a route raised, one of the router, one of the user, or a defect."""
    if isinstance(error, RefusedError):
        return refused(error)
    if isinstance(error, HTTPException):
        code, text = _HTTP.get(error.status_code, ("http", str(error.detail)))
        answer = refused(RefusedError(error.status_code, code, text))
        answer.headers.update(error.headers or {})
        return answer
    return refused(RefusedError(422, "invalid", str(error)) if isinstance(error, LopsidedError) else INTERNAL)


_HTTP = {404: ("not_found", "There is nothing here."), 405: ("wrong_method", "This address takes another method.")}


def _is_https(request: Request) -> bool:
    """Return whether the browser speaks https with a proxy. A client that lies harms its own cookie alone."""
    headers = request.headers
    return headers.get("x-forwarded-proto") == "https" or headers.get("origin", "").startswith("https:")


def _csv(name: str, text: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text.encode(errors="surrogateescape"), media_type="text/csv; charset=utf-8", headers=headers)


def _html(template: str, status: int = 200, *, data: Any = None, **context: Any) -> Response:
    templates = environment("lopsided.serve", "lopsided.reports")
    text = templates.get_template(template).render(data=embedded_json(data), version=__version__, **context)
    return Response(text, status, media_type="text/html; charset=utf-8")


@cache
def _file(room: str, name: str) -> bytes:
    return (resources.files(room) / "static" / name).read_bytes()
