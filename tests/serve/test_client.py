from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lopsided import cli
from lopsided.errors import InputError, RunError

if TYPE_CHECKING:
    from lopsided.serve.bench import Bench


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("further", [[], ["--decide", "threshold:dog=0.02"], ["--prevalence", "cat=0.5,dog=0.5"]])
def test_predict_writes_the_same_table_through_a_server(
    live: str, run: Path, pool: Path, tmp_path: Path, further: list[str]
) -> None:
    here, there = tmp_path / "here.csv", tmp_path / "there.csv"
    assert cli.run(["predict", str(run), str(pool), "--out", str(here), "--quiet", "--device", "cpu", *further]) == 0
    assert cli.run(["predict", str(pool), "--url", live, "--out", str(there), "--quiet", *further]) == 0
    one, other = rows_of(here), rows_of(there)
    assert len(one) == len(other) == 20
    for mine, theirs in zip(one, other, strict=True):
        assert list(mine) == list(theirs)
        for name in ("path", "predicted", "unfamiliar"):
            assert mine[name] == theirs[name]
        numbers = [[float(row[name]) for name in ("p:cat", "p:dog", "typicality")] for row in (mine, theirs)]
        assert np.allclose(*numbers, atol=1e-6)
    assert rows_of(tmp_path / "there.unreadable.csv") == rows_of(tmp_path / "here.unreadable.csv")


def test_options_of_a_run_do_not_go_with_an_address(live: str, pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["predict", str(pool), "--url", live, "--tta", "flips"]) == 2
    assert "--tta needs a run of this machine" in capsys.readouterr().err
    assert cli.run(["predict", str(pool), "--url", live, "--decide", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1", "ftp://a", "http://", "http://a:99999", "http://u:p@a", "http://a/?x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    from lopsided.serve.client import Client

    with pytest.raises(InputError, match="--url"):
        Client(url)


def test_nobody_at_the_address_is_told() -> None:
    from lopsided.serve.client import Client

    with pytest.raises(RunError, match="does not answer"):
        Client("http://127.0.0.1:1")


@contextmanager
def impostor(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  The name that the handler calls.

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


MODEL = {"classes": ["cat", "dog"], "limits": {"image_bytes": 10**6}, "unfamiliar_level": None}
RULE = {"decision": {"rule": "plain"}}


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, b"[]"),
        (200, b"{}"),
        (302, b""),
        (500, b"oops"),
        (200, b"[" * 100_000),
        (404, b'{"error": "none"}'),
    ],
)
def test_a_server_that_says_something_else_is_told(status: int, body: bytes) -> None:
    from lopsided.serve.client import Client

    with impostor(lambda path: (status, body)) as url, pytest.raises(RunError, match="something else"):
        Client(url)


@pytest.mark.parametrize(
    "images",
    [None, [], [{}], [{"probabilities": {"cat": "x", "dog": 1}}], [{"probabilities": {"cat": 1e999, "dog": 0}}], ["x"]],
)
def test_answers_that_do_not_fit_are_told(images: object, photos: Path) -> None:
    from lopsided.serve.client import Client

    contents = {"/v1/model": MODEL, "/v1/decide": RULE, "/v1/predict": {"images": images}}
    with impostor(lambda path: (200, json.dumps(contents[path]).encode())) as url:
        client = Client(url)
        with pytest.raises(RunError, match="something else"):
            list(client.answers([photos / "cat" / "001.png"]))


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from lopsided.serve import client

    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)
    busy = [(503, b'{"error": {"code": "busy", "message": "Busy."}}')] * 3

    def answer(path: str) -> tuple[int, bytes]:
        return busy.pop() if busy else (200, json.dumps({**MODEL, **RULE}).encode())

    with impostor(answer) as url:
        asked = client.Client(url)
        asked.close()
        assert asked.classes == ("cat", "dog")
    assert busy == []


def test_the_token_is_taken_from_the_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from lopsided.serve.client import Client

    seen: list[str] = []

    def answer(path: str) -> tuple[int, bytes]:
        seen.append(path)
        return 401, b'{"error": {"code": "no_token", "message": "A token is needed."}}'

    with impostor(answer) as url, pytest.raises(RunError, match="LOPSIDED_TOKEN"):
        Client(url)
    assert seen == ["/v1/model"]
