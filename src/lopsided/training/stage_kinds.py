"""The stages of each kind: what they train, on which batches, with which loss, and how an epoch is judged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from lopsided.data.inputs import Indices, Inputs, MemoryInputs, Part
from lopsided.data.samplers import BatchSampler
from lopsided.losses.deferred import ReweightedObjective
from lopsided.losses.objective import Objective
from lopsided.models.encoders import seeded_init
from lopsided.models.heads import ProjectionHead
from lopsided.models.machine import evaluating
from lopsided.recipe import Classifier, EncoderTraining, LossSettings
from lopsided.seeds import derive_seed
from lopsided.training.built import Built, unchanged
from lopsided.training.loop import Stage
from lopsided.training.selection import Judged, centroid_logits, figures, probe_rows, tempered_log_loss
from lopsided.training.step import of_loss


def network_stage(
    built: Built,
    name: str,
    judge: Callable[[], Judged] | None,
    encode: Callable[[Tensor], Tensor] | None = None,
    *,
    apart: bool = False,
) -> Stage:
    """Return a stage that trains the encoder and the heads that its loss needs. ``encode`` computes features.

    With ``apart``, a loss that needs logits gets a classifier of its own instead of that of the model.
    """
    encode = encode or built.model.encode  # Training augments each image instead of averaging its views.
    settings, views = built.recipe.encoder_training, built.recipe.encoder_training.views
    needs = settings.loss.entry.needs
    module, heads = _module(built, needs, apart=apart)

    def output(x: Tensor) -> Tensor:
        features = built.model.scale(encode(x))
        rows = torch.cat([head(features) for head in heads], dim=1) if len(heads) > 1 else heads[0](features)
        return rows if views == 1 else rows.view(len(rows) // views, views, -1)

    return Stage(
        name=name,
        section="encoder_training",
        module=module,
        settings=settings,
        part=built.prepared.train,
        sampler=_sampler(built, name, settings),
        transform=lambda x, generator, start, total: built.augment(
            _repeat(x, views), generator, start=start * views, total=total * views
        ),
        output=output,
        objective=_reweighted(built, objective_of(built, settings.loss)),
        projected=built.recipe.head.out if "projections" in needs else 0,
        judge=judge,
        views=views,
        min_batch=2,
        average=settings.ema,
    )


def classifier_stage(built: Built, scales: nn.Module | None = None) -> Stage:
    """Return the second stage: the model's classifier, or the ``scales`` of its logits, on the frozen encoder."""
    settings, prepared = built.recipe.classifier, built.prepared
    classifier = built.model.classifier

    def output(features: Tensor) -> Tensor:
        logits: Tensor = classifier(features)
        return logits if scales is None else scales(logits.detach())

    val = None if prepared.val is None else (built.features(prepared.val.inputs), prepared.val.labels)

    def encode(x: Tensor, generator: torch.Generator, start: int, total: int) -> Tensor:
        with torch.no_grad():
            images = built.augment(x, generator, start=start, total=total)
            return built.model.scale(built.model.encode(images))

    def judge() -> Judged:
        assert val is not None
        with torch.no_grad():
            logits = output(val[0])
        return built.judged(logits, val[1])

    part, transform = prepared.train, encode
    if not settings.augment:
        part = Part(MemoryInputs(built.features(part.inputs)), part.labels)
        transform = unchanged
    built.model.encoder.eval()
    return Stage(
        name="classifier",
        section="classifier",
        module=classifier if scales is None else scales,
        settings=settings,
        part=part,
        sampler=_sampler(built, "classifier", settings),
        transform=transform,
        output=output,
        objective=objective_of(built, settings.loss),
        judge=None if val is None else judge,
    )


def _module(built: Built, needs: frozenset[str], *, apart: bool) -> tuple[nn.Module, list[nn.Module]]:
    """Return the module to train, and the heads that feed the loss, the projection head first."""
    if "projections" not in needs:
        return built.model, [built.model.classifier]
    with seeded_init(built.recipe.seed, "projection"):
        projection = ProjectionHead(built.card.features, built.recipe.head.hidden, built.recipe.head.out)
    if "logits" not in needs:
        return nn.ModuleDict({"encoder": built.model.encoder, "projection": projection}), [projection]
    classifier = built.model.classifier
    if apart:
        with seeded_init(built.recipe.seed, "joint"):
            classifier = built.head(built.recipe.encoder_training.loss, built.card.features)
    parts = {"encoder": built.model.encoder, "classifier": classifier, "projection": projection}
    return nn.ModuleDict(parts), [projection, classifier]


def objective_of(
    built: Built, loss: LossSettings, labels: Indices | None = None, width: int | None = None
) -> Objective:
    """Return the loss of a stage. ``labels`` are those of its images, by default of all training images."""
    numbers = built.prepared.counts() if labels is None else np.bincount(labels, minlength=built.num_classes)
    counts, entry = torch.from_numpy(numbers), loss.entry
    with seeded_init(built.recipe.seed, "objective"), of_loss(entry, "its constructor"):
        objective = entry.load()(counts, built.recipe.head.out if width is None else width, **loss.parameters)
        if not isinstance(objective, Objective):
            raise TypeError(f"{type(objective).__name__} does not derive from lopsided.losses.Objective")
        return objective


def _reweighted(built: Built, objective: Objective) -> Objective:
    """Return the objective of the first stage with the class weights of its last epochs, if it has any."""
    settings = built.recipe.encoder_training
    if settings.reweight_from is None:
        return objective
    counts = torch.from_numpy(built.prepared.counts())
    return ReweightedObjective(
        objective, counts, objective.width, defer=settings.reweight_from, beta=settings.reweight_beta
    )


def _sampler(built: Built, stage: str, settings: EncoderTraining | Classifier) -> BatchSampler:
    return BatchSampler(
        built.prepared.train.labels,
        settings.batch_size,
        kind=settings.sampler,
        m_per_class=settings.m_per_class if isinstance(settings, EncoderTraining) else None,
        last=settings.last_batch if isinstance(settings, EncoderTraining) else "keep",
        seed=derive_seed(built.recipe.seed, stage),
    )


def judge_by_classifier(built: Built, val: Part, features: Callable[[Inputs], Tensor]) -> Callable[[], Judged]:
    """Return a function that evaluates the classifier on the features of validation images."""

    def judge() -> Judged:
        with evaluating(built.model):
            logits = built.model.classifier(features(val.inputs))
        return built.judged(logits, val.labels)

    return judge


def judge_by_means(built: Built, val: Part, features: Callable[..., Tensor]) -> Callable[[], Judged]:
    """Return a function that evaluates the encoder by nearest class means of training images, not augmented."""
    train = built.prepared.train
    rows = probe_rows(train.labels, derive_seed(built.recipe.seed, "probe"))
    labels = torch.from_numpy(train.labels[rows]).to(built.device)

    def judge() -> Judged:
        known = features(train.inputs, rows)
        logits = centroid_logits(known, labels, features(val.inputs), built.num_classes)
        found = figures(logits.argmax(axis=1), val.labels, built.num_classes)
        return found | {"log_loss": tempered_log_loss(logits, val.labels)}

    return judge


def _repeat(x: Tensor, views: int) -> Tensor:
    return x if views == 1 else x.repeat_interleave(views, dim=0)
