"""Leave one source out: how a model does on images of a camera or clinic that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lopsided.data.sources.listing import TABLE_SUFFIXES, Inside, read_columns
from lopsided.errors import InputError
from lopsided.evaluation.calibration import at_prevalence
from lopsided.evaluation.decision import resolve
from lopsided.evaluation.metrics import evaluate
from lopsided.facts import Fact, cautions, notes

if TYPE_CHECKING:
    from lopsided.data.sources import Source
    from lopsided.recipe import Recipe

WORSE = 0.05
"""If AUROC or balanced accuracy of a source are lower by this than those of folds, and the upper end of the interval is
lower too, the model depends on the source."""


def check_origin(recipe: Recipe) -> None:
    """Raise if a recipe cannot use the column of sources that it names."""
    if not recipe.spec.shares_features or recipe.data.folds is None:
        must = "--source compares models that were trained without a source"
        raise InputError(f"{must}, which needs a frozen encoder and folds. Use --recipe quick --folds 5.")
    if Path(recipe.data.source or "").suffix.lower() not in TABLE_SUFFIXES:
        raise InputError(f"--source names a column of a table, but {recipe.data.source} is none.")


def read_origins(recipe: Recipe, source: Source) -> npt.NDArray[np.str_]:
    """Return the source of each image, from its column of the table."""
    table, column = Path(recipe.data.source or ""), recipe.data.origin or ""
    columns = read_columns(table, {"path", column})
    if column not in columns:
        raise InputError(f"--source must be a column of {table}, got {column!r}; there are {', '.join(columns)}.")
    inside = Inside(table, recipe.data.allow_outside)
    names = (inside.check(line, text) for line, text in enumerate(columns["path"], start=2))
    places = dict(zip(names, columns[column], strict=True))
    return np.array([places.get(name) or "unknown" for name in source.names], dtype=np.str_)


def leave_out_sources(
    recipe: Recipe,
    source: Source,
    features: npt.NDArray[np.float32],
    prior: tuple[float, ...],
    importance: npt.NDArray[np.float64] | None,
    strength: float | None,
    by_folds: Mapping[str, float],
) -> list[Fact]:
    """Train without each source and test on it. Return what there is to say.

    ``by_folds`` are AUROC (auroc) and balanced accuracy (uwa) of folds.
    """
    from scipy.special import softmax

    from lopsided.training.regression import fit_regression

    origins, num_classes = read_origins(recipe, source), len(source.classes)
    rows, worse = [], []
    for name in np.unique(origins):
        here, others = origins == name, np.flatnonzero(origins != name)
        counts = np.bincount(source.labels[here], minlength=num_classes)
        trained = np.bincount(source.labels[others], minlength=num_classes)
        if not trained.all() or not counts.all():
            rows.append({"source": str(name), "counts": counts.tolist(), "auroc": None, "uwa": None})
            continue
        groups = None if source.groups is None else source.groups[others]
        fitted = fit_regression(
            features[others], source.labels[others], num_classes, groups=groups, strength=strength,
            seed=recipe.seed, importance=importance,
        )  # fmt: skip
        logits = features[here].astype(np.float64) @ fitted.weight.T + fitted.bias
        p = at_prevalence(softmax(logits, axis=1), (trained / trained.sum()).tolist(), prior)
        decided = resolve("balanced", source.classes, prior).decide(p)
        found = evaluate(source.labels[here], p, decided, classes=source.classes, seed=recipe.seed, bootstrap=100)
        figures = found.figures
        rows.append(
            {
                "source": str(name),
                "counts": counts.tolist(),
                "auroc": round(figures["auroc"].value, 4),
                "uwa": round(figures["uwa"].value, 4),
            }
        )
        for metric, words in (("auroc", "an AUROC"), ("uwa", "a balanced accuracy")):
            figure, usual = figures[metric], by_folds[metric]
            if figure.value < usual - WORSE and figure.high < usual:
                said = cautions.worse_source(str(name), round(figure.value, 4), round(usual, 4), words)
                worse.append((figure.value - usual, said))
    told = {metric: round(value, 4) for metric, value in by_folds.items()}
    column, classes = recipe.data.origin or "", list(source.classes)
    facts = [notes.left_out_sources(column, classes, rows, told["auroc"], told["uwa"])]
    return facts + [fact for _, fact in sorted(worse, key=lambda pair: pair[0])[:1]]
