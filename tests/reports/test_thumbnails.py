from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lopsided.recipe import Recipe
from lopsided.reports.thumbnails import COLUMNS, ROWS, Thumbnails, make_thumbnails


def piece(thumbnails: Thumbnails, place: int) -> np.ndarray:
    """Cut one picture out of its sheet by the rule that the style sheet has."""
    sheet, rest = divmod(place, COLUMNS * ROWS)
    side = thumbnails.side
    x, y = rest % COLUMNS * side, rest // COLUMNS * side
    assert thumbnails.classes(place) == f"thumb s{sheet} x{rest % COLUMNS} y{rest // COLUMNS}"
    image = Image.open(io.BytesIO(thumbnails.sheets[sheet])).convert("RGBA")
    return np.asarray(image.crop((x, y, x + side, y + side)), dtype=np.int64)


def write_source(folder: Path, images: dict[str, Image.Image]) -> Recipe:
    for name, image in images.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return Recipe().override(**{"data.source": str(folder)})


def colour(i: int) -> tuple[int, int, int]:
    return (3 * i % 250, 7 * i % 250, 11 * i % 250)


def test_every_picture_is_where_it_belongs_across_sheets(tmp_path: Path) -> None:
    images = {f"{'ab'[i % 2]}/{i:04d}.png": Image.new("RGB", (8, 8), colour(i)) for i in range(COLUMNS * ROWS + 25)}
    recipe = write_source(tmp_path, images)
    names = sorted(images, reverse=True)
    found = make_thumbnails(recipe, names, 10_000_000)
    assert len(found.sheets) == 2
    assert found.missing == ()
    for place in (0, 1, 19, 20, 399, 400, 424):
        number = int(Path(names[place]).stem)
        assert np.abs(piece(found, place)[..., :3] - colour(number)).max() <= 1
    css = found.css()
    assert css.count("data:image/webp;base64,") == 2, "Each sheet is embedded once."


def test_an_image_that_is_not_square_is_whole_and_the_rest_transparent(tmp_path: Path) -> None:
    recipe = write_source(
        tmp_path,
        {"a/wide.jpg": Image.new("RGB", (400, 200), (200, 30, 30)), "b/tall.png": Image.new("L", (100, 300), 90)},
    )
    found = make_thumbnails(recipe, ["a/wide.jpg", "b/tall.png"], 1_000_000)
    wide, tall = piece(found, 0), piece(found, 1)
    side = found.side
    assert wide[side // 2, 2, 3] == wide[side // 2, -3, 3] == 255
    assert wide[2, side // 2, 3] == wide[-3, side // 2, 3] == 0
    assert np.abs(wide[side // 2, side // 2, :3] - (200, 30, 30)).max() <= 12
    assert tall[2, side // 2, 3] == 255
    assert tall[side // 2, 2, 3] == 0


def test_what_cannot_be_read_or_found_is_left_out_and_counted(tmp_path: Path) -> None:
    recipe = write_source(tmp_path, {f"a/{i}.png": Image.new("RGB", (8, 8)) for i in range(3)})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    found = make_thumbnails(recipe, ["a/0.png", "b/broken.jpg", "gone.png", "a/2.png"], 1_000_000)
    assert found.missing == (1, 2)
    assert found.note == "2 of 4 pictures could not be found or read."
    assert found.classes(1) == ""
    assert found.classes(3)


def test_a_source_that_is_gone_gives_no_pictures_and_a_reason(tmp_path: Path) -> None:
    found = make_thumbnails(Recipe().override(**{"data.source": str(tmp_path / "gone")}), ["x"], 1_000_000)
    assert found.sheets == ()
    assert found.css() == ""
    assert found.note.startswith("There are no pictures: DATA must be a folder")
    assert found.note.endswith("gone, which does not exist.")


def test_pictures_of_pure_noise_shrink_until_they_fit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = {
        f"{'ab'[i % 2]}/{i:03d}.png": Image.fromarray(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8))
        for i in range(60)
    }
    recipe = write_source(tmp_path, images)
    sizes = [make_thumbnails(recipe, sorted(images), budget) for budget in (2_000_000, 150_000, 40_000)]
    assert sizes[0].side == 96
    assert sizes[0].side > sizes[1].side > sizes[2].side
    for found, budget in zip(sizes, (2_000_000, 150_000, 40_000), strict=True):
        assert len(found.css().split("base64,", 1)[1]) <= found.num_bytes <= budget
    nothing = make_thumbnails(recipe, sorted(images), 100)
    assert nothing.sheets == ()
    assert nothing.note == "There are no pictures: they do not fit into the page."


def test_a_source_in_memory_has_pictures_too() -> None:
    from lopsided.data.images import ArrayImages
    from lopsided.data.sources import open_source

    source = open_source("fashion-mnist-tops")
    assert isinstance(source.images, ArrayImages)
    names = [source.names[i] for i in (5, 1000)]
    found = make_thumbnails(Recipe().override(**{"data.source": "fashion-mnist-tops"}), names, 1_000_000)
    assert found.side == 28
    for place, row in enumerate((5, 1000)):
        assert (piece(found, place)[..., 0] == source.images.pixels[row][0]).all()


@pytest.mark.parametrize("side", [28, 96])
def test_small_pictures_keep_their_pixels_when_enlarged(side: int) -> None:
    css = Thumbnails(side, (b"x",), ()).css()
    assert ("image-rendering:pixelated" in css) == (side == 28)
