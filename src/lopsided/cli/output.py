"""Printing: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided.errors import InputError, LopsidedError
from lopsided.evaluation.metric_table import METRICS, decimals
from lopsided.runs.progress import printable

if TYPE_CHECKING:
    from lopsided.data.sources.names import Twins
    from lopsided.evaluation.decision import Decision
    from lopsided.facts import Fact
    from lopsided.recipe import Recipe
    from lopsided.runs.folder import Run

WIDEST, LONGEST = 60, 390
"""Maximum characters of a class name in a table, and of a note. JSON and files contain the full text."""
_RUN_FILES = frozenset(
    {"recipe.toml", "log.jsonl", "predictions.csv", "model.safetensors", "model.json"}
    | {"features.safetensors", "metrics.json", "sweep.json", "records.jsonl", "failures.jsonl"}
    | {"labels.csv", "near_duplicates.csv", "trackers.json"}
)
_RUN_MARKS = (("model.json",), ("recipe.toml", "log.jsonl"), ("sweep.json",))
"""A run or sweep folder contains all files of at least one set. A recipe alone does not mark a run."""
_BEGAN = [time.monotonic()]


def begin(age: float = 0.0) -> None:
    """Start to count the seconds of a command. ``age`` is the time that the process has already taken."""
    _BEGAN[0] = time.monotonic() - age


def process_age() -> float:
    """Return the seconds since this process started, or 0 if the system does not tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        age = float(Path("/proc/uptime").read_text().split()[0]) - started
        if 0 <= age < 600:  # In some containers the two clocks differ.
            return age
    return 0.0


def elapsed() -> float:
    """Return the seconds since the command started."""
    return time.monotonic() - _BEGAN[0]


class StoppedError(LopsidedError):
    """The user stopped the command. The message gives the command that continues."""


def check_out(out: Path | None, *inputs: str | Path) -> None:
    """Raise an error if ``--out`` cannot be written or would overwrite input. Call this before the work starts.

    Protected files: every file in ``inputs``, existing images, and the files of a run or a sweep.
    """
    if out is None:
        return
    from lopsided.data.decoding import is_image_name
    from lopsided.files import check_replaceable

    if out.is_dir() or not out.parent.is_dir():
        what = "is a folder" if out.is_dir() else "is in a folder that does not exist"
        raise InputError(f"{out} {what}. Set --out to a file in an existing folder.")
    check_replaceable(out)
    what = ""
    if any(_is_same(out, path) for path in inputs):
        what = "an input of this command"
    elif is_image_name(out.name) and os.path.lexists(out):
        what = "an existing image"
    elif out.name in _RUN_FILES and any(all((out.parent / name).is_file() for name in mark) for mark in _RUN_MARKS):
        what = "a file of a run or a sweep"
    if what:
        raise InputError(f"--out would overwrite {out}, {what}. Choose another file name.")


def _is_same(one: Path, other: str | Path) -> bool:
    with suppress(OSError, ValueError):
        return os.path.samefile(one, other)
    return False


def say(text: str) -> None:
    """Print a note or a warning on stderr, in one write, so that lines of several processes do not mix."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def say_replaced(*paths: Path | None) -> None:
    """Print which of the files that a command will write exist already."""
    for path in paths:
        if path is not None and os.path.lexists(path):
            say(f"{path} exists and is replaced.")


def tell_unreadable(first: Iterable[tuple[str, str]], number: int, out: Path | None) -> None:
    """Print the first unreadable images, as path and reason, and how many more there are."""
    from lopsided.inference.predict import unreadable_path

    shown = 0
    for path, reason in first:
        say(f"unreadable: {path} ({reason})")
        shown += 1
    if number > shown:
        where = f"; {unreadable_path(out)} lists all of them" if out is not None else ""
        say(f"and {number - shown:,} more unreadable images{where}")


def warn_of_twins(pairs: Twins) -> None:
    """Warn about images that differ only in the suffix, which may be masks."""
    if pairs.number:
        say(f"warning: {pairs.cautions()[0]}")


def show(text: str) -> None:
    """Print a result as text on stdout."""
    print("\n".join(printable(line) for line in text.split("\n")))


class Terminal:
    """Standard output for a terminal. Control characters are replaced; line breaks are kept."""

    def write(self, text: str) -> int:
        """Write a text of one or more lines."""
        return sys.stdout.write("\n".join(map(printable, text.split("\n"))))


def show_json(result: object) -> None:
    """Print a result as JSON on stdout."""
    print(json.dumps(result, indent=2, allow_nan=False))


def shortened(text: str, most: int = WIDEST) -> str:
    """Return an untrusted text, such as a class name, as one short printable line.

    >>> shortened("a\\nb"), shortened("x" * 1000) == "x" * 59 + "\N{HORIZONTAL ELLIPSIS}"
    ('a\N{REPLACEMENT CHARACTER}b', True)
    """
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows aligned under a header. Columns of numbers are right-aligned.

    >>> print(table(["class", "images"], [["shirt", 12], ["top", 3]]))
    class  images
    shirt      12
    top         3
    """
    body = [list(row) for row in rows]
    texts = [[printable(str(cell)) for cell in row] for row in (header, *body)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(header))]
    right = [bool(body) and all(isinstance(row[i], int | float) for row in body) for i in range(len(header))]
    lines = (
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        for row in texts
    )
    return "\n".join(line.rstrip() for line in lines)


def interval(figure: Mapping[str, float | None]) -> str:
    """Return a figure of ``metrics.json`` with its interval as text.

    >>> interval({"value": 0.5, "low": 0.25, "high": 0.75})
    '0.500 [0.250, 0.750]'
    """
    value, low, high = figure["value"], figure["low"], figure["high"]
    if value is None or low is None or high is None:
        return "not defined"
    digits = decimals(value, low, high)
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def figures_table(evaluation: Mapping[str, Any]) -> str:
    """Return an evaluation as two tables: figures next to the majority vote, and one row per class, rare ones first.

    Without what compares classes if images of one class were tested.
    """
    majority = evaluation["majority"]
    left_out = () if _num_tested(evaluation) > 1 else ("uwa", "macro_f1", "g_mean", "mcc")
    level = f"{100 * evaluation['level']:g} % interval"
    rows = []
    for name, metric in METRICS.items():
        if name in evaluation["figures"] and name not in left_out:
            vote = majority.get(name)
            rows.append([metric.title, interval(evaluation["figures"][name]), "" if vote is None else f"{vote:.3f}"])
    classes = [
        [
            shortened(row["label"]),
            row["support"],
            interval(row["recall"]),
            interval(row["precision"]),
            interval(row["f1"]).partition(" [")[0],  # With its interval, a row is too long for many terminals.
            interval(row["average_precision"]),
        ]
        for row in sorted(evaluation["per_class"], key=lambda row: row["support"])
    ]
    parts = [
        table(["metric", f"value [{level}]", f"always {shortened(majority['label'])}"], rows),
        table(["class", "images", "recall", "precision", "F1", "average precision"], classes),
        *(shortened(note, LONGEST) for note in evaluation["notes"]),
    ]
    return "\n\n".join(parts)


def _num_tested(evaluation: Mapping[str, Any]) -> int:
    """Return the number of classes of which images were tested."""
    return sum(row["support"] > 0 for row in evaluation["per_class"])


def balanced_words(evaluation: Mapping[str, Any]) -> str:
    """Return the balanced accuracy, and the cost if the rule has costs, beside those of the majority vote.

    Nothing if images of one class were tested.
    """
    if _num_tested(evaluation) < 2:
        return ""
    majority, figures = evaluation["majority"], evaluation["figures"]
    names = {"cost": "Cost per image", "uwa": "Balanced accuracy"}
    always = f"always answering {shortened(majority['label'])}"
    lines = [
        f"{title} {interval(figures[name])}; {always}: {majority[name]:.3f}"
        for name, title in names.items()
        if figures.get(name) is not None
    ]
    return "\n".join(lines)


def baseline_words(metrics: Mapping[str, Any], split: str) -> list[str]:
    """Return the figure of the recipe to which a run is compared; nothing if there is none."""
    baseline = metrics.get("baseline") or {"splits": {}}
    found = baseline["splits"].get(split)
    if found is None:
        return []
    words = f"The recipe {baseline['recipe']} on the same split: balanced accuracy {interval(found['uwa'])}."
    change = found["difference"]
    if not change["low"] <= 0 <= change["high"]:
        side = "above" if change["value"] > 0 else "below"
        return [f"{words} This model is {abs(change['value']):.3f} {side} it: difference {interval(change)}."]
    return [f"{words} The difference of this model to it is {interval(change)}, which chance can explain."]


CLEARLY_SLOWER = 1.5
"""The times of a short measurement differ by less without a reason."""


def speed_words(recipe: Recipe) -> list[str]:
    """Return how long a model with a frozen encoder takes for new images, measured, if quick is clearly faster."""
    from lopsided.recipe import named_recipe
    from lopsided.reports.wording import duration
    from lopsided.runs.features import images_per_second

    peer, number = named_recipe("quick"), 10_000
    if recipe.spec.trains_encoder or recipe.encoder.spec.has_features_of(peer.encoder.spec):
        return []
    try:
        own, quick = (number / images_per_second(each) for each in (recipe, peer))
    except LopsidedError:  # A figure for information must not end a run that is finished.
        return []
    if own < CLEARLY_SLOWER * quick:
        return []
    times = f"about {duration(own)} with this model, and {duration(quick)} with quick"
    return [f"On this machine, {number:,} new images take {times}."]


def fold_words(folds: Mapping[str, Any]) -> str:
    """Return the spread of the balanced accuracy over the folds, and what the model of a run with folds is."""
    values = sorted(row["uwa"] for row in folds["per_fold"])
    spread = f"By fold, the balanced accuracy is {values[0]:.3f} to {values[-1]:.3f}."
    if folds["final"] == "refit":
        return f"{spread} The model is trained on all images ({folds['parameters'] / 1e6:.1f} million parameters)."
    times = f"{folds['members']} times " if folds["members"] > 1 else ""
    return (
        f"{spread} The model is the ensemble of {folds['folds']} models ({folds['parameters'] / 1e6:.1f} million "
        f"parameters). An image costs {times}as much as with one of them."
    )


def decision_words(metrics: Mapping[str, Any], split: str) -> list[str]:
    """Return how the model of a run decides, and its balanced accuracy by the other rule."""
    from lopsided.evaluation.decision import Decision

    decision = Decision.model_validate(metrics["decision"]["decision"])
    words = rule_words(decision, metrics["classes"])
    other = "balanced" if decision.rule == "plain" else "plain"
    rules = metrics[split].get("rules", {})
    found = rules.get(other)
    if found is not None and found != rules.get(decision.rule):
        words += f" By the rule {other}, the balanced accuracy would be {found['uwa']:.3f}."
    return [words]


FIND_BELOW = 20
"""With fewer images of a class, the next step is to find more of them."""


def next_words(run: Run) -> list[str]:
    """Return the next step after a fit with few images of a class: find more of them, mark them, and fit again."""
    metrics = run.metrics or {}
    counts = metrics["counts"]["train"]
    rarest = run.recipe.decision.focus or min(counts, key=lambda name: counts[name])
    if counts[rarest] >= FIND_BELOW or metrics["test"] is None:
        return []
    folder, name = shlex.quote(str(run.folder)), shlex.quote(rarest)
    data = shlex.quote(str(metrics["source"]))
    chosen = run.recipe.data.classes
    classes = "" if chosen is None else f" {shlex.quote('classes=' + ','.join(chosen))}"
    known = [str(table) for table in run.recipe.data.more or ()]
    marks = "marks.csv" if not known else f"marks-{len(known) + 1}.csv"
    more = " ".join(f"--more {shlex.quote(table)}" for table in [*known, marks])
    number = counts[rarest]
    held = "is no labelled image" if number == 0 else "is 1 image" if number == 1 else f"are {number} images"
    some = "some" if number == 0 else "more"
    return [
        f"There {held} of {rarest}. Next, find {some} among other images, mark them on the page, and fit again:\n"
        f"  lopsided find {folder} POOL --class {name} --out found.csv\n"
        f"  lopsided fit {data}{classes} {more} allow_outside=true --out {folder}-2"
    ]


def rule_words(decision: Decision, classes: Sequence[str], *, stated: bool = False) -> str:
    """Return how a model decides, with the notes on its rule. ``stated``: at class shares that the user states."""
    from lopsided.evaluation.decision import explain

    return " ".join([explain(decision, classes, stated=stated), *decision.notes])


def tell_facts(facts: Iterable[Fact], *, quiet: bool) -> None:
    """Print facts on stderr, with ``quiet`` only cautions."""
    for fact in facts:
        if not quiet or fact.is_caution:
            say(f"warning: {fact}" if fact.is_caution else str(fact))
