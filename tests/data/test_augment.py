from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lopsided.data.augment import Augment, _jitter, to_float
from lopsided.errors import InputError

EVERYTHING = Augment(rotation=30, horizontal_flip=True, vertical_flip=True, crop=0.5, colour=0.4)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=seeded(9), dtype=torch.uint8)


def blob(height: int, width: int, row: float, column: float) -> Tensor:
    """A smooth spot, so that interpolation moves it and changes it little."""
    rows = torch.arange(height)[:, None] - row
    columns = torch.arange(width)[None] - column
    return torch.exp(-(rows**2 + columns**2) / 18)[None, None]


@pytest.mark.parametrize("off", [Augment(), Augment(rotation=0.0, crop=1.0, colour=0.0)])
def test_what_is_switched_off_leaves_pixels_exactly(off: Augment) -> None:
    batch = noise(5, 3, 9, 7)
    assert torch.equal(off(batch, seeded()), batch.float() / 255)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_the_input_is_neither_changed_nor_handed_back(dtype: torch.dtype) -> None:
    batch = noise(4, 3, 8, 8) if dtype == torch.uint8 else (noise(4, 3, 8, 8) / 255).to(dtype)
    before = batch.clone()
    for augment in (Augment(), EVERYTHING):
        out = augment(batch, seeded())
        assert out.dtype == torch.float32
        assert out.shape == batch.shape
        out.fill_(0.5)
        assert torch.equal(batch, before)


@pytest.mark.parametrize("channels", [1, 3])
def test_results_stay_in_the_unit_interval(channels: int) -> None:
    out = Augment(rotation=180, horizontal_flip=True, vertical_flip=True, crop=0.1, colour=1.0)(
        noise(32, channels, 12, 12), seeded()
    )
    assert out.min() >= 0
    assert out.max() <= 1


def test_results_depend_on_the_generators_state_alone() -> None:
    batch = noise(8, 3, 16, 16)
    generator = seeded(4)
    first, second = EVERYTHING(batch, generator), EVERYTHING(batch, generator)
    torch.manual_seed(123)
    assert torch.equal(EVERYTHING(batch, seeded(4)), first)
    assert not torch.equal(first, second)


def test_images_of_a_batch_change_differently() -> None:
    batch = noise(1, 1, 16, 16).expand(16, -1, -1, -1)
    out = Augment(rotation=30)(batch, seeded())
    assert len({tuple(image.flatten().tolist()) for image in out}) == 16


@pytest.mark.parametrize(("name", "axis"), [("horizontal_flip", 3), ("vertical_flip", 2)])
def test_flips_are_exact_and_happen_half_of_the_time(name: str, axis: int) -> None:
    batch = noise(400, 1, 5, 6)
    options: dict[str, Any] = {name: True}
    out = Augment(**options)(batch, seeded())
    plain = batch.float() / 255
    flipped = (out == plain.flip(axis)).flatten(1).all(1)
    kept = (out == plain).flatten(1).all(1)
    assert (flipped | kept).all()
    assert 150 < int(flipped.sum()) < 250


def test_a_flip_before_a_rotation_is_a_flip_in_the_same_pass() -> None:
    batch = noise(32, 3, 12, 16)
    options: dict[str, Any] = {"rotation": 25, "crop": 0.6}
    flipped = Augment(horizontal_flip=True, vertical_flip=True)(batch, seeded())
    expected = Augment(**options)(flipped, seeded())
    out = Augment(horizontal_flip=True, vertical_flip=True, **options)(batch, seeded())
    assert torch.allclose(out, expected, atol=1e-4)


def test_colours_are_drawn_apart_from_flips() -> None:
    ramp = torch.linspace(0.2, 0.4, 8).expand(200, 1, 8, 8)
    out = Augment(horizontal_flip=True, colour=0.3)(ramp, seeded())
    flipped = out[:, 0, 0, 0] > out[:, 0, 0, -1]
    brighter = out.mean(dim=(1, 2, 3)) > 0.3
    for one in (flipped, ~flipped):
        assert 0.3 < brighter[one].float().mean() < 0.7


def test_colours_change_as_torchvisions_do() -> None:
    transforms = pytest.importorskip("torchvision.transforms.functional")
    batch = noise(6, 3, 10, 10) / 255
    factors = torch.rand((6, 3), generator=seeded()) * 1.5
    expected = [
        transforms.adjust_saturation(transforms.adjust_contrast(transforms.adjust_brightness(x, b), c), s)
        for x, (b, c, s) in zip(batch, factors.tolist(), strict=True)
    ]
    assert torch.allclose(_jitter(batch, factors), torch.stack(expected), atol=1e-3)


def test_switching_the_colour_on_does_not_change_the_flips_and_rotations() -> None:
    batch = (noise(32, 1, 8, 8) > 127).to(torch.uint8) * 255
    plain = Augment(rotation=20, horizontal_flip=True)(batch, seeded())
    coloured = Augment(rotation=20, horizontal_flip=True, colour=0.01)(batch, seeded())
    assert (plain - coloured).abs().max() < 0.05


@pytest.mark.parametrize(("height", "width"), [(41, 41), (41, 61)])
def test_rotation_turns_about_the_centre_in_pixels_and_up_to_the_given_angle(height: int, width: int) -> None:
    centre = torch.tensor([(height - 1) / 2, (width - 1) / 2])
    spot = blob(height, width, float(centre[0]), float(centre[1]) + 12).expand(200, -1, -1, -1)
    out = Augment(rotation=45)(spot, seeded())[:, 0]
    mass = out.sum(dim=(1, 2))
    row = (out.sum(2) @ torch.arange(height).float()) / mass - centre[0]
    column = (out.sum(1) @ torch.arange(width).float()) / mass - centre[1]
    assert torch.allclose((row**2 + column**2).sqrt(), torch.full_like(row, 12), atol=0.3)
    angles = torch.atan2(row, column).rad2deg()
    assert angles.abs().max() < 46
    assert angles.min() < -40
    assert angles.max() > 40


def test_a_rotation_leaves_zeros_where_the_image_has_no_pixels() -> None:
    white = torch.full((64, 1, 20, 20), 255, dtype=torch.uint8)
    out = Augment(rotation=45)(white, seeded())
    assert torch.allclose(out[:, :, 6:14, 6:14], torch.ones(1))
    assert (out[:, 0, 0, 0] == 0).any()


def test_a_crop_shows_a_window_of_the_image_and_no_border() -> None:
    ramp = torch.linspace(0, 1, 64).expand(100, 1, 64, 64)
    out = Augment(crop=0.25)(ramp, seeded())
    widths = out[:, 0, 32, -1] - out[:, 0, 32, 0]
    assert widths.min() > 0.45
    assert widths.min() < 0.6
    assert widths.max() > 0.9
    white = Augment(crop=0.25)(torch.ones(100, 1, 32, 32), seeded())
    assert torch.allclose(white[:, :, 1:-1, 1:-1], torch.ones(1))


def test_saturation_leaves_grey_images_grey() -> None:
    grey = noise(16, 1, 8, 8).expand(-1, 3, -1, -1)
    out = Augment(colour=0.5)(grey, seeded())
    assert torch.allclose(out, out[:, :1].expand_as(out), atol=1e-6)


def test_colour_changes_brightness_within_its_strength() -> None:
    flat = torch.full((500, 1, 4, 4), 0.5)
    out = Augment(colour=0.2)(flat, seeded())[:, 0, 0, 0]
    assert out.min() >= 0.4 - 1e-6
    assert out.max() <= 0.6 + 1e-6
    assert out.max() - out.min() > 0.18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotation": -1}, r"rotation must be in \[0, 180\] degrees, got -1"),
        ({"rotation": float("nan")}, r"rotation must be in \[0, 180\] degrees, got nan"),
        ({"crop": 0.0}, r"crop must be in \(0, 1\], got 0.0\. Use None for the whole image\."),
        ({"colour": 2.0}, r"colour must be in \[0, 1\], got 2.0\. Use None to keep the colours\."),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Augment(**options)


def test_batches_of_another_kind_are_refused() -> None:
    with pytest.raises(InputError, match=r"a batch must have the shape \(b, c, h, w\), got \(3, 8, 8\)"):
        to_float(noise(3, 8, 8))
    with pytest.raises(InputError, match=r"a batch must be uint8 or float, got torch\.int64"):
        to_float(noise(1, 3, 8, 8).long())
