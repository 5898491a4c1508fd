"""How good is a logistic regression on frozen features? Unweighted accuracy on images that no choice has seen.

    python studies/frozen.py tops                        # Fashion-MNIST tops at 90:10, 95:5 and 98:2
    python studies/frozen.py isic                        # melanoma against dermatofibroma, $LOPSIDED_DATA
    python studies/frozen.py isic --encoder resnet50 --weights FILE.safetensors     # or resnet50-v1, see below
    python studies/frozen.py summary                     # the table of the records, without computing anything

``tops`` runs the recipe ``default`` as ``lopsided fit`` does: 1,000 images drawn by the scenario, of which 700 train
the regression, and held-out images with the same number per class, which the run has not drawn. ``isic`` judges every
image once, in five folds by lesion; inner folds of each training part, also by lesion, choose the strength.
``resnet50-v1`` has the stride of a stage on its first 1x1 convolution.

Each line of the record is one run or one set of folds. A line that exists is not computed again. ``plain`` is the
decision for the most probable class, ``balanced`` for the largest probability divided by the share of the class in
training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold
from torch import nn

from lopsided import files
from lopsided.data.inputs import StreamedInputs
from lopsided.data.prepare import open_sources
from lopsided.data.sources import open_source
from lopsided.inference.features import Extractor
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard
from lopsided.models.pixels import column_weights, pixel_width
from lopsided.models.pretrained import preprocessing_of
from lopsided.models.scaling import scaled
from lopsided.recipe import named_recipe
from lopsided.training.fit import fit
from lopsided.training.regression import fit_regression

RECORD = Path(__file__).parent / "records" / "frozen.jsonl"
SCENARIOS = ("90:10", "95:5", "98:2")


def judged(p: np.ndarray, labels: np.ndarray, prior: np.ndarray) -> dict[str, float]:
    """Return UWA by both decisions, and the AUROC of two classes, in percent."""
    plain, balanced = (balanced_accuracy_score(labels, scores.argmax(axis=1)) for scores in (p, p / prior))
    auroc = roc_auc_score(labels, p[:, 1])
    return {name: round(100 * value, 2) for name, value in (("plain", plain), ("balanced", balanced), ("auroc", auroc))}


def tops(scenario: str, seed: int, loss: str) -> dict[str, Any]:
    """Run the recipe on one draw of the tops."""
    recipe = named_recipe("default").override(
        **{
            "seed": seed,
            "classifier.loss": loss,
            "data.source": "fashion-mnist-tops",
            "data.scenario": f"{scenario},total=1000",
            "data.split": "stratified",
            "data.test": 0.3,
            "data.held_out": True,
        }
    )
    source, held_out = open_sources(recipe)
    fitted = fit(recipe, source, held_out=held_out)
    assert fitted.held_out is not None
    assert fitted.held_out.y_true is not None
    share = np.bincount(source.labels[fitted.splits.train]) / len(fitted.splits.train)
    prior = np.ones(2) if loss == "weighted-ce" else share
    return {
        "train": len(fitted.splits.train),
        "images": len(fitted.held_out.y_true),
        **judged(fitted.held_out.probabilities, fitted.held_out.y_true, prior),
    }


def stride_first(network: nn.Module) -> None:
    """Move the stride of a stage of a ResNet to its first 1x1 convolution, as in the first version of the network."""
    for name in ("layer2", "layer3", "layer4"):
        block: Any = network.get_submodule(name)[0]  # type: ignore[operator]
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride


def isic(encoder: str, weights: str, seed: int, loss: str) -> dict[str, Any]:
    """Judge every image once, in five folds by lesion. The encoder may have the suffix ``-v1``."""
    source = open_source("isic2018", classes=["MEL", "DF"])
    encoder, first, _ = encoder.partition("-v1")
    pixels = preprocessing_of(encoder, weights)
    size = pixels.image_size
    network, width = build_encoder(encoder, channels=3, image_size=size, weights=weights)
    if first:
        stride_first(network)
    card = ModelCard(
        kind="image", encoder=encoder + first, channels=3, image_size=size, shape=(3, size, size), mean=pixels.mean,
        std=pixels.std, classes=source.classes, features=width,
    )  # fmt: skip
    model = Model(network, ClassifierHead(width, 2), pixels.mean, pixels.std).eval()
    begin = time.perf_counter()
    inputs = StreamedInputs(source.images, size, 3, 2)
    features = Extractor(model, card).features(inputs, source.images.digest(np.arange(len(source))))
    seconds = time.perf_counter() - begin
    how = named_recipe("default").encoder.scaling
    features = scaled(torch.from_numpy(features), how, plain=pixel_width(encoder)).numpy()
    begin = time.perf_counter()
    p, ratio = np.zeros((len(source), 2)), np.zeros((len(source), 2))
    folds = StratifiedGroupKFold(5, shuffle=True, random_state=seed)
    assert source.groups is not None
    for train, rest in folds.split(features, source.labels, source.groups):
        found = fit_regression(
            features[train], source.labels[train], 2, groups=source.groups[train], weighted=loss == "weighted-ce",
            seed=seed, importance=column_weights(encoder, features.shape[1]),
        )  # fmt: skip
        logits = features[rest] @ found.weight.T + found.bias
        p[rest] = np.exp(logits - logits.max(axis=1, keepdims=True))
        p[rest] /= p[rest].sum(axis=1, keepdims=True)
        prior = np.ones(2) if loss == "weighted-ce" else np.bincount(source.labels[train]) / len(train)
        ratio[rest] = p[rest] / prior
    result = judged(p, source.labels, np.ones(2))
    result["balanced"] = round(100 * balanced_accuracy_score(source.labels, ratio.argmax(axis=1)), 2)
    times = {"feature_seconds": round(seconds, 1), "regression_seconds": round(time.perf_counter() - begin, 1)}
    return {"train": len(source) * 4 // 5, "images": len(source), **result, **times}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the record."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(path: Path) -> str:
    """Return the mean of each cell with its 95 % interval over the seeds."""
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in read(path):
        cells.setdefault((line["data"], line["scenario"], line["encoder"], line["loss"]), []).append(line)
    rows = ["| data | proportions | encoder | loss | runs | plain | balanced | AUROC |", "|---" * 8 + "|"]
    for key, lines in cells.items():
        figures = [_interval([line[name] for line in lines]) for name in ("plain", "balanced", "auroc")]
        rows.append(f"| {' | '.join((*key, str(len(lines)), *figures))} |")
    return "\n".join(rows)


def _interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}"
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.1f} ± {half:.1f}"


def main() -> None:
    """Compute the missing lines of the record and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tops", "isic", "summary"])
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--loss", choices=["ce", "weighted-ce"], default="ce")
    parser.add_argument("--encoder", default=named_recipe("default").encoder.name)
    parser.add_argument("--weights", default="embedded")
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    names = ("data", "scenario", "encoder", "loss", "seed")
    done = [{name: line[name] for name in names} for line in read(arguments.record)]
    scenarios = {"tops": SCENARIOS, "isic": ("all",), "summary": ()}[arguments.what]
    for scenario in scenarios:
        for seed in range(arguments.seeds or (12 if arguments.what == "tops" else 3)):
            cell = {"data": arguments.what, "scenario": scenario, "encoder": arguments.encoder}
            cell |= {"loss": arguments.loss, "seed": seed}
            if cell in done:
                continue
            if arguments.what == "tops":
                found = tops(scenario, seed, arguments.loss)
            else:
                found = isic(arguments.encoder, arguments.weights, seed, arguments.loss)
            files.append_line(arguments.record, json.dumps({**cell, **found}))
            print(json.dumps({**cell, **found}), flush=True)
    print(summary(arguments.record))


if __name__ == "__main__":
    main()
