"""Colours and contrast of regions as features."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from lopsided.data.inputs import MemoryInputs
from lopsided.errors import InputError
from lopsided.inference.engine import Engine
from lopsided.inference.feature_cache import list_cache
from lopsided.inference.scorer import Scorer
from lopsided.models.blocks.block import Columns, FeatureBlock, Layout, scaled
from lopsided.models.blocks.pixels import WIDTH, Pixels, areas
from lopsided.models.encoders import build_encoder, embedded_state
from lopsided.models.graph import INPUT, OUTPUT, Graph, UntranslatableError, to_onnx
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard, load_model, save_model
from lopsided.models.pretrained import preprocessing_of
from lopsided.recipe import entries
from lopsided.recipe.blocks import FINAL, Block, find
from lopsided.recipe.encoder_spec import EncoderSpec
from lopsided.training.regression import fit_regression

NAME = "tf_efficientnet_lite0+pixels"
PIXELS = find("pixels")
assert PIXELS is not None


def images(number: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(number, 3, height, width, generator=torch.Generator().manual_seed(seed))


def by_hand(image: np.ndarray) -> np.ndarray:
    """Mean and deviation of each colour in 8 x 8 cells of a (3, 64, 64) image, cell by cell."""
    found = np.zeros((2, 3, 4, 4))
    for colour in range(3):
        for row in range(8):
            for column in range(8):
                cell = image[colour, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
                place = colour, min(row, 7 - row), min(column, 7 - column)
                found[(0, *place)] += cell.mean() / 4
                found[(1, *place)] += cell.std() / 4
    return found.ravel()


def test_the_features_are_means_and_deviations_of_cells_and_their_mirror_images() -> None:
    x = images(2, 64, 64)
    found = Pixels()(x).numpy()
    assert found.shape == (2, WIDTH)
    for row, image in zip(found, x.double().numpy(), strict=True):
        assert row == pytest.approx(by_hand(image), abs=1e-6)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (50, 37), (224, 260), (28, 28)])
def test_mirror_images_have_the_same_features_and_flat_images_no_contrast(height: int, width: int) -> None:
    x, pixels = images(2, height, width), Pixels()
    for axes in ([2], [3], [2, 3]):
        assert torch.allclose(pixels(x.flip(axes)), pixels(x), atol=1e-6)
    flat = pixels(torch.full((1, 3, height, width), 0.3))
    assert torch.allclose(flat[:, : WIDTH // 2], torch.tensor(0.3))
    assert flat[:, WIDTH // 2 :].abs().max() < 1e-6
    assert not torch.allclose(pixels(x.roll(height // 3, dims=2)), pixels(x), atol=1e-4)


def test_a_larger_copy_of_an_image_has_the_same_features() -> None:
    x = images(1, 64, 64)
    large = x.repeat_interleave(3, dim=2).repeat_interleave(5, dim=3)
    assert torch.allclose(Pixels()(large), Pixels()(x), atol=1e-6)


@pytest.mark.parametrize(("size", "parts"), [(3, 2), (7, 64), (260, 64), (64, 8)])
def test_averages_keep_the_mean_of_a_row_of_pixels(size: int, parts: int) -> None:
    matrix = areas(size, parts)
    assert matrix.shape == (parts, size)
    assert np.allclose(matrix.sum(axis=1), 1)
    assert np.allclose(matrix.sum(axis=0), parts / size)


@pytest.mark.slow
def test_onnxruntime_computes_the_same_and_needs_the_size() -> None:
    encoder, width = build_encoder("resnet18+pixels", channels=3, image_size=(40, 48))
    assert width == 512 + WIDTH
    batch = (images(3, 40, 48) * 255).to(torch.uint8)
    with pytest.raises(UntranslatableError, match="size of the images"):
        to_onnx(encoder, 3, (0.1,) * 3, (0.5,) * 3)
    content = to_onnx(encoder, 3, (0.0,) * 3, (1.0,) * 3, (40, 48))
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run([OUTPUT], {INPUT: batch.numpy()})
    with torch.no_grad():
        expected = encoder.eval()(batch / 255)
    assert np.abs(found - expected.numpy()).max() < 1e-4 * float(expected.abs().max())
    assert np.abs(found[:, -WIDTH:] - Pixels()(batch / 255).numpy()).max() < 1e-6
    model = Model(encoder, ClassifierHead(width, 2), (0.0,) * 3, (1.0,) * 3).eval()
    assert Engine(model, (3, 40, 48)).is_fast


def test_a_scaling_leaves_the_numbers_of_the_pixels_as_they_are() -> None:
    features = torch.rand(2, 10)
    found = Layout((Columns(FINAL, 6), Columns(PIXELS, 4))).scaled(features, "root")
    assert torch.equal(found[:, 6:], features[:, 6:])
    assert torch.allclose(found[:, :6].norm(dim=1), torch.ones(2))


def test_final_layers_are_scaled_together_and_groups_of_other_blocks_apart() -> None:
    features, apart = torch.rand(2, 12), Block("a", "", "encoder", "a", scaling="apart")
    layout = Layout((Columns(FINAL, 3), Columns(apart, 2), Columns(apart, 2), Columns(FINAL, 3), Columns(PIXELS, 2)))
    first, second, third, fourth, last = features.split([3, 2, 2, 3, 2], dim=1)
    joint = scaled(torch.cat([first, fourth], dim=1), "root")
    parts = [joint[:, :3], scaled(second, "root"), scaled(third, "root"), joint[:, 3:], last]
    assert torch.equal(layout.scaled(features, "root"), torch.cat(parts, dim=1))
    assert torch.equal(layout.final_of(features), torch.cat([first, fourth], dim=1))
    weights = layout.importance()
    assert weights is not None
    assert np.square(weights).tolist() == pytest.approx([1] * 3 + [3] * 4 + [1] * 3 + [0.9] * 2)


def test_a_regression_weighs_the_pixels_as_a_share_of_the_encoders() -> None:
    weights = Layout((Columns(FINAL, 1280), Columns(PIXELS, WIDTH))).importance()
    assert weights is not None
    assert np.square(weights[-WIDTH:]).sum() == pytest.approx(0.3 * np.square(weights[:-WIDTH]).sum())
    assert Layout.final(2048).importance() is None


def test_a_column_that_weighs_k_times_as_much_is_like_k_squared_copies_of_it() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], [40, 20])
    x = generator.normal(size=(60, 6)) + labels[:, None]
    copies = np.concatenate([x] + [x[:, -2:]] * 3, axis=1)
    weighed = fit_regression(x, labels, 2, importance=np.array([1, 1, 1, 1, 2, 2.0]))
    copied = fit_regression(copies, labels, 2)
    assert weighed.strength == copied.strength
    logits = x @ weighed.weight.T + weighed.bias
    assert np.allclose(logits, copies @ copied.weight.T + copied.bias, atol=1e-5)


def test_a_model_with_pixels_is_written_and_read_with_the_same_answers(tmp_path: Path) -> None:
    encoder, width = build_encoder(NAME, channels=3, image_size=32, weights="embedded")
    known = embedded_state(EncoderSpec.parse(NAME, "embedded"))
    assert known is not None
    assert known[1] == encoder.layout == Layout((Columns(FINAL, 1280), Columns(PIXELS, WIDTH, 1)))
    assert {key: value.shape for key, value in known[0].items()} == {
        key: value.shape for key, value in encoder.state_dict().items()
    }
    model = Model(encoder, ClassifierHead(width, 2), (0.0,) * 3, (1.0,) * 3, scaling="root").eval()
    card = ModelCard(
        kind="image", encoder=NAME, encoder_weights="embedded", channels=3, image_size=32, shape=(3, 32, 32),
        mean=(0.0,) * 3, std=(1.0,) * 3, classes=("a", "b"), features=width, scaling="root", prior=(0.5, 0.5),
    )  # fmt: skip
    save_model(tmp_path, model, card)
    again, _ = load_model(tmp_path)
    x = images(2, 32, 32)
    with torch.no_grad():
        assert torch.allclose(again(x), model(x), atol=1e-5)


def model_of(name: str, side: int = 32, **fields: Any) -> tuple[Model, ModelCard]:
    """A model and its card with the embedded weights, or with random ones."""
    weights = "embedded" if name.startswith("tf_") else "none"
    encoder, width = build_encoder(name, image_size=side, weights=weights, seed=1)
    plain = preprocessing_of(name, weights) if weights == "embedded" else None
    mean, std = ((0.0,) * 3, (1.0,) * 3) if plain is None else (plain.mean, plain.std)
    card = ModelCard(
        kind="image", encoder=name, encoder_weights=weights, channels=3, image_size=side, shape=(3, side, side),
        mean=mean, std=std, classes=("a", "b"), features=width, prior=(0.5, 0.5), **fields,
    )  # fmt: skip
    return Model(encoder, ClassifierHead(width, 2), mean, std, scaling=card.scaling).eval(), card


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
def test_an_encoder_shares_its_cached_features_with_and_without_a_block(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = (images(5, 32, 32) * 255).to(torch.uint8)
    digests = [hashlib.sha256(bytes([row])).hexdigest() for row in range(5)]
    names = {"bare": "tf_efficientnet_lite0", "coloured": NAME, "other weight": f"{NAME}:2"}
    made = {key: model_of(name) for key, name in names.items()}
    found: dict[tuple[str, str], np.ndarray] = {}
    for first, second in (("bare", "coloured"), ("coloured", "bare")):
        monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / first))
        for key in (first, second, "other weight"):
            model, card = made[key]
            scorer = Scorer(model, card, engine=Engine(model, card.shape, fast=fast))
            if (first, key) in [("coloured", "bare"), ("bare", "other weight"), ("coloured", "other weight")]:
                monkeypatch.setattr(scorer.engine, "encode", None)  # Nothing is computed again.
            found[first, key] = scorer.features(MemoryInputs(batch), digests)
        entries = {(entry["encoder"], entry["images"]) for entry in list_cache(tmp_path / first)}
        assert entries == {("tf_efficientnet_lite0", 5), ("pixels", 5)}
    for key, expected in (("bare", found["bare", "bare"]), ("coloured", found["coloured", "coloured"])):
        assert all(np.array_equal(found[first, key], expected) for first in ("bare", "coloured"))
    assert np.array_equal(found["coloured", "coloured"][:, :1280], found["bare", "bare"])


class Means(FeatureBlock):
    """The means of two layers of a ResNet, as a package of somebody else may add them."""

    taps = ("conv1", "layer2")

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        assert encoder is not None
        self._widths = encoder.get_submodule("conv1").out_channels, encoder.feature_info[2]["num_chs"]

    @property
    def widths(self) -> tuple[int, ...]:
        return self._widths

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer.mean((2, 3)) for layer in inputs], dim=1)

    def write(self, graph: Graph, inputs: Sequence[str]) -> str:
        means = [graph.flatten(graph.add("GlobalAveragePool", [value])) for value in inputs]
        return graph.add("Concat", means, axis=1)


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a block that reads an encoder, from an entry point."""
    block = Block("layer-means", Means, "encoder", "the means of layers", scaling="apart")
    point = SimpleNamespace(name=block.name, module="means", dist=None, load=lambda: block)
    monkeypatch.setattr(entries, "_points", lambda group: [point])
    return block.name


@pytest.mark.slow
def test_a_block_of_another_package_reads_layers_in_the_pass_of_the_encoder(
    means: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    model, card = model_of(f"resnet18+{means}+pixels", scaling="root")
    layout = model.layout
    assert layout is not None
    assert [(group.block.name, group.width) for group in layout.groups] == [
        ("final", 512), (means, 64), (means, 128), ("pixels", WIDTH),
    ]  # fmt: skip
    batch = (images(3, 32, 32) * 255).to(torch.uint8)
    bare, _ = build_encoder("resnet18", image_size=32, seed=1)
    with torch.no_grad():
        expected = bare.eval()(batch / 255)
        stem = bare.conv1(batch / 255).mean((2, 3))
    for fast in (True, False):
        engine = Engine(model, card.shape, fast=fast)
        assert engine.is_fast == fast
        found = engine.encode(batch)
        assert np.abs(found[:, :512] - expected.numpy()).max() < 1e-4
        assert np.abs(found[:, 512:576] - stem.numpy()).max() < 1e-5
        if fast:
            scorer = Scorer(model, card, engine=engine)
            scorer.features(MemoryInputs(batch), [hashlib.sha256(bytes([row])).hexdigest() for row in range(3)])
    names = [(entry["encoder"], entry["images"]) for entry in list_cache(tmp_path / "cache")]
    assert sorted(names) == [("pixels", 3), ("resnet18", 3), ("resnet18 layer-means", 3)]
    save_model(tmp_path / "model", model, card)
    again, _ = load_model(tmp_path / "model")
    with torch.no_grad():
        assert torch.allclose(again(batch / 255), model(batch / 255), atol=1e-5)


def test_a_block_that_cannot_be_used_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    point = SimpleNamespace(name="broken", module="broken", dist=None, load=lambda: "no block")
    monkeypatch.setattr(entries, "_points", lambda group: [point])
    with pytest.raises(InputError, match=r"The feature block 'broken' of the module broken must be .*got 'no block'"):
        EncoderSpec.parse("resnet18+broken")
