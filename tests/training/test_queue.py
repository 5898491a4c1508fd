from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.data.inputs import MemoryInputs, Part, Prepared
from lopsided.data.splits import Leaks
from lopsided.facts import cautions
from lopsided.losses import FeatureQueue
from lopsided.training.cautions import run_cautions
from training.conftest import tiny

Pushes = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6)


def filled(size: int, pushes: list[list[int]], *, balanced: bool) -> tuple[FeatureQueue, list[tuple[int, int]]]:
    """A queue, and all that was pushed, as (number, label); the feature of a sample is its number."""
    queue, everything = FeatureQueue(size, balanced=balanced), []
    for labels in pushes:
        numbers = range(len(everything), len(everything) + len(labels))
        everything += list(zip(numbers, labels, strict=True))
        queue.push(torch.tensor([[float(number)] for number in numbers]), torch.tensor(labels))
    return queue, everything


def content(queue: FeatureQueue) -> list[tuple[int, int]]:
    found = queue.reference()
    assert found is not None
    return list(zip(found[0][:, 0].int().tolist(), found[1].tolist(), strict=True))


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 20), pushes=Pushes)
def test_a_queue_holds_the_last_features_in_their_order(size: int, pushes: list[list[int]]) -> None:
    queue, everything = filled(size, pushes, balanced=False)
    assert content(queue) == everything[-size:]


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 20), pushes=Pushes)
def test_a_balanced_queue_is_full_and_has_of_each_class_the_newest_and_none_more_than_its_share(
    size: int, pushes: list[list[int]]
) -> None:
    queue, everything = filled(size, pushes, balanced=True)
    held = content(queue)
    assert held == sorted(held)
    counts, seen = Counter(label for _, label in held), Counter(label for _, label in everything)
    assert len(held) <= size
    for label, number in counts.items():
        assert [pair for pair in held if pair[1] == label] == [p for p in everything if p[1] == label][-number:]
    if len(pushes) == 1:  # Nothing was dropped before the end.
        assert len(held) == min(size, len(everything))
        for label in seen:
            # A class that lost features is as large as any other, up to one feature.
            assert counts[label] == seen[label] or counts[label] >= max(counts.values()) - 1


def test_the_majority_does_not_fill_a_balanced_queue() -> None:
    queue, _ = filled(8, [[0, 0, 0, 0, 0, 0, 1]] * 20, balanced=True)
    assert Counter(label for _, label in content(queue)) == {0: 4, 1: 4}
    queue, _ = filled(8, [[0, 0, 0, 0, 0, 0, 1]] * 20, balanced=False)
    assert Counter(label for _, label in content(queue)) == {0: 6, 1: 2}


def test_every_view_enters_the_queue_without_a_graph() -> None:
    queue = FeatureQueue(10)
    queue.push(torch.arange(8.0).view(2, 2, 2).requires_grad_(), torch.tensor([3, 5]))
    found = queue.reference()
    assert found is not None
    assert found[0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found[1].tolist() == [3, 3, 5, 5]
    assert not found[0].requires_grad


def test_a_queue_is_kept_and_taken_up_again() -> None:
    queue, _ = filled(4, [[0, 1, 2], [1, 1]], balanced=True)
    again = FeatureQueue(4, balanced=True)
    assert again.tensors() == {}
    again.restore(queue.tensors(), torch.device("cpu"))
    assert content(again) == content(queue)
    with pytest.raises(ValueError, match=r"^tensors must hold both the features and the labels of the queue, got only"):
        again.restore({"queue.labels": torch.zeros(2)}, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^tensors must hold one label for each feature of the queue, got shapes"):
        again.restore({"queue.features": torch.zeros(3, 2), "queue.labels": torch.zeros(2)}, torch.device("cpu"))


@pytest.mark.parametrize(("size", "views", "warned"), [(100, 1, False), (101, 1, True), (101, 2, False)])
def test_a_queue_of_more_features_than_there_are_is_warned_about(size: int, views: int, warned: bool) -> None:
    labels = np.repeat([0, 1], 50)
    part = Part(MemoryInputs(torch.zeros(100, 1)), labels)
    prepared = Prepared("vector", (1,), None, (0.0,), (1.0,), ("many", "few"), part, part, part)
    recipe = tiny(encoder_training__queue=size, encoder_training__views=views)
    assert list(run_cautions(recipe, prepared, Leaks((), ()))) == [cautions.large_queue(101, 100)] * warned
