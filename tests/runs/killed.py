"""What processes do until they are killed; apart from the tests, whose imports would cost each of them a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forked import die_at_write


def run(recipe: str, folder: Path, fatal: int = 0, before: str = "") -> None:
    """Train, and die before a write; ``before``: a recipe that the process trains first."""
    from lopsided.recipe import Recipe
    from lopsided.runs.run import run_recipe
    from lopsided.training import checkpoint

    checkpoint.TIMES_AS_LONG = 0.0  # A checkpoint after every epoch.
    if before:
        run_recipe(Recipe.from_toml(before), folder.with_name(f"{folder.name}-before"))
    if fatal:
        die_at_write(fatal, folder)
    run_recipe(Recipe.from_toml(recipe), folder, resume=True)


def predict(folder: Path, fatal: int = 0) -> None:
    """Write answers, and die before a write."""
    from lopsided.data.decoding import UnreadableImageError
    from lopsided.inference.predict import write_predictions

    if fatal:
        die_at_write(fatal, folder)
    answers = [(Path(f"{i}.png"), np.array([i / 1000, 1 - i / 1000]), None) for i in range(1000)]
    broken = Path("broken.png")
    stream = [*answers, (broken, UnreadableImageError(broken, "no image"), None)]
    write_predictions(stream, ["cat", "dog"], folder / "answers.csv")


def sweep(folder: Path, recipes: list[str], fatal: int) -> None:
    """Run a sweep whose cells are done at once, and die before a write."""
    from lopsided.recipe import Recipe
    from lopsided.runs.sweep import run_sweep
    from tiny_sweep import Scripted

    die_at_write(fatal, folder)
    run_sweep([Recipe.from_toml(recipe) for recipe in recipes], folder, engine=Scripted(slots=1))
