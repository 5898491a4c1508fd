from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image

from lopsided.data import inputs as room
from lopsided.data.inputs import (
    MemoryInputs,
    StreamedInputs,
    check_trainable,
    left_in_container,
    prepare,
    prepare_vectors,
    row_batches,
)
from lopsided.data.sources import Source, open_source, source_from_arrays
from lopsided.data.splits import Splits
from lopsided.errors import DataError
from lopsided.facts import notes
from training.conftest import stripes, tiny


def whole(source: Source) -> Splits:
    none = np.empty(0, dtype=np.int64)
    return Splits(np.arange(len(source)), none, none)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(5):
            pixels = np.random.default_rng([i, ord(name)]).integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_a_stream_gives_the_batches_of_memory_in_the_same_order(folder: Path) -> None:
    source = open_source(folder)
    order = np.random.default_rng(0).permutation(len(source))
    parts = [order[rows] for rows in row_batches(len(order), 4)]
    kept, _ = prepare(tiny(data__cache="memory"), source, whole(source))
    streamed, _ = prepare(tiny(data__cache="none"), source, whole(source))
    assert isinstance(kept.train.inputs, MemoryInputs)
    assert isinstance(streamed.train.inputs, StreamedInputs)
    pairs = list(zip(kept.train.inputs.batches(parts), streamed.train.inputs.batches(parts), strict=True))
    assert [len(rows) for (rows, _), _ in pairs] == [4, 4, 2]
    for (rows, one), (others, other) in pairs:
        assert np.array_equal(rows, others)
        assert torch.equal(one, other)
    assert (kept.mean, kept.std) == (streamed.mean, streamed.std)


def test_a_stream_without_batches_ends_at_once(folder: Path) -> None:
    source = open_source(folder)
    assert list(StreamedInputs(source.images, None, 3).batches(iter(()))) == []


def test_a_stream_passes_an_unreadable_image_on(folder: Path) -> None:
    source = open_source(folder)
    (folder / "b" / "4.png").write_text("not an image")

    def parts() -> Iterator[np.ndarray]:
        yield from row_batches(len(source), 4)

    with pytest.raises(DataError, match=r"4\.png"):
        list(StreamedInputs(source.images, None, 3).batches(parts()))


def test_images_are_kept_in_memory_only_where_they_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(folder)
    need = 10 * 3 * 6 * 6
    for free, kind, place in (
        (4 * need, MemoryInputs, "memory"),
        (4 * need - 1, StreamedInputs, "decoded"),
        (None, MemoryInputs, "memory"),
    ):
        monkeypatch.setattr(room, "free_memory", lambda free=free: free)
        prepared, facts = prepare(tiny(), source, whole(source))
        assert isinstance(prepared.train.inputs, kind)
        assert facts[0] == notes.images_read(10, [3, 6, 6], need / 1e6, place, "auto", free and free / 1e6)


@pytest.mark.parametrize("channels", [1, 3])
def test_source_statistics_are_those_of_the_training_pixels(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 4, 4, channels), dtype=np.uint8)
    source = source_from_arrays(pixels, [0, 1] * 10)
    train = np.arange(15)
    prepared, _ = prepare(tiny(), source, Splits(train, np.arange(15, 18), np.arange(18, 20)))
    scaled = pixels[train] / 255
    assert_allclose(prepared.mean, scaled.mean(axis=(0, 1, 2)), rtol=1e-12)
    assert_allclose(prepared.std, scaled.std(axis=(0, 1, 2)), rtol=1e-12)


@pytest.mark.parametrize(
    ("rule", "channels", "mean", "std"),
    [
        ("none", 1, (0.0,), (1.0,)),
        ("half", 3, (0.5,) * 3, (0.5,) * 3),
        ("imagenet", 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("imagenet", 1, ((0.485 + 0.456 + 0.406) / 3,), ((0.229 + 0.224 + 0.225) / 3,)),
    ],
)
def test_pixels_are_normalised_by_the_rule_of_the_recipe(
    rule: str, channels: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    source = source_from_arrays(np.zeros((4, 2, 2, channels), dtype=np.uint8), [0, 1, 0, 1])
    prepared, _ = prepare(tiny(augment__normalisation=rule), source, whole(source))
    assert prepared.mean == pytest.approx(mean)
    assert prepared.std == pytest.approx(std)


def test_images_of_one_colour_are_not_divided_by_zero() -> None:
    source = source_from_arrays(np.full((4, 2, 2), 51, dtype=np.uint8), [0, 1, 0, 1])
    prepared, _ = prepare(tiny(), source, whole(source))
    assert prepared.mean == pytest.approx((0.2,))
    assert prepared.std == (1.0,)


def test_shape_and_size_are_those_of_the_recipe_or_else_of_the_images() -> None:
    source = stripes({"a": 3, "b": 3})
    prepared, _ = prepare(tiny(), source, whole(source))
    assert (prepared.shape, prepared.image_size) == ((1, 8, 8), 8)
    prepared, _ = prepare(tiny(data__image_size=6, data__channels=3), source, whole(source))
    assert (prepared.shape, prepared.image_size) == ((3, 6, 6), 6)
    oblong = source_from_arrays(np.zeros((4, 2, 3), dtype=np.uint8), [0, 1, 0, 1])
    prepared, _ = prepare(tiny(), oblong, whole(oblong))
    assert (prepared.shape, prepared.image_size) == ((1, 2, 3), None)


def test_images_of_different_sizes_ask_for_an_image_size(folder: Path) -> None:
    Image.new("RGB", (9, 9)).save(folder / "a" / "9.png")
    source = open_source(folder)
    with pytest.raises(DataError, match=r"images must have the same size .* Set image_size"):
        prepare(tiny(), source, whole(source))


def test_vectors_are_standardised_by_the_training_rows_and_constant_columns_are_kept() -> None:
    x = np.array([[1.0, 1e9, 5.0], [3.0, 1e9 + 2, 5.0], [100.0, 0.0, 0.0]])
    prepared = prepare_vectors(x, np.array([0, 1, 0]), ("a", "b"), np.array([0, 1]), np.array([2]))
    assert prepared.mean == (2.0, 1e9 + 1, 5.0)
    assert prepared.std == (1.0, 1.0, 1.0)
    assert prepared.val is not None
    assert prepared.val.labels.tolist() == [0]


def test_one_class_cannot_be_trained_on() -> None:
    source = stripes({"a": 3, "b": 3})
    prepared, _ = prepare(tiny(), source, Splits(np.arange(3), np.arange(3, 6), np.empty(0, dtype=np.int64)))
    with pytest.raises(DataError, match=r"train must hold at least 2 classes, got 1 with 3 samples\."):
        check_trainable(prepared)


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert left_in_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert left_in_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert left_in_container(tmp_path) == 700
    old = tmp_path / "old" / "memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("500")
    (old / "memory.usage_in_bytes").write_text("600")
    assert left_in_container(tmp_path / "old") == 0
