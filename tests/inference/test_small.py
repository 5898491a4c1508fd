from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from lopsided.data.inputs import Indices, Inputs, MemoryInputs, Part
from lopsided.errors import RunError
from lopsided.inference.feature_cache import Space, empty_cache, list_cache
from lopsided.inference.scorer import SmallImages


class Unreadable(Inputs):
    """Images that must not be decoded."""

    def __len__(self) -> int:
        return 6

    def batch(self, rows: Indices) -> torch.Tensor:
        raise AssertionError(f"The images {rows} were decoded.")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path))
    return tmp_path


def part(size: int = 40) -> Part:
    pixels = torch.randint(0, 256, (6, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    digests = tuple(hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in pixels)
    return Part(MemoryInputs(pixels), np.zeros(6, dtype=np.int64), None, digests)


def test_an_image_that_was_shrunk_once_is_not_decoded_again(cache: Path) -> None:
    whole, rows = part(), np.array([4, 0, 2])
    first = SmallImages((3, 40, 40), 40).of(whole, rows)
    assert first.shape == (3, 3 * 16 * 16)
    again = Part(Unreadable(), whole.labels, None, whole.digests)
    assert np.array_equal(SmallImages((3, 40, 40), 40).of(again, rows), first)
    with pytest.raises(AssertionError, match=r"\[4 0 2\] were decoded"):
        SmallImages((3, 40, 40), None).of(again, rows)  # Images that are loaded in another way.
    assert [entry["encoder"] for entry in list_cache(cache)] == ["16 x 16 pixels"]
    assert empty_cache(cache) > 0


def test_images_that_are_decoded_for_another_purpose_are_shrunk_as_well(cache: Path) -> None:
    whole, small = part(), SmallImages((3, 40, 40), 40)
    assert whole.digests is not None
    small.keep(whole.digests, whole.inputs.batch(np.arange(6)))
    small.shelf.flush()
    again = Part(Unreadable(), whole.labels, None, whole.digests)
    found = SmallImages((3, 40, 40), 40).of(again, np.arange(6))
    assert np.array_equal(found, SmallImages((3, 40, 40), None).of(whole, np.arange(6)))


def test_without_a_cache_and_on_a_full_disk_the_images_are_decoded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunError("no space")

    whole = part(8)
    expected = SmallImages((3, 8, 8), 8).of(whole, np.arange(6))
    assert expected.shape == (6, 3 * 8 * 8)
    monkeypatch.setattr(Space, "store", full)
    empty_cache(cache)
    assert np.array_equal(SmallImages((3, 8, 8), 8).of(whole, np.arange(6)), expected)
    monkeypatch.setenv("LOPSIDED_CACHE_GIB", "0")
    assert np.array_equal(SmallImages((3, 8, 8), 8).of(whole, np.arange(6)), expected)
