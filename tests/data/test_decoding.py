from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from queue import Queue
from threading import Event

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lopsided.data import decoding
from lopsided.data.decoding import (
    MAX_PIXELS,
    Header,
    UnreadableImageError,
    decode_image,
    examine,
    hash_file,
    read_header,
    read_image,
    walk_images,
)
from lopsided.data.images import FileImages, ordered_map
from lopsided.errors import DataError

RED, WHITE = (255, 0, 0), (255, 255, 255)


def gradient(height: int = 6, width: int = 10) -> Image.Image:
    values = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    return Image.fromarray(values)


def png(width: int, height: int, depth: int, rows: bytes) -> bytes:
    """An RGB PNG by hand, whose header may promise more than its rows hold."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_header(width: int, height: int) -> bytes:
    return png(width, height, 8, b"\0" * 100)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".ppm"])
def test_an_rgb_image_comes_out_pixel_by_pixel(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    gradient().save(path)
    assert np.array_equal(decode_image(path, None, 3), np.asarray(gradient()).transpose(2, 0, 1))


def test_a_grey_image_fills_three_channels_alike_and_one_channel_unchanged(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert np.array_equal(decode_image(tmp_path / "a.png", None, 1), values[None])
    assert np.array_equal(decode_image(tmp_path / "a.png", None, 3), np.stack([values] * 3))


def test_colour_becomes_grey_by_luma(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (0, 255, 0)).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png", None, 1) == round(0.587 * 255)).all()


def test_transparent_parts_lie_over_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (*RED, 255))
    image.putpixel((1, 0), (*RED, 0))
    image.save(tmp_path / "a.png")
    pixels = decode_image(tmp_path / "a.png", None, 3)
    assert tuple(pixels[:, 0, 0]) == RED
    assert tuple(pixels[:, 0, 1]) == WHITE


def test_a_half_transparent_black_is_middle_grey_in_one_channel(tmp_path: Path) -> None:
    Image.new("LA", (2, 2), (0, 128)).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png", None, 1) == 127).all()


def test_a_palette_becomes_its_colours_and_its_transparent_entry_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, 0, 0, 255])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "solid.png")
    image.save(tmp_path / "clear.png", transparency=1)
    assert tuple(decode_image(tmp_path / "solid.png", None, 3)[:, 0, 1]) == (0, 0, 255)
    clear = decode_image(tmp_path / "clear.png", None, 3)
    assert tuple(clear[:, 0, 0]) == RED
    assert tuple(clear[:, 0, 1]) == WHITE


@pytest.mark.parametrize("suffix", [".png", ".tif", ".pgm"])
def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    path = tmp_path / f"a{suffix}"
    if suffix == ".pgm":
        path.write_bytes(b"P5 4 1 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(path)
    assert decode_image(path, None, 1).ravel().tolist() == [0, 1, 128, 255]


def test_sixteen_bits_per_colour_are_scaled(tmp_path: Path) -> None:
    row = np.array([0, 32768, 65535], dtype=">u2").tobytes()
    (tmp_path / "a.png").write_bytes(png(1, 1, 16, b"\0" + row))
    assert decode_image(tmp_path / "a.png", None, 3).ravel().tolist() == [0, 128, 255]


def test_a_dark_image_of_sixteen_bits_stays_dark(tmp_path: Path) -> None:
    values = np.full((4, 4), 300, dtype=np.uint16)
    values[0, 0] = 5000  # More than twelve bits.
    Image.fromarray(values).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png", None, 3)[:, 1:] == 1).all()


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_thirty_two_bits_are_refused_by_name(tmp_path: Path, dtype: type) -> None:
    Image.fromarray(np.zeros((4, 4), dtype=dtype)).save(tmp_path / "deep.tif")
    with pytest.raises(DataError, match=r"deep\.tif \(32 bits per pixel, but only 8 and 16 are supported\)"):
        decode_image(tmp_path / "deep.tif", None, 1)


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.tif")
    assert tuple(decode_image(tmp_path / "a.tif", None, 3)[:, 0, 0]) == RED


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(tmp_path: Path, orientation: int) -> None:
    upright = np.asarray(gradient())
    # How a camera stores an upright picture, by the orientation's definition: which edge is row 0 and column 0.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(decode_image(tmp_path / "a.png", None, 3), upright.transpose(2, 0, 1))


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".tif"])
def test_an_animation_gives_its_first_frame(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 0, 255))]
    options = {"lossless": True} if suffix == ".webp" else {}
    frames[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:], **options)
    assert tuple(decode_image(tmp_path / f"a{suffix}", None, 3)[:, 0, 0]) == RED


def test_resizing_is_pillows_antialiased_bilinear_of_the_whole_image(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    expected = Image.fromarray(noise).resize((16, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(decode_image(tmp_path / "a.png", 16, 3), np.asarray(expected).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("size", "image_size", "factor"),
    [
        ((600, 450), 128, 2),  # 225 is 1.76 times 128
        ((600, 450), 64, 2),  # a quarter would leave 112, less than twice 64
        ((600, 450), 224, 1),
        ((4000, 3000), 224, 4),
        ((4000, 3000), 128, 8),
        ((300, 3000), 100, 2),
        ((128, 128), 128, 1),
    ],
)
def test_a_jpeg_is_decoded_smaller_where_much_more_than_the_final_size_is_left(size, image_size, factor, tmp_path):
    Image.new("RGB", size).save(tmp_path / "a.jpg")
    assert read_image(tmp_path / "a.jpg", image_size).size == tuple(-(-side // factor) for side in size)
    assert read_image(tmp_path / "a.jpg").size == size


@pytest.mark.parametrize("orientation", [1, 6])
def test_decoding_smaller_gives_the_picture_of_decoding_in_full(orientation: int, tmp_path: Path) -> None:
    y, x = np.mgrid[0:450, 0:600]
    waves = [127 + 100 * np.sin(x / a) * np.cos(y / b) for a, b in ((40, 60), (25, 90), (70, 30))]
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.fromarray(np.stack(waves, axis=2).astype(np.uint8))
    picture.save(tmp_path / "a.jpg", quality=95, exif=exif)
    upright = picture if orientation == 1 else picture.transpose(Image.Transpose.ROTATE_270)
    expected = np.asarray(upright.resize((128, 128), Image.Resampling.BILINEAR), dtype=float).transpose(2, 0, 1)
    difference = np.abs(decode_image(tmp_path / "a.jpg", 128, 3) - expected)
    assert difference.mean() < 1.0
    assert difference.max() < 8.0


def test_a_jpeg_that_is_cut_short_is_found_also_when_it_is_decoded_smaller(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.jpg", quality=95)
    content = (tmp_path / "whole.jpg").read_bytes()
    for share in (0.3, 0.9):
        (tmp_path / "cut.jpg").write_bytes(content[: int(share * len(content))])
        with pytest.raises(UnreadableImageError, match="truncated"):
            read_image(tmp_path / "cut.jpg", 1)


def test_a_text_file_named_jpg_is_named(tmp_path: Path) -> None:
    path = tmp_path / "note.jpg"
    path.write_text("not a picture")
    with pytest.raises(UnreadableImageError) as caught:
        decode_image(path, 8, 3)
    assert str(caught.value) == (
        f"Cannot read the image {path} (not an image of a supported format). "
        "Repair or remove the file, or skip unreadable images: skip_unreadable=true."
    )


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match=r"a\.png \(the file is empty\)"):
        decode_image(tmp_path / "a.png", 8, 3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.png \(no such file or directory\)"):
        decode_image(tmp_path / "gone.png", 8, 3)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".bmp", ".webp"])
def test_a_truncated_file_is_named(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / f"half{suffix}"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"Cannot read the image .*half\{suffix} \(.+\)"):
        decode_image(path, 8, 3)


@pytest.mark.parametrize(("width", "height"), [(10_000, 9_000), (60_000, 60_000)])
def test_a_pixel_bomb_is_stopped_by_its_header(tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(width, height))
    with pytest.raises(
        DataError, match=rf"bomb\.png \({width * height:,} pixels, but at most 89,478,485 are allowed\)"
    ):
        decode_image(path, 8, 3)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_pixel_bomb_is_stopped_where_pillow_only_warns(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(10_000, 9_000))
    assert MAX_PIXELS < 90_000_000 < 2 * MAX_PIXELS
    with pytest.raises(DataError, match=r"bomb\.png \(10000 x 9000 pixels, but at most 89,478,485 are allowed\)"):
        read_header(tmp_path / "bomb.png")


def test_postscript_is_never_started(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(DataError, match="not an image of a supported format"):
        decode_image(tmp_path / "a.png", 8, 3)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format=st.sampled_from(["JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP"]),
    place=st.floats(0, 1, exclude_max=True),
    junk=st.binary(min_size=1, max_size=12),
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_give_an_image_or_the_one_error(tmp_path: Path, format: str, place: float, junk: bytes) -> None:
    buffer = io.BytesIO()
    gradient(16, 16).save(buffer, format)
    content = bytearray(buffer.getvalue())
    start = int(place * len(content))
    content[start : start + len(junk)] = junk
    path = tmp_path / "damaged"
    path.write_bytes(content)
    outcome: tuple[int, ...] | str
    try:
        outcome = decode_image(path, 8, 3).shape
    except UnreadableImageError as error:
        outcome = str(error)
    assert outcome == (3, 8, 8) or str(path) in str(outcome)


def test_the_error_survives_being_sent_to_another_process(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(UnreadableImageError(tmp_path / "a.png", "broken")))
    assert error.path == tmp_path / "a.png"
    assert error.reason == "broken"


def test_a_header_tells_grey_from_colour(tmp_path: Path) -> None:
    Image.new("L", (4, 2)).save(tmp_path / "grey.png")
    Image.new("RGB", (4, 2)).save(tmp_path / "colour.png")
    assert read_header(tmp_path / "grey.png") == Header((2, 4), True)
    assert read_header(tmp_path / "colour.png") == Header((2, 4), False)


def test_images_below_folders_are_listed_sorted(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.JPG", "b/deep/3.tif", "b/notes.txt", "b/._1.jpg", "b/.hidden/4.png", "single.dat"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    listed = walk_images(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in listed] == [
        "b/1.JPG",
        "b/2.png",
        "b/deep/3.tif",
    ]


def test_a_link_in_a_circle_ends(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").touch()
    os.symlink(tmp_path / "a", tmp_path / "a" / "again")
    assert list(walk_images(tmp_path / "a")) == [tmp_path / "a" / "1.png"]


def test_a_folder_to_which_many_links_lead_is_read_once(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
        for other in "abcdef":
            (tmp_path / name / f"to-{other}").symlink_to(f"../{other}")
    found = list(walk_images(tmp_path))
    assert len(found) == 6
    assert {path.resolve() for path in found} == {tmp_path / name / "1.png" for name in "abcdef"}
    seen: set[tuple[int, int]] = set()
    assert [len(list(walk_images(tmp_path / name, seen=seen))) for name in "abc"] == [6, 0, 0]


def test_folders_may_be_nested_more_deeply_than_calls(tmp_path: Path) -> None:
    deepest = Path(tmp_path, *"d" * 200)
    deepest.mkdir(parents=True)
    (deepest / "1.png").touch()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        found = list(walk_images(tmp_path))
    finally:
        sys.setrecursionlimit(limit)
    assert found == [deepest / "1.png"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"])
def test_what_is_no_file_is_refused_before_it_is_read(tmp_path: Path, make) -> None:
    make(path := tmp_path / "a.jpg")
    for read in (read_header, read_image, lambda path: FileImages([path]).digest(np.array([0]))):
        with pytest.raises(UnreadableImageError, match=r"a\.jpg \(a pipe, a socket or a device, not a file\)"):
            read(path)
    assert list(walk_images(tmp_path)) == []


def test_a_file_that_claims_to_be_longer_than_memory_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(path := tmp_path / "a.jp2")
    content = bytearray(path.read_bytes())
    content[32:36] = b"\xff\xff\xff\x00"  # the length of the header's box
    path.write_bytes(content)
    code = (
        "import resource, sys\n"
        "from lopsided.data.decoding import UnreadableImageError, read_image\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))\n"
        "try:\n    read_image(sys.argv[1])\nexcept UnreadableImageError as error:\n    print(error.reason)"
    )
    ended = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("Expected to read 4294967032 bytes but only got 201\n", "")


def test_an_image_that_needs_too_much_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    gradient().save(path := tmp_path / "a.png")
    monkeypatch.setattr(decoding, "_to_eight_bits", fail)
    assert examine(path).error == "it needs more memory than is available"


def test_a_file_that_changes_after_it_was_hashed_is_refused(tmp_path: Path) -> None:
    gradient().save(path := tmp_path / "a.png")
    facts, other = hash_file(path), gradient(8, 8)
    path.rename(tmp_path / "b.png")
    (tmp_path / "b.png").rename(path)  # This changes the stamp of the file, but not its content.
    assert hash_file(path).stamp != facts.stamp
    assert decode_image(path, 4, 3, facts).shape == (3, 4, 4)
    other.save(path)
    with pytest.raises(UnreadableImageError, match="its content has changed since it was first read"):
        decode_image(path, 4, 3, facts)


@pytest.mark.parametrize("large", [0, 1 << 25], ids=["as a stream", "in memory"])
def test_one_reading_gives_digest_header_and_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(decoding, "LARGE", large)
    gradient().save(path := tmp_path / "a.png")
    facts = examine(path)
    assert (facts.digest, facts.header, facts.error) == (hash_file(path).digest, Header((6, 10), False), "")
    path.write_bytes(path.read_bytes()[:45])
    assert examine(path).digest == hash_file(path).digest
    assert examine(path).error
    path.unlink()
    assert examine(path) == hash_file(path)
    assert (examine(path).digest, examine(path).error) == ("", "no such file or directory")


def test_a_link_to_itself_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "circle.jpg").symlink_to(tmp_path / "circle.jpg")
    (tmp_path / "folder.jpg").mkdir()
    with pytest.raises(UnreadableImageError, match=r"circle\.jpg \(too many levels of symbolic links\)"):
        read_image(tmp_path / "circle.jpg")
    with pytest.raises(UnreadableImageError, match=r"folder\.jpg \(is a directory\)"):
        read_image(tmp_path / "folder.jpg")


@pytest.mark.slow
def test_two_hundred_damaged_and_hostile_files_are_pictures_or_refused(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "fuzz_images.py"
    command = [sys.executable, script, "--first", "1000", "--cases", "200", "--out", tmp_path / "record.json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["cases"] == record["outcomes"]["picture"] + record["outcomes"]["refused"] == 200
    assert record["outcomes"]["picture"] > 40
    assert sum(name.startswith("bomb") for name in record["by_format"]) >= 4


def with_scans(number: int) -> bytes:
    """A progressive JPEG of which the last scan is repeated."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16), 90).save(buffer, "JPEG", progressive=True)
    content = buffer.getvalue()
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * (number - content.count(b"\xff\xda")) + content[-2:]


def test_a_jpeg_with_too_many_scans_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "many.jpg"
    path.write_bytes(with_scans(decoding.MAX_SCANS))
    assert examine(path).error == ""
    path.write_bytes(with_scans(decoding.MAX_SCANS + 1))
    assert examine(path).error == "more than 100 scans, which would take too long to decode"
    with pytest.raises(UnreadableImageError, match="more than 100 scans"):
        decode_image(path, 8, 1)


def test_what_looks_like_scans_in_a_comment_is_none(tmp_path: Path) -> None:
    path = tmp_path / "comment.jpg"
    Image.new("L", (16, 16)).save(path, comment=b"\xff\xda" * 500)
    assert examine(path).error == ""


def test_a_large_jpeg_may_have_fewer_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.jpg"
    path.write_bytes(with_scans(20))
    monkeypatch.setattr(decoding, "MAX_SCANNED", 16 * 16 * 19)
    assert examine(path).error == "more than 19 scans, which would take too long to decode"


def progressive(path: Path, side: int = 1100) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (side, side), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "JPEG", progressive=True)
    return path


def test_an_image_that_takes_too_long_is_given_up_by_the_time_of_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, passed = progressive(tmp_path / "slow.jpg"), iter(range(0, 10**6, 10))
    assert examine(path).error == ""
    monkeypatch.setattr(decoding, "thread_time", lambda: next(passed))
    assert examine(path).error == "decoding it takes more than 30 s"
    with pytest.raises(UnreadableImageError, match="takes more than 30 s"):
        decode_image(path, 8, 1)


def test_a_decoder_gets_a_progressive_jpeg_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read = decoding._Watched.read
    monkeypatch.setattr(decoding._Watched, "read", lambda file, size=-1: sizes.append(size) or read(file, size))
    path = progressive(tmp_path / "large.jpg")
    assert examine(path).error == ""
    assert sizes.count(decoding.SMALL_BLOCK) > 0.9 * path.stat().st_size / decoding.SMALL_BLOCK


def test_an_image_in_work_is_given_up_when_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, begun, left, ended = progressive(tmp_path / "slow.jpg"), Event(), Event(), Queue[str]()

    def clock() -> float:
        begun.set()
        assert left.wait(120)
        return 0.0

    def decode(index: int) -> None:
        if not index:
            assert begun.wait(120)  # The other thread decodes.
            return
        try:
            decode_image(path, 8, 1)
            ended.put("decoded")
        except UnreadableImageError as error:
            ended.put(error.reason)

    monkeypatch.setattr(decoding, "thread_time", clock)
    results = ordered_map(decode, range(2), workers=2)
    next(results)
    results.close()  # type: ignore[attr-defined]  As an interrupt does.
    left.set()
    assert ended.get(timeout=120) == "interrupted"


@pytest.mark.parametrize("large", [False, True])
def test_a_file_that_changes_between_hash_and_decode_gives_no_features_under_a_wrong_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    path, other = tmp_path / "image.png", tmp_path / "other.png"
    Image.new("L", (8, 8), 50).save(path)
    Image.new("L", (8, 8), 200).save(other)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if large:  # Such a file is read twice.
        monkeypatch.setattr(decoding, "LARGE", 10)

    def changing(found: str) -> bool:
        assert found == digest
        path.write_bytes(other.read_bytes())
        return False

    facts, pixels = decoding.read_pixels(path, 8, 1, changing)
    assert facts.digest == digest
    if large:
        assert (facts.error, pixels) == ("its content has changed while it was read", None)
    else:
        assert pixels is not None
        assert set(pixels.flat) == {50}


@pytest.mark.parametrize("suffix", ["tif", "png"])
def test_twelve_bits_in_sixteen_are_read_as_twelve(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"image.{suffix}"
    for brightest, expected in ((4095, 255), (4096, 16)):
        Image.fromarray(np.array([[0, brightest]], dtype=np.uint16)).save(path)
        assert decode_image(path, None, 1).tolist() == [[[0, expected]]]
        header = examine(path).header
        assert header is not None
        assert header.twelve == (brightest == 4095)


def test_several_pages_of_a_tiff_are_noticed_and_the_frames_of_an_animation_are_not(tmp_path: Path) -> None:
    pages = [Image.new("L", (4, 4), value) for value in (0, 90)]
    for name, paged in (("pages.tif", True), ("frames.gif", False)):
        pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:])
        header = examine(tmp_path / name).header
        assert header is not None
        assert header.paged == paged
    pages[0].save(tmp_path / "page.tif")
    assert examine(tmp_path / "page.tif").header == Header((4, 4), True)
