"""Joined encoders and scaled features: what the classifier gets, and that every way to it gives the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lopsided.data.augment import to_float
from lopsided.errors import InputError, RunError
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import Scorer
from lopsided.models.blocks.block import scaled
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard, average, load_model, save_model
from lopsided.models.pretrained import EMBEDDED_ENCODER, Preprocessing, preprocessing_of
from lopsided.recipe.encoder_spec import Scaling

SIDE = 32
FILE_PIXELS = Preprocessing(SIDE, (0.1, 0.5, 0.7), (0.2, 0.4, 0.9))
JOINED = f"{EMBEDDED_ENCODER}+test_resnet"
SMALL = "test_resnet+test_efficientnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Embedded weights and a file in a folder whose name holds the sign between weights."""
    folder = tmp_path_factory.mktemp("a+b")
    encoder, _ = build_encoder("test_resnet", image_size=SIDE, seed=3)
    state = {key: value.contiguous() for key, value in encoder.state_dict().items()}
    save_file(state, folder / "own.safetensors", {"lopsided": FILE_PIXELS.to_json()})
    return f"embedded+{folder / 'own.safetensors'}"


def images(number: int = 4) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (number, 3, SIDE, SIDE), dtype=np.uint8))


def joined_model(name: str, weights: str, views: tuple[str, ...] = ("identity",)) -> tuple[Model, ModelCard]:
    encoder, width = build_encoder(name, image_size=SIDE, weights=weights, seed=3)
    card = ModelCard(
        kind="image", encoder=name, encoder_weights=weights, channels=3, image_size=SIDE, shape=(3, SIDE, SIDE),
        mean=(0.0,) * 3, std=(1.0,) * 3, classes=("cat", "dog"), features=width, views=views, scaling="root",
        prior=(0.5, 0.5),
    )  # fmt: skip
    torch.manual_seed(0)
    head = ClassifierHead(width, 2)
    torch.nn.init.normal_(head.weight, std=10)
    return Model(encoder, head, card.mean, card.std, views=views, scaling="root").eval(), card


@pytest.mark.parametrize(("scaling", "power"), [("root", 1 / 2), ("cube-root", 1 / 3)])
def test_scaled_features_keep_their_sign_have_length_1_and_a_row_of_zeros_stays_zero(
    scaling: Scaling, power: float
) -> None:
    x = np.random.default_rng(0).normal(size=(6, 9)).astype(np.float32) * 100
    x[2] = 0
    root = np.copysign(np.abs(x.astype(np.float64)) ** power, x)
    length = np.linalg.norm(root, axis=1, keepdims=True)
    expected = np.divide(root, length, out=np.zeros_like(root), where=length > 0)
    np.testing.assert_allclose(scaled(torch.from_numpy(x), scaling).numpy(), expected, atol=1e-6)
    np.testing.assert_array_equal(scaled(torch.from_numpy(x), "none").numpy(), x)


@pytest.mark.parametrize(("scaling", "power"), [("root", 1 / 2), ("cube-root", 1 / 3)])
def test_scaled_features_have_the_gradient_of_their_formula_and_a_finite_one_at_zero(
    scaling: Scaling, power: float
) -> None:
    x = torch.tensor([[4.0, 0.25, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    weight = torch.tensor([1.0, -2.0, 3.0, 0.5])
    found = scaled(x, scaling)
    assert torch.equal(found, scaled(x.detach(), scaling))
    (found @ weight).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    other = x.detach()[:1, :3].double().requires_grad_()
    roots = other.sign() * other.abs() ** power
    (roots / roots.norm() @ weight[:3].double()).sum().backward()
    assert other.grad is not None
    torch.testing.assert_close(x.grad[:1, :3].double(), other.grad)


@pytest.mark.slow
def test_joined_encoders_are_the_single_ones_side_by_side_each_with_its_own_normalisation(weights: str) -> None:
    model, card = joined_model(JOINED, weights)
    whole = preprocessing_of(JOINED, weights)
    assert (whole.mean, whole.std, whole.image_size) == (card.mean, card.std, 224)
    batch = images()
    parts = []
    for name, file in zip(JOINED.split("+"), ("embedded", weights.removeprefix("embedded+")), strict=True):
        pixels = FILE_PIXELS if name == "test_resnet" else preprocessing_of(name, file)
        single, width = build_encoder(name, image_size=SIDE, weights=file)
        own = Model(single, ClassifierHead(width, 2), pixels.mean, pixels.std).eval()
        parts.append(Engine(own, (3, SIDE, SIDE), fast=False).encode(batch))
    expected = np.concatenate(parts, axis=1)
    slow, fast = Engine(model, (3, SIDE, SIDE), fast=False), Engine(model, (3, SIDE, SIDE))
    assert fast.is_fast
    np.testing.assert_allclose(slow.encode(batch), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fast.encode(batch), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_a_saved_joined_model_with_scaled_features_and_views_gives_the_same_probabilities(
    weights: str, tmp_path: Path
) -> None:
    model, card = joined_model(JOINED, weights, views=("identity", "hflip"))
    save_model(tmp_path, model, card)
    loaded, there = load_model(tmp_path)
    assert (there.encoder, there.scaling, there.members) == (JOINED, "root", 1)
    batch = images()
    with torch.no_grad():
        expected = model(to_float(batch)).softmax(dim=1).numpy()
        mirrored = torch.stack([model.encode(to_float(x)) for x in (batch, batch.flip(-1))]).mean(dim=0)
        by_hand = model.classifier(scaled(mirrored, "root")).softmax(dim=1).numpy()
        np.testing.assert_allclose(loaded(to_float(batch)).softmax(dim=1).numpy(), expected, atol=1e-5)
    assert np.ptp(expected[:, 0]) > 1e-3  # The images differ in their probabilities.
    np.testing.assert_allclose(by_hand, expected, atol=1e-5)
    engine = Engine(loaded, (3, SIDE, SIDE))
    np.testing.assert_allclose(engine.probabilities(engine.features(batch)), expected, atol=1e-3)


def test_an_ensemble_of_models_with_scaled_features_has_the_mean_of_their_logits() -> None:
    _, width = build_encoder("test_resnet", image_size=SIDE)
    card = ModelCard(
        kind="image", encoder="test_resnet", channels=3, image_size=SIDE, shape=(3, SIDE, SIDE), mean=(0.5,) * 3,
        std=(0.5,) * 3, classes=("cat", "dog"), features=width, scaling="root", prior=(0.5, 0.5),
    )  # fmt: skip
    models = []
    for seed in range(3):  # Fine-tuned encoders differ.
        encoder, _ = build_encoder("test_resnet", image_size=SIDE, seed=seed)
        torch.manual_seed(seed)
        head = ClassifierHead(width, 2)
        torch.nn.init.normal_(head.weight, std=10)
        models.append((Model(encoder, head, card.mean, card.std, scaling="root").eval(), card))
    joined, _ = average(models, [(0.5, 0.0), (0.0, 0.0), (0.0, 1.0)])
    x = to_float(images())
    with torch.no_grad():
        biases = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 1.0]])
        expected = torch.stack([model(x) + bias for (model, _), bias in zip(models, biases, strict=True)]).mean(dim=0)
        torch.testing.assert_close(joined(x), expected, rtol=1e-4, atol=1e-4)


def test_the_cache_keeps_the_features_of_joined_encoders_apart_but_not_those_of_scalings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path))
    model, card = joined_model(SMALL, "none")
    plain = Model(model.encoder, model.classifier, card.mean, card.std).eval()
    engine = Engine(model, card.shape, fast=False)

    def folders(net: Model, about: ModelCard) -> list[Path]:
        return [space.folder for space in Scorer(net, about, engine=engine).shelves[0].spaces]

    own = folders(model, card)
    assert folders(plain, card.model_copy(update={"scaling": "none"})) == own  # Features are cached before scaling.
    model.encoder.mean[1] += 0.1  # Another normalisation of one member.
    changed = folders(model, card)
    assert (changed[0] == own[0], changed[1] == own[1]) == (True, False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"encoder": "test_resnet"}, r"model\.safetensors must hold the weights of 1 encoders, got 2\."),
        ({"encoder": f"{SMALL}+test_resnet"}, r"model\.safetensors must hold the weights of 3 encoders, got 2\."),
        (
            {"encoder": "test_efficientnet+test_resnet"},
            r"does not fit the encoder test_efficientnet\+test",
        ),
        (
            {"encoder": "+".join(["test_resnet"] * 500)},
            r"built: encoder\.name must join at most 16 encoders.*got 500\.",
        ),
        ({"members": 2}, r"model\.safetensors does not fit the encoder "),
        ({"scaling": "cube"}, r"not a valid model card: scaling: input should be 'none', 'root' or 'cube-root'\."),
    ],
)
def test_an_edited_card_of_a_joined_model_is_one_sentence(
    changes: dict[str, object], text: str, tmp_path: Path
) -> None:
    model, card = joined_model(SMALL, "none")
    save_model(tmp_path, model, card)
    content = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(content | changes))
    with pytest.raises(RunError, match=text) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "weights", "channels", "text"),
    [
        (JOINED, "embedded", 1, "joined encoders must have images of 3 channels, got 1 channels."),
        ("test_resnet+mlp", "none", 3, "joined encoders must be models of timm, got 'mlp'."),
        (
            "test_resnet+",
            "none",
            3,
            "encoder.name must join at most 16 encoders, none of them empty, got 'test",
        ),
        (JOINED, "a.safetensors", 3, "encoder.weights must name weights for each of the 2 encoders "),
        (
            "+".join(["test_resnet"] * 17),
            "none",
            3,
            "encoder.name must join at most 16 encoders, none of them empty, got",
        ),
    ],
)
def test_encoders_that_cannot_be_joined_are_one_sentence(name: str, weights: str, channels: int, text: str) -> None:
    with pytest.raises(InputError) as caught:
        build_encoder(name, channels=channels, image_size=SIDE, weights=weights)
    assert str(caught.value).startswith(text)


@pytest.mark.slow
def test_an_exported_model_with_scaled_features_gives_the_same_probabilities(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from lopsided.inference.export import export_onnx

    model, card = joined_model("test_resnet+test_resnet", "none")
    model.encoder.mean[1], model.encoder.std[0] = 0.4, 0.3
    export_onnx(model, card, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    x = to_float(images())
    with torch.no_grad():
        expected = model(x).softmax(dim=1).numpy()
    found = session.run(["probabilities"], {"images": x.numpy()})[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)
