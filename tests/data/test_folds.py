from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.data.prepare import split_note, split_source
from lopsided.data.sources import Source, open_source, source_from_arrays
from lopsided.data.splits import How, fold_numbers, fold_splits, most_folds
from lopsided.errors import DataError, InputError
from lopsided.facts import notes
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.folds import fold_recipes
from lopsided.runs.keys import cell_key, data_key
from tiny import write_photos


def source_of(labels: Sequence[int], groups: Sequence[str] | None = None) -> Source:
    return source_from_arrays(np.zeros((len(labels), 1, 1), dtype=np.uint8), np.array(labels), groups=groups)


def tally(source: Source, numbers: np.ndarray, folds: int) -> np.ndarray:
    return np.array([np.bincount(source.labels[numbers == k], minlength=len(source.classes)) for k in range(folds)])


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(5, 40), min_size=2, max_size=5), folds=st.integers(2, 5), seed=st.integers(0, 99))
def test_stratified_folds_differ_by_at_most_one_image_in_total_and_in_each_class(
    counts: list[int], folds: int, seed: int
) -> None:
    source = source_of(np.repeat(np.arange(len(counts)), counts).tolist())
    held = tally(source, fold_numbers(source, how="stratified", folds=folds, seed=seed), folds)
    assert held.sum() == len(source)
    assert np.ptp(held, axis=0).max() <= 1
    assert np.ptp(held.sum(axis=1)) <= 1


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=30, max_size=80),
    rare=st.integers(6, 15),
    folds=st.integers(2, 5),
    seed=st.integers(0, 99),
    mixed=st.booleans(),
)
def test_no_group_crosses_folds_and_every_class_is_spread(
    sizes: list[int], rare: int, folds: int, seed: int, mixed: bool
) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = (groups < rare).astype(np.int64)
    if mixed:  # A group may hold two labels.
        labels[np.flatnonzero(groups == 0)[0]] = 0
    source = source_of(labels.tolist(), [str(g) for g in groups])
    numbers = fold_numbers(source, how="group", folds=folds, seed=seed)
    assert all(len(np.unique(numbers[groups == group])) == 1 for group in range(len(sizes)))
    held = tally(source, numbers, folds)
    assert held.min() >= 1
    assert np.ptp(held, axis=0).max() <= 2 * max(sizes)


def test_groups_of_one_make_folds_as_equal_as_images() -> None:
    source = source_of([0] * 103 + [1] * 17, [str(i) for i in range(120)])
    held = tally(source, fold_numbers(source, how="group", folds=5, seed=0), 5)
    assert np.ptp(held, axis=0).max() <= 1
    assert np.ptp(held.sum(axis=1)) <= 1  # Ties go to the smallest fold, not to the first.


@pytest.mark.parametrize("how", ["stratified", "group", "random"])
def test_every_image_is_tested_once_per_repeat_and_never_trained_on_beside(how: How) -> None:
    source = source_of([0] * 40 + [1] * 12, [f"g{i // 2}" for i in range(52)])
    for repeat in range(2):
        tested = []
        for fold in range(1 + 4 * repeat, 5 + 4 * repeat):
            splits = fold_splits(source, how=how, folds=4, fold=fold, val=0.15, seed=0)
            together = np.concatenate([rows for _, rows in splits.parts()])
            assert sorted(together.tolist()) == list(range(52))
            assert 5 <= len(splits.val) <= 11  # About 15 % of all 52 images.
            tested += splits.test.tolist()
        assert sorted(tested) == list(range(52))


def test_folds_depend_on_seed_and_repeat_alone() -> None:
    source = source_of([0] * 40 + [1] * 12)
    drawn = {
        (seed, repeat): tuple(fold_numbers(source, how="stratified", folds=4, seed=seed, repeat=repeat))
        for seed in (0, 1)
        for repeat in (0, 1)
    }
    assert len(set(drawn.values())) == 4
    assert tuple(fold_numbers(source, how="stratified", folds=4, seed=0)) == drawn[0, 0]


def test_two_recipes_with_the_same_data_and_seed_are_tested_on_the_same_folds() -> None:
    source = source_of([0] * 40 + [1] * 12)
    folds = {"data.folds": 4}
    methods = [named_recipe("quick").override(**folds), Recipe().override(**folds), Recipe(**{"data": {"test": 0.4}})]
    methods[2] = methods[2].override(**folds, **{"encoder_training.loss": "ce"})
    for parts in zip(*map(fold_recipes, methods), strict=True):
        tests = [split_source(part, source).test.tolist() for part in parts]
        assert tests[0] == tests[1] == tests[2]
    seeds = [fold_recipes(methods[0].override(seed=seed))[0] for seed in (0, 1)]
    assert split_source(seeds[0], source).test.tolist() != split_source(seeds[1], source).test.tolist()


def test_the_recipe_of_a_fold_does_not_depend_on_how_many_repeats_follow() -> None:
    recipe = named_recipe("from-scratch").override(**{"data.folds": 3, "data.source": "x"})
    more = recipe.override(**{"data.repeats": 2, "final": "ensemble"})
    assert [cell_key(part) for part in fold_recipes(more)[:3]] == [cell_key(part) for part in fold_recipes(recipe)]
    assert len({cell_key(part) for part in fold_recipes(more)}) == 6
    counts = {"train": {"a": 4, "b": 2}, "val": {"a": 0, "b": 0}, "test": {"a": 2, "b": 1}}
    metrics = {"classes": ["a", "b"], "counts": counts, "source_name": "x"}
    assert len({data_key(part, metrics) for part in fold_recipes(more)}) == 6


def test_a_recipe_with_folds_and_no_fold_is_the_model_of_all_images() -> None:
    source = source_of([0] * 40 + [1] * 12)
    splits = split_source(named_recipe("quick").override(**{"data.folds": 4}), source)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (52, 0, 0)


def test_the_note_names_the_fold() -> None:
    source = source_of([0] * 40 + [1] * 12)
    parts = fold_recipes(named_recipe("quick").override(**{"data.folds": 4, "data.repeats": 2}))
    assert split_note(parts[1], source) == notes.fold_of("stratified", auto=True, fold=2, folds=4, repeat=1)
    assert split_note(parts[5], source) == notes.fold_of("stratified", auto=True, fold=2, folds=4, repeat=2)


@pytest.mark.parametrize(
    ("rare", "folds", "how", "message"),
    [
        (4, 5, "stratified", r"every class, got 5 for 4 images of '1' in arrays\. Use at most 4, or add images\."),
        (6, 5, "group", r"every class, got 5 for 3 groups of '1' in arrays\. Use at most 3, or add images\."),
    ],
)
def test_more_folds_than_images_or_groups_of_the_rare_class_are_an_error(
    rare: int, folds: int, how: How, message: str
) -> None:
    source = source_of([0] * 40 + [1] * rare, [f"g{i // 2}" for i in range(40 + rare)])
    with pytest.raises(DataError, match=message):
        fold_numbers(source, how=how, folds=folds, seed=0)
    most = most_folds(source, how)
    if most >= 2:
        assert tally(source, fold_numbers(source, how=how, folds=most, seed=0), most).min() >= 1


def test_a_fold_without_a_class_is_an_error() -> None:
    # Each class is in two of the three groups, so one of two folds lacks one class whatever the groups.
    chained = source_of([0, 1, 1, 2, 2, 0], ["a", "a", "b", "b", "c", "c"])
    with pytest.raises(DataError, match=r"Fold \d of 2 has no image of '\d' of arrays\. Use fewer folds \(--folds\)\."):
        fold_numbers(chained, how="group", folds=2, seed=0)


def test_folds_of_given_splits_or_of_missing_groups_are_an_error() -> None:
    source = source_of([0] * 8 + [1] * 8)
    given_splits = replace(source, splits=np.array(["train", "test"] * 8))
    recipe = fold_recipes(named_recipe("quick").override(**{"data.folds": 4}))[0]
    with pytest.raises(DataError, match=r"arrays defines its own splits, so folds cannot be drawn\. Leave out folds"):
        split_source(recipe, given_splits)
    assert len(split_source(recipe.override(**{"data.split": "stratified"}), given_splits).test) == 4
    with pytest.raises(DataError, match=r"Folds by group need groups, but arrays has none\. Name the group column"):
        split_source(recipe.override(**{"data.split": "group"}), source)


def test_a_fold_that_leaves_too_few_rare_images_to_train_on_is_an_error() -> None:
    source = source_of([0] * 20 + [1] * 2)
    assert len(fold_splits(source, how="stratified", folds=2, fold=1, val=0.0, seed=0).test) == 11
    with pytest.raises(DataError, match=r"arrays has too few images of '1' for 2 folds: too few remain for training "):
        fold_splits(source, how="stratified", folds=2, fold=1, val=0.15, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.folds": 1}, "data.folds must be an integer >= 2 and <= 1000, got 1"),
        ({"data.fold": 2}, r"data.fold must be unset when data.folds is unset, got 2\. Set data.folds \(--folds\)\."),
        ({"data.repeats": 2}, "data.repeats must be 1 when data.folds is unset, got 2"),
        ({"final": "refit"}, "final must be auto when data.folds is unset, got refit"),
        ({"data.folds": 5, "data.split": "given"}, 'data.folds cannot be used with data.split = "given"'),
        ({"data.folds": 2, "data.val": 0.5}, "data.val must be below 0.5 with 2 folds, to leave images for training"),
    ],
)
def test_fields_of_folds_that_contradict_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe().override(**changes)


def test_copies_of_a_file_are_in_one_fold_unless_a_fold_would_lack_their_class(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 20, "dog": 4})
    for name in ("003.png", "007.png", "011.png"):
        shutil.copy(photos / "cat" / "000.png", photos / "cat" / name)
    shutil.copy(photos / "dog" / "000.png", photos / "dog" / "001.png")
    source = open_source(photos)
    numbers = fold_numbers(source, how="stratified", folds=4, seed=0)
    copies = [source.names.index(f"cat/{name}") for name in ("000.png", "003.png", "007.png", "011.png")]
    assert len(set(numbers[copies].tolist())) == 1
    assert set(numbers[source.labels == 1].tolist()) == {0, 1, 2, 3}


def test_a_class_of_one_image_is_tested_in_one_fold() -> None:
    source = source_of([0] * 40 + [1])
    numbers = fold_numbers(source, how="stratified", folds=2, seed=0)
    assert tally(source, numbers, 2)[:, 1].tolist() in ([0, 1], [1, 0])
