"""Columns for each position of an image, and the distances that read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from lopsided.errors import InputError, RunError
from lopsided.evaluation.decision import PLAIN
from lopsided.inference.engine import Engine
from lopsided.models.blocks.positions import NUMBERS, SIDE, WIDTH, Positions, middle_stages, mixtures
from lopsided.models.blocks.stages import stages_of
from lopsided.models.encoders import build_encoder, embedded_state
from lopsided.models.graph import INPUT, OUTPUT, to_onnx
from lopsided.models.heads import DecisionHead, DistanceHead, DistanceShape
from lopsided.models.maps import class_maps
from lopsided.models.model import Model, ModelCard, load_model, save_model
from lopsided.models.whole_graph import model_to_onnx
from lopsided.recipe import named_recipe
from lopsided.recipe.encoder_spec import EncoderSpec
from lopsided.training.methods.distance import DistanceTrainer

LITE = "tf_efficientnet_lite0"
SHAPES = (DistanceShape(positions=1, columns=5, axes=2), DistanceShape(positions=49, columns=NUMBERS, axes=3))


def images(number: int, height: int, width: int) -> torch.Tensor:
    return torch.rand(number, 3, height, width, generator=torch.Generator().manual_seed(0))


def model_of(side: int, name: str = "test_efficientnet+stages+positions+pixels") -> tuple[Model, ModelCard]:
    """Return a model whose distances have random numbers, which are not 0 anywhere."""
    encoder, width = build_encoder(name, image_size=side, seed=1)
    card = ModelCard(
        kind="image", encoder=name, channels=3, image_size=side, shape=(3, side, side), mean=(0.0,) * 3,
        std=(1.0,) * 3, classes=("a", "b"), features=width, scaling="root", prior=(0.5, 0.5), head="distance",
        distances=SHAPES,
    )  # fmt: skip
    head, generator = DistanceHead(width, 2, SHAPES), torch.Generator().manual_seed(2)
    model = Model(encoder, head, card.mean, card.std, scaling="root").eval()
    with torch.no_grad():
        head.pull.copy_(torch.tensor([-0.6, 0.6]))
        for distance in head.parts:
            for part in (distance.centre, distance.scale, distance.axes, distance.gains):
                part.copy_(torch.rand(part.shape, generator=generator))
            distance.level.copy_(torch.tensor([0.5, 2.0]))
        assert model.layout is not None
        head.parts[0].columns.copy_(torch.arange(5)[None])
        head.parts[1].columns.copy_(torch.from_numpy(model.local[:WIDTH].reshape(49, NUMBERS)))
    return model, card


def test_a_position_has_mixtures_of_the_mean_around_it() -> None:
    network, _ = build_encoder("resnet18", seed=1)
    block = Positions(network)
    assert block.taps == ("layer2", "layer3")
    fine, coarse = torch.rand(2, 128, 14, 14), torch.rand(2, 256, 7, 7)
    found = block(fine, coarse).reshape(2, SIDE, SIDE, NUMBERS).numpy()
    for row, column in ((0, 0), (2, 6), (3, 4)):
        parts = []
        for map_, step in ((fine, 2), (coarse, 1)):
            rows, columns = (slice(max(step * at - 1, 0), step * at + step + 1) for at in (row, column))
            parts.append(map_[:, :, rows, columns].mean(dim=(2, 3)).numpy())
        expected = np.concatenate(parts, axis=1) @ mixtures(384)
        assert found[:, row, column] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("channels", [5, NUMBERS, 152, 1536])
def test_mixtures_keep_lengths_as_far_as_there_are_numbers(channels: int) -> None:
    found, kept = mixtures(channels), min(channels, NUMBERS)
    assert found.shape == (channels, NUMBERS)
    assert np.allclose((found.T @ found)[:kept, :kept], np.eye(kept), atol=1e-5)
    assert not found[:, kept:].any()


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        (LITE, ["blocks.2", "blocks.4"]),
        ("resnet50", ["layer2", "layer3"]),
        ("convnext_atto", ["stages.1", "stages.2"]),
        ("vit_tiny_patch16_224", ["blocks.5", "blocks.8"]),
    ],
)
def test_two_stages_in_the_middle_are_read(name: str, layers: list[str]) -> None:
    with torch.device("meta"):
        encoder, _ = build_encoder(name)
    assert list(middle_stages(stages_of(encoder))) == layers


@pytest.mark.parametrize("name", ["test_efficientnet", "test_resnet", "test_convnext", "test_vit", "test_vit2"])
def test_every_kind_of_encoder_has_positions(name: str) -> None:
    model, _ = model_of(64, f"{name}+positions")
    assert len(model.local) == WIDTH
    with torch.no_grad():
        assert model.encode(images(2, 64, 64))[:, model.local].isfinite().all()


@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 48), (32, 96), (160, 224)])
def test_onnxruntime_computes_the_same_columns_also_if_maps_are_smaller_than_the_positions(
    height: int, width: int
) -> None:
    encoder, number = build_encoder("test_efficientnet+positions", channels=3, image_size=(height, width), seed=1)
    batch = (images(3, height, width) * 255).to(torch.uint8)
    session = onnxruntime.InferenceSession(to_onnx(encoder.eval(), 3, (0.0,) * 3, (1.0,) * 3))
    (found,) = session.run([OUTPUT], {INPUT: batch.numpy()})
    with torch.no_grad():
        expected = encoder(batch / 255)
    assert found.shape == (3, number)
    assert np.abs(found - expected.numpy()).max() < 1e-4 * float(expected.abs().max())


def test_the_exported_model_has_the_logits_of_the_distances() -> None:
    model, _ = model_of(64)
    graph = model_to_onnx(model, DecisionHead(PLAIN, 2), (3, 64, 64), "image", ("logits", "p", "s", "label"), PLAIN)
    x = images(4, 64, 64)
    (found,) = onnxruntime.InferenceSession(graph.SerializeToString()).run(["logits"], {"image": x.numpy()})
    with torch.no_grad():
        expected = model(x)
    assert found == pytest.approx(expected.numpy(), abs=1e-4)
    plain = nn.functional.linear(model.features(x), model.classifier.weight, model.classifier.bias)
    assert (plain - expected).abs().min() > 0.1, "Without the distances, the logits would be others."


def test_only_columns_of_the_whole_image_compare_images() -> None:
    model, card = model_of(64)
    engine = Engine(model, (3, 64, 64))
    features = engine.encode((images(2, 64, 64) * 255).to(torch.uint8))
    assert engine.whole(features).shape[1] == card.whole_features == card.features - WIDTH
    changed = features.copy()
    changed[:, model.local] += 1
    np.testing.assert_array_equal(engine.compared(changed), engine.compared(features))
    np.testing.assert_array_equal(engine.whole(changed), engine.whole(features))
    layout = model.layout
    assert layout is not None
    importance = layout.whole.importance()
    assert importance is not None
    assert len(importance) == len(np.concatenate(layout.whole.kinds())) == card.whole_features


def test_the_map_is_red_where_a_position_is_far_and_its_gradient_says_nothing_else() -> None:
    model, _ = model_of(64)
    head = model.classifier
    assert isinstance(head, DistanceHead)
    x, place = images(1, 64, 64), 5 * SIDE + 1
    with torch.no_grad():
        head.weight.zero_()
        head.shares.copy_(torch.tensor([0.0, 1.0]))
        local = head.parts[1]
        local.centre.copy_(model.features(x)[0, local.columns])
        local.axes.zero_()
        local.centre[place] += 3.0
    found = class_maps(model, x, torch.tensor([1]))[0]
    row, column = divmod(int(found.argmax()), 28)
    assert (row // 4, column // 4) == divmod(place, SIDE)
    assert found[:16].abs().max() < 0.05 * found.max()
    expected = 1.2 * float(local(model.features(x)).detach())  # What the distance adds to the log odds.
    assert float(found.sum()) == pytest.approx(expected, rel=1e-3)
    assert torch.allclose(class_maps(model, x, torch.tensor([0]))[0], -found, atol=1e-5)


def test_a_saved_model_gives_the_same_and_another_shape_of_its_distances_is_refused(tmp_path: Path) -> None:
    model, card = model_of(64)
    save_model(tmp_path, model, card)
    loaded, _ = load_model(tmp_path)
    with torch.no_grad():
        assert torch.allclose(loaded(images(2, 64, 64)), model(images(2, 64, 64)), atol=1e-4)
    content = json.loads((tmp_path / "model.json").read_text())
    content["distances"][1] = {"positions": 4096, "columns": 2**20, "axes": 4096}
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match="Train the model again"):
        load_model(tmp_path)


@pytest.mark.parametrize("column", [-1, 10**6])
def test_a_distance_of_columns_that_the_features_do_not_have_is_refused(tmp_path: Path, column: int) -> None:
    model, card = model_of(64)
    assert isinstance(model.classifier, DistanceHead)
    model.classifier.parts[1].columns[3, 4] = column
    save_model(tmp_path, model, card)
    with pytest.raises(RunError, match="Train the model again"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["mlp+positions", "identity+positions"])
def test_vectors_have_no_positions(name: str) -> None:
    with pytest.raises(InputError, match="must be models of timm"):
        EncoderSpec.parse(name)


def test_an_encoder_without_stages_and_a_method_without_positions_say_so() -> None:
    with pytest.raises(InputError, match=r"Leave out .*\+positions"):
        Positions(nn.Linear(3, 3))
    with pytest.raises(InputError, match="reads no single positions"):
        named_recipe("quick").override(**{"encoder.name": f"{LITE}+positions"})


def test_the_weights_of_an_embedded_encoder_tell_the_number_of_positions() -> None:
    found = embedded_state(EncoderSpec.parse(f"{LITE}+positions", "embedded"))
    assert found is not None
    assert [group.width for group in found[1].groups] == [1280, WIDTH]


@pytest.mark.parametrize("name", ["test_resnet", "test_resnet+test_efficientnet"])
def test_each_encoder_has_a_distance_of_its_own_positions(name: str) -> None:
    model, card = model_of(64, f"{name}+stages+positions")
    trainer = object.__new__(DistanceTrainer)
    trainer.model, trainer.card = model, card
    whole, *local = trainer._columns()
    assert whole.shape[0] == 1
    assert [each.shape for each in local] == [(SIDE * SIDE, NUMBERS)] * len(name.split("+"))
    assert np.concatenate(local).ravel().tolist() == model.local.tolist()
    assert not set(whole.ravel()) & set(model.local)
