from __future__ import annotations

import base64
import http.client
import io
import json
import socket
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from serve.conftest import client_of, running

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from lopsided.serve.bench import Bench

TOKEN = "a-token-of-the-test-0123456789"
GETS = ["/", "/v1/model", "/healthz", "/metrics", "/openapi.json", "/static/report.css", "/images/aaaa"]


@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::1"])
def test_another_host_is_refused_on_every_route(client: TestClient, path: str, host: str) -> None:
    answer = client.get(path, headers={"Host": host})
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:1", "[::1]:8765", "LOCALHOST"])
def test_the_names_of_this_machine_are_its_own(client: TestClient, host: str) -> None:
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


def test_a_server_on_all_addresses_has_them_as_names_but_no_other_name() -> None:
    from starlette.datastructures import Headers

    from lopsided.serve.guard import Access
    from lopsided.serve.limits import RefusedError

    access = Access(("lab",), TOKEN, any_address=True)
    for host in ("192.168.1.5:8765", "[fe80::1]:8765", "lab:8765"):
        access.check("GET", Headers({"host": host}))
        with pytest.raises(RefusedError):
            Access(("other",), TOKEN).check("GET", Headers({"host": host}))
    for host in ("evil.example", "192.168.1.5.evil.example", "192.168.1"):
        with pytest.raises(RefusedError):
            access.check("GET", Headers({"host": host}))


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9999", "file://", "http://["])
def test_pages_of_other_sites_are_refused(client: TestClient, origin: str) -> None:
    answer = client.post("/v1/decide", json={}, headers={"Origin": origin})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "wrong_origin"
    assert client.post("/v1/decide", json={}, headers={"Origin": "http://127.0.0.1:8765"}).status_code == 200


def test_a_site_may_link_to_the_page_but_not_read_it(client: TestClient) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=link).status_code == 200
    assert client.get("/v1/model", headers={**link, "Sec-Fetch-Mode": "no-cors"}).status_code == 403
    assert client.post("/v1/decide", json={}, headers=link).status_code == 403


@pytest.mark.parametrize("path", [path for path in GETS if path not in ("/", "/healthz", "/static/report.css")])
def test_without_the_token_nothing_is_told(bench: Bench, path: str) -> None:
    client = client_of(bench, TOKEN)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Cookie": "lopsided-1=\x01"}):
        answer = client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "no_token"
    assert client.get(path, headers={"Authorization": f"Bearer {TOKEN}"}).status_code != 401


def test_the_page_asks_for_the_token_and_keeps_a_cookie(bench: Bench) -> None:
    client = client_of(bench, TOKEN)
    first = client.get("/")
    assert first.status_code == 401
    assert "model-facts" not in first.text
    assert client.get("/?token=wrong").status_code == 401
    assert client.post("/login", data={"token": "wrong"}).status_code == 401
    for entered in (client_of(bench, TOKEN).get(f"/?token={TOKEN}"), client.post("/login", data={"token": TOKEN})):
        assert entered.status_code == 303
        assert entered.headers["location"] == "/"  # The token leaves the address bar.
        cookie = entered.headers["set-cookie"]
        assert "SameSite=strict" in cookie
        assert "HttpOnly" in cookie
        assert TOKEN not in cookie
    assert "model-facts" in client.get("/").text
    assert client.get("/v1/model").status_code == 200


def test_the_cookie_stays_on_https_behind_a_proxy_that_speaks_it(bench: Bench) -> None:
    client, form = client_of(bench, TOKEN), {"token": TOKEN}
    assert "Secure" not in client.post("/login", data=form).headers["set-cookie"]
    for headers in ({"Origin": "https://127.0.0.1:8765"}, {"X-Forwarded-Proto": "https"}):
        assert "Secure" in client.post("/login", data=form, headers=headers).headers["set-cookie"]
    entered = client.get(f"/?token={TOKEN}", headers={"X-Forwarded-Proto": "https"})
    assert "Secure" in entered.headers["set-cookie"]


def test_a_wrong_token_is_answered_late_and_no_token_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from lopsided.serve.guard import Access

    client, waited, sleep = small(bench, monkeypatch, TOKEN, wrong_token_seconds=7.5), [], asyncio.sleep

    async def shortly(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", shortly)
    wrong = Access((), "another-token-of-the-test")
    cookie = {"Cookie": f"{wrong.cookie_name}={wrong.cookie}"}
    for number, ask in enumerate(
        (
            lambda: client.get("/v1/model", headers={"Authorization": "Bearer wrong"}),
            lambda: client.get("/v1/model", headers=cookie),
            lambda: client.get("/", headers=cookie),
            lambda: client.get("/?token=wrong"),
            lambda: client.post("/login", data={"token": "wrong"}),
        ),
        start=1,
    ):
        assert ask().status_code == 401
        assert waited.count(7.5) == number
    assert client.get("/").status_code == 401
    assert client.get("/v1/model").status_code == 401
    assert client.get("/v1/model", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert waited.count(7.5) == 5


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    from lopsided.serve.guard import Access

    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert Access((), TOKEN).is_token(TOKEN)
    assert not Access((), TOKEN).is_token("\udcff")
    assert len(compared) == 2


@pytest.mark.parametrize("path", GETS)
def test_every_answer_has_the_headers_that_protect(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["referrer-policy"] == "same-origin"  # With no-referrer, browsers send forms with the Origin null.


def test_the_page_has_no_inline_script_or_style(client: TestClient) -> None:
    text = client.get("/").text
    assert "<style" not in text
    assert " style=" not in text
    assert all("src=" in part or "application/json" in part for part in text.split("<script")[1:])


@pytest.mark.parametrize("name", ["../model.py", "..%2fmodel.py", "%2e%2e/app.py", "report.css/..", "nix", "%00"])
def test_no_name_leads_to_another_file(client: TestClient, name: str) -> None:
    for room in ("static", "images"):
        answer = client.get(f"/{room}/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"


def test_other_methods_are_refused(client: TestClient) -> None:
    for path in GETS:
        answer = client.request("DELETE", path)
        assert answer.status_code == 405
        assert answer.json()["error"]["code"] == "wrong_method"
    assert client.get("/v1/predict").status_code == 405


def small(bench: Bench, monkeypatch: pytest.MonkeyPatch, token: str = "", **limits: float) -> TestClient:
    monkeypatch.setattr(bench, "limits", replace(bench.limits, **limits))
    return client_of(bench, token)


def test_a_request_with_too_many_bytes_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    client = small(bench, monkeypatch, request_bytes=3000)
    answer = client.post("/v1/predict", files={"image": b"0" * 4000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")

    def parts() -> object:
        yield from [b"0" * 1000] * 4  # Without a length, it is noticed on the way.

    answer = client.post("/v1/predict", content=parts(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    picture = (photos / "cat" / "001.png").read_bytes()
    assert client.post("/v1/predict", files={"image": picture}).status_code == 200
    client = small(bench, monkeypatch, image_bytes=100)
    assert client.post("/v1/predict", files={"image": picture}).status_code == 413


def test_all_requests_together_have_a_budget(bench: Bench, monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    client = small(bench, monkeypatch, bytes_at_once=3000)
    assert client.post("/v1/predict", files={"image": b"0" * 4000}).json()["error"]["code"] == "busy"
    picture = (photos / "cat" / "001.png").read_bytes()
    for _ in range(10):  # What is answered is given back.
        assert client.post("/v1/predict", files={"image": picture}).status_code == 200


def test_a_bomb_is_refused_before_it_is_decoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, client: TestClient
) -> None:
    content = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(content, "PNG", compress_level=9)
    assert len(content.getvalue()) < 200_000
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    (answer,) = client.post("/v1/predict", files={"image": content.getvalue()}).json()["images"]
    assert "pixels" in answer["unreadable"]


def test_an_answer_that_takes_too_long_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    import threading

    gate = threading.Event()
    bench.worker.do(lambda: gate.wait(60))
    client = small(bench, monkeypatch, seconds=0.2)
    try:
        text = base64.b64encode((photos / "cat" / "001.png").read_bytes()).decode()
        answer = client.post("/v1/predict", json={"images": [text]})
    finally:
        gate.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def test_an_image_whose_sender_has_given_up_is_not_decoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, photos: Path
) -> None:
    import threading

    gate, threads = threading.Event(), bench._readers._max_workers
    for _ in range(threads):
        bench._readers.submit(gate.wait, 60)
    decoded: list[object] = []
    monkeypatch.setattr(bench.served.sent, "read", lambda *asked: decoded.append(asked))
    client = small(bench, monkeypatch, seconds=0.2)
    try:
        answer = client.post("/v1/predict", files={"image": (photos / "cat" / "001.png").read_bytes()})
    finally:
        gate.set()
    assert answer.status_code == 504
    ends = threading.Barrier(threads)
    done = [bench._readers.submit(ends.wait, 60) for _ in range(threads)]  # Each thread is past the image now.
    assert [each.result(60) is not None for each in done] == [True] * threads
    assert decoded == []


def test_a_full_queue_is_refused_and_told_when_to_come_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, photos: Path
) -> None:
    client = small(bench, monkeypatch, waiting=1)
    picture = (photos / "cat" / "001.png").read_bytes()
    answer = client.post("/v1/predict", files=[("image", picture), ("image", picture)])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
    assert answer.headers["retry-after"]


def test_a_defect_is_answered_without_details(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> dict[str, object]:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(bench.served, "facts", fail)
    answer = client_of(bench, raise_server_exceptions=False).get("/v1/model")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in answer.text
    assert "secret" in capsys.readouterr().err


def test_connections_that_send_no_request_are_ended(bench: Bench) -> None:
    from lopsided.serve.guard import LOOPBACK, Access

    whole = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with running(bench, Access(LOOPBACK, TOKEN), replace(bench.limits, idle_seconds=1)) as port:
        for sent in (b"", whole[:20], whole, whole + whole[:20]):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(sent)
                answer = b""
                with suppress(ConnectionResetError):
                    while part := client.recv(4096):  # A timeout would be an error.
                        answer += part
                assert answer.startswith(b"HTTP/1.1 200") == sent.startswith(whole)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_sends_far_too_much_before_it_reads_sees_the_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_chunked: bool
) -> None:
    monkeypatch.setattr(bench, "limits", replace(bench.limits, request_bytes=100_000, idle_seconds=60))
    parts = [b"0" * 100_000] * 200  # More than the system keeps for a program that does not read.
    with running(bench) as port, closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        headers = {"Content-Type": "application/json"}
        body = iter(parts) if is_chunked else b"".join(parts)
        client.request("POST", "/v1/predict", body, headers, encode_chunked=is_chunked)
        answer = client.getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (413, "too_large")
        client.request("GET", "/healthz")  # The rest of the upload is not taken for a request.
        assert json.load(client.getresponse()) == {"status": "ok"}
