"""The section of a run's page on thresholds: the data of its slider, its words and its curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lopsided.evaluation.decision import explain, threshold_of
from lopsided.reports import run_figures, run_words
from lopsided.reports.page import packed
from lopsided.reports.run_data import Judged
from lopsided.reports.run_words import Facts
from lopsided.reports.thresholds import (
    STEPS,
    Counts,
    counts_at,
    counts_of,
    favoured,
    favoured_interval,
    is_sure,
    matching,
)
from lopsided.reports.wording import clean
from lopsided.runs.metrics import Evaluation

MOST_NUMBERS = 500_000
"""Maximum number of probabilities in a page. The slider needs the probabilities of all images."""


def threshold_section(
    facts: Facts, figures: Evaluation, judged: Judged, val: Judged | None, ranks: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of the slider, with the probabilities of all images, and the template context."""
    most = max(1, MOST_NUMBERS // len(judged))
    first = facts.minority
    offered = [first, *(c for c in reversed(ranks) if c != first)][:most]  # Rarest class first.
    chosen = [None if val is None else favoured(val.p[:, c], val.y_true == c) for c in offered]
    decision = facts.decision
    start = [
        threshold_of(decision, c, len(facts.classes)) or matching(judged.p[:, c], judged.y_pred == c) for c in offered
    ]
    label, threshold, has_choice = offered[0], chosen[0], any(value is not None for value in chosen)
    areas = ("auroc", "average_precision")
    p, positive = judged.p[:, label], judged.y_true == label
    by_rule, at_half = counts_of(judged.y_pred == label, positive), counts_at(p, positive, 0.5)
    at_chosen = None if threshold is None else counts_at(p, positive, threshold)
    roc, precision_recall = run_figures.roc_plot(p, positive, facts.classes[label], by_rule, at_chosen, judged.folds)
    is_threshold = threshold_of(decision, label, len(facts.classes)) is not None
    by = f"rule of the model ({clean(decision.rule)})"
    rows: list[tuple[str, float | None, Counts]] = [(by, start[0] if is_threshold else None, by_rule)]
    if not is_threshold and start[0] is not None:
        rows.append(("as many images as by the rule", start[0], counts_at(p, positive, start[0])))
    if start[0] != 0.5:
        rows.append(("half", 0.5, at_half))
    spread = None
    if threshold is not None and at_chosen is not None and val is not None:
        rows.append(("validation threshold", threshold, at_chosen))
        spread = favoured_interval(val.p[:, label], val.y_true == label, facts.recipe.seed)
    data: dict[str, Any] = {
        "classes": offered,
        "p": packed(np.ascontiguousarray(judged.p[:, offered].T)),
        "folds": None if judged.folds is None else packed(judged.folds.astype(np.uint16)),
        "chosen": chosen,
        "start": start,
        "logit": [
            is_sure(judged.p[:, c], threshold) or is_sure(judged.p[:0, c], begin)
            for c, threshold, begin in zip(offered, chosen, start, strict=True)
        ],
        **{name: [getattr(figures.per_class[c], name).value for c in offered] for name in areas},
    }
    left = len(ranks) - len(offered)
    return data, {
        "threshold_class": label,
        "threshold_chosen": threshold,
        "threshold_start": 0.5 if start[0] is None else start[0],
        "threshold_rule": clean(decision.rule),
        "decision_words": clean(" ".join([explain(decision, facts.classes), *decision.notes])),
        "threshold_rows": rows,
        "threshold_areas": [data[name][0] for name in areas],
        "threshold_step": 1 / STEPS,
        "threshold_offered": offered,
        "threshold_words": run_words.threshold_words(facts.classes[label], by_rule, threshold, at_chosen, spread),
        "rule_words": run_words.rule_words(
            facts.classes[label], by_rule, counts_at(p, positive, start[0]) if is_threshold and start[0] else None
        ),
        "has_curves": 0 < positive.sum() < len(positive),
        "has_choice": has_choice,
        "threshold_advice": run_words.threshold_advice(facts, judged.split, has_choice=has_choice),
        "no_choice": run_words.no_choice(facts, judged.split),
        "threshold_note": f"Only the {len(offered):,} rarest classes can be selected; {left:,} more do not fit."
        if left
        else "",
        "roc": roc,
        "curves_note": "" if judged.folds is None else run_words.CURVES,
        "precision_recall": precision_recall,
    }
