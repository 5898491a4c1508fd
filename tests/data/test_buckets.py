"""Images in buckets, behind servers of this machine: s3:// by moto, gs:// by a few lines.

This needs s3fs, moto and gcsfs, which are no dependencies: without them the tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import numpy as np
import pytest

from lopsided.data.sources import open_source
from lopsided.errors import DataError
from lopsided.inference.pool import find_images

PHOTOS = {"cat": 3, "dog": 2}


@pytest.fixture
def names(photos: Path) -> list[str]:
    return sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))


@pytest.fixture
def s3(photos: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # Each test has its own port.
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anyone")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    client = pytest.importorskip("boto3").client("s3")
    client.create_bucket(Bucket="pets")
    table = "path,label,age\n" + "".join(f"photos/{name},{name[:3]},{i}\n" for i, name in enumerate(names))
    client.put_object(Bucket="pets", Key="pets.csv", Body=table.encode())
    for name in names:
        client.put_object(Bucket="pets", Key=f"photos/{name}", Body=(photos / name).read_bytes())
    yield "s3://pets"
    server.stop()


@pytest.fixture
def gs(photos: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("gcsfs").GCSFileSystem.clear_instance_cache()
    files = {f"photos/{name}": (photos / name).read_bytes() for name in names}

    class Handler(BaseHTTPRequestHandler):
        """The three answers of the storage service that are needed: a listing, an object, and its content."""

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlparse(self.path)
            asked, (_, _, key) = parse_qs(url.query), url.path.partition("/o/")
            if not key:
                start, cut = (asked.get(name, [""])[0] for name in ("prefix", "delimiter"))
                below = [name for name in files if name.startswith(start)]
                folders = {
                    start + name[len(start) :].split(cut)[0] + cut
                    for name in below
                    if cut and cut in name[len(start) :]
                }
                items = [self.about(name) for name in below if not (cut and cut in name[len(start) :])]
                self.reply(200, json.dumps({"items": items, "prefixes": sorted(folders)}).encode())
            elif unquote(key) not in files:
                self.reply(404, b'{"error": {"code": 404, "message": "Not Found"}}')
            elif asked.get("alt") == ["media"]:
                self.reply(200, files[unquote(key)])
            else:
                self.reply(200, json.dumps(self.about(unquote(key))).encode())

        def about(self, name: str) -> dict[str, str]:
            day = "2026-01-01T00:00:00.000Z"
            return {"name": name, "bucket": "pets", "size": str(len(files[name])), "updated": day, "timeCreated": day}

        def reply(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json" if body[:1] == b"{" else "image/png")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    yield "gs://pets"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_folder_in_a_bucket_is_the_folder_on_this_machine(
    kind: str, photos: Path, names: list[str], request: pytest.FixtureRequest
) -> None:
    bucket = request.getfixturevalue(kind)
    there, here = open_source(f"{bucket}/photos"), open_source(photos)
    assert there.counts() == here.counts() == PHOTOS
    assert list(there.names) == names
    rows = np.arange(len(there))
    assert there.images.digest(rows) == [hashlib.sha256((photos / name).read_bytes()).hexdigest() for name in names]
    assert np.array_equal(there.images.load(rows, None, 3).numpy(), here.images.load(rows, None, 3).numpy())
    number, paths = find_images([f"{bucket}/photos/dog"])
    assert (number, [str(path) for path in paths]) == (2, [f"{bucket}/photos/dog/{i:03d}.png" for i in range(2)])
    with pytest.raises(DataError, match=f"{bucket}/nothing does not exist"):
        open_source(f"{bucket}/nothing")


def test_a_table_in_a_bucket_names_its_images_and_has_columns_beside_them(s3: str) -> None:
    source = open_source(f"{s3}/pets.csv", columns=["age"])
    assert source.counts() == PHOTOS
    assert source.images.cells() == [(str(i),) for i in range(5)]
