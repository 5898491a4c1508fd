"""Images behind servers of this machine: s3:// by moto, gs:// and hf:// by the few answers that are needed."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lopsided.data.sources import open_source
from lopsided.errors import DataError
from lopsided.inference.pool import find_images

pytestmark = pytest.mark.slow  # The three clients take seconds to import.

PHOTOS = {"cat": 3, "dog": 2}

Answer = tuple[int, bytes] | dict[str, object] | list[dict[str, object]]
"""A status and bytes, or what is sent as JSON."""


@contextmanager
def serving(answer: Callable[[str, dict[str, str], dict[str, list[str]]], Answer]) -> Iterator[str]:
    """Serve on a free port what ``answer`` returns for a path, the query and the form; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
            answered = answer(unquote(url.path), {name: value[0] for name, value in parse_qs(url.query).items()}, form)
            code, body = answered if isinstance(answered, tuple) else (200, json.dumps(answered).encode())
            if (part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))) and code == 200:
                code, body = 206, body[int(part[1]) : int(part[2]) + 1]
            self.send_response(code)
            self.send_header(
                "Content-Type", "application/octet-stream" if isinstance(answered, tuple) else "application/json"
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """For the module: no account of the user is used, and no proxy stands before this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"):
            patch.delenv(name, raising=False)
        yield patch


@pytest.fixture(scope="module")
def names(photos: Path) -> list[str]:
    return sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))


@pytest.fixture(scope="module")
def s3(
    photos: Path, names: list[str], environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.setenv(name, "anyone")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        environment.setenv(name, str(tmp_path_factory.getbasetemp() / "none"))
    environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
    environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    S3FileSystem.clear_instance_cache()
    system = S3FileSystem()
    system.mkdir("pets")
    table = "path,label,age\n" + "".join(f"photos/{name},{name[:3]},{i}\n" for i, name in enumerate(names))
    system.pipe(
        {"pets/pets.csv": table.encode()} | {f"pets/photos/{name}": (photos / name).read_bytes() for name in names}
    )
    yield "s3://pets"
    S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture(scope="module")
def gs(photos: Path, names: list[str], environment: pytest.MonkeyPatch) -> Iterator[str]:
    from gcsfs import GCSFileSystem

    files = {f"photos/{name}": (photos / name).read_bytes() for name in names}

    def about(name: str) -> dict[str, object]:
        day = "2026-01-01T00:00:00.000Z"
        return {"name": name, "bucket": "pets", "size": str(len(files[name])), "updated": day, "timeCreated": day}

    def answer(path: str, asked: dict[str, str], _: object) -> Answer:
        """A listing, an object, or its content."""
        _, _, key = path.partition("/o/")
        if key:
            if key not in files:
                return 404, b'{"error": {"code": 404, "message": "Not Found"}}'
            return (200, files[key]) if asked.get("alt") == "media" else about(key)
        start, cut = asked.get("prefix", ""), asked.get("delimiter")
        below = {name: name[len(start) :] for name in files if name.startswith(start)}
        folders = {start + rest.split(cut)[0] + cut for rest in below.values() if cut and cut in rest}
        items = [about(name) for name, rest in below.items() if not (cut and cut in rest)]
        return {"items": items, "prefixes": sorted(folders)}

    with serving(answer) as address:
        environment.setenv("STORAGE_EMULATOR_HOST", address)
        GCSFileSystem.clear_instance_cache()
        yield "gs://pets"
        GCSFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def hub(photos: Path, names: list[str], environment: pytest.MonkeyPatch) -> Iterator[str]:
    from huggingface_hub import HfFileSystem

    cells = [{"bytes": (photos / name).read_bytes(), "path": name} for name in names]
    features = {"label": {"names": list(PHOTOS), "_type": "ClassLabel"}}
    table = pyarrow.table({"image": cells, "label": [int(name.startswith("dog")) for name in names]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content, row_group_size=2)
    shard, commit = "data/train-00000-of-00001.parquet", "0" * 40
    tree: list[dict[str, object]] = [
        {"type": "directory", "path": "data", "oid": "1" * 40},
        {"type": "file", "path": shard, "oid": "2" * 40, "size": len(content.getvalue())},
    ]

    def answer(path: str, _: object, form: dict[str, list[str]]) -> Answer:
        """The data set, its history, what is below a folder, what is at paths, or a file."""
        if path in {"/api/datasets/owner/pets", "/api/datasets/owner/pets/revision/main"}:
            return {"id": "owner/pets", "sha": commit, "private": False, "tags": [], "siblings": []}
        if path.startswith("/api/datasets/owner/pets/commits/"):
            return [{"id": commit, "title": "pets", "date": "2026-01-01T00:00:00.000Z", "authors": [], "message": ""}]
        if below := re.fullmatch(r"/api/datasets/owner/pets/tree/\w+/?(.*)", path):
            return [entry for entry in tree if str(entry["path"]).startswith(below[1])]
        if path.startswith("/api/datasets/owner/pets/paths-info/"):
            return [entry for entry in tree if entry["path"] in form["paths"]]
        if re.fullmatch(rf"/datasets/owner/pets/resolve/\w+/{shard}", path):
            return 200, content.getvalue()
        return 404, b"{}"

    with serving(answer) as address:
        environment.setitem(fsspec.config.conf, "hf", {"endpoint": address})
        HfFileSystem.clear_instance_cache()
        yield "hf://datasets/owner/pets"
        HfFileSystem.clear_instance_cache()


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


def test_a_data_set_of_the_hub_is_the_folder_on_this_machine(hub: str, photos: Path) -> None:
    there, here = open_source(hub), open_source(photos)
    assert there.counts() == here.counts() == PHOTOS
    rows = np.arange(len(there))
    assert np.array_equal(there.images.load(rows, None, 3).numpy(), here.images.load(rows, None, 3).numpy())
    with pytest.raises(DataError, match="hf://datasets/owner/nothing"):
        open_source("hf://datasets/owner/nothing")
