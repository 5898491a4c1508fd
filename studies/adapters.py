"""Are contrastive heads on frozen features better than a logistic regression? Each arm against it on the same images.

    python studies/adapters.py features DATA         # compute the features once; DATA is tops or isic
    python studies/adapters.py run DATA              # 12 seeds of the tops, or 3 draws of the folds of isic
    python studies/adapters.py run tops --seeds 100-105 --record FILE --set adapter.dropout=0.8   # other settings
    python studies/adapters.py summary               # the tables of the records, without computing anything
    python studies/adapters.py pairs                 # arms against arms, over all proportions of the tops

``tops`` draws 1,000 images of Fashion-MNIST as ``studies/frozen.py`` does: 700 of them train, and held-out images
that the run has not drawn are evaluated. ``isic`` evaluates every image once, in five folds by lesion.

The arms: ``regression`` is the recipe ``default``, ``regression, calibrated`` is the same regression calibrated on
left-out folds of the training images, as the heads are. ``CE``, ``CL``, ``ACL`` and ``AFCL`` are heads with the
settings of the recipe ``adapter`` and this loss. ``+`` is the average of the logits of heads and of the calibrated
regression, which is the recipe ``adapter-average``. CE heads give their own logits.

A line of the record holds all arms of a seed. A line that exists is not computed again. Features are kept in a file
in the folder of --features (default: the current one).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold
from torch import nn

from lopsided import files
from lopsided.data.images import ArrayImages
from lopsided.data.inputs import StreamedInputs
from lopsided.data.scenarios import draw, draw_held_out, parse_scenario
from lopsided.data.sources import Source, open_source
from lopsided.data.splits import split
from lopsided.inference.features import Extractor
from lopsided.losses.objective import Objective
from lopsided.models.adapter import Adapter
from lopsided.models.encoders import build_encoder, seeded_init
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard
from lopsided.models.pretrained import EMBEDDED_ENCODER, preprocessing_of
from lopsided.recipe import Recipe, named_recipe, parse_change
from lopsided.training.adapter import Rows, Unseen, fit_adapter, fit_plain, head_folds
from lopsided.training.regression import standardisation

RECORD = Path(__file__).parent / "records" / "adapters.jsonl"
SCENARIOS = ("90:10", "95:5", "98:2")
CPU = torch.device("cpu")
BASE = "regression"


def compute_features(data: str, folder: Path) -> None:
    """Write the features, labels and groups of all images."""
    size = 112 if data == "tops" else 224
    source = open_source("fashion-mnist-tops") if data == "tops" else open_source("isic2018", classes=["MEL", "DF"])
    pixels = preprocessing_of(EMBEDDED_ENCODER, "embedded")
    network, width = build_encoder(EMBEDDED_ENCODER, channels=3, image_size=size, weights="embedded")
    card = ModelCard(
        kind="image", encoder=EMBEDDED_ENCODER, channels=3, image_size=size, shape=(3, size, size), mean=pixels.mean,
        std=pixels.std, classes=source.classes, features=width,
    )  # fmt: skip
    model = Model(network, ClassifierHead(width, 2), pixels.mean, pixels.std).eval()
    digests = source.images.digest(np.arange(len(source)))
    features = Extractor(model, card).features(StreamedInputs(source.images, size, 3, 2), digests)
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


def arms(rows: Rows, inputs: np.ndarray, seed: int, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the logits of each arm for the features ``inputs``."""
    recipe = named_recipe("adapter").override(**{"seed": seed, "encoder.name": EMBEDDED_ENCODER} | changes)
    calibrated, fitted = fit_plain(rows, recipe)
    found = {BASE: inputs @ fitted.weight.T + fitted.bias, f"{BASE}, calibrated": calibrated(inputs)}
    found["CE"] = cross_entropy(rows, recipe, inputs)
    for loss in ("cl", "acl", "afcl"):
        found[loss.upper()] = head_logits(rows, recipe.override(**{"encoder_training.loss": loss}), inputs)
        found[f"{loss.upper()} +"] = (found[loss.upper()] + calibrated(inputs)) / 2
    return found


def figures(logits: np.ndarray, labels: np.ndarray, prior: np.ndarray) -> dict[str, float]:
    """Return the UWA of the balanced decision and the AUROC, in percent."""
    uwa = balanced_accuracy_score(labels, (logits - np.log(prior)).argmax(axis=1))
    return {"uwa": round(100 * uwa, 2), "auroc": round(100 * roc_auc_score(labels, logits[:, 1] - logits[:, 0]), 2)}


def tops(data: Any, scenario: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of each arm on one draw of the tops."""
    features, labels, classes = data["features"], data["labels"], ("T-shirt/top", "Shirt")
    drawn = draw(labels, classes, parse_scenario(f"{scenario},total=1000"), seed)
    held_out = draw_held_out(labels, classes, drawn, seed, None)
    blank = ArrayImages(np.zeros((len(drawn), 1, 1, 1), dtype=np.uint8))
    source = Source("tops", blank, labels[drawn], classes, tuple(map(str, range(len(drawn)))))
    train = drawn[split(source, how="stratified", val=0.0, test=0.3, seed=seed).train]
    prior = np.bincount(labels[train]) / len(train)
    found = arms(Rows(features[train], labels[train], None, 2), features[held_out], seed, changes)
    return {arm: figures(logits, labels[held_out], prior) for arm, logits in found.items()}


def isic(data: Any, _: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of each arm in five folds by lesion."""
    features, labels, groups = data["features"], data["labels"], data["groups"]
    logits: dict[str, np.ndarray] = {}
    folds = StratifiedGroupKFold(5, shuffle=True, random_state=seed)
    for train, rest in folds.split(features, labels, groups):
        found = arms(Rows(features[train], labels[train], groups[train], 2), features[rest], seed, changes)
        prior = np.bincount(labels[train]) / len(train)
        for arm, values in found.items():  # The prior differs between folds, so it is removed here.
            logits.setdefault(arm, np.zeros((len(labels), 2)))[rest] = values - np.log(prior)
    return {arm: figures(values, labels, np.ones(2)) for arm, values in logits.items()}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the record."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(path: Path) -> str:
    """Return each arm's mean figures, and its difference to the regression with a paired 95 % interval."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in read(path):
        cells.setdefault((line["data"], line["scenario"]), []).append(line["arms"])
    head = "| data | proportions | arm | runs | UWA | against regression | AUROC | against regression |"
    rows = [head, "|---" * 8 + "|"]
    for key, lines in sorted(cells.items(), key=lambda cell: (cell[0][0] != "tops", cell[0])):
        for arm in lines[0]:
            parts = []
            for name in ("uwa", "auroc"):
                values = [line[arm][name] for line in lines]
                parts.append(f"{statistics.mean(values):.1f}")
                less = [line[arm][name] - line[BASE][name] for line in lines]
                parts.append("" if arm == BASE else _interval(less))
            rows.append(f"| {' | '.join((*key, arm, str(len(lines)), *parts))} |")
    return "\n".join(rows)


PAIRS = (("ACL", "CL"), ("ACL +", "CL +"), ("AFCL", "ACL"), ("ACL +", BASE))


def pairs(path: Path) -> str:
    """Return paired differences of arms with 95 % intervals: at each proportion of the tops, and over all of them."""
    lines = [line for line in read(path) if line["data"] == "tops"]
    rows = ["| difference | proportions | pairs | UWA | AUROC |", "|---" * 5 + "|"]
    for one, other in PAIRS:
        for scenario in (*SCENARIOS, "all"):
            found = [line["arms"] for line in lines if scenario in ("all", line["scenario"])]
            cells = [_interval([arms[one][name] - arms[other][name] for arms in found], 2) for name in ("uwa", "auroc")]
            rows.append(f"| {one} - {other} | {scenario} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _interval(values: list[float], digits: int = 1) -> str:
    if len(values) < 2:
        return f"{values[0]:+.{digits}f}"
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.{digits}f} ± {half:.{digits}f}"


def _seeds(text: str | None, data: str) -> Iterator[int]:
    first, _, last = (text or ("0-11" if data == "tops" else "0-2")).partition("-")
    yield from range(int(first), int(last or first) + 1)


def main() -> None:
    """Compute the missing lines of the record, or print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["features", "run", "summary", "pairs"])
    parser.add_argument("data", choices=["tops", "isic"], nargs="?")
    parser.add_argument("--seeds", help="such as 0-11")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--features", type=Path, default=Path())
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    if arguments.what in ("summary", "pairs"):
        print((summary if arguments.what == "summary" else pairs)(arguments.record))
        return
    if arguments.data is None:
        parser.error("DATA must be tops or isic")
    if arguments.what == "features":
        compute_features(arguments.data, arguments.features)
        return
    changes = dict(map(parse_change, arguments.set))
    data = dict(np.load(arguments.features / f"{arguments.data}.npz"))
    names = ("data", "scenario", "seed", "changes")
    done = [{name: line[name] for name in names} for line in read(arguments.record)]
    for scenario in arguments.scenarios.split(",") if arguments.data == "tops" else ("all",):
        for seed in _seeds(arguments.seeds, arguments.data):
            cell = {"data": arguments.data, "scenario": scenario, "seed": seed, "changes": changes}
            if cell in done:
                continue
            found = (tops if arguments.data == "tops" else isic)(data, scenario, seed, changes)
            files.append_line(arguments.record, json.dumps({**cell, "arms": found}))
            print(json.dumps({**cell, "arms": found}), flush=True)


if __name__ == "__main__":
    main()
