"""Every command on the pages of the site runs, on small images and with few epochs."""

from __future__ import annotations

import csv
import re
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

from data.test_dicom import write_dicom
from test_site_pages import commands
from tiny_command import command_here

RARE = {"decisions": "melanoma", "data": "melanoma", "few": "good"}
"""The class that the commands of a page name; elsewhere it is shirt."""
FREQUENT = {"melanoma": "nevus", "good": "bad", "shirt": "t-shirt"}
ELSEWHERE = {
    r"demo|serve|reproduce|predict inbox --url": "commands that have tests of their own, or run until they are stopped",
    r"fit (/shared|s3:|hf:)|predict run s3:": "tests of ranks on several machines, and of buckets",
    r".*--engine ray": "tests of Ray",
    r".*--encoder dinov2": "tests of weights from a hub",
}
SHORT = ["epochs=1", "classifier_epochs=1", "image_size=16"]
PAGES: dict[str, list[list[str]]] = defaultdict(list)
for _page, _words in commands():
    is_run = not any(re.match(pattern, " ".join(_words)) for pattern in ELSEWHERE)
    if is_run and _page not in ("README.md", "index.md", "which-recipe.md"):  # These have what other pages have.
        PAGES[_page.removesuffix(".md")].append(_words)


def picture(rare: bool, number: int) -> Image.Image:
    """A small picture, the same on every page, so that its features are computed once."""
    noise = np.random.default_rng([rare, number]).integers(-60, 60, (16, 16, 3))
    return Image.fromarray(((100 if rare else 150) + noise).astype(np.uint8))


def write_world(folder: Path, page: str) -> None:
    """Write everything that the commands of a page name."""
    rare = RARE.get(page, "shirt")
    names = {True: rare, False: FREQUENT[rare]}
    for place, start in {"photos": 0, "photos-more": 50, "other-hospital": 50, "other": 50, "archive": 80}.items():
        for kind, number in ((True, 12), (False, 20)):
            for i in range(start, start + (6 if start else number)):
                # In the folder of a patient, whose number is also in the name: a page shows both ways.
                path = folder / place / names[kind] / f"p{i // 2}" / f"p{i // 2}_{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture(kind, i).save(path)
                scan = folder / "scans" / names[kind] / f"{i}.dcm"
                if page == "data" and place == "photos":
                    write_dicom(scan, np.asarray(picture(kind, i).convert("L")), PatientID=f"{names[kind]}{i // 2}")
    for place in ("inbox", "new"):
        shutil.copytree(folder / "archive", folder / place)
    tables = {"photos.csv": "photos", "lesions.csv": "photos", "new.csv": "archive", "marks.csv": "archive"}
    for table, place in tables.items():
        with (folder / table).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "label", "patient", "age", "sex", "site"])
            for number, path in enumerate(sorted((folder / place).rglob("*.png"))):
                label, patient = path.parts[-3], f"{path.parts[-3]} {path.parts[-2]}"
                cells = [30 + number * 7 % 40, "mf"[number % 2], ["arm", "leg", ""][number % 3]]
                writer.writerow([path.relative_to(folder).as_posix(), label, patient, *cells])
    (folder / "costs.csv").write_text("true,shirt,t-shirt\nshirt,0,10\nt-shirt,1,0\n", encoding="utf-8")
    rng, labels = np.random.default_rng(0), np.repeat(list(names.values()), [12, 20])
    for name in ("features.npz", "new.npz"):
        np.savez(
            folder / name,
            features=rng.normal(size=(32, 8)) + (labels == rare)[:, None],
            label=labels,
            patient=[f"{label}{i}" for i, label in enumerate(labels)],
        )
    if page == "own-weights":  # As that page makes the file, but without a network.
        save_file(timm.create_model("resnet18").state_dict(), folder / "resnet18.safetensors")


def shortened(words: list[str]) -> list[str]:
    """A command as it stands on a page, with less training and fewer folds."""
    words = [re.sub(r"^(epochs|classifier_epochs|image_size)=.*", "", word) for word in words]
    words = [re.sub(r"^steps=\d+", "steps=2", re.sub(r"^minutes=.*", "minutes=0.05", word)) for word in words if word]
    fewer = {"--folds": {"5": "2"}, "--repeats": {"3": "1"}}
    words = [words[0], *(fewer.get(before, {}).get(word, word) for before, word in pairwise(words))]
    words = ["repeats=1" if word == "repeats=3" else word for word in words]
    line, given = " ".join(words), dict(pairwise(words))
    if words[0] not in ("fit", "compare"):
        return words
    if "fine-tune" in line:
        return [*words, *([] if "steps=" in line else ["steps=2"]), "image_size=32"]
    trains = given.get("--recipe") == "from-scratch" or "--loss" in line or re.search(r"\b(ce|cl|afcl)\b", line)
    return [*words, *SHORT] if trains else words


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    if page != "start":  # That page begins with nothing.
        write_world(tmp_path, page)
    for words in map(shortened, PAGES[page]):
        if words[0] in ("fit", "compare"):  # A page shows several ways to one run.
            shutil.rmtree(tmp_path / dict(pairwise(words))["--out"], ignore_errors=True)
        ended = command_here(*[word for word in words if word != "--open"], cwd=tmp_path)
        assert ended.code == 0, f"lopsided {' '.join(words)}\n{ended.err}"
