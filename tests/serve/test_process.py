"""A real server in a process of its own: what it prints, how it ends, and what a kill leaves."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serve.conftest import wait_for
from tiny_command import environment

pytestmark = pytest.mark.slow
ANA = {"who": "Ana", "session": "session-of-ana"}


@contextmanager
def served(*arguments: str | Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Start a server on a free port, and give its process, its port and what it printed."""
    command = [sys.executable, "-m", "lopsided", "serve", *map(str, arguments), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**variables)
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r":(\d+)/", line)
        assert found is not None, process.communicate(timeout=30)
        port = int(found[1])
        wait_for(lambda: _status(port) == 200)
        yield process, port, line
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def ask(port: int, path: str, content: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = None if content is None else json.dumps(content)
        connection.request(
            "GET" if body is None else "POST", path, body, {"Content-Type": "application/json", **headers}
        )
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    finally:
        connection.close()


def _status(port: int) -> int:
    try:
        return ask(port, "/healthz")[0]
    except OSError:
        return 0


def test_marks_survive_kills_in_the_middle(run: Path, pool: Path, tmp_path: Path) -> None:
    marked: list[str] = []
    for _ in range(3):
        with served(run, pool, "--work", tmp_path / "work") as (process, port, _line):
            wait_for(lambda port=port: ask(port, "/v1/marks")[1]["pool"]["done"] == 21)
            assert ask(port, "/v1/marks")[1]["counts"]["marks"] == len(marked)
            for _turn in range(5):
                asked = {**ANA, "order": "likeliest", "label": "dog", "number": 1}
                (item,) = ask(port, "/v1/queue", asked)[1]["images"]
                assert item["id"] not in marked
                mark = {**ANA, "id": item["id"], "task": "pool", "mark": "yes", "asked": "dog"}
                assert ask(port, "/v1/marks", mark)[0] == 200
                marked.append(item["id"])
            process.send_signal(signal.SIGKILL)
    lines = (tmp_path / "work" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["image"] for line in lines[1:]] == marked


def test_sigterm_finishes_what_has_begun(run: Path, photos: Path, tmp_path: Path) -> None:
    import base64

    text = base64.b64encode((photos / "cat" / "001.png").read_bytes()).decode()
    with served(run, "--work", tmp_path / "work", "--quiet") as (process, port, _line):
        statuses: list[int] = []
        begun = threading.Event()

        def send() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = json.dumps({"images": [text] * 16, "map": True})
            connection.putrequest("POST", "/v1/predict")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            connection.send(body[:100].encode())
            begun.set()
            wait_for(asked_to_stop.is_set)
            connection.send(body[100:].encode())
            answer = connection.getresponse()
            statuses.append(answer.status)
            assert len(json.loads(answer.read())["images"]) == 16
            connection.close()

        asked_to_stop = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(send)
            assert begun.wait(60)
            # The server must have read the head of the request, or it would not know of it.
            wait_for(lambda: _status(port) == 200)
            process.send_signal(signal.SIGTERM)
            asked_to_stop.set()
            sent.result(60)
        assert statuses == [200]
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert not (tmp_path / "work" / ".lock").exists()


def test_another_address_needs_the_token_that_is_printed(run: Path, tmp_path: Path) -> None:
    with served(run, "--work", tmp_path / "work", "--host", "0.0.0.0") as (_, port, line):
        found = re.search(r"\?token=([\w-]{32})", line)
        assert found is not None
        assert ask(port, "/v1/model")[0] == 401
        assert ask(port, "/v1/model", Authorization=f"Bearer {found[1]}")[0] == 200
    given = "a-token-of-the-test-0123456789"
    with served(run, "--work", tmp_path / "work", LOPSIDED_TOKEN=given) as (_, port, line):
        assert given not in line
        assert ask(port, "/v1/model")[0] == 401
        assert ask(port, "/v1/model", Authorization=f"Bearer {given}")[0] == 200


def test_a_port_in_use_a_short_token_and_no_run_are_told(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lopsided", "serve"]
    with served(run, "--work", tmp_path / "work") as (_, port, _line):
        cases = [
            ([run, "--work", tmp_path / "other", "--port", port], {}, f"port {port}"),
            ([run, "--work", tmp_path / "work", "--port", 0], {}, "work"),
            ([run, "--port", 0], {"LOPSIDED_TOKEN": "short"}, "LOPSIDED_TOKEN"),
            ([tmp_path, "--port", 0], {}, "run"),
        ]
        for arguments, variables, told in cases:
            ended = subprocess.run(
                [*command, *map(str, arguments)],
                capture_output=True, text=True, timeout=120, check=False, env=environment(**variables), cwd=tmp_path,
            )  # fmt: skip
            assert ended.returncode == 2, ended.stderr
            assert told in ended.stderr
            assert "Traceback" not in ended.stderr
    assert os.path.exists(tmp_path / "work" / "journal.jsonl") is False


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "python_multipart"])
def test_a_missing_extra_is_told(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from lopsided.cli import run; sys.exit(run(['serve', 'x']))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment()
    )
    assert ended.returncode == 2, ended.stderr
    assert "pip install 'lopsided[serve]'" in ended.stderr
