"""Fine-tune: a logistic regression on the features of a pretrained encoder, and then the training of both.

``lopsided.training.fine_tune`` has the parts: the sampler, the budget, the groups of parameters, kept activations.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from lopsided.data.samplers import BatchSampler
from lopsided.errors import InputError
from lopsided.facts import notes
from lopsided.models.machine import arrange
from lopsided.models.model import Model, average
from lopsided.recipe import Recipe
from lopsided.training import fine_tune
from lopsided.training.checkpoint import State, load_strictly
from lopsided.training.finishers import Finisher
from lopsided.training.loop import Stage
from lopsided.training.methods.frozen import regress
from lopsided.training.methods.staged import StagedTrainer
from lopsided.training.prior import bias_between, carried_prior, regression_prior
from lopsided.training.stage_kinds import judge_by_classifier, judge_by_means, network_stage

_ENCODER = "module.encoder."
"""Start of the names of the encoder's weights in a checkpoint."""


class FineTuneTrainer(StagedTrainer):
    """Fits a regression, and trains the encoder, or its last blocks, with the regression as the first classifier."""

    _blends = False

    @property
    def trains_norms(self) -> bool:
        """Whether batch norm uses the statistics of batches."""
        return self.recipe.fine_tune.batch_norm == "train"

    def epochs(self, state: State) -> dict[str, int]:
        """Return the epochs of each stage; those of a budget in steps or minutes depend on the images."""
        steps = fine_tune.num_epochs(self.recipe, self.prepared.train.labels, state.steps)
        stages = self.recipe.spec.stages(self.recipe)
        return {name: steps if number is None else number for name, number in stages.items()}

    def finishers(self) -> list[Finisher]:
        """Return what follows the training of the encoder."""
        if self.recipe.fine_tune.blend:
            return [Blending()]
        return super().finishers() if _trains_classifier(self.recipe) else [Regressing()]

    def expect(self) -> None:
        """Give the model two encoders, if the finished one has two."""
        if self.recipe.fine_tune.blend:
            self.model, self.card = average([(copy.deepcopy(self.model), self.card) for _ in range(2)])

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the encoder, and finish the classifier."""
        self._blends = self.recipe.fine_tune.blend > 0  # The recipe of the first stage does not say it.
        super().train(state, tensors)

    def train_first(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the regression, and train the encoder or its last blocks."""
        recipe, section, counts = self.recipe, self.recipe.fine_tune, self.prepared.counts()
        if self.prepared.kind == "vector":
            raise InputError('Method "fine-tune" needs images, got vectors. Use the recipe quick or from-scratch.')
        if tensors:
            own = {key.removeprefix(_ENCODER): value for key, value in tensors.items() if key.startswith(_ENCODER)}
            load_strictly(self.model.encoder, own)  # The front computes the activations with these weights.
        else:
            regress(self, told=not self._blends)
            shift = bias_between(regression_prior(recipe, counts), carried_prior(recipe, counts, early=True))
            with torch.no_grad():
                self.model.classifier.bias.add_(torch.from_numpy(shift).to(self.model.classifier.bias))
        self.replace_model(self.model)  # The encoder changes now.
        sampler = fine_tune.fine_tune_sampler(recipe, self.prepared.train.labels)
        stage = self._stage(sampler)
        steps = fine_tune.num_steps(recipe, len(sampler), state.steps)
        if steps is None:
            seconds = 60 * (section.minutes or 0.0) - (perf_counter() - self.begin)
            found = fine_tune.settle_steps(self.loop(stage), stage.judge, seconds)
            steps = state.steps = self.ranks.told(lambda: found)
            self.log.fact(notes.minutes(section.minutes or 0.0, steps, seconds))
        elif section.minutes is not None:
            self.log.fact(notes.settled_steps(steps))
        sampler.limit = stage.steps = steps
        stage.settings = recipe.encoder_training.model_copy(update={"epochs": -(-steps // len(sampler))})
        stage.warmup = round(section.warmup * steps)
        self.run_stage(stage, state, tensors)
        self.model.encoder.requires_grad_(True)

    def _stage(self, sampler: BatchSampler) -> Stage:
        """Return the stage that trains the encoder, or its last blocks on the activations of the others."""
        recipe, section, val = self.recipe, self.recipe.fine_tune, self.prepared.val
        kept = None
        if section.blocks != "all":
            kept = fine_tune.Kept(self.model, self.prepared, recipe, self.augment, self.ranks, self.log)
        judge, features = None, self.features if kept is None else kept.features
        if val is not None:
            judge = (judge_by_classifier if _trains_classifier(recipe) else judge_by_means)(self, val, features)
        stage = network_stage(self, "fine-tune", judge, None if kept is None else kept.cut.rest)
        frozen = fine_tune.norm_layers(self.model.encoder) if section.batch_norm == "frozen" else ()
        return replace(
            stage,
            part=stage.part if kept is None else kept.part,
            sampler=sampler,
            transform=stage.transform if kept is None else kept.transform,
            frozen=frozen if kept is None else (*frozen, kept.cut.front),
            groups=fine_tune.parameter_groups(
                self.model.encoder, stage.trained, recipe.encoder_training, section.layer_decay
            ),
            average=section.average,
        )


def _trains_classifier(recipe: Recipe) -> bool:
    return "logits" in recipe.encoder_training.loss.entry.needs


class Regressing(Finisher):
    """Fits the regression again, on the features of an encoder that was trained without a classifier."""

    def finish(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the regression."""
        regress(trainer, cached=False)
        state.seconds = perf_counter() - trainer.begin


class Blending(Finisher):
    """Averages the logits of a regression on the features of the trained encoder and of the pretrained encoder.

    The features of the trained encoder separate the images that it was trained on, so inner folds cannot choose the
    strength of their regression. It is that of the other regression.
    """

    def finish(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit both regressions, and join the two models."""
        tuned, prepared, share = trainer.model, trainer.prepared, trainer.recipe.fine_tune.blend
        encoder, features = trainer.untrained()
        head = trainer.head(trainer.recipe.classifier.loss, features)
        frozen = Model(encoder, head, prepared.mean, prepared.std, views=tuned.views, scaling=tuned.scaling)
        frozen.to(trainer.device)
        if trainer.recipe.fast:
            arrange(frozen.encoder, trainer.device, prepared.shape)
        trainer.replace_model(frozen)
        strength = regress(trainer)
        trainer.replace_model(tuned)
        regress(trainer, cached=False, strength=strength)
        both, trainer.card = average([(frozen, trainer.card), (tuned, trainer.card)], shares=(share, 1 - share))
        trainer.replace_model(both)
        trainer.log.fact(notes.blend(share))
        state.seconds = perf_counter() - trainer.begin
