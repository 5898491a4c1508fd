from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from lopsided.data import decoding
from lopsided.data.images import FileImages
from lopsided.errors import RunError
from lopsided.inference.feature_cache import ReadableImages, Space


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    paths = [tmp_path / f"{place}.png" for place in range(4)]
    for place, path in enumerate(paths):
        Image.new("RGB", (8, 8), (place, 0, 0)).save(path)
    return paths


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded, as far as they have a header."""
    names: list[str] = []
    check = decoding._check_pixels

    def remember(path: Path, size: tuple[int, int], most: int) -> None:
        names.append(path.name)
        check(path, size, most)

    monkeypatch.setattr(decoding, "_check_pixels", remember)
    return names


def test_an_image_is_checked_again_only_if_its_content_changes(files: list[Path], decoded: list[str]) -> None:
    files[1].write_text("no picture")
    steps: list[tuple[int, int]] = []
    for _ in range(2):
        (found,) = FileImages(files).unreadable(
            known=ReadableImages(), progress=lambda done, total: steps.append((done, total))
        )
        assert (found[0], found[1].path) == (1, files[1])
    assert sorted(decoded) == ["0.png", "2.png", "3.png"]  # Threads decode them in any order.
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)] * 2
    whole = files[2].read_bytes()
    files[2].write_bytes(whole[:40])
    files[3].unlink()
    files[0].rename(files[1])
    found = FileImages(files[1:]).unreadable(known=ReadableImages())
    assert [(index, error.path) for index, error in found] == [(1, files[2]), (2, files[3])]
    assert len(decoded) == 3
    steps.clear()
    assert not FileImages(files[1:2]).unreadable(known=ReadableImages(), progress=lambda *now: steps.append(now))
    assert steps == [(1, 1)]


def test_a_full_disk_or_a_disabled_cache_only_costs_time(
    files: list[Path], decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Space, "store", full)
        assert not FileImages(files).unreadable(known=ReadableImages())
    monkeypatch.setenv("LOPSIDED_CACHE_GIB", "0")
    for _ in range(2):
        assert not FileImages(files).unreadable(known=ReadableImages())
    assert len(decoded) == 12
