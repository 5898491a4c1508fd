"""Held-out balanced accuracy by decision rule and by rule for the epoch, from the scores of ``studies/scores.py``.

Run as ``python studies/decisions.py --scores FOLDER --record studies/records/decisions.jsonl``. Each run becomes a line
of the record. Runs that are in the record already are kept, also if their scores are gone. The command then prints two
tables of Markdown, in per cent with Student's 95 % intervals.

Of a run of the study ``rules``, the line has the UWA on the held-out images by ``plain``; by ``balanced`` without and
with calibration; by ``tuned``; by the threshold with the highest UWA on the test images; and by the best threshold in
hindsight, which is the ceiling. Calibration, ``tuned`` and the highest UWA use the 300 test images, on which the model
was not trained. Of a run of the study ``epochs``, it has the UWA by ``balanced`` for every rule that selects an epoch,
calibrated on the validation images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from sklearn.metrics import balanced_accuracy_score

import shared
from lopsided.evaluation.calibration import HeldBack, fit_calibration, prior_of
from lopsided.evaluation.decision import resolve
from lopsided.evaluation.intervals import mean_interval, paired_difference
from thresholds import highest_uwa

Floats = npt.NDArray[np.float64]
UNIFORM = ("weighted-ce",)
"""The methods whose probabilities carry a uniform prior."""


def main() -> None:
    """Update the record and print the tables."""
    parser = shared.parser(__doc__)
    parser.add_argument(
        "--scores", type=Path, action="append", default=[], help="folder of files of logits; repeatable"
    )
    parser.add_argument("--record", type=Path, required=True)
    given = parser.parse_args()
    lines = {line["run"]: line for line in shared.read(given.record)}
    for path in sorted(path for folder in given.scores for path in folder.glob("[!.]*.npz")):
        with np.load(path, allow_pickle=False) as content:
            lines[path.stem] = line_of(path.stem, dict(content))
    shared.write_lines(given.record, (lines[run] for run in sorted(lines)))
    for study, table in (("rules", rules_table), ("epochs", epochs_table)):
        print(
            table([line for line in lines.values() if line["study"] == study]), end="\n\n" if study == "rules" else "\n"
        )


def line_of(run: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the line of one run."""
    study, rest = run.split("-", 1)
    method, majority, minority, seed = rest.rsplit("-", 3)
    counts = content["counts"]
    weights = 1 / counts if method in UNIFORM else None
    prior = prior_of(counts, weights)
    uwa: dict[str, float] = {}
    if study == "rules":
        uwa = _by_rule(content, prior)
    else:
        if method != "ce":  # Its linear layer is trained on balanced batches.
            prior = (0.5, 0.5)
        balanced = resolve("balanced", shared.TOPS, prior)
        labels = content["held_labels"]
        for name in [key.removeprefix("epoch_") for key in content if key.startswith("epoch_")] + ["ema"]:
            if f"held_{name}" in content:
                held, val = content[f"held_{name}"], content[f"val_{name}"]
            else:
                epoch = int(content[f"epoch_{name}"])
                held, val = content[f"held_{epoch}"], content["val_logits"][epoch]
            change = fit_calibration(HeldBack(_softmax(val), content["val_labels"]), prior)
            uwa[name] = balanced_accuracy_score(labels, balanced.decide(change(_softmax(held))))
    found = {"run": run, "study": study, "method": method, "scenario": f"{majority}:{minority}", "seed": int(seed)}
    return {**found, "uwa": {name: round(100 * value, 3) for name, value in uwa.items()}}


def _by_rule(content: dict[str, Any], prior: Sequence[float]) -> dict[str, float]:
    test, held = _softmax(content["test_logits"]), _softmax(content["held_logits"])
    known, labels = content["test_labels"], content["held_labels"]
    known_scores = HeldBack(test, known)
    cooled = fit_calibration(known_scores, prior, biases=False)
    change = fit_calibration(known_scores, prior)
    balanced = resolve("balanced", shared.TOPS, prior)
    tuned = resolve("tuned", shared.TOPS, prior, HeldBack(change(test), known))
    odds = _odds(content["held_logits"])
    decisions = {
        "plain": held.argmax(axis=1),
        "balanced": balanced.decide(held),
        "balanced, temperature": balanced.decide(cooled(held)),
        "balanced, calibrated": balanced.decide(change(held)),
        "tuned": tuned.decide(change(held)),
        "highest test UWA": odds >= highest_uwa(_odds(content["test_logits"]), known),
        "ceiling": odds >= highest_uwa(odds, labels),
    }
    return {rule: balanced_accuracy_score(labels, decided.astype(np.int64)) for rule, decided in decisions.items()}


def _odds(logits: npt.NDArray[np.floating[Any]]) -> Floats:
    odds: Floats = logits[:, 1].astype(np.float64) - logits[:, 0].astype(np.float64)
    return odds


def _softmax(logits: npt.NDArray[np.floating[Any]]) -> Floats:
    probabilities: Floats = softmax(logits.astype(np.float64), axis=1)
    return probabilities


def rules_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of the study ``rules``: one row per method and scenario."""
    rules, rows = list(lines[0]["uwa"]) if lines else [], []
    for cell in _cells(lines):
        runs = [line["uwa"] for line in lines if (line["scenario"], line["method"]) == cell]
        means = (mean_interval([uwa[rule] for uwa in runs]) for rule in rules)
        rows.append((*cell, len(runs), *map(shared.shown, means)))
    heads = [rule.replace("UWA", "balanced accuracy") for rule in rules]
    return shared.table(f"scenario | loss | runs | {' | '.join(heads)}", rows)


def epochs_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of the study ``epochs``: one row per rule, with paired differences to the last epoch."""
    cells, rows = _cells(lines), []
    for rule in lines[0]["uwa"] if lines else ():
        means = [
            mean_interval([line["uwa"][rule] for line in lines if (line["scenario"], line["method"]) == cell])
            for cell in cells
        ]
        gap = paired_difference(*([line["uwa"][name] for line in lines] for name in (rule, "last")))
        rows.append((rule, *map(shared.shown, means), "" if rule == "last" else shared.shown(gap, sign=True)))
    return shared.table(
        f"epoch | {' | '.join(f'{method}, {scenario}' for scenario, method in cells)} | less last", rows
    )


def _cells(lines: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted({(line["scenario"], line["method"]) for line in lines})


if __name__ == "__main__":
    main()
