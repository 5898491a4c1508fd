"""Recipes: the validated settings of a run, read from and written to TOML. This package does not need torch."""

from lopsided.recipe.losses import LossSettings
from lopsided.recipe.schema import (
    FROZEN,
    MAX_MEMBERS,
    MAX_SIDE,
    RUNTIME_FIELDS,
    UNHASHED_FIELDS,
    Classifier,
    EncoderTraining,
    Recipe,
    earlier_values,
    find_recipe,
    hashed_fields,
    is_idle,
    named_recipe,
    named_recipes,
    parse_change,
)
from lopsided.recipe.weights import WEIGHT_NAMES

__all__ = [
    "FROZEN",
    "MAX_MEMBERS",
    "MAX_SIDE",
    "RUNTIME_FIELDS",
    "UNHASHED_FIELDS",
    "WEIGHT_NAMES",
    "Classifier",
    "EncoderTraining",
    "LossSettings",
    "Recipe",
    "earlier_values",
    "find_recipe",
    "hashed_fields",
    "is_idle",
    "named_recipe",
    "named_recipes",
    "parse_change",
]
