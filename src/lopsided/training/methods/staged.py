"""Methods that train an encoder by batches, in stages that are saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lopsided.data.augment import Augment, to_float
from lopsided.data.inputs import Indices, Inputs, MemoryInputs, Part, row_batches
from lopsided.data.samplers import BatchSampler
from lopsided.errors import InputError, sentence
from lopsided.evaluation.calibration import TINY, HeldBack, carried_prior, fit_calibration
from lopsided.evaluation.decision import resolve
from lopsided.evaluation.metric_table import figure_of
from lopsided.facts import Fact, notes
from lopsided.inference.scorer import share_rows
from lopsided.losses.deferred import ReweightedObjective
from lopsided.losses.objective import Objective
from lopsided.models.encoders import seeded_init
from lopsided.models.heads import ProjectionHead
from lopsided.models.machine import evaluating
from lopsided.models.model import all_finite
from lopsided.recipe import Classifier, EncoderTraining, LossSettings, Recipe
from lopsided.seeds import derive_seed
from lopsided.stopping import STOPPING
from lopsided.training.checkpoint import Checkpoint, State, load_strictly, restoring
from lopsided.training.finishers import FINISHERS, Finisher, SecondStage
from lopsided.training.loop import Loop, Stage, deferred_epoch, first_kept
from lopsided.training.methods.trainer import Trainer
from lopsided.training.selection import Judged, Selection, centroid_logits, figures, probe_rows, tempered_log_loss
from lopsided.training.step import make_objective


class Course:
    """The state of a stage and its best weights so far, which are written to the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, state: State, begin: float) -> None:
        self.checkpoint, self.state, self.begin = checkpoint, state, begin
        self.best: dict[str, Tensor] = {}
        self._written = state.chosen

    def restore(self, *, evaluated: bool) -> None:
        """Load the best weights that the state names."""
        if self.state.chosen is not None:
            self.best = self.checkpoint.load_weights(self.state.chosen)
            if not evaluated or not all_finite(self.best.values()):
                raise ValueError("the chosen weights were never evaluated, or are not finite")

    def choose(self, stage: Stage, index: int) -> None:
        """Take the weights after an epoch as the best ones."""
        self.best = {key: value.detach().clone() for key, value in stage.module.state_dict().items()}
        self.state.chosen = f"chosen-{stage.name}-{index + 1}.safetensors"

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Write the state with these tensors, and the best weights if they are new."""
        if self.state.chosen is not None and self.state.chosen != self._written:
            self.checkpoint.save_weights(self.state.chosen, self.best)
            self._written = self.state.chosen
        self.checkpoint.save(self.state, tensors)

    def pause(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Write the state after a step of an epoch."""
        self.state.step, self.state.seconds = step, perf_counter() - self.begin
        self.save(tensors)


class StagedTrainer(Trainer):
    """Trains the encoder in a first stage, and finishes the classifier."""

    early = False
    """Whether the epoch to be judged comes before the class weights of the last epochs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.augment = self._choose_augment()

    @property
    def trains_norms(self) -> bool:
        """Whether layers of batch norm compute the statistics of batches."""
        return True

    def first_stage(self) -> Stage:
        """Return the stage that trains the encoder."""
        raise NotImplementedError

    def finishers(self) -> list[Finisher]:
        """Return what follows the first stage."""
        return [FINISHERS[self.recipe.classifier.kind]()]

    def build(self, *, fresh: bool = True) -> None:
        """Build the model, after a look whether the finishers can use the data."""
        for finisher in self.finishers():
            finisher.check(self)
        super().build(fresh=fresh)

    def notes(self) -> Iterator[Fact]:
        """Yield a note for each setting that changes how a batch is computed."""
        settings, num = self.recipe.encoder_training, self.ranks.size
        norm = self.trains_norms and any(isinstance(child, _BatchNorm) for child in self.model.encoder.modules())
        if num > 1:
            yield notes.ranks(num, settings.batch_size)
        if num > 1 and norm:
            yield notes.batch_norm(settings.batch_norm)
        if self.recipe.precision != "float32":
            yield notes.precision(self.recipe.precision)
        if settings.chunk_size is not None:
            batch = "share" if num > 1 and settings.batch_norm == "rank" else "chunk"
            yield notes.chunks(settings.chunk_size, batch if norm else "")
        if settings.queue:
            yield notes.queue(settings.queue, settings.queue_balanced)
        if settings.reweight_from is not None:
            yield notes.reweighting(settings.reweight_from, settings.reweight_beta)
        if settings.resample_from is not None:
            yield notes.resampling(settings.resample_from)
        if settings.mixup or settings.cutmix:
            yield notes.mixing(settings.mixup, settings.cutmix)
        if settings.sam_rho:
            yield notes.sharpness(settings.sam_rho)
        if settings.ema:
            yield notes.moving_average(settings.ema)
        if settings.swa_from is not None:
            yield notes.weight_average(settings.swa_from)

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the encoder, and finish the classifier."""
        finishers = self.finishers()
        resumed = next((finisher for finisher in finishers if finisher.stage == state.stage), None)
        if resumed is not None:
            resumed.restore(self)
        else:
            with self.following(self.recipe.first_stage()):  # The first stage is the same whatever follows.
                self.train_first(state, tensors)
            state.seconds = perf_counter() - self.begin
        for finisher in finishers:
            finisher.finish(self, state, tensors)

    def train_first(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the first stage."""
        self.run_stage(self.first_stage(), state, tensors)

    def loop(self, stage: Stage) -> Loop:
        """Return the loop of a stage."""
        return Loop(
            stage,
            device=self.device,
            seed=self.recipe.seed,
            num_classes=self.num_classes,
            minority=self.prepared.minority,
            reporter=self.log,
            ranks=self.ranks,
            precision=self.recipe.precision,
        )

    def run_stage(self, stage: Stage, state: State, tensors: dict[str, Tensor]) -> None:
        """Train a stage from the epoch of ``state``, select an epoch and save checkpoints when they are due."""
        epochs, first = stage.settings.epochs, first_kept(stage.settings)
        loop = self.loop(stage)
        selection, metric = Selection(patience=self.recipe.selection.patience), self.recipe.selection.metric
        course = Course(self.checkpoint, state, self.begin)
        if tensors:
            with restoring():
                loop.restore(tensors, state.epoch, state.step)
                selection = Selection.from_dict(state.selection, selection.patience, state.epoch)
                course.restore(evaluated=selection.best is not None)
        state.selection = selection.to_dict()
        self.log.stage(stage.name, epochs, len(stage.sampler))
        with STOPPING.saving(self.checkpoint.folder is not None):
            while state.epoch < epochs and not selection.exhausted(state.epoch):
                index = state.epoch
                facts = loop.epoch(index, self.checkpoint, course.pause)
                due = self.checkpoint.due()
                now = loop.tensors()
                if due or stage.judge is not None or index + 1 == epochs:  # Otherwise the next loss shows it.
                    loop.check_weights(all_finite(now.values()), index, self.checkpoint)
                self.early = index < deferred_epoch(stage.settings)
                # Without a judge nothing reads the average yet, and its statistics cost a pass over all images.
                with loop.averaged(index) if stage.judge is not None else nullcontext():
                    found = stage.judge() if stage.judge is not None else {}
                    found = self.ranks.told(
                        partial(dict, found)
                    )  # All ranks must select the same epoch despite rounding.
                    facts |= {f"val_{name}": value for name, value in found.items()}
                    state.history.append(facts)
                    rows = [row for row in state.history if row["stage"] == stage.name]
                    figure = figure_of(metric, rows[first:])
                    if index >= first and selection.update(index, figure) and figure is not None:
                        course.choose(stage, index)
                state.epoch, state.step, state.selection = index + 1, 0, selection.to_dict()
                state.seconds = perf_counter() - self.begin
                self.log.epoch(index + 1, facts)
                if self.ranks.any(STOPPING.requested):
                    with STOPPING.interrupting():
                        loop.check_weights(all_finite(now.values()), index, self.checkpoint)
                        course.save(now)
                if due:
                    course.save(now)
        if course.best:
            load_strictly(stage.module, course.best)
            value = abs(selection.best or 0.0)
            self.log.fact(notes.kept_epoch(stage.name, selection.chosen + 1, state.epoch, metric, value))
        else:
            loop.keep_average(state.epoch - 1)

    def network_stage(
        self,
        name: str,
        judge: Callable[[], Judged] | None,
        encode: Callable[[Tensor], Tensor] | None = None,
        *,
        apart: bool = False,
    ) -> Stage:
        """Return a stage that trains the encoder and the heads that its loss needs. ``encode`` computes features.

        With ``apart``, a loss that needs logits gets a classifier of its own instead of that of the model.
        """
        encode = encode or self.model.encode  # Training augments each image instead of averaging its views.
        settings, views = self.recipe.encoder_training, self.recipe.encoder_training.views
        needs = settings.loss.entry.needs
        module, heads = self._module(needs, apart=apart)

        def output(x: Tensor) -> Tensor:
            features = self.model.scale(encode(x))
            rows = torch.cat([head(features) for head in heads], dim=1) if len(heads) > 1 else heads[0](features)
            return rows if views == 1 else rows.view(len(rows) // views, views, -1)

        return Stage(
            name=name,
            section="encoder_training",
            module=module,
            settings=settings,
            part=self.prepared.train,
            sampler=self._sampler(name, settings),
            transform=lambda x, generator, start, total: self.augment(
                x if views == 1 else x.repeat_interleave(views, dim=0),
                generator,
                start=start * views,
                total=total * views,
            ),
            output=output,
            objective=self._reweighted(self._objective(settings.loss)),
            projected=self.recipe.head.out if "projections" in needs else 0,
            judge=judge,
            views=views,
            min_batch=2,
            average=settings.ema,
        )

    def _module(self, needs: frozenset[str], *, apart: bool) -> tuple[nn.Module, list[nn.Module]]:
        """Return the module to train, and the heads that feed the loss, the projection head first."""
        if "projections" not in needs:
            return self.model, [self.model.classifier]
        with seeded_init(self.recipe.seed, "projection"):
            projection = ProjectionHead(self.card.features, self.recipe.head.hidden, self.recipe.head.out)
        if "logits" not in needs:
            return nn.ModuleDict({"encoder": self.model.encoder, "projection": projection}), [projection]
        classifier = self.model.classifier
        if apart:
            with seeded_init(self.recipe.seed, "joint"):
                classifier = self.head(self.recipe.encoder_training.loss, self.card.features)
        parts = {"encoder": self.model.encoder, "classifier": classifier, "projection": projection}
        return nn.ModuleDict(parts), [projection, classifier]

    def _objective(self, loss: LossSettings) -> Objective:
        counts = torch.from_numpy(self.prepared.counts())
        return make_objective(loss, counts, self.recipe.head.out, self.recipe.seed)

    def _reweighted(self, objective: Objective) -> Objective:
        """Return the objective of the first stage with the class weights of its last epochs, if it has any."""
        settings = self.recipe.encoder_training
        if settings.reweight_from is None:
            return objective
        counts = torch.from_numpy(self.prepared.counts())
        return ReweightedObjective(
            objective, counts, objective.width, defer=settings.reweight_from, beta=settings.reweight_beta
        )

    def _sampler(self, stage: str, settings: EncoderTraining | Classifier) -> BatchSampler:
        return BatchSampler(
            self.prepared.train.labels,
            settings.batch_size,
            kind=settings.sampler,
            m_per_class=settings.m_per_class if isinstance(settings, EncoderTraining) else None,
            last=settings.last_batch if isinstance(settings, EncoderTraining) else "keep",
            seed=derive_seed(self.recipe.seed, stage),
        )

    def classifier_stage(self, scales: nn.Module | None = None) -> Stage:
        """Return the second stage: the model's classifier, or the ``scales`` of its logits, on the frozen encoder."""
        settings, prepared = self.recipe.classifier, self.prepared
        classifier = self.model.classifier

        def output(features: Tensor) -> Tensor:
            logits: Tensor = classifier(features)
            return logits if scales is None else scales(logits.detach())

        val = None if prepared.val is None else (self.features(prepared.val.inputs), prepared.val.labels)

        def encode(x: Tensor, generator: torch.Generator, start: int, total: int) -> Tensor:
            with torch.no_grad():
                images = self.augment(x, generator, start=start, total=total)
                return self.model.scale(self.model.encode(images))

        def judge() -> Judged:
            assert val is not None
            with torch.no_grad():
                logits = output(val[0])
            return self.judged(logits, val[1])

        part, transform = prepared.train, encode
        if not settings.augment:
            part = Part(MemoryInputs(self.features(part.inputs)), part.labels)
            transform = _unchanged
        self.model.encoder.eval()
        return Stage(
            name="classifier",
            section="classifier",
            module=classifier if scales is None else scales,
            settings=settings,
            part=part,
            sampler=self._sampler("classifier", settings),
            transform=transform,
            output=output,
            objective=self._objective(settings.loss),
            judge=None if val is None else judge,
        )

    def judge_by_classifier(self, val: Part, features: Callable[[Inputs], Tensor]) -> Callable[[], Judged]:
        """Return a function that evaluates the classifier on the features of validation images."""

        def judge() -> Judged:
            with evaluating(self.model):
                logits = self.model.classifier(features(val.inputs))
            return self.judged(logits, val.labels)

        return judge

    def judge_by_means(self, val: Part, features: Callable[..., Tensor]) -> Callable[[], Judged]:
        """Return a function that evaluates the encoder by nearest class means of training images, not augmented."""
        train = self.prepared.train
        rows = probe_rows(train.labels, derive_seed(self.recipe.seed, "probe"))
        labels = torch.from_numpy(train.labels[rows]).to(self.device)

        def judge() -> Judged:
            known = features(train.inputs, rows)
            logits = centroid_logits(known, labels, features(val.inputs), self.num_classes)
            found = figures(logits.argmax(axis=1), val.labels, self.num_classes)
            return found | {"log_loss": tempered_log_loss(logits, val.labels)}

        return judge

    def _choose_augment(self) -> Callable[..., Tensor]:
        cutmix = self.recipe.encoder_training.cutmix
        if self.prepared.kind == "vector" and cutmix:
            must = "encoder_training.cutmix must be 0 for vectors, which have no boxes"
            raise InputError(sentence(must, cutmix, "Use encoder_training.mixup."))
        if self.prepared.kind == "vector":
            return _unchanged
        section = self.recipe.augment
        return Augment(
            rotation=section.rotation,
            horizontal_flip=section.horizontal_flip,
            vertical_flip=section.vertical_flip,
            crop=section.crop,
            colour=section.colour,
        )

    @contextmanager
    def following(self, recipe: Recipe) -> Iterator[None]:
        """Follow another recipe inside the block."""
        whole, self.recipe = self.recipe, recipe
        try:
            yield
        finally:
            self.recipe = whole

    def features(self, inputs: Inputs, rows: Indices | None = None) -> Tensor:
        """Return the features of inputs, not augmented, in the order of ``rows``. Each rank computes a share."""
        size = self.recipe.encoder_training.batch_size
        rows = np.arange(len(inputs)) if rows is None else rows
        share, sizes = share_rows(len(rows), self.ranks)
        own = rows[share]
        parts = [torch.empty(0, self.card.features, device=self.device)]
        with evaluating(self.model):
            batches = inputs.batches(own[part] for part in row_batches(len(own), size))
            plain = (x.to(self.device) for _, x in batches)
            parts += [self.model.features(to_float(x) if x.ndim == 4 else x) for x in plain]
        return self.ranks.gather(torch.cat(parts), sizes)

    def judged(self, logits: Tensor, labels: Indices) -> Judged:
        """Return the figures of validation images by the rule ``balanced``, or by ``plain`` if the recipe sets it."""
        prior = carried_prior(self.recipe, self.prepared.counts(), early=self.early)
        kind = self.recipe.decision.calibration
        rule = "plain" if self.recipe.decision.rule == "plain" else "balanced"
        p = logits.double().softmax(dim=1).cpu().numpy()
        if kind != "none":  # As the finished model will be.
            p = fit_calibration(HeldBack(p, labels), prior, biases=kind == "affine")(p)
        found = figures(resolve(rule, self.prepared.classes, prior).decide(p), labels, self.num_classes)
        balanced = np.log(np.maximum(p, TINY)) + np.array(resolve("balanced", self.prepared.classes, prior).offsets)
        return found | {"log_loss": tempered_log_loss(balanced, labels)}


class TwoStageTrainer(StagedTrainer):
    """Two stages: the encoder with a projection head, and then a linear layer on the frozen encoder."""

    def first_stage(self) -> Stage:
        """Return the first stage, which validation images judge by class means: it has no classifier of its own."""
        val = self.prepared.val
        judge = None if val is None else self.judge_by_means(val, self.features)
        # The second stage trains the model's own classifier from the start.
        return self.network_stage("encoder", judge, apart=True)

    def finishers(self) -> list[Finisher]:
        """Return the second stage, and what follows it."""
        return [SecondStage(), *super().finishers()]


class EndToEndTrainer(StagedTrainer):
    """End to end: one stage with encoder, linear layer, and a projection head if the loss needs projections."""

    def first_stage(self) -> Stage:
        """Return the only stage, which validation images judge by the classifier."""
        val = self.prepared.val
        judge = None if val is None else self.judge_by_classifier(val, self.features)
        return self.network_stage("end-to-end", judge)


def _unchanged(x: Tensor, *_: object, **__: object) -> Tensor:
    """Return inputs as they are."""
    return x
