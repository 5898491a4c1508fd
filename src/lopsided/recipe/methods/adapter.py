"""Adapter: small contrastive heads on the features of a pretrained encoder, and a linear classifier on the heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.errors import sentence
from lopsided.losses import catalogue
from lopsided.recipe.methods.frozen import FrozenSpec, regression_conflicts
from lopsided.recipe.sections import TRAINING_FIELDS
from lopsided.recipe.words import amount

if TYPE_CHECKING:
    from lopsided.recipe.losses import LossSettings
    from lopsided.recipe.schema import Recipe

NOT_OF_HEADS = ("views", "queue", "queue_balanced", "chunk_size", *(path.split(".")[1] for path in TRAINING_FIELDS))
"""Fields of ``encoder_training`` without effect on heads, which are trained on the features of images."""


class AdapterSpec(FrozenSpec):
    """Heads that are trained on the features of an encoder as it is."""

    name = "adapter"
    takes_weights = False
    trainer = "lopsided.training.methods.adapter:AdapterTrainer"
    example = "adapter"
    advice = "Use other pretrained weights (encoder, weights), or the recipe quick."
    sections = frozenset({"regression", "adapter"})
    chooses_views = False
    calibrates = True
    folds_by_default = False
    shares_features = False

    def title(self, recipe: Recipe) -> str:
        """Return the name of a run."""
        return f"{self.loss(recipe).entry.label} heads on frozen features"

    def summary(self, recipe: Recipe, its: str) -> str:
        """Return how the model was trained."""
        training = recipe.encoder_training
        plus = ", averaged with a logistic regression" if recipe.adapter.blend else ""
        what = f"{amount(recipe.adapter.heads, 'head')} on {its} features, which were not trained"
        return f"{what}, with {amount(training.epochs, 'epoch')} of {training.loss.words}{plus}"

    def loss(self, recipe: Recipe) -> LossSettings:
        """Return the loss of the heads, which names the run."""
        return recipe.encoder_training.loss

    def loss_sections(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the section of the loss of the heads."""
        return ("encoder_training",)

    def stages(self, recipe: Recipe) -> dict[str, int | None]:
        """Return the epochs of the heads."""
        return {self.name: recipe.encoder_training.epochs}

    def passes(self, recipe: Recipe) -> float:
        """Return a small number, because heads are trained on features."""
        return 0.1

    def why_no_ensemble(self, recipe: Recipe) -> str | None:
        """Return the method: a member of an ensemble has no heads of its own."""
        return f'method "{self.name}"'

    def is_idle(self, path: str) -> bool:
        """Return whether a field has no effect on heads."""
        section, _, field = path.partition(".")
        if section == "encoder_training":
            return field in (*NOT_OF_HEADS, "batch_norm")
        return super().is_idle(path)

    def loss_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence if the heads or the regression cannot have their loss."""
        yield from regression_conflicts(recipe)
        loss = recipe.encoder_training.loss
        if loss.entry.kind != "contrastive" or loss.entry.views > 1:
            losses = ", ".join(entry.name for entry in catalogue.losses(("contrastive",)) if entry.views == 1)
            yield f'encoder_training.loss cannot be {loss.name} with method "{self.name}". Use one of {losses}.'
        if recipe.adapter.blend == 0 and recipe.regression.strength is not None:
            do = "Set adapter.blend, or remove regression.strength."
            yield sentence("regression.strength must be unset when adapter.blend is 0", recipe.regression.strength, do)


ADAPTER = AdapterSpec()
