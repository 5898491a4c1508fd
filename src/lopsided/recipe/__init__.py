"""Recipes: the validated settings of a run, read from and written to TOML. This package does not need torch."""

from lopsided.recipe.changes import Changes, is_word, read_values, read_words
from lopsided.recipe.conflicts import MAX_MEMBERS, check_classes
from lopsided.recipe.losses import LossSettings
from lopsided.recipe.schema import Recipe, find_recipe, named_recipe, named_recipes
from lopsided.recipe.sections import RUNTIME_FIELDS, UNHASHED_FIELDS, Classifier, EncoderTraining
from lopsided.recipe.values import MAX_SIDE

__all__ = [
    "MAX_MEMBERS",
    "MAX_SIDE",
    "RUNTIME_FIELDS",
    "UNHASHED_FIELDS",
    "Changes",
    "Classifier",
    "EncoderTraining",
    "LossSettings",
    "Recipe",
    "check_classes",
    "find_recipe",
    "is_word",
    "named_recipe",
    "named_recipes",
    "read_values",
    "read_words",
]
