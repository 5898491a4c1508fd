from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.data.samplers import BatchSampler, Kind
from lopsided.errors import InputError

KINDS: tuple[Kind, ...] = ("plain", "balanced", "sqrt", "m-per-class")
LABELS = np.repeat([0, 1, 2], [90, 9, 1])


def epoch_of(sampler: BatchSampler, epoch: int = 0) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return [batch.tolist() for batch in sampler]


def drawn_per_class(batches: list[list[int]], labels: np.ndarray = LABELS) -> list[int]:
    return np.bincount(labels[np.concatenate(batches).astype(int)], minlength=labels.max() + 1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_seed_and_epoch_decide_the_order(kind: Kind) -> None:
    sampler = BatchSampler(LABELS, 16, kind=kind, seed=3)
    assert epoch_of(sampler, 2) == epoch_of(BatchSampler(LABELS, 16, kind=kind, seed=3), 2)
    assert epoch_of(sampler, 2) == epoch_of(sampler, 2)
    assert epoch_of(sampler, 2) != epoch_of(sampler, 3)
    assert epoch_of(sampler, 2) != epoch_of(BatchSampler(LABELS, 16, kind=kind, seed=4), 2)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=80),
    batch_size=st.integers(1, 20),
    epoch=st.integers(0, 3),
)
def test_there_are_as_many_batches_as_said_and_none_is_too_large(
    kind: Kind, labels: list[int], batch_size: int, epoch: int
) -> None:
    sampler = BatchSampler(labels, batch_size, kind=kind, seed=1)
    batches = epoch_of(sampler, epoch)
    assert len(batches) == len(sampler)
    assert all(1 <= len(batch) <= batch_size for batch in batches)


def test_batches_are_int64_indices() -> None:
    for kind in KINDS:
        assert next(iter(BatchSampler(LABELS, 16, kind=kind, seed=0))).dtype == np.int64


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 100), batch_size=st.integers(1, 30), epoch=st.integers(0, 5))
def test_the_plain_sampler_shows_each_image_once(n: int, batch_size: int, epoch: int) -> None:
    batches = epoch_of(BatchSampler([0] * n, batch_size, seed=0), epoch)
    assert sorted(chain(*batches)) == list(range(n))
    assert all(len(batch) == batch_size for batch in batches[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_dropping_the_last_batch_leaves_whole_batches_alone(kind: Kind) -> None:
    sampler = BatchSampler(LABELS, 15, kind=kind, last="drop", seed=0)
    batches = epoch_of(sampler)
    assert len(sampler) == len(batches) == 6
    assert {len(batch) for batch in batches} == {15}


def test_the_balanced_sampler_draws_each_class_equally_often() -> None:
    batches = epoch_of(BatchSampler(LABELS, 16, kind="balanced", seed=0))
    assert sum(map(len, batches)) == 100
    assert drawn_per_class(batches) == [34, 33, 33]


def test_the_square_root_sampler_draws_by_the_root_of_the_size() -> None:
    labels = np.repeat([0, 1], [81, 9])
    assert drawn_per_class(epoch_of(BatchSampler(labels, 16, kind="sqrt", seed=0)), labels) == [68, 22]


def test_images_of_a_class_are_drawn_equally_often() -> None:
    drawn = np.concatenate(epoch_of(BatchSampler(LABELS, 16, kind="balanced", seed=0)))
    times = np.bincount(drawn.astype(int), minlength=100)
    for label in range(3):
        of_class = times[label == LABELS]
        assert of_class.max() - of_class.min() <= 1


@pytest.mark.parametrize(("m", "held"), [(None, 5), (3, 3)])
def test_every_batch_holds_m_of_each_class(m: int | None, held: int) -> None:
    sampler = BatchSampler(LABELS, 16, kind="m-per-class", m_per_class=m, seed=0)
    batches = epoch_of(sampler)
    assert len(batches) == len(sampler) == -(-100 // (3 * held))
    for batch in batches:
        assert np.bincount(LABELS[batch]).tolist() == [held] * 3


def test_classes_that_do_not_fit_into_one_batch_take_turns() -> None:
    labels = np.repeat(np.arange(7), 30)
    batches = epoch_of(BatchSampler(labels, 12, kind="m-per-class", m_per_class=4, seed=0))
    assert all(sorted(np.bincount(labels[batch], minlength=7).tolist()) == [0] * 4 + [4] * 3 for batch in batches)
    uses = np.bincount(labels[np.concatenate(batches).astype(int)]) // 4
    assert uses.max() - uses.min() <= 1


def test_the_first_half_of_a_batch_is_not_one_class_alone() -> None:
    batches = epoch_of(BatchSampler(np.repeat([0, 1], 100), 10, kind="m-per-class", seed=0))
    assert any(0 < (np.array(batch)[:5] >= 100).sum() < 5 for batch in batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"kind": "fair"}, "sampler must be one of plain, balanced, sqrt, m-per-class, got 'fair'"),
        ({"last": "pad"}, "last must be keep or drop, got 'pad'"),
        ({"labels": []}, r"labels must be one number per image, got shape \(0,\)"),
        ({"kind": "m-per-class", "m_per_class": 17}, r"m_per_class must be in \[1, 16\] \(the batch size\), got 17"),
        (
            {"batch_size": 101, "last": "drop"},
            "Dropping the last batch leaves no batch: 100 images at batch size 101",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"labels": LABELS, "batch_size": 16, "seed": 0, **options}
    with pytest.raises(InputError, match=message):
        BatchSampler(**arguments)
