"""What the studies share: records, tables with 95 % intervals, the figures of scores, and the data that several use."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lopsided import files
from lopsided.evaluation.intervals import Estimate, mean_interval

if TYPE_CHECKING:
    from lopsided.data.sources import Source
    from lopsided.models.model import Model, ModelCard

RECORDS = Path(__file__).parent / "records"
Floats = np.ndarray
Line = dict[str, Any]
Runs = Mapping[Any, Mapping[str, Any]]
"""Lines of a record by their seed, or by their fold."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the text at the top of a script."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


# --- Records ---


def read(path: Path) -> list[Line]:
    """Return the lines of a record."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add(path: Path, line: Line) -> None:
    """Append a line to a record, and print it."""
    files.append_line(path, json.dumps(line))
    print(json.dumps(line), flush=True)


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Replace the lines of a record."""
    files.atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_json(path: Path) -> Any:
    """Return a record of one object; an empty one if there is no file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: Path, content: Any) -> None:
    """Replace a record of one object."""
    files.atomic_write(path, json.dumps(content, indent=1) + "\n")


def compute_missing(path: Path, cells: Iterable[Line], compute: Callable[[Line], Line]) -> None:
    """Append a line for each cell that the record does not hold yet."""
    for cell in cells:
        if not any(cell.items() <= line.items() for line in read(path)):
            add(path, {**cell, **compute(cell)})


def nested(lines: Iterable[Line], *keys: str | tuple[str, ...]) -> dict[Any, Any]:
    """Return lines in dictionaries of dictionaries, by one key after the other. The last key names one line."""
    found: dict[Any, Any] = {}
    for line in lines:
        inner = found
        *outer, last = (line[key] if isinstance(key, str) else tuple(line[name] for name in key) for key in keys)
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = line
    return found


def finished_cells(folder: Path) -> Iterator[tuple[Line, list[dict[str, str]]]]:
    """Yield the record of each run of a comparison whose predictions are there, and those of its test images."""
    for record in read(folder / "records.jsonl"):
        path = folder / "cells" / record["cell"] / "predictions.csv"
        if path.exists():
            with path.open(encoding="utf-8", newline="") as table:
                yield record, [row for row in csv.DictReader(table) if row["split"] == "test"]


# --- Tables ---


DATA = {"tops": "T-shirts", "isic": "skin lesions", "few": "skin lesions", "fashion": "ten classes"}
"""What tables call the data of the records."""


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table of Markdown. ``head`` has the names of the columns with bars between them."""
    names = head.split(" | ")
    lines = (
        [_titled(cell) if name == "data" else str(cell) for name, cell in zip(names, row, strict=True)] for row in rows
    )
    first, *others = (f"| {line} |" for line in (head, *map(" | ".join, lines)))
    return "\n".join([first, "|---" * (head.count("|") + 1) + "|", *others])


def _titled(data: object) -> str:
    """Return the title of data, and their setting if there is one."""
    name, *setting = str(data).split(" ", 1)
    return " ".join([DATA.get(name, name), *setting])


def shown(figure: Estimate, *, sign: bool = False, digits: int = 1) -> str:
    """Return a mean and half the width of its interval, if it has one."""
    mean = f"{figure.value:{'+' if sign else ''}.{digits}f}"
    return mean if np.isnan(figure.low) else f"{mean} ± {(figure.high - figure.low) / 2:.{digits}f}"


def mean_of(runs: Runs | Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the mean of a figure."""
    lines = runs.values() if isinstance(runs, Mapping) else runs
    return f"{statistics.mean(line[name] for line in lines):.1f}"


def minus(runs: Runs, base: Runs, name: str, *, digits: int = 1, overlap: float = 0.0) -> str:
    """Return the mean difference of a figure to that of ``base``, over what both have; nothing for the base itself."""
    gains = [run[name] - base[key][name] for key, run in runs.items() if key in base and runs is not base]
    if not gains:
        return ""
    same = -1.0 if len(gains) > 1 else 0.0  # Differences that are all equal are shown with a width of 0.
    return shown(mean_interval(gains, same=same, overlap=overlap), sign=True, digits=digits)


def compared(runs: Runs, base: Runs, *names: str, overlap: float = 0.0) -> list[str]:
    """Return the mean of each figure and its difference to ``base``; of ``plain`` the mean alone."""
    cells = []
    for name in names:
        cells.append(mean_of(runs, name))
        if name != "plain":
            cells.append(minus(runs, base, name, overlap=overlap))
    return cells


# --- Figures of scores ---


def figures(balanced: Floats, labels: Floats, plain: Floats | None = None) -> dict[str, float]:
    """Return balanced accuracy (``uwa``) and AUROC in percent, without the prior; with ``plain``, also by these scores.

    The AUROC of several classes is that of each class against the others, by ``plain``.
    """
    from scipy.special import softmax
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    found = {"uwa": balanced_accuracy_score(labels, balanced.argmax(axis=1))}
    if plain is not None:
        found["plain"] = balanced_accuracy_score(labels, plain.argmax(axis=1))
    if balanced.shape[1] == 2:
        found["auroc"] = roc_auc_score(labels, balanced[:, 1] - balanced[:, 0])
    else:
        found["auroc"] = roc_auc_score(labels, softmax(plain, axis=1), multi_class="ovr")
    return {name: round(100 * float(value), 2) for name, value in found.items()}


def rank_auroc(scores: Floats, positive: Floats) -> float:
    """Return the AUROC by ranks, which is fast enough for simulations."""
    from scipy.stats import rankdata

    size = positive.sum()
    return float((rankdata(scores)[positive].sum() - size * (size + 1) / 2) / (size * (len(scores) - size)))


# --- Data ---

TOPS = ("T-shirt/top", "Shirt")
LESIONS = ["MEL", "DF"]


def tops_fields(scenario: str, seed: int) -> dict[str, Any]:
    """Return the fields of a recipe for one draw of the tops: 700 of 1,000 images train, held-out ones are judged."""
    return {
        "seed": seed,
        "data.source": "fashion-mnist-tops",
        "data.scenario": f"{scenario},total=1000",
        "data.split": "stratified",
        "data.test": 0.3,
        "data.held_out": True,
    }


def draw_tops(labels: Floats, scenario: str, seed: int) -> tuple[Floats, Floats]:
    """Return the rows of the tops that a recipe with ``tops_fields`` trains on, and those that it is judged by."""
    from lopsided.data.images import ArrayImages
    from lopsided.data.scenarios import draw, draw_held_out, parse_scenario
    from lopsided.data.sources import Source
    from lopsided.data.splits import split

    drawn = draw(labels, TOPS, parse_scenario(f"{scenario},total=1000"), seed)
    blank = ArrayImages(np.zeros((len(drawn), 1, 1, 1), dtype=np.uint8))
    source = Source("tops", blank, labels[drawn], TOPS, tuple(map(str, range(len(drawn)))))
    train = drawn[split(source, how="stratified", val=0.0, test=0.3, seed=seed).train]
    return train, draw_held_out(labels, TOPS, drawn, seed, None)


def folds_by_lesion(labels: Floats, groups: Floats, seed: int) -> list[tuple[Floats, Floats]]:
    """Return the rows to train on and to judge by, for each of five folds by lesion."""
    from sklearn.model_selection import StratifiedGroupKFold

    return list(StratifiedGroupKFold(5, shuffle=True, random_state=seed).split(labels, labels, groups))


def seeds_of(text: str) -> range:
    """Return the seeds of a text such as 0-11."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def frozen_model(
    encoder: str, weights: str, size: int | None = None, classes: Sequence[str] = TOPS, **card: Any
) -> tuple[Model, ModelCard]:
    """Return a model with a pretrained encoder, whose classifier is never used, and its card."""
    from lopsided.models.encoders import build_encoder
    from lopsided.models.heads import ClassifierHead
    from lopsided.models.model import Model, ModelCard
    from lopsided.models.pretrained import preprocessing_of

    pixels = preprocessing_of(encoder, weights)
    size = size or pixels.image_size
    network, width = build_encoder(encoder, channels=3, image_size=size, weights=weights)
    facts = ModelCard(
        kind="image", encoder=encoder, channels=3, image_size=size, shape=(3, size, size), mean=pixels.mean,
        std=pixels.std, classes=tuple(classes), features=width, prior=(1 / len(classes),) * len(classes), **card,
    )  # fmt: skip
    model = Model(
        network, ClassifierHead(width, len(classes)), pixels.mean, pixels.std, views=facts.views,
        scaling=facts.scaling,
    )  # fmt: skip
    return model.eval(), facts


def importance(encoder: str, width: int) -> Floats | None:
    """Return how much a regression weighs each of the features of an encoder; None: all the same."""
    from lopsided.models.blocks.block import Columns, Layout
    from lopsided.models.encoders import embedded_state
    from lopsided.recipe.blocks import FINAL
    from lopsided.recipe.encoder_spec import EncoderSpec

    known = embedded_state(EncoderSpec.parse(encoder, "embedded"))
    if known is not None:
        return known[1].importance()
    groups = [Columns(block, one) for block in EncoderSpec.parse(encoder).blocks for one in block.load()().widths]
    return Layout((Columns(FINAL, width - sum(group.width for group in groups)), *groups)).importance()


def features_of(source: Source, model: Model, card: ModelCard, *, cached: bool = True) -> Floats:
    """Return the features of all images, as the classifier of the model gets them."""
    from lopsided.data.inputs import StreamedInputs
    from lopsided.inference.scorer import Scorer

    scorer = Scorer(model, card)
    digests = source.images.digest(np.arange(len(source))) if cached else None
    features = scorer.features(StreamedInputs(source.images, card.image_size, 3, 2), digests)
    return np.asarray(scorer.engine.scale(features))
