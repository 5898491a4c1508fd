from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.data.sources import Source, open_source, source_from_arrays
from lopsided.data.splits import How, Splits, find_leaks, split
from lopsided.errors import DataError, InputError

MakeFolder = Callable[..., Path]


def source_of(
    counts: Sequence[int], *, groups: Sequence[str] | None = None, splits: Sequence[str] | None = None
) -> Source:
    """A source of blank images with so many per class."""
    labels = np.repeat(np.arange(len(counts)), counts)
    source = source_from_arrays(np.zeros((len(labels), 1, 1), dtype=np.uint8), labels, groups=groups)
    return replace(source, splits=None if splits is None else np.array(splits))


def per_class(source: Source, indices: np.ndarray) -> list[int]:
    return np.bincount(source.labels[indices], minlength=len(source.classes)).tolist()


def assert_partition(source: Source, splits: Splits) -> None:
    together = np.concatenate([indices for _, indices in splits.parts()])
    assert sorted(together.tolist()) == list(range(len(source)))
    for _, indices in splits.parts():
        assert (np.diff(indices) > 0).all()


@pytest.mark.parametrize(("counts", "size"), [((900, 100), 300), ((1113, 115), 368)])
@pytest.mark.parametrize("how", ["random", "stratified"])
def test_the_papers_test_sets_have_300_and_368_images(how: How, counts: tuple[int, int], size: int) -> None:
    splits = split(source_of(counts), how=how, val=0.0, test=0.3, seed=0)
    assert len(splits.test) == size
    assert len(splits.val) == 0


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(3, 60), min_size=2, max_size=5),
    val=st.sampled_from([0.0, 0.1, 0.2]),
    test=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 100),
)
def test_a_stratified_split_keeps_sizes_and_every_class(counts: list[int], val: float, test: float, seed: int) -> None:
    source = source_of(counts)
    splits = split(source, how="stratified", val=val, test=test, seed=seed)
    assert_partition(source, splits)
    assert min(per_class(source, splits.train)) >= 1
    for indices, share in ((splits.val, val), (splits.test, test)):
        assert abs(len(indices) - share * len(source)) <= 0.5
        if len(indices) >= len(counts):
            assert min(per_class(source, indices)) >= 1
            for held, number in zip(per_class(source, indices), counts, strict=True):
                assert abs(held - number * len(indices) / len(source)) <= len(counts)


def test_a_stratified_split_shares_a_class_of_two_between_train_and_test() -> None:
    source = source_of((50, 2))
    splits = split(source, how="stratified", val=0.2, test=0.2, seed=0)
    assert [per_class(source, indices)[1] for _, indices in splits.parts()] == [1, 0, 1]


def test_a_test_split_without_room_for_every_class_stays_as_small_as_asked() -> None:
    source = source_of([2] * 40)
    assert len(split(source, how="stratified", val=0.0, test=0.1, seed=0).test) == 8


@pytest.mark.parametrize("how", ["random", "stratified"])
def test_the_test_split_does_not_move_when_val_does(how: How) -> None:
    source = source_of((80, 20))
    tests = [split(source, how=how, val=val, test=0.3, seed=5).test.tolist() for val in (0.0, 0.1, 0.2)]
    assert tests[0] == tests[1] == tests[2]


@pytest.mark.parametrize("how", ["random", "stratified", "group"])
def test_the_same_seed_splits_the_same_and_another_otherwise(how: How) -> None:
    source = source_of((80, 20), groups=[str(i // 2) for i in range(100)])
    first, again, other = (split(source, how=how, val=0.1, test=0.3, seed=seed) for seed in (1, 1, 2))
    assert_partition(source, first)
    assert first.test.tolist() == again.test.tolist()
    assert first.test.tolist() != other.test.tolist()


def test_a_random_split_leaves_class_proportions_to_chance() -> None:
    source = source_of((900, 100))
    held = {per_class(source, split(source, how="random", val=0.0, test=0.3, seed=s).test)[1] for s in range(12)}
    assert len(held) > 3


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=30, max_size=80),
    rare=st.integers(6, 15),
    seed=st.integers(0, 100),
    mixed=st.booleans(),
)
def test_no_group_crosses_splits_and_shares_hold_about(sizes: list[int], rare: int, seed: int, mixed: bool) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = (groups < rare).astype(np.int64)
    if mixed:  # A lesion may change its diagnosis between photographs.
        labels[np.flatnonzero(groups == 0)[0]] = 0
    source = source_from_arrays(np.zeros((len(groups), 1, 1), dtype=np.uint8), labels, groups=groups)
    splits = split(source, how="group", val=0.15, test=0.3, seed=seed)
    assert_partition(source, splits)
    assert find_leaks(replace(source, images=distinct(len(groups)).images), splits).groups == ()
    for indices, share in ((splits.val, 0.15), (splits.test, 0.3)):
        for held, number in zip(per_class(source, indices), source.counts().values(), strict=True):
            assert abs(held - share * number) <= 2 * max(sizes)


def test_groups_of_one_are_split_as_exactly_as_images() -> None:
    source = source_of((700, 300), groups=[str(i) for i in range(1000)])
    splits = split(source, how="group", val=0.1, test=0.3, seed=0)
    for indices, expected in ((splits.val, [70, 30]), (splits.test, [210, 90])):
        assert np.abs(np.array(per_class(source, indices)) - expected).max() <= 1


def test_large_groups_are_not_kept_for_train() -> None:
    groups = [f"g{i // 10}" if i < 400 else f"s{i}" for i in range(1000)]
    source = source_of((1000, 40), groups=groups + [f"r{i}" for i in range(40)])
    splits = split(source, how="group", val=0.0, test=0.3, seed=0)
    assert source.groups is not None
    large = {group for group in source.groups[splits.test] if group.startswith("g")}
    assert 8 <= len(large) <= 16


def test_a_given_split_is_taken_as_it_comes() -> None:
    marks = ["train", "val", "test", "train", "val", "test"]
    splits = split(source_of((3, 3), splits=marks), how="given", val=0.1, test=0.3, seed=0)
    assert [indices.tolist() for _, indices in splits.parts()] == [[0, 3], [1, 4], [2, 5]]


def test_a_validation_split_that_is_not_given_is_taken_out_of_train() -> None:
    marks = (["train"] * 40 + ["test"] * 10) * 2
    source = source_of((50, 50), splits=marks)
    splits = split(source, how="given", val=0.25, test=0.3, seed=0)
    assert per_class(source, splits.test) == [10, 10]
    assert per_class(source, splits.val) == [10, 10]
    assert len(split(source, how="given", val=0.0, test=0.3, seed=0).val) == 0


def test_a_validation_split_that_is_not_given_respects_groups() -> None:
    groups = [str(i // 4) for i in range(100)]
    source = source_of((48, 52), splits=["train"] * 100, groups=groups)
    splits = split(source, how="given", val=0.25, test=0.0, seed=0)
    assert len(splits.val) > 0
    assert not set(np.array(groups)[splits.val]) & set(np.array(groups)[splits.train])


@pytest.mark.parametrize("how", ["random", "stratified", "group"])
def test_a_class_with_one_image_cannot_be_split(how: How) -> None:
    with pytest.raises(DataError, match=r"a class must hold at least 2 images to be split, got 1 in '1' of arrays\."):
        split(source_of((9, 1), groups=[str(i) for i in range(10)]), how=how, val=0.0, test=0.3, seed=0)


def test_a_class_with_one_image_is_fine_where_nothing_is_split_off() -> None:
    assert len(split(source_of((9, 1)), how="stratified", val=0.0, test=0.0, seed=0).train) == 10


def split_by_seeds(seeds: range) -> None:
    for seed in seeds:
        split(source_of((20, 2)), how="random", val=0.0, test=0.5, seed=seed)


def test_a_class_that_a_random_split_takes_out_of_train_is_an_error() -> None:
    with pytest.raises(
        DataError,
        match=r"train must hold every class, but it has no image of 1 of arrays\. Use a stratified split or another ",
    ):
        split_by_seeds(range(200))


def test_a_given_split_whose_train_lacks_a_class_is_an_error() -> None:
    with pytest.raises(DataError, match=r"train must hold every class, but it has no image of 1 of arrays\."):
        split(source_of((2, 1), splits=["train", "test", "test"]), how="given", val=0.0, test=0.0, seed=0)


@pytest.mark.parametrize(
    ("how", "val", "test", "message"),
    [
        ("by-name", 0.1, 0.1, "split must be one of random, stratified, group, given, got 'by-name'"),
        ("random", -0.1, 0.1, r"val must be a share in \[0, 1\), got -0.1"),
        ("random", 0.1, 30, r"test must be a share in \[0, 1\), got 30"),
        ("random", 0.5, 0.5, r"val \+ test must be below 1, to leave images for train, got 0.5 \+ 0.5"),
    ],
)
def test_a_split_that_cannot_be_asked_for_is_refused(how: How, val: float, test: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split(source_of((9, 9)), how=how, val=val, test=test, seed=0)


def test_groups_and_given_splits_must_be_there() -> None:
    source = source_of((9, 9))
    with pytest.raises(DataError, match=r"A split by group needs groups, but arrays has none\."):
        split(source, how="group", val=0.0, test=0.3, seed=0)
    with pytest.raises(DataError, match=r"arrays does not define splits, so a given split cannot be used\."):
        split(source, how="given", val=0.0, test=0.3, seed=0)


def test_a_class_of_one_group_cannot_be_split_by_group() -> None:
    source = source_of((9, 3), groups=[*"abcdefghi", *"xxx"])
    with pytest.raises(
        DataError, match="a class must hold at least 2 groups to be split by group, got 1 in '1' of arrays"
    ):
        split(source, how="group", val=0.0, test=0.3, seed=0)


# Leaks


def distinct(n: int) -> Source:
    pixels = np.arange(n, dtype=np.uint32)[:, None] // np.array([1, 256]) % 256
    return source_from_arrays(pixels.astype(np.uint8).reshape(n, 1, 2), np.arange(n) % 2)


def test_a_group_and_a_copy_across_splits_are_found() -> None:
    x = np.array([1, 2, 3, 1, 2, 1], dtype=np.uint8).reshape(6, 1, 1)
    source = source_from_arrays(x, [0, 1, 0, 1, 0, 1], groups=["a", "b", "a", "c", "d", "c"])
    leaks = find_leaks(source, Splits(np.array([0, 1]), np.array([3]), np.array([2, 4, 5])))
    assert leaks.groups == ("a", "c")
    assert leaks.duplicates == (("0", "train", "3", "val"), ("1", "train", "4", "test"), ("0", "train", "5", "test"))
    assert leaks


def test_copies_within_a_split_are_no_leak() -> None:
    source = source_from_arrays(np.zeros((4, 1, 1), dtype=np.uint8), [0, 1, 0, 1])
    leaks = find_leaks(source, Splits(np.arange(4), np.array([], dtype=np.int64), np.array([], dtype=np.int64)))
    assert not leaks
    assert leaks.groups == ()


def test_a_copied_file_across_splits_is_found_under_its_name(make_folder: MakeFolder) -> None:
    folder = make_folder({"train/cat": 2, "train/dog": 2, "test/cat": 1, "test/dog": 1})
    (folder / "test" / "cat" / "copy.png").write_bytes((folder / "train" / "dog" / "001.png").read_bytes())
    source = open_source(folder)
    leaks = find_leaks(source, split(source, how="given", val=0.0, test=0.0, seed=0))
    assert ("train/dog/001.png", "train", "test/cat/copy.png", "test") in leaks.duplicates
