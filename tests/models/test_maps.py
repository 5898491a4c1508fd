"""Maps of where a model looked."""

from __future__ import annotations

import pytest
import torch

from lopsided.errors import InputError
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.maps import SIDE, class_maps
from lopsided.models.model import Model


def made(name: str, scaling: str = "none", views: tuple[str, ...] = ("identity",), classes: int = 3) -> Model:
    torch.manual_seed(0)
    encoder, features = build_encoder(name, channels=3, image_size=64)
    return Model(
        encoder, ClassifierHead(features, classes), (0.5,) * 3, (0.2,) * 3, views=views, scaling=scaling
    ).eval()


def test_without_scaling_the_map_adds_up_to_the_logit() -> None:
    model, images = made("test_resnet"), torch.rand(2, 3, 64, 64)
    labels = torch.tensor([0, 2])
    with torch.no_grad():
        logits = model(images) - model.classifier.bias
    own = logits[torch.arange(2), labels]
    expected = own - (logits.sum(dim=1) - own) / 2
    found = class_maps(model, images, labels)
    assert found.shape == (2, SIDE, SIDE)
    torch.testing.assert_close(found.sum(dim=(1, 2)), expected, rtol=1e-3, atol=1e-4)


def test_a_map_is_the_class_activation_map() -> None:
    model, images = made("test_resnet", classes=2), torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        last = model.encoder.forward_features((images - 0.5) / 0.2)
        weights = model.classifier.weight[1] - model.classifier.weight[0]
        expected = (last * weights[None, :, None, None]).sum(dim=1) / last[0, 0].numel()
    found = class_maps(model, images, torch.tensor([1]))
    shrunk = torch.nn.functional.interpolate(found[:, None], last.shape[2:], mode="area") * SIDE**2 / last[0, 0].numel()
    assert torch.corrcoef(torch.stack([shrunk.flatten(), expected.flatten()]))[0, 1] > 0.9


@pytest.mark.parametrize("scaling", ["none", "root"])
def test_a_map_turns_with_the_image(scaling: str) -> None:
    views = ("identity", "hflip", "vflip", "rot180")
    model, image = made("test_resnet+test_resnet+pixels", scaling, views), torch.rand(1, 3, 64, 64)
    label = torch.tensor([1])
    found, mirrored = class_maps(model, image, label), class_maps(model, image.flip(3), label)
    torch.testing.assert_close(found.flip(2), mirrored, rtol=1e-3, atol=1e-5)
    assert found.std() > 0


def test_a_channel_that_is_the_same_everywhere_leaves_the_map_finite() -> None:
    model = made("test_resnet+stages")
    with torch.no_grad():
        for weight in model.encoder.members[0].encoder.conv1.parameters():
            weight[0] = 0.0
    found = class_maps(model, torch.rand(1, 3, 64, 64), torch.tensor([1]))
    assert found.isfinite().all()
    assert found.abs().max() > 0


def test_an_encoder_without_positions_has_no_map() -> None:
    with pytest.raises(InputError, match="no positions"):
        class_maps(made("mlp"), torch.rand(1, 3, 64, 64), torch.tensor([0]))


@pytest.mark.parametrize("scaling", ["none", "root"])
def test_an_image_of_one_colour_has_a_map(scaling: str) -> None:
    model = made("test_resnet+pixels", scaling)
    assert class_maps(model, torch.full((1, 3, 64, 64), 0.5), torch.tensor([1])).isfinite().all()
