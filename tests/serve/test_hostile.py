"""Thirty of the worst things that can be sent, to every route. The table of docs/serve.md says what happens."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from serve.conftest import client_of

if TYPE_CHECKING:
    from lopsided.serve.bench import Bench

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
FORM, JSON, END = "multipart/form-data; boundary=b", "application/json", b"--b--\r\n"
ROUTES = [
    *("/", "/login", "/healthz", "/metrics", "/openapi.json", "/static/report.css", "/images/0", "/v1/predict"),
    *("/v1/decide", "/v1/model", "/v1/queue", "/v1/marks", "/v1/undo", "/v1/refit", "/v1/runs", "/v1/use"),
    *("/v1/compare", "/v1/marks.csv", "/v1/corrections.csv", "/nothing"),
]


class Worst(NamedTuple):
    """What is sent, in words and in bytes."""

    words: str
    body: bytes
    kind: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


def part(content: bytes, head: bytes = b'name="image"; filename="i"') -> bytes:
    return b"--b\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + content + b"\r\n"


def form(content: bytes) -> bytes:
    return part(content) + b"--b--\r\n"


def image(words: str, content: bytes) -> Worst:
    return Worst(words, form(content), FORM)


def saved(kind: str, picture: Image.Image, **options: Any) -> bytes:
    content = io.BytesIO()
    picture.save(content, kind, **options)
    return content.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def many_scans() -> bytes:
    plain = saved("JPEG", Image.fromarray(np.zeros((64, 64, 3), np.uint8)), progressive=True)
    start = plain.rindex(b"\xff\xda")
    return plain[:start] + plain[start:-2] * 300 + plain[-2:]


BOMB = (
    b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)) + chunk(b"IEND", b"")
)
TEXT_BOMB = (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0))
    + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200_000_000), 9))
    + chunk(b"IDAT", zlib.compress(bytes(20)))
    + chunk(b"IEND", b"")
)
SMALL = saved("PNG", Image.new("RGB", (8, 8)))
TEXT = base64.b64encode(SMALL).decode()
WORST = [
    Worst("nothing at all", b""),
    Worst("bytes that are no UTF-8 as JSON", b'{"images": ["\xff\xfe"]}'),
    Worst("JSON nested 100,000 deep", b"[" * 100_000),
    Worst("JSON with an integer of 100,000 digits", b'{"nearest": ' + b"9" * 100_000 + b', "images": ["aaaa"]}'),
    Worst("JSON with NaN and Infinity", b'{"probabilities": [[NaN, Infinity]], "images": ["aaaa"]}'),
    Worst("a list instead of an object", b"[1, 2, 3]"),
    Worst("a path in an unknown field", json.dumps({"images": [TEXT], "path": "/etc/passwd"}).encode()),
    Worst("a rule that names a file", json.dumps({"images": [TEXT], "decide": "cost:/etc/costs.csv"}).encode()),
    Worst("a rule of 100,000 letters", json.dumps({"images": [TEXT], "decide": "x" * 100_000}).encode()),
    Worst("a rule with half a character", b'{"images": ["' + TEXT.encode() + b'"], "decide": "threshold:\\ud800=0.1"}'),
    Worst("shares below 0", json.dumps({"images": [TEXT], "prevalence": "cat=-1,dog=2"}).encode()),
    Worst("something else than base64", json.dumps({"images": ["<svg onload=alert(1)>"]}).encode()),
    Worst("65 images, one more than allowed", json.dumps({"images": [TEXT] * 65}).encode()),
    Worst("a form without a boundary", form(SMALL), "multipart/form-data"),
    Worst("a form that ends in the middle", part(SMALL)[:-20], FORM),
    Worst(
        "a form with 1,000 fields", b"".join(part(b"x", b'name="f%d"' % i) for i in range(1000)) + b"--b--\r\n", FORM
    ),
    Worst("a field of 1 MB", part(b"x" * 1_000_000, b'name="decide"') + END, FORM),
    Worst(
        "a file called ../../../etc/passwd",
        part(SMALL, b'name="image"; filename="../../../etc/passwd"') + b"--b--\r\n",
        FORM,
    ),
    Worst("a file called with a zero byte", part(SMALL, b'name="image"; filename="a\x00b"') + END, FORM),
    Worst("a body that claims to be zipped", zlib.compress(form(SMALL)), FORM, (("Content-Encoding", "gzip"),)),
    Worst("a body of another kind", SMALL, "text/html"),
    image("a PNG that declares 60,000 x 60,000 pixels", BOMB),
    image("a PNG with 200 MB of compressed text", TEXT_BOMB),
    image("half a PNG", SMALL[: len(SMALL) // 2]),
    image("a JPEG of 300 scans", many_scans()),
    image("a TIFF of 32-bit floats", saved("TIFF", Image.fromarray(np.full((4, 4), np.nan, np.float32)))),
    image("an SVG with a script", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
    image(
        "an EPS file, for which a decoder would start a program", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    ),
    image("a pickle that would run a command", b"cos\nsystem\n(S'touch /tmp/owned'\ntR."),
    image("the head of a DICOM file and noise", bytes(128) + b"DICM" + bytes(range(256)) * 8),
]


def test_there_are_thirty() -> None:
    assert len(WORST) == len({each.words for each in WORST}) == 30


@pytest.mark.parametrize("worst", WORST, ids=lambda worst: worst.words)
def test_the_worst_things_are_answered_on_every_route(
    bench: Bench, worst: Worst, capsys: pytest.CaptureFixture[str]
) -> None:
    client = client_of(bench, raise_server_exceptions=False)
    headers = {"Content-Type": worst.kind, **dict(worst.headers)}
    marks = bench.marking.journal.counts()
    for route in ROUTES:
        for method in ("POST", "GET", "PUT"):
            answer = client.request(method, route, content=worst.body, headers=headers)
            assert answer.status_code < 500, (method, route, answer.text)
            if answer.status_code >= 400 and "html" not in answer.headers["content-type"]:
                assert set(answer.json()["error"]) == {"code", "message"}
            assert "Traceback" not in answer.text
    assert bench.marking.journal.counts() == marks
    assert bench.refits.status()["state"] == "none"
    assert capsys.readouterr().err == ""
    assert client.post("/v1/predict", json={"images": [TEXT]}).status_code == 200


def outcome(answer: Any) -> str:
    """Return what happens at /v1/predict, in the words of the table."""
    content = answer.json()
    if answer.status_code != 200:
        return f"{answer.status_code} `{content['error']['code']}`"
    (found,) = content["images"]
    return f"200, unreadable: {found['unreadable']}" if "unreadable" in found else "200, an answer"


def test_the_page_says_what_happens(bench: Bench) -> None:
    client = client_of(bench)
    rows = dict(re.findall(r"^\| (.+?) \| (\d\d\d.*?) \|$", PAGE.read_text(), flags=re.MULTILINE))
    post: Callable[..., Any] = client.post
    found = {
        each.words: outcome(
            post("/v1/predict", content=each.body, headers={"Content-Type": each.kind, **dict(each.headers)})
        )
        for each in WORST
    }
    assert {words: rows.get(words) for words in found} == found


def test_images_of_every_size_and_kind_are_answered(bench: Bench) -> None:
    """What the limits allow is answered, however odd."""
    client = client_of(bench)
    frames = [Image.new("P", (3, 3), i) for i in range(6)]
    pictures = [
        saved("PNG", Image.new("RGB", (1, 1))),
        saved("PNG", Image.new("L", (5000, 1))),
        saved("GIF", frames[0], save_all=True, append_images=frames[1:]),
        saved("TIFF", Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8))),
        saved("PNG", Image.new("RGBA", (9, 9))),
        saved("WEBP", Image.new("RGB", (9, 9))),
    ]
    texts = [base64.b64encode(each).decode() for each in pictures]
    answers = client.post("/v1/predict", json={"images": texts, "map": True, "picture": True, "nearest": 3}).json()
    assert [set(each) >= {"predicted", "map", "picture", "nearest"} for each in answers["images"]] == [True] * 6
