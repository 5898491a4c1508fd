"""Are contrastive heads on frozen features better than a logistic regression? Each method against it, on equal images.

    python studies/adapters.py features DATA         # compute the features once; DATA is tops or isic
    python studies/adapters.py run DATA              # 12 seeds of the tops, or 3 draws of the folds of isic
    python studies/adapters.py run tops --seeds 100-105 --record FILE --set adapter.dropout=0.8   # other settings
    python studies/adapters.py summary               # the tables of the records, without computing anything
    python studies/adapters.py pairs                 # methods against methods, over all proportions of the tops

``tops`` draws 1,000 images of Fashion-MNIST as ``studies/frozen.py`` does: 700 of them train, and held-out images
that the run has not drawn are evaluated. ``isic`` evaluates every image once, in five folds by lesion.

The methods: ``regression`` is ``quick`` without stages and pixels, ``regression, calibrated`` is the same regression
calibrated on left-out folds of the training images, as the heads are. ``CE``, ``CL``, ``ACL`` and ``AFCL`` are heads
with the settings of the recipe ``adapter`` and this loss. ``+`` is the average of the logits of heads and of the
calibrated regression, which is the recipe ``adapter`` with ``adapter.blend=0.5``. CE heads give their own logits.

A line of the record holds all methods of a seed. A line that exists is not computed again. Features are kept in a file
in the folder of --features (default: the current one).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shared
from lopsided.data.sources import open_source
from lopsided.evaluation.intervals import mean_interval
from lopsided.losses.objective import Objective
from lopsided.models.encoders import seeded_init
from lopsided.models.heads import Adapter
from lopsided.models.pretrained import EMBEDDED_ENCODER
from lopsided.recipe import Recipe, named_recipe, read_words
from lopsided.training.methods.adapter import Rows, Unseen, fit_adapter, fit_plain, head_folds
from lopsided.training.regression import standardisation

RECORD = shared.RECORDS / "adapters.jsonl"
SCENARIOS = ("90:10", "95:5", "98:2")
CPU = torch.device("cpu")
BASE = "regression"


def compute_features(data: str, folder: Path) -> None:
    """Write the features, labels and groups of all images."""
    size = 112 if data == "tops" else 224
    source = open_source("fashion-mnist-tops") if data == "tops" else open_source("isic2018", classes=shared.LESIONS)
    features = shared.features_of(source, *shared.frozen_model(EMBEDDED_ENCODER, "embedded", size, source.classes))
    groups = np.arange(len(source)).astype(str) if source.groups is None else source.groups
    np.savez(folder / f"{data}.npz", features=features, labels=source.labels, groups=groups)


def cross_entropy(rows: Rows, recipe: Recipe, inputs: np.ndarray) -> np.ndarray:
    """Return the logits of heads trained with cross-entropy, with the same layers, folds and calibration."""
    section, training = recipe.adapter, recipe.encoder_training
    mean, scale = standardisation(rows.features.astype(np.float64))
    x, queries = (torch.from_numpy((part - mean) / scale).float() for part in (rows.features, inputs))
    num = rows.num_classes
    unseen, total = Unseen(rows.labels, num), torch.zeros(len(queries), num)
    torch.manual_seed(recipe.seed)
    for index, (train, rest) in enumerate(head_folds(rows, recipe, section.heads)):
        with seeded_init(recipe.seed, "ce", str(index)):
            layers = nn.Linear(x.shape[1], section.hidden), nn.ReLU(), nn.Dropout(section.dropout)
            head = nn.Sequential(nn.Dropout(section.input_dropout), *layers, nn.Linear(section.hidden, num))
        optimizer = torch.optim.Adam(head.parameters(), training.lr, weight_decay=training.weight_decay)
        batches = -(-len(train) // training.batch_size) * training.epochs
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, batches)
        for _ in range(training.epochs):
            for batch in torch.randperm(len(train)).split(training.batch_size):
                chosen = train[batch.numpy()]
                loss = nn.functional.cross_entropy(head(x[chosen]), torch.from_numpy(rows.labels[chosen]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        head.eval()
        with torch.no_grad():
            unseen.add(rest, head(x[rest]).double().numpy())
            total += head(queries) / section.heads
    change = unseen.calibration(rows.prior(recipe))
    return total.double().numpy() / change.temperature + change.bias


def objective(recipe: Recipe, labels: np.ndarray) -> Objective:
    """Return the loss of the heads for training images with these labels."""
    loss = recipe.encoder_training.loss
    return loss.entry.load()(torch.from_numpy(np.bincount(labels)), recipe.adapter.out, **loss.parameters)


def head_logits(rows: Rows, recipe: Recipe, inputs: np.ndarray) -> np.ndarray:
    """Return the logits of heads with the loss of the recipe for the features ``inputs``."""
    section = recipe.adapter
    with seeded_init(recipe.seed, "adapter"):
        adapter = Adapter(
            inputs.shape[1], heads=section.heads, hidden=section.hidden, out=section.out,
            input_dropout=section.input_dropout, dropout=section.dropout,
        )  # fmt: skip
    joined = fit_adapter(adapter, rows, recipe, partial(objective, recipe), device=CPU)
    with torch.no_grad():
        outputs = adapter.eval()(torch.from_numpy(inputs)).double().numpy()
    return joined.linear(outputs)


def methods(rows: Rows, inputs: np.ndarray, seed: int, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the logits of each method for the features ``inputs``."""
    recipe = named_recipe("adapter").override(**{"seed": seed, "encoder.name": EMBEDDED_ENCODER} | changes)
    calibrated, fitted = fit_plain(rows, recipe)
    found = {BASE: inputs @ fitted.weight.T + fitted.bias, f"{BASE}, calibrated": calibrated(inputs)}
    found["CE"] = cross_entropy(rows, recipe, inputs)
    for loss in ("cl", "acl", "afcl"):
        found[loss.upper()] = head_logits(rows, recipe.override(**{"encoder_training.loss": loss}), inputs)
        found[f"{loss.upper()} +"] = (found[loss.upper()] + calibrated(inputs)) / 2
    return found


def tops(data: Any, scenario: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of each method on one draw of the tops."""
    features, labels = data["features"], data["labels"]
    train, held_out = shared.draw_tops(labels, scenario, seed)
    prior = np.bincount(labels[train]) / len(train)
    found = methods(Rows(features[train], labels[train], None, 2), features[held_out], seed, changes)
    return {method: shared.figures(logits - np.log(prior), labels[held_out]) for method, logits in found.items()}


def isic(data: Any, _: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of each method in five folds by lesion."""
    features, labels, groups = data["features"], data["labels"], data["groups"]
    logits: dict[str, np.ndarray] = {}
    for train, rest in shared.folds_by_lesion(labels, groups, seed):
        found = methods(Rows(features[train], labels[train], groups[train], 2), features[rest], seed, changes)
        prior = np.bincount(labels[train]) / len(train)
        for method, values in found.items():  # The prior differs between folds, so it is removed here.
            logits.setdefault(method, np.zeros((len(labels), 2)))[rest] = values - np.log(prior)
    return {method: shared.figures(values, labels) for method, values in logits.items()}


def summary(path: Path) -> str:
    """Return each method's mean figures, and its difference to the regression with a paired 95 % interval."""
    rows = []
    settings = shared.nested(shared.read(path), ("data", "scenario"), "seed")
    for key, lines in sorted(settings.items(), key=lambda setting: (setting[0][0] != "tops", setting[0])):
        methods = {
            method: {s: line["methods"][method] for s, line in lines.items()}
            for method in next(iter(lines.values()))["methods"]
        }
        for method, runs in methods.items():
            rows.append((*key, method, len(runs), *shared.compared(runs, methods[BASE], "uwa", "auroc")))
    return shared.table(
        "data | proportions | method | runs | balanced accuracy | against regression | AUROC | against regression", rows
    )


PAIRS = (("ACL", "CL"), ("ACL +", "CL +"), ("AFCL", "ACL"), ("ACL +", BASE))


def pairs(path: Path) -> str:
    """Return paired differences of methods with 95 % intervals: at each proportion of the tops, and over all."""
    lines = [line for line in shared.read(path) if line["data"] == "tops"]
    rows = []
    for one, other in PAIRS:
        for scenario in (*SCENARIOS, "all"):
            found = [line["methods"] for line in lines if scenario in ("all", line["scenario"])]
            gains = ([methods[one][name] - methods[other][name] for methods in found] for name in ("uwa", "auroc"))
            cells = [shared.shown(mean_interval(each), sign=True, digits=2) for each in gains]
            rows.append((f"{one} - {other}", scenario, len(found), *cells))
    return shared.table("difference | proportions | pairs | balanced accuracy | AUROC", rows)


def main() -> None:
    """Compute the missing lines of the record, or print its summary."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["features", "run", "summary", "pairs"])
    parser.add_argument("data", choices=["tops", "isic"], nargs="?")
    parser.add_argument("--seeds", help="such as 0-11")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--features", type=Path, default=Path())
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    if given.what in ("summary", "pairs"):
        print((summary if given.what == "summary" else pairs)(given.record))
        return
    if given.data is None:
        parser.error("DATA must be tops or isic")
    if given.what == "features":
        compute_features(given.data, given.features)
        return
    changes, compute = read_words(given.set).values, tops if given.data == "tops" else isic
    data = dict(np.load(given.features / f"{given.data}.npz"))
    cells = (
        {"data": given.data, "scenario": scenario, "seed": seed, "changes": changes}
        for scenario in (given.scenarios.split(",") if given.data == "tops" else ("all",))
        for seed in shared.seeds_of(given.seeds or ("0-11" if given.data == "tops" else "0-2"))
    )
    shared.compute_missing(
        given.record, cells, lambda cell: {"methods": compute(data, cell["scenario"], cell["seed"], changes)}
    )


if __name__ == "__main__":
    main()
