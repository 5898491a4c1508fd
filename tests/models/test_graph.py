from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from lopsided.models.encoders import build_encoder
from lopsided.models.graph import INPUT, OUTPUT, UntranslatableError, to_onnx
from lopsided.models.machine import arrange

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def shaken(encoder: nn.Module) -> nn.Module:
    """Give batch norms statistics and weights that are not trivial, so that a mistake in folding shows."""
    generator = torch.Generator().manual_seed(0)
    for layer in encoder.modules():
        if isinstance(layer, nn.BatchNorm2d):
            with torch.no_grad():
                for tensor in (layer.running_mean, layer.bias):
                    tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
                for tensor in (layer.running_var, layer.weight):
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return encoder


def difference(encoder: nn.Module, size: int, channels: int = 3) -> float:
    """The largest difference between onnxruntime and torch, relative to the largest feature."""
    mean, std = MEAN[:channels], STD[:channels]
    session = onnxruntime.InferenceSession(to_onnx(encoder, channels, mean, std), providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(0).integers(0, 256, (3, channels, size, size), dtype=np.uint8)
    (found,) = session.run([OUTPUT], {INPUT: pixels})
    scale = [torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std)]
    with torch.no_grad():
        expected = encoder.eval()((torch.from_numpy(pixels) / 255 - scale[0]) / scale[1]).numpy()
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("test_resnet", 40),
        ("test_efficientnet", 33),
        ("tf_efficientnet_lite0", 37),
        ("resnet18", 32),
        ("lcnet_035", 35),
    ],
)
def test_a_graph_has_the_features_of_torch_for_sizes_that_no_stride_divides(name: str, size: int) -> None:
    encoder = shaken(build_encoder(name, channels=3, image_size=size)[0])
    assert difference(encoder, size) < 1e-4


def test_a_graph_of_an_encoder_with_fast_paths_and_one_channel() -> None:
    encoder = shaken(build_encoder("resnet18", channels=1, image_size=28)[0])
    arrange(encoder, torch.device("cpu"), (1, 28, 28))
    assert difference(encoder, 28, channels=1) < 1e-4


def test_translation_keeps_the_mode_and_the_weights_of_the_encoder() -> None:
    encoder = build_encoder("test_resnet", channels=3, image_size=32)[0].train()
    encoder.layer1.eval()  # type: ignore[union-attr]
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    modes = [child.training for child in encoder.modules()]
    to_onnx(encoder, 3, MEAN, STD)
    assert [child.training for child in encoder.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in encoder.state_dict().items())


class Shared(nn.Module):
    """A convolution whose output is read by a batch norm and by an addition, so that folding would be wrong."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.name = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Identity()
        self.pool, self.named = nn.AdaptiveAvgPool2d(1), named

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = self.norm(self.name(x) if self.named else x)
        return self.pool(y + x).flatten(1)


@pytest.mark.parametrize("named", [False, True])
def test_a_batch_norm_is_not_folded_into_a_convolution_that_others_read(named: bool) -> None:
    assert difference(shaken(Shared(named)), 12) < 1e-4


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.norm(x.flatten(2), dim=2)


def test_a_layer_without_a_translation_is_named() -> None:
    with pytest.raises(UntranslatableError, match="flatten of other axes"):
        to_onnx(Odd(), 3, MEAN, STD)
    with pytest.raises(UntranslatableError):
        to_onnx(build_encoder("test_vit", channels=3, image_size=32)[0], 3, MEAN, STD)
