"""Runs: train a model with a recipe, and write the model and its figures into a run folder (see ``folder``)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided import files
from lopsided.data.prepare import Sources
from lopsided.data.sources import SOURCE_NAMES, Source
from lopsided.data.sources.vectors import is_vectors
from lopsided.data.stored import is_address
from lopsided.errors import InputError, RunError, sentence
from lopsided.facts import Fact, notes
from lopsided.inference.feature_cache import ReadableImages
from lopsided.models.pretrained import check_encoder
from lopsided.ranks import ALONE, Ranks
from lopsided.recipe import RUNTIME_FIELDS, Recipe, words
from lopsided.runs.duration import Expected, expect
from lopsided.runs.folder import CHECKPOINT, LOG, METRICS, RECIPE, TRACKERS, Run, read_metrics
from lopsided.runs.metrics import check_metrics
from lopsided.runs.results import write_results

if TYPE_CHECKING:
    from lopsided.data.images import Progress
    from lopsided.facts.log import Reporter
    from lopsided.runs.engines import Engine
    from lopsided.runs.view import View


def run_recipe(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    why: Sequence[Fact] = (),
    sources: Sources | None = None,
    opened: tuple[Source, Source | None] | None = None,
    engine: Engine | None = None,
    view: View | None = None,
) -> Run:
    """Train with a recipe, write the results to the folder ``out`` and return the finished run.

    ``data`` replaces the source of the recipe. ``resume`` continues a run of the same recipe, starts a run that does
    not exist, and returns a finished run unchanged. Nothing is written before the data have been read. An error before
    the first checkpoint removes the folder again. ``progress`` receives the number of checked images. ``why`` are
    the reasons for the choice of the recipe; they become notes of the run. ``sources`` may have listed the images
    already. ``opened`` are the checked images of a recipe that is settled. A recipe with folds trains one run per fold
    (see ``folds``), on an ``engine`` several at once; ``view`` receives their events.

    With several ``ranks``, each rank reads the data itself. Only the first rank uses the folder. All ranks return the
    same result.
    """
    from lopsided.runs import folds

    if opened is None:
        recipe = settle(recipe, data)
    folder, recorded, expected = Path(out), recipe, None

    def state() -> str:
        nonlocal recorded
        found = _found(folder, recipe, resume)
        recorded = recipe if found is None else found.recipe  # It may differ in fields that decide nothing.
        if found is not None and found.metrics is not None:
            check_metrics(folder / METRICS, found.metrics)
            return "finished"
        return "new" if found is None else "unfinished"

    def checked_state() -> str:
        """Raise for what is wrong before images are read and torch is imported, which takes long."""
        files.check_no_links(folder)
        files.check_free(folder)
        if recipe.track:
            from lopsided.trackers import tracker

            tracker.check(recipe.track)
        found = state()
        if found != "finished":
            _check_early(recipe, folder)
        return found

    if ranks.told(checked_state) != "finished":
        if opened is None:
            opened = (sources or Sources()).open(recipe, progress, ReadableImages(), cues=True)
            expected = _tell_time(recipe, opened, reporter) if ranks.size == 1 else None
        with ExitStack() as held:
            if ranks.first:
                held.enter_context(_made(folder))
                held.enter_context(files.lock(folder, patient=True))
            found = ranks.told(state)  # Another process may have used the folder since.
            if found != "finished":
                task = Task(folder, recipe, *opened, found == "unfinished", reporter, ranks, why)
                if folds.has_folds(recipe):
                    folds.train_folds(task, engine, view, expected)
                else:
                    _train(task)
    elif ranks.first:
        from lopsided.runs.tracking import finish_left

        files.remove_left_lock(folder)  # A process may have been killed after it wrote the last file.
        finish_left(folder, recipe, reporter)
        if folds.has_folds(recipe):
            folds.tidy(folder)
    return Run(folder, recorded, ranks.told(lambda: read_metrics(folder)))


def _tell_time(recipe: Recipe, opened: tuple[Source, Source | None], reporter: Reporter | None) -> Expected | None:
    """Return how long a run will take, and say it, if anybody listens."""
    expected = None if reporter is None else expect(recipe, opened)
    if reporter is not None and expected is not None:
        seconds, features = round(expected.seconds, 1), round(expected.all_features, 1)
        reporter.fact(notes.expected_time(seconds, features, expected.trainings))
    return expected


def _check_early(recipe: Recipe, folder: Path) -> None:
    """Raise for simple mistakes in a recipe, and if nothing can be written to the folder."""
    check_encoder(recipe.encoder.spec)
    if recipe.data.origin is not None:
        from lopsided.runs.origins import check_origin

        check_origin(recipe)
    if recipe.device not in ("auto", "cpu"):
        from lopsided.models.machine import pick_device

        pick_device(recipe.device)
    with _made(folder), files.disk_errors(folder), tempfile.TemporaryFile(dir=folder):
        pass


@dataclass(frozen=True, eq=False)
class Task:
    """A run to train in its folder, whose lock the caller holds, with images that are checked."""

    folder: Path
    recipe: Recipe
    source: Source
    held_out: Source | None
    resume: bool
    reporter: Reporter | None
    ranks: Ranks
    why: Sequence[Fact]

    @contextmanager
    def begun(self, is_kept: Callable[[], bool]) -> Iterator[Reporter | None]:
        """Begin the run in its folder, unless it is resumed, and yield a reporter that also feeds its trackers.

        An error takes the beginning back if nothing ``is_kept`` to continue. Only the first rank writes and tracks.
        """
        folder, recipe, first = self.folder, self.recipe, self.ranks.first
        try:
            if not self.resume and first:
                files.atomic_write(folder / RECIPE, recipe.to_toml())
            if recipe.track and first:
                from lopsided.runs.tracking import tracked

                with tracked(folder, recipe, self.reporter) as watcher:
                    yield watcher
            else:
                yield self.reporter
        except Exception:
            if not self.resume and first and not is_kept():
                from lopsided.trackers.tracker import TENSORBOARD

                for name in (CHECKPOINT, TENSORBOARD):
                    shutil.rmtree(folder / name, ignore_errors=True)
                for name in (RECIPE, LOG, TRACKERS):
                    with suppress(OSError):  # The original error matters, not an error of this cleanup.
                        (folder / name).unlink()
            raise


def _train(task: Task) -> None:
    from lopsided.training.checkpoint import Checkpoint
    from lopsided.training.fit import fit

    folder, recipe, source, ranks = task.folder, task.recipe, task.source, task.ranks
    with task.begun(Checkpoint(folder).exists) as watcher:
        fitted = fit(
            recipe, source, folder, held_out=task.held_out, resume=task.resume, reporter=watcher, ranks=ranks,
            why=task.why,
        )  # fmt: skip
        if ranks.first:
            write_results(folder, recipe, source, fitted, ranks.size)


def settle(recipe: Recipe, data: str | os.PathLike[str] | None = None) -> Recipe:
    """Return the recipe with ``data`` as its source and with absolute paths, which are valid in any folder."""
    source = recipe.data.source if data is None else os.fspath(data)
    if source is None:
        do = "Write lopsided fit DATA, or set data.source in the recipe."
        raise InputError(f"DATA is missing, and the recipe names no source. {do}")
    weights = recipe.encoder.spec.change_files(os.path.abspath)
    if source not in SOURCE_NAMES and not is_address(source):
        source = os.path.abspath(source)
    changes: dict[str, Any] = {"data.source": source, "encoder.weights": weights}
    if is_vectors(source):
        changes |= recipe.vector_fields()
    elif weights == "embedded":
        changes["augment.normalisation"] = "weights"
    if recipe.track:
        from lopsided.trackers import tracker

        changes["track"] = tuple(dict.fromkeys(map(tracker.settle, recipe.track)))
    for field in ("more", "corrections"):
        tables = getattr(recipe.data, field)
        if tables is not None:
            changes[f"data.{field}"] = [os.path.abspath(path) for path in tables]
    before = {path: value for path, _, value in words.leaves(recipe)}
    return recipe if all(before[path] == value for path, value in changes.items()) else recipe.override(**changes)


def _found(folder: Path, recipe: Recipe, resume: bool) -> Run | None:
    """Return the existing run that may be continued, or None if the folder is empty or missing."""
    if folder.exists() and not folder.is_dir():
        raise RunError(sentence("--out must be a folder", f"{folder}, which is a file"))
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    # A killed process may have left its lock and temporary files.
    if all(name == files.LOCK_NAME or (name.startswith(".") and name.endswith(".tmp")) for name in names):
        return None
    if not resume:
        do = "Choose another folder, or continue its run with --resume."
        raise RunError(f"The folder {folder} is not empty. {do}")
    run = Run.open(folder)
    before = {path: value for path, _, value in words.leaves(run.recipe)}
    for path, _, value in words.leaves(recipe):
        if path not in RUNTIME_FIELDS and before[path] != value:
            differs = f"The run in {folder} has {path} = {before[path]!r}, but the recipe has {value!r}."
            raise RunError(f"{differs} Keep the old value, or choose another folder.")
    return run


_CHANCES = 20


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create a folder and its parents. Remove new folders that are empty at the end of the block."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for chance in range(_CHANCES, 0, -1):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            break
        except OSError as error:
            # Another process may just have removed a parent that it had made and left empty.
            if chance == 1 or not isinstance(error, FileNotFoundError):
                text = f"cannot create the folder {folder} ({error.strerror}). Choose another folder."
                raise RunError(text) from None
    try:
        yield
    finally:
        files.remove_empty(*missing)
