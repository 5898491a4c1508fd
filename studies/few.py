"""How well are rare images found with 0, 1, 2, ... 50 of them in training, beside tools that need none or many?

    python studies/few.py features DATA --images FOLDER --features OUT   # once per data set: minutes
    python studies/few.py run --features OUT [--repeats 10]              # adds what records/few.jsonl lacks
    python studies/few.py patchcore --features OUT [--repeats 3]         # the same for PatchCore: minutes per repeat
    python studies/few.py choose --features OUT                          # splits 100 to 103: ways to join the two
    python studies/few.py patches --features OUT                         # positions and distance together: minutes
    python studies/few.py align --features OUT                           # splits 100 to 103: what positions explain
    python studies/few.py summary                                        # print the tables of the records
    python studies/few.py auroc | recall | balanced | local | aligned    # print a table of docs/few.md

DATA is ``cells``, with the folder ``elpv_dataset/data`` of the PyPI package elpv-dataset 1.0.0.post1 as FOLDER: label 0
against label 1, both types, or ``isic`` with the folder ISIC2018 of the official layout: melanoma against
dermatofibroma. ``cells`` gives three sets: all, mono and poly. ``align`` also takes ``--sets eggs shirts``: the folder
``eggs`` that ``lopsided demo`` writes, and the IDX files of Fashion-MNIST, 200 T-shirts of its training images against
60 shirts.

In each repeat, two thirds of the frequent images are for training, with the first k of the shuffled rare images; all
others are for testing. Every method gets the same features, those of the recipes few and quick. AUROC, the recall at
5 % false alarms among the test images and the balanced accuracy of the recipe's decision are in per cent. How few joins
the distance and the regressions of quick was chosen on splits 100 to 103 (records/few_choice.jsonl), so not on those of
the record, but on other splits of the same images.

    few               what the recipe few does
    quick             what the recipe quick does: the mean of regressions without the distance
    distance          its distance alone, the same for every k
    column            of ``choose``: the regression of few that has the distance as a column, calibrated
    mean, sum         of ``choose``: half of the log odds of ``column`` and half of quick; quick plus the distance times
                      its usual weight, as far as it can be relied on
    by reliance       of ``choose``: the recipe few, as it is now
    before            of ``choose``: the recipe few of commit 63b19f2, on its own features; it was computed there
    one-class SVM, isolation forest    of scikit-learn, on the standardised columns that the distance reads
    PatchCore         a bank of positions (``--maps`` of ``features``) in the manner of PatchCore: maps of two middle
                      stages, each averaged over 3 x 3 positions and joined, a coreset by greedy k-centres in random
                      projections, and the distance of the farthest position from its nearest one in the bank. Simpler
                      than anomalib's: 2,000 of 40,000 positions, and no score that weighs the neighbours in the bank
    Gaussians         of ``patches``: the same maps, with mean and shrunk covariance of the normal images at each
                      position, as in PaDiM, and the Mahalanobis distance of the farthest position
    few, 2 % rare     the recipe few without labelled rare images, with unlabelled ones among the frequent ones

The lines of few_choice.jsonl are from before the distance of training images was measured in parts: it came from a
formula, which differs little with 700 frequent images or more. Their expected values of C were 1e-4 and 1e-3. Those of
``tops`` are T-shirts at 98:2 (repeats of studies/study.py, features of studies/layers.py), a guard of the choice.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import shared
from lopsided.models.blocks.positions import NUMBERS
from lopsided.recipe import named_recipe
from lopsided.training.averaged import fit_averaged
from lopsided.training.distance import (
    PULL,
    SHRINKAGE,
    Distances,
    Mixed,
    fit_distance,
    fit_distances,
    fit_mixed,
    reliance,
)
from lopsided.training.methods.distance import LATE
from lopsided.training.regression import Regression
from shared import Floats, Line

RECORD, CHOICE = shared.RECORDS / "few.jsonl", shared.RECORDS / "few_choice.jsonl"
PATCHES, ALIGNED = shared.RECORDS / "few_patches.jsonl", shared.RECORDS / "few_aligned.jsonl"
RARE, ALARMS, CONTAMINATION = (0, 1, 2, 3, 5, 10, 20, 50), 0.05, 0.02
FIGURES = ("auroc", "recall", "balanced")
SETS = {"cells": ("cells", ""), "mono": ("cells", "mono"), "poly": ("cells", "poly"), "isic": ("isic", "")}
CHECKED = {**SETS, "shirts": ("shirts", ""), "eggs": ("eggs", "")}
CHOSEN_ON = range(100, 104)
SIDE = 224
BANK, POSITIONS = 2_000, 40_000
MAPS = ("blocks.2", "blocks.4")
SUMMARIES = {"farthest": 0.0, "farthest 1 %": 0.01, "farthest 5 %": 0.05}


def listed(data: str, folder: Path) -> tuple[list[Path] | Floats, list[int], list[str]]:
    """Return the images of a data set, as paths or as grey pixels, whether each is rare, and its type."""
    if data == "eggs":
        paths = sorted(folder.glob("*/*.jpg"))
        return paths, [int(path.parent.name == "cracked") for path in paths], [""] * len(paths)
    if data == "shirts":
        pixels, labels = (
            np.frombuffer(gzip.decompress((folder / f"train-{name}-ubyte.gz").read_bytes()), np.uint8, offset=start)
            for name, start in (("images-idx3", 16), ("labels-idx1", 8))
        )
        rows = np.concatenate([np.flatnonzero(labels == label)[:number] for label, number in ((0, 200), (6, 60))])
        return pixels.reshape(-1, 28, 28)[rows], np.repeat([0, 1], [200, 60]).tolist(), [""] * 260
    if data == "cells":
        rows = [line.split() for line in (folder / "labels.csv").read_text().splitlines()]
        rows = [row for row in rows if float(row[1]) in (0.0, 1.0)]
        return [folder / row[0] for row in rows], [int(float(row[1])) for row in rows], [row[2] for row in rows]
    from lopsided.data.images import FileImages
    from lopsided.data.sources import open_source

    source = open_source(folder, classes=["MEL", "DF"])
    assert isinstance(source.images, FileImages)
    return list(source.images.paths), source.labels.tolist(), [""] * len(source)


def compute_features(data: str, folder: Path, out: Path, *, maps: bool) -> None:
    """Write the features of all images of a data set as the recipes quick and few have them, and maps of two stages."""
    import torch
    from torch.nn.functional import avg_pool2d, interpolate

    from lopsided.data.decoding import decode_image
    from lopsided.inference.engine import Engine
    from lopsided.models.blocks.block import Tapped
    from lopsided.models.encoders import Ensemble

    paths, labels, kinds = listed(data, folder)
    model, _ = shared.frozen_model(named_recipe("few").encoder.name, "embedded", SIDE)
    model.complete()
    assert isinstance(model.encoder, Ensemble)
    tapped = model.encoder.members[0]
    assert isinstance(tapped, Tapped)
    layers: dict[str, torch.Tensor] = {}
    for name in MAPS if maps else ():
        layer = tapped.encoder.get_submodule(name)
        layer.register_forward_hook(lambda _, __, output, name=name: layers.update({name: output}))
    rows, positions = [], []
    layout = model.layout
    assert layout is not None
    engine = Engine(model, (3, SIDE, SIDE))
    with torch.inference_mode():
        for start in range(0, len(paths), 32):
            pixels = [
                decode_image(image, SIDE, 3) if isinstance(image, Path) else enlarged(image)
                for image in paths[start : start + 32]
            ]
            x = torch.from_numpy(np.stack(pixels))
            rows.append(layout.scaled(torch.from_numpy(engine.encode(x)), "root").numpy())
            if maps:
                model.encode(x.float() / 255)
                means = [avg_pool2d(layers[name], 3, 1, 1) for name in MAPS]
                fine = interpolate(means[0], means[1].shape[2:], mode="bilinear")
                positions.append(torch.cat([fine, means[1]], dim=1).half().numpy())
    parts = np.zeros(layout.whole.width, dtype=np.int64)
    for place, columns in enumerate(layout.whole.kinds()):
        parts[columns] = place
    content = {"x": np.concatenate(rows), "rare": labels, "kind": kinds, "importance": layout.whole.importance()}
    content |= {"parts": parts, "local": layout.local, "widths": [group.width for group in layout.groups]}
    content["names"] = [group.block.name for group in layout.groups]
    np.savez(out / f"{data}.npz", **content)
    if maps:
        np.savez(out / f"{data}-maps.npz", maps=np.concatenate(positions))


def enlarged(grey: Floats) -> Floats:
    """Return grey pixels (h, w) as an image of the recipe's size with three channels."""
    from PIL import Image

    image = Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.repeat(np.asarray(image)[None], 3, axis=0)


class Images:
    """The features of one set of images."""

    def __init__(self, name: str, folder: Path) -> None:
        data, kind = CHECKED[name]
        content = np.load(folder / f"{data}.npz")
        rows = np.flatnonzero((content["kind"] == kind) | (not kind))
        self.x, self.rare = content["x"][rows], content["rare"][rows].astype(np.int64)
        self.importance = content["importance"]
        stages = np.flatnonzero(content["names"] == "stages")
        self.read = np.repeat(np.isin(np.arange(len(content["widths"])), stages[-LATE:]), content["widths"])
        self.columns = [np.flatnonzero(self.read)[None], content["local"].reshape(-1, NUMBERS)]
        self.whole = np.delete(self.x, content["local"], axis=1)
        self.parts = [np.flatnonzero(content["parts"] == place) for place in range(content["parts"].max() + 1)]
        path = folder / f"{data}-maps.npz"
        self.maps = np.load(path)["maps"][rows] if path.exists() else None
        self._last: tuple[int, Distances] | None = None

    def distances(self, seed: int) -> Distances:
        """Return the distances from the frequent images for training of one repeat. The last ones are kept."""
        if self._last is None or self._last[0] != seed:
            self._last = seed, fit_distances(self.x[self.split(seed, 0)[0]], self.columns, seed=seed)
        return self._last[1]

    def split(self, seed: int, num_rare: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Return frequent and rare images for training, and frequent and rare ones for testing."""
        rng = np.random.default_rng(seed)
        frequent, rare = (rng.permutation(np.flatnonzero(self.rare == label)) for label in (0, 1))
        middle = 2 * len(frequent) // 3
        return frequent[:middle], rare[:num_rare], frequent[middle:], rare[num_rare:]


def figures(normal: Floats, rare: Floats, edge: float | None = None) -> dict[str, float]:
    """Return AUROC and the recall at 5 % false alarms of the scores of test images, in per cent.

    With an edge, add the balanced accuracy if higher scores mean rare: the decision ``balanced`` of a recipe.
    """
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([0, 1], [len(normal), len(rare)])
    area = roc_auc_score(truth, np.concatenate([normal, rare]))
    found = {"auroc": area, "recall": np.mean(rare > np.quantile(normal, 1 - ALARMS))}
    if edge is not None:
        found["balanced"] = (np.mean(rare > edge) + np.mean(normal <= edge)) / 2
    return {name: round(100 * float(value), 2) for name, value in found.items()}


def compute(images: Images, num_rare: int, seed: int) -> dict[str, Any]:
    """Return the figures of all methods in one repeat."""
    train, seen, normal, rare = images.split(seed, num_rare)
    tested, cut = np.concatenate([normal, rare]), len(normal)
    distances = images.distances(seed)
    if num_rare:
        scores = _recipes(images, distances, train, seen, tested, seed)
        edge = float(np.log(num_rare / len(train)))
        return {"methods": {name: figures(each[:cut], each[cut:], edge) for name, each in scores.items()}}
    whole, local = (part.column(images.x[tested]) for part in distances.parts)
    scores = {"few": distances.column(images.x[tested]), "distance": whole, "positions": local}
    scores |= _peers(images, train, tested, seed)
    hidden = rare[: round(CONTAMINATION * len(train))]
    left = np.concatenate([normal, rare[len(hidden) :]])
    dirty = fit_distances(images.x[np.concatenate([train, hidden])], images.columns, seed=seed).column(images.x[left])
    other = {"few, 2 % rare": figures(dirty[:cut], dirty[cut:])}
    found = {name: figures(each[:cut], each[cut:]) for name, each in scores.items()} | other
    return {"alignment": round(distances.aligned[1], 3), "methods": found}


def _recipes(
    images: Images, distances: Distances, train: Floats, seen: Floats, tested: Floats, seed: int
) -> dict[str, Floats]:
    """Return the log odds that the recipes few and quick give to tested images."""
    x, rows = images.whole, np.concatenate([train, seen])
    column = np.concatenate([distances.left_out, distances.column(images.x[seen])])
    labels = np.repeat([0, 1], [len(train), len(seen)])
    settings = {"importance": images.importance, "parts": images.parts, "seed": seed}
    quick = fit_averaged(x[rows], labels, 2, **settings)
    with patch("lopsided.training.distance.fit_averaged", return_value=quick):  # It would fit the same once more.
        few = fit_mixed(x[rows], column, labels, 0, 2, **settings)
    far = distances.column(images.x[tested]) * np.diff(few.pull)
    return {"few": log_odds(few, x[tested]) + far, "quick": log_odds(quick, x[tested])}


def log_odds(fitted: Mixed | Regression, x: Floats) -> Floats:
    """Return the log odds of the rare class, without a distance."""
    return x @ np.diff(fitted.weight, axis=0)[0] + np.diff(fitted.bias)


def compute_choice(images: Images, num_rare: int, seed: int) -> dict[str, Any]:
    """Return the figures of several ways to join the distance and the regressions of quick.

    ``relied`` is how much the distance counts by what training knows of it.
    """
    train, seen, normal, rare = images.split(seed, num_rare)
    tested, cut = np.concatenate([normal, rare]), len(normal)
    distances = images.distances(seed)
    far = distances.column(images.x[tested])
    column = np.append(distances.left_out, distances.column(images.x[seen]))
    relied = reliance(column, images.rare[np.append(train, seen)] == 0, num_rare)
    scores = _recipes(images, distances, train, seen, tested, seed)
    few, quick = scores["few"], scores["quick"]
    joined = few if num_rare == 1 else (few - (1 - relied) * quick) / max(relied, 0.01)  # What the mean is made of.
    ways = {
        "distance": far,
        "quick": quick,
        "column": joined,
        "mean": (joined + quick) / 2,
        "sum": quick + PULL * relied * far,
        "by reliance": few,
    }
    edge = float(np.log(num_rare / len(train)))
    return {"relied": round(relied, 3), "methods": {n: figures(s[:cut], s[cut:], edge) for n, s in ways.items()}}


def _peers(images: Images, train: Floats, tested: Floats, seed: int) -> dict[str, Floats]:
    """Return the scores of tools that need no rare images."""
    from sklearn.ensemble import IsolationForest
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import OneClassSVM

    x = images.x[:, images.read]
    svm = make_pipeline(StandardScaler(), OneClassSVM()).fit(x[train])
    forest = IsolationForest(random_state=seed).fit(x[train])
    return {"one-class SVM": -svm.decision_function(x[tested]), "isolation forest": -forest.score_samples(x[tested])}


def compute_patchcore(images: Images, seed: int) -> dict[str, Any]:
    """Return the figures of PatchCore in one repeat."""
    assert images.maps is not None, "Compute features with --maps first."
    train, _, normal, rare = images.split(seed, 0)
    scores = _from_bank(images.maps, train, np.concatenate([normal, rare]), seed).max(axis=1)
    return {"methods": {"PatchCore": figures(scores[: len(normal)], scores[len(normal) :])}}


def compute_patches(images: Images, seed: int) -> dict[str, Any]:
    """Return the figures of the distance, of distances of positions, and of both together in one repeat.

    Both are standardised as logarithms: the distance by the training images, each left out, that of the positions by
    every tenth training image, of which nothing is in the bank.
    """
    assert images.maps is not None, "Compute features with --maps first."
    train, _, normal, rare = images.split(seed, 0)
    held, tested, cut = train[::10], np.concatenate([normal, rare]), len(normal)
    known, rows = np.setdiff1d(train, held, assume_unique=True), np.concatenate([held, tested])
    images_far = fit_distance(images.x[train], images.columns[0]).column(images.x[tested])
    found = {"distance": figures(images_far[:cut], images_far[cut:])}
    for kind, far in (
        ("bank", _from_bank(images.maps, known, rows, seed)),
        ("Gaussians", _from_gaussians(images.maps, known, rows)),
    ):
        ordered = np.sort(far, axis=1)
        for summary, share in SUMMARIES.items():
            logs = np.log(ordered[:, -max(1, round(share * far.shape[1])) :].mean(axis=1))
            own = (logs[len(held) :] - logs[: len(held)].mean()) / logs[: len(held)].std()
            for how, scores in (("alone", own), ("mean", own + images_far), ("larger", np.maximum(own, images_far))):
                found[f"{kind}, {summary}, {how}"] = figures(scores[:cut], scores[cut:])
    return {"methods": found}


def compute_aligned(images: Images, seed: int) -> dict[str, Any]:
    """Return what positions explain of the frequent images for training, and the figures of both distances alone."""
    train, _, normal, rare = images.split(seed, 0)
    tested, cut = np.concatenate([normal, rare]), len(normal)
    distances = fit_distances(images.x[train], images.columns, seed=seed)
    whole, local = (part.column(images.x[tested]) for part in distances.parts)
    scores = {"distance": whole, "positions": local, "sum": whole + local}
    found = {name: figures(each[:cut], each[cut:]) for name, each in scores.items()}
    return {"alignment": round(distances.aligned[1], 3), "methods": found}


def _from_bank(maps: Floats, train: Floats, tested: Floats, seed: int) -> Floats:
    """Return the squared distance of each position of tested images from a bank of positions, (n, positions)."""
    rng = np.random.default_rng(seed)

    def positions(rows: Floats) -> Floats:
        part = maps[rows].astype(np.float32)
        return part.transpose(0, 2, 3, 1).reshape(-1, part.shape[1])

    known = positions(train)
    known = known[rng.permutation(len(known))[:POSITIONS]]
    flat = known @ rng.standard_normal((known.shape[1], 32)).astype(np.float32)
    chosen = [int(rng.integers(len(flat)))]
    nearest = np.square(flat - flat[chosen[0]]).sum(axis=1)
    while len(chosen) < min(BANK, len(flat)):
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, np.square(flat - flat[chosen[-1]]).sum(axis=1))
    bank = known[chosen]
    squares, scores = np.square(bank).sum(axis=1), []
    for start in range(0, len(tested), 16):
        part = positions(tested[start : start + 16])
        distance = (np.square(part).sum(axis=1, keepdims=True) + squares - 2 * part @ bank.T).min(axis=1)
        scores.append(distance.reshape(-1, maps.shape[2] * maps.shape[3]))
    return np.maximum(np.concatenate(scores), 1e-12)


def _from_gaussians(maps: Floats, train: Floats, tested: Floats) -> Floats:
    """Return the squared Mahalanobis distance of each position from the training images at this position.

    As in PaDiM, but with all channels, and a covariance that is shrunk as that of the recipe few.
    """
    flat = maps.reshape(*maps.shape[:2], -1)
    scores = np.empty((len(tested), flat.shape[2]))
    for place in range(flat.shape[2]):
        known, asked = (flat[rows, :, place].astype(np.float64) for rows in (train, tested))
        centre, deviation = known.mean(axis=0), known.std(axis=0) + 1e-6
        z = (known - centre) / deviation
        covariance = (1 - SHRINKAGE) * z.T @ z / len(z) + SHRINKAGE * np.eye(z.shape[1])
        z = (asked - centre) / deviation
        scores[:, place] = (z * np.linalg.solve(covariance, z.T).T).sum(axis=1)
    return np.maximum(scores, 1e-12)


def cells(repeats: int, name: str) -> Iterator[Line]:
    """Yield the cells of one set of images, without those of PatchCore."""
    for repeat in range(repeats):
        for num_rare in RARE:
            yield {"data": name, "rare": num_rare, "repeat": repeat, "bank": 0}


def table(lines: list[Line], data: str, figure: str) -> str:
    """Return the means of a figure over the repeats as a table, one row per method."""
    own = [line for line in lines if line["data"] == data]
    numbers, rows = sorted({line["rare"] for line in own}), []
    for method in dict.fromkeys(method for line in own for method in line["methods"]):
        values = [[line["methods"][method] for line in own if line["rare"] == num and method in line["methods"]]
                  for num in numbers]  # fmt: skip
        rows.append([method, *(_mean([one[figure] for one in each if figure in one]) for each in values)])
    return shared.table(" | ".join([f"{data}: {figure}", *map(str, numbers)]), rows)


NAMES = {"cells": "solar cells", "isic": "skin lesions"}
PATCH_METHODS = {
    "distance": "distance from normal",
    "bank, farthest, alone": "bank of positions",
    "bank, farthest, mean": "bank of positions and distance, mean",
    "Gaussians, farthest, alone": "a Gaussian per position",
    "Gaussians, farthest, mean": "a Gaussian per position and distance, mean",
}
METHODS = {"few": "`few`", "quick": "`quick`", "distance": "distance of the whole image",
        "positions": "distance by position", "one-class SVM": "one-class SVM",
        "isolation forest": "isolation forest", "PatchCore": "bank of patches, three splits"}  # fmt: skip


def page_table(lines: list[Line], figure: str) -> str:
    """Return the table of the docs: the means of a figure for both data sets."""
    rows = []
    for data, title in NAMES.items():
        for method, name in METHODS.items():
            found = {num: [line["methods"][method][figure] for line in lines
                           if (line["data"], line["rare"]) == (data, num) and figure in line["methods"].get(method, {})]
                     for num in RARE}  # fmt: skip
            if any(found.values()):
                rows.append([f"{title}: {name}", *(_mean(values) for values in found.values())])
    return shared.table(" | ".join(["rare training images", *map(str, RARE)]), rows)


def patches_table(lines: list[Line]) -> str:
    """Return the table of the docs: AUROC and recall of the distance, of positions, and of both, on its splits."""
    own = [line for line in lines if line["repeat"] not in CHOSEN_ON]
    titles = {"cells": "solar cells", "mono": "monocrystalline", "poly": "polycrystalline", "isic": "skin lesions"}
    rows = []
    for method, title in PATCH_METHODS.items():
        cells = []
        for name in titles:
            found = [line["methods"][method] for line in own if line["data"] == name]
            cells.append(" / ".join(_mean([each[figure] for each in found]) for figure in ("auroc", "recall")))
        rows.append([title, *cells])
    return shared.table(" | ".join(["AUROC / recall", *titles.values()]), rows)


def aligned_table(lines: list[Line]) -> str:
    """Return the table of the docs: what positions explain, and the AUROC of both distances and of their sum."""
    titles = {"isic": "skin lesions, one disease", "eggs": "eggs of the demo", "cells": "solar cells, both types",
              "poly": "polycrystalline cells", "shirts": "T-shirts", "mono": "monocrystalline cells"}  # fmt: skip
    rows = []
    for name, title in titles.items():
        own = [line for line in lines if line["data"] == name]
        areas = [_mean([line["methods"][each]["auroc"] for line in own]) for each in ("distance", "positions", "sum")]
        rows.append([title, f"{np.mean([line['alignment'] for line in own]):.0%}".replace("%", " %"), *areas])
    return shared.table("frequent class | position explains | distance | by position | sum", rows)


def _mean(values: list[float]) -> str:
    return f"{np.mean(values):.1f}" if values else ""


def main() -> None:
    """Compute features or what the record lacks, or print the tables."""
    parser = shared.parser(__doc__)
    computed = ["features", "run", "patchcore", "patches", "choose", "align"]
    printed = ["summary", *FIGURES, "local", "aligned"]
    parser.add_argument("what", choices=computed + printed)
    parser.add_argument("data", nargs="?", choices=["cells", "isic", "eggs", "shirts"])
    parser.add_argument("--images", type=Path, help="the folder of the images")
    parser.add_argument("--features", type=Path, default=Path(), help="the folder of the features")
    parser.add_argument("--maps", action="store_true", help="also write the maps for PatchCore")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sets", nargs="+", choices=list(CHECKED), default=list(SETS))
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.what == "features":
        compute_features(given.data, given.images, given.features, maps=given.maps)
    for name in given.sets if given.what in computed[1:] else ():
        images = Images(name, given.features)
        if given.what == "align":
            asked = ({"data": name, "repeat": seed} for seed in CHOSEN_ON)
            shared.compute_missing(ALIGNED, asked, lambda cell, of=images: compute_aligned(of, cell["repeat"]))
            continue
        if given.what == "choose":
            choices = ({"data": name, "rare": num, "repeat": seed} for seed in CHOSEN_ON for num in RARE[1:])
            shared.compute_missing(CHOICE, choices, lambda c, of=images: compute_choice(of, c["rare"], c["repeat"]))
            continue
        if given.what == "patches":
            asked = ({"data": name, "repeat": seed} for seed in (*CHOSEN_ON, *range(given.repeats)))
            shared.compute_missing(PATCHES, asked, lambda cell, of=images: compute_patches(of, cell["repeat"]))
            continue
        if given.what == "run":
            shared.compute_missing(
                RECORD, cells(given.repeats, name), lambda cell, of=images: compute(of, cell["rare"], cell["repeat"])
            )
        else:
            asked = ({"data": name, "rare": 0, "repeat": repeat, "bank": BANK} for repeat in range(given.repeats))
            shared.compute_missing(RECORD, asked, lambda cell, of=images: compute_patchcore(of, cell["repeat"]))
    lines = shared.read(RECORD)
    if given.what in FIGURES:
        print(page_table(lines, given.what))
        return
    if given.what == "aligned":
        print(aligned_table(shared.read(ALIGNED)))
        return
    if given.what == "local":
        print(patches_table(shared.read(PATCHES)))
        return
    for record in (lines, shared.read(CHOICE)):
        for name in dict.fromkeys(line["data"] for line in record):
            print(*(table(record, name, figure) for figure in FIGURES), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
