"""Class-averaged CL: its formula, and that copies of a class change nothing for the others."""

from __future__ import annotations

import pytest
import torch
from batches import unit
from torch import Tensor
from torch.testing import assert_close

from lopsided.losses import AveragedContrastiveLoss, averaged_contrastive_loss

Y = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
TEMPERATURE = 0.3


def features(n: int = len(Y)) -> Tensor:
    return unit(n, 4, seed=3)


def plain(z: Tensor, y: Tensor, i: int) -> Tensor:
    """The formula, one anchor at a time."""
    s = (z @ z[i]) / TEMPERATURE
    others = [k for k in range(len(y)) if k != i]
    positive = [k for k in others if y[k] == y[i]]
    if not positive:
        return torch.zeros((), dtype=z.dtype)
    classes = {int(y[k]) for k in others}
    total = sum(torch.stack([s[k].exp() for k in others if int(y[k]) == c]).mean() for c in classes)
    assert isinstance(total, Tensor)
    return torch.stack([total.log() - s[k] for k in positive]).mean()


@pytest.mark.parametrize("tile", ["auto", 1, 3])
def test_value_and_gradient_are_those_of_the_formula(tile: int | str) -> None:
    z = features().requires_grad_()
    found = averaged_contrastive_loss(z, Y, temperature=TEMPERATURE, reduction="none", tile=tile)  # type: ignore[arg-type]
    expected = torch.stack([plain(z, Y, i) for i in range(len(Y))])
    assert_close(found, expected)
    grads = [torch.autograd.grad(values.square().sum(), z)[0] for values in (found, expected)]
    assert_close(*grads)


def test_a_lonely_anchor_has_no_loss_and_no_gradient_of_its_own() -> None:
    z = features().requires_grad_()
    own = averaged_contrastive_loss(z, Y, temperature=TEMPERATURE, reduction="none")[-1]
    assert own == 0
    assert (torch.autograd.grad(own, z)[0] == 0).all()


def test_copies_of_a_frequent_class_change_nothing_for_the_other_classes() -> None:
    z, copies = features(), [0, 1, 2, 3, 4] * 3
    once = averaged_contrastive_loss(z, Y, temperature=TEMPERATURE, reduction="none")[5:]
    more = averaged_contrastive_loss(
        torch.cat([z, z[copies]]), torch.cat([Y, Y[copies]]), temperature=TEMPERATURE, reduction="none"
    )
    assert_close(more[5:8], once)


def test_a_reference_stands_for_samples_that_are_not_anchors() -> None:
    z = features()
    whole = averaged_contrastive_loss(z, Y, temperature=TEMPERATURE, reduction="none")
    part = averaged_contrastive_loss(z[:6], Y[:6], temperature=TEMPERATURE, reference=(z[6:], Y[6:]), reduction="none")
    assert_close(part, whole[:6])


def test_the_module_normalises_and_takes_views() -> None:
    z = torch.randn(4, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    y = torch.tensor([0, 0, 1, 2])
    found = AveragedContrastiveLoss(TEMPERATURE, reduction="none")(z, y)
    flat = averaged_contrastive_loss(
        torch.nn.functional.normalize(z.flatten(0, 1)),
        y.repeat_interleave(2),
        temperature=TEMPERATURE,
        reduction="none",
    )
    assert found.shape == (4, 2)
    assert_close(found.flatten(), flat)
