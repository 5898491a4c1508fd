"""Recipes by name or path."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from lopsided.errors import InputError, sentence
from lopsided.recipe import words
from lopsided.recipe.schema import Recipe


def named_recipes() -> dict[str, str]:
    """Return the names and descriptions of the recipes in the package."""
    names = sorted(file.name.removesuffix(".toml") for file in _shelf().iterdir() if file.name.endswith(".toml"))
    return {name: named_recipe(name).description for name in names}


def named_recipe(name: str) -> Recipe:
    """Return one of the recipes in the package."""
    names = sorted(file.name.removesuffix(".toml") for file in _shelf().iterdir() if file.name.endswith(".toml"))
    if name == "default":
        do = "lopsided fit takes thorough for up to 3,000 images and quick for more. Name one of the two."
        raise InputError(f"default is not one recipe: {do}")
    if name not in names:
        raise InputError(
            sentence(f"a named recipe must be one of {', '.join(names)}", words.shown(name), words.suggest(name, names))
        )
    return Recipe.from_bytes((_shelf() / f"{name}.toml").read_bytes(), f"The recipe {name}")


def find_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe with this name, or the recipe in the file with this path."""
    if isinstance(name_or_path, str) and not name_or_path.endswith(".toml") and not Path(name_or_path).exists():
        return named_recipe(name_or_path)
    return Recipe.load(name_or_path)


def _shelf() -> resources.abc.Traversable:
    return resources.files("lopsided.recipe") / "named"
