from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from lopsided.errors import InputError
from lopsided.inference import feature_cache
from lopsided.inference.feature_cache import (
    Space,
    cache_limit,
    cache_root,
    empty_cache,
    list_cache,
    tidy,
    trim,
)

FACTS = {"encoder": "small", "image_size": 8, "engine": "none"}


def digests(*numbers: int) -> list[str]:
    return [hashlib.sha256(bytes([number])).hexdigest() for number in numbers]


def rows(*numbers: int) -> np.ndarray:
    return np.array([[number, number + 0.5, -number] for number in numbers], dtype=np.float32)


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path, FACTS)


def packs(space: Space) -> list[Path]:
    return sorted(space.folder.glob("*.safetensors"))


def test_what_was_stored_is_found_by_content_in_any_order(space: Space) -> None:
    space.store(digests(1, 2), rows(1, 2))
    space.store(digests(3), rows(3))
    found, there = space.fetch(digests(3, 7, 1, 3), 3)
    assert there.tolist() == [True, False, True, True]
    assert np.array_equal(found[there], rows(3, 1, 3))
    assert not found[1].any()


def test_a_look_up_reads_the_packs_that_it_needs_and_no_others(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        space.store(digests(10 * number, 10 * number + 1), rows(10 * number, 10 * number + 1))
    read: list[Path] = []
    monkeypatch.setattr(feature_cache, "_read_pack", lambda path, width: read.append(path))
    other = Space(space.root, FACTS)
    other.fetch(digests(30, 31, 7), 3)
    assert len(read) == 1
    assert [digest in other for digest in digests(50, 51, 52)] == [True, True, False]


def test_packs_that_come_and_go_are_noticed(space: Space) -> None:
    other = Space(space.root, FACTS)
    assert not other.fetch(digests(1), 3)[1].any()
    space.store(digests(1), rows(1))
    other._index.forget_time()
    assert other.fetch(digests(1), 3)[1].all()
    packs(space)[0].unlink()
    other._index.forget_time()
    assert not other.fetch(digests(1), 3)[1].any()


def test_other_encoders_preprocessings_and_engines_have_other_features(space: Space) -> None:
    space.store(digests(1), rows(1))
    for name, value in (("encoder", "large"), ("image_size", 16), ("engine", "other")):
        other = Space(space.root, {**FACTS, name: value})
        assert not other.fetch(digests(1), 3)[1].any()


def test_two_writers_of_the_same_images_do_not_disturb_each_other(space: Space) -> None:
    for _ in range(2):
        Space(space.root, FACTS).store(digests(1, 2), rows(1, 2))
    Space(space.root, FACTS).store(digests(2, 3), rows(2, 3))
    assert np.array_equal(space.fetch(digests(1, 2, 3), 3)[0], rows(1, 2, 3))
    assert len(packs(space)) == 2


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "keys"])
def test_a_damaged_pack_is_removed_and_the_others_are_used(space: Space, damage: str) -> None:
    space.store(digests(1), rows(1))
    (path,) = packs(space)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        del content[-4:]
    elif damage == "empty":
        content.clear()
    elif damage == "changed":
        content[content.index(rows(1).tobytes())] ^= 1
    else:  # A key that is that of another image must not give that image these features.
        place = content.index(bytes.fromhex(digests(1)[0]))
        content[place : place + 32] = bytes.fromhex(digests(5)[0])
    path.write_bytes(content)
    space.store(digests(2), rows(2))
    found, there = space.fetch(digests(1, 2, 5), 3)
    assert there.tolist() == [False, True, False]
    assert np.array_equal(found[1:2], rows(2))
    assert not path.exists()


def test_a_file_that_a_killed_writer_left_is_not_read_and_goes_away(space: Space) -> None:
    space.store(digests(1), rows(1))
    (path,) = packs(space)
    left = path.with_name(f".{path.name}.12345.tmp")
    left.write_bytes(path.read_bytes()[:-10])
    assert space.fetch(digests(1), 3)[1].all()
    tidy(space)
    assert not left.exists()
    assert packs(space) == [path]


def test_a_cache_of_another_version_is_neither_read_nor_kept_beyond_the_limit(space: Space) -> None:
    space.store(digests(1), rows(1))
    space.folder.parent.rename(space.root / "features-0")
    assert not space.fetch(digests(1), 3)[1].any()
    assert trim(space.root, 0) == 1
    assert not list(space.root.glob("features-0/*/*"))


def test_the_packs_used_last_are_kept(space: Space) -> None:
    for number in (1, 2, 3):
        space.store(digests(number), rows(number))
        newest = max(packs(space), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    assert space.fetch(digests(1), 3)[1].all()  # Its time of use is now the latest.
    size = packs(space)[0].stat().st_size
    assert trim(space.root, 2 * size) == 1
    assert space.fetch(digests(1, 2, 3), 3)[1].tolist() == [True, False, True]
    assert trim(space.root, 2 * size) == 0


def test_the_cache_is_listed_and_emptied(space: Space) -> None:
    space.store(digests(1, 2), rows(1, 2))
    size = sum(path.stat().st_size for path in packs(space))
    assert list_cache(space.root) == [{**FACTS, "images": 2, "bytes": size}]
    kept = space.root / "other"
    kept.write_text("of somebody else")
    assert empty_cache(space.root) == size
    assert list_cache(space.root) == []
    assert list(space.root.iterdir()) == [kept]
    assert empty_cache(space.root) == 0


def test_the_folder_and_the_limit_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path))
    assert (cache_root(), cache_limit()) == (tmp_path, 4 * 2**30)
    monkeypatch.setenv("LOPSIDED_CACHE_GIB", "0.5")
    assert cache_limit() == 2**29
    monkeypatch.setenv("LOPSIDED_CACHE_GIB", "0")
    assert cache_root() is None
    for text in ("-1", "much", "nan"):
        monkeypatch.setenv("LOPSIDED_CACHE_GIB", text)
        with pytest.raises(InputError, match=r"^LOPSIDED_CACHE_GIB must be a number >= 0, got '.*'\. Use 0 to disable"):
            cache_limit()
    monkeypatch.delenv("LOPSIDED_CACHE_GIB")
    monkeypatch.delenv("LOPSIDED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / "lopsided"


def test_the_verb_shows_and_empties_the_cache(
    space: Space, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lopsided.cli.app import run

    monkeypatch.setenv("LOPSIDED_CACHE", str(space.root))
    space.store(digests(1, 2), rows(1, 2))
    assert run(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spaces"][0]["images"] == 2
    assert run(["cache"]) == 0
    assert "small" in capsys.readouterr().out
    Space(space.root, {**FACTS, "image_size": None}).store(digests(3), rows(3))  # Such as what is known of files.
    assert run(["cache"]) == 0
    assert "None" not in capsys.readouterr().out
    assert run(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith("Removed 0.0 MB from ")
    assert run(["cache"]) == 0
    assert capsys.readouterr().out == f"0.0 MB of at most 4,295 MB in {space.root}.\n"


def test_the_cache_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    Space(tmp_path / "cache", FACTS).store(digests(1), rows(1))
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_cache_that_others_may_write_is_refused(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path))
    tmp_path.chmod(mode)
    with pytest.raises(InputError, match="Run chmod 700"):
        cache_root()
    tmp_path.chmod(0o755)
    assert cache_root() == tmp_path


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(InputError, match="Other users"):
        cache_root()


def test_only_what_the_cache_wrote_is_removed(space: Space, tmp_path: Path) -> None:
    space.store(digests(1), rows(1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    own_name = packs(space)[0].name
    foreign = [
        elsewhere / own_name,  # behind a linked folder
        tmp_path / "features-mine" / "model.safetensors",  # no folder of the cache
        space.folder.parent / "model.safetensors",  # no name of the cache
        space.folder / "model.safetensors",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    (space.folder.parent / ("0" * 32)).symlink_to(elsewhere)
    (space.folder / f"{'0' * 32}.safetensors").symlink_to(elsewhere / own_name)
    assert trim(tmp_path, 0) == 1
    space.store(digests(1), rows(1))
    empty_cache(tmp_path)
    assert packs(space) == [space.folder / f"{'0' * 32}.safetensors", space.folder / "model.safetensors"]
    assert all(path.read_bytes() == b"mine" for path in foreign)
