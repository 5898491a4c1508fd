"""The recipe ``quick`` on the images of another run, so that its figures stand beside those of the model.

It trains on the training images of the run and classifies the run's validation and test images. Its features are
cached, so only the first run on these images computes them. The number of images is bounded, and the random numbers
are its own, so it does not change the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lopsided.data.inputs import prepare
from lopsided.data.sources import Source
from lopsided.data.splits import Splits
from lopsided.errors import LopsidedError
from lopsided.evaluation.calibration import prior_of
from lopsided.evaluation.decision import resolve
from lopsided.evaluation.metrics import evaluate
from lopsided.facts import notes
from lopsided.models.pretrained import preprocessing_of
from lopsided.recipe import Recipe, named_recipe
from lopsided.seeds import derive_seed
from lopsided.training.baseline import Compared, sample
from lopsided.training.checkpoint import Checkpoint, State
from lopsided.training.methods import make_trainer
from lopsided.training.reporter import Log, Reporter

Indices = npt.NDArray[np.int64]

MOST_TRAIN, MOST_EVALUATED = 10_000, 2_000
"""Maximum numbers of training images and of evaluated images of a split. Larger splits are sampled by class."""
LEAST_TRAIN, LEAST_EVALUATED = 100, 30
"""With fewer images, the figure would be noise."""


@dataclass(frozen=True, eq=False)
class Answers:
    """The classifications of one split. ``rows`` are the places of the classified images in the split."""

    rows: Indices
    labels: Indices
    probabilities: npt.NDArray[np.float64]
    predicted: Indices


def is_quick(recipe: Recipe) -> bool:
    """Return whether a recipe computes the same as ``quick`` on the same training images."""
    base = named_recipe("quick")
    return (
        recipe.method == base.method
        and recipe.encoder == base.encoder
        and recipe.regression == base.regression
        and recipe.classifier.loss == base.classifier.loss
        and recipe.data.image_size is None
    )


def figures_of(
    answers: Answers, compared: Compared, classes: Sequence[str], groups: npt.NDArray[np.str_] | None, seed: int
) -> dict[str, Any]:
    """Return the figures of the recipe ``quick`` on one split, as in ``metrics.json``."""
    figures = evaluate(
        answers.labels, answers.probabilities, answers.predicted, classes=classes, seed=seed, groups=groups
    ).to_dict()["figures"]
    difference = compared.difference
    return {
        "num_images": compared.number,
        "uwa": figures["uwa"],
        "auroc": figures.get("auroc"),
        "model_uwa": compared.model,
        "difference": {"value": difference.value, "low": difference.low, "high": difference.high},
    }


def classify_by_quick(
    recipe: Recipe,
    source: Source,
    splits: Splits,
    digests: Sequence[str],
    device: torch.device,
    log: Log,
    *,
    told: bool = True,
) -> dict[str, Answers]:
    """Fit the recipe ``quick`` on the training images. Return its classifications of the other splits.

    The result is empty if there are too few images, or if the recipe cannot be used on these images. A note gives the
    time, unless ``told`` is false.
    """
    most = {"train": MOST_TRAIN, "val": MOST_EVALUATED, "test": MOST_EVALUATED}
    few = {
        name: sample(source.labels[rows], most[name], derive_seed(recipe.seed, "default", name))
        for name, rows in splits.parts()
    }
    names = [name for name in ("val", "test") if len(few[name]) >= LEAST_EVALUATED]
    if len(few["train"]) < LEAST_TRAIN or not names:
        return {}
    begin = perf_counter()
    base = named_recipe("quick").override(seed=recipe.seed, threads=recipe.threads, fast=recipe.fast)
    none = np.empty(0, dtype=np.int64)
    parts = {name: rows[few[name]] if name in ("train", *names) else none for name, rows in splits.parts()}
    try:
        pixels = preprocessing_of(base.encoder.name, base.encoder.weights)
        prepared, _ = prepare(base, source, Splits(**parts), pixels=pixels, digests=digests)
        trainer = make_trainer(base, prepared, device, Log(None, _Counts(log)), Checkpoint(None))
        trainer.build()
        trainer.run(State("", "", base.method), {})
        decision = resolve("balanced", prepared.classes, prior_of(prepared.counts()))
        found = {}
        for name in names:
            part = prepared.val if name == "val" else prepared.test
            assert part is not None
            p = trainer.score(part)[0]
            found[name] = Answers(few[name], part.labels, p, decision.decide(p))
    except LopsidedError as error:  # A comparison must not end a run that is otherwise finished.
        log.fact(notes.quick_not_compared(str(error)))
        return {}
    if told:
        log.fact(notes.quick_compared(perf_counter() - begin, "split"))
    return found


_LABEL = "features for the recipe quick, for comparison"


class _Counts(Reporter):
    """Passes on the counts of images only: the notes of the comparison are not notes of the run."""

    def __init__(self, inner: Reporter) -> None:
        self._inner = inner

    def count(self, label: str, done: int, total: int) -> None:
        """Call the other reporter."""
        self._inner.count(_LABEL, done, total)
