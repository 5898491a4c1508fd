"""Evaluate the model of a run on labelled images, for the command and for Python."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lopsided.data.listed import Tested
from lopsided.data.sources.names import suggest_names, twins
from lopsided.errors import InputError, sentence
from lopsided.evaluation.decision import Decision
from lopsided.facts import Fact, notes
from lopsided.inference.evaluate import check_labelled, evaluate_model, list_labelled
from lopsided.recipe.views import parse_tta
from lopsided.runs.folder import named_focus
from lopsided.runs.progress import Counting
from lopsided.runs.reopen import (
    columns_of,
    open_familiarity,
    open_model,
    open_own_split,
    open_use,
    trained_digests,
    trained_on,
    use_views,
)

if TYPE_CHECKING:
    from lopsided.data.sources import Source
    from lopsided.models.model import Model, ModelCard


_ALL = Tested()


@dataclass(frozen=True)
class Evaluated:
    """The metrics of a model on labelled images, for JSON, how it decided, and warnings for the user."""

    result: dict[str, Any]
    decision: Decision
    classes: tuple[str, ...]
    focus: str | None = None
    """The class that comes first: the one that was asked for, that of the run or of its rule. None: the rarest."""
    warnings: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    """What there is to say about unfamiliar images."""


def evaluate_run(
    run: Path,
    data: str | os.PathLike[str] | None = None,
    *,
    split: str | None = None,
    listed: Tested = _ALL,
    focus: str | None = None,
    decide: str | None = None,
    prevalence: str | None = None,
    level: float | None = None,
    tta: str | None = None,
    batch_size: int = 64,
    device: str = "auto",
    quiet: bool = True,
    counting: Counting = lambda label: nullcontext(None),
) -> Evaluated:
    """Evaluate the model of a run on ``data``, or without data on a split of the run, by default test."""
    views = parse_tta(tta)
    warnings: list[str] = []
    if data is None:
        listed.check_unused()
        split = split or "test"
        source, model, card, seed = _open_own(run, split, device, counting)
    else:
        source, model, card, left_out = _open_data(run, data, split, listed, device, counting)
        seed = 0
        if left_out:
            warnings.append(f"{left_out:,} images of classes that the model does not have are left out.")
        warnings += [str(fact) for fact in twins(source.names).cautions()]
    card = use_views(model, card, views, quiet=quiet)
    if focus is not None and focus not in card.classes:
        must = f"--focus must be a class of the model: {', '.join(card.classes)}"
        raise InputError(sentence(must, repr(focus), suggest_names([focus], card.classes)))
    use = open_use(run, card, decide, prevalence)
    target = use.decision.target
    focus = focus or named_focus(run) or (None if target is None else card.classes[target])
    familiarity = open_familiarity(run, card, level=level)
    seen = 0
    if data is not None:
        trained = trained_digests(run)
        seen = sum(digest in trained for digest in source.images.digest(np.arange(len(source))))
    if data is None and split == "val":
        warnings.append("the validation split selected the model, so the metrics are too high.")
    elif seen:
        warnings.append(
            f"the model was trained on {seen:,} of these {len(source):,} images, so the metrics are too high. "
            "Use the test metrics of the run instead, or leave these images out."
        )
    elif split != "test" and (data is None or trained_on(run, data)):
        warnings.append(
            "the model was trained on images of these data, so the metrics are too high. "
            "Use the test metrics of the run instead."
        )
    own_val = data is None and split == "val"
    with counting("evaluating") as progress:
        result = evaluate_model(
            model,
            card,
            source,
            batch_size=batch_size,
            seed=seed,
            use=use,
            familiarity=familiarity,
            fitted_to=own_val,
            progress=progress,
        )
    facts = [notes.no_bank()] if familiarity is None else list(familiarity.facts(source.groups))
    return Evaluated({"run": str(run), **result}, use.decision, card.classes, focus, tuple(warnings), tuple(facts))


def _open_own(run: Path, split: str, device: str, counting: Counting) -> tuple[Source, Model, ModelCard, int]:
    """Open a model and a split of its run, and return the seed of the run, too."""
    with counting("checking images") as progress:
        source, recipe = open_own_split(run, split, progress)
    model, card = open_model(run, device, kinds=("image", "vector"))
    return source.relabel(card.classes), model, card, recipe.seed


def _open_data(
    run: Path, data: str | os.PathLike[str], split: str | None, listed: Tested, device: str, counting: Counting
) -> tuple[Source, Model, ModelCard, int]:
    """Open a model and other data, and count the images of classes that the model does not have."""
    # Before the model, whose import of torch takes seconds.
    source = list_labelled(data, listed, split=split, columns=columns_of(run))
    model, card = open_model(run, device, kinds=("image", "vector"))
    number = len(source)
    with counting("checking images") as progress:
        source = check_labelled(source, card, listed, progress=progress)
    return source, model, card, number - len(source) - len(source.unreadable)
