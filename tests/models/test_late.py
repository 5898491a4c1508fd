from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lopsided.errors import RunError
from lopsided.inference import engine as engines
from lopsided.inference import export
from lopsided.inference.engine import Engine, graph_path, load_graph, store_graph
from lopsided.inference.feature_cache import empty_cache, list_cache
from lopsided.inference.scorer import Scorer
from lopsided.models import encoders
from lopsided.models.encoders import build_encoder, embedded_state, late_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard, load_model, save_model
from lopsided.models.pretrained import EMBEDDED_ENCODER, preprocessing_of
from lopsided.models.small_maps import SmallMapConv2d
from lopsided.recipe.encoder_spec import EncoderSpec

SHAPE = (3, 32, 32)
PIXELS = preprocessing_of(EMBEDDED_ENCODER, "embedded")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LOPSIDED_CACHE", str(folder))
    return folder


def made_late(fast: bool = True) -> Model:
    found = embedded_state(EncoderSpec.parse(EMBEDDED_ENCODER, "embedded"))
    assert found is not None
    encoder = late_encoder(EMBEDDED_ENCODER, *found, SHAPE, fast=fast)
    return Model(encoder, ClassifierHead(found[1].width, 2), PIXELS.mean, PIXELS.std).eval()


def card() -> ModelCard:
    return ModelCard(
        kind="image", encoder=EMBEDDED_ENCODER, encoder_weights="embedded", channels=3, image_size=32, shape=SHAPE,
        mean=PIXELS.mean, std=PIXELS.std, classes=("a", "b"), features=1280, prior=(0.5, 0.5),
    )  # fmt: skip


def photos(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (number, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [EMBEDDED_ENCODER, f"{EMBEDDED_ENCODER}+tf_efficientnet_lite1"])
def test_the_weights_without_layers_are_those_of_the_layers(name: str) -> None:
    encoder, width = build_encoder(name, image_size=32, weights="embedded")
    found = embedded_state(EncoderSpec.parse(name, "embedded"))
    assert found is not None
    assert found[1].width == width
    weights = late_encoder(name, *found, SHAPE, fast=True)
    assert sorted(key for key, _ in weights.named_parameters()) == sorted(key for key, _ in encoder.named_parameters())
    own, there = weights.state_dict(), encoder.state_dict()
    assert own.keys() == there.keys()
    assert all(own[key].dtype == value.dtype and torch.equal(own[key], value) for key, value in there.items())


@pytest.mark.parametrize(
    ("name", "weights"),
    [("resnet18", "embedded"), (EMBEDDED_ENCODER, "timm"), (f"{EMBEDDED_ENCODER}+resnet18", "embedded+a.safetensors")],
)
def test_other_weights_need_their_layers(name: str, weights: str) -> None:
    assert embedded_state(EncoderSpec.parse(name, weights)) is None


def test_the_layers_are_made_when_a_feature_is_needed_and_not_before() -> None:
    model = made_late()
    engine = Engine(model, SHAPE)
    assert engine.name.startswith("onnxruntime ")
    assert engine.probabilities(engine.adapt(np.ones((2, 1280), dtype=np.float32))).shape == (2, 2)
    assert not model.is_complete
    found = engine.features(photos(2))
    assert model.is_complete
    assert engine.is_fast
    encoder, _ = build_encoder(EMBEDDED_ENCODER, image_size=32, weights="embedded")
    plain = Model(encoder, model.classifier, PIXELS.mean, PIXELS.std).eval()
    assert np.array_equal(found, Engine(plain, SHAPE).features(photos(2)))
    again = pickle.loads(pickle.dumps(made_late()))  # Joblib copies estimators in this way.
    assert np.abs(Engine(again, (), fast=False).features(photos(1)) - found[:1]).max() < 1e-4 * np.abs(found).max()


@pytest.mark.slow
def test_a_graph_that_was_kept_needs_no_layers_and_is_checked_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(made_late(), SHAPE).features(photos(2))
    (path,) = (cache / "graphs-1").glob("*.safetensors")
    assert list_cache(cache)[-1]["bytes"] == path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(encoders, "build_encoder", None)
        model = made_late()
        assert np.array_equal(Engine(model, SHAPE).features(photos(2)), first)
        assert not model.is_complete
    content = path.read_bytes()
    other = first[:1].copy()  # These are not the features of the image of the check.
    store_graph(path, load_graph(path)[0], other)
    for changed in (path.read_bytes(), content[:-1] + bytes([content[-1] ^ 1]), content[:1000], b""):
        path.write_bytes(changed)
        model = made_late()
        assert np.array_equal(Engine(model, SHAPE).features(photos(2)), first)
        assert model.is_complete
        assert path.read_bytes() == content
    assert empty_cache(cache) == len(content)
    assert list_cache(cache) == list(cache.iterdir()) == []


def test_other_weights_shapes_and_normalisations_have_other_graphs() -> None:
    model, changed, scaled = made_late(), made_late(), made_late()
    with torch.no_grad():
        changed.encoder.get_parameter("bn1.weight")[0] += 1
    scaled.mean += 0.1
    places = [graph_path(one, SHAPE) for one in (model, changed, scaled)] + [graph_path(model, (3, 64, 64))]
    assert len(set(places)) == 4
    assert graph_path(made_late(), SHAPE) == places[0]
    model.complete()
    assert graph_path(model, SHAPE) is None


def test_features_of_torch_are_not_kept_as_those_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_session", lambda *_: None)
    scorer = Scorer(made_late(), card())
    (expected,) = (space.folder for space in scorer.shelves[0].spaces)
    assert scorer.complete()
    assert scorer.engine.name.startswith("torch ")
    assert scorer.shelves[0].spaces[0].folder != expected
    assert not scorer.complete()


def test_an_export_makes_the_layers_before_it_takes_their_fast_paths_away() -> None:
    model = made_late()
    export._network(model, card())
    assert model.is_complete
    assert not any(isinstance(layer, SmallMapConv2d) for layer in model.modules())
    made = made_late()
    made.complete()
    assert any(isinstance(layer, SmallMapConv2d) for layer in made.modules())


@pytest.mark.slow
def test_a_model_is_loaded_without_its_layers_if_its_weights_fit_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made_late()
    save_model(tmp_path, model, card())
    with monkeypatch.context() as patch:
        patch.setattr(encoders, "build_encoder", None)
        loaded, again = load_model(tmp_path)
        assert not loaded.is_complete
    assert np.array_equal(Engine(loaded, again.shape).features(photos(1)), Engine(model, SHAPE).features(photos(1)))
    whole, _ = load_model(tmp_path, fast=False)
    assert not whole.is_complete
    whole.complete()
    save_model(tmp_path, whole, card())
    assert torch.equal(load_model(tmp_path)[0].state_dict()["encoder.bn1.weight"], whole.encoder.bn1.weight)
    del whole.encoder.bn1
    save_model(tmp_path, whole, card())
    with pytest.raises(RunError, match=r"does not fit the encoder tf_efficientnet_lite0: Missing key.*bn1\.weight"):
        load_model(tmp_path)
