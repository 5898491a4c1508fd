"""What training calls: the sum over anchors with its gradient, and the loss of each anchor, from one visit."""

from __future__ import annotations

import pytest
import torch
from batches import BATCHES, PATHS, unit
from torch import nn
from torch.testing import assert_close

import lopsided.losses._kernel.autograd
from lopsided.losses import (
    AsymmetricContrastiveLoss,
    AsymmetricFocalContrastiveLoss,
    ContrastiveLoss,
    FocalContrastiveLoss,
)

every_path = pytest.mark.parametrize("tile", PATHS.values(), ids=PATHS)
MODULES = {
    "CL": (ContrastiveLoss, {}),
    "FCL": (FocalContrastiveLoss, {}),
    "ACL": (AsymmetricContrastiveLoss, {"eta": 60.0}),
    "AFCL": (AsymmetricFocalContrastiveLoss, {"eta": 60.0, "gamma": 7.0}),
}
SETTINGS = [
    {},
    {"normalize": False},
    {"normalization": "released"},
    {"eta": 0.5, "eta_unit": "parity"},
    {"eta": 5.0, "gamma": 2.5, "temperature": 0.5, "normalize": False, "normalization": "released"},
]


@every_path
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODULES)
def test_total_values_and_gradient_are_those_of_the_reductions_sum_and_none(name, batch, tile):
    module, settings = MODULES[name]
    z, y = BATCHES[batch]()
    z.requires_grad_()
    total, values = module(**settings, tile=tile).total_and_values(z, y)
    by_sum = module(**settings, tile=tile, reduction="sum")(z, y)
    assert_close(total, by_sum, rtol=1e-12, atol=1e-12)
    assert_close(values, module(**settings, tile=tile, reduction="none")(z, y).detach(), rtol=1e-12, atol=1e-12)
    assert total.shape == ()
    assert not values.requires_grad
    (found,), (expected,) = torch.autograd.grad(total, z), torch.autograd.grad(by_sum, z)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


@every_path
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_views_reference_and_every_setting_count_and_the_reduction_does_not(settings, tile, reduction):
    z, z_ref = (2 * unit(5, 3, 6)).requires_grad_(), (3 * unit(4, 2, 6, seed=1)).requires_grad_()
    y, y_ref = torch.tensor([0, 1, 0, 2, 1]), torch.tensor([0, 1, 4, 2])
    mask = torch.rand(5, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    loss = AsymmetricFocalContrastiveLoss(**settings, tile=tile, reduction=reduction)
    each = AsymmetricFocalContrastiveLoss(**settings, tile=tile, reduction="none")
    by_mask = {"y": None, "reference": (z_ref, None), "positive": mask}
    for given in ({"y": y, "reference": (z_ref, y_ref)}, by_mask):
        total, values = loss.total_and_values(z, **given)
        expected = each(z, **given)
        assert values.shape == (5, 3)
        assert_close(values, expected.detach(), rtol=1e-12, atol=1e-12)
        assert_close(total, expected.sum(), rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(3.0 * total, (z, z_ref))
        for one, other in zip(found, torch.autograd.grad(3.0 * expected.sum(), (z, z_ref)), strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.fixture
def visits(monkeypatch):
    """Per visit of all anchors, whether it made a gradient."""
    found = []
    right = lopsided.losses._kernel.autograd.sweep

    def counted(*arguments):
        found.append(arguments[-2])
        return right(*arguments)

    monkeypatch.setattr(lopsided.losses._kernel.autograd, "sweep", counted)
    return found


@pytest.mark.parametrize("tile", [3, "auto"])
def test_total_values_and_gradient_take_one_visit(visits, tile):
    z, y = unit(9, 6).requires_grad_(), torch.arange(9) % 2
    total, _ = AsymmetricFocalContrastiveLoss(eta=9.0, gamma=2.0, tile=tile).total_and_values(z, y)
    total.backward()
    assert visits == [True]


@pytest.mark.parametrize("tile", [3, "auto"])
def test_no_gradient_is_made_where_nobody_can_ask_for_it(visits, tile):
    z, y, z_ref = unit(9, 6), torch.arange(9) % 2, unit(4, 6, seed=1)
    # Normalising without gradients would already give features that require none.
    loss = AsymmetricFocalContrastiveLoss(eta=9.0, gamma=2.0, tile=tile, normalize=False)
    expected = loss.total_and_values(z, y, reference=(z_ref, y[:4]))
    with torch.no_grad():
        found = loss.total_and_values(z.requires_grad_(), y, reference=(z_ref.requires_grad_(), y[:4]))
    assert visits == [False, False]
    assert not any(x.requires_grad for x in (*expected, *found))
    assert_close(found, expected, rtol=0.0, atol=0.0)


@every_path
def test_autocast_changes_neither_total_nor_values_nor_gradient(tile):
    z, y = unit(9, 6).float().requires_grad_(), torch.arange(9) % 2
    loss = AsymmetricFocalContrastiveLoss(eta=100.0, gamma=2.0, tile=tile)
    plain = loss.total_and_values(z, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = loss.total_and_values(z, y)
    assert_close(cast, plain, rtol=0.0, atol=0.0)
    assert torch.equal(*(torch.autograd.grad(total, z)[0] for total, _ in (plain, cast)))


class Trained(nn.Module):
    def __init__(self, tile):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.loss = AsymmetricFocalContrastiveLoss(eta=5.0, gamma=2.0, tile=tile)

    def forward(self, x, y):
        return self.loss.total_and_values(self.layer(x), y)


@pytest.mark.slow
@pytest.mark.parametrize("tile", ["auto", 4, None])
def test_a_compiled_model_gives_the_same_total_values_and_gradient_in_one_graph(tile):
    torch._dynamo.reset()
    x, y = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    model, twin = Trained(tile), Trained(tile)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    (total, values), (compiled_total, compiled_values) = model(x, y), compiled(x, y)
    assert_close(compiled_total, total)
    assert_close(compiled_values, values)
    assert not compiled_values.requires_grad
    total.backward()
    compiled_total.backward()
    assert_close(twin.layer.weight.grad, model.layer.weight.grad)


@pytest.mark.parametrize("tile", [3, "auto"])
def test_a_second_derivative_of_the_total_is_a_clear_error(tile):
    z, y = unit(9, 6).requires_grad_(), torch.arange(9) % 2
    total, _ = ContrastiveLoss(tile=tile).total_and_values(z, y)
    (grad,) = torch.autograd.grad(total, z, create_graph=True)
    with pytest.raises(RuntimeError, match="Pass tile=None to differentiate twice"):
        torch.autograd.grad(grad.square().sum(), z)
