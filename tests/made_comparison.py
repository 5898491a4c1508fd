"""Records of methods that were never run, with figures whose answer is known by construction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lopsided.runs.keys import LossTable
from lopsided.runs.records import Fold, Record, Scores


def run(name: str, seed: int, uwa: float, scenario: str | None = "90:10", **changes: Any) -> Record:
    """A run of a method whose loss bears its name, on data that follow from scenario and seed."""
    recalls = min(1.0, uwa + 0.1), max(0.0, uwa - 0.1)
    figures = Scores(100, 10, 0.9, uwa, recalls, 0.9, 0.9, (), None)
    record = Record(
        cell=f"{name}-{scenario}-{seed}", source="photos", scenario=scenario, seed=seed, method="two-stage",
        loss=LossTable(name), classifier_loss=LossTable("ce"), encoder="mlp", image_size=28, split="random",
        weights="none", test=figures, held_out=None, seconds=60.0 + seed, threads=1, lopsided="0", torch="2",
        data=f"{scenario}-{seed}", family="0123456789abcdef", epochs=(3, 1), classes=("cat", "dog"), compared_as=name,
    )  # fmt: skip
    return replace(record, **changes)


def runs(name: str, *uwas: float, **changes: Any) -> list[Record]:
    return [run(name, seed, uwa, **changes) for seed, uwa in enumerate(uwas)]


def folds(name: str, *uwas: float, number: int = 5, seconds: float = 60.0, **changes: Any) -> list[Record]:
    """Runs of a method on folds of 120 images, 24 of them of the rare class; the seconds are those of a fold."""
    return [
        replace(
            run(name, 0, uwa, scenario=None, **changes),
            cell=f"{name}-fold-{i}",
            data=f"fold-{i}",
            seconds=seconds,
            fold=Fold(i, number, 100, 20),
            test=replace(run(name, 0, uwa).test, images=20, minority=4, log_loss=0.5 - uwa / 4),
        )
        for i, uwa in enumerate(uwas, start=1)
    ]
