"""The demo: compare three losses and the recipe ``quick`` on the included images at 90:10, within minutes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided import files
from lopsided.errors import RunError
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.folder import Run
from lopsided.runs.run import run_recipe

if TYPE_CHECKING:
    from lopsided.facts.log import Reporter

LOSSES = ("ce", "cl", "afcl")
QUICK = "quick"
SMALL = {
    "data.source": "fashion-mnist-tops",
    "data.scenario": "90:10,total=1000",
    "data.split": "stratified",
    "data.test": 0.3,
    "encoder_training.epochs": 15,
    "classifier.epochs": 5,
    "compare_quick": False,
}
"""What makes ``from-scratch`` take minutes on a laptop."""
SUMMARY = "summary.json"


def demo_recipes(seed: int = 0) -> dict[str, Recipe]:
    """Return the recipe of each row: from scratch with CE, CL and AFCL and equal epochs, and ``quick``.

    All of them use the same images for training and test.
    """
    base = Recipe().override(seed=seed, **SMALL)
    recipes = {loss: base.override(**{"encoder_training.loss": loss}) for loss in LOSSES}
    data = {f"data.{name}": value for name, value in base.data.model_dump().items()}
    return {**recipes, QUICK: named_recipe(QUICK).override(seed=seed, **data)}


def run_demo(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    reporter: Callable[[str], Reporter | None] = lambda loss: None,
) -> dict[str, Run]:
    """Train one run per recipe in a sub-folder of ``out``. Finished runs are reused.

    ``reporter`` returns the reporter for the run of a recipe. ``summary.json`` is written at the end.
    """
    runs = {
        loss: run_recipe(recipe, Path(out) / loss, resume=True, reporter=reporter(loss))
        for loss, recipe in demo_recipes(seed).items()
    }
    files.atomic_write(Path(out) / SUMMARY, json.dumps(summarise(runs), indent=2, allow_nan=False) + "\n")
    return runs


def summarise(runs: dict[str, Run]) -> dict[str, Any]:
    """Return the test figures of each run and of the majority vote."""
    rows = []
    majority: dict[str, Any] = {}
    for loss, run in runs.items():
        metrics = run.metrics or {}
        if not metrics.get("test"):  # The folder may hold any finished run.
            raise RunError(f"{run.folder} is not a run of the demo: it has no test metrics. Choose another folder.")
        figures = metrics["test"]["figures"]
        majority = metrics["test"]["majority"]
        rows.append(
            {
                "loss": loss,
                "run": str(run.folder),
                "uwa": figures["uwa"],
                "accuracy": figures["accuracy"],
                "seconds": metrics["seconds"],
            }
        )
    counts = (next(iter(runs.values())).metrics or {})["counts"]
    return {"counts": counts, "majority": majority, "runs": rows}
