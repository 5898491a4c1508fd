"""What are the stages of an encoder worth? The recipes with them, against the recipes as they were before.

    python studies/layers.py features DATA --features FOLDER    # compute the features once, a file per size and view
    python studies/layers.py run DATA --features FOLDER         # the missing lines of studies/records/layers.jsonl
    python studies/layers.py summary                            # the table of the record
    python studies/layers.py heads                              # the mean of regressions against one, and the old mean
    python studies/layers.py views                              # thorough minus quick, paired by repeat
    python studies/layers.py trials                             # the classifiers that were tried

DATA is one of ``isic``, ``few``, ``tops`` and ``fashion``, with the settings and repeats of ``studies/study.py``, so
that lines of ``study.jsonl`` are about the same images: five folds by lesion, T-shirts and shirts at 90:10, 95:5 and
98:2, ten classes. ``--only`` takes one setting, ``--methods`` some of the methods, ``--seeds`` such as 0-2.

The methods are the recipes ``quick`` and ``thorough``, with the views ``flips`` for ``thorough``, as in
``studies/study.py``, whose record has both as they were before they had stages; ``quick before`` is that for other
repeats. ``quick, logistic`` and ``thorough, logistic`` are one logistic regression on the same features. ``quick,
registered`` and ``thorough, registered`` are the recipes of commit b479d66, with its classifier: a logistic regression,
and with few images the mean of those on all features and on each kind. They were computed there. A line that exists is
not computed again.

Regions, and the classifier of then and of now, were chosen on the repeats 100 to 111; studies/records/heads.jsonl has
the trials of the classifier of now. The
weights of the blocks and the scaling had been chosen among a dozen variants on the repeats 0 to 2 of the skin lesions
and 0 to 3 of the T-shirts, which are among those of the table: the gains there are too high by what the choice is
worth. Repeats from 200 on are of the same images, and had no part in a choice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax

import shared
import study
from lopsided.data.inputs import StreamedInputs
from lopsided.inference.engine import Engine
from lopsided.models.blocks.block import Columns, Layout
from lopsided.models.encoders import embedded_state
from lopsided.models.model import look
from lopsided.recipe import named_recipe
from lopsided.recipe.encoder_spec import EncoderSpec, Scaling
from lopsided.recipe.views import parse_views
from lopsided.training.averaged import fit_averaged
from lopsided.training.regression import balanced_log_loss, fit_regression
from shared import Floats

RECORD, TRIALS = shared.RECORDS / "layers.jsonl", shared.RECORDS / "heads.jsonl"
ENCODER = "tf_efficientnet_lite0"
EVERYTHING = f"{ENCODER}+stages+regions+pixels"
"""The encoder whose features are written. A method takes the columns of the blocks that it has."""


@dataclass(frozen=True)
class Method:
    """What the features of a regression are."""

    encoder: str
    side: int
    views: str = "none"
    scaling: Scaling = "root"


def recipe_method(name: str) -> Method:
    """Return the method of a recipe. ``auto`` views are ``flips``."""
    recipe = named_recipe(name)
    views = "flips" if recipe.encoder.views == "auto" else recipe.encoder.views
    return Method(recipe.encoder.name, recipe.data.image_size or study.SMALL, views, recipe.encoder.scaling)


RECIPES, LOSSES = ("quick", "thorough"), ("log_loss", "brier", "fair_loss")
BEFORE = " before"
ALONE, REGISTERED = ", logistic", ", registered"
METHODS = {
    **{name: recipe_method(name) for name in ("quick", "thorough")},
    **{f"{name}{ALONE}": recipe_method(name) for name in ("quick", "thorough")},
    f"quick{BEFORE}": Method(f"{ENCODER}+pixels", 224),
}
FRESH = 200
"""Repeats from this one on had no part in the choice of the weights."""


def compute_features(data: str, folder: Path) -> None:
    """Write the features of each size and view that a method has, as the encoder gives them."""
    source = study.open_data(data)
    rows = study.long_tail(source, 0)[2] if data == "fashion" else np.arange(len(source))
    wanted = {(method.side, view): None for method in METHODS.values() for view in parse_views(method.views)}
    for side, view in wanted:
        path = file_of(folder, data, side, view)
        if path.exists():
            continue
        model, card = shared.frozen_model(EVERYTHING, "embedded", side)
        engine, begin = Engine(model, card.shape), time.process_time()
        batches = StreamedInputs(source.images, side, 3, 1).batches(rows[i : i + 64] for i in range(0, len(rows), 64))
        x = np.concatenate([engine.encode(look(batch, view)) for _, batch in batches])
        groups = np.arange(len(source)).astype(str) if source.groups is None else source.groups
        np.savez(path, x=x, labels=source.labels[rows], groups=groups[rows], rows=rows)
        print(f"{path}: {len(rows):,} images, {time.process_time() - begin:.0f} s of one core", flush=True)


def file_of(folder: Path, data: str, side: int, view: str) -> Path:
    """Return the file of the features of one view."""
    return folder / f"{data}-{ENCODER}-{side}-{view}.npz"


class Features:
    """The features of a data set, for each method."""

    def __init__(self, data: str, folder: Path) -> None:
        self._data, self._folder = data, folder
        paths = (file_of(folder, data, method.side, "identity") for method in METHODS.values())
        first = np.load(next(path for path in paths if path.exists()))
        self.labels, self.groups, self.rows = first["labels"], first["groups"], first["rows"]
        self._layout = layout_of(EVERYTHING)

    def of(self, method: Method) -> tuple[Floats, Layout]:
        """Return the features as a regression gets them, and what their columns are."""
        files = [file_of(self._folder, self._data, method.side, view) for view in parse_views(method.views)]
        x = np.mean([np.load(path)["x"] for path in files], axis=0, dtype=np.float32)
        spec = EncoderSpec.parse(method.encoder, "embedded")
        blocks = {block.name: block for block in (self._layout.groups[0].block, *spec.blocks)}
        places = np.split(np.arange(x.shape[1]), np.cumsum([group.width for group in self._layout.groups])[:-1])
        taken = [pair for pair in zip(self._layout.groups, places, strict=True) if pair[0].block.name in blocks]
        layout = Layout(tuple(Columns(blocks[group.block.name], group.width) for group, _ in taken))
        columns = torch.from_numpy(x[:, np.concatenate([place for _, place in taken])])
        return layout.scaled(columns, method.scaling).numpy(), layout


def layout_of(encoder: str) -> Layout:
    """Return the columns of an embedded encoder with blocks."""
    known = embedded_state(EncoderSpec.parse(encoder, "embedded"))
    assert known is not None
    return known[1]


def run_cell(data: str, cell: str, seed: int, method: str, found: Features) -> dict[str, Any]:
    """Return the metrics of a method on one repeat."""
    x, layout = found.of(METHODS[method])
    weights, parts = layout.importance(), layout.kinds()
    folds, grouped = study.pairs(data, cell, seed, found)
    scores, plain, begin = [], [], time.process_time()
    for train, rest in folds:
        labels = found.labels[train].astype(np.int64)
        num, groups = int(labels.max()) + 1, found.groups[train] if grouped else None
        rows = {"groups": groups, "seed": seed, "importance": weights}
        if method.endswith((BEFORE, ALONE)):
            fitted = fit_regression(x[train], labels, num, **rows)
        else:
            fitted = fit_averaged(x[train], labels, num, parts=parts, **rows)
        plain.append(x[rest] @ fitted.weight.T + fitted.bias)
        scores.append(plain[-1] - np.log(np.bincount(labels, minlength=num) / len(labels)))
    tested = np.concatenate([found.labels[rest] for _, rest in folds])
    seconds = round((time.process_time() - begin) / len(folds), 2)
    metrics = shared.figures(np.concatenate(scores), tested, np.concatenate(plain))
    metrics |= calibration(np.concatenate(plain), tested, np.concatenate(scores))
    return {"encoder": METHODS[method].encoder, "side": METHODS[method].side, **metrics, "seconds": seconds}


def calibration(logits: Floats, labels: Floats, balanced: Floats) -> dict[str, float]:
    """Return log loss and Brier score of the logits, and the log loss with classes that count alike."""
    logs, rows = log_softmax(logits, axis=1), np.arange(len(labels))
    brier = np.square(np.exp(logs) - np.eye(logs.shape[1])[labels]).sum(axis=1).mean()
    found = {"log_loss": -logs[rows, labels].mean(), "brier": brier, "fair_loss": balanced_log_loss(balanced, labels)}
    return {name: round(float(value), 4) for name, value in found.items()}


def summary() -> str:
    """Return a row for each setting and recipe, with the differences to the same recipe before it had stages."""
    rows = []
    before = shared.nested(shared.read(study.RECORD), ("data", "cell"), "method", "seed")
    settings = shared.nested(shared.read(RECORD), ("data", "cell"), "method", "seed")
    for key, methods in sorted(settings.items(), key=study.place):
        for method in (name for name in RECIPES if name in methods):
            base = before[key][method] | methods.get(f"{method}{BEFORE}", {})
            for which, fresh in (("of the choice", False), ("fresh", True)):
                runs = {seed: line for seed, line in methods[method].items() if (seed >= FRESH) == fresh}
                if runs:
                    rows.append((*key, method, f"{len(runs)} {which}", *shared.compared(runs, base, "uwa", "auroc")))
    head = "data | setting | recipe | repeats | balanced accuracy | minus before | AUROC | minus before"
    return shared.table(head, rows)


def heads() -> str:
    """Return a row for each setting and recipe: differences to the classifier before, and losses beside one alone."""
    rows = []
    settings = shared.nested(shared.read(RECORD), ("data", "cell"), "method", "seed")
    for key, methods in sorted(settings.items(), key=study.place):
        for method in (name for name in RECIPES if name in methods):
            alone, before = methods.get(f"{method}{ALONE}", {}), methods.get(f"{method}{REGISTERED}", {})
            for which, fresh in (("of the choice", False), ("fresh", True)):
                own = {seed: line for seed, line in methods[method].items() if (seed >= FRESH) == fresh}
                if own:
                    both = [(line, alone[seed]) for seed, line in own.items() if seed in alone]
                    cells = (*shared.compared(own, before, "uwa", "auroc"), *(beside(both, loss) for loss in LOSSES))
                    rows.append((*key, method, f"{len(own)} {which}", *cells))
    head = "data | setting | recipe | repeats | balanced accuracy | minus registered | AUROC | minus registered"
    return shared.table(f"{head} | log loss, one alone | Brier score, one alone | fair log loss, one alone", rows)


def beside(pairs: list[tuple[dict[str, float], dict[str, float]]], name: str) -> str:
    """Return the means of a metric over the first and the second lines of pairs."""
    return " / ".join(f"{np.mean([pair[i][name] for pair in pairs]):.3f}" for i in (0, 1)) if pairs else ""


def views() -> str:
    """Return a row for each setting: ``thorough`` and its differences to ``quick``, paired by repeat."""
    settings = shared.nested(shared.read(RECORD), ("data", "cell"), "method", "seed")
    rows = []
    for key, methods in sorted(settings.items(), key=study.place):
        quick = methods.get("quick", {})
        both = {seed: line for seed, line in methods.get("thorough", {}).items() if seed in quick}
        if both:
            rows.append((*key, len(both), *shared.compared(both, quick, "uwa", "auroc")))
    head = "data | setting | repeats | balanced accuracy of thorough | minus quick | AUROC | minus quick"
    return shared.table(head, rows)


def trials() -> str:
    """Return a row for each trial of a classifier: balanced accuracy and AUROC in each setting, and the repeats.

    L is a logistic regression, R a ridge regression with classes that count alike, whose strength is chosen by the
    squared error (stage 1: by the log loss after Platt scaling), Q one by the log loss, P one with images that count
    alike; ``all`` is on all features, ``parts`` on each kind of them. In stage 2 the path of strengths ends where it
    ends in the worst inner fold, in stage 3 with all folds together. In stage 5, R has the strength with the highest
    mean AUROC on the test images, and its balanced accuracy is that of the best threshold on them: no recipe can know
    either. In stage 6, ``distance`` is the distance from the frequent class by the last two stages, calibrated like a
    regression; the mean of regressions counts 8.
    """
    lines = shared.read(TRIALS)
    settings = list(dict.fromkeys((line["data"], line["cell"]) for line in lines))
    rows = []
    for key in dict.fromkeys((line["stage"], line["features"], line["head"]) for line in lines):
        own = [line for line in lines if (line["stage"], line["features"], line["head"]) == key]
        cells = []
        for setting in settings:
            runs = [line for line in own if (line["data"], line["cell"]) == setting]
            means = [f"{np.mean([run[name] for run in runs]):.1f}" for name in ("uwa", "auroc")] if runs else []
            cells.append(f"{' / '.join(means)} ({len(runs)})" if runs else "")
        rows.append((*key, *cells))
    return shared.table(" | ".join(["stage", "features", "head", *(" ".join(each) for each in settings)]), rows)


TABLES = {"summary": summary, "heads": heads, "views": views, "trials": trials}


def main() -> None:
    """Compute features or the missing lines of the record, or print its table."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["features", "run", *TABLES])
    parser.add_argument("data", choices=["tops", "fashion", "isic", "few"], nargs="?")
    parser.add_argument("--features", type=Path, default=Path(), help="the folder with the features")
    parser.add_argument("--seeds", help="such as 0-11")
    parser.add_argument("--methods", help="separated by semicolons; default: all")
    parser.add_argument("--only", help="one setting, such as 98:2")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what in TABLES:
        print(TABLES[given.what]())
        return
    if given.data is None:
        parser.error("DATA is missing")
    images = "isic" if given.data == "few" else given.data
    if given.what == "features":
        compute_features(images, given.features)
        return
    found = Features(images, given.features)
    settings = {"tops": study.SCENARIOS[1:], "few": ("10 rare",)}.get(given.data) or study.cells_of(given.data)
    wanted = (
        {"data": given.data, "cell": cell, "seed": seed, "method": method}
        for seed in shared.seeds_of(given.seeds or ("0-11" if given.data == "tops" else "0-2"))
        for cell in settings
        if given.only in (None, cell)
        for method in (given.methods.split(";") if given.methods else METHODS)
    )
    shared.compute_missing(RECORD, wanted, lambda cell: run_cell(**cell, found=found))


if __name__ == "__main__":
    main()
