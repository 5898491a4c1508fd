"""Held-out UWA by decision rule and by rule for the epoch, from the scores that ``studies/scores.py`` kept.

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

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.evaluation.calibration import HeldBack, fit_calibration, prior_of
from lopsided.evaluation.decision import resolve
from lopsided.evaluation.intervals import mean_interval, paired_difference
from thresholds import highest_uwa

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
CLASSES = ("T-shirt/top", "Shirt")
UNIFORM = ("weighted-ce",)
"""The arms whose probabilities carry a uniform prior."""


def main() -> None:
    """Update the record and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scores", type=Path, action="append", default=[], help="folder of files of logits; repeatable"
    )
    parser.add_argument("--record", type=Path, required=True)
    given = parser.parse_args()
    lines = {}
    if given.record.exists():
        lines = {line["run"]: line for line in map(json.loads, given.record.read_text().splitlines())}
    for path in sorted(path for folder in given.scores for path in folder.glob("[!.]*.npz")):
        with np.load(path, allow_pickle=False) as content:
            lines[path.stem] = line_of(path.stem, dict(content))
    given.record.write_text("".join(json.dumps(lines[run]) + "\n" for run in sorted(lines)))
    print(rules_table([line for line in lines.values() if line["study"] == "rules"]))
    print()
    print(epochs_table([line for line in lines.values() if line["study"] == "epochs"]))


def line_of(run: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the line of one run."""
    study, rest = run.split("-", 1)
    arm, majority, minority, seed = rest.rsplit("-", 3)
    counts = content["counts"]
    weights = 1 / counts if arm in UNIFORM else None
    prior = prior_of(counts, weights)
    uwa: dict[str, float] = {}
    if study == "rules":
        uwa = _by_rule(content, prior)
    else:
        if arm != "ce":  # Its linear layer is trained on balanced batches.
            prior = (0.5, 0.5)
        balanced = resolve("balanced", CLASSES, prior)
        labels = content["held_labels"]
        for name in [key.removeprefix("epoch_") for key in content if key.startswith("epoch_")] + ["ema"]:
            if f"held_{name}" in content:
                held, val = content[f"held_{name}"], content[f"val_{name}"]
            else:
                epoch = int(content[f"epoch_{name}"])
                held, val = content[f"held_{epoch}"], content["val_logits"][epoch]
            change = fit_calibration(HeldBack(_softmax(val), content["val_labels"]), prior)
            uwa[name] = _uwa(balanced.decide(change(_softmax(held))), labels)
    found = {"run": run, "study": study, "arm": arm, "scenario": f"{majority}:{minority}", "seed": int(seed)}
    return {**found, "uwa": {name: round(100 * value, 3) for name, value in uwa.items()}}


def _by_rule(content: dict[str, Any], prior: Sequence[float]) -> dict[str, float]:
    test, held = _softmax(content["test_logits"]), _softmax(content["held_logits"])
    known, labels = content["test_labels"], content["held_labels"]
    known_scores = HeldBack(test, known)
    cooled = fit_calibration(known_scores, prior, biases=False)
    change = fit_calibration(known_scores, prior)
    balanced = resolve("balanced", CLASSES, prior)
    tuned = resolve("tuned", CLASSES, prior, HeldBack(change(test), known))
    return {
        "plain": _uwa(held.argmax(axis=1), labels),
        "balanced": _uwa(balanced.decide(held), labels),
        "balanced, temperature": _uwa(balanced.decide(cooled(held)), labels),
        "balanced, calibrated": _uwa(balanced.decide(change(held)), labels),
        "tuned": _uwa(tuned.decide(change(held)), labels),
        "highest test UWA": _uwa(
            _odds(content["held_logits"]) >= highest_uwa(_odds(content["test_logits"]), known), labels
        ),
        "ceiling": _uwa(_odds(content["held_logits"]) >= highest_uwa(_odds(content["held_logits"]), labels), labels),
    }


def _softmax(logits: npt.NDArray[np.floating[Any]]) -> Floats:
    z = logits.astype(np.float64)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    scaled: Floats = p / p.sum(axis=1, keepdims=True)
    return scaled


def _odds(logits: npt.NDArray[np.floating[Any]]) -> Floats:
    odds: Floats = logits[:, 1].astype(np.float64) - logits[:, 0].astype(np.float64)
    return odds


def _uwa(decided: npt.NDArray[Any], labels: Codes) -> float:
    return float(np.mean([np.mean(decided[labels == c] == c) for c in np.unique(labels)]))


def rules_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of the study ``rules``: one row per arm and scenario."""
    rules = list(lines[0]["uwa"]) if lines else []
    rows = ["| scenario | loss | runs | " + " | ".join(rules) + " |", "|---" * (3 + len(rules)) + "|"]
    for scenario, arm in _cells(lines):
        own = [line["uwa"] for line in lines if (line["scenario"], line["arm"]) == (scenario, arm)]
        shown = [_shown([uwa[rule] for uwa in own]) for rule in rules]
        rows.append(f"| {scenario} | {arm} | {len(own)} | " + " | ".join(shown) + " |")
    return "\n".join(rows)


def epochs_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of the study ``epochs``: one row per rule, with paired differences to the last epoch."""
    cells = list(_cells(lines))
    rows = ["| epoch | " + " | ".join(f"{arm}, {scenario}" for scenario, arm in cells) + " | less last |"]
    rows.append("|---" * (2 + len(cells)) + "|")
    for rule in lines[0]["uwa"] if lines else ():
        shown = [
            _shown([line["uwa"][rule] for line in lines if (line["scenario"], line["arm"]) == cell]) for cell in cells
        ]
        pairs = [[line["uwa"][name] for line in lines] for name in (rule, "last")]
        gap = "" if rule == "last" else _shown_figure(paired_difference(*pairs), signed=True)
        rows.append(f"| {rule} | " + " | ".join(shown) + f" | {gap} |")
    return "\n".join(rows)


def _cells(lines: Iterable[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    return sorted({(line["scenario"], line["arm"]) for line in lines})


def _shown(values: Sequence[float]) -> str:
    return _shown_figure(mean_interval(values))


def _shown_figure(figure: Any, *, signed: bool = False) -> str:
    half = (figure.high - figure.low) / 2
    return f"{figure.value:{'+' if signed else ''}.1f}" + (f" ± {half:.1f}" if np.isfinite(half) else "")


if __name__ == "__main__":
    main()
