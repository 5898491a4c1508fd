"""A temperature that is a tensor: the value of the number, and an exact gradient, in functions and modules."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import BATCHES, PATHS, unit
from torch import nn
from torch.testing import assert_close

from lopsided.losses import (
    AsymmetricContrastiveLoss,
    AsymmetricFocalContrastiveLoss,
    ContrastiveLoss,
    FocalContrastiveLoss,
    asymmetric_contrastive_loss,
    asymmetric_focal_contrastive_loss,
    contrastive_loss,
    focal_contrastive_loss,
)
from lopsided.losses.reference import reference_loss

every_path = pytest.mark.parametrize("tile", PATHS.values(), ids=PATHS)
LABELS, REFERENCE = torch.tensor([0, 1, 0, 2, 1, 0, 3]), torch.tensor([0, 1, 4, 2])


def learnt(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("batch", BATCHES)
def test_value_and_gradients_are_those_of_the_specification(batch):
    z, y = BATCHES[batch]()
    z.requires_grad_()
    for eta, gamma, number in [(0.0, 0.0, 0.07), (60.0, 0.5, 0.07), (300.0, 7.0, 0.5)]:
        temperature, options = learnt(number), {"eta": eta, "gamma": gamma}
        expected = reference_loss(z, y, **options, temperature=temperature)
        right = torch.autograd.grad(expected, (z, temperature))
        for tile in PATHS.values():
            found = asymmetric_focal_contrastive_loss(z, y, **options, temperature=temperature, tile=tile)
            assert_close(found, expected, rtol=1e-9, atol=1e-11)
            for one, other in zip(torch.autograd.grad(found, (z, temperature)), right, strict=True):
                assert_close(one, other, rtol=1e-8, atol=1e-10 * max(1.0, other.abs().max().item()))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [None, 1, 3, 64])  # At this size, "auto" is one block like 64, and 5 cuts like 3.
@pytest.mark.parametrize(
    ("reduction", "normalization", "masked"),
    [("sum", "paper", False), ("none", "released", False), ("none", "paper", True), ("sum", "released", True)],
)
def test_the_gradient_is_the_numerical_derivative(tile, reduction, normalization, masked):
    z, z_ref = unit(7, 3).requires_grad_(), unit(4, 3, seed=1).requires_grad_()
    labels = {"y": LABELS, "reference": REFERENCE}
    mask = torch.rand(7, 11, generator=torch.Generator().manual_seed(0)) < 0.5 if masked else None
    if masked:
        labels = {"y": None, "reference": None}

    def loss(z, z_ref, temperature):
        return asymmetric_focal_contrastive_loss(
            z, labels["y"], reference=(z_ref, labels["reference"]), positive=mask, eta=3.0, gamma=1.7,
            temperature=temperature, normalization=normalization, reduction=reduction, tile=tile,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, (z, z_ref, learnt(0.3)), atol=1e-6)
    assert torch.autograd.gradcheck(lambda t: loss(z.detach(), z_ref.detach(), t), (learnt(0.3),), atol=1e-6)


def test_the_dense_path_has_a_right_second_derivative_by_the_temperature_too():
    z = unit(7, 3).requires_grad_()

    def loss(z, temperature):
        return asymmetric_focal_contrastive_loss(z, LABELS, eta=3.0, gamma=1.7, temperature=temperature, tile=None)

    assert torch.autograd.gradgradcheck(loss, (z, learnt(0.5)))


@pytest.mark.parametrize("tile", [2, "auto"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_by_the_temperature_of_the_tiled_path_is_a_clear_error(tile, reduction):
    temperature = learnt(0.5)
    loss = contrastive_loss(unit(7, 3), LABELS, temperature=temperature, tile=tile, reduction=reduction)
    (grad,) = torch.autograd.grad(loss.sum(), temperature, create_graph=True)
    with pytest.raises(RuntimeError, match="Pass tile=None to differentiate twice"):
        torch.autograd.grad(grad, temperature)


@every_path
@pytest.mark.parametrize(
    "function",
    [contrastive_loss, focal_contrastive_loss, asymmetric_contrastive_loss, asymmetric_focal_contrastive_loss],
)
def test_every_function_takes_a_tensor_of_any_floating_type_and_of_one_element(function, tile):
    z = unit(7, 3)
    expected = function(z, LABELS, temperature=0.5, tile=tile)
    for temperature in (torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float16), torch.full((1, 1), 0.5)):
        assert_close(function(z, LABELS, temperature=temperature, tile=tile), expected, rtol=1e-14, atol=0.0)
    with torch.no_grad():
        assert not function(z, LABELS, temperature=learnt(0.5), tile=tile).requires_grad


@pytest.mark.parametrize("tile", [3, "auto", None])
def test_single_precision_has_a_gradient_of_its_precision(tile):
    z, y = unit(300, 6), torch.arange(300) % 3
    grads = []
    for dtype, path in ((torch.float64, None), (torch.float32, tile)):
        temperature = torch.tensor(0.1, dtype=dtype, requires_grad=True)
        options = {"eta": 50.0, "gamma": 2.0, "temperature": temperature, "tile": path}
        value = asymmetric_focal_contrastive_loss(z.to(dtype), y, **options)
        grads.append(torch.autograd.grad(value, temperature)[0].double())
    assert_close(grads[1], grads[0], rtol=2e-5, atol=0.0)


MODULES = {
    "CL": (ContrastiveLoss, {}),
    "FCL": (FocalContrastiveLoss, {}),
    "ACL": (AsymmetricContrastiveLoss, {"eta": 60.0}),
    "AFCL": (AsymmetricFocalContrastiveLoss, {"eta": 60.0, "gamma": 2.5}),
}


@every_path
@pytest.mark.parametrize("name", MODULES)
def test_a_module_learns_a_parameter_or_what_each_call_passes(name, tile):
    module, settings = MODULES[name]
    z, parameter = 5 * unit(7, 3), nn.Parameter(torch.tensor(0.2, dtype=torch.float64))
    log = learnt(0.2).log().detach().requires_grad_()
    own, given = module(**settings, temperature=parameter, tile=tile), module(**settings, tile=tile)
    assert [id(p) for p in own.parameters()] == [id(parameter)]
    assert list(given.parameters()) == []
    expected = module(**settings, temperature=0.2, tile=tile)(z, LABELS)
    at = learnt(0.2)
    exact = reference_loss(unit(7, 3), LABELS, eta=own.eta, gamma=own.gamma, temperature=at)
    (slope,) = torch.autograd.grad(exact, at)
    found = own(z, LABELS), given(z, LABELS, temperature=log.exp())
    for value, leaf, scale in zip(found, (parameter, log), (1.0, 0.2), strict=True):
        assert_close(value, expected, rtol=1e-12, atol=1e-12)
        assert_close(torch.autograd.grad(value, leaf)[0], slope * scale, rtol=1e-9, atol=1e-11)
    total, _ = given.total_and_values(z, LABELS, temperature=log.exp())
    assert_close(torch.autograd.grad(total, log)[0], 7 * 0.2 * slope, rtol=1e-9, atol=1e-11)


def test_a_module_shows_saves_and_copies_its_temperature():
    loss = ContrastiveLoss(nn.Parameter(torch.tensor(0.07)))
    assert "temperature=Parameter(0.07)" in repr(loss)
    assert loss.state_dict().keys() == {"temperature"}
    twin = copy.deepcopy(loss)
    twin.load_state_dict({"temperature": torch.tensor(0.5)})
    z = unit(7, 3)
    assert_close(twin(z, LABELS), ContrastiveLoss(0.5)(z, LABELS))
    assert ContrastiveLoss(torch.tensor(0.5)).temperature == 0.5


def test_a_temperature_is_learnt_by_steps_of_an_optimizer():
    z, y = unit(40, 6), torch.arange(40) % 2
    loss = ContrastiveLoss(nn.Parameter(torch.tensor(0.1)))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.05)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        value = loss(z, y)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert loss.temperature.item() > 0.1  # Random features have the smallest loss at a high temperature.
    assert values[-1] < values[0]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (
            torch.tensor(-0.5, requires_grad=True),
            "temperature must be > 0 and finite, got -0.5. To keep it positive, learn its logarithm and pass the "
            "exponential.",
        ),
        (
            torch.ones(2, requires_grad=True),
            "temperature must be a number, got a tensor of shape (2,) and type torch.float32. Pass a float.",
        ),
    ],
)
def test_a_bad_tensor_is_refused_in_one_sentence(bad, sentence):
    for call in (
        lambda: contrastive_loss(unit(7, 3), LABELS, temperature=bad),
        lambda: ContrastiveLoss()(unit(7, 3), LABELS, temperature=bad),
        lambda: ContrastiveLoss(nn.Parameter(bad.detach())),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert str(caught.value) == sentence


def test_a_module_refuses_a_tensor_that_it_could_not_save():
    sentence = (
        "temperature must be a number or an nn.Parameter, got a tensor that requires grad. "
        "Pass it with each call: criterion(z, y, temperature=...)."
    )
    with pytest.raises(TypeError) as caught:
        ContrastiveLoss(learnt(0.1))
    assert str(caught.value) == sentence


class Trained(nn.Module):
    def __init__(self, tile, reduction):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.log = nn.Linear(8, 4), nn.Parameter(torch.tensor(-1.0))
        self.loss = AsymmetricFocalContrastiveLoss(eta=5.0, gamma=2.0, tile=tile, reduction=reduction)

    def forward(self, x, y):
        return self.loss(self.layer(x), y, temperature=self.log.exp()).sum()


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tile", ["auto", 4, None])
def test_a_compiled_model_learns_its_temperature_in_one_graph(tile, reduction):
    torch._dynamo.reset()
    x, y = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    model, twin = Trained(tile, reduction), Trained(tile, reduction)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    one, other = model(x, y), compiled(x, y)
    assert_close(other, one)
    one.backward()
    other.backward()
    assert_close(twin.log.grad, model.log.grad)
    assert_close(twin.layer.weight.grad, model.layer.weight.grad)
