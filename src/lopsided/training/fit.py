"""Fit a model from a recipe and a source: in two stages, end to end, on frozen features, or by fine-tuning.

**Two stages.** The first stage trains the encoder and the projection head with a contrastive loss. The second stage
drops the projection head, freezes the encoder in eval mode and trains one linear layer on the features. Unless
``classifier.augment`` is set, each image is encoded once. **End to end** trains the encoder and the linear layer
together for ``encoder_training.epochs``. A baseline of the same budget (``Recipe.baseline``) sets this field to the
epochs of both stages.

**Frozen.** The encoder has pretrained weights and is not trained. Each image is encoded once, or its features come
from a cache on disk. A logistic regression on the features (see ``regression``) becomes the linear layer. A killed run
starts again and finds the features in the cache. **Adapter** also trains small heads on them (``methods.adapter``).

**Fine-tune.** The logistic regression comes first. Then the pretrained encoder, or its last blocks, is trained with it
(see ``methods.fine_tune``).

**Selection of the epoch.** With a validation split, every stage keeps the epoch that is best by ``selection.metric``.
If two epochs tie, the later one wins. Training stops early after ``selection.patience`` epochs without an improvement.
The first stage has no classifier, so a nearest-class-mean classifier on the encoder's features evaluates its epochs.
The class means come from up to 100 training images per class. Without a validation split, the last epoch is kept. The
test split is evaluated once, at the end.

**Randomness.** Initial weights, the order of images, augmentation and dropout are seeded by name, stage, epoch and
step. So no generator state needs to be saved, and an epoch gives the same result whenever it runs.

**Ranks.** Several processes train one model. The batches, their augmentation and the loss are the same as in one
process with the same recipe. Each rank computes a share (see ``step`` and ``distributed``). Only dropout differs,
because each rank draws the masks for its own images. Each validation or test image is evaluated by one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lopsided import __version__
from lopsided.data.cues import cue_cautions
from lopsided.data.inputs import Part, Prepared, check_trainable, inputs_of, prepare
from lopsided.data.prepare import split_note, split_source, training_source
from lopsided.data.sources import Source
from lopsided.data.splits import Leaks, Splits, find_leaks
from lopsided.errors import RunError
from lopsided.facts import Fact, notes
from lopsided.facts.log import Log, Reporter
from lopsided.files import make_folder, remove_leftovers
from lopsided.inference.familiar import save_bank
from lopsided.inference.scorer import Predictions, SmallImages
from lopsided.models.machine import flushed_denormals, keep_freed_memory, pick_device, threads
from lopsided.models.model import CARD_NAME, Model, ModelCard, load_model, save_model
from lopsided.models.pretrained import Preprocessing, preprocessing_of
from lopsided.ranks import ALONE, Ranks
from lopsided.recipe import Recipe, check_classes
from lopsided.training.baseline import classify_by_quick, compare, compare_answers, figures_of, is_quick
from lopsided.training.cautions import falling_cautions, run_cautions, source_cautions
from lopsided.training.checkpoint import Checkpoint, State, check_course, load_strictly
from lopsided.training.decide import check_rule, familiar_images, settle
from lopsided.training.methods import Trainer, make_trainer

_MAY_DIFFER = ("threads", "ranks", "fast", "torch")
"""Fields of the state that may change when a run is resumed."""


@dataclass(eq=False)
class Fitted:
    """The result of a run. ``history`` holds the facts of each epoch, as in the log."""

    model: Model
    card: ModelCard
    splits: Splits
    leaks: Leaks
    history: list[dict[str, Any]]
    val: Predictions | None
    test: Predictions | None
    held_out: Predictions | None = None
    cautions: list[Fact] = field(default_factory=list)
    seconds: float = 0.0
    fingerprint: str = ""
    baseline: dict[str, Any] | None = None
    """The figures of the recipe ``quick`` on the same split, as in ``metrics.json``."""


@dataclass(frozen=True, eq=False)
class _Images:
    """The images of a training, split and prepared, and what there is to say about them."""

    source: Source
    splits: Splits
    digests: list[str]
    prepared: Prepared
    leaks: Leaks
    notes: list[Fact]
    cautions: list[Fact]


def fit(
    recipe: Recipe,
    source: Source,
    folder: Path | None = None,
    *,
    held_out: Source | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    ranks: Ranks = ALONE,
    why: Sequence[Fact] = (),
) -> Fitted:
    """Train a model on a source that is already verified and drawn by scenario.

    ``held_out`` is a source of the same classes that is not used in training. The finished model is evaluated on it.

    With ``folder``, ``log.jsonl`` gets a line per event. ``checkpoint/`` is written after an epoch when it is due.
    ``model.safetensors`` and ``model.json`` are written at the end. The caller must hold the folder's lock.

    With ``resume``, an interrupted run continues from its checkpoint. On a CPU it ends with the same bytes as a run
    without interruption. A finished run is loaded.

    With ``ranks``, every rank calls this function with the same arguments and gets the same result. Only the first rank
    reads and writes the folder and calls the reporter. A run may be resumed with another number of ranks.

    ``why`` are the reasons for the choice of the recipe. They become the first notes of the run.
    """
    checkpoint = Checkpoint(folder, ranks)
    saved = _saved(checkpoint, folder, ranks, resume=resume)
    log = Log(folder, reporter) if ranks.first else Log(None, None)
    device = pick_device(recipe.device, ranks)
    if recipe.fast:
        keep_freed_memory()
    with threads(recipe.threads) as num_threads, flushed_denormals(recipe.fast):
        images = _open(recipe, source, ranks)
        source, splits, prepared = images.source, images.splits, images.prepared
        state = _new_state(recipe, fingerprint(source, splits, images.digests), num_threads, ranks)
        trainer = make_trainer(recipe, prepared, device, log, checkpoint, ranks)
        changed: list[Fact] = []
        if saved is not None:
            changed = _check_resumable(state, saved[0])
            check_course(*saved, trainer.epochs(saved[0]))
            # The next resume must compare with the values of this one.
            now = {name: getattr(state, name) for name in _MAY_DIFFER}
            state = replace(saved[0], **now)
        if ranks.size == 1 and recipe.compare_quick and is_quick(recipe) and prepared.kind == "image":
            trainer.small = SmallImages(prepared.shape, prepared.image_size)
        trainer.build(fresh=saved is None)
        if folder is not None and ranks.first:
            remove_leftovers(make_folder(folder))
        log.event(
            "start" if saved is None else "resume",
            recipe=state.recipe,
            seed=recipe.seed,
            lopsided=__version__,
            torch=torch.__version__,
            device=str(device),
            threads=num_threads,
            ranks=ranks.size,
            source=source.name,
            images={name: source.subset(rows).counts() for name, rows in splits.parts()},
        )
        if device.type != "cpu":
            log.fact(notes.not_repeatable(str(device)))
        log.begin(source.classes, state.history)
        for fact in [*why, *images.notes, *changed, *trainer.notes(), *images.cautions]:
            log.fact(fact)
        log.keep(state.cautions)
        _complete(trainer, state, saved[1] if saved is not None else {}, folder)
        fitted = Fitted(
            model=trainer.model,
            card=trainer.card,
            splits=splits,
            leaks=images.leaks,
            history=state.history,
            val=_predictions(trainer, source, splits.val, prepared.val),
            test=_predictions(trainer, source, splits.test, prepared.test),
            held_out=_judged(trainer, held_out),
            seconds=state.seconds,
            fingerprint=state.data,
        )
        if ranks.first:
            fitted.baseline, below = _baseline(recipe, images, fitted, trainer, log)
            for fact in [*falling_cautions(recipe, state.history), *below]:
                log.fact(fact)
        fitted.cautions = log.cautions
    log.event("end", seconds=fitted.seconds)
    return fitted


def _open(recipe: Recipe, source: Source, ranks: Ranks) -> _Images:
    """Split and prepare the images, and raise if the recipe cannot be trained on them."""
    own = split_source(recipe, source)
    source, splits = training_source(source, own)
    digests = source.images.digest(np.arange(len(source)))
    prepared, facts = prepare(
        recipe, source, splits, ranks, pixels=pixels_of(recipe), digests=digests, own=len(own.train)
    )
    check_trainable(prepared, 2 if recipe.spec.needs_rare else 1)
    check_classes(recipe, len(prepared.classes))
    check_rule(recipe, prepared)
    left_out = [notes.left_out(source.left_out)] if source.left_out else []
    unused = len(source) - sum(len(rows) for _, rows in splits.parts())
    left_out += [notes.unused_validation(unused)] if unused else []
    leaks = find_leaks(source, splits, digests)
    cautions = [
        *run_cautions(recipe, prepared, leaks),
        *source_cautions(source, recipe, prepared.shape),
        *cue_cautions(source, splits.train, recipe),
    ]
    said = [split_note(recipe, source), *left_out, *source.facts, *facts]
    return _Images(source, splits, digests, prepared, leaks, said, cautions)


def _new_state(recipe: Recipe, data: str, num_threads: int, ranks: Ranks) -> State:
    """Return the state of a run that has not begun. Raise if the ranks have another recipe or other data."""
    state = State(
        recipe=recipe.content_hash(),
        data=data,
        stage=next(iter(recipe.spec.stages(recipe))),
        threads=num_threads,
        ranks=ranks.size,
        fast=recipe.fast,
    )
    ranks.check_same("recipe", state.recipe)
    ranks.check_same("images, labels and splits", state.data)
    return state


def _complete(trainer: Trainer, state: State, tensors: dict[str, torch.Tensor], folder: Path | None) -> None:
    """Run the remaining training and write the model, or load the model of a finished run."""
    ranks = trainer.ranks
    if state.finished and folder is not None:
        trainer.checkpoint.tidy(state)  # The run may have been killed before it did this.
        if ranks.first:
            trainer.model, trainer.card = load_model(folder, trainer.device, fast=trainer.recipe.fast)
        else:  # The weights come from the first rank.
            trainer.expect()
        if ranks.size > 1:
            load_strictly(trainer.model, ranks.spread(trainer.model.state_dict))
            trainer.card = ModelCard.model_validate(ranks.told(partial(trainer.card.model_dump, mode="json")))
        trainer.model.eval()
        return
    trainer.run(state, tensors)
    settle(trainer)
    bank = familiar_images(trainer)
    if folder is not None and ranks.first:
        trainer.card = save_model(folder, trainer.model, save_bank(folder, bank, trainer.card))
    state.finished, state.chosen = True, None
    trainer.checkpoint.save(state, {})


def pixels_of(recipe: Recipe) -> Preprocessing | None:
    """Return the preprocessing of the encoder's weights, if the recipe uses it."""
    if recipe.augment.normalisation != "weights":
        return None
    return preprocessing_of(recipe.encoder.name, recipe.encoder.weights)


def _saved(
    checkpoint: Checkpoint, folder: Path | None, ranks: Ranks, *, resume: bool
) -> tuple[State, dict[str, torch.Tensor]] | None:
    if folder is None:
        if resume:
            raise RunError("A run without a folder cannot be resumed. Give the folder of the run.")
        return None
    if resume:
        return checkpoint.load()
    if ranks.told(lambda: checkpoint.exists() or (folder / CARD_NAME).exists()):
        raise RunError(f"{folder} already holds a run. Choose another folder, or continue that run with --resume.")
    return None


def _check_resumable(state: State, saved: State) -> list[Fact]:
    do = "Resume it with the same recipe and data, or start a new run in another folder."
    for name, what in (("recipe", "another recipe"), ("data", "other images, labels or splits")):
        if getattr(state, name) != getattr(saved, name):
            raise RunError(f"The run started with {what}. {do}")
    facts = [notes.continued(saved.stage, saved.epoch)]
    for name in _MAY_DIFFER:
        then, now = getattr(saved, name), getattr(state, name)
        if then != now:
            facts.append(notes.changed_machine(name, str(then), str(now)))
    return facts


def _baseline(
    recipe: Recipe, images: _Images, fitted: Fitted, trainer: Trainer, log: Log
) -> tuple[dict[str, Any] | None, list[Fact]]:
    """Compare the model with the recipe ``quick``. Return its figures, and a caution if the model is worse.

    The caution is about validation images, or about test images if there are too few validation images. The recipe
    ``quick`` itself has a baseline of small images, without figures.
    """
    source, prepared = images.source, images.prepared
    if not recipe.compare_quick or prepared.kind == "vector" or (prepared.counts() == 0).any():  # Nothing to compare.
        return None, []
    if is_quick(recipe):
        return None, _below_pixels(recipe, prepared, fitted, trainer.small)
    answers = classify_by_quick(recipe, source, images.splits, images.digests, trainer.device, log)
    splits: dict[str, Any] = {}
    cautions: list[Fact] | None = None
    for split, found in answers.items():
        model = fitted.val if split == "val" else fitted.test
        assert model is not None
        groups = None if model.groups is None else model.groups[found.rows]
        compared = compare_answers(found.labels, model.y_pred[found.rows], found.predicted, len(source.classes), groups)
        splits[split] = figures_of(found, compared, source.classes, groups, recipe.seed)
        if cautions is None and compared.enough:
            cautions = compared.cautions("validation" if split == "val" else "test", "quick")
    return ({"recipe": "quick", "splits": splits} if splits else None), cautions or []


def _below_pixels(recipe: Recipe, prepared: Prepared, fitted: Fitted, small: SmallImages | None) -> list[Fact]:
    """Return a caution if the model is worse than a linear classifier on small images."""
    for split, part, found in (("validation", prepared.val, fitted.val), ("test", prepared.test, fitted.test)):
        if part is None or found is None:
            continue
        compared = compare(prepared, part, found.y_pred, recipe.seed, small)
        if compared is not None:
            return compared.cautions(split, "small-images", recipe.spec.advice)
    return []


def fingerprint(source: Source, splits: Splits, digests: list[str]) -> str:
    """Return a hash of the images, labels and splits of a run, and of the columns beside the images."""
    cells = source.images.cells()
    beside = (cells,) if any(cells) else ()
    digest = hashlib.sha256(repr((source.classes, source.names, digests, *beside)).encode())
    for array in (source.labels, splits.train, splits.val, splits.test):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes() + b"/")
    return digest.hexdigest()


def _predictions(trainer: Trainer, source: Source, rows: Any, part: Part | None) -> Predictions | None:
    if part is None:
        return None
    probabilities, features = trainer.score(part)
    return Predictions(
        names=tuple(source.names[i] for i in rows),
        probabilities=probabilities,
        y_true=part.labels,
        y_pred=trainer.card.decision.decide(probabilities),
        groups=None if source.groups is None else source.groups[rows],
        features=features,
    )


def _judged(trainer: Trainer, source: Source | None) -> Predictions | None:
    if source is None:
        return None
    rows, card, trained = np.arange(len(source)), trainer.card, trainer.recipe.spec.trains_encoder
    digests = None if trained else tuple(source.images.digest(rows))
    inputs = inputs_of(source.images, card.image_size, card.channels)
    judged = _predictions(trainer, source, rows, Part(inputs, source.labels, source.groups, digests))
    assert judged is not None
    return replace(judged, features=None) if trained else judged
