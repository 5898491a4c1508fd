"""Decision rules on the command line."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lopsided.errors import InputError

if TYPE_CHECKING:
    from lopsided.evaluation.decision import Decision

HELP = (
    "Decision rule: balanced, plain, tuned, cost:A=10,B=1 (or cost:FILE.csv, a matrix), recall:A=0.95, "
    "precision:A=0.5, alarms:A=100 (of 10,000 images), threshold:A=0.013, or prevalence:A=0.02,B=0.98."
)
_MAX_BYTES = 10_000_000


def read_rule(text: str | None) -> str | None:
    """Return the text of a rule, with the file of ``cost:FILE.csv`` replaced by the costs in it."""
    if text is None or not text.startswith("cost:"):
        return text
    path = Path(text.removeprefix("cost:").strip())
    if path.suffix.lower() != ".csv":
        if "=" not in text and not path.name.startswith(("[", "{")) and path.suffix and path.is_file():
            raise InputError(f"A file of costs must be a table that ends in .csv, got {path}. Rename or convert it.")
        return text
    must = "Its first row names the decided classes, and each further row starts with a true class."
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.read(_MAX_BYTES).splitlines()
        sign = max(",;\t", key=(lines or [""])[0].count)  # Spreadsheets of many countries write semicolons.
        rows = [row for row in csv.reader(lines, delimiter=sign) if any(row)]
        (_, *names), *body = rows
        decided = [name.strip() for name in names]
        costs = {true.strip(): dict(zip(decided, map(float, row), strict=True)) for true, *row in body}
    except OSError as error:
        raise InputError(f"The matrix of costs {path} cannot be read ({error.strerror}).") from None
    except (ValueError, csv.Error):
        raise InputError(f"{path} is not a matrix of costs. {must}") from None
    return f"cost:{json.dumps(costs, ensure_ascii=False)}"


def rule_words(decision: Decision, classes: Sequence[str]) -> str:
    """Return how a model decides, with the notes on its rule."""
    from lopsided.evaluation.decision import explain

    return " ".join([explain(decision, classes), *decision.notes])
