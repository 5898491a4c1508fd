"""How many flipped labels does the label check list first, and how similar are near-duplicates? On ISIC 2018.

    python studies/labels.py flips     flips 20 of 1,228 labels, five times; $LOPSIDED_DATA holds the images
    python studies/labels.py near [--recipe thorough] [--changed 50]
                                          similarity of changed copies, of one lesion and of other lesions

Both add to studies/records/labels.json. ``flips`` computes out-of-fold probabilities as ``lopsided fit --folds 5`` does
with the recipe ``quick``: features of the embedded encoder, folds by lesion that are drawn from the flipped labels,
and a regression whose strength inner folds choose. It counts the flipped labels among the first 40 images in
several orders:

- ours: ``check_labels``, by the probability of the label,
- suspects first: suspects of confident learning before the other images, each by the probability of the label,
- margin: by the probability of the label less the largest other probability,
- adjusted: the margin after the threshold of each class is subtracted from its probability (for imbalance),
- balanced: by the probability of the label if all classes had the same share.

``near`` changes 200 images as people do (JPEG quality 60, half the size, a crop of 5 % on each side, a mirror image,
20 % brighter) and compares the cosine of standardised features with that of the most similar image of another lesion.
The features are those that a run of the recipe gives to its classifier: of its encoders and views, scaled by its rule.
The record is of ``quick`` as it was before it had stages.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps
from scipy.special import softmax

import shared
from lopsided.data.sources import Source, open_source, source_from_arrays
from lopsided.data.splits import fold_numbers
from lopsided.evaluation.labels import NEAR, check_labels, standardised
from lopsided.models.model import Model, ModelCard
from lopsided.recipe import named_recipe
from lopsided.recipe.views import parse_views
from lopsided.training.regression import fit_regression

RECORD = shared.RECORDS / "labels.json"
FLIPPED, FIRST, SEEDS, FOLDS = 20, 40, 5, 5
CHANGED = 200


def frozen_model(classes: tuple[str, ...], recipe: str) -> tuple[Model, ModelCard]:
    """Return the model of a recipe with a frozen encoder."""
    encoder, size = named_recipe(recipe).encoder, named_recipe(recipe).data.image_size
    views = parse_views(
        "flips" if encoder.views == "auto" else encoder.views
    )  # "auto" chose flips in studies/views.py.
    return shared.frozen_model(encoder.name, encoder.weights, size, classes, views=views, scaling=encoder.scaling)


def out_of_fold(features: np.ndarray, source: Source, labels: np.ndarray, seed: int) -> np.ndarray:
    """Return the probabilities of every image by a regression that was fitted without its fold."""
    flipped = replace(source, labels=labels)
    numbers = fold_numbers(flipped, how="group", folds=FOLDS, seed=seed)
    p = np.zeros((len(labels), len(source.classes)))
    assert source.groups is not None
    for fold in range(FOLDS):
        train, test = numbers != fold, numbers == fold
        found = fit_regression(
            features[train], labels[train], len(source.classes), groups=source.groups[train], seed=seed,
            importance=shared.importance(named_recipe("quick").encoder.name, features.shape[1]),
        )  # fmt: skip
        p[test] = softmax(features[test] @ found.weight.T + found.bias, axis=1)
    return p


def orders(labels: np.ndarray, p: np.ndarray) -> dict[str, np.ndarray]:
    """Return the images in the order of each rule, the most doubtful first."""
    rows = np.arange(len(labels))
    check = check_labels(labels, p)

    def margin(values: np.ndarray) -> np.ndarray:
        others = values.copy()
        others[rows, labels] = -np.inf
        return np.asarray(values[rows, labels] - others.max(axis=1))

    ratio = p / (np.bincount(labels) / len(labels))
    scores = {
        "suspects first": p[rows, labels] - 2.0 * check.suspect,
        "margin": margin(p),
        "adjusted": margin(p - check.thresholds),
        "balanced": (ratio / ratio.sum(axis=1, keepdims=True))[rows, labels],
    }
    return {"ours": check.order, **{name: np.argsort(score, kind="stable") for name, score in scores.items()}}


def flips(out: Path) -> None:
    """Flip labels and count how many are listed first. Each seed is added to the record; those in it are skipped."""
    source = open_source("isic2018", classes=shared.LESIONS)
    features = shared.features_of(source, *frozen_model(source.classes, "quick"))
    for seed in range(SEEDS):
        lines = shared.read_json(out).get("flips", {"runs": []})["runs"]
        if any(line["seed"] == seed for line in lines):
            continue
        rng = np.random.default_rng(seed)
        flipped = rng.permutation(len(source))[:FLIPPED]
        labels = source.labels.copy()
        labels[flipped] = 1 - labels[flipped]
        p = out_of_fold(features, source, labels, seed)
        found = {name: int(np.isin(order[:FIRST], flipped).sum()) for name, order in orders(labels, p).items()}
        suspects = check_labels(labels, p)
        lines.append(
            {
                "seed": seed,
                "found": found,
                "suspects": suspects.num_suspects,
                "flipped_suspects": int(suspects.suspect[flipped].sum()),
                "flipped_rare": int((source.labels[flipped] == 1).sum()),
            }
        )
        print(lines[-1], flush=True)
        facts = {"images": len(source), "flipped": FLIPPED, "first": FIRST, "folds": FOLDS, "runs": lines}
        write(out, "flips", facts)


def write(out: Path, what: str, facts: dict[str, Any]) -> None:
    """Replace one part of the record."""
    shared.write_json(out, shared.read_json(out) | {what: {"command": f"python studies/labels.py {what}", **facts}})


def changed(path: Path) -> dict[str, Image.Image]:
    """Return changed copies of an image."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    width, height = image.size
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=60)
    return {
        "jpeg": Image.open(buffer),
        "half": image.resize((width // 2, height // 2)),
        "crop": image.crop((width // 20, height // 20, width - width // 20, height - height // 20)),
        "mirror": ImageOps.mirror(image),
        "brighter": ImageEnhance.Brightness(image).enhance(1.2),
    }


def near(recipe: str, number: int) -> dict[str, Any]:
    """Measure the similarity of changed copies, of images of one lesion, and of other lesions."""
    source = open_source("isic2018", classes=shared.LESIONS)
    model, card = frozen_model(source.classes, recipe)
    features = shared.features_of(source, model, card)
    z = standardised(features.astype(np.float32))
    similar = z @ z.T
    assert source.groups is not None
    same = source.groups[:, None] == source.groups[None, :]
    np.fill_diagonal(same, False)
    other = np.where(same | np.eye(len(z), dtype=bool), -1.0, similar).max(axis=1)
    found: dict[str, Any] = {
        "same lesion": quantiles(similar[np.triu(same)]),
        "most similar image of another lesion": quantiles(other),
        "pairs of other lesions at the threshold": int((np.triu(np.where(same, -1, similar), 1) >= NEAR).sum()),
    }
    mean, deviation = features.mean(axis=0), features.std(axis=0)
    kept = deviation > 0
    rows = np.random.default_rng(0).permutation(len(source))[:number]
    copies: dict[str, list[np.ndarray]] = {}
    for row in rows.tolist():
        for name, image in changed(source.images.paths[row]).items():
            square = image.resize((card.image_size * 2, card.image_size * 2), Image.Resampling.BICUBIC)
            copies.setdefault(name, []).append(np.asarray(square))
    for name, pixels in copies.items():
        made = source_from_arrays(np.stack(pixels), [0] * (len(pixels) - 1) + [1])
        own = shared.features_of(made, model, card, cached=False)
        y = (own[:, kept] - mean[kept]) / deviation[kept]
        y /= np.linalg.norm(y, axis=1, keepdims=True)
        cosine = (y * z[rows]).sum(axis=1)
        found[name] = quantiles(cosine) | {"at the threshold": float((cosine >= NEAR).mean())}
        print(name, found[name], flush=True)
    return {"threshold": NEAR, "images": len(source), "changed": number, "similarity": found}


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Return some quantiles of similarities."""
    return {f"{q:g} %": round(float(np.quantile(values, q / 100)), 3) for q in (1, 5, 50, 95, 99)} | {
        "largest": round(float(values.max()), 3)
    }


def main() -> None:
    """Measure and add to the record."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=("flips", "near"))
    parser.add_argument("--out", type=Path, default=RECORD, help="default: records/labels.json")
    parser.add_argument("--recipe", default="quick", choices=("quick", "thorough"), help="recipe of near")
    parser.add_argument("--changed", type=int, default=CHANGED, help="number of images that near changes")
    options = parser.parse_args()
    if options.what == "flips":
        flips(options.out)
    else:
        more = "" if options.recipe == "quick" else f" --recipe {options.recipe}"
        more += "" if options.changed == CHANGED else f" --changed {options.changed}"
        write(options.out, f"near{more}", near(options.recipe, options.changed))


if __name__ == "__main__":
    main()
