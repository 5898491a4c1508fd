"""From a recipe and a source to a fitted model: two stages, or end to end.

**Two stages.** The first trains encoder and projection head with a contrastive loss. The second drops the projection,
freezes the encoder in eval mode and trains one linear layer on its features; unless ``classifier.augment``, each image
is encoded once. **End to end** trains encoder and linear layer together for ``encoder_training.epochs``; a baseline of
the same budget (``Recipe.baseline``) has the epochs of both stages there.

**Which epoch is taken.** With a validation split, in every stage the epoch whose ``selection.metric`` is highest, the
later one of equals; training stops early after ``selection.patience`` epochs without a gain. The first stage has no
classifier, so its epochs are judged by the nearest class mean in the encoder's features, from up to 100 training images
of each class. Without a validation split the last epoch is taken. The test split is looked at once, at the end.

**Randomness.** Initial weights, the order of images, augmentation and dropout have seeds by name, stage, epoch and
step, so that no generator's state needs to be saved: an epoch is the same whenever it is run.

**Ranks.** Several processes train one model: the batches, their augmentation and the loss are those of one process
with the same recipe, and each rank computes a share (see ``step`` and ``distributed``). Only dropout differs, whose
masks are drawn by each rank for its own images. Validation and test images are shared, too, each to one rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lopsided import __version__
from lopsided.data.inputs import Part, check_trainable, prepare
from lopsided.data.prepare import split_source
from lopsided.data.sources import Source
from lopsided.data.splits import Leaks, Splits, find_leaks
from lopsided.distributed import Ranks
from lopsided.errors import RunError, sentence
from lopsided.files import make_folder, remove_leftovers
from lopsided.inference.probabilities import (
    Predictions,
    gather_rows,
    predict,
    predict_batch,
    predict_inputs,
    share_rows,
)
from lopsided.models.machine import flushed_denormals, keep_freed_memory, pick_device, threads
from lopsided.models.model import CARD_NAME, Model, ModelCard, load_model, save_model
from lopsided.recipe import Recipe
from lopsided.training.cautions import cautions
from lopsided.training.checkpoint import Checkpoint, State, check_course, load_strictly
from lopsided.training.reporter import Log, Reporter
from lopsided.training.stages import Stages

__all__ = [
    "Fitted",
    "Model",
    "ModelCard",
    "Predictions",
    "Reporter",
    "fit",
    "load_model",
    "predict",
    "predict_batch",
    "save_model",
]

_MAY_DIFFER = ("threads", "ranks", "fast", "torch")
"""Facts of a state that a run may be resumed with others of."""


@dataclass(eq=False)
class Fitted:
    """What a run gave. ``history`` holds the facts of each epoch, as they are in the log."""

    model: Model
    card: ModelCard
    splits: Splits
    leaks: Leaks
    history: list[dict[str, Any]]
    val: Predictions | None
    test: Predictions | None
    held_out: Predictions | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def fit(
    recipe: Recipe,
    source: Source,
    folder: Path | None = None,
    *,
    held_out: Source | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    ranks: Ranks | None = None,
) -> Fitted:
    """Train a model on a source that is already drawn by scenario and verified.

    ``held_out`` is a source of the same classes that has no part in the training; the finished model is judged on it.

    With ``folder``: ``log.jsonl`` gets a line per event, ``checkpoint/`` is written after an epoch when it is due, and
    ``model.safetensors`` with ``model.json`` at the end. With ``resume`` a run that was cut off goes on from its
    checkpoint and ends, on a CPU, with the same bytes as one that never was; a finished one is read back. The caller
    holds the folder's lock.

    With ``ranks``, every rank calls this with the same arguments and gets the same result. The first one alone reads
    and writes the folder and tells the reporter. A run may be resumed with another number of ranks.
    """
    ranks = ranks or Ranks()
    device = pick_device(recipe.device, ranks)
    if recipe.fast:
        keep_freed_memory()
    checkpoint = Checkpoint(folder, ranks)
    saved = _saved(checkpoint, folder, ranks, resume=resume)
    log = Log(folder, reporter) if ranks.first else Log(None, None)
    with threads(recipe.threads) as num_threads, flushed_denormals(recipe.fast):
        splits = split_source(recipe, source)
        prepared, notes = prepare(recipe, source, splits, ranks)
        check_trainable(prepared)
        notes += _unused(source, splits)
        digests = source.images.digest(np.arange(len(source)))
        state = State(
            recipe=recipe.content_hash(),
            data=_fingerprint(source, splits, digests),
            stage="encoder" if recipe.method == "two-stage" else "end-to-end",
            threads=num_threads,
            ranks=ranks.size,
            fast=recipe.fast,
        )
        ranks.check_same("recipe", state.recipe)
        ranks.check_same("images, labels and splits", state.data)
        if saved is not None:
            notes += _check_resumable(state, saved[0])
            check_course(*saved, _stage_epochs(recipe))
            # What the next resume compares with is what this one goes on with.
            now = {name: getattr(state, name) for name in _MAY_DIFFER}
            state = replace(saved[0], **now)
        stages = Stages(recipe, prepared, device, log, checkpoint, ranks)
        stages.build(fresh=saved is None)
        leaks = find_leaks(source, splits, digests)
        if folder is not None and ranks.first:
            remove_leftovers(make_folder(folder))
        _announce(log, recipe, source, splits, device, num_threads, ranks.size, resumed=saved is not None)
        for text in [*notes, *stages.notes()]:
            log.note(text)
        for text in cautions(recipe, prepared, leaks):
            log.warn(text)
        _complete(stages, state, saved[1] if saved is not None else {}, folder)
        fitted = Fitted(
            model=stages.model,
            card=stages.card,
            splits=splits,
            leaks=leaks,
            history=state.history,
            val=_predictions(stages, source, splits.val, prepared.val),
            test=_predictions(stages, source, splits.test, prepared.test),
            held_out=_judged(stages, held_out),
            warnings=log.warnings,
            seconds=state.seconds,
        )
    log.event("end", seconds=fitted.seconds)
    return fitted


def _complete(stages: Stages, state: State, tensors: dict[str, torch.Tensor], folder: Path | None) -> None:
    """Train what is left to train and write the model, or read back the one that is finished."""
    ranks = stages.ranks
    if state.finished and folder is not None:
        stages.checkpoint.tidy(state)  # It may have been broken off before it came to that.
        if ranks.first:
            stages.model, stages.card = load_model(folder, stages.device, fast=stages.recipe.fast)
        if ranks.size > 1:
            load_strictly(stages.model, ranks.spread(stages.model.state_dict))
        stages.model.eval()
        return
    stages.run(state, tensors)
    if folder is not None and ranks.first:
        stages.card = save_model(folder, stages.model, stages.card)
    state.finished, state.chosen = True, None
    stages.checkpoint.save(state, {})


def _saved(
    checkpoint: Checkpoint, folder: Path | None, ranks: Ranks, *, resume: bool
) -> tuple[State, dict[str, torch.Tensor]] | None:
    if folder is None:
        if resume:
            raise RunError(sentence("a run must have a folder to be resumed", "none"))
        return None
    if resume:
        return checkpoint.load()
    if ranks.told(lambda: checkpoint.exists() or (folder / CARD_NAME).exists()):
        raise RunError(
            sentence("a new run must have a folder of its own", f"{folder}, which holds a run", "Resume it (--resume).")
        )
    return None


def _check_resumable(state: State, saved: State) -> list[str]:
    do = "Resume with what the run was started with, or start a new one in another folder."
    for name, what in (("recipe", "recipe"), ("data", "images, labels and splits")):
        if getattr(state, name) != getattr(saved, name):
            raise RunError(sentence(f"a run must be resumed with the same {what}", "others", do))
    notes = [f"The run goes on after epoch {saved.epoch} of stage {saved.stage}."]
    for name in _MAY_DIFFER:
        then, now = getattr(saved, name), getattr(state, name)
        if then != now:
            notes.append(f"The run was started with {name} {then} and goes on with {now}: last digits may differ.")
    return notes


def _stage_epochs(recipe: Recipe) -> dict[str, int]:
    epochs = recipe.encoder_training.epochs
    if recipe.method == "two-stage":
        return {"encoder": epochs, "classifier": recipe.classifier.epochs}
    return {"end-to-end": epochs}


def _unused(source: Source, splits: Splits) -> list[str]:
    number = len(source) - sum(len(rows) for _, rows in splits.parts())
    return [f"{number:,} images of the given val split are not used because data.val is 0."] if number else []


def _fingerprint(source: Source, splits: Splits, digests: list[str]) -> str:
    digest = hashlib.sha256(repr((source.classes, source.names, digests)).encode())
    for array in (source.labels, splits.train, splits.val, splits.test):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes() + b"/")
    return digest.hexdigest()


def _announce(
    log: Log,
    recipe: Recipe,
    source: Source,
    splits: Splits,
    device: torch.device,
    num_threads: int,
    num_ranks: int,
    *,
    resumed: bool,
) -> None:
    counts = {name: source.subset(rows).counts() for name, rows in splits.parts()}
    log.event(
        "resume" if resumed else "start",
        recipe=recipe.content_hash(),
        seed=recipe.seed,
        lopsided=__version__,
        torch=torch.__version__,
        device=str(device),
        threads=num_threads,
        ranks=num_ranks,
        source=source.name,
        images=counts,
    )
    if device.type != "cpu":
        log.note(f"On {device} two runs of one recipe can differ in their last digits; on a CPU they do not.")


def _predictions(stages: Stages, source: Source, rows: Any, part: Part | None) -> Predictions | None:
    if part is None:
        return None
    size = stages.recipe.encoder_training.batch_size
    probabilities, features = predict_inputs(stages.model, part.inputs, size, stages.ranks)
    return Predictions(
        names=tuple(source.names[i] for i in rows),
        classes=source.classes,
        probabilities=probabilities,
        y_true=part.labels,
        groups=None if source.groups is None else source.groups[rows],
        features=features,
    )


def _judged(stages: Stages, source: Source | None) -> Predictions | None:
    if source is None:
        return None
    size = stages.recipe.encoder_training.batch_size
    own, sizes = share_rows(len(source), stages.ranks)
    found = predict(stages.model, stages.card, source.images.take(own), batch_size=size)
    return Predictions(
        names=source.names,
        classes=source.classes,
        probabilities=gather_rows(found, sizes, stages.ranks),
        y_true=source.labels,
        groups=source.groups,
    )
