"""How good is a fine-tuned encoder, against the frozen features of the recipe ``default`` on the same images?

    python benchmarks/fine_tune.py tops                     # Fashion-MNIST tops at 98:2 and 90:10
    python benchmarks/fine_tune.py isic                     # melanoma against dermatofibroma, $LOPSIDED_DATA
    python benchmarks/fine_tune.py tune                     # the candidates, on other seeds
    python benchmarks/fine_tune.py summary                  # the tables of the records, without computing anything

``tops`` trains on 700 of 1,000 images that the scenario draws, and evaluates on held-out images that the run has not
drawn, with the same number per class. ``isic`` trains on four of five folds by lesion and evaluates on the fifth one;
the folds are those of ``StratifiedGroupKFold`` with the seed of the line. ``tune`` compares settings of the fine-tuning
on seeds from 100 on, which no other line uses. It evaluates every fourth held-out image, and computes the activations
of the frozen blocks once for all arms, so that its minutes are too few.

Each line of the record is one run. A line that exists is not computed again, and ``--minutes`` stops after a run that
ends later than this. ``uwa`` is that of the rule ``balanced``. ``minutes`` are those of the whole fit on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold

from lopsided import files
from lopsided.data.prepare import open_sources
from lopsided.data.sources import Source, open_source
from lopsided.recipe import Recipe, named_recipe
from lopsided.training.fine_tune import Activations
from lopsided.training.fit import Predictions, fit

RECORD = Path(__file__).parents[1] / "docs" / "records" / "fine_tune.jsonl"
SCENARIOS = ("98:2", "90:10")
FOLDS = 5
START: dict[str, Any] = {
    "encoder_training.loss": "ce",
    "encoder_training.batch_size": 32,
    "encoder_training.lr": 1e-3,
    "encoder_training.optimizer": "adamw",
    "encoder_training.weight_decay": 0.01,
    "encoder_training.sampler": "plain",
    "fine_tune.blocks": 5,
    "fine_tune.views": 4,
    "fine_tune.layer_decay": 0.8,
    "fine_tune.warmup": 0.1,
    "fine_tune.batch_norm": "frozen",
    "fine_tune.average": 0.99,
    "fine_tune.steps": 200,
}
"""The settings from which the choice of the recipe ``fine-tune`` started."""
CANDIDATES: dict[str, dict[str, Any]] = {
    "default": {},
    "fine-tune": {},
    "lr 1e-4": START | {"encoder_training.lr": 1e-4},
    "lr 1e-5": START | {"encoder_training.lr": 1e-5},
    "start (lr 1e-3)": START,
    "cl, lr 1e-4": START | {"encoder_training.loss": "cl", "encoder_training.lr": 1e-4},
    "balanced, lr 1e-4": START | {"encoder_training.sampler": "balanced", "encoder_training.lr": 1e-4},
    "weighted-ce, lr 1e-4": START | {"encoder_training.loss": "weighted-ce", "encoder_training.lr": 1e-4},
    "batch norm trained, lr 1e-4": START | {"fine_tune.batch_norm": "train", "encoder_training.lr": 1e-4},
    "no average, lr 1e-4": START | {"fine_tune.average": 0.0, "encoder_training.lr": 1e-4},
    "10 blocks, lr 1e-4": START | {"fine_tune.blocks": 10, "encoder_training.lr": 1e-4},
}
"""Changes of the recipe ``fine-tune`` by name. ``default`` is the recipe ``default``."""


def recipe_of(arm: str, changes: dict[str, Any]) -> Recipe:
    """Return the recipe of an arm with further changes."""
    base = named_recipe("default" if arm == "default" else "fine-tune")
    return base.override(**CANDIDATES[arm]).override(**{"threads": 1, **changes})


def judged(found: Predictions) -> dict[str, float]:
    """Return UWA by the rule of the model, and the AUROC, in percent."""
    assert found.y_true is not None
    uwa = balanced_accuracy_score(found.y_true, found.y_pred)
    auroc = roc_auc_score(found.y_true, found.probabilities[:, 1])
    return {"uwa": round(100 * uwa, 2), "auroc": round(100 * auroc, 2)}


@contextmanager
def shared_activations(memory: dict[tuple[Any, ...], Any], run: tuple[Any, ...]) -> Iterator[None]:
    """Compute the activations of a run once for all arms with the same views and the same frozen blocks."""
    compute = Activations.compute

    def once(self: Activations, inputs: Any, count: Any, **more: Any) -> Any:
        key = (run, self.cut.shape, len(self.cut.frozen), len(inputs), more.get("views", 1))
        if key not in memory:
            memory[key] = compute(self, inputs, count, **more)
        return memory[key]

    Activations.compute = once  # type: ignore[method-assign]
    try:
        yield
    finally:
        Activations.compute = compute  # type: ignore[method-assign]


def timed(recipe: Recipe, source: Source, held_out: Source) -> dict[str, Any]:
    """Fit a recipe on a source and return the figures of the held-out images."""
    begin = time.perf_counter()
    fitted = fit(recipe, source, held_out=held_out)
    minutes = (time.perf_counter() - begin) / 60
    assert fitted.held_out is not None
    sizes = {"train": len(fitted.splits.train), "images": len(held_out)}
    return {**sizes, **judged(fitted.held_out), "minutes": round(minutes, 2)}


def tops(arm: str, scenario: str, seed: int, part: int = 1) -> dict[str, Any]:
    """Run an arm on one draw of the tops, and evaluate every image whose number ``part`` divides."""
    recipe = recipe_of(
        arm,
        {
            "seed": seed,
            "data.source": "fashion-mnist-tops",
            "data.scenario": f"{scenario},total=1000",
            "data.split": "stratified",
            "data.test": 0.3,
            "data.held_out": True,
        },
    )
    source, held_out = open_sources(recipe)
    assert held_out is not None
    return timed(recipe, source, held_out.subset(np.arange(0, len(held_out), part)))


def isic(arm: str, fold: int, seed: int) -> dict[str, Any]:
    """Run an arm on four of five folds by lesion and evaluate it on the remaining fold."""
    source = open_source("isic2018", classes=["MEL", "DF"])
    assert source.groups is not None
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    train, rest = list(folds.split(np.zeros(len(source)), source.labels, source.groups))[fold]
    recipe = recipe_of(arm, {"seed": seed, "data.test": 0.0})
    return timed(recipe, source.subset(train), source.subset(rest))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the record."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cells(what: str, arms: list[str], number: int) -> list[dict[str, Any]]:
    """Return the lines to compute, all arms of a seed before the next seed."""
    if what == "isic":
        runs = [{"data": "isic", "scenario": f"fold {fold + 1}", "seed": 0} for fold in range(number)]
    else:
        first = 100 if what == "tune" else 0
        runs = [
            {"data": "tops", "scenario": scenario, "seed": seed}
            for seed in range(first, first + number)
            for scenario in SCENARIOS
        ]
    return [{**run, "arm": arm} for run in runs for arm in arms]


def summary(path: Path) -> str:
    """Return the means of the arms with 95 % intervals over the runs, and of the difference to the default."""
    lines = read(path)
    tables = []
    for chosen in (False, True):
        rows = ["| data | arm | runs | UWA | AUROC | UWA minus default | minutes |", "|---" * 7 + "|"]
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in lines:
            if (line["seed"] >= 100) == chosen:
                data = line["data"] if line["data"] == "isic" else f"{line['data']} {line['scenario']}"
                groups.setdefault((data, line["arm"]), []).append(line)
        for (data, arm), found in sorted(groups.items(), key=lambda item: (item[0][0], _place(item[0][1]))):
            base = {_run(line): line["uwa"] for line in lines if line["arm"] == "default"}
            gains = [line["uwa"] - base[_run(line)] for line in found if _run(line) in base and arm != "default"]
            figures = [_interval([line[name] for line in found]) for name in ("uwa", "auroc")]
            minutes = statistics.median(line["minutes"] for line in found)
            shown = (data, arm, str(len(found)), *figures, _interval(gains, sign=True), f"{minutes:.1f}")
            rows.append(f"| {' | '.join(shown)} |")
        if groups:
            tables.append("\n".join(rows))
    return "\n\n".join(tables)


def _place(arm: str) -> int:
    return list(CANDIDATES).index(arm)


def _run(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["data"], line["scenario"], line["seed"]


def _interval(values: list[float], *, sign: bool = False) -> str:
    if not values:
        return ""
    mean = f"{statistics.mean(values):{'+' if sign else ''}.1f}"
    if len(values) < 2:
        return mean
    from scipy.stats import t

    return f"{mean} ± {t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5:.1f}"


def main() -> None:
    """Compute the missing lines of the record and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tops", "isic", "tune", "summary"])
    parser.add_argument("--number", type=int, default=None, help="seeds, or folds of isic")
    parser.add_argument("--arms", default=None, help="names of CANDIDATES, separated by semicolons")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    usual = ["default", "fine-tune"]
    if arguments.what == "tune":
        usual = [arm for arm in CANDIDATES if arm != "fine-tune"]
    arms = arguments.arms.split(";") if arguments.arms else usual
    number = arguments.number or {"tops": 6, "isic": FOLDS, "tune": 3, "summary": 0}[arguments.what]
    done = [{name: line[name] for name in ("data", "scenario", "seed", "arm")} for line in read(arguments.record)]
    begin = time.perf_counter()
    memory: dict[tuple[Any, ...], Any] = {}
    for cell in cells(arguments.what, arms, number) if number else []:
        if cell in done or time.perf_counter() - begin > 60 * arguments.minutes:
            continue
        if cell["data"] == "isic":
            found = isic(cell["arm"], int(cell["scenario"].split()[1]) - 1, cell["seed"])
        elif arguments.what == "tune":
            with shared_activations(memory, (cell["scenario"], cell["seed"])):
                found = tops(cell["arm"], cell["scenario"], cell["seed"], part=4)
        else:
            found = tops(cell["arm"], cell["scenario"], cell["seed"])
        files.append_line(arguments.record, json.dumps({**cell, **found}))
        print(json.dumps({**cell, **found}), flush=True)
    print(summary(arguments.record))


if __name__ == "__main__":
    main()
