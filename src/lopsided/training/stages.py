"""The stages of a run: trained one after the other, saved in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lopsided.errors import InputError
from lopsided.evaluation.epochs import figure_of
from lopsided.facts import Fact, notes
from lopsided.models.encoders import seeded_init
from lopsided.models.model import all_finite
from lopsided.training import fine_tune
from lopsided.training.built import Built
from lopsided.training.checkpoint import ENCODER_NAME, State, load_strictly, restoring
from lopsided.training.deferred import deferred_epoch, first_kept, training_notes
from lopsided.training.frozen import adapt, blend, regress
from lopsided.training.loop import Loop, Stage
from lopsided.training.prior import bias_between, carried_prior, regression_prior
from lopsided.training.rescale import Scales, choose_tau, normalise
from lopsided.training.selection import Selection
from lopsided.training.stage_kinds import classifier_stage, encoder_stage, end_to_end_stage, fine_tune_stage

_ENCODER = "module.encoder."
"""Start of the names of the encoder's weights in a checkpoint."""


class Stages(Built):
    """A run of one recipe on prepared data."""

    def notes(self) -> Iterator[Fact]:
        """Yield a note for each setting that changes how a batch is computed."""
        settings, num = self.recipe.encoder_training, self.ranks.size
        if not self.recipe.spec.trains_encoder:
            return
        norm = any(isinstance(child, _BatchNorm) for child in self.model.encoder.modules())
        if self.recipe.method == "fine-tune" and self.recipe.fine_tune.batch_norm == "frozen":
            norm = False
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
        yield from training_notes(settings)

    def run(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Run the remaining stages, starting at ``state``. ``state`` is updated in place."""
        self._begin = perf_counter() - state.seconds
        if state.stage == "frozen":
            regress(self)
            state.seconds = perf_counter() - self._begin
        elif state.stage == "adapter":
            state.history = adapt(self)
            state.epoch, state.seconds = len(state.history), perf_counter() - self._begin
        else:
            self._run_stages(state, tensors)
        self.model.eval()

    def _run_stages(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the encoder, and then the classifier if it has a stage of its own. Rescale it at the end."""
        recipe, before = self.recipe, self.recipe.first_stage()
        if state.stage == "classifier":
            load_strictly(self._handed_on, self.checkpoint.load_weights(ENCODER_NAME))
        else:
            with self.following(before):  # The first stage is the same whatever follows.
                if state.stage == "fine-tune":
                    self._fine_tune(state, tensors, told=not recipe.fine_tune.blend)
                else:
                    stage = encoder_stage(self) if state.stage == "encoder" else end_to_end_stage(self)
                    self._run_stage(stage, state, tensors)
            if state.stage == "fine-tune" and recipe.fine_tune.blend:
                blend(self)
            elif state.stage == "fine-tune" and "logits" not in recipe.encoder_training.loss.entry.needs:
                regress(self, cached=False)
            state.seconds = perf_counter() - self._begin
        if "classifier" in recipe.spec.stages(recipe):
            if state.stage != "classifier":
                self.checkpoint.save_weights(ENCODER_NAME, self._handed_on.state_dict())
                state.stage, state.epoch, state.selection, state.chosen, tensors = "classifier", 0, {}, None, {}
                self.checkpoint.save(state, {})
            with self.following(recipe if recipe.finisher.has_stage else before):
                self._train_classifier(state, tensors)
        if recipe.classifier.kind == "tau-norm":
            self._normalise()

    def _train_classifier(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the classifier on the frozen encoder: the model's own, a new one, or only the scales of its logits."""
        recipe = self.recipe
        if recipe.classifier.kind == "crt":
            with seeded_init(recipe.seed, "retrained"):
                self.model.classifier = self.head(recipe.classifier.loss, self.card.features).to(self.device)
        stage = classifier_stage(self)
        self._run_stage(stage, state, tensors)
        if isinstance(stage.module, Scales):
            stage.module.apply_to(self.model.classifier)

    @property
    def _handed_on(self) -> nn.Module:
        """What the first stage leaves for the second: the encoder, and its classifier if that is rescaled."""
        if self.recipe.classifier.kind != "lws":
            return self.model.encoder
        return nn.ModuleDict({"encoder": self.model.encoder, "classifier": self.model.classifier})

    def _normalise(self) -> None:
        """Apply tau-normalisation to the trained classifier. Validation images choose tau if the recipe does not."""
        head, val, tau = self.model.classifier, self.prepared.val, self.recipe.classifier.tau
        if tau is None:
            assert val is not None  # ``build`` has checked it.
            metric = self.recipe.selection.metric.removeprefix("smooth_").replace("last", "log_loss")
            features = self.features(val.inputs)

            def figure(logits: Tensor) -> float:
                found = {f"val_{name}": value for name, value in self.judged(logits, val.labels).items()}
                return figure_of(metric, [found]) or 0.0

            with torch.no_grad():
                tau, found = self.ranks.told(lambda: choose_tau(head.weight, features, figure))
            self.log.event("tau", tau=tau, metric=metric, figures=found)
            fact = notes.tau(float(tau), metric, len(found))
        else:
            fact = notes.tau(tau, None, 0)
        normalise(head, float(tau))
        self.log.fact(fact)

    def _fine_tune(self, state: State, tensors: dict[str, Tensor], *, told: bool) -> None:
        """Fit the regression and train the encoder or its last blocks. See ``regress`` for ``told``."""
        recipe, section, counts = self.recipe, self.recipe.fine_tune, self.prepared.counts()
        if self.prepared.kind == "vector":
            raise InputError('Method "fine-tune" needs images, got vectors. Use the recipe quick or from-scratch.')
        if tensors:
            own = {key.removeprefix(_ENCODER): value for key, value in tensors.items() if key.startswith(_ENCODER)}
            load_strictly(self.model.encoder, own)  # The front computes the activations with these weights.
        else:
            regress(self, told=told)
            shift = bias_between(regression_prior(recipe, counts), carried_prior(recipe, counts, early=True))
            with torch.no_grad():
                self.model.classifier.bias.add_(torch.from_numpy(shift).to(self.model.classifier.bias))
        self.replace_model(self.model)  # The encoder changes now.
        sampler = fine_tune.fine_tune_sampler(recipe, self.prepared.train.labels)
        stage = fine_tune_stage(self, sampler)
        steps = fine_tune.num_steps(recipe, len(sampler), state.steps)
        if steps is None:
            seconds = 60 * (section.minutes or 0.0) - (perf_counter() - self._begin)
            found = fine_tune.settle_steps(self._loop(stage), stage.judge, seconds)
            steps = state.steps = self.ranks.told(lambda: found)
            self.log.fact(notes.minutes(section.minutes or 0.0, steps, seconds))
        elif section.minutes is not None:
            self.log.fact(notes.settled_steps(steps))
        sampler.limit = stage.steps = steps
        stage.settings = recipe.encoder_training.model_copy(update={"epochs": -(-steps // len(sampler))})
        stage.warmup = round(section.warmup * steps)
        self._run_stage(stage, state, tensors)
        self.model.encoder.requires_grad_(True)

    def _loop(self, stage: Stage) -> Loop:
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

    def _run_stage(self, stage: Stage, state: State, tensors: dict[str, Tensor]) -> None:
        epochs, first = stage.settings.epochs, first_kept(stage.settings)
        loop = self._loop(stage)
        selection, metric = Selection(patience=self.recipe.selection.patience), self.recipe.selection.metric
        best: dict[str, Tensor] = {}
        if tensors:
            with restoring():
                loop.restore(tensors)
                selection = Selection.from_dict(state.selection, selection.patience, state.epoch)
                if state.chosen is not None:
                    best = self.checkpoint.load_weights(state.chosen)
                    if selection.best is None or not all_finite(best.values()):
                        raise ValueError("the chosen weights were never evaluated, or are not finite")
        written = state.chosen
        self.log.stage(stage.name, epochs, len(stage.sampler))
        while state.epoch < epochs and not selection.exhausted(state.epoch):
            index = state.epoch
            facts = loop.epoch(index, self.checkpoint)
            due = self.checkpoint.due()
            now = loop.tensors()
            if due or stage.judge is not None or index + 1 == epochs:  # Otherwise the next loss shows it.
                loop.check_weights(all_finite(now.values()), index, self.checkpoint)
            self.early = index < deferred_epoch(stage.settings)
            # Without a judge nothing reads the average yet, and its statistics cost a pass over all images.
            with loop.averaged(index) if stage.judge is not None else nullcontext():
                found = stage.judge() if stage.judge is not None else {}
                found = self.ranks.told(partial(dict, found))  # All ranks must select the same epoch despite rounding.
                facts |= {f"val_{name}": value for name, value in found.items()}
                state.history.append(facts)
                rows = [row for row in state.history if row["stage"] == stage.name]
                figure = figure_of(metric, rows[first:])
                if index >= first and selection.update(index, figure) and figure is not None:
                    best = {key: value.detach().clone() for key, value in stage.module.state_dict().items()}
                    state.chosen = f"chosen-{stage.name}-{index + 1}.safetensors"
            state.epoch, state.selection = index + 1, selection.to_dict()
            state.seconds = perf_counter() - self._begin
            self.log.epoch(index + 1, facts)
            if due:
                if state.chosen not in (None, written):
                    self.checkpoint.save_weights(state.chosen, best)
                    written = state.chosen
                self.checkpoint.save(state, now)
        if best:
            load_strictly(stage.module, best)
            value = abs(selection.best or 0.0)
            self.log.fact(notes.kept_epoch(stage.name, selection.chosen + 1, state.epoch, metric, value))
        else:
            loop.keep_average(state.epoch - 1)
