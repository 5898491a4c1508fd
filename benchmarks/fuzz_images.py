"""Does a damaged or hostile image file ever do more than be refused?

    python benchmarks/fuzz_images.py --minutes 20      tries random files and writes records/fuzz_images.json
    python benchmarks/fuzz_images.py --case 1234 --keep bad.jpg      repeats a case and keeps its file

A case is made from its number alone: a valid file of one of nine formats and many modes, of which bytes are changed,
left out, repeated or exchanged with those of another file, whose end is cut off, whose header lies about its size, or
which has another suffix; and now and then no file at all but a folder, a pipe, a device, or a link to itself. Each must
give the picture, in the asked-for shape, or the one error with the file's name. Cases run in child processes with a
limit on memory; a child that dies or says nothing for a minute is counted as a crash or a hang of the case that it was
at. A file whose header promises more pixels than are allowed must be refused while the memory of its child stays where
it was.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image

from lopsided.data.decoding import MAX_PIXELS, UnreadableImageError, decode_image, read_header

RECORD = Path(__file__).parent / "records" / "fuzz_images.json"
MEMORY = 2 * 2**30
"""Address space of a child beyond what it starts with; the largest allowed picture with an alpha channel is 341 MiB."""
PATIENCE = 60.0
BOMB_GROWTH = 32 * 2**20
SIZES = [(1, 1), (1, 10_000), (10_000, 1), (3, 5), (16, 16), (33, 17), (64, 48)]
_MODES = {
    "JPEG": ["RGB", "L", "CMYK", "RGB exif", "RGB progressive"],
    "PNG": ["RGB", "L", "RGBA", "LA", "P", "P transparent", "1", "I;16", "RGB exif"],
    "GIF": ["P", "L", "P transparent", "P animated"],
    "BMP": ["RGB", "L", "1", "P", "RGBA"],
    "TIFF": ["RGB", "L", "RGBA", "CMYK", "1", "I;16", "I", "F", "P", "RGB deflate", "RGB lzw", "L pages", "RGB exif"],
    "WEBP": ["RGB", "RGBA", "RGB lossless", "RGB animated", "RGB exif"],
    "PPM": ["RGB", "L", "1"],
    "JPEG2000": ["RGB", "L", "RGBA"],
    "AVIF": ["RGB", "RGBA"],
}
Image.init()
MODES = {name: modes for name, modes in _MODES.items() if name in Image.SAVE}  # Pillow has AVIF since 11.3.
SUFFIXES = [".jpg", ".png", ".gif", ".bmp", ".tif", ".webp", ".ppm", ".jp2", ".avif", ".txt", ""]


@cache
def valid(format: str, mode: str, size: tuple[int, int], seed: int) -> bytes:
    """A file as a camera or a program would write it."""
    rng = np.random.default_rng(seed)
    kind, _, extra = mode.partition(" ")
    smooth = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    if kind == "I;16":
        image = Image.fromarray(rng.integers(0, 65536, size[::-1], dtype=np.uint16))
    elif kind in ("I", "F"):
        image = Image.fromarray(rng.integers(0, 65536, size[::-1]).astype(np.int32 if kind == "I" else np.float32))
    elif kind in ("RGBA", "LA"):
        image = smooth.convert("RGBA")
        image.putalpha(smooth.convert("L"))
        image = image.convert(kind)
    else:
        image = smooth.convert(kind)
    options: dict[str, Any] = {}
    if extra == "exif":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 1 + seed % 8
    elif extra in ("animated", "pages"):
        options |= {"save_all": True, "append_images": [image.transpose(Image.Transpose.ROTATE_180)] * 2}
    elif extra in ("transparent", "progressive", "lossless"):
        options[{"transparent": "transparency"}.get(extra, extra)] = 0 if extra == "transparent" else True
    elif extra in ("deflate", "lzw"):
        options["compression"] = {"deflate": "tiff_adobe_deflate", "lzw": "tiff_lzw"}[extra]
    content = io.BytesIO()
    image.save(content, format, **options)
    return content.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@cache
def much() -> bytes:
    """A few bytes that unpack to 200 MB."""
    return zlib.compress(b"\0" * 200_000_000, 1)


def bomb(rng: random.Random) -> tuple[bytes, str]:
    """A small file whose header promises more pixels than are allowed, or whose notes unpack to much."""
    side = rng.randint(9_500, 12_000)  # above the limit in every format; Pillow reserves a canvas of WebP on opening it
    content: bytes | bytearray
    format = rng.choice(["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", "PNG text", "PNG profile"])
    if format == "JPEG":
        content = bytearray(valid("JPEG", "RGB", (16, 16), 0))
        at = content.index(b"\xff\xc0") + 5
        content[at : at + 4] = struct.pack(">HH", side, 65_000)
    elif format.startswith("PNG"):
        header = struct.pack(">IIBBBBB", *((16, 16) if " " in format else (side, side)), 8, 2, 0, 0, 0)
        packed = much() if " " in format else b""
        note = {"PNG text": chunk(b"zTXt", b"k\0\0" + packed), "PNG profile": chunk(b"iCCP", b"k\0\0" + packed)}
        body = chunk(b"IDAT", zlib.compress(b"\0" * 16 * 49, 9)) + chunk(b"IEND", b"")
        content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + note.get(format, b"") + body
    elif format == "GIF":
        content = bytearray(valid("GIF", "P", (16, 16), 0))
        content[6:10] = struct.pack("<HH", side, 60_000)
    elif format == "BMP":
        content = bytearray(valid("BMP", "RGB", (16, 16), 0))
        content[18:26] = struct.pack("<ii", side, side * 100)
    elif format == "TIFF":
        content = bytearray(valid("TIFF", "RGB", (16, 16), 0))
        for tag in (256, 257):
            at = max(content.find(struct.pack("<HH", tag, kind)) for kind in (3, 4))
            content[at : at + 12] = struct.pack("<HHII", tag, 4, 1, side)
    elif format == "WEBP":
        content = bytearray(valid("WEBP", "RGB animated", (16, 16), 0))  # whose frames may be smaller than the canvas
        content[24:30] = struct.pack("<I", side - 1)[:3] * 2
    elif format == "PPM":
        content = b"P6 %d %d 255\n" % (side, side) + b"\0" * 100
    else:
        content = bytearray(valid("JPEG2000", "RGB", (16, 16), 0))
        at = content.index(b"ihdr") + 4
        content[at : at + 8] = struct.pack(">II", side, side)
        at = content.index(b"\xff\x51") + 6
        content[at : at + 8] = struct.pack(">II", side, side)
    return bytes(content), format


def damaged(rng: random.Random, content: bytes, other: bytes) -> tuple[bytes, str]:
    """Bytes changed in one of several ways."""
    data = bytearray(content)
    kind = rng.choice(["bits", "bits", "bytes", "cut", "drop", "repeat", "splice", "header", "append", "numbers"])
    at = rng.randrange(max(len(data), 1))
    if kind == "bits":
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        data[at : at + rng.randint(1, 16)] = rng.randbytes(rng.randint(0, 16))
    elif kind == "cut":
        del data[at:]
    elif kind == "drop":
        del data[at : at + rng.randint(1, 64)]
    elif kind == "repeat":
        data[at:at] = data[at : at + rng.randint(1, 256)] * rng.randint(1, 20)
    elif kind == "splice":
        data = data[:at] + bytearray(other[rng.randrange(len(other)) :])
    elif kind == "header":
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(min(len(data), 48))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    elif kind == "append":
        data += rng.randbytes(rng.randint(1, 5000))
    else:
        for _ in range(rng.randint(1, 3)):
            number = rng.choice([0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)])
            text = struct.pack(rng.choice("<>") + "I", number)[: rng.choice([2, 4])]
            place = rng.randrange(min(len(data), rng.choice([64, len(data)])))
            data[place : place + len(text)] = text
    return bytes(data), kind


def make(seed: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the file of a case and say what it is."""
    rng = random.Random(seed)
    path = folder / f"case{seed}{rng.choice(SUFFIXES)}"
    if seed % 50 == 7:
        what = rng.choice(["folder", "pipe", "link to itself", "link to nothing", "empty", "device"])
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "empty":
            path.touch()
        else:
            path.symlink_to({"link to itself": path, "device": "/dev/zero"}.get(what, folder / "nothing"))
        return path, {"format": what, "damage": "no file"}
    if seed % 50 in (13, 37):
        content, format = bomb(rng)
        path.write_bytes(content)
        return path, {"format": format, "damage": "bomb"}
    other_format, format = rng.choices(list(MODES), k=2)
    other = valid(other_format, rng.choice(MODES[other_format]), rng.choice(SIZES), rng.randrange(3))
    content = valid(format, mode := rng.choice(MODES[format]), rng.choice(SIZES), rng.randrange(3))
    kind = "none"
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        content, kind = damaged(rng, content or b"\0", other)
    path.write_bytes(content)
    return path, {"format": format, "mode": mode, "damage": kind, "bytes": len(content)}


def status(key: str) -> int:
    """A size of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def attempt(seed: int, path: Path, told: dict[str, Any]) -> str:  # noqa: PLR0911, PLR0912
    """Read the file in every way; "picture", "refused", or a sentence about what is wrong."""
    rng = random.Random(seed)
    size, channels = rng.choice([None, 1, 8, 32]), rng.choice([1, 3])
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # The peak starts again from what stands now.
    before, outcome = status("VmHWM"), "picture"
    for read in (lambda: read_header(path), lambda: decode_image(path, size, channels)):
        try:
            found = read()
        except UnreadableImageError as error:
            outcome = "refused"
            if str(path) not in str(error) or "\n" in str(error):
                return f"an error that is no sentence with the file's name: {error}"
            if told["damage"] == "bomb" and " " not in told["format"] and "are allowed" not in error.reason:
                return f"a bomb was refused for another reason: {error}"
            # Python asks for as many bytes as a length in the file says before it reads; those are never touched.
            if isinstance(error.__cause__, MemoryError) and status("VmHWM") - before > BOMB_GROWTH:
                return f"memory was used up: {error}"
        else:
            if isinstance(found, np.ndarray):
                outcome = "picture"
                if found.dtype != np.uint8 or found.shape[0] != channels or (size and found.shape[1:] != (size, size)):
                    return f"a picture of {found.dtype} and {found.shape}"
                if found.shape[1] * found.shape[2] > MAX_PIXELS:
                    return f"a picture of {found.shape}, which is more than is allowed"
    if told["damage"] == "bomb":
        if outcome != "refused" and " " not in told["format"]:
            return "a bomb was decoded"
        if (growth := status("VmHWM") - before) > BOMB_GROWTH + (100 * 2**20 if " " in told["format"] else 0):
            return f"a bomb took {growth >> 20} MiB before it was refused"
    if told["damage"] == "no file" and outcome != "refused":
        return f"a {told['format']} gave a picture"
    return outcome


def child(first: int, last: int, out: int, memory: int) -> None:
    """Try cases and write a line per case: its number, what it is, the outcome, and the warnings it gave."""
    limit = status("VmSize") + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # C libraries print there.
    with tempfile.TemporaryDirectory() as folder, os.fdopen(out, "w", buffering=1) as pipe:
        for seed in range(first, last):
            path, told = make(seed, Path(folder))
            pipe.write(json.dumps(["start", seed, told]) + "\n")
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                try:
                    outcome = attempt(seed, path, told)
                except Exception:
                    outcome = "raised " + traceback.format_exc(limit=-1).strip().splitlines()[-1]
            pipe.write(json.dumps(["end", seed, outcome, [str(w.message) for w in heard]]) + "\n")
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


class Tally:
    """What was found."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.formats: dict[str, Counter[str]] = {}
        self.warnings: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []

    def add(self, seed: int, told: dict[str, Any], outcome: str, heard: list[str]) -> None:
        """Count a case."""
        word = outcome if outcome in ("picture", "refused") else "failed"
        self.outcomes[word] += 1
        name = f"{told['damage']}: {told['format']}" if told["damage"] in ("bomb", "no file") else told["format"]
        self.formats.setdefault(name, Counter())[word] += 1
        self.warnings["cases with a warning of Pillow"] += bool(heard)
        self.warnings["most warnings of a case"] = max(self.warnings["most warnings of a case"], len(heard))
        if word == "failed":
            self.failures.append({"case": seed, "what": outcome, **told})
            print(f"case {seed}: {outcome}\n    {told}\n    python benchmarks/fuzz_images.py --case {seed}", flush=True)


def try_cases(
    first: int, last: int, seconds: float, memory: int = MEMORY, patience: float = PATIENCE
) -> tuple[int, Tally]:
    """Run cases in children until the last one or until the time is over; returns where it ended."""
    begin, seed, tally = time.monotonic(), first, Tally()
    while seed < last and time.monotonic() - begin < seconds:
        start = seed
        read, write = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read)
                child(seed, last, write, memory)
            finally:
                os._exit(0)
        os.close(write)
        told: dict[str, Any] | None = None
        problem, rest = "", b""
        while not problem:
            if time.monotonic() - begin > seconds and told is None:
                break
            if not select.select([read], [], [], patience)[0]:
                problem = f"hung: nothing for {patience:.0f} seconds"
                break
            data = os.read(read, 65536)
            if not data:
                problem = "crashed" if told is not None else "ended"
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                word, seed, *more = json.loads(line)
                if word == "start":
                    told = more[0]
                else:
                    assert told is not None
                    tally.add(seed, told, *more)
                    told, seed = None, seed + 1
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(read)
        if told is not None:
            tally.add(seed, told, f"{problem} ({code})", [])
            seed += 1
        elif problem and seed == start:
            raise RuntimeError(f"the file of case {seed} could not be made: the child {problem}")
    return seed, tally


def main() -> None:
    """Try cases, print failures, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long to try (default: %(default)g)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="how many at most")
    parser.add_argument("--case", type=int, help="repeat one case and stop")
    parser.add_argument("--keep", type=Path, help="where to keep the file of that case")
    parser.add_argument("--out", type=Path, default=RECORD, help="record (default: records/fuzz_images.json)")
    options = parser.parse_args()
    if options.case is not None:
        with tempfile.TemporaryDirectory() as folder:
            path, told = make(options.case, Path(folder))
            print(told)
            if options.keep and path.is_file():
                options.keep.write_bytes(path.read_bytes())
            print(attempt(options.case, path, told))
        return
    begin = time.monotonic()
    end, tally = try_cases(options.first, options.first + options.cases, 60 * options.minutes)
    record = {
        "command": f"python benchmarks/fuzz_images.py --minutes {options.minutes:g}",
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "pillow": PIL.__version__,
        "first_case": options.first,
        "cases": end - options.first,
        "outcomes": dict(tally.outcomes),
        "by_format": {name: dict(tally.formats[name]) for name in sorted(tally.formats)},
        "warnings": dict(tally.warnings),
        "failures": tally.failures,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print({name: record[name] for name in ("cases", "outcomes", "warnings", "minutes")})
    if tally.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
