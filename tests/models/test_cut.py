from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lopsided.errors import InputError
from lopsided.models.cut import block_numbers, cut_encoder
from lopsided.models.encoders import build_encoder


@pytest.mark.parametrize(
    ("name", "blocks", "shape"),
    [
        ("test_resnet", 1, (192, 2, 2)),
        ("test_resnet", 4, (32, 8, 8)),
        ("test_efficientnet", 2, (32, 4, 4)),
        ("test_convnext", 1, (64, 1, 1)),
        ("mlp-16-8", 1, (16,)),
    ],
)
def test_front_and_rest_together_are_the_encoder(name: str, blocks: int, shape: tuple[int, ...]) -> None:
    encoder, _ = build_encoder(name, channels=3, image_size=32, seed=1)
    encoder.eval()
    cut = cut_encoder(encoder, blocks, (3, 32, 32), name)
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert cut.front(x).shape == (3, *cut.shape)
        assert torch.equal(cut.rest(cut.front(x)), encoder(x))
        assert cut.flat_front(x).shape == (3, torch.Size(cut.shape).numel())
    assert cut.shape == shape
    own = {id(weight) for weight in encoder.parameters()}
    ends = [{id(weight) for weight in part.parameters()} for part in (cut.front, cut.rest)]
    assert ends[0] | ends[1] == own
    assert ends[0] == {id(weight) for weight in cut.frozen}
    assert not ends[0] & ends[1]


def test_a_cut_leaves_the_mode_of_each_layer_and_follows_later_changes_of_the_weights() -> None:
    encoder, _ = build_encoder("test_resnet", channels=3, image_size=32, seed=1)
    encoder.train()
    encoder.layer1.eval()
    modes = [child.training for child in encoder.modules()]
    cut = cut_encoder(encoder, 2, (3, 32, 32))
    assert [child.training for child in encoder.modules()] == modes
    encoder.eval()
    with torch.no_grad():
        encoder.layer4[0].conv1.weight.mul_(0.5)
        x = torch.ones(1, 3, 32, 32)
        assert torch.equal(cut.rest(cut.front(x)), encoder(x))


def test_blocks_are_numbered_from_the_stem_and_what_follows_the_last_block_belongs_to_it() -> None:
    encoder, _ = build_encoder("test_efficientnet", channels=3, image_size=32)
    numbers = block_numbers(encoder)
    assert numbers["conv_stem.weight"] == 0
    assert numbers["blocks.0.0.conv.weight"] == 1
    last = max(numbers.values())
    assert {name for name, number in numbers.items() if number == last} >= {"conv_head.weight", "bn2.bias"}
    assert set(numbers) == {name for name, _ in encoder.named_parameters()}
    mlp, _ = build_encoder("mlp-4-3", in_features=2)
    assert block_numbers(mlp) == {"1.weight": 0, "1.bias": 0, "3.weight": 1, "3.bias": 1}


class Crossed(nn.Module):
    """Two tensors go from the first layer to the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) + x


class Looping(Crossed):
    """Cannot be recorded, because its course depends on its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) if x.sum() > 0 else x


@pytest.mark.parametrize("kind", [Crossed, Looping])
def test_an_encoder_that_cannot_be_cut_is_one_sentence(kind: type[nn.Module]) -> None:
    with pytest.raises(InputError) as caught:
        cut_encoder(kind(), 1, (4,), "odd")
    assert str(caught.value) == (
        'odd cannot be cut for fine_tune.blocks = 1. Set fine_tune.blocks = "all" to train the whole encoder.'
    )


def test_more_blocks_than_there_are_is_one_sentence() -> None:
    encoder, _ = build_encoder("test_resnet", channels=3, image_size=32)
    with pytest.raises(InputError) as caught:
        cut_encoder(encoder, 5, (3, 32, 32), "test_resnet")
    assert str(caught.value) == (
        'fine_tune.blocks must be <= 4 for test_resnet, got 5. Set fine_tune.blocks = "all" to train the whole encoder.'
    )
