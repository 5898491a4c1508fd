"""The facts of the folds of a run as facts of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lopsided.facts.fact import KINDS, Fact


def merge_folds(folds: Sequence[Sequence[Fact]], model: Sequence[Fact] = ()) -> list[Fact]:
    """Return what the facts of folds, and of the model of all images, say about their run.

    What becomes of a fact, its kind says. If a fold has a fact several times because it was resumed, the last counts.
    """
    last = [{KINDS[fact.kind].key(fact): fact for fact in facts} for facts in folds]
    merged: dict[tuple[str, Any], Fact] = {}
    for facts in last:
        for key, fact in facts.items():
            if fact.in_folds in ("once", "counted"):
                merged.setdefault(key, fact)
    for key, fact in merged.items():
        if fact.in_folds == "counted":
            merged[key] = replace(fact, folds=(sum(key in facts for facts in last), len(last)))
    of_model = {KINDS[fact.kind].key(fact): fact for fact in model if fact.in_folds == "model"}
    return [*merged.values(), *of_model.values()]
