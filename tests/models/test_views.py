from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lopsided.data.augment import to_float
from lopsided.errors import InputError, RunError
from lopsided.inference.engine import Engine
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard, average, load_card, load_model, look, save_model, with_views
from lopsided.recipe.views import SETS, VIEWS

SIDE = 16
BY_PILLOW = {
    "hflip": Image.Transpose.FLIP_LEFT_RIGHT,
    "vflip": Image.Transpose.FLIP_TOP_BOTTOM,
    "rot90": Image.Transpose.ROTATE_90,
    "rot180": Image.Transpose.ROTATE_180,
    "rot270": Image.Transpose.ROTATE_270,
    "transpose": Image.Transpose.TRANSPOSE,
    "transverse": Image.Transpose.TRANSVERSE,
}


def scored(model: Model, batch: torch.Tensor) -> np.ndarray:
    engine = Engine(model, (), fast=False)
    return engine.probabilities(engine.features(batch))


def model(seed: int = 0, views: tuple[str, ...] = ("identity",)) -> tuple[Model, ModelCard]:
    encoder, features = build_encoder("test_resnet", channels=3, image_size=SIDE, seed=seed)
    torch.manual_seed(seed)
    card = ModelCard(
        kind="image", encoder="test_resnet", channels=3, image_size=SIDE, shape=(3, SIDE, SIDE), mean=(0.4,) * 3,
        std=(0.2,) * 3, classes=("cat", "dog"), features=features, views=views, prior=(0.5, 0.5),
    )  # fmt: skip
    return Model(encoder, ClassifierHead(features, 2), card.mean, card.std, views=views).eval(), card


def images(number: int = 3) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (number, 3, SIDE, SIDE), dtype=np.uint8))


def test_views_are_those_of_pillow() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    assert set(BY_PILLOW) == set(VIEWS) - {"identity"}
    for name, transpose in BY_PILLOW.items():
        expected = np.asarray(Image.fromarray(pixels).transpose(transpose))
        np.testing.assert_array_equal(look(torch.from_numpy(pixels)[None, None], name)[0, 0].numpy(), expected)


@pytest.mark.parametrize("views", [("identity",), ("rot90",), SETS["flip"], VIEWS])
def test_the_logits_are_the_mean_of_the_logits_of_the_views(views: tuple[str, ...]) -> None:
    plain, card = model()
    x = images()
    with torch.no_grad():
        each = [plain(look(to_float(x), view)) for view in views]
        plain.views = views
        torch.testing.assert_close(plain(to_float(x)), torch.stack(each).mean(dim=0), rtol=1e-5, atol=1e-6)
    expected = torch.stack(each).mean(dim=0).double().softmax(dim=1).numpy()
    np.testing.assert_allclose(scored(plain, x), expected, atol=1e-6)
    engine = Engine(plain, card.shape)
    np.testing.assert_allclose(engine.probabilities(engine.features(x)), expected, atol=1e-5)
    assert engine.is_fast


def test_with_all_views_a_turned_image_has_the_same_probabilities() -> None:
    symmetric, _ = model(views=VIEWS)
    x = images()
    found = scored(symmetric, x)
    for view in VIEWS:
        np.testing.assert_allclose(scored(symmetric, look(x, view)), found, atol=1e-6)


def test_a_model_keeps_its_views_in_its_card(tmp_path: Path) -> None:
    plain, card = model()
    save_model(tmp_path / "flips", plain, with_views(plain, card, SETS["flips"]))
    again, found = load_model(tmp_path / "flips")
    assert found.views == again.views == SETS["flips"]
    with torch.no_grad():
        torch.testing.assert_close(again(to_float(images())), plain(to_float(images())), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("views", [[], ["mirror"], ["hflip", "hflip"]])
def test_a_card_with_other_views_is_refused(views: list[str], tmp_path: Path) -> None:
    save_model(tmp_path, *model())
    content = json.loads((tmp_path / "model.json").read_text()) | {"views": views}
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"model\.json must name different views of identity, hflip, .*, got \("):
        load_card(tmp_path)


def test_views_that_the_images_do_not_have_are_refused(tmp_path: Path) -> None:
    made, card = model()
    wide = card.model_copy(update={"shape": (3, SIDE, 2 * SIDE), "image_size": None})
    with pytest.raises(InputError, match=r"^Images of 32 x 16 pixels have no view rot90"):
        with_views(made, wide, VIEWS)
    save_model(tmp_path, made, wide.model_copy(update={"views": VIEWS}))
    with pytest.raises(RunError, match=r"model\.json describes a model that cannot be built: Images of 32 x 16"):
        load_card(tmp_path)


def test_an_ensemble_averages_the_views_of_its_members() -> None:
    members = [model(seed, SETS["flip"]) for seed in range(2)]
    joined, card = average(members)
    assert joined.views == card.views == SETS["flip"]
    x = to_float(images())
    with torch.no_grad():
        expected = torch.stack([member(x) for member, _ in members]).mean(dim=0)
        torch.testing.assert_close(joined(x), expected, rtol=1e-5, atol=1e-6)
