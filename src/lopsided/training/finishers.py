"""What follows the training of an encoder: a stage that trains the classifier, or a change of its weights.

Kang et al., "Decoupling representation and classifier for long-tailed recognition" (ICLR 2020), section 4.2. A
classifier that is trained on imbalanced images has longer weight vectors for frequent classes. Both methods change only
these lengths:

- tau-normalisation: ``w_k / ||w_k||^tau``. The bias is dropped, as in the paper. Tau is given, or chosen on validation
  images from 0, 0.1, ..., 2, the values of the authors' code.
- learnable weight scaling (LWS): ``s_k (w_k x + b_k)``, where only the scales ``s_k`` are trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lopsided.errors import InputError
from lopsided.evaluation.metric_table import figure_of
from lopsided.facts import notes
from lopsided.models.encoders import seeded_init
from lopsided.training.checkpoint import ENCODER_NAME, State, load_strictly

if TYPE_CHECKING:
    from lopsided.training.methods.staged import StagedTrainer


from collections.abc import Callable

from lopsided.models.heads import ClassifierHead

TAUS = tuple(round(0.1 * step, 1) for step in range(21))
"""The values of tau that validation images choose from. 0 only drops the bias."""


def tau_normalised(weight: Tensor, tau: float) -> Tensor:
    """Return rows ``w_k / ||w_k||^tau``, computed in float64. A row of zeros stays as it is.

    >>> tau_normalised(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    rows = weight.double()
    lengths = rows.norm(dim=1, keepdim=True)
    return (rows / torch.where(lengths > 0, lengths, 1.0) ** tau).to(weight.dtype)


def choose_tau(weight: Tensor, features: Tensor, figure: Callable[[Tensor], float]) -> tuple[float, dict[str, float]]:
    """Return the tau with the highest ``figure`` of its logits, the lowest if several tie, and the figure of each."""
    found = {tau: figure(features @ tau_normalised(weight, tau).T) for tau in TAUS}
    return max(found, key=lambda tau: (found[tau], -tau)), {f"{tau:g}": value for tau, value in found.items()}


def normalise(head: ClassifierHead, tau: float) -> None:
    """Apply tau-normalisation to a classifier, in place, and drop its bias."""
    with torch.no_grad():
        head.weight.copy_(tau_normalised(head.weight, tau))
        head.bias.zero_()


class Scales(nn.Module):
    """One scale per class for the logits of a classifier, which itself is not trained."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(num_classes))

    def forward(self, logits: Tensor) -> Tensor:
        """Return scaled logits (n, K)."""
        return logits * self.scales

    def apply_to(self, head: ClassifierHead) -> None:
        """Make the scales part of the weights of a classifier."""
        with torch.no_grad():
            head.weight.mul_(self.scales[:, None])
            head.bias.mul_(self.scales)


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
            trainer.run_stage(trainer.classifier_stage(), state, tensors)


class Retraining(SecondStage):
    """Trains a new classifier (cRT)."""

    def train(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Replace the classifier, and train it."""
        with seeded_init(trainer.recipe.seed, "retrained"):
            head = trainer.head(trainer.recipe.classifier.loss, trainer.card.features)
        trainer.model.classifier = head.to(trainer.device)
        trainer.run_stage(trainer.classifier_stage(), state, tensors)


class Rescaling(SecondStage):
    """Trains one scale per class for the logits of the classifier (LWS)."""

    def handed_on(self, trainer: StagedTrainer) -> nn.Module:
        """Return the encoder and its classifier."""
        return nn.ModuleDict({"encoder": trainer.model.encoder, "classifier": trainer.model.classifier})

    def train(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the scales, and multiply the weights of the classifier by them."""
        scales = Scales(trainer.num_classes).to(trainer.device)
        trainer.run_stage(trainer.classifier_stage(scales), state, tensors)
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
