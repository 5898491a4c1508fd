"""Leave one source out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lopsided.errors import InputError
from lopsided.recipe import named_recipe
from lopsided.runs.run import run_recipe

SMALL = {"compare_quick": False, "threads": 1, "data.image_size": 32, "regression.strength": 0.01}


def write_table(folder: Path, num: int = 14) -> Path:
    """Two cameras: one takes bright images of the rare class, the other dark ones; objects are stripes or none."""
    generator, rows = np.random.default_rng(0), ["path,label,camera"]
    for camera, base in (("a", 90), ("b", 160)):
        for label in ("plain", "striped"):
            for i in range(num):
                pixels = generator.normal(base, 8, (32, 32, 3))
                if label == "striped":
                    pixels[::4] += 50
                path = folder / f"{camera}-{label}-{i}.png"
                Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)
                rows.append(f"{path.name},{label},{camera}")
    table = folder / "table.csv"
    table.write_text("\n".join(rows))
    return table


def test_each_source_is_tested_by_a_model_that_was_trained_without_it(tmp_path: Path) -> None:
    table = write_table(tmp_path)
    recipe = named_recipe("quick").override(**{**SMALL, "data.folds": 2, "data.origin": "camera"})
    facts = run_recipe(recipe, tmp_path / "run", data=table).facts()
    (found,) = [fact for fact in facts if fact.kind == "left_out_sources"]
    assert [row["source"] for row in found.values["sources"]] == ["a", "b"]
    assert all(row["counts"] == [14, 14] for row in found.values["sources"])
    assert all(row["auroc"] > 0.8 for row in found.values["sources"])


def test_a_column_that_is_missing_and_a_run_without_folds_are_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path, 4)
    recipe = named_recipe("quick").override(**{**SMALL, "data.folds": 2, "data.origin": "clinic"})
    with pytest.raises(InputError, match=r"^--source must be a column of .*table\.csv, got 'clinic'; there are path"):
        run_recipe(recipe, tmp_path / "run", data=table)
    with pytest.raises(InputError, match="needs a frozen encoder and folds"):
        run_recipe(recipe.override(**{"data.folds": None}), tmp_path / "other", data=table)
    with pytest.raises(InputError, match="names a column of a table"):
        run_recipe(recipe, tmp_path / "third", data=tmp_path)
