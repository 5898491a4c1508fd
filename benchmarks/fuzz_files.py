"""Files of a stranger: damaged model cards, weights, packs of the cache, and odd entries of a folder.

    python benchmarks/fuzz_files.py         writes benchmarks/records/fuzz_files.json (about a minute)
    python benchmarks/fuzz_files.py --seed 7 --share 0.1

Each file is a good one with some bytes or some JSON values changed. It must be read or refused with a sentence
(``LopsidedError``); anything else is a failure, which the record lists. What is read from a damaged pack must be the
features that were stored. A folder with an odd entry beside good images must be listed and verified, or refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lopsided import files
from lopsided.data.sources import open_source
from lopsided.errors import LopsidedError
from lopsided.inference.feature_cache import Shelf
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import CARD_NAME, WEIGHTS_NAME, Model, ModelCard, load_model, save_model

RECORD = Path(__file__).parent / "records" / "fuzz_files.json"
TRIALS = {"model cards": 1500, "weights": 600, "packs": 600}
VALUES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 10**30, -0.5, 1e300, "", "x", "\ud800", "a" * 10_000, "../../etc", [], [[]], {},
    [None], ["a", "a"], [0.5] * 3, {"a": {"b": []}}, float("nan"), float("inf"),
]  # fmt: skip


def changed_json(content: Any, rng: random.Random) -> Any:
    """Return JSON with up to three values replaced, removed or added."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        place = content
        while isinstance(place, dict | list) and place:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or rng.random() < 0.4:
                break
            place = place[key]
        if not isinstance(place, dict | list) or not place:
            continue
        kind = rng.random()
        if kind < 0.15:
            del place[key]
        elif kind < 0.25 and isinstance(place, dict):
            place[rng.choice(["extra", "", "format"])] = rng.choice(VALUES)
        else:
            place[key] = rng.choice(VALUES)
    return content


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes that are cut, filled, swapped, or changed in some places, most often in the header."""
    kind = rng.random()
    if kind < 0.2:
        return content[: rng.randint(0, len(content))]
    if kind < 0.3:
        return content + rng.randbytes(rng.randint(1, 100))
    found = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        end = min(len(found), 600) if rng.random() < 0.8 else len(found)
        found[rng.randrange(end)] = rng.randrange(256)
    return bytes(found)


def judged(attempt: Callable[[], str]) -> str:
    """Return what became of an attempt: its own word, "refused", or the error that nobody expected."""
    try:
        return attempt()
    except LopsidedError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def models(folder: Path, number: int, rng: random.Random, *, cards: bool) -> Iterator[str]:
    """Yield the outcomes of loading a small model with a changed card, or with changed weights and their digest."""
    encoder, features = build_encoder("mlp", channels=3, image_size=8)
    card = ModelCard(
        kind="image", encoder="mlp", channels=3, image_size=8, shape=(3, 8, 8), mean=(0.0,) * 3, std=(1.0,) * 3,
        classes=("cat", "dog"), features=features, prior=(0.5, 0.5),
    )  # fmt: skip
    save_model(folder, Model(encoder, ClassifierHead(features, 2), card.mean, card.std), card)
    good, weights = json.loads((folder / CARD_NAME).read_text()), (folder / WEIGHTS_NAME).read_bytes()

    def load() -> str:
        model, found = load_model(folder)
        with torch.no_grad():
            model(torch.rand(1, *found.shape))
        return "read"

    for _ in range(number):
        if cards:
            (folder / CARD_NAME).write_text(json.dumps(changed_json(good, rng)), errors="replace")
        else:
            content = changed_bytes(weights, rng)
            (folder / WEIGHTS_NAME).write_bytes(content)
            (folder / CARD_NAME).write_text(json.dumps({**good, "sha256": hashlib.sha256(content).hexdigest()}))
        yield judged(load)


def packs(folder: Path, number: int, rng: random.Random) -> Iterator[str]:
    """Yield the outcomes of reading a changed pack of the cache."""
    os.environ["LOPSIDED_CACHE"] = str(folder / "cache")
    digests = [hashlib.sha256(bytes([i])).hexdigest() for i in range(20)]
    rows = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)

    def shelf() -> Shelf:
        return Shelf([(16, {"encoder": "mlp"})])

    first = shelf()
    first.keep(digests, rows)
    first.flush()
    (pack,) = (folder / "cache").rglob("*.safetensors")
    good = pack.read_bytes()

    def fetch() -> str:
        found, known = shelf().fetch(digests)
        if not np.array_equal(found[known], rows[known]):
            raise ValueError("other features than were stored")
        return "read" if known.any() else "passed over"

    for _ in range(number):
        pack.write_bytes(changed_bytes(good, rng))
        yield judged(fetch)
        pack.write_bytes(good)


def entries() -> dict[str, Callable[[Path], object]]:
    """Return what makes each odd entry, given the folder of a class."""

    def link(target: str, name: str) -> Callable[[Path], object]:
        return lambda folder: (folder / name).symlink_to(target)

    def unix(folder: Path) -> None:
        here = os.getcwd()
        os.chdir(folder)  # The path of a socket must be short.
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind("socket.png")
        finally:
            os.chdir(here)

    names = ["-rf.png", "--out.png", " .png", "a\nb.png", "a\tb.png", "\x1b[31m.png", "$(id).png", "`id`.png", "'.png",
             '".png', ";.png", "%s%n.png", "{0}.png", "*.png", "?.png", "[a].png", "\\.png", "a,b.png", "=1+1.png",
             "\u202egnp.png", "\u200b.png", "a" * 250 + ".png", "..png", ".hidden.png", "CON.png", "nul.png", "é.png",
             "e\u0301.png", "<b>.png", "#.png", "~.png", "a.PNG", "a.png.png", "a.jpg"]  # fmt: skip
    made: dict[str, Callable[[Path], object]] = {
        f"the name {name[:20]!r}": lambda folder, name=name: Image.new("RGB", (8, 8)).save(folder / name, "PNG")
        for name in names
    }
    for name in (b"\xff\xfe.png", b"\xed\xa0\x80.png", b"caf\xe9.png"):
        made[f"the bytes {name!r}"] = lambda folder, name=name: Image.new("RGB", (8, 8)).save(
            os.fsdecode(os.path.join(os.fsencode(folder), name)), "PNG"
        )
    content = {
        "empty": b"",
        "text": b"hello",
        "zeros": b"\0" * 1000,
        "zip": b"PK\x03\x04",
        "half": b"\x89PNG\r\n\x1a\n",
    }
    for what, data in content.items():
        for suffix in (".png", ".jpg", ".tif", ".dcm"):
            made[f"{what} as {suffix}"] = lambda folder, data=data, suffix=suffix: (folder / f"x{suffix}").write_bytes(
                data
            )
    return made | {
        "a folder as an image": lambda folder: (folder / "x.png").mkdir(),
        "a deep folder": lambda folder: folder.joinpath(*["d"] * 200).mkdir(parents=True),
        "a pipe": lambda folder: os.mkfifo(folder / "pipe.png"),
        "a socket": unix,
        "a link to nothing": link("nowhere", "x.png"),
        "a link to itself": link("x.png", "x.png"),
        "a link to the folder": link(".", "loop"),
        "a link to the root": link("/", "root.png"),
        "a device without end": link("/dev/zero", "zero.png"),
        "a device that waits": link("/dev/tty", "tty.png"),
    }


def folders(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each odd entry and what became of its folder."""
    for number, (name, make) in enumerate(entries().items()):
        folder = root / str(number)
        for label in ("cat", "dog"):
            (folder / label).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / label / f"{i}.png")
        make(folder / "cat")

        def read(folder: Path = folder) -> str:
            source = open_source(folder, missing_ok=True).verify(skip_unreadable=True)
            source.images.load(np.arange(len(source)), 8, 3)
            return "left out" if source.unreadable else "read"

        yield name, judged(read)


def main() -> None:
    """Try all, print the outcomes and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="share of the trials; below 1 nothing is written")
    given = parser.parse_args()
    numbers = {name: max(1, round(number * given.share)) for name, number in TRIALS.items()}
    outcomes: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        tries = {
            "model cards": lambda number, rng: models(root / "card", number, rng, cards=True),
            "weights": lambda number, rng: models(root / "weights", number, rng, cards=False),
            "packs": lambda number, rng: packs(root, number, rng),
        }
        for name, attempt in tries.items():
            outcomes[name] = Counter(attempt(numbers[name], random.Random(f"{given.seed} {name}")))
        outcomes["entries of a folder"] = Counter(outcome for _, outcome in folders(root / "folders"))
    known = {"read", "refused", "passed over", "left out"}
    failures = {name: {text: n for text, n in found.items() if text not in known} for name, found in outcomes.items()}
    record: dict[str, Any] = {"command": f"python benchmarks/fuzz_files.py --seed {given.seed}"}
    for name, found in outcomes.items():
        record[name] = {"trials": found.total(), **{text: found[text] for text in sorted(known) if found[text]}}
        record[name]["failures"] = failures[name]
        print(name, record[name])
    if given.share == 1:
        files.atomic_write(RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
