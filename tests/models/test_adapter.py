"""Heads on frozen features: the module, its card, and the files of a model with heads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lopsided.errors import RunError
from lopsided.inference.engine import Engine
from lopsided.inference.export import INPUTS, export_onnx
from lopsided.models.encoders import build_encoder, seeded_init
from lopsided.models.heads import Adapter, ClassifierHead, adapter_width
from lopsided.models.model import AdapterCard, Model, ModelCard, load_model, save_model

SIZE = 32


def an_adapter(features: int = 6, *, keep: bool = True, dropout: float = 0.0) -> Adapter:
    with seeded_init(3, "test"):
        adapter = Adapter(features, heads=2, hidden=5, out=4, keep=keep, input_dropout=dropout, dropout=dropout)
    adapter.mean.copy_(torch.linspace(-1, 1, features))
    adapter.scale.copy_(torch.linspace(0.5, 2, features))
    return adapter.eval()


def a_model(*, keep: bool = True) -> tuple[Model, ModelCard]:
    encoder, width = build_encoder("test_resnet", channels=3, image_size=SIZE, seed=0)
    adapter = an_adapter(width, keep=keep)
    with seeded_init(0, "classifier"):
        classifier = ClassifierHead(adapter.width, 3)
    card = ModelCard(
        kind="image", encoder="test_resnet", channels=3, image_size=SIZE, shape=(3, SIZE, SIZE), mean=(0.5,) * 3,
        std=(0.2,) * 3, classes=("a", "b", "c"), features=width, prior=(0.5, 0.3, 0.2),
        adapter=AdapterCard(heads=2, hidden=5, out=4, keep=keep),
    )  # fmt: skip
    return Model(encoder, classifier, card.mean, card.std, "image", adapter).eval(), card


@pytest.mark.parametrize("keep", [True, False])
def test_the_outputs_are_the_features_and_each_head_by_plain_numpy(keep: bool) -> None:
    adapter = an_adapter(keep=keep)
    x = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
    with torch.no_grad():
        found = adapter(torch.from_numpy(x)).numpy()
    state = {key: value.double().numpy() for key, value in adapter.state_dict().items()}
    z = (x.astype(np.float64) - state["mean"]) / state["scale"]
    parts = [x] if keep else []
    for head in ("heads.0", "heads.1"):
        hidden = np.maximum(z @ state[f"{head}.first.weight"].T + state[f"{head}.first.bias"], 0)
        out = hidden @ state[f"{head}.second.weight"].T + state[f"{head}.second.bias"]
        parts.append(out / np.linalg.norm(out, axis=1, keepdims=True))
    np.testing.assert_allclose(found, np.concatenate(parts, axis=1), rtol=1e-5, atol=1e-6)
    assert found.shape[1] == adapter.width == adapter_width(6, heads=2, out=4, keep=keep)


def test_dropout_acts_in_training_only_and_changes_no_name_of_a_weight() -> None:
    plain, dropping = an_adapter(), an_adapter(dropout=0.5)
    assert list(plain.state_dict()) == list(dropping.state_dict())
    x = torch.ones(3, 6)
    with torch.no_grad():
        assert torch.equal(plain(x), dropping(x))
        torch.manual_seed(0)
        assert not torch.equal(plain(x), dropping.train()(x))


@pytest.mark.parametrize("keep", [True, False])
def test_a_model_with_heads_survives_saving(keep: bool, tmp_path: Path) -> None:
    model, card = a_model(keep=keep)
    card = save_model(tmp_path, model, card)
    again, read = load_model(tmp_path, fast=False)
    x = torch.rand(4, 3, SIZE, SIZE)
    with torch.no_grad():
        assert torch.equal(model(x), again(x))
        assert again.features(x).shape == (4, card.width)
    assert read == card


@pytest.mark.parametrize(
    "change",
    [{"heads": 3}, {"hidden": 65536}, {"out": 5}, {"keep": False}, None],
)
def test_heads_that_the_card_does_not_describe_are_refused(change: dict[str, object] | None, tmp_path: Path) -> None:
    save_model(tmp_path, *a_model())
    path = tmp_path / "model.json"
    content = json.loads(path.read_text())
    content["adapter"] = None if change is None else content["adapter"] | change
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"does not (hold the heads that model\.json describes|fit the encoder)"):
        load_model(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("heads", 0), ("heads", 65), ("hidden", 0), ("out", 2**16 + 1)])
def test_a_card_with_impossible_heads_is_refused(field: str, value: int, tmp_path: Path) -> None:
    save_model(tmp_path, *a_model())
    path = tmp_path / "model.json"
    content = json.loads(path.read_text())
    content["adapter"][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match=rf"is not a valid model card: adapter\.{field}: "):
        load_model(tmp_path)


def test_the_engine_gives_features_of_the_encoder_and_inputs_of_the_classifier() -> None:
    model, card = a_model()
    engine = Engine(model, card.shape)
    assert engine.is_fast
    images = torch.randint(0, 256, (3, 3, SIZE, SIZE), dtype=torch.uint8)
    encoded = engine.encode(images)
    with torch.no_grad():
        expected = model.encode(images.float() / 255)
        logits = model(images.float() / 255)
    assert encoded.shape == (3, card.features)
    np.testing.assert_allclose(encoded, expected.numpy(), atol=1e-4)
    np.testing.assert_array_equal(engine.features(images), engine.adapt(encoded))
    np.testing.assert_allclose(engine.probabilities(engine.features(images)), logits.softmax(dim=1).numpy(), atol=1e-4)


@pytest.mark.slow
def test_the_onnx_file_of_a_model_with_heads_agrees_with_torch(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, card = a_model()
    export_onnx(model, card, tmp_path / "model.onnx")
    images = torch.rand(5, 3, SIZE, SIZE)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found = session.run(["probabilities"], {INPUTS["image"]: images.numpy()})[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, model(images).softmax(dim=1).numpy(), atol=1e-4)
