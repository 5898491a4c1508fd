from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lopsided.data.inputs import MemoryInputs, Part, Prepared
from lopsided.data.sources import source_from_arrays
from lopsided.data.splits import Leaks
from lopsided.facts import Fact, cautions
from lopsided.recipe import Recipe
from lopsided.training.cautions import falling_cautions, is_falling, run_cautions, source_cautions
from training.conftest import tiny

NO_LEAKS = Leaks((), ())


def part(*counts: int) -> Part:
    labels = np.repeat(np.arange(len(counts)), counts)
    return Part(MemoryInputs(torch.zeros(len(labels), 1)), labels)


def made(train: Part, val: Part | None = None, test: Part | None = None) -> Prepared:
    return Prepared("vector", (1,), None, (0.0,), (1.0,), ("many", "few"), train, val, test)


def facts(recipe: Recipe, prepared: Prepared, leaks: Leaks = NO_LEAKS) -> list[Fact]:
    return list(run_cautions(recipe, prepared, leaks))


def test_a_run_with_enough_of_everything_has_no_warnings() -> None:
    assert facts(tiny(), made(part(50, 50), part(10, 10), part(30, 30))) == []


def test_missing_splits_are_warned_about() -> None:
    assert facts(tiny(), made(part(50, 50))) == [cautions.no_test_split(), cautions.no_validation_split()]


def test_classes_with_few_images_are_named_with_their_number() -> None:
    assert facts(tiny(), made(part(50, 50), part(10, 9), part(30, 6))) == [
        cautions.few_test_images({"few": 6}, 30),
        cautions.few_validation_images({"few": 9}, 10),
    ]


def test_leaks_are_counted_and_one_is_shown() -> None:
    enough = made(part(50, 50), part(10, 10), part(30, 30))
    leaks = Leaks(("p1", "p7"), (("a.png", "train", "b.png", "test"),))
    assert facts(tiny(), enough, leaks) == [
        cautions.shared_groups(2, "p1", "split"),
        cautions.shared_images(1, ["a.png", "train", "b.png", "test"], "split"),
    ]


def test_a_minority_that_is_alone_in_its_batches_is_warned_about() -> None:
    rare = made(part(90, 10), part(10, 10), part(30, 30))
    assert facts(tiny(), rare) == [cautions.few_positives("few", pytest.approx(1.6), learns=True)]
    assert facts(tiny(encoder_training__loss="cl"), rare) == [
        cautions.few_positives("few", pytest.approx(1.6), learns=False)
    ]
    for change in (
        {"encoder_training__batch_size": 20},
        {"encoder_training__views": 2},
        {"encoder_training__queue": 64},
        {"encoder_training__sampler": "balanced"},
        {"encoder_training__sampler": "m-per-class"},
        {"encoder_training__sampler": "sqrt"},
        {"encoder_training__loss": "ce"},
    ):
        assert facts(tiny(**change), rare) == [], change


@pytest.mark.parametrize(
    ("losses", "falls"),
    [
        ([5.0 - 0.1 * i for i in range(30)], True),  # a straight line
        ([1.0 + 4.0 * math.exp(-i / 30) for i in range(30)], True),  # far from its end
        ([1.0 + 4.0 * math.exp(-i / 5) for i in range(30)], False),  # levelled off
        ([5.0, 2.0, 1.5, 1.45, 1.44, 1.44], False),
        ([5.0, 4.9, 4.95, 4.9, 4.92, 4.88], False),  # noise
        ([2.0, 2.5, 3.0], False),
        ([3.0, 2.0], True),
        ([3.0], False),
        ([], False),
    ],
)
def test_a_loss_falls_steeply_if_its_end_is_as_steep_as_half_its_mean(losses: list[float], falls: bool) -> None:
    assert is_falling(losses) is falls


def test_a_stage_whose_loss_still_falls_is_named_with_the_flag_that_helps() -> None:
    def history(stage: str, losses: list[float]) -> list[dict[str, Any]]:
        return [{"stage": stage, "epoch": i + 1, "loss": loss} for i, loss in enumerate(losses)]

    recipe = tiny()  # three epochs, then two
    falling, flat = history("encoder", [3.0, 2.0, 1.25]), history("classifier", [0.5, 0.5])
    assert list(falling_cautions(recipe, falling + flat)) == [cautions.falling_loss("encoder", 2.0, 1.25, "epochs")]
    second = history("encoder", [3.0, 1.0, 1.0]) + history("classifier", [0.9, 0.3])
    assert list(falling_cautions(recipe, second)) == [
        cautions.falling_loss("classifier", 0.9, 0.3, "classifier_epochs")
    ]
    assert list(falling_cautions(recipe, falling[:2] + flat)) == [], "It was stopped early, by its validation images."


def test_typos_pairs_and_large_images_are_warned_about() -> None:
    labels = ["Break"] * 30 + ["Brake"]
    source = source_from_arrays(np.zeros((31, 4, 4), dtype=np.uint8), np.array(labels))
    assert list(source_cautions(source, tiny(), (1, 4, 4))) == [
        cautions.similar_names([["Brake", "Break"]], {"Brake": 1, "Break": 30})
    ]
    plain = source.subset(range(30))
    assert list(source_cautions(plain, tiny(data__image_size=600), (3, 600, 600))) == []
    assert list(source_cautions(plain, tiny(), (3, 3000, 4000))) == [cautions.large_images(4000, 3000)]
