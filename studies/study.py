"""Which recipe? Methods on frozen, pretrained features, on the same images, seeds and folds.

    python studies/study.py features DATA [--resnet50 FILE.safetensors]    # compute the features once, per encoder
    python studies/study.py run DATA                                       # 12 seeds of the tops, 3 of the others
    python studies/study.py summary                                        # all methods of the records
    python studies/study.py short                                          # the table for docs/recipe-tables.md

DATA is one of:

tops     Fashion-MNIST tops at 70:30, 90:10, 95:5 and 98:2: 1,000 images drawn, 700 train, held-out ones are evaluated.
fashion  all ten classes of Fashion-MNIST, long tail of factor 100 (Debian's package): 2,000 training images, 8 of the
         rarest class; the first 2,500 images of its test set are evaluated.
isic     melanoma against dermatofibroma of ISIC 2018 ($LOPSIDED_DATA): five folds by lesion, all images evaluated once.
few      the same with 10, 20, 40 or 80 training images of dermatofibroma; all held-back images of a fold are evaluated.
seven    all seven classes of ISIC 2018, 10,015 images, five folds by lesion. No record has it; registered.csv.gz does.

Methods: ``quick`` and ``thorough`` are the recipes as they were before the block ``stages`` (``studies/layers.py``):
the final layer of one encoder at 224 pixels, or of three at 260 pixels and four views, with the block ``pixels``. ``...
without pixels`` is the same without colours and contrast of regions. ``plain features`` is ``quick without pixels``
without the scaling of features, and ``thorough with root`` is ``thorough without pixels`` with the scaling of
``quick``. All of ``thorough`` take the views ``flips``, which ``encoder.views = "auto"`` chose with one encoder on the
tops and on ISIC (studies/views.py). ``resnet50`` is ``quick without pixels`` with a ResNet-50 (a file that is not part
of the package), ``resnet50 + pixels`` is ``quick`` with it, and ``thorough + resnet50`` joins it to the encoders of
``thorough``. ``CE``, ``CL``, ``ACL`` and ``AFCL`` are heads of the recipe ``adapter`` without pixels; ``+`` is their
average with the regression (``adapter adapter.blend=0.5``). Peers, as one would write them by hand on the features of
``quick``, pixels included: scikit-learn's LogisticRegression with class_weight="balanced", the same after SMOTE, and
imbalanced-learn's EasyEnsembleClassifier.

``uwa`` is that of the rule ``balanced``; peers decide by themselves. ``plain`` is that of the most probable class.
``seconds`` is the processor time of the fit without the features. A line of the record that exists is not computed
again.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

import shared
from adapters import cross_entropy, head_logits
from lopsided.data.inputs import StreamedInputs
from lopsided.data.scenarios import draw, parse_scenario
from lopsided.data.sources import Source, open_source
from lopsided.data.sources.isic import CLASSES
from lopsided.evaluation.intervals import mean_interval
from lopsided.inference.engine import Engine
from lopsided.models.blocks.block import scaled
from lopsided.models.blocks.pixels import Pixels
from lopsided.models.model import look
from lopsided.recipe import named_recipe
from lopsided.recipe.views import parse_views
from lopsided.training.methods.adapter import Rows, fit_plain
from lopsided.training.regression import fit_regression
from shared import Floats

RECORD = shared.RECORDS / "study.jsonl"
SCENARIOS = ("70:30", "90:10", "95:5", "98:2")
FEW = (10, 20, 40, 80)
TAIL, TAIL_TOTAL, TAIL_TEST = 100, 2000, 2500
"""Factor of the long tail, its number of training images, and how many test images are evaluated, from the first."""
VIEWS = parse_views("flips")
EMBEDDED = ("tf_efficientnet_lite0", "tf_efficientnet_lite1", "tf_efficientnet_lite2")
SCALINGS = {"quick": "root", "thorough": "cube-root"}
SMALL, LARGE = 224, 260
"""Sides of the images for ``quick`` and for ``thorough``."""
RESNET = "resnet50"
BASE = "quick"
WITHOUT = " without pixels"
PEERS = ("class_weight", "SMOTE", "EasyEnsemble")
COLOURED = ("quick", "thorough", f"{RESNET} + pixels", f"thorough + {RESNET}", *PEERS)
"""Methods with the features of the block ``pixels``."""
CHEAP = (
    "quick", "thorough", f"default{WITHOUT}", f"thorough{WITHOUT}", "thorough with root", "plain features",
    "resnet50", "resnet50 + pixels", "thorough + resnet50", "class_weight", "SMOTE",
)  # fmt: skip
HEADS = ("CE", "CL", "ACL", "AFCL")


def open_data(data: str) -> Source:
    """Return the images of a data set."""
    if data == "tops":
        return open_source("fashion-mnist-tops")
    if data == "fashion":
        return open_source("fashion-mnist")
    return open_source("isic2018", classes=list(CLASSES) if data == "seven" else shared.LESIONS)


def compute_features(data: str, folder: Path, resnet50: str | None) -> None:
    """Write the features of all views of the images that are used, one file per encoder."""
    source = open_data(data)
    rows = long_tail(source, 0)[2] if data == "fashion" else np.arange(len(source))
    wanted = [(EMBEDDED[0], SMALL, "embedded"), *((name, LARGE, "embedded") for name in EMBEDDED)]
    wanted += [(RESNET, size, resnet50) for size in (SMALL, LARGE) if resnet50]
    for name, size, weights in wanted:
        path = folder / f"{data}-{name}-{size}.npz"
        if path.exists():
            continue
        views = [VIEWS[0]] if size == SMALL else VIEWS
        model, card = shared.frozen_model(name, weights, size)
        engine = Engine(model, card.shape)
        begin, found = time.process_time(), {view: [] for view in views}
        inputs = StreamedInputs(source.images, size, 3, 1)
        for _, batch in inputs.batches(rows[i : i + 64] for i in range(0, len(rows), 64)):
            for view in views:
                found[view].append(engine.encode(look(batch, view)))
        seconds = (time.process_time() - begin) / len(views)
        groups = np.arange(len(source)).astype(str) if source.groups is None else source.groups
        np.savez(
            path, labels=source.labels[rows], groups=groups[rows], rows=rows, seconds=seconds,
            **{view: np.concatenate(parts) for view, parts in found.items()},
        )  # fmt: skip
        print(f"{path}: {len(rows):,} images, {seconds:.0f} s per view", flush=True)
    path = folder / f"{data}-pixels.npz"
    if not path.exists():
        batches = StreamedInputs(source.images, SMALL, 3, 1).batches(rows[i : i + 64] for i in range(0, len(rows), 64))
        np.savez(path, identity=np.concatenate([Pixels()(batch / 255).numpy() for _, batch in batches]))


def long_tail(source: Source, seed: int) -> tuple[Floats, Floats, Floats]:
    """Return the training rows of a long tail, the test rows, and all rows that some seed up to 2 uses."""
    assert source.splits is not None
    test = np.flatnonzero(source.splits == "test")[:TAIL_TEST]
    pool = np.flatnonzero(source.splits == "train")
    scenario = parse_scenario(f"long-tail:{TAIL},total={TAIL_TOTAL}")
    drawn = [pool[draw(source.labels[pool], source.classes, scenario, each)] for each in range(3)]
    return drawn[seed], test, np.unique(np.concatenate([*drawn, test]))


class Features:
    """The features of a data set, for each method."""

    def __init__(self, data: str, folder: Path) -> None:
        wanted = [(name, size) for name in (*EMBEDDED, RESNET) for size in (SMALL, LARGE)]
        paths = {key: folder / f"{data}-{key[0]}-{key[1]}.npz" for key in wanted}
        self._files = {key: dict(np.load(path)) for key, path in paths.items() if path.exists()}
        self._pixels = np.load(folder / f"{data}-pixels.npz")["identity"]
        first = self._files[EMBEDDED[0], SMALL]
        self.labels, self.groups, self.rows = first["labels"], first["groups"], first["rows"]

    def of(self, method: str) -> Floats | None:
        """Return the features of a method, or None if a file is missing."""
        keys = [(RESNET if method.startswith(RESNET) else EMBEDDED[0], SMALL)]
        if method.startswith("thorough"):
            keys = [(name, LARGE) for name in (*EMBEDDED, *([RESNET] if RESNET in method else []))]
        if any(key not in self._files for key in keys):
            return None
        views = VIEWS if method.startswith("thorough") else VIEWS[:1]
        parts = [np.mean([self._files[key][view] for view in views], axis=0) for key in keys]
        features = np.concatenate(parts, axis=1)
        usual = SCALINGS["thorough" if method.startswith("thorough") else "quick"]
        how = {"plain features": "none", "thorough with root": "root"}.get(method, usual)
        found = scaled(torch.from_numpy(features), how).numpy()
        return np.concatenate([found, self._pixels], axis=1) if method in COLOURED else found


def peer(method: str, seed: int) -> Any:
    """Return a classifier as one would write it by hand."""
    from imblearn.ensemble import EasyEnsembleClassifier
    from imblearn.over_sampling import SMOTE
    from imblearn.pipeline import make_pipeline
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    if method == "class_weight":
        return make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
    if method == "SMOTE":
        few = SMOTE(random_state=seed, k_neighbors=5)
        return make_pipeline(StandardScaler(), few, LogisticRegression(max_iter=1000))
    return make_pipeline(StandardScaler(), EasyEnsembleClassifier(random_state=seed))


def heads(method: str, rows: Rows, inputs: Floats, seed: int) -> tuple[Floats, Floats]:
    """Return the logits of heads with one loss, and of their average with the calibrated regression."""
    recipe = named_recipe("adapter").override(**{"seed": seed, "encoder.name": EMBEDDED[0]})
    calibrated, _ = fit_plain(rows, recipe)
    if method == "CE":
        found = cross_entropy(rows, recipe, inputs)
        return found, (found + calibrated(inputs)) / 2
    own = head_logits(rows, recipe.override(**{"encoder_training.loss": method.lower()}), inputs)
    return own, (own + calibrated(inputs)) / 2


def fit_method(
    method: str, x: Floats, labels: Floats, groups: Floats | None, inputs: Floats, seed: int
) -> dict[str, tuple[Floats, Floats]]:
    """Return, by the name of the method, the logits of ``inputs`` and the prior that the logits carry."""
    num = int(labels.max()) + 1
    prior = np.bincount(labels, minlength=num) / len(labels)
    if method in HEADS:
        own, mean = heads(method, Rows(x, labels, groups, num), inputs, seed)
        return {method: (own, prior), f"{method} +": (mean, prior)}
    if method in PEERS:
        with threadpool_limits(1):
            found = np.log(np.maximum(peer(method, seed).fit(x, labels).predict_proba(inputs), 1e-12))
        return {method: (found, np.full(num, 1 / num))}
    weights = shared.importance(f"{EMBEDDED[0]}+pixels", x.shape[1]) if method in COLOURED else None
    fitted = fit_regression(x, labels, num, groups=groups, seed=seed, importance=weights)
    return {method: (inputs @ fitted.weight.T + fitted.bias, prior)}


Pair = tuple[Floats, Floats]


def pairs(data: str, cell: str, seed: int, found: Features) -> tuple[list[Pair], bool]:
    """Return the rows to train on and to evaluate, once per fold, and whether there are groups."""
    labels = found.labels
    if data == "tops":
        return [shared.draw_tops(labels, cell, seed)], False
    if data == "fashion":
        train, test, _ = long_tail(open_data(data), seed)
        place = {row: index for index, row in enumerate(found.rows.tolist())}
        return [tuple(np.array([place[row] for row in rows.tolist()]) for rows in (train, test))], False  # type: ignore[list-item]
    folds = shared.folds_by_lesion(labels, found.groups, seed)
    if data in ("isic", "seven"):
        return folds, True
    generator, rare = np.random.default_rng(seed), int(np.bincount(labels).argmin())
    cut = []
    for train, rest in folds:
        own = train[labels[train] == rare]
        kept = generator.permutation(own)[: int(cell.split(maxsplit=1)[0])]
        cut.append((np.sort(np.concatenate([train[labels[train] != rare], kept])), rest))
    return cut, True


def run_cell(data: str, cell: str, seed: int, method: str, found: Features) -> Iterator[dict[str, Any]]:
    """Yield the lines of one method (and of its average with the regression) on one draw."""
    x = found.of(method)
    if x is None:
        return
    folds, grouped = pairs(data, cell, seed, found)
    scores: dict[str, list[tuple[Floats, Floats]]] = {}
    begin = time.process_time()
    for train, rest in folds:
        groups = found.groups[train] if grouped else None
        for name, (logits, prior) in fit_method(method, x[train], found.labels[train], groups, x[rest], seed).items():
            scores.setdefault(name, []).append((logits - np.log(prior), logits))
    seconds = (time.process_time() - begin) / len(folds)
    labels = np.concatenate([found.labels[rest] for _, rest in folds])
    for name, parts in scores.items():
        balanced, plain = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        line = {
            "data": data,
            "cell": cell,
            "seed": seed,
            "method": name,
            "train": len(folds[0][0]),
            "images": len(labels),
        }
        yield {**line, **shared.figures(balanced, labels, plain), "seconds": round(seconds, 2)}


def cells_of(data: str) -> list[str]:
    """Return the settings of a data set."""
    known = {"tops": list(SCENARIOS), "fashion": [f"long tail {TAIL}"], "isic": ["all"], "seven": ["all"]}
    return known.get(data) or [f"{number} rare" for number in FEW]


def usual_candidates(data: str, cell: str) -> list[str]:
    """Return the methods of a data set, the cheap ones first."""
    methods = [*CHEAP, *HEADS]
    methods.insert(len(CHEAP), "EasyEnsemble")
    if data in ("tops", "fashion"):
        methods = [method for method in methods if RESNET not in method]
    if data == "few":
        methods = [method for method in methods if method not in ("CE", "AFCL")]
    return methods


def summary(path: Path, keep: Callable[[dict[str, Any]], bool] = lambda line: True) -> str:
    """Return the mean of each method, and its paired difference to ``quick`` with a 95 % interval over the draws."""
    rows = []
    for key, methods in shared.nested(filter(keep, shared.read(path)), ("data", "cell"), "method", "seed").items():
        for method, runs in methods.items():
            cells = shared.compared(runs, methods.get(BASE, {}), "uwa", "plain", "auroc")
            seconds = statistics.median(line["seconds"] for line in runs.values())
            rows.append((*key, method, len(runs), *cells, f"{seconds:.1f}"))
    head = "data | setting | method | runs | balanced accuracy | minus quick | plain | AUROC | minus quick | seconds"
    return shared.table(head, rows)


RARE_TOPS = {"70:30": 210, "90:10": 70, "95:5": 35, "98:2": 14}
"""Training images of the rare class, of 700."""
SHORT = ("thorough", "quick", "class_weight", "SMOTE")


def short(path: Path) -> str:
    """Return a row for each setting: the balanced accuracy of a few methods, with Student's 95 % interval."""
    rows = []
    settings = shared.nested(shared.read(path), ("data", "cell"), "method", "seed")
    for (data, cell), methods in sorted(settings.items(), key=place):
        tops = f"T-shirts and shirts at {cell}, {RARE_TOPS.get(cell)} rare"
        what = {"few": f"skin lesions, {cell}", "isic": "skin lesions, 92 rare", "tops": tops}
        what |= {"fashion": "ten classes, 8 rare", "seven": "seven classes of lesions, 92 rare"}
        runs = ([line["uwa"] for line in methods.get(method, {}).values()] for method in SHORT)
        rows.append((what[data], *(shared.shown(mean_interval(values)) if values else "" for values in runs)))
    return shared.table(f"images | {' | '.join(SHORT)}", rows)


def place(item: tuple[tuple[str, str], object]) -> tuple[int, int]:
    """Return the place of a setting: few images of ISIC first, then more, then the others."""
    (data, cell), _ = item
    digits = "".join(c for c in cell.partition(":")[0] if c.isdigit())
    return ("few", "isic", "tops", "fashion", "seven").index(data), int(digits or 0)


def main() -> None:
    """Compute the missing lines of the record, or print its summary."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["features", "run", "summary", "short"])
    parser.add_argument("data", choices=["tops", "fashion", "isic", "few", "seven"], nargs="?")
    parser.add_argument("--seeds", help="such as 0-11")
    parser.add_argument("--methods", help="separated by commas; default: all")
    parser.add_argument("--resnet50", help="a file of ImageNet weights")
    parser.add_argument("--features", type=Path, default=Path())
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if given.what in ("summary", "short"):
        print((summary if given.what == "summary" else short)(given.record))
        return
    if given.data is None:
        parser.error("DATA is missing")
    images = "isic" if given.data == "few" else given.data
    if given.what == "features":
        compute_features(images, given.features, given.resnet50)
        return
    found = Features(images, given.features)
    for seed in shared.seeds_of(given.seeds or ("0-11" if given.data == "tops" else "0-2")):
        for cell in cells_of(given.data):
            for method in given.methods.split(",") if given.methods else usual_candidates(given.data, cell):
                key = {"data": given.data, "cell": cell, "seed": seed, "method": method}
                if not any(key.items() <= line.items() for line in shared.read(given.record)):
                    for line in run_cell(given.data, cell, seed, method, found):
                        shared.add(given.record, line)


if __name__ == "__main__":
    main()
