"""Losses as training calls them: what each sample's part is, and what the parts add up to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lopsided.losses import AsymmetricFocalContrastiveLoss, ContrastiveLoss, FocalContrastiveLoss
from lopsided.losses.catalogue import find
from lopsided.losses.classification import focal_loss
from lopsided.losses.objective import Objective, Samples

COUNTS = torch.tensor([6, 3, 1])
CONTRASTIVE: list[tuple[str, dict[str, Any], nn.Module]] = [
    ("cl", {}, ContrastiveLoss()),
    ("fcl", {"gamma": 1.0}, FocalContrastiveLoss()),
    (
        "afcl",
        {"eta": 0.3, "eta_unit": "parity", "gamma": 4.0, "temperature": 0.2, "normalization": "released"},
        AsymmetricFocalContrastiveLoss(0.3, 4.0, 0.2, eta_unit="parity", normalization="released"),
    ),
    ("acl", {"eta": 300.0, "eta_unit": "absolute"}, AsymmetricFocalContrastiveLoss(300.0)),
]


def objective(name: str, **parameters: Any) -> Objective:
    return find(name).load()(COUNTS, 5, **parameters)


@pytest.fixture
def y() -> Tensor:
    return torch.tensor([0, 0, 1, 0, 2, 1])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(6, 5), (6, 2, 5)])
@pytest.mark.parametrize(("name", "parameters", "loss"), CONTRASTIVE)
def test_the_parts_of_a_contrastive_loss_add_up_to_its_mean(
    y: Tensor, shape: tuple[int, ...], name: str, parameters: dict[str, Any], loss: nn.Module
) -> None:
    z = drawn(*shape).requires_grad_()
    total, parts = objective(name, **parameters)(Samples(y, y, projections=z))
    assert parts.shape == (6,)
    assert not parts.requires_grad
    torch.testing.assert_close(parts.sum(), total.detach())
    expected = loss(z, y)
    torch.testing.assert_close(total, expected)
    found, wanted = (torch.autograd.grad(value, z)[0] for value in (total, expected))
    torch.testing.assert_close(found, wanted)


def test_the_parts_of_a_classification_loss_add_up_to_torchs_mean(y: Tensor) -> None:
    logits = drawn(6, 3)
    weight = torch.tensor([10 / 18, 10 / 9, 10 / 3])
    cases = [
        (objective("ce"), cross_entropy(logits, y)),
        (objective("weighted-ce"), cross_entropy(logits, y, weight=weight)),
        (objective("focal", gamma=3.0), focal_loss(logits, y, gamma=3.0)),
    ]
    for made, expected in cases:
        parts = made(Samples(y, y, logits=logits))
        assert parts.shape == (6,)
        torch.testing.assert_close(parts.sum(), expected)


def test_weighted_cross_entropy_gives_every_class_the_same_weight_in_the_training_set() -> None:
    weight = objective("weighted-ce").weight
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(weight * COUNTS, torch.full((3,), 10 / 3))
