"""The subcommand that opens a page to work on: serve."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from lopsided.cli.options import AllowOutside, Device, Quiet, argument, option
from lopsided.cli.output import say, show
from lopsided.errors import InputError, MissingDependencyError


def serve(
    words: Annotated[
        list[str] | None,
        argument(
            "RUN: folder of a finished run; default: the newest in runs/. POOL: unlabelled images to mark: files, "
            "folders, and tables with a column path.",
            metavar="[RUN] [POOL]...",
        ),
    ] = None,
    work: Annotated[
        Path | None,
        option(None, "Folder for the marks and for runs that are trained with them. Default: RUN-work beside the run."),
    ] = None,
    allow_outside: AllowOutside = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8765,
    name: Annotated[
        list[str] | None,
        option(None, "Another name under which the server is reached, such as that of a proxy. Can be repeated."),
    ] = None,
    device: Device = "auto",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    quiet: Quiet = False,
) -> None:
    """Open a page on which to try a model and to mark images.

    The page takes images, shows class, calibrated probability, typicality,
    where the model looked and the nearest known images, and lets thresholds,
    costs and shares be tried out. Programs ask the same server: POST
    /v1/predict, GET /v1/model, /healthz, /metrics and /openapi.json. `lopsided
    predict --url` does so, too.

    With a POOL, the most useful of its images are marked by keyboard: the
    likeliest of a rare class, the least certain or the most unusual; and
    doubtful labels of the run are corrected. Several people can mark at once.
    Each mark is saved in RUN-work when its key is pressed.

    The server listens on this machine only. With another --host, a token is
    needed, which is printed, or taken from LOPSIDED_TOKEN. Images that are
    sent are forgotten after the answer.

    \b
    Examples:
      lopsided serve --open
      lopsided serve runs/1 archive --port 9000
      lopsided serve runs/1 --host 0.0.0.0 --name lab.example.org
    """
    import secrets
    import webbrowser

    from lopsided.runs.folder import run_and_words

    try:
        from lopsided.serve import app, guard, server
        from lopsided.serve.bench import Bench
        from lopsided.serve.client import TOKEN
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "python_multipart", "multipart"):
            raise
        do = "Run pip install 'lopsided[serve]'."
        raise MissingDependencyError(f"serve needs {error.name}, which is not installed. {do}") from None

    folder, pool = run_and_words(words or (), quiet=quiet)
    here = guard.is_loopback(host)
    given = os.environ.get(TOKEN, "")
    if given and (len(given) < 16 or not given.isascii() or not given.isprintable()):
        raise InputError(f"{TOKEN} must have at least 16 characters of ASCII. Leave it out to get a new one.")
    token = given or ("" if here else secrets.token_urlsafe(24))
    listener = server.bind(host, port)
    bench = Bench(folder, pool, work=work, device=device, allow_outside=allow_outside)
    try:
        bench.prepare()
        at, everywhere = listener.getsockname()[1], guard.is_everywhere(host)
        reached = socket.gethostname() if everywhere else host
        names = {*guard.LOOPBACK, *(each.lower() for each in (reached, *(name or ())))}
        shown = f"[{reached}]" if ":" in reached else reached
        address = f"http://{shown}:{at}/" + (f"?token={token}" if token and not given else "")

        def started() -> None:
            show(f"{folder} is served on {address}")
            sys.stdout.flush()
            if not quiet:
                say("Stop with Ctrl+C.")
            if open_page:
                webbrowser.open(address)

        access = guard.Access(names, token, everywhere)
        server.run(app.make_app(bench, access), listener, bench.limits, started)
    finally:
        bench.close()
