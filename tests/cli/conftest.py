from __future__ import annotations

from pathlib import Path

import pytest

from tiny import write_model, write_photos
from tiny_command import SMALL, Call, Ended


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command in this process, which spares the import of torch; errors and exit codes are the same."""
    from lopsided.cli import run

    monkeypatch.delenv("LOPSIDED_DATA", raising=False)

    def call(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return call


@pytest.fixture(scope="session")
def many_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty cats and sixteen dogs; not to be changed."""
    return write_photos(tmp_path_factory.mktemp("data") / "photos", {"cat": 40, "dog": 16})


@pytest.fixture(scope="module")
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, many_photos: Path) -> Path:
    """The photos of ``finished``, unless the module says with ``PHOTOS`` how many it needs; not to be changed."""
    counts = getattr(request.module, "PHOTOS", None)
    return many_photos if counts is None else write_photos(tmp_path_factory.mktemp("data") / "photos", counts)


@pytest.fixture(scope="session")
def other_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of the same kind that no run has seen; not to be changed."""
    return write_photos(tmp_path_factory.mktemp("data") / "others", {"cat": 9, "dog": 6}, start=100)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model; not to be changed."""
    return write_model(tmp_path_factory.mktemp("untrained") / "model")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, many_photos: Path) -> Path:
    """A finished run, made by the command in this process; not to be changed."""
    from lopsided.cli import run
    from lopsided.models.machine import threads

    folder = tmp_path_factory.mktemp("runs") / "run"
    with threads(1):  # As ``command`` has it, so that another run can be the same to the byte.
        assert run(["fit", str(many_photos), "--out", str(folder), "--seed", "3", *SMALL]) == 0
    return folder
