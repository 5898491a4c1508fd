"""Distance: how far an image is from those of the frequent class, and regressions as soon as rare images are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lopsided.recipe.methods.frozen import FrozenSpec

if TYPE_CHECKING:
    from lopsided.recipe.schema import Recipe


class DistanceSpec(FrozenSpec):
    """The distance from normal, mixed with regressions. It needs no image of the rare class."""

    name = "distance"
    trainer = "lopsided.training.methods.distance:DistanceTrainer"
    example = "few"
    no_finisher = ", whose classifier is a distance and regressions"
    chooses_views = False
    takes_weights = False
    needs_rare = False
    reads_positions = True

    def title(self, recipe: Recipe) -> str:
        """Return the name of a run."""
        return "Distance from normal"

    def summary(self, recipe: Recipe, its: str) -> str:
        """Return how the model was trained."""
        return (
            f"the distance from the frequent class, joined with regressions if there are rare images, both on {its} "
            "features, which were not trained"
        )

    def counted(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the images that the prior counts: a class without images as if it had one."""
        return tuple(max(int(number), 1) for number in counts)

    def loss_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence for a loss that the regression cannot have, and for an average of distances."""
        yield from super().loss_conflicts(recipe)
        if recipe.final == "ensemble":
            yield 'final cannot be "ensemble" with method "distance": each fold has its own distance. Use "refit".'


DISTANCE = DistanceSpec()
