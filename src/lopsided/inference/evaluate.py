"""Evaluate a trained model on any labelled data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lopsided.data.images import Vectors
from lopsided.data.sources import Source, open_source
from lopsided.errors import DataError, sentence
from lopsided.evaluation.calibration import HeldBack
from lopsided.evaluation.doubt import measure_doubt, trade_off
from lopsided.evaluation.folds import decided_unseen, figures_by_rule
from lopsided.evaluation.intervals import share_interval
from lopsided.evaluation.metrics import evaluate
from lopsided.inference.feature_cache import ReadableImages
from lopsided.inference.predict import Familiarity, Use, choose_use
from lopsided.recipe.rules import parse_rule

if TYPE_CHECKING:
    from lopsided.data.images import Progress
    from lopsided.data.listed import Tested
    from lopsided.models.model import Model, ModelCard

FAR = 1.5
"""A class is far more frequent than assumed if its share is this many times as large, and far rarer likewise."""


def list_labelled(
    data: str | os.PathLike[str], listed: Tested, *, split: str | None = None, columns: Sequence[str] = ()
) -> Source:
    """List labelled data without reading images. ``split`` selects one split of data that have splits."""
    asked = {name: value for name, value in vars(listed).items() if name not in ("skip_unreadable", "known_classes")}
    source = open_source(data, missing_ok=listed.skip_unreadable, min_classes=1, columns=columns, **asked)
    if split is None:
        return source
    if source.splits is None:
        raise DataError(f"{os.fspath(data)} has no splits, so --split {split} cannot be used. Omit --split.")
    rows = np.flatnonzero(source.splits == split)
    if not len(rows):
        known = ", ".join(sorted(set(source.splits.tolist())))
        raise DataError(sentence(f"--split must be one of {known}", f"{split} for {os.fspath(data)}"))
    return source.subset(rows)


def check_labelled(source: Source, card: ModelCard, listed: Tested, *, progress: Progress | None = None) -> Source:
    """Check that labels are classes of the model and that images are readable. Return the source of the model.

    With ``listed.known_classes``, images of other classes are left out instead.
    """
    if listed.known_classes:
        known = np.array([name in card.classes for name in source.classes])
        if not known[source.labels].any():
            raise DataError(sentence(f"some labels must be classes of the model ({', '.join(card.classes)})", "none"))
        source = source.subset(np.flatnonzero(known[source.labels]))
    if isinstance(source.images, Vectors):
        vectors = source.images.fitted(card.shape, card.columns, source.name)
        return replace(source.relabel(card.classes), images=vectors)
    if card.kind == "vector":
        must = f"the model takes vectors of {card.shape[0]:,} numbers"
        raise DataError(sentence(must, f"images in {source.name}", "Give a Parquet or NPZ table."))
    source = source.relabel(card.classes)
    return source.verify(
        skip_unreadable=listed.skip_unreadable,
        same_size=card.image_size is None,
        progress=progress,
        known=ReadableImages(),
    )


def evaluate_model(
    model: Model,
    card: ModelCard,
    source: Source,
    *,
    batch_size: int = 64,
    seed: int = 0,
    use: Use | None = None,
    familiarity: Familiarity | None = None,
    fitted_to: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the metrics of a model on a source from ``check_labelled``, for JSON. By default its own rule decides.

    With ``fitted_to``, the source holds the images that a fitted rule was fitted to. Folds then decide for each of
    them without its label. ``familiarity`` adds the metrics without unfamiliar images.
    """
    from lopsided.inference.scorer import Scorer

    bank = None if familiarity is None else familiarity.bank
    scorer = Scorer(model, card, cached="begun", bank=bank, batch_size=batch_size)
    p, _, typicality = scorer.judge(source.images, progress=progress)
    use = use or choose_use(card)
    rules = figures_by_rule(("plain", "balanced"), card.classes, card.prior, p, source.labels)
    p = use.probabilities(p)
    decided = use.decision.decide(p)
    prior = use.shares or use.prior
    if fitted_to and parse_rule(use.decision.rule).fitted:
        held = HeldBack(p, source.labels, source.groups)
        decided = decided_unseen(use.decision.rule, card.classes, prior, held, seed)
    costs = use.decision.costs or None
    evaluation = evaluate(
        source.labels, p, decided, classes=card.classes, seed=seed, groups=source.groups, costs=costs
    ).to_dict()
    unreadable = [{"name": name, "reason": reason} for name, reason in source.unreadable]
    if shift := prior_shift(evaluation["per_class"], prior, card.classes):
        evaluation["notes"].append(shift)
    rule: dict[str, Any] = {"decision": use.decision.model_dump(mode="json"), "rules": rules}
    rule |= measure_doubt(use.decision, p, source.labels, card.classes, source.groups)
    if use.decision.error is not None:
        moved = None if use.shares is None else (use.shares, use.shares)
        rule["trade_off"] = trade_off(p, source.labels, source.groups, moved)
        rule["trade_off_shares"] = None if use.shares is None else dict(zip(card.classes, use.shares, strict=True))
    seen = {}
    if familiarity is not None and typicality is not None:
        familiarity.typicality.extend(typicality.tolist())
        seen = familiarity.to_dict(source.groups)
        rows = np.flatnonzero(~familiarity.bank.is_unfamiliar(typicality, familiarity.asked))
        groups = None if source.groups is None else source.groups[rows]
        if 0 < len(rows) < len(p) and not card.scores_distance:  # There, what is unlike is what is looked for.
            familiar = evaluate(
                source.labels[rows], p[rows], decided[rows], classes=card.classes, seed=seed, groups=groups
            )
            seen["familiar"] = familiar.to_dict()
    return {"data": source.name, "views": list(card.views), **evaluation, **rule, **seen, "unreadable": unreadable}


def prior_shift(rows: Sequence[Mapping[str, Any]], prior: Sequence[float], classes: Sequence[str]) -> str:
    """Return a note if a class is far more or less frequent than the probabilities assume; otherwise an empty text.

    Far means by half as much again or more, and more than chance explains.
    """
    counts = [int(row["support"]) for row in rows]
    total = sum(counts)
    far = []
    for place, (count, share) in enumerate(zip(counts, prior, strict=True)):
        found = share_interval(count / total, total, 0.99)
        ratio = max(found.value, 1e-12) / max(share, 1e-12)
        if not found.low <= share <= found.high and not 1 / FAR < ratio < FAR:
            far.append((abs(np.log(ratio)), place))
    if not far:
        return ""
    place = max(far)[1]
    shares = ",".join(f"{name}={count / total:.3g}" for name, count in zip(classes, counts, strict=True))
    return (
        f"{classes[place]} has {counts[place] / total:.1%} of these images, but the probabilities assume "
        f"{prior[place]:.1%}: they are wrong here, and so are Brier score, log loss and calibration error. If the "
        f"images where the model is used have these shares, use --prevalence {shares}."
    )
