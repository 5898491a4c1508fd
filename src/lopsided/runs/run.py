"""Run folders: train a model with a recipe and write the model and its figures.

A run folder holds ``recipe.toml``, ``log.jsonl``, ``predictions.csv``, ``model.safetensors`` with ``model.json``,
``features.safetensors``, ``checkpoint/`` and ``metrics.json``. A run is finished when it has ``metrics.json``, which is
written last. A run with folds has ``folds/`` instead of ``checkpoint/`` (see ``folds``).
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save

from lopsided import __version__, files
from lopsided.data.more import training_source
from lopsided.data.prepare import open_sources, split_source
from lopsided.data.sources import SOURCE_NAMES, Source
from lopsided.data.splits import Leaks
from lopsided.errors import InputError, RunError, sentence
from lopsided.evaluation.decision import HeldBack, decided_unseen, figures_by_rule
from lopsided.evaluation.folds import named_out_of_fold
from lopsided.evaluation.metrics import evaluate
from lopsided.inference.predict import PROBABILITY
from lopsided.inference.use import Use, choose_use
from lopsided.models.names import check_encoder_name
from lopsided.models.pretrained import EMBEDDED, check_embedded
from lopsided.recipe import RUNTIME_FIELDS, WEIGHT_NAMES, Recipe, words
from lopsided.recipe.rules import parse_rule
from lopsided.recipe.weights import JOINT, change_files, split_weights
from lopsided.runs.metrics import check_metrics
from lopsided.trackers import catalogue as trackers

if TYPE_CHECKING:
    from lopsided.data.images import Progress
    from lopsided.distributed import Ranks
    from lopsided.inference.probabilities import Predictions
    from lopsided.models.model import Model, ModelCard
    from lopsided.runs.folds import Parallel
    from lopsided.training.fit import Fitted
    from lopsided.training.reporter import Reporter

FORMAT = 1
"""The format version of a run folder. It increases when an older version could misread a newer folder."""

RECIPE, METRICS, PREDICTIONS, LOG, CARD = "recipe.toml", "metrics.json", "predictions.csv", "log.jsonl", "model.json"
FEATURES, CHECKPOINT = "features.safetensors", "checkpoint"
DECISION_FIELDS = ("prior", "temperature", "bias", "calibrated_on", "decision")
"""The fields of a model card that say how the model decides. ``metrics.json`` repeats them."""
MAX_TABLE = 1 << 30
"""Maximum bytes of ``predictions.csv``, which is read at once. A million images need only a fraction of this."""


@dataclass(frozen=True)
class Run:
    """An opened run folder. ``metrics`` is None until the run is finished."""

    folder: Path
    recipe: Recipe
    metrics: dict[str, Any] | None

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Open a run folder, finished or not."""
        path = Path(folder)
        if not (path / RECIPE).is_file():
            missing = f"which has no {RECIPE}" if path.is_dir() else "which does not exist"
            raise RunError(sentence("RUN must be the folder of a run", f"{path}, {missing}"))
        try:
            recipe = Recipe.load(path / RECIPE)
        except InputError as error:
            do = f"This is lopsided {__version__}; if another version wrote the run, use that version."
            raise RunError(f"{error} {do}") from None
        return cls(path, recipe, _read_metrics(path))

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.metrics is not None

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the log, oldest first. Unfinished lines of a killed process are skipped."""
        path = self.folder / LOG
        try:
            files.check_regular(path, files.MAX_BYTES)
        except OSError as error:
            raise RunError(sentence(f"{LOG} must be a readable log", f"{path} ({error.strerror})")) from None
        with path.open(encoding="utf-8", errors="replace") as log:
            for line in log:
                event = None
                with suppress(ValueError, RecursionError):
                    event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event

    def predictions(self) -> list[dict[str, str]]:
        """Return the rows of ``predictions.csv``."""
        files.check_regular(self.folder / PREDICTIONS, MAX_TABLE)
        with (self.folder / PREDICTIONS).open(encoding="utf-8", errors="surrogateescape", newline="") as table:
            return list(csv.DictReader(table))

    def features(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the encoder features of each split, in the order of its predictions. Empty if the file is missing."""
        path = self.folder / FEATURES
        if not path.is_file():
            return {}
        try:
            with files.reading_tensors():
                found = dict(load_file(path))
            odd = [name for name, part in found.items() if part.ndim != 2 or part.dtype != np.float32]
        except (OSError, ValueError) as error:
            got = f"{path} ({files.reason(error)})"
            raise RunError(sentence(f"{FEATURES} must be a readable safetensors file", got)) from None
        if odd:
            got = f"{found[odd[0]].dtype} of shape {found[odd[0]].shape} for {odd[0]!r:.40} in {path}"
            raise RunError(sentence(f"{FEATURES} must hold a float32 vector for each image", got))
        return found


def open_model(folder: str | os.PathLike[str], device: str = "auto") -> tuple[Model, ModelCard]:
    """Load the model of a finished run, or of any folder with ``model.safetensors`` and ``model.json``.

    The model must be an image model. The estimator has its own method to load models, including vector models.
    """
    path = Path(folder)
    if (path / RECIPE).is_file() and not (path / CARD).is_file():
        do = f"Continue it with lopsided fit --out {shlex.quote(str(path))} --resume."
        raise RunError(f"The run in {path} is not finished. {do}")
    if not (path / CARD).is_file():
        raise RunError(f"{path} holds no {CARD}. Give the folder of a finished run.")
    from lopsided.models.machine import pick_device
    from lopsided.models.model import load_model

    model, card = load_model(path, pick_device(device))
    if card.kind != "image":
        do = "Load it with lopsided.TwoStageClassifier."
        raise RunError(f"The model in {path} is not an image model but of kind {card.kind}. {do}")
    return model, card


def open_own_split(
    folder: str | os.PathLike[str], split: str, progress: Progress | None = None
) -> tuple[Source, Recipe]:
    """Open the images of one split of a finished run again, with the recipe of the run.

    Raise if the images, their labels or the split differ from those of the run.
    """
    from lopsided.training.fit import fingerprint

    run = Run.open(folder)
    do = f"Name the data: lopsided evaluate {shlex.quote(str(folder))} DATA."
    known = None if run.metrics is None else run.metrics.get("fingerprint")
    if run.metrics is None:
        again = f"Continue it with lopsided fit --out {shlex.quote(str(folder))} --resume."
        raise RunError(f"The run in {folder} is not finished. {again}")
    if not isinstance(known, str):
        raise RunError(f"The run in {folder} does not record its images, so its splits cannot be found again. {do}")
    if split not in ("train", "val", "test"):
        raise InputError(sentence("--split must be train, val or test", split))
    if run.recipe.data.folds is not None and run.recipe.data.fold is None:
        what = f"The model in {folder} has seen all images of its run: its folds tested them with other models"
        raise RunError(f"{what}. metrics.json holds these figures. For other images: lopsided evaluate RUN DATA.")
    source, _ = open_sources(run.recipe, progress)
    source, splits = training_source(source, split_source(run.recipe, source))
    if fingerprint(source, splits, source.images.digest(np.arange(len(source)))) != known:
        what = f"The images or labels of {run.recipe.data.source} have changed since the run was trained"
        raise RunError(f"{what}, so its {split} split cannot be found again. Restore them, or name the data.")
    rows = dict(splits.parts())[split]
    if not len(rows):
        raise RunError(f"The run in {folder} has no {split} split. {do}")
    return source.subset(rows), run.recipe


def open_use(
    folder: str | os.PathLike[str], card: ModelCard, rule: str | None = None, prevalence: str | None = None
) -> Use:
    """Return how to use the model of a run: by its rule or another one, at its prior or at another prevalence.

    Rules that are fitted use the validation images in the ``predictions.csv`` of the run, or the out-of-fold images of
    a run with folds.
    """
    asked = rule or (card.decision.rule if prevalence is not None else None)
    if asked is None or not parse_rule(asked).fitted:
        return choose_use(card, rule, prevalence)
    use = choose_use(card, rule, prevalence, held_back(Path(folder), card))
    path = Path(folder) / RECIPE
    is_single = not path.is_file() or _evaluated(Run.open(folder).recipe) == "val"
    return use if is_single else replace(use, decision=named_out_of_fold(use.decision))


def _evaluated(recipe: Recipe) -> str:
    """Return the split of ``predictions.csv`` to which rules are fitted."""
    return "val" if recipe.data.folds is None or recipe.data.fold is not None else "test"


def held_back(folder: Path, card: ModelCard) -> HeldBack | None:
    """Return the validation images in the ``predictions.csv`` of a run, or None if there are none.

    In a run with folds these are the out-of-fold predictions of all images.
    """
    path = folder / PREDICTIONS
    if not path.is_file() or not (folder / RECIPE).is_file():
        return None
    try:
        run = Run.open(folder)
        rows = [row for row in run.predictions() if row["split"] == _evaluated(run.recipe)]
        places = {name: i for i, name in enumerate(card.classes)}
        p = np.array([[float(row[f"{PROBABILITY}{name}"]) for name in card.classes] for row in rows])
        labels = np.array([places[row["label"]] for row in rows], dtype=np.int64)
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        text = f"{path} is not a valid table of predictions ({files.reason(error)})."
        raise RunError(f"{text} Restore the file, or train the run again.") from None
    groups = np.array([row["group"] for row in rows])
    return HeldBack(p, labels, groups if any(groups) else None) if rows else None


def run_recipe(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    why: str = "",
    sources: tuple[Source, Source | None] | None = None,
    parallel: Parallel | None = None,
) -> Run:
    """Train with a recipe, write the results to the folder ``out`` and return the finished run.

    ``data`` replaces the source of the recipe. ``resume`` continues a run of the same recipe, starts a run that does
    not exist, and returns a finished run unchanged. Nothing is written before the data have been read. An error before
    the first checkpoint removes the folder again. ``progress`` receives the number of checked images. ``why`` is the
    reason for the choice of the recipe; it becomes a note of the run. ``sources`` are the images of the recipe, if the
    caller has opened and checked them. A recipe with folds trains one run per fold (see ``folds``), several at once
    with ``parallel``.

    With several ``ranks``, each rank reads the data itself. Only the first rank uses the folder. All ranks return the
    same result.
    """
    from lopsided.runs import folds
    from lopsided.runs.tracking import finish_left

    recipe = settle(recipe, data)
    folder = Path(out)
    first = ranks is None or ranks.first

    def state() -> str:
        found = _found(folder, recipe, resume)
        if found is not None and found.metrics is not None:
            check_metrics(folder / METRICS, found.metrics)
            return "finished"
        return "new" if found is None else "unfinished"

    def told(make: Callable[[], Any]) -> Any:
        return make() if ranks is None else ranks.told(make)

    told(lambda: files.check_no_links(folder))
    told(lambda: files.check_free(folder))  # Before reading the data, which may take long.
    told(lambda: trackers.check(recipe.track))
    if told(state) != "finished":
        told(lambda: _check_early(recipe, folder))
        sources = sources or open_sources(recipe, progress)
        with _held(folder) if first else nullcontext():
            found = told(state)  # Another process may have used the folder since.
            if found != "finished":
                watched: dict[str, Any] = {"reporter": reporter, "ranks": ranks, "why": why}
                resumes = found == "unfinished"
                if folds.has_folds(recipe):
                    folds.train_folds(folder, recipe, *sources, resume=resumes, parallel=parallel, **watched)
                else:
                    _train(folder, recipe, *sources, resume=resumes, **watched)
    elif first:
        files.remove_left_lock(folder)  # A process may have been killed after it wrote the last file.
        finish_left(folder, recipe, reporter)
        if folds.has_folds(recipe):
            folds.tidy(folder)
    metrics = told(lambda: Run.open(folder).metrics)
    return Run.open(folder) if first else Run(folder, recipe, metrics)


def check_encoder(recipe: Recipe) -> None:
    """Raise if the encoder of a recipe or its weights certainly do not exist, without importing torch."""
    names = recipe.encoder.name.split(JOINT)
    for name, weights in zip(names, split_weights(recipe.encoder.weights, names), strict=True):
        check_encoder_name(name)
        if weights == EMBEDDED:
            check_embedded(name)
        elif weights not in WEIGHT_NAMES and not os.path.exists(weights):
            got = f"{weights} (No such file or directory)"
            raise InputError(sentence("encoder.weights must be a readable safetensors file", got))


def _check_early(recipe: Recipe, folder: Path) -> None:
    """Raise for simple mistakes before images are read and torch is imported, which takes long."""
    check_encoder(recipe)
    made = _make(folder)
    try:
        with files.disk_errors(folder), tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Create a folder if necessary and lock it while the block runs. Remove new folders that stay empty."""
    made = _make(folder)
    try:
        with files.lock(folder):
            yield
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()  # Removes empty folders only.


def _train(
    folder: Path,
    recipe: Recipe,
    source: Source,
    held_out: Source | None,
    *,
    resume: bool,
    reporter: Reporter | None,
    ranks: Ranks | None = None,
    why: str = "",
) -> None:
    from lopsided.runs.tracking import TRACKERS, tracked
    from lopsided.trackers.tensorboard import FOLDER as TENSORBOARD
    from lopsided.training.checkpoint import Checkpoint
    from lopsided.training.fit import fit

    writes = ranks is None or ranks.first
    try:
        if not resume and writes:
            files.atomic_write(folder / RECIPE, recipe.to_toml())
        with tracked(folder, recipe, reporter, first=writes) as watcher:
            fitted = fit(
                recipe, source, folder, held_out=held_out, resume=resume, reporter=watcher, ranks=ranks, why=why
            )
            if writes:
                _write_results(folder, recipe, source, fitted, 1 if ranks is None else ranks.size)
    except Exception:
        if writes and not resume and not Checkpoint(folder).exists():  # The run cannot be continued.
            for name in (CHECKPOINT, TENSORBOARD):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in (RECIPE, LOG, TRACKERS):
                with suppress(OSError):  # The original error matters, not an error of this cleanup.
                    (folder / name).unlink()
        raise


def settle(recipe: Recipe, data: str | os.PathLike[str] | None = None) -> Recipe:
    """Return the recipe with ``data`` as its source and with absolute paths, which are valid in any folder."""
    source = recipe.data.source if data is None else os.fspath(data)
    if source is None:
        do = "Write lopsided fit DATA, or set data.source in the recipe."
        raise InputError(f"DATA is missing, and the recipe names no source. {do}")
    weights = change_files(recipe.encoder.name, recipe.encoder.weights, os.path.abspath)
    changes: dict[str, Any] = {"data.source": _absolute(source), "encoder.weights": weights}
    if recipe.track:
        changes["track"] = tuple(dict.fromkeys(map(trackers.settle, recipe.track)))
    if recipe.data.more is not None:
        changes["data.more"] = [os.path.abspath(path) for path in recipe.data.more]
    return recipe.override(**changes)


def trained_on(folder: str | os.PathLike[str], data: str | os.PathLike[str]) -> bool:
    """Return whether a model was trained on this source, or on a folder inside or around it, as far as known."""
    path = Path(folder) / RECIPE
    try:
        source = Recipe.load(path).data.source if path.is_file() else None
    except InputError:
        source = None
    if source is None:
        return False
    if source in SOURCE_NAMES or data in SOURCE_NAMES:
        return source == os.fspath(data)
    then, now = Path(os.path.realpath(source)), Path(os.path.realpath(data))
    return then.is_relative_to(now) or now.is_relative_to(then)


def _absolute(source: str) -> str:
    return source if source in SOURCE_NAMES else os.path.abspath(source)


def environment(recipe: Recipe, num_ranks: int = 1) -> dict[str, Any]:
    """Return the versions and settings that can change figures in addition to the recipe."""
    import torch

    from lopsided.models.machine import pick_device

    packages = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "pillow", "onnxruntime")
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(pick_device(recipe.device)),
        "threads": recipe.threads or torch.get_num_threads(),
        "ranks": num_ranks,
        "packages": {name: metadata.version(name) for name in packages},
    }


def _read_metrics(folder: Path) -> dict[str, Any] | None:
    path = folder / METRICS
    try:
        content = json.loads(files.read_whole(path))
        written = content["format"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"{path} ({files.reason(error)})"
        raise RunError(sentence(f"{METRICS} must be a readable record of a run", got)) from None
    if written != FORMAT:
        do = f"Open it with lopsided {content.get('lopsided', 'of that version')!s:.40}, which wrote it."
        got = f"format {words.shown(written)} in {path}"
        raise RunError(sentence(f"a run must have format {FORMAT}", got, do))
    return dict(content)


def _found(folder: Path, recipe: Recipe, resume: bool) -> Run | None:
    """Return the existing run that may be continued, or None if the folder is empty or missing."""
    if folder.exists() and not folder.is_dir():
        raise RunError(sentence("--out must be a folder", f"{folder}, which is a file"))
    if not folder.exists() or all(path.name == files.LOCK_NAME or _is_temporary(path) for path in folder.iterdir()):
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


def _is_temporary(path: Path) -> bool:
    """Return whether a path is a temporary file, which a killed process may have left."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _make(folder: Path) -> list[Path]:
    """Create a folder and its parents. Return the new folders, the deepest first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create the folder {folder} ({error.strerror}). Choose another folder.") from None
    return missing


def _write_results(folder: Path, recipe: Recipe, source: Source, fitted: Fitted, num_ranks: int) -> None:
    parts = {"val": fitted.val, "test": fitted.test, "held_out": fitted.held_out}
    decided = {name: part.y_pred for name, part in parts.items() if part is not None}
    val, card = fitted.val, fitted.card
    if val is not None and val.y_true is not None and card.prior is not None and parse_rule(card.decision.rule).fitted:
        held = HeldBack(val.probabilities, val.y_true, val.groups)
        decided["val"] = decided_unseen(card.decision.rule, card.classes, card.prior, held, recipe.seed)
    write_tables(folder, parts, decided, source.classes)
    joined, _ = training_source(source, fitted.splits)
    write_metrics(
        folder,
        recipe,
        source,
        counts={name: joined.subset(indices).counts() for name, indices in fitted.splits.parts()},
        card=card,
        evaluations={name: _figures(name, parts, decided, recipe.seed, fitted.card) for name in parts},
        leaks=fitted.leaks,
        baseline=fitted.baseline,
        warnings=fitted.warnings,
        num_ranks=num_ranks,
        fingerprint=fitted.fingerprint,
        seconds=fitted.seconds,
    )


def write_tables(
    folder: Path,
    parts: Mapping[str, Predictions | None],
    decided: Mapping[str, npt.NDArray[np.int64]],
    classes: Sequence[str],
) -> None:
    """Write the predictions and the features of each split."""
    files.atomic_write(folder / PREDICTIONS, _table(parts, decided, classes))
    features = {name: part.features for name, part in parts.items() if part is not None and part.features is not None}
    files.atomic_write(folder / FEATURES, save(features))


def write_metrics(
    folder: Path,
    recipe: Recipe,
    source: Source,
    *,
    counts: Mapping[str, Mapping[str, int]],
    card: ModelCard,
    evaluations: Mapping[str, Mapping[str, Any] | None],
    leaks: Leaks,
    warnings: Sequence[str],
    num_ranks: int,
    fingerprint: str,
    seconds: float,
    baseline: Mapping[str, Any] | None = None,
    folds: Mapping[str, Any] | None = None,
) -> None:
    """Write ``metrics.json``, which marks a run as finished."""
    record = {
        "format": FORMAT,
        "lopsided": __version__,
        "recipe": recipe.content_hash(),
        "method": recipe.method,
        "loss": recipe.loss.name,
        "seed": recipe.seed,
        "source": recipe.data.source,
        "source_name": source.name,
        "classes": list(source.classes),
        "counts": {split: dict(numbers) for split, numbers in counts.items()},
        **({} if folds is None else {"folds": dict(folds)}),
        "decision": card.model_dump(mode="json", include=set(DECISION_FIELDS)),
        **evaluations,
        "leaks": {"groups": list(leaks.groups), "duplicates": [list(pair) for pair in leaks.duplicates]},
        "baseline": baseline,
        "warnings": list(warnings),
        "unreadable": [{"name": name, "reason": reason} for name, reason in source.unreadable],
        "environment": environment(recipe, num_ranks),
        "fingerprint": fingerprint,
        "seconds": round(seconds, 3),
    }
    files.atomic_write(folder / METRICS, json.dumps(record, indent=2, allow_nan=False) + "\n")


def figures_of(part: Predictions, card: ModelCard, seed: int) -> dict[str, Any] | None:
    """Return the figures of images that neither training nor a fitted rule has used."""
    return _figures("held_out", {"held_out": part, "val": None}, {"held_out": part.y_pred}, seed, card)


def _figures(
    split: str,
    parts: Mapping[str, Predictions | None],
    decided: Mapping[str, npt.NDArray[np.int64]],
    seed: int,
    card: ModelCard,
) -> dict[str, Any] | None:
    """Return the figures of a split by the rule of the model, and its UWA by several rules."""
    part = parts[split]
    if part is None or part.y_true is None:
        return None
    p, labels = part.probabilities, part.y_true
    val = parts["val"]
    held = None
    if val is not None and val.y_true is not None and split != "val":
        held = HeldBack(val.probabilities, val.y_true, val.groups)
    figures = evaluate(labels, p, decided[split], classes=part.classes, seed=seed, groups=part.groups).to_dict()
    if split == "val" and parse_rule(card.decision.rule).fitted:
        figures["notes"].append(FITTED_NOTE)
    rules = ("plain", "balanced", "tuned")
    return {**figures, "rules": figures_by_rule(rules, card.classes, card.prior, p, labels, held)}


FITTED_NOTE = (
    "The decision rule was fitted to these images. By folds, each image was decided by a rule that was fitted without "
    "it."
)


def _table(
    parts: Mapping[str, Predictions | None], decided: Mapping[str, npt.NDArray[np.int64]], classes: Sequence[str]
) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["split", "name", "group", "label", "predicted", *(f"{PROBABILITY}{name}" for name in classes)])
    for split, part in parts.items():
        if part is None or part.y_true is None:
            continue
        groups = [""] * len(part.names) if part.groups is None else part.groups.tolist()
        rows = zip(part.names, groups, part.y_true, decided[split], part.probabilities, strict=True)
        for name, group, label, predicted, p in rows:
            numbers = (f"{value:.9g}" for value in p)
            writer.writerow([split, name, group, classes[label], classes[predicted], *numbers])
    return text.getvalue().encode(errors="surrogateescape")
