"""Frozen: regressions on the features of a pretrained encoder, which is not trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.recipe.methods.spec import MethodSpec, Section

if TYPE_CHECKING:
    from lopsided.recipe.losses import LossSettings
    from lopsided.recipe.schema import Recipe

REGRESSION_LOSSES = ("ce", "weighted-ce")
"""Losses of the logistic regression: each image counts the same, or each class."""
_IDLE = ("augment.", "head.", "encoder_training.", "classifier.", "selection.")
_USED = ("augment.normalisation", "classifier.loss")


def regression_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence if the logistic regression cannot have the loss of the recipe."""
    loss = recipe.classifier.loss.name
    if loss not in REGRESSION_LOSSES:
        losses = ", ".join(REGRESSION_LOSSES)
        yield f'classifier.loss cannot be {loss} with method "{recipe.method}". Use one of {losses}.'


def averages(recipe: Recipe) -> bool:
    """Return whether ridge regressions join the logistic one: not if the recipe says how to fit it."""
    return recipe.regression.strength is None and recipe.classifier.loss.name == "ce"


class FrozenSpec(MethodSpec):
    """A classifier on the features of a pretrained encoder. Other methods on such features derive from this class."""

    name = "frozen"
    trainer = "lopsided.training.methods.frozen:FrozenTrainer"
    example = "quick"
    advice = "Use other pretrained weights (encoder, weights), or train an encoder (--recipe from-scratch)."
    sections = frozenset({"regression"})
    no_finisher = ", whose classifier is a logistic regression"
    trains_encoder = False
    pretrained = True
    chooses_views = True
    selects_epochs = False
    folds_by_default = True
    takes_weights = True
    shares_features = True

    def title(self, recipe: Recipe) -> str:
        """Return the name of a run."""
        return "Frozen features"

    def summary(self, recipe: Recipe, its: str) -> str:
        """Return how the model was trained."""
        kind = "mean of logistic and ridge regressions" if averages(recipe) else "logistic regression"
        return f"{kind} on {its} features, which were not trained, with {recipe.classifier.loss.words}"

    def loss(self, recipe: Recipe) -> LossSettings:
        """Return the loss that names the run."""
        return recipe.classifier.loss

    def head_loss(self, recipe: Recipe) -> LossSettings:
        """Return the loss of the regression, which has a linear classifier."""
        return recipe.classifier.loss

    def loss_sections(self, recipe: Recipe) -> tuple[str, ...]:
        """Return no section: nothing is trained by batches."""
        return ()

    def scored_by(self, recipe: Recipe) -> Section:
        """Return that each training image counts once."""
        return "regression"

    def stages(self, recipe: Recipe) -> dict[str, int | None]:
        """Return one stage without epochs."""
        return {self.name: 0}

    def is_idle(self, path: str) -> bool:
        """Return whether a field is about the training of an encoder."""
        return path.startswith(_IDLE) and not path.startswith(_USED)

    def loss_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence if the regression cannot have the loss of the recipe."""
        yield from regression_conflicts(recipe)


FROZEN = FrozenSpec()
