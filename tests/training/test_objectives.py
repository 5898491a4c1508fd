from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from lopsided.losses import AsymmetricFocalContrastiveLoss, ContrastiveLoss, FocalContrastiveLoss
from lopsided.losses.classification import focal_loss
from lopsided.recipe import Classifier, EncoderTraining
from lopsided.training.objectives import ClassificationObjective, ContrastiveObjective

COUNTS = np.array([6, 3, 1])


@pytest.fixture
def y() -> torch.Tensor:
    return torch.tensor([0, 0, 1, 0, 2, 1])


@pytest.mark.parametrize("shape", [(6, 5), (6, 2, 5)])
def test_the_parts_of_a_contrastive_loss_add_up_to_its_mean(y: torch.Tensor, shape: tuple[int, ...]) -> None:
    z = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    cases = [
        ({"loss": "cl"}, ContrastiveLoss()),
        ({"loss": "fcl"}, FocalContrastiveLoss()),
        (
            {"loss": "afcl", "eta": 0.3, "gamma": 4.0, "temperature": 0.2, "normalization": "released"},
            AsymmetricFocalContrastiveLoss(0.3, 4.0, 0.2, eta_unit="parity", normalization="released"),
        ),
        ({"loss": "acl", "eta_unit": "absolute"}, AsymmetricFocalContrastiveLoss(300.0)),
    ]
    for fields, loss in cases:
        parts = ContrastiveObjective(EncoderTraining(**fields))(z, y)
        assert parts.shape == (6,)
        torch.testing.assert_close(parts.sum(), loss(z, y))


def test_the_parts_of_a_classification_loss_add_up_to_torchs_mean(y: torch.Tensor) -> None:
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([10 / 18, 10 / 9, 10 / 3])
    cases = [
        (Classifier(loss="ce"), cross_entropy(logits, y)),
        (Classifier(loss="weighted-ce"), cross_entropy(logits, y, weight=weight)),
        (Classifier(loss="focal", focal_gamma=3.0), focal_loss(logits, y, gamma=3.0)),
        (EncoderTraining(loss="weighted-ce"), cross_entropy(logits, y, weight=weight)),
    ]
    for settings, expected in cases:
        parts = ClassificationObjective(settings, COUNTS)(logits, y)
        assert parts.shape == (6,)
        torch.testing.assert_close(parts.sum(), expected)


def test_weighted_cross_entropy_gives_every_class_the_same_weight_in_the_training_set() -> None:
    objective = ClassificationObjective(Classifier(loss="weighted-ce"), COUNTS)
    assert objective.weight is not None
    torch.testing.assert_close(objective.weight * torch.tensor(COUNTS), torch.full((3,), 10 / 3))
