from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lopsided import cli
from tiny import write_photos

pytest.importorskip("starlette", reason="the extra serve is not installed")

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from lopsided.serve.bench import Bench
    from lopsided.serve.guard import Access
    from lopsided.serve.limits import Limits

QUICK = ["--recipe", "quick", "--quiet", "--folds", "2", "--device", "cpu", "image_size=32"]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty cats, twelve dogs, and a dog that is labelled as a cat; not to be changed."""
    folder = write_photos(tmp_path_factory.mktemp("serve") / "photos", {"cat": 30, "dog": 13})
    shutil.move(folder / "dog" / "012.png", folder / "cat" / "wrong.png")
    return folder


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """Twelve cats and six dogs that are new, one dog that the run knows, a copy, and a file that is no image."""
    folder = write_photos(tmp_path_factory.mktemp("serve") / "pool", {"cat": 12, "dog": 6}, start=300)
    shutil.copy(photos / "dog" / "001.png", folder / "known.png")
    shutil.copy(folder / "dog" / "300.png", folder / "twin.png")
    (folder / "broken.png").write_text("no image")
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """A finished run with folds; not to be changed."""
    folder = tmp_path_factory.mktemp("serve") / "run"
    assert cli.run(["fit", str(photos), "--out", str(folder), *QUICK]) == 0
    return folder


@pytest.fixture(scope="session")
def bench(run: Path) -> Iterator[Bench]:
    """A workbench of the run whose known images are ready."""
    from lopsided.serve.bench import Bench
    from lopsided.serve.limits import Limits

    bench = Bench(run, device="cpu", limits=Limits(wrong_token_seconds=0))
    bench.prepare()
    wait_for(lambda: bench.served.neighbours is not None)
    yield bench
    bench.close()


@pytest.fixture
def client(bench: Bench) -> TestClient:
    """A caller on this machine."""
    return client_of(bench)


def client_of(bench: Bench, token: str = "", **options: Any) -> TestClient:
    """Return a caller of an app of a workbench."""
    from starlette.testclient import TestClient

    from lopsided.serve.app import make_app
    from lopsided.serve.guard import LOOPBACK, Access

    app = make_app(bench, Access(LOOPBACK, token))
    return TestClient(app, "http://127.0.0.1:8765", follow_redirects=False, **options)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition. Only a defect reaches the limit."""
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextmanager
def running(bench: Bench, access: Access | None = None, limits: Limits | None = None) -> Iterator[int]:
    """Run a real server of the workbench in a thread of this process, and yield its port."""
    import threading

    from lopsided.serve import server
    from lopsided.serve.app import make_app
    from lopsided.serve.guard import LOOPBACK, Access

    listener = server.bind("127.0.0.1", 0)
    made = server.made(make_app(bench, access or Access(LOOPBACK)), limits or bench.limits)
    thread = threading.Thread(target=lambda: made.run(sockets=[listener]), daemon=True)
    thread.start()
    wait_for(lambda: made.started)
    try:
        yield listener.getsockname()[1]
    finally:
        made.should_exit = True
        thread.join(30)


@pytest.fixture(scope="session")
def live(bench: Bench) -> Iterator[str]:
    """The address of a real server of the workbench."""
    with running(bench) as port:
        yield f"http://127.0.0.1:{port}"
