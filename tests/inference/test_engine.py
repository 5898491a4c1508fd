from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lopsided.inference import engine as engines
from lopsided.inference.engine import Engine
from lopsided.inference.feature_cache import Features
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.machine import evaluating
from lopsided.models.model import Model
from lopsided.models.pretrained import EMBEDDED_ENCODER, preprocessing_of


def make(name: str, size: int, weights: str = "none") -> Model:
    encoder, features = build_encoder(name, channels=3, image_size=size, weights=weights)
    pixels = preprocessing_of(EMBEDDED_ENCODER, "embedded")
    return Model(encoder, ClassifierHead(features, 2), pixels.mean, pixels.std).eval()


def photos(number: int, size: int) -> torch.Tensor:
    """Smooth images, which an encoder does not see as noise."""
    noise = torch.rand(number, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    large = torch.nn.functional.interpolate(noise, size=(size, size), mode="bicubic")
    return (large.clamp(0, 1) * 255).to(torch.uint8)


def test_onnxruntime_and_torch_agree_on_the_embedded_encoder() -> None:
    model = make(EMBEDDED_ENCODER, 96, "embedded")
    fast, plain = Engine(model, (3, 96, 96)), Engine(model, (3, 96, 96), fast=False)
    assert (fast.is_fast, plain.is_fast) == (True, False)
    assert (fast.name.split()[0], plain.name.split()[0]) == ("onnxruntime", "torch")
    batch = photos(5, 96)
    found, expected = fast.features(batch), plain.features(batch)
    assert found.dtype == np.float32
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_features_of_an_image_do_not_depend_on_the_other_images_of_a_batch() -> None:
    engine = Engine(make(EMBEDDED_ENCODER, 64, "embedded"), (3, 64, 64))
    batch = photos(67, 64)
    whole = engine.features(batch)
    apart = np.concatenate([engine.features(batch[:1]), engine.features(batch[1:50]), engine.features(batch[50:])])
    assert np.array_equal(whole, apart)
    assert engine.features(batch[:0]).shape == (0, 1280)


def test_floats_vectors_and_untranslated_encoders_use_torch() -> None:
    model = make("test_resnet", 32)
    engine = Engine(model, (3, 32, 32))
    batch = photos(3, 32)
    assert np.abs(engine.features(batch.float() / 255) - engine.features(batch)).max() < 1e-4
    assert not Engine(make("test_vit", 32), (3, 32, 32)).is_fast
    assert not Engine(make("mlp", 8), (3, 8, 8)).is_fast


def test_a_graph_that_differs_from_torch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("test_resnet", 32)
    right = engines.to_onnx
    monkeypatch.setattr(engines, "to_onnx", lambda encoder, channels, mean, std: right(encoder, channels, std, std))
    assert not Engine(model, (3, 32, 32)).is_fast
    monkeypatch.setattr(engines, "to_onnx", lambda *_: b"no graph")
    assert not Engine(model, (3, 32, 32)).is_fast


def test_a_difference_in_a_block_of_small_numbers_counts_as_much_as_in_others() -> None:
    right, wrong = (np.array([[100.0, 50.0, 1.0, last]], dtype=np.float32) for last in (0.5, 0.501))
    assert engines._agrees(wrong, right, [])
    assert not engines._agrees(wrong, right, [2, 2])
    assert engines._agrees(right, right, [2, 2])


def test_a_graph_is_compared_with_torch_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape, told = make("test_resnet+stages+pixels", 32), (3, 32, 32), list[int]()

    def refused(found: Features, expected: Features, widths: list[int]) -> bool:
        told.extend(widths)
        return False

    monkeypatch.setattr(engines, "_agrees", refused)
    assert not Engine(model, shape).is_fast
    assert model.layout is not None
    assert told == [group.width for group in model.layout.groups]


def test_evaluating_restores_the_mode_of_each_part() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].eval()
    with evaluating(module):
        assert not any(child.training for child in module.modules())
    assert [child.training for child in module.modules()] == [True, True, False]


def test_features_do_not_depend_on_the_number_of_images_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch, sizes = Engine(make("test_resnet", 32), (3, 32, 32)), photos(7, 32), list[int]()
    together, run = engine.encode(batch), engine._run

    def counted(pixels: np.ndarray) -> np.ndarray:
        sizes.append(len(pixels))
        return run(pixels)

    monkeypatch.setattr(engine, "_run", counted)
    monkeypatch.setattr(engines, "images_per_call", lambda pixels, threads: 3)
    assert np.array_equal(engine.encode(batch), together)
    assert sizes == [3, 3, 1]


@pytest.mark.slow
def test_a_transformer_is_exported_once_and_agrees_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "test_vit+stages+regions+pixels"
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    model, batch = make(name, 160), photos(3, 160)
    assert not Engine(model, (3, 160, 160)).is_fast  # A small one is not worth the export.
    monkeypatch.setattr(engines, "_LARGE", 0)
    fast, plain = Engine(model, (3, 160, 160)), Engine(model, (3, 160, 160), fast=False)
    assert fast.is_fast
    found, expected = fast.encode(batch), plain.encode(batch)
    assert model.layout is not None
    ends = np.cumsum([group.width for group in model.layout.groups])
    for own, other in zip(np.split(found, ends[:-1], axis=1), np.split(expected, ends[:-1], axis=1), strict=True):
        assert np.abs(own - other).max() <= 1e-4 * np.abs(other).max()
    monkeypatch.setattr(engines, "_export", lambda model, shape: None)
    assert np.array_equal(Engine(model, (3, 160, 160)).encode(batch), found)
    changed = make(name, 160)
    next(changed.encoder.parameters()).data.add_(0.1)
    assert not Engine(changed, (3, 160, 160)).is_fast  # Other weights have another graph.


def test_a_graph_that_names_a_file_outside_of_itself_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    model, shape = make("test_resnet", 32), (3, 32, 32)
    expected = Engine(model, shape).features(torch.from_numpy(engines._example(shape)))
    mean, std = (values.flatten().tolist() for values in (model.mean, model.std))
    whole = engines.to_onnx(model.encoder, 3, mean, std)
    assert engines._checked(whole, model, shape, expected) is not None
    proto = onnx.load_from_string(whole)
    largest = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    content = largest.raw_data
    assert content, "There is something to move out of the graph."
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret").write_bytes(content)
    monkeypatch.chdir(tmp_path / "inside")
    for place in ("../secret", str(tmp_path / "secret"), "/etc/hostname", "/dev/zero"):
        largest.ClearField("raw_data")
        del largest.external_data[:]
        largest.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", place), ("offset", "0"), ("length", str(len(content)))):
            largest.external_data.add(key=key, value=value)
        assert engines._checked(proto.SerializeToString(), model, shape, expected) is None, place
