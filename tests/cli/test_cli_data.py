from __future__ import annotations

import json
import shutil
import struct
import warnings
from pathlib import Path

from PIL import Image

from tiny import write_photos
from tiny_command import Call, command


def test_the_sources_are_listed_with_what_to_do_about_those_that_are_missing(call: Call) -> None:
    sources = {source["name"]: source for source in json.loads(call("data", "--json").out)}
    assert sources["fashion-mnist-tops"]["found"] is True
    assert sources["isic2018"]["found"] is False
    assert "LOPSIDED_DATA" in sources["isic2018"]["where"]
    assert "fashion-mnist" in call("data").out


def test_a_folder_is_described_by_its_own_process(photos: Path) -> None:
    ended = command("data", photos)
    assert ended.code == 0
    assert ended.err == ""
    first, *_ = ended.out.splitlines()
    assert first == "photos: 56 images, 2 classes, colour, 12 x 12 pixels"
    assert "cat        40  71.4 %" in ended.out
    assert "dog        16  28.6 %" in ended.out
    assert "cat has 2.5 times as many images as dog. Always answering cat gives 71.4 % accuracy" in ended.out


def test_one_image_of_one_class_is_described_in_the_singular(call: Call, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 1})
    assert call("data", folder).out.startswith("photos: 1 image, 1 class, colour, ")


def test_what_fit_would_stumble_over_is_listed(call: Call, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 4, "dog": 3})
    shutil.copy(folder / "cat" / "000.png", folder / "dog" / "copy.png")
    (folder / "cat" / "text.jpg").write_text("hello")
    facts = json.loads(call("data", folder, "--json").out)
    assert facts["classes"] == {"cat": 5, "dog": 4}
    assert facts["duplicates"] == [{"names": ["cat/000.png", "dog/copy.png"], "labels": ["cat", "dog"]}]
    assert [item["name"] for item in facts["unreadable"]] == ["cat/text.jpg"]
    words = call("data", folder).out
    assert "2 byte-identical images in one set:\n  cat/000.png = dog/copy.png" in words
    assert "One unreadable image:\n  cat/text.jpg" in words
    assert "Sets of byte-identical images with different labels: 1, the first " in words
    assert "cat/text.jpg (not an image of a supported format)" in words


def test_byte_identical_images_are_counted_by_image_and_by_set(call: Call, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 4, "dog": 3})
    for name in ("a", "b", "c"):
        shutil.copy(folder / "cat" / "000.png", folder / "cat" / f"{name}.png")
    shutil.copy(folder / "dog" / "000.png", folder / "dog" / "d.png")
    words = call("data", folder).out
    assert "6 byte-identical images in 2 sets:\n  cat/000.png = cat/a.png = cat/b.png = cat/c.png\n  dog/" in words


def test_groups_and_splits_of_a_table_are_counted(call: Call, tmp_path: Path) -> None:
    write_photos(tmp_path, {"cat": 4, "dog": 4})
    lines = ["path,label,patient,split"]
    for name in ("cat", "dog"):
        lines += [f"{name}/{i:03d}.png,{name},{i // 2},{'train' if i < 2 else 'test'}" for i in range(4)]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    facts = json.loads(call("data", tmp_path / "table.csv", "--group", "patient", "--json").out)
    assert facts["groups"] == {"number": 2, "largest": 4}
    assert facts["splits"] == {"train": {"cat": 2, "dog": 2}, "test": {"cat": 2, "dog": 2}}


def test_data_that_do_not_exist_are_named(call: Call) -> None:
    ended = call("data", "nowhere")
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.endswith("got nowhere, which does not exist.\n")


def test_what_pillow_thinks_of_damaged_metadata_is_not_said(call: Call, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 4, "dog": 3})
    Image.new("RGB", (12, 12)).save(path := folder / "cat" / "odd.tif", dpi=(72, 72))
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<HH", 282, 5)) + 8  # the resolution lies beyond the end of the file
    content[at : at + 4] = struct.pack("<I", 2**31 - 1)
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        Image.open(path).close()
        assert heard
        del heard[:]
        ended = call("data", folder)
    assert heard == []
    assert (ended.code, ended.err) == (0, "")
    assert "odd.tif" not in ended.out


def test_sample_pictures_are_written_for_two_folders_and_only_into_empty_ones(call: Call, tmp_path: Path) -> None:
    ended = call("data", "--sample", tmp_path / "photos", "--json")
    assert list(json.loads(ended.out).values()) == [{"t-shirt": 300, "shirt": 24}, {"t-shirt": 60, "shirt": 12}]
    names = [{path.name for path in (tmp_path / folder).rglob("*.png")} for folder in ("photos", "photos-more")]
    assert [len(each) for each in names] == [324, 72]
    assert not names[0] & names[1]
    described = json.loads(call("data", tmp_path / "photos", "--json").out)
    assert described["classes"] == {"shirt": 24, "t-shirt": 300}
    again = call("data", "--sample", tmp_path / "photos")
    assert (again.code, "is not an empty folder. Choose another folder." in again.err) == (2, True)
    both = call("data", tmp_path / "photos", "--sample", tmp_path / "other")
    assert (both.code, "Leave out one of the two." in both.err) == (2, True)
    assert not (tmp_path / "other").exists()
