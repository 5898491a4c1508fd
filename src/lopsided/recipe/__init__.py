"""What a run is: a validated recipe, read from TOML and written to TOML. Needs no torch."""

from lopsided.recipe.schema import (
    CLASSIFICATION_LOSSES,
    CONTRASTIVE_LOSSES,
    LATER_FIELDS,
    MAX_SIDE,
    RUNTIME_FIELDS,
    Classifier,
    EncoderTraining,
    Recipe,
    find_recipe,
    named_recipe,
    named_recipes,
)

__all__ = [
    "CLASSIFICATION_LOSSES",
    "CONTRASTIVE_LOSSES",
    "LATER_FIELDS",
    "MAX_SIDE",
    "RUNTIME_FIELDS",
    "Classifier",
    "EncoderTraining",
    "Recipe",
    "find_recipe",
    "named_recipe",
    "named_recipes",
]
