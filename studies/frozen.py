"""How good is a logistic regression on frozen features? Balanced accuracy on other images.

    python studies/frozen.py tops                        # Fashion-MNIST tops at 90:10, 95:5 and 98:2
    python studies/frozen.py isic                        # melanoma against dermatofibroma, $LOPSIDED_DATA
    python studies/frozen.py isic --encoder resnet50 --weights FILE.safetensors     # or resnet50-v1, see below
    python studies/frozen.py summary                     # the table of the records, without computing anything

``tops`` runs the recipe ``quick`` as ``lopsided fit`` does: 1,000 images drawn by the scenario, of which 700 train
the regression, and held-out images with the same number per class, which the run has not drawn. ``isic`` judges every
image once, in five folds by lesion; inner folds of each training part, also by lesion, choose the strength.
``resnet50-v1`` has the stride of a stage on its first 1x1 convolution.

Each line of the record is one run or one set of folds. A line that exists is not computed again. ``plain`` is the
decision for the most probable class, ``balanced`` for the largest probability divided by the share of the class in
training.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import nn

import shared
from lopsided.data.prepare import Sources
from lopsided.data.sources import open_source
from lopsided.evaluation.intervals import mean_interval
from lopsided.recipe import named_recipe
from lopsided.training.fit import fit
from lopsided.training.regression import fit_regression

RECORD = shared.RECORDS / "frozen.jsonl"
SCENARIOS = ("90:10", "95:5", "98:2")


def judged(p: np.ndarray, labels: np.ndarray, prior: np.ndarray) -> dict[str, float]:
    """Return the balanced accuracy by both decisions, and the AUROC of two classes, in percent."""
    plain, balanced = (balanced_accuracy_score(labels, scores.argmax(axis=1)) for scores in (p, p / prior))
    auroc = roc_auc_score(labels, p[:, 1])
    return {name: round(100 * value, 2) for name, value in (("plain", plain), ("balanced", balanced), ("auroc", auroc))}


def tops(scenario: str, seed: int, loss: str) -> dict[str, Any]:
    """Run the recipe on one draw of the tops."""
    recipe = named_recipe("quick").override(**shared.tops_fields(scenario, seed), **{"classifier.loss": loss})
    source, held_out = Sources().open(recipe)
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
    source = open_source("isic2018", classes=shared.LESIONS)
    encoder, first, _ = encoder.partition("-v1")
    scaling = named_recipe("quick").encoder.scaling
    model, card = shared.frozen_model(encoder, weights, classes=source.classes, scaling=scaling)
    if first:
        stride_first(model.encoder)
        card = card.model_copy(update={"encoder": encoder + first})
    begin = time.perf_counter()
    features = shared.features_of(source, model, card)
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    p, ratio = np.zeros((len(source), 2)), np.zeros((len(source), 2))
    assert source.groups is not None
    for train, rest in shared.folds_by_lesion(source.labels, source.groups, seed):
        found = fit_regression(
            features[train], source.labels[train], 2, groups=source.groups[train], weighted=loss == "weighted-ce",
            seed=seed, importance=shared.importance(encoder, features.shape[1]),
        )  # fmt: skip
        p[rest] = softmax(features[rest] @ found.weight.T + found.bias, axis=1)
        prior = np.ones(2) if loss == "weighted-ce" else np.bincount(source.labels[train]) / len(train)
        ratio[rest] = p[rest] / prior
    result = judged(p, source.labels, np.ones(2))
    result["balanced"] = round(100 * balanced_accuracy_score(source.labels, ratio.argmax(axis=1)), 2)
    times = {"feature_seconds": round(seconds, 1), "regression_seconds": round(time.perf_counter() - begin, 1)}
    return {"train": len(source) * 4 // 5, "images": len(source), **result, **times}


def summary(path: Path) -> str:
    """Return the mean of each cell with its 95 % interval over the seeds."""
    rows = []
    for key, runs in shared.nested(shared.read(path), ("data", "scenario", "encoder", "loss"), "seed").items():
        means = (mean_interval([line[name] for line in runs.values()]) for name in ("plain", "balanced", "auroc"))
        rows.append((*key, len(runs), *map(shared.shown, means)))
    return shared.table("data | proportions | encoder | loss | runs | plain | balanced | AUROC", rows)


def main() -> None:
    """Compute the missing lines of the record and print its summary."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["tops", "isic", "summary"])
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--loss", choices=["ce", "weighted-ce"], default="ce")
    parser.add_argument("--encoder", default=named_recipe("quick").encoder.name)
    parser.add_argument("--weights", default="embedded")
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    scenarios = {"tops": SCENARIOS, "isic": ("all",), "summary": ()}[arguments.what]
    fixed = {"encoder": arguments.encoder, "loss": arguments.loss}
    cells = (
        {"data": arguments.what, "scenario": scenario, **fixed, "seed": seed}
        for scenario in scenarios
        for seed in range(arguments.seeds or (12 if arguments.what == "tops" else 3))
    )

    def compute(cell: dict[str, Any]) -> dict[str, Any]:
        if arguments.what == "tops":
            return tops(cell["scenario"], cell["seed"], arguments.loss)
        return isic(arguments.encoder, arguments.weights, cell["seed"], arguments.loss)

    shared.compute_missing(arguments.record, cells, compute)
    print(summary(arguments.record))


if __name__ == "__main__":
    main()
