"""Decision rules on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lopsided.evaluation.decision import Decision

HELP = (
    "Decision rule: balanced, plain, tuned, cost:A=10,B=1 (or cost:FILE.csv, a matrix), recall:A=0.95, "
    "precision:A=0.5, alarms:A=100 (of 10,000 images), false-alarms:A=0.05, threshold:A=0.013, "
    "prevalence:A=0.02,B=0.98, sets:0.95 (every class that an image may be of), or abstain:0.02 (ask a person unless "
    "the expected error is below 2 %)."
)


def rule_words(decision: Decision, classes: Sequence[str]) -> str:
    """Return how a model decides, with the notes on its rule."""
    from lopsided.evaluation.decision import explain

    return " ".join([explain(decision, classes), *decision.notes])
