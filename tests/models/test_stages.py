"""The stages of an encoder as features, as a whole and by regions of the image."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lopsided.data.inputs import MemoryInputs
from lopsided.errors import InputError
from lopsided.inference.engine import Engine, graph_path
from lopsided.inference.feature_cache import list_cache
from lopsided.inference.scorer import Scorer
from lopsided.models.blocks.block import Layout
from lopsided.models.blocks.regions import Regions
from lopsided.models.blocks.stages import Stages, stages_of
from lopsided.models.encoders import LateEncoder, build_encoder, embedded_state
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard, load_model, save_model
from lopsided.recipe.encoder_spec import EncoderSpec

LITE = "tf_efficientnet_lite0"
CHANNELS = [32, 16, 24, 40, 80, 112, 192, 320]
"""Of the stem and the seven stages of EfficientNet-Lite0 (Tan and Le, 2019, table 1, without the last two layers)."""


def batch(number: int, side: int) -> torch.Tensor:
    return torch.randint(0, 256, (number, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def model_of(name: str, side: int, weights: str = "none") -> tuple[Model, ModelCard]:
    encoder, width = build_encoder(name, image_size=side, weights=weights, seed=1)
    card = ModelCard(
        kind="image", encoder=name, encoder_weights=weights, channels=3, image_size=side, shape=(3, side, side),
        mean=(0.0,) * 3, std=(1.0,) * 3, classes=("a", "b"), features=width, scaling="root", prior=(0.5, 0.5),
    )  # fmt: skip
    return Model(encoder, ClassifierHead(width, 2), card.mean, card.std, scaling="root").eval(), card


def test_a_stage_has_mean_and_deviation_of_each_channel_over_all_positions() -> None:
    network, _ = build_encoder("resnet18", seed=1)
    network.eval()
    block, x = Stages(network), batch(2, 40) / 255
    assert block.taps == ("act1", "layer1", "layer2", "layer3", "layer4")
    assert block.widths == (128, 128, 256, 512, 1024)
    with torch.no_grad():
        first = network.act1(network.bn1(network.conv1(x)))
        map_ = network.layer1(network.maxpool(first)).double().flatten(2).numpy()
        columns = block(*[torch.from_numpy(map_).float().reshape(2, 64, 10, 10)] * 5)
    assert columns[:, :64].numpy() == pytest.approx(map_.mean(axis=2), abs=1e-5)
    assert columns[:, 64:128].numpy() == pytest.approx(map_.std(axis=2), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        (LITE, ["bn1", *(f"blocks.{i}" for i in range(7))]),
        ("mobilenetv3_small_100", ["bn1", *(f"blocks.{i}" for i in range(6))]),
        ("convnext_atto", [f"stages.{i}" for i in range(4)]),
        ("vit_tiny_patch16_224", [f"blocks.{i}" for i in (2, 5, 8, 11)]),
    ],
)
def test_the_stages_are_those_of_the_network(name: str, layers: list[str]) -> None:
    with torch.device("meta"):
        encoder, _ = build_encoder(name)
    found = stages_of(encoder)
    assert list(found) == layers
    if name == LITE:
        assert list(found.values()) == CHANNELS


@pytest.mark.parametrize("name", ["test_efficientnet", "test_resnet", "test_convnext", "test_vit", "test_vit2"])
def test_every_kind_of_encoder_has_columns_for_its_stages(name: str) -> None:
    model, card = model_of(f"{name}+stages+pixels", 64)
    assert model.layout is not None
    names = [group.block.name for group in model.layout.groups]
    assert names == ["final", *["stages"] * (len(names) - 2), "pixels"]
    engine = Engine(model, card.shape)
    found, expected = engine.encode(batch(2, 64)), Engine(model, card.shape, fast=False).encode(batch(2, 64))
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert (np.ptp(expected, axis=0) > 0).mean() > 0.5  # Some channels of random weights are dead.


def test_onnxruntime_and_torch_agree_on_every_block_of_the_embedded_encoder() -> None:
    model, card = model_of(f"{LITE}+stages+regions+pixels", 512, "embedded")
    engine, x = Engine(model, card.shape), batch(1, 512)
    assert engine.is_fast
    found, expected = engine.encode(x), Engine(model, card.shape, fast=False).encode(x)
    assert model.layout is not None
    start = 0
    for group in model.layout.groups:
        columns = slice(start, start := start + group.width)
        assert np.abs(found - expected)[:, columns].max() <= 1e-5 * np.abs(expected[:, columns]).max(), group.block.name


def test_a_flat_image_has_no_deviation_and_no_nan() -> None:
    model, card = model_of("test_resnet+stages", 32)
    for fast in (True, False):
        assert np.isfinite(
            Engine(model, card.shape, fast=fast).encode(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
        ).all()


def test_a_model_with_stages_is_found_in_the_cache_without_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    name = f"{LITE}+stages+pixels"
    model, card = model_of(name, 32, "embedded")
    known = embedded_state(EncoderSpec.parse(name, "embedded"))
    assert known is not None
    assert known[1] == model.layout
    assert {key: value.shape for key, value in known[0].items()} == {
        key: value.shape for key, value in model.encoder.state_dict().items()
    }
    save_model(tmp_path / "model", model, card)
    digests = [hashlib.sha256(bytes([row])).hexdigest() for row in range(3)]
    first = Scorer(model, card).features(MemoryInputs(batch(3, 32)), digests)
    again, _ = load_model(tmp_path / "model")
    scorer = Scorer(again, card)
    monkeypatch.setattr(scorer.engine, "encode", None)  # Nothing is computed again.
    assert np.array_equal(scorer.features(MemoryInputs(batch(3, 32)), digests), first)
    assert isinstance(again.encoder, LateEncoder)
    newer, _ = load_model(tmp_path / "model")
    groups = (replace(group, block=replace(group.block, version=group.block.version + 1)) for group in known[1].groups)
    assert isinstance(newer.encoder, LateEncoder)
    newer.encoder.layout = Layout(tuple(groups))
    assert not any(shelf.is_begun for shelf in Scorer(newer, card).shelves)
    assert all(shelf.is_begun for shelf in scorer.shelves)
    assert graph_path(newer, card.shape) != graph_path(again, card.shape)
    entries = sorted((entry["encoder"], entry["images"]) for entry in list_cache(tmp_path / "cache"))
    assert entries == [("pixels", 3), (LITE, 3), (f"{LITE} stages", 3)]


def test_an_encoder_without_named_stages_is_one_sentence() -> None:
    with pytest.raises(
        InputError,
        match=r"^timm does not name the stages of Identity\. Leave out \+stages, \+regions and \+positions\.$",
    ):
        stages_of(nn.Identity())


def test_images_are_compared_without_stages() -> None:
    model, card = model_of("test_resnet+stages+pixels", 32)
    engine = Engine(model, card.shape)
    features, layout = engine.encode(batch(2, 32)), model.layout
    assert layout is not None
    expected = features[:, layout.columns("final", "pixels")]
    assert np.array_equal(engine.compared(features), expected)
    assert len(layout.columns("stages")) == features.shape[1] - expected.shape[1] > 0


def block_of(name: str) -> Regions:
    network, _ = build_encoder(name, seed=1)
    return Regions(network.eval())


def test_a_column_is_the_mean_of_a_region_and_its_mirror_image() -> None:
    block = block_of("resnet18")
    assert block.widths == (512, 512)  # 64 and 64 channels; the next stage has 128.
    maps = [torch.rand(2, width // 8, 12, 20, generator=torch.Generator().manual_seed(0)) for width in block.widths]
    found = block(*maps).double().numpy()
    x = maps[0].double().numpy()
    for row in range(4):
        for column in range(2):
            rows, width = slice(3 * row, 3 * row + 3), 5
            sides = [x[:, :, rows, width * place : width * (place + 1)] for place in (column, 3 - column)]
            expected = (sides[0].mean(axis=(2, 3)) + sides[1].mean(axis=(2, 3))) / 2
            assert found[:, 2 * row + column : 512 : 8] == pytest.approx(expected, abs=1e-6)


def test_left_and_right_are_the_same_and_up_and_down_are_not() -> None:
    block = block_of("resnet18")
    maps = [torch.rand(1, width // 8, 14, 14, generator=torch.Generator().manual_seed(1)) for width in block.widths]
    found, mirrored, turned = (block(*(x.flip(axis) if axis else x for x in maps)) for axis in (0, 3, 2))
    assert torch.allclose(found, mirrored, atol=1e-6)
    assert not torch.allclose(found, turned, atol=1e-2)


@pytest.mark.parametrize("side", [64, 72])
def test_onnxruntime_and_torch_agree_also_where_regions_cut_through_pixels(side: int) -> None:
    model, card = model_of(f"{LITE}+stages+regions+pixels", side, "embedded")
    engine, x = Engine(model, card.shape), batch(2, side)
    assert engine.is_fast
    found, expected = engine.encode(x), Engine(model, card.shape, fast=False).encode(x)
    assert model.layout is not None
    columns = model.layout.columns("regions")
    assert len(columns) == 8 * sum(CHANNELS[:4])
    for own in np.split(columns, 8 * np.cumsum(CHANNELS[:3])):
        assert np.abs(found - expected)[:, own].max() <= 1e-4 * np.abs(expected[:, own]).max()


def test_the_layout_is_known_without_the_layers_of_the_encoder() -> None:
    name = f"{LITE}+stages+regions+pixels"
    known = embedded_state(EncoderSpec.parse(name, "embedded"))
    assert known is not None
    assert known[1] == model_of(name, 32, "embedded")[0].layout


@pytest.mark.parametrize("name", ["test_efficientnet", "test_convnext", "test_vit", "test_vit2"])
def test_tokens_are_regions_too(name: str) -> None:
    model, card = model_of(f"{name}+regions", 64)
    found = Engine(model, card.shape).encode(batch(2, 64))
    assert model.layout is not None
    assert np.ptp(found[:, model.layout.columns("regions")], axis=0).max() > 0


def test_images_are_compared_without_regions() -> None:
    model, card = model_of("test_resnet+stages+regions+pixels", 32)
    engine, layout = Engine(model, card.shape), model.layout
    assert layout is not None
    features = engine.encode(batch(2, 32))
    assert np.array_equal(engine.compared(features), features[:, layout.columns("final", "pixels")])
