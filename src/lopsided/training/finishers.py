"""What follows the training of an encoder: a stage that trains the classifier, or a change of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lopsided.errors import InputError
from lopsided.evaluation.metric_table import figure_of
from lopsided.facts import notes
from lopsided.models.encoders import seeded_init
from lopsided.training.checkpoint import ENCODER_NAME, State, load_strictly
from lopsided.training.rescale import Scales, choose_tau, normalise
from lopsided.training.stage_kinds import classifier_stage

if TYPE_CHECKING:
    from lopsided.training.methods.staged import StagedTrainer


class Finisher:
    """Leaves the classifier as it is."""

    stage: str | None = None
    """The name of the finisher's own stage, if it has one."""

    def check(self, trainer: StagedTrainer) -> None:
        """Raise if the data cannot be used. It is called before training."""

    def restore(self, trainer: StagedTrainer) -> None:
        """Load what the stage before has left, to continue in the stage of this finisher."""

    def finish(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Change or train the classifier. ``tensors`` are those of a checkpoint of the finisher's own stage."""


class SecondStage(Finisher):
    """Trains the model's classifier on the frozen encoder."""

    stage = "classifier"

    def handed_on(self, trainer: StagedTrainer) -> nn.Module:
        """Return what the first stage leaves for this one."""
        return trainer.model.encoder

    def restore(self, trainer: StagedTrainer) -> None:
        """Load the encoder of the first stage."""
        load_strictly(self.handed_on(trainer), trainer.checkpoint.load_weights(ENCODER_NAME))

    def finish(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Save the encoder, unless this stage continues, and train the classifier."""
        if state.stage != self.stage:
            trainer.checkpoint.save_weights(ENCODER_NAME, self.handed_on(trainer).state_dict())
            state.stage, state.epoch, state.selection, state.chosen, tensors = "classifier", 0, {}, None, {}
            trainer.checkpoint.save(state, {})
        self.train(trainer, state, tensors)

    def train(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the classifier."""
        with trainer.following(trainer.recipe.first_stage()):  # This stage is the same whatever follows.
            trainer.run_stage(classifier_stage(trainer), state, tensors)


class Retraining(SecondStage):
    """Trains a new classifier (cRT)."""

    def train(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Replace the classifier, and train it."""
        with seeded_init(trainer.recipe.seed, "retrained"):
            head = trainer.head(trainer.recipe.classifier.loss, trainer.card.features)
        trainer.model.classifier = head.to(trainer.device)
        trainer.run_stage(classifier_stage(trainer), state, tensors)


class Rescaling(SecondStage):
    """Trains one scale per class for the logits of the classifier (LWS)."""

    def handed_on(self, trainer: StagedTrainer) -> nn.Module:
        """Return the encoder and its classifier."""
        return nn.ModuleDict({"encoder": trainer.model.encoder, "classifier": trainer.model.classifier})

    def train(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the scales, and multiply the weights of the classifier by them."""
        scales = Scales(trainer.num_classes).to(trainer.device)
        trainer.run_stage(classifier_stage(trainer, scales), state, tensors)
        scales.apply_to(trainer.model.classifier)


class TauNormalisation(Finisher):
    """Divides the weights of the classifier by their length to the power tau, and removes its bias."""

    def check(self, trainer: StagedTrainer) -> None:
        """Raise if there are no images to choose tau by."""
        if trainer.recipe.classifier.tau is None and trainer.prepared.val is None:
            raise InputError("The data have no validation images to choose classifier.tau by. Set classifier.tau.")

    def finish(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Normalise the weights. Validation images choose tau if the recipe does not."""
        head, val, tau = trainer.model.classifier, trainer.prepared.val, trainer.recipe.classifier.tau
        if tau is not None:
            normalise(head, float(tau))
            trainer.log.fact(notes.tau(tau, None, 0))
            return
        assert val is not None  # ``check`` has seen it.
        labels = val.labels
        metric = trainer.recipe.selection.metric.removeprefix("smooth_").replace("last", "log_loss")
        features = trainer.features(val.inputs)

        def figure(logits: Tensor) -> float:
            judged = {f"val_{name}": value for name, value in trainer.judged(logits, labels).items()}
            return figure_of(metric, [judged]) or 0.0

        with torch.no_grad():
            tau, figures = trainer.ranks.told(lambda: choose_tau(head.weight, features, figure))
        trainer.log.event("tau", tau=tau, metric=metric, figures=figures)
        normalise(head, float(tau))
        trainer.log.fact(notes.tau(float(tau), metric, len(figures)))


FINISHERS: dict[str, type[Finisher]] = {
    "linear": Finisher,
    "crt": Retraining,
    "lws": Rescaling,
    "tau-norm": TauNormalisation,
}
"""The finisher of each ``classifier.kind``."""
