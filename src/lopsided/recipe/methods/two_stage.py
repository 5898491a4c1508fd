"""Two stages: first the encoder with a contrastive loss, then a linear classifier on the frozen encoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.recipe.finishers import finisher_conflicts
from lopsided.recipe.methods.end_to_end import END_TO_END, classifier_loss_conflicts, unfit_loss
from lopsided.recipe.methods.spec import MethodSpec, Section
from lopsided.recipe.words import amount

if TYPE_CHECKING:
    from lopsided.losses.catalogue import Loss
    from lopsided.recipe.losses import LossSettings
    from lopsided.recipe.schema import Recipe


class TwoStageSpec(MethodSpec):
    """The paper's method."""

    name = "two-stage"
    trainer = "lopsided.training.methods.staged:TwoStageTrainer"
    finishers = ("linear", "tau-norm")
    no_finisher = ", whose second stage trains a new classifier anyway"

    def summary(self, recipe: Recipe, its: str) -> str:
        """Return how the model was trained."""
        training, section = recipe.encoder_training, recipe.classifier
        return (
            f"{amount(training.epochs, 'epoch')} of {training.loss.words}, then {amount(section.epochs, 'epoch')} of a "
            f"linear classifier with {section.loss.words}{recipe.finisher.summary(recipe)}"
        )

    def head_loss(self, recipe: Recipe) -> LossSettings:
        """Return the loss of the second stage."""
        return recipe.classifier.loss

    def loss_sections(self, recipe: Recipe) -> tuple[str, ...]:
        """Return both stages."""
        return ("encoder_training", "classifier")

    def method_for(self, loss: Loss) -> str:
        """Return the method of a recipe that gets this loss: one that needs logits trains both parts together."""
        return self.name if loss.kind == "contrastive" else END_TO_END.name

    def scored_by(self, recipe: Recipe) -> Section:
        """Return the second stage."""
        return "classifier"

    def stages(self, recipe: Recipe) -> dict[str, int | None]:
        """Return the epochs of both stages."""
        return {"encoder": recipe.encoder_training.epochs, "classifier": recipe.classifier.epochs}

    def joint_epochs(self, recipe: Recipe) -> int:
        """Return the epochs of both stages together."""
        return recipe.encoder_training.epochs + recipe.classifier.epochs

    def loss_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence for every loss that does not fit."""
        if "projections" not in recipe.encoder_training.loss.entry.needs:
            yield unfit_loss(recipe, ("contrastive", "joint"), END_TO_END)
        yield from classifier_loss_conflicts(recipe)

    def finisher_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence if the classifier cannot be finished as the recipe says."""
        yield from finisher_conflicts(recipe, self.finishers, self.no_finisher, "classifier.loss")


TWO_STAGE = TwoStageSpec()
