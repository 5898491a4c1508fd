from __future__ import annotations

import pytest
import torch

from lopsided.errors import InputError
from lopsided.models.heads import ClassifierHead, ProjectionHead


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


def test_a_head_says_what_its_sizes_must_be() -> None:
    with pytest.raises(InputError, match=r"a classifier must have at least 2 classes, got 1\."):
        ClassifierHead(3, 1)
    with pytest.raises(InputError, match=r'head\.hidden must be an integer >= 1 or "auto", got \'wide\'\.'):
        ProjectionHead(3, "wide")
