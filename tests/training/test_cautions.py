from __future__ import annotations

import numpy as np
import torch

from lopsided.data.inputs import MemoryInputs, Part, Prepared
from lopsided.data.splits import Leaks
from lopsided.recipe import Recipe
from lopsided.training.cautions import cautions
from training.conftest import tiny

NO_LEAKS = Leaks((), ())


def part(*counts: int) -> Part:
    labels = np.repeat(np.arange(len(counts)), counts)
    return Part(MemoryInputs(torch.zeros(len(labels), 1)), labels)


def made(train: Part, val: Part | None = None, test: Part | None = None) -> Prepared:
    return Prepared("vector", (1,), None, (0.0,), (1.0,), ("many", "few"), train, val, test)


def texts(recipe: Recipe, prepared: Prepared, leaks: Leaks = NO_LEAKS) -> list[str]:
    return list(cautions(recipe, prepared, leaks))


def test_a_run_with_enough_of_everything_has_no_warnings() -> None:
    assert texts(tiny(), made(part(50, 50), part(10, 10), part(30, 30))) == []


def test_missing_splits_are_warned_about() -> None:
    assert texts(tiny(), made(part(50, 50))) == [
        "There is no test split: the run cannot estimate how well the model does on new images.",
        "There is no validation split: the run keeps the weights of the last epoch, not of the best one.",
    ]


def test_classes_with_few_images_are_named_with_their_number() -> None:
    assert texts(tiny(), made(part(50, 50), part(10, 9), part(30, 6))) == [
        "The test split holds fewer than 30 images of few (6): check how wide the intervals are.",
        "The validation split holds fewer than 10 images of few (9): the choice of the epoch is noisy.",
    ]


def test_leaks_are_counted_and_one_is_shown() -> None:
    enough = made(part(50, 50), part(10, 10), part(30, 30))
    leaks = Leaks(("p1", "p7"), (("a.png", "train", "b.png", "test"),))
    groups, duplicates = texts(tiny(), enough, leaks)
    assert groups.startswith("2 groups are in more than one split, for example p1: the figures will be too high.")
    assert duplicates.startswith(
        "One image is byte-identical to an image in another split, for example b.png in test and a.png in train: "
    )


def test_a_minority_that_is_alone_in_its_batches_is_warned_about() -> None:
    rare = made(part(90, 10), part(10, 10), part(30, 30))
    (text,) = texts(tiny(), rare)
    assert text.startswith("A batch holds 1.6 images of few on average: its anchors have few positives.")
    (text,) = texts(tiny(encoder_training__loss="cl"), rare)
    assert "anchors without a positive do not learn" in text
    for change in (
        {"encoder_training__batch_size": 20},
        {"encoder_training__views": 2},
        {"encoder_training__queue": 64},
        {"encoder_training__sampler": "balanced"},
        {"encoder_training__sampler": "m-per-class"},
        {"encoder_training__sampler": "sqrt"},
        {"encoder_training__loss": "ce"},
    ):
        assert texts(tiny(**change), rare) == [], change
