from __future__ import annotations

import pytest
import torch

from lopsided.errors import InputError
from lopsided.models.heads import ClassifierHead, CosineHead, ProjectionHead, build_head


@pytest.mark.parametrize(("features", "hidden"), [(512, 512), (2048, 2048)])
def test_the_projection_heads_of_the_paper_are_as_wide_as_the_encoder_and_end_at_128(
    features: int, hidden: int
) -> None:
    head = ProjectionHead(features)
    shapes = [tuple(parameter.shape) for parameter in head.parameters()]
    assert shapes == [(hidden, features), (hidden,), (128, hidden), (128,)]


def test_a_projection_is_two_linear_layers_with_relu_between() -> None:
    head = ProjectionHead(3, 4, 2)
    first, _, last = head
    x = torch.randn(5, 3)
    expected = torch.relu(x @ first.weight.T + first.bias) @ last.weight.T + last.bias
    torch.testing.assert_close(head(x), expected)


def test_a_classifier_is_one_linear_layer() -> None:
    head = ClassifierHead(3, 4)
    x = torch.randn(5, 3)
    torch.testing.assert_close(head(x), x @ head.weight.T + head.bias)


def test_a_cosine_head_ignores_lengths_and_trains_its_weights_only() -> None:
    head = CosineHead(3, 4, 30.0)
    x = torch.randn(5, 3)
    cosines = torch.tensor([[float(a @ b / (a.norm() * b.norm())) for b in head.weight.detach()] for a in x])
    torch.testing.assert_close(head(x), 30 * cosines)
    torch.testing.assert_close(head(7 * x), head(x))
    assert [name for name, parameter in head.named_parameters() if parameter.requires_grad] == ["weight"]
    assert set(head.state_dict()) == {"weight", "bias", "scale"}


def test_a_cosine_head_divided_by_a_temperature_is_a_cosine_head_with_logits_divided_by_it() -> None:
    head = CosineHead(3, 4, 30.0)
    x = torch.randn(5, 3)
    before = head(x).detach()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.div_(2.5)
        head.bias.add_(torch.arange(4))
    torch.testing.assert_close(head(x), before / 2.5 + torch.arange(4))


def test_the_kind_of_a_head_chooses_its_class() -> None:
    assert type(build_head("linear", 3, 4)) is ClassifierHead
    assert type(build_head("cosine", 3, 4, 30.0)) is CosineHead


def test_a_head_says_what_its_sizes_must_be() -> None:
    with pytest.raises(InputError, match=r"a classifier must have at least 2 classes, got 1\."):
        ClassifierHead(3, 1)
    with pytest.raises(InputError, match=r'head\.hidden must be an integer >= 1 or "auto", got \'wide\'\.'):
        ProjectionHead(3, "wide")
