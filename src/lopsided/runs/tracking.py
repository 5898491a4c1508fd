"""Trackers of a run or of a sweep: they receive its events, and a tracker that fails is left out with a warning.

``trackers.json`` in a run folder holds what a tracker needs to continue the run, and whether the run has ended there. A
run below ``folds/`` or ``cells/`` of another folder is a child of the run or sweep in that folder.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lopsided import files
from lopsided.errors import LopsidedError, RunError
from lopsided.facts import Fact, cautions, notes
from lopsided.facts.log import LOG_NAME, Log, Reporter
from lopsided.recipe import Recipe
from lopsided.recipe.words import leaves
from lopsided.runs.folder import TRACKERS, Run, read_metrics
from lopsided.runs.keys import coordinates, proportion
from lopsided.runs.plan import Cell
from lopsided.runs.progress import Voice
from lopsided.runs.records import Record
from lopsided.trackers import Status, TrackedRun, Tracker
from lopsided.trackers import tracker as trackers
from lopsided.trackers.tracker import Epoch

NESTS = ("folds", "cells")
"""Folders whose sub-folders are runs that belong to the folder around them."""
_NO_FIGURES = frozenset({"stage", "epoch"})
_SMALL_FILES = ("recipe.toml", "metrics.json", "predictions.csv", LOG_NAME, "labels.csv")
_MODEL_FILES = ("model.json", "model.safetensors")


class Trackers:
    """Several trackers of one run. Each call reaches all of them; one that raises is left out from then on."""

    def __init__(self, texts: Sequence[str], folder: Path, warn: Callable[[Fact], None]) -> None:
        self._texts, self._folder, self._warn = dict.fromkeys(texts), folder, warn
        self._running: dict[str, Tracker] = {}
        self._keys: dict[str, str] = {}

    def start(self, run: TrackedRun) -> None:
        """Start all trackers, or continue them, and write down how to find their runs again."""
        keys = read_keys(self._folder)[0]
        above = {} if run.parent_folder is None else read_keys(run.parent_folder)[0]
        for text in self._texts:
            with self._guarded(text):
                tracker = trackers.make(text)
                own = {**vars(run), "key": keys.get(text), "parent": above.get(text)}
                keys[text] = str(tracker.start(TrackedRun(**own)))
                self._running[text] = tracker
        self._keys = keys  # A tracker that is not named this time keeps its run.
        self._write(ended=False)

    @property
    def running(self) -> list[str]:
        """The trackers that have not failed."""
        return list(self._running)

    def epoch(self, epoch: Epoch) -> None:
        """Pass on the figures of an epoch."""
        self._each("epoch", epoch.step, epoch.stage, epoch.figures)
        if epoch.recall:
            self._each("recall", epoch.step, "val", epoch.recall)

    def end(
        self,
        step: int,
        status: Status,
        figures: Mapping[str, float] | None = None,
        recall: Mapping[str, Mapping[str, float]] | None = None,
        paths: Sequence[Path] = (),
    ) -> None:
        """Pass on the results, the recall of each split and the files, and end all trackers."""
        for split, values in (recall or {}).items():
            self._each("recall", step, split, values)
        there = [path for path in paths if path.is_file()]
        if there:
            self._each("artifacts", there)
        self._each("end", step, status, figures or {})
        if status == "finished":
            self._write(ended=True)

    def _each(self, method: str, *arguments: Any) -> None:
        for text, tracker in list(self._running.items()):
            with self._guarded(text):
                getattr(tracker, method)(*arguments)

    @contextmanager
    def _guarded(self, text: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # A tracker is other people's code, and the run matters more than it.
            self._running.pop(text, None)
            reason = " ".join(str(error).split())[:200]
            told = f"{type(error).__name__}: {reason}".removesuffix(": ")
            self._warn(cautions.tracker_failed(text, told))

    def _write(self, *, ended: bool) -> None:
        if self._keys:
            try:
                content = json.dumps({"keys": self._keys, "ended": ended}, indent=2) + "\n"
                files.atomic_write(self._folder / TRACKERS, content)
            except RunError as error:
                self._warn(cautions.trackers_cannot_resume(str(error)))


def read_keys(folder: Path) -> tuple[dict[str, str], bool]:
    """Return the keys of the trackers of a run, and whether the run has ended there. Damaged files count as missing."""
    try:
        content = json.loads(files.read_whole(folder / TRACKERS))
        keys = content["keys"]
        if isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values()):
            return dict(keys), content["ended"] is True
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return {}, False


class Tracking(Reporter):
    """Passes the events of a run on to another reporter and to the trackers of its recipe."""

    def __init__(
        self, folder: Path, recipe: Recipe, reporter: Reporter | None, texts: Sequence[str] | None = None
    ) -> None:
        self.inner = reporter
        self._folder, self._recipe = folder, recipe
        self._log = Log(folder, reporter)  # A caution about a tracker is a line of the log, not one about the metrics.
        self._trackers = Trackers(recipe.track if texts is None else texts, folder, self._log.fact)
        self._classes: Sequence[str] = ()
        self._step = 0
        self._began = False

    def begin(self, classes: Sequence[str], history: Sequence[Mapping[str, Any]]) -> None:
        """Start the trackers, or continue them after the epochs in ``history``."""
        super().begin(classes, history)
        self._classes, self._step, self._began = classes, len(history), True
        past = [_epoch(step, facts, classes) for step, facts in enumerate(history, start=1)]
        self._trackers.start(_described(self._folder, self._recipe, past))
        if self._trackers.running:
            self._log.fact(notes.tracked(self._trackers.running))

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        """Pass on an epoch, also to the trackers."""
        self._step += 1
        self._trackers.epoch(_epoch(self._step, facts, self._classes))
        super().epoch(index, facts)

    def finish(self) -> None:
        """End the trackers with the results of the run. The run is complete, so an error here is only a warning."""
        names = _SMALL_FILES if _parent(self._folder) else (*_SMALL_FILES, *_MODEL_FILES)
        try:
            figures, recall = results(_metrics(self._folder))
        except Exception as error:
            self._log.fact(cautions.results_not_sent(f"{type(error).__name__}: {error}"))
            return
        self._trackers.end(self._step, "finished", figures, recall, [self._folder / name for name in names])

    def stop(self, error: BaseException) -> None:
        """End the trackers of a run that did not finish."""
        if self._began:
            self._trackers.end(self._step, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")


@contextmanager
def tracked(folder: Path, recipe: Recipe, reporter: Reporter | None) -> Iterator[Reporter]:
    """Yield a reporter that also feeds the trackers of a recipe, and end them with the block.

    The block must write ``metrics.json``.
    """
    tracking = Tracking(folder, recipe, reporter)
    try:
        yield tracking
    except BaseException as error:
        tracking.stop(error)
        raise
    tracking.finish()


def finish_left(folder: Path, recipe: Recipe, reporter: Reporter | None = None) -> None:
    """End the trackers of a finished run whose process was killed before it could do so.

    Trackers that the run did not have receive its epochs and results, unless it is part of another run.
    """
    keys, ended = read_keys(folder)
    left = bool(keys) and not ended
    late = [] if _is_part(folder) else [text for text in recipe.track if text not in keys]
    texts = recipe.track if left else late
    if not texts:
        return
    with suppress(LopsidedError, OSError):  # The run is complete, and its log may be gone.
        tracking = Tracking(folder, recipe, reporter, texts)
        tracking.begin(_metrics(folder).get("classes", ()), _epochs_of(folder))
        tracking.finish()


@contextmanager
def tracked_sweep(
    folder: Path,
    cells: Sequence[Cell],
    done: Mapping[str, Record | None],
    about: Mapping[str, Any],
    warn: Callable[[Fact], None],
) -> Iterator[None]:
    """Track a sweep while the block runs. At its end, ``done`` holds the records of the finished cells."""
    texts = list(dict.fromkeys(text for cell in cells for text in cell.recipe.track))
    if not texts:
        yield
        return
    new = [text for text in texts if text not in read_keys(folder)[0]]
    if done and new:
        warn(cautions.cells_not_sent(len(done), new))
    if len(done) == len(cells):
        yield
        return
    trackers = Trackers(texts, folder, warn)
    facts = {name: ", ".join(map(str, value)) for name, value in about.items() if isinstance(value, list)}
    facts |= {name: value for name, value in about.items() if isinstance(value, str)}
    name = folder.absolute().name
    trackers.start(TrackedRun(name, folder, parameters={**facts, "cells": len(cells)}))
    try:
        yield
    except BaseException as error:
        trackers.end(0, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    trackers.end(0, "finished", _means(cells, done), paths=[folder / "records.jsonl"])


def _means(cells: Sequence[Cell], done: Mapping[str, Record | None]) -> dict[str, float]:
    """Return the mean balanced accuracy of the test images of each method or loss, in each scenario."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        record = done.get(cell.key)
        if record is not None:
            own = [proportion(cell.recipe.data.scenario), cell.compared_as or cell.recipe.loss.label]
            found.setdefault(f"uwa/{' '.join(filter(None, own))}", []).append(record.test.uwa)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return {name: value for name, value in means.items() if math.isfinite(value)}


def results(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the figures of a run with the limits of their intervals, and the recall of each class by split."""
    figures: dict[str, float] = {}
    recall: dict[str, dict[str, float]] = {}
    for split in ("test", "held_out", "val"):
        found = metrics.get(split)
        if found is None:
            continue
        for name, figure in found["figures"].items():
            parts = {"": "value", "_low": "low", "_high": "high"}
            figures |= {f"{split}/{name}{end}": figure[part] for end, part in parts.items()}
        if split != "val":  # The epochs already have that of the validation images.
            recall[split] = {row["label"]: row["recall"]["value"] for row in found["per_class"]}
    figures["seconds"] = metrics["seconds"]
    return _numbers(figures), {split: _numbers(values) for split, values in recall.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among values. An undefined figure is None."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _epoch(step: int, facts: Mapping[str, Any], classes: Sequence[str]) -> Epoch:
    figures = _numbers({name: value for name, value in facts.items() if name not in _NO_FIGURES})
    recall = facts.get("val_recall")
    values = recall if isinstance(recall, list) and len(recall) == len(classes) else [None] * len(classes)
    return Epoch(step, str(facts.get("stage", "")), figures, _numbers(dict(zip(classes, values, strict=True))))


def _described(folder: Path, recipe: Recipe, history: Sequence[Epoch]) -> TrackedRun:
    parent = _parent(folder)
    return TrackedRun(
        name=folder.name if parent is None else _child_name(folder, recipe),
        folder=folder,
        parameters={path: value for path, _, value in leaves(recipe)},
        recipe=recipe.to_toml(),
        parent_folder=parent,
        history=history,
    )


def _parent(folder: Path) -> Path | None:
    """Return the folder of the run with folds or of the sweep that a run belongs to."""
    absolute = folder.absolute()
    above = absolute.parent.parent
    return above if absolute.parent.name in NESTS and (above / TRACKERS).is_file() else None


def _is_part(folder: Path) -> bool:
    """Return whether a run is a fold of another run or a cell of a sweep, tracked or not."""
    nest = folder.absolute().parent
    return nest.name in NESTS and any((nest.parent / name).is_file() for name in ("recipe.toml", "sweep.json"))


def _child_name(folder: Path, recipe: Recipe) -> str:
    if folder.parent.name == "folds":
        return f"fold {folder.name}" if folder.name.isdigit() else folder.name
    what = coordinates(proportion(recipe.data.scenario), recipe.loss.label, recipe.seed, recipe.data.fold)
    return f"{what} {folder.name[:8]}"  # Two methods may have the same loss.


def _metrics(folder: Path) -> dict[str, Any]:
    return read_metrics(folder) or {}


def _epochs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the last line of each epoch in the log of a run."""
    found = {(e.get("stage"), e.get("epoch")): e for e in Run.open(folder).events() if e["event"] == "epoch"}
    return [{name: value for name, value in e.items() if name not in ("event", "time")} for e in found.values()]


def say_trackers(recipe: Recipe, asked: Sequence[str]) -> None:
    """Print the trackers that the file of a recipe names and the user does not: a file may come from someone else."""
    unused = [text for text in recipe.unused_trackers if text not in asked]
    if unused:
        options = " ".join(f"--track {shlex.quote(text)}" for text in unused)
        Voice().say(f"The recipe names trackers, which a file cannot switch on. To use them, add {options}.")
